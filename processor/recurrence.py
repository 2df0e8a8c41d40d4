"""When something happens again: a forecast for a step that was cut off, from the steps in which it has happened before.

A rank can be caught between its update and the end of its step. What has not happened there by then (a scheduler's
step, the end of an epoch's validation) may have been about to. What has come in every step, at every end of an epoch,
or every so many steps is known; for everything else the forecast is UNKNOWN, also for what never came so far: averaged
weights that begin after a warm-up do not come before either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from lastwords.errors import some

REPEATS_MIN = 2
"""So many equal distances in a row make a period, where it is longer than one step; so many ends of epochs a habit."""


class Forecast(Enum):
    """Whether something happens in a certain step. The value completes a message that ends in "this"."""

    DUE = "happens in every step"
    AT_END = "happens at the end of an epoch"
    IN_TURN = "happens every few steps, this step included"
    STOPPED = "happened in every step until it stopped, and may start again"
    NOT_DUE = "does not happen in this step"
    NEVER = "has never happened before, but may start"
    UNKNOWN = "may happen in any step"


class Recurrence(NamedTuple):
    """In which steps something has happened, as far as it takes to tell in which it will. Steps count from 1.

    times: in how many. first, last: the steps. period: how many steps after the time before the last one came. repeats:
    how often in a row that was so. ends: how often in the last step of an epoch; the others are `times - ends`.
    often: how often in step `last`, 0 if nobody could count it.
    """

    times: int = 0
    first: int = 0
    last: int = 0
    period: int = 0
    repeats: int = 0
    ends: int = 0
    often: int = 0

    def happened(self, step: int, ends_epoch: bool | None, often: int = 1) -> Recurrence:
        """It has come in `step`, too. ends_epoch: whether that is the last one of its epoch; None: not known.

        >>> Recurrence().happened(3, False).happened(6, False).happened(9, True)
        Recurrence(times=3, first=3, last=9, period=3, repeats=2, ends=1, often=1)
        """
        if self.times and step <= self.last:  # it is done again, after a resume
            return self
        period = step - self.last if self.times else 0
        repeats = self.repeats + 1 if period == self.period else 1
        first = self.first if self.times else step
        ends = self.ends + (ends_epoch is True)
        return Recurrence(self.times + 1, first, step, period, repeats if period else 0, ends, often)

    def forecast(self, step: int, ends_epoch: bool | None, ends_min: int = REPEATS_MIN) -> Forecast:
        """Whether it comes in `step`, all steps before that having been watched.

        ends_min: so often it has to have come, in last steps of epochs and in no other, to be expected in these alone.

        >>> every = Recurrence().happened(1, False).happened(2, False)
        >>> every.forecast(3, False).name, every.forecast(5, False).name, Recurrence().forecast(5, True).name
        ('DUE', 'STOPPED', 'NEVER')
        """
        gap = step - self.last
        if not self.times:
            return Forecast.NEVER
        if gap < 1:
            return Forecast.UNKNOWN
        if gap == 1 and (self.times == step - 1 or self.period == 1):
            return Forecast.DUE
        if self.times == self.ends >= ends_min and ends_epoch is not None:
            return Forecast.AT_END if ends_epoch else Forecast.NOT_DUE
        if self.repeats >= REPEATS_MIN and 1 < self.period >= gap:
            return Forecast.IN_TURN if gap == self.period else Forecast.NOT_DUE
        if 1 < self.times == self.last - self.first + 1:
            return Forecast.STOPPED
        return Forecast.UNKNOWN


_NOTHING = Recurrence()


class Late(dict[str, Recurrence]):
    """What has moved between the update of a step and its end, by what messages call it.

    steps: how many of those in which it is looked at have ended.
    """

    def __init__(self, stored: Mapping[str, Sequence[int]] | None = None, steps: int = 0) -> None:
        super().__init__()
        self.steps = steps
        if stored:
            self.learn(stored, steps)

    def learn(self, stored: Mapping[str, Sequence[int]], steps: int = 0) -> None:
        """Forget all, and go on from this."""
        self.clear()
        self.update({name: Recurrence(*numbers) for name, numbers in stored.items()})
        self.steps = steps

    def copy(self) -> Late:
        """As it is now."""
        late = Late.__new__(Late)  # in every step, where each call costs a microsecond
        late.steps = self.steps
        late.update(self)
        return late

    def happened(self, moved: Mapping[str, int], step: int, ends_epoch: bool | None) -> None:
        """`step` has ended, in which this has moved, so often. ends_epoch: see `Recurrence.happened`."""
        self.steps = step
        for name, often in moved.items():
            self[name] = self.get(name, _NOTHING).happened(step, ends_epoch, often)

    def forecast(self, name: str, step: int, ends_epoch: bool | None, ends_min: int = 1) -> Forecast:
        """Whether it moves in `step`."""
        return self.get(name, _NOTHING).forecast(step, ends_epoch, ends_min)

    def may_move(
        self, names: Iterable[str], step: int, ends_epoch: bool | None, moved: Mapping[str, int] | None = None
    ) -> dict[str, str]:
        """Which of `names` may be about to move in `step`, which was cut off, and what is known of that.

        Those that have moved before, and not in this step yet. moved: what has, and so often; that may not be all
        where it never did before, or not so often.
        """
        moved = moved or {}
        found = {name: self.forecast(name, step, ends_epoch) for name in names if name in self and name not in moved}
        due = {name: one.value for name, one in found.items() if one is not Forecast.NOT_DUE}
        odd = [name for name, often in moved.items() if not 0 < often == self.get(name, _NOTHING).often]
        return due | dict.fromkeys(odd, "has begun, and not as in earlier steps")


def about_to_change(found: Mapping[str, str]) -> list[str]:
    """Why what is saved of a step that was cut off may lack these; found: what is known of each.

    >>> about_to_change({"hyperparameters": "happens in every step", "requires_grad": "happens in every step"})
    ['hyperparameters, requires_grad may have been about to change; this happens in every step']
    >>> about_to_change({"model.n, model.best": "may happen in any step", "model.n": "may happen in any step"})
    ['model.n, model.best may have been about to change; this may happen in any step']
    """
    by_why: dict[str, dict[str, None]] = {}
    for names, why in found.items():
        by_why.setdefault(why, {}).update(dict.fromkeys(names.split(", ")))
    return [f"{some(names)} may have been about to change; this {why}" for why, names in by_why.items()]
