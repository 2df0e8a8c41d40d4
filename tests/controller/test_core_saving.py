"""Writers that finish, fail, stall and die; verification, publication, and everybody's farewell."""

from __future__ import annotations

import itertools
import sys

import pytest

from lastwords import codec
from lastwords.controller.context import JobContext
from lastwords.controller.core import ControllerOptions
from lastwords.controller.events import (
    STORAGE_FAILURES_MAX,
    JobStage,
    OutcomeKind,
    PartPlan,
    Remember,
    StartPublish,
    StartVerify,
    StorageProgress,
    VerifyFailed,
)
from lastwords.controller.saving import Saving
from lastwords.processor.departure import verdict_of
from lastwords.vocabulary import (
    PERIODIC,
    Exit,
    ExitKind,
    Goodbye,
    Hello,
    Phase,
    ProcessId,
    Raised,
    Save,
    Stand,
    WholeCopy,
)
from tests import golden
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


def test_the_next_controller_would_publish_what_is_verified_and_nothing_before() -> None:
    job = saving()
    job.saved(0, 5)
    assert not [effect for effect in job.effects if isinstance(effect, Remember)]
    job.verified()
    [kept] = [effect for effect in job.effects if isinstance(effect, Remember)]
    assert kept.memory.publishing == job.starts()


def test_a_verification_of_another_attempt_does_not_publish() -> None:
    job = saving()
    job.saved(0, 5)
    assert job.verified(attempt=2) == []
    assert job.verified(incident=2) == []
    assert job.core.state is JobStage.VERIFYING


def test_a_word_about_a_publication_that_was_not_asked_for_is_void() -> None:
    job = saving()
    assert job.published() == []
    job.saved(0, 5)
    assert job.published() == []
    assert job.core.state is JobStage.VERIFYING


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
    assert job.core.state is JobStage.SAVING


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


def test_nobody_is_waited_for_who_wrote_for_a_step_that_is_given_up() -> None:
    job = JobDriver(4, hosts="abbb")
    job.kill(3)
    for rank, stand in enumerate((computing(6), Stand(Phase.TORN, 6), computing(5))):
        job.settle(rank, stand)
    assert sorted(job.sent(Save)) == [0, 1]
    job.kill(0)
    assert sorted(job.sent(Save)) == [2]
    job.saved(2, 5, attempt=2)
    assert isinstance(job.starts(), StartVerify)


@pytest.mark.parametrize("finishes", [True, False], ids=["has finished", "goes on"])
def test_one_writer_has_no_more_time_because_another_one_is_faster(finishes: bool) -> None:
    job = JobDriver(4, units=("A", "B", "B", "A"))
    job.kill(3)
    for rank in range(3):
        job.settle(rank, computing(5))
    assert sorted(job.sent(Save)) == [0, 1]
    job.wait(10.0)
    job.progress(1, 1)
    job.wait(10.0)
    if finishes:
        job.saved(0, 5)
    else:
        job.progress(0, 1)
    job.wait(19.9)
    assert not job.sent(Save)
    job.wait(0.2)
    assert sorted(job.sent(Save)) == [2]


def test_a_writer_without_progress_is_replaced() -> None:
    job = saving()
    job.progress(0, 0)
    for written in (10, 20, 30):
        job.wait(29.0)
        job.progress(0, written)
    assert job.core.state is JobStage.SAVING
    job.wait(29.0)
    job.progress(0, 30)
    job.progress(0, 20)
    job.wait(1.1)
    golden.says(job.logs())
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
    assert job.core.state is JobStage.SAVING
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
    while job.core.state is not JobStage.EXITING:
        job.wait(0.25)
        for rank, order in job.sent(Save).items():
            job.save_failed(rank, 5, attempt=order.attempt, storage=True)
    order = job.sent(Exit)[0]
    assert order.kind is ExitKind.NOT_SAVED
    golden.says(order.reason)


def test_retries_in_a_refused_directory_are_bounded() -> None:
    job = saving(20)
    began_s = job.now_s
    attempts = rounds = 0
    while job.core.state is not JobStage.EXITING:
        rounds += 1
        while job.core.state is JobStage.SAVING:
            (writer,) = job.sent(Save)
            attempts += 1
            job.save_failed(writer, 5, attempt=attempts, storage=True)
        while job.core.state is JobStage.SETTLING:
            job.wait(0.25)
    assert attempts == rounds * STORAGE_FAILURES_MAX
    assert rounds == 10
    assert job.now_s - began_s == pytest.approx(20.0, abs=0.5)
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


