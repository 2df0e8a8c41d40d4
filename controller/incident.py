"""One incident, from the first suspicion to a verdict: freeze, settle, select, save, verify, publish.

The core feeds it what concerns it and looks at `verdict` after each event. It never looks back: once a step has been
chosen (`_selected`), there is no way to `IncidentResumed` any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from lastwords.controller.context import SIGINT, IncidentEnded, IncidentResumed, JobContext, Verdict
from lastwords.controller.events import (
    ERROR,
    INFO,
    LESSER_RETRY_S,
    RESEND_INTERVAL_MAX_S,
    RESEND_INTERVAL_S,
    WARNING,
    JobStage,
    LookForNewest,
    NewestKnown,
    Published,
    PublishFailed,
    StorageEvent,
    StorageProgress,
    Verified,
    VerifyBlocked,
    VerifyFailed,
)
from lastwords.controller.membership import Causes, Life, Membership, death_text, signal_text, suspicion_text
from lastwords.controller.saving import Saving
from lastwords.controller.selection import NO_TARGETS, Decision, NoDecision, NoDecisionKind, RankView, laggards, select
from lastwords.controller.words import first_texts, newest_text
from lastwords.errors import ranks_text
from lastwords.vocabulary import (
    DeathSource,
    ExitKind,
    Freeze,
    Phase,
    Proceed,
    Raised,
    Saved,
    SaveFailed,
    SaveProgress,
    Settled,
    Signalled,
    Stand,
)

# What there is to go on from where an incident can save nothing. That is said when it is known, and cannot change.


class Newest:
    """The newest checkpoint, as far as one incident knows.

    It may be on disk before the controller has the answer about it: a periodic one that was complete when the incident
    began. So that is waited for, and then looked for again.
    """

    def __init__(self, context: JobContext, incident: int) -> None:
        self._context = context
        self._incident = incident
        self._looks = 0  # that have not been answered
        self._one_more_comes = False
        self._until_s: float | None = None
        self.known: NewestKnown | None = None

    def search(self) -> None:
        """Order a look; what older ones have found does not count any more."""
        self.known = None
        self._looks += 1
        self._one_more_comes = self._context.publishing
        self._context.emit(LookForNewest(self._incident))

    def on_storage_moved(self) -> None:
        """The work on a periodic checkpoint has come further, perhaps to its end."""
        if self._one_more_comes and not self._context.publishing:
            self.search()

    def on_found(self, found: NewestKnown) -> None:
        """A look has ended; they do in their order."""
        self._looks -= 1
        if not self._looks:
            self.known = found

    def is_awaited(self) -> bool:
        """Whether `known` may change; that is waited for, with the timer "newest", if only for `newest_timeout_s`."""
        context = self._context
        if not self._looks and not context.publishing:
            return False
        if self._until_s is None:
            self._until_s = context.now_s + context.options.newest_timeout_s
            context.timers.set("newest", self._until_s)
        return context.now_s < self._until_s


# What a choice is made from, and whether it is worth waiting for a better one. Pure.


def choose(
    context: JobContext,
    saving: Saving,
    views: Mapping[int, RankView],
    *,
    forgiven: bool = False,
    without: Collection[int] = (),
    back: bool = False,
) -> Decision | NoDecision:
    """The step and its writers; `forgiven`: as if all that may pass had passed; `without`: no such target.

    back: steps that a survivor has ended may be given up for one before.
    """
    targets = [target for target in saving.targets(forgiven=forgiven) if target not in without]
    if not targets:
        return NoDecision(NoDecisionKind.STORAGE, "no directory is left that can be written")
    if forgiven:
        barred = {rank: frozenset(targets) for rank, targets in saving.barred.items()}
        views = {r: replace(view, refused_targets=barred.get(r, NO_TARGETS)) for r, view in views.items()}
    members = context.members
    return select(
        views,
        members.units,
        saving.parts(),
        base_step=members.base_step,
        targets=targets,
        retry_refused=True,
        back=back,
    )


def or_steps_back(
    context: JobContext,
    saving: Saving,
    views: Mapping[int, RankView],
    answer: Decision | NoDecision,
    newest_step: int = 0,
) -> Decision | NoDecision:
    """Where a unit has no holder at the step that survivors have ended: a step before, if all can be had there.

    A rank has left its loop with its gradients not applied, and nobody else holds what it holds (docs/adr/0013), or has
    died, and its copy is of a step before. newest_step: of which there is a checkpoint; an older one would
    be none the better.
    """
    if isinstance(answer, Decision) or answer.kind is NoDecisionKind.NOTHING_TO_SAVE:
        return answer
    lower = choose(context, saving, views, back=True)
    if not isinstance(lower, Decision) or lower.step <= newest_step:
        return answer
    count = answer.step - lower.step
    given_up = "one step is" if count == 1 else f"{count} steps are"
    return replace(lower, reason=f"{lower.reason}; {given_up} given up, since {answer.reason}")


def retry_s(context: JobContext, saving: Saving, views: Mapping[int, RankView], answer: Decision | NoDecision) -> float:
    """For how long refused writers are worth another try before `answer` is carried out; 0.0 if it is as good.

    Where nothing can be saved without them, `storage_retry_s`. Where a lower step can, or the same one without the
    rank-local state of a host, only LESSER_RETRY_S: those who could write it may die meanwhile.
    """
    if not saving.refused:
        return 0.0
    back = not isinstance(answer, Decision)
    better = choose(context, saving, views, forgiven=True, back=back)
    if not isinstance(better, Decision):
        return 0.0
    answer = choose(context, saving, views, back=True) if back else answer
    if not isinstance(answer, Decision):
        return context.options.storage_retry_s
    more = (better.step, -len(better.lost_local_ranks)) > (answer.step, -len(answer.lost_local_ranks))
    return min(context.options.storage_retry_s, LESSER_RETRY_S) if more else 0.0


def files_retry_s(context: JobContext, saving: Saving, views: Mapping[int, RankView]) -> float:
    """For how long the newest attempt's files are worth another try: not long if all can be had in another place."""
    elsewhere = choose(context, saving, views, without=(saving.target,), back=True)
    limit_s = context.options.storage_retry_s
    return (
        min(limit_s, LESSER_RETRY_S) if isinstance(elsewhere, Decision) and elsewhere.step >= saving.step else limit_s
    )


