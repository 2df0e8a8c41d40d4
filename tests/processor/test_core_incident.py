"""One rank in an incident: freeze, settle, proceed, save, resume, exit; lost, late and repeated orders."""

from __future__ import annotations

import itertools

import pytest

from lastwords.processor.core import ProcessorOptions
from lastwords.processor.events import (
    CancelSave,
    Leave,
    SaveErrored,
    SaveFinished,
    SaveProgressed,
    StartSave,
    Wake,
)
from lastwords.vocabulary import (
    Exit,
    ExitKind,
    Freeze,
    Goodbye,
    Left,
    Phase,
    Proceed,
    Raised,
    Refused,
    Release,
    Resume,
    Save,
    Saved,
    SaveFailed,
    SaveProgress,
    Settled,
    Stand,
)
from tests import golden
from tests.processor.rank_driver import GENERATION, RankDriver, reports


def frozen(phase: Phase, step: int, incident: int = 1) -> RankDriver:
    rank = RankDriver(ended_step=step if phase in (Phase.COMPUTING, Phase.DONE) else step - 1)
    rank.walk(phase, step)
    rank.core.take_effects()
    rank.freeze(incident)
    return rank


# --------------------------------------------------------------------------- freeze and settle


@pytest.mark.parametrize("phase", [Phase.COMPUTING, Phase.READY, Phase.SKIPPED, Phase.TORN, Phase.DONE])
def test_a_rank_whose_weights_cannot_change_settles_at_once(phase: Phase) -> None:
    rank = RankDriver(ended_step=7)
    rank.walk(phase, 7 if phase in (Phase.COMPUTING, Phase.DONE) else 8)
    rank.core.take_effects()
    assert reports(rank.freeze()) == [Settled(1, GENERATION, 1, 1, rank.core.stand)]


def test_no_update_begins_while_frozen() -> None:
    rank = frozen(Phase.READY, 8)
    assert rank.core.try_update() is False
    assert rank.core.stand == Stand(Phase.READY, 8)


def test_the_same_call_begins_an_update_without_the_freeze() -> None:
    rank = RankDriver(ended_step=7)
    rank.walk(Phase.READY, 8)
    assert rank.core.try_update() is True


def test_a_running_update_settles_only_after_its_step_has_ended() -> None:
    rank = frozen(Phase.UPDATING, 8)
    assert rank.core.take_effects() == []
    rank.core.mark_updated()
    assert rank.core.take_effects() == []
    assert rank.core.try_end_step() is True
    assert reports(rank.core.take_effects()) == [Settled(1, GENERATION, 1, 1, Stand(Phase.COMPUTING, 8))]


def test_an_update_without_an_end_settles_when_its_grace_is_over() -> None:
    rank = frozen(Phase.UPDATING, 8)
    rank.wait(5.0)
    rank.core.mark_updated()
    assert reports(rank.wait(0.49)) == []
    assert reports(rank.wait(0.01)) == [Settled(1, GENERATION, 1, 1, Stand(Phase.UPDATED, 8))]


def test_a_rank_that_has_settled_in_updated_stays_there() -> None:
    rank = frozen(Phase.UPDATED, 8)
    rank.wait(0.5)
    assert not rank.core.may_end_step
    assert rank.core.try_end_step() is False
    assert rank.core.stand == Stand(Phase.UPDATED, 8)


def test_an_exception_after_the_update_ends_the_grace() -> None:
    rank = frozen(Phase.UPDATED, 8)
    rank.core.mark_raised("RuntimeError: gloo", secondary=True)
    assert Settled(1, GENERATION, 1, 1, Stand(Phase.UPDATED, 8)) in reports(rank.core.take_effects())


def test_an_update_that_raises_while_frozen_settles_as_torn() -> None:
    rank = frozen(Phase.UPDATING, 8)
    rank.core.mark_torn()
    assert reports(rank.core.take_effects()) == [Settled(1, GENERATION, 1, 1, Stand(Phase.TORN, 8))]


def test_a_frozen_rank_that_moves_settles_again_with_a_higher_sequence() -> None:
    rank = frozen(Phase.COMPUTING, 7)
    rank.core.mark_ready()
    assert reports(rank.core.take_effects()) == [Settled(1, GENERATION, 1, 2, Stand(Phase.READY, 8))]


