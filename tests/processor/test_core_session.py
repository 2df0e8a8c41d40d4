"""One rank and its session: what is repeated, and what happens without a controller."""

from __future__ import annotations

import pytest

from lastwords.core_events import Log, Tick
from lastwords.processor.core import ProcessorOptions
from lastwords.processor.events import Leave, PassOn, Released, SaveFinished, SayHello, SessionDown, SessionUp
from lastwords.vocabulary import (
    DeathSource,
    Left,
    LoopBegin,
    LoopGo,
    Notice,
    PeerDied,
    Phase,
    Raised,
    Refused,
    Saved,
    Settled,
    Signalled,
    Stand,
    Welcome,
)
from tests import golden
from tests.processor.rank_driver import GENERATION, RankDriver, reports


def test_a_new_session_gets_everything_that_is_owed() -> None:
    rank = RankDriver(ended_step=7)
    rank.core.mark_signalled(15)
    rank.freeze()
    rank.save(7)
    rank.tell(SessionDown())
    rank.core.mark_raised("RuntimeError: gloo", secondary=True)
    rank.tell(SaveFinished(1, 1, 900))
    assert [type(report) for report in reports(rank.tell(SessionUp()))] == [Signalled, Raised, Settled, Saved]


def test_hello_is_said_again_until_it_is_welcome() -> None:
    """One of the first messages of a living stream was lost; in growing pauses, as all may wait for a last rank."""
    rank = RankDriver()
    said = [effect for effect in rank.wait(64.0) if isinstance(effect, SayHello)]
    assert len(said) == 17, "after 1, 3, 7, 11, ... 63 s"
    rank.order(Welcome(GENERATION))
    assert rank.wait(300.0) == []
    assert rank.core.deadline_s is None


def test_each_session_has_its_own_hello() -> None:
    rank = RankDriver()
    rank.order(Welcome(GENERATION))
    rank.tell(SessionDown())
    assert not any(isinstance(effect, SayHello) for effect in rank.wait(60.0)), "there is nobody to say it to"
    rank.tell(SessionUp())
    assert any(isinstance(effect, SayHello) for effect in rank.wait(1.0))


def test_an_agreed_loop_is_not_announced_again() -> None:
    rank = RankDriver()
    rank.core.begin_loop(10, 2, 0)
    assert reports(rank.tell(SessionUp())).count(LoopBegin(1, GENERATION, 10, 2, 0)) == 2  # as it began, and again
    rank.order(LoopGo(GENERATION))
    assert rank.core.loop_open
    assert reports(rank.tell(SessionUp())) == []


def test_a_notice_is_a_line_for_people_and_nothing_else() -> None:
    rank = RankDriver()
    rank.walk(Phase.READY, 1)
    before = rank.core.stand
    assert rank.order(Notice(GENERATION, "all ranks wait for rank 2")) == [Log(30, "all ranks wait for rank 2")]
    assert rank.core.stand == before
    assert rank.order(Notice(GENERATION - 1, "old")) == []


def test_the_welcome_is_noted() -> None:
    rank = RankDriver()
    assert not rank.core.welcomed
    rank.order(Welcome(GENERATION))
    assert rank.core.welcomed


def test_a_refused_process_leaves_with_the_reason() -> None:
    rank = RankDriver()
    (leave,) = [e for e in rank.order(Refused(GENERATION, "rank 1 is already taken")) if isinstance(e, Leave)]
    assert leave.order == Refused(GENERATION, "rank 1 is already taken")


def test_training_goes_on_unprotected_and_that_is_said_once() -> None:
    rank = RankDriver(ended_step=7)
    rank.tell(SessionDown())
    logs = [effect for effect in rank.wait(300.0) if isinstance(effect, Log)]
    assert len(logs) == 1
    golden.says(logs[0].text)
    assert rank.core.may_train
    (back,) = [effect for effect in rank.tell(SessionUp()) if isinstance(effect, Log)]
    assert "protected" in back.text


def test_a_rank_that_never_had_a_controller_says_so_once_and_waits_for_nothing_more() -> None:
    """Its deadline stayed in the past: the pulse spun, and said it again and again."""
    rank = RankDriver(connected=False)
    rank.tell(Tick())
    rank.now_s += 30.0
    (log,) = rank.tell(Tick())
    assert isinstance(log, Log)
    golden.says(log.text)
    assert rank.tell(Tick()) == []
    assert rank.core.deadline_s is None
    rank.core.begin_loop(10, 2, 0)
    assert any(isinstance(effect, Leave) for effect in rank.wait(30.0)), "it waits for others, but not for ever"


def test_the_loss_of_protection_is_said_within_some_seconds() -> None:
    """Not at once: another controller may follow."""
    rank = RankDriver(ended_step=7)
    rank.tell(SessionDown())
    assert not [effect for effect in rank.wait(4.0) if isinstance(effect, Log)]
    golden.says(effect.text for effect in rank.wait(2.0) if isinstance(effect, Log))