# What selection is told about each rank, out of what the incident knows.


def rank_views(
    membership: Membership,
    saving: Saving,
    settled: Mapping[int, Settled],
    excluded: Mapping[int, str],
) -> dict[int, RankView]:
    """A view of every registered rank. excluded: living ranks that are not waited for any more, and why."""
    views = {}
    for rank, member in membership.members.items():
        stand, absence = None, ""
        if not member.living:
            absence = member.death
        elif rank in excluded:
            absence = excluded[rank]
        elif member.life is Life.ALIVE and rank in settled:
            stand = settled[rank].stand
        refused = frozenset(saving.refused.get(rank, NO_TARGETS))
        may_copy = rank not in saving.cannot_copy
        shared = member.shared if saving.shares else ()
        host_id = member.process.host_id
        copies = frozenset(saving.copies.get(rank, ()))
        views[rank] = RankView(rank, host_id, member.units, stand, absence, refused, may_copy, shared, copies)
    return views


# An incident in a grace period: deadlines that run already are cut, and what the time was not enough for is said.


class GracePeriod:
    """Of one incident; nothing happens without a grace period."""

    def __init__(self, context: JobContext, saving: Saving) -> None:
        self._context = context
        self._saving = saving

    def begin(self, signal_number: int, late: dict[int, float]) -> None:
        """A rank was asked to stop. late: deadlines of ranks of their own."""
        context = self._context
        if signal_number == SIGINT or not context.begin_grace():
            return
        settled_s = context.now_s + context.options.settle_timeout_s
        late.update({rank: min(at_s, settled_s) for rank, at_s in late.items()})
        ends_s = {
            "settle": settled_s,
            "proceed": settled_s,
            "storage": context.now_s + context.options.storage_timeout_s,
        }
        for name in filter(context.timers.running, ends_s):
            context.timers.set_earlier(name, ends_s[name])
        context.timers.set_earlier("suspects", context.now_s)
        self._saving.hurry()

    def more_s(
        self, option: str, overdue: Collection[int], settled: Mapping[int, Settled], excluded: Mapping[int, str]
    ) -> float:
        """What a deadline was cut by, if nothing can be saved without those that have missed it; 0.0 otherwise."""
        context = self._context
        if not context.preempted or not overdue:
            return 0.0
        views = rank_views(context.members, self._saving, settled, {**excluded, **dict.fromkeys(overdue, "is late")})
        answer = choose(context, self._saving, views, back=True)
        return 0.0 if isinstance(answer, Decision) else context.uncut_s(option)

    def missing_text(self, awaited: Collection[int]) -> str:
        """What could not be done in time. awaited: ranks that have not settled."""
        saving = self._saving
        match self._context.state:
            case JobStage.SAVING:
                what = f"{ranks_text(saving.writing)} had not finished writing step {saving.step}"
            case JobStage.VERIFYING:
                what = f"the files of step {saving.step} were being verified"
            case JobStage.PUBLISHING:
                what = f"step {saving.step} was about to get its final name; `lastwords latest` says whether it has"
            case _:
                what = f"{ranks_text(awaited)} had not stopped" if awaited else saving.storage_reason
        return f"the grace period of {self._context.options.preemption_grace_s:g} s is over: {what}"


