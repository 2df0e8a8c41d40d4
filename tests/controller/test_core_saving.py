"""Writers that finish, fail, stall and die; verification, publication, and everybody's farewell."""

from __future__ import annotations

import pytest

from lastwords.controller.core import ControllerOptions
from lastwords.controller.events import STORAGE_FAILURES_MAX, OutcomeKind, PartPlan, StartPublish, StartVerify, State
from lastwords.vocabulary import Exit, ExitKind, Goodbye, Save
from tests.controller.job_driver import GENERATION, JobDriver, computing


def saving(ranks: int = 3, *, hosts: str = "", fallback: bool = False, ahead: bool = False) -> JobDriver:
    """The last rank has died, the others stand at step 5 (or rank 0 at 6), rank 0 is writing."""
    job = JobDriver(ranks, hosts=hosts, options=ControllerOptions(has_fallback_target=fallback))
    job.kill(ranks - 1)
    for rank in range(ranks - 1):
        job.settle(rank, computing(6 if ahead and rank == 0 else 5))
    assert 0 in job.sent(Save)
    return job


# --------------------------------------------------------------------------- the straight way


def test_nothing_is_published_before_it_is_written_and_verified() -> None:
    job = saving()
    assert job.starts() is None
    job.saved(0, 5)
    assert isinstance(job.starts(), StartVerify)
    job.verified()
    published = job.starts()
    assert isinstance(published, StartPublish)
    assert (published.step, published.cause_ranks, published.dead_ranks) == (5, (2,), (2,))
    assert published.parts == (PartPlan(0, 1, ("u",), (0, 1, 2)),)
    job.published()
    assert {order.kind for order in job.sent(Exit).values()} == {ExitKind.SAVED}
    assert job.sent(Exit)[1].path == "/c/step"


def test_a_verification_of_another_attempt_does_not_publish() -> None:
    job = saving()
    job.saved(0, 5)
    assert job.verified(attempt=2) == []
    assert job.verified(incident=2) == []
    assert job.core.state is State.VERIFYING


def test_a_word_about_a_publication_that_was_not_asked_for_is_void() -> None:
    job = saving()
    assert job.published() == []
    job.saved(0, 5)
    assert job.published() == []
    assert job.core.state is State.VERIFYING


def test_the_checkpoint_waits_for_every_writer() -> None:
    job = saving(4, hosts="aabb")
    assert sorted(job.sent(Save)) == [0, 2]
    job.saved(0, 5)
    assert job.starts() is None
    job.saved(2, 5)
    started = job.starts()
    assert isinstance(started, StartVerify)
    assert started.writers == (0, 2)
    assert started.local_ranks == (0, 1, 2, 3)


@pytest.mark.parametrize(("step", "attempt", "incident"), [(6, 1, 1), (5, 2, 1), (5, 1, 2)])
def test_a_file_of_another_step_attempt_or_incident_does_not_count(step: int, attempt: int, incident: int) -> None:
    job = saving()
    assert job.saved(0, step, attempt, incident) == []
    assert job.core.state is State.SAVING


def test_a_file_that_nobody_asked_for_does_not_count() -> None:
    job = saving()
    assert job.saved(1, 5) == []


# --------------------------------------------------------------------------- writers that do not finish


def test_a_dead_writer_is_replaced_and_the_step_may_fall() -> None:
    job = saving(ahead=True)
    assert job.sent(Save)[0].step == 6
    job.kill(0)
    assert job.discards() == [(1, 6)]
    order = job.sent(Save)[1]
    assert (order.step, order.attempt) == (5, 2)


def test_a_writer_that_dies_after_it_has_finished_is_not_missed() -> None:
    job = saving(4, hosts="aabb")
    job.saved(0, 5)
    job.kill(0)
    assert not job.sent(Save)
    job.saved(2, 5)
    started = job.starts()
    assert isinstance(started, StartVerify)
    assert started.writers == (0, 2)


def test_other_writers_go_on_when_one_is_replaced() -> None:
    job = JobDriver(5, units=("A", "B", "A", "B", "A"))
    job.kill(4)
    for rank in range(4):
        job.settle(rank, computing(5))
    assert sorted(job.sent(Save)) == [0, 1]
    job.kill(0)
    assert sorted(job.sent(Save)) == [2], "rank 1 keeps writing its part of the first attempt"
    assert not job.discards()
    job.saved(1, 5, attempt=1)
    job.saved(2, 5, attempt=2)
    started = job.starts()
    assert isinstance(started, StartVerify)
    assert [(part.rank, part.attempt) for part in started.parts] == [(1, 1), (2, 2)]
    job.verified(attempt=2)
    published = job.starts()
    assert isinstance(published, StartPublish)
    assert {part.attempt for part in published.parts} == {2}, "they have been gathered"
    job.published(attempt=2)
    assert job.discards() == [(1, 5)]


