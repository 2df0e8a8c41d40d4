"""How a process has ended: by its exit status, read before its parent collects it, and by the kernel's counters."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastwords.liveness import endings, process_id
from lastwords.liveness.endings import UNKNOWN, OomCounts, OomKills, ending_text
from lastwords.liveness.watch import HostWatch
from lastwords.vocabulary import DeathSource, ProcessId
from tests import golden
from tests.liveness.cgroups import memory_cgroup, put
from tests.liveness.test_life_line import Ends

LIMIT_BYTES = 64 << 20
READY = "import ctypes, os, signal, sys; print(flush=True); sys.stdin.read(1); "
GREEDY = f"{READY} eaten = [bytearray(1 << 20) for _ in range({2 * LIMIT_BYTES >> 20})]"


@contextlib.contextmanager
def child(code: str) -> Iterator[tuple[subprocess.Popen[bytes], ProcessId]]:
    """A process that does what `code` says once it is told to."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline()
        ticks = process_id.start_ticks(process.pid)
        assert ticks is not None
        yield process, ProcessId(process_id.host_id(), process.pid, ticks, "child")
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def let_go(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b".")
    process.stdin.flush()


WAYS = {
    "ctypes.string_at(0)": -signal.SIGSEGV,
    "os.kill(os.getpid(), signal.SIGSEGV)": -signal.SIGSEGV,
    "os.abort()": -signal.SIGABRT,
    "os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
    "os._exit(3)": 3,
}


@pytest.mark.parametrize(("way", "code"), WAYS.items())
def test_the_watch_tells_how_a_process_has_ended_though_it_is_not_its_parent(way: str, code: int) -> None:
    told, died = Ends(), Ends()
    with child(READY + way) as (process, identity):
        watch = HostWatch(died, on_ending=told)
        watch.add(5, None, identity)
        let_go(process)
        ((rank, how),) = told.wait(1)
        watch.stop()
        assert (rank, how) == (5, ending_text(code))
        assert [one[:2] for one in died.seen] == [(5, DeathSource.PIDFD)], "the death comes first"
        assert process.wait() == code
        assert process_id.exit_code(identity) is None, "its parent has collected it"
    golden.says(how)


def test_of_an_end_without_an_error_and_of_a_process_that_runs_nothing_is_said() -> None:
    died = Ends()
    with child(READY + "os._exit(0)") as (process, identity):
        assert process_id.exit_code(identity) is None
        told = Ends()
        watch = HostWatch(died, on_ending=told)
        watch.add(0, None, identity)
        let_go(process)
        died.wait(1)
        watch.stop()
        assert told.seen == []


@pytest.mark.parametrize(
    ("code", "before", "after"),
    [
        (-9, OomKills(cgroup=0, host=7), OomKills(cgroup=0, host=8)),
        (-9, OomKills(cgroup=2), OomKills(cgroup=4)),
        (-9, OomKills(host=7), OomKills(host=7)),
        (-9, OomKills(host=7), OomKills(host=8)),
        (-9, OomKills(cgroup=0), UNKNOWN),
        (-11, OomKills(cgroup=0), OomKills(cgroup=1)),
        (1, OomKills(cgroup=0), OomKills(cgroup=1)),
        (None, OomKills(cgroup=0), OomKills(cgroup=1)),
        (None, OomKills(host=0), OomKills(host=1)),
        (None, UNKNOWN, OomKills(cgroup=1, host=1)),
        (-64, UNKNOWN, UNKNOWN),
    ],
)
def test_what_the_counters_say_of_a_death(code: int | None, before: OomKills, after: OomKills) -> None:
    golden.says(repr(ending_text(code, before, after)))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("low 0\nhigh 0\nmax 5\noom 1\noom_kill 3\noom_group_kill 0\n", 3),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 12\n", 12),
        ("low 0\n", None),
        ("oom_kill many\n", None),
        ("oom_kill\n", None),
        ("", None),
    ],
)
def test_the_count_is_read_from_a_file_of_either_version(tmp_path: Path, text: str, count: int | None) -> None:
    path = tmp_path / "memory.events"
    path.write_text(text)
    assert OomCounts(path, host=tmp_path / "missing").read() == OomKills(cgroup=count)


def test_a_watch_compares_the_counts_of_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 0\n")
    monkeypatch.setattr(endings, "counting_files", lambda cgroups, mounts: [tmp_path / "none", events])
    told = Ends()
    with child(READY + "os.kill(os.getpid(), 9)") as (process, identity):
        watch = HostWatch(Ends(), on_ending=told)
        watch.add(2, None, identity)
        events.write_text("oom_kill 1\n")
        let_go(process)
        golden.says(told.wait(1))
        watch.stop()


@pytest.fixture
def cgroup() -> Iterator[Path]:
    with memory_cgroup(LIMIT_BYTES) as folder:
        yield folder


@pytest.mark.root
def test_a_process_that_the_kernel_kills_for_lack_of_memory_is_told_from_one_that_somebody_kills(cgroup: Path) -> None:
    told = []
    for code in (GREEDY, READY + "os.kill(os.getpid(), 9)"):
        ends = Ends()
        with child(code) as (process, identity):
            put(process.pid, cgroup)
            watch = HostWatch(Ends(), on_ending=ends)
            watch.add(0, None, identity)
            let_go(process)
            told.append(ends.wait(1)[0])
            watch.stop()
            assert process.wait() == -signal.SIGKILL
    golden.says([how for _, how in told])
