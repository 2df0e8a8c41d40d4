"""A data position that does not depend on how many ranks there are: samples of the epoch that all of them have seen.

torch's DistributedSampler puts an epoch's samples in one order and deals them out like cards: rank r of R gets every
R-th, beginning with r. So after k batches of b samples on each rank, exactly the first k * b * R of that order have
been seen, and the rest can be dealt to any other number of ranks. Each sample of the epoch is seen once, but for what
a sampler does at an epoch's end anyway: the last ranks get a sample again so that all have equally many, or, with
drop_last, what does not divide is left out.

The step that was under way counts as not seen. A step of another size (other ranks, batch size, accumulate) moves the
numbers of the steps: the resumed epoch goes on counting from its last step and ends with another one than usual.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

_OF_THE_ORDER = ("samples", "shuffle", "seed")


def dealing(loader: Any) -> dict[str, Any]:
    """How a loader deals out its samples, as JSON for the checkpoint; empty where that is not known.

    >>> dealing(DataLoader(range(9), batch_size=2))
    {'samples': 9, 'shuffle': False, 'seed': 0, 'replicas': 1, 'batch_size': 2, 'drop_last': False, 'even': False}
    """
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return {}
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return {}
    sampler: Any = loader.sampler
    size = {"batch_size": loader.batch_size, "drop_last": bool(loader.drop_last)}
    if isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
        samples = len(sampler.dataset)  # type: ignore[arg-type]
        order = {"samples": samples, "shuffle": sampler.shuffle, "seed": sampler.seed if sampler.shuffle else 0}
        return {**order, "replicas": sampler.num_replicas, **size, "even": bool(sampler.drop_last)}
    if type(sampler) is SequentialSampler:
        order = {"samples": len(sampler.data_source), "shuffle": False, "seed": 0}
        return {**order, "replicas": 1, **size, "even": False}
    return {}


def samples_seen(data: Mapping[str, Any], epoch: int, step: int) -> int:
    """Samples of the epoch that the saved run had seen after `step`, over all ranks; `data` is its facts.

    >>> deal = {"samples": 50, "replicas": 4, "batch_size": 3, "drop_last": False, "even": False}
    >>> [samples_seen({"dealing": deal, "accumulate": 2}, 1, step) for step in (0, 1, 2, 3)]
    [0, 24, 48, 50]
    """
    deal, carried = data["dealing"], data.get("carried", {})
    first, first_step = 0, 0
    if carried.get("epoch") == epoch:
        first, first_step = carried["first"], carried["first_step"]
    seen = first + (step - first_step) * data["accumulate"] * deal["batch_size"] * deal["replicas"]
    return int(min(seen, deal["samples"]))


@dataclass(frozen=True)
class Carried:
    """What is left of `epoch`: `indices` are this rank's. `first` samples were seen before, in `first_step` steps.

    drawn: the sampler draws the epoch's order from the random streams at its start; what comes after `first` is left.
    """

    epoch: int
    first: int
    first_step: int
    indices: tuple[int, ...]
    batches: int
    drawn: bool = False

    def facts(self) -> dict[str, int]:
        """For the checkpoints of this run."""
        return {"epoch": self.epoch, "first": self.first, "first_step": self.first_step}

    def open(self, loader: Any) -> Iterator[Any]:
        """An iterator over the rest. Workers that persist are made with the next epoch."""
        indices: Any = self.indices
        if self.drawn:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as the iterator, for its workers
            indices = list(loader.sampler)[self.first :]
        sampler: Any = BatchSampler(indices, loader.batch_size, loader.drop_last)
        kept = {name: loader.__dict__[name] for name in ("batch_sampler", "persistent_workers")}
        # As in `skipping_iterator`: in place only while the iterator is being made.
        loader.__dict__.update(batch_sampler=sampler, persistent_workers=False)
        try:
            iterator: Iterator[Any] = iter(loader)
            return iterator
        finally:
            loader.__dict__.update(kept)


def carry(
    data: Mapping[str, Any], epoch: int, step: int, loader: Any, accumulate: int, world_size: int = 0
) -> tuple[Carried | None, str]:
    """Where to go on in `epoch` after the saved `step`. None: by the number of steps, and why that is not right, or "".

    data: facts of the saved run's. world_size: ranks here. Nothing has to be carried where both runs deal alike.
    """
    if "dealing" not in data:
        return None, ""  # a loop of the user's own, who knows
    saved, here = data["dealing"], dealing(loader)
    again = data.get("carried", {}).get("epoch") == epoch
    unknown = not here and data.get("world_size", world_size) != world_size
    if saved == here and data.get("accumulate") == accumulate and not again and not unknown:
        return None, ""
    if not saved or not here:
        return None, (
            "the number of ranks or the loader has changed, and the loader does not expose how it "
            "distributes samples over ranks, so the data continues by step count: some samples of this epoch "
            "may be used twice or not at all; "
            "use torch's DistributedSampler"
        )
    different = [name for name in _OF_THE_ORDER if saved[name] != here[name]]
    if different:
        said = ", ".join(f"{name}: {saved[name]} in the saved run, {here[name]} here" for name in different)
        return None, f"the samples of an epoch come in a different order ({said}), so the data continues by step count"
    whole_epoch = not again and step >= data.get("steps_per_epoch", 0) > 0
    first = saved["samples"] if whole_epoch else samples_seen(data, epoch, step)
    indices = _dealt(loader, epoch, first, here)
    size = here["batch_size"]
    batches = len(indices) // size if here["drop_last"] else -(-len(indices) // size)
    return Carried(epoch, first, step, indices, batches), ""


def _dealt(loader: Any, epoch: int, first: int, deal: Mapping[str, Any]) -> tuple[int, ...]:
    """This rank's share of what is left of the epoch's order."""
    sampler, ranks = loader.sampler, deal["replicas"]
    if not isinstance(sampler, DistributedSampler):
        return tuple(range(first, deal["samples"]))
    alone: Any = copy.copy(sampler)
    alone.num_replicas, alone.rank, alone.drop_last = 1, 0, False
    alone.num_samples = alone.total_size = deal["samples"]
    alone.set_epoch(epoch - 1)
    rest = list(alone)[first:]
    over = len(rest) % ranks
    if over and sampler.drop_last:
        rest = rest[:-over]
    elif over:
        rest += (rest * ranks)[: ranks - over]
    return tuple(rest[sampler.rank :: ranks])
