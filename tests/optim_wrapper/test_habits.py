"""What a run learns of its loop goes into each rank's local state, and a resumed run goes on from it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lastwords
from lastwords.checkpoint.meta import COMMITTED, NO_STATE, Habits, LocalMeta, json_of
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.capture.source import TrainerSource
from lastwords.optim_wrapper.launch.world import World, next_prefix
from lastwords.optim_wrapper.resume.resume import habits_for
from lastwords.processor.recurrence import Forecast, Recurrence
from lastwords.processor.saver import Position
from lastwords.vocabulary import UNIT_REPLICATED, Phase, Stand


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


class Job:
    """A rank whose loop does `late` between its update and the end of each step; cut_off: of the next step."""

    def __init__(self, folder: Path, late: Callable[[Job], None], done: int = 0, habits: Habits | None = None) -> None:
        self.late, self.done = late, done
        self.model = torch.nn.Linear(2, 2)
        self.wrapped = lastwords.OptTFTWrapper(torch.optim.SGD(self.model.parameters(), 0.1))
        self.metric = {"count": 0}
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.wrapped.inner, 1)
        extras = {"scheduler": self.scheduler}
        self.recorder = StepRecorder(self.model, [self.wrapped], extras, {"metric": self.metric})
        self.recorder.agree_units(World(), next_prefix(), ())
        box = folder / f"box_{done}"
        self.source: TrainerSource = self.recorder.make_source(lambda rank: box, lambda step: {})
        self.recorder.open(box)
        self.recorder.begin(0, None)
        if habits is not None:
            self.recorder.learn(habits)
            self.recorder.open(box)  # as steps() does
        self.recorder.begin(done, Position(1, done) if done else None)

    def update(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()
        self.recorder.tentative()
        self.recorder.watch.begin_update()
        self.wrapped.inner.step()
        self.wrapped.inner.zero_grad()
        self.recorder.watch.end_update()

    def step(self) -> None:
        self.update()
        self.late(self)
        self.done += 1
        self.recorder.end_step(self.done, Position(1, self.done))

    def habits(self, step: int) -> Habits:
        """What stands in the file."""
        meta = LocalMeta.read(json_of(self.source.local_states([0], step)[0].meta))
        return meta.habits

    def cut_off(self) -> list[str]:
        """Why the step under way, which has come to its update, is not exact."""
        self.update()
        step = self.done + 1
        unit = self.source.unit_state(UNIT_REPLICATED, step, Stand(Phase.UPDATED, step))
        return [*unit.meta.reasons, *map(str, self.source.local_states([0], step)[0].reasons)]


def clamps(job: Job) -> None:
    job.model.weight.data.clamp_(-0.1, 0.1)


def sets_lr(job: Job) -> None:
    for group in job.wrapped.inner.param_groups:
        group["lr"] *= 0.9


def draws(job: Job) -> None:
    torch.rand(1)


def counts(job: Job) -> None:
    job.metric["count"] += 1


LATE = [
    (clamps, "parameter 'weight' may have been about to change; this happens in every step"),
    (sets_lr, "hyperparameters may have been about to change; this happens in every step"),
    (draws, "rng/torch may have been about to change; this happens in every step"),
    (counts, "local_extras['metric'] may have been about to change; this may happen in any step"),
]


def learned(tmp_path: Path, late: Callable[[Job], None]) -> Habits:
    """What three steps of such a loop have shown."""
    first = Job(tmp_path, late)
    for _ in range(3):
        first.step()
    return first.habits(3)


@pytest.mark.parametrize(("late", "words"), LATE)
def test_a_resumed_run_names_in_its_first_step_what_the_saved_one_had_seen_move_late(
    tmp_path: Path, late: Callable[[Job], None], words: str
) -> None:
    habits = learned(tmp_path, late)
    told = [why for why in Job(tmp_path, late, 3, habits).cut_off() if words in why]
    assert told, "known to the run that is resumed"
    assert not [why for why in Job(tmp_path, late, 3, Habits()).cut_off() if words in why], "negative control"


@pytest.mark.parametrize(("late", "words"), LATE)
def test_a_run_that_is_resumed_twice_before_a_step_ends_still_knows(
    tmp_path: Path, late: Callable[[Job], None], words: str
) -> None:
    habits = learned(tmp_path, late)
    again = Job(tmp_path, late, 3, habits).habits(3)
    assert again == habits


def test_what_was_written_in_the_step_that_was_cut_off_counts(tmp_path: Path) -> None:
    """Resumed after step 3, the clamp has come in each step so far."""
    first = Job(tmp_path, clamps)
    first.step()
    first.step()
    first.update()
    clamps(first)
    seen = first.habits(3)
    assert seen.updates == 3
    assert {name: Recurrence(*when)[:3] for name, when in seen.after_update.items()} == {
        "parameter 'weight'": (3, 1, 3)
    }
    seen = first.habits(2)
    assert (seen.updates, seen.after_update["parameter 'weight'"][2]) == (2, 2), "of the step before it does not"


def test_how_often_a_step_was_written_that_was_cut_off_is_no_habit(tmp_path: Path) -> None:
    def writes(job: Job, times: int = 2) -> None:
        with torch.no_grad():
            for _ in range(times):
                job.model.weight.mul_(0.9)

    first = Job(tmp_path, writes)
    first.step()
    first.step()
    first.update()
    writes(first, 1)
    seen = Recurrence(*first.habits(3).after_update["parameter 'weight'"])
    assert (seen.last, seen.often) == (3, 2)
    again = Job(tmp_path, writes, 3, first.habits(3))
    again.update()
    for counts, told in ((1, True), (1, False), (1, True)):
        writes(again, counts)
        unit = again.source.unit_state(UNIT_REPLICATED, 4, Stand(Phase.UPDATED, 4))
        assert any("parameter 'weight'" in reason for reason in unit.meta.reasons) == told


def test_what_is_not_there_any_more_is_not_missed(tmp_path: Path) -> None:
    gone = Habits(after_update={"parameter 'elsewhere'": (3, 1, 3, 1, 2, 0, 1)}, updates=3)
    assert not [why for why in Job(tmp_path, draws, 3, gone).cut_off() if "elsewhere" in why]


def test_what_is_saved_of_an_older_step_says_what_was_known_then(tmp_path: Path) -> None:
    job = Job(tmp_path, clamps)
    for _ in range(3):
        job.step()
    for step in (2, 3):
        seen = job.habits(step)
        assert (seen.updates, Recurrence(*seen.after_update["parameter 'weight'"]).last) == (step, step)


def test_a_larger_black_box_goes_on_with_what_its_predecessor_has_seen(tmp_path: Path) -> None:
    job = Job(tmp_path, draws)
    job.step()
    job.recorder.open(tmp_path / "larger", carried=job.recorder._box)
    job.step()
    assert job.recorder.after_copy == {"rng/torch": (2, 1, 2, 1, 1, 0, 1)}


def test_a_resumed_run_knows_of_its_schedulers_whether_they_are_due(tmp_path: Path) -> None:
    def steps(job: Job) -> None:
        job.scheduler.step()

    known = Job(tmp_path, steps, 3, learned(tmp_path, steps))
    assert known.cut_off() == []
    unit = known.source.unit_state(UNIT_REPLICATED, 4, Stand(Phase.UPDATED, 4))
    assert unit.meta.extras is not None
    assert unit.meta.extras.step_on_resume == ["scheduler"]
    assert known.habits(4).after_update["extras['scheduler']"] == (4, 1, 4, 1, 3, 0, 1), "once it is resumed"
    (reason,) = Job(tmp_path, steps, 3, Habits()).cut_off()
    assert "extras['scheduler']" in reason
    assert Forecast.NEVER.value in reason


def manifest_of(every: dict[int, Habits], lost: Collection[int] = ()) -> Any:
    metas = {rank: LocalMeta(kind=NO_STATE if rank in lost else COMMITTED, habits=one) for rank, one in every.items()}
    return SimpleNamespace(locals={rank: SimpleNamespace(meta=meta) for rank, meta in metas.items()})


def test_a_rank_goes_by_its_own_habits_and_by_those_of_all_where_its_own_are_lost() -> None:
    twice, once = (2, 1, 4, 3, 1, 0, 1), (1, 3, 3, 0, 0, 0, 1)
    zero = Habits(after_copy={"a": twice}, after_update={"w": once}, updates=3, early_reasons=["x"], passes=2)
    one = Habits(after_copy={"a": once, "b": once}, after_update={"w": twice, "v": once}, updates=4, passes=2)
    one = replace(one, early_reasons=["x", "y"])
    every = manifest_of({0: zero, 1: one, 2: Habits(after_update={"w": once}), 3: Habits()}, lost=(2, 3))
    assert habits_for(0, every) == zero
    assert habits_for(1, every) == one
    for rank in (2, 3, 4, None):
        found = habits_for(rank, every)
        assert found.after_copy == {"a": twice, "b": once}
        assert (found.after_update, found.updates) == ({"w": twice, "v": once}, 4)
        assert (found.early_reasons, found.passes) == (["x", "y"], None if rank is None else 2)
    assert habits_for(4, manifest_of({0: zero, 1: replace(one, passes=3)})).passes is None
    assert not any(habits_for(0, manifest_of({})).to_json().values()), "a converted checkpoint"
