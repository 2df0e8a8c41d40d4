"""One incident, from the first suspicion to a verdict: freeze, settle, select, save, verify, publish.

The core feeds it what concerns it and looks at `verdict` after each event. It never looks back: once ranks have been
told what to write (`selected`), there is no way to `Resumed` any more.
"""

from __future__ import annotations

from collections.abc import Iterable

from lastwords.controller.choice import choose, files_retry_s, or_steps_back, retry_s
from lastwords.controller.context import Ended, Resumed
from lastwords.controller.decision import Decision, NoDecision, NoDecisionKind, laggards
from lastwords.controller.detection import death_text, signal_text, suspicion_text
from lastwords.controller.events import (
    ERROR,
    INFO,
    RESEND_INTERVAL_MAX_S,
    RESEND_INTERVAL_S,
    WARNING,
    Published,
    PublishFailed,
    State,
    StorageEvent,
    StorageProgress,
    Verified,
    VerifyBlocked,
    VerifyFailed,
)
from lastwords.controller.incident_state import NOTICE_S, IncidentState
from lastwords.controller.views import rank_views
from lastwords.controller.words import newest_text
from lastwords.vocabulary import (
    DeathSource,
    ExitKind,
    Freeze,
    Phase,
    Raised,
    SaveFailed,
    SaveProgress,
    Settled,
    Signalled,
    Stand,
)


