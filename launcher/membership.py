"""A supervisor's way to the scheduler of its cluster, which may be killed and come back at any time.

Where the scheduler has gone, it is asked for again and again, and the next one is told what it has to know.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lastwords.clock import OwnTime, mono_s
from lastwords.errors import ConfigError, FormatError, StorageError, UnavailableError
from lastwords.launcher.cluster_state import directory_of, read_token
from lastwords.launcher.environment import Cluster
from lastwords.launcher.events import Begun, Ended, Enter, Guarded, Inside, Leaving, Over, Ready
from lastwords.launcher.link import (
    RECV_BYTES,
    STRANGER_LINE_BYTES_MAX,
    Complaints,
    Connection,
    Lines,
    keep_alive,
    send,
)
from lastwords.launcher.protocol import (
    OWN,
    Admission,
    Answer,
    Applicant,
    Application,
    Beat,
    Challenge,
    Dismissed,
    Done,
    FromSupervisor,
    RankRuns,
    ToSupervisor,
    difference,
    proof_of,
    read,
    to_message,
)
from lastwords.launcher.registry import Rejected
from lastwords.liveness import process_id
from lastwords.optim_wrapper.launch.reporter import PROTOCOL
from lastwords.processor.departure import say

# How a process becomes a worker of a cluster: it asks the scheduler, shows that it knows the token, and is a rank.

_log = logging.getLogger(__name__)

JOIN_S = 600.0
"""How long a worker waits for a scheduler, and for its name to become free, while no process of its rank runs."""

ANSWER_S = 10.0
ASK_S_MAX = 3 * ANSWER_S
"""A connection, a challenge, an answer."""

AGAIN_S = 0.5
NOTICE_S = 10.0

NO_ANSWER = (OSError, FormatError, StorageError, UnavailableError)
"""What asking a scheduler raises where there is none, or where it makes no sense."""


class Joined(NamedTuple):
    """Admitted by a scheduler. lines: of what has come over `link` so far."""

    answer: Admission
    link: socket.socket
    lines: Lines


class Candidate:
    """This process, which would be a worker of `cluster`, or is one and has lost its scheduler."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._name = cluster.node
        self._process = process_id.this_process("")
        self._rank: int | None = None
        self._job = ""

    def join(self) -> Joined:
        """It is a rank on return.

        Raises ConfigError where the scheduler refuses it or is of another version, UnavailableError where there is
        none, SystemExit where there is nothing left to do for it.
        """
        begun_s = told_s = mono_s()
        while True:
            try:
                answer = self.ask()
            except NO_ANSWER as error:
                why = f"there is no scheduler: {error}"
            else:
                if isinstance(answer, Joined):
                    self._name, self._rank, self._job = answer.answer.name, answer.answer.rank, answer.answer.job
                    return answer
                why = f"the scheduler refuses this worker: {answer.why}"
                if answer.done:
                    say(f"lastwords: {answer.why}")
                    raise SystemExit(0)  # so that nobody starts it once more
                if not answer.later:
                    raise ConfigError(why)
            now_s = mono_s()
            if now_s - begun_s > JOIN_S:
                raise UnavailableError(
                    f"no place in the cluster at {self._cluster.address} after {JOIN_S:g} s: {why}"
                ) from None
            if now_s - told_s > NOTICE_S:
                told_s = now_s
                _log.warning("waiting for the scheduler at %s: %s", self._cluster.address, why)
            time.sleep(AGAIN_S)

    def ask(self) -> Joined | Rejected:
        """The scheduler's answer. NO_ANSWER, ConfigError."""
        token = read_token(self._cluster.path)
        link = socket.create_connection((self._cluster.host, self._cluster.port), ANSWER_S)
        lines = Lines(STRANGER_LINE_BYTES_MAX)
        try:
            answer = self._apply(link, lines, token)
        except BaseException:
            link.close()
            raise
        if isinstance(answer, Admission):
            return Joined(answer, link, lines)
        link.close()
        return answer

    def _apply(self, link: socket.socket, lines: Lines, token: str) -> Admission | Rejected:
        _refuse_itself(link)
        keep_alive(link)
        challenge: Challenge = read(_next(link, lines), Challenge)
        if (wrong := difference(challenge.version)) is not None:
            raise ConfigError(f"the scheduler at {self._cluster.address} {wrong}")
        process = self._process
        who = Applicant(
            self._name, process.host_id, process.pid, process.start_ticks, self._cluster.workers, self._rank, self._job
        )
        application = {**dataclasses.asdict(who), "version": PROTOCOL}
        send(link, to_message(Application(application, proof_of(token, challenge.nonce, application))))
        answer: Admission | Rejected = read(_next(link, lines), Answer)
        return answer


