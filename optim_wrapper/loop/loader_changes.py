"""Whether the loader of a resumed loop is that of the saved run. What it is like goes into the checkpoint; what differs
is named.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from lastwords.checkpoint.meta import Begun, Dealing, Inputs, LoopFacts, differences
from lastwords.optim_wrapper.loop.global_samples import Carried, carry, samples_seen

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
    return Carried(Begun(epoch, first, step), (), batches, drawn=True)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None
