"""Whether the loader of a resumed loop is that of the saved run. What it is like goes into the checkpoint; what differs
is named.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lastwords.checkpoint.meta import Dealing, EpochBegun, Inputs, LoopFacts, differences
from lastwords.optim_wrapper.loop.data_position import opened_with
from lastwords.optim_wrapper.tensors.tensor_bytes import class_name

# A data position that does not depend on how many ranks there are: samples of the epoch that all of them have seen.
#
# torch's DistributedSampler puts an epoch's samples in one order and deals them out like cards: rank r of R gets every
# R-th, beginning with r. So after k batches of b samples on each rank, exactly the first k * b * R of that order have
# been seen, and the rest can be dealt to any other number of ranks. Each sample of the epoch is seen once, but for
# what a sampler does at an epoch's end anyway: the last ranks get a sample again so that all have equally many, or,
# with drop_last, what does not divide is left out.
#
# The step that was under way counts as not seen. A step of another size (other ranks, batch size, accumulate) moves
# the numbers of the steps: the resumed epoch goes on counting from its last step and ends with another one than usual.

_OF_THE_ORDER = ("samples", "shuffle", "seed")


def dealing(loader: Any) -> Dealing:
    """How a loader deals out its samples.

    >>> dealing(DataLoader(range(9), batch_size=2))
    Dealing(samples=9, shuffle=False, seed=0, replicas=1, batch_size=2, drop_last=False, even=False)
    >>> dealing([1, 2]).known
    False
    """
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return Dealing()
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return Dealing()
    sampler: Any = loader.sampler
    size, drops = loader.batch_size, bool(loader.drop_last)
    if isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
        samples = len(sampler.dataset)  # type: ignore[arg-type]
        seed, ranks = sampler.seed if sampler.shuffle else 0, int(sampler.num_replicas)
        return Dealing(samples, sampler.shuffle, seed, ranks, size, drops, bool(sampler.drop_last))
    if type(sampler) is SequentialSampler:
        return Dealing(len(sampler.data_source), replicas=1, batch_size=size, drop_last=drops)
    return Dealing()


def samples_seen(saved: LoopFacts, deal: Dealing, epoch: int, step: int) -> int:
    """Samples of the epoch that the saved run, which dealt them like this, had seen after `step`, over all ranks.

    >>> deal = Dealing(samples=50, replicas=4, batch_size=3)
    >>> [samples_seen(LoopFacts(accumulate=2), deal, 1, step) for step in (0, 1, 2, 3)]
    [0, 24, 48, 50]
    """
    begun = saved.begun(epoch)
    if begun is None and step >= saved.steps_per_epoch > 0:
        return deal.samples
    first, first_step = (0, 0) if begun is None else (begun.first, begun.first_step)
    return min(first + (step - first_step) * saved.accumulate * deal.batch_size * deal.replicas, deal.samples)


@dataclass(frozen=True)
class Carried:
    """What is left of an epoch that had been begun so: `indices` are this rank's, in so many `batches`.

    drawn: the sampler draws the epoch's order from the random streams at its start; what comes after `first` is left.
    """

    begun: EpochBegun
    indices: tuple[int, ...]
    batches: int
    drawn: bool = False

    def open(self, loader: Any) -> Iterator[Any]:
        """An iterator over the rest. Workers that persist are made with the next epoch."""
        indices: Any = self.indices
        if self.drawn:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as the iterator, for its workers
            indices = list(loader.sampler)[self.begun.first :]
        sampler: Any = BatchSampler(indices, loader.batch_size, loader.drop_last)
        return opened_with(loader, batch_sampler=sampler, persistent_workers=False)


def carry(
    data: LoopFacts, epoch: int, step: int, loader: Any, accumulate: int, world_size: int = 0
) -> tuple[Carried | None, str]:
    """Where to go on in `epoch` after the saved `step`. None: by the number of steps, and why that is not right, or "".

    data: of the saved run. world_size: ranks here. Nothing has to be carried where both runs deal alike.
    """
    saved, here = data.dealing, dealing(loader)
    if saved is None:
        return None, ""  # a loop of the user's own, who knows
    unknown = not here.known and data.world_size != world_size
    if saved == here and data.accumulate == accumulate and data.begun(epoch) is None and not unknown:
        return None, ""
    if not saved.known or not here.known:
        return None, (
            "the number of ranks or the loader has changed, and the loader does not expose how it "
            "distributes samples over ranks, so the data continues by step count: some samples of this epoch "
            "may be used twice or not at all; "
            "use torch's DistributedSampler"
        )
    pairs = {name: (getattr(saved, name), getattr(here, name)) for name in _OF_THE_ORDER}
    different = [f"{name}: {was} in the saved run, {now} here" for name, (was, now) in pairs.items() if was != now]
    if different:
        said = ", ".join(different)
        return None, f"the samples of an epoch come in a different order ({said}), so the data continues by step count"
    begun = EpochBegun(epoch, samples_seen(data, saved, epoch, step), step)
    indices = _dealt(loader, begun, here)
    size = here.batch_size
    batches = len(indices) // size if here.drop_last else -(-len(indices) // size)
    return Carried(begun, indices, batches), ""


def _dealt(loader: Any, begun: EpochBegun, deal: Dealing) -> tuple[int, ...]:
    """This rank's share of what is left of the epoch's order."""
    sampler, ranks = loader.sampler, deal.replicas
    if not isinstance(sampler, DistributedSampler):
        return tuple(range(begun.first, deal.samples))
    alone: Any = copy.copy(sampler)
    alone.num_replicas, alone.rank, alone.drop_last = 1, 0, False
    alone.num_samples = alone.total_size = deal.samples
    alone.set_epoch(begun.epoch - 1)
    rest = list(alone)[begun.first :]
    over = len(rest) % ranks
    if over and sampler.drop_last:
        rest = rest[:-over]
    elif over:
        rest += (rest * ranks)[: ranks - over]
    return tuple(rest[sampler.rank :: ranks])


_OF_BATCHES = frozenset({"batch_size", "drop_last", "batches", "accumulate"})


def about(loader: Any, batches: int, accumulate: int) -> Inputs:
    """What the batches of a loader depend on; None for what cannot be seen.

    >>> about(DataLoader(range(9), 2), 5, 1).batch_size, about([1, 2], 2, 1) == Inputs(
    ...     loader="builtins.list", batches=2, accumulate=1)
    (2, True)
    """
    dataset, batch_sampler = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None) or getattr(loader, "sampler", None)
    found = {
        "loader": class_name(loader),
        "dataset": None if dataset is None else class_name(dataset),
        "samples": _length(dataset),
        "sampler": None if sampler is None else class_name(sampler),
        "batch_sampler": None if batch_sampler is None else class_name(batch_sampler),
        "batch_size": getattr(batch_sampler, "batch_size", getattr(loader, "batch_size", None)),
        "drop_last": getattr(batch_sampler, "drop_last", getattr(loader, "drop_last", None)),
        "workers": getattr(loader, "num_workers", None),
        "shuffle": getattr(sampler, "shuffle", None),
        "seed": getattr(sampler, "seed", None),
        "replacement": getattr(sampler, "replacement", None),
        "drawn": None if isinstance(sampler, DistributedSampler) else getattr(sampler, "num_samples", None),
        "batches": batches,
        "accumulate": accumulate,
    }
    said: dict[str, Any] = {name: value for name, value in found.items() if isinstance(value, int | str)}
    return Inputs(**said)


@dataclass(frozen=True, slots=True)
class Onward:
    """Where a resumed loop goes on in its data: see `Carried`. saved: what the saved run knew of its loop."""

    carried: Carried | None = None
    reasons: tuple[str, ...] = ()
    saved: LoopFacts = field(default_factory=LoopFacts)


def onward(resumed: Any, loader: Any, accumulate: int, world_size: int) -> Onward:
    """For a loop that goes on after `resumed`, a `Resumed`; None: from the beginning."""
    if resumed is None or resumed.position is None:
        return Onward()
    data: LoopFacts = resumed.data
    carried, why = carry(data, resumed.epoch, resumed.step, loader, accumulate, world_size)
    reasons = [why] if why else []
    if data.inputs is not None and data.world_size == world_size and hasattr(loader, "__len__"):
        differ = differences(data.inputs, about(loader, len(loader), accumulate))
        again = data.begun(resumed.epoch) is not None
        if carried is None and (differ or again) and differ.keys() <= _OF_BATCHES and is_redealt(loader):
            carried = redealt(data, data.inputs, resumed.epoch, resumed.step, loader)
        if len(differ) > 1:
            differ.pop("batches", None)  # the others say why
        reasons += differ.values()
    if data.inputs is None and hasattr(loader, "__len__") and resumed.step > (most := -(-len(loader) // accumulate)):
        reasons.append(
            f"step {resumed.step} of epoch {resumed.epoch} was saved, but an epoch of steps() has {most} steps here, "
            f"so epoch {resumed.epoch} counts as over"
        )
    return Onward(carried, tuple(reasons), data)


def is_redealt(loader: Any) -> bool:
    """Whether the loader's order is drawn by torch's RandomSampler at the epoch's start, whatever the batch size."""
    return (
        type(loader) is DataLoader
        and type(loader.sampler) is RandomSampler
        and type(loader.batch_sampler) is BatchSampler
        and not hasattr(loader.dataset, "__iter__")
    )


def redealt(data: LoopFacts, saved: Inputs, epoch: int, step: int, loader: Any) -> Carried:
    """What is left of an epoch of RandomSampler for batches of another size: its order is drawn again, and cut."""
    drawn = len(loader.sampler)
    deal = Dealing(samples=drawn, replicas=1, batch_size=int(saved.batch_size or 0))
    first = samples_seen(data, deal, epoch, step)
    left, size = drawn - first, loader.batch_size
    batches = left // size if loader.drop_last else -(-left // size)
    return Carried(EpochBegun(epoch, first, step), (), batches, drawn=True)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None
