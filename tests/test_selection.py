"""What `-m` leaves out is neither imported nor made, and nothing else is."""

from __future__ import annotations

import doctest
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import selection

HERE = Path(__file__).parent
USUAL = frozenset({"slow", "thorough"})


def test_examples_in_docstrings_are_true() -> None:
    found = doctest.testmod(selection)
    assert (found.failed, found.attempted > 3) == (0, True)


@pytest.mark.parametrize(
    ("file", "marks", "left_out"),
    [
        ("test_matrix.py", USUAL, True),
        ("test_matrix.py", frozenset(), False),
        ("test_kills.py", USUAL, False),
        ("test_preemption.py", USUAL, True),
        ("test_preemption.py", frozenset({"slow"}), False),
        ("kills.py", USUAL, False),
    ],
)
def test_a_file_is_left_out_by_the_mark_of_all_its_tests(file: str, marks: frozenset[str], left_out: bool) -> None:
    assert selection.is_left_out(HERE / "integration" / file, marks) is left_out


def table(*of_cases: str, of_test: str = "process") -> SimpleNamespace:
    """A test with a case for each of these marks."""
    calls = [SimpleNamespace(marks=[getattr(pytest.mark, name).mark] if name else []) for name in of_cases]
    definition = SimpleNamespace(iter_markers=lambda: [getattr(pytest.mark, of_test).mark])
    return SimpleNamespace(definition=definition, _calls=calls)


@pytest.mark.parametrize(
    ("made", "kept"),
    [
        (table("", "thorough", "", "slow"), [0, 2]),
        (table("thorough", "slow"), [0]),
        (table("", "", of_test="slow"), [0]),
        (table(), []),
    ],
    ids=["some", "none, but for one", "of a test that is left out", "a test without cases"],
)
def test_cases_that_are_left_out_are_dropped_from_a_table(made: SimpleNamespace, kept: list[int]) -> None:
    expected = [made._calls[index] for index in kept]
    selection.drop_cases(made, USUAL)  # type: ignore[arg-type]
    assert made._calls == expected


class Item:
    """A test as pytest collects it."""

    def __init__(self, name: str, *marks: str) -> None:
        self.nodeid, self.marks = name, [*marks]

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, name: str) -> None:
        self.marks.append(name)


def test_of_the_tests_with_processes_120_are_usual_at_most_and_each_has_a_promise() -> None:
    usual = selection.usual_processes()
    assert 40 <= len(usual) <= 120
    assert all(usual.values())


def test_what_is_not_usual_is_left_to_ci_and_a_name_that_is_gone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "USUAL", tmp_path / "usual.txt")
    (tmp_path / "usual.txt").write_text("# why\n== kills\na.py::one\nb.py::gone\n", encoding="utf-8")
    items = [Item("a.py::one", "process"), Item("a.py::two", "process"), Item("a.py::three")]

    def collect(*also: Item, complete: bool = True) -> None:
        selection.leave_to_ci([*items, *also], complete=complete)  # type: ignore[list-item]

    collect()
    assert [one.nodeid for one in items if "ci" in one.marks] == ["a.py::two"]
    collect(Item("b.py::other"), complete=False)
    with pytest.raises(pytest.UsageError, match=r"b\.py::gone"):
        collect(Item("b.py::other"))
