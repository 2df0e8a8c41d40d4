"""Whether the loader of a resumed loop is that of the saved run. What it is like goes into the checkpoint; what differs
is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from lastwords.optim_wrapper.loop.global_samples import Carried, carry, samples_seen

_LABELS = {
    "loader": "type of the loader",
    "dataset": "type of the data set",
    "samples": "samples in the data set",
    "sampler": "type of the sampler",
    "batch_sampler": "type of the batch sampler",
    "batch_size": "batch size",
    "drop_last": "drop_last of the loader",
    "accumulate": "batches in a step",
    "shuffle": "shuffle of the sampler",
    "seed": "seed of the sampler",
    "replacement": "replacement of the sampler",
    "drawn": "samples that the sampler draws",
    "workers": "workers of the loader, in which the data set may draw random numbers",
    "batches": "batches in an epoch",
}
_OF_BATCHES = frozenset({"batch_size", "drop_last", "batches", "accumulate"})


def about(loader: Any, batches: int, accumulate: int) -> dict[str, Any]:
    """What the batches of a loader depend on, as JSON for the checkpoint; what cannot be seen is left out.

    >>> about(DataLoader(range(9), 2), 5, 1)["batch_size"], about([1, 2], 2, 1)
    (2, {'loader': 'builtins.list', 'batches': 2, 'accumulate': 1})
    """
    dataset, batch_sampler = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None) or getattr(loader, "sampler", None)
    found = {
        "loader": _kind(loader),
        "dataset": None if dataset is None else _kind(dataset),
        "samples": _length(dataset),
        "sampler": None if sampler is None else _kind(sampler),
        "batch_sampler": None if batch_sampler is None else _kind(batch_sampler),
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
    return {name: value for name, value in found.items() if isinstance(value, int | str)}


def changes(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """One sentence for each thing that differs; the number of batches only where nothing else says why.

    >>> changes({"batch_size": 4, "batches": 6}, {"batch_size": 8, "batches": 3})
    ['batch size: 4 in the saved run, 8 here']
    """
    different = [name for name in _LABELS if saved.get(name) != here.get(name)]
    if len(different) > 1:
        different = [name for name in different if name != "batches"]
    return [
        f"{_LABELS[name]}: {saved.get(name, 'unknown')} in the saved run, {here.get(name, 'unknown')} here"
        for name in different
    ]


@dataclass(frozen=True, slots=True)
class Onward:
    """Where a resumed loop goes on in its data: see `Carried`. counted, draws: of `Counters` and `Draws` as saved."""

    carried: Carried | None = None
    reasons: tuple[str, ...] = ()
    counted: Mapping[str, Any] = field(default_factory=dict)
    draws: Mapping[str, Any] = field(default_factory=dict)


def onward(resumed: Any, loader: Any, accumulate: int, world_size: int) -> Onward:
    """For a loop that goes on after `resumed`, a `Resumed`; None: from the beginning."""
    if resumed is None or resumed.position is None:
        return Onward()
    carried, why = carry(resumed.data, resumed.epoch, resumed.step, loader, accumulate, world_size)
    reasons = [why] if why else []
    data = resumed.data
    saved = data.get("inputs")
    if saved is not None and data.get("world_size", world_size) == world_size and hasattr(loader, "__len__"):
        here = about(loader, len(loader), accumulate)
        differ = {name for name in _LABELS if saved.get(name) != here.get(name)}
        again = data.get("carried", {}).get("epoch") == resumed.epoch
        if carried is None and (differ or again) and differ <= _OF_BATCHES and is_redealt(loader):
            carried = redealt(data, saved, resumed.epoch, resumed.step, loader)
        reasons += changes(saved, here)
    return Onward(carried, tuple(reasons), data.get("counters", {}), data.get("draws", {}))


def is_redealt(loader: Any) -> bool:
    """Whether the loader's order is drawn by torch's RandomSampler at the epoch's start, whatever the batch size."""
    return (
        type(loader) is DataLoader
        and type(loader.sampler) is RandomSampler
        and type(loader.batch_sampler) is BatchSampler
        and not hasattr(loader.dataset, "__iter__")
    )


def redealt(data: Mapping[str, Any], saved: Mapping[str, Any], epoch: int, step: int, loader: Any) -> Carried:
    """What is left of an epoch of RandomSampler for batches of another size: its order is drawn again, and cut."""
    drawn = len(loader.sampler)
    deal = {"samples": drawn, "replicas": 1, "batch_size": saved["batch_size"]}
    whole_epoch = "carried" not in data and step >= data.get("steps_per_epoch", 0) > 0
    first = drawn if whole_epoch else samples_seen({**data, "dealing": deal}, epoch, step)
    left, size = drawn - first, loader.batch_size
    batches = left // size if loader.drop_last else -(-left // size)
    return Carried(epoch, first, step, (), batches, drawn=True)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None
