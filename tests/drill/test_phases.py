"""Where a drill kills, chosen of what an undisturbed run came by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastwords.drill.phases import EARLIEST, NAMES, PHASES, choose, phases_of
from lastwords.errors import ConfigError
from tests import golden
from tests.drill.made import PASSES, life


def run_of(ranks: int = 2, last: int = 8, **passes: int) -> dict[int, object]:
    every = {number: {**PASSES, **passes} for number in range(1, last + 1)}
    return {rank: life(last=last, passes=every) for rank in range(ranks)}


def test_each_phase_that_comes_is_drilled_and_each_other_one_is_named() -> None:
    drills, missed = choose(run_of(), NAMES, 1, two=False)  # type: ignore[arg-type]
    assert [one.phase for one in drills] == ["forward", "backward", "after-update", "epoch-end", "periodic"]
    assert set(missed) == {"between-updates", "evaluation"}


def test_a_rank_is_killed_in_the_middle_of_what_comes_several_times() -> None:
    drills, _ = choose(run_of(update=3, backward=5), ["backward", "between-updates", "after-update"], 1, two=False)  # type: ignore[arg-type]
    assert [(one.death.event, one.death.nth) for one in drills] == [("backward", 3), ("update", 1), ("update", 3)]


def test_an_epoch_ends_where_the_next_step_is_of_another_one() -> None:
    (one,), _ = choose(run_of(), ["epoch-end"], 1, two=False)  # type: ignore[arg-type]
    assert (one.death.step, one.death.event) == (5, "end")


def test_kills_are_spread_over_steps_and_ranks() -> None:
    drills, _ = choose(run_of(last=20), ["forward"], 4, two=False)  # type: ignore[arg-type]
    assert len({one.death.step for one in drills}) == 4
    assert {one.death.ranks for one in drills} == {(0,), (1,)}


def test_two_ranks_at_once_come_besides() -> None:
    drills, _ = choose(run_of(3), ["forward", "backward"], 1, two=True)  # type: ignore[arg-type]
    assert [len(one.death.ranks) for one in drills] == [1, 2, 1, 2]


def test_an_evaluation_on_one_rank_alone_is_where_that_rank_is_killed() -> None:
    evaluates = {5: {**PASSES, "evaluation": 4}}
    (one,), _ = choose({0: life(), 1: life(passes=evaluates)}, ["evaluation"], 1, two=False)
    assert (one.death.ranks, one.death.step, one.death.nth) == ((1,), 5, 2)


def test_before_a_periodic_checkpoint_is_there_nobody_dies_and_then_all_do() -> None:
    (one,), _ = choose(run_of(), ["periodic"], 1, two=False)  # type: ignore[arg-type]
    assert one.death.ranks == (0, 1)
    assert one.every == one.death.published == one.death.step - 2 > 0


@given(st.integers(1, 4), st.integers(4, 30), st.integers(1, 5), st.booleans())
def test_nobody_is_killed_in_the_last_step_nor_where_it_does_not_come(
    ranks: int, last: int, kills: int, two: bool
) -> None:
    run = {rank: life(last=last) for rank in range(ranks)}
    drills, missed = choose(run, [*PHASES], kills, two=two)
    for one in drills:
        death = one.death
        assert EARLIEST <= death.step < last or (one.phase == "epoch-end" and death.step == 5)
        for rank in death.ranks:
            assert 1 <= death.nth <= run[rank].steps[death.step].passes.get(death.event, 1)
        assert len(set(death.ranks)) == len(death.ranks)
    assert {one.phase for one in drills} | set(missed) == set(PHASES)


@pytest.mark.parametrize("text", ["forwards", "forward,,later", "", ","])
def test_an_unknown_phase_is_refused_with_all_that_there_are(text: str) -> None:
    with golden.raises(ConfigError):
        phases_of(text)
