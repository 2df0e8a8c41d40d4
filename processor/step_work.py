"""What a step takes a rank by itself, measured where it meets the others: two looks at the clock in each step.

A rank that is slower than the others never waits for them, so between two ends of a step all ranks take equally long.
They differ in the time from where they have all met to where they meet again: the last gradient that is ready before
it is reduced, or the gate.
"""

from __future__ import annotations

from collections import deque

from lastwords.clock import Clock, mono_s

STEPS = 32
"""So many of the newest steps count. With the median of them a pause now and then, such as a validation, counts for
nothing, and neither do the first steps, which may compile kernels."""

STEPS_MIN = 8
"""Of fewer steps nothing is said."""


class StepWork:
    """Of one rank. `arrive` and `go_on` are for the thread that trains (or its backward pass), `seconds` for any."""

    def __init__(self, clock: Clock = mono_s) -> None:
        self._clock = clock
        self._newest_s: deque[float] = deque(maxlen=STEPS)
        self._since_s: float | None = None
        self._arrived_s: float | None = None

    def arrive(self) -> None:
        """From here on this rank waits for the others; of several arrivals in a step the last one counts."""
        self._arrived_s = self._clock()

    def go_on(self) -> None:
        """All ranks have arrived. A step without an arrival is left out."""
        since_s, arrived_s, self._since_s, self._arrived_s = self._since_s, self._arrived_s, self._clock(), None
        if since_s is not None and arrived_s is not None:
            self._newest_s.append(arrived_s - since_s)

    @property
    def seconds(self) -> float:
        """The median of the newest steps; 0.0: not known.

        >>> now_s = iter(range(100))
        >>> work = StepWork(lambda: next(now_s))
        >>> for _ in range(STEPS_MIN):
        ...     work.arrive(), work.go_on()
        >>> work.seconds
        0.0
        >>> work.arrive(), work.go_on()
        >>> work.seconds
        1.0
        """
        newest_s = sorted(self._newest_s.copy())  # one call, during which no other thread appends
        return float(newest_s[len(newest_s) // 2]) if len(newest_s) >= STEPS_MIN else 0.0
