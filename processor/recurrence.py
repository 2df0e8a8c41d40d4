"""When something happens again: a forecast for a step that was cut off, from the steps in which it has happened before.

A rank can be caught between its update and the end of its step. What has not happened there by then (a scheduler's
step, the end of an epoch's validation) may have been about to. What has come in every step, at every end of an epoch,
or every so many steps is known; for everything else the forecast is UNKNOWN, also for what never came so far: averaged
weights that begin after a warm-up do not come before either.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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
    UNKNOWN = "happens in some steps only"


@dataclass(frozen=True, slots=True)
class Recurrence:
    """In which steps something has happened, as far as it takes to tell in which it will. Steps count from 1.

    times: how often. first, last: the steps. period: how many steps after the time before the last one came. repeats:
    how often in a row that was so. ends: how often in the last step of an epoch; the others are `times - ends`.
    """

    times: int = 0
    first: int = 0
    last: int = 0
    period: int = 0
    repeats: int = 0
    ends: int = 0

    def happened(self, step: int, ends_epoch: bool | None) -> Recurrence:
        """It has come in `step`, too. ends_epoch: whether that is the last one of its epoch; None: not known.

        >>> Recurrence().happened(3, False).happened(6, False).happened(9, True)
        Recurrence(times=3, first=3, last=9, period=3, repeats=2, ends=1)
        """
        period = step - self.last if self.times else 0
        repeats = self.repeats + 1 if period == self.period else 1
        first = self.first if self.times else step
        return Recurrence(
            self.times + 1, first, step, period, repeats if period else 0, self.ends + (ends_epoch is True)
        )

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
        if gap == 1 and (self.times == step - 1 or self.period == 1):
            return Forecast.DUE
        if self.times == self.ends >= ends_min and ends_epoch is not None:
            return Forecast.AT_END if ends_epoch else Forecast.NOT_DUE
        if self.repeats >= REPEATS_MIN and 1 < self.period >= gap:
            return Forecast.IN_TURN if gap == self.period else Forecast.NOT_DUE
        if 1 < self.times == self.last - self.first + 1:
            return Forecast.STOPPED
        return Forecast.UNKNOWN

    @property
    def numbers(self) -> tuple[int, int, int, int, int, int]:
        """What is stored of it; `Recurrence(*numbers)` is the inverse."""
        return self.times, self.first, self.last, self.period, self.repeats, self.ends
