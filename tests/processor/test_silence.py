"""When a silent controller is asked after, and by whom; pure."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lastwords.clock import OwnTime
from lastwords.controller import takeover
from lastwords.processor.events import ProcessorOptions
from lastwords.processor.ring import ASK_TURN_S, Silence
from lastwords.transport import CLIENT_KEEPALIVE
from lastwords.vocabulary import DeathSource, PeerDied, Phase
from tests.processor.rank_driver import GENERATION, RankDriver

OPTIONS = ProcessorOptions()
START_S = 0.5
"""A process needs so long to become a controller."""


def silent_for(seconds: float) -> Silence:
    """Seen at 0.0 for the last time, and looked at since as often as it is."""
    silence = Silence(OPTIONS)
    looks = int(seconds / OwnTime.LOOK_INTERVAL_S) + 1
    for number in range(looks):
        silence.hear(7, number * OwnTime.LOOK_INTERVAL_S)
    return silence


def after_s(asks: bool, is_first: bool = True) -> float:
    """When it is time, to a tenth of a second."""
    silence = silent_for(60.0)
    return next(tenth / 10 for tenth in range(600) if silence.is_over(asks, is_first=is_first, now_s=tenth / 10))


def test_who_has_something_to_say_asks_earlier_than_who_trains() -> None:
    assert after_s(asks=True) == OPTIONS.unanswered_s
    assert after_s(asks=False) == OPTIONS.controller_silent_s


@pytest.mark.parametrize("asks", [True, False])
def test_the_first_living_rank_of_the_host_goes_first(asks: bool) -> None:
    assert after_s(asks, is_first=False) == after_s(asks) + ASK_TURN_S
    assert ASK_TURN_S > takeover.ANSWER_S + START_S


def test_who_trains_never_asks_before_who_has_something_to_say() -> None:
    silence = Silence(ProcessorOptions(unanswered_s=60.0))
    silence.hear(1, 0.0)
    assert not silence.is_over(False, is_first=True, now_s=59.9)


def test_the_deadlines_fit_together() -> None:
    ended_s = takeover.ANSWER_S + START_S
    # A pause of 10 s ends no controller of a job that trains, and one of 6 s none at all.
    assert after_s(asks=False) >= 10.0
    assert after_s(asks=True) + takeover.ANSWER_S > 6.0
    # Who waits for a controller has another one long before it gives up.
    assert after_s(asks=True, is_first=False) + ended_s < OPTIONS.controller_lost_s / 2
    # The sessions with one that is stopped break after 10 s: SIGTERM is kept back until the other one serves.
    broken_s = CLIENT_KEEPALIVE.time_s + CLIENT_KEEPALIVE.timeout_s
    assert after_s(asks=False) + ended_s + 1.0 < broken_s + OPTIONS.unprotected_s


def test_a_sign_of_life_is_a_number_that_changes() -> None:
    silence = silent_for(4.5)
    silence.hear(8, 4.9)
    assert not silence.is_over(True, is_first=True, now_s=9.8)
    assert silence.is_over(True, is_first=True, now_s=9.9)


def test_without_a_session_no_sign_of_life_counts() -> None:
    silence = silent_for(0.0)
    silence.hear(None, 4.9)
    assert silence.is_over(True, is_first=True, now_s=5.0)


def test_one_that_has_answered_has_all_its_time_again() -> None:
    silence = silent_for(6.0)
    silence.begin(6.0)
    assert not silence.is_over(True, is_first=True, now_s=10.9)
    assert silence.is_over(True, is_first=True, now_s=11.0)


def test_who_has_never_looked_knows_nothing() -> None:
    assert not Silence(OPTIONS).is_over(True, is_first=True, now_s=1e9)


def test_a_host_that_was_frozen_blames_nobody() -> None:
    """Both have been stopped for ten minutes; this rank runs first, and looks before the controller does anything."""
    own_time, silence = OwnTime(), Silence(OPTIONS)
    silence.hear(7, own_time.at(100.0))
    for now_mono_s in (700.0, 700.5, 701.0):
        now_s = own_time.at(now_mono_s)
        silence.hear(7, now_s)
        assert not silence.is_over(True, is_first=True, now_s=now_s)
    silence.hear(8, own_time.at(701.5))
    assert not silence.is_over(True, is_first=True, now_s=own_time.at(706.0))


# ------------------------------------------------------------------ who has something to say

ASKS: dict[str, Callable[[RankDriver], object]] = {
    "frozen": lambda rank: rank.freeze(),
    "an exception": lambda rank: rank.core.mark_raised("KeyError", secondary=False),
    "a gate that has failed": lambda rank: (rank.walk(Phase.READY, 8), rank.core.mark_gate_failed("gone")),
    "its loop is over": lambda rank: rank.core.mark_left(),
    "its loop is to begin": lambda rank: rank.core.begin_loop(10, 2, 7),
    "a signal": lambda rank: rank.core.mark_signalled(15),
    "a death": lambda rank: rank.core.mark_peer_died(PeerDied(1, GENERATION, 2, DeathSource.ROBUST_MUTEX)),
}


@pytest.mark.parametrize("why", ASKS)
def test_a_rank_has_something_to_say(why: str) -> None:
    rank = RankDriver(ended_step=7)
    ASKS[why](rank)
    assert rank.core.asks


def test_a_rank_that_trains_has_nothing_to_say() -> None:
    assert not RankDriver(ended_step=7).core.asks


def test_after_a_false_alarm_it_has_nothing_to_say_any_more() -> None:
    rank = RankDriver(ended_step=7)
    rank.freeze()
    rank.resume()
    assert not rank.core.asks


def test_a_rank_that_has_been_told_has_nothing_to_say_any_more() -> None:
    rank = RankDriver(ended_step=7)
    rank.freeze()
    rank.exit()
    assert not rank.core.asks
