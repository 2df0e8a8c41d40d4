"""What a rank learns of its loop beside what the black box shows: it goes into the checkpoint, and a resume has it."""

from __future__ import annotations

from collections.abc import Callable

from lastwords.checkpoint.meta import Habits


class BackwardPasses:
    """How many a step has, where a hook sees them (`BeforeCollective`); training thread.

    A resumed loop that has another number counts its data otherwise.

    A number counts once two steps in a row have had it, so that the left-over batches of an epoch do not. A second such
    number makes it 0, "changes": there is nothing to compare then. saved: `usual` of the run that is resumed.

    >>> passes = BackwardPasses(saved=4)
    >>> passes.when_other = lambda saved, here: print(saved, here)
    >>> for count in (2, 2, 2):
    ...     passes.count = count
    ...     _ = passes.end_step()
    4 2
    """

    def __init__(self, saved: int | None = None) -> None:
        self.count = 0
        """In the step under way."""
        self.usual = saved
        """In every step; 0 where that changes, None where it is not known."""
        self.when_other: Callable[[int, int], None] | None = None
        """Called once, with the saved number and this run's, where they differ; None: nobody wants to know."""
        self._saved = saved
        self._before = 0

    def end_step(self) -> bool:
        """A step is over. Returns whether `usual` has become another one."""
        count, self.count = self.count, 0
        if not count:
            return False
        before, self._before = self._before, count
        if count != before:
            return False
        saved, self._saved = self._saved, None
        if saved and saved != count:
            self.usual = count
            if self.when_other is not None:
                self.when_other(saved, count)
            return True
        if self.usual in (0, count):
            return False
        self.usual = count if self.usual is None else 0
        return True


class LoopHabits:
    """See `Habits`. say: called when any of it has changed."""

    def __init__(self, say: Callable[[], None]) -> None:
        self.early_reasons: list[str] = []
        self.names_go_back = False
        self.repeats = False
        """A resumed loop does again what it does between the end of a step and the begin of the next one."""
        self.data = ""
        self.passes = BackwardPasses()
        self.draws: bool | None = None
        self._drew = 0
        self._say = say

    def learn(self, habits: Habits) -> None:
        """Those of the run that is resumed."""
        self.early_reasons, self.names_go_back = [*habits.early_reasons], habits.names_go_back
        self.passes, self.data, self.draws = BackwardPasses(habits.passes), habits.data, habits.draws

    def iterates_over(self, data: str) -> bool:
        """The loader's digest (see `data_digest`). False if the run that is resumed had another one."""
        before, self.data = self.data, data
        self._say()
        return not (before and data) or before == data

    def moves_after_the_end(self, reason: str) -> None:
        """Something moves between an early end of a step and the next one."""
        self.early_reasons = [reason]
        self._say()

    def begins(self, *, drew: bool) -> None:
        """A step begins. drew: random numbers since the end of the one before, as a loader does that is asked here."""
        before = self.draws
        self._drew += drew
        if not drew:
            self.draws = False
        elif before is None and self._drew > 1:  # an evaluation, say, draws once in a while
            self.draws = True
        if self.draws is not before:
            self._say()

    def names_went_back(self) -> None:
        """The loop has called a step what is no later than the one before."""
        self.names_go_back = True
        self._say()

    def end_step(self) -> None:
        """A step is over."""
        if self.passes.end_step():
            self._say()