def test_a_part_that_is_bad_in_the_same_words_again_is_not_tried_a_third_time() -> None:
    """Two writers that contradict each other, say: twenty seconds of patience would change nothing."""
    job = JobDriver(3, units=("A", "B", "A"))
    job.kill(2)
    for rank in range(2):
        job.settle(rank, computing(5))
    for attempt in (1, 2):
        job.saved(0, 5)
        job.saved(1, 5, attempt=attempt)
        job.verify_failed(1, attempt=attempt)
        if attempt == 1:
            job.wait(0.25)
            assert job.sent(Save)[1].attempt == 2
    assert job.sent(Exit)[0].kind is ExitKind.NOT_SAVED


def test_the_control_other_words_are_a_reason_to_try_on() -> None:
    job = JobDriver(3, units=("A", "B", "A"))
    job.kill(2)
    for rank in range(2):
        job.settle(rank, computing(5))
    for attempt in (1, 2):
        job.saved(0, 5)
        job.saved(1, 5, attempt=attempt)
        job.tell(VerifyFailed(1, attempt, ((1, f"attempt {attempt} is damaged"),)))
        job.wait(0.5)
    assert job.sent(Save)[1].attempt == 3


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
    began_s = job.now_s
    while not job.sent(Save):
        job.wait(0.25)
        if job.starts() is not None:
            job.publish_failed()
    assert job.sent(Save)[0].target == 1
    assert job.now_s - began_s <= 2.5, "those who can write to the fallback may not live for long"
    assert not job.discards(), "the complete files stay for a human"
    for written in range(1, 8):
        job.wait(20.0)
        job.progress(0, written, attempt=2)
    assert job.core.state is JobStage.SAVING, "and whoever writes there has time for it"


def test_a_name_that_cannot_be_given_without_a_fallback_ends_with_the_reason() -> None:
    job = saving()
    job.saved(0, 5)
    job.verified()
    job.publish_failed()
    tries = 1
    while job.core.state is JobStage.PUBLISHING:
        job.wait(0.25)
        if job.starts() is not None:
            tries += 1
            job.publish_failed()
    assert tries == 10
    assert job.sent(Exit)[0].kind is ExitKind.NOT_SAVED
    golden.says(job.sent(Exit)[0].reason)
    assert not job.discards()
    assert job.keeps() == [(1, 5)]
    golden.says(job.sent(Exit)[0].reason)


@pytest.mark.parametrize("stage", [JobStage.VERIFYING, JobStage.PUBLISHING])
def test_a_file_system_that_hangs_is_given_up(stage: JobStage) -> None:
    job = saving()
    job.saved(0, 5)
    if stage is JobStage.PUBLISHING:
        job.verified()
    assert job.core.state is stage
    job.wait(119.0)
    assert job.core.state is stage
    job.wait(1.1)
    assert job.core.outcome is not None
    assert job.core.outcome.kind is OutcomeKind.NOT_SAVED
    golden.says(job.core.outcome.reason)


def test_a_publication_that_comes_late_still_counts() -> None:
    job = saving(fallback=True)
    job.saved(0, 5)
    job.verified()
    job.wait(120.0)
    assert job.sent(Save)[0].target == 1
    job.published(attempt=1)
    assert job.sent(Exit)[0].kind is ExitKind.SAVED
    assert job.discards() == [(2, 5)]


# --------------------------------------------------------------------------- fsync


def test_a_writer_inside_fsync_is_waited_for_although_it_writes_nothing() -> None:
    job = saving()
    job.progress(0, 1000)
    for _ in range(28):
        job.wait(10.0)
        job.progress(0, 1000, syncing=True)
    assert job.core.state is JobStage.SAVING
    job.saved(0, 5)
    assert job.core.state is JobStage.VERIFYING


