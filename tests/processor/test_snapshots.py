"""A rank's part in periodic checkpoints: told ahead, copied between two steps, written behind the training."""

from __future__ import annotations

import pytest

from lastwords.processor.events import (
    RESEND_INTERVAL_S,
    CancelSave,
    Effect,
    SaveErrored,
    SaveFinished,
    SaveProgressed,
    SessionDown,
    SessionUp,
    StartSave,
    Wake,
)
from lastwords.vocabulary import (
    Left,
    Phase,
    Release,
    Report,
    Save,
    Saved,
    SaveFailed,
    SaveProgress,
    SaveWanted,
    Stand,
)
from tests.processor.rank_driver import GENERATION, RankDriver, reports


def told(rank: RankDriver, step: int, attempt: int = 1) -> list[Report]:
    """A checkpoint is ordered; what is answered."""
    return reports(rank.save(step, attempt, incident=0))


def step(rank: RankDriver) -> None:
    """The training thread makes a step, without copying anything."""
    core = rank.core
    core.mark_ready()
    assert core.try_update()
    core.mark_updated()
    assert core.try_end_step()


def copied(rank: RankDriver) -> list[Effect]:
    """The training thread copies what is due."""
    order = rank.core.copy_due
    assert order is not None
    rank.core.mark_copied(order)
    return rank.core.take_effects()


def test_the_copy_is_due_when_the_step_has_ended_and_then_the_writer_starts() -> None:
    rank = RankDriver(4)
    assert told(rank, 6) == [SaveProgress(1, GENERATION, 0, 1, 0)]
    assert rank.core.copy_due is None
    step(rank)
    assert rank.core.copy_due is None
    step(rank)
    assert rank.core.copy_due is not None
    assert [effect.order.step for effect in copied(rank) if isinstance(effect, StartSave)] == [6]
    step(rank)  # it trains on
    assert reports(rank.tell(SaveProgressed(0, 1, 500))) == [SaveProgress(1, GENERATION, 0, 1, 500)]
    assert reports(rank.tell(SaveFinished(0, 1, 900))) == [Saved(1, GENERATION, 0, 1, 6, 900)]
    assert not rank.core.frozen


def test_an_order_for_the_step_that_has_just_ended_is_in_time() -> None:
    rank = RankDriver(4)
    told(rank, 4)
    assert rank.core.copy_due is not None


@pytest.mark.parametrize("phase", [Phase.READY, Phase.UPDATING, Phase.UPDATED, Phase.SKIPPED])
def test_an_order_that_comes_after_the_next_step_has_begun_is_too_late(phase: Phase) -> None:
    rank = RankDriver(4)
    rank.walk(phase, 5)
    rank.core.take_effects()
    (answer,) = told(rank, 4)
    assert isinstance(answer, SaveFailed)
    assert answer.missed


def test_an_order_for_an_older_step_is_too_late() -> None:
    (answer,) = told(RankDriver(4), 3)
    assert isinstance(answer, SaveFailed)
    assert answer.missed


def test_what_was_not_copied_in_time_is_not_written() -> None:
    rank = RankDriver(4)
    told(rank, 5)
    step(rank)
    order = rank.core.copy_due
    assert order is not None
    step(rank)
    answers = reports(rank.core.take_effects())
    assert [type(answer) for answer in answers] == [SaveFailed]
    rank.core.mark_copied(order)
    assert not rank.core.take_effects()


def test_what_could_not_be_copied_is_reported() -> None:
    rank = RankDriver(4)
    told(rank, 4)
    order = rank.core.copy_due
    assert order is not None
    rank.core.mark_not_copied(order, "MemoryError: no memory")
    (answer,) = reports(rank.core.take_effects())
    assert isinstance(answer, SaveFailed)
    assert (answer.missed, answer.reason) == (False, "MemoryError: no memory")


def test_of_two_orders_the_newer_one_counts() -> None:
    rank = RankDriver(4)
    told(rank, 4)
    copied(rank)
    effects = rank.save(6, 2, incident=0)
    assert CancelSave(0, 1) in effects
    assert not reports(rank.tell(SaveFinished(0, 1, 900)))
    assert told(rank, 4, attempt=1) == []


def test_the_same_order_is_answered_again() -> None:
    rank = RankDriver(4)
    told(rank, 4)
    copied(rank)
    rank.tell(SaveFinished(0, 1, 900))
    assert told(rank, 4) == [Saved(1, GENERATION, 0, 1, 4, 900)]
    assert Saved(1, GENERATION, 0, 1, 4, 900) in reports(rank.tell(SessionUp()))


