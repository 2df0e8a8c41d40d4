"""The simulated disk as the shells see it: each system call takes time, can fail for a moment, and can be the last."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lastwords.checkpoint.system import Os
from tests.checkpoint.simulated_disk import SimulatedOs
from tests.sim.shells.scheduler import Gone, Scheduler

CALLS = tuple(name for name, member in vars(Os).items() if callable(member) and not name.startswith("_"))
"""What `checkpoint.system.Os` offers."""

GLITCHES = (errno.EIO, errno.EMFILE, errno.ESTALE, errno.ENOMEM)
_MAY_FAIL = ("create", "open_read", "open_directory", "pwrite", "preadv", "fsync", "mkdir", "rename", "listdir")


class Calls:
    """`glitches`: how many more calls fail, by the name of the process that makes them."""

    def __init__(self, disk: SimulatedOs, scheduler: Scheduler, slow_s: float) -> None:
        missing = [name for name in CALLS if name not in vars(SimulatedOs)]
        assert not missing, f"the simulated disk lacks {missing}: the real one would be used"
        self.disk = disk
        self.glitches: dict[str, int] = {}
        self.failed: list[str] = []
        self.locks: dict[str, set[int]] = {}
        """Descriptors with a lock, by the name of the process that holds it."""
        self._scheduler = scheduler
        self._slow_s = slow_s

    def patches(self) -> dict[str, Callable[..., Any]]:
        """What takes the place of the methods of the class `Os`, whoever makes an object of it."""
        return {name: self._call(name) for name in CALLS}

    def release(self, process: str) -> None:
        """What the kernel does for a process that died: its locks are free, and their names stay."""
        for fd in self.locks.pop(process, ()):
            self.disk.close(fd)

    def _call(self, name: str) -> Callable[..., Any]:
        shipped = getattr(self.disk, name)
        scheduler = self._scheduler

        def call(_system: Os, *arguments: Any, **named: Any) -> Any:
            if not scheduler.inside:
                if scheduler.is_gone:
                    raise Gone
                return shipped(*arguments, **named)  # a thread of the writer's own, or a checker
            process = scheduler.current.process.name
            if scheduler.dice.random() < 0.2:
                scheduler.sleep(self._slow_s * scheduler.dice.random())
            on_disk = not isinstance(arguments[0], Path) or Path("/proc") in arguments[0].parents
            if name in _MAY_FAIL and on_disk and self.glitches.get(process, 0) and scheduler.dice.random() < 0.3:
                self.glitches[process] -= 1
                number = scheduler.dice.choice(GLITCHES)
                self.failed.append(f"{process}: {name} {errno.errorcode[number]}")
                raise OSError(number, "for a moment")
            value = shipped(*arguments, **named)
            if name == "try_lock" and value:
                self.locks.setdefault(process, set()).add(arguments[0])
            elif name in ("unlock", "close"):
                self.locks.get(process, set()).discard(arguments[0])
            return value

        return call
