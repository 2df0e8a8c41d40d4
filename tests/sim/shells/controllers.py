"""The processes of a simulated job that are its controller one after the other, as `controller.takeover` has it.

Shipped: who may serve, who is ended first, what is kept and read. Simulated: processes and their signals, whether one
answers, and the locks, which are on the simulated disk. The state file is a real one in a directory of its own.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from lastwords.controller import handover, takeover
from lastwords.controller.handover import ControllerSpec, KeptState, StateFile
from lastwords.errors import UnavailableError
from lastwords.liveness import paths
from tests.checkpoint.simulated_disk import SimulatedOs
from tests.sim.shells.scheduler import Process, Scheduler

FIRST_PID = 5000
TICKS = 1


class Controllers:
    """kill: SIGKILL of one of these processes. answers: whether this one would answer now."""

    def __init__(
        self,
        scheduler: Scheduler,
        disk: SimulatedOs,
        spec: ControllerSpec,
        kill: Callable[[Process], None],
        answers: Callable[[Process], bool],
    ) -> None:
        self._scheduler = scheduler
        self._disk = disk
        self._spec = spec
        self._kill = kill
        self._answers = answers
        self.path = Path()
        self.processes: list[Process] = []
        self.beats = 0
        """Signs of life, of all of them."""

    def new(self) -> Process:
        """One more process."""
        number = len(self.processes)
        self.processes.append(Process("controller" if not number else f"controller {number}"))
        return self.processes[-1]

    # ------------------------------------------------------------------ called in its process

    def first(self) -> StateFile:
        """The process that calls this is the first controller."""
        takeover.hold(self.path.parent)
        return self._file(takeover.this_owner())

    def follow(self, *, by_hand: bool) -> tuple[StateFile, KeptState]:
        """The process that calls this takes the place of the one that serves, or did; raises as `takeover.follow`."""
        kept = takeover.follow(self.path, by_hand=by_hand, sleep=self._scheduler.sleep)
        return self._file(takeover.this_owner(kept.owner)), kept

    def clear_up(self) -> None:
        """What a controller does that ends by itself."""
        self.path.unlink(missing_ok=True)

    def _file(self, owner: handover.StateOwner) -> StateFile:
        return StateFile(self.path, owner, self._spec, "token")

    # ------------------------------------------------------------------ the kernel

    @contextlib.contextmanager
    def simulated(self, root: Path) -> Iterator[None]:
        """`root`: a real directory for the state file."""
        self.path = paths.state_path(self._spec.job, self._spec.generation, root=root)
        self.path.parent.mkdir(mode=0o700)
        for directory in reversed((self.path.parent, *self.path.parent.parents[:-1])):
            with contextlib.suppress(FileExistsError):
                self._disk.mkdir(directory)
        of_processes = types.SimpleNamespace(runs=self._runs, start_ticks=lambda pid: TICKS)
        system = types.SimpleNamespace(getpid=self._pid, pidfd_open=lambda pid: pid, close=lambda fd: None)
        signals = types.SimpleNamespace(SIGKILL=9, pidfd_send_signal=lambda pid, _: self._kill(self.process(pid)))
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(handover, "process_id", of_processes))
            stack.enter_context(mock.patch.object(handover, "beat", self._newest_beat))
            stack.enter_context(mock.patch.object(StateFile, "beat", self._beat))
            stack.enter_context(mock.patch.object(takeover, "process_id", of_processes))
            stack.enter_context(mock.patch.object(takeover, "os", system))
            stack.enter_context(mock.patch.object(takeover, "signal", signals))
            stack.enter_context(mock.patch.object(takeover, "query_state", self._query))
            held: list[contextlib.ExitStack] = []
            stack.enter_context(mock.patch.object(takeover, "_held", types.SimpleNamespace(push=held.append)))
            yield
            for lock in held:  # of processes that have ended: nothing is left to unlock
                with contextlib.suppress(Exception):
                    lock.close()

    def _beat(self) -> None:
        self.beats += 1

    def _newest_beat(self, path: Path) -> int | None:
        return self.beats if path.exists() else None

    def _pid(self) -> int:
        return FIRST_PID + self.processes.index(self._scheduler.current.process)

    def process(self, pid: int) -> Process:
        return self.processes[pid - FIRST_PID]

    def _runs(self, pid: int, start_ticks: int) -> bool:
        return self.process(pid).lives

    def _query(self, address: str, token: str, *, timeout_s: float, with_ranks: bool) -> Any:
        """Of whoever serves now; a process that is stopped, or has only just begun, does not answer in time."""
        until_s = self._scheduler.now_s + timeout_s
        while True:
            for pid, process in enumerate(self.processes, FIRST_PID):
                if process.lives and self._answers(process):
                    return types.SimpleNamespace(pid=pid, stage="serving")
            if self._scheduler.now_s >= until_s:
                raise UnavailableError("nobody answers")
            self._scheduler.sleep(0.05)
