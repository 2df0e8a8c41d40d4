"""The scheduler of a dynamic cluster: the head of a job whose workers are started, and started again, by somebody else.

It decides as the launcher does (core.py), keeps what the next scheduler needs, and carries the stores in which the
ranks of each entry meet. A worker's process comes over TCP and shows that it knows the cluster's token: its application
has with it an HMAC, with the token, of the application and of a nonce that was drawn for this connection (protocol.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hmac
import ipaddress
import logging
import math
import os
import resource
import secrets
import selectors
import socket
from typing import Any, TypeGuard

from lastwords import descriptors
from lastwords.clock import OwnTime, mono_s
from lastwords.errors import BusyError, ConfigError, StorageError
from lastwords.launcher.cluster_state import ClusterState, KeptCluster
from lastwords.launcher.core import KEEP_AGAIN_S, RankPlace
from lastwords.launcher.environment import Cluster
from lastwords.launcher.events import (
    Awaited,
    Effect,
    End,
    Ended,
    Enter,
    Event,
    Gone,
    Keep,
    Kept,
    Kill,
    Look,
    Lost,
    Ready,
    Seat,
    Stop,
)
from lastwords.launcher.head import Head
from lastwords.launcher.link import STRANGER_LINE_BYTES_MAX, Complaints, Connection, Lines, Reception, listening
from lastwords.launcher.protocol import (
    OWN,
    Admission,
    Applicant,
    Application,
    Beat,
    Challenge,
    Dismissed,
    Done,
    FromSupervisor,
    RankRuns,
    ToSupervisor,
    application_of,
    difference,
    proof_of,
    read,
    to_message,
)
from lastwords.launcher.registry import Admitted, Process, Registry, Rejected, Worker
from lastwords.liveness import process_id
from lastwords.optim_wrapper.launch.reporter import PROTOCOL

# Where the scheduler of a cluster listens: at those addresses of MS_SCHED_HOST that are this host's, and nowhere else.
#
# At all addresses only where that cannot be known: the address of a gateway that passes connections on (NAT, a virtual
# address of a cluster manager) is no address of this host; and a name that is a loopback address here, as Debian's
# /etc/hosts has it for the host's own name, is another address on the other hosts.

_log = logging.getLogger(__name__)

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""What the kernel says of an address that it does not have, or of a kind that is switched off."""


def listen(cluster: Cluster, backlog: int) -> list[socket.socket]:
    """Where its scheduler is reached. ConfigError."""
    try:
        return servers(cluster.host, cluster.port, backlog)
    except OSError as error:
        raise ConfigError(
            f"the scheduler cannot listen at {cluster.address}: {os.strerror(error.errno or 0)}; choose another "
            "MS_SCHED_PORT for all processes of the cluster, or end what uses it"
        ) from error


def servers(host: str, port: int, backlog: int) -> list[socket.socket]:
    """For connections to `host`; one or more. ConfigError for a name that is not known here, OSError."""
    found = _resolved(host, port)
    made: list[socket.socket] = []
    with contextlib.ExitStack() as closing:
        for family, address in found:
            try:
                made.append(closing.enter_context(listening(port, backlog, (family, address))))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
        if made and (_means_this_host(host) or not all(map(_is_loopback, made))):
            closing.pop_all()
            return made
    addresses = ", ".join(dict.fromkeys(str(address[0]) for _, address in found))
    _log.warning(
        "MS_SCHED_HOST=%s%s %s; the scheduler listens at all addresses of this host",
        host,
        "" if addresses == host else f" ({addresses} on this host)",
        "cannot be reached from other hosts" if made else "is no address of this host",
    )
    return [listening(port, backlog)]


