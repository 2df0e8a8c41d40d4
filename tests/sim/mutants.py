"""Deliberately broken rules. Each differs from the shipped cores in one rule, and some checker has to see it.

A mutant is a set of replacements inside the shipped modules, so that what it leaves alone is the shipped code. If a
name that a mutant replaces disappears, applying it fails: a mutant can never turn into the shipped code unnoticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from lastwords.controller import core as controller_core
from lastwords.controller import selection
from lastwords.controller.context import IncidentResumed
from lastwords.controller.core import ControllerCore
from lastwords.controller.events import JobStage
from lastwords.controller.incident import Incident
from lastwords.controller.membership import Life
from lastwords.processor.core import ProcessorCore
from lastwords.vocabulary import Phase, Settled
from tests.sim import world


@dataclass(frozen=True, slots=True)
class Mutant:
    """rule: what is broken, in words. patches: full name -> replacement. caught_by: checkers one of which must see it.

    small: the exhaustive exploration of this job (of `tests.sim.small_jobs`) must see it as well.
    seeds: schedules that have caught it; `python -m tests.sim.run --seed 1 --count 8000 --mutant NAME` finds others.
    """

    rule: str
    patches: Mapping[str, Any]
    caught_by: tuple[str, ...]
    small: str = ""
    seeds: tuple[int, ...] = ()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The cores have the broken rule inside this block."""
        with contextlib.ExitStack() as stack:
            for name, replacement in self.patches.items():
                if name == "_HANDLERS":
                    stack.enter_context(mock.patch.dict(controller_core._HANDLERS, replacement))
                else:
                    stack.enter_context(mock.patch(name, replacement))
            yield


_INCIDENT = "lastwords.controller.incident.Incident"
_SAVING = "lastwords.controller.saving.Saving"
_PROCESSOR = "lastwords.processor.core.ProcessorCore"
_PART = "lastwords.processor.participation.Participation"
_SELECTION = "lastwords.controller.selection"

_shipped_carry_out: Callable[..., None] = Incident._carry_out
_shipped_on_return: Callable[..., None] = Incident.on_return
_shipped_mark_ready: Callable[..., None] = ProcessorCore.mark_ready
_shipped_mark_gate_failed: Callable[..., None] = ProcessorCore.mark_gate_failed
_shipped_assign_shares = selection._assign_shares
_shipped_try_update: Callable[..., bool] = ProcessorCore.try_update


def _carry_out_the_dead_ranks_step(self: Any, decision: Any) -> None:
    members = self._context.members.members.values()
    dead = [member.stand.begun_step for member in members if member.life is Life.DEAD]
    _shipped_carry_out(self, dataclasses.replace(decision, step=max([decision.step, *dead])))


def _publish_at_once(self: Any) -> None:
    if self._context.state is JobStage.SAVING and not self.saving.writing:
        self._context.state = JobStage.PUBLISHING
        self.saving.start_publish(self.words(), self.causes.ranks, {})


def _resume_after_select(self: Any, rank: int, *, was_dead: bool) -> None:
    if self._selected and self.verdict is None:
        self.verdict = IncidentResumed()
    else:
        _shipped_on_return(self, rank, was_dead=was_dead)


def _accept_any_settled(self: ControllerCore, member: Any, report: Settled) -> None:
    if self._incident is not None:
        self._incident.on_settled(dataclasses.replace(report, incident=self._incident.number))


def _ended_steps_the_least_first(survey: Any) -> list[int]:
    return sorted({view.stand.ended_step for view in survey.usable})


def _mark_ready_and_check(self: Any) -> None:
    _shipped_mark_ready(self)
    self.checked = not self.frozen and not self.leaving


def _update_as_checked_before(self: Any) -> bool:
    if getattr(self, "checked", False):
        self.checked = False
        self.phase = Phase.UPDATING
        return True
    return _shipped_try_update(self)


def _settle_whatever_happens(self: Any) -> None:
    if self._part.incident and not self.leaving:
        self._part.settle(self.stand)


