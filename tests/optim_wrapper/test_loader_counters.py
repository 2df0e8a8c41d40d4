"""Numbers that a loader or the loop moves in it, and a loader's draws in the training process, in a resumed run."""

from __future__ import annotations

import doctest
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lastwords.optim_wrapper.loop import data_position
from lastwords.optim_wrapper.loop.data_position import known_at_resume
from tests.ledgers import told
from tests.optim_wrapper.test_loader_changes import data_of
from tests.optim_wrapper.test_steps import BATCH, BATCHES, SAMPLES, Run, after, forget, resumed, seeded, whole_run


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


@pytest.mark.ci
@pytest.mark.parametrize(("epoch", "step"), [(1, 1), (1, 3), (2, 2), (1, BATCHES), (2, BATCHES)])
def test_a_data_set_that_counts_what_it_gives_goes_on_counting(epoch: int, step: int) -> None:
    """Its done batches are not fetched again, so that nothing counts there."""
    whole = whole_run(counting, epochs=3)
    again = resumed(whole, counting, epoch, step, epochs=3)
    assert again.record == after(whole.record, epoch, step)
    assert told(again) == []
    forget(whole)
    control = resumed(whole, counting, epoch, step, epochs=3)
    assert control.record != after(whole.record, epoch, step)


class Levels(Run):
    """The loop raises the level of its data set in every second step."""

    def step_end(self, epoch: int, step: int) -> None:
        if step % 2 == 0:
            self.loader.dataset.level += 1
        super().step_end(epoch, step)

    def train(self, **kwargs: Any) -> Run:
        self.loader = kwargs["loader"]
        return super().train(**kwargs)


@pytest.mark.parametrize(("epoch", "step"), [(1, 1), (1, 3), (2, 2), (1, BATCHES), (2, BATCHES)])
def test_a_level_that_the_loop_raises_is_what_it_was(epoch: int, step: int) -> None:
    whole = whole_run(counting, Levels(), epochs=3)
    again = resumed(whole, counting, epoch, step, Levels(), epochs=3)
    assert again.record == after(whole.record, epoch, step)
    assert told(again) == []


class Wrapped:
    """As accelerate and Fabric wrap a loader: neither a DataLoader nor of the user's own, and it counts its epochs."""

    __module__ = pytest.__name__

    def __init__(self, loader: Any) -> None:
        self.loader, self.epochs = loader, 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        for batch in self.loader:
            yield batch, self.epochs


@pytest.mark.parametrize(("epoch", "step"), [(1, 3), (2, 2), (2, BATCHES), (3, 1)])
def test_a_loader_of_an_installed_package_goes_on_in_its_order_and_counts_on(epoch: int, step: int) -> None:
    def make() -> Any:
        return Wrapped(DataLoader(range(SAMPLES), BATCH, shuffle=True, generator=seeded(5)))  # type: ignore[arg-type]

    whole = whole_run(make, epochs=4)
    again = resumed(whole, make, epoch, step, epochs=4)
    assert again.record == after(whole.record, epoch, step)
    assert told(again) == []


class Collator:
    """Says how many batches it has made."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, rows: Any) -> Any:
        self.made += 1
        return torch.stack([torch.as_tensor(row) for row in rows]) + self.made

    collate = __call__


class Calls:
    """Of an installed package: it calls what it holds."""

    __module__ = pytest.__name__

    def __init__(self, *of: Any) -> None:
        self.of = of

    def __call__(self, rows: Any) -> Any:
        return self.of[0](rows)


BEHIND: dict[str, Callable[[Collator], Any]] = {
    "library": Calls,
    "two libraries": lambda collator: Calls(Calls(collator)),
    "partial": functools.partial,
    "method": lambda collator: collator.collate,
    "method in a library": lambda collator: Calls(collator.collate),
}


@pytest.mark.parametrize("behind", BEHIND)
def test_a_collator_that_counts_behind_what_is_a_librarys_goes_on_counting(behind: str) -> None:
    def make() -> Any:
        return DataLoader(range(SAMPLES), BATCH, collate_fn=BEHIND[behind](Collator()))  # type: ignore[arg-type]

    whole = whole_run(make, epochs=3)
    again = resumed(whole, make, 2, 2, epochs=3)
    assert again.record == after(whole.record, 2, 2)
    assert told(whole.attributes) == told(again.attributes) == told(again) == []


def test_a_collator_that_counts_goes_on_counting() -> None:
    def make() -> Any:
        return DataLoader(range(SAMPLES), BATCH, collate_fn=Collator())  # type: ignore[arg-type]

    whole = whole_run(make, epochs=3)
    again = resumed(whole, make, 2, 2, epochs=3)
    assert again.record == after(whole.record, 2, 2)
    assert told(again) == []


@pytest.mark.parametrize("behind", BEHIND)
def test_what_does_not_change_behind_it_is_not_told(behind: str) -> None:
    class Constant(Collator):
        def __call__(self, rows: Any) -> Any:
            return torch.stack([torch.as_tensor(row) for row in rows])

        collate = __call__

    def make() -> Any:
        return DataLoader(range(SAMPLES), BATCH, collate_fn=BEHIND[behind](Constant()))  # type: ignore[arg-type]

    whole = whole_run(make, epochs=3)
    again = resumed(whole, make, 2, 2, epochs=3)
    assert again.record == after(whole.record, 2, 2)
    assert told(whole.attributes) == told(again.attributes) == told(again) == []


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
        assert known_at_resume(data, step) == [reason], "resume() says it already"
    for epoch, step in ((1, 1), (1, BATCHES)):
        again = resumed(whole, make, epoch, step, epochs=2)
        assert again.record == after(whole.record, epoch, step)
        assert again.steps is not None
        assert told(again) == known_at_resume(data, step) == []


def test_an_order_that_is_drawn_from_a_stream_of_its_own_is_exact() -> None:
    def make() -> Any:
        return DataLoader(Buffer(OfOwn()), BATCH)

    whole = whole_run(make, epochs=2)
    again = resumed(whole, make, 2, 3, epochs=2)
    assert again.record == after(whole.record, 2, 3)
    assert again.steps is not None
    assert told(again) == known_at_resume(data_of(whole.steps), 3) == []


def test_the_examples_in_the_docstrings_are_right() -> None:
    assert doctest.testmod(data_position).failed == 0
