"""An incident, from suspicion to selection: certain and uncertain, settled and silent, resume and the lack of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lastwords.controller.events import (
    ControllerOptions,
    FromRank,
    JobStage,
    NewestKnown,
    OutcomeKind,
    StartPublish,
    Watched,
)
from lastwords.controller.words import newest_text
from lastwords.vocabulary import (
    DeathSource,
    Exit,
    ExitKind,
    Freeze,
    Goodbye,
    Left,
    PeerDied,
    Phase,
    Proceed,
    Raised,
    Report,
    Resume,
    Save,
    Saved,
    SaveFailed,
    Schedule,
    Settled,
    Signalled,
    Stand,
    Status,
)
from tests import golden
from tests.controller.job_driver import GENERATION, JobDriver, computing

CERTAIN = [DeathSource.ROBUST_MUTEX, DeathSource.PIDFD]


# --------------------------------------------------------------------------- how it starts


@pytest.mark.parametrize("source", CERTAIN)
def test_a_certain_death_freezes_everybody_else(source: DeathSource) -> None:
    job = JobDriver(3)
    job.kill(1, source)
    assert sorted(job.sent(Freeze)) == [0, 2]
    for rank in (0, 2):
        job.settle(rank, computing(5))
    assert job.core.state is JobStage.SAVING


def test_a_suspicion_freezes_but_decides_nothing() -> None:
    job = JobDriver(3)
    job.kill(1, DeathSource.STREAM)
    assert set(job.sent(Freeze)) >= {0, 2}
    for rank in (0, 2):
        job.settle(rank, computing(5))
    assert job.core.state is JobStage.SETTLING


def test_a_peers_word_about_a_death_counts() -> None:
    job = JobDriver(3)
    job.hear(PeerDied(0, GENERATION, 1, DeathSource.ROBUST_MUTEX))
    assert sorted(job.sent(Freeze)) == [0, 2]


@pytest.mark.parametrize("dead", [-1, 3, 99])
def test_a_word_about_a_rank_that_does_not_exist_is_void(dead: int) -> None:
    job = JobDriver(3)
    assert job.hear(PeerDied(0, GENERATION, dead, DeathSource.PIDFD)) == []


def test_two_sources_of_one_death_are_one_incident() -> None:
    job = JobDriver(3)
    job.kill(1)
    job.close(1)
    assert job.kill(1, DeathSource.PIDFD) == []
    assert job.core.incident == 1


@pytest.mark.parametrize("secondary", [False, True])
def test_an_exception_starts_an_incident_that_never_resumes(secondary: bool) -> None:
    job = JobDriver(2)
    job.hear(Raised(1, GENERATION, "ValueError: x\n  trace", secondary, computing(5)))
    assert sorted(job.sent(Freeze)) == [0, 1]
    for rank in (0, 1):
        job.settle(rank, computing(5))
    job.saved(0, 5)
    job.verified()
    job.published()
    exits = job.sent(Exit)
    assert exits[0].cause_ranks == (() if secondary else (1,))


def test_sigterm_to_everybody_names_everybody() -> None:
    job = JobDriver(2)
    for rank in (0, 1):
        job.hear(Signalled(rank, GENERATION, 15, computing(5)))
    for rank in (0, 1):
        job.settle(rank, computing(5))
    job.saved(0, 5)
    job.verified()
    job.published()
    assert job.sent(Exit)[0].cause_ranks == (0, 1)
    assert job.sent(Exit)[0].reason == "ranks 0 and 1: each was asked to stop (SIGTERM)"


def test_sigterm_after_a_death_is_not_a_cause() -> None:
    job = JobDriver(3)
    job.kill(2)
    for rank in (0, 1):
        job.hear(Signalled(rank, GENERATION, 15, computing(5)))
        job.settle(rank, computing(5))
    job.saved(0, 5)
    job.verified()
    job.published()
    assert job.sent(Exit)[0].cause_ranks == (2,)


def test_a_status_is_no_incident() -> None:
    job = JobDriver(2)
    assert job.hear(Status(0, GENERATION, computing(5))) == []


# --------------------------------------------------------------------------- false alarms


def test_a_false_alarm_resumes_as_soon_as_the_suspect_is_back() -> None:
    job = JobDriver(3)
    job.close(1)
    job.wait(1.9)
    job.hello(1)
    assert sorted(job.sent(Resume)) == [0, 1, 2]
    assert job.core.state is JobStage.WATCHING


def test_a_suspect_that_does_not_come_back_is_dead() -> None:
    job = JobDriver(3)
    job.close(1)
    for rank in (0, 2):
        job.settle(rank, computing(5))
    job.wait(10.0)
    assert job.core.state is JobStage.SAVING
    job.hello(1)
    assert not job.sent(Resume)


def test_a_silent_rank_with_a_living_session_is_cleared_by_any_word() -> None:
    job = JobDriver(3)
    job.kill(1, DeathSource.STREAM)
    job.hear(Status(1, GENERATION, computing(5)))
    assert sorted(job.sent(Resume)) == [0, 1, 2]


def test_nobody_is_left_out_before_anything_is_certain() -> None:
    job = JobDriver(3, options=ControllerOptions(settle_timeout_s=1.0))
    job.close(1)
    job.close(2)
    job.wait(1.5)
    job.hello(1)
    job.hello(2)
    assert sorted(job.sent(Resume)) == [0, 1, 2]


def test_a_suspect_is_not_left_out_while_others_write() -> None:
    job = JobDriver(3, options=ControllerOptions(settle_timeout_s=1.0))
    job.kill(2)
    for rank in (0, 1):
        job.settle(rank, computing(5))
    assert job.core.state is JobStage.SAVING
    job.close(1)
    job.wait(1.5)
    assert "rank 1" not in job.logs()


def test_all_suspects_must_be_back() -> None:
    job = JobDriver(3)
    job.close(1)
    job.close(2)
    job.hello(1)
    assert not job.sent(Resume)
    job.hello(2)
    assert sorted(job.sent(Resume)) == [0, 1, 2]


@pytest.mark.parametrize("second", ["death", "exception", "signal"])
def test_nothing_resumes_once_something_is_certain(second: str) -> None:
    job = JobDriver(3)
    job.close(1)
    if second == "death":
        job.kill(2)
    elif second == "exception":
        job.hear(Raised(2, GENERATION, "RuntimeError: gloo", True, computing(5)))
    else:
        job.hear(Signalled(2, GENERATION, 15, computing(5)))
    job.hello(1)
    assert not job.sent(Resume)
    assert job.core.state is JobStage.SETTLING


def test_nothing_resumes_after_the_choice() -> None:
    job = JobDriver(3)
    job.kill(2)
    for rank in (0, 1):
        job.settle(rank, computing(5))
    assert job.sent(Save)
    job.close(1)
    job.hello(1)
    assert not job.sent(Resume)


def test_a_rank_that_missed_resume_gets_it_when_it_answers_the_old_freeze() -> None:
    job = JobDriver(3)
    job.close(1)
    job.hello(1)
    job.settle(0, computing(5), incident=1)
    assert job.sent(Resume) == {0: Resume(GENERATION, 1)}
    assert job.core.state is JobStage.WATCHING


def test_a_rank_that_reconnects_after_a_false_alarm_hears_of_its_end() -> None:
    job = JobDriver(3)
    job.close(1)
    job.hello(1)
    job.hello(0)
    assert job.sent(Resume) == {0: Resume(GENERATION, 1)}


def test_the_next_incident_has_the_next_number() -> None:
    job = JobDriver(3)
    job.close(1)
    job.hello(1)
    job.kill(2)
    assert job.sent(Freeze)[0].incident == 2


# --------------------------------------------------------------------------- settle


def test_the_choice_waits_for_every_living_rank() -> None:
    job = JobDriver(4)
    job.kill(3)
    job.settle(0, computing(5))
    job.settle(1, computing(5))
    assert job.core.state is JobStage.SETTLING
    job.settle(2, computing(6))
    assert job.sent(Save)[2].step == 6


def test_a_freeze_that_is_not_answered_goes_out_again() -> None:
    job = JobDriver(3)
    job.kill(2)
    job.settle(0, computing(5))
    job.wait(0.5)
    assert sorted(job.sent(Freeze)) == [1]


def test_a_silent_rank_is_left_out_and_told_to_leave() -> None:
    job = JobDriver(3)
    job.kill(2)
    job.settle(0, computing(5))
    job.wait(30.0)
    assert job.sent(Save)[0].step == 5
    golden.says(job.logs())
    job.settle(1, computing(6))
    job.saved(0, 5)
    job.verified()
    job.published()
    assert sorted(job.sent(Exit)) == [0, 1, 2]
    assert job.sent(Exit)[1].step == 5


def test_had_it_answered_in_time_its_step_would_count() -> None:
    job = JobDriver(3)
    job.kill(2)
    job.settle(0, computing(5))
    job.wait(14.0)
    job.settle(1, computing(6))
    assert job.sent(Save)[1].step == 6


def test_a_rank_that_comes_back_late_has_the_whole_time_to_settle() -> None:
    job = JobDriver(3)
    job.kill(2)
    job.close(1)
    job.wait(14.0)  # rank 0 updates, for long
    job.hello(1)
    job.settle(0, computing(5))
    job.wait(14.0)
    golden.says(job.logs())
    job.settle(1, computing(6))
    assert job.sent(Save)[1].step == 6


def test_and_no_more_than_that_and_the_others_get_nothing_of_it() -> None:
    """Negative control: the time-out of the first ones still runs, and so does that of the late one."""
    job = JobDriver(3)
    job.kill(2)
    job.close(1)
    job.wait(14.0)
    job.hello(1)
    job.wait(1.0)
    golden.says(job.logs())
    job.wait(14.0)
    golden.says(job.logs())


def test_each_of_several_that_come_back_late_has_its_own_time() -> None:
    job = JobDriver(4)
    job.kill(3)
    for rank in (1, 2):
        job.close(rank)
    job.wait(12.0)  # rank 0 updates, for long
    job.hello(1)
    job.wait(2.0)
    job.hello(2)
    job.settle(0, computing(5))
    job.wait(13.0)
    golden.says(job.logs())
    job.settle(2, computing(6))
    assert job.sent(Save)[2].step == 6


def test_the_newest_of_several_answers_counts_whatever_their_order() -> None:
    job = JobDriver(3)
    job.kill(2)
    job.settle(0, Stand(Phase.UPDATED, 8), sequence=2)
    job.settle(0, Stand(Phase.UPDATED, 8), sequence=2)
    job.settle(0, Stand(Phase.READY, 8), sequence=1)
    job.settle(1, computing(7))
    assert job.sent(Save)[0].step == 8


def test_a_death_after_the_answer_takes_it_back() -> None:
    job = JobDriver(3)
    job.kill(2)
    job.settle(0, computing(8))
    job.kill(0)
    job.settle(1, computing(7))
    assert job.sent(Save)[1].step == 7


def test_a_suspect_may_come_back_before_the_choice() -> None:
    job = JobDriver(4)
    job.kill(3)
    job.settle(0, computing(5))
    job.close(1)
    job.settle(2, computing(5))
    assert job.core.state is JobStage.SETTLING
    job.hello(1)
    assert job.sent(Freeze)
    job.settle(1, computing(6))
    assert job.sent(Save)[1].step == 6


def test_a_rank_that_comes_back_too_late_is_only_told() -> None:
    job = JobDriver(3)
    job.close(1)
    for rank in (0, 2):
        job.settle(rank, computing(5))
    job.wait(10.0)
    job.hello(1)
    assert 1 in job.sent(Freeze)
    job.settle(1, computing(6))
    assert job.core.state is JobStage.SAVING
    job.saved(0, 5)
    job.verified()
    job.published()
    assert sorted(job.sent(Exit)) == [0, 1, 2]


def test_a_rank_that_comes_back_before_the_choice_counts_and_is_waited_for_in_bounded_time() -> None:
    job = JobDriver(3)
    job.close(1)
    job.settle(0, computing(5))
    job.wait(14.0)  # rank 1 is dead by now, rank 2 has not answered
    job.hello(1)
    job.settle(2, computing(5))
    assert job.core.state is JobStage.SETTLING
    job.wait(15.1)
    assert job.core.state is JobStage.SAVING


def test_a_rank_that_was_left_out_is_not_waited_for_once_more_when_it_connects_again() -> None:
    job = JobDriver(4)
    job.kill(3)
    job.close(1)
    job.settle(0, computing(5))
    job.wait(14.0)
    job.hello(1)
    job.wait(2.0)  # rank 2 is left out, and rank 1 has more time
    job.close(2)
    job.hello(2)
    assert 2 in job.sent(Freeze)
    assert job.core.state is JobStage.SETTLING
    job.settle(1, computing(5))
    assert job.core.state is JobStage.SAVING


def test_a_rank_that_registers_after_the_choice_is_told_and_not_waited_for() -> None:
    job = JobDriver(3, registered=False)
    job.hello(0)
    job.hello(1)
    job.kill(1)
    job.settle(0, computing(5))
    assert job.core.state is JobStage.SAVING
    job.hello(2)
    assert 2 in job.sent(Freeze)
    job.save_failed(0, 5)
    assert job.core.state is JobStage.EXITING


# --------------------------------------------------------------------------- an exception between gate and update


def _only_holder_of_a_stays_behind(*, raised: bool) -> JobDriver:
    """All have passed the gate of step 9. Rank 1 has ended it, rank 2 is dead, and rank 0 had not begun its update."""
    job = JobDriver(4, units=("a", "b", "a", "b"))
    job.kill(2)
    if raised:
        job.hear(Raised(0, GENERATION, "ValueError: a hook failed", False, computing(8)))
    job.settle(1, computing(9))
    job.settle(3, Stand(Phase.READY, 9))
    job.settle(0, computing(8))
    return job


def test_a_step_that_a_unit_can_reach_no_more_is_given_up() -> None:
    job = _only_holder_of_a_stays_behind(raised=True)
    assert {rank: order.step for rank, order in job.sent(Save).items() if order.units} == {0: 8, 3: 8}
    golden.says(job.logs())


def test_a_rank_that_may_still_come_to_the_gate_is_waited_for() -> None:
    """Negative control: it had answered while it still computed; its step is kept."""
    job = _only_holder_of_a_stays_behind(raised=False)
    assert not job.sent(Save)
    job.settle(0, Stand(Phase.READY, 9))
    assert list(job.sent(Proceed)) == [0]


def test_and_once_only() -> None:
    job = _only_holder_of_a_stays_behind(raised=False)
    assert job.core.state is JobStage.SETTLING
    job.settle(0, computing(8))
    assert {rank: order.step for rank, order in job.sent(Save).items() if order.units} == {0: 8, 3: 8}


def test_and_no_longer_once_it_says_that_it_has_raised() -> None:
    job = _only_holder_of_a_stays_behind(raised=False)
    job.hear(Raised(0, GENERATION, "ValueError: a hook failed", False, computing(8)))
    assert job.sent(Save)[3].step == 8


def test_no_step_is_given_up_that_all_units_can_reach() -> None:
    """Negative control: rank 2 lives and holds the step."""
    job = JobDriver(4, units=("a", "b", "a", "b"))
    job.hear(Raised(0, GENERATION, "ValueError: a hook failed", False, computing(8)))
    job.settle(1, computing(9))
    job.settle(2, computing(9))
    job.settle(3, Stand(Phase.READY, 9))
    job.settle(0, computing(8))
    assert {rank: order.step for rank, order in job.sent(Save).items() if order.units} == {1: 9, 2: 9}


# --------------------------------------------------------------------------- proceed


def gated_split() -> JobDriver:
    job = JobDriver(4, units=("A", "B", "A", "B"))
    job.kill(3)
    job.settle(0, computing(8))
    job.settle(1, Stand(Phase.READY, 8))
    job.settle(2, Stand(Phase.READY, 8))
    return job


def test_a_laggard_whose_unit_nobody_holds_is_told_to_proceed() -> None:
    job = gated_split()
    assert job.sent(Proceed) == {1: Proceed(GENERATION, 1, 8)}
    assert job.core.state is JobStage.PROCEEDING
    assert not job.sent(Save), "nothing is written before it has settled again"
    job.settle(1, computing(8))
    assert sorted(job.sent(Save)) == [0, 1]


def test_its_old_answer_repeated_does_not_count_as_a_new_one() -> None:
    job = gated_split()
    job.settle(1, Stand(Phase.READY, 8), sequence=3)
    assert job.core.state is JobStage.PROCEEDING
    assert not job.effects, "nor does it need to be told again"


def test_a_lost_proceed_goes_out_again() -> None:
    job = gated_split()
    job.wait(0.5)
    assert sorted(job.sent(Proceed)) == [1]
    job.hello(1)
    assert sorted(job.sent(Proceed)) == [1]


def test_a_rank_that_falls_silent_while_another_proceeds_is_waited_for_as_long_as_one_that_is_to_settle() -> None:
    job = JobDriver(4, units=("A", "B", "A", "B"))
    job.tell(Watched(2))
    job.kill(3)
    job.wait(10.0)
    job.settle(0, computing(8))
    job.settle(1, Stand(Phase.READY, 8))
    job.settle(2, computing(8))
    job.wait(6.0)
    assert job.core.state is JobStage.PROCEEDING
    job.close(2)
    job.settle(1, computing(8))
    job.wait(14.9)
    assert not job.sent(Save)
    job.wait(0.2)
    assert sorted(job.sent(Save)) == [0, 1]


def test_a_rank_that_never_proceeds_is_left_out() -> None:
    job = gated_split()
    job.wait(30.0)
    assert job.core.outcome is not None
    assert job.core.outcome.kind is OutcomeKind.NOT_SAVED
    golden.says(job.core.outcome.reason)


def test_no_choice_is_made_while_a_rank_may_be_updating() -> None:
    """It could be at step 7 or at step 8: whatever were chosen now could be wrong."""
    job = gated_split()
    job.kill(0)
    assert not job.sent(Save)
    job.settle(1, computing(8))
    assert job.sent(Proceed) == {2: Proceed(GENERATION, 1, 8)}


def test_a_writer_that_fails_while_another_rank_proceeds_changes_nothing_about_that() -> None:
    job = JobDriver(5, units=("A", "B", "A", "B", "A"), hosts="aabba")
    job.kill(2)
    for rank in (0, 1, 4):
        job.settle(rank, computing(8))
    job.settle(3, Stand(Phase.READY, 8))
    job.kill(1)
    assert list(job.sent(Proceed)) == [3]
    job.save_failed(0, 8)
    assert job.core.state is JobStage.PROCEEDING
    job.settle(3, computing(8))
    assert {rank: order.units for rank, order in job.sent(Save).items()} == {3: ("B",), 4: ("A",)}


def test_a_rank_that_tears_its_update_is_replaced() -> None:
    job = JobDriver(4, units=("A", "B", "A", "B"))
    job.hear(Raised(2, GENERATION, "x", False, computing(7)))
    job.settle(0, computing(8))
    job.settle(1, Stand(Phase.READY, 8))
    job.settle(2, computing(7))
    job.settle(3, Stand(Phase.READY, 8))
    assert sorted(job.sent(Proceed)) == [1]
    job.settle(1, Stand(Phase.TORN, 8))
    assert sorted(job.sent(Proceed)) == [3]


# --------------------------------------------------------------------------- nothing to save, nobody left


def test_a_death_before_the_first_step_leaves_nothing() -> None:
    job = JobDriver(2)
    job.begin_loop()
    job.kill(1)
    job.settle(0, Stand(Phase.READY, 1))
    assert job.sent(Exit)[0].kind is ExitKind.NOTHING_TO_SAVE
    assert job.starts() is None
    assert not job.discards()


def test_a_death_before_the_first_step_after_a_resume_leaves_the_old_checkpoint() -> None:
    job = JobDriver(2)
    job.begin_loop(start_step=37)
    job.kill(1)
    job.settle(0, computing(37))
    assert job.sent(Exit)[0].kind is ExitKind.NOTHING_TO_SAVE


def test_a_second_loop_does_not_move_the_start() -> None:
    job = JobDriver(2)
    job.begin_loop(10, 1)
    job.begin_loop(10, 1, start_step=10)
    job.kill(1)
    job.settle(0, computing(10))
    assert job.sent(Save)[0].step == 10


def test_everybody_dead_ends_at_once() -> None:
    job = JobDriver(2)
    job.kill(0)
    job.kill(1)
    assert job.stops()
    assert job.core.outcome is not None
    assert job.core.outcome.kind is OutcomeKind.NOT_SAVED


# --------------------------------------------------------------------------- fencing

LATE: list[Report] = [
    Settled(1, GENERATION - 1, 1, 99, computing(99)),
    Settled(1, GENERATION, 0, 99, computing(99)),
    Settled(1, GENERATION, 2, 99, computing(99)),
    Saved(1, GENERATION - 1, 1, 1, 5, 10),
    Saved(1, GENERATION, 1, 1, 5, 10),
    SaveFailed(1, GENERATION, 1, 7, 5, "late", True),
    Raised(1, GENERATION - 1, "old", False, computing(99)),
    Signalled(1, GENERATION - 1, 15, computing(99)),
    Left(1, GENERATION - 1, Stand(Phase.DONE, 99)),
    PeerDied(1, GENERATION - 1, 0, DeathSource.PIDFD),
    Goodbye(1, GENERATION),
    Goodbye(1, GENERATION - 1),
]


@pytest.mark.parametrize("report", LATE, ids=lambda report: f"{type(report).__name__}-{report.generation}")
def test_a_report_of_another_generation_or_incident_changes_nothing(report: Report) -> None:
    job = JobDriver(3)
    job.kill(2)
    assert job.hear(report) == []
    job.settle(0, computing(5))
    job.settle(1, computing(5))
    assert list(job.sent(Save)) == [0]
    assert job.sent(Save)[0].step == 5


def test_a_dead_ranks_reports_change_nothing() -> None:
    job = JobDriver(3)
    job.kill(2)
    job.settle(2, computing(9))
    job.settle(0, computing(5))
    job.settle(1, computing(5))
    assert job.sent(Save)[0].step == 5


def _ends_without_rank_2(job: JobDriver) -> None:
    for rank in (0, 1):
        job.settle(rank, computing(5))
    job.saved(0, 5)
    job.verified()


def test_a_rank_that_was_reported_dead_by_mistake_hears_how_it_ended() -> None:
    job = JobDriver(3)
    job.kill(2, DeathSource.PIDFD)
    _ends_without_rank_2(job)
    job.published()
    assert sorted(job.sent(Exit)) == [0, 1, 2]
    assert job.sent(Exit)[2].step == 5
    job.wait(0.5)
    assert 2 in job.sent(Exit), "it may have been lost"


@pytest.mark.parametrize("early", [True, False], ids=["before the end", "after it"])
def test_a_rank_that_was_reported_dead_hears_it_on_a_new_session_and_counts_no_more(early: bool) -> None:
    job = JobDriver(3)
    job.kill(2, DeathSource.PIDFD)
    job.close(2)
    if early:
        job.hello(2)
        assert not job.replies()
        job.settle(2, computing(6))
    _ends_without_rank_2(job)
    job.published()
    assert (2 in job.sent(Exit)) == early
    if not early:
        job.hello(2)
    assert job.sent(Exit)[2].step == 5


def test_nobody_waits_for_a_rank_that_was_reported_dead() -> None:
    job = JobDriver(3)
    job.kill(2, DeathSource.PIDFD)
    _ends_without_rank_2(job)
    job.published()
    job.hear(Goodbye(0, GENERATION))
    job.hear(Goodbye(1, GENERATION))
    assert job.stops()


def test_a_stopped_controller_says_nothing() -> None:
    job = JobDriver(1)
    job.kill(0)
    assert job.stops()
    assert job.hello(0) == []
    assert job.core.handle(FromRank(Status(0, GENERATION, computing(1))), 1e9) == []
    assert job.core.deadline_s is None


# ------------------------------------------------------------------ nothing can be saved


def losing(
    units: str, *, dead: tuple[int, ...] = (1,), newest: tuple[int, str] | None = (0, ""), **options: float
) -> JobDriver:
    """These ranks are dead and the others are done with step 5, so that some unit is lost. newest: as of JobDriver."""
    job = JobDriver(len(units), units=tuple(units), options=ControllerOptions(**options))  # type: ignore[arg-type]
    job.newest = newest
    job.begin_loop()
    for rank in dead:
        job.kill(rank)
    for rank in sorted(set(range(len(units))) - set(dead)):
        job.settle(rank, computing(5))
    return job


def not_saved(job: JobDriver) -> str:
    """The reason that the first living rank has just been told."""
    order = next(iter(job.sent(Exit).values()))
    assert order.kind is ExitKind.NOT_SAVED
    return order.reason


def lost(units: str, *, dead: tuple[int, ...], newest: tuple[int, str] = (0, "")) -> str:
    return not_saved(losing(units, dead=dead, newest=newest))


def test_every_unit_that_is_lost_is_named_with_its_holders() -> None:
    reason = lost("ABCABC", dead=(1, 4, 2, 5))
    golden.says(reason)
    assert "A cannot" not in reason


def test_of_very_many_lost_units_a_few_are_named() -> None:
    reason = lost("ABCDEFGH", dead=(0, 1, 2, 3, 4, 5))
    assert reason.count("cannot be saved at") == 3
    golden.says(reason)


OLDER = (3, "/ckpt/tft_saved_checkpoints-step_3")
NEWER = (4, "/ckpt/tft_saved_checkpoints-step_4")


def text_of(newest: tuple[int, str]) -> str:
    """Where step 5 cannot be saved."""
    return newest_text(NewestKnown(1, *newest), 5)


def test_the_newest_older_checkpoint_is_named() -> None:
    assert lost("AB", dead=(1,), newest=OLDER).endswith(text_of(OLDER))
    assert lost("AB", dead=(1,)).endswith(text_of((0, "")))


@pytest.mark.parametrize("step", [0, 3, 4, 5, 9])
def test_how_many_steps_are_lost_is_said(step: int) -> None:
    """Not where the newest one is of a later step: another job's, or of a start that had come farther."""
    newest = (step, f"/ckpt/tft_saved_checkpoints-step_{step}" if step else "")
    reason = lost("AB", dead=(1,), newest=newest)
    golden.says(reason)
    assert (" lost" in reason) == (step <= 5)


