"""A resumed loop whose loader is another one than the saved run's is told so, or goes on with the same samples."""

from __future__ import annotations

import doctest
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler

from lastwords.checkpoint.meta import LoopFacts, RunFacts, json_of
from lastwords.optim_wrapper.loop import loader_changes
from lastwords.optim_wrapper.loop.loader_changes import Onward, onward
from lastwords.optim_wrapper.loop.steps import Steps
from tests import golden
from tests.ledgers import told
from tests.optim_wrapper.test_steps import (
    BATCH,
    BATCHES,
    SAMPLES,
    Buckets,
    Items,
    Run,
    after,
    forget,
    loader,
    points,
    resumed,
    seeded,
    whole_run,
)


def data_of(steps: Steps | None) -> LoopFacts:
    """What a checkpoint says of the loop, read back."""
    assert steps is not None
    facts = steps.facts(1)
    read = RunFacts.read(json.loads(json.dumps(json_of(RunFacts(data=facts))))).data
    assert read == facts
    return facts


def going_on(whole: Run, new: Any, epoch: int, step: int, accumulate: int = 1) -> Onward:
    saved = SimpleNamespace(data=data_of(whole.steps), epoch=epoch, step=step, position=(epoch, step))
    return onward(saved, new, accumulate, 1)


def test_the_examples_in_the_docstrings_are_right() -> None:
    assert doctest.testmod(loader_changes).failed == 0


def plain(**options: Any) -> DataLoader[Any]:
    return DataLoader(Items(), **{"batch_size": BATCH, "shuffle": True, **options})


class More(Items):
    """A sample more."""

    def __len__(self) -> int:
        return SAMPLES + 1


