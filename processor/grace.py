"""A bounded wait that begins when it is first asked for. Pure."""

from __future__ import annotations


class Grace:
    """Runs while it is `wanted`, and is over `seconds` after that began."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until_s: float | None = None

    def over(self, wanted: bool, now_s: float) -> bool:
        """True once, when the time is up; begins the wait if need be.

        >>> grace = Grace(0.5)
        >>> grace.over(True, 1.0), grace.over(True, 1.4), grace.over(True, 1.6)
        (False, False, True)
        """
        if not wanted:
            self._until_s = None
        elif self._until_s is None:
            self._until_s = now_s + self.seconds
        elif now_s >= self._until_s:
            self._until_s = None
            return True
        return False

    def deadline_s(self, wanted: bool, now_s: float) -> float | None:
        """When `over` has to be asked again; at once if the wait has not begun."""
        return self._until_s if self._until_s is not None or not wanted else now_s