def test_steps_that_only_the_dead_have_ended_are_lost_too() -> None:
    """Nobody is left who could say so any more."""
    job = JobDriver(2, units=("A", "B"))
    job.newest = OLDER
    job.begin_loop()
    for rank, step in enumerate((6, 7)):
        job.hear(Status(rank, GENERATION, computing(step)))
    for rank in range(2):
        job.kill(rank)
    assert job.core.outcome is not None
    assert job.core.outcome.reason.endswith(newest_text(NewestKnown(1, *OLDER), 7))


def nothing_new(start_step: int | None) -> str:
    """The reason after a death before a step has ended, with a checkpoint of step 31. None: before resume(), too."""
    job = JobDriver(2)
    job.newest = (31, "/ckpt/tft_saved_checkpoints-step_31")
    if start_step is not None:
        job.begin_loop(start_step=start_step)
    job.kill(1)
    job.settle(0, computing(start_step or 0))
    order = job.sent(Exit)[0]
    assert order.kind is ExitKind.NOTHING_TO_SAVE
    return order.reason


@pytest.mark.parametrize("start_step", [None, 31])
def test_where_no_step_has_ended_since_the_start_the_checkpoint_that_there_is_is_named(start_step: int | None) -> None:
    golden.says(nothing_new(start_step))


