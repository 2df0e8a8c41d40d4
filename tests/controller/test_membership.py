"""Who takes part, kept in several ways that must never differ, and what is said of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastwords.controller.events import LoopShape
from lastwords.controller.membership import Life, Membership
from lastwords.vocabulary import NO_SCHEDULE, DeathSource, Hello, Left, LoopBegin, Phase, ProcessId, Schedule, Stand
from tests import golden

RANKS = 4


def hello(rank: int, *, ended: int = 0, units: tuple[str, ...] = ("u",)) -> Hello:
    process = ProcessId(f"host-{rank}", 100 + rank, 7, f"nonce{rank}")
    return Hello(rank, 1, RANKS, process, units, Stand(Phase.COMPUTING, ended))


def registered(ranks: int = RANKS) -> Membership:
    membership = Membership(RANKS, 1)
    for rank in range(ranks):
        membership.admit(hello(rank))
    return membership


@given(st.lists(st.tuples(st.sampled_from(["suspect", "clear", "bury", "leave", "again"]), st.integers(0, RANKS - 1))))
def test_the_sets_of_ranks_say_what_the_members_say(events: list[tuple[str, int]]) -> None:
    membership = registered()
    for what, rank in events:
        match what:
            case "suspect" if membership.members[rank].life is Life.ALIVE:
                membership.suspect(rank, DeathSource.STREAM, 5.0)
            case "clear":
                membership.clear(rank)
            case "bury":
                membership.bury(rank, DeathSource.PIDFD)
            case "leave":
                membership.leave(Left(rank, 1, Stand(Phase.DONE, 3)))
            case "again":
                membership.admit(hello(rank))
        lives = {rank: member.life for rank, member in membership.members.items()}
        assert membership.living == {rank for rank, member in membership.members.items() if member.living}
        assert membership.dead == {rank for rank, life in lives.items() if life is Life.DEAD}
        assert membership.suspects == {rank for rank, life in lives.items() if life is Life.SUSPECT}
        here = {rank for rank, member in membership.members.items() if member.left is None}
        assert membership.not_left == sorted(here)
        assert membership.anyone_left == (len(here) < RANKS)
        assert membership.everyone_left == (not here)
        gone = [rank for rank in range(RANKS) if rank not in here]
        assert membership.left_early == gone, "nobody has said where the loop ends"
        assert membership.left_steps() == ({3: gone} if gone else {})


def test_a_rank_that_has_left_with_permission_is_neither_living_nor_dead() -> None:
    membership = registered()
    membership.depart(2)
    assert (membership.members[2].life, membership.living, membership.dead) == (Life.GONE, {0, 1, 3}, set())


def test_a_job_is_complete_once_all_ranks_are_there() -> None:
    membership = Membership(RANKS, 1)
    for rank in (3, 1, 0, 2):
        assert not membership.complete
        assert rank in membership.missing_ranks
        assert not membership.everyone_left
        membership.admit(hello(rank, units=(f"u{3 - rank}", "all", "all")))
        assert f"u{3 - rank}" in membership.units
    assert (membership.complete, membership.missing_ranks) == (True, [])
    assert membership.units == ("all", "u0", "u1", "u2", "u3")
    membership.members[3].connected = False
    assert membership.connected_ranks() == [0, 1, 2]


def test_only_a_process_with_a_session_is_reached_and_the_word_of_the_dead_does_not_count() -> None:
    membership = registered()
    member = membership.members[1]
    assert member.reachable
    member.connected = False
    assert not member.reachable
    member.connected = True
    membership.bury(1, DeathSource.STREAM)
    assert (member.reachable, member.buried) == (True, False), "it may come back"
    membership.bury(1, DeathSource.PIDFD)
    assert (member.reachable, member.buried) == (False, True)
    membership.clear(1)
    assert (member.life, member.source) == (Life.ALIVE, None)


def test_nothing_is_saved_up_to_the_newest_step_that_a_rank_began_with() -> None:
    membership = Membership(RANKS, 1)
    for rank, ended in enumerate((5, 7, 6, 0)):
        membership.admit(hello(rank, ended=ended))
    assert membership.base_step == membership.reached == 7
    membership.begin_loop(LoopBegin(0, 1, 10, 2, 6))
    assert membership.base_step == 7
    membership.begin_loop(LoopBegin(1, 1, 10, 2, 8))
    assert membership.base_step == 8
    membership.members[2].stand = Stand(Phase.COMPUTING, 9)
    assert membership.reached == 9


def test_a_loop_begins_for_those_that_wait_for_it() -> None:
    membership = registered()
    assert (membership.start_step, membership.schedule) == (0, NO_SCHEDULE)
    assert (membership.anyone_waits, membership.loop_wanted_by_all) == (False, False)
    loops = [LoopBegin(rank, 1, 10, 2, 6, Schedule(3)) for rank in (2, 0, 3, 1)]
    for loop in loops:
        assert not membership.loop_wanted_by_all
        assert not membership.begin_loop(loop)
        assert membership.anyone_waits
    assert membership.loop_wanted_by_all
    assert membership.loop_disagreement() is None
    assert membership.agree_loop() == [0, 1, 2, 3]
    assert (membership.loop_waiting, membership.loop_go_sent) == ([], True)
    assert membership.loop == LoopShape(10, 2, 6, Schedule(3))
    assert (membership.start_step, membership.schedule) == (6, Schedule(3))
    assert membership.begin_loop(loops[0]), "the answer was lost"
    assert membership.loop_waiting == []
    membership.begin_loop(LoopBegin(0, 1, 10, 2, 9))
    assert membership.base_step == 6, "a second loop takes nothing back"


def test_how_loops_differ_is_said() -> None:
    membership = registered()
    for rank, shape in enumerate([(0, 0, 3), (10, 2, 3), (10, 2, 0)]):
        membership.begin_loop(LoopBegin(rank, 1, *shape))
    membership.begin_loop(LoopBegin(3, 1, 10, 2, 0, Schedule(3)))
    text = membership.loop_disagreement()
    assert text is not None
    golden.says(text)


@pytest.mark.parametrize(("ended", "early"), [(19, True), (20, False), (21, False)])
def test_a_rank_that_leaves_before_the_last_step_leaves_early(ended: int, early: bool) -> None:
    membership = registered()
    for rank in range(RANKS):
        membership.begin_loop(LoopBegin(rank, 1, 10, 2, 0))
    membership.agree_loop()
    report = Left(1, 1, Stand(Phase.DONE, ended))
    assert membership.leave(report)
    assert not membership.leave(report)
    assert membership.left_early == ([1] if early else [])
    assert not membership.stuck
    for rank in (0, 2):
        membership.members[rank].waits_at = "train.py:7"
    assert not membership.stuck
    membership.members[3].waits_at = "train.py:7"
    assert membership.stuck


def test_where_ranks_are_is_said() -> None:
    membership = registered()
    for rank, phase in enumerate([Phase.READY, Phase.UPDATING, Phase.UPDATED, Phase.COMPUTING]):
        membership.members[rank].stand = Stand(phase, 8)
    membership.members[0].waits_at = membership.members[0].stands_at = "a.py:1"
    membership.members[3].stands_at = "b.py:2"
    golden.says(membership.places(range(RANKS)))