def test_what_a_failed_writer_has_left_is_not_in_the_published_directory() -> None:
    """Nobody can replace rank 2 on its host; the directory of its attempt holds half a file of it."""
    job = JobDriver(4, hosts="aabb")
    job.kill(3)
    for rank in range(3):
        job.settle(rank, computing(5))
    job.saved(0, 5)
    job.save_failed(2, 5)
    started = job.starts()
    assert isinstance(started, StartVerify)
    assert started.attempt == 2
    assert [(part.rank, part.attempt) for part in started.parts] == [(0, 1)]
    job.verified(attempt=2)
    job.published(attempt=2)
    assert job.discards() == [(1, 5)]


def test_a_writer_without_progress_is_replaced() -> None:
    job = saving()
    job.progress(0, 0)
    for written in (10, 20, 30):
        job.wait(29.0)
        job.progress(0, written)
    assert job.core.state is State.SAVING
    job.wait(29.0)
    job.progress(0, 30)
    job.progress(0, 20)
    job.wait(1.1)
    assert "rank 0 made no progress for 30 s" in job.logs()
    assert job.sent(Save)[1].attempt == 2


def test_a_slow_writer_that_was_replaced_cannot_come_back() -> None:
    job = saving(ahead=True)
    job.wait(30.0)
    assert job.sent(Save)[1].step == 5
    assert job.saved(0, 6) == []
    job.saved(1, 5, attempt=2)
    started = job.starts()
    assert isinstance(started, StartVerify)
    assert started.step == 5


def test_a_writer_that_cannot_is_replaced() -> None:
    job = saving()
    job.save_failed(0, 5)
    assert job.sent(Save)[1].attempt == 2


def test_a_rank_that_cannot_copy_a_black_box_still_holds_its_weights() -> None:
    job = JobDriver(4, hosts="aabb")
    job.kill(1)
    for rank in (0, 2, 3):
        job.settle(rank, computing(5))
    assert job.sent(Save)[2].units == ()
    job.save_failed(2, 5)
    assert job.sent(Save)[3].local_ranks == (2, 3)
    job.kill(0)
    assert job.sent(Save)[2].units == ("u",), "the lowest holder, though another one copies the boxes"
    assert job.sent(Save)[2].local_ranks == ()


def test_a_writer_of_a_unit_that_cannot_is_not_asked_again() -> None:
    """Negative control: what it holds could not be written."""
    job = saving()
    job.save_failed(0, 5)
    job.kill(1)
    assert job.stops() or not job.sent(Save)


def test_a_lost_order_to_save_goes_out_again_until_it_is_answered() -> None:
    job = saving()
    job.wait(0.5)
    assert sorted(job.sent(Save)) == [0]
    job.progress(0, 0)
    job.wait(5.0)
    assert not job.sent(Save)


def test_a_writer_that_reconnects_gets_its_order_again() -> None:
    job = saving()
    job.progress(0, 10)
    job.close(0)
    assert job.core.state is State.SAVING
    job.hello(0)
    assert job.sent(Save)[0].attempt == 1


def test_the_next_choice_waits_for_a_suspect() -> None:
    job = saving(4)
    job.close(1)
    job.kill(0)
    assert not job.sent(Save)
    job.hello(1)
    assert sorted(job.sent(Save)) == [1]


def test_a_second_death_is_in_the_manifest() -> None:
    job = saving(4)
    job.kill(2)
    job.saved(0, 5)
    job.verified()
    published = job.starts()
    assert isinstance(published, StartPublish)
    assert published.cause_ranks == published.dead_ranks == (2, 3)


def test_all_dead_while_the_files_are_looked_at_still_publish() -> None:
    job = saving()
    job.saved(0, 5)
    job.kill(0)
    job.kill(1)
    assert not job.stops()
    job.verified()
    job.published()
    assert job.stops()
    assert job.core.outcome is not None
    assert job.core.outcome.kind is OutcomeKind.SAVED


# --------------------------------------------------------------------------- storage


def test_a_refused_directory_is_given_up_for_the_fallback() -> None:
    job = saving(fallback=True)
    job.save_failed(0, 5, storage=True)
    assert job.sent(Save)[0].target == 1


def test_a_refused_directory_without_a_fallback_ends_with_the_reason() -> None:
    job = saving()
    job.save_failed(0, 5, storage=True)
    job.save_failed(1, 5, attempt=2, storage=True)
    order = job.sent(Exit)[0]
    assert order.kind is ExitKind.NOT_SAVED
    assert "it did not work" in order.reason


def test_retries_in_a_refused_directory_are_bounded() -> None:
    job = saving(20)
    attempts = 1
    while job.core.state is State.SAVING:
        (writer,) = job.sent(Save)
        job.save_failed(writer, 5, attempt=attempts, storage=True)
        attempts += 1
    assert attempts - 1 == STORAGE_FAILURES_MAX
    assert job.sent(Exit)[0].kind is ExitKind.NOT_SAVED