def test_the_search_of_the_older_one_is_waited_for() -> None:
    job = losing("AB", newest=None)
    assert not job.sent(Exit)
    job.tell(NewestKnown(1, *OLDER))
    assert not_saved(job).endswith(text_of(OLDER))


def test_a_search_without_an_answer_is_not_waited_for_for_ever() -> None:
    job = losing("AB", newest=None, newest_timeout_s=5.0)
    job.wait(4.9)
    assert not job.sent(Exit)
    job.wait(0.2)
    assert "checkpoint" not in not_saved(job)


def test_where_there_was_nothing_to_save_it_is_not_waited_for_for_ever_either() -> None:
    job = JobDriver(2, options=ControllerOptions(newest_timeout_s=5.0))
    job.newest = None
    job.kill(1)
    job.settle(0, computing(0))
    assert not job.sent(Exit)
    job.wait(5.0)
    order = job.sent(Exit)[0]
    assert order.kind is ExitKind.NOTHING_TO_SAVE
    assert "checkpoint" not in order.reason


def test_an_answer_about_an_earlier_incident_says_nothing_of_this_one() -> None:
    job = JobDriver(2, units=("A", "B"))
    job.begin_loop()
    job.newest = None
    job.close(1)
    job.hello(1)
    for rank in (0, 1):
        job.settle(rank, computing(5))
    assert job.core.state is JobStage.WATCHING
    job.kill(1)
    job.settle(0, computing(5), incident=2)
    job.tell(NewestKnown(1, *OLDER))
    assert not job.sent(Exit)
    job.tell(NewestKnown(2, *NEWER))
    assert not_saved(job).endswith(text_of(NEWER))


