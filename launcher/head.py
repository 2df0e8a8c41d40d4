"""The head of the job: the launcher of the first host decides for the ranks of all hosts; the others do as it says.

Their connections carry core.py's events and effects. Where one breaks, nothing is healed any more: torch's agents end
the ranks of their hosts, which save what there is, and meet again for the next round.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from lastwords import threads
from lastwords.clock import OwnTime, mono_s
from lastwords.controller.timeline import UNREADABLE, Telling, append_record, records
from lastwords.core_events import Tick
from lastwords.errors import StorageError, UnavailableError, ranks_text
from lastwords.launcher.core import LauncherCore, RankPlace
from lastwords.launcher.events import (
    UNKNOWN_CODE,
    Begun,
    Effect,
    Ended,
    Enter,
    Event,
    Gone,
    Keep,
    Leaving,
    Lost,
    Stop,
    Updated,
)
from lastwords.launcher.link import (
    AGAIN_S,
    STRANGER_LINE_BYTES_MAX,
    Complaints,
    Connection,
    Lines,
    Reception,
    keep_alive,
    listening,
)
from lastwords.launcher.protocol import FromHost, Introduction, ToHost, difference, read, to_message
from lastwords.launcher.recovery import Recovery, incident_of, joined, sentence
from lastwords.optim_wrapper.launch.reporter import PROTOCOL
from lastwords.processor.departure import say

_log = logging.getLogger(__name__)

GENERATIONS_PER_ROUND = 1000
"""torch counts its own restarts; the generations of round n are called n * 1000, n * 1000 + 1, ..."""

STRANGERS_MAX = 512
"""Connections that have not shown the token."""

HOSTS_AT_ONCE = 4096
"""Launchers that may come in the same moment."""

CONNECT_S = 60.0
HOSTS_S = 2 * CONNECT_S
"""From the end of the rendezvous until the launchers of all its hosts have come: one may be lost in between."""

_telling = Telling()

STORE_S = 60.0
"""How long a store for the next generation is tried for, where ports, descriptors or memory are short."""


class Head:
    """Directs the ranks 0 .. size - 1. address: of this host, where the stores are. Thread of the selector.

    keeps: as of the core.
    """

    def __init__(self, size: int, number: int, address: str, *, keeps: bool = False) -> None:
        self.core = LauncherCore(tuple(range(size)), keeps=keeps)
        self._recovery = Recovery(tuple(range(size)))
        self._record: Path | None = None
        self._first = number * GENERATIONS_PER_ROUND
        self._address = address
        self._store: TCPStore | None = None
        self._hosts: list[Callable[[Effect], None]] = []
        self._host_of: dict[int, Callable[[Effect], None]] = {}
        self._events: deque[Event] = deque()
        self._busy = False
        self._size = size
        self._own_time = OwnTime()
        """Of the deadlines: what has happened while this process was stopped, maybe with all ranks, comes after it."""
        self._hosts_due_s = None if keeps else self._own_time.at(mono_s()) + HOSTS_S

    def take_over(self, entry: int, step: int) -> None:
        """Follow a head that was killed after it had begun this generation."""
        self.core.take_over(entry, step)
        self._recovery.entered(entry, mono_s())

    def has_host(self, ranks: range, obey: Callable[[Effect], None]) -> None:
        """A host of these ranks takes part."""
        self._hosts.append(obey)
        self._host_of.update(dict.fromkeys(ranks, obey))
        if len(self._host_of) == self._size:
            self._hosts_due_s = None

    def hear(self, event: Event) -> None:
        """Something has happened to a rank, wherever it is; also while an effect is carried out."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                event, now_s = self._events.popleft(), mono_s()
                self._note(event, now_s)
                for effect in self.core.handle(event, self._own_time.at(now_s)):
                    self._carry_out(effect)
        finally:
            self._busy = False

    @property
    def due_in_s(self) -> float | None:
        """When `tick` is wanted."""
        dues_s = [due_s for due_s in (self.core.deadline_s, self._hosts_due_s) if due_s is not None]
        return max(0.0, self._own_time.look_mono_s(min(dues_s)) - mono_s()) if dues_s else None

    def tick(self) -> None:
        if self._hosts_due_s is not None and self._own_time.at(mono_s()) >= self._hosts_due_s:
            self._hosts_due_s = None
            missing = ranks_text(rank for rank in range(self._size) if rank not in self._host_of)
            self.hear(
                Lost(
                    f"the launcher of the host of {missing} has not come within {HOSTS_S:g} s: it has ended, or"
                    " a port is closed between the hosts"
                )
            )
        self.hear(Tick())

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Enter(entry, step=step):
                number = self._first + entry
                self._recovery.entered(number, mono_s())
                # Each has a store of its own: in the one before it, ranks would find addresses of the dead.
                try:
                    self._store = _new_store(self._address)
                except RuntimeError as error:
                    return self.hear(
                        Lost(f"no store for the ranks can be made on this host for {STORE_S:g} s: {error}")
                    )
                self._tell_all(Enter(number, self._store.port, step))
            case Stop() | Keep():
                self._tell_all(effect)
            case _ if effect.rank in self._host_of:
                self._host_of[effect.rank](effect)
            case _:
                _log.warning("the launcher of rank %d's host has not come yet; all others wait for it", effect.rank)

    def _tell_all(self, effect: Effect) -> None:
        for obey in self._hosts:
            obey(effect)

    def _note(self, event: Event, now_s: float) -> None:
        match event:
            case Leaving(rank, step, record, ended):
                self._record = Path(record) if record else self._record
                self._recovery.left(rank, step, now_s, ended)
            case Ended(rank, code, how, raised) if self.core.is_by_itself(event):
                self._recovery.died(rank, code, now_s, how, raised)
            case Gone(rank) if self.core.place(rank) is RankPlace.RUNNING:
                self._recovery.died(rank, UNKNOWN_CODE, now_s)
            case Begun(rank, step, _, imports):
                self._recovery.begun(rank, step, now_s, dict(imports))
            case Updated(rank, inexact):
                if (recovered := self._recovery.updated(rank, now_s, inexact)) is not None:
                    _tell_in_time(recovered, self._record)
            case _:
                pass


