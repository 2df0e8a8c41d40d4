"""Which session a rank's orders go to: the newest one that was accepted, and nobody else's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lastwords.controller.server import SessionRoster
from lastwords.vocabulary import Goodbye, Hello, Phase, ProcessId, Stand, Status


class FakeSession:
    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def session() -> Any:
    return FakeSession()


def hello(rank: int, step: int = 0) -> Hello:
    return Hello(rank, 1, 4, ProcessId("h", 1, 1, "n"), ("u",), Stand(Phase.COMPUTING, step))


def test_a_session_may_carry_several_ranks_and_loses_all_of_them() -> None:
    roster, both = SessionRoster(4), session()
    roster.bind(both, hello(2), 1.0)
    roster.bind(both, hello(1), 1.0)
    assert roster.session_of(1) is roster.session_of(2) is both
    assert roster.unbind(both) == [1, 2]
    assert roster.session_of(1) is None
    assert not roster.is_untouched


def test_a_newer_session_takes_a_rank_over_and_the_old_one_is_ended_when_it_is_empty() -> None:
    roster, old, new = SessionRoster(4), session(), session()
    roster.bind(old, hello(1), 1.0)
    roster.bind(old, hello(2), 1.0)
    roster.bind(new, hello(1), 2.0)
    assert not old.cancelled
    roster.bind(new, hello(2), 2.0)
    assert old.cancelled
    assert roster.unbind(old) == []
    assert roster.session_of(1) is new


def test_a_hello_that_is_repeated_in_the_same_session_changes_nothing() -> None:
    roster, one = SessionRoster(4), session()
    roster.bind(one, hello(1), 1.0)
    roster.bind(one, hello(1), 2.0)
    assert not one.cancelled
    assert roster.unbind(one) == [1]


def test_the_dead_are_not_counted_as_living_even_while_their_socket_is_open() -> None:
    roster, one = SessionRoster(4), session()
    roster.bind(one, hello(1), 1.0)
    roster.bind(one, hello(2), 1.0)
    roster.bury(2)
    roster.bury(3)
    assert roster.live == 1
    assert len(roster.connected) == 2


def test_people_see_the_newest_stand_and_how_long_ago_it_came() -> None:
    roster, one = SessionRoster(3), session()
    roster.bind(one, hello(1), 1.0)
    roster.hear(Status(1, 1, Stand(Phase.READY, 8)), 3.0)
    roster.hear(Goodbye(1, 1), 4.0)
    unseen, seen, _ = roster.views(5.5)
    assert (unseen.process, unseen.stand, unseen.heard_s, unseen.connected) == (None, None, -1.0, False)
    assert (seen.stand, seen.heard_s, seen.connected, seen.dead) == (Stand(Phase.READY, 8), 1.5, True, False)


def test_a_death_is_news_once_and_only_of_a_rank_that_ever_came() -> None:
    roster, one = SessionRoster(4), session()
    roster.bind(one, hello(1), 1.0)
    assert [roster.bury(1), roster.bury(1), roster.bury(2)] == [True, False, False]


def test_the_dead_stay_dead_whatever_still_arrives_from_them() -> None:
    roster, one = SessionRoster(2), session()
    roster.bind(one, hello(1), 1.0)
    roster.bury(1)
    roster.bind(session(), hello(1), 2.0)
    assert roster.views(2.0)[1].dead
    assert roster.live == 0
    assert not roster.bury(1)
    another = replace(hello(1), process=ProcessId("h", 2, 2, "n"))
    roster.bind(session(), another, 3.0)
    assert not roster.views(3.0)[1].dead


def test_a_rank_is_the_only_holder_of_a_unit_once_no_other_living_rank_holds_it() -> None:
    roster, one = SessionRoster(4), session()
    for rank, units in enumerate((("a", "b"), ("a",), ("b",))):
        roster.bind(one, replace(hello(rank), units=units), 1.0)
    assert not any(view.sole_holder for view in roster.views(2.0))
    roster.bury(1)
    assert [view.rank for view in roster.views(2.0) if view.sole_holder] == [0]
    roster.bury(0)
    assert [view.rank for view in roster.views(2.0) if view.sole_holder] == [2], "the dead hold nothing"
