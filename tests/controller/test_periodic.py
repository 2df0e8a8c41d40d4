"""Periodic checkpoints: when they are ordered, what ends them, and that nothing of it stops the training."""

from __future__ import annotations

import pytest

from lastwords.controller.events import (
    JobStage,
    Prune,
    PublishFailed,
    StartPublish,
    StartVerify,
    VerifyBlocked,
    VerifyFailed,
    Watched,
)
from lastwords.controller.membership import Member
from lastwords.controller.periodic import shares
from lastwords.vocabulary import (
    Freeze,
    Left,
    LoopBegin,
    Notice,
    Phase,
    ProcessId,
    Refused,
    Release,
    Resume,
    Save,
    SaveFailed,
    SaveWanted,
    Schedule,
    Stand,
    Status,
)
from tests import golden
from tests.controller.job_driver import GENERATION, JobDriver, computing


def due(schedule: Schedule, ranks: int = 3, start_step: int = 0) -> JobDriver:
    """A loop that has begun, with a checkpoint ordered if one is due after steps."""
    job = JobDriver(ranks)
    job.begin_loop(100, 1, start_step, schedule)
    return job


def written(job: JobDriver, step: int, attempt: int = 1) -> None:
    """All parts are on disk."""
    for rank in range(job.ranks):
        job.saved(rank, step, attempt, incident=0)


def failed(job: JobDriver, rank: int, step: int, attempt: int = 1, *, missed: bool = False) -> None:
    """A rank has no part."""
    job.hear(SaveFailed(rank, GENERATION, 0, attempt, step, "it did not work", storage=not missed, missed=missed))


def leave(job: JobDriver, step: int) -> None:
    """All ranks leave the loop."""
    for rank in range(job.ranks):
        job.hear(Left(rank, GENERATION, computing(step)))


def test_all_ranks_are_told_the_next_multiple_before_it_is_reached() -> None:
    job = due(Schedule(steps=10), start_step=13)
    orders = job.sent(Save)
    assert {rank: (order.incident, order.step) for rank, order in orders.items()} == dict.fromkeys(range(3), (0, 20))


def test_a_checkpoint_is_verified_published_and_followed_by_the_next() -> None:
    job = due(Schedule(steps=10, keep_max=3, keep_minutes=60))
    job.at(10)
    job.saved(0, 10, incident=0)
    job.saved(1, 10, incident=0)
    assert job.starts() is None
    job.saved(2, 10, incident=0)
    assert isinstance(job.starts(), StartVerify)
    job.verified(incident=0)
    publish = job.starts()
    assert isinstance(publish, StartPublish)
    assert (publish.incident, publish.step, publish.dead_ranks) == (0, 10, ())
    job.published(incident=0)
    assert Prune(3, 60) in job.effects
    assert {order.step for order in job.sent(Save).values()} == {20}
    assert job.core.state is JobStage.WATCHING


def test_nothing_is_pruned_where_everything_is_kept() -> None:
    job = due(Schedule(steps=10))
    written(job, 10)
    job.verified(incident=0)
    job.published(incident=0)
    assert not [effect for effect in job.effects if isinstance(effect, Prune)]


def test_one_that_is_due_at_a_time_is_of_the_step_that_is_under_way() -> None:
    job = due(Schedule(seconds=60.0))
    assert not job.sent(Save)
    job.at(7)
    job.wait(59.0)
    assert not job.sent(Save)
    job.wait(2.0)
    assert {order.step for order in job.sent(Save).values()} == {8}


def test_a_rank_that_is_past_the_step_makes_it_a_later_one() -> None:
    job = due(Schedule())
    job.at(7)
    job.hear(SaveWanted(1, GENERATION, 7))
    steps = []
    for attempt in range(1, 6):
        steps.append(job.sent(Save)[0].step)
        failed(job, 2, steps[-1], attempt, missed=True)
    assert steps == [8, 9, 11, 15, 23]


def test_a_schedule_that_no_rank_can_keep_up_with_skips_ahead() -> None:
    job = due(Schedule(steps=1))
    steps = []
    for attempt in range(1, 6):
        steps.append(job.sent(Save)[0].step)
        failed(job, 0, steps[-1], attempt, missed=True)
    assert steps == [1, 2, 4, 8, 16]


