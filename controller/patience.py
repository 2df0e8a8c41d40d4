"""When to try again what a file system has refused: after growing pauses, and not for ever. Pure."""

from __future__ import annotations

FIRST_PAUSE_S = 0.25
PAUSE_S_MAX = 4.0
"""A descriptor or a page is free again within a second; a mount that fails over takes minutes, and is not helped by
being asked more often."""


class Patience:
    """Pauses between tries of one thing; the first call of `pause_s` starts the clock."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._next_s = FIRST_PAUSE_S

    def pause_s(self, now_s: float, limit_s: float) -> float | None:
        """How long to wait before the next try; None once `limit_s` have passed since the first call.

        The last try comes at the limit, so the number of tries is bounded if that is finite.

        >>> patience = Patience()
        >>> [patience.pause_s(now_s, 1.0) for now_s in (7.0, 7.25, 7.75, 8.0)]
        [0.25, 0.5, 0.25, None]
        >>> patience = Patience()
        >>> {patience.pause_s(now_s, float("inf")) for now_s in range(2000)} == {0.25, 0.5, 1.0, 2.0, 4.0}
        True
        """
        if self._began_s is None:
            self._began_s = now_s
        left_s = self._began_s + limit_s - now_s
        if left_s < 0.001:  # what rounding may leave
            return None
        pause_s = min(self._next_s, PAUSE_S_MAX, left_s)
        self._next_s = min(2 * pause_s, PAUSE_S_MAX)
        return pause_s