def _refuse_itself(link: socket.socket) -> None:
    """OSError for a connection whose two ends are one: it keeps the scheduler from its port.

    TCP makes one where nobody listens and the port, being in the range of `ip_local_port_range`, is chosen for the
    end here as well; whoever asks a thousand times meets that some day. It is reset: TIME_WAIT would keep the port.
    """
    if link.getsockname() == link.getpeername():
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _next(link: socket.socket, lines: Lines) -> dict[str, Any]:
    """The next message of a connection. OSError, FormatError."""
    data = b""
    while (message := next(lines.feed(data), None)) is None:
        try:
            data = link.recv(RECV_BYTES)
        except TimeoutError:
            raise TimeoutError(f"it has not answered for {ANSWER_S:g} s; is it stopped?") from None
        if not data:
            raise FormatError("the connection was closed")
    return message


SILENT_S = 10.0
"""Without a word from the scheduler, which says one every `scheduler.BEAT_S`, and before each write."""

_REPEATED = (RankRuns, Guarded, Begun, Over, Leaving)


@dataclass(slots=True)
class _Standing:
    """What a scheduler has to hear of this worker's rank if it knows nothing. entry: its newest generation."""

    entry: int = -1
    runs: bool = False
    loops: int = 0
    """How many have begun in this generation."""
    done: bool = False
    """It has come to its end."""
    said: dict[type[FromSupervisor], FromSupervisor] = field(default_factory=dict)
    """The newest of each kind since then."""

    def entered(self, entry: int) -> None:
        self.entry, self.loops, self.runs, self.done = entry, 0, True, False
        self.said.clear()

    def note(self, event: FromSupervisor) -> None:
        if isinstance(event, Begun):
            self.loops += 1
            self.said.pop(Over, None)  # of the loop before
        if isinstance(event, Ended):
            self.runs, self.done = False, event.code == 0
        if isinstance(event, _REPEATED):
            self.said.pop(type(event), None)
            self.said[type(event)] = event

    def repeated(self) -> list[FromSupervisor]:
        if self.done:
            return [Done(self.entry)]
        if not self.runs:
            return [*(one for one in self.said.values() if isinstance(one, Leaving)), Ready(OWN, self.entry)]
        inside = Inside(OWN, self.entry, Begun in self.said, self.loops)
        return [inside, *(event for kind, event in self.said.items() if kind is not Begun)]