def test_a_frozen_step_without_an_update_parks_as_skipped() -> None:
    rank = frozen(Phase.COMPUTING, 7)
    assert rank.core.try_end_step() is False
    assert reports(rank.core.take_effects()) == [Settled(1, GENERATION, 1, 2, Stand(Phase.SKIPPED, 8))]
    rank.resume()
    assert rank.core.try_end_step() is True
    assert rank.core.stand == Stand(Phase.COMPUTING, 8)


def test_a_repeated_freeze_is_answered_again_and_changes_nothing() -> None:
    rank = frozen(Phase.COMPUTING, 7)
    before = Settled(1, GENERATION, 1, 1, Stand(Phase.COMPUTING, 7))
    assert reports(rank.freeze()) == [before]
    assert reports(rank.freeze()) == [before]


def test_a_frozen_rank_repeats_its_answer_until_it_is_told_something() -> None:
    rank = frozen(Phase.COMPUTING, 7)
    assert len(reports(rank.wait(3.0))) == 3
    rank.resume()
    assert reports(rank.wait(10.0)) == []


# --------------------------------------------------------------------------- resume, late and reordered orders


def test_a_false_alarm_leaves_no_trace() -> None:
    rank = frozen(Phase.READY, 8)
    rank.proceed(8)
    assert Wake() in rank.resume()
    assert (rank.core.may_train, rank.core.frozen, rank.core.may_proceed) == (True, False, False)
    assert reports(rank.wait(10.0)) == [], "its answer is not owed any more"
    assert rank.core.try_update() is True


def test_a_freeze_that_its_resume_has_overtaken_is_void() -> None:
    rank = RankDriver(ended_step=7)
    rank.resume(1)
    assert reports(rank.freeze(1)) == []
    assert not rank.core.frozen


def test_a_resume_of_an_older_incident_does_not_unfreeze() -> None:
    rank = frozen(Phase.READY, 8, incident=2)
    rank.resume(1)
    assert rank.core.frozen
    assert rank.core.try_update() is False


def test_a_freeze_of_an_older_incident_is_void() -> None:
    rank = frozen(Phase.READY, 8, incident=2)
    assert reports(rank.freeze(1)) == []
    assert rank.core._part.incident == 2


def test_a_newer_incident_starts_its_own_sequence() -> None:
    rank = frozen(Phase.COMPUTING, 7)
    rank.core.mark_ready()
    rank.core.take_effects()
    assert reports(rank.freeze(2)) == [Settled(1, GENERATION, 2, 1, Stand(Phase.READY, 8))]


def test_no_rank_trains_on_after_a_save() -> None:
    rank = frozen(Phase.READY, 8)
    rank.save(7)
    rank.resume()
    assert rank.core.frozen
    assert rank.core.try_update() is False


def test_the_same_rank_trains_on_without_the_save() -> None:
    rank = frozen(Phase.READY, 8)
    rank.resume()
    assert rank.core.try_update() is True


@pytest.mark.parametrize(
    "order",
    [
        Freeze(GENERATION - 1, 9, "old"),
        Proceed(GENERATION - 1, 1, 8),
        Save(GENERATION - 1, 1, 9, 7, ("u",), (), 0, "old"),
        Resume(GENERATION - 1, 1),
        Exit(GENERATION - 1, 9, ExitKind.SAVED, 7, "/c", "old", ()),
        Refused(GENERATION - 1, "old"),
        Release(GENERATION - 1),
    ],
    ids=lambda order: type(order).__name__,
)
def test_an_order_of_another_generation_changes_nothing(order: Freeze) -> None:
    rank = frozen(Phase.READY, 8)
    assert rank.order(order) == []
    assert rank.core._part.incident == 1
    assert rank.core.try_update() is False


# --------------------------------------------------------------------------- proceed


def test_proceed_lets_exactly_this_update_through() -> None:
    rank = frozen(Phase.READY, 8)
    assert Wake() in rank.proceed(8)
    assert rank.core.try_update() is True
    rank.core.mark_updated()
    assert rank.core.try_end_step() is True
    assert reports(rank.core.take_effects()) == [Settled(1, GENERATION, 1, 2, Stand(Phase.COMPUTING, 8))]
    rank.core.mark_ready()
    assert rank.core.try_update() is False, "the next update is frozen again"


@pytest.mark.parametrize(("step", "incident"), [(7, 1), (9, 1), (8, 2), (8, 0)])
def test_proceed_for_another_step_or_incident_is_void(step: int, incident: int) -> None:
    rank = frozen(Phase.READY, 8)
    rank.proceed(step, incident)
    assert rank.core.try_update() is False


