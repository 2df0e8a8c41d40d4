"""Reasons why a resume is not exact: what is read, what is damaged, what is folded."""

from __future__ import annotations

import json

import pytest

from lastwords.checkpoint.codec import brief, typed
from lastwords.checkpoint.entries import Cause, Reason, merged
from lastwords.errors import FormatError


@pytest.mark.parametrize(
    "reason",
    [Reason("late"), Reason("late", ranks=(0, 2)), Reason("x", Cause.LOCAL_STATE_LOST, (1,)), Reason("rank 3: x")],
)
def test_a_reason_comes_back_as_it_was(reason: Reason) -> None:
    assert typed(json.loads(json.dumps(brief(reason))), Reason, "reason") == reason


def test_a_cause_of_a_newer_version_is_told_by_its_words() -> None:
    assert typed({"detail": "late", "cause": "of next year"}, Reason, "reason") == Reason("late")


def test_what_a_reason_does_not_say_is_not_written() -> None:
    assert brief(Reason("late")) == {"detail": "late"}
    said = {"detail": "", "cause": "resharded", "ranks": (0, 2), "unit": "a"}
    assert list(brief(Reason("", Cause.RESHARDED, (2, 0, 2), "a")).items()) == list(said.items())


@pytest.mark.parametrize(
    "item",
    [
        *(3, None, "late", [], {}, {"detail": 1}, {"detail": None}),
        *({"detail": "x", "ranks": ranks} for ranks in ([-1], 1, None, [True], [1 << 63], ["1"])),
        *({"detail": "x", "cause": cause} for cause in (None, 1, [])),
        {"detail": "x", "unit": 3},
    ],
)
def test_a_damaged_reason_is_refused(item: object) -> None:
    with pytest.raises(FormatError, match="reason"):
        typed(item, Reason, "reason")


def test_only_what_is_alike_is_folded() -> None:
    said = [
        Reason("late", ranks=(0,)),
        Reason("late", ranks=(3,)),
        Reason("late"),
        Reason("late", ranks=(1,), unit="a"),
    ]
    assert merged(said) == (Reason("late", ranks=(0, 3)), Reason("late"), Reason("late", ranks=(1,), unit="a"))
