"""The whole numbers that a loader, its sampler or its data set move, and where they stand in a resumed run.

"How often I have been iterated over", "how many samples I gave", a level that the loop raises: they begin anew in a
new process, and give an epoch the order, or its samples the values, of another one. They are set to what they were
when the epoch began, as the batches that are done are passed over from there, and then to what they were at the end of
the step. What another than the newest writer of a checkpoint counts is taken to be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from lastwords.checkpoint.run_facts import Counts, EpochCount, LoopFacts, StepCounts
from lastwords.processor.recurrence import Forecast, Recurrence

_DEPTH_MAX = 4
_OBJECTS_MAX = 500


class Counters:
    """The whole numbers that move in a loader, without those that `set_epoch` sets.

    counts: for the checkpoint. Another object whenever it changes: the writer of a checkpoint may be reading.
    """

    def __init__(self, loader: Any, steps_per_epoch: int = 0) -> None:
        self._loader = loader
        self._steps_per_epoch = steps_per_epoch
        self.counts = Counts()
        self._watched: list[tuple[str, dict[str, Any], str]] = []
        self._last: list[Any] = []
        self._moved: set[str] = set()
        self._in_body = Recurrence()
        self._told: set[str] = set()
        self._starts: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._firsts: dict[str, int] = {}

    def let_go(self) -> None:
        """The loop is over: the loader is no business of this object any more."""
        self._loader = None
        self._watched, self._last = [], []

    def tell(self, set_epoch: Callable[[], None]) -> None:
        """Let the sampler know its epoch: what that sets needs no setting back."""
        before = _values(self._loader)
        set_epoch()
        self._told |= {name for name, value in _values(self._loader).items() if before.get(name) != value}

    def epoch_starts(self, epoch: int) -> None:
        """Nothing of the epoch has been drawn."""
        self._before, self._starts, self._firsts = self._starts, _values(self._loader), {}
        self.look()
        self._write(epoch, self._starts, self._starts)

    def has_batches(self, epoch: int, count: int) -> None:
        """So many batches of the epoch, which was begun here, have been fetched."""
        if self._starts and count == 1:
            self._firsts = _values(self._loader)
            self.look()
            self._write(epoch, self._firsts, self._firsts)
        elif self._firsts and count == 2:
            self._write(epoch, self._firsts, _values(self._loader))

    def _write(self, epoch: int, firsts: Mapping[str, int], seconds: Mapping[str, int]) -> None:
        entries: dict[str, EpochCount] = {}
        for name, start in self._starts.items():
            by_first = firsts.get(name, start) - start if firsts.get(name) == seconds.get(name) else None
            since = start - self._before[name] if name in self._before else None
            if name not in self._told and (by_first != 0 or since or name in self._moved):
                entries[name] = EpochCount(start, by_first, since)
        self.counts = self.counts.with_epoch(epoch, entries)

    # ------------------------------------------------------------------ each step

    def look(self) -> None:
        """Find the numbers anew; those that have moved since they were last read are known then."""
        before = {name: value for (name, _, _), value in zip(self._watched, self._last, strict=True)}
        places = [(name, *place) for name, place in _places(self._loader) if name not in self._told]
        self._watched = places
        self._last = [names.get(key) for _, names, key in places]
        self._moved |= {name for name, names, key in places if name in before and before[name] != names.get(key)}

    def fetched(self, epoch: int, step: int) -> None:
        """A batch of this step is here."""
        if self._read() or self._moved:
            self._enter(epoch, step, cut=True)

    def ended(self, epoch: int, step: int) -> None:
        """The loop's body is done with it; once more where it has said so before it was."""
        if self._read():
            number = (epoch - 1) * self._steps_per_epoch + step
            if self._in_body.last != number:
                self._in_body = self._in_body.happened(number, step == self._steps_per_epoch)
        if self._moved:
            self._enter(epoch, step, cut=False)

    def _read(self) -> bool:
        """Whether any has moved since they were last read."""
        now = [names.get(key) for _, names, key in self._watched]
        if now == self._last:
            return False
        self._moved |= {entry[0] for entry, old, new in zip(self._watched, self._last, now, strict=True) if old != new}
        self._last = now
        return True

    def _enter(self, epoch: int, step: int, *, cut: bool) -> None:
        """Values as they are now. cut: the step has yet to end."""
        values = {
            name: value
            for (name, _, _), value in zip(self._watched, self._last, strict=True)
            if name in self._moved and value is not None
        }
        self.counts = self.counts.with_step(epoch, step, StepCounts(values, cut, self._in_body.numbers))

    # ------------------------------------------------------------------ resume

    def set_on(self, saved: StepCounts, epoch: int, step: int) -> list[str]:
        """Set them to where they stood at the end of `step` of the saved run. Returns why that failed."""
        places, values = dict(_places(self._loader)), saved.values
        for name in values.keys() & places.keys():
            names, key = places[name]
            names[key] = values[name]
        self.look()
        self._moved |= values.keys()
        self._in_body = Recurrence(*saved.in_body)
        self.counts = Counts(self.counts.of).with_step(epoch, step, replace(saved, cut=False))
        return [f"{name} counts the loader's epochs, and is not there" for name in sorted(values.keys() - places)]

    def set_back(self, saved: Mapping[str, EpochCount], epoch: int, *, replayed: bool) -> list[str]:
        """Set the counters to where they were when `epoch` began, or, not replayed, to where they stand after it.

        saved: of this epoch, by the saved run. Returns why that cannot be done.
        """
        reasons = []
        places = dict(_places(self._loader))
        for name, count in saved.items():
            value = count.start if replayed else count.after
            if name not in places:
                reasons.append(f"{name} counts the loader's epochs, and is not there")
            elif value is None:
                reasons.append(f"{name} counts while the loader is iterated over, and cannot be restored")
            else:
                names, key = places[name]
                names[key] = value
        if replayed:
            self.counts = Counts(at=self.counts.at).with_epoch(epoch, saved)
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
    if type(thing).__module__ == DataLoader.__module__ and not isinstance(thing, DataLoader):
        return True  # its iterators, which count for themselves
    home = type(thing).__module__.partition(".")[0]
    return home in ("numpy", "multiprocessing", "threading", "logging", "lastwords")


def known_at_resume(saved: LoopFacts, epoch: int, step: int) -> list[str]:
    """Why a loop that goes on after this step is not exact, as far as the saved run knew.

    >>> from lastwords.checkpoint.run_facts import Drawn
    >>> known_at_resume(LoopFacts(draws=Drawn("it draws"), steps_per_epoch=4), 1, 4)
    []
    """
    reasons, per_epoch = [], saved.steps_per_epoch
    if saved.draws.reason and step * saved.accumulate > 1 and step < per_epoch:
        reasons.append(saved.draws.reason)
    counts = saved.counters.in_step(epoch, step)
    if counts is not None and counts.cut:
        number = (epoch - 1) * per_epoch + step
        forecast = Recurrence(*counts.in_body).forecast(number, step == per_epoch, 1)
        if forecast not in (Forecast.NEVER, Forecast.NOT_DUE):
            names = ", ".join(sorted(counts.values))
            reasons.append(
                f"step {number} was interrupted before its end, and within a step the loop changes counters "
                f"of the loader ({names}): this {forecast.value}"
            )
    return reasons
