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
