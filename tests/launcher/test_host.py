"""What a host's launcher prepares for the next failure, and when."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from lastwords.launcher import host as module
from lastwords.launcher import spares
from lastwords.launcher.agent import _Round
from lastwords.launcher.events import (
    Awaited,
    Begun,
    Ended,
    Enter,
    Event,
    Imported,
    Kill,
    Look,
    Lost,
    Over,
    Start,
    Stopped,
    Updated,
    Waiting,
)
from lastwords.launcher.host import RESTOCK_AFTER_UPDATE_S, Failure, Host, Left
from lastwords.launcher.link import Lines, send
from lastwords.launcher.processes import Controllers, ended_badly
from lastwords.launcher.protocol import (
    OWN,
    PROTOCOL,
    ControllerAnswer,
    Hello,
    Raised,
    Report,
    order_of,
    to_launcher,
)
from lastwords.launcher.registry import Refused
from lastwords.launcher.spares import RESTOCK_S
from tests import golden


class Clock:
    now_s = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "mono_s", lambda: clock.now_s)
    return clock


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would have been started, in that order."""
    found: list[str] = []

    def process(*_: Any, **__: Any) -> Any:
        found.append("spare")
        return SimpleNamespace(proc=SimpleNamespace(pid=len(found)))

    def nobody_watches(self: Host, process: Any, ended: Callable[[], None]) -> None:
        pass

    monkeypatch.setattr(module, "Process", process)
    monkeypatch.setattr(spares, "Process", process)
    monkeypatch.setattr(Host, "_at_the_end_of", nobody_watches)
    monkeypatch.setattr(module.Controllers, "prepare", lambda self: found.append("controller"))
    return found


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as made:
        yield made


@pytest.fixture
def host(short_path: Path, clock: Clock, started: list[str], selector: selectors.BaseSelector) -> Iterator[Host]:
    context = SimpleNamespace(envs={0: {"RANK": "0"}}, args={0: ()}, entrypoint="", _numa_options=None)
    context.subprocess_handlers = {0: SimpleNamespace(proc=None)}
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(short_path / "agent"))
        yield Host(server, context, 1, selector, lambda event: None)


def test_what_was_used_is_replaced_once_a_rank_has_updated(host: Host, clock: Clock, started: list[str]) -> None:
    host._spares.restock()
    assert started == ["spare"]
    assert host.due_in_s is None
    host._spares._waiting.clear()  # it becomes a rank
    host._restock_in(RESTOCK_S)
    host.tick()
    assert started == ["spare"], "the ranks need the processors to train again"

    who = module._Who()
    who.rank = 0
    host._hear(who, SimpleNamespace(), Updated(0))
    assert host.due_in_s == pytest.approx(RESTOCK_AFTER_UPDATE_S)
    clock.now_s += RESTOCK_AFTER_UPDATE_S
    host.tick()
    assert started == ["spare", "spare", "controller"]
    assert host.due_in_s is None


def test_where_no_rank_gets_there_it_is_replaced_all_the_same(host: Host, clock: Clock, started: list[str]) -> None:
    host._restock_in(RESTOCK_S)
    clock.now_s += RESTOCK_S
    host.tick()
    assert started == ["spare", "controller"]