def test_one_that_is_wanted_now_goes_before_one_whose_step_is_to_come() -> None:
    job = due(Schedule(steps=1000))
    job.at(5)
    job.hear(SaveWanted(0, GENERATION, 5))
    assert {order.step for order in job.sent(Save).values()} == {6}
    written(job, 6, attempt=2)
    job.verified(attempt=2, incident=0)
    job.published(attempt=2, incident=0)
    assert {order.step for order in job.sent(Save).values()} == {1000}


def test_all_ranks_may_ask_at_once_for_one() -> None:
    job = due(Schedule(steps=1000))
    job.at(5)
    for rank in range(3):
        job.hear(SaveWanted(rank, GENERATION, 5))
    written(job, 6, attempt=2)
    job.verified(attempt=2, incident=0)
    job.published(attempt=2, incident=0)
    assert {order.step for order in job.sent(Save).values()} == {1000}


def test_a_rank_that_asks_again_before_it_has_ended_the_step_asks_for_the_same_one() -> None:
    job = due(Schedule(steps=1000))
    job.at(5)
    job.hear(SaveWanted(0, GENERATION, 5))
    job.hear(Status(1, GENERATION, computing(6)))
    job.hear(SaveWanted(0, GENERATION, 5))
    written(job, 6, attempt=2)
    job.verified(attempt=2, incident=0)
    job.published(attempt=2, incident=0)
    assert {order.step for order in job.sent(Save).values()} == {1000}


@pytest.mark.parametrize("published", [False, True])
def test_a_rank_that_asks_again_while_it_copies_the_state_asks_for_the_same_one(published: bool) -> None:
    """It has ended the step of the order, and says so before it repeats itself; and what is repeated may come late."""
    job = due(Schedule(steps=1000))
    job.at(5)
    job.hear(SaveWanted(0, GENERATION, 5))
    job.at(6)
    if not published:
        job.hear(SaveWanted(0, GENERATION, 5))
    written(job, 6, attempt=2)
    job.verified(attempt=2, incident=0)
    job.published(attempt=2, incident=0)
    assert {order.step for order in job.sent(Save).values()} == {1000}
    job.hear(SaveWanted(0, GENERATION, 5))
    assert not job.discards()
    assert not job.sent(Save)


@pytest.mark.parametrize("repeated", [False, True])
def test_a_rank_that_asks_again_while_it_copies_the_last_step_does_not_make_all_wait_for_another(
    repeated: bool,
) -> None:
    job = due(Schedule())
    job.at(5)
    job.hear(SaveWanted(0, GENERATION, 5))
    leave(job, 5)
    (attempt,) = {order.attempt for order in job.sent(Save).values()}
    if repeated:
        job.hear(SaveWanted(0, GENERATION, 5))
    failed(job, 1, 5, attempt)
    assert not job.sent(Save)
    assert len(job.sent(Release)) == 3


def test_one_that_is_wanted_is_of_a_step_after_that_in_which_it_was_wanted() -> None:
    """The controller may not have heard yet how far the ranks have come, and would take a step that is over."""
    job = due(Schedule())
    job.hear(SaveWanted(0, GENERATION, 5))
    assert {order.step for order in job.sent(Save).values()} == {6}


def test_one_that_is_asked_for_after_the_step_of_the_one_under_way_is_another() -> None:
    job = due(Schedule(steps=1000))
    job.at(5)
    job.hear(SaveWanted(0, GENERATION, 5))
    job.at(6)
    job.hear(SaveWanted(1, GENERATION, 6))
    written(job, 6, attempt=2)
    job.verified(attempt=2, incident=0)
    job.published(attempt=2, incident=0)
    assert {order.step for order in job.sent(Save).values()} == {7}


def test_a_multiple_that_was_also_asked_for_is_ordered_again_at_once_if_it_is_missed() -> None:
    job = due(Schedule(steps=10))
    job.at(9)
    job.hear(SaveWanted(0, GENERATION, 9))
    failed(job, 1, 10, missed=True)
    assert {order.step for order in job.sent(Save).values()} == {11}


