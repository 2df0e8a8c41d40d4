"""The processes of one host that have imported the script and wait for a rank: taken, replaced, and given up."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from typing import Any

from lastwords.launcher.link import Connection
from lastwords.launcher.processes import Process, kill_group
from lastwords.liveness import process_id
from lastwords.optim_wrapper.launch.config import SPARE

_log = logging.getLogger(__name__)

NO_RANK = "not known before lastwords.run(main)"
"""In place of a spare's rank: a script that reads it earlier fails at once, and does not go on as another rank."""

DEATHS_MAX = 3
"""Spares in a row that may die before one is used; then there is none any more."""

RESTOCK_S = 10.0
"""From the use of a spare or a controller until another one is prepared, which takes seconds of processor time."""


class Spare:
    """A process that has imported the script and waits for a rank."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.link: Connection | None = None
        self.ready = False
        self.rank: int | None = None

    @property
    def pid(self) -> int:
        """Of the process that was started, which leads a session."""
        return self.process.proc.pid


class Spares:
    """So many as are wanted. context: torch's, of the processes that were started first.

    at_the_end_of: calls back once a process has ended. say_once: for people. restock_in: calls `restock` after so many
    seconds.
    """

    def __init__(
        self,
        wanted: int,
        context: Any,
        at_the_end_of: Callable[[subprocess.Popen[bytes], Callable[[], None]], None],
        say_once: Callable[[str], None],
        restock_in: Callable[[float], None],
    ) -> None:
        self._wanted, self._died = wanted, 0
        self._context = context
        self._at_the_end_of, self._say_once, self._restock_in = at_the_end_of, say_once, restock_in
        self._waiting: list[Spare] = []

    def of(self, pid: int) -> Spare | None:
        """The one whose process this is, if it waits for a rank."""
        return next((one for one in self._waiting if one.pid == pid), None)

    def take(self, local: int) -> Spare | None:
        """One that was started with the arguments of this rank: torchrun's macros may differ by rank."""
        context = self._context
        for one in self._waiting:
            if not one.ready or one.process.proc.poll() is not None or context.args[local] != context.args[0]:
                continue
            if process_id.is_stopped(one.pid):  # all ranks would wait for it; a new process takes some seconds
                self._say_once(
                    f"a spare (pid {one.pid}) is stopped and is not used until `kill -CONT {one.pid}` lets it go on"
                )
                continue
            self._waiting.remove(one)
            self._died = 0
            return one
        return None

    def restock(self) -> None:
        """Start those that are missing."""
        while len(self._waiting) < self._wanted and self._start():
            pass

    def end(self) -> None:
        """Those that wait."""
        for one in self._waiting:
            kill_group(one.pid)
            one.process.proc.wait()

    def _start(self) -> bool:
        context = self._context
        unknown = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), NO_RANK)
        env = {**context.envs[0], **unknown, SPARE: "1"}
        try:
            handler = Process(context.entrypoint, context.args[0], env, None, None, 0, context._numa_options)
        except OSError as error:
            self._say_once(f"no spare can be started: {error}; it is tried again every {RESTOCK_S:g} s")
            self._restock_in(RESTOCK_S)
            return False
        one = Spare(handler)
        self._waiting.append(one)
        self._at_the_end_of(handler.proc, lambda: self._ended(one))
        return True

    def _ended(self, one: Spare) -> None:
        if one not in self._waiting:
            return  # it has become a rank, whose end is seen as such
        self._waiting.remove(one)
        self._died += 1
        more = self._died <= DEATHS_MAX
        self._wanted -= not more
        what = "another one is started" if more else "no other one is started any more"
        _log.warning("a spare (pid %d) ended with %s; %s", one.pid, one.process.proc.wait(), what)
        if more:
            self._restock_in(0.0 if self._died == 1 else RESTOCK_S)
