"""The checkers themselves: what they complain about, and what they do not."""

from __future__ import annotations

from tests.sim.checkers import complaints
from tests.sim.job import Job
from tests.sim.ledger import Ledger, Life, RankRecord

ONE_UNIT = Job((0, 0), (("replicated",),) * 2, 5)
TWO_UNITS = Job((0, 0), (("tp0",), ("tp1",)), 5)


def _left(held: int, *reach: int) -> RankRecord:
    return RankRecord(held=held, ended=held, reach=reach, life=Life.LEFT, farewell="exit not_saved")


def _ended(first: RankRecord, second: RankRecord) -> Ledger:
    return Ledger([first, second], ended=True, controller_stopped=True, certain_faults=1)


def test_a_common_step_that_is_not_saved_is_a_complaint() -> None:
    (text,) = complaints(ONE_UNIT, _ended(_left(1, 1), _left(0, 0, 1)))
    assert text.startswith("i3_what_can_be_saved_is_saved: step 1 had healthy holders")


def test_a_step_that_only_a_rank_which_can_write_nowhere_has_begun_is_not_owed() -> None:
    ledger = _ended(_left(1, 1), _left(0, 0, 1))
    ledger.refused = {(0, 0)}
    assert complaints(ONE_UNIT, ledger) == []


def test_units_whose_healthy_holders_have_no_common_step_are_a_complaint() -> None:
    """Without a gate this is how it ends; with one it cannot happen."""
    (text,) = complaints(TWO_UNITS, _ended(_left(1, 1), _left(0, 0)))
    assert text.startswith("i3_what_can_be_saved_is_saved: every unit had a healthy holder")


def test_a_holder_that_gave_its_final_gradients_up_may_cost_the_step() -> None:
    ledger = _ended(_left(1, 1), _left(0, 0))
    ledger.ranks[1].gave_up = True
    assert complaints(TWO_UNITS, ledger) == []