def _give_the_gradients_up(self: Any, text: str) -> None:
    _shipped_mark_gate_failed(self, text)
    if self.phase is Phase.READY:
        self.phase = Phase.COMPUTING


def _update_if_still_ready(self: Any) -> bool:
    return self.phase is Phase.READY and _shipped_try_update(self)


def _give_up_at_once(self: Any, words: str) -> None:
    self._give_up_target(words)


def _discard_finished(self: Any) -> str:
    self._spared.clear()
    self.discard_all()
    return ""


def _as_the_clock_says(self: Any, now_mono_s: float) -> float:
    self._seen_mono_s = now_mono_s
    return now_mono_s


def _nobody(self: Any) -> list[tuple[int, str]]:
    return []


def _ignored(*_: Any) -> bool:
    return False


def _always(*_: Any) -> bool:
    return True


def _content_with_one_share(survey: Any, draft: Any, unit: str, kept: Any) -> set[int] | None:
    return set() if kept else _shipped_assign_shares(survey, draft, unit, kept)


def _keep_one_copy(self: Any) -> None:
    self.record.whole = ()


def _whole_behind_the_gate(self: Any, place: int) -> None:
    if place == world.BEHIND_GATE and self.filling is not None:
        self.record.whole += (self.filling,)
        self.filling = None


def _any_copy(survey: Any, unit: str, step: int) -> list[Any]:
    every = {view.host_id for view in survey.views.values() if unit in view.units and view.copies}
    return [view for host in sorted(every) for view in survey.by_host.get(host, ())]


def _whichever_copy(self: Any, trainer: Any, unit: str, step: int) -> int | None:
    owner = next(rank for rank, units in enumerate(self.job.units) if unit in units)
    return next((content for _, content in reversed(self.trainers[owner].record.whole)), None)


