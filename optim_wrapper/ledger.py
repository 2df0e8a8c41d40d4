"""The one list of reasons why what is saved of a rank cannot be resumed exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lastwords.checkpoint.reason import Reason, as_reason


class Ledger:
    """Each reason once, in the order in which they were found. Belongs to the training thread.

    Whoever finds one tells it here, at once. What says "exact", or "not exact, because", reads it from here.
    """

    def __init__(self) -> None:
        self._told: dict[Reason, None] = {}
        self._listeners: list[Callable[[Sequence[Reason]], None]] = []

    def tell(self, *reasons: str | Reason) -> list[Reason]:
        """Add those that are not here yet, and return them."""
        new = [one for one in dict.fromkeys(map(as_reason, reasons)) if one not in self._told]
        if new:
            self._told.update(dict.fromkeys(new))
            for hear in self._listeners:
                hear(new)
        return new

    def heard_by(self, listener: Callable[[Sequence[Reason]], None]) -> None:
        """From now on `listener` is called with what is new."""
        self._listeners.append(listener)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """All of them."""
        return tuple(self._told)