def test_a_signal_for_all_does_not_collect_a_rank_whose_end_has_not_been_seen(host: Host) -> None:
    """The way of an ended process is through its pidfd, which has to find it there."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        host.processes[0] = process
        host.signal_all(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        host.signal_all(signal.SIGUSR1)
        assert ended_badly(process.pid)
    finally:
        process.kill()
        process.wait()


def test_the_end_of_a_process_comes_with_what_it_has_said_and_the_first_bad_one_is_the_failure_of_its_rank(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(host, "_report", events.append)
    monkeypatch.setattr(host, "_at_the_end_of", lambda process, ended: ends.append(ended))
    who = module._Who()
    who.rank = 0

    def end(*said: Raised, kill: bool = False) -> int:
        host.processes[0] = process = subprocess.Popen(["sleep", "60"] if kill else ["false"], start_new_session=True)
        host._watch(0)
        for one in said:
            host._hear(who, SimpleNamespace(), one)  # type: ignore[arg-type]
        if kill:
            host.obey(Kill(0, "it is late"))
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        ends.pop()()
        return process.pid

    end(kill=True)
    assert host.failures == {}, "it was ended from here"
    first = end(Raised("ValueError: bad batch", lasting=False))
    end(Raised("no such setting", lasting=True))
    assert [(one.pid, one.code, one.error) for one in host.failures.values()] == [(first, 1, "ValueError: bad batch")]
    host.obey(Enter(1))
    assert host.failures == {}, "of the entry before"
    end()
    assert [one.error for one in host.failures.values()] == [""]
    assert [(one.code, one.raised, one.lasting) for one in events if isinstance(one, Ended)] == [
        (-signal.SIGKILL, "", False),
        (1, "ValueError: bad batch", False),
        (1, "no such setting", True),
        (1, "", False),
    ]


def test_what_a_process_has_said_is_known_at_its_end_though_its_connection_was_not_taken(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is refused ends as soon as it has come."""
    events: list[Event] = []
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(host, "_report", events.append)
    monkeypatch.setattr(host, "_at_the_end_of", lambda process, ended: ends.append(ended))
    host._server.listen()
    host._selector.register(host._server, selectors.EVENT_READ, host._accept)
    host.processes[0] = process = subprocess.Popen(["false"], start_new_session=True)
    host._watch(0)
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(host._server.getsockname())
        for report in (Hello(0, process.pid, PROTOCOL), Raised("no such setting", lasting=True)):
            send(link, to_launcher(report))
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    ((seen, _),) = host._selector.select(1)
    ends.pop()()
    seen.data()  # in the same turn; nobody is there any more
    assert [(one.code, one.raised, one.lasting) for one in events if isinstance(one, Ended)] == [
        (1, "no such setting", True)
    ]


