"""Life lines within one process: what the file is, who may read it, a clean end. For deaths see tests/integration."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lastwords.errors import FormatError, StorageError, UnavailableError
from lastwords.liveness import process_id, robust_mutex
from lastwords.liveness.pidfd import PidWatcher
from lastwords.liveness.robust_mutex import EndKind, LifeLine, state_of, watch
from lastwords.liveness.watch import HostWatch
from lastwords.vocabulary import DeathSource
from tests import golden
from tests.shortage import open_files

WAIT_S = 20.0


class Ends:
    """Collects call-backs and lets a test wait for them."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self._condition = threading.Condition()

    def __call__(self, *what: object) -> None:
        with self._condition:
            self.seen.append(what[0] if len(what) == 1 else what)
            self._condition.notify_all()

    def wait(self, count: int) -> list[object]:
        with self._condition:
            assert self._condition.wait_for(lambda: len(self.seen) >= count, WAIT_S), f"only {self.seen}"
            return list(self.seen)


@pytest.fixture
def line(tmp_path: Path) -> Iterator[LifeLine]:
    made = LifeLine.create(tmp_path / "rank_0.life")
    yield made
    made.release()


def test_the_file_appears_under_its_name_only(line: LifeLine) -> None:
    assert [entry.name for entry in line.path.parent.iterdir()] == ["rank_0.life"]
    assert line.path.stat().st_mode & 0o777 == 0o600


def test_a_held_life_line_has_not_ended(line: LifeLine) -> None:
    assert state_of(line.path) is None
    assert state_of(line.path, process=process_id.this_process("x")) is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_before_it_holds_the_lock_keeps_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robust_mutex, "_FUTEX_TID_MASK", None)
    refused: list[UnavailableError] = []

    def create() -> None:
        try:
            LifeLine.create(tmp_path / "rank_0.life")
        except UnavailableError as error:
            refused.append(error)

    creating = threading.Thread(target=create, daemon=True)
    creating.start()
    creating.join(WAIT_S)
    assert len(refused) == 1


def test_release_tells_every_watcher_that_it_was_no_death(line: LifeLine) -> None:
    ends = Ends()
    watches = [watch(line.path, ends) for _ in range(5)]
    line.release()
    assert ends.wait(5) == [EndKind.CLEAN] * 5
    for each in watches:
        each.stop()
    assert state_of(line.path) is EndKind.CLEAN


def test_a_watcher_that_comes_after_the_release_is_told_at_once(line: LifeLine) -> None:
    line.release()
    ends = Ends()
    watch(line.path, ends)
    assert ends.wait(1) == [EndKind.CLEAN]


def test_release_may_be_repeated(line: LifeLine) -> None:
    line.release()
    line.release()


def test_a_stopped_watch_does_not_call_back(line: LifeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust_mutex, "_RECHECK_S", 3600.0)  # stop() wakes the thread, it does not wait for it
    ends, others = Ends(), Ends()
    stopped, running = watch(line.path, ends), watch(line.path, others)
    stopped.stop()
    stopped.stop()
    line.release()
    assert others.wait(1) == [EndKind.CLEAN]
    running.stop()
    assert ends.seen == []


def test_a_call_back_may_stop_its_own_watch(line: LifeLine) -> None:
    ends = Ends()
    watches: list[robust_mutex.LifeWatch] = []
    ready = threading.Event()

    def on_end(kind: EndKind) -> None:
        ready.wait(WAIT_S)
        watches[0].stop()
        ends(kind)

    watches.append(watch(line.path, on_end))
    ready.set()
    line.release()
    assert ends.wait(1) == [EndKind.CLEAN]


def test_a_missing_file_is_worth_a_retry(tmp_path: Path) -> None:
    with golden.raises(UnavailableError):
        watch(tmp_path / "rank_1.life", Ends())


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\0" * 4096, b"LWLIFE\0\1" + b"\xff" * 4088])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rank_1.life"
    path.write_bytes(content)
    with pytest.raises(FormatError):
        watch(path, Ends())


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "rank_1.life")
    with pytest.raises(FormatError):
        watch(tmp_path / "rank_1.life", Ends())


def test_a_link_is_refused(line: LifeLine, tmp_path: Path) -> None:
    link = tmp_path / "rank_7.life"
    link.symlink_to(line.path)
    with golden.raises(Exception):
        watch(link, Ends())


def test_a_life_line_of_another_process_is_refused(line: LifeLine) -> None:
    other = dataclasses.replace(process_id.this_process("x"), start_ticks=1)
    with golden.raises(UnavailableError):
        watch(line.path, Ends(), process=other)