class WorkerMembership:
    """This process in `cluster`, whose rank it is on return. Errors as of `Candidate.join`. Thread of the selector.

    obey: takes what the scheduler orders. ended: nobody will order anything any more; why, and whether the rank has to
    end too. Times are own time: what the scheduler has said while this process was stopped is heard before that can
    count as silence, and where the whole host was stopped, the scheduler may take a moment to go on as well.
    """

    def __init__(
        self,
        cluster: Cluster,
        selector: selectors.BaseSelector,
        obey: Callable[[ToSupervisor], None],
        ended: Callable[[str, bool], None],
    ) -> None:
        self._cluster, self._selector = cluster, selector
        self._obey_order, self._ended = obey, ended
        self._candidate = Candidate(cluster)
        self._stand = _Standing()
        self._complaints = Complaints()
        self._scheduler: Connection | None = None
        self._own_time = OwnTime()
        self._now_s = self._heard_s = self._waits_since_s = self._own_time.at(mono_s())
        """When something has come from the scheduler; since when this worker waits for one, where it does."""
        self._asked_s = 0.0
        self._said, self._notice_s = False, NOTICE_S
        self._is_over = False
        """Nobody orders anything any more."""
        joined = self._candidate.join()
        self.rank, self.job = joined.answer.rank, joined.answer.job
        self._joined: Joined | None = joined

    def begin(self) -> None:
        """The scheduler hears of this worker, and may order something from now on."""
        joined, self._joined = self._joined, None
        assert joined is not None
        self._connect(joined)

    def report(self, event: FromSupervisor) -> None:
        """Something has happened to the rank."""
        self._stand.note(event)
        if not self._stand.runs:
            self._waits_since_s = self._now_s
        if self._scheduler is not None:
            done = self._stand.done and isinstance(event, Ended)
            self._scheduler.tell(to_message(Done(self._stand.entry) if done else event))

    def tick(self) -> None:
        """Time has passed: twice a second at least."""
        self._now_s = self._own_time.at(mono_s())
        if self._is_over:
            return
        if self._scheduler is not None:
            if self._now_s - self._heard_s >= SILENT_S:
                self._is_silent()
        elif self._now_s - self._asked_s >= AGAIN_S:
            self._ask_again()
            self._asked_s = self._now_s

    def close(self) -> None:
        """Nothing is said any more; what was has been sent, as far as the scheduler takes it."""
        if self._scheduler is not None:
            self._scheduler.close()

    def _connect(self, joined: Joined) -> None:
        peer = f"the scheduler at {self._cluster.address}"
        self._scheduler = Connection(
            joined.link, self._selector, peer, lambda message: read(message, ToSupervisor), self._hear,
            self._complaints, joined.lines,
        )  # fmt: skip
        self._scheduler.let_in(peer)
        self._heard_s = self._now_s = self._own_time.at(mono_s(), ASK_S_MAX)
        for event in self._stand.repeated():
            self._scheduler.tell(to_message(event))
        self._scheduler.feed(b"")  # what came with the answer to the application, in the same bytes

    def _hear(self, order: ToSupervisor | None) -> None:
        match order:
            case None:
                self._scheduler = None
                if not self._said:
                    self._waits_since_s = self._now_s
                return
            case Dismissed(failure):
                self._end(f"the scheduler has given up: {failure}" if failure else "", bool(failure))
            case Beat():
                pass
            case Enter(entry):
                self._stand.entered(entry)
                self._obey_order(order)
            case _:
                self._obey_order(order)
        self._heard_s = self._now_s
        self._is_there()

    def _ask_again(self) -> None:
        try:
            answer = self._candidate.ask()
        except ConfigError as error:  # it will not get better
            return self._end(str(error), True)
        except UnavailableError as error:  # its files are removed once all have come to their end, this one as well
            answer = Rejected(f"there is none: {error}", later=True, done=self._stand.done)
        except NO_ANSWER as error:
            answer = Rejected(f"there is none: {error}", later=True)
        self._now_s = self._own_time.at(mono_s(), ASK_S_MAX)
        if isinstance(answer, Joined):
            self._connect(answer)
            return self._is_there()
        if answer.done:
            return self._end("" if self._stand.done else answer.why, False)
        if not answer.later:
            return self._end(f"the scheduler refuses rank {self.rank}: {answer.why}", True)
        what = f"has lost the scheduler at {self._cluster.address}, and asks for it every {AGAIN_S:g} s"
        self._goes_without(what, "start the scheduler again")

    def _is_there(self) -> None:
        """The scheduler, again or still."""
        if self._said:
            _log.warning("the scheduler at %s is there again", self._cluster.address)
        self._said, self._notice_s = False, NOTICE_S

    def _is_silent(self) -> None:
        """It is stopped, or hangs. The connection stays: once it goes on, nothing has happened."""
        if not self._said:
            self._waits_since_s = max(self._waits_since_s, self._heard_s)
        what = f"has heard nothing from the scheduler at {self._cluster.address} for {SILENT_S:g} s"
        remedy = "let the scheduler go on if it is stopped (kill -CONT), or end it and start it again"
        self._goes_without(what, remedy)

    def _goes_without(self, what: str, remedy: str) -> None:
        """There is no scheduler for now; people hear of it once."""
        if not self._said:
            self._said = True
            _log.warning("rank %d %s; %s: %s", self.rank, what, self._what_follows(), remedy)
        if not self._stand.runs:
            self._wait_outside(self._now_s - self._waits_since_s)

    def _what_follows(self) -> str:
        """Of having no scheduler, said once."""
        if self._stand.done:
            return f"it has come to its end, and waits for {JOIN_S:g} s at most until that is known there"
        if self._stand.runs:
            return "training continues"
        self._notice_s *= 3
        return f"it does not train, and ends in {JOIN_S - (self._now_s - self._waits_since_s):.0f} s if none answers"

    def _end(self, why: str, fails: bool) -> None:
        self._is_over = True
        self._ended(why, fails)

    def _wait_outside(self, waited_s: float) -> None:
        """No process of the rank runs, and none can be started without a scheduler."""
        address = self._cluster.address
        if waited_s > JOIN_S:
            hint = (
                f"; one that is started later waits for rank {self.rank}, which has come to its end: start this worker "
                f"again, or remove {directory_of(self._cluster.path)}"
            )
            self._end(
                f"no scheduler has answered at {address} for {JOIN_S:g} s{hint if self._stand.done else ''}", True
            )
        elif waited_s > self._notice_s and not self._stand.done:
            self._notice_s *= 3
            _log.warning(
                "rank %d does not train: it waits for the scheduler at %s to start it, and ends in %.0f s if "
                "none answers",
                self.rank, address, JOIN_S - waited_s,
            )  # fmt: skip