def test_a_writer_that_never_leaves_fsync_is_given_up_after_sync_timeout_s() -> None:
    job = saving()
    job.progress(0, 1000)
    began_s = job.now_s
    while not job.sent(Save):
        job.wait(1.0)
        if not job.sent(Save):
            job.progress(0, 1000, syncing=True)
    assert sorted(job.sent(Save)) == [1]
    assert 299.0 < job.now_s - began_s < 302.0
    golden.says(job.logs())


def test_a_writer_that_is_silent_inside_fsync_has_made_no_progress() -> None:
    job = saving()
    job.progress(0, 1000)
    job.progress(0, 1000, syncing=True)
    job.wait(30.0)
    assert sorted(job.sent(Save)) == [1]
    golden.says(job.logs())


def test_a_byte_between_two_fsyncs_starts_their_time_anew() -> None:
    job = saving()
    for written in range(10):
        job.progress(0, written + 1)
        for _ in range(8):
            job.wait(25.0)
            job.progress(0, written + 1, syncing=True)
    assert job.core.state is JobStage.SAVING


def test_a_writer_that_is_not_inside_fsync_has_no_more_than_before() -> None:
    job = saving()
    job.progress(0, 1000)
    job.wait(29.0)
    job.progress(0, 1000)
    job.wait(2.0)
    assert sorted(job.sent(Save)) == [1]


# --------------------------------------------------------------------------- transient failures


def test_a_verification_that_could_not_look_discards_nothing_and_looks_again() -> None:
    job = saving()
    job.saved(0, 5)
    first = job.starts()
    job.kill(0)
    job.verify_blocked()
    assert job.core.state is JobStage.VERIFYING
    assert not job.discards()
    assert not job.sent(Save)
    golden.says(job.logs())
    job.wait(0.25)
    assert job.starts() == first, "the same parts, wherever they lie by now"
    job.verified()
    job.published()
    assert job.sent(Exit)[1].kind is ExitKind.SAVED


def test_a_verification_that_looks_again_has_its_time_once_more() -> None:
    job = saving(fallback=True)
    job.saved(0, 5)
    job.wait(100)
    job.verify_blocked()
    job.wait(0.25)
    assert job.starts() is not None
    job.wait(100)
    assert job.core.state is JobStage.VERIFYING
    job.wait(21)
    assert job.sent(Save)[0].target == 1


def test_a_verification_that_can_never_look_ends_with_the_files_kept() -> None:
    job = saving()
    job.saved(0, 5)
    began_s = job.now_s
    job.verify_blocked()
    while job.core.state is JobStage.VERIFYING:
        job.wait(0.25)
        if job.starts() is not None:
            job.verify_blocked()
    assert job.now_s - began_s == pytest.approx(20.0, abs=0.5)
    assert not job.discards()
    assert job.keeps() == [(1, 5)]
    golden.says(job.sent(Exit)[0].reason)


def test_a_late_word_that_nobody_could_look_changes_nothing() -> None:
    job = saving()
    job.saved(0, 5)
    job.verified()
    assert job.verify_blocked() == []
    assert job.verify_blocked(attempt=7) == []
    assert job.core.state is JobStage.PUBLISHING


def test_parts_that_were_not_gathered_yet_are_kept_too() -> None:
    job = JobDriver(5, units=("A", "B", "A", "B", "A"))
    job.kill(4)
    for rank in range(4):
        job.settle(rank, computing(5))
    job.saved(0, 5)
    job.save_failed(1, 5, storage=True)
    assert job.sent(Save)[3].attempt == 2
    job.saved(3, 5, attempt=2)
    while job.core.state is JobStage.VERIFYING:
        job.wait(0.25)
        job.verify_blocked(attempt=2)
    assert job.keeps() == [(1, 5), (2, 5)]


def test_a_publication_that_failed_is_tried_again() -> None:
    job = saving()
    job.saved(0, 5)
    job.verified()
    first = job.starts()
    job.publish_failed()
    assert job.core.state is JobStage.PUBLISHING
    job.wait(0.25)
    assert job.starts() == first
    job.published()
    assert job.sent(Exit)[0].kind is ExitKind.SAVED


def test_a_writer_that_was_refused_may_try_again_when_nobody_else_is_left() -> None:
    job = saving(2)
    job.save_failed(0, 5, storage=True)
    assert job.core.state is JobStage.SETTLING
    assert not job.sent(Exit)
    job.wait(0.25)
    assert job.sent(Save)[0].attempt == 2
    job.saved(0, 5, attempt=2)
    job.verified(attempt=2)
    job.published(attempt=2)
    assert job.sent(Exit)[0].kind is ExitKind.SAVED


