"""What the loop changes between its update and the end of the step, beside tensors: hyperparameters, and the like.

Looked at directly after the update and again at the step's end. What is saved of a step that was cut off in between
lacks what was still to come, so that is named in the steps in which it is due.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import ne
from typing import Any

from lastwords.processor.recurrence import Recurrence


class LateChange:
    """One such thing, of which messages say `what`. Training thread, except `reasons`.

    take: its value at one moment, which nothing changes later. differ: whether two of them do. always: whether it is
    looked at in each step; else only in some, until it has been seen to change.
    """

    __slots__ = ("_always", "_differ", "_take", "_was", "what", "when")

    def __init__(
        self, what: str, take: Callable[[], Any], differ: Callable[[Any, Any], bool] = ne, *, always: bool = False
    ) -> None:
        self.what, self._take, self._differ, self._always = what, take, differ, always
        self.when = Recurrence()
        self._was: Any = None

    @property
    def habitual(self) -> bool:
        """Whether it is looked at in each step."""
        return self._always or self.when.times > 0

    def end_update(self) -> None:
        """The optimizer has written everything, and this is a step in which it is looked at."""
        self._was = self._take()

    def end_step(self, step: int, ends_epoch: bool | None) -> None:
        """The step is over, which had an update after which it was looked at."""
        if self._differ(self._was, self._take()):
            self.when = self.when.happened(step, ends_epoch)
        self._was = None

    def reasons(self, is_due: Callable[[Recurrence], bool]) -> list[str]:
        """Why what is saved of a step that was cut off after its update may lack it."""
        if not is_due(self.when):
            return []
        return [f"the loop changes {self.what} after optimizer.step(); in this step that may not have happened yet"]