def test_a_repeated_proceed_does_not_let_a_second_update_through() -> None:
    rank = frozen(Phase.READY, 8)
    rank.proceed(8)
    rank.core.try_update()
    rank.core.mark_updated()
    rank.core.try_end_step()
    rank.core.mark_ready()
    rank.proceed(8)
    assert rank.core.try_update() is False


def test_proceed_after_a_save_is_void() -> None:
    rank = frozen(Phase.READY, 8)
    rank.save(7)
    rank.proceed(8)
    assert rank.core.try_update() is False, "the weights of step 7 are being written"


def test_a_save_takes_back_a_proceed_that_was_not_used() -> None:
    rank = frozen(Phase.READY, 8)
    rank.proceed(8)
    rank.save(7)
    assert rank.core.try_update() is False


def test_what_is_read_from_a_copy_may_be_of_any_step_and_nothing_else_may() -> None:
    for copied, starts in ((("u", "v"), True), (("v",), False)):
        rank = frozen(Phase.COMPUTING, 8)
        order = Save(GENERATION, 1, 1, 7, ("u", "v"), (), 0, "chosen", copied)
        assert any(isinstance(effect, StartSave) for effect in rank.order(order)) is starts


def test_an_update_under_proceed_is_not_settled_while_it_runs() -> None:
    rank = frozen(Phase.READY, 8)
    rank.proceed(8)
    rank.core.try_update()
    assert reports(rank.wait(5.0)) == [], "READY(8) is no longer true and must not be repeated"
    assert reports(rank.freeze()) == []


# --------------------------------------------------------------------------- save

HOLDERS = [
    (Phase.COMPUTING, 7, 7),
    (Phase.DONE, 7, 7),
    (Phase.UPDATED, 7, 7),
    (Phase.READY, 8, 7),
    (Phase.SKIPPED, 8, 7),
    (Phase.SKIPPED, 7, 7),
]


@pytest.mark.parametrize(("phase", "of_step", "step"), HOLDERS)
def test_a_holder_starts_to_write_and_says_so(phase: Phase, of_step: int, step: int) -> None:
    rank = frozen(phase, of_step)
    rank.wait(1.0)
    effects = rank.save(step)
    (started,) = [effect for effect in effects if isinstance(effect, StartSave)]
    assert started.order.step == step
    assert reports(effects) == [SaveProgress(1, GENERATION, 1, 1, 0)]


@pytest.mark.parametrize(("phase", "step"), list(itertools.product(Phase, (5, 6, 7, 8, 9))))
def test_a_rank_refuses_a_step_that_it_does_not_hold(phase: Phase, step: int) -> None:
    if phase is Phase.UPDATING:
        return  # never settled: see the next test
    rank = frozen(phase, 7 if phase in (Phase.COMPUTING, Phase.DONE) else 8)
    rank.wait(1.0)
    if rank.core.stand.holds(step):
        return
    effects = rank.save(step)
    assert not any(isinstance(effect, StartSave) for effect in effects)
    (answer,) = reports(effects)
    assert isinstance(answer, SaveFailed)
    assert not answer.storage
    golden.says(answer.reason)


def test_a_rank_that_has_not_settled_refuses_to_write() -> None:
    rank = frozen(Phase.UPDATING, 8)
    (answer,) = reports(rank.save(8))
    assert isinstance(answer, SaveFailed)
    golden.says(answer.reason)


def test_black_boxes_can_be_copied_by_a_rank_that_holds_nothing() -> None:
    rank = frozen(Phase.TORN, 8)
    assert any(isinstance(effect, StartSave) for effect in rank.save(8, units=()))


def test_the_result_is_reported_and_repeated_until_the_end() -> None:
    rank = frozen(Phase.COMPUTING, 7)
    rank.save(7)
    assert reports(rank.tell(SaveProgressed(1, 1, 500))) == [SaveProgress(1, GENERATION, 1, 1, 500)]
    done = Saved(1, GENERATION, 1, 1, 7, 900)
    assert reports(rank.tell(SaveFinished(1, 1, 900))) == [done]
    assert done in reports(rank.wait(1.0))
    assert reports(rank.save(7)) == [done], "asked again, it does not write again"
    rank.exit()
    assert reports(rank.wait(10.0)) == []


