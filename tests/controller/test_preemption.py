"""SIGTERM with a known grace period: what is waited for until when, and what is said if the time was not enough."""

from __future__ import annotations

import doctest
import itertools

import pytest

from lastwords.controller import context
from lastwords.controller.context import saving_s
from lastwords.controller.events import ControllerOptions, JobStage, StartPublish, StartVerify
from lastwords.vocabulary import Exit, ExitKind, Phase, Proceed, Save, Signalled, Stand
from tests import golden
from tests.controller.job_driver import GENERATION, JobDriver, computing

SIGINT, SIGTERM = 2, 15
GRACE_S = 12.0
OPTIONS = ControllerOptions(preemption_grace_s=GRACE_S)
NONE = ControllerOptions()
PART_S = GRACE_S / context.PARTS


def signalled(options: ControllerOptions = OPTIONS, ranks: int = 3, number: int = SIGTERM) -> JobDriver:
    """Every rank has had the signal."""
    job = JobDriver(ranks, options=options)
    for rank in range(ranks):
        job.hear(Signalled(rank, GENERATION, number, computing(5)))
    return job


def settled(job: JobDriver, *ranks: int, incident: int = 1) -> JobDriver:
    for rank in ranks:
        job.settle(rank, computing(5), incident)
    return job


def ends(job: JobDriver) -> Exit:
    """How the job ends at the end of the grace period, and not earlier."""
    job.wait(50.0 + saving_s(OPTIONS) - job.now_s - 0.01)
    assert not job.sent(Exit)
    job.wait(0.02)
    return job.sent(Exit)[0]


def test_the_arithmetic_of_the_page() -> None:
    assert doctest.testmod(context).failed == 0


@pytest.mark.parametrize(
    ("options", "wait_s"), [(OPTIONS, PART_S), (NONE, NONE.settle_timeout_s)], ids=["grace", "control"]
)
def test_a_straggler_is_left_out_while_there_is_time_to_write(options: ControllerOptions, wait_s: float) -> None:
    job = settled(signalled(options), 0, 1)
    job.wait(wait_s - 0.01)
    assert not job.sent(Save)
    job.wait(0.01)
    assert job.sent(Save)[0].step == 5


@pytest.mark.parametrize(
    ("options", "wait_s"), [(OPTIONS, PART_S), (NONE, NONE.progress_timeout_s)], ids=["grace", "control"]
)
def test_a_writer_without_progress_is_replaced_while_there_is_time(options: ControllerOptions, wait_s: float) -> None:
    job = settled(signalled(options), 0, 1, 2)
    job.progress(0, 0)
    job.wait(wait_s - 0.01)
    assert not job.sent(Save)
    job.wait(0.01)
    assert job.sent(Save)[1].attempt == 2


def test_a_rank_of_which_nothing_is_heard_is_dead_in_time() -> None:
    job = signalled(ControllerOptions(preemption_grace_s=3.0, lost_confirm_s=10.0))
    settled(job, 0, 1)
    job.close(2)
    job.wait(context.WAIT_S_MIN)
    assert job.sent(Save)[0].step == 5


def test_a_writer_that_says_it_is_inside_fsync_is_not_replaced_by_one_that_would_wait_there_as_well() -> None:
    job = settled(signalled(), 0, 1, 2)
    job.progress(0, 10)
    while job.now_s < 50.0 + saving_s(OPTIONS) - 1.0:
        job.wait(1.0)
        job.progress(0, 10, syncing=True)
        assert not job.sent(Save)
    golden.says(ends(job).reason)


@pytest.mark.parametrize(("fallback", "wait_s"), [(True, PART_S), (False, saving_s(OPTIONS))])
def test_files_that_hang_are_given_up_early_only_for_the_fallback_directory(fallback: bool, wait_s: float) -> None:
    options = ControllerOptions(preemption_grace_s=GRACE_S, has_fallback_target=fallback)
    job = settled(signalled(options), 0, 1, 2)
    job.saved(0, 5)
    job.wait(wait_s - 0.01)
    assert job.core.state is JobStage.VERIFYING
    job.wait(0.02)
    assert bool(job.sent(Save)) is fallback
    assert bool(job.sent(Exit)) is not fallback


def test_what_a_file_system_refuses_is_tried_until_the_end_where_nothing_else_can_be_done() -> None:
    job = settled(signalled(ranks=1), 0)
    job.save_failed(0, 5, storage=True)
    tries = 0
    while job.now_s < 50.0 + saving_s(OPTIONS) - 0.5:
        job.wait(0.5)
        for order in job.sent(Save).values():
            tries += 1
            job.save_failed(0, 5, order.attempt, storage=True)
    assert tries > 2
    golden.says(ends(job).reason)


