"""How a process has ended, as people read it: its exit status, and what the kernel counts of memory. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass
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
