"""Several optimizers in one job: their step is one update."""

from __future__ import annotations

from lastwords.optim_wrapper.wrapper import StepHooks


class SeveralOptimizers:
    """`StepHooks` that all optimizers share: an update lasts from the first one's beginning to the last one's end.

    Between the two the weights are of no step; a collective in there is a window in which nobody could save.

    How many calls of step() make up an update is learnt: as many as in the steps before, if these were equal. Until
    that is known, the update lasts until the step ends. Training thread only.
    """

    def __init__(self, around: StepHooks) -> None:
        self._around = around
        self._inside = False
        self._calls = 0
        self._calls_a_step = 0  # 0: not known
        self._calls_before = 0

    def begin_update(self) -> None:
        """An optimizer is about to write; only the first one of a step enters the update."""
        if not self._inside:
            self._around.begin_update()
            self._inside = True

    def leave_update(self) -> None:
        """An optimizer has written; only the last one of a step leaves the update."""
        self._calls += 1
        if self._calls == self._calls_a_step:
            self._leave()

    def torn(self, error: BaseException) -> None:
        """An optimizer raised while it wrote."""
        self._inside = False
        self._around.torn(error)

    def end_step(self) -> None:
        """The step is over, so the update is."""
        if self._inside:
            self._leave()
        if self._calls:
            self._calls_a_step = self._calls if self._calls == self._calls_before else 0
            self._calls_before = self._calls
        self._calls = 0

    def _leave(self) -> None:
        self._inside = False
        self._around.leave_update()
