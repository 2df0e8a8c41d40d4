"""How a process has ended, as people read it: its exit status, and what the kernel counts of memory. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

_NAMES: Final = {
    signal.SIGABRT: "abort",
    signal.SIGBUS: "bus error",
    signal.SIGFPE: "arithmetic error",
    signal.SIGILL: "illegal instruction",
    signal.SIGSEGV: "segmentation fault",
}
"""Of signals that a process brings upon itself."""


@dataclass(frozen=True, slots=True)
class OomKills:
    """How many processes the kernel has killed for lack of memory; None where that is not counted, or not to be read.

    cgroup: in the memory cgroup of one process. host: on its host.
    """

    cgroup: int | None = None
    host: int | None = None


UNKNOWN: Final = OomKills()


def ending_text(code: int | None, before: OomKills = UNKNOWN, after: OomKills = UNKNOWN) -> str:
    """How a process has ended; "" where nobody knows.

    code: as of Popen.returncode; None: not known. before, after: since the process was first watched, and now. That a
    process of the same cgroup was killed for lack of memory is taken for the reason of a SIGKILL, and said with the
    numbers; the whole host's count is a hint at most.

    >>> ending_text(-9), ending_text(-11), ending_text(3), ending_text(None)
    ('SIGKILL', 'SIGSEGV, segmentation fault', 'exit code 3', '')
    >>> ending_text(-9, OomKills(cgroup=0), OomKills(cgroup=1))
    'SIGKILL by the kernel, for lack of memory: oom_kill of its cgroup has risen from 0 to 1'
    >>> ending_text(-9, OomKills(host=4), OomKills(host=5))
    'SIGKILL, perhaps by the kernel for lack of memory: oom_kill of its host has risen from 4 to 5'
    """
    text = "" if code is None else _code_text(code)
    if code not in (None, -signal.SIGKILL):
        return text
    if _has_risen(before.cgroup, after.cgroup):
        why = f"for lack of memory: oom_kill of its cgroup has risen from {before.cgroup} to {after.cgroup}"
        return f"{text} by the kernel, {why}" if text else f"perhaps killed by the kernel {why}"
    if after.cgroup is None and _has_risen(before.host, after.host):
        why = f"by the kernel for lack of memory: oom_kill of its host has risen from {before.host} to {after.host}"
        return f"{text}, perhaps {why}" if text else f"perhaps killed {why}"
    return text


def _has_risen(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _code_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    if -code not in {*signal.Signals}:
        return f"signal {-code}"
    number = signal.Signals(-code)
    return ", ".join(filter(None, (number.name, _NAMES.get(number, ""))))


# The kernel's counts of processes that it has killed for lack of memory: of one process's cgroup, and of the host.
#
# The kernel counts a kill before it sends the signal, in the cgroup of the process that it kills, also where the whole
# host is short of memory. cgroup v2: `oom_kill` of memory.events; v1: of memory.oom_control. Reads /proc and the
# mounted cgroups only. See cgroups(7), Documentation/admin-guide/cgroup-v2.rst.

HOST_COUNTS = Path("/proc/vmstat")
_NAME = "oom_kill"


@dataclass(frozen=True, slots=True)
class OomCounts:
    """Where the counts around one process are; what cannot be read counts as not known."""

    cgroup: Path | None
    host: Path = HOST_COUNTS

    @classmethod
    def around(cls, pid: int) -> OomCounts:
        """Of a process that lives, since nobody knows the cgroup of one that has ended."""
        try:
            cgroups = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return cls(None)
        return cls(next((path for path in counting_files(cgroups, mounts) if _read(path) is not None), None))

    def read(self) -> OomKills:
        """The counts as they are now."""
        return OomKills(None if self.cgroup is None else _read(self.cgroup), _read(self.host))


def _read(path: Path) -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[:1] == [_NAME]), None)
    except (OSError, ValueError, IndexError):
        return None


def counting_files(cgroups: str, mounts: str) -> Sequence[Path]:
    """Files that may have the count of a process's memory cgroup, the likeliest first.

    cgroups: its /proc/PID/cgroup. mounts: a /proc/self/mountinfo. In v2, a cgroup without a memory controller is
    accounted for in the nearest one above that has it.

    >>> v2 = "35 25 0:30 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw"
    >>> [str(path) for path in counting_files("0::/job/step_0", v2)]
    ['/sys/fs/cgroup/job/step_0/memory.events', '/sys/fs/cgroup/job/memory.events', '/sys/fs/cgroup/memory.events']
    >>> v1 = "36 25 0:31 /docker/a /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    >>> [str(path) for path in counting_files("9:cpu:/docker/a\\n4:memory:/docker/a/b\\n0::/", v1)]
    ['/sys/fs/cgroup/memory/b/memory.oom_control']
    """
    found: list[Path] = []
    for line in cgroups.splitlines():
        _, controllers, cgroup = line.split(":", 2)
        if "memory" in controllers.split(","):
            found[:0] = [folder / "memory.oom_control" for folder, _ in _folders(cgroup, mounts, "cgroup")]
        elif not controllers:
            for folder, top in _folders(cgroup, mounts, "cgroup2"):
                above = [folder, *folder.parents]
                found += [level / "memory.events" for level in above if level.is_relative_to(top)]
    return found


def _folders(cgroup: str, mounts: str, kind: str) -> Iterator[tuple[Path, Path]]:
    """Where a cgroup is seen in the file system, and the mount point above; v1: among those of the memory controller.

    A mount may show a part of the hierarchy only: a container's.
    """
    for line in mounts.splitlines():
        mount, _, what = line.partition(" - ")
        root, point = mount.split()[3:5]
        file_system, _, options = what.split(" ", 2)
        if file_system != kind or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        if PurePosixPath(cgroup).is_relative_to(root):
            yield Path(point, PurePosixPath(cgroup).relative_to(root)), Path(point)
