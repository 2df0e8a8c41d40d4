"""Threads where the system has none left."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading

import pytest

from lastwords import threads
from lastwords.errors import UnavailableError, is_shortage
from tests import golden
from tests.shortage import TOO_LARGE, no_threads

WAIT_S = 30.0


def in_reserve() -> int:
    return sum(thread.name == "lastwords-reserve" for thread in threading.enumerate())


def test_a_thread_that_cannot_be_started_is_a_shortage() -> None:
    with no_threads(), golden.raises(UnavailableError) as caught:
        threads.start(lambda: None, name="lastwords-test")
    assert is_shortage(caught.value)


def test_another_error_than_a_shortage_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shutdown"), threads.starting("lastwords-test"):
        raise RuntimeError("can't create new thread at interpreter shutdown")


def test_whoever_may_wait_waits_for_the_end_of_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_s: list[float] = []

    def sleep(pause_s: float) -> None:
        pauses_s.append(pause_s)
        if len(pauses_s) == 3:
            threading.stack_size(0)

    monkeypatch.setattr(threads.time, "sleep", sleep)
    ran = threading.Event()
    with no_threads():
        threads.start_patiently(ran.set, name="lastwords-test")
    assert ran.wait(WAIT_S)
    assert pauses_s == [0.1, 0.25, 0.5]


def test_whoever_may_wait_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_s: list[float] = []
    monkeypatch.setattr(threads.time, "sleep", pauses_s.append)
    with no_threads(), pytest.raises(UnavailableError):
        threads.start_patiently(lambda: None, name="lastwords-test")
    assert 5.0 < sum(pauses_s) < 10.0


def test_threads_in_reserve_do_what_no_other_thread_can_be_had_for() -> None:
    threads.reserve(2)
    done: queue.Queue[str] = queue.Queue()
    go_on = threading.Event()

    def work() -> None:
        go_on.wait(WAIT_S)
        done.put(threading.current_thread().name)

    with no_threads():
        for _ in range(2):
            threads.run(work, name="lastwords-test")
        with pytest.raises(UnavailableError):
            threads.run(work, name="lastwords-test")
        go_on.set()
        assert [done.get(timeout=WAIT_S) for _ in range(2)] == ["lastwords-reserve"] * 2
        while len(threads._reserve._idle) < 2:
            pass
        threads.run(work, name="lastwords-test")  # they are there again
        assert done.get(timeout=WAIT_S) == "lastwords-reserve"
    threads.run(work, name="lastwords-test")
    assert done.get(timeout=WAIT_S) == "lastwords-test"
    threads.release(2)


def test_a_task_that_fails_does_not_cost_its_thread(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("a mistake")

    threads.reserve(1)
    ran = threading.Event()
    with no_threads():
        threads.run(fail, name="lastwords-test")
        while not threads._reserve._idle:
            pass
        threads.run(ran.set, name="lastwords-test")
        assert ran.wait(WAIT_S)
    threads.release(1)
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_released_threads_end_those_with_a_task_after_it() -> None:
    before = in_reserve()
    threads.reserve(2)
    busy, go_on = threading.Event(), threading.Event()

    def work() -> None:
        busy.set()
        go_on.wait(WAIT_S)

    with no_threads():
        threads.run(work, name="lastwords-test")
    assert busy.wait(WAIT_S)
    mine = [thread for thread in threading.enumerate() if thread.name == "lastwords-reserve"]
    threads.release(2)
    go_on.set()
    for thread in mine[before:]:
        thread.join(WAIT_S)
    assert in_reserve() == before


def test_a_reserve_that_cannot_be_had_leaves_none_of_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = in_reserve()
    monkeypatch.setattr(threads.time, "sleep", lambda pause_s: None)
    started: list[threading.Thread] = []
    start = threads.start_patiently

    def once(*args: object, name: str) -> threading.Thread:
        if started:
            threading.stack_size(TOO_LARGE)
        started.append(start(*args, name=name))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(threads, "start_patiently", once)
    try:
        with pytest.raises(UnavailableError):
            threads.reserve(2)
    finally:
        threading.stack_size(0)
    started[0].join(WAIT_S)
    assert in_reserve() == before


FORKED = f"""
import os, threading
from lastwords import threads
from lastwords.errors import UnavailableError
threads.reserve(1)
pid = os.fork()
if pid == 0:
    threading.stack_size({TOO_LARGE})
    try:
        threads.run(lambda: None, name="lastwords-test")
    except UnavailableError:
        os._exit(7)
    os._exit(1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_forked_child_does_not_count_on_its_parent_s_reserve() -> None:
    found = subprocess.run([sys.executable, "-c", FORKED], env=os.environ, timeout=WAIT_S, check=False)
    assert found.returncode == 7
