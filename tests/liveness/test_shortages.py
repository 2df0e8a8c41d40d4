"""A process that cannot be watched for lack of a thread is watched later, and in the other way until then."""

from __future__ import annotations

import os
import queue
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastwords.errors import FormatError, UnavailableError, is_shortage
from lastwords.liveness import process_id
from lastwords.liveness import watch as watch_module
from lastwords.liveness.pidfd import PidWatcher
from lastwords.liveness.robust_mutex import LifeLine, watch
from lastwords.liveness.watch import HostWatch
from lastwords.vocabulary import DeathSource
from tests import golden
from tests.shortage import no_descriptors, no_threads, open_files

WAIT_S = 30.0


@pytest.fixture
def line() -> Iterator[LifeLine]:
    directory = Path(f"/dev/shm/test-shortages-{secrets.token_hex(4)}")
    directory.mkdir()
    line = LifeLine.create(directory / "rank_0.life")
    yield line
    line.release()
    shutil.rmtree(directory)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "AGAIN_S", 0.01)


def test_a_life_line_that_no_thread_can_watch_is_a_shortage_and_leaves_no_mapping(line: LifeLine) -> None:
    before = Path("/proc/self/maps").read_text().count(str(line.path))
    with no_threads(), pytest.raises(UnavailableError) as caught:
        watch(line.path, lambda kind: None)
    assert is_shortage(caught.value)
    assert Path("/proc/self/maps").read_text().count(str(line.path)) == before


def test_a_life_line_is_watched_as_soon_as_there_is_a_thread_for_it(line: LifeLine) -> None:
    released: queue.Queue[int] = queue.Queue()
    hosts = HostWatch(lambda *death: None, on_release=released.put)
    hosts.start()
    with no_threads():
        assert hosts.add(0, line.path, process_id.this_process("x")) == (DeathSource.PIDFD,)
    line.release()  # which the pidfd says nothing of
    assert released.get(timeout=WAIT_S) == 0
    hosts.stop()


def test_a_shortage_is_said_once_and_once_when_it_is_over(line: LifeLine, caplog: pytest.LogCaptureFixture) -> None:
    hosts = HostWatch(lambda *death: None)
    hosts.start()
    here = process_id.this_process("x")
    passed: queue.Queue[int] = queue.Queue()
    with no_threads():
        for _ in range(3):  # as who owns the watch tries again
            hosts.add(0, line.path, here)
        hosts.later(0.05, lambda: passed.put(1))
        assert passed.get(timeout=WAIT_S) == 1
    hosts.later(0.2, lambda: passed.put(2))  # after the next try
    assert passed.get(timeout=WAIT_S) == 2
    golden.says("\n".join(record.getMessage() for record in caplog.records).replace(str(os.getpid()), "PID"))
    hosts.stop()


@pytest.mark.parametrize("later", [False, True])
def test_a_reason_that_lasts_is_said_after_a_shortage(
    line: LifeLine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    """later: whoever owns the watch does not try again; the watch itself does, and gives that up."""
    hosts = HostWatch(lambda *death: None)
    hosts.start()
    here = process_id.this_process("x")
    passed: queue.Queue[int] = queue.Queue()

    def is_no_life_line(*_: object, **__: object) -> None:
        raise FormatError("rank_0.life is no life line")

    with no_threads():
        hosts.add(0, line.path, here)
        if not later:
            hosts.remove(0)
        monkeypatch.setattr(watch_module, "watch", is_no_life_line)
    for _ in range(0 if later else 2):
        hosts.add(0, line.path, here)
    hosts.later(0.2, lambda: passed.put(1))  # after the next try
    assert passed.get(timeout=WAIT_S) == 1
    golden.says("\n".join(record.getMessage() for record in caplog.records).replace(str(os.getpid()), "PID"))
    hosts.stop()


def test_a_rank_that_is_removed_in_a_shortage_is_not_watched_after_it(line: LifeLine) -> None:
    released: queue.Queue[int] = queue.Queue()
    hosts = HostWatch(lambda *death: None, on_release=released.put)
    hosts.start()
    with no_threads():
        hosts.add(0, line.path, process_id.this_process("x"))
        hosts.remove(0)
    later: queue.Queue[int] = queue.Queue()
    hosts.later(0.05, lambda: later.put(1))
    assert later.get(timeout=WAIT_S) == 1
    line.release()
    hosts.stop()
    assert released.empty()


def test_what_cannot_be_watched_at_all_in_a_shortage_says_that_it_is_one(line: LifeLine) -> None:
    hosts = HostWatch(lambda *death: None)
    hosts.start()
    here = process_id.this_process("x")
    with golden.raises(UnavailableError) as caught, no_descriptors():
        hosts.add(0, Path("/dev/shm/rank_0.life"), here)
    assert is_shortage(caught.value)
    hosts.stop()


@pytest.mark.ci
def test_a_pid_watcher_without_a_thread_takes_a_process_later() -> None:
    watcher = PidWatcher()
    before = open_files()
    with no_threads(), pytest.raises(UnavailableError) as caught:
        watcher.add(process_id.this_process("x"), lambda: None)
    assert is_shortage(caught.value)
    assert open_files() <= before
    watcher.add(process_id.this_process("x"), lambda: None)
    watcher.stop()


def test_a_pid_watcher_without_descriptors_is_a_shortage() -> None:
    with golden.raises(UnavailableError) as caught, no_descriptors():
        PidWatcher()
    assert is_shortage(caught.value)


def test_a_call_back_that_fails_does_not_end_the_watcher(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("a mistake")

    watcher = PidWatcher()
    watcher.start()
    called: queue.Queue[int] = queue.Queue()
    watcher.later(0.0, fail)
    watcher.later(0.0, lambda: called.put(1))
    assert called.get(timeout=WAIT_S) == 1
    watcher.stop()
    assert "a mistake" in caplog.text
