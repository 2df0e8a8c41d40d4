"""Registration, the agreement on the loop, and leaving it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lastwords.controller.core import ControllerOptions
from lastwords.controller.events import JobStage, OutcomeKind
from lastwords.controller.membership import Membership
from lastwords.vocabulary import (
    DeathSource,
    Exit,
    ExitKind,
    Freeze,
    Goodbye,
    Hello,
    Left,
    LoopBegin,
    LoopGo,
    Phase,
    ProcessId,
    Refused,
    Release,
    Stand,
    Status,
    Welcome,
)
from tests import golden
from tests.controller.job_driver import GENERATION, JobDriver, computing


def left(job: JobDriver, rank: int, step: int) -> None:
    job.hear(Left(rank, GENERATION, Stand(Phase.DONE, step)))


# --------------------------------------------------------------------------- registration


def test_all_are_welcomed_when_the_last_one_has_come() -> None:
    job = JobDriver(3, registered=False)
    job.hello(0)
    job.hello(2)
    assert not job.sent(Welcome)
    job.hello(1)
    assert sorted(job.sent(Welcome)) == [0, 1, 2]
    assert job.core.state is JobStage.WATCHING


def test_a_repeated_hello_is_welcomed_again_and_changes_nothing() -> None:
    job = JobDriver(2)
    job.hello(1)
    assert sorted(job.sent(Welcome)) == [1]
    assert job.core.state is JobStage.WATCHING


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"generation": GENERATION - 1}, "serves generation 3"),
        ({"generation": GENERATION + 1}, "serves generation 3"),
        ({"world_size": 8}, "start all ranks with the same WORLD_SIZE"),
        ({"rank": 3}, "outside a job of 3 ranks"),
        ({"rank": -1}, "outside a job of 3 ranks"),
        ({"process": ProcessId("host-z", 9, 9, "other")}, "already taken by process 101 on host host-a"),
    ],
)
def test_a_process_that_does_not_belong_is_refused(changes: dict[str, object], words: str) -> None:
    job = JobDriver(3)
    job.hello(1, **changes)
    (order,) = job.replies()
    assert isinstance(order, Refused)
    assert words in order.reason
    assert not job.sent(Welcome)
    assert job.core.state is JobStage.WATCHING


def test_a_process_that_was_seen_dead_cannot_come_back() -> None:
    job = JobDriver(3)
    job.kill(1)
    job.hello(1)
    assert job.effects == [], "it will hear how this ends"
    job.hear(LoopBegin(1, GENERATION, 10, 2, 0))
    assert job.effects == []


def test_a_hello_that_is_said_again_in_the_same_session_changes_nothing_and_is_answered() -> None:
    job = JobDriver(3)
    before = job.core.state
    for _ in range(2):
        job.hello(1)
        assert list(job.sent(Welcome)) == [1]
        assert not job.replies()
        assert job.core.state is before
    job.kill(0)
    job.settle(1, computing(5))
    job.hello(1)
    job.settle(2, computing(5))
    assert job.core.state is JobStage.SAVING, "its answer still stands"


def test_a_missing_rank_ends_the_start_with_its_number() -> None:
    job = JobDriver(3, registered=False, options=ControllerOptions(start_timeout_s=60.0))
    job.hello(0)
    job.hello(2)
    job.wait(59.9)
    assert not job.sent(Refused)
    job.wait(0.2)
    refused = job.sent(Refused)
    assert sorted(refused) == [0, 2]
    assert refused[0].reason.startswith("rank 1 did not register within 60 s")
    assert job.core.outcome is not None
    assert job.core.outcome.kind is OutcomeKind.REFUSED


def test_a_rank_that_comes_when_the_job_has_ended_is_told_why() -> None:
    job = JobDriver(3, registered=False)
    job.hello(0)
    job.hello(1)
    job.kill(1)
    job.settle(0, computing(0))
    assert not job.stops(), "rank 2 is still to come"
    job.hello(2)
    (order,) = job.replies()
    assert isinstance(order, Exit)
    assert order.kind is ExitKind.NOTHING_TO_SAVE


def test_a_lost_connection_before_all_are_there_is_forgiven() -> None:
    job = JobDriver(2, registered=False)
    job.hello(0)
    job.close(0)
    assert job.core.state is JobStage.SETTLING
    job.hello(0)
    assert job.core.state is JobStage.REGISTERING
    job.hello(1)
    assert job.core.state is JobStage.WATCHING


def test_the_start_timeout_does_not_interrupt_an_incident() -> None:
    job = JobDriver(2, registered=False, options=ControllerOptions(start_timeout_s=5.0, lost_confirm_s=60.0))
    job.hello(0)
    job.wait(4.0)
    job.close(0)
    job.wait(4.0)
    assert job.core.state is JobStage.SETTLING
    job.hello(0)
    job.wait(4.9)
    assert job.core.state is JobStage.REGISTERING
    job.wait(0.2)
    assert job.core.state is JobStage.REFUSING


# --------------------------------------------------------------------------- the loop


def test_the_loop_begins_when_all_want_the_same() -> None:
    job = JobDriver(2)
    job.hear(LoopBegin(0, GENERATION, 10, 2, 0))
    assert not job.sent(LoopGo)
    job.hear(LoopBegin(1, GENERATION, 10, 2, 0))
    assert sorted(job.sent(LoopGo)) == [0, 1]


def test_a_rank_that_missed_the_answer_gets_it_again() -> None:
    job = JobDriver(2)
    job.begin_loop()
    job.hear(LoopBegin(1, GENERATION, 10, 2, 0))
    assert sorted(job.sent(LoopGo)) == [1]


@pytest.mark.parametrize("other", [(9, 2, 0), (10, 3, 0), (10, 2, 5)])
def test_unequal_loops_are_refused_with_ranks_and_numbers(other: tuple[int, int, int]) -> None:
    job = JobDriver(3)
    job.hear(LoopBegin(0, GENERATION, 10, 2, 0))
    job.hear(LoopBegin(1, GENERATION, *other))
    job.hear(LoopBegin(2, GENERATION, 10, 2, 0))
    refused = job.sent(Refused)
    assert sorted(refused) == [0, 1, 2]
    golden.says(refused[0].reason)


def test_a_rank_that_never_begins_is_named() -> None:
    job = JobDriver(2)
    job.hear(LoopBegin(0, GENERATION, 10, 2, 0))
    job.wait(300.0)
    assert (
        job.sent(Refused)[0].reason == "rank 1 did not begin the training loop within 300 s after rank 0 had begun it"
    )


def test_a_second_loop_is_agreed_on_by_itself() -> None:
    job = JobDriver(2)
    job.begin_loop()
    job.hear(LoopBegin(0, GENERATION, 10, 1, 20))
    assert not job.sent(LoopGo)
    job.hear(LoopBegin(1, GENERATION, 10, 1, 20))
    assert sorted(job.sent(LoopGo)) == [0, 1]


# --------------------------------------------------------------------------- leaving


def test_all_are_released_when_all_have_left_at_the_same_step() -> None:
    job = JobDriver(2)
    job.begin_loop()
    left(job, 0, 20)
    assert not job.sent(Release)
    left(job, 1, 20)
    assert sorted(job.sent(Release)) == [0, 1]
    assert job.core.outcome is not None
    assert job.core.outcome.kind is OutcomeKind.RELEASED


def test_no_end_of_a_process_is_a_death_after_the_release() -> None:
    job = JobDriver(2)
    left(job, 0, 20)
    left(job, 1, 20)
    job.kill(0)
    assert not job.stops()
    job.hear(Goodbye(1, GENERATION))
    assert job.stops()
    assert job.core.incident == 0


def test_the_controller_does_not_wait_for_ever_for_a_goodbye() -> None:
    job = JobDriver(2)
    left(job, 0, 20)
    left(job, 1, 20)
    job.wait(9.9)
    assert not job.stops()
    job.wait(0.2)
    assert job.stops()


def test_a_release_that_is_lost_goes_out_again() -> None:
    job = JobDriver(2)
    left(job, 0, 20)
    left(job, 1, 20)
    job.hear(Goodbye(0, GENERATION))
    job.wait(0.5)
    assert 1 in job.sent(Release)
    job.hear(Left(1, GENERATION, Stand(Phase.DONE, 20)))
    job.hello(1)
    assert 1 in job.sent(Release)


def test_a_rank_that_left_early_is_an_incident_when_nobody_moves() -> None:
    job = JobDriver(3)
    job.begin_loop()
    left(job, 2, 5)
    job.wait(29.0)
    job.hear(Status(0, GENERATION, computing(6)))
    job.wait(29.0)
    assert job.core.state is JobStage.WATCHING, "rank 0 has moved"
    job.hear(Status(0, GENERATION, computing(6)))
    job.wait(1.1)
    assert sorted(job.sent(Freeze)) == [0, 1, 2]
    golden.says(job.sent(Freeze)[0].reason)


def test_a_rank_that_has_done_all_its_steps_waits_longer() -> None:
    job = JobDriver(2)
    job.begin_loop(10, 2)
    left(job, 0, 20)
    job.wait(599.0)
    assert job.core.state is JobStage.WATCHING
    job.wait(2.0)
    assert job.core.state is JobStage.SETTLING
    golden.says(job.sent(Freeze)[0].reason)


def finishing(shape: tuple[int, int], done: tuple[int, ...], step: int, ranks: int = 3) -> JobDriver:
    """All have ended `step`; those that are not `done` have not left the loop yet."""
    job = JobDriver(ranks)
    job.begin_loop(*shape)
    for rank in range(ranks):
        job.hear(Status(rank, GENERATION, computing(step)))
    for rank in done:
        left(job, rank, step)
    return job


@pytest.mark.parametrize(
    ("shape", "done"),
    [((0, 0), (1, 2)), ((0, 0), (1,)), ((10, 2), (1, 2)), ((10, 2), (1,)), ((10, 3), (1, 2))],
    ids=["own loop", "own loop, two of them", "last step", "last step, two of them", "all have broken out"],
)
def test_a_rank_that_stands_where_all_others_have_left_needs_no_last_words(
    shape: tuple[int, int], done: tuple[int, ...]
) -> None:
    job = finishing(shape, done, 20)
    job.wait(1000.0 if shape == (10, 2) else 599.0)
    assert job.core.state is JobStage.WATCHING
    job.kill(1)
    assert job.core.state is JobStage.WATCHING, "it had done everything"
    for rank in {0, 1, 2} - set(done):
        left(job, rank, 20)
    assert sorted(job.sent(Release)) == [0, 1, 2], "and should it live, it hears that it may go on"


def test_a_job_is_not_finishing_before_all_ranks_are_there() -> None:
    membership = Membership(2, GENERATION)
    hello = Hello(0, GENERATION, 2, ProcessId("host", 1, 1, "nonce"), ("u",), computing(0))
    membership.admit(hello)
    membership.leave(Left(0, GENERATION, computing(0)))
    assert not membership.finishing
    membership.admit(replace(hello, rank=1))
    membership.members[1].streamed = computing(0)
    assert membership.finishing


def test_several_that_stand_still_before_the_last_step_may_wait_for_one_that_left_too_early() -> None:
    """Negative control."""
    job = finishing((10, 3), (2,), 20)
    job.wait(31.0)
    golden.says(job.sent(Freeze)[0].reason)


@pytest.mark.parametrize("done", [(1, 2), (2,)], ids=["one", "two"])
def test_who_stands_in_a_loop_of_ones_own_that_others_have_left_is_not_waited_for_for_ever(
    done: tuple[int, ...],
) -> None:
    """It may wait in a collective for one that has left too early, and nobody can tell from outside."""
    job = finishing((0, 0), done, 20)
    job.wait(601.0)
    golden.says(job.sent(Freeze)[0].reason)


def test_the_death_of_the_rank_that_is_not_done_is_a_death() -> None:
    job = finishing((0, 0), (1, 2), 20)
    job.kill(0)
    assert sorted(job.sent(Freeze)) == [1, 2]


@pytest.mark.parametrize("done", [(1, 2), (1,)], ids=["alone", "one of two"])
def test_a_rank_that_died_when_all_seemed_done_is_missed_when_another_goes_on(done: tuple[int, ...]) -> None:
    job = finishing((0, 0), done, 20)
    job.kill(1)
    assert job.core.state is JobStage.WATCHING
    job.hear(Status(0, GENERATION, Stand(Phase.READY, 21)))
    assert sorted(job.sent(Freeze)) == [0, 2]
    assert "rank 1 died" in job.sent(Freeze)[0].reason


def test_no_rank_is_done_where_others_have_left_after_different_steps() -> None:
    job = finishing((0, 0), (1,), 20)
    left(job, 2, 21)
    job.kill(1)
    assert sorted(job.sent(Freeze)) == [0, 2]


def test_a_lost_connection_of_a_rank_that_is_done_freezes_nobody() -> None:
    job = finishing((0, 0), (1, 2), 20)
    job.close(1)
    job.wait(10.0)
    assert not job.sent(Freeze)


def test_ranks_that_leave_at_different_steps_are_an_incident() -> None:
    job = JobDriver(2)
    left(job, 0, 5)
    left(job, 1, 6)
    assert sorted(job.sent(Freeze)) == [0, 1]
    job.settle(0, Stand(Phase.DONE, 5))
    job.settle(1, Stand(Phase.DONE, 6))
    job.saved(1, 6)
    job.verified()
    job.published()
    assert job.sent(Exit)[0].step == 6
    assert job.sent(Exit)[0].cause_ranks == (0,)


def test_a_rank_that_has_left_is_a_holder_like_any_other() -> None:
    job = JobDriver(2)
    left(job, 0, 5)
    job.kill(1)
    job.settle(0, Stand(Phase.DONE, 5))
    assert job.core.state is JobStage.SAVING


def test_leaving_is_looked_at_again_after_a_false_alarm() -> None:
    job = JobDriver(2)
    left(job, 0, 5)
    job.close(1)
    job.hello(1)
    left(job, 1, 5)
    assert sorted(job.sent(Release)) == [0, 1]


def test_a_death_before_the_release_is_still_a_death() -> None:
    job = JobDriver(2)
    left(job, 0, 5)
    job.kill(0, DeathSource.PIDFD)
    left(job, 1, 5)
    assert not job.sent(Release)
    assert job.core.state is JobStage.SETTLING
