"""A rank's side: `lastwords.run`, what a rank says to its launcher, and what it hears."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import lastwords
from lastwords.errors import BusyError, ConfigError, IncompleteError, LastWordsError, MismatchError, StorageError
from lastwords.launcher import fork_server, new_process, worker
from lastwords.launcher.events import Begun, Guarded, Leaving, Over, Updated
from lastwords.launcher.link import Lines
from lastwords.launcher.new_process import EXIT_BUSY, EXIT_REFUSED
from lastwords.launcher.protocol import (
    ControllerAnswer,
    ControllerWanted,
    Dismissed,
    FromRank,
    RankHello,
    RankRaised,
    ToRank,
    read,
    to_message,
)
from lastwords.launcher.registry import Rejected
from lastwords.optim_wrapper.launch import reporter
from lastwords.optim_wrapper.launch.reporter import LAUNCHER, PROTOCOL, Reporter, listening
from lastwords.optim_wrapper.trainer import run as run_module
from lastwords.optim_wrapper.trainer.register import TFTRegister
from lastwords.optim_wrapper.trainer.run import ProtectedRun
from tests import golden
from tests.launcher.test_cluster_state import ENVIRONMENT

RANK = 3


# ---------------------------------------------------------------------- lastwords.run


def test_main_is_called_once_and_what_it_returns_is_dropped() -> None:
    calls: list[int] = []
    assert lastwords.run(lambda: calls.append(1) or 5) is None  # type: ignore[func-returns-value]
    assert calls == [1]


def refused(main: Any, capfd: pytest.CaptureFixture[str], code: int = EXIT_REFUSED) -> None:
    """In one line, which is the golden one but for the number of the line of this file."""
    with pytest.raises(SystemExit) as ended:
        lastwords.run(main)
    assert ended.value.code == code
    (line,) = capfd.readouterr().err.splitlines()
    golden.says(re.sub(r"(?<=\.py:)\d+", "_", line))


async def coroutine() -> None:
    pass


@pytest.mark.parametrize(
    "main", [None, 5, lambda arguments: None, coroutine], ids=["called", "number", "arguments", "coroutine"]
)
def test_what_is_no_main_is_refused_with_what_to_do(main: Any, capfd: pytest.CaptureFixture[str]) -> None:
    refused(main, capfd)


def test_a_second_training_in_one_process_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    lastwords.run(lambda: None)
    refused(lambda: None, capfd)


def test_a_training_in_a_fork_of_one_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    lastwords.run(lambda: None)
    if not (pid := os.fork()):
        with contextlib.suppress(BaseException):
            refused(lambda: os._exit(1), capfd)
            os._exit(7)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@pytest.mark.parametrize("error", [ConfigError("no such setting"), BusyError("another scheduler runs")], ids=str)
def test_what_lastwords_refuses_in_main_is_one_line_with_the_users_own_place(
    error: LastWordsError, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", str(RANK))

    def main() -> None:
        raise error

    refused(main, capfd, EXIT_BUSY if isinstance(error, BusyError) else EXIT_REFUSED)


def test_a_process_group_from_before_run_is_refused_where_another_process_will_train(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker.dist, "is_initialized", lambda: True)
    lastwords.run(lambda: None)
    monkeypatch.setattr(worker, "_called", False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    refused(lambda: None, capfd)


# ---------------------------------------------------------------------- what a rank says


class Launcher:
    """The other end of one rank's link."""

    def __init__(self) -> None:
        self._server, name = listening(1)
        self.rank = Reporter(name, RANK, step=31)
        self._link: socket.socket | None = None
        self._lines = Lines()

    @property
    def link(self) -> socket.socket:
        """Once the rank has said something."""
        if self._link is None:
            self._link, _ = self._server.accept()
        return self._link

    def say(self, order: ToRank) -> None:
        self.link.sendall(json.dumps(to_message(order)).encode() + b"\n")

    def heard(self) -> list[RankHello | FromRank]:
        """At least one message."""
        return [read(one, RankHello | FromRank, RANK) for one in self._lines.feed(self.link.recv(1 << 20))]

    def close(self) -> None:
        self._server.close()
        if self._link is not None:
            self._link.close()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


