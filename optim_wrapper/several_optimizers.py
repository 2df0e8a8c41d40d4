"""Several optimizers in one job: their step is one update."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from lastwords.optim_wrapper.wrapper import StepHooks


class SeveralOptimizers:
    """An update lasts from the first optimizer's beginning until each of them has stepped, or else to the step's end.

    Between the first and the last the weights are of no step; a collective in there is a window in which nobody could
    save. Where an optimizer is left out of a step nobody knows whether it still comes, so the update then lasts until
    the step ends. Training thread only.
    """

    def __init__(self, around: StepHooks, count: int) -> None:
        self._around = around
        self._count = count
        self._inside = False
        self._stepped: set[int] = set()

    def hooks(self, number: int) -> StepHooks:
        """What the optimizer with this number is attached to."""
        return SimpleNamespace(
            begin_update=self.begin_update, end_update=partial(self.end_update, number), tear_update=self.tear_update
        )

    def begin_update(self) -> None:
        """An optimizer is about to write; only the first one of a step begins the update."""
        if not self._inside:
            self._around.begin_update()
            self._inside = True

    def end_update(self, number: int) -> None:
        """An optimizer has written; the update is over when all of them have."""
        self._stepped.add(number)
        if len(self._stepped) == self._count:
            self._end()

    def tear_update(self) -> None:
        self._inside = False
        self._around.tear_update()

    def end_step(self) -> frozenset[int]:
        """The step is over, so the update is. Returns the numbers of the optimizers that have stepped in it."""
        if self._inside:
            self._end()
        stepped = frozenset(self._stepped)
        self._stepped.clear()
        return stepped

    def _end(self) -> None:
        self._inside = False
        self._around.end_update()
