"""The controller, pure: events go in, effects come out; the shell has the sockets, the clock and the disk.

The course of a job: all ranks register (REGISTERING), train (WATCHING), and leave the loop together (RELEASING). In
between there may be incidents: SETTLING → (PROCEEDING) → SAVING → VERIFYING → PUBLISHING → EXITING, or from SETTLING
back to WATCHING if it was a false alarm. See docs/protocol.md.

API::

    core = ControllerCore(world_size, generation, options, before)   # before: what a killed one remembered last
    effects = core.handle(event, now_s)      # now_s: monotonic seconds, never going back
    core.deadline_s                          # when the next Tick is wanted, at the latest
    core.state, core.incident, core.outcome  # for people

Rules for the shell. A Hello may come in on any session: if the effects contain a `Reply`, send it there and do not
bind the session; otherwise bind the session to the rank, replacing an older one, before the `Send`s are carried out.
Other reports are passed on only from the session that is bound to their rank. `SessionClosed` is passed on only for
a bound session. Events and effects are in `lastwords.controller.events`, the incident is in
`lastwords.controller.incident`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from lastwords.controller.context import IncidentEnded, IncidentResumed, JobContext
from lastwords.controller.events import (
    INFO,
    WARNING,
    ControllerOptions,
    Died,
    Discard,
    Effect,
    EndKnown,
    Event,
    FromRank,
    GoneRank,
    JobMemory,
    JobStage,
    KeepParts,
    NewestKnown,
    Outcome,
    Published,
    PublishFailed,
    Registered,
    Remember,
    Reply,
    SessionClosed,
    StartPublish,
    StorageEvent,
    Watched,
)
from lastwords.controller.incident import TIMERS, Incident
from lastwords.controller.loop import Closing, HangWatch, LoopWatch, Stragglers, Strayed
from lastwords.controller.membership import CERTAIN, Life, Member, Membership, death_text, suspicion_text
from lastwords.controller.periodic import Periodic
from lastwords.core_events import Log, Tick
from lastwords.errors import ranks_text
from lastwords.vocabulary import (
    PERIODIC,
    DeathSource,
    ExitKind,
    Goodbye,
    Hello,
    Left,
    LoopBegin,
    PeerDied,
    Phase,
    Raised,
    Refused,
    Report,
    Resume,
    Saved,
    SaveFailed,
    SaveProgress,
    SaveWanted,
    Settled,
    Signalled,
    Stack,
    Stand,
    Status,
    Welcome,
)

# What the controller's core consists of, and what it can be asked. Pure.


class JobState:
    """The parts of one job's controller, and the queries on them. before: what one that was killed has kept."""

    def __init__(
        self,
        world_size: int,
        generation: int,
        options: ControllerOptions | None = None,
        before: Remember | None = None,
    ) -> None:
        self._context = JobContext(world_size, generation, options or ControllerOptions())
        self._members = self._context.members
        self._timers = self._context.timers
        self._incident: Incident | None = None
        self._incident_number = 0
        self._incident_resumed = 0  # newest one that was a false alarm
        self._closing = Closing(self._context)
        self._periodic = Periodic(self._context)
        self._loop = LoopWatch(self._context, self._closing, self._periodic)
        self._hang = HangWatch(self._context, before.memory.pace_s if before is not None else 0.0)
        self._stragglers = Stragglers(self._context)
        self._succession = Succession(self._context, before)
        self._started = False

    @property
    def state(self) -> JobStage:
        """Where the job stands."""
        return self._context.state

    @property
    def incident(self) -> int:
        """Number of the newest incident, 0 if there was none."""
        return self._incident_number

    @property
    def outcome(self) -> Outcome | None:
        """How the job ended, once that is decided."""
        return self._closing.outcome

    @property
    def members(self) -> Membership:
        """Who takes part; to be read only."""
        return self._members

    @property
    def slower(self) -> Mapping[int, float]:
        """The ranks that are persistently slower than their peers, and by how much: 0.5 is half as much again."""
        return self._stragglers.slower

    @property
    def deadline_s(self) -> float | None:
        """When the next Tick is due; None if nothing is waited for. Before the first event it is due at once."""
        return self._timers.next_s if self._started else 0.0

    def _current(self, number: int) -> Incident | None:
        return self._incident if self._incident is not None and self._incident.number == number else None

    def _incident_or_new(self) -> Incident:
        if self._incident is None:
            self._incident_number += 1
            self._incident = Incident(self._context, self._incident_number)
        return self._incident

    def _remembering(self, effects: list[Effect]) -> list[Effect]:
        """The effects, preceded by a Remember if the successor needs new state."""
        wanted, pace_s = self._periodic.wanted, self._hang.kept_pace_s
        if self._succession.may_wait(effects, self._incident, wanted=wanted, pace_s=pace_s):
            return effects
        numbers = JobMemory(
            incident=self._incident_number,
            resumed=self._incident_resumed,
            periodic=self._periodic.newest,
            wanted=wanted,
            pace_s=pace_s,
            outcome=self._closing.outcome,
        )
        kept = self._succession.remember(numbers, self._incident)
        return effects if kept is None else [kept, *effects]


