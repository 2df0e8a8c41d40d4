"""The spares of one host: which one is taken, and what becomes of those that die."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from lastwords.launcher import spares as module
from lastwords.launcher.spares import DEATHS_MAX, NO_RANK, RESTOCK_S, Spare, Spares
from lastwords.optim_wrapper.launch.config import SPARE
from tests import golden


class Stock:
    """Spares whose processes are none, and what they ask of their host."""

    def __init__(self, wanted: int, args: dict[int, tuple[str, ...]]) -> None:
        context = SimpleNamespace(envs={0: {"RANK": "0"}}, args=args, entrypoint="", _numa_options=None)
        self.said: list[str] = []
        self.pauses_s: list[float] = []
        self.ends: list[Any] = []
        self.spares = Spares(
            wanted, context, lambda process, ended: self.ends.append(ended), self.said.append, self.pauses_s.append
        )

    def restock(self) -> list[Spare]:
        self.spares.restock()
        return self.spares._waiting


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Of the processes that would have been started."""
    found: list[dict[str, str]] = []

    def process(entrypoint: str, args: tuple[str, ...], env: dict[str, str], *_: Any) -> Any:
        found.append(env)
        return SimpleNamespace(proc=SimpleNamespace(pid=len(found), poll=lambda: None, wait=lambda: 1))

    monkeypatch.setattr(module, "Process", process)
    return found


def test_so_many_as_are_wanted_are_started_and_none_knows_a_rank(environments: list[dict[str, str]]) -> None:
    stock = Stock(2, {0: ()})
    assert [one.pid for one in stock.restock()] == [one.pid for one in stock.restock()] == [1, 2]
    assert [(env["RANK"], env[SPARE]) for env in environments] == [(NO_RANK, "1")] * 2


@pytest.mark.usefixtures("environments")
def test_one_is_taken_that_is_ready_lives_and_has_the_arguments_of_the_rank() -> None:
    stock = Stock(2, {0: ("a",), 1: ("a",), 2: ("b",)})
    first, second = stock.restock()
    assert stock.spares.take(1) is None, "none is ready"
    first.ready = second.ready = True
    first.process.proc.poll = lambda: 1
    assert stock.spares.take(2) is None
    assert stock.spares.take(1) is second
    assert stock.spares.of(second.pid) is None
    assert stock.spares.of(first.pid) is first


@pytest.mark.usefixtures("environments")
def test_a_spare_that_is_stopped_is_used_only_once_it_goes_on() -> None:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        stock = Stock(1, {0: ()})
        (spare,) = stock.restock()
        spare.ready, spare.process.proc = True, process
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert stock.spares.take(0) is None
        os.kill(process.pid, signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
        assert stock.spares.take(0) is spare
    finally:
        process.kill()
        process.wait()
    golden.says("\n".join(stock.said).replace(str(process.pid), "PID"))


@pytest.mark.usefixtures("environments")
def test_spares_that_die_in_a_row_are_counted_until_one_is_used(caplog: pytest.LogCaptureFixture) -> None:
    stock = Stock(1, {0: ()})
    for _ in range(DEATHS_MAX):
        stock.restock()
        stock.ends.pop()()
    (used,) = stock.restock()
    used.ready = True
    assert stock.spares.take(0) is used
    stock.ends.pop()()
    assert stock.pauses_s == [0.0, RESTOCK_S, RESTOCK_S], "the end of a rank is none of a spare"
    for _ in range(1 + DEATHS_MAX):
        assert len(stock.restock()) == 1
        stock.ends.pop()()
    assert stock.restock() == []
    golden.says("\n".join(caplog.messages))


def test_a_spare_that_cannot_be_started_is_said_and_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(module, "Process", fails)
    stock = Stock(2, {0: ()})
    assert stock.restock() == []
    assert stock.pauses_s == [RESTOCK_S]
    golden.says("\n".join(stock.said))