def test_what_happens_to_a_rank_is_said_in_order_after_who_it_is(launcher: Launcher) -> None:
    rank = launcher.rank
    rank.guarded(None)
    rank.guarded(Path("/dev/shm/state"))
    rank.begun(31, lacks="")
    rank.updated()
    rank.over()
    rank.left(32, Path("/ckpt/logs/incidents.jsonl"))
    rank.left(0, None)
    rank.raised("ValueError: bad batch", lasting=False)
    assert launcher.heard() == [
        RankHello(RANK, os.getpid(), PROTOCOL),
        Guarded(RANK, ""),
        Guarded(RANK, "/dev/shm/state"),
        Begun(RANK, 31, lacks=""),
        Updated(RANK),
        Over(RANK),
        Leaving(RANK, 32, "/ckpt/logs/incidents.jsonl"),
        Leaving(RANK, 0, ""),
        RankRaised("ValueError: bad batch", lasting=False),
    ]


def test_a_launcher_that_has_gone_stops_no_rank(launcher: Launcher) -> None:
    launcher.rank.updated()
    assert launcher.rank.launcher_pid == os.getpid()
    launcher.link.close()
    launcher.close()
    launcher.rank.over()
    late = Reporter(launcher.rank._name, RANK)
    for one in (late, launcher.rank):
        one.left(7, None)
        assert one.controller([], {}, "log") is None
    assert late.launcher_pid is None


@pytest.mark.parametrize("dismissed", [False, True])
def test_a_launcher_that_ends_says_so_and_one_that_is_killed_does_not(launcher: Launcher, dismissed: bool) -> None:
    assert not launcher.rank.dismissed
    launcher.rank.updated()
    launcher.heard()
    assert not launcher.rank.dismissed
    assert launcher.rank.heals
    if dismissed:
        launcher.say(Dismissed())
    launcher.link.close()
    assert launcher.rank.dismissed is dismissed
    assert not launcher.rank.heals


def test_two_threads_that_ask_for_a_controller_get_each_its_own(launcher: Launcher) -> None:
    """A rank may still wait for one that was to follow when another thread asks."""
    found: dict[str, Any] = {}

    def ask(name: str) -> None:
        found[name] = launcher.rank.controller([name], {}, "log")

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("older", "newer")]
    for thread in threads:
        thread.start()
    answered: list[str] = []
    while len(answered) < 2:
        for one in launcher.heard():
            if isinstance(one, ControllerWanted):
                launcher.say(ControllerAnswer(one.asked - 1, 1))  # to a question that nobody asks any more
                launcher.say(ControllerAnswer(one.asked, 40 + one.asked))
                answered += one.arguments
    for thread in threads:
        thread.join(10)
    assert found == {name: 41 + place for place, name in enumerate(answered)}


def test_where_the_launcher_can_make_no_controller_the_rank_starts_one(launcher: Launcher) -> None:
    launcher.rank.updated()
    launcher.say(ControllerAnswer(1))
    assert launcher.rank.controller([], {}, "log") is None


def test_a_rank_of_another_version_is_refused_with_what_to_do(launcher: Launcher) -> None:
    launcher.rank.updated()
    launcher.say(Rejected("rank 3 speaks version 7 of this protocol, not 8: install the same version everywhere"))
    with golden.raises(ConfigError):
        launcher.rank.controller([], {}, "log")