def test_a_directory_that_does_not_exist_is_a_storage_error(tmp_path: Path) -> None:
    with golden.raises(StorageError):
        LifeLine.create(tmp_path / "nowhere" / "rank_0.life")


def test_an_unknown_machine_is_said_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust_mutex.platform, "machine", lambda: "vax")
    with pytest.raises(UnavailableError, match="vax"):
        LifeLine.create(tmp_path / "rank_0.life")


def test_a_process_with_another_start_time_has_ended_already() -> None:
    ends = Ends()
    gone = dataclasses.replace(process_id.this_process("x"), start_ticks=1)
    watcher = PidWatcher()
    watcher.add(gone, lambda: ends("gone"))
    assert ends.wait(1) == ["gone"]
    watcher.stop()


def test_a_pid_watch_is_stopped_and_removed_without_a_call_back() -> None:
    ends = Ends()
    watcher = PidWatcher()
    token = watcher.add(process_id.this_process("x"), lambda: ends("never"))
    watcher.remove(token)
    watcher.remove(token)
    watcher.add(process_id.this_process("x"), lambda: ends("never"))
    watcher.stop()
    watcher.stop()
    assert ends.seen == []


def test_a_host_watch_says_which_sources_it_has(line: LifeLine, tmp_path: Path) -> None:
    hosts = HostWatch(Ends())
    here = process_id.this_process("x")
    assert hosts.add(0, line.path, here) == (DeathSource.ROBUST_MUTEX, DeathSource.PIDFD)
    assert hosts.add(1, None, here) == (DeathSource.PIDFD,)
    assert hosts.add(2, tmp_path / "missing.life", here) == (DeathSource.PIDFD,)
    hosts.stop()


def test_a_host_watch_takes_a_clean_release_for_no_death(line: LifeLine) -> None:
    ends, told = Ends(), Ends()
    hosts = HostWatch(ends)
    hosts.add(0, line.path, process_id.this_process("x"))
    gone = dataclasses.replace(process_id.this_process("x"), start_ticks=1)
    also = watch(line.path, told)
    line.release()
    told.wait(1)
    hosts.add(1, None, gone)  # a death that comes later is reported, so the release before it was not
    assert [entry[:2] for entry in ends.wait(1)] == [(1, DeathSource.PIDFD)]  # type: ignore[index]
    also.stop()
    hosts.stop()


def test_a_stale_life_line_of_a_dead_process_does_not_kill_the_new_one(line: LifeLine) -> None:
    # The rank was restarted, and the file still is the old process's, which has ended.
    line.release()
    ends = Ends()
    hosts = HostWatch(ends)
    newcomer = dataclasses.replace(process_id.this_process("x"), pid=1, start_ticks=process_id.start_ticks(1) or 0)
    assert hosts.add(0, line.path, newcomer) == (DeathSource.PIDFD,)
    hosts.stop()
    assert ends.seen == []


def test_a_removed_rank_is_not_reported(line: LifeLine) -> None:
    ends = Ends()
    hosts = HostWatch(ends)
    hosts.add(0, line.path, process_id.this_process("x"))
    hosts.remove(0)
    hosts.remove(0)
    line.release()
    hosts.stop()
    assert ends.seen == []


def test_a_watcher_may_be_stopped_at_the_very_moment_a_process_ends() -> None:
    """Its thread wakes up for the end, sees that it is to stop, and would close what `stop` is about to write to."""
    child = subprocess.Popen(["sleep", "60"])
    watcher = PidWatcher()
    watcher.add(
        dataclasses.replace(process_id.this_process("x"), pid=child.pid, start_ticks=process_id.start_ticks(child.pid)),
        lambda: None,
    )
    closed, close, wake = threading.Event(), watcher._close, watcher._wake

    def close_and_tell() -> None:
        close()
        closed.set()

    def wake_late() -> None:
        child.kill()
        closed.wait(0.3)  # with the lock held it cannot come to this
        wake()

    watcher._close = close_and_tell  # type: ignore[method-assign]
    watcher._wake = wake_late  # type: ignore[method-assign]
    watcher.stop()
    child.wait()
    assert closed.is_set()


@pytest.mark.ci
def test_a_process_that_cannot_be_watched_is_an_error_and_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """An epoll without memory for one more."""

        def register(self, fd: int, mask: int) -> None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    watcher = PidWatcher()
    poll = watcher._poll
    monkeypatch.setattr(watcher, "_poll", Full())
    before = open_files()
    with golden.raises(UnavailableError):
        watcher.add(process_id.this_process("x"), lambda: None)
    assert open_files() <= before
    assert not watcher._watched
    monkeypatch.setattr(watcher, "_poll", poll)
    watcher.stop()
