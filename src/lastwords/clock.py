"""The one place that reads a clock. Cores never import this: time is an argument there."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds on a monotonic axis; only differences mean anything."""


def thread_s() -> float:
    """Seconds of processor time that this thread has used."""
    return time.thread_time()


mono_s: Clock = time.monotonic
"""Monotonic seconds (CLOCK_MONOTONIC, the same axis for all processes of a host since boot)."""


class OwnTime:
    """Monotonic seconds without those in which this process did not run (stopped, swapped out, its host suspended).

    What others have sent meanwhile has not been handled yet, and sessions may have broken that are about to come back:
    the pause says nothing about them. So time-outs of others run on this axis. Whoever waits for a point on it looks at
    the clock every LOOK_INTERVAL_S, and of an interval between two looks LOOKS_APART_S_MAX count, no more. Not
    thread-safe.
    """

    LOOK_INTERVAL_S = 0.5
    LOOKS_APART_S_MAX = 1.0

    def __init__(self) -> None:
        self._seen_mono_s: float | None = None
        self._left_out_s = 0.0

    def at(self, now_mono_s: float, apart_s_max: float = LOOKS_APART_S_MAX) -> float:
        """Own time of this very moment; a look at the clock. apart_s_max: after a call that may take longer itself.

        >>> own = OwnTime()
        >>> [own.at(now_mono_s) for now_mono_s in (10.0, 10.5, 70.5, 71.0)]
        [10.0, 10.5, 11.5, 12.0]
        """
        if self._seen_mono_s is not None:
            self._left_out_s += max(0.0, now_mono_s - self._seen_mono_s - apart_s_max)
        self._seen_mono_s = now_mono_s
        return now_mono_s - self._left_out_s

    def look_mono_s(self, at_s: float) -> float:
        """When to look at the clock next, waiting for `at_s` of own time."""
        at_mono_s = at_s + self._left_out_s + (1e-6 if self._left_out_s else 0.0)  # never before it, by rounding
        return at_mono_s if self._seen_mono_s is None else min(at_mono_s, self._seen_mono_s + self.LOOK_INTERVAL_S)


def wall_ns() -> int:
    """Nanoseconds since the Unix epoch; for people and for ordering checkpoints, never for time-outs."""
    return time.time_ns()
