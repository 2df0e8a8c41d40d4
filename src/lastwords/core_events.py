"""What every pure core takes and gives: that time has passed, and lines for an operator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; wanted at the latest at the core's `deadline_s`, harmless at any time."""


@dataclass(frozen=True, slots=True)
class Log:
    """One line for an operator. `level` as in `logging`."""

    level: int
    text: str