def test_however_short_the_time_is_a_refused_writer_may_try_again_whatever_is_heard_meanwhile() -> None:
    job = JobDriver(2, options=ControllerOptions(storage_retry_s=0.5))
    job.kill(1)
    job.settle(0, computing(5))
    job.wait(10.0)
    job.save_failed(0, 5, storage=True)
    job.settle(0, computing(5))
    assert not job.sent(Exit)
    job.wait(0.25)
    assert sorted(job.sent(Save)) == [0]


def test_a_finished_part_of_a_dead_writer_waits_for_the_refused_one() -> None:
    job = JobDriver(3, units=("A", "B", "B"))
    job.kill(2)
    job.settle(0, computing(5))
    job.settle(1, computing(5))
    job.saved(0, 5)
    job.kill(0)
    job.save_failed(1, 5, storage=True)
    assert not job.discards()
    job.wait(0.25)
    job.saved(1, 5, attempt=job.sent(Save)[1].attempt)
    started = job.starts()
    assert isinstance(started, StartVerify)
    assert started.writers == (0, 1)


def test_no_survivor_is_set_back_by_one_refusal() -> None:
    """Rank 0 alone has ended step 6; its file system refuses once, and rank 1 could write step 5 at once."""
    job = saving(3, hosts="abc", ahead=True)
    order = job.sent(Save)[0]
    job.save_failed(0, 6, storage=True)
    assert not job.sent(Save)
    job.wait(0.25)
    assert job.sent(Save)[0].step == order.step == 6


def test_a_short_wait_for_the_newer_step_then_the_older_one() -> None:
    job = saving(3, hosts="abc", ahead=True)
    began_s = job.now_s
    attempt = 1
    while 1 not in (orders := job.sent(Save)) or not orders[1].units:
        if 0 in orders:
            attempt = orders[0].attempt
        if job.core.state is JobStage.SAVING:
            job.save_failed(0, 6, attempt=attempt, storage=True)
        else:
            job.wait(0.25)
    assert job.sent(Save)[1].step == 5
    assert 1.0 < job.now_s - began_s < 3.0
    golden.says(job.logs())


def test_a_death_while_writers_wait_to_try_again_ends_it_at_once() -> None:
    job = saving(2)
    job.save_failed(0, 5, storage=True)
    job.kill(0)
    assert job.core.outcome is not None
    assert job.core.outcome.kind is OutcomeKind.NOT_SAVED


def test_what_a_dead_writer_has_finished_is_kept_where_nothing_can_be_published() -> None:
    job = JobDriver(3, units=("A", "B", "B"))
    job.kill(2)
    job.settle(0, computing(5))
    job.settle(1, computing(5))
    job.saved(0, 5)
    job.kill(1)
    order = job.sent(Exit)[0]
    assert order.kind is ExitKind.NOT_SAVED
    assert job.keeps() == [(1, 5)]
    assert not job.discards()
    golden.says(order.reason)


def test_of_each_directory_that_is_kept_it_is_said_whose_files_are_there() -> None:
    job = JobDriver(5, units=("A", "B", "C", "B", "C"))
    job.kill(4)
    for rank in range(4):
        job.settle(rank, computing(5))
    job.saved(0, 5)
    job.kill(1)
    job.saved(3, 5, attempt=job.sent(Save)[3].attempt)
    job.kill(2)
    assert job.keeps() == [(1, 5), (2, 5)]
    golden.says(job.sent(Exit)[0].reason)


def test_what_is_kept_in_the_fallback_directory_is_said_to_be_there() -> None:
    job = saving(fallback=True)
    job.save_failed(0, 5, storage=True)
    attempt = job.sent(Save)[0].attempt
    job.saved(0, 5, attempt=attempt)
    while not (ended := job.sent(Exit)):
        if job.core.state is JobStage.VERIFYING:
            job.verify_blocked(attempt=attempt)
        elif writers := job.sent(Save):
            ((writer, order),) = writers.items()
            job.save_failed(writer, 5, attempt=order.attempt, storage=True)
        if not job.sent(Exit) and not job.sent(Save):
            job.wait(0.25)
    golden.says(ended[0].reason)


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


