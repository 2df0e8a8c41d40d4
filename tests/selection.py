"""Which cases of a long table `make test` takes; `make test-rest` takes the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest


def usually(cases: Iterable[Any], usual: Collection[Any] | Callable[[Any], bool]) -> list[Any]:
    """Parameters for all `cases`; those that are not `usual` are left to the thorough run."""
    is_usual = usual if callable(usual) else usual.__contains__
    listed = list(cases)
    assert any(map(is_usual, listed)), "the usual run would have none of these cases"
    return [case if is_usual(case) else more(case) for case in listed]


def each_value_once(rows: Sequence[Mapping[str, Hashable]]) -> list[Any]:
    """Parameters for all `rows`; the usual run takes a few in which each value of each setting occurs.

    >>> rows = [{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 2}]
    >>> [row if isinstance(row, dict) else "thorough" for row in each_value_once(rows)]
    [{'a': 1, 'b': 1}, 'thorough', {'a': 2, 'b': 2}]
    """
    missing = {setting for row in rows for setting in row.items()}
    chosen: list[int] = []
    while missing:
        best = max(range(len(rows)), key=lambda place: len(missing & set(rows[place].items())))
        chosen.append(best)
        missing -= set(rows[best].items())
    return usually(rows, [rows[place] for place in chosen])


def more(*values: Any) -> Any:
    """One case that is left to the thorough run."""
    return pytest.param(*values, marks=pytest.mark.thorough)
