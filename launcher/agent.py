"""torch's elastic agent, except that a failure is healed: all ranks end, and are forked anew.

Rendezvous, logs, error files and `--max-restarts` are torch's. What differs: a thread of its own hears the ranks, sees
their processes end, and does what the head of the job says, which is the launcher of the first host; torch's loop, in
the main thread, asks ten times a second how it stands.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import ProcessFailure
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.multiprocessing.api import SignalException

from lastwords import threads
from lastwords.launcher.events import Event, Stop
from lastwords.launcher.forks import Ahead
from lastwords.launcher.head import Head, Listener, Uplink
from lastwords.launcher.host import Host, HowLeft, Program
from lastwords.launcher.processes import RankSeat
from lastwords.liveness.parents import take_in_orphans
from lastwords.processor.signals import UNHANDLED_STOPS

_log = logging.getLogger(__name__)


HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""torch's: names of the signals that end the launcher."""

INVITATION = "lastwords/head"
"""Key in the store of torch's rendezvous."""


_ONCE = (signal.SIGTERM, *UNHANDLED_STOPS)
"""Once one of these ends the launcher, none of them cuts short the time that its ranks have; Ctrl-C does."""

_ASKING = (signal.SIGTERM, signal.SIGINT, *UNHANDLED_STOPS)
"""Ranks are sent the first of these that they do not ignore."""

STOP_S = 5.0