# --------------------------------------------------------------------------- thousands of writers


def test_an_order_to_save_holds_what_its_writer_needs_and_no_more() -> None:
    lengths = []
    for ranks in (10, 400):
        job = JobDriver(ranks, hosts="".join(chr(0x100 + rank) for rank in range(ranks)), units=_own_units(ranks))
        job.hear(Raised(0, GENERATION, "x", False, computing(5)))
        for rank in range(ranks):
            job.settle(rank, computing(5))
        orders = job.sent(Save)
        assert len(orders) == ranks
        lengths.append(max(len(codec.order_to_pb(order).SerializeToString()) for order in orders.values()))
    assert lengths[1] <= lengths[0] + 64, "the reason names some ranks, never all"


def test_a_farewell_holds_what_its_receiver_needs_and_no_more() -> None:
    lengths = []
    for ranks in (20, 400):
        job = JobDriver(ranks, units=("u",) * ranks)
        for rank in range(1, ranks):
            job.hear(Raised(rank, GENERATION, f"ValueError: no {rank:03}", False, computing(5)))
        for rank in range(ranks):
            job.settle(rank, computing(5))
        job.saved(0, 5)
        job.verified()
        job.published()
        farewells = job.sent(Exit)
        assert len(farewells) == ranks
        assert [verdict_of(rank, order).is_cause for rank, order in farewells.items()] == [False] + [True] * (ranks - 1)
        assert job.core.outcome is not None
        assert job.core.outcome.cause_ranks == tuple(range(1, ranks)), "the record has them all"
        lengths.append(max(codec.order_to_pb(order).ByteSize() for order in farewells.values()))
        job.wait(1.0)
        assert job.sent(Exit) == farewells, "it is repeated as it was"
    assert lengths[1] <= lengths[0] + 64, "it names some of those that began the incident, never all"


def test_what_a_report_costs_the_controller_does_not_grow_with_the_number_of_writers() -> None:
    calls = [_calls_of_a_report(ranks) for ranks in (20, 200)]
    assert calls[1] < 1.5 * calls[0], "a look at all parts is a call for each"


def _calls_of_a_report(ranks: int) -> float:
    """Calls of Python functions that a report of a finished part costs, steps of generators included."""
    job = JobDriver(ranks, hosts="".join(chr(0x100 + rank) for rank in range(ranks)), units=_own_units(ranks))
    job.hear(Raised(0, GENERATION, "x", False, computing(5)))
    for rank in range(ranks):
        job.settle(rank, computing(5))
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for rank in range(ranks):
            job.saved(rank, 5)
    finally:
        sys.setprofile(before)
    assert isinstance(job.starts(), StartVerify)
    return calls / ranks


def _own_units(ranks: int) -> tuple[str, ...]:
    return tuple(f"u{rank}" for rank in range(ranks))


def test_an_order_that_is_not_answered_is_sent_again_in_growing_pauses() -> None:
    job = saving()
    sent_s = []
    for _ in range(60):
        job.wait(0.25)
        if 0 in job.sent(Save):
            sent_s.append(job.now_s - 50.0)
    pauses = [round(later - earlier, 1) for earlier, later in itertools.pairwise([0.0, *sent_s])]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 4.0]


def test_a_verification_that_comes_further_is_waited_for_and_one_that_hangs_is_not() -> None:
    job = saving(fallback=True)
    job.saved(0, 5)
    for _ in range(10):
        job.wait(100)
        job.tell(StorageProgress(1, 1))
        assert job.core.state is JobStage.VERIFYING
    job.tell(StorageProgress(1, 2))  # of another attempt: no news
    job.wait(121)
    assert job.core.state is JobStage.SAVING
    assert job.sent(Save)[0].target == 1


def test_a_publication_that_comes_further_is_waited_for() -> None:
    job = saving(fallback=True)
    job.saved(0, 5)
    job.wait(100)
    job.verified()
    for _ in range(10):
        job.wait(100)
        job.tell(StorageProgress(1, 1))
        assert job.core.state is JobStage.PUBLISHING
    job.wait(121)
    assert job.core.state is JobStage.SAVING


