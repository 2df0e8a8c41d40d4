"""Where a rank stands inside a global step."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Phase(enum.IntEnum):
    """Where a rank stands inside a global step. `Stand` adds which step."""

    COMPUTING = 1
    READY = 2
    UPDATING = 3
    UPDATED = 4
    SKIPPED = 5
    TORN = 6
    DONE = 7


@dataclass(frozen=True, slots=True, order=True)
class Stand:
    """A phase together with its step.

    `COMPUTING` and `DONE` carry the step that was *ended* last (N); all other phases carry the step that
    is *under way* (N+1).
    """

    phase: Phase
    step: int

    def __str__(self) -> str:
        return f"{self.phase.name}({self.step})"

    @property
    def ended_step(self) -> int:
        """Newest step that this rank has ended.

        >>> Stand(Phase.COMPUTING, 7).ended_step, Stand(Phase.UPDATED, 8).ended_step
        (7, 7)
        """
        return self.step if self.phase in (Phase.COMPUTING, Phase.DONE) else self.step - 1

    @property
    def begun_step(self) -> int:
        """Newest step that this rank has ended or begun to update; a torn update does not count.

        >>> Stand(Phase.READY, 8).begun_step, Stand(Phase.UPDATING, 8).begun_step, Stand(Phase.TORN, 8).begun_step
        (7, 8, 7)
        """
        if self.phase in (Phase.UPDATING, Phase.UPDATED, Phase.COMPUTING, Phase.DONE):
            return self.step
        return self.step - 1

    @property
    def reach(self) -> frozenset[int]:
        """Steps at which this rank, if it is healthy and settled, can hold its units whole.

        >>> sorted(Stand(Phase.READY, 8).reach), sorted(Stand(Phase.TORN, 8).reach)
        ([7, 8], [])
        """
        if self.phase in (Phase.READY, Phase.SKIPPED):
            return frozenset((self.step - 1, self.step))
        if self.phase in (Phase.COMPUTING, Phase.UPDATED, Phase.DONE):
            return frozenset((self.step,))
        return frozenset()

    def holds(self, step: int) -> bool:
        """The safety predicate: a settled rank here holds its units whole at global step `step` as they are.

        "Never a torn checkpoint" rests on it, on both sides of the wire: the controller chooses writers by it, and a
        rank refuses what it does not allow. Every step within `reach` but one: READY(N+1) still has to apply its
        gradients, on `Proceed`, before it holds N+1.

        >>> Stand(Phase.READY, 8).holds(7), Stand(Phase.READY, 8).holds(8), Stand(Phase.UPDATED, 8).holds(8)
        (True, False, True)
        """
        return step in self.reach and not (self.phase is Phase.READY and self.step == step)
