"""What a browser is sent of a job, and how little of it from second to second."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lastwords.page.columns import COLUMNS, KINDS, LETTERS, JobLook, compact, difference, odd_rows, runs, spans
from lastwords.state import ControllerState, OpenIncident, RankState
from lastwords.vocabulary import Phase
from tests.page.fake_controller import rank_of, state_of

NEVER_CAME = RankState(3, None, None, connected=False, dead=False, heard_s=-1.0)


def look_at(state: ControllerState, **more: Any) -> JobLook:
    return JobLook(state, "node:1", **more)


def applied(told: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """What page.js does."""
    new = dict(told)
    for key, value in changed.items():
        if key in COLUMNS and not isinstance(value, str):
            for place, text in value:
                new[key] = new[key][:place] + text + new[key][place + len(text) :]
        else:
            new[key] = value
    return new


def test_each_phase_has_a_letter_of_its_own() -> None:
    assert sorted(LETTERS) == sorted(Phase)
    assert len({*LETTERS.values(), "X", "?", "-"}) == len(Phase) + 3


def test_the_dead_the_lost_and_those_that_never_came_have_letters_too() -> None:
    ranks = (
        rank_of(0, 5, Phase.READY),
        rank_of(1, 5, dead=True, connected=False),
        rank_of(2, 5, connected=False),
        NEVER_CAME,
        rank_of(4, 9, Phase.DONE, connected=False),
        rank_of(5, 5, sole_holder=True),
    )
    told = compact(look_at(dataclasses.replace(state_of(6), ranks=ranks)))
    assert told["phase"] == "RX?-DC"
    assert told["flag"] == "002001", "the dead have their letter"
    assert told["connected"] == 2
    assert told["step"] == 9


def test_ranks_of_which_the_same_is_to_be_said_share_a_row_and_the_worst_come_first() -> None:
    ranks = [rank_of(rank, 5, waits_at="train.py:3") for rank in range(900)]
    ranks += [rank_of(900, 4, stands_at="data.py:7"), rank_of(901, 5, slower=0.5), rank_of(902, 5, connected=False)]
    ranks += [rank_of(903, 5, heard_s=60.0)]
    rows = [row.json() for row in odd_rows(ranks)]
    assert [row["kind"] for row in rows] == ["lost", "silent", "slow", "stands", "waits"]
    assert rows[-1]["ranks"] == "0 to 899"
    assert rows[3]["step"] == "4"
    assert [row["kind"] for row in rows] == sorted((row["kind"] for row in rows), key=KINDS.index)


def test_that_ranks_stand_or_wait_beside_a_dead_one_is_not_odd() -> None:
    ranks = [rank_of(0, 5, waits_at="train.py:3"), rank_of(1, 5, stands_at="train.py:9"), rank_of(2, 5, slower=0.5)]
    assert [row.kind for row in odd_rows(ranks)] == ["slow", "stands", "waits"]
    assert [row.kind for row in odd_rows([*ranks, rank_of(3, 5, dead=True)])] == ["dead", "slow"]


def test_a_job_in_which_all_take_long_for_a_step_is_not_silent() -> None:
    assert not odd_rows([rank_of(rank, 5, heard_s=60.0 + rank) for rank in range(8)])
    assert odd_rows([rank_of(rank, 5, heard_s=400.0 if rank == 3 else 60.0) for rank in range(8)])


def test_a_rank_that_has_come_to_its_end_is_as_it_should_be() -> None:
    assert not odd_rows([rank_of(0, 5, Phase.DONE, connected=False, heard_s=900.0)])


def test_an_incident_is_told_while_it_is_open_and_the_controller_answers() -> None:
    state = state_of(2, stage="saving", open_=OpenIncident("rank 1 died", 2.04, 5_000))
    assert compact(look_at(state, bytes_per_s=123456.7))["open"] == {
        "reason": "rank 1 died",
        "since_s": 2.0,
        "bytes": 5_000,
        "rate": 123000.0,
    }
    gone = compact(look_at(state, note="no answer", heard_unix_s=7.0))
    assert gone["open"] is None
    assert not gone["live"]
    assert gone["step"], "what was known last is shown"


def test_before_the_first_answer_there_is_nothing_but_the_reason() -> None:
    told = compact(JobLook(note="none"))
    assert told["world"] == 0
    assert told.keys() == compact(look_at(state_of(2))).keys(), "a browser may rely on the keys"


@given(st.text("CRUN", max_size=80), st.data())
def test_runs_say_what_has_changed(old: str, data: st.DataObject) -> None:
    new = data.draw(st.text("CRUN", min_size=len(old), max_size=len(old)))
    assert applied({"phase": old}, {"phase": runs(old, new)})["phase"] == new


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9), st.integers(0, 9))
def test_a_difference_makes_the_new_state_of_the_old_one(ranks: int, others: int, seed: int, next_seed: int) -> None:
    old = compact(look_at(state_of(ranks, seed=seed)))
    new = compact(look_at(state_of(others, step=1003, seed=next_seed)))
    assert applied(old, difference(old, new)) == new
    assert difference(new, new) == {}


def test_a_state_of_a_thousand_ranks_is_a_few_kilobytes_and_what_changes_each_second_is_less() -> None:
    told = [compact(look_at(state_of(1000, 1000 + seed, seed=seed))) for seed in range(2)]
    assert len(json.dumps(told[0])) < 8_000
    assert len(json.dumps(difference(told[0], told[1]))) < 3_000


def test_of_many_spans_of_ranks_the_first_are_named() -> None:
    assert spans(range(0, 40, 2), 3) == "0, 2, 4, and 17 more"