def test_a_directory_that_is_broken_for_all_is_left_for_the_fallback() -> None:
    job = JobDriver(
        40, hosts="".join(chr(65 + rank) for rank in range(40)), options=ControllerOptions(has_fallback_target=True)
    )
    job.kill(39)
    for rank in range(39):
        job.settle(rank, computing(5))
    refusals = 0
    while next(iter(job.sent(Save).values())).target == 0:
        order = next(order for order in job.sent(Save).values() if order.units)
        (writer,) = [rank for rank, sent in job.sent(Save).items() if sent == order]
        job.save_failed(writer, 5, attempt=order.attempt, storage=True)
        refusals += 1
    assert refusals <= STORAGE_FAILURES_MAX + 40 // 4


def test_bad_files_are_written_again_by_somebody_else() -> None:
    job = saving()
    job.saved(0, 5)
    job.verify_failed(0)
    assert job.sent(Save)[1].attempt == 2
    assert job.discards() == [(1, 5)]


def test_only_the_bad_part_is_written_again() -> None:
    job = JobDriver(5, units=("A", "B", "A", "B", "A"))
    job.kill(4)
    for rank in range(4):
        job.settle(rank, computing(5))
    job.saved(0, 5)
    job.saved(1, 5)
    job.verify_failed(1)
    assert job.sent(Save)[3].units == ("B",)
    assert sorted(job.sent(Save)) == [3]


def test_a_complaint_about_nobody_is_about_all() -> None:
    job = saving()
    job.saved(0, 5)
    job.verify_failed(-1)
    assert sorted(job.sent(Save)) == [1]


def test_a_name_that_cannot_be_given_leads_to_the_fallback() -> None:
    job = saving(fallback=True)
    job.saved(0, 5)
    job.verified()
    job.publish_failed()
    assert job.sent(Save)[0].target == 1
    assert not job.discards(), "the complete files stay for a human"


def test_a_name_that_cannot_be_given_without_a_fallback_ends_with_the_reason() -> None:
    job = saving()
    job.saved(0, 5)
    job.verified()
    job.publish_failed()
    assert job.sent(Exit)[0].kind is ExitKind.NOT_SAVED
    assert "read-only file system" in job.sent(Exit)[0].reason
    assert not job.discards()


@pytest.mark.parametrize("stage", [State.VERIFYING, State.PUBLISHING])
def test_a_file_system_that_hangs_is_given_up(stage: State) -> None:
    job = saving()
    job.saved(0, 5)
    if stage is State.PUBLISHING:
        job.verified()
    assert job.core.state is stage
    job.wait(119.0)
    assert job.core.state is stage
    job.wait(1.1)
    assert job.core.outcome is not None
    assert job.core.outcome.kind is OutcomeKind.NOT_SAVED
    assert "longer than 120 s" in job.core.outcome.reason


def test_a_publication_that_comes_late_still_counts() -> None:
    job = saving(fallback=True)
    job.saved(0, 5)
    job.verified()
    job.wait(120.0)
    assert job.sent(Save)[0].target == 1
    job.published(attempt=1)
    assert job.sent(Exit)[0].kind is ExitKind.SAVED
    assert job.discards() == [(2, 5)]


# --------------------------------------------------------------------------- farewell


def finished() -> JobDriver:
    job = saving()
    job.saved(0, 5)
    job.verified()
    job.published()
    return job


def test_the_controller_stops_when_everybody_has_gone() -> None:
    job = finished()
    job.hear(Goodbye(0, GENERATION))
    assert not job.stops()
    job.hear(Goodbye(1, GENERATION))
    assert job.stops()


def test_an_exit_that_is_lost_goes_out_again() -> None:
    job = finished()
    job.hear(Goodbye(0, GENERATION))
    job.wait(0.5)
    assert 1 in job.sent(Exit)


def test_a_rank_that_reconnects_is_told_again() -> None:
    job = finished()
    job.close(1)
    job.hello(1)
    assert sorted(job.sent(Exit)) == [1]


def test_a_session_that_breaks_without_a_goodbye_is_waited_for_a_little() -> None:
    job = finished()
    job.hear(Goodbye(0, GENERATION))
    job.close(1)
    assert not job.stops()
    job.wait(2.0)
    assert job.stops()


def test_nobody_is_waited_for_longer_than_exit_timeout_s() -> None:
    job = finished()
    job.wait(9.9)
    assert not job.stops()
    job.wait(0.2)
    assert job.stops()


def test_a_death_during_the_farewell_is_only_a_farewell() -> None:
    job = finished()
    job.kill(0)
    job.kill(1)
    assert job.stops()
    assert job.core.incident == 1