def test_a_child_that_a_rank_has_forked_says_nothing(launcher: Launcher) -> None:
    reporter.use(launcher.rank)
    assert reporter.reporter() is launcher.rank
    if not (pid := os.fork()):
        launcher.rank.over()
        os._exit(0 if reporter.reporter() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    launcher.rank.updated()
    assert launcher.heard() == [RankHello(RANK, os.getpid(), PROTOCOL), Updated(RANK)]


def test_a_rank_that_could_not_be_forked_finds_its_launcher_in_the_environment_and_its_children_do_not(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reporter.reporter() is None
    monkeypatch.setenv(LAUNCHER, f"31 {launcher.rank._name}")
    monkeypatch.setenv("RANK", str(RANK))
    found = reporter.reporter()
    assert found is not None
    assert found.goes_on_at == 31
    assert LAUNCHER not in os.environ
    found.over()
    assert launcher.heard()[-1] == Over(RANK)


# ---------------------------------------------------------------------- where a rank goes on


@pytest.mark.parametrize("newest", [7, 4], ids=["it is there", "on another host"])
def test_a_loop_that_does_not_go_on_where_it_was_saved_is_refused(newest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module.socket, "gethostname", lambda: "node-2")
    protection = SimpleNamespace(newest_step=lambda: newest)
    for step in (7, 8):
        ProtectedRun._refuse_to_begin_before(SimpleNamespace(start_step=step, protection=protection), 7)  # type: ignore[arg-type]
    with golden.raises(ConfigError):
        ProtectedRun._refuse_to_begin_before(SimpleNamespace(start_step=4, protection=protection), 7)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- how a script ends


def out_of_resume(error: Exception) -> None:
    """`tft.resume()`, which raises this."""

    def started(name: str) -> None:
        raise error

    TFTRegister.resume(SimpleNamespace(_started=started))  # type: ignore[arg-type]


def elsewhere(error: BaseException) -> None:
    """A step that raises this."""
    raise error


@pytest.mark.parametrize(
    ("error", "place", "lasting"),
    [
        (ValueError("too small"), elsewhere, False),
        (SystemExit(3), elsewhere, False),
        (KeyboardInterrupt(), elsewhere, False),
        (ConfigError("no such setting"), elsewhere, True),
        (BusyError("another scheduler runs"), elsewhere, True),
        (MismatchError("another model"), out_of_resume, True),
        (IncompleteError("no checkpoint"), out_of_resume, True),
        (StorageError("a file system that hangs"), out_of_resume, False),
        (MismatchError("replicas have diverged"), elsewhere, False),
    ],
    ids=lambda one: getattr(one, "__name__", repr(one)),
)
def test_the_launcher_hears_what_has_left_the_script_and_whether_it_would_come_again(
    launcher: Launcher, error: BaseException, place: Callable[[Any], None], lasting: bool
) -> None:
    reporter.use(launcher.rank)
    with pytest.raises(type(error)) as raised:
        place(error)
    new_process._tell(raised.value)
    _, said = launcher.heard()
    assert isinstance(said, RankRaised)
    assert said.lasting is lasting
    assert said.error.endswith(str(error))


def test_of_a_script_that_comes_to_its_end_nothing_is_said(launcher: Launcher) -> None:
    reporter.use(launcher.rank)
    for code in (None, 0):
        new_process._tell(SystemExit(code))
    launcher.rank.updated()
    assert launcher.heard()[1:] == [Updated(RANK)]


# ---------------------------------------------------------------------- what is done before the fork


def test_what_is_done_before_the_fork_uses_no_device_and_no_hook_and_draws_nothing_of_pythons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("touched")

    monkeypatch.setattr("setproctitle.setproctitle", lambda title: None)
    drawn = random.getstate(), numpy.random.get_state()[1].tolist()
    monkeypatch.setattr(fork_server, "_has_device", lambda: False)
    fork_server._import_all()
    assert drawn == (random.getstate(), numpy.random.get_state()[1].tolist())
    monkeypatch.setattr(fork_server, "_has_device", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", refuse)
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    hook = torch.nn.modules.module.register_module_forward_hook(refuse)
    try:
        fork_server._import_all()
    finally:
        hook.remove()