class Listener:
    """Where the launchers of other hosts come to their head. Whoever does not know the token is not heard."""

    def __init__(self, head: Head, selector: selectors.BaseSelector) -> None:
        self.head, self.selector = head, selector
        self.token = secrets.token_hex(16)
        self.complaints = Complaints()
        self._server = listening(0, HOSTS_AT_ONCE)
        self._reception = Reception(self._server)
        self._links: list[_Launcher] = []
        self._strangers: list[_Launcher] = []
        selector.register(self._server, selectors.EVENT_READ, self._accept)

    def invitation(self, address: str) -> str:
        """What another launcher has to know, over a channel that only launchers of this job read."""
        return json.dumps({"address": address, "port": self._server.getsockname()[1], "token": self.token})

    def end(self) -> None:
        """Nobody is heard any more."""
        for link in self._links:
            link.connection.close()
        self._server.close()

    def _accept(self) -> None:
        if (taken := self._reception.accept()) is None:
            return
        self._strangers = [one for one in self._strangers if one.connection.open and not one.known]
        if len(self._strangers) >= STRANGERS_MAX:
            self._strangers.pop(0).connection.close()
        one = _Launcher(self, *taken)
        self._links = [link for link in self._links if link.connection.open] + [one]
        self._strangers.append(one)


