"""Processes that outlive the rank that has started them. They are this process's children then (`take_in_orphans`)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path


def end_orphans(sessions: Collection[int], kept: Collection[int]) -> Iterator[tuple[int, str]]:
    """Kills those of these sessions, and names the others, but for those in `kept`. Collects whatever has ended."""
    seen = {*kept}
    while new := {*children()} - seen:  # the children of whoever is ended here are this process's then
        yield from _end_these(sorted(new), sessions)
        seen |= new


def _end_these(pids: Sequence[int], sessions: Collection[int]) -> Iterator[tuple[int, str]]:
    for pid in pids:
        with contextlib.suppress(OSError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                continue
            if _is_tracker(pid):  # it ends by itself, and removes what those have left that are ended here
                continue
            if os.getsid(pid) in sessions:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            elif not _is_controller(pid):
                yield pid, Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()


def collect_orphans(kept: Collection[int]) -> None:
    """Those that have ended, but for `kept`. Whoever is the first process of a container has strangers' as well."""
    for pid in {*children()} - {*kept}:
        with contextlib.suppress(OSError):
            if os.getsid(pid) != os.getsid(0):  # else this process may have started it, and wait for it
                os.waitpid(pid, os.WNOHANG)


def end_group(group: int) -> None:
    """Kills the processes of this group."""
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.getpgid(int(name)) == group and not _is_tracker(int(name)):
                os.kill(int(name), signal.SIGKILL)


def _is_tracker(pid: int) -> bool:
    """Multiprocessing's, of named semaphores and shared memory."""
    return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def _is_controller(pid: int) -> bool:
    """One that a rank has started ends with its job, and by itself."""
    return b"lastwords.controller" in Path(f"/proc/{pid}/cmdline").read_bytes()


def children() -> list[int]:
    """Of this process, those that have ended and were not collected as well."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/self/task/{task}/children").read_text(encoding="ascii")
            found += map(int, text.split())
    return found
