"""The table that is shown at the start: what the job's state is divided into, and what may die."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lastwords.errors import NAMED_RANKS_MAX, counted, some
from lastwords.sharding.pieces import UnitTable
from lastwords.vocabulary import UNIT_REPLICATED

# What follows from who holds which unit: redundancy groups, and how many processes may die.


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


_ROWS_MAX = 24
_MIB = 1 << 20


def describe(table: UnitTable, world_size: int, lines: Sequence[str] = (), *, copied: bool = False) -> str:
    """Units, holders and what may die, as text; `lines` (gate, windows) come below the table.

    MiB are those of parameters and buffers; the optimizer's state comes on top and divides in the same way.
    copied: each rank keeps whole copies of what it holds.
    """
    rows = [("unit", "tensors", "MiB", "holders", "may die")]
    shown = sorted(table.units, key=lambda unit: (unit != UNIT_REPLICATED, len(table.units[unit]), table.units[unit]))
    for unit in shown[:_ROWS_MAX]:
        holders = table.units[unit]
        rows.append(
            (
                unit,
                str(table.tensors.get(unit, 0)),
                f"{table.nbytes.get(unit, 0) / _MIB:.2f}",
                "all" if len(holders) == world_size else some(holders, NAMED_RANKS_MAX),
                "any 1 of 1, if its host lives on" if copied and len(holders) == 1 else may_die(len(holders)),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = (1, 2)
    text = [f"state of {counted(world_size, 'rank')} in {counted(len(table.units), 'unit')}:"]
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        text.append("  " + "  ".join(cells).rstrip())
    if len(shown) > _ROWS_MAX:
        rest = [len(table.units[unit]) for unit in shown[_ROWS_MAX:]]
        text.append(f"  and {len(rest)} more, of {min(rest)} to {max(rest)} holders each")
    text += [f"  {line}" for line in (*lines, *table.notes)]
    return "\n".join(text)


def warnings_of(table: UnitTable, *, copied: bool = False) -> list[str]:
    """What a user has to know before a death: units that no other rank holds, declarations that take nothing."""
    found = list(table.notes)
    alone = table.unprotected
    if alone and copied:
        found.append(
            f"{len(alone)} of {len(table.units)} units have one holder, whose copy in shared memory outlives its "
            "process, but not its host, nor all processes there"
        )
    elif alone:
        named = some(alone, 4)
        found.append(
            f"no redundancy: {len(alone)} of {len(table.units)} units have one holder ({named}). If that process is "
            "killed, its part of the state is lost and nothing can be saved; an exception or a signal, which loses no "
            "process, still saves everything. copy=True keeps copies that outlive a process; HSDP has replicas"
        )
    return found
