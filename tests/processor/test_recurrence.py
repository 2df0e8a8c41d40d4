"""A forecast is made only of what has shown how it comes, and is right wherever that goes on."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import pytest

from lastwords.processor import recurrence
from lastwords.processor.recurrence import Forecast, Late, Recurrence, about_to_change

PER_EPOCH = 4
F = Forecast


def forecast(comes: Callable[[int], bool], step: int, *, known: bool = True) -> Forecast:
    """For `step`, after all steps before it. known: which steps end an epoch."""
    seen = Recurrence()
    for before in range(1, step):
        if comes(before):
            seen = seen.happened(before, before % PER_EPOCH == 0 if known else None)
    return seen.forecast(step, step % PER_EPOCH == 0 if known else None)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("comes", "expected"),
    [
        (lambda step: True, [F.NEVER, F.DUE, F.DUE, F.DUE, F.DUE]),
        (lambda step: False, [F.NEVER] * 9),
        (lambda step: step >= 3, [F.NEVER, F.NEVER, F.NEVER, F.UNKNOWN, F.DUE, F.DUE]),
        (lambda step: step <= 3, [F.NEVER, F.DUE, F.DUE, F.DUE, F.STOPPED, F.STOPPED]),
        (lambda step: step % 3 == 0, [F.NEVER] * 3 + [F.UNKNOWN] * 6 + [F.NOT_DUE, F.NOT_DUE, F.IN_TURN, F.NOT_DUE]),
        (lambda step: step in (2, 3, 5), [F.NEVER, F.NEVER, F.UNKNOWN, F.DUE, F.STOPPED, F.UNKNOWN, F.UNKNOWN]),
    ],
)
def test_what_comes_by_steps_is_foretold_from_when_it_has_shown_how(
    comes: Callable[[int], bool], expected: list[Forecast], known: bool
) -> None:
    assert [forecast(comes, step, known=known) for step in range(1, len(expected) + 1)] == expected


def test_what_comes_at_the_end_of_epochs_is_foretold_from_the_third_epoch_on() -> None:
    found = [forecast(lambda step: step % PER_EPOCH == 0, step) for step in range(1, 13)]
    assert found == [F.NEVER] * 4 + [F.UNKNOWN] * 4 + [F.NOT_DUE] * 3 + [F.AT_END]


def test_what_can_be_nothing_else_is_foretold_from_the_second_epoch_on() -> None:
    once = Recurrence().happened(4, True)
    assert [once.forecast(step, step == 8, 1) for step in (5, 8)] == [F.NOT_DUE, F.AT_END]
    assert [once.forecast(step, step == 8) for step in (5, 8)] == [F.UNKNOWN, F.UNKNOWN], "it may have begun in step 4"


def test_where_epochs_are_not_known_their_ends_have_to_come_three_times() -> None:
    found = [forecast(lambda step: step % PER_EPOCH == 0, step, known=False) for step in range(1, 18)]
    assert found[4:12] == [F.UNKNOWN] * 8
    assert found[12:] == [F.NOT_DUE] * 3 + [F.IN_TURN] + [F.NOT_DUE]


def test_what_came_at_some_ends_of_epochs_is_not_foretold_to_be_absent_at_one() -> None:
    assert forecast(lambda step: step in (4, 8), 16) is F.AT_END
    assert forecast(lambda step: step in (4, 8), 15) is F.NOT_DUE


def test_a_step_that_is_done_again_counts_once_and_is_not_foretold() -> None:
    seen = Recurrence().happened(2, False).happened(4, True)
    assert seen.happened(4, True) == seen
    assert seen.happened(3, False) == seen
    assert seen.forecast(4, True) is F.UNKNOWN


def test_what_has_moved_so_often_as_before_is_done_and_what_has_begun_otherwise_is_not() -> None:
    late = Late()
    late.happened({"a": 2, "b": 1, "uncounted": 0}, 1, False)
    assert late.may_move(late, 2, False, {"a": 2}) == {"b": F.DUE.value, "uncounted": F.DUE.value}
    odd = late.may_move(late, 2, False, {"a": 1, "b": 1, "uncounted": 0, "new": 1})
    assert odd.keys() == {"a", "uncounted", "new"}
    assert {*odd.values()}.isdisjoint(one.value for one in F)
    assert about_to_change(odd) == [f"a, uncounted, new may have been about to change; this {odd['a']}"]
    assert late.may_move(["a"], 2, False) == {"a": F.DUE.value}, "of these names alone"


def test_what_is_not_due_is_not_told() -> None:
    late = Late()
    for step in range(1, 10):
        late.happened({"third": 1} if step % 3 == 0 else {}, step, None)
    assert late.steps == 9
    assert [[*late.may_move(late, step, None)] for step in (10, 11, 12)] == [[], [], ["third"]]
    again = Late({name: [*when] for name, when in late.items()}, late.steps)
    assert (again, again.steps) == (late, 9)
    again.learn({})
    assert (again, again.steps) == ({}, 0)


def test_the_numbers_are_all_there_is() -> None:
    seen = Recurrence().happened(2, True).happened(4, False)
    assert Recurrence(*[*seen]) == seen
    assert doctest.testmod(recurrence).failed == 0