def test_one_that_is_wanted_while_another_is_written_comes_after_it() -> None:
    job = due(Schedule(steps=10))
    job.at(10)
    job.saved(0, 10, incident=0)
    job.hear(SaveWanted(0, GENERATION, 10))
    assert not job.sent(Save)
    job.saved(1, 10, incident=0)
    job.saved(2, 10, incident=0)
    job.verified(incident=0)
    job.published(incident=0)
    assert {order.step for order in job.sent(Save).values()} == {11}


def test_a_part_that_fails_ends_it_and_is_said_once() -> None:
    job = due(Schedule(steps=10))
    said, shown = [], list[tuple[int, Notice]]()
    for attempt in (1, 2):
        failed(job, 1, 10 * attempt, attempt)
        said += [effect.level for effect in job.effects if hasattr(effect, "level")]
        shown += job.sent(Notice).items()
        if attempt == 1:
            golden.says(job.logs())
            assert job.discards() == [(1, 10)]
    assert said == [30, 20]
    assert [rank for rank, _ in shown] == [0], "in the output of one rank, once"
    assert job.core.state is JobStage.WATCHING


@pytest.mark.parametrize(
    "answer", [VerifyBlocked(0, 1, "Stale file handle"), PublishFailed(0, 1, "Read-only file system")], ids=repr
)
def test_files_that_are_refused_end_it(answer: VerifyBlocked | PublishFailed) -> None:
    job = due(Schedule(steps=10))
    written(job, 10)
    if isinstance(answer, PublishFailed):
        job.verified(incident=0)
    job.tell(answer)
    assert job.discards() == [(1, 10)]
    assert {order.step for order in job.sent(Save).values()} == {20}


def test_bad_parts_end_it() -> None:
    job = due(Schedule(steps=10))
    written(job, 10)
    job.tell(VerifyFailed(0, 1, ((1, "12 bytes, 1000 expected"),)))
    golden.says(job.logs())
    assert job.discards() == [(1, 10)]


def test_writers_that_make_no_progress_are_given_up() -> None:
    job = due(Schedule(steps=10))
    job.wait(10_000.0)
    assert not job.discards()  # the step is still to come, however long it takes
    job.at(11)
    job.saved(0, 10, incident=0)
    job.wait(20.0)
    job.progress(1, 500, incident=0)
    job.wait(29.0)
    assert not job.discards()
    job.wait(2.0)
    assert job.discards() == [(1, 10)]
    golden.says(job.logs())


def test_ranks_that_say_nothing_are_given_up() -> None:
    job = due(Schedule(steps=10))
    job.at(11)
    job.wait(31.0)
    assert job.discards() == [(1, 10)]


def test_a_writer_inside_fsync_has_more_time() -> None:
    job = due(Schedule(steps=10))
    job.at(11)
    job.progress(1, 0, incident=0, syncing=True)
    job.wait(290.0)
    assert not job.discards()
    job.wait(20.0)
    assert job.discards() == [(1, 10)]


def test_a_publication_that_hangs_is_given_up() -> None:
    job = due(Schedule(steps=10))
    written(job, 10)
    job.verified(incident=0)
    job.wait(121.0)
    assert job.discards() == [(1, 10)]
    golden.says(job.logs())


def test_an_incident_ends_what_is_being_written() -> None:
    job = due(Schedule(steps=10))
    job.saved(0, 10, incident=0)
    job.kill(2)
    assert job.sent(Freeze)
    assert job.discards() == [(1, 10)]
    job.saved(1, 10, incident=0)
    assert job.starts() is None


def test_an_incident_does_not_end_what_is_being_published() -> None:
    job = due(Schedule(steps=10))
    written(job, 10)
    job.kill(2)
    assert not job.discards()
    job.verified(incident=0)
    assert isinstance(job.starts(), StartPublish)
    job.published(incident=0)
    assert job.core.state is JobStage.SETTLING
    assert not job.sent(Save)


def test_after_a_false_alarm_the_next_one_is_ordered() -> None:
    job = due(Schedule(steps=10))
    job.close(2)
    assert job.discards() == [(1, 10)]
    job.hello(2)
    assert job.sent(Resume)
    assert {order.attempt for order in job.sent(Save).values()} == {2}