@pytest.mark.parametrize("seconds", [0.0, 1.0, 300.0], ids=["at once", "a second later", "long after"])
def test_a_signal_without_a_controller_goes_its_own_way(seconds: float) -> None:
    rank = RankDriver(ended_step=7)
    rank.tell(SessionDown())
    rank.wait(seconds)
    rank.core.mark_signalled(15)
    effects = rank.core.take_effects() + rank.wait(6.0)
    assert [effect for effect in effects if isinstance(effect, PassOn)] == [PassOn(15)]
    rank.core.mark_signalled(2)
    assert rank.core.take_effects() == [PassOn(2)]
    assert not any(isinstance(report, Signalled) for report in reports(rank.tell(SessionUp()))), "it has been obeyed"


def test_a_signal_waits_for_a_session_that_returns_in_time() -> None:
    rank = RankDriver(ended_step=7)
    rank.tell(SessionDown())
    rank.core.mark_signalled(15)
    rank.core.take_effects()
    assert not any(isinstance(effect, PassOn) for effect in rank.wait(4.9))
    assert [type(report) for report in reports(rank.tell(SessionUp()))] == [Signalled]
    assert not any(isinstance(effect, PassOn) for effect in rank.wait(60.0))


def test_a_signal_in_an_incident_does_not_end_a_rank_that_may_have_to_write() -> None:
    rank = RankDriver(ended_step=7)
    rank.freeze()
    rank.tell(SessionDown())
    rank.core.mark_signalled(15)
    assert not any(isinstance(effect, PassOn) for effect in rank.wait(29.9))


def test_a_short_break_is_not_mentioned() -> None:
    rank = RankDriver(ended_step=7)
    rank.tell(SessionDown())
    assert rank.wait(1.4) == []
    assert rank.tell(SessionUp()) == []


def test_a_frozen_rank_leaves_when_the_controller_is_lost() -> None:
    rank = RankDriver(ended_step=7)
    rank.freeze()
    rank.tell(SessionDown())
    assert not any(isinstance(effect, Leave) for effect in rank.wait(29.9))
    (leave,) = [effect for effect in rank.wait(0.2) if isinstance(effect, Leave)]
    assert leave.order is None
    golden.says(leave.reason)


def test_repeated_words_about_a_lost_session_do_not_prolong_the_wait() -> None:
    rank = RankDriver(ended_step=7)
    rank.freeze()
    effects = []
    for _ in range(40):
        rank.tell(SessionDown())
        effects += rank.wait(1.0)
    assert sum(isinstance(effect, Leave) for effect in effects) == 1


def test_an_exception_without_a_controller_does_not_wait_long() -> None:
    rank = RankDriver(ended_step=7)
    rank.tell(SessionDown())
    rank.wait(100.0)
    rank.core.mark_raised("KeyError: 'label'", secondary=False)
    (leave,) = [effect for effect in rank.wait(0.0) if isinstance(effect, Leave)]
    assert "KeyError" in leave.reason


def test_a_finished_loop_without_a_controller_ends_well() -> None:
    rank = RankDriver(ended_step=7)
    rank.core.mark_left()
    rank.tell(SessionDown())
    effects = rank.wait(30.0)
    assert any(isinstance(effect, Released) for effect in effects)
    assert not any(isinstance(effect, Leave) for effect in effects)


def test_a_rank_that_never_had_a_session_does_not_wait_for_ever() -> None:
    rank = RankDriver(connected=False, options=ProcessorOptions(controller_lost_s=5.0))
    rank.wait(0.0)
    rank.core.begin_loop(10, 2, 0)
    rank.tell(SessionDown())
    assert any(isinstance(effect, Leave) for effect in rank.wait(5.1))


def test_a_rank_that_left_repeats_it() -> None:
    rank = RankDriver(ended_step=7)
    rank.core.mark_left()
    rank.core.take_effects()
    assert reports(rank.wait(2.0)) == [Left(1, GENERATION, Stand(Phase.DONE, 7))] * 2


def test_nothing_is_sent_while_training() -> None:
    rank = RankDriver(ended_step=7)
    rank.order(Welcome(GENERATION))
    for _ in range(5):
        rank.walk(Phase.UPDATED, rank.core.ended_step + 1)
        rank.core.try_end_step()
    assert rank.core.take_effects() == []
    assert rank.core.deadline_s is None


def test_a_rank_is_done_when_every_step_of_its_loop_has_ended() -> None:
    rank = RankDriver(ended_step=19)
    rank.core.begin_loop(10, 2, 19)
    assert not rank.core.steps_done
    rank.walk(Phase.UPDATED, 20)
    assert not rank.core.steps_done, "its last step has not ended"
    rank.core.try_end_step()
    assert rank.core.steps_done


def test_a_loop_without_a_known_end_is_never_known_to_be_done() -> None:
    rank = RankDriver(ended_step=19)
    rank.core.begin_loop(0, 0, 19)
    assert not rank.core.steps_done


def test_a_death_that_was_seen_is_told_to_each_controller() -> None:
    rank = RankDriver(ended_step=7)
    death = PeerDied(1, GENERATION, 2, DeathSource.ROBUST_MUTEX)
    rank.core.mark_peer_died(death)
    assert reports(rank.core.take_effects()) == [death]
    for _ in range(2):
        rank.tell(SessionDown())
        assert death in reports(rank.tell(SessionUp()))