def complete(job: JobDriver) -> None:
    """A periodic checkpoint of step 4, of which nothing but its name is missing, or nothing at all but the answer."""
    schedule = Schedule(steps=4)
    job.begin_loop(schedule=schedule)
    job.at(3)
    for rank in range(job.ranks):
        job.saved(rank, 4, incident=0)
    job.verified(incident=0)
    assert isinstance(job.starts(), StartPublish)


def test_a_checkpoint_that_is_about_to_have_its_name_is_waited_for() -> None:
    """It may have it already: then the first look finds it or does not, and the one after the answer does."""
    job = JobDriver(2, units=("A", "B"))
    complete(job)
    job.newest = None
    job.kill(1)
    job.settle(0, computing(5))
    job.tell(NewestKnown(1, *OLDER))
    assert not job.sent(Exit)
    job.published(incident=0)
    assert not job.sent(Exit)
    job.tell(NewestKnown(1, *NEWER))
    assert not_saved(job).endswith(text_of(NEWER))


@pytest.mark.parametrize("answered", [False, True])
def test_a_name_that_never_comes_is_not_waited_for_for_ever(answered: bool) -> None:
    """What the look has found meanwhile is said all the same."""
    job = JobDriver(2, units=("A", "B"))
    complete(job)
    job.newest = OLDER if answered else None
    job.kill(1)
    job.settle(0, computing(5))
    job.wait(ControllerOptions().newest_timeout_s)
    assert not_saved(job).endswith(text_of(OLDER)) is answered


