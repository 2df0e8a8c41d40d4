"""One incident, from the first suspicion to a verdict: freeze, settle, select, save, verify, publish.

The core feeds it what concerns it and looks at `verdict` after each event. It never looks back: once ranks have been
told what to write (`selected`), there is no way to `Resumed` any more.
"""

from __future__ import annotations

from collections.abc import Iterable

from lastwords.controller.context import Ended, JobContext, Resumed, Verdict
from lastwords.controller.decision import NO_TARGETS, Decision, NoDecision, NoDecisionKind, RankView, laggards
from lastwords.controller.detection import Causes, death_text, raised_text, signal_text, suspicion_text
from lastwords.controller.events import (
    ERROR,
    INFO,
    RESEND_INTERVAL_S,
    WARNING,
    Published,
    PublishFailed,
    State,
    Verified,
    VerifyFailed,
)
from lastwords.controller.membership import Life
from lastwords.controller.saving import Saving
from lastwords.controller.selection import select
from lastwords.controller.words import newest_text
from lastwords.vocabulary import (
    DeathSource,
    ExitKind,
    Freeze,
    Phase,
    Proceed,
    Raised,
    SaveFailed,
    Settled,
    Signalled,
    Stand,
)


class Incident:
    """The course of one incident; `context.state` says which stage it is in."""

    def __init__(self, context: JobContext, number: int) -> None:
        self._context = context
        self.number = number
        self.causes = Causes()
        self.verdict: Verdict | None = None
        self.excluded: dict[int, str] = {}  # living ranks that are not waited for any more, and why
        self.opened = False  # everybody has been told
        self._certain = False
        self._first_words = ""
        self._settled: dict[int, Settled] = {}
        self._unsettled: set[int] = set()
        self._awaited: set[int] = set()  # laggards that were waited for: once each
        self._proceeding: dict[int, float] = {}  # rank -> deadline
        self._proceed_step = 0
        self._selected = False
        self._saving = Saving(context, number)
        self._told = ""

    # ------------------------------------------------------------------ how it starts

    def open(self, words: str) -> None:
        """Freeze everybody. Call it when the cause has been noted."""
        context = self._context
        context.state = State.SETTLING
        self.opened = True
        self._first_words = words
        context.log(WARNING, f"incident {self.number}: {self.words()}; every rank is told to stop")
        self._unsettled = set(context.members.living)
        self._send_freeze(self._unsettled)
        context.timers.set("settle", context.now_s + context.options.settle_timeout_s)
        context.timers.set("resend", context.now_s + RESEND_INTERVAL_S)
        self.advance()

    def words(self) -> str:
        """Why this incident is on, for people."""
        return self.causes.text() or self._first_words

    def _send_freeze(self, ranks: Iterable[int]) -> None:
        context = self._context
        order = Freeze(context.generation, self.number, context.options.settle_timeout_s, self.words())
        for rank in sorted(ranks):
            context.send(rank, order)

    # ------------------------------------------------------------------ what happens to ranks

    def on_death(self, rank: int, source: DeathSource) -> None:
        """A process has ended (or its suspicion was confirmed)."""
        self._certain = True
        if self.causes.add(rank, death_text(source)) and self.opened:
            self._context.log(WARNING, f"incident {self.number}: rank {rank} {death_text(source)}")
        self._unsettled.discard(rank)
        self._settled.pop(rank, None)
        self._proceeding.pop(rank, None)
        if self._saving.drop_writer(rank):
            self._context.log(WARNING, f"incident {self.number}: rank {rank} had not finished its part; choosing again")
            self._choose_again()
        self.advance()

    def on_suspicion(self, rank: int, source: DeathSource) -> None:
        """Nothing is heard of a rank; the core confirms or clears it within lost_confirm_s."""
        if self.opened:
            self._context.log(WARNING, f"incident {self.number}: rank {rank} is in doubt, {suspicion_text(source)}")

    def on_return(self, rank: int, *, was_dead: bool) -> None:
        """A rank that was in doubt, or thought dead, is back. Too late to count once it was left out of a choice."""
        if was_dead and self._selected:
            self.excluded[rank] = "came back after it had been given up"
        self.catch_up(rank)
        self.advance()

    def on_raised(self, report: Raised) -> None:
        """An exception left the loop of a rank: this incident cannot end in Resume any more."""
        self._certain = True
        if not report.secondary and self.causes.add(report.rank, raised_text(report.text)) and self.opened:
            self._context.log(WARNING, f"incident {self.number}: rank {report.rank} {raised_text(report.text)}")
        self.advance()

    def on_signalled(self, report: Signalled) -> None:
        """A rank was asked to stop."""
        self._certain = True
        words = signal_text(report.signal_number)
        if self.causes.add_signal(report.rank, words) and self.opened:
            self._context.log(INFO, f"incident {self.number}: rank {report.rank} {words}")
        self.advance()

    def on_strayed(self, ranks: tuple[int, ...], words: str) -> None:
        """Ranks have left the loop where others cannot follow."""
        self._certain = True
        for rank in ranks:
            self.causes.add(rank, words)
        self.advance()

    def catch_up(self, rank: int) -> None:
        """Tell a rank that has connected (again) whatever it should know."""
        if rank not in self._settled and rank not in self._unsettled and rank not in self.excluded:
            if self._selected:
                self.excluded[rank] = "came too late to be counted"
            else:
                self._await({rank})
        self._send_freeze((rank,))
        if rank in self._proceeding:
            self._context.send(rank, self._proceed())
        writing = self._saving.writing.get(rank)
        if writing is not None:
            self._context.send(rank, writing.order)

    # ------------------------------------------------------------------ settle

    def _await(self, ranks: set[int]) -> None:
        """Wait for these ranks to settle (anew), not for ever."""
        context = self._context
        self._unsettled |= ranks
        context.timers.start("settle", context.now_s + context.options.settle_timeout_s)
        self._arm_resend()

    def on_settled(self, report: Settled) -> None:
        """A rank says exactly where it stands; of several the newest counts."""
        rank = report.rank
        known = self._settled.get(rank)
        if report.incident != self.number or (known is not None and known.sequence >= report.sequence):
            return
        self._settled[rank] = report
        self._unsettled.discard(rank)
        if rank in self._proceeding and report.stand != Stand(Phase.READY, self._proceed_step):
            del self._proceeding[rank]
        self.advance()

    def advance(self) -> None:
        """Go on to the choice, or back to training, if nothing is waited for any more."""
        context = self._context
        if not self.opened or self.verdict is not None or context.state not in (State.SETTLING, State.PROCEEDING):
            return
        if any(rank not in self.excluded for rank in context.members.suspects):
            return
        if not self._certain:
            self.verdict = Resumed()
        elif not self._unsettled and not self._proceeding:
            self._select()

    def _exclude(self, rank: int, words: str) -> None:
        """Go on without a living rank: it does not count as a survivor and is told to leave at the end."""
        self._certain = True
        self.excluded[rank] = words
        self._unsettled.discard(rank)
        self._proceeding.pop(rank, None)
        self._context.log(ERROR, f"incident {self.number}: rank {rank} {words}; going on without it")

    # ------------------------------------------------------------------ select

    def _select(self) -> None:
        context, saving = self._context, self._saving
        targets = saving.targets()
        if not targets:
            self._end(ExitKind.NOT_SAVED, f"{self.words()}; {saving.storage_reason}")
            return
        answer = select(
            views := self._views(),
            context.members.units,
            saving.parts(),
            base_step=context.members.base_step,
            targets=targets,
            retry_refused=True,
        )
        if isinstance(answer, Decision):
            self._carry_out(answer)
        elif behind := laggards(views, answer) - self._awaited:
            self._awaited |= behind
            self._await(behind)
        else:
            self._cannot_save(answer)

    def _views(self) -> dict[int, RankView]:
        views = {}
        for rank, member in self._context.members.members.items():
            stand, absence = None, ""
            if not member.living:
                absence = death_text(member.source) if member.source is not None else "is gone"
            elif rank in self.excluded:
                absence = self.excluded[rank]
            elif member.life is Life.ALIVE and rank in self._settled:
                stand = self._settled[rank].stand
            refused = frozenset(self._saving.refused.get(rank, NO_TARGETS))
            may_copy = rank not in self._saving.cannot_copy
            views[rank] = RankView(rank, member.process.host_id, member.units, stand, absence, refused, may_copy)
        return views

    def _cannot_save(self, answer: NoDecision) -> None:
        words = f"{self.words()}; {answer.reason}"
        if answer.kind is NoDecisionKind.NOTHING_TO_SAVE:
            self._end(ExitKind.NOTHING_TO_SAVE, words)
        else:
            storage = f"; {self._saving.storage_reason}" if self._saving.storage_reason else ""
            older = newest_text(self._context.newest)
            self._end(ExitKind.NOT_SAVED, "; ".join(filter(None, (words + storage, older))))

    def _carry_out(self, decision: Decision) -> None:
        context = self._context
        self._selected = True
        for rank in decision.given_up:
            self._exclude(rank, "can write nowhere")
        if decision.reason != self._told:
            self._told = decision.reason
            context.log(INFO, f"incident {self.number}: {decision.reason}")
        if decision.proceed:
            context.state = State.PROCEEDING
            self._proceed_step = decision.step
            deadline_s = context.now_s + context.options.settle_timeout_s
            for rank in decision.proceed:
                self._proceeding[rank] = deadline_s
                context.send(rank, self._proceed())
            context.timers.set("proceed", deadline_s)
            self._arm_resend()
            return
        context.state = State.SAVING
        self._saving.begin(decision, decision.reason)
        self._arm_resend()
        self._verify_if_written()

    def _proceed(self) -> Proceed:
        return Proceed(self._context.generation, self.number, self._proceed_step)

    # ------------------------------------------------------------------ save

    def on_save_progress(self, rank: int, attempt: int, bytes_written: int) -> None:
        """A writer moves."""
        self._saving.progress(rank, attempt, bytes_written)

    def on_saved(self, rank: int, attempt: int, step: int) -> None:
        """A writer has finished."""
        if self._saving.finish(rank, attempt, step):
            self._verify_if_written()

    def on_save_failed(self, report: SaveFailed) -> None:
        """A writer has failed: its file system refused, or it could not do it."""
        part = self._saving.fail(report.rank, report.attempt)
        if part is None:
            return
        words = f"rank {report.rank} could not write its part of step {report.step}: {report.reason}"
        if not part.units or report.storage:
            self._context.log(ERROR, f"incident {self.number}: {words}")
        if report.storage:
            self._saving.refuse(report.rank, words)
        elif part.units:
            self._exclude(report.rank, f"could not write ({report.reason})")
        else:
            self._saving.cannot_copy.add(report.rank)  # its own weights are as good as before
        self._choose_again()

    def _choose_again(self) -> None:
        self._context.state = State.PROCEEDING if self._proceeding else State.SETTLING
        self.advance()

    def _verify_if_written(self) -> None:
        if self._context.state is State.SAVING and not self._saving.writing:
            self._context.state = State.VERIFYING
            self._saving.start_verify()
            self._context.timers.set("verify", self._context.now_s + self._context.options.verify_timeout_s)

    def on_storage(self, event: Verified | VerifyFailed | Published | PublishFailed) -> None:
        """The controller's own work on the finished files has an answer."""
        match event:
            case Verified(attempt=attempt):
                self._on_verified(attempt)
            case VerifyFailed(attempt=attempt, problems=problems):
                self._on_verify_failed(attempt, problems)
            case Published(attempt=attempt, path=path):
                self._on_published(attempt, path)
            case PublishFailed(attempt=attempt, reason=reason):
                if self._context.state is State.PUBLISHING and attempt == self._saving.attempt:
                    self._give_up_target(f"the checkpoint is complete but could not get its final name: {reason}")

    def _on_verified(self, attempt: int) -> None:
        context = self._context
        if context.state is not State.VERIFYING or attempt != self._saving.attempt:
            return
        context.timers.clear("verify")
        context.timers.set("publish", context.now_s + context.options.publish_timeout_s)
        context.state = State.PUBLISHING
        dead = sorted(rank for rank, member in context.members.members.items() if member.life is Life.DEAD)
        self._saving.start_publish(self.words(), self.causes.ranks, tuple(dead))

    def _on_verify_failed(self, attempt: int, problems: tuple[tuple[int, str], ...]) -> None:
        context = self._context
        if context.state is not State.VERIFYING or attempt != self._saving.attempt:
            return
        context.timers.clear("verify")
        self._saving.reject(problems)
        context.log(ERROR, f"incident {self.number}: verification failed: {self._saving.storage_reason}")
        self._choose_again()

    def _on_published(self, attempt: int, path: str) -> None:
        # Perhaps later than we were willing to wait; but there it is.
        if self.verdict is None and self._saving.was_publishing(attempt):
            step = self._saving.published_step(attempt)
            self._saving.discard_all(published_attempt=attempt)
            self.verdict = Ended(ExitKind.SAVED, step, path, self.words())

    def _give_up_target(self, words: str) -> None:
        self._context.timers.clear("verify", "publish")
        self._context.log(ERROR, f"incident {self.number}: {words}")
        self._saving.close_target(words)
        self._choose_again()

    def _end(self, kind: ExitKind, reason: str) -> None:
        self._saving.discard_all()
        self.verdict = Ended(kind, 0, "", reason)

    # ------------------------------------------------------------------ time

    def on_timer(self, name: str) -> None:
        """One of this incident's timers is due."""
        options = self._context.options
        match name:
            case "settle":
                for rank in sorted(self._unsettled):
                    self._exclude(rank, f"did not settle within {options.settle_timeout_s:g} s")
                self.advance()
            case "proceed":
                for rank in sorted(self._proceeding):
                    words = f"did not apply step {self._proceed_step} within {options.settle_timeout_s:g} s"
                    self._exclude(rank, words)
                self.advance()
            case "writers":
                self._drop_overdue()
            case "verify":
                self._give_up_target(f"the verification took longer than {options.verify_timeout_s:g} s")
            case "publish":
                self._give_up_target(f"the publication took longer than {options.publish_timeout_s:g} s")
            case "resend":
                self._resend()

    def _drop_overdue(self) -> None:
        overdue = self._saving.drop_overdue()
        for rank in overdue:
            self._exclude(rank, f"made no progress for {self._context.options.progress_timeout_s:g} s while writing")
        if overdue:
            self._choose_again()

    def _resend(self) -> None:
        self._send_freeze(self._unsettled)
        for rank in sorted(self._proceeding):
            self._context.send(rank, self._proceed())
        for writing in self._saving.unanswered():
            self._context.send(writing.part.rank, writing.order)
        self._arm_resend()

    def _arm_resend(self) -> None:
        if self._unsettled or self._proceeding or self._saving.unanswered():
            self._context.timers.start("resend", self._context.now_s + RESEND_INTERVAL_S)


TIMERS = ("settle", "proceed", "writers", "verify", "publish", "resend")
"""Names of the timers that belong to an incident."""