class Incident(IncidentState):
    """The course of one incident; `context.state` says which stage it is in."""

    # ------------------------------------------------------------------ how it starts

    def open(self, words: str) -> None:
        """Freeze everybody. Call it when the cause has been noted."""
        self._context.state = State.SETTLING
        self.opened = True
        self._first_words = words
        self._context.log(WARNING, f"incident {self.number}: {self.words()}; every rank is ordered to stop")
        self._context.timers.set("notice", self._context.now_s + NOTICE_S)
        self._unsettled = set(self._context.members.living)
        self._send_freeze(self._unsettled)
        self._arm_resend()
        self.newest.look()
        self.advance()

    def _send_freeze(self, ranks: Iterable[int]) -> None:
        order = Freeze(self._context.generation, self.number, self._context.options.settle_timeout_s, self.words())
        for rank in sorted(ranks):
            self._context.send(rank, order)

    # ------------------------------------------------------------------ what happens to ranks

    def on_death(self, rank: int, source: DeathSource) -> None:
        """A process has ended (or its suspicion was confirmed)."""
        self.be_certain()
        if self.causes.add(rank, death_text(source)) and self.opened:
            self._context.log(WARNING, f"incident {self.number}: rank {rank} {death_text(source)}")
        self._unsettled.discard(rank)
        self._settled.pop(rank, None)
        self._proceeding.pop(rank, None)
        if self.saving.drop_writer(rank):
            self._context.log(
                WARNING, (f"incident {self.number}: rank {rank} had not finished writing its files; choosing again")
            )
            self._choose_again()
        self.advance()

    def be_certain(self) -> None:
        """No Resume any more. Only from here on is a silent rank left out after settle_timeout_s, alive or not."""
        if self._context.be_certain():
            self._context.timers.set("settle", self._context.now_s + self._context.options.settle_timeout_s)

    def on_suspicion(self, rank: int, source: DeathSource) -> None:
        """Nothing is heard of a rank."""
        if self.opened:
            self._await(set())
            self._context.log(WARNING, (f"incident {self.number}: rank {rank} may have died: {suspicion_text(source)}"))

    def on_return(self, rank: int, *, was_dead: bool) -> None:
        """A rank that was in doubt, or thought dead, is back. Too late to count once it was left out of a choice."""
        if was_dead and self._selected:
            self.excluded[rank] = "reconnected after it had been declared dead"
        self.catch_up(rank)
        self.advance()

    def on_raised(self, report: Raised) -> None:
        """An exception left the loop of a rank: this incident cannot end in Resume any more."""
        self.be_certain()
        if not report.secondary and self.causes.add(report.rank, f"raised {report.summary}") and self.opened:
            self._context.log(WARNING, f"incident {self.number}: rank {report.rank} raised {report.summary}")
        if not report.secondary:  # it has left its loop and comes to no gate any more: its answer stands
            self._awaited.add(report.rank)
            self._unsettled -= self._settled.keys() & {report.rank}
        self.advance()

    def on_signalled(self, report: Signalled) -> None:
        """A rank was asked to stop."""
        self._grace_period.begin(report.signal_number, self._late)
        self.be_certain()
        if self.causes.add_signal(report.rank, words := signal_text(report.signal_number)) and self.opened:
            self._context.log(INFO, f"incident {self.number}: rank {report.rank} {words}")
        self.advance()

    def on_strayed(self, ranks: tuple[int, ...], words: str) -> None:
        """Ranks have left the loop where others cannot follow."""
        self.be_certain()
        for rank in ranks:
            self.causes.add(rank, words)
        self.advance()

    def catch_up(self, rank: int) -> None:
        """Tell a rank that has connected (again) whatever it should know."""
        if rank not in self._settled and rank not in self._unsettled and rank not in self.excluded:
            if self._selected:
                self.excluded[rank] = "reported too late to be counted"
            else:
                self._await({rank})
        self._send_freeze((rank,))
        if rank in self._proceeding:
            self._context.send(rank, self._proceed())
        if (writing := self.saving.writing.get(rank)) is not None:
            self._context.send(rank, writing.order)

    # ------------------------------------------------------------------ settle

    def _await(self, ranks: set[int]) -> None:
        """Wait for these ranks to settle (anew), and for those in doubt; not for ever."""
        deadline_s = self._context.now_s + self._context.options.settle_timeout_s
        self._unsettled |= ranks
        self._late |= dict.fromkeys(ranks, deadline_s)
        self._context.timers.start("settle", deadline_s)
        self._arm_resend()

    def on_settled(self, report: Settled) -> None:
        """A rank says exactly where it stands; of several the newest counts."""
        rank = report.rank
        known = self._settled.get(rank)
        for copy in report.copies if report.incident == self.number else ():
            self.saving.copies.setdefault(copy.rank, set()).add(copy.step)
        if report.incident != self.number or (known is not None and known.sequence >= report.sequence):
            return
        self._settled[rank] = report
        self._unsettled.discard(rank)
        if rank in self._proceeding and report.stand != Stand(Phase.READY, self._proceed_step):
            del self._proceeding[rank]
        self.advance()

    def advance(self) -> None:
        """Go on to the choice, or back to training, if nothing is waited for any more."""
        if not self.opened or self.verdict is not None or self._context.state not in (State.SETTLING, State.PROCEEDING):
            return
        if any(rank not in self.excluded for rank in self._context.members.suspects):
            return
        if not self._context.certain:
            self.verdict = Resumed()
        elif not self._unsettled and not self._proceeding:
            self._select()

    def _exclude(self, rank: int, words: str) -> None:
        """Go on without a living rank: it does not count as a survivor and is told to leave at the end."""
        self.be_certain()
        self.excluded[rank] = words
        self._unsettled.discard(rank)
        self._proceeding.pop(rank, None)
        self._context.log(ERROR, f"incident {self.number}: rank {rank} {words}; continuing without it")

    # ------------------------------------------------------------------ select

    def _select(self) -> None:
        context, saving = self._context, self.saving
        views = rank_views(context.members, saving, self._settled, self.excluded)
        answer = choose(context, saving, views)
        if saving.tries_writers_later(retry_s(context, saving, views, answer)):
            return
        if behind := laggards(views, answer) - self._awaited:
            self._awaited |= behind
            self._await(behind)
            return
        known = self.newest.known
        newest_step = known.step if known and known.own else 0
        if isinstance(answer := or_steps_back(context, saving, views, answer, newest_step), Decision):
            self._carry_out(answer)
        else:
            self._cannot_save(answer)

    def _cannot_save(self, answer: NoDecision) -> None:
        words, nothing_new = f"{self.words()}; {answer.reason}", answer.kind is NoDecisionKind.NOTHING_TO_SAVE
        if nothing_new and self._context.members.base_step:
            self._end(ExitKind.NOTHING_TO_SAVE, words)
        elif self.newest.is_awaited():
            return
        elif nothing_new:
            # A death before resume() has said where this start goes on; the state is in a checkpoint all the same.
            known = self.newest.known
            self._end(ExitKind.NOTHING_TO_SAVE, f"{words}; {newest_text(known)}" if known and known.path else words)
        else:
            self._end_unsaved(words, self.saving.storage_reason, step=answer.step)

    def _end_unsaved(self, *words: str, step: int = 0) -> None:
        """Said, too: what there is to go on from instead. step: one that somebody had, if it is known."""
        newest = newest_text(self.newest.known, self.reached(step))
        self._end(ExitKind.NOT_SAVED, "; ".join(filter(None, (*words, newest))))

    def reached(self, step: int) -> int:
        """The step up to which all is lost that no checkpoint has, for people."""
        return max(step, self._context.members.reached)

    def _carry_out(self, decision: Decision) -> None:
        context = self._context
        self._selected = True
        context.timers.clear("again")
        for rank in decision.given_up:
            self._exclude(rank, "cannot write to any directory")
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
        self.saving.begin(decision, decision.reason)
        self._arm_resend()
        self._verify_if_written()

    # ------------------------------------------------------------------ save

    def on_save_progress(self, report: SaveProgress) -> None:
        """A writer moves."""
        self.saving.progress(report)

    def on_saved(self, rank: int, attempt: int, step: int) -> None:
        """A writer has finished."""
        if self.saving.finish(rank, attempt, step):
            self._verify_if_written()

    def on_save_failed(self, report: SaveFailed) -> None:
        """A writer has failed: its file system refused, or it could not do it."""
        if (order := self.saving.fail(report.rank, report.attempt)) is None:
            return
        words = f"rank {report.rank} could not write its files of step {report.step}: {report.reason}"
        if not order.units or report.storage:
            self._context.log(ERROR, f"incident {self.number}: {words}")
        if report.storage:
            self.saving.refuse(report.rank, words)
        elif order.copied:
            self._context.log(ERROR, f"incident {self.number}: {words}")
            self.saving.forget_copies(order.copied, order.step)  # if it was not they, it fails once more without
        elif order.units:
            self._exclude(report.rank, f"could not write ({report.reason})")
        else:
            self.saving.cannot_copy.add(report.rank)  # its own weights are as good as before
        self._choose_again()

    def _choose_again(self) -> None:
        self._context.state = State.PROCEEDING if self._proceeding else State.SETTLING
        self._await(set())
        self.advance()

    def _verify_if_written(self) -> None:
        if self._context.state is State.SAVING and not self.saving.writing:
            self._context.state = State.VERIFYING
            self.saving.start_verify()
            self._await_storage()

    def _await_storage(self) -> None:
        self._context.timers.set("storage", self._context.now_s + self._context.options.storage_timeout_s)

    def on_storage_moved(self) -> None:
        """A periodic checkpoint that was before this one's files in the queue has come further."""
        if self._context.timers.running("storage"):
            self._await_storage()
        self.newest.on_storage_moved()

    def on_storage(self, event: StorageEvent) -> None:
        """The controller's own work on the finished files goes on, or has an answer; late ones are void."""
        state = self._context.state if event.attempt == self.saving.attempt else None
        match event:
            case Published(attempt=attempt, path=path):
                self._on_published(attempt, path)
            case StorageProgress() if state in (State.VERIFYING, State.PUBLISHING):
                self._await_storage()
            case Verified() if state is State.VERIFYING:
                self._publish()
            case VerifyFailed(problems=problems) if state is State.VERIFYING:
                self._reject(problems)
            case VerifyBlocked(reason=reason) if state is State.VERIFYING:
                self._on_blocked(f"the files could not be read back: {reason}")
            case PublishFailed(reason=reason) if state is State.PUBLISHING:
                self._on_blocked(f"the checkpoint is complete but could not be renamed to its final name: {reason}")

    def _on_blocked(self, words: str) -> None:
        """The file system did not let the controller do it; perhaps later it does."""
        views = rank_views(self._context.members, self.saving, self._settled, self.excluded)
        if not self.saving.tries_files_later(words, files_retry_s(self._context, self.saving, views)):
            self._give_up_target(words)

    def _publish(self) -> None:
        self._context.state = State.PUBLISHING
        self._await_storage()
        self.saving.start_publish(self.words(), self.causes.ranks)

    def _reject(self, problems: tuple[tuple[int, str], ...]) -> None:
        self._context.timers.clear("storage")
        self.saving.reject(problems)
        self._context.log(ERROR, f"incident {self.number}: verification failed: {self.saving.storage_reason}")
        self._choose_again()

    def _on_published(self, attempt: int, path: str) -> None:
        if self.verdict is None and self.saving.was_publishing(attempt):  # perhaps late, but there it is
            step = self.saving.published_step(attempt)
            self.saving.discard_all(published_attempt=attempt)
            self.verdict = Ended(ExitKind.SAVED, step, path, "; ".join(filter(None, (self.words(), self._again(step)))))

    def _again(self, step: int) -> str:
        """Which step that a survivor has ended is computed again, for people."""
        counted = [report.stand for rank, report in self._settled.items() if rank not in self.excluded]
        ended = max((stand.ended_step for stand in counted), default=step)
        return f"step {ended} is done again" if ended > step else ""

    def _give_up_target(self, words: str) -> None:
        self._context.timers.clear("storage", "again")
        self._context.log(ERROR, f"incident {self.number}: {words}")
        self.saving.close_target(words)
        self._choose_again()

    def _end(self, kind: ExitKind, reason: str) -> None:
        self.verdict = Ended(kind, 0, "", "; ".join(filter(None, (reason, self.saving.keep_finished()))))

    # ------------------------------------------------------------------ time

    def on_timer(self, name: str) -> None:
        """One of this incident's timers is due."""
        within = f"within {self._context.options.settle_timeout_s:g} s"
        match name:
            case "settle" if self._context.certain and self._context.state in (State.SETTLING, State.PROCEEDING):
                late = {rank for rank, at_s in self._late.items() if at_s > self._context.now_s} & self._unsettled
                overdue = (self._unsettled | (self._context.members.suspects - self.excluded.keys())) - late
                if self._have_more_time(name, overdue):
                    return
                for rank in sorted(overdue):
                    self._exclude(rank, f"did not stop {within}")
                if late:
                    self._context.timers.start("settle", min(self._late[rank] for rank in late))
                self.advance()
            case "notice":
                self._tell_for_whom_all_wait()
            case "proceed":
                if self._have_more_time(name, {*self._proceeding}):
                    return
                for rank in sorted(self._proceeding):
                    self._exclude(rank, f"did not apply step {self._proceed_step} {within}")
                self.advance()
            case "writers":
                self._on_overdue_writers()
            case "again":
                self._try_again()
            case "newest":
                self.advance()
            case "storage":
                what = "verification" if self._context.state is State.VERIFYING else "publication"
                self._give_up_target(f"the {what} made no progress for {self._context.options.storage_timeout_s:g} s")
            case "grace":
                self._end_unsaved(self.words(), self._grace_period.missing_text(self._awaited_ranks))
            case "resend":
                self._resend()

    def _have_more_time(self, timer: str, overdue: set[int]) -> bool:
        """Where nothing can be saved without the ranks that are late, in a grace period."""
        more_s = self._grace_period.more_s("settle_timeout_s", overdue, self._settled, self.excluded)
        if more_s:
            self._context.timers.set(timer, self._context.now_s + more_s)
        return more_s > 0

    def _on_overdue_writers(self) -> None:
        dropped = self.saving.drop_overdue()
        late = {writing.part.rank for writing, _ in dropped}
        if more_s := self._grace_period.more_s("progress_timeout_s", late, self._settled, self.excluded):
            self.saving.wait_on((writing for writing, _ in dropped), more_s)
            return
        for writing, words in dropped:
            self._exclude(writing.part.rank, words)
        if dropped:
            self._choose_again()

    def _try_again(self) -> None:
        if self._context.state in (State.VERIFYING, State.PUBLISHING):
            self._await_storage()
            self.saving.order_files_again()
            return
        self.saving.forgive()
        self.advance()

    def _resend(self) -> None:
        self._send_freeze(self._unsettled)
        for rank in sorted(self._proceeding):
            self._context.send(rank, self._proceed())
        for writing in self.saving.unanswered():
            self._context.send(writing.part.rank, writing.order)
        self._resend_pause_s = min(2 * self._resend_pause_s, RESEND_INTERVAL_MAX_S)  # more orders delay the answers
        self._rearm_resend()

    def _arm_resend(self) -> None:
        self._resend_pause_s = RESEND_INTERVAL_S
        self._rearm_resend()

    def _rearm_resend(self) -> None:
        if self._unsettled or self._proceeding or self.saving.unanswered():
            self._context.timers.start("resend", self._context.now_s + self._resend_pause_s)


TIMERS = ("settle", "notice", "proceed", "writers", "storage", "again", "newest", "grace", "resend")
