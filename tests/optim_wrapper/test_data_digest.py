"""Whether a resumed loop iterates over the same samples as the saved run did."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)

from lastwords.checkpoint.meta import Habits
from lastwords.optim_wrapper.capture.recorder import LoopHabits
from lastwords.optim_wrapper.loop import data_digest as module
from lastwords.optim_wrapper.loop.data_digest import data_digest


class Drawing(Dataset[Any]):
    """What must not be asked for a sample: it draws, and counts."""

    def __init__(self, length: int = 8) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("code of the user's own was run")


def split(seed: int) -> Any:
    return random_split(range(100), [80, 20], generator=torch.Generator().manual_seed(seed))[0]  # type: ignore[arg-type]


class Shuffled(Dataset[Any]):
    """Draws which samples it has, when it is made."""

    def __init__(self, seed: int) -> None:
        self.number = seed
        self.files = torch.randperm(9, generator=torch.Generator().manual_seed(seed)).tolist()


PAIRS = {
    "a data set that has drawn": (lambda: Shuffled(1), lambda: Shuffled(2)),
    "a split": (lambda: split(1), lambda: split(2)),
    "a split of what is not looked at": (lambda: Subset(Drawing(), [0, 1]), lambda: Subset(Drawing(), [1, 0])),
    "longer": (Drawing, lambda: Drawing(9)),
    "tensors": (lambda: TensorDataset(torch.arange(9.0)), lambda: TensorDataset(torch.arange(9.0).flip(0))),
    "an array": (lambda: np.arange(9), lambda: np.arange(1, 10)),
    "a list": (lambda: [[1, "a"], [2, "b"]], lambda: [[1, "a"], [2, "c"]]),
    "several": (lambda: ConcatDataset([split(1), split(1)]), lambda: ConcatDataset([split(1), split(2)])),
}


@pytest.mark.parametrize("what", PAIRS)
def test_other_samples_have_another_digest(what: str) -> None:
    one, other = PAIRS[what]
    assert data_digest(DataLoader(one())) == data_digest(DataLoader(one())) != data_digest(DataLoader(other()))


SAMPLERS = {
    "in order": SequentialSampler,
    "shuffled": RandomSampler,
    "of a rank": lambda data: DistributedSampler(data, num_replicas=2, rank=0),
    "some": lambda data: SubsetRandomSampler(range(len(data) - 1)),
}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("how", SAMPLERS)
def test_other_samples_to_choose_from_have_another_digest(how: str, batched: bool) -> None:
    digests = []
    for length in (8, 8, 9):
        sampler = SAMPLERS[how](Drawing(length))
        given: Any = {"batch_sampler": BatchSampler(sampler, 2, drop_last=False)} if batched else {"sampler": sampler}
        digests.append(data_digest(DataLoader(Unsized(), **given)))
    assert digests[0] == digests[1] != digests[2]


class Unsized(Dataset[Any]):
    """Who has a batch sampler needs no length."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("code of the user's own was run")


def test_what_cannot_be_seen_has_none_and_is_not_asked() -> None:
    assert data_digest(DataLoader(Unsized(), batch_sampler=[[0, 1]])) == data_digest(iter([1])) == ""


def test_a_run_that_goes_on_hears_of_other_data_once() -> None:
    said: list[int] = []
    loop = LoopHabits(lambda: said.append(1))
    loop.learn(Habits(data="a"))
    assert not loop.iterates_over("b")
    assert loop.iterates_over("b")
    assert loop.known.data == "b"
    assert said


@pytest.mark.parametrize(("before", "here"), [("", "a"), ("a", ""), ("a", "a")])
def test_what_either_run_has_not_seen_differs_in_nothing(before: str, here: str) -> None:
    loop = LoopHabits(lambda: None)
    loop.learn(Habits(data=before))
    assert loop.iterates_over(here)


def test_the_examples_in_the_docstring_are_right() -> None:
    assert doctest.testmod(module).failed == 0