def test_a_rank_with_a_new_session_is_told_again() -> None:
    job = due(Schedule(steps=10))
    job.hello(1)
    assert job.sent(Save)[1].step == 10
    job.saved(1, 10, incident=0)
    job.hello(1)
    assert not job.sent(Save)


def test_the_end_of_the_loop_waits_for_what_is_being_written() -> None:
    job = due(Schedule(steps=10))
    job.at(10)
    leave(job, 10)
    assert not job.sent(Release)
    written(job, 10)
    job.verified(incident=0)
    assert not job.sent(Release)
    job.published(incident=0)
    assert len(job.sent(Release)) == 3


def test_the_end_of_the_loop_does_not_wait_for_ever() -> None:
    job = due(Schedule(steps=10))
    job.at(10)
    leave(job, 10)
    job.wait(31.0)
    assert len(job.sent(Release)) == 3


def test_the_end_of_the_loop_waits_longer_for_a_rank_that_copies() -> None:
    job = due(Schedule(steps=10))
    job.at(10)
    leave(job, 10)
    job.progress(1, 0, incident=0, syncing=True)
    job.wait(290.0)
    assert not job.discards()
    job.wait(11.0)
    assert len(job.sent(Release)) == 3


def test_the_end_of_the_loop_waits_for_no_step_that_is_not_reached() -> None:
    job = due(Schedule(steps=10))
    leave(job, 9)
    assert len(job.sent(Release)) == 3


def test_old_answers_are_void() -> None:
    job = due(Schedule(steps=10))
    failed(job, 1, 10)
    written(job, 10, attempt=1)
    assert job.starts() is None
    written(job, 10, attempt=2)  # the step is another one
    assert job.starts() is None


def test_nothing_is_ordered_without_a_schedule() -> None:
    job = due(Schedule())
    job.at(50)
    job.wait(10_000.0)
    assert not job.sent(Save)


def test_a_unit_is_written_by_the_holder_that_has_the_fewest() -> None:
    held = {0: ("a", "b"), 1: ("a", "b"), 2: ("b", "c")}
    members = [Member(rank, ProcessId("h", 1 + rank, 1, "n"), units, computing(0)) for rank, units in held.items()]
    assert {rank: share.units for rank, share in shares(members).items()} == {0: ("a",), 1: ("b",), 2: ("c",)}
    assert {rank: share.local_ranks for rank, share in shares(members).items()} == {rank: (rank,) for rank in held}


def test_ranks_that_disagree_about_the_schedule_are_refused() -> None:
    job = JobDriver(2)
    job.hear(LoopBegin(0, GENERATION, 10, 1, 0, Schedule(steps=5)))
    job.hear(LoopBegin(1, GENERATION, 10, 1, 0, Schedule(seconds=60.0)))
    golden.says(job.sent(Refused)[0].reason)


def test_one_that_is_wanted_again_and_again_is_still_written() -> None:
    """A loop that asks at every step: what is being copied or written must not make way."""
    job = due(Schedule())
    job.at(5)
    job.hear(SaveWanted(0, GENERATION, 5))
    assert {order.step for order in job.sent(Save).values()} == {6}
    for step in (6, 7, 8):
        job.at(step)
        job.hear(SaveWanted(0, GENERATION, step))
        assert not job.sent(Save)
        assert not job.discards()
    written(job, 6)
    job.verified(incident=0)
    job.published(incident=0)
    assert {order.step for order in job.sent(Save).values()} == {9}


def test_one_that_is_wanted_is_not_forgotten_when_another_one_is_missed() -> None:
    job = due(Schedule(steps=10))
    job.at(9)
    job.hear(SaveWanted(0, GENERATION, 9))
    failed(job, 1, 10, missed=True)
    assert {order.step for order in job.sent(Save).values()} == {11}


def test_a_false_alarm_does_not_cost_the_step_that_is_still_to_come() -> None:
    job = due(Schedule(steps=1000))
    job.at(500)
    job.close(2)
    job.hello(2, stand=computing(500))
    assert job.sent(Resume)
    assert {order.step for order in job.sent(Save).values()} == {1000}


def test_one_that_was_wanted_comes_after_a_false_alarm() -> None:
    job = due(Schedule())
    job.at(5)
    job.hear(SaveWanted(1, GENERATION, 5))
    job.close(2)
    job.hello(2, stand=computing(5))
    assert {order.step for order in job.sent(Save).values()} == {6}


