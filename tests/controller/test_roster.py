"""Which session a rank's orders go to: the newest one that was accepted; and how people see the ranks."""

from __future__ import annotations

from typing import Any

from lastwords.controller.membership import Membership
from lastwords.controller.server import SessionRoster, rank_states
from lastwords.vocabulary import DeathSource, Hello, Phase, ProcessId, Stand


class FakeSession:
    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def session() -> Any:
    return FakeSession()


def job_of(*units: tuple[str, ...], world_size: int = 4) -> Membership:
    """The first ranks have registered, with these units."""
    job = Membership(world_size, 1)
    for rank, held in enumerate(units):
        job.admit(Hello(rank, 1, world_size, ProcessId("h", 1, 1, "n"), held, Stand(Phase.COMPUTING, 0)))
    return job


def test_a_session_may_carry_several_ranks_and_loses_all_of_them() -> None:
    roster, both = SessionRoster(), session()
    roster.bind(both, 2, 1.0)
    roster.bind(both, 1, 1.0)
    assert roster.session_of(1) is roster.session_of(2) is both
    assert roster.unbind(both) == [1, 2]
    assert roster.session_of(1) is None
    assert not roster.connected


def test_a_newer_session_takes_a_rank_over_and_the_old_one_is_ended_when_it_is_empty() -> None:
    roster, old, new = SessionRoster(), session(), session()
    roster.bind(old, 1, 1.0)
    roster.bind(old, 2, 1.0)
    roster.bind(new, 1, 2.0)
    assert not old.cancelled
    roster.bind(new, 2, 2.0)
    assert old.cancelled
    assert roster.unbind(old) == []
    assert roster.session_of(1) is new


def test_a_hello_that_is_repeated_in_the_same_session_changes_nothing() -> None:
    roster, one = SessionRoster(), session()
    roster.bind(one, 1, 1.0)
    roster.bind(one, 1, 2.0)
    assert not one.cancelled
    assert roster.unbind(one) == [1]


def test_people_see_the_newest_stand_and_how_long_ago_anything_came() -> None:
    job, roster = job_of(("u",), ("u",), world_size=3), SessionRoster()
    roster.bind(session(), 1, 1.0)
    job.members[1].stand = Stand(Phase.READY, 8)
    roster.hear(1, 4.0)
    silent, seen, unseen = rank_states(job, roster, 5.5)
    assert (unseen.process, unseen.stand, unseen.heard_s, unseen.connected) == (None, None, -1.0, False)
    assert (silent.process, silent.heard_s, silent.connected) == (job.members[0].process, -1.0, False)
    assert (seen.stand, seen.heard_s, seen.connected, seen.dead) == (Stand(Phase.READY, 8), 1.5, True, False)


def test_of_the_dead_nothing_is_said_but_that_they_are_whatever_still_arrives_from_them() -> None:
    job, roster = job_of(("u",), ("u",)), SessionRoster()
    for member in job.members.values():
        member.waits_at, member.work_s = "train.py:9", 0.5
    job.bury(1, DeathSource.PIDFD)
    roster.bind(session(), 1, 2.0)
    living, dead, *_ = rank_states(job, roster, 2.0, {0: 0.4, 1: 0.6})
    assert (living.dead, living.waits_at, living.work_s, living.slower) == (False, "train.py:9", 0.5, 0.4)
    assert (dead.dead, dead.waits_at, dead.work_s, dead.slower) == (True, "", 0.0, 0.0)


def test_a_rank_that_is_only_silent_is_lost_and_not_dead() -> None:
    job = job_of(("u",), ("u",))
    job.bury(1, DeathSource.STREAM)
    _, lost, *_ = rank_states(job, SessionRoster(), 2.0)
    assert (lost.dead, lost.connected) == (False, False)


def test_a_rank_is_the_only_holder_of_a_unit_once_no_other_living_rank_holds_it() -> None:
    job = job_of(("a", "b"), ("a",), ("b",))

    def alone() -> list[int]:
        return [view.rank for view in rank_states(job, SessionRoster(), 2.0) if view.sole_holder]

    assert alone() == []
    job.bury(1, DeathSource.PIDFD)
    assert alone() == [0]
    job.bury(0, DeathSource.PIDFD)
    assert alone() == [2], "the dead hold nothing"