# What one incident consists of, and what is said of it. Pure.

NOTICE_S = 3.0
"""From the beginning of an incident until people are told for whom all wait; ranks settle within milliseconds."""


class IncidentState:
    """The facts of one incident, and the queries on them."""

    def __init__(self, context: JobContext, number: int) -> None:
        self._context = context
        self.number = number
        self.causes = Causes()
        self.verdict: Verdict | None = None
        self.excluded: dict[int, str] = {}  # living ranks that are not waited for any more, and why
        self.opened = False  # everybody has been told
        self._first_words = ""
        self._settled: dict[int, Settled] = {}
        self._unsettled: set[int] = set()
        self._late: dict[int, float] = {}  # ranks that are awaited since later -> their own deadline
        self._awaited: set[int] = set()  # laggards that were waited for: once each
        self._proceeding: dict[int, float] = {}  # rank -> deadline
        self._proceed_step = 0
        self._selected = False
        self.saving = Saving(context, number)
        self._grace_period = GracePeriod(context, self.saving)
        self._told = ""
        self._resend_pause_s = RESEND_INTERVAL_S
        self.newest = Newest(context, number)

    def words(self) -> str:
        """Why this incident is on, for people."""
        return self.causes.text() or self._first_words

    def _proceed(self) -> Proceed:
        return Proceed(self._context.generation, self.number, self._proceed_step)

    @property
    def _awaited_ranks(self) -> set[int]:
        members = self._context.members
        silent = members.suspects - self.excluded.keys()
        return silent | (self._unsettled & members.living) | self._proceeding.keys()

    def _tell_for_whom_all_wait(self) -> None:
        context, members = self._context, self._context.members
        silent = members.suspects - self.excluded.keys()
        awaited = self._awaited_ranks
        if not awaited or context.state not in (JobStage.SETTLING, JobStage.PROCEEDING):
            return
        who = first_texts(
            (f"rank {rank} (process {members.members[rank].process.pid})" for rank in sorted(awaited)), ", "
        )
        why = "no answer, as of a process that is stopped" if silent else "in an update, or hanging"
        words = f"{self.words()}; all ranks wait for {who}, for {context.longest_wait_s(silent):.0f} s at most: {why}"
        context.tell_people(words, about=awaited)


