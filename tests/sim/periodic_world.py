"""A timed world with periodic checkpoints: writers behind the training, and one queue of files for each directory."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lastwords.controller import events as to_controller
from lastwords.processor.events import SaveProgressed
from lastwords.vocabulary import Order, Report, Save, SaveWanted, Status
from tests.sim.behind import FilesJob, comes_too_late, files_done, is_of_none, writes
from tests.sim.ledger import Life
from tests.sim.periodic_schedule import Behind
from tests.sim.schedule import Fault, Plan
from tests.sim.timed import HORIZON_S, TimedWorld
from tests.sim.world import At, Trainer

_PASSED = (At.READY, At.GATE, At.END, At.LEFT)
"""Places at which the time to copy the step that has ended is over."""


@dataclass(slots=True)
class Record:
    """What became of the periodic checkpoints. Written by the world; times are seconds."""

    ordered: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Attempt -> its step, and when."""
    over_s: dict[int, float] = field(default_factory=dict)
    """Attempt -> when it was published or given up."""
    published: dict[int, float] = field(default_factory=dict)
    """Step -> when."""
    missed: set[int] = field(default_factory=set)
    """Attempts of which a rank was told when it was past the step."""
    busy: set[int] = field(default_factory=set)
    """Attempts that a rank could not copy because a cancelled writer had not stopped yet."""
    passed_s: dict[int, float] = field(default_factory=dict)
    """Step -> when the first rank could not be copied at it any more."""
    wanted: list[tuple[float, int]] = field(default_factory=list)
    """When the controller has heard that a rank asks, and the step that this rank had ended when it first asked."""
    left_over: list[tuple[int, int]] = field(default_factory=list)
    """Attempt, rank of parts that are still in a temporary directory at the end."""
    newest: tuple[int, str] | None = None
    """Step and name of the newest checkpoint that could be seen when an incident ended without one."""
    reason: str = ""
    """What was said at that end."""
    began_s: float = math.inf
    left_s: float = 0.0