def test_false_alarms_do_not_put_one_off_that_is_due_at_a_time() -> None:
    job = due(Schedule(seconds=60.0))
    for _ in range(5):
        job.wait(11.0)
        job.close(2)
        job.hello(2)
    assert {order.step for order in (job.wait(6.0) and job.sent(Save)).values()} == {1}


def test_one_that_becomes_due_in_a_false_alarm_comes_after_it() -> None:
    job = due(Schedule(seconds=60.0))
    job.wait(58.0)
    job.close(2)
    job.wait(4.0)
    assert not job.sent(Save)
    job.hello(2)
    assert {order.step for order in job.sent(Save).values()} == {1}


def test_a_rank_that_is_still_at_the_step_has_as_long_as_it_takes() -> None:
    """It evaluates before it ends the step, say; what the others have written waits."""
    job = due(Schedule(steps=10))
    for rank in (0, 1):
        job.hear(Status(rank, GENERATION, computing(10)))
        job.saved(rank, 10, incident=0)
    job.wait(10_000.0)
    assert not job.discards()
    job.hear(Status(2, GENERATION, computing(11)))
    job.wait(31.0)
    assert job.discards() == [(1, 10)]


@pytest.mark.parametrize("when", ["after the last step", "in the last step, and too late", "when some have left"])
def test_one_that_is_asked_for_after_the_last_step_is_of_that_step(when: str) -> None:
    job = due(Schedule())
    job.at(100 if when == "after the last step" else 99)
    if when != "when some have left":
        job.hear(SaveWanted(0, GENERATION, 100 if when == "after the last step" else 99))
        (step,) = {order.step for order in job.sent(Save).values()}
        assert step == 101 if when == "after the last step" else 100
        if when == "in the last step, and too late":
            failed(job, 1, 100, missed=True)
    job.hear(Left(0, GENERATION, computing(100)))
    if when == "when some have left":
        job.hear(SaveWanted(1, GENERATION, 100))
    for rank in (1, 2):
        job.hear(Left(rank, GENERATION, computing(100)))
    orders = job.sent(Save)
    assert {order.step for order in orders.values()} == {100}
    assert not job.sent(Release)
    written(job, 100, orders[0].attempt)
    job.verified(attempt=orders[0].attempt, incident=0)
    job.published(attempt=orders[0].attempt, incident=0)
    assert len(job.sent(Release)) == 3


def test_nobody_waits_for_a_second_checkpoint_of_the_last_step() -> None:
    job = due(Schedule(steps=100))
    job.at(100)
    job.hear(SaveWanted(0, GENERATION, 100))
    written(job, 100)
    leave(job, 100)
    job.verified(incident=0)
    job.published(incident=0)
    assert len(job.sent(Release)) == 3


def test_the_step_that_was_resumed_from_is_not_written_again() -> None:
    """A job that had finished is started once more: no step comes, and the checkpoint that there is stays."""
    job = due(Schedule(), start_step=100)
    job.at(100)
    for rank in range(3):
        job.hear(SaveWanted(rank, GENERATION, 100))
    leave(job, 100)
    assert not job.sent(Save)
    assert len(job.sent(Release)) == 3
    golden.says(job.logs())


def test_a_step_after_the_one_that_was_resumed_from_is_written() -> None:
    job = due(Schedule(), start_step=99)
    job.at(100)
    job.hear(SaveWanted(0, GENERATION, 100))
    leave(job, 100)
    assert {order.step for order in job.sent(Save).values()} == {100}


def test_one_of_the_last_step_that_fails_is_said_and_holds_nobody() -> None:
    job = due(Schedule())
    job.at(100)
    job.hear(SaveWanted(0, GENERATION, 100))
    leave(job, 100)
    failed(job, 1, 100, attempt=2)
    (notice,) = job.sent(Notice).values()
    golden.says(notice.text)
    assert len(job.sent(Release)) == 3


