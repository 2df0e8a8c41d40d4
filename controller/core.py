"""The controller, pure: events go in, effects come out; the shell has the sockets, the clock and the disk.

The course of a job: all ranks register (REGISTERING), train (WATCHING), and leave the loop together (RELEASING). In
between there may be incidents: SETTLING → (PROCEEDING) → SAVING → VERIFYING → PUBLISHING → EXITING, or from SETTLING
back to WATCHING if it was a false alarm. See docs/protocol.md.

API::

    core = ControllerCore(world_size, generation, options)
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

from collections.abc import Callable
from typing import Final

from lastwords.controller.context import JobContext
from lastwords.controller.detection import CERTAIN, death_text, suspicion_text
from lastwords.controller.events import (
    ERROR,
    INFO,
    RESEND_INTERVAL_S,
    WARNING,
    ControllerOptions,
    Died,
    Discard,
    Effect,
    Event,
    FromRank,
    Log,
    Outcome,
    OutcomeKind,
    PartPlan,
    Published,
    PublishFailed,
    Reply,
    Send,
    SessionClosed,
    StartPublish,
    StartVerify,
    State,
    Stop,
    Tick,
    Verified,
    VerifyFailed,
)
from lastwords.controller.incident import TIMERS, Ended, Incident, Resumed
from lastwords.controller.membership import Life, Member, Membership
from lastwords.controller.words import ranks_text
from lastwords.vocabulary import (
    DeathSource,
    Exit,
    ExitKind,
    Goodbye,
    Hello,
    Left,
    LoopBegin,
    LoopGo,
    Order,
    PeerDied,
    Raised,
    Refused,
    Release,
    Report,
    Resume,
    Saved,
    SaveFailed,
    SaveProgress,
    Settled,
    Signalled,
    Status,
    Welcome,
)

__all__ = [
    "ControllerCore",
    "ControllerOptions",
    "Died",
    "Discard",
    "Effect",
    "Event",
    "FromRank",
    "Log",
    "Outcome",
    "OutcomeKind",
    "PartPlan",
    "PublishFailed",
    "Published",
    "Reply",
    "Send",
    "SessionClosed",
    "StartPublish",
    "StartVerify",
    "State",
    "Stop",
    "Tick",
    "Verified",
    "VerifyFailed",
]

_ENDING: Final = frozenset((State.EXITING, State.RELEASING, State.REFUSING))
"""Everybody has been told to go; nothing is protected any more."""

_OUTCOME_KINDS: Final = {
    ExitKind.SAVED: OutcomeKind.SAVED,
    ExitKind.NOTHING_TO_SAVE: OutcomeKind.NOTHING_TO_SAVE,
    ExitKind.NOT_SAVED: OutcomeKind.NOT_SAVED,
}


class ControllerCore:
    """The controller of one job and generation; see the module's docstring. For one thread."""

    def __init__(self, world_size: int, generation: int, options: ControllerOptions | None = None) -> None:
        self._context = JobContext(world_size, generation, options or ControllerOptions())
        self._members = self._context.members
        self._timers = self._context.timers
        self._incident: Incident | None = None
        self._incident_number = 0
        self._incident_resumed = 0  # newest one that was a false alarm
        self._farewell: Order | None = None  # what everybody is told while the job ends
        self._outcome: Outcome | None = None
        self._started = False

    # ------------------------------------------------------------------ queries

    @property
    def state(self) -> State:
        """Where the job stands."""
        return self._context.state

    @property
    def incident(self) -> int:
        """Number of the newest incident, 0 if there was none."""
        return self._incident_number

    @property
    def outcome(self) -> Outcome | None:
        """How the job ended, once that is decided."""
        return self._outcome

    @property
    def members(self) -> Membership:
        """Who takes part; to be read only."""
        return self._members

    @property
    def deadline_s(self) -> float | None:
        """When the next Tick is due; None if nothing is waited for. Before the first event it is due at once."""
        return self._timers.next_s if self._started else 0.0

    # ------------------------------------------------------------------ events

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take in one event and say what is to be done."""
        context = self._context
        context.now_s = now_s
        context.effects = []
        if context.state is State.STOPPED:
            return []
        if not self._started:
            self._started = True
            self._timers.set("start", now_s + context.options.start_timeout_s)
        match event:
            case FromRank(report):
                self._on_report(report)
            case SessionClosed(rank):
                self._on_session_closed(rank)
            case Died(rank, source):
                self._on_end(rank, source)
            case Verified(incident, attempt):
                if (current := self._current(incident)) is not None:
                    current.on_verified(attempt)
            case VerifyFailed(incident, attempt, problems):
                if (current := self._current(incident)) is not None:
                    current.on_verify_failed(attempt, problems)
            case Published(incident, attempt, path):
                if (current := self._current(incident)) is not None:
                    current.on_published(attempt, path)
            case PublishFailed(incident, attempt, reason):
                if (current := self._current(incident)) is not None:
                    current.on_publish_failed(attempt, reason)
            case Tick():
                pass
        for name in self._timers.pop_due(now_s):
            self._on_timer(name)
        self._follow_verdict()
        effects, context.effects = context.effects, []
        return effects

    def _current(self, number: int) -> Incident | None:
        return self._incident if self._incident is not None and self._incident.number == number else None

    def _on_timer(self, name: str) -> None:
        if name in TIMERS:
            if self._incident is not None and self._incident.verdict is None:
                self._incident.on_timer(name)
            return
        options = self._context.options
        match name:
            case "start":
                missing = self._members.missing_ranks
                text = f"{ranks_text(missing)} did not register within {options.start_timeout_s:g} s"
                self._refuse_all(f"{text}; look at their output, and check that every rank was started")
            case "loop":
                if self._context.state is State.WATCHING:
                    waiting = self._members.loop_waiting
                    missing = [rank for rank in range(self._members.world_size) if rank not in waiting]
                    text = f"{ranks_text(missing)} did not begin the loop within {options.start_timeout_s:g} s"
                    self._refuse_all(f"{text} of {ranks_text(waiting)}")
            case "suspects":
                self._confirm_suspects()
            case "leave":
                self._on_leave_timeout()
            case "farewell":
                self._repeat_farewell()
            case "exit":
                self._stop(f"the job has ended; {ranks_text(self._lingering())} did not close the session")

    # ------------------------------------------------------------------ reports

    def _on_report(self, report: Report) -> None:
        if isinstance(report, Hello):
            self._on_hello(report)
            return
        member = self._members.members.get(report.rank)
        if member is None or report.generation != self._members.generation or member.life is Life.DEAD:
            return  # of another generation, or of somebody whose word does not count (any more)
        member.heard = True
        if member.life is Life.SUSPECT and member.connected:
            self._on_return(member)
        handler: Callable[..., None] | None = _HANDLERS.get(type(report))
        assert handler is not None, f"no handler for {type(report).__name__}"
        handler(self, member, report)

    def _on_status(self, member: Member, report: Status) -> None:
        if report.stand != member.stand:
            member.stand = report.stand
            if self._members.anyone_left and self._context.state is State.WATCHING:
                self._arm_leave()  # somebody moves: those who have left can wait

    def _on_settled(self, member: Member, report: Settled) -> None:
        member.stand = report.stand
        if report.incident <= self._incident_resumed:
            self._context.send(report.rank, Resume(self._members.generation, report.incident))
        elif (current := self._current(report.incident)) is not None:
            current.on_settled(report)

    def _on_save_progress(self, member: Member, report: SaveProgress) -> None:
        if (current := self._current(report.incident)) is not None:
            current.on_save_progress(report.rank, report.attempt, report.bytes_written)

    def _on_saved(self, member: Member, report: Saved) -> None:
        if (current := self._current(report.incident)) is not None:
            current.on_saved(report.rank, report.attempt, report.step)

    def _on_save_failed(self, member: Member, report: SaveFailed) -> None:
        if (current := self._current(report.incident)) is not None:
            current.on_save_failed(report)

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

    # ------------------------------------------------------------------ registration

    def _on_hello(self, hello: Hello) -> None:
        context, members = self._context, self._members
        known = members.members.get(hello.rank)
        refusal = members.refusal(hello)
        if refusal is None and known is not None and known.life is Life.DEAD and known.source in CERTAIN:
            refusal = f"rank {hello.rank} was reported dead; this process cannot take part any more"
        if refusal is not None and context.state in _ENDING:
            refusal = (
                f"this controller is finishing an earlier run of the job; start again when it has ended ({refusal})"
            )
        if refusal is not None:
            context.log(WARNING, f"refused process {hello.process.pid} of host {hello.process.host_id}: {refusal}")
            context.emit(Reply(Refused(members.generation, refusal)))
            return
        if known is None and self._farewell is not None:
            context.emit(Reply(self._farewell))
            return
        member = members.admit(hello)
        if known is None and members.complete:
            self._welcome_all()
        elif members.complete:
            context.send(hello.rank, self._welcome())
        if member.life in (Life.SUSPECT, Life.DEAD):
            self._on_return(member)
        else:
            self._catch_up(member)

    def _welcome(self) -> Welcome:
        return Welcome(self._members.generation, self._incident_number, self._members.world_size)

    def _welcome_all(self) -> None:
        self._timers.clear("start")
        if self._context.state is State.REGISTERING:
            self._context.state = State.WATCHING
        self._context.log(INFO, f"all {self._members.world_size} ranks are registered")
        self._context.send_all(self._welcome())

    def _catch_up(self, member: Member) -> None:
        """Tell a rank with a new session what it may have missed."""
        if self._farewell is not None:
            self._context.send(member.rank, self._farewell)
        elif self._incident is not None:
            self._incident.catch_up(member.rank)
        elif self._incident_resumed:
            self._context.send(member.rank, Resume(self._members.generation, self._incident_resumed))

    # ------------------------------------------------------------------ the loop

    def _on_loop_begin(self, member: Member, report: LoopBegin) -> None:
        if self._members.begin_loop(report):
            self._context.send(report.rank, LoopGo(self._members.generation))
        else:
            self._check_loop()

    def _check_loop(self) -> None:
        members = self._members
        waiting = members.loop_waiting
        if self._context.state is not State.WATCHING or not waiting:
            return
        self._timers.start("loop", self._context.now_s + self._context.options.start_timeout_s)
        if len(waiting) < members.world_size:
            return
        self._timers.clear("loop")
        disagreement = members.loop_disagreement()
        if disagreement is not None:
            self._refuse_all(disagreement)
            return
        for rank in members.agree_loop():
            self._context.send(rank, LoopGo(members.generation))

    # ------------------------------------------------------------------ leaving the loop

    def _on_left(self, member: Member, report: Left) -> None:
        if self._members.leave(report):
            self._check_left()

    def _check_left(self) -> None:
        members = self._members
        if self._context.state is not State.WATCHING or not members.anyone_left:
            return
        if not members.everyone_left:
            self._arm_leave()
            return
        steps = members.left_steps()
        if len(steps) == 1:
            self._release_all(next(iter(steps)))
            return
        said = ", ".join(f"{ranks_text(ranks)} at step {step}" for step, ranks in steps.items())
        newest = max(steps)
        early = sorted(rank for step, ranks in steps.items() if step < newest for rank in ranks)
        incident = self._incident_or_new()
        incident.on_strayed(early, f"left the loop before the others ({said})")
        self._open(incident, "the ranks left the loop at different steps")

    def _arm_leave(self) -> None:
        options = self._context.options
        timeout_s = options.leave_timeout_s if self._members.left_early() else options.finish_timeout_s
        self._timers.set("leave", self._context.now_s + timeout_s)

    def _on_leave_timeout(self) -> None:
        members, options = self._members, self._context.options
        if self._context.state is not State.WATCHING:
            return
        early = members.left_early()
        if early:
            text = f"left the loop early, and no other rank has moved for {options.leave_timeout_s:g} s"
        else:
            early = sorted(rank for rank, member in members.members.items() if member.left is None)
            text = f"did not finish the loop, and has not moved for {options.finish_timeout_s:g} s"
        incident = self._incident_or_new()
        incident.on_strayed(early, text)
        self._open(incident, text)

    # ------------------------------------------------------------------ doubt, death, departure

    def _on_session_closed(self, rank: int) -> None:
        member = self._members.members.get(rank)
        if member is not None and member.connected:
            member.connected = False
            self._on_silence(member, DeathSource.STREAM)
            self._stop_if_empty()

    def _on_end(self, rank: int, source: DeathSource) -> None:
        member = self._members.members.get(rank)
        if member is None or member.life is Life.GONE:
            return
        if source not in CERTAIN:
            self._on_silence(member, source)
            return
        if member.life is Life.DEAD:
            member.source = source if member.source not in CERTAIN else member.source
            return
        self._bury(member, source)

    def _on_silence(self, member: Member, source: DeathSource) -> None:
        if member.life is not Life.ALIVE:
            return
        until_s = self._context.now_s + self._context.options.lost_confirm_s
        self._members.suspect(member.rank, source, until_s)
        self._timers.set_earlier("suspects", until_s)
        if self._context.state in _ENDING:
            return
        incident = self._incident_or_new()
        incident.on_suspicion(member.rank, source)
        self._open(incident, f"rank {member.rank} is in doubt, {suspicion_text(source)}")

    def _confirm_suspects(self) -> None:
        now_s = self._context.now_s
        for rank in sorted(self._members.suspects):
            member = self._members.members[rank]
            if member.suspect_until_s > now_s:
                self._timers.set_earlier("suspects", member.suspect_until_s)
            else:
                self._bury(member, member.source or DeathSource.STREAM)

    def _bury(self, member: Member, source: DeathSource) -> None:
        self._members.bury(member.rank, source)
        if self._context.state in _ENDING:
            self._stop_if_empty()
            return
        incident = self._incident_or_new()
        incident.on_death(member.rank, source)
        self._open(incident, f"rank {member.rank} {death_text(source)}")

    def _on_return(self, member: Member) -> None:
        was_dead = member.life is Life.DEAD
        self._members.clear(member.rank)
        if self._incident is not None and self._incident.verdict is None:
            self._context.log(INFO, f"rank {member.rank} is back")
            self._incident.on_return(member.rank, was_dead=was_dead)
        else:
            self._catch_up(member)

    def _on_goodbye(self, member: Member, report: Goodbye) -> None:
        if self._context.state in _ENDING:
            self._members.depart(member.rank)
            self._stop_if_empty()

    # ------------------------------------------------------------------ incidents

    def _incident_or_new(self) -> Incident:
        if self._incident is None:
            self._incident_number += 1
            self._incident = Incident(self._context, self._incident_number)
        return self._incident

    def _open(self, incident: Incident, words: str) -> None:
        if not incident.opened:
            self._timers.clear("leave", "loop")
            incident.open(words)

    def _follow_verdict(self) -> None:
        while (incident := self._incident) is not None and incident.verdict is not None:
            self._timers.clear(*TIMERS)
            self._incident = None
            match incident.verdict:
                case Resumed():
                    self._resume_all(incident.number)
                case Ended(kind, step, path, reason):
                    self._exit_all(incident, kind, step, path, reason)

    def _resume_all(self, number: int) -> None:
        self._incident_resumed = number
        self._context.state = State.WATCHING if self._members.complete else State.REGISTERING
        self._context.log(INFO, f"incident {number}: false alarm, every rank goes on")
        self._context.send_all(Resume(self._members.generation, number))
        self._check_loop()
        self._check_left()

    # ------------------------------------------------------------------ the end

    def _exit_all(self, incident: Incident, kind: ExitKind, step: int, path: str, reason: str) -> None:
        causes = incident.causes.ranks
        self._outcome = Outcome(_OUTCOME_KINDS[kind], step, path, reason, causes)
        what = f"step {step} is in {path}" if kind is ExitKind.SAVED else _OUTCOME_KINDS[kind].value
        level = ERROR if kind is ExitKind.NOT_SAVED else INFO
        self._context.log(level, f"incident {incident.number} is over: {reason}; {what}")
        self._say_farewell(
            State.EXITING, Exit(self._members.generation, incident.number, kind, step, path, reason, causes)
        )

    def _release_all(self, step: int) -> None:
        reason = f"all ranks have left the loop at step {step}"
        self._outcome = Outcome(OutcomeKind.RELEASED, step, "", reason, ())
        self._context.log(INFO, reason)
        self._say_farewell(State.RELEASING, Release(self._members.generation))

    def _refuse_all(self, reason: str) -> None:
        self._outcome = Outcome(OutcomeKind.REFUSED, 0, "", reason, ())
        self._context.log(ERROR, reason)
        self._say_farewell(State.REFUSING, Refused(self._members.generation, reason))

    def _say_farewell(self, state: State, order: Order) -> None:
        context = self._context
        context.state = state
        self._farewell = order
        self._timers.clear("start", "loop", "leave")
        self._timers.set("exit", context.now_s + context.options.exit_timeout_s)
        self._timers.set("farewell", context.now_s + RESEND_INTERVAL_S)
        context.send_all(order)
        self._stop_if_empty()

    def _repeat_farewell(self) -> None:
        assert self._farewell is not None
        for rank in self._lingering():
            self._context.send(rank, self._farewell)
        self._timers.set("farewell", self._context.now_s + RESEND_INTERVAL_S)

    def _lingering(self) -> list[int]:
        """Ranks that may still need to be told that the job is over, sorted."""
        return sorted(rank for rank, member in self._members.members.items() if member.living)

    def _stop_if_empty(self) -> None:
        if self._context.state in _ENDING and not self._lingering():
            self._stop("the job has ended and every rank has left")

    def _stop(self, reason: str) -> None:
        self._context.state = State.STOPPED
        self._timers.clear_all()
        self._context.emit(Stop(reason))


_HANDLERS: Final[dict[type, Callable[..., None]]] = {
    LoopBegin: ControllerCore._on_loop_begin,
    Status: ControllerCore._on_status,
    Settled: ControllerCore._on_settled,
    SaveProgress: ControllerCore._on_save_progress,
    Saved: ControllerCore._on_saved,
    SaveFailed: ControllerCore._on_save_failed,
    Raised: ControllerCore._on_raised,
    Signalled: ControllerCore._on_signalled,
    Left: ControllerCore._on_left,
    PeerDied: ControllerCore._on_peer_died,
    Goodbye: ControllerCore._on_goodbye,
}
