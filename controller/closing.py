"""How a job ends for the controller: everybody is told, again and again, until everybody has gone or time is up."""

from __future__ import annotations

from dataclasses import replace

from lastwords.controller.context import Ended, JobContext
from lastwords.controller.events import (
    ERROR,
    INFO,
    RESEND_INTERVAL_MAX_S,
    RESEND_INTERVAL_S,
    Outcome,
    OutcomeKind,
    Reply,
    Send,
    State,
    Stop,
)
from lastwords.controller.incident import Incident
from lastwords.controller.words import NAMED_RANKS_MAX, ranks_text
from lastwords.vocabulary import Exit, ExitKind, Order, Refused, Release

_OUTCOME_KINDS = {
    ExitKind.SAVED: OutcomeKind.SAVED,
    ExitKind.NOTHING_TO_SAVE: OutcomeKind.NOTHING_TO_SAVE,
    ExitKind.NOT_SAVED: OutcomeKind.NOT_SAVED,
}


class Closing:
    """The last order and the outcome, once there is one. States: EXITING, RELEASING, REFUSING, then STOPPED."""

    TIMERS = ("farewell", "exit")

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self.farewell: Order | None = None  # what everybody is told while the job ends: see `farewell_to`
        self._causes: frozenset[int] = frozenset()
        self.outcome: Outcome | None = None
        self._pause_s = RESEND_INTERVAL_S
        self._told_strangers: set[int] = set()  # ranks that came too late to register, and know by now

    @property
    def stopped(self) -> bool:
        """True once there is nothing left to do."""
        return self._context.state is State.STOPPED

    # ------------------------------------------------------------------ three ways to end

    def exit_all(self, incident: Incident, verdict: Ended) -> None:
        """An incident is over."""
        kind, reason, causes = verdict.kind, verdict.reason, incident.causes.ranks
        what = f"step {verdict.step} is in {verdict.path}" if kind is ExitKind.SAVED else _OUTCOME_KINDS[kind].value
        level = ERROR if kind is ExitKind.NOT_SAVED else INFO
        self._context.log(level, f"incident {incident.number} is over: {what}; {reason}")
        self.end(Outcome(_OUTCOME_KINDS[kind], verdict.step, verdict.path, reason, causes), incident.number)

    def release_all(self, step: int) -> None:
        """All ranks have left the loop at the same step."""
        reason = f"all ranks have left the training loop at step {step}"
        self._context.log(INFO, reason)
        self.end(Outcome(OutcomeKind.RELEASED, step, "", reason, ()))

    def refuse_all(self, reason: str) -> None:
        """The job cannot start."""
        self._context.log(ERROR, reason)
        self.end(Outcome(OutcomeKind.REFUSED, 0, "", reason, ()))

    def end(self, outcome: Outcome, incident: int = 0) -> None:
        """It is decided how the job ends, here or by the controller before: tell everybody."""
        context, causes = self._context, outcome.cause_ranks
        self.outcome, self._causes = outcome, frozenset(causes)
        match outcome.kind:
            case OutcomeKind.RELEASED:
                context.state, self.farewell = State.RELEASING, Release(context.generation)
            case OutcomeKind.REFUSED:
                context.state, self.farewell = State.REFUSING, Refused(context.generation, outcome.reason)
            case kind:
                facts = (outcome.step, outcome.path, outcome.reason, causes[:NAMED_RANKS_MAX])
                exit_kind = next(one for one, other in _OUTCOME_KINDS.items() if other is kind)
                context.state, self.farewell = State.EXITING, Exit(context.generation, incident, exit_kind, *facts)
        context.timers.clear("start", "loop", "leave", "begin_notice", "leave_notice")
        context.be_certain()
        context.timers.set("exit", context.now_s + context.options.exit_timeout_s)
        context.timers.set("farewell", context.now_s + self._pause_s)
        self._tell_all()
        self.stop_if_empty()

    def _tell_all(self) -> None:
        for rank in self._context.members.connected_ranks():
            self.tell(rank)

    def tell(self, rank: int) -> None:
        """How the job ends, if it does. Also to one that was reported dead: if it hears this, that was a mistake."""
        if self.farewell is not None:
            self._context.emit(Send(rank, self.farewell_to(rank)))

    def farewell_to(self, rank: int) -> Order:
        """What a rank is told. Of those that began the incident, who may be all, it needs to know whether it is one."""
        order = self.farewell
        assert order is not None
        if isinstance(order, Exit) and rank in self._causes and rank not in order.cause_ranks:
            return replace(order, cause_ranks=(*order.cause_ranks, rank))
        return order

    # ------------------------------------------------------------------ until all have gone

    def on_timer(self, name: str) -> None:
        """`farewell`: say it again. `exit`: nobody is waited for any longer."""
        if name == "exit":
            if self._context.publishing:
                self._context.timers.set("exit", self._context.now_s + self._context.options.exit_timeout_s)
                return
            members = self._context.members
            late = sorted(members.living) + [rank for rank in members.missing_ranks if rank not in self._told_strangers]
            self._stop(f"the job has ended; {ranks_text(late)} did not deregister in time")
            return
        self._tell_all()
        self._pause_s = min(2 * self._pause_s, RESEND_INTERVAL_MAX_S)
        self._context.timers.set("farewell", self._context.now_s + self._pause_s)

    def stop_if_empty(self) -> None:
        """Stop once every process has gone or is known to have ended."""
        if self.farewell is not None and self._context.state is not State.STOPPED and not self._lingering():
            self._stop("the job has ended and every rank has deregistered")

    def tell_stranger(self, rank: int) -> None:
        """A rank has come that was not registered before the job ended."""
        self._told_strangers.add(rank)
        self._context.emit(Reply(self.farewell_to(rank)))
        self.stop_if_empty()

    def _lingering(self) -> bool:
        """True while some rank may still have to be told (one that lives, or is still to come), or files be named."""
        members = self._context.members
        if self._context.publishing:
            return True
        return bool(members.living) or len(members.members) + len(self._told_strangers) < members.world_size

    def _stop(self, reason: str) -> None:
        self._context.state = State.STOPPED
        self._context.timers.clear_all()
        self._context.emit(Stop(reason))
