"""What a host's launcher prepares for the next failure, and when."""

from __future__ import annotations

import contextlib
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

from lastwords.launcher import host as module
from lastwords.launcher.core import Awaited
from lastwords.launcher.host import RESTOCK_AFTER_UPDATE_S, RESTOCK_S, Host
from lastwords.launcher.processes import ended_badly
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
    monkeypatch.setattr(Host, "_at_the_end_of", nobody_watches)
    monkeypatch.setattr(module.Controllers, "prepare", lambda self: found.append("controller"))
    return found


@pytest.fixture
def host(tmp_path: Path, clock: Clock, started: list[str]) -> Iterator[Host]:
    context = SimpleNamespace(envs={0: {"RANK": "0"}}, args={0: ()}, entrypoint="", _numa_options=None)
    context.subprocess_handlers = {0: SimpleNamespace(proc=None)}
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as server, selectors.DefaultSelector() as selector:
        server.bind(str(tmp_path / "agent"))
        yield Host(server, context, 1, selector, lambda event: None)


def test_what_was_used_is_replaced_once_a_rank_has_updated(host: Host, clock: Clock, started: list[str]) -> None:
    host._restock()
    assert started == ["spare"]
    assert host.due_in_s is None
    host._spares.clear()  # it becomes a rank
    host._restock_in(RESTOCK_S)
    host.tick()
    assert started == ["spare"], "the ranks need the processors to train again"

    who = module._Who()
    who.rank = 0
    host._hear(who, socket.socket(), {"updated": True})
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
