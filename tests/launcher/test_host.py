"""What a host's launcher does for its ranks: it starts them, sees them end, and hears them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from lastwords.launcher import host as module
from lastwords.launcher import link, processes
from lastwords.launcher.agent import _Round
from lastwords.launcher.events import (
    Awaited,
    Begun,
    End,
    Ended,
    Enter,
    Event,
    Kill,
    Leaving,
    Look,
    Lost,
    Over,
    Ready,
    Stopped,
)
from lastwords.launcher.host import Host, HowLeft, Program
from lastwords.launcher.link import Lines, send
from lastwords.launcher.processes import RankProcess, RankSeat, ended_badly
from lastwords.launcher.protocol import (
    OWN,
    PROTOCOL,
    ControllerAnswer,
    ControllerWanted,
    Fork,
    FromRank,
    Loaded,
    RankHello,
    RankRaised,
    ToRank,
    read,
    to_message,
)
from lastwords.launcher.registry import Rejected
from lastwords.optim_wrapper.state.running import program_files
from tests import golden
from tests.integration.programs import PR_SET_CHILD_SUBREAPER, prctl
from tests.patience import until


class Clock:
    now_s = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "mono_s", lambda: clock.now_s)
    return clock


class Forks:
    """In place of a fork server: what it was asked for. `made` and the like are the host's."""

    pid, wants_ranks = 0, True
    made: Callable[[dict[int, int], str], None]
    failed: Callable[[str], None]
    impossible: Callable[[str], None]

    def __init__(self) -> None:
        self.asked: list[Sequence[Fork]] = []
        self.ended = False

    def start(self, begun: object) -> None:
        pass

    def fork(self, forks: Sequence[Fork]) -> None:
        self.asked.append(forks)

    def supervise(self) -> None:
        """It has done all."""

    def end(self) -> None:
        self.ended = True


class TestHost(Host):
    """One of two ranks, and what it has reported."""

    __test__ = False

    def __init__(self, directory: Path, selector: selectors.BaseSelector) -> None:
        self.script = directory / "train.py"
        self.script.write_text("import os, sys; sys.exit(40 + int(os.environ['RANK']) + len(sys.argv))")
        self.events: list[Event] = []
        self.asked = Forks()
        seats = {rank: self.seat(rank) for rank in range(2)}
        program = Program(sys.executable, is_module=False, threads=3)
        with unittest.mock.patch.object(module, "ForkServer", return_value=self.asked):
            super().__init__(seats, program, selector, self.events.append)

    def seat(self, rank: int) -> RankSeat:
        return RankSeat(sys.executable, ("-u", str(self.script), "--lr", "1"), {"RANK": str(rank)})

    def has(self, *command: str) -> RankProcess:
        """Rank 0's process is this one, which leads a session."""
        process = subprocess.Popen(command or ["sleep", "60"], start_new_session=True)
        process.returncode = 0  # it is not for Popen to collect
        self.asked.made({0: process.pid}, "")
        return self.process

    @property
    def process(self) -> RankProcess:
        found: RankProcess = self.seats[0].proc
        return found

    def turn(self) -> None:
        """Whatever has come."""
        for key, _ in self._selector.select(0.3):
            key.data()

    def until(self, kind: type[Event]) -> None:
        """There is one more event of this kind."""
        count = sum(isinstance(one, kind) for one in self.events)
        while sum(isinstance(one, kind) for one in self.events) == count:
            self.turn()

    def of(self, kind: type[Any]) -> list[Any]:
        return [one for one in self.events if isinstance(one, kind)]


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as made:
        yield made


@pytest.fixture
def host(tmp_path: Path, clock: Clock, selector: selectors.BaseSelector) -> Iterator[TestHost]:
    host = TestHost(tmp_path, selector)
    with contextlib.closing(host._server):
        yield host
        if host.process.pid and host.process.poll() is None:
            os.kill(host.process.pid, signal.SIGKILL)
            host.process.wait()


# ---------------------------------------------------------------------- a generation


