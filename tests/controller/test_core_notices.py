"""Where a job stands still, a line says who is waited for, where it is, and what to do."""

from __future__ import annotations

import pytest

from lastwords.controller.events import ControllerOptions, JobStage, Send, Watched
from lastwords.controller.incident import NOTICE_S
from lastwords.controller.loop import BEGIN_NOTICE_S, LEAVE_NOTICE_S
from lastwords.core_events import Log
from lastwords.vocabulary import DeathSource, Freeze, Left, LoopBegin, Notice, Phase, Stand, Status
from tests import golden
from tests.controller.job_driver import GENERATION, JobDriver, computing

OPTIONS = ControllerOptions()


def said(job: JobDriver) -> list[tuple[int, str]]:
    """Lines that ranks print since the last call, and which rank."""
    return [(e.rank, e.order.text) for e in job.effects if isinstance(e, Send) and isinstance(e.order, Notice)]


def own_loop(ranks: int = 3, step: int = 7, *, left: tuple[int, ...] = (1,), stuck: dict[int, str]) -> JobDriver:
    """A loop of the user's own that some ranks have left after `step`. stuck: where others wait for them."""
    job = JobDriver(ranks)
    job.begin_loop(0, 0)
    for rank in range(ranks):
        job.hear(Status(rank, GENERATION, computing(step)))
    for rank in left:
        job.hear(Left(rank, GENERATION, Stand(Phase.DONE, step)))
    job.wait(3.5)
    for rank, place in stuck.items():
        job.hear(Status(rank, GENERATION, computing(step), place))
    return job


def test_a_rank_that_has_left_alone_is_named_within_seconds_and_where_the_others_wait() -> None:
    job = own_loop(stuck={0: "train.py:41", 2: "train.py:41"})
    job.wait(LEAVE_NOTICE_S)
    ((rank, text),) = said(job)
    assert rank == 0
    golden.says(text)


def test_where_all_others_wait_in_a_collective_for_it_nobody_waits_ten_minutes() -> None:
    job = own_loop(stuck={0: "train.py:41", 2: "train.py:41"})
    job.wait(OPTIONS.leave_timeout_s)
    assert sorted(job.sent(Freeze)) == [0, 1, 2]


@pytest.mark.parametrize("stuck", [{}, {0: "train.py:41"}], ids=["nobody", "one"])
def test_ranks_with_work_of_their_own_after_the_last_step_are_waited_for(stuck: dict[int, str]) -> None:
    job = own_loop(stuck=stuck)
    job.wait(LEAVE_NOTICE_S)
    golden.says([text for _, text in said(job)])
    job.wait(OPTIONS.finish_timeout_s - LEAVE_NOTICE_S - 4.0)
    assert not job.sent(Freeze)


def test_a_rank_whose_place_changes_moves() -> None:
    job = own_loop(stuck={0: "train.py:41", 2: "train.py:41"})
    for line in range(5):
        job.wait(OPTIONS.leave_timeout_s - 1.0)
        assert not job.sent(Freeze)
        job.hear(Status(2, GENERATION, computing(7), f"evaluate.py:{line}"))
    job.wait(OPTIONS.leave_timeout_s)
    assert job.sent(Freeze)


def test_ranks_that_leave_together_are_no_news() -> None:
    job = own_loop(left=(0, 1), stuck={})
    job.hear(Left(2, GENERATION, Stand(Phase.DONE, 7)))
    assert said(job) == []
    assert job.core.state is JobStage.RELEASING
    job.wait(5.0)
    assert said(job) == []


def test_a_rank_that_does_not_come_to_the_first_step_is_named_once_and_where_it_waits() -> None:
    """It has left out its first update, say, and waits in its next backward pass for those that wait for it."""
    job = JobDriver(3)
    job.hear(Status(1, GENERATION, computing(0), "train.py:41"))
    for rank in (0, 2):
        job.hear(LoopBegin(rank, GENERATION, 0, 0, 0))
    job.wait(BEGIN_NOTICE_S)
    ((rank, text),) = said(job)
    assert rank == 0
    golden.says(text)
    job.hear(LoopBegin(0, GENERATION, 0, 0, 0))  # repeated until it is answered
    job.wait(BEGIN_NOTICE_S)
    assert said(job) == []
    job.wait(OPTIONS.start_timeout_s)
    golden.says(job.core.outcome.reason if job.core.outcome else "")


@pytest.mark.parametrize("dead", [(), (2,)], ids=["alone", "with a death"])
def test_a_rank_that_does_not_answer_is_named_and_how_long_it_is_waited_for(dead: tuple[int, ...]) -> None:
    job = JobDriver(4)
    job.begin_loop()
    job.tell(Watched(1))  # on the controller's host, which sees that it lives: stopped, say
    for rank in dead:
        job.kill(rank)
    job.kill(1, DeathSource.STREAM)
    for rank in sorted({0, 2, 3} - {*dead}):
        job.settle(rank, computing(5))
    job.wait(NOTICE_S)
    ((rank, text),) = said(job)
    assert rank == 0
    golden.says(text)
    job.wait(NOTICE_S)
    assert said(job) == []


def test_a_rank_that_is_back_in_time_is_no_news_and_neither_is_an_incident_that_ends_at_once() -> None:
    job = JobDriver(2)
    job.begin_loop()
    job.kill(1, DeathSource.STREAM)
    job.hear(Status(1, GENERATION, computing(1)))
    assert job.core.state is JobStage.WATCHING
    job.wait(NOTICE_S)
    assert said(job) == []


def test_where_only_the_late_one_can_hear_it_it_says_so_itself() -> None:
    job = JobDriver(2)
    job.begin_loop()
    job.kill(1)
    job.wait(NOTICE_S)
    ((rank, _),) = said(job)
    assert rank == 0
    assert any(isinstance(effect, Log) for effect in job.effects)