MUTANTS: Mapping[str, Mutant] = {
    "one-copy": Mutant(
        "a rank has room for one whole copy, which it writes over at each step's end",
        {"tests.sim.world.Trainer.begin_copy": _keep_one_copy},
        ("i3_what_can_be_saved_is_saved",),
        seeds=(1000008, 1000052, 1000088),
    ),
    "whole-behind-the-gate": Mutant(
        "a copy is whole before the next update, but not before its gate",
        {"tests.sim.world.Trainer.fill_copy": _whole_behind_the_gate},
        ("i3_what_can_be_saved_is_saved",),
        seeds=(1000088, 1000189),
    ),
    "one-step-back": Mutant(
        "of the steps that were copied only the one before the newest is tried",
        {f"{_SELECTION}._steps_before": lambda survey, lowest: [lowest - 1]},
        ("i3_what_can_be_saved_is_saved",),
        seeds=(1000021, 1000361),
    ),
    "mixed-copies": Mutant(
        "whole copies of different steps make up a checkpoint",
        {f"{_SELECTION}._readers": _any_copy, "tests.sim.world.World._copied": _whichever_copy},
        ("i1_every_file_is_of_the_published_step",),
        seeds=(1000008, 1000018, 1000027),
    ),
    "trust-the-dead": Mutant(
        "the newest step that a dead rank had reported counts",
        {f"{_INCIDENT}._carry_out": _carry_out_the_dead_ranks_step},
        ("i3_what_can_be_saved_is_saved",),
        small="ddp-two",
        seeds=(890, 1285, 1354),
    ),
    "obedient-saver": Mutant(
        "the same, and a saver writes a step that it does not hold",
        {
            f"{_INCIDENT}._carry_out": _carry_out_the_dead_ranks_step,
            "lastwords.processor.participation.may_write": _always,
        },
        ("i1_every_file_is_of_the_published_step",),
        small="ddp-two",
        seeds=(1083, 1285, 1354),
    ),
    "publish-before-verify": Mutant(
        "a directory is published without being verified",
        {f"{_INCIDENT}._verify_if_written": _publish_at_once},
        ("i2_only_whole_verified_directories_are_published",),
        small="ddp-two",
        seeds=(2, 3, 6),
    ),
    "no-lock": Mutant(
        "the freeze is checked some time before UPDATING is set, without a lock around both",
        {f"{_PROCESSOR}.mark_ready": _mark_ready_and_check, f"{_PROCESSOR}.try_update": _update_as_checked_before},
        ("i1_every_file_is_of_the_published_step", "i4_no_survivor_is_set_back", "i3_what_can_be_saved_is_saved"),
        small="ddp-two",
        seeds=(193, 600, 850),
    ),
    "settle-in-update": Mutant(
        "a rank settles while its update is still running",
        {f"{_PROCESSOR}._after_move": _settle_whatever_happens},
        ("i1_every_file_is_of_the_published_step", "i4_no_survivor_is_set_back", "i3_what_can_be_saved_is_saved"),
        small="ddp-two",
        seeds=(35, 38, 115),
    ),
    "resume-after-select": Mutant(
        "a rank that comes back turns an incident into a false alarm although savers have their orders",
        {f"{_INCIDENT}.on_return": _resume_after_select},
        ("i7_nobody_waits_for_ever", "i3_what_can_be_saved_is_saved", "i1_every_file_is_of_the_published_step"),
        small="ddp-two-break",
        seeds=(496, 3328, 3684),
    ),
    "any-settled": Mutant(
        "a Settled of an older incident counts",
        {"_HANDLERS": {Settled: _accept_any_settled}},
        ("i6_nothing_older_changes_anything_newer",),
        seeds=(89, 256, 659),
    ),
    "minimum": Mutant(
        "N is the smallest step that is held, not the largest",
        {f"{_SELECTION}._candidate_steps": _ended_steps_the_least_first},
        ("i4_no_survivor_is_set_back", "i3_what_can_be_saved_is_saved"),
        small="ddp-two",
        seeds=(3, 7, 12),
    ),
    "no-progress-time-out": Mutant(
        "a writer may take as long as it likes",
        {f"{_SAVING}.drop_overdue": _nobody},
        ("i7_nobody_waits_for_ever",),
        seeds=(109, 181, 310),
    ),
    "deaf-to-proceed": Mutant(
        "a rank that is told to proceed stays where it is",
        {f"{_PART}.on_proceed": _ignored},
        ("i3_what_can_be_saved_is_saved",),
        small="mixed",
        seeds=(115, 234, 664),
    ),
    "gate-failed-gives-up": Mutant(
        "a rank whose gate has failed gives its gradients up, as after any other exception",
        {f"{_PROCESSOR}.mark_gate_failed": _give_the_gradients_up, f"{_PROCESSOR}.try_update": _update_if_still_ready},
        ("i3_what_can_be_saved_is_saved",),
        small="mixed",
        seeds=(112, 115, 234),
    ),
    "delete-after-a-glitch": Mutant(
        "what could not be read back once is given up, and thrown away",
        {f"{_INCIDENT}._on_blocked": _give_up_at_once, f"{_SAVING}.keep_finished": _discard_finished},
        ("i3_what_can_be_saved_is_saved", "finished_files_are_never_thrown_away"),
        seeds=(11, 15, 39),
    ),
    "discard-unpublished": Mutant(
        "finished files of an incident that ends without a publication are removed",
        {f"{_SAVING}.keep_finished": _discard_finished},
        ("finished_files_are_never_thrown_away",),
        seeds=(42, 310, 312),
    ),
    "counts-its-own-pause": Mutant(
        "a controller that was stopped takes its own pause for the silence of the ranks",
        {"lastwords.clock.OwnTime.at": _as_the_clock_says},
        ("i3_what_can_be_saved_is_saved",),
        seeds=(493,),
    ),
    "one-share-is-enough": Mutant(
        "a unit of which some share is there is not written any more",
        {f"{_SELECTION}._assign_shares": _content_with_one_share},
        ("i2_only_whole_verified_directories_are_published",),
        seeds=(10, 81, 103),
    ),
    "late-exit": Mutant(
        "a rank obeys an Exit of an incident that is over",
        {f"{_PART}.concerns": _always},
        ("i6_nothing_older_changes_anything_newer", "a_false_alarm_is_not_noticed"),
        seeds=(1, 15, 210),
    ),
}