class Shuffled:
    """Around a loader."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.inner), generator=seeded(self.epoch)).tolist()
        self.epoch += 1
        batches = list(self.inner)
        yield from (batches[at] for at in order)


def distributed(**options: Any) -> DataLoader[Any]:
    items = Items()
    return DataLoader(items, BATCH, sampler=DistributedSampler(items, 1, 0, **options))


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "batch size": (plain, lambda: plain(batch_size=BATCH + 1), f"batch size: {BATCH} in the saved run, {BATCH + 1}"),
    "length": (plain, lambda: DataLoader(More(), BATCH, shuffle=True), f"data set: {SAMPLES} in the saved run, "),
    "sampler": (
        plain,
        lambda: plain(shuffle=False),
        "type of the sampler: torch.utils.data.sampler.RandomSampler in the saved",
    ),
    "own sampler": (plain, lambda: DataLoader(Items(), batch_sampler=Buckets()), "type of the batch sampler: "),
    "shuffle": (distributed, lambda: distributed(shuffle=False), "shuffle of the sampler: True in the saved run"),
    "seed": (distributed, lambda: distributed(seed=4), "seed of the sampler: 0 in the saved run, 4 here"),
    "drop_last": (plain, lambda: plain(drop_last=True), "drop_last of the loader: False in the saved run, True here"),
    "workers": (plain, lambda: plain(num_workers=1), "may draw random numbers: 0 in the saved run, 1 here"),
    "replacement": (
        lambda: DataLoader(Items(), BATCH, sampler=RandomSampler(Items())),
        lambda: DataLoader(Items(), BATCH, sampler=RandomSampler(Items(), replacement=True)),
        "replacement of the sampler: False in the saved run, True here",
    ),
    "wrapper": (
        plain,
        lambda: Shuffled(plain()),
        "type of the loader: torch.utils.data.dataloader.DataLoader in the saved",
    ),
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_has_changed_of_the_loader_is_named_with_what_it_was_and_is(what: str) -> None:
    before, then, expected = CHANGED[what]
    whole = whole_run(before, epochs=1)
    assert going_on(whole, before(), 1, 2) == Onward(None, (), data_of(whole.steps))
    assert any(expected in reason for reason in going_on(whole, then(), 1, 2).reasons)


def test_another_accumulation_is_named() -> None:
    whole = whole_run(plain, epochs=1)
    golden.says(going_on(whole, plain(), 1, 2, 2).reasons)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["shuffle", "shuffle with generator", "two generators"])
def test_a_random_order_goes_on_with_batches_of_another_size_and_each_sample_is_seen_once(kind: str) -> None:
    def make() -> Any:
        return loader(kind)

    def other() -> Any:
        return loader(kind, batch_size=3)

    def seen(run: Run, epoch: int) -> list[float]:
        return [row[0] for entry in run.record if entry[0] == epoch and len(entry) == 4 for row in entry[2]]

    whole = whole_run(make, epochs=2)
    for epoch, step in ((1, 2), (2, 3), (1, BATCHES), (2, BATCHES)):
        here = going_on(whole, other(), epoch, step)
        assert len(here.reasons) == 1
        again = resumed(whole, other, epoch, step, epochs=2, onward=here)
        order = seen(whole, epoch)
        assert seen(again, epoch) == order[step * BATCH :]
        if epoch == 1:
            assert sorted(seen(again, 2)) == sorted(range(SAMPLES))
    by_number = resumed(whole, other, 1, 2, epochs=2)
    assert seen(by_number, 1) != seen(whole, 1)[2 * BATCH :], "the control: by the number of steps"


def test_a_run_with_batches_of_another_size_can_be_resumed_again_in_the_same_epoch() -> None:
    def make() -> Any:
        return loader("shuffle")

    def other() -> Any:
        return loader("shuffle", batch_size=3)

    whole = whole_run(make, epochs=1)
    again = resumed(whole, other, 1, 2, epochs=1, onward=going_on(whole, other(), 1, 2))
    third = resumed(again, other, 1, 4, epochs=1, onward=going_on(again, other(), 1, 4))
    assert third.record == after(again.record, 1, 4)


@pytest.mark.ci
@pytest.mark.parametrize("drops", [False, True])
def test_a_loader_that_counts_its_epochs_itself_is_set_back(drops: bool) -> None:
    """Control: without what the saved run had counted, epoch 2 has the order of epoch 1."""

    def make() -> Any:
        return Shuffled(loader("sequential", drop_last=drops))

    whole = whole_run(make, epochs=3)
    assert whole.steps is not None
    for epoch, step in points(whole.steps.steps_per_epoch):
        again = resumed(whole, make, epoch, step, epochs=3)
        assert again.record == after(whole.record, epoch, step)
    forget(whole)
    differs = resumed(whole, make, 2, 2, epochs=3)
    assert differs.record != after(whole.record, 2, 2)


class Counted(Sampler[int]):
    """Begins each epoch elsewhere."""

    def __init__(self) -> None:
        self.begun = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        yield from ((at + self.begun) % SAMPLES for at in range(SAMPLES))


@pytest.mark.ci
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("epoch", "step"), [(1, 2), (2, 1), (2, BATCHES)])
def test_a_sampler_that_counts_its_epochs_goes_on_where_it_was(epoch: int, step: int, workers: int) -> None:
    def make() -> Any:
        return DataLoader(Items(), BATCH, sampler=Counted(), num_workers=workers)

    whole = whole_run(make, epochs=3)
    again = resumed(whole, make, epoch, step, epochs=3)
    assert again.record == after(whole.record, epoch, step)
    assert told(again) == []
    forget(whole)
    if epoch > 1:
        assert resumed(whole, make, epoch, step, epochs=3).record != after(whole.record, epoch, step)


@pytest.mark.process
def test_workers_that_persist_begin_each_epoch_once() -> None:
    sampler = Counted()
    whole_run(lambda: DataLoader(Items(), BATCH, sampler=sampler, num_workers=1, persistent_workers=True), epochs=3)
    assert sampler.begun == 3


@pytest.mark.parametrize(("step", "told"), [(BATCHES, False), (BATCHES + 1, True)])
def test_a_custom_loops_step_that_no_epoch_of_steps_has_is_told(step: int, told: bool) -> None:
    """It may have counted its steps on through all epochs."""
    saved = SimpleNamespace(data=LoopFacts(), epoch=1, step=step, position=(1, step))
    found = onward(saved, plain(), 1, 1).reasons
    assert bool(found) is told
    if told:
        golden.says(found)