def test_deadlines_that_run_already_are_cut_too() -> None:
    """torchrun sends SIGTERM to the survivors after a death: they wait for one of themselves, or for a writer."""
    job = JobDriver(4, options=OPTIONS)
    job.kill(3)
    settled(job, 0, 1)
    job.hear(Signalled(0, GENERATION, SIGTERM, computing(5)))
    job.wait(PART_S)
    assert job.sent(Save)[0].step == 5

    job = JobDriver(3, options=OPTIONS)
    job.kill(2)
    settled(job, 0, 1)
    job.progress(0, 10)
    job.hear(Signalled(0, GENERATION, SIGTERM, computing(5)))
    job.wait(PART_S)
    assert job.sent(Save)[1].attempt == 2


def stuck_at(state: JobStage) -> JobDriver:
    job = signalled(ranks=2)
    if state is JobStage.SETTLING:
        return job
    settled(job, 0, 1)
    if state is not JobStage.SAVING:
        job.saved(0, 5)
        assert isinstance(job.starts(), StartVerify)
    if state is JobStage.PUBLISHING:
        job.verified()
        assert isinstance(job.starts(), StartPublish)
    return job


@pytest.mark.parametrize("state", [JobStage.SAVING, JobStage.VERIFYING, JobStage.PUBLISHING], ids=str)
def test_before_the_end_everybody_is_told_what_could_not_be_published(state: JobStage) -> None:
    job = stuck_at(state)
    for written in itertools.count(1):
        if job.now_s + 1.0 >= 50.0 + saving_s(OPTIONS):
            break
        job.wait(1.0)
        job.progress(0, written)
    order = ends(job)
    assert order.kind is ExitKind.NOT_SAVED
    assert job.core.state is JobStage.EXITING
    golden.says(order.reason)


@pytest.mark.parametrize("units", ["u", "AB"], ids=["all ranks late", "the only holder late"])
def test_a_rank_without_which_nothing_can_be_saved_is_waited_for_as_long_as_otherwise(units: str) -> None:
    """Updates may take longer than a third of the time: that is no reason to save nothing at all."""
    job = JobDriver(2, options=OPTIONS, units=("A", "B") if units == "AB" else ())
    job.hear(Signalled(0, GENERATION, SIGTERM, computing(5)))
    if units == "AB":
        settled(job, 0)
    job.wait(PART_S + 1.0)
    assert not job.sent(Exit)
    settled(job, *((1,) if units == "AB" else (0, 1)))
    assert job.sent(Save)


def test_and_no_longer() -> None:
    job = JobDriver(2, options=ControllerOptions(preemption_grace_s=30.0), units=("A", "B"))
    job.hear(Signalled(0, GENERATION, SIGTERM, computing(5)))
    settled(job, 0)
    job.wait(NONE.settle_timeout_s - 0.01)
    assert not job.sent(Exit)
    job.wait(0.02)
    assert job.sent(Exit)


def test_a_writer_without_which_nothing_can_be_saved_is_waited_for_as_long_as_otherwise() -> None:
    job = JobDriver(2, options=OPTIONS, units=("A", "B"))
    job.hear(Signalled(0, GENERATION, SIGTERM, computing(5)))
    settled(job, 0, 1)
    job.saved(0, 5)
    job.wait(PART_S + 1.0)
    assert not job.sent(Exit)
    job.saved(1, 5)
    assert isinstance(job.starts(), StartVerify)


def test_a_rank_that_has_to_proceed_is_waited_for_as_long_as_otherwise() -> None:
    job = JobDriver(2, options=OPTIONS, units=("A", "B"))
    job.hear(Signalled(0, GENERATION, SIGTERM, computing(5)))
    settled(job, 0)
    job.settle(1, Stand(Phase.READY, 5))
    assert job.sent(Proceed)
    job.wait(PART_S + 1.0)
    job.settle(1, computing(5))
    assert job.sent(Save)


def test_where_no_rank_ever_stops_it_is_said_at_the_end() -> None:
    job = stuck_at(JobStage.SETTLING)
    golden.says(ends(job).reason)


def test_the_control_without_a_grace_period_a_slow_save_takes_the_time_that_it_takes() -> None:
    job = settled(signalled(NONE), 0, 1, 2)
    for written in range(100):
        job.wait(29.0)
        job.progress(0, written)
    assert job.core.state is JobStage.SAVING


def test_later_signals_move_nothing() -> None:
    job = settled(signalled(), 0, 1)
    job.wait(PART_S - 1.0)
    job.hear(Signalled(2, GENERATION, SIGTERM, computing(5)))
    job.wait(1.0)
    assert job.sent(Save)


def test_what_a_person_interrupts_has_no_grace_period() -> None:
    job = settled(signalled(number=SIGINT), 0, 1)
    job.wait(PART_S)
    assert not job.sent(Save)
    job.wait(NONE.settle_timeout_s - PART_S)
    assert job.sent(Save)