def test_a_verification_waits_for_a_periodic_checkpoint_that_was_before_it_and_comes_further() -> None:
    job = saving(fallback=True)
    job.saved(0, 5)
    for _ in range(10):
        job.wait(100)
        job.tell(StorageProgress(PERIODIC, 1))
        assert job.core.state is JobStage.VERIFYING
    job.wait(121)
    assert job.core.state is JobStage.SAVING


def test_a_periodic_checkpoint_that_comes_further_takes_no_time_from_the_writers_of_this_one() -> None:
    job = JobDriver(3, options=ControllerOptions(has_fallback_target=True))
    job.kill(2)
    job.tell(StorageProgress(PERIODIC, 1))
    for rank in (0, 1):
        job.settle(rank, computing(5))
    for written in range(1, 11):
        job.progress(0, written)
        job.wait(20)
    job.saved(0, 5)
    assert job.starts() == StartVerify(1, 1, 5, 0, (PartPlan(0, 1, ("u",), (0, 1, 2)),))


@pytest.mark.parametrize(("hosts", "more"), [(1, 0), (7, 1), (8, 2), (20, 5)])
def test_one_refusal_more_is_taken_for_every_fourth_host(hosts: int, more: int) -> None:
    context = JobContext(40, GENERATION, ControllerOptions(has_fallback_target=True))
    for rank in range(40):
        process = ProcessId(f"host-{rank % hosts}", rank, 1, "nonce")
        context.members.admit(Hello(rank, GENERATION, 40, process, ("u",), computing(5)))
    writers = Saving(context, 1)
    for rank in range(STORAGE_FAILURES_MAX + more):
        assert writers.targets() == (0, 1)
        writers.refuse(rank, "no space")
    assert writers.targets() == (1,)
    assert writers.targets(forgiven=True) == (0, 1)


# --------------------------------------------------------------------------- whole copies


def copied(*steps: int, incident: int = 1) -> JobDriver:
    """Each of three ranks alone holds a unit. The last one has died; the others know of these copies of its unit."""
    job = JobDriver(3, units=("u0", "u1", "u2"))
    job.kill(2)
    for rank in range(2):
        job.settle(rank, computing(5), incident, copies=tuple(WholeCopy(2, step) for step in steps))
    return job


def test_what_a_dead_rank_has_held_is_read_from_its_copy() -> None:
    job = copied(4, 5)
    orders = job.sent(Save)
    assert {rank: order.copied for rank, order in orders.items()} == {0: ("u2",), 1: ()}
    assert all(order.step == 5 for order in orders.values())


def test_copies_that_were_told_of_another_incident_count_for_nothing() -> None:
    job = copied(4, 5, incident=7)
    assert not job.sent(Save)
    for rank in range(2):
        job.settle(rank, computing(5))
    assert {order.kind for order in job.sent(Exit).values()} == {ExitKind.NOT_SAVED}


def test_a_copy_that_cannot_be_read_costs_nobody_its_place() -> None:
    job = copied(5)
    job.save_failed(0, 5)
    assert {order.kind for order in job.sent(Exit).values()} == {ExitKind.NOT_SAVED}, "nothing else has that unit"
    golden.says(job.sent(Exit)[0].reason)


def test_only_the_copies_of_what_was_read_are_forgotten() -> None:
    job = JobDriver(4, units=("u0", "u1", "u2", "u3"))
    job.kill(2)
    job.kill(3)
    for rank in range(2):
        job.settle(rank, computing(5), copies=(WholeCopy(2, 5), WholeCopy(3, 5)))
    (reader,) = [rank for rank, order in job.sent(Save).items() if order.copied == ("u2",)]
    job.save_failed(reader, 5)
    reason = job.sent(Exit)[0].reason
    assert "u2 cannot" in reason
    assert "u3 cannot" not in reason


def test_who_goes_on_one_step_back_is_told_which_step_is_done_again() -> None:
    job = JobDriver(2, units=("u0", "u1"))
    job.kill(1)
    job.settle(0, computing(6), copies=(WholeCopy(0, 5), WholeCopy(1, 5)))
    assert job.sent(Save)[0].copied == ("u0", "u1")
    job.saved(0, 5)
    job.verified()
    job.published()
    golden.says(job.sent(Exit)[0].reason)
