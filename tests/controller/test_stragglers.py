"""Ranks that are persistently slower than their peers: who is named, when, and when not any more."""

from __future__ import annotations

import random

import pytest

from lastwords.controller.events import ControllerOptions, JobStage
from lastwords.controller.loop import LOOKS, NEW_STEPS, SLOWER, SLOWER_S
from lastwords.core_events import Log
from lastwords.vocabulary import Left, Notice, Phase, Stand, Status
from tests import golden
from tests.controller.job_driver import GENERATION, JobDriver, computing

NOTICE_S = ControllerOptions().straggler_notice_s
LOOK_S = NOTICE_S / LOOKS


class Job(JobDriver):
    """A job that trains; `train` tells what a step takes each rank while a look's time passes."""

    step = 0

    def train(self, *work_s: float, looks: int = 1, steps: int = NEW_STEPS) -> list[tuple[int, str]]:
        """Lines that ranks print meanwhile, and which rank."""
        said: list[tuple[int, str]] = []
        for _ in range(looks):
            for _ in range(steps):
                self.step += 1
                for rank, one_s in enumerate(work_s):
                    self.hear(Status(rank, GENERATION, computing(self.step), work_s=one_s))
                self.wait(LOOK_S / steps)
                said += self.lines()
        return said

    def lines(self) -> list[tuple[int, str]]:
        notices = {rank: notice.text for rank, notice in self.sent(Notice).items()}
        assert [*notices.values()] == [one.text for one in self.effects if isinstance(one, Log)]
        return [*notices.items()]


def training(ranks: int = 4, *, units: tuple[str, ...] = (), hosts: str = "") -> Job:
    job = Job(ranks, units=units, hosts=hosts)
    job.begin_loop(0, 0)
    job.effects = []
    return job


@pytest.mark.parametrize("slow", range(4))
def test_a_slow_rank_is_named_once_with_its_host_and_by_how_much(slow: int) -> None:
    job = training(hosts="aabb")
    works_s = [0.010, 0.011, 0.012, 0.011]
    works_s[slow] = 0.041
    assert job.train(*works_s, looks=LOOKS - 1) == []
    ((teller, text),) = job.train(*works_s, looks=1)
    golden.says(text)
    assert teller != slow, "another rank says it"
    assert list(job.core.slower) == [slow]
    assert job.core.slower[slow] == pytest.approx(0.041 / 0.011 - 1)
    assert job.train(*works_s, looks=20) == [], "once"
    assert job.core.state is JobStage.WATCHING, "nothing is done about it"


def test_ranks_that_are_all_alike_are_never_named() -> None:
    job, luck = training(8), random.Random(5)
    for _ in range(200):
        assert job.train(*(0.1 * luck.uniform(0.95, 1.05) for _ in range(8))) == []
    assert not job.core.slower


@pytest.mark.parametrize("more_s", [0.9 * SLOWER * 0.1, 1.1 * SLOWER * 0.1])
def test_the_share_decides_where_steps_are_long(more_s: float) -> None:
    job = training()
    job.train(0.1, 0.1, 0.1 + more_s, 0.1, looks=2 * LOOKS)
    assert bool(job.core.slower) is (more_s > SLOWER * 0.1)


@pytest.mark.parametrize("more_s", [0.9 * SLOWER_S, 1.1 * SLOWER_S])
def test_where_steps_are_short_a_share_of_them_is_nothing(more_s: float) -> None:
    job = training()
    job.train(0.001, 0.001, 0.001 + more_s, 0.001, looks=2 * LOOKS)
    assert bool(job.core.slower) is (more_s > SLOWER_S)


def test_two_ranks_are_peers_and_the_slower_one_is_named() -> None:
    job = training(2)
    golden.says([text for _, text in job.train(0.02, 0.03, looks=LOOKS)])
    assert list(job.core.slower) == [1]


def test_several_are_named_in_one_line() -> None:
    job = training(5, hosts="aabbb")
    golden.says([text for _, text in job.train(0.02, 0.02, 2.5, 0.02, 1.5, looks=LOOKS)])


def test_of_half_the_ranks_the_slow_half_is_named() -> None:
    job = training(8, hosts="aaaabbbb")
    job.train(*[0.1] * 4, *[0.15] * 4, looks=LOOKS)
    assert sorted(job.core.slower) == [4, 5, 6, 7]


def test_stages_of_a_pipeline_are_compared_with_their_own_replicas() -> None:
    """Stage 1 has five times as much to do, which is nobody's fault; one of its replicas is slower still."""
    job = training(6, units=("s0", "s0", "s0", "s1", "s1", "s1"))
    assert job.train(0.1, 0.1, 0.1, 0.5, 0.5, 0.5, looks=3 * LOOKS) == []
    ((_, text),) = job.train(0.1, 0.1, 0.1, 0.5, 0.7, 0.5, looks=LOOKS)
    golden.says(text)
    assert list(job.core.slower) == [4]


def test_the_control_compared_with_all_ranks_the_second_stage_would_be_named() -> None:
    job = training(6, units=("s",) * 6)
    job.train(0.1, 0.1, 0.1, 0.5, 0.5, 0.5, looks=LOOKS)
    assert sorted(job.core.slower) == [3, 4, 5]


