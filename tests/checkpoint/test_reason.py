"""Reasons why a resume is not exact: what is read, what is damaged, what is folded."""

from __future__ import annotations

import pytest

from lastwords.checkpoint.reason import Cause, Reason, merged


@pytest.mark.parametrize(
    "reason",
    [Reason("late"), Reason("late", ranks=(0, 2)), Reason("x", Cause.LOCAL_STATE_LOST, (1,)), Reason("rank 3: x")],
)
def test_a_reason_comes_back_as_it_was(reason: Reason) -> None:
    assert Reason.from_json(reason.to_json()) == reason


def test_a_cause_of_a_newer_version_is_told_by_its_words() -> None:
    assert Reason.from_json({"detail": "late", "cause": "of next year"}) == Reason("late")


@pytest.mark.parametrize(
    "item", [3, None, "late", [], {}, {"detail": 1}, {"detail": "x", "ranks": [-1]}, {"detail": "x", "ranks": 1}]
)
def test_a_damaged_reason_is_refused(item: object) -> None:
    with pytest.raises(ValueError, match="reason"):
        Reason.from_json(item)


def test_only_what_is_alike_is_folded() -> None:
    said = [
        Reason("late", ranks=(0,)),
        Reason("late", ranks=(3,)),
        Reason("late"),
        Reason("late", ranks=(1,), unit="a"),
    ]
    assert merged(said) == (Reason("late", ranks=(0, 3)), Reason("late"), Reason("late", ranks=(1,), unit="a"))
