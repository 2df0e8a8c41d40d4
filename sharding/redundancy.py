"""What follows from who holds which unit: redundancy groups, and how many processes may die."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def group_of(rank: int, units: Mapping[str, Sequence[int]], mine: Iterable[str]) -> tuple[int, ...]:
    """Ranks that hold every one of the units `mine` of `rank`, itself included, ascending: each may take its place.

    >>> group_of(0, {"replicated": (0, 1, 2, 3), "tp0": (0, 2), "tp1": (1, 3)}, ("replicated", "tp0"))
    (0, 2)
    """
    group: set[int] | None = None
    for unit in mine:
        group = set(units[unit]) if group is None else group & set(units[unit])
    return tuple(sorted({rank} | (group or set())))


def may_die(holders: int) -> str:
    """How many of a unit's holders may die at once with nothing lost.

    >>> may_die(1), may_die(2), may_die(4)
    ('none', 'any 1 of 2; not both', 'any 3 of 4; not all')
    """
    if holders == 1:
        return "none"
    return f"any {holders - 1} of {holders}; not {'both' if holders == 2 else 'all'}"