class HealingAgent(LocalElasticAgent):
    """program: what its ranks run. begun: a fork server that has been started already."""

    def __init__(self, *args: Any, program: Program, begun: Ahead | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._program = program
        self._begun = begun
        asking = (one for one in _ASKING if signal.getsignal(one) is not signal.SIG_IGN)  # ranks ignore the same
        self.stop = next(asking, signal.SIGTERM)
        """What asks the ranks to end."""
        self._ending = False
        self._round: _Round | None = None
        self._rounds = 0
        self.failure = ""
        """Why nothing is healed any more."""
        self.saved = False
        """As of that `Stop`."""
        self.left: HowLeft | None = None
        """How the ranks of this host have ended, once all of them have because the launcher wanted it."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        take_in_orphans()
        with _seats():
            pids: dict[int, Any] = super()._start_workers(worker_group)
        for name in os.environ[HANDLED].split(","):  # each of torch's handlers would raise in turn
            number = getattr(signal, name.strip(), None)
            if number is not None:
                signal.signal(number, self._end_by)
        begun, self._begun = self._begun, None
        self._round = _Round(worker_group, self._pcontext, self._program, self._rounds, begun)
        self._rounds += 1
        return pids

    def _end_by(self, number: int, frame: object) -> None:
        """The first signal ends the launcher. Of those that come with it, or later, only Ctrl-C does anything."""
        if self._ending and number != signal.SIGINT:
            return
        self._ending = True
        raise SignalException(f"ended by {signal.Signals(number).name}", signal.Signals(number))

    def pass_on(self, number: int) -> None:
        """A signal for the ranks of this host, as of a handler."""
        if self._round is not None:
            self._round.host.signal_all(number)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._round is not None
        for worker in worker_group.workers:
            worker.id = self._round.host.seats[worker.global_rank].proc.pid
        result = self._round.host.result
        if result is None:
            return RunResult(state=WorkerState.HEALTHY)
        if result.failure is None:
            return RunResult(
                state=WorkerState.SUCCEEDED, return_values={one.global_rank: None for one in worker_group.workers}
            )
        _log.error("lastwords run: nothing is healed any more: %s", result.failure)
        self.failure, self.saved = result.failure, result.saved
        if result.lasting:
            self._remaining_restarts = 0
        return RunResult(state=WorkerState.FAILED, failures=self._round.failures(worker_group))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._end_round(self.stop, self._shutdown_timeout)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        """The launcher ends. Whatever has told it to, its ranks get SIGTERM, for which a closed terminal is no reason
        of its own; only Ctrl-C stays what it is, so that `finally` blocks run in a script that has not begun to train.
        """
        self._ending = True
        for number in _ONCE:  # a shell and the kernel both tell of a closed terminal; for good, so until the last line
            signal.signal(number, signal.SIG_IGN)
        self._end_round(death_sig if death_sig == signal.SIGINT else self.stop, *args, **kwargs)

    def _end_round(self, *args: Any, **kwargs: Any) -> None:
        if self._round is not None:
            self._round.end()
        super()._shutdown(*args, **kwargs)
        self.left = HowLeft({}, 0, None) if self._round is None else self._round.host.left()


@contextlib.contextmanager
def _seats() -> Iterator[None]:
    """What torch's agent starts meanwhile are no processes yet, but seats of ranks."""
    before = multiprocessing.get_subprocess_handler  # type: ignore[attr-defined]
    multiprocessing.get_subprocess_handler = RankSeat  # type: ignore[attr-defined, assignment]
    try:
        yield
    finally:
        multiprocessing.get_subprocess_handler = before  # type: ignore[attr-defined]


class _Round:
    """This host's part of one rendezvous round, and the thread that looks after it.

    number: how many rounds this launcher has seen before. Raises UnavailableError where the head cannot be reached, or
    no thread can be started.
    """

    def __init__(self, group: WorkerGroup, context: Any, program: Program, number: int, begun: Ahead | None) -> None:
        place: Any = group  # torch says None of what is set by now
        ranks = range(group.workers[0].global_rank, group.workers[-1].global_rank + 1)
        self._context = context
        self._selector = selectors.DefaultSelector()
        self._head: Head | None = None
        self._way: Listener | Uplink | None = None
        seats = {int(seat.env["RANK"]): seat for seat in context.subprocess_handlers.values()}
        self.host = Host(seats, program, self._selector, self._report, begun)
        if place.group_rank == 0:
            self._head = Head(group.workers[0].world_size, number, place.master_addr)
            self._head.has_host(ranks, self.host.obey)
            if place.group_world_size > 1:
                self._way = listener = Listener(self._head, self._selector)
                place.store.set(INVITATION, listener.invitation(place.master_addr))
        else:
            self._way = Uplink(lambda: place.store.get(INVITATION).decode(), ranks, self._selector, self.host.obey)
        self._over = False
        self._wake, self._wake_up = socket.socketpair()
        self._thread = threads.start_patiently(self._run, name="lastwords-agent")

    def end(self) -> None:
        """Nothing is healed any more. Idempotent, any thread."""
        if self._over:
            return
        self._over = True
        with contextlib.suppress(OSError):
            self._wake_up.send(b"x")
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(STOP_S)  # it may hang in a file system; the ranks have to hear of the end all the same

    def failures(self, group: WorkerGroup) -> dict[int, ProcessFailure]:
        """Of the ranks of this host whose processes have ended badly by themselves in the newest generation.

        In this order, so torch takes the first one for the root cause.
        """
        local = {worker.global_rank: worker.local_rank for worker in group.workers}
        found = {}
        for rank, (pid, ended) in self.host.failures.items():
            error_file = self._context.error_files[local[rank]]
            found[rank] = failure = ProcessFailure(local[rank], pid, ended.code, error_file)
            if failure.error_file != error_file:  # the script has written none
                failure.message = ended.raised or failure.message
        return found

    # ------------------------------------------------------------------ the thread

    def _report(self, event: Event) -> None:
        if self._head is not None:
            self._head.hear(event)
        elif isinstance(self._way, Uplink):
            self._way.report(event)

    def _run(self) -> None:
        try:
            self._selector.register(self._wake, selectors.EVENT_READ, lambda: None)
            self.host.begin()
            while not self._over and self.host.result is None:
                self._turn()
        except Exception as error:  # outermost: torch's loop has to hear that nobody looks after the workers
            _log.exception("the launcher failed")
            self.host.result = Stop(repr(error))
        self.host.end()
        if self._way is not None:
            self._way.end()
        self._selector.close()

    def _turn(self) -> None:
        due_in_s = [self.host.due_in_s, None if self._head is None else self._head.due_in_s]
        for key, _ in self._selector.select(min((one for one in due_in_s if one is not None), default=None)):
            key.data()
        self.host.tick()
        if self._head is not None:
            self._head.tick()