class Incident(IncidentState):
    """The course of one incident; `context.state` says which stage it is in."""

    # ------------------------------------------------------------------ how it starts

    def open(self, words: str) -> None:
        """Freeze everybody. Call it when the cause has been noted."""
        self._context.state = JobStage.SETTLING
        self.opened = True
        self._first_words = words
        self._context.log(WARNING, f"incident {self.number}: {self.words()}; every rank is ordered to stop")
        self._context.timers.set("notice", self._context.now_s + NOTICE_S)
        self._unsettled = set(self._context.members.living)
        self._send_freeze(self._unsettled)
        self._arm_resend()
        self.newest.search()
        self.advance()

    def _send_freeze(self, ranks: Iterable[int]) -> None:
        order = Freeze(self._context.generation, self.number, self.words())
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
        if (
            not self.opened
            or self.verdict is not None
            or self._context.state not in (JobStage.SETTLING, JobStage.PROCEEDING)
        ):
            return
        if any(rank not in self.excluded for rank in self._context.members.suspects):
            return
        if not self._context.certain:
            self.verdict = IncidentResumed()
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
            context.state = JobStage.PROCEEDING
            self._proceed_step = decision.step
            deadline_s = context.now_s + context.options.settle_timeout_s
            for rank in decision.proceed:
                self._proceeding[rank] = deadline_s
                context.send(rank, self._proceed())
            context.timers.set("proceed", deadline_s)
            self._arm_resend()
            return
        context.state = JobStage.SAVING
        self.saving.begin(decision)
        self._arm_resend()
        self._verify_if_written()

    # ------------------------------------------------------------------ save

    def on_progress(self, report: SaveProgress) -> None:
        """A writer moves."""
        self.saving.progress(report)

    def on_saved(self, report: Saved) -> None:
        """A writer has finished."""
        if self.saving.finish(report.rank, report.attempt, report.step):
            self._verify_if_written()

    def on_failed(self, report: SaveFailed) -> None:
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
        self._context.state = JobStage.PROCEEDING if self._proceeding else JobStage.SETTLING
        self._await(set())
        self.advance()

    def _verify_if_written(self) -> None:
        if self._context.state is JobStage.SAVING and not self.saving.writing:
            self._context.state = JobStage.VERIFYING
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
            case StorageProgress() if state in (JobStage.VERIFYING, JobStage.PUBLISHING):
                self._await_storage()
            case Verified() if state is JobStage.VERIFYING:
                self._publish()
            case VerifyFailed(problems=problems) if state is JobStage.VERIFYING:
                self._reject(problems)
            case VerifyBlocked(reason=reason) if state is JobStage.VERIFYING:
                self._on_blocked(f"the files could not be read back: {reason}")
            case PublishFailed(reason=reason) if state is JobStage.PUBLISHING:
                self._on_blocked(f"the checkpoint is complete but could not be renamed to its final name: {reason}")

    def _on_blocked(self, words: str) -> None:
        """The file system did not let the controller do it; perhaps later it does."""
        views = rank_views(self._context.members, self.saving, self._settled, self.excluded)
        if not self.saving.tries_files_later(words, files_retry_s(self._context, self.saving, views)):
            self._give_up_target(words)

    def _publish(self) -> None:
        self._context.state = JobStage.PUBLISHING
        self._await_storage()
        doubts = {rank: report.doubts for rank, report in self._settled.items() if report.doubts}
        self.saving.start_publish(self.words(), self.causes.ranks, doubts)

    def _reject(self, problems: tuple[tuple[int, str], ...]) -> None:
        self._context.timers.clear("storage")
        self.saving.reject(problems)
        self._context.log(ERROR, f"incident {self.number}: verification failed: {self.saving.storage_reason}")
        self._choose_again()

    def _on_published(self, attempt: int, path: str) -> None:
        if self.verdict is None and self.saving.was_publishing(attempt):  # perhaps late, but there it is
            step = self.saving.published_step(attempt)
            self.saving.discard_all(published_attempt=attempt)
            self.verdict = IncidentEnded(
                ExitKind.SAVED, step, path, "; ".join(filter(None, (self.words(), self._again(step))))
            )

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
        self.verdict = IncidentEnded(kind, 0, "", "; ".join(filter(None, (reason, self.saving.keep_finished()))))

    # ------------------------------------------------------------------ time

    def on_timer(self, name: str) -> None:
        """One of this incident's timers is due."""
        within = f"within {self._context.options.settle_timeout_s:g} s"
        match name:
            case "settle" if self._context.certain and self._context.state in (JobStage.SETTLING, JobStage.PROCEEDING):
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
                what = "verification" if self._context.state is JobStage.VERIFYING else "publication"
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
        if self._context.state in (JobStage.VERIFYING, JobStage.PUBLISHING):
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