def _resolved(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"MS_SCHED_HOST is {host!r}, which this host cannot resolve: {error.strerror}; set it to an address or a "
            "name of the scheduler's host, in all processes of the cluster"
        ) from error
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _means_this_host(host: str) -> bool:
    """Whether whoever wrote `host` has named this very host, if it is a loopback address."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return "localhost" in host.lower()


def _is_loopback(server: socket.socket) -> bool:
    return ipaddress.ip_address(server.getsockname()[0].partition("%")[0]).is_loopback


STATE_LOOK_S = 5.0
"""Between two looks whether the state is still there; a worker that finds no token says so after 10 s."""

LOOK_S = 0.2
"""Between two looks at all processes; a look at 4096 takes about 20 ms."""

BEAT_S = 2.0
"""Between two signs of life to each worker; to 4096 of them they take about 40 ms. Before each write as well, which may
take seconds: a worker waits for `membership.SILENT_S`."""

NOTICE_S = 30.0
"""Between two lines about those for whom all others wait."""

FAREWELL_S = 10.0
"""How long workers may take to hear that the cluster has ended."""

BACKLOG = 4096
"""Connections that may wait until they are taken; the workers of a large cluster all come back at once."""

NAMED_MAX = 8


FILES_RESERVED = 512
"""Descriptors beside those of the workers: for workers that come again before the old connection is seen to be gone,
for strangers, for the state."""


def schedule(cluster: Cluster) -> int:
    """Runs the scheduler until all workers have come to their end; exit code 0, or 1 if nothing is healed any more.

    Raises ConfigError (address, path of another cluster), BusyError (a scheduler runs), FormatError and StorageError
    (state).
    """
    descriptors.allow(cluster.workers + FILES_RESERVED, f"{cluster.workers} workers")
    state = ClusterState(cluster)
    with state.held() as kept, selectors.DefaultSelector() as selector:
        scheduler = Scheduler(cluster, state, kept, selector)
        result = scheduler.run()
        if result.failure is None:
            state.remove()
            return 0
    _log.error("nothing is healed any more: %s", result.failure)
    return 1


class Scheduler:
    """One thread: that of `selector`. kept: what the scheduler before it has left.

    How long a process has been silent is measured in own time, of which a turn counts LOOKS_APART_S_MAX at most, and a
    turn takes the connections that are pending. So whoever counts as dead was silent in SILENCE_S / LOOKS_APART_S_MAX
    turns at least, however slow this host is, and however long the scheduler was stopped.
    """

    def __init__(
        self, cluster: Cluster, state: ClusterState, kept: KeptCluster, selector: selectors.BaseSelector
    ) -> None:
        if not cluster.recovery:  # what another cluster of the same path has left is over
            kept = dataclasses.replace(kept, generation=-1, step=0, members={})
        self._cluster, self._state, self._kept = cluster, state, kept
        self._selector = selector
        self._host = process_id.host_id()
        self._own_time = OwnTime()
        self._now_s = now_s = self._own_time.at(mono_s())
        self._looked_s = -math.inf
        self._state_looked_s = now_s
        self._registry = Registry(cluster.workers, dict(kept.members.items()))
        for one in self._registry.members.values():
            one.linked, one.silent_since_s, one.over = False, now_s, False
        self._token = state.token()
        self._links: dict[int, _Link] = {}
        self._strangers: list[_Link] = []
        self._applied: list[tuple[_Link, Applicant]] = []
        """In this turn."""
        self._done: dict[int, int] = {}
        """Ranks that have come to their end, which is not kept yet, and in which generation."""
        self._done_due_s = -math.inf
        """When that is tried again."""
        self.complaints = Complaints()
        self._unkept = ""
        """Why the state could not be written the last time."""
        self._result: Stop | None = None
        self._told_s = now_s
        self._beat_mono_s = mono_s()
        self._head = Head(cluster.workers, 0, cluster.host, keeps=True)
        self._head.has_host(range(cluster.workers), self._obey)
        self._strangers_max = min(BACKLOG, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._servers = listen(cluster, BACKLOG)
        for server in self._servers:
            selector.register(server, selectors.EVENT_READ, functools.partial(self._accept, Reception(server)))
        alone = "" if cluster.recovery else "; MS_ENABLE_RECOVERY is not 1, so the first death ends the job"
        _log.warning("scheduler of %d workers at %s%s", cluster.workers, cluster.address, alone)
        if kept.generation >= 0:
            self._head.take_over(kept.generation, kept.step)
            for one in self._registry.members.values():
                if one.done:
                    self._head.hear(Ended(one.rank, 0))

    def run(self) -> Stop:
        """Until nothing is left to decide."""
        while self._result is None:
            self._turn(self._head.due_in_s)
            self._look()
            self._head.tick()
        for link in self._links.values():
            link.tell(Dismissed(self._result.failure or ""))
        until_s = mono_s() + FAREWELL_S
        while any(link.connection.open for link in self._links.values()) and mono_s() < until_s:
            self._turn(LOOK_S)
        self.close()
        return self._result

    def close(self) -> None:
        """Nobody is heard any more."""
        for link in (*self._links.values(), *self._strangers):
            link.connection.close()
        for server in self._servers:
            server.close()

    def _turn(self, due_in_s: float | None) -> None:
        ready = self._selector.select(min(LOOK_S, LOOK_S if due_in_s is None else due_in_s))
        self._now_s = self._own_time.at(mono_s())
        self._beat()
        for key, _ in ready:
            key.data()
        self._settle()

    def _settle(self) -> None:
        """What this turn has brought that the next scheduler has to know: written once, and answered then."""
        applied = [(link, who) for link, who in self._applied if link.connection.open]
        self._applied = []
        if self._head.core.heals or any(entry < self._head.core.entry for entry in self._done.values()):
            self._take_back_ends()
        done = self._done if self._now_s >= self._done_due_s else {}
        before = {**self._registry.members}
        verdicts = [(link, self._verdict(who)) for link, who in applied]
        new = {one.name for _, one in verdicts if isinstance(one, Admitted) and one.anew}
        failure = self._keep() if new or done else None
        if failure is not None:
            self._registry.members, self._done_due_s = before, self._now_s + KEEP_AGAIN_S
        elif done:
            self._done = {}
            for rank in done:
                self._tell(rank, Done())
                self._report(Ended(rank, 0))
        for link, verdict in verdicts:
            if isinstance(verdict, Rejected):
                link.tell(verdict)
            elif failure is not None and verdict.name in new:
                link.tell(Rejected(failure, later=True))
            else:
                self._admit(link, verdict)

    def _take_back_ends(self) -> None:
        """These ranks have come to their end in a generation that is over all the same, and take part in the next."""
        done, self._done = self._done, {}
        for entry, rank in sorted((entry, rank) for rank, entry in done.items()):
            self._member(rank).done = False
            healed = self._head.core.heals
            if healed:
                self._report(Ended(rank, 0))
            if not healed or self._head.core.place(rank) is RankPlace.ABSENT:  # it has said so before
                self._report(Ready(rank, entry))

    # ------------------------------------------------------------------ who is there

    def _accept(self, reception: Reception) -> None:
        """All that are pending: one at a time, the last ones have given up before it is their turn, and come again."""
        self._strangers = [one for one in self._strangers if one.connection.open and one.rank == OWN]
        for _ in range(max(1, self._strangers_max - len(self._strangers))):
            if (taken := reception.accept()) is None:
                return
            one = _Link(*taken, self._selector, self)
            if one.connection.has_gone:
                one.connection.close()
                continue
            if len(self._strangers) >= self._strangers_max:
                self._strangers.pop(0).connection.close()
            one.tell(Challenge(one.nonce, PROTOCOL))
            self._strangers.append(one)

    def apply(self, link: _Link, application: Application, who: Applicant | None) -> None:
        """A process introduces itself. who: None from one of another version."""
        wanted = proof_of(self._token, link.nonce, application.apply)
        if not hmac.compare_digest(wanted.encode(), application.proof.encode()):
            self.complaints.tell(link.connection.peer, "does not know the token of this cluster; it is not heard")
            return link.connection.close()
        if who is None:
            wrong = difference(application.version) or ""
            name, pid = (application.apply.get(key) for key in ("name", "pid"))
            self.complaints.tell(f"worker {name!r:.80} (pid {pid!s:.20} at {link.address})", wrong)
            return link.tell(Rejected(f"it {wrong}"))
        self._applied.append((link, who))

    def _verdict(self, who: Applicant) -> Admitted | Rejected:
        if who.job and self._kept.generation < 0 and not self._registry.members:
            self._kept = dataclasses.replace(self._kept, job=who.job)  # what the scheduler before has kept is lost
        process = Process(who.host, who.pid, who.start_ticks)
        return self._registry.apply(who.name, process, who.workers, self._now_s, self._runs_still, who.rank)

    def _admit(self, link: _Link, verdict: Admitted) -> None:
        if verdict.anew and self._head.core.place(verdict.rank) is not RankPlace.ABSENT:
            self._report(Gone(verdict.rank))
        self._cannot_start(verdict.rank)
        older = self._links.pop(verdict.rank, None)
        if older is not None and older is not link:  # which has applied twice
            older.rank = OWN
            older.connection.close()
        link.rank, self._links[verdict.rank] = verdict.rank, link
        member = self._member(verdict.rank)
        member.linked = True
        link.connection.let_in(f"rank {verdict.rank} (pid {member.process.pid} at {link.address})")
        link.tell(Admission(verdict.rank, verdict.name, self._kept.job))
        if verdict.anew:
            _log.warning("worker %r has come, as rank %d", verdict.name, verdict.rank)
        if self._result is not None:
            link.tell(Dismissed(self._result.failure or ""))

    def lost(self, link: _Link) -> None:
        """The connection to a worker is gone; that alone says nothing about its process."""
        if self._links.get(link.rank) is link:
            del self._links[link.rank]
            member = self._member(link.rank)
            member.linked, member.silent_since_s = False, self._now_s
            self._looked_s = -math.inf  # its process may have ended
            self._cannot_start(link.rank)

    def _cannot_start(self, rank: int) -> None:
        """Before its supervisor has said, over another connection, where it is."""
        if self._head.core.place(rank) is RankPlace.READY:
            self._head.hear(Gone(rank))

    def _look(self) -> None:
        """Who has ended? And for whom does everybody wait? Again after LOOK_S, or once a connection is lost."""
        now_s = self._now_s
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        if now_s - self._state_looked_s >= STATE_LOOK_S:
            self._state_looked_s = now_s
            if self._state.is_removed:
                self._keep()
        self._want_again()
        for rank in self._registry.ended(now_s, self._runs_still):
            self._report(Gone(rank))
            self._ask_for(rank)
        if now_s - self._told_s >= NOTICE_S:
            self._told_s = now_s
            missing = [r for r in range(self._cluster.workers) if self._head.core.place(r) is RankPlace.ABSENT]
            if missing:
                named = ", ".join(map(str, missing[:NAMED_MAX])) + (" ..." if len(missing) > NAMED_MAX else "")
                _log.warning("waiting for workers to be started: ranks %s", named)

    def _runs(self, process: Process) -> bool | None:
        if process.host != self._host:
            return None
        return process_id.runs(process.pid, process.start_ticks)

    def _runs_still(self, process: Process) -> bool | None:
        """Of a member or its rank. One that has ended is heard out: its last words may have come after this turn's."""
        running = self._runs(process)
        if running is False:
            rank = next(one.rank for one in self._registry.members.values() if process in (one.process, one.forked))
            while rank in self._links and self._links[rank].connection.read():
                pass
        return running

    def _member(self, rank: int) -> Worker:
        return next(one for one in self._registry.members.values() if one.rank == rank)

    # ------------------------------------------------------------------ what is said and done

    def hear(self, rank: int, report: FromSupervisor) -> None:
        match report:
            case Done(entry):
                self._member(rank).done = True
                self._done[rank] = entry
            case RankRuns(pid, ticks):
                member = self._member(rank)
                member.forked = dataclasses.replace(member.process, pid=pid, start_ticks=ticks)
            case _:
                self._report(report)

    def _ask_for(self, rank: int) -> None:
        """People: its supervisor has ended, and the rank's process with it."""
        name = next(name for name, one in self._registry.members.items() if one.rank == rank)
        if self._result is None:
            _log.warning(
                "rank %d has ended; all wait for it: start it again with its environment, MS_NODE_ID=%s", rank, name
            )
        self._told_s = self._now_s

    def _report(self, event: Event) -> None:
        if not self._cluster.recovery and self._is_a_death(event):
            event = Lost(f"rank {event.rank} has ended, and MS_ENABLE_RECOVERY is not 1")
        self._head.hear(event)

    def _is_a_death(self, event: Event) -> TypeGuard[Gone | Ended | Ready]:
        match event:
            case Gone():
                return True
            case Ended(code=code):
                return code != 0
            case Ready(rank):
                return self._head.core.place(rank) is RankPlace.RUNNING
            case _:
                return False

    def _obey(self, effect: Effect) -> None:
        match effect:
            case Keep(entry, step):
                before = self._kept
                self._kept = dataclasses.replace(before, generation=entry, step=step)
                if (failure := self._keep()) is not None:
                    self._kept = before
                self._report(Kept(entry, failure or ""))
            case Enter():
                self._tell_to_enter(effect)
            case End(rank) | Kill(rank) | Look(rank):
                self._tell(rank, effect)
            case Awaited(rank, what):
                _log.warning("rank %d %s; all others wait for it", rank, what)
            case Stop():
                self._result = effect

    def _want_again(self) -> None:
        """Those that had come to their end before another one has failed; the next scheduler has to know that."""
        wanted = [
            one for one in self._registry.members.values()
            if one.done and self._head.core.place(one.rank) is RankPlace.ABSENT
        ]  # fmt: skip
        for one in wanted:
            one.done = False
        if wanted:
            self._keep()

    def _tell_to_enter(self, enter: Enter) -> None:
        by_host: dict[str, list[int]] = {}
        for one in sorted(self._registry.members.values(), key=lambda one: one.rank):
            by_host.setdefault(one.process.host, []).append(one.rank)
        near = self._member(0).process.host == self._host or 0 not in self._links
        rank_0 = self._cluster.host if near else self._links[0].address
        for ranks in by_host.values():
            for local, rank in enumerate(ranks):
                self._tell(rank, dataclasses.replace(enter, seat=Seat(local, len(ranks), rank_0)))

    def _beat(self) -> None:
        """To all workers, now and then."""
        if (now_mono_s := mono_s()) - self._beat_mono_s >= BEAT_S:
            self._beat_mono_s = now_mono_s
            for rank in self._links:
                self._tell(rank, Beat())

    def _tell(self, rank: int, order: ToSupervisor) -> None:
        if rank in self._links:
            self._links[rank].tell(order)

    def _keep(self) -> str | None:
        """For the next scheduler; what is wrong if it cannot be written. Ranks that train go on all the same."""
        self._kept = dataclasses.replace(self._kept, members=self._registry.members)
        self._beat()
        try:
            self._state.write(self._kept)
        except (BusyError, StorageError) as error:
            if str(error) != self._unkept:
                _log.error(
                    "what the next scheduler has to know cannot be written: %s; no worker is admitted and no rank is "
                    "started until it can", error,
                )  # fmt: skip
            self._unkept = str(error)
            return f"the scheduler cannot write its state: {error}"
        if self._unkept:
            _log.warning("what the next scheduler has to know is written again")
        self._unkept = ""
        return None


class _Link:
    """A connection: to a stranger first, whose rank is OWN, to the process of a rank once it has applied."""

    def __init__(
        self, link: socket.socket, address: str, selector: selectors.BaseSelector, scheduler: Scheduler
    ) -> None:
        self.rank = OWN
        self.nonce = secrets.token_hex(16)
        self.address = address
        self._scheduler = scheduler
        self.connection = Connection(
            link, selector, f"a process at {address}", self._decode, self._hear, scheduler.complaints,
            Lines(STRANGER_LINE_BYTES_MAX),
        )  # fmt: skip

    def tell(self, order: ToSupervisor | Challenge | Admission) -> None:
        self.connection.tell(to_message(order))

    def _decode(self, message: dict[str, Any]) -> FromSupervisor | tuple[Application, Applicant | None]:
        return application_of(message) if self.rank == OWN else read(message, FromSupervisor, self.rank)

    def _hear(self, what: FromSupervisor | tuple[Application, Applicant | None] | None) -> None:
        if what is None:
            self._scheduler.lost(self)
        elif not isinstance(what, tuple):
            self._scheduler.hear(self.rank, what)
        elif self.connection.has_gone:
            self.connection.close()  # nobody waits for an answer
        else:
            self._scheduler.apply(self, *what)
