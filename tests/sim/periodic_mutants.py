"""Deliberately broken rules of periodic checkpoints, as `tests.sim.mutants` has them of incidents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lastwords.controller.periodic import Periodic
from lastwords.processor.core import ProcessorCore
from lastwords.processor.participation import OwnPart
from lastwords.vocabulary import Phase, Saved, SaveFailed
from tests.sim import behind
from tests.sim.mutants import Mutant

_PERIODIC = "lastwords.controller.periodic.Periodic"
_NEWEST = "lastwords.controller.incident.Newest"
_SNAPSHOTS = "lastwords.processor.participation.Snapshots"
_OWN_PART = "lastwords.processor.participation.OwnPart"
_CONTENT = "tests.sim.behind.content"
_I1 = "i1_every_file_is_of_the_published_step"
_I2 = "i2_only_whole_verified_directories_are_published"
_I6 = "i6_nothing_older_changes_anything_newer"
_I7 = "i7_nobody_waits_for_ever"
_DUE = "what_is_due_is_published"
_NAMED = "the_newest_is_named"
_SO = "what_a_rank_says_is_so"

_shipped_say: Callable[..., None] = OwnPart._say
_shipped_on_saved: Callable[..., None] = Periodic.on_saved


def _due_one_step_late(self: Any, ended_step: int) -> Any:
    order = self.waiting
    return order if order is not None and order.step + 1 == ended_step else None


def _never_missed(self: Any, ended_step: int) -> None:
    pass


def _due_after_the_update(self: ProcessorCore) -> Any:
    order = self._snapshots.due(self.ended_step)
    return order if self.phase is Phase.UPDATED and not self._part.incident and not self.leaving else None


def _cancel_silently(self: Any) -> None:
    self.waiting = self.writing.order = self.writing.said = None


def _keep(self: Any) -> None:
    pass


def _do_not_wait_for_the_last(self: Any, report: Saved) -> None:
    if len(self._missing) > 1 and report.rank in self._missing and report.attempt == self.attempt:
        for rank in self._missing - {report.rank}:
            del self._orders[rank]
        self._missing = {report.rank}
    _shipped_on_saved(self, report)


def _expect_any_attempt(self: Any, rank: int, attempt: int) -> bool:
    return rank in self._missing


def _release_at_once(self: Any, step: int) -> bool:
    self._drop()
    return False


def _say_saved_all_the_same(self: Any, answer: Any) -> None:
    if isinstance(answer, SaveFailed) and answer.missed:
        answer = Saved(answer.rank, answer.generation, answer.incident, answer.attempt, answer.step, 0)
    _shipped_say(self, answer)


def _never(self: Any) -> float:
    return 1e9


def _awaits_nothing(self: Any) -> bool:
    return False


def _awaits_the_look(self: Any) -> bool:
    return self._looks > 0


def _make_way(self: Any, ended_step: int) -> None:
    self._wanted = True
    if self._stage is None and not self._bytes:
        self._drop()
    self.order_next()


MUTANTS: Mapping[str, Mutant] = {
    "copy-a-step-late": Mutant(
        "a rank copies its state when it has ended the step after the one that it was told",
        {f"{_SNAPSHOTS}.due": _due_one_step_late, f"{_SNAPSHOTS}.on_step_ended": _never_missed},
        (_I1,),
        small="periodic-skip",
        seeds=(1, 4, 15),
    ),
    "copy-after-the-update": Mutant(
        "a rank copies its state at the end of the next step, when its optimizer has written",
        {"lastwords.processor.core.ProcessorCore.copy_due": property(_due_after_the_update)},
        (_I1,),
        small="periodic",
        seeds=(1, 4, 15),
    ),
    "write-the-live-state": Mutant(
        "the writer behind the training reads the state instead of the copy",
        {_CONTENT: behind.live},
        (_I1,),
        small="periodic-skip",
        seeds=(1, 4, 15),
    ),
    "write-on-in-an-incident": Mutant(
        "the same, and it goes on through an incident that turns out to be a false alarm",
        {_CONTENT: behind.live, f"{_SNAPSHOTS}.cancel": _keep, f"{_PERIODIC}.interrupt": _keep},
        (_I1,),
        small="periodic-skip",
        seeds=(1, 4, 15),
    ),
    "publish-without-the-last": Mutant(
        "a checkpoint is published when one rank has written its part",
        {f"{_PERIODIC}.on_saved": _do_not_wait_for_the_last},
        (_I2,),
        small="periodic-skip",
        seeds=(1, 2, 4),
    ),
    "parts-of-two-attempts": Mutant(
        "a part counts, whichever attempt it was written for",
        {f"{_PERIODIC}._expects": _expect_any_attempt},
        (_I6,),
        seeds=(26, 47, 75),
    ),
    "release-without-waiting": Mutant(
        "ranks that have left the loop are released while a checkpoint is being written",
        {f"{_PERIODIC}.holds_release": _release_at_once},
        (_DUE,),
        small="periodic-skip",
        seeds=(3, 6, 7),
    ),
    "missed-and-saved": Mutant(
        "a rank that is past the step says that it has saved it",
        {f"{_OWN_PART}._say": _say_saved_all_the_same},
        (_SO,),
        small="periodic-later",
        seeds=(28, 36, 37),
    ),
    "newest-unknown": Mutant(
        "an incident that saves nothing does not wait until it is known what there is to go on from",
        {f"{_NEWEST}.is_awaited": _awaits_nothing},
        (_NAMED,),
        seeds=(21, 67, 75),
    ),
    "newest-before-its-answer": Mutant(
        "it does not wait for the answer about a checkpoint that is complete, and may be on disk",
        {f"{_NEWEST}.is_awaited": _awaits_the_look},
        (_NAMED,),
        seeds=(11311, 31704),
    ),
    "newest-looked-for-once": Mutant(
        "it waits for that answer, and does not look again",
        {f"{_NEWEST}.on_storage_moved": _keep},
        (_NAMED,),
        seeds=(87, 568, 608),
    ),
    "no-timer-behind": Mutant(
        "a writer behind the training may take as long as it likes",
        {f"{_PERIODIC}._due_s": _never},
        (_I7,),
        seeds=(3, 85, 100),
    ),
    "two-writers": Mutant(
        "a newer order does not end the writer of an older one",
        {f"{_SNAPSHOTS}.cancel": _cancel_silently},
        (_DUE,),
        seeds=(172, 256, 307),
    ),
    "wanted-again-and-again": Mutant(
        "a checkpoint makes way for each one that is wanted",
        {f"{_PERIODIC}.want": _make_way},
        (_DUE,),
        seeds=(31, 32, 33),
    ),
}
