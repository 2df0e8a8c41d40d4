"""Periodic checkpoints: ordered ahead of their step, copied between two steps, written behind the training.

All ranks are told the step in time, so that each copies its own state when it has ended that step, without a word to
the others. A rank that is past the step by then says so, and another step is chosen: for a checkpoint that is due after
so many steps their next multiple, for one that is due at a time a later one. One is under way at a time; what becomes
due meanwhile waits, or is left out. Nothing here stops the training, and a failure is said once.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from lastwords.controller.context import JobContext
from lastwords.controller.events import (
    INFO,
    WARNING,
    Discard,
    JobStage,
    PartPlan,
    Prune,
    Published,
    PublishFailed,
    StartPublish,
    StartVerify,
    StorageEvent,
    Verified,
    VerifyBlocked,
    VerifyFailed,
)
from lastwords.controller.membership import Life, Member
from lastwords.controller.selection import Assignment
from lastwords.controller.words import first_texts
from lastwords.errors import ranks_text
from lastwords.vocabulary import (
    NO_SCHEDULE,
    PERIODIC,
    SHARES_MAX,
    Save,
    Saved,
    SaveFailed,
    SaveProgress,
    Schedule,
    Share,
)

AHEAD_STEPS_MAX: Final = 4096
"""So far ahead of the newest known step is one chosen, at most, where ranks have been past those before it."""

TARGET: Final = 0


class Periodic:
    """The one checkpoint under way, and when the next one is due. Idle during an incident."""

    TIMERS = ("checkpoint", "behind")

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._schedule = NO_SCHEDULE
        self._begun = False
        self._wanted = False  # one is due now
        self._asked_for = False  # the one under way is no multiple of the schedule's steps: it was wanted
        self._ahead_steps = 1
        self._ended = 0  # newest step that some rank has ended, as far as wishes and answers to orders say
        self._troubled = False  # the newest one failed, and that has been said
        self._whole = False  # shares of one unit have not fitted together
        self.attempt = 0
        self._step = 0
        self._orders: dict[int, Save] = {}  # of the checkpoint under way, by rank
        self._missing: set[int] = set()  # ranks whose parts are not finished
        self._bytes: dict[int, int] = {}  # of the parts that have begun
        self._syncing = False  # a writer was inside fsync or the like, or copies after the loop
        self._newest_step = 0  # of which there is a checkpoint: published, or resumed from
        self._left_at: int | None = None  # all ranks have left the loop after this step, and wait for it
        self._stage: StartVerify | StartPublish | None = None

    # ------------------------------------------------------------------ when

    def begin(self, schedule: Schedule) -> None:
        """The loop begins."""
        self._begun, self._schedule = True, schedule
        self._newest_step = max(self._newest_step, self._context.members.start_step)
        self._rearm()
        self.order_next()

    def want(self, after_step: int) -> None:
        """A checkpoint of a step after `after_step` is wanted, scheduled or not; an order for a later one yields.

        An order under way is enough if it is of such a step and no later, or of the last one once all have left: ranks
        may ask all at once, and go on asking when it is published."""
        if after_step < self._newest_step:
            return
        self._ended = max(self._ended, after_step)
        if self._orders and (after_step < self._step <= self._next_step or self._step == self._left_at):
            self._asked_for = True
            return
        self._wanted = True
        if not self._bytes and self._step > self._next_step:
            self._drop()
        self.order_next()

    @property
    def newest(self) -> Discard | None:
        """The newest checkpoint that was ordered, as what would remove what is left of it."""
        return Discard(PERIODIC, self.attempt, self._step, TARGET) if self.attempt else None

    @property
    def wanted(self) -> bool:
        """Whether one that was asked for, or is due at a time, still has to be written by whoever follows.

        One that is being published counts, too: whoever follows cannot know whether it has its name already, and a
        second one of that step, or of a later one, costs less than none.
        """
        return self._wanted or (self._asked_for and bool(self._orders))

    def follow(self, newest: Discard | None, *, wanted: bool) -> None:
        """Go on after a controller that was killed: what it had ordered is given up, whatever has become of it.

        wanted: one is ordered in its place once all ranks are back."""
        self._wanted = wanted
        if newest is not None:
            self.attempt, self._step = newest.attempt, newest.step
            self._context.emit(newest)

    def interrupt(self) -> None:
        """An incident: parts that are being written will not be finished. What is complete is published all the same.

        Should it be a false alarm, the step can still be had where nobody is past it."""
        if self._orders and self._stage is None:
            self._wanted |= self._asked_for
            self._drop()

    def holds_release(self, step: int) -> bool:
        """All ranks have left the loop at `step`: whether they have to stay until a checkpoint is written.

        One that was asked for and that no step came after is of this step: nothing of it moves any more. If there is
        one of this step, that is what it asked for: resumed from it, say, it would be exact, and the new one would not.
        """
        if self._orders and self._step > step:
            self._wanted |= self._asked_for
            self._drop()
        if self._wanted and not self._orders and self._newest_step == step:
            self._wanted = False
            self._context.log(INFO, f"step {step} is not written again: there is a checkpoint of it already")
        if self._wanted and not self._orders:
            self._order_last(step)
        if self._orders:
            self._context.timers.start("behind", self._due_s())
        self._left_at = step if self._orders or self._wanted else None
        return self._left_at is not None

    def _order_last(self, step: int) -> None:
        """Order one of a step that all have left the loop at. A rank in doubt returns, or will count as dead."""
        self._order(step)
        members = self._context.members
        if self._wanted and members.dead:
            self._wanted = False
            dead = (f"rank {rank} {members.members[rank].death}" for rank in sorted(members.dead))
            self._say_not_written(step, first_texts(dead))

    @property
    def holds_no_more(self) -> bool:
        """Whether the checkpoint that the ranks have waited for is over, or may be ordered now."""
        return self._left_at is not None and not self._orders

    def order_next(self) -> None:
        """Order the next checkpoint, unless one is under way already or everybody is leaving."""
        context = self._context
        if not self._begun or self._orders or context.state is not JobStage.WATCHING or context.members.anyone_left:
            return
        if self._wanted:
            self._order(self._next_step)
        elif every := self._schedule.steps:
            self._order(-(-self._next_step // every) * every)

    @property
    def _next_step(self) -> int:
        """The first one for which an order should come in time."""
        return max(self._context.members.reached + self._ahead_steps, self._ended + 1)

    def on_timer(self, name: str) -> None:
        """`checkpoint`: one is due. `behind`: writers show no progress."""
        if name == "checkpoint":
            self._rearm()
            if not self._context.members.anyone_left:
                self.want(max(self._context.members.reached, self._newest_step))
        elif self._orders:
            who = ranks_text(self._missing) if self._missing else "the controller"
            self._give_up(f"{who} made no progress")

    def _rearm(self) -> None:
        if self._schedule.seconds:
            self._context.timers.set("checkpoint", self._context.now_s + self._schedule.seconds)

    # ------------------------------------------------------------------ writing

    def _order(self, step: int) -> None:
        members = self._context.members.members
        if any(member.life is not Life.ALIVE for member in members.values()):
            return
        self._wanted, self._asked_for, self._step = False, self._wanted, step
        self.attempt += 1
        for rank, share in shares(members.values(), whole=self._whole).items():
            order = self._orders[rank] = Save(
                generation=self._context.generation,
                incident=PERIODIC,
                attempt=self.attempt,
                step=step,
                units=share.units,
                local_ranks=share.local_ranks,
                target=TARGET,
                reason="a periodic checkpoint is due",
            )
            self._context.send(rank, order)
        self._missing = set(self._orders)

    def catch_up(self, rank: int) -> None:
        """A rank has a new session: an order may have been lost with the old one."""
        if rank in self._missing:
            self._context.send(rank, self._orders[rank])

    def on_progress(self, report: SaveProgress) -> None:
        """A rank has the order, or has copied its state and is writing."""
        if self._expects(report.rank, report.attempt):
            syncing, self._syncing = self._syncing, self._syncing or report.syncing
            if report.bytes_written > self._bytes.get(report.rank, 0) or self._syncing is not syncing:
                self._note(report.rank, report.bytes_written)

    def on_status(self, rank: int) -> None:
        """A rank has moved: past the step, it has copied what it was told to, and should soon be heard of."""
        if rank in self._missing and self._owes(rank):
            self._context.timers.start("behind", self._due_s())

    def on_saved(self, report: Saved) -> None:
        """A part is on disk."""
        if self._comes_late(report):
            return
        if not self._expects(report.rank, report.attempt) or report.step != self._step:
            return
        self._missing.discard(report.rank)
        if not self._missing:
            self._enter(StartVerify(PERIODIC, self.attempt, self._step, TARGET, self._parts()))
        self._note(report.rank, report.bytes_written)

    def on_failed(self, report: SaveFailed) -> None:
        """A rank has no part of this checkpoint."""
        if not report.missed and self._comes_late(report):
            return
        if not self._expects(report.rank, report.attempt):
            return
        self._ended = max(self._ended, self._step)
        if not report.missed or self._step == self._left_at:
            self._give_up(f"rank {report.rank}: {report.reason}")
            return
        self._wanted |= self._asked_for
        self._ahead_steps = min(2 * self._ahead_steps, AHEAD_STEPS_MAX)
        self._drop()
        self.order_next()

    def _comes_late(self, report: Saved | SaveFailed) -> bool:
        """Whether it is of a checkpoint that was given up before: its writer may have made the directory anew since, or
        kept it from being removed, so that is removed once more."""
        late = report.attempt < self.attempt or not self._orders
        if late:
            self._context.emit(Discard(PERIODIC, report.attempt, report.step, TARGET))
        return late

    def on_death(self, rank: int) -> None:
        """A rank has gone without an incident: all are done with their steps."""
        if rank in self._missing:
            self._give_up(f"rank {rank} {self._context.members.members[rank].death}")

    def _expects(self, rank: int, attempt: int) -> bool:
        return attempt == self.attempt and rank in self._missing

    def _note(self, rank: int, bytes_written: int) -> None:
        self._bytes[rank] = bytes_written
        self._ended = max(self._ended, self._step)
        self._await()

    def _owes(self, rank: int) -> bool:
        """Whether a rank has its copy. One that is still at the step may take as long as the step takes."""
        member = self._context.members.members[rank]
        return rank in self._bytes or member.stand.ended_step > self._step or member.left is not None

    def _await(self) -> None:
        """Progress: wait anew, if it is for something that should not take long."""
        self._context.timers.clear("behind")
        if self._stage is not None or any(map(self._owes, self._missing)):
            self._context.timers.set("behind", self._due_s())

    def _due_s(self) -> float:
        options = self._context.options
        if self._stage is not None:
            return self._context.now_s + options.storage_timeout_s
        return self._context.now_s + (options.sync_timeout_s if self._syncing else options.progress_timeout_s)

    def _parts(self) -> tuple[PartPlan, ...]:
        ordered = sorted(self._orders.items())
        return tuple(PartPlan(rank, self.attempt, order.units, order.local_ranks) for rank, order in ordered)

    # ------------------------------------------------------------------ files

    def on_storage(self, event: StorageEvent) -> None:
        """An answer about the finished files."""
        if self._stage is None or event.attempt != self.attempt:
            return
        self._await()
        match event:
            case Verified() if isinstance(self._stage, StartVerify):
                stage = self._stage
                self._enter(
                    StartPublish(
                        incident=PERIODIC,
                        attempt=stage.attempt,
                        step=stage.step,
                        target=stage.target,
                        parts=stage.parts,
                        reason="a periodic checkpoint",
                        cause_ranks=(),
                        dead_ranks=(),
                        lost_local_ranks=(),
                    )
                )
            case Published(path=path):
                self._published(path)
            case VerifyFailed(problems=problems):
                self._whole |= any(rank not in self._orders for rank, _ in problems)
                self._give_up(first_texts(f"part of rank {rank}: {text}" for rank, text in problems))
            case VerifyBlocked(reason=reason) | PublishFailed(reason=reason):
                self._give_up(reason)
            case _:
                pass  # StorageProgress

    def _enter(self, stage: StartVerify | StartPublish) -> None:
        self._stage = stage
        self._context.publishing = True
        self._context.emit(stage)

    def _published(self, path: str) -> None:
        written = sum(self._bytes.values())
        self._context.log(INFO, f"checkpoint of step {self._step}: {written / 1e6:.1f} MB in {path}")
        self._troubled, self._newest_step = False, self._step
        self._ahead_steps = max(1, self._ahead_steps // 2)
        self._forget()
        if self._schedule.keep_max or self._schedule.keep_minutes:
            self._context.emit(Prune(self._schedule.keep_max, self._schedule.keep_minutes))
        self.order_next()

    def _give_up(self, why: str) -> None:
        self._say_not_written(self._step, why)
        self._drop()
        self.order_next()

    def _say_not_written(self, step: int, why: str) -> None:
        """In the output of a rank, too, until one is written again."""
        text = f"the periodic checkpoint of step {step} was not written: {why}"
        text += "" if self._context.members.everyone_left else "; training continues"
        if self._troubled:
            self._context.log(INFO, text)
        else:
            self._context.tell_people(text, level=WARNING)
        self._troubled = True

    def _drop(self) -> None:
        if self._orders:
            self._context.emit(Discard(PERIODIC, self.attempt, self._step, TARGET))
        self._forget()

    def _forget(self) -> None:
        self._context.timers.clear("behind")
        self._orders, self._missing, self._bytes, self._syncing, self._stage = {}, set(), {}, False, None
        self._context.publishing = False


def shares(members: Collection[Member], *, whole: bool = False) -> dict[int, Assignment]:
    """Who writes what: each rank its own rank-local state, each unit the holders that have the fewest yet.

    A large unit is shared out among up to SHARES_MAX holders, unless units are to be written `whole`.
    """
    units: dict[int, list[str]] = {member.rank: [] for member in members}
    holders: dict[str, list[Member]] = {}
    for member in members:
        for unit in member.units:
            holders.setdefault(unit, []).append(member)
    for unit, having in sorted(holders.items()):
        shared = not whole and all(unit in member.shared for member in having)
        ranks = sorted((member.rank for member in having), key=lambda rank: (len(units[rank]), rank))
        count = min(len(ranks), SHARES_MAX) if shared else 1
        for rank, share in zip(ranks, Share(unit, 0, count).all, strict=False):
            units[rank].append(str(share))
    return {rank: Assignment(tuple(units[rank]), (rank,)) for rank in sorted(units)}