def test_all_ranks_are_asked_for_at_once_with_what_each_of_them_is(host: TestHost) -> None:
    host.begin()
    assert host.events == [Ready(0), Ready(1)]
    host.address = "node-1"
    host.obey(Enter(7, port=4000, step=31))
    ((first, second),) = host.asked.asked
    assert (first.rank, second.rank, first.step, first.threads, first.address) == (0, 1, 31, 3, "node-1")
    assert [*first.argv] == [str(host.script), "--lr", "1"]
    assert not first.is_module
    assert f"\0{first.report}".encode() == host._server.getsockname()
    told = ("RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "PATH")
    assert [second.environment[name] for name in told] == ["1", "4000", "7", "True", os.environ["PATH"]]
    assert first.dies_with == 0
    host._program = module.replace(host._program, dies_with_launcher=True)
    host.obey(Enter(8, port=4000, step=31))
    assert host.asked.asked[-1][0].dies_with == os.getpid()


def test_what_a_generation_has_written_of_its_failure_is_not_taken_for_that_of_the_next_one(
    host: TestHost, tmp_path: Path
) -> None:
    file = tmp_path / "error.json"
    file.touch()
    host.seats[0].env["TORCHELASTIC_ERROR_FILE"] = str(file)
    host.seats[1].env["TORCHELASTIC_ERROR_FILE"] = os.devnull
    host.obey(Enter(1))
    assert not file.exists()


def test_one_that_cannot_be_removed_is_named_and_the_generation_begins(
    host: TestHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "error.json"
    host.seats[0].env["TORCHELASTIC_ERROR_FILE"] = str(file)

    def stale(path: Path) -> bool:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "error.json")

    monkeypatch.setattr(Path, "is_file", stale)
    host.obey(Enter(1))
    assert len(host.asked.asked) == 1
    golden.says("\n".join(caplog.messages))


def test_a_process_of_its_own_that_cannot_write_its_log_writes_where_its_launcher_does(
    host: TestHost, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    host._program = module.replace(host._program, python="")
    host.seats[0].stdout = str(host.script / "stdout.log")
    host.obey(Enter(1))
    while len(host.of(Ended)) < 2 and not host.of(Lost):
        host.turn()
    assert sorted(one.code for one in host.of(Ended)) == [43, 44]
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("lastwords run: ")]
    golden.says("\n".join(said).replace(str(tmp_path), "<directory>"))


def test_a_script_that_was_changed_ends_the_job_and_is_named(host: TestHost) -> None:
    host.obey(Enter(0))
    host.script.write_text("# another version")
    host.obey(Enter(1))
    assert len(host.asked.asked) == 1
    (lost,) = host.events
    assert isinstance(lost, Lost)
    golden.says(lost.why.replace(str(host.script), "<script>"))


@pytest.mark.parametrize("comes", [True, False])
def test_a_script_that_is_not_there_for_a_moment_is_waited_for(host: TestHost, clock: Clock, comes: bool) -> None:
    """While an editor saves it, say, or a file system of another host is slow."""
    text = host.script.read_text()
    host.obey(Enter(0))
    host.script.unlink()
    host.obey(Enter(1))
    for _ in range(module.ABSENT_LOOKS_MAX):
        assert len(host.asked.asked) == 1
        assert host.events == []
        clock.now_s += module.SHORTAGE_PAUSE_S
        if comes:
            host.script.write_text(text)
        host.tick()
        if comes:
            break
    assert len(host.asked.asked) == 1 + comes
    if not comes:
        (lost,) = host.of(Lost)
        golden.says(lost.why.replace(str(host.script), "<script>"))


def test_a_rank_that_would_be_ended_by_the_wish_for_a_checkpoint_does_not_get_it(
    host: TestHost, caplog: pytest.LogCaptureFixture
) -> None:
    host.begin()
    host.has("sleep", "60")
    host.signal_all(signal.SIGUSR1)
    golden.says("\n".join(caplog.messages))
    script = "import signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))\nprint(flush=True)\n"
    handles = subprocess.Popen([sys.executable, "-c", f"{script}signal.pause()"], stdout=subprocess.PIPE)
    assert handles.stdout is not None
    handles.stdout.read(1)
    with unittest.mock.patch.object(host.process, "pid", handles.pid):
        host.signal_all(signal.SIGUSR1)
    assert handles.wait() == 7
    handles.stdout.close()
    host.signal_all(signal.SIGTERM)
    host.until(Ended)
    assert [one.code for one in host.of(Ended)] == [-signal.SIGTERM]


def test_ranks_that_cannot_be_forked_now_are_forked_later_and_the_others_run(host: TestHost, clock: Clock) -> None:
    host.obey(Enter(0))
    short = os.strerror(errno.EAGAIN)
    for _ in range(module.SHORTAGE_TRIES_MAX):
        host.asked.made({}, short)
        clock.now_s += module.SHORTAGE_PAUSE_S
        host.tick()
    assert host.asked.asked[1:] == [()] * module.SHORTAGE_TRIES_MAX, "what is missing the server knows"
    host.asked.wants_ranks = False
    host.asked.made({}, short)
    assert host.events == [], "ranks train on without a controller"
    host.asked.wants_ranks = True
    host.asked.made({}, short)
    golden.says([one.why for one in host.of(Lost)])


def test_where_no_rank_can_be_forked_each_is_a_process_of_its_own(
    host: TestHost, caplog: pytest.LogCaptureFixture
) -> None:
    host.obey(Enter(0))
    host.asked.impossible("it has started 2 threads, which a fork does not have")
    golden.says("\n".join(caplog.messages))
    ends = []
    for generation in (1, 2):
        while len(host.of(Ended)) < 2 * generation:
            host.turn()
        ends.append(sorted(one.code for one in host.of(Ended)[-2:]))
        host.obey(Enter(generation))
    assert ends == [[43, 44]] * 2
    assert len(host.asked.asked) == 1
    for seat in host.seats.values():
        seat.proc.wait()


def test_where_no_rank_of_a_later_generation_can_be_forked_each_is_a_process_of_its_own(host: TestHost) -> None:
    host.obey(Enter(0))
    host.has("true")
    host.until(Ended)
    host.obey(Enter(1))
    host.asked.impossible("it has started 2 threads, which a fork does not have")
    while len(host.of(Ended)) < 3 and not host.of(Lost):
        host.turn()
    assert not host.of(Lost)


@pytest.mark.parametrize("has", [True, False], ids=["later", "before the first"])
def test_where_no_rank_can_be_forked_any_more_the_job_ends(host: TestHost, has: bool) -> None:
    host.obey(Enter(0))
    if has:
        host.has()
        host.asked.impossible("it has started 2 threads, which a fork does not have")
    host.asked.failed("the fork server has ended 3 times before it has served, with -9")
    golden.says([one.why for one in host.of(Lost)])
    assert [bool(seat.proc.pid) for seat in host.seats.values()] == [has, False], "nor is there a new process"


def test_what_ranks_have_left_behind_ends_or_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(command: str, own: bool) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sh", "-c", command], start_new_session=own)
        until(Path(f"/proc/{process.pid}/cmdline").read_bytes)  # the kernel may not have come so far
        return process

    leader = started("sleep 60 & sleep 60", own=True)
    others = [
        started("sleep 60", own=True),
        started("sleep 60", own=True),
        started("sleep 60; lastwords.controller", own=True),
    ]
    stranger, kept, _ = others
    try:
        monkeypatch.setattr(processes, "children", lambda: [leader.pid, *(one.pid for one in others)])
        found = [*processes.end_orphans({leader.pid}, {kept.pid})]
        assert [pid for pid, _ in found] == [stranger.pid]
        assert [one.poll() is None for one in (leader, *others)] == [False, True, True, True]
    finally:
        for one in (leader, *others):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def test_what_a_ranks_own_children_have_started_ends_with_them() -> None:
    """Each is an orphan only once the one that has started it has been ended."""
    before = processes.children()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        child = "sh -c 'sleep 600 & echo $!; wait'"
        leader = subprocess.Popen(["sh", "-c", f"{child} & wait"], start_new_session=True, stdout=subprocess.PIPE)
        assert leader.stdout is not None
        grandchild = int(leader.stdout.readline())
        leader.kill()
        leader.wait()
        leader.stdout.close()
        assert [*processes.end_orphans({leader.pid}, before)] == []
        with pytest.raises(ProcessLookupError):
            os.kill(grandchild, 0)
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


@pytest.mark.parametrize("code", [0, 3])
def test_how_a_fork_has_ended_is_known_though_it_is_that_of_whoever_forks_others_for_a_moment(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    waitid, looks = os.waitid, [ChildProcessError(), ChildProcessError()]

    def look(*of: Any) -> Any:
        if looks:
            raise looks.pop()
        return waitid(*of)

    monkeypatch.setattr(os, "waitid", look)
    process = subprocess.Popen(["sh", "-c", f"exit {code}"])
    waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert ended_badly(process.pid) is bool(code)
    assert process.wait() == code


def test_a_process_that_outlives_its_rank_is_named_once(
    host: TestHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "end_orphans", lambda sessions, kept: [(5, "wandb")])
    for generation in range(3):
        host.obey(Enter(generation))
    golden.says("\n".join(caplog.messages))


# ---------------------------------------------------------------------- how processes end


def test_a_signal_for_all_does_not_collect_a_rank_whose_end_has_not_been_seen(host: TestHost) -> None:
    """The way of an ended process is through its pidfd, which has to find it there."""
    pid = host.has().pid
    host.signal_all(signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    host.signal_all(signal.SIGUSR1)
    assert ended_badly(pid)
    host.until(Ended)
    assert host.process.returncode == -signal.SIGKILL


def test_the_end_of_a_process_comes_with_what_it_has_said_and_the_first_bad_one_is_the_failure_of_its_rank(
    host: TestHost,
) -> None:
    def end(*said: RankRaised, by: Event | None = None, command: str = "exit 1") -> int:
        host.obey(Enter(1))
        pid = host.has("sh", "-c", command if by is None else "sleep 60").pid
        for one in said:
            host._hear(SimpleNamespace(rank=0), one)  # type: ignore[arg-type]
        if by is not None:
            host.obey(by)  # type: ignore[arg-type]
        host.until(Ended)
        return pid

    for by in (Kill(0, "it is stopped"), End(0)):
        end(by=by)  # type: ignore[arg-type]
        assert host.failures == {}, "it was ended from here"
    end(RankRaised("SystemExit: 0", lasting=False), command="exit 0")
    assert host.failures == {}
    pid = end(RankRaised("ValueError: bad batch", lasting=False))
    ((where, ended),) = host.failures.values()
    assert (where, ended.code, ended.raised) == (pid, 1, "ValueError: bad batch")
    end(RankRaised("no such setting", lasting=True))
    assert [ended.raised for _, ended in host.failures.values()] == ["no such setting"], "of this generation alone"
    end()
    assert [(one.code, one.raised, one.lasting) for one in host.of(Ended)] == [
        (-signal.SIGKILL, "", False),
        (-signal.SIGTERM, "", False),
        (0, "SystemExit: 0", False),
        (1, "ValueError: bad batch", False),
        (1, "no such setting", True),
        (1, "", False),
    ]


def test_all_processes_of_a_rank_that_ends_badly_end_with_it(host: TestHost) -> None:
    """And not those of one that ends well, which may upload a result."""
    for code, lives in ((0, True), (1, False)):
        reads, writes = os.pipe()
        command = ["sh", "-c", f"sleep 60 & exit {code}"]
        process = subprocess.Popen(command, start_new_session=True, pass_fds=[writes])
        process.returncode = 0
        os.close(writes)
        host.asked.made({0: process.pid}, "")
        host.until(Ended)
        os.set_blocking(reads, False)
        if lives:
            with pytest.raises(BlockingIOError):
                os.read(reads, 1)
            os.killpg(process.pid, signal.SIGKILL)
        os.set_blocking(reads, True)
        assert os.read(reads, 1) == b"", "nobody holds the other end"
        os.close(reads)


def test_torchs_report_has_the_ranks_that_have_failed_and_the_first_one_is_its_root_cause(tmp_path: Path) -> None:
    written = tmp_path / "error.json"
    written.write_text(json.dumps({"message": {"message": "written", "extraInfo": {"timestamp": 5}}}))
    failures = {2: (12, Ended(2, 1, raised="ValueError: bad batch")), 1: (11, Ended(1, -9))}
    files = {0: "", 1: "", 2: ""}
    group = SimpleNamespace(workers=[SimpleNamespace(global_rank=rank, local_rank=rank) for rank in range(3)])
    part = SimpleNamespace(host=SimpleNamespace(failures=failures), _context=SimpleNamespace(error_files=files))
    found = _Round.failures(part, group)  # type: ignore[arg-type]
    rank, root = ChildFailedError("train.py", found).get_first_failure()
    assert (rank, root.pid, root.exitcode, root.message) == (2, 12, 1, "ValueError: bad batch")
    assert {*found} == {1, 2}, "and nobody who has not failed"
    assert "SIGKILL" in found[1].message
    files[2] = str(written)
    assert "written" in str(_Round.failures(part, group)[2].message)  # type: ignore[arg-type]


def stop(host: TestHost) -> int:
    """Rank 0's process, by a signal."""
    os.kill(host.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, host.process.pid, os.WSTOPPED | os.WNOWAIT)
    return host.process.pid


def test_who_is_waited_for_and_how_to_let_it_go_on_is_said(host: TestHost, caplog: pytest.LogCaptureFixture) -> None:
    host.has()
    host.obey(Awaited(0, "has not ended", 115.0))
    host.obey(Awaited(0, "was killed, and has not ended", None))
    pid = stop(host)
    host.obey(Awaited(0, "has not ended", 115.0))
    golden.says("\n".join(caplog.messages).replace(str(pid), "PID"))


def test_who_is_looked_at_is_reported_only_if_it_is_stopped(host: TestHost) -> None:
    host.has()
    host.obey(Look(0))
    assert host.events == []
    stop(host)
    host.obey(Look(0))
    assert host.events == [Stopped(0)]


# ---------------------------------------------------------------------- controllers


def test_a_rank_that_wants_a_controller_is_told_of_a_fork_whichever_comes_first(host: TestHost, told: Told) -> None:
    for asked in (5, 6):
        told.say(told.link, ControllerWanted([f"spec {asked}", "/proc/7/fd/8"], {"A": "b"}, "/logs/controller", asked))
    forks = [one for (one,) in host.asked.asked[-2:]]
    assert [(one.argv[0], one.environment, one.stdout, one.stderr) for one in forks] == [
        (f"spec {asked}", {"A": "b"}, "/logs/controller", "/logs/controller") for asked in (5, 6)
    ]
    host.asked.made({forks[1].rank: 66}, "")
    host.asked.made({forks[0].rank: 55}, "")
    answers = [read(message, ToRank) for message in Lines().feed(told.link.recv(1 << 16))]
    assert answers == [ControllerAnswer(6, 66), ControllerAnswer(5, 55)]


def test_where_nothing_can_be_forked_a_rank_starts_its_controller_itself(host: TestHost, told: Told) -> None:
    host._program = replace(host._program, python="")
    told.say(told.link, ControllerWanted([], {}, "", 5))
    assert [read(message, ToRank) for message in Lines().feed(told.link.recv(1 << 16))] == [ControllerAnswer(5)]


# ---------------------------------------------------------------------- what is short


class Shortage:
    """An action for which there are no descriptors so many times."""

    def __init__(self, times: int, number: int = errno.EMFILE) -> None:
        self.times, self.number, self.done = times, number, 0

    def __call__(self) -> None:
        self.times -= 1
        if self.times >= 0:
            raise OSError(self.number, os.strerror(self.number))
        self.done += 1


def test_what_is_short_is_waited_for_and_said_once(
    host: TestHost, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    act = Shortage(module.SHORTAGE_TRIES_MAX)
    host._try("process 7 cannot be watched", act)
    while not act.done:
        assert host.due_in_s == pytest.approx(module.SHORTAGE_PAUSE_S)
        host.tick()
        clock.now_s += module.SHORTAGE_PAUSE_S
        host.tick()
    assert host.due_in_s is None
    golden.says("\n".join(caplog.messages))


def test_a_shortage_that_lasts_and_any_other_failure_end_the_job(host: TestHost, clock: Clock) -> None:
    host._try("process 7 cannot be watched", Shortage(1, errno.EPERM))
    host._try("process 7 cannot be watched", Shortage(module.SHORTAGE_TRIES_MAX + 1))
    for _ in range(module.SHORTAGE_TRIES_MAX - 1):
        clock.now_s += module.SHORTAGE_PAUSE_S
        host.tick()
    assert len(host.events) == 1
    clock.now_s += module.SHORTAGE_PAUSE_S
    host.tick()
    golden.says("\n".join(one.why for one in host.of(Lost)))


def test_a_connection_that_cannot_be_taken_is_taken_later(host: TestHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host.begin()
    accept, shortage, pauses = host._server.accept, Shortage(1), list[float]()
    monkeypatch.setattr(link.time, "sleep", pauses.append)
    monkeypatch.setattr(host._reception, "_server", Accepts(host._server, lambda: (shortage(), accept())[1]))
    with socket.socket(socket.AF_UNIX) as rank:
        rank.connect(host._server.getsockname())
        host._accept()
        assert pauses == [link.AGAIN_S], "or it would be tried again without a pause"
        assert len(host._selector.get_map()) == 1
        for key, _ in host._selector.select(0):
            key.data()
        assert len(host._selector.get_map()) == 2


class Accepts:
    """A socket whose `accept` is another one."""

    def __init__(self, one: socket.socket, accept: Callable[[], object]) -> None:
        self._one, self.accept = one, accept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._one, name)


# ---------------------------------------------------------------------- what ranks say


class Told:
    """Rank 0's connection to its host."""

    def __init__(self, host: TestHost) -> None:
        self._host = host
        host.begin()
        host.events.clear()
        self._pid = host.has().pid
        self.link = self.connect()

    def connect(self, version: int = PROTOCOL) -> socket.socket:
        link = socket.socket(socket.AF_UNIX)
        link.connect(self._host._server.getsockname())
        self._host.turn()
        self.say(link, RankHello(0, self._pid, version))
        return link

    def say(self, link: socket.socket, report: RankHello | FromRank) -> None:
        send(link, to_message(report))
        self._host.turn()


@pytest.fixture
def told(host: TestHost) -> Iterator[Told]:
    told = Told(host)
    yield told
    told.link.close()


def test_of_what_ranks_have_loaded_a_change_is_named_and_the_same_contents_are_none(
    host: TestHost, told: Told, tmp_path: Path
) -> None:
    helper, gone = tmp_path / "helper.py", tmp_path / "made_by_a_rank.py"
    for file in (helper, gone):
        file.write_text("RATE = 1")
    told.say(told.link, Loaded([str(helper), str(gone), str(tmp_path / "in.zip/absent.py")]))
    gone.unlink()
    helper.unlink()
    helper.write_text("RATE = 1")
    host.obey(Enter(1))
    assert [type(event) for event in host.events if isinstance(event, Lost)] == []
    helper.write_text("RATE = 2")
    told.say(told.link, Loaded([str(helper)]))  # it was another one when it was loaded first
    host.obey(Enter(2))
    golden.says([event.why for event in host.events if isinstance(event, Lost)])


def test_a_program_consists_of_the_users_modules_and_of_each_packages_first_file() -> None:
    files = program_files()
    ours = [path for path in files if path.endswith("tests/launcher/test_host.py")]
    (torchs,) = [path for path in files if "/torch/" in path]
    assert len(ours) == 1
    assert torchs == torch.__file__
    assert os.__file__ not in files


def test_what_a_process_has_said_is_known_at_its_end_though_its_connection_was_not_taken(host: TestHost) -> None:
    """One that is refused ends as soon as it has come."""
    host.begin()
    process = host.has()
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(host._server.getsockname())
        for report in (RankHello(0, process.pid, PROTOCOL), RankRaised("no such setting", lasting=True)):
            send(link, to_message(report))
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    seen = {key.fileobj: key.data for key, _ in host._selector.select(1)}
    assert [*seen] != [host._server]
    for fileobj in sorted(seen, key=lambda one: one is host._server):
        seen[fileobj]()  # in the same turn; nobody is there any more
    assert [(one.raised, one.lasting) for one in host.of(Ended)] == [("no such setting", True)]


def test_what_a_process_has_said_is_not_taken_for_what_the_next_one_in_the_same_shell_says(
    host: TestHost, told: Told
) -> None:
    told.say(told.link, RankRaised("no such setting", lasting=True))
    told.link.close()
    host.turn()
    told.connect().close()
    os.kill(host.process.pid, signal.SIGKILL)
    host.until(Ended)
    assert [(one.code, one.raised, one.lasting) for one in host.of(Ended)] == [(-9, "", False)]


def test_what_is_left_of_an_earlier_generation_is_not_heard(host: TestHost, told: Told) -> None:
    """A child of a rank, in a session of its own, which has kept the connection."""
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(host._server.getsockname())
            host.turn()
            for report in (RankHello(0, stranger.pid, PROTOCOL), Over(OWN)):
                told.say(link, report)
    finally:
        stranger.kill()
        stranger.wait()
    assert host.events == []


def test_of_the_processes_of_another_user_nothing_is_heard(
    host: TestHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    peer = module.peer
    monkeypatch.setattr(module, "peer", lambda link: (peer(link)[0], 4711))
    with pytest.raises(BrokenPipeError):
        Told(host)
    assert host.events == []
    golden.says("\n".join(caplog.messages))


def test_what_a_rank_has_saved_after_its_launcher_has_told_it_to_end_is_heard(
    host: TestHost, told: Told, tmp_path: Path
) -> None:
    host.end()
    assert host.asked.ended
    assert told.link.recv(1 << 16).endswith(b"\n"), "it is dismissed"
    assert not told.link.recv(1), "and hears nothing more"
    record = str(tmp_path / "incidents.jsonl")
    send(told.link, to_message(Leaving(OWN, 7, record)))
    os.kill(host.process.pid, signal.SIGTERM)
    host.process.wait()
    assert host.left() == HowLeft({0: -signal.SIGTERM}, 7, Path(record))
    assert host.events == [], "nobody begins again"


def test_what_a_rank_has_saved_before_its_launcher_ends_is_not_forgotten(host: TestHost, told: Told) -> None:
    """All have been forked again, and none trains yet; a process that is new knows of nothing."""
    told.say(told.link, Leaving(0, 13, "/ckpt/logs/incidents.jsonl"))
    told.say(told.link, Leaving(0))
    host.end()
    os.kill(host.process.pid, signal.SIGTERM)
    host.process.wait()
    assert host.left() == HowLeft({0: -signal.SIGTERM}, 13, Path("/ckpt/logs/incidents.jsonl"))


def test_who_leaves_as_its_controller_has_told_it_has_not_failed(host: TestHost, told: Told) -> None:
    told.say(told.link, Leaving(0, 13, ""))
    os.kill(host.process.pid, signal.SIGKILL)
    host.until(Ended)
    assert host.failures == {}


def test_a_mistake_of_the_launchers_own_is_not_taken_for_a_ranks(
    host: TestHost, told: Told, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Event] = []

    def mistake(event: Event) -> None:
        heard.append(event)
        if len(heard) == 1:
            raise KeyError(7)

    monkeypatch.setattr(host, "_report", mistake)
    with pytest.raises(KeyError):
        told.say(told.link, Begun(OWN))
    told.say(told.link, Over(OWN))
    assert heard == [Begun(0), Over(0)]
    assert caplog.messages == []


def test_what_is_not_understood_is_told_and_ends_that_connection_only(
    host: TestHost, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        send(told.link, {"kind": "Begun", "step": "x"})
        host.turn()
        assert told.link.recv(1) == b""
        told.link = told.connect()
    told.say(told.link, Over(OWN))
    assert host.events == [Over(0)]
    golden.says("\n".join(caplog.messages).replace(str(host.process.pid), "PID"))


def test_a_rank_of_another_version_ends_the_job_and_is_told_what_to_do(host: TestHost, told: Told) -> None:
    with told.connect(PROTOCOL + 1) as link:
        (message,) = Lines().feed(link.recv(1 << 16))
        assert link.recv(1) == b""
    order, (lost,) = read(message, ToRank), host.events
    assert isinstance(lost, Lost)
    assert order == Rejected(lost.why)
    golden.says(lost.why.replace(str(host.process.pid), "PID"))
