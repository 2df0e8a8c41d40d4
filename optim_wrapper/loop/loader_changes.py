"""Whether the loader of a resumed loop is that of the saved run, and where its own counters stand.

What a loader is like goes into the checkpoint; what differs is named. Whole numbers that a loader, its sampler or its
data set move from epoch to epoch ("how often I have been iterated over") begin anew in a new process, and give an epoch
the order of another one: they are set to what they were when the epoch began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
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
_DEPTH_MAX = 4
_OBJECTS_MAX = 500
EPOCHS_KEPT = 2


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
    ['batch size: 4 when it was saved, 8 here']
    """
    different = [name for name in _LABELS if saved.get(name) != here.get(name)]
    if len(different) > 1:
        different = [name for name in different if name != "batches"]
    return [
        f"{_LABELS[name]}: {saved.get(name, 'unknown')} when it was saved, {here.get(name, 'unknown')} here"
        for name in different
    ]


@dataclass(frozen=True, slots=True)
class Onward:
    """Where a resumed loop goes on in its data: see `Carried`. counted: of `Counters`, of the saved run."""

    carried: Carried | None = None
    reasons: tuple[str, ...] = ()
    counted: Mapping[str, Any] = field(default_factory=dict)


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
    return Onward(carried, tuple(reasons), data.get("counters", {}))


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


# --------------------------------------------------------------------------- counters


class Counters:
    """The whole numbers that a loader moves from epoch to epoch, without those that `set_epoch` sets.

    facts: {"of": epoch -> name -> [at the epoch's start, moved by its first batch, moved since the epoch before]}, for
    the checkpoint, of the newest epochs. The second is None where the next batch has moved it again.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.facts: dict[str, dict[str, dict[str, list[Any]]]] = {"of": {}}
        self._told: set[str] = set()
        self._starts: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._firsts: dict[str, int] = {}

    def let_go(self) -> None:
        """The loop is over: the loader is no business of this object any more."""
        self._loader = None

    def tell(self, set_epoch: Callable[[], None]) -> None:
        """Let the sampler know its epoch: what that sets needs no setting back."""
        before = _values(self._loader)
        set_epoch()
        self._told |= {name for name, value in _values(self._loader).items() if before.get(name) != value}

    def epoch_starts(self, epoch: int) -> None:
        """Nothing of the epoch has been drawn."""
        self._before, self._starts, self._firsts = self._starts, _values(self._loader), {}
        self._write(epoch, self._starts, self._starts)

    def has_batches(self, epoch: int, count: int) -> None:
        """So many batches of the epoch, which was begun here, have been fetched."""
        if self._starts and count == 1:
            self._firsts = _values(self._loader)
            self._write(epoch, self._firsts, self._firsts)
        elif self._firsts and count == 2:
            self._write(epoch, self._firsts, _values(self._loader))

    def _write(self, epoch: int, firsts: Mapping[str, int], seconds: Mapping[str, int]) -> None:
        entries: dict[str, list[Any]] = {}
        for name, start in self._starts.items():
            by_first = firsts.get(name, start) - start if firsts.get(name) == seconds.get(name) else None
            since = start - self._before[name] if name in self._before else None
            if name not in self._told and (by_first != 0 or since):
                entries[name] = [start, by_first, since]
        kept = {key: entry for key, entry in self.facts["of"].items() if key != str(epoch)}
        newest = sorted(kept, key=int)[1 - EPOCHS_KEPT :]
        # One store: the writer of a checkpoint may be reading.
        self.facts["of"] = {**{key: kept[key] for key in newest}, str(epoch): entries}

    def set_back(self, facts: Mapping[str, Any], epoch: int, *, replayed: bool) -> list[str]:
        """Set the counters to where they were when `epoch` began, or, not replayed, to where they stand after it.

        facts: of the saved run. Returns why that cannot be done.
        """
        reasons = []
        saved = facts.get("of", {}).get(str(epoch), {})
        places = dict(_places(self._loader))
        for name, (start, by_first, since) in saved.items():
            if name not in places:
                reasons.append(f"{name} counts the loader's epochs, and is not there")
            elif not replayed and (by_first is None or since not in (None, by_first)):
                reasons.append(f"{name} counts while the loader is iterated over, and cannot be set back")
            else:
                names, key = places[name]
                names[key] = start if replayed else start + by_first
        if replayed:
            self.facts["of"] = {str(epoch): {name: list(entry) for name, entry in saved.items()}}
        return reasons


def _values(loader: Any) -> dict[str, int]:
    return {name: names[key] for name, (names, key) in _places(loader)}


def _places(loader: Any) -> Iterator[tuple[str, tuple[dict[str, Any], str]]]:
    """Every whole number in an attribute of the loader or of an object below it: its name, and where to set it."""
    seen: set[int] = set()
    queue: list[tuple[Any, str, int]] = [(loader, "loader", 0)]
    while queue and len(seen) < _OBJECTS_MAX:
        thing, name, depth = queue.pop(0)
        names = getattr(thing, "__dict__", None)
        if type(names) is not dict or id(thing) in seen or _is_passed(thing):
            continue
        seen.add(id(thing))
        for key, value in list(names.items()):
            if type(value) is int:
                yield f"{name}.{key}", (names, key)
            elif depth < _DEPTH_MAX and hasattr(type(value), "__dict__") and type(value).__module__ != "builtins":
                queue.append((value, f"{name}.{key}", depth + 1))


def _is_passed(thing: Any) -> bool:
    if isinstance(thing, torch.Tensor | torch.nn.Module | type):
        return True
    home = type(thing).__module__.partition(".")[0]
    return home in ("numpy", "multiprocessing", "threading", "logging", "lastwords")


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None