def test_a_failure_is_reported_with_its_kind() -> None:
    rank = frozen(Phase.COMPUTING, 7)
    rank.save(7)
    effects = rank.tell(SaveErrored(1, 1, "No space left on device", True))
    assert reports(effects) == [SaveFailed(1, GENERATION, 1, 1, 7, "No space left on device", True)]


def test_a_newer_attempt_replaces_the_older_one() -> None:
    rank = frozen(Phase.READY, 8)
    rank.save(7, attempt=1)
    effects = rank.save(7, attempt=2)
    assert effects.index(CancelSave(1, 1)) < next(i for i, e in enumerate(effects) if isinstance(e, StartSave))
    assert reports(rank.tell(SaveFinished(1, 1, 900))) == [], "the cancelled writer's answer counts for nothing"


def test_an_order_of_an_older_attempt_is_void() -> None:
    rank = frozen(Phase.READY, 8)
    rank.save(7, attempt=2)
    assert not reports(rank.save(7, attempt=1))


def test_a_save_without_a_freeze_is_void() -> None:
    rank = RankDriver(ended_step=7)
    assert reports(rank.save(7)) == []
    assert rank.core.may_train


# --------------------------------------------------------------------------- the end


def test_exit_stops_the_writer_and_everything_else() -> None:
    rank = frozen(Phase.COMPUTING, 7)
    rank.save(7)
    effects = rank.exit()
    assert effects[0] == CancelSave(1, 1)
    assert reports(effects) == [Goodbye(1, GENERATION)]
    assert [effect.reason for effect in effects if isinstance(effect, Leave)] == ["rank 0 died"]
    assert rank.freeze(2) == []
    assert rank.core.leaving
    assert rank.core.deadline_s is None


def test_exit_reaches_a_rank_that_has_missed_the_whole_incident() -> None:
    rank = RankDriver(ended_step=7)
    rank.walk(Phase.READY, 8)
    assert any(isinstance(effect, Leave) for effect in rank.exit())
    assert rank.core.try_update() is False


def test_exit_of_an_older_incident_is_void() -> None:
    rank = frozen(Phase.COMPUTING, 7, incident=2)
    assert not any(isinstance(effect, Leave) for effect in rank.exit(1))


def test_exit_of_a_false_alarm_is_void() -> None:
    rank = frozen(Phase.COMPUTING, 7, incident=1)
    rank.resume(1)
    assert not any(isinstance(effect, Leave) for effect in rank.exit(1))


def test_only_a_rank_that_has_left_is_released() -> None:
    rank = RankDriver(ended_step=7)
    rank.order(Release(GENERATION))
    assert not rank.core.released
    rank.core.mark_left()
    assert reports(rank.core.take_effects()) == [Left(1, GENERATION, Stand(Phase.DONE, 7))]
    rank.order(Release(GENERATION))
    assert rank.core.released


def test_the_grace_is_an_option() -> None:
    rank = RankDriver(ended_step=7, options=ProcessorOptions(step_end_grace_s=2.0))
    rank.walk(Phase.UPDATED, 8)
    rank.freeze()
    assert reports(rank.wait(1.9)) == []
    assert len(reports(rank.wait(0.1))) == 1


def test_a_rank_whose_gate_failed_can_still_be_told_to_proceed() -> None:
    rank = RankDriver(ended_step=7)
    rank.core.mark_ready()
    rank.core.mark_gate_failed("connection closed by peer")
    raised = reports(rank.core.take_effects())
    assert raised == [Raised(1, GENERATION, "connection closed by peer", True, Stand(Phase.READY, 8))]
    assert not rank.core.try_update(), "the gate was never passed"
    rank.freeze()
    assert not rank.core.try_update()
    rank.proceed(8)
    assert rank.core.may_proceed
    assert rank.core.try_update()


def test_a_rank_whose_gate_failed_does_not_update_by_itself_even_if_nobody_freezes_it() -> None:
    """Negative control: what an exception out of a collective does to a rank in READY cannot be made good."""
    rank = RankDriver(ended_step=7)
    rank.core.mark_ready()
    rank.core.mark_raised("connection closed by peer", secondary=True)
    rank.freeze()
    rank.proceed(8)
    assert not rank.core.may_proceed


def test_a_rank_needs_its_controller_until_it_knows_how_its_job_ends() -> None:
    released, told = RankDriver(), RankDriver()
    released.core.mark_left()
    told.freeze()
    assert (released.core.released, told.core.leaving) == (False, False)
    released.order(Release(GENERATION))
    told.exit()
    assert (released.core.released, told.core.leaving) == (True, True)
