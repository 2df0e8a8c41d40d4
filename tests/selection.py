"""Which tests `make test` takes: of those with processes the ones in usual.txt, of a long table some cases.

`make test-ci` takes the other processes, and what computes for long, `make test-rest` and `make test-zoo` the rest.
What `-m` leaves out is not made in the first place: thousands of cases, in each of xdist's workers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

USUAL = Path(__file__).with_name("usual.txt")


def usual_processes() -> dict[str, str]:
    """Names of tests with processes that `make test` takes, and what each group of them is there for."""
    found, group = {}, ""
    for line in USUAL.read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            group = line.removeprefix("== ")
        elif line and not line.startswith("#"):
            found[line] = group
    return found


def leave_to_ci(items: Sequence[pytest.Item], *, complete: bool) -> None:
    """Mark tests with processes that are not usual. complete: of a file that is collected, all of its tests are.

    UsageError for a usual one that is not there.
    """
    usual = usual_processes()
    for item in items:
        if item.get_closest_marker("process") and item.nodeid not in usual:
            item.add_marker("ci")
    files = {item.nodeid.partition("::")[0] for item in items} if complete else ()
    if gone := sorted({name for name in usual if name.partition("::")[0] in files} - {item.nodeid for item in items}):
        raise pytest.UsageError(f"{USUAL} names what is not there: {', '.join(gone)}")


def usually(cases: Iterable[Any], usual: Collection[Any] | Callable[[Any], bool]) -> list[Any]:
    """Parameters for all `cases`; those that are not `usual` are left to the thorough run."""
    is_usual = usual if callable(usual) else usual.__contains__
    listed = list(cases)
    assert any(map(is_usual, listed)), "the usual run would have none of these cases"
    return [case if is_usual(case) else more(case) for case in listed]


def each_value_once(rows: Sequence[Mapping[str, Hashable]], *, but: Collection[str] = ()) -> list[Any]:
    """Parameters for all `rows`; the usual run takes a few in which each value of each setting occurs, `but` of these.

    >>> rows = [{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 2}]
    >>> [row if isinstance(row, dict) else "thorough" for row in each_value_once(rows)]
    [{'a': 1, 'b': 1}, 'thorough', {'a': 2, 'b': 2}]
    """
    missing = {setting for row in rows for setting in row.items() if setting[0] not in but}
    chosen: list[int] = []
    while missing:
        best = max(range(len(rows)), key=lambda place: len(missing & set(rows[place].items())))
        chosen.append(best)
        missing -= set(rows[best].items())
    return usually(rows, [rows[place] for place in chosen])


def more(*values: Any) -> Any:
    """One case that is left to the thorough run."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def left_out(expression: str) -> frozenset[str]:
    """Marks whose tests `-m expression` leaves out, whatever else they are.

    >>> sorted(left_out("not slow and not thorough")), sorted(left_out("thorough and not slow"))
    (['slow', 'thorough'], ['slow'])
    >>> [*left_out("(thorough or ci) and not slow")]
    ['slow']
    >>> [*left_out("slow"), *left_out("not slow or process"), *left_out("process or thorough and not slow")]
    []
    """
    outside = re.sub(r"\([^()]*\)", "", expression)
    words = [] if " or " in outside else outside.split(" and ")
    return frozenset(word.removeprefix("not ") for word in words if word in ("not slow", "not thorough"))


def is_left_out(path: Path, marks: Collection[str]) -> bool:
    """Whether all tests of a file are left out, by the `pytestmark` in its text: it need not be imported then."""
    if not marks or not path.name.startswith("test_"):
        return False
    found = re.search(r"^pytestmark = .*", path.read_text(encoding="utf-8"), re.MULTILINE)
    return found is not None and not set(re.findall(r"pytest\.mark\.(\w+)", found.group())).isdisjoint(marks)


def drop_cases(metafunc: pytest.Metafunc, marks: Collection[str]) -> None:
    """Leave cases with one of the marks out of a test's table, once that is made: the others keep their names.

    One of them stays where it would be empty, which pytest takes for a test without parameters; `-m` leaves that out.
    """
    calls = metafunc._calls
    of_test = {mark.name for mark in metafunc.definition.iter_markers()}
    kept = [call for call in calls if (of_test | {mark.name for mark in call.marks}).isdisjoint(marks)]
    calls[:] = kept or calls[:1]
