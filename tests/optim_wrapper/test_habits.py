"""What a run learns of its loop goes into each rank's local state, and a resumed run goes on from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lastwords
from lastwords.checkpoint.meta import Habits, LocalMeta, StoredRecurrence
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.capture.source import TrainerSource
from lastwords.optim_wrapper.launch.world import World, next_prefix
from lastwords.optim_wrapper.resume.saved_habits import habits_for
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
        self.recorder = StepRecorder(self.model, [self.wrapped], None, {"metric": self.metric})
        self.recorder.agree_units(World(), next_prefix(), ())
        box = folder / f"box_{done}"
        self.source: TrainerSource = self.recorder.make_source(lambda rank: box, lambda step: {})
        self.recorder.open(box)
        self.recorder.begin(0, None)
        if habits is not None:
            self.recorder.history(self.recorder.extras.first(), None, habits)
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
        meta = LocalMeta.read(self.source.local_states([0], step)[0].meta.to_json())
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
    (clamps, "parameter 'weight' changed after optimizer.step() in earlier steps"),
    (sets_lr, "the loop changes hyperparameters after optimizer.step()"),
    (draws, "rng/torch changed after a tentative copy"),
    (counts, "local_extras['metric'] changed between the forward pass and the end of a step"),
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
    ((kind, name, _, _, when),) = first.habits(3).writes
    assert (kind, name, when[0], when[2]) == ("model", "weight", 3, 3)
    assert [one[4][2] for one in first.habits(2).writes] == [2], "of the step before it does not"


def test_what_is_not_there_any_more_is_forgotten(tmp_path: Path) -> None:
    gone = Habits(writes=[("model", "elsewhere", None, 1, (3, 1, 3, 1, 2, 0))], late=(0,) * 6)
    assert not [why for why in Job(tmp_path, draws, 3, gone).cut_off() if "elsewhere" in why]


def test_a_larger_black_box_goes_on_with_what_its_predecessor_has_seen(tmp_path: Path) -> None:
    job = Job(tmp_path, draws)
    job.step()
    job.recorder.open(tmp_path / "larger", carried=job.recorder._box)
    box = job.recorder._box
    assert box is not None
    assert box.habits.late == (1, 1, 1, 0, 0, 0)
    assert box.moved == "rng/torch"


def manifest_of(every: dict[int, Habits]) -> Any:
    return SimpleNamespace(
        locals={rank: SimpleNamespace(meta=LocalMeta(habits=habits)) for rank, habits in every.items()}
    )


def test_a_rank_goes_by_its_own_habits_and_by_those_of_all_where_its_own_are_lost() -> None:
    twice: StoredRecurrence = (2, 1, 4, 3, 1, 0)
    once: StoredRecurrence = (1, 3, 3, 0, 0, 0)
    zero = Habits(late=twice, moved="rng/a", tentative_reasons=["x"], writes=[("model", "w", None, 1, once)])
    one = Habits(late=once, moved="rng/b", tentative_reasons=["x", "y"], changes={"x": once})
    one = replace(one, writes=[("model", "w", None, 5, twice), ("optim", "w", "exp_avg", 1, once)])
    every = manifest_of({0: zero, 1: one, 2: Habits(changes={"x": twice}), 3: Habits()})
    assert habits_for(0, every) == zero
    assert habits_for(1, every) == one
    for rank in (2, 3, 4, None):
        found = habits_for(rank, every)
        assert (found.late, found.moved, found.changes) == (twice, "rng/a", {"x": twice})
        assert found.tentative_reasons == ["x", "y"]
        assert {(name, key): count for _, name, key, count, _ in found.writes} == {("w", None): 5, ("w", "exp_avg"): 1}
    assert not any(habits_for(0, manifest_of({})).to_json().values()), "a converted checkpoint"
