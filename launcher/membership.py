"""A worker's way to the scheduler of its cluster, which may be killed and come back at any time.

To the rest of the process it is a launcher that never ends: the other end of a socket pair, with the messages of
protocol.py. A thread passes on what comes from either side; where the scheduler has gone, it asks for it again and
again, and repeats what the next one has to know.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

from lastwords import threads
from lastwords.clock import OwnTime, mono_s
from lastwords.errors import ConfigError, UnavailableError
from lastwords.launcher.cluster_state import directory_of
from lastwords.launcher.environment import Cluster
from lastwords.launcher.events import Begun, Inside, Kill, Over, Waiting
from lastwords.launcher.joining import AGAIN_S, ASK_S_MAX, JOIN_S, NO_ANSWER, NOTICE_S, Candidate, Joined
from lastwords.launcher.link import (
    Complaints,
    Connection,
    Inbox,
    send,
)
from lastwords.launcher.protocol import (
    OWN,
    Beat,
    ControllerAnswer,
    ControllerWanted,
    Dismissed,
    Done,
    Entry,
    Order,
    Raised,
    SchedulerGone,
    order_of,
    to_launcher,
    to_worker,
)
from lastwords.launcher.registry import Refused
from lastwords.optim_wrapper.trainer import protect
from lastwords.processor.departure import EXIT_NOT_SAVED, say

_log = logging.getLogger(__name__)

FAREWELL_S = 30.0
"""How long a worker that has come to its end waits for a scheduler to tell it."""

SILENT_S = 10.0
"""Without a word from the scheduler, which says one every `scheduler.BEAT_S`, and before each write."""

_REPEATED = tuple(one.__name__ for one in (Waiting, Begun, Over, Raised, Done))


@dataclass(slots=True)
class _Stand:
    """What a scheduler has to hear from this process if it knows nothing. inside: the entry whose `main` runs."""

    inside: int | None = None
    loops: int = 0
    """How many have begun in `main`."""
    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The newest message of each kind since then."""

    def entered(self, entry: int) -> None:
        self.inside, self.loops = entry, 0
        self.said.clear()

    def note(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == Waiting.__name__:
            self.inside = None
            self.said.clear()
        elif kind == Begun.__name__:
            self.loops += 1
            self.said.pop(Over.__name__, None)  # of the loop before
        if kind in _REPEATED:
            self.said[kind] = message

    @property
    def is_done(self) -> bool:
        """`main` has come to its end."""
        return Done.__name__ in self.said

    def repeated(self) -> list[dict[str, Any]]:
        begun = Begun.__name__ in self.said
        inside = [] if self.inside is None else [to_launcher(Inside(OWN, self.inside, begun, self.loops))]
        return [*inside, *(message for kind, message in self.said.items() if kind != Begun.__name__)]


class Membership:
    """This process in `cluster`, whose rank it is on return. Errors as of `Candidate.join`.

    Times are own time: what the scheduler has said while this process was stopped is heard before that can count as
    silence, and where the whole host was stopped, the scheduler may take a moment to go on as well.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._candidate = Candidate(cluster)
        self._stand = _Stand()
        self._complaints = Complaints()
        self._selector = selectors.DefaultSelector()
        self._scheduler: Connection | None = None
        self.launcher, near = socket.socketpair()
        inbox = Inbox("this worker", lambda message: message, self._complaints)
        self._worker = Connection(near, self._selector, inbox, self._from_worker)
        self._told = threading.Event()
        self._own_time = OwnTime()
        self._now_s = self._heard_s = self._waits_since_s = self._own_time.at(mono_s())
        """When something has come from the scheduler; since when this worker waits for one, where it does."""
        self._said, self._notice_s = False, NOTICE_S
        self._connect(self._candidate.join())
        self._thread = threads.start_patiently(self._run, name="lastwords-scheduler")

    def done(self) -> None:
        """`main` has come to its end: the scheduler hears of it, if one comes in time."""
        with contextlib.suppress(OSError):
            send(self.launcher, to_launcher(Done()))
        if not self._told.wait(FAREWELL_S):
            say(
                f"lastwords: the scheduler at {self._cluster.address} could not be told that rank "
                f"{os.environ.get('RANK')} is done; one that is started later waits for this rank: start the rank "
                f"again, or remove {directory_of(self._cluster.path)}"
            )

    def farewell(self) -> None:
        """This worker says nothing more, and ends. Waits AGAIN_S at most until the scheduler has been sent all."""
        with contextlib.suppress(OSError):
            self.launcher.shutdown(socket.SHUT_WR)
        self._thread.join(AGAIN_S)

    def _connect(self, joined: Joined) -> None:
        peer = f"the scheduler at {self._cluster.address}"
        inbox = Inbox(peer, order_of, self._complaints, joined.lines)
        self._scheduler = Connection(joined.link, self._selector, inbox, self._from_scheduler)
        self._scheduler.let_in(peer)
        self._heard_s = self._now_s = self._own_time.at(mono_s(), ASK_S_MAX)
        for message in self._stand.repeated():
            self._scheduler.tell(message)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._pass_on()
        finally:  # also after a mistake of its own: the worker must not wait for a launcher that never speaks
            self._worker.close()
            if self._scheduler is not None:
                self._scheduler.close()
            self._selector.close()

    def _pass_on(self) -> None:
        self._obey_what_came()
        while self._worker.open:
            self._turn(AGAIN_S)

    def _turn(self, at_most_s: float) -> None:
        ready = self._selector.select(at_most_s)
        self._now_s = self._own_time.at(mono_s())
        for key, _ in ready:
            key.data()
        if not self._worker.open:
            return
        if self._scheduler is None:
            self._ask_again()
        elif self._now_s - self._heard_s >= SILENT_S:
            self._is_silent()

    def _from_worker(self, message: dict[str, Any] | None) -> None:
        if message is None:
            return
        if message["kind"] == ControllerWanted.__name__:  # there is none that waits: the rank starts it itself
            return self._worker.tell(to_worker(ControllerAnswer(message["asked"])))
        self._stand.note(message)
        if message["kind"] == Waiting.__name__:
            self._waits_since_s = self._now_s
        if self._scheduler is not None:
            self._scheduler.tell(message)

    def _from_scheduler(self, order: Order | None) -> None:
        if order is not None:
            self._heard_s = self._now_s
            self._is_there()
            return self._obey(order)
        self._scheduler = None
        if not self._said:
            self._waits_since_s = self._now_s
        self._worker.tell(to_worker(SchedulerGone()))

    def _obey_what_came(self) -> None:
        """With the answer to the application, in the same bytes."""
        assert self._scheduler is not None
        for order in self._scheduler.inbox.feed(b""):
            self._obey(order)

    def _obey(self, order: Order) -> None:
        match order:
            case Kill(why=why):
                say(f"lastwords: rank {os.environ['RANK']} is ended by the scheduler: {why}")
                os._exit(EXIT_NOT_SAVED)
            case Done():
                return self._told.set()
            case Beat():
                return None
            case Entry(entry, seat=seat) if seat is not None:
                self._stand.entered(entry)
                os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(seat.local_rank), str(seat.local_size)
                protect.use_address(seat.rank_0)
            case _:
                pass
        self._worker.tell(to_worker(order))
        if isinstance(order, Dismissed):
            self._told.set()
            self._worker.close()

    def _ask_again(self) -> None:
        try:
            answer = self._candidate.ask()
        except ConfigError as error:  # it will not get better: this worker ends as if it was told to
            self._worker.tell(to_worker(Refused(str(error))))
            return self._worker.close()
        except UnavailableError as error:  # its files are removed once all have come to their end, this one as well
            answer = Refused(f"there is none: {error}", later=True, done=self._stand.is_done)
        except NO_ANSWER as error:
            answer = Refused(f"there is none: {error}", later=True)
        self._now_s = self._own_time.at(mono_s(), ASK_S_MAX)
        if isinstance(answer, Joined):
            self._connect(answer)
            self._is_there()
            return self._obey_what_came()
        if answer.done:
            return self._end(answer.why)
        if not answer.later:
            say(f"lastwords: the scheduler refuses rank {os.environ['RANK']}: {answer.why}")
            os._exit(EXIT_NOT_SAVED)
        if not self._said:
            self._said = True
            _log.warning(
                "rank %s has lost the scheduler at %s, and asks for it every %g s; %s: start the scheduler again",
                os.environ["RANK"], self._cluster.address, AGAIN_S, self._what_follows(),
            )  # fmt: skip
        if self._stand.inside is None:
            self._wait_outside(self._now_s - self._waits_since_s)

    def _is_there(self) -> None:
        """The scheduler, again or still."""
        if self._said:
            _log.warning("the scheduler at %s is there again", self._cluster.address)
        self._said, self._notice_s = False, NOTICE_S

    def _is_silent(self) -> None:
        """It is stopped, or hangs. The connection stays: once it goes on, nothing has happened."""
        if not self._said:
            self._said = True
            self._waits_since_s = max(self._waits_since_s, self._heard_s)
            _log.warning(
                "rank %s has heard nothing from the scheduler at %s for %g s; %s: let the scheduler go on if it is "
                "stopped (kill -CONT), or end it and start it again",
                os.environ["RANK"], self._cluster.address, SILENT_S, self._what_follows(),
            )  # fmt: skip
        if self._stand.inside is None:
            self._wait_outside(self._now_s - self._waits_since_s)

    def _what_follows(self) -> str:
        """Of having no scheduler, said once."""
        if self._stand.inside is not None:
            return "training continues"
        self._notice_s *= 3
        return f"it does not train, and ends in {JOIN_S - (self._now_s - self._waits_since_s):.0f} s if none answers"

    def _end(self, why: str) -> None:
        """Nothing is left to do for this worker, by whatever process it has come to its end."""
        if self._stand.is_done:
            return self._obey(Dismissed())
        say(f"lastwords: {why}")
        os._exit(0)  # so that nobody starts it once more

    def _wait_outside(self, waited_s: float) -> None:
        """No `main` runs here, and none can be entered without a scheduler."""
        address = self._cluster.address
        if waited_s > JOIN_S:
            say(f"lastwords: no scheduler has answered at {address} for {JOIN_S:g} s")
            self._worker.close()
        elif waited_s > self._notice_s:
            self._notice_s *= 3
            _log.warning(
                "rank %s does not train: it waits for the scheduler at %s to enter main() again, and ends in %.0f s if "
                "none answers",
                os.environ["RANK"], address, JOIN_S - waited_s,
            )  # fmt: skip
