"""Why a resume is not exact, in a table."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN_MAX = 6
"""Reasons in a table; `--all` shows every one."""


def shortened(reasons: Sequence[object], *, everything: bool, most: int = SHOWN_MAX) -> list[str]:
    """A line for each reason: no more than `most`, or all of them."""
    lines = [str(reason) for reason in (reasons if everything else reasons[:most])]
    more = len(reasons) - len(lines)
    return [*lines, f"and {more} more (--all shows them)"] if more else lines
