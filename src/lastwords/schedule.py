"""When periodic checkpoints are due, and which of them are kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """When periodic checkpoints are due, and which of them are kept; 0: not at all, or without that limit.

    steps: after every so many steps. seconds: so long after the one before. keep_max: so many of the newest ones.
    keep_minutes: where that is 0, one in so many minutes.
    """

    steps: int = 0
    seconds: float = 0.0
    keep_max: int = 0
    keep_minutes: int = 0

    def __str__(self) -> str:
        due = [f"{self.steps} steps"] * bool(self.steps) + [f"{self.seconds:g} s"] * bool(self.seconds)
        return f"a checkpoint every {' and every '.join(due)}" if due else "no periodic checkpoints"


NO_SCHEDULE = Schedule()