def test_an_incident_ends_it() -> None:
    rank = RankDriver(4)
    told(rank, 4)
    copied(rank)
    assert CancelSave(0, 1) in rank.freeze()
    assert not [one for one in reports(rank.tell(SaveFinished(0, 1, 900))) if isinstance(one, Saved)]
    assert told(rank, 9, attempt=2) == []


def test_nothing_is_copied_in_an_incident() -> None:
    rank = RankDriver(4)
    told(rank, 4)
    order = rank.core.copy_due
    assert order is not None
    rank.freeze()
    assert rank.core.copy_due is None
    rank.core.mark_copied(order)  # it was being copied when the incident began
    assert not [effect for effect in rank.core.take_effects() if isinstance(effect, StartSave)]


def test_last_words_do_not_touch_it_and_the_other_way_round() -> None:
    rank = RankDriver(4)
    told(rank, 4)
    copied(rank)
    rank.freeze()
    effects = rank.save(4, 1, incident=1)
    assert [effect.order.incident for effect in effects if isinstance(effect, StartSave)] == [1]
    assert not reports(rank.tell(SaveFinished(0, 1, 900)))
    (answer,) = reports(rank.tell(SaveFinished(1, 1, 900)))
    assert answer == Saved(1, GENERATION, 1, 1, 4, 900)


def test_a_writer_that_gives_up_is_reported() -> None:
    rank = RankDriver(4)
    told(rank, 4)
    copied(rank)
    (answer,) = reports(rank.tell(SaveErrored(0, 1, "no space left", True)))
    assert isinstance(answer, SaveFailed)
    assert (answer.storage, answer.missed) == (True, False)
    assert rank.core.stand == Stand(Phase.COMPUTING, 4)


def test_an_order_of_another_generation_is_void() -> None:
    rank = RankDriver(4)
    assert not rank.order(Save(GENERATION + 1, 0, 1, 5, (), (1,), 0, "due"))


def test_a_rank_that_leaves_its_loop_says_that_no_later_step_comes() -> None:
    rank = RankDriver(4)
    told(rank, 9)
    rank.core.mark_left()
    answers = [one for one in reports(rank.core.take_effects()) if isinstance(one, SaveFailed)]
    assert [answer.missed for answer in answers] == [True]
    assert any(isinstance(one, SaveFailed) and one.missed for one in told(rank, 14, attempt=2))
    assert rank.core.copy_due is None


@pytest.mark.parametrize("told_first", [True, False])
def test_the_last_step_is_copied_after_the_rank_has_left_its_loop(told_first: bool) -> None:
    rank = RankDriver(4)
    if told_first:
        told(rank, 4)
    rank.core.mark_left()
    rank.core.take_effects()
    if not told_first:
        assert Wake() in rank.save(4, 1, incident=0), "the training thread waits, and is needed"
    assert [effect.order.step for effect in copied(rank) if isinstance(effect, StartSave)] == [4]


def test_a_rank_says_that_it_copies_where_the_others_wait_for_it() -> None:
    rank = RankDriver(4)
    told(rank, 4)
    rank.core.mark_left()
    rank.core.take_effects()
    rank.core.mark_copying()
    assert reports(rank.core.take_effects()) == [SaveProgress(1, GENERATION, 0, 1, 0, syncing=True)]
    copied(rank)
    rank.core.mark_copying()
    assert not rank.core.take_effects(), "nothing is due any more"


def test_a_rank_that_leaves_its_loop_goes_on_writing() -> None:
    rank = RankDriver(4)
    told(rank, 4)
    copied(rank)
    rank.core.mark_left()
    rank.core.take_effects()
    assert reports(rank.tell(SaveFinished(0, 1, 900))) == [Saved(1, GENERATION, 0, 1, 4, 900)]


def test_one_that_is_wanted_is_counted_from_where_the_rank_is() -> None:
    rank = RankDriver(4)
    step(rank)
    rank.core.want_save()
    assert reports(rank.core.take_effects()) == [SaveWanted(1, GENERATION, 5)]