def test_what_a_process_has_said_is_not_taken_for_what_the_next_one_in_the_same_shell_says(
    host: Host, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(host, "_report", events.append)
    monkeypatch.setattr(host, "_at_the_end_of", lambda process, ended: ends.append(ended))
    host._watch(0)
    told.say(told.link, Raised("no such setting", lasting=True))
    told.link.close()
    told.turn()
    told.connect().close()
    host.processes[0].kill()
    os.waitid(os.P_PID, host.processes[0].pid, os.WEXITED | os.WNOWAIT)
    ends.pop()()
    assert [(one.code, one.raised, one.lasting) for one in events if isinstance(one, Ended)] == [(-9, "", False)]


def test_torchs_report_has_the_ranks_that_have_failed_and_the_first_one_is_its_root_cause(tmp_path: Path) -> None:
    written = tmp_path / "error.json"
    written.write_text(json.dumps({"message": {"message": "written", "extraInfo": {"timestamp": 5}}}))
    failures = {2: Failure(12, 1, "ValueError: bad batch"), 1: Failure(11, -9, "")}
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


def test_who_is_waited_for_and_how_to_let_it_go_on_is_said(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        host.processes[0] = process
        host.obey(Awaited(0, "has not left main()", 115.0))
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        host.obey(Awaited(0, "has not left main()", 115.0))
    finally:
        process.kill()
        process.wait()
    golden.says("\n".join(caplog.messages).replace(str(process.pid), "PID"))


def test_a_controller_in_advance_that_is_stopped_is_not_handed_out() -> None:
    """Rank 0 would wait for its answer, up to a minute, before it starts one itself."""
    for stops in (False, True):
        controllers = Controllers()
        process = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE, start_new_session=True)
        controllers._ready = process
        try:
            if stops:
                os.kill(process.pid, signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert controllers.hand_out({}) is (None if stops else process)
            assert (process.poll() is None) is not stops
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize(("ends", "how"), [("exit 3", "exit code 3"), ("kill -9 $$", "SIGKILL")])
def test_a_controller_in_advance_that_ends_when_it_is_handed_out_says_how(
    host: Host, selector: selectors.BaseSelector, ends: str, how: str
) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(["sh", "-c", f"read work; {ends}"], stdin=pipe, stdout=pipe) as process:
        host._controllers._ready = process
        told: list[dict[str, Any]] = []
        host._hand_out(SimpleNamespace(tell=told.append), {}, 5)
        for key, _ in selector.select(10):
            key.data()
    assert order_of(told[0]) == ControllerAnswer(5, process.pid, {"ended": how})


def test_who_is_looked_at_is_reported_only_if_it_is_stopped(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[Event] = []
    monkeypatch.setattr(host, "_report", reports.append)
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        host.processes[0] = process
        host.obey(Look(0))
        assert reports == []
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        host.obey(Look(0))
        assert reports == [Stopped(0)]
    finally:
        process.kill()
        process.wait()


def test_the_first_start_waits_for_as_long_as_it_takes_and_says_so(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        host.processes[0] = process
        host.obey(Awaited(0, "has not reached lastwords.run(main)", None))
    finally:
        process.kill()
        process.wait()
    golden.says("\n".join(caplog.messages).replace(str(process.pid), "PID"))


class Shortage:
    """An action for which there are no descriptors so many times."""

    def __init__(self, times: int, number: int = errno.EMFILE) -> None:
        self.times, self.number, self.done = times, number, 0

    def __call__(self) -> None:
        self.times -= 1
        if self.times >= 0:
            raise OSError(self.number, os.strerror(self.number))
        self.done += 1


def test_what_is_short_is_waited_for_and_said_once(host: Host, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    act = Shortage(module.SHORTAGE_TRIES_MAX)
    host._try("process 7 cannot be watched", act)
    while not act.done:
        assert host.due_in_s == pytest.approx(module.SHORTAGE_PAUSE_S)
        host.tick()
        clock.now_s += module.SHORTAGE_PAUSE_S
        host.tick()
    assert host.due_in_s is None
    golden.says("\n".join(caplog.messages))


def test_a_shortage_that_lasts_and_any_other_failure_end_the_job(
    host: Host, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[Event] = []
    monkeypatch.setattr(host, "_report", reports.append)
    host._try("process 7 cannot be watched", Shortage(1, errno.EPERM))
    host._try("process 7 cannot be watched", Shortage(module.SHORTAGE_TRIES_MAX + 1))
    for _ in range(module.SHORTAGE_TRIES_MAX - 1):
        clock.now_s += module.SHORTAGE_PAUSE_S
        host.tick()
    assert len(reports) == 1
    clock.now_s += module.SHORTAGE_PAUSE_S
    host.tick()
    golden.says("\n".join(report.why for report in reports if isinstance(report, Lost)))


def test_a_replacement_that_cannot_be_started_for_want_of_processes_is_started_later(
    host: Host, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[Event] = []
    monkeypatch.setattr(host, "_report", reports.append)
    start, shortage = module.Process, Shortage(3, errno.EAGAIN)
    monkeypatch.setattr(module, "Process", lambda *what, **how: (shortage(), start(*what, **how))[1])
    host._context.stdouts = host._context.stderrs = {0: ""}
    host._context.error_files = {0: os.devnull}
    host.obey(Start(0))
    while not shortage.done:
        assert host.due_in_s == pytest.approx(module.SHORTAGE_PAUSE_S)
        clock.now_s += module.SHORTAGE_PAUSE_S
        host.tick()
    assert reports == [], "a process that never was has not ended"
    assert host.processes[0].pid == 1


def test_a_connection_that_cannot_be_taken_is_taken_later(
    host: Host, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, shortage = host._server.accept, Shortage(1)
    monkeypatch.setattr(host, "_server", Accepts(host._server, lambda: (shortage(), accept())[1]))
    host._selector.register(host._server, selectors.EVENT_READ, host._accept)
    host._server.listen()
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(host._server.getsockname())
        host._accept()
        assert not host._selector.select(0), "or it would be tried again without a pause"
        clock.now_s += module.SHORTAGE_PAUSE_S
        host.tick()
        assert len(host._selector.get_map()) == 2


class Accepts:
    """A socket whose `accept` is another one."""

    def __init__(self, one: socket.socket, accept: Callable[[], object]) -> None:
        self._one, self.accept = one, accept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._one, name)


def test_that_a_spare_has_taken_a_place_is_reported_and_of_a_new_process_nothing(
    host: Host, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[Event] = []
    monkeypatch.setattr(host, "_report", reports.append)
    host._context.stdouts = host._context.stderrs = {0: ""}
    host._context.error_files = {0: os.devnull}
    host._spares.restock()
    (spare,) = host._spares._waiting
    host.obey(Start(0))
    assert reports == [], "it is not ready"
    spare.ready, spare.link = True, SimpleNamespace(tell=lambda message: None)  # type: ignore[assignment]
    spare.process.proc.poll = lambda: None
    host.obey(Start(0))
    assert reports == [Imported(0)]


class Told:
    """A worker's connection to a host, whose process is this one or a child of it."""

    def __init__(self, host: Host, process: subprocess.Popen[bytes]) -> None:
        self._host = host
        host.processes[0] = process
        host._server.listen()
        host._selector.register(host._server, selectors.EVENT_READ, host._accept)
        self._pid = process.pid
        self.link = self.connect()

    def connect(self, version: int = PROTOCOL) -> socket.socket:
        link = socket.socket(socket.AF_UNIX)
        link.connect(self._host._server.getsockname())
        self.turn()
        self.say(link, Hello(0, self._pid, version))
        return link

    def say(self, link: socket.socket, report: Report) -> None:
        send(link, to_launcher(report))
        self.turn()

    def turn(self) -> None:
        for key, _ in self._host._selector.select(0.3):
            key.data()


@pytest.fixture
def told(host: Host) -> Iterator[Told]:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        yield Told(host, process)
    finally:
        process.kill()
        process.wait()


def test_what_a_rank_has_saved_after_its_launcher_has_told_it_to_end_is_heard(
    host: Host, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    monkeypatch.setattr(host, "_report", events.append)
    host.end()
    assert told.link.recv(1 << 16).endswith(b"\n"), "it is dismissed"
    assert not told.link.recv(1), "and hears nothing more"
    record = str(tmp_path / "incidents.jsonl")
    send(told.link, to_launcher(Waiting(OWN, 7, record)))
    host.processes[0].terminate()
    host.processes[0].wait()
    assert host.left() == Left({0: -signal.SIGTERM}, 7, Path(record))
    assert events == [], "nobody is replaced any more"


def test_what_a_rank_has_saved_before_its_launcher_ends_is_not_forgotten(host: Host, told: Told) -> None:
    """All have entered `main` again, and none trains yet; a process that is new knows of nothing."""
    told.say(told.link, Waiting(0, 13, "/ckpt/logs/incidents.jsonl"))
    told.say(told.link, Waiting(0))
    host.end()
    host.processes[0].terminate()
    host.processes[0].wait()
    assert host.left() == Left({0: -signal.SIGTERM}, 13, Path("/ckpt/logs/incidents.jsonl"))


def test_a_mistake_of_the_launchers_own_is_not_taken_for_a_workers(
    host: Host, told: Told, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    host: Host, told: Told, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Event] = []
    monkeypatch.setattr(host, "_report", heard.append)
    for _ in range(2):
        send(told.link, {"kind": "Begun", "step": "x", "inexact": ""})
        told.turn()
        assert told.link.recv(1) == b"", "so it ends where it would wait, and is replaced"
        told.link = told.connect()
    told.say(told.link, Over(OWN))
    assert heard == [Over(0)]
    golden.says("\n".join(caplog.messages).replace(str(host.processes[0].pid), "PID"))


def test_a_worker_of_another_version_ends_the_job_and_is_told_what_to_do(
    host: Host, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Event] = []
    monkeypatch.setattr(host, "_report", heard.append)
    with told.connect(PROTOCOL + 1) as link:
        (message,) = Lines().feed(link.recv(1 << 16))
        assert link.recv(1) == b""
    order, (lost,) = order_of(message), heard
    assert isinstance(lost, Lost)
    assert order == Refused(lost.why)
    golden.says(lost.why.replace(str(host.processes[0].pid), "PID"))