# A controller that was killed is followed by another one: what is kept for it, and how it begins.
#
# It knows what `JobMemory` says and what the ranks repeat. An incident that was open and might have been a false alarm
# is one: whoever still is in doubt will be again. Any other begins anew, with a number of its own, so that nothing of
# the old one counts any more; only a checkpoint that was verified, and lacked no more than its name, is published
# first.


class Succession:
    """What was taken over, as long as it matters, and what is remembered for the next controller."""

    TIMERS = ("absent",)

    def __init__(self, context: JobContext, before: Remember | None) -> None:
        self._context = context
        self.before = before
        self._members: tuple[Registered, ...] = ()
        self.remembered: Remember | None = None
        self._absent: set[int] = set()  # ranks that have not come back yet
        self._attempts: tuple[Discard, ...] = ()  # directories of incidents before
        self._publishing: StartPublish | None = None
        if before is not None:
            self._members = before.members
            self._attempts, self._publishing = before.memory.attempts, before.memory.publishing
            self._recall_members(before.memory)

    def _recall_members(self, memory: JobMemory) -> None:
        members = self._context.members
        start = Stand(Phase.COMPUTING, memory.base_step)
        for rank, known in enumerate(self._members):
            hello = Hello(rank, members.generation, members.world_size, known.process, known.units, start, known.shared)
            member = members.admit(hello)
            member.connected, member.loop_agreed = False, memory.loop
        members.base_step = memory.base_step
        members.loop, members.loop_go_sent = memory.loop, memory.loop is not None
        for gone in memory.gone if self._members else ():  # before all are registered, nobody is known by name
            members.bury(gone.rank, gone.source)
            if gone.left is not None:
                members.leave(Left(gone.rank, members.generation, gone.left))
        self._absent = set(members.living)

    # ------------------------------------------------------------------ who is back

    def begin(self) -> None:
        """From now on ranks may come back; those that do not within `lost_confirm_s` are as if they were lost now."""
        self._context.timers.set("absent", self._context.now_s + self._context.options.lost_confirm_s)

    def is_last_to_return(self, rank: int) -> bool:
        """A rank is back; True if it was the last one of those that may come."""
        waited = bool(self._absent)
        self._absent.discard(rank)
        if waited and not self._absent:
            self._context.timers.clear(*self.TIMERS)
        return waited and not self._absent

    def take_absent(self) -> list[int]:
        """The ranks that have not come back, sorted; they are not waited for here any more."""
        absent, self._absent = sorted(self._absent), set()
        return absent

    # ------------------------------------------------------------------ what the controller before was doing

    def publish_first(self) -> None:
        """An incident begins anew: what was about to be published needs no rank any more."""
        if self._publishing is not None:
            self._context.emit(self._publishing)

    def on_storage(self, event: StorageEvent, incident: Incident) -> None:
        """About files that this controller has not ordered."""
        order = self._publishing
        if order is None or (event.incident, event.attempt) != (order.incident, order.attempt):
            return
        if isinstance(event, Published):
            if incident.verdict is None:
                incident.saving.discard_all()
                incident.verdict = IncidentEnded(ExitKind.SAVED, order.step, event.path, incident.words())
        elif isinstance(event, PublishFailed):
            self._publishing = None
            self._context.log(
                WARNING, f"step {order.step} is saved again, since it could not be published: {event.reason}"
            )

    def clear_up(self, *, saved: bool) -> None:
        """The incident is over: directories of those before go, or are kept for a human if nothing was saved."""
        for left in self._attempts:
            if saved:
                self._context.emit(left)
            else:
                self._context.emit(KeepParts(left.incident, left.attempt, left.step, left.target))
        self._attempts, self._publishing = (), None

    # ------------------------------------------------------------------ for the next one

    def may_wait(self, effects: Sequence[Effect], incident: Incident | None, *, wanted: bool, pace_s: float) -> bool:
        """Whether these effects do nothing that the next controller would have to know of. The rest: see `JobMemory`.

        The successor reopens a certain incident and detects its dead ranks itself, so single deaths need not be
        persisted: a thousand deaths at once are written once, before what is done about them.
        """
        kept = None if self.remembered is None else self.remembered.memory
        if not effects:
            # Before that, ranks may say where they start; and before the first time nobody knows who serves now.
            known = kept is not None and (kept.wanted, kept.pace_s) == (wanted, pace_s)
            return self._context.members.loop_go_sent and known
        if incident is None or kept is None or not kept.certain or kept.incident != incident.number:
            return False
        return all(isinstance(effect, Log) for effect in effects)

    def remember(self, known: JobMemory, incident: Incident | None) -> Remember | None:
        """What has to be kept before the effects of an event are carried out; None if that is kept already.

        known: what the core knows of it; the rest is found here.
        """
        members = self._context.members
        if members.complete and not self._members:
            ordered = (member for _, member in sorted(members.members.items()))
            self._members = tuple(Registered(member.process, member.units, member.shared) for member in ordered)
        dead = (members.members[rank] for rank in sorted(members.dead))
        memory = replace(
            known,
            gone=tuple(GoneRank(one.rank, one.source or DeathSource.STREAM, one.left) for one in dead),
            base_step=members.base_step,
            loop=members.loop,
            certain=incident is not None and self._context.certain,
            attempts=self._attempts + (() if incident is None else incident.saving.attempts),
            publishing=(None if incident is None else incident.saving.publishing) or self._publishing,
        )
        if (
            self.remembered is not None
            and memory == self.remembered.memory
            and self.remembered.members is self._members
        ):
            return None
        self.remembered = Remember(self._members, memory)
        return self.remembered


