"""The whole numbers that a loader, its sampler or its data set move, and where they stand in a resumed run.

"How often I have been iterated over", "how many samples I gave", a level that the loop raises: they begin anew in a
new process, and give an epoch the order, or its samples the values, of another one. They are set to what they were
when the epoch began, as the batches that are done are passed over from there, and then to what they were at the end of
the step. What another than the newest writer of a checkpoint counts is taken to be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from lastwords.processor.recurrence import Forecast, Recurrence

_DEPTH_MAX = 4
_OBJECTS_MAX = 500
EPOCHS_KEPT = 2
STEPS_KEPT = 3
"""The one that is saved, the one after it that this rank may be in, and one more."""


class Counters:
    """The whole numbers that move in a loader, without those that `set_epoch` sets.

    facts, for the checkpoint: {"of": epoch -> name -> [at the epoch's start, moved by its first batch, moved since the
    epoch before], "at": "epoch/step" -> `_entry`}, of the newest epochs and steps. The second of the three is None
    where the next batch has moved it again. "at" is empty as long as nothing has moved.
    """

    def __init__(self, loader: Any, steps_per_epoch: int = 0) -> None:
        self._loader = loader
        self._steps_per_epoch = steps_per_epoch
        self.facts: dict[str, dict[str, Any]] = {"of": {}, "at": {}}
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
        entries: dict[str, list[Any]] = {}
        for name, start in self._starts.items():
            by_first = firsts.get(name, start) - start if firsts.get(name) == seconds.get(name) else None
            since = start - self._before[name] if name in self._before else None
            if name not in self._told and (by_first != 0 or since or name in self._moved):
                entries[name] = [start, by_first, since]
        kept = {key: entry for key, entry in self.facts["of"].items() if key != str(epoch)}
        newest = sorted(kept, key=int)[1 - EPOCHS_KEPT :]
        # One store: the writer of a checkpoint may be reading.
        self.facts["of"] = {**{key: kept[key] for key in newest}, str(epoch): entries}

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
        """`_entry`: values as they are now; whether the step has yet to end; in which steps the loop moved any."""
        values = {
            name: value
            for (name, _, _), value in zip(self._watched, self._last, strict=True)
            if name in self._moved and value is not None
        }
        key = f"{epoch}/{step}"
        kept = [(other, entry) for other, entry in self.facts["at"].items() if other != key][1 - STEPS_KEPT :]
        entry = {"values": values, "cut": cut, "in_body": list(self._in_body.numbers)}
        self.facts["at"] = {**dict(kept), key: entry}  # one store, as above

    # ------------------------------------------------------------------ resume

    @staticmethod
    def knows(facts: Mapping[str, Any], epoch: int, step: int) -> bool:
        """Whether the saved run says where they stood in this step."""
        return f"{epoch}/{step}" in facts.get("at", {})

    def set_on(self, facts: Mapping[str, Any], epoch: int, step: int) -> list[str]:
        """Set them to where they stood at the end of `step`, which the saved run knows. Returns why that failed."""
        entry = facts["at"][f"{epoch}/{step}"]
        places, values = dict(_places(self._loader)), entry["values"]
        for name in values.keys() & places.keys():
            names, key = places[name]
            names[key] = values[name]
        self.look()
        self._moved |= values.keys()
        self._in_body = Recurrence(*entry["in_body"])
        self.facts["at"] = {f"{epoch}/{step}": {**entry, "cut": False}}
        return [f"{name} counts the loader's epochs, and is not there" for name in sorted(values.keys() - places)]

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
                reasons.append(f"{name} counts while the loader is iterated over, and cannot be restored")
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
    if type(thing).__module__ == DataLoader.__module__ and not isinstance(thing, DataLoader):
        return True  # its iterators, which count for themselves
    home = type(thing).__module__.partition(".")[0]
    return home in ("numpy", "multiprocessing", "threading", "logging", "lastwords")


def known_at_resume(data: Mapping[str, Any], epoch: int, step: int) -> list[str]:
    """Why a loop that goes on after this step is not exact, as far as the saved run knew.

    data: what `Steps.facts` had said.

    >>> known_at_resume({"draws": {"reason": "it draws"}, "accumulate": 1, "steps_per_epoch": 4}, 1, 4)
    []
    """
    reasons, per_epoch = [], data.get("steps_per_epoch", 0)
    drawn = data.get("draws", {}).get("reason", "")
    if drawn and step * data.get("accumulate", 1) > 1 and step < per_epoch:
        reasons.append(drawn)
    entry = data.get("counters", {}).get("at", {}).get(f"{epoch}/{step}")
    if entry is not None and entry["cut"]:
        number = (epoch - 1) * per_epoch + step
        forecast = Recurrence(*entry["in_body"]).forecast(number, step == per_epoch, 1)
        if forecast not in (Forecast.NEVER, Forecast.NOT_DUE):
            names = ", ".join(sorted(entry["values"]))
            reasons.append(
                f"step {number} was interrupted before its end, and within a step the loop changes counters "
                f"of the loader ({names}): this {forecast.value}"
            )
    return reasons
