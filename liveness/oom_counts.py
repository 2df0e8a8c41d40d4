"""The kernel's counts of processes that it has killed for lack of memory: of one process's cgroup, and of the host.

The kernel counts a kill before it sends the signal, in the cgroup of the process that it kills, also where the whole
host is short of memory. cgroup v2: `oom_kill` of memory.events; v1: of memory.oom_control. Reads /proc and the mounted
cgroups only. See cgroups(7), Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lastwords.liveness.endings import OomKills

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