__all__ = ["ControllerCore", "ControllerOptions"]

_ENDING: Final = frozenset((JobStage.EXITING, JobStage.RELEASING, JobStage.REFUSING))
"""Everybody has been told to go; nothing is protected any more."""


class ControllerCore(JobState):
    """The controller of one job and generation; see the module's docstring. For one thread."""

    # ------------------------------------------------------------------ events

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take in one event and say what is to be done."""
        context = self._context
        context.now_s, context.effects = now_s, []
        if self._closing.stopped:
            return []
        if not self._started:
            self._started = True
            self._begin()
        match event:
            case FromRank(report):
                self._on_report(report)
            case SessionClosed(rank):
                self._on_session_closed(rank)
            case Died(rank, source):
                self._on_end(rank, source)
            case EndKnown(rank, how):
                self._on_end_known(rank, how)
            case Watched(rank, ended):
                self._members.members[rank].watched = not ended
                if ended:
                    self._timers.set_earlier("suspects", now_s)
            case _ if isinstance(event, StorageEvent) and event.incident == PERIODIC:
                self._periodic.on_storage(event)
                if self._incident is not None:
                    self._incident.on_storage_moved()
            case _ if isinstance(event, StorageEvent):
                if (incident := self._current(event.incident)) is not None:
                    incident.on_storage(event)
                elif self._incident is not None:
                    self._succession.on_storage(event, self._incident)
            case NewestKnown() if (incident := self._current(event.incident)) is not None:
                incident.newest.on_found(event)
                incident.advance()
            case Tick():
                pass
        for name in self._timers.pop_due(now_s):
            if not self._closing.stopped:
                self._on_timer(name)
        if self._periodic.holds_no_more:
            self._stray(self._loop.check_left())
        self._follow_verdict()
        self._closing.stop_if_empty()
        effects, context.effects = context.effects, []
        return self._remembering(effects)

    def _begin(self) -> None:
        """The first event; perhaps in the place of a controller that was killed."""
        context, before = self._context, self._succession.before
        if not self._members.complete:
            self._timers.set("start", context.now_s + context.options.start_timeout_s)
        else:
            context.state = JobStage.WATCHING
            self._succession.begin()
        if before is None:
            return
        memory = before.memory
        self._incident_number, self._incident_resumed = memory.incident, memory.resumed
        self._periodic.follow(memory.periodic, wanted=memory.wanted)
        if memory.outcome is not None:
            self._closing.end(memory.outcome, memory.incident)
        elif not memory.certain:
            self._incident_resumed = memory.incident  # if it is not over, nothing has been chosen in it
        else:
            incident = self._incident_or_new()
            incident.be_certain()
            for gone in memory.gone:
                incident.on_death(gone.rank, gone.source)
            self._open(incident, f"the controller was killed in incident {memory.incident}")
            self._succession.publish_first()

    def _on_timer(self, name: str) -> None:
        if name in Succession.TIMERS:
            for rank in self._succession.take_absent():
                self._on_silence(self._members.members[rank], DeathSource.STREAM)
            self._go_on_with_checkpoints()  # once the doubts are over, should those who are late come back
        elif name in TIMERS:
            if self._incident is not None and self._incident.verdict is None:
                self._incident.on_timer(name)
        elif name in Closing.TIMERS:
            self._closing.on_timer(name)
        elif name in Periodic.TIMERS:
            self._periodic.on_timer(name)
        elif name in LoopWatch.TIMERS:
            self._stray(self._loop.on_timer(name))
        elif name in HangWatch.TIMERS:
            self._stray(self._hang.on_timer())
        elif name in Stragglers.TIMERS:
            self._stragglers.on_timer()
        elif name == "suspects":
            self._confirm_suspects()
        elif self._context.state is JobStage.REGISTERING:
            missing = ranks_text(self._members.missing_ranks)
            text = f"{missing} did not register within {self._context.options.start_timeout_s:g} s"
            self._closing.refuse_all(
                f"{text}; check that every rank was started, and read the output of the missing ranks"
            )

    # ------------------------------------------------------------------ reports

    def _on_report(self, report: Report) -> None:
        if isinstance(report, Hello):
            self._on_hello(report)
            return
        member = self._members.members.get(report.rank)
        if member is None or report.generation != self._members.generation or not member.reachable:
            return  # of another generation, or of somebody whose word does not count (any more)
        if member.life in (Life.SUSPECT, Life.DEAD):
            self._on_return(member)  # the session still lives, so it was only silent
        handler: Callable[..., None] | None = _HANDLERS.get(type(report))
        assert handler is not None, f"no handler for {type(report).__name__}"
        handler(self, member, report)

    def _on_status(self, member: Member, report: Status) -> None:
        for death in self._loop.on_status(member, report):
            self._on_death(*death)
        self._periodic.on_status(report.rank)
        self._hang.on_status(member, report)
        self._stragglers.on_status(member, report)

    def _on_settled(self, member: Member, report: Settled) -> None:
        if 0 < report.incident <= self._incident_resumed:
            self._context.send(report.rank, Resume(self._members.generation, report.incident))
        elif (current := self._current(report.incident)) is not None:
            member.stand = report.stand
            current.on_settled(report)

    def _on_part(self, member: Member, report: SaveProgress | Saved | SaveFailed) -> None:
        owner = self._periodic if report.incident == PERIODIC else self._current(report.incident)
        if owner is None:
            return
        match report:
            case SaveProgress():
                owner.on_progress(report)
            case Saved():
                owner.on_saved(report)
            case SaveFailed():
                owner.on_failed(report)

    def _on_raised(self, member: Member, report: Raised) -> None:
        if self._context.state in _ENDING:
            return
        incident = self._incident_or_new()
        incident.on_raised(report)
        self._open(incident, f"a collective failed on rank {report.rank}")

    def _on_signalled(self, member: Member, report: Signalled) -> None:
        if self._context.state in _ENDING:
            return
        incident = self._incident_or_new()
        incident.on_signalled(report)
        self._open(incident, f"rank {report.rank} was asked to stop")

    def _on_peer_died(self, member: Member, report: PeerDied) -> None:
        self._on_end(report.dead_rank, report.source)
        if report.how:
            self._on_end_known(report.dead_rank, report.how)

    # ------------------------------------------------------------------ registration

    def _on_hello(self, hello: Hello) -> None:
        context, members = self._context, self._members
        known = members.members.get(hello.rank)
        refusal = members.refusal(hello)
        if refusal is not None and context.state in _ENDING:
            refusal = (
                f"this controller is finishing an earlier run of the job; start again when it has ended ({refusal})"
            )
        if refusal is not None:
            context.log(WARNING, f"rejected process {hello.process.pid} of host {hello.process.host_id}: {refusal}")
            context.emit(Reply(Refused(members.generation, refusal)))
            return
        if known is None and self._closing.farewell is not None:
            self._closing.tell_stranger(hello.rank)
            return
        member = members.admit(hello)
        if known is None and members.complete:
            self._welcome_all()
        elif members.complete:
            context.send(hello.rank, self._welcome())
        if member.buried:
            self._closing.tell(member.rank)  # its word does not count any more, but it lives and hears how this ends
        elif member.life in (Life.SUSPECT, Life.DEAD):
            self._on_return(member)
        else:
            self._catch_up(member)
        if self._succession.is_last_to_return(member.rank):
            self._all_are_back()

    def _all_are_back(self) -> None:
        """Every rank that lives is known to this controller, which follows one that was killed."""
        self._context.log(INFO, "every living rank has connected again")
        self._go_on_with_checkpoints()

    def _go_on_with_checkpoints(self) -> None:
        if self._members.loop_go_sent:
            self._periodic.begin(self._members.schedule)

    def _welcome(self) -> Welcome:
        return Welcome(self._members.generation)

    def _welcome_all(self) -> None:
        self._timers.clear("start")
        if self._context.state is JobStage.REGISTERING:
            self._context.state = JobStage.WATCHING
        self._context.log(INFO, f"all {self._members.world_size} ranks are registered")
        self._context.send_all(self._welcome())

    def _catch_up(self, member: Member) -> None:
        """Tell a rank with a new session what it may have missed."""
        if self._closing.farewell is not None:
            self._closing.tell(member.rank)
        elif self._incident is not None:
            self._incident.catch_up(member.rank)
        else:
            if self._incident_resumed:
                self._context.send(member.rank, Resume(self._members.generation, self._incident_resumed))
            self._periodic.catch_up(member.rank)

    # ------------------------------------------------------------------ doubt, death, departure

    def _on_session_closed(self, rank: int) -> None:
        member = self._members.members.get(rank)
        if member is not None and member.connected:
            member.connected = False
            self._on_silence(member, DeathSource.STREAM)
            self._closing.stop_if_empty()

    def _on_end(self, rank: int, source: DeathSource) -> None:
        member = self._members.members.get(rank)
        if member is None or member.life is Life.GONE:
            return
        if source not in CERTAIN:
            self._on_silence(member, source)
        elif member.life is not Life.DEAD:
            self._bury(member, source)
        elif member.source not in CERTAIN:
            member.source = source

    def _on_end_known(self, rank: int, how: str) -> None:
        member = self._members.members.get(rank)
        if member is None or not member.buried or member.how:
            return
        before, member.how = member.death, how
        self._context.log(WARNING, f"rank {rank} {member.death}")
        if self._incident is not None:
            self._incident.causes.explain(rank, before, member.death)

    def _on_silence(self, member: Member, source: DeathSource) -> None:
        if member.life is not Life.ALIVE:
            return
        self._members.suspect(member.rank, source, self._context.now_s)
        self._timers.set_earlier("suspects", self._context.now_s)
        if self._context.state in _ENDING or self._loop.needs_nobody(member.rank):
            return
        incident = self._incident_or_new()
        incident.on_suspicion(member.rank, source)
        self._open(incident, f"rank {member.rank} may have died: {suspicion_text(source)}")

    def _confirm_suspects(self) -> None:
        for rank in sorted(self._members.suspects):
            member = self._members.members[rank]
            if (until_s := self._context.silent_until_s(member)) > self._context.now_s:
                self._timers.set_earlier("suspects", until_s)
            else:
                self._bury(member, member.source or DeathSource.STREAM)

    def _bury(self, member: Member, source: DeathSource) -> None:
        self._members.bury(member.rank, source)
        if self._context.state in _ENDING:
            self._closing.stop_if_empty()
        elif self._loop.lets_go(member.rank, source):
            self._periodic.on_death(member.rank)
        else:
            self._on_death(member.rank, source)

    def _on_death(self, rank: int, source: DeathSource) -> None:
        incident = self._incident_or_new()
        incident.on_death(rank, source)
        self._open(incident, f"rank {rank} {death_text(source)}")

    def _on_return(self, member: Member) -> None:
        was_dead = member.life is Life.DEAD
        self._members.clear(member.rank)
        if self._incident is not None and self._incident.verdict is None:
            self._context.log(INFO, f"rank {member.rank} has reconnected")
            self._incident.on_return(member.rank, was_dead=was_dead)
        else:
            self._catch_up(member)

    def _on_goodbye(self, member: Member, report: Goodbye) -> None:
        if self._context.state in _ENDING:
            self._members.depart(member.rank)
            self._closing.stop_if_empty()

    # ------------------------------------------------------------------ incidents

    def _stray(self, strayed: Strayed | None) -> None:
        if strayed is not None:
            incident = self._incident_or_new()
            incident.on_strayed(strayed.ranks, strayed.words)
            self._open(incident, strayed.words)

    def _open(self, incident: Incident, words: str) -> None:
        if not incident.opened:
            self._timers.clear("start", *LoopWatch.TIMERS, *HangWatch.TIMERS, *Stragglers.TIMERS)
            self._periodic.interrupt()
            incident.open(words)

    def _follow_verdict(self) -> None:
        while (incident := self._incident) is not None and incident.verdict is not None:
            self._timers.clear(*TIMERS)
            self._incident = None
            match incident.verdict:
                case IncidentResumed():
                    self._resume_all(incident.number)
                case IncidentEnded() as verdict:
                    self._succession.clear_up(saved=verdict.kind is ExitKind.SAVED)
                    self._closing.exit_all(incident, verdict)

    def _resume_all(self, number: int) -> None:
        self._incident_resumed = number
        self._context.state = JobStage.WATCHING if self._members.complete else JobStage.REGISTERING
        if not self._members.complete:
            self._timers.set("start", self._context.now_s + self._context.options.start_timeout_s)
        self._context.log(INFO, f"incident {number}: false alarm, every rank continues")
        self._context.send_all(Resume(self._members.generation, number))
        self._loop.check_begin()
        self._periodic.order_next()
        self._hang.begin_anew()
        self._stray(self._loop.check_left())


_HANDLERS: Final[dict[type, Callable[..., None]]] = {
    LoopBegin: lambda core, member, report: core._loop.on_begin(report),
    Status: ControllerCore._on_status,
    Stack: lambda core, member, report: core._hang.on_stack(member.rank),
    Settled: ControllerCore._on_settled,
    SaveProgress: ControllerCore._on_part,
    Saved: ControllerCore._on_part,
    SaveFailed: ControllerCore._on_part,
    SaveWanted: lambda core, member, report: core._periodic.want(report.after_step),
    Raised: ControllerCore._on_raised,
    Signalled: ControllerCore._on_signalled,
    Left: lambda core, member, report: core._stray(core._loop.on_left(report)),
    PeerDied: ControllerCore._on_peer_died,
    Goodbye: ControllerCore._on_goodbye,
}
