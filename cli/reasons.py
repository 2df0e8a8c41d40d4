"""Why a resume is not exact, for people: what several ranks say alike is said once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

SHOWN_MAX = 6
"""Reasons in a table; `--all` shows every one."""

_OF_A_RANK = re.compile(r"rank (\d+): (.*)", re.DOTALL)


def folded(reasons: Iterable[str]) -> list[str]:
    """Equal reasons of several ranks as one, in the order in which they come first.

    >>> folded(["rank 0: no slot", "rank 1: no slot", "rank 4: no slot", "unit a: late", "rank 2: lost"])
    ['ranks 0-1, 4: no slot', 'unit a: late', 'rank 2: lost']
    """
    ranks: dict[str, list[int]] = {}
    for reason in reasons:
        found = _OF_A_RANK.fullmatch(reason)
        if found is None:
            ranks.setdefault(reason, [])
        else:
            ranks.setdefault(found[2], []).append(int(found[1]))
    return [f"{_ranks(owners)}: {text}" if owners else text for text, owners in ranks.items()]


def shortened(reasons: Sequence[str], *, everything: bool, most: int = SHOWN_MAX) -> list[str]:
    """What a table shows: folded and no more than `most`, or all of them as they are."""
    if everything:
        return list(reasons)
    lines = folded(reasons)
    if len(lines) <= most:
        return lines
    return [*lines[:most], f"and {len(lines) - most} more (--all shows them)"]


def ranges(numbers: Iterable[int]) -> str:
    """Numbers, sorted, runs of them together.

    >>> ranges([5, 0, 1, 2, 3]), ranges([7]), ranges([1, 2])
    ('0-3, 5', '7', '1-2')
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _ranks(owners: list[int]) -> str:
    return f"rank {owners[0]}" if len(set(owners)) == 1 else f"ranks {ranges(owners)}"