@pytest.mark.parametrize("watched", [True, False])
def test_one_of_the_last_step_waits_for_a_rank_in_doubt(watched: bool) -> None:
    job = due(Schedule())
    job.at(100)
    leave_in_doubt(job, watched=watched)
    assert not job.sent(Save)
    assert not job.sent(Release)
    job.wait(290.0 if watched else 9.0)
    job.hello(1, stand=Stand(Phase.DONE, 100))
    assert {order.step for order in job.sent(Save).values()} == {100}
    written(job, 100)
    job.verified(incident=0)
    job.published(incident=0)
    assert len(job.sent(Release)) == 3


@pytest.mark.parametrize("how", ["silent", "silent, and its process lives", "killed"])
def test_a_rank_in_doubt_that_does_not_return_holds_nobody(how: str) -> None:
    job = due(Schedule())
    job.at(100)
    leave_in_doubt(job, watched="lives" in how)
    if how == "killed":
        job.kill(1)
    else:
        job.wait(301.0 if "lives" in how else 11.0)
    golden.says(job.logs())
    assert not job.sent(Save)
    assert job.core.state is JobStage.RELEASING


def leave_in_doubt(job: JobDriver, *, watched: bool) -> None:
    """A checkpoint is asked for after the last step, and the session of rank 1 is broken when all have left."""
    job.tell(Watched(1, ended=not watched))
    for rank in (1, 2):
        job.hear(Left(rank, GENERATION, computing(100)))
    job.close(1)
    job.hear(SaveWanted(0, GENERATION, 100))
    job.hear(Left(0, GENERATION, computing(100)))


def test_ranks_that_have_all_left_may_wait_long_for_what_is_being_written() -> None:
    job = JobDriver(3)
    job.begin_loop(0, 0, 0, Schedule(steps=10))  # a custom loop: nobody knows its last step
    job.at(10)
    leave(job, 10)
    for rank in range(3):
        job.hear(Status(rank, GENERATION, Stand(Phase.DONE, 10)))
    for written_bytes in range(1, 60):
        job.wait(20.0)
        job.progress(1, written_bytes, incident=0)
    assert job.core.state is JobStage.WATCHING
    written(job, 10)
    job.verified(incident=0)
    job.published(incident=0)
    assert len(job.sent(Release)) == 3


def test_what_is_complete_is_published_although_all_ranks_have_died() -> None:
    job = due(Schedule(steps=10))
    written(job, 10)
    for rank in range(3):
        job.kill(rank)
    job.wait(60.0)
    assert not job.stops()
    job.verified(incident=0)
    assert isinstance(job.starts(), StartPublish)
    job.published(incident=0)
    assert job.stops()


def test_files_that_hang_do_not_keep_a_job_that_has_ended() -> None:
    job = due(Schedule(steps=10))
    written(job, 10)
    for rank in range(3):
        job.kill(rank)
    job.wait(121.0)
    assert job.stops()


def test_last_words_that_wait_behind_it_in_the_queue_have_their_time() -> None:
    job = due(Schedule(steps=10))
    job.at(10)
    written(job, 10)
    job.kill(2)
    for rank in (0, 1):
        job.settle(rank, computing(10))
    job.saved(0, 10)
    job.saved(1, 10)
    job.wait(100.0)
    job.verified(incident=0)  # only now can the incident's files be looked at
    job.wait(100.0)
    assert job.core.state is JobStage.VERIFYING
    job.verified()
    job.wait(100.0)
    job.published(incident=0)
    job.wait(100.0)
    job.published()
    assert job.core.outcome is not None
    assert job.core.outcome.step == 10


def test_a_step_that_is_saved_is_not_ordered_again_although_no_status_has_come() -> None:
    job = due(Schedule())
    job.at(5)
    job.hear(SaveWanted(0, GENERATION, 5))
    written(job, 6)
    job.verified(incident=0)
    job.published(incident=0)
    job.hear(SaveWanted(0, GENERATION, 6))
    assert {order.step for order in job.sent(Save).values()} == {7}


def test_a_part_that_was_finished_too_late_is_removed() -> None:
    """Its writer had not heard yet that the checkpoint was given up, and may have made the directory anew."""
    job = due(Schedule())
    job.at(5)
    job.hear(SaveWanted(0, GENERATION, 5))
    failed(job, 1, 6)
    job.saved(0, 6, incident=0)
    assert job.discards() == [(1, 6)]
