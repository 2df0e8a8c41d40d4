"""The one list of reasons why what is saved of a rank cannot be resumed exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from glob import escape

from lastwords.checkpoint.entries import Reason, as_reason


class Ledger:
    """Each reason once, in the order in which they were found. Belongs to the training thread.

    Whoever finds one tells it here, at once. What says "exact", or "not exact, because", reads it from here.
    forget: paths of state that is dead at each step's end, as the user says; `*` stands for any part of a path.
    """

    def __init__(self, forget: Sequence[str] = ()) -> None:
        self._told: dict[Reason, None] = {}
        self._leaves: dict[str, None] = {}
        names = ["*".join(map(escape, name.split("*"))) for name in forget]
        self._forget = [f"{name}{inside}" for name in names for inside in ("", ".*", "[[]*")]
        self._forgotten: set[str] = set()
        self._listeners: list[Callable[[Sequence[Reason]], None]] = []

    def forgets(self, leaf: str) -> bool:
        """Whether the user says of the state at this path, or of an object that has it, that nothing reads it again."""
        if not self._forget or not any(fnmatchcase(leaf, one) for one in self._forget):
            return False
        self._forgotten.add(leaf)
        return True

    @property
    def forgotten(self) -> list[str]:
        """Of what has been met, that which is forgotten."""
        return sorted(self._forgotten)

    def tell(self, *reasons: str | Reason, leaf: str = "") -> list[Reason]:
        """Add those that are not here yet, and return them. leaf: the path of the state that they are about."""
        if self.forgets(leaf):
            return []
        if leaf:
            self._leaves[leaf] = None
        new = [one for one in dict.fromkeys(map(as_reason, reasons)) if one not in self._told]
        if new:
            self._told.update(dict.fromkeys(new))
            for hear in self._listeners:
                hear(new)
        return new

    @property
    def leaves(self) -> list[str]:
        """Paths of state that reasons are about."""
        return [*self._leaves]

    def heard_by(self, listener: Callable[[Sequence[Reason]], None]) -> None:
        """From now on `listener` is called with what is new."""
        self._listeners.append(listener)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        return tuple(self._told)
