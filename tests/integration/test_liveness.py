"""Deaths of real processes, seen through robust mutexes and pidfds."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastwords.errors import UnavailableError
from lastwords.liveness import paths, process_id, robust_mutex
from lastwords.liveness.pidfd import PidWatcher
from lastwords.liveness.robust_mutex import EndKind, LifeLine, state_of, watch
from lastwords.liveness.watch import HostWatch
from lastwords.vocabulary import DeathSource
from tests.integration.living import ROOT, Living
from tests.patience import until

pytestmark = pytest.mark.process

WAIT_S = 20.0
"""Far more than a death takes to be known, far less than any fallback (`_RECHECK_S`, a child's end)."""


class Ends:
    """Collects call-backs with their times."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []
        self.at_s: list[float] = []
        self._condition = threading.Condition()

    def __call__(self, *what: object) -> None:
        with self._condition:
            self.at_s.append(time.monotonic())
            self.seen.append(what)
            self._condition.notify_all()

    def wait(self, count: int, timeout_s: float = WAIT_S) -> list[tuple[object, ...]]:
        with self._condition:
            self._condition.wait_for(lambda: len(self.seen) >= count, timeout_s)
            return list(self.seen)


@pytest.fixture
def life_path() -> Iterator[Path]:
    job = f"test-liveness-{os.getpid()}"
    paths.make_job_dir(job, 0)
    yield paths.life_path(job, 0, 0)
    paths.remove_job_dir(job, 0)


@pytest.fixture
def no_recheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the periodical look: who is not woken learns nothing."""
    monkeypatch.setattr(robust_mutex, "_RECHECK_S", 3600.0)


@pytest.mark.usefixtures("no_recheck")
def test_every_watcher_learns_of_a_kill_at_once(life_path: Path) -> None:
    with Living(life_path) as living, _WatchingProcess(life_path) as other:
        ends = Ends()
        watches = [watch(life_path, ends) for _ in range(4)]
        living.kill()
        assert ends.wait(4) == [(EndKind.DIED,)] * 4
        assert other.stdout is not None
        assert other.stdout.readline().strip() == "died"
        for each in watches:
            each.stop()


@pytest.mark.usefixtures("no_recheck")
def test_without_the_waiters_bit_nobody_is_woken(life_path: Path) -> None:
    # Negative control: the test above passes because the owner sets FUTEX_WAITERS, not by chance.
    with Living(life_path) as living:
        fd = os.open(life_path, os.O_RDWR)
        word = os.pread(fd, 4, robust_mutex._MUTEX_AT)
        os.pwrite(fd, word[:3] + bytes((word[3] & 0x7F,)), robust_mutex._MUTEX_AT)
        os.close(fd)
        ends = Ends()
        running = watch(life_path, ends)
        until(lambda: _sleeps_on_the_futex(running))
        living.kill()
        living.wait()
        assert ends.wait(1, timeout_s=1.0) == []
        running.stop()
        assert state_of(life_path) is EndKind.DIED  # only the wake-up was missing


@pytest.mark.usefixtures("no_recheck")
def test_a_forked_child_that_outlives_its_killed_parent_does_not_hide_the_death(life_path: Path) -> None:
    with Living(life_path) as living:
        ends = Ends()
        watch(life_path, ends)
        child = living.fork_child()
        living.kill()
        assert ends.wait(1) == [(EndKind.DIED,)]
        # Negative control: a socket or pipe of the parent stays open as long as the child lives.
        assert process_id.start_ticks(child) is not None
        assert select.select([living.output_fd], [], [], 0.5)[0] == []


def test_a_forked_child_that_ends_is_no_death_of_its_parent(life_path: Path) -> None:
    with Living(life_path) as living:
        ends = Ends()
        watch(life_path, ends)
        assert living.tell("brief") == "gone"
        os.kill(living.fork_child(), signal.SIGKILL)
        living.orphans.clear()
        assert ends.wait(1, timeout_s=0.3) == []
        assert state_of(life_path) is None
        living.kill()
        assert ends.wait(1) == [(EndKind.DIED,)]


def test_a_forked_child_cannot_release_its_parents_life_line(life_path: Path) -> None:
    line = LifeLine.create(life_path)
    child = os.fork()
    if child == 0:
        line.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert state_of(life_path) is None
    line.release()
    assert state_of(life_path) is EndKind.CLEAN


@pytest.mark.parametrize("last_command", ["exit 0", "exit 3", "raise", "exec"])
def test_a_process_that_ends_without_release_has_died(life_path: Path, last_command: str) -> None:
    with Living(life_path) as living:
        ends = Ends()
        watch(life_path, ends)
        living.tell(last_command, answer=False)
        assert ends.wait(1) == [(EndKind.DIED,)]


def test_a_process_that_released_its_life_line_may_be_killed_without_a_death(life_path: Path) -> None:
    with Living(life_path) as living:
        ends, pid_ends = Ends(), Ends()
        hosts = HostWatch(ends)
        hosts.add(0, life_path, living.process)
        assert living.tell("release") == "released"
        last = PidWatcher()
        last.add(living.process, pid_ends)
        living.kill()
        assert pid_ends.wait(1) == [()]
        assert ends.wait(1, timeout_s=0.3) == []
        last.stop()
        hosts.stop()


def test_a_watcher_that_comes_after_the_death_is_told_at_once(life_path: Path) -> None:
    with Living(life_path) as living:
        living.kill()
        living.wait()
        ends = Ends()
        watch(life_path, ends)
        assert ends.wait(1) == [(EndKind.DIED,)]


def test_a_new_process_takes_the_name_and_old_watchers_keep_the_old_one(life_path: Path) -> None:
    with Living(life_path) as old:
        ends = Ends()
        watch(life_path, ends)
        with Living(life_path) as new:
            new_ends = Ends()
            watch(life_path, new_ends)
            old.kill()
            assert ends.wait(1) == [(EndKind.DIED,)]
            assert new_ends.wait(1, timeout_s=0.2) == []
            with pytest.raises(UnavailableError):
                state_of(life_path, process=old.process)
            assert state_of(life_path, process=new.process) is None


def test_a_stopped_process_has_not_died_and_can_still_be_killed(life_path: Path) -> None:
    with Living(life_path) as living:
        ends = Ends()
        hosts = HostWatch(ends)
        hosts.add(0, life_path, living.process)
        os.kill(living.pid, signal.SIGSTOP)
        assert ends.wait(1, timeout_s=0.3) == []
        living.kill()
        assert [entry[0] for entry in ends.wait(1)] == [0]  # by whichever source: a small process dies fast
        hosts.stop()


def test_a_watcher_that_is_killed_or_stopped_does_not_keep_the_death_from_the_others(life_path: Path) -> None:
    with Living(life_path) as living, _WatchingProcess(life_path) as first, _WatchingProcess(life_path) as second:
        # Both sleep on the futex before ours does, and the kernel wakes in that order.
        ends = Ends()
        watch(life_path, ends)
        first.kill()
        first.wait()
        assert state_of(life_path) is None
        os.kill(second.pid, signal.SIGSTOP)
        living.kill()
        assert ends.wait(1, timeout_s=10 * robust_mutex._RECHECK_S) == [(EndKind.DIED,)]


def test_a_large_process_is_known_dead_before_its_memory_is_freed(life_path: Path) -> None:
    with Living(life_path, resident_mb=1024) as living:
        ends, pid_ends, told = Ends(), Ends(), Ends()
        hosts = HostWatch(ends, on_ending=told)
        hosts.add(0, life_path, living.process)
        PidWatcher().add(living.process, pid_ends)
        killed_s = time.monotonic()
        living.kill()
        assert [entry[:2] for entry in ends.wait(1)] == [(0, DeathSource.ROBUST_MUTEX)]
        pid_ends.wait(1)
        mutex_s, pid_s = ends.at_s[0] - killed_s, pid_ends.at_s[0] - killed_s
        assert mutex_s < pid_s / 2, f"mutex {mutex_s * 1e3:.2f} ms, pidfd {pid_s * 1e3:.2f} ms"
        assert told.wait(1) == [(0, "SIGKILL")]
        assert ends.wait(2, timeout_s=0.2) == ends.seen[:1], "reported once, although both sources speak"
        assert told.wait(2, timeout_s=0.0) == [(0, "SIGKILL")]
        assert ends.at_s[0] <= told.at_s[0], "nobody waits for it"
        hosts.stop()


def test_a_pidfd_alone_reports_a_death_too(life_path: Path) -> None:
    with Living(life_path) as living:
        ends = Ends()
        hosts = HostWatch(ends)
        hosts.add(3, None, living.process)
        living.kill()
        assert [entry[:2] for entry in ends.wait(1)] == [(3, DeathSource.PIDFD)]
        hosts.stop()


def test_a_process_that_died_before_it_was_added_is_reported(life_path: Path) -> None:
    with Living(life_path) as living:
        living.kill()
        living.wait()
        ends = Ends()
        hosts = HostWatch(ends)
        hosts.add(0, life_path, living.process)
        hosts.add(1, None, living.process)
        assert sorted(entry[0] for entry in ends.wait(2)) == [0, 1]  # type: ignore[type-var]
        hosts.stop()


def test_a_zombie_is_not_alive(life_path: Path) -> None:
    with Living(life_path) as living:
        living.kill()
        ends = Ends()
        PidWatcher().add(living.process, ends)
        ends.wait(1)
        assert os.path.exists(f"/proc/{living.pid}")  # nobody has waited for it yet
        assert not process_id.is_alive(living.process)


def test_a_pid_that_now_is_another_process_counts_as_ended() -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as sleeper:
        ticks = process_id.start_ticks(sleeper.pid)
        assert ticks is not None
        older = dataclasses.replace(process_id.this_process("x"), pid=sleeper.pid, start_ticks=ticks - 1)
        ends = Ends()
        PidWatcher().add(older, ends)
        assert ends.wait(1) == [()]
        sleeper.kill()


def test_a_watcher_may_be_stopped_while_its_thread_is_awake() -> None:
    """Found in training: everybody leaves at once, and a neighbour's end is being told while the watch is stopped."""
    told = threading.Event()

    class Slow(PidWatcher):
        def _wake(self) -> None:
            if self._stopping:
                told.set()
                assert self._thread is not None
                self._thread.join()  # has tidied up before it could be woken
            super()._wake()

    watcher, awake = Slow(), threading.Event()
    ended = dataclasses.replace(process_id.this_process("x"), start_ticks=1)
    watcher.add(ended, lambda: (awake.set(), told.wait(WAIT_S)))  # type: ignore[arg-type, return-value]
    assert awake.wait(WAIT_S)
    watcher.stop()


def test_a_job_directory_may_go_while_its_processes_live(life_path: Path) -> None:
    with Living(life_path) as living:
        ends = Ends()
        hosts = HostWatch(ends)
        hosts.add(0, life_path, living.process)
        life_path.unlink()
        living.kill()
        assert [entry[0] for entry in ends.wait(1)] == [0]  # by whichever source: a small process dies fast
        hosts.stop()


_WATCHER = """
import sys, threading
from pathlib import Path
from lastwords.liveness import robust_mutex
robust_mutex._RECHECK_S = 3600.0
done = threading.Event()
robust_mutex.watch(Path(sys.argv[1]), lambda kind: (print(kind.value, flush=True), done.set()))
print("watching", flush=True)
done.wait()
"""


class _WatchingProcess(subprocess.Popen[str]):
    """Another process that watches the same life line and prints how it ended."""

    def __init__(self, life_path: Path) -> None:
        super().__init__([sys.executable, "-c", _WATCHER, str(life_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.stdout is not None
        assert self.stdout.readline().strip() == "watching"
        until(lambda: b"futex" in Path(f"/proc/{self.pid}/wchan").read_bytes() or self.poll() is not None)

    def __exit__(self, *exc: object) -> None:
        self.kill()
        super().__exit__(None, None, None)


def _sleeps_on_the_futex(running: robust_mutex.LifeWatch) -> bool:
    """Whether the watch's thread is inside the system call, on its own word (not on the interpreter's lock)."""
    address = running._mapping.address + robust_mutex._MUTEX_AT
    return f" {address:#x} " in Path(f"/proc/self/task/{running._thread.native_id}/syscall").read_text()