def test_one_that_is_asked_for_again_is_counted_from_where_it_was_wanted() -> None:
    """A copy may take long: the step of the order has ended, and the rank repeats what it owes."""
    rank = RankDriver(4)
    rank.core.want_save()
    told(rank, 5)
    step(rank)
    assert SaveWanted(1, GENERATION, 4) in reports(rank.wait(RESEND_INTERVAL_S))
    copied(rank)
    assert not wishes(rank.wait(10 * RESEND_INTERVAL_S))


def test_one_that_is_wanted_before_the_loop_is_counted_from_its_first_step() -> None:
    """What the job resumes from may be later than what the rank knew of when it was asked."""
    rank = RankDriver(0)
    rank.core.want_save()
    rank.core.begin_loop(100, 1, 50)
    assert wishes(rank.wait(RESEND_INTERVAL_S))[-1] == SaveWanted(1, GENERATION, 50)


def wishes(effects: list[Effect]) -> list[Report]:
    """What was asked for."""
    return [report for report in reports(effects) if isinstance(report, SaveWanted)]


def asked_again(rank: RankDriver) -> bool:
    """Whether the controller hears of it once more after a while."""
    return bool(wishes(rank.wait(RESEND_INTERVAL_S)))


def asked_in_a_new_session(rank: RankDriver) -> bool:
    """Whether the controller, or whoever follows it, hears of it once more when the session is a new one."""
    return bool(wishes([*rank.tell(SessionDown()), *rank.tell(SessionUp())]))


@pytest.mark.parametrize("ordered", ["before", "after"])
def test_one_that_is_wanted_is_owed_until_its_state_is_copied(ordered: str) -> None:
    """It may be lost with its session or its controller, and an order may be of a step far ahead."""
    rank = RankDriver(4)
    if ordered == "before":
        told(rank, 1000)
    rank.core.want_save()
    assert wishes(rank.core.take_effects())
    assert asked_again(rank)
    assert asked_in_a_new_session(rank)
    if ordered == "after":
        told(rank, 1000)
    assert asked_again(rank)
    told(rank, 5, attempt=2)
    assert asked_again(rank)
    step(rank)
    copied(rank)
    assert not asked_again(rank)


def test_one_whose_state_is_copied_is_asked_for_in_each_new_session_until_the_next_one_is_ordered() -> None:
    """It was copied for a multiple of the schedule, say, and whoever follows has not heard that it was wanted."""
    rank = RankDriver(6)
    told(rank, 7)
    rank.core.want_save()
    step(rank)
    copied(rank)
    for _ in range(2):
        assert asked_in_a_new_session(rank)
        assert not asked_again(rank)
    told(rank, 7)  # the same order once more
    assert asked_in_a_new_session(rank)
    told(rank, 14, attempt=2)
    assert not asked_in_a_new_session(rank)


def test_in_a_new_session_what_is_wanted_is_said_before_the_rank_has_left() -> None:
    """All may have left then, and are released."""
    rank = RankDriver(4)
    rank.core.want_save()
    rank.core.mark_left()
    rank.core.take_effects()

    def said() -> list[type[Report]]:
        again = reports([*rank.tell(SessionDown()), *rank.tell(SessionUp())])
        return [type(report) for report in again if isinstance(report, SaveWanted | Left)]

    assert said() == [SaveWanted, Left]
    told(rank, 4)
    copied(rank)
    assert said() == [SaveWanted, Left]
    rank.order(Release(GENERATION))
    assert not said()


def test_one_whose_state_cannot_be_copied_is_not_asked_for_again() -> None:
    rank = RankDriver(4)
    rank.core.want_save()
    told(rank, 5)
    step(rank)
    order = rank.core.copy_due
    assert order is not None
    rank.core.mark_not_copied(order, "MemoryError: no memory")
    assert not asked_again(rank)


def test_a_copy_of_the_step_before_is_not_what_is_wanted() -> None:
    rank = RankDriver(4)
    told(rank, 4)
    rank.core.want_save()
    copied(rank)
    assert asked_again(rank)


def test_after_the_loop_a_copy_of_the_last_step_is_what_is_wanted() -> None:
    rank = RankDriver(4)
    rank.core.want_save()
    rank.core.mark_left()
    told(rank, 4)
    copied(rank)
    assert not asked_again(rank)


def test_a_rank_that_is_released_stops_writing() -> None:
    """The checkpoint has been given up, or the release would have waited."""
    rank = RankDriver(4)
    told(rank, 4)
    copied(rank)
    rank.core.mark_left()
    assert CancelSave(0, 1) in rank.order(Release(GENERATION))