def test_an_answer_that_comes_late_changes_nothing() -> None:
    job = losing("AB")
    assert job.tell(NewestKnown(1, *OLDER)) == []


# --------------------------------------------------------------------------- how a process has ended


def test_how_a_rank_has_died_is_said_in_the_reason_and_once_in_the_log() -> None:
    job = JobDriver(3)
    job.kill(1)
    golden.says(job.sent(Freeze)[0].reason)
    job.explain(1)
    golden.says(job.logs())
    assert job.explain(1, "SIGABRT, abort") == [], "the first word counts"
    for rank in (0, 2):
        job.settle(rank, computing(5))
    job.saved(0, 5)
    job.verified()
    published = job.starts()
    assert isinstance(published, StartPublish)
    golden.says(published.reason)


def test_what_a_survivor_doubts_is_told_with_the_checkpoint() -> None:
    job = JobDriver(3)
    job.kill(1)
    for rank, doubts in ((0, ""), (2, "model.scale has moved")):
        job.settle(rank, computing(5), doubts=doubts)
    job.saved(0, 5)
    job.verified()
    published = job.starts()
    assert isinstance(published, StartPublish)
    assert published.doubts == ((2, "model.scale has moved"),)


def test_a_neighbour_tells_of_a_death_and_then_how_it_came_about() -> None:
    job = JobDriver(3, hosts="abb")
    death = PeerDied(2, GENERATION, 1, DeathSource.ROBUST_MUTEX)
    job.hear(death)
    assert sorted(job.sent(Freeze)) == [0, 2]
    job.hear(replace(death, how="exit code 3"))
    job.hear(replace(death, rank=0, how="exit code 3"))
    for rank in (0, 2):
        job.settle(rank, computing(0))
    golden.says(job.sent(Exit)[0].reason)


def test_where_a_unit_is_lost_with_a_rank_it_is_said_how_that_has_died() -> None:
    job = JobDriver(2, units=("A", "B"))
    job.kill(1)
    job.explain(1)
    job.settle(0, computing(5))
    golden.says(job.sent(Exit)[0].reason)


@pytest.mark.parametrize("ranks", [[], [0]])
def test_how_a_rank_ended_that_has_not_died_changes_nothing(ranks: list[int]) -> None:
    """It was only lost, or nobody knows it."""
    job = JobDriver(3)
    for rank in ranks:
        job.close(rank)
    assert job.explain(0) == []
    assert job.explain(7) == []