def test_a_rank_without_peers_is_never_named() -> None:
    job = training(3, units=("a", "b", "c"))
    assert job.train(0.1, 9.0, 0.1, looks=3 * LOOKS) == []


def test_a_rank_that_is_slow_now_and_then_is_not_named() -> None:
    job = training()
    for _ in range(20):
        assert job.train(0.1, 0.1, 0.9, 0.1, looks=LOOKS - 1) == []
        assert job.train(0.1, 0.1, 0.1, 0.1) == []
    assert not job.core.slower


def test_it_is_told_when_the_rank_is_as_fast_as_the_others_again() -> None:
    job = training()
    job.train(0.1, 0.1, 0.2, 0.1, looks=LOOKS)
    assert job.train(0.1, 0.1, 0.1, 0.1, looks=LOOKS - 1) == []
    assert list(job.core.slower) == [2]
    golden.says([text for _, text in job.train(0.1, 0.1, 0.1, 0.1)])
    assert not job.core.slower
    golden.says([text for _, text in job.train(0.3, 0.1, 0.1, 0.1, looks=LOOKS)])


def test_around_the_limit_nothing_is_told_twice() -> None:
    """What names a rank is twice as far from the others as what takes that back."""
    job, said = training(), []
    for look in range(300):
        said += job.train(0.1, 0.1, 0.123 if look % 50 < 25 else 0.117, 0.1)
    assert len(said) == 1
    assert list(job.core.slower) == [2]


def test_by_how_much_follows_what_the_rank_says() -> None:
    job = training()
    job.train(0.1, 0.1, 0.2, 0.1, looks=LOOKS)
    job.train(0.1, 0.1, 0.4, 0.1)
    assert job.core.slower[2] == pytest.approx(3.0)


def test_before_anything_is_known_nobody_is_named() -> None:
    """The first steps: ranks say 0.0 until some have ended, and may do so at different moments."""
    job = training()
    assert job.train(0.0, 0.0, 0.0, 0.0, looks=2 * LOOKS) == []
    assert job.core.deadline_s is None or job.core.deadline_s > job.now_s
    assert job.train(0.0, 0.0, 9.0, 0.0, looks=2 * LOOKS) == []
    assert job.train(0.1, 0.0, 0.1, 0.1, looks=2 * LOOKS) == []


def test_a_job_that_stands_still_is_not_looked_at() -> None:
    """A validation, or a checkpoint of the user's: the same numbers say nothing new."""
    job = training()
    job.train(0.1, 0.1, 0.9, 0.1, looks=LOOKS - 1)
    for line in range(20 * LOOKS):
        for rank, work_s in enumerate((0.1, 0.1, 0.9, 0.1)):
            job.hear(Status(rank, GENERATION, computing(job.step), "", f"evaluate.py:{line}", work_s))
        job.wait(LOOK_S)
        assert not job.core.slower
    job.train(0.1, 0.1, 0.9, 0.1)
    assert list(job.core.slower) == [2]


def test_long_steps_are_waited_for() -> None:
    job = training()
    looks = (LOOKS - 1) * NEW_STEPS
    assert job.train(5.0, 5.0, 9.0, 5.0, looks=looks, steps=1) == []
    assert len(job.train(5.0, 5.0, 9.0, 5.0, looks=1, steps=1)) == 1


def test_the_dead_and_the_silent_are_nobodys_peers() -> None:
    job = training(3)
    job.train(0.1, 0.3, 0.1, looks=1)
    job.kill(1)
    job.wait(60.0)
    assert not job.core.slower


def test_at_the_end_of_the_loop_nobody_is_named() -> None:
    job = training()
    job.train(0.1, 0.1, 0.9, 0.1, looks=LOOKS - 1)
    job.hear(Left(0, GENERATION, Stand(Phase.DONE, job.step)))
    job.train(0.1, 0.1, 0.9, 0.1, looks=LOOKS)
    assert not job.core.slower


def test_a_false_alarm_in_between_does_no_harm() -> None:
    job = training()
    job.train(0.1, 0.1, 0.9, 0.1, looks=1)
    job.close(3)
    for rank in range(3):
        job.settle(rank, computing(job.step))
    job.hello(3, stand=computing(job.step))
    job.settle(3, computing(job.step))
    assert job.core.state is JobStage.WATCHING
    job.train(0.1, 0.1, 0.9, 0.1, looks=LOOKS)
    assert list(job.core.slower) == [2]


def test_among_thousands_of_ranks_the_slow_one_is_found() -> None:
    ranks = 4096
    job = training(ranks, units=tuple(f"stage-{rank % 8}" for rank in range(ranks)))
    for rank in range(ranks):
        job.hear(Status(rank, GENERATION, computing(1), work_s=0.1 * (1 + rank % 8) + 0.001 * (rank % 7)))
    for step in range(1, LOOKS * NEW_STEPS, NEW_STEPS):
        job.hear(Status(711, GENERATION, computing(step), work_s=1.0))
        job.wait(LOOK_S)
    assert list(job.core.slower) == [711]
