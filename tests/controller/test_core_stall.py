"""Ranks that are silent and seen to live: stopped, frozen, in a debugger. A false alarm at most."""

from __future__ import annotations

import pytest

from lastwords.controller.events import ControllerOptions, JobStage, Watched
from lastwords.vocabulary import DeathSource, Left, PeerDied, Raised, Resume, Save
from tests import golden
from tests.controller.job_driver import GENERATION, JobDriver, computing


def watched() -> JobDriver:
    """Rank 1's process is watched, and its session breaks (SIGSTOP, a frozen cgroup)."""
    job = JobDriver(3)
    job.tell(Watched(1))
    job.close(1)
    for rank in (0, 2):
        job.settle(rank, computing(5))
    return job


@pytest.mark.parametrize("seconds", [6.0, 60.0, 299.0])
def test_a_rank_that_is_seen_to_live_is_a_false_alarm_however_long_it_is_silent(seconds: float) -> None:
    job = watched()
    job.wait(seconds)
    assert job.core.state is JobStage.SETTLING
    job.hello(1)
    assert job.core.state is JobStage.WATCHING
    assert sorted(job.sent(Resume)) == [0, 1, 2]


def elsewhere(options: ControllerOptions | None = None) -> JobDriver:
    """Rank 1 is on another host, where nobody watches it, and its session breaks."""
    job = JobDriver(3, hosts="aba", options=options)
    job.close(1)
    for rank in (0, 2):
        job.settle(rank, computing(5))
    return job


@pytest.mark.parametrize("seconds", [2.1, 6.0, 9.9])
def test_silence_without_proof_is_a_false_alarm_on_every_host(seconds: float) -> None:
    job = elsewhere()
    job.wait(seconds)
    assert job.core.state is JobStage.SETTLING
    job.hello(1)
    assert job.core.state is JobStage.WATCHING


def test_the_control_a_rank_of_which_nobody_knows_anything_is_dead_soon() -> None:
    job = elsewhere()
    job.wait(10.1)
    assert job.core.state is JobStage.SAVING


def test_how_long_silence_may_be_can_be_set() -> None:
    job = elsewhere(ControllerOptions(silence_timeout_s=2.0))
    job.wait(2.1)
    assert job.core.state is JobStage.SAVING


def test_a_death_that_another_rank_of_the_host_has_seen_is_not_waited_for() -> None:
    job = elsewhere()
    job.hear(PeerDied(2, GENERATION, 1, DeathSource.ROBUST_MUTEX))
    assert job.core.state is JobStage.SAVING


def a_collective_fails(job: JobDriver) -> None:
    job.hear(Raised(0, GENERATION, "connection closed by peer", True, computing(5)))


def test_silence_beside_a_collective_that_has_failed_is_short() -> None:
    """Nobody can go on, so nothing is won by waiting for a false alarm."""
    job = elsewhere()
    job.wait(0.5)
    a_collective_fails(job)
    job.wait(1.4)
    assert job.core.state is JobStage.SETTLING
    job.wait(0.2)
    assert job.core.state is JobStage.SAVING


def test_silence_that_has_lasted_is_a_death_when_a_collective_fails() -> None:
    job = elsewhere()
    job.wait(5.0)
    a_collective_fails(job)
    job.wait(0.0)
    assert job.core.state is JobStage.SAVING


def test_a_rank_that_is_silent_when_all_have_left_does_not_hold_the_controller_up() -> None:
    job = JobDriver(2)
    for rank in range(2):
        job.hear(Left(rank, GENERATION, computing(5)))
    job.close(0)
    job.kill(0)
    job.close(1)
    job.wait(2.1)
    assert job.stops() or job.core.state is JobStage.STOPPED


def test_a_rank_that_is_seen_to_live_is_not_waited_for_for_ever() -> None:
    job = watched()
    job.wait(300.1)
    assert sorted(job.sent(Save)) == [0]


def test_once_somebody_has_died_a_silent_rank_has_the_time_to_settle_and_no_more() -> None:
    job = watched()
    job.wait(100.0)
    job.kill(2)
    job.wait(14.9)
    assert job.core.state is JobStage.SETTLING
    job.wait(0.2)
    assert sorted(job.sent(Save)) == [0]
    golden.says(job.logs())


def test_a_rank_that_falls_silent_after_it_has_settled_is_not_waited_for_for_ever() -> None:
    job = JobDriver(4)
    job.tell(Watched(1))
    job.kill(3)
    job.settle(1, computing(5))
    job.close(1)
    for rank in (0, 2):
        job.settle(rank, computing(5))
    assert job.core.state is JobStage.SETTLING
    job.wait(15.1)
    assert job.core.state is JobStage.SAVING


def test_the_death_of_a_watched_rank_is_known_at_once_also_while_it_is_silent() -> None:
    job = watched()
    job.wait(3.0)
    job.kill(1)
    assert sorted(job.sent(Save)) == [0]
