"""A worker of a dynamic cluster: it runs nothing of the user's itself, but forks its rank as the scheduler orders.

The rank dies with it, and what it says to people is about the rank: its end is the worker's, by exit code and signals.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence

from lastwords.clock import OwnTime, mono_s
from lastwords.errors import ConfigError, UnavailableError
from lastwords.launcher.core import END_S
from lastwords.launcher.environment import Cluster
from lastwords.launcher.events import (
    NOT_ENDED,
    Begun,
    End,
    Ended,
    Enter,
    Event,
    Guarded,
    Kill,
    Leaving,
    Look,
    Lost,
    Over,
    Stopped,
    Updated,
)
from lastwords.launcher.forks import ahead
from lastwords.launcher.host import Host, Program
from lastwords.launcher.membership import WorkerMembership
from lastwords.launcher.processes import RankSeat
from lastwords.launcher.protocol import Done, RankRuns, ToSupervisor
from lastwords.liveness import process_id
from lastwords.liveness.parents import take_in_orphans
from lastwords.processor.departure import EXIT_NOT_SAVED, flush, say
from lastwords.processor.signals import UNHANDLED_STOPS

_log = logging.getLogger(__name__)

TURN_S = 0.5


def become_supervisor() -> None:
    """This process is one from now on, with its pid; the script begins again in its rank. Does not return.

    ConfigError where there is nothing that another process could run.
    """
    name, spec = sys.argv[0], sys.modules["__main__"].__spec__
    module = spec.name.removesuffix(".__main__") if spec is not None and spec.name != "__main__" else ""
    if not module and not os.path.exists(name):
        raise ConfigError(
            "lastwords.run(main) begins the script again in another process, so it has to be in a file or a module, "
            "and not in the command line or the standard input"
        )
    flush()
    program = ["-m", module] if module else [name]
    os.execv(sys.executable, [sys.executable, "-m", "lastwords.cli", "worker", *program, *sys.argv[1:]])


def supervise(cluster: Cluster, argv: Sequence[str]) -> int:
    """Until the worker has come to its end, or nothing is left to do for it; its exit code. argv: -m NAME, or a script.

    Errors as of `WorkerMembership`.
    """
    with selectors.DefaultSelector() as selector:
        return Supervisor(cluster, argv, selector).run()


class Supervisor:
    """One rank of `cluster`."""

    def __init__(self, cluster: Cluster, argv: Sequence[str], selector: selectors.BaseSelector) -> None:
        self._cluster = cluster
        self._selector = selector
        self._told_pid = 0
        """The process of its rank that the scheduler knows."""
        self._signal = 0
        """By which this process was asked to end."""
        self._rank_code: int | None = None
        self._code: int | None = None
        """With which it ends now."""
        self._ends = False
        """Nothing is healed any more."""
        self._own_time = OwnTime()
        self._kill_s = math.inf
        """When its rank is, which has not ended; by its own time, as it may have been stopped with this process."""
        take_in_orphans()
        begun = ahead(sys.executable)  # it imports while this worker may have to wait for its scheduler
        self._membership = WorkerMembership(cluster, selector, self._obey, self._is_over)
        rank = self._membership.rank
        is_module = argv[0] == "-m"
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(cluster.workers),
            "MASTER_ADDR": cluster.host,
            "TORCHELASTIC_RUN_ID": self._membership.job,
        }
        self._seat = RankSeat(sys.executable, ("-u", *argv), environment, None, None, 0)
        program = Program(sys.executable, is_module, _threads(), dies_with_launcher=True)
        self._host = Host({rank: self._seat}, program, selector, self._report, begun)

    def run(self) -> int:
        """Its exit code."""
        wake, wake_up = socket.socketpair()
        for one in (wake, wake_up):
            one.setblocking(False)
        self._selector.register(wake, selectors.EVENT_READ, lambda: wake.recv(64))
        signal.set_wakeup_fd(wake_up.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, *UNHANDLED_STOPS):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        signal.signal(signal.SIGUSR1, lambda number, _: self._host.signal_all(number))
        self._host.begin()
        self._membership.begin()
        while self._code is None:
            due_s = self._host.due_in_s
            for key, _ in self._selector.select(TURN_S if due_s is None else min(TURN_S, due_s)):
                key.data()
            self._tick()
        self._membership.close()
        self._host.end()
        return self._code

    def _tick(self) -> None:
        self._host.tick()
        self._membership.tick()
        self._tell_process()
        if self._own_time.at(mono_s()) >= self._kill_s:
            self._kill_s = math.inf
            self._host.obey(Kill(self._membership.rank, NOT_ENDED))

    def _tell_process(self) -> None:
        """Of its rank, which dies with this one, but a moment later."""
        pid = self._seat.proc.pid
        if self._runs and pid != self._told_pid:
            with contextlib.suppress(UnavailableError):  # then the next time
                if (ticks := process_id.start_ticks(pid)) is not None:
                    self._told_pid = pid
                    self._membership.report(RankRuns(pid, ticks))

    @property
    def _runs(self) -> bool:
        return bool(self._seat.proc.pid) and self._seat.proc.returncode is None

    def _on_signal(self, number: int, _: object) -> None:
        self._signal = self._signal or number
        if self._runs:
            return self._host.signal_all(number)
        self._end(self._last_code)

    @property
    def _last_code(self) -> int:
        return EXIT_NOT_SAVED if self._rank_code is None else self._rank_code

    def _end(self, code: int) -> None:
        self._code = code if self._code is None else self._code

    # ------------------------------------------------------------------ the rank

    def _report(self, event: Event) -> None:
        match event:
            case Ended(rank, code):
                self._rank_code = code if code >= 0 else 128 - code
                self._membership.report(event)
                if self._signal or self._ends:
                    if self._signal and code:
                        say(
                            f"lastwords: rank {rank} was asked to stop ({signal.Signals(self._signal).name}) and ends; "
                            "the job waits for it: start it again with the same environment"
                        )
                    self._end(self._rank_code)
                return
            case Lost(why):
                say(f"lastwords: rank {self._membership.rank} ends: {why}")
                return self._end(1)
            case Guarded() | Begun() | Updated() | Over() | Leaving() | Stopped():
                self._membership.report(event)
            case _:
                pass  # that it is ready, the scheduler knows

    # ------------------------------------------------------------------ the scheduler

    def _obey(self, order: ToSupervisor) -> None:
        match order:
            case Enter(seat=seat) if seat is not None:
                self._seat.env |= {"LOCAL_RANK": str(seat.local_rank), "LOCAL_WORLD_SIZE": str(seat.local_size)}
                self._host.address = seat.rank_0
                self._host.obey(order)
            case End() | Kill() | Look():
                self._host.obey(order)
            case Done():
                self._end(0)
            case _:
                pass

    def _is_over(self, why: str, fails: bool) -> None:
        """Nothing is healed any more."""
        if why:
            say(f"lastwords: {why}")
        if self._runs:
            self._ends, self._kill_s = True, self._own_time.at(mono_s()) + END_S  # it may be writing a checkpoint
            return self._host.obey(End(self._membership.rank))
        self._end(self._last_code if fails else 0)


def _threads() -> int:
    count = os.environ.get("OMP_NUM_THREADS", "")
    return int(count) if count.isdigit() and int(count) else len(os.sched_getaffinity(0))