class PeriodicWorld(TimedWorld):
    """`behind`: how the checkpoints go; everything else is the plan's."""

    def __init__(self, plan: Plan, behind: Behind, **others: Any) -> None:
        super().__init__(plan, **others)
        self.behind = behind
        self.record = Record()
        self.periodic_stage = ""
        self.failing = dict(behind.failing)
        self.blocked = behind.blocked
        self.line_free_s = dict.fromkeys((0, 1), 0.0)
        of_looks = random.Random(plan.seed ^ 0x51EE7)
        self.look_s = of_looks.choice((0.001, 0.02, 0.2))
        self.told_s = 0.0 if behind.quiet else of_looks.choice((0.0, 0.0, 0.05, 0.5))
        """From the instant at which a checkpoint has its name until the controller hears of it."""

    def _plan_troubles(self) -> None:
        super()._plan_troubles()
        for at_s, rank in self.behind.wants:
            self.after(at_s, self._want, self.trainers[rank])

    def _want(self, trainer: Trainer) -> None:
        if trainer.record.life is Life.ALIVE and trainer.core.loop_open and trainer.linked:
            self.tell_of(trainer, "wants a checkpoint")
            trainer.core.want_save()
            self.drain(trainer)

    # ------------------------------------------------------------------ ranks

    def on_moved(self, trainer: Trainer) -> None:
        super().on_moved(trainer)
        record = self.record
        if trainer.at in _PASSED:
            record.passed_s.setdefault(trainer.record.ended, self.now_s)
        if trainer.at is At.FORWARD:
            record.began_s = min(record.began_s, self.now_s)
        elif trainer.at is At.LEFT:
            record.left_s = self.now_s
            self.after_in(trainer, 0.1 * self.luck.random(), self._status, trainer)
            if all(other.at is At.LEFT for other in self.trainers):
                self.on_periodic("held")

    def _status(self, trainer: Trainer) -> None:
        if trainer.linked:
            self.send_up(trainer, Status(trainer.rank, self.job.generation, trainer.core.stand))

    def _arrive_down(self, trainer: Trainer, session: int, order: Order) -> None:
        if isinstance(order, Save) and is_of_none(order) and comes_too_late(trainer, order):
            self.record.missed.add(order.attempt)
        super()._arrive_down(trainer, session, order)

    def hear(self, session: int, report: Report) -> None:
        in_time = self.controller.outcome is None and self.bound.get(report.rank) == session
        if isinstance(report, SaveWanted) and in_time:
            self.record.wanted.append((self.now_s, report.after_step))
        super().hear(session, report)

    def on_writer_started(self, trainer: Trainer) -> None:
        order = trainer.writer.order if trainer.writer is not None else None
        assert order is not None
        self.tell_of(trainer, f"begins to write its copy of step {order.step}")
        rank, luck = trainer.rank, self.luck
        if rank in self.behind.hanging or rank in self.plan.hanging:
            return
        written_s = 0.002 + self.behind.write_s * luck.random()
        failure = "no space left on device" if (rank, order.target) in self.plan.refused else ""
        if not failure and self.failing.get(rank):
            self.failing[rank] -= 1
            failure = "input/output error"
        if luck.random() < 0.3:
            self.after_in(trainer, 0.5 * written_s, self._write_on, trainer, order)
        self.after_in(trainer, written_s, self._written_behind, trainer, order, failure)

    def _write_on(self, trainer: Trainer, order: Save) -> None:
        if trainer.writer is not None and trainer.writer.order is order and not trainer.writer.cancelled:
            self.feed(trainer, SaveProgressed(0, order.attempt, 50, self.luck.random() < 0.3))

    def on_copy_refused(self, trainer: Trainer, order: Save) -> None:
        assert trainer.writer is not None
        if trainer.writer.cancelled:
            self.record.busy.add(order.attempt)

    def on_writer_cancelled(self, trainer: Trainer) -> None:
        if trainer.rank not in self.behind.hanging | self.plan.hanging and trainer.writer is not None:
            stops_s = self.behind.stops_s * self.luck.random()
            self.after_in(trainer, stops_s, self._written_behind, trainer, trainer.writer.order, "")

    def _written_behind(self, trainer: Trainer, order: Save, failure: str) -> None:
        if trainer.writer is not None and trainer.writer.order is order:
            self.tell_of(trainer, f"ends writing its copy of step {order.step} {failure}")
            writes(self, trainer, failure)

    # ------------------------------------------------------------------ files

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        if delay_s < HORIZON_S:  # what hangs never comes
            super().after(delay_s, action, *arguments)

    def in_line(self, target: int, delay_s: float) -> float:
        """One job after the other in each directory; how long until this one is done."""
        free_s = self.line_free_s[target] = max(self.now_s, self.line_free_s[target]) + delay_s
        return free_s - self.now_s

    def on_periodic_files(self, effect: FilesJob) -> None:
        verifies = isinstance(effect, to_controller.StartVerify)
        hangs = self.plan.hanging_verify if verifies else self.plan.hanging_publish
        late_s = self.troubles.late_verify_s if verifies else self.troubles.late_publish_s
        delay_s = self.in_line(effect.target, math.inf if hangs else 0.001 + self.behind.storage_s + late_s)
        self.after(delay_s, self._files_done, effect)

    def _files_done(self, effect: FilesJob) -> None:
        if self._controller_is_busy(self._files_done, effect) or not self.controller_lives:
            return
        failure = "Stale file handle" if self.blocked else ""
        self.blocked -= bool(failure)
        self.tell("disk", f"work on the checkpoint of step {effect.step} is done {failure}")
        files_done(self, effect, failure)

    def on_look(self, effect: to_controller.LookForNewest) -> None:
        self.after(0.5 * self.look_s, self._look, effect)

    def _look(self, effect: to_controller.LookForNewest) -> None:
        self.after(0.5 * self.look_s, self._tell_newest, to_controller.NewestKnown(effect.incident, *self.newest()))

    def _tell_newest(self, found: to_controller.NewestKnown) -> None:
        if not self._controller_is_busy(self._tell_newest, found):
            self.tell("controller", f"hears that the newest checkpoint is {found.path or 'none'}")
            self.feed_controller(found)

    def tell_published(self, effect: to_controller.StartPublish) -> None:
        if not self._controller_is_busy(self.tell_published, effect):
            super().tell_published(effect)

    def _carry_out_all(self, effects: list[to_controller.Effect]) -> None:
        had_ended = self.record.newest is not None
        super()._carry_out_all(effects)
        outcome = self.controller.outcome
        if not had_ended and outcome is not None and outcome.kind is to_controller.OutcomeKind.NOT_SAVED:
            self.record.newest, self.record.reason = self.newest(), outcome.reason

    def _close_books(self) -> None:
        super()._close_books()
        attempts = [(attempt, files) for (_, _, incident, attempt), files in self.disk.attempts.items() if not incident]
        self.record.left_over = sorted((attempt, rank) for attempt, files in attempts for rank in files)

    def discard(self, effect: to_controller.Discard) -> None:
        if not effect.incident:
            self.record.over_s.setdefault(effect.attempt, self.now_s)
            self.periodic_stage = ""
        if self.line_free_s[effect.target] <= self.now_s:
            super().discard(effect)
        else:
            self.after(self.line_free_s[effect.target] - self.now_s, super().discard, effect)

    def on_published(self, effect: to_controller.StartPublish) -> None:
        self.record.over_s.setdefault(effect.attempt, self.now_s)
        self.record.published[effect.step] = self.now_s
        self.periodic_stage = ""
        self.after(self.told_s, self.tell_published, effect)

    # ------------------------------------------------------------------ stages and faults

    def send_down(self, rank: int, order: Order) -> None:
        if isinstance(order, Save) and is_of_none(order):
            self.record.ordered.setdefault(order.attempt, (order.step, self.now_s))
        super().send_down(rank, order)

    def on_periodic(self, stage: str) -> None:
        if stage != self.periodic_stage:
            self.periodic_stage = stage if stage != "held" else self.periodic_stage
            self.tell("controller", f"a periodic checkpoint: {stage}")
            for fault in self.stage_faults.pop(stage, ()):
                self.after(fault.trigger.delay_s, self.strike, fault)

    def strike(self, fault: Fault) -> None:
        if fault.kind == "kill_behind":
            writers = tuple(trainer.rank for trainer in self.trainers if trainer.writer is not None)
            self.tell("fault", f"one of {writers} is killed")
            self._kill_ranks((self.dice.choice(writers),) if writers else fault.ranks)
        else:
            super().strike(fault)

    def _kill_ranks(self, ranks: tuple[int, ...]) -> None:
        if self.periodic_stage and any(self.trainers[rank].record.life is Life.ALIVE for rank in ranks):
            self.deaths[f"periodic: {self.periodic_stage}"] += 1
        super()._kill_ranks(ranks)
