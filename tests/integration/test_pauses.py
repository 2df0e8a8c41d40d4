"""SIGSTOP: what is silent is not dead, and a pause of one's own is nobody's silence."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastwords import clock
from lastwords.controller.takeover import query_state
from lastwords.processor.agent import Agent
from lastwords.processor.core import ProcessorCore, ProcessorOptions
from lastwords.processor.departure import EXIT_NOT_SAVED, Departure
from lastwords.vocabulary import LoopBegin, LoopGo, Welcome
from tests.integration.puppet import WAIT_S, PuppetProcess
from tests.integration.test_controller_shell import TOKEN, Job
from tests.patience import until

pytestmark = pytest.mark.process

QUICK = {"keepalive_time_s": 0.2, "keepalive_timeout_s": 2.0}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with contextlib.closing(Job(tmp_path / "ckpt", f"pauses-{os.getpid()}-{time.monotonic_ns() % 10**6}")) as job:
        yield job


def elsewhere(job: Job) -> list[PuppetProcess]:
    """Three ranks of a host that is not the controller's: it knows them by their sessions alone."""
    ranks = [job.puppet_process(rank, host="another-host", watching=True) for rank in range(3)]
    for rank in ranks:
        rank.begin_call("begin")
    for rank in ranks:
        rank._results.get(timeout=WAIT_S)
    for rank in ranks:
        rank.call("await_go")
        rank.call("step", 2)
    return ranks


def stopped(job: Job, rank: PuppetProcess) -> int:
    """Stop a rank, and wait until the controller knows."""
    os.kill(rank.process.pid, signal.SIGSTOP)
    until(lambda: query_state(job.address, TOKEN).incident == 1)
    return rank.process.pid


@pytest.mark.thorough
def test_a_stopped_rank_of_another_host_is_a_false_alarm_far_beyond_lost_confirm(job: Job) -> None:
    job.start(silence_timeout_s=10.0, lost_confirm_s=0.2, **QUICK)
    ranks = elsewhere(job)
    pid = stopped(job, ranks[1])
    time.sleep(1.5)
    os.kill(pid, signal.SIGCONT)
    assert job.incident()["outcome"] == "FALSE_ALARM"
    for rank in ranks:
        rank.call("await_resume", 1)
        rank.call("step", 1)


def test_the_control_the_same_rank_is_given_up_where_silence_is_given_less(job: Job) -> None:
    job.start(silence_timeout_s=0.2, lost_confirm_s=0.2, **QUICK)
    ranks = elsewhere(job)
    pid = stopped(job, ranks[1])
    assert job.incident()["outcome"] == "SAVED"
    os.kill(pid, signal.SIGCONT)


# ---------------------------------------------------------------------- a pause of one's own


def test_a_controller_that_was_stopped_blames_nobody_for_its_pause(job: Job) -> None:
    """Rank 1 is silent; while the controller is stopped far beyond its deadline, rank 1 comes back."""
    handle = job.start(silence_timeout_s=2.5, lost_confirm_s=2.5, **QUICK)
    ranks = elsewhere(job)
    pid = stopped(job, ranks[1])
    os.kill(handle.pid, signal.SIGSTOP)
    try:
        os.kill(pid, signal.SIGCONT)
        time.sleep(3.0)
    finally:
        os.kill(handle.pid, signal.SIGCONT)
    assert job.incident()["outcome"] == "FALSE_ALARM"


class _Nobody:
    """A session that delivers nothing."""

    def __init__(self) -> None:
        self.asked_to_begin = threading.Event()

    def ask_if_silent(self, asks: bool, now_s: float) -> None:
        pass

    def send(self, report: Any) -> None:
        if isinstance(report, LoopBegin):
            self.asked_to_begin.set()

    def close(self, timeout_s: float) -> None:
        pass


class _Watched(ProcessorCore):
    """Counts how often its shell asks when it wants to be called; that calls it where it is time."""

    looks = 0

    @property
    def deadline_s(self) -> float | None:
        self.looks += 1
        return super().deadline_s

    def await_looks(self, count: int) -> None:
        enough = self.looks + count
        until(lambda: self.looks >= enough)


def wait_for_a_controller(own_time: bool) -> None:
    """A rank that waits for the others when its session breaks, and comes back once it has been told to.

    It has looked at the clock by then. One that gives up has decided so, and nothing that comes later changes it.
    """
    if not own_time:
        clock.OwnTime.at = lambda self, now_mono_s: now_mono_s  # type: ignore[method-assign]
    unused: Any = None
    departure = Departure(0)
    core = _Watched(0, 1, 0, ProcessorOptions(controller_lost_s=4.0))
    agent = Agent(core, hello=unused, saver=unused, departure=departure)
    session = _Nobody()
    agent.start(session)
    agent.on_session_up()
    agent.on_order(Welcome(1))

    def course() -> None:
        session.asked_to_begin.wait()
        agent.on_session_down()
        print("down", flush=True)
        sys.stdin.readline()
        core.await_looks(4)  # two in each pass of the thread that looks
        if not core.leaving:
            agent.on_session_up()
            agent.on_order(LoopGo(1))

    threading.Thread(target=course, daemon=True).start()
    agent.begin_loop(10, 1, 0)
    print("trains", flush=True)
    os._exit(0)


def a_stop_of_its_own(own_time: bool) -> int:
    """Exit code of a rank that was stopped for longer than it would wait for its controller."""
    code = f"from tests.integration.test_pauses import wait_for_a_controller; wait_for_a_controller({own_time})"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        assert rank.stdout.readline() == "down\n"
        os.kill(rank.pid, signal.SIGSTOP)
        rank.stdin.write("up\n")
        rank.stdin.flush()
        time.sleep(4.5)
        os.kill(rank.pid, signal.SIGCONT)
        return rank.wait(WAIT_S)


def test_a_rank_that_was_stopped_does_not_blame_its_controller_for_the_pause() -> None:
    assert a_stop_of_its_own(own_time=True) == 0


@pytest.mark.thorough
def test_the_control_by_the_clock_on_the_wall_it_gives_its_controller_up() -> None:
    assert a_stop_of_its_own(own_time=False) == EXIT_NOT_SAVED