class _Launcher:
    """That of another host: the token and its ranks come over its connection first, then events."""

    def __init__(self, listener: Listener, link: socket.socket, address: str) -> None:
        self._head, self._token, self._complaints = listener.head, listener.token, listener.complaints
        self._address = address
        self.known = False
        self.connection = Connection(
            link, listener.selector, f"a process at {address}", self._decode, self._hear, self._complaints,
            Lines(STRANGER_LINE_BYTES_MAX),
        )  # fmt: skip

    def _decode(self, message: dict[str, Any]) -> Introduction | Event:
        found: Introduction | Event = read(message, FromHost if self.known else Introduction)
        return found

    def _hear(self, what: Introduction | Event | None) -> None:
        if what is None:
            if self.known and not self._head.core.stopped:
                broken = self.connection.broken
                why = "says what is not understood" if broken else "has ended or cannot be reached"
                self._head.hear(Lost(f"the launcher of host {self._address} {why}"))
        elif isinstance(what, Introduction):
            self._meet(what)
        else:
            self._head.hear(what)

    def _meet(self, who: Introduction) -> None:
        if not hmac.compare_digest(who.token.encode(), self._token.encode()):
            self._complaints.tell(self.connection.peer, "does not know this job's token; it is not heard")
            return self.connection.close()
        if (wrong := difference(who.version)) is not None:
            failure = f"the launcher of host {self._address} {wrong}"
            self._send(Stop(failure))
            self.connection.close()
            return self._head.hear(Lost(failure))
        self.known = True
        self.connection.let_in(f"the launcher of host {self._address}")
        self._head.has_host(range(*who.ranks), self._send)

    def _send(self, effect: Effect) -> None:
        self.connection.tell(to_message(effect))


class Uplink:
    """A host's way to the head of the job. invitation: that of the head; it may still be that of an earlier round.

    Raises UnavailableError if the head cannot be reached.
    """

    def __init__(
        self,
        invitation: Callable[[], str],
        ranks: range,
        selector: selectors.BaseSelector,
        obey: Callable[[Effect], None],
    ) -> None:
        link, token = _reach(invitation)
        keep_alive(link)

        def hear(effect: Effect | None) -> None:
            if effect is None:
                broken = self._connection.broken
                why = "says what is not understood" if broken else "has ended or cannot be reached"
                effect = Stop(f"the launcher of the first host {why}")
            obey(effect)

        peer = "the launcher of the first host"
        self._connection = Connection(link, selector, peer, lambda message: read(message, ToHost), hear)
        self._connection.tell(to_message(Introduction(token, (ranks.start, ranks.stop), PROTOCOL)))

    def report(self, event: Event) -> None:
        """Something has happened to a rank of this host."""
        self._connection.tell(to_message(event))

    def end(self) -> None:
        """Nothing is heard any more."""
        self._connection.close()


def _tell_in_time(record: Mapping[str, Any], path: Path | None) -> None:
    try:
        threads.start(_tell_of, record, path, name="lastwords-record")
    except UnavailableError as error:  # nothing else depends on it
        _log.warning("%s; not recorded: %s", sentence(record, None), error)


def _tell_of(record: Mapping[str, Any], path: Path | None) -> None:
    """All ranks train again. In a thread of its own: a file system or a terminal may take its time. path: where to."""
    incident = None
    if path is not None:
        with contextlib.suppress(OSError, StorageError):  # there is none where no controller has lived to write one
            incident = incident_of(records(path), record)
    line = joined(record, incident)
    if path is not None:
        with contextlib.suppress(StorageError):
            append_record(path, line)
    _telling.tell(line)
    with contextlib.suppress(*UNREADABLE):
        say(f"lastwords run: {sentence(record, incident)}")


def _new_store(address: str) -> TCPStore:
    """RuntimeError, as of torch, if it cannot be had for `STORE_S`. All ranks wait meanwhile, so this thread may."""
    deadline_mono_s, said = mono_s() + STORE_S, False
    while True:
        try:
            return TCPStore(address, 0, is_master=True, wait_for_workers=False)
        except RuntimeError as error:
            if mono_s() > deadline_mono_s:
                raise
            if not said:
                _log.warning("no store can be made on this host: %s; it is tried again for %g s", error, STORE_S)
            said = True
            time.sleep(AGAIN_S)


def _reach(invitation: Callable[[], str]) -> tuple[socket.socket, str]:
    """A connection, and the token to show there."""
    deadline_mono_s = mono_s() + CONNECT_S
    while True:
        found = json.loads(invitation())
        try:
            link = socket.create_connection((found["address"], found["port"]), CONNECT_S)
        except OSError as error:
            if mono_s() > deadline_mono_s:
                raise UnavailableError(
                    f"the launcher of the first host cannot be reached at {found['address']}:{found['port']}: {error}; "
                    "the launchers of a job need open ports between their hosts"
                ) from error
            time.sleep(AGAIN_S)
        else:
            link.settimeout(None)
            return link, str(found["token"])
