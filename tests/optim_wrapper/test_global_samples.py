"""After a resume on another number of ranks every sample of the epoch has been seen once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler

from lastwords.checkpoint.meta import LoopFacts
from lastwords.optim_wrapper.loop.loader_changes import Carried, Onward, carry, dealing
from lastwords.optim_wrapper.loop.steps import ResumeAt, Steps
from tests.ledgers import told


class Numbers(Dataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Quiet:
    """Hears nothing."""

    def epoch_start(self, epoch: int) -> None: ...
    def under_way(self, epoch: int, step: int) -> None: ...
    def step_end(self, epoch: int, step: int) -> None: ...
    def round_over(self, epoch: int, step: int) -> None: ...


def loader(samples: int, ranks: int, rank: int, batch: int, *, shuffle: bool = True, **options: Any) -> DataLoader[int]:
    data = Numbers(samples)
    sampler = DistributedSampler(data, ranks, rank, shuffle=shuffle, seed=3)
    return DataLoader(data, batch_size=batch, sampler=sampler, **options)


def run(
    samples: int,
    ranks: int,
    batch: int,
    accumulate: int,
    epochs: int,
    at: tuple[int, int] = (1, 0),
    data: LoopFacts | None = None,
) -> tuple[list[tuple[int, int, int]], LoopFacts]:
    """(epoch, step, sample) of all ranks, and the facts that a checkpoint of this run would have."""
    seen = []
    facts = LoopFacts()
    for rank in range(ranks):
        own = loader(samples, ranks, rank, batch)
        carried: Carried | None = None
        if data is not None:
            carried, why = carry(data, *at, own, accumulate)
            assert why == ""
        resume = None if data is None else ResumeAt(*at, lambda: None, lambda: None)
        steps = Steps(own, epochs, accumulate=accumulate, events=Quiet(), resume=resume, onward=Onward(carried))
        for epoch, step, values in steps:
            seen += [(epoch, step, int(value)) for value in values]
        facts = steps.facts(ranks)
    return seen, facts


def upto(seen: list[tuple[int, int, int]], at: tuple[int, int]) -> list[tuple[int, int, int]]:
    return [one for one in seen if one[:2] <= at]


sizes = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))  # ranks, batch size, accumulate


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(24, 60), sizes, sizes, sizes, st.data())
def test_every_sample_is_seen_once_however_often_the_ranks_change(
    samples: int, first: Any, second: Any, third: Any, data: st.DataObject
) -> None:
    whole, facts = run(samples, *first, epochs=2)
    at = data.draw(st.sampled_from(sorted({one[:2] for one in whole if one[0] == 1})))
    past = upto(whole, at)
    more, facts = run(samples, *second, epochs=2, at=at, data=facts)
    if (here := sorted({one[:2] for one in more if one[0] == 1})) and here[0] == (1, at[1] + 1):
        again = data.draw(st.sampled_from(here))
        past += upto(more, again)
        more, _ = run(samples, *third, epochs=2, at=again, data=facts)
        ranks = (first[0], second[0], third[0])
    else:
        ranks = (first[0], second[0], second[0])
    for epoch in (1, 2):
        values = [value for number, _, value in past + more if number == epoch]
        assert set(values) == set(range(samples)), "nothing is left out"
        assert len(values) - samples < max(ranks), "only what makes the last ranks even is seen again"


def test_going_on_by_steps_instead_would_see_samples_twice() -> None:
    """The control: what the numbers of steps alone would do."""
    whole, _ = run(40, 4, 2, 1, 1)
    more = []
    for rank in range(2):
        steps = Steps(loader(40, 2, rank, 2), 1, events=Quiet(), resume=ResumeAt(1, 2, lambda: None, lambda: None))
        more += [int(value) for _, _, values in steps for value in values]
    values = [value for _, _, value in upto(whole, (1, 2))] + more
    assert len(values) > len(set(values))


def test_the_same_dealing_needs_nothing_carried() -> None:
    _, facts = run(40, 4, 2, 1, 1)
    assert carry(facts, 1, 2, loader(40, 4, 1, 2), 1) == (None, "")


def test_what_is_left_is_dealt_by_workers_that_persist_too_and_the_next_epoch_is_whole() -> None:
    _, facts = run(24, 4, 2, 1, 1)
    own = loader(24, 1, 0, 2, num_workers=1, persistent_workers=True)
    carried, _ = carry(facts, 1, 1, own, 1)
    steps = Steps(own, 2, events=Quiet(), resume=ResumeAt(1, 1, lambda: None, lambda: None), onward=Onward(carried))
    counts = {1: 0, 2: 0}
    for epoch, _, values in steps:
        counts[epoch] += len(values)
    assert counts == {1: 16, 2: 24}


def test_the_order_of_what_is_left_is_known_without_the_random_streams_of_the_epochs_start() -> None:
    _, facts = run(24, 4, 2, 1, 1)
    own = loader(24, 1, 0, 2)
    carried, _ = carry(facts, 1, 1, own, 1)
    steps = Steps(own, 1, events=Quiet(), resume=ResumeAt(1, 1, None, lambda: None), onward=Onward(carried))
    assert len([*steps]) == 8
    assert told(steps) == []


def test_an_epoch_of_which_nothing_is_left_does_not_begin_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    _, facts = run(24, 4, 2, 1, 1)
    own = loader(24, 2, 0, 2)
    carried, _ = carry(facts, 1, 3, own, 1)
    begun: list[int] = []
    monkeypatch.setattr(Quiet, "epoch_start", lambda _, epoch: begun.append(epoch))
    at = ResumeAt(1, 3, lambda: None, lambda: None)
    assert len([*Steps(own, 2, events=Quiet(), resume=at, onward=Onward(carried))]) == 6
    assert begun == [2]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda: DataLoader(Numbers(40), sampler=RandomSampler(Numbers(40))), "does not expose"),
        (lambda: DataLoader(Numbers(40), batch_sampler=BatchSampler(range(40), 2, False)), "does not expose"),
        (lambda: loader(41, 2, 0, 2), "samples: 40 in the saved run, 41 here"),
        (lambda: loader(40, 2, 0, 2, shuffle=False), "shuffle: True in the saved run, False here"),
    ],
)
def test_a_position_that_cannot_be_carried_says_why(other: Any, why: str) -> None:
    _, facts = run(40, 4, 2, 1, 1)
    carried, said = carry(facts, 1, 2, other(), 1)
    assert carried is None
    assert why in said


def test_a_loader_that_is_not_divided_goes_on_from_one_that_was() -> None:
    own = [loader(20, 2, rank, 2, shuffle=False) for rank in range(2)]
    facts = LoopFacts(steps_per_epoch=5, dealing=dealing(own[0]))
    carried, why = carry(facts, 1, 2, DataLoader(Numbers(20), batch_size=3), 1)
    assert why == ""
    assert carried is not None
    assert carried.indices == tuple(range(8, 20))
    assert torch.equal(torch.cat(list(carried.open(DataLoader(Numbers(20), batch_size=3)))), torch.arange(8, 20))
