"""Numbers that a loader or the loop moves in it, and a loader's draws in the training process, in a resumed run."""

from __future__ import annotations

import doctest
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lastwords.checkpoint.run_facts import LoopFacts
from lastwords.optim_wrapper.loop import loader_counters
from lastwords.optim_wrapper.loop.loader_counters import Counters, known_at_resume
from lastwords.optim_wrapper.loop.steps import Steps
from tests.ledgers import told
from tests.optim_wrapper.test_loader_changes import data_of, going_on
from tests.optim_wrapper.test_steps import BATCH, BATCHES, SAMPLES, Run, after, resumed, seeded, whole_run


class Counting(Dataset[Any]):
    """Says how many items it has given, and at which level."""

    def __init__(self) -> None:
        self.seen = 0
        self.level = 1

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.seen += 1
        return torch.tensor([index, self.seen, self.level])


def counting() -> Any:
    return DataLoader(Counting(), BATCH, shuffle=True)


def saved_at(epoch: int, step: int, make: Callable[[], Any]) -> Run:
    """The run up to the end of this step: what a checkpoint of it knows."""

    class Cut(Run):
        def step_end(self, at_epoch: int, at_step: int) -> None:
            super().step_end(at_epoch, at_step)
            if (at_epoch, at_step) == (epoch, step):
                raise KeyboardInterrupt

    run = Cut()
    with pytest.raises(KeyboardInterrupt):
        whole_run(make, run, epochs=3)
    return run


@pytest.mark.parametrize(("epoch", "step"), [(1, 1), (1, 3), (2, 2), (1, BATCHES), (2, BATCHES)])
def test_a_data_set_that_counts_what_it_gives_goes_on_counting(epoch: int, step: int) -> None:
    """Its done batches are not fetched again, so that nothing counts there."""
    whole = whole_run(counting, epochs=3)
    run = saved_at(epoch, step, counting)
    again = resumed(whole, counting, epoch, step, epochs=3, onward=going_on(run, counting(), epoch, step))
    assert again.record == after(whole.record, epoch, step)
    assert again.steps is not None
    assert told(again) == []
    control = resumed(whole, counting, epoch, step, epochs=3)
    assert control.record != after(whole.record, epoch, step)


def body_moves(counters: Counters, dataset: Counting, steps: int, *, at: int) -> None:
    """Epoch 1 of a loop that raises the level in every step `at` of an epoch."""
    counters.epoch_starts(1)
    for step in range(1, steps + 1):
        counters.fetched(1, step)
        dataset.level += step == at
        counters.ended(1, step)


@pytest.mark.parametrize(("at", "saved"), [(4, 4), (2, 3)])
def test_a_level_that_the_loop_raises_is_set_also_where_no_epoch_had_begun_with_it(at: int, saved: int) -> None:
    loader = DataLoader(Counting(), BATCH)
    counters = Counters(loader, 4)
    body_moves(counters, loader.dataset, saved, at=at)
    fresh = DataLoader(Counting(), BATCH)
    again = Counters(fresh, 4)
    counts = counters.counts.in_step(1, saved)
    assert counts is not None
    assert again.set_on(counts, 1, saved) == []
    assert fresh.dataset.level == 2  # type: ignore[attr-defined]
    assert known_at_resume(LoopFacts(counters=counters.counts, steps_per_epoch=4), 1, saved) == []
    again.epoch_starts(2)
    assert again.counts.in_epoch(2)["loader.dataset.level"].start == 2, "the next resume needs it as well"


def test_a_step_that_was_cut_off_before_the_loop_may_have_moved_a_number_is_named() -> None:
    loader = DataLoader(Counting(), BATCH)
    counters = Counters(loader, 4)
    body_moves(counters, loader.dataset, 3, at=2)
    counters.fetched(1, 4)
    data = LoopFacts(counters=counters.counts, steps_per_epoch=4)
    [reason] = known_at_resume(data, 1, 4)
    assert "step 4" in reason
    assert "(loader.dataset.level)" in reason
    assert known_at_resume(data, 1, 3) == []


def test_a_loop_that_is_cut_off_in_its_body_has_said_that_the_step_was_begun() -> None:
    run, batches = Run(), DataLoader(Counting(), BATCH)
    steps = run.steps = Steps(batches, epochs=1, events=run)
    for _, step, _ in steps:
        batches.dataset.level += step == 2  # type: ignore[attr-defined]
        if step == 4:
            break
    [reason] = known_at_resume(data_of(steps), 1, 4)
    assert "step 4" in reason
    assert "loader.dataset.level" in reason
    assert known_at_resume(data_of(steps), 1, 3) == []


def test_nothing_is_kept_of_a_loader_whose_numbers_stay() -> None:
    whole = whole_run(lambda: DataLoader(range(SAMPLES), BATCH, shuffle=True), epochs=2)  # type: ignore[arg-type]
    assert data_of(whole.steps).counters.at == {}


# ------------------------------------------------------------------ draws


class Buffer(IterableDataset[Any]):
    """A shuffle buffer."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[Any]:
        held = []
        for item in range(SAMPLES):
            held.append(item)
            if len(held) > 6:
                yield held.pop(self.draw(len(held)))
        while held:
            yield held.pop(self.draw(len(held)))


def from_torch(count: int) -> int:
    return int(torch.randint(count, ()))


class OfOwn:
    """Draws from a generator that the run saves."""

    def __init__(self) -> None:
        self.generator = seeded(3)

    def __call__(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self.generator))


@pytest.mark.parametrize("draw", [from_torch, random.randrange])
def test_an_order_that_is_drawn_between_the_trainings_own_draws_is_named(draw: Callable[[int], int]) -> None:
    def make() -> Any:
        return DataLoader(Buffer(draw), BATCH)

    whole = whole_run(make, epochs=2)
    data = data_of(whole.steps)
    for epoch, step in ((1, 4), (2, 4)):
        again = resumed(whole, make, epoch, step, epochs=2)
        assert again.record != after(whole.record, epoch, step), "it is no false alarm"
        assert again.steps is not None
        [reason] = told(again)
        assert known_at_resume(data, epoch, step) == [reason], "resume() says it already"
    for epoch, step in ((1, 1), (1, BATCHES)):
        again = resumed(whole, make, epoch, step, epochs=2)
        assert again.record == after(whole.record, epoch, step)
        assert again.steps is not None
        assert told(again) == known_at_resume(data, epoch, step) == []


def test_an_order_that_is_drawn_from_a_stream_of_its_own_is_exact() -> None:
    def make() -> Any:
        return DataLoader(Buffer(OfOwn()), BATCH)

    whole = whole_run(make, epochs=2)
    again = resumed(whole, make, 2, 3, epochs=2)
    assert again.record == after(whole.record, 2, 3)
    assert again.steps is not None
    assert told(again) == known_at_resume(data_of(whole.steps), 2, 3) == []


def test_the_examples_in_the_docstrings_are_right() -> None:
    assert doctest.testmod(loader_counters).failed == 0
