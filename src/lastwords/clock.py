"""The one place that reads a clock. Cores never import this: time is an argument there."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds on a monotonic axis; only differences mean anything."""


def mono_s() -> float:
    """Monotonic seconds (CLOCK_MONOTONIC, the same axis for all processes of a host since boot)."""
    return time.monotonic()


def wall_ns() -> int:
    """Nanoseconds since the Unix epoch; for people and for ordering checkpoints, never for time-outs."""
    return time.time_ns()
