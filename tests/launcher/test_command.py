"""Flags of `lastwords run` that cannot work, and what killed launchers leave."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from lastwords.errors import ConfigError
from lastwords.launcher import command
from lastwords.launcher.agent import ABANDONED_S, HealingAgent, remove_abandoned
from tests import golden

GIB = 1 << 30


@pytest.mark.parametrize(
    "flags",
    [
        ["--spares", "-1"],
        ["--spares", "100"],
        ["--nnodes", "1:4"],
        ["--nnodes", "two"],
        ["--nproc-per-node", "x"],
        ["--nproc-per-node", "0"],
        ["--max-restarts", "-2"],
        ["--run-path"],
    ],
    ids=" ".join,
)
def test_flags_that_cannot_work_are_refused_before_anything_starts(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "available_memory_bytes", lambda: 2 * GIB)
    script = tmp_path / "train.py"
    script.touch()
    with golden.raises(ConfigError):
        command.run([*flags, str(script)])


def test_a_script_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with golden.raises(ConfigError):
        command.run(["--standalone", "train.py"])


@pytest.fixture
def ignored_hangup() -> Iterator[None]:
    """As `nohup` does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("ignored_hangup")
def test_what_is_ignored_is_not_for_torch_to_handle() -> None:
    assert command.handled("SIGTERM, SIGHUP,SIGUSR1") == ["SIGTERM", "SIGUSR1", "SIGQUIT", "SIGUSR2", "SIGXCPU"]


class Shutdown:
    """In place of torch's, which sends a signal to the ranks and waits."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.meanwhile: list[object] = []

    def __call__(self, agent: object, death_sig: int, **_: object) -> None:
        self.sent.append(death_sig)
        self.meanwhile.append([signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)])


def test_ranks_get_sigterm_whatever_has_ended_the_launcher_and_nothing_but_ctrl_c_cuts_it_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torchs = Shutdown()
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", lambda *arguments, **more: torchs(*arguments, **more))
    agent = HealingAgent.__new__(HealingAgent)
    agent._round = None
    before = {number: signal.getsignal(number) for number in signal.Signals}
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGINT):
        agent._shutdown(number, timeout=30)
    assert torchs.sent == [signal.SIGTERM, signal.SIGTERM, signal.SIGTERM, signal.SIGINT]
    assert torchs.meanwhile == [[signal.SIG_IGN, signal.SIG_IGN, before[signal.SIGINT]]] * 4
    assert {number: signal.getsignal(number) for number in signal.Signals} == before
    golden.says(command.end_text(agent.left))
    golden.says(command.end_text(None))


def test_memory_is_what_the_kernel_says() -> None:
    assert 0 < command.available_memory_bytes() < 1 << 50


def test_sockets_of_killed_launchers_are_removed_and_no_others(short_path: Path) -> None:
    servers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for server, name in zip(servers, ("lives", "killed", "begins"), strict=True):
        (short_path / f"lastwords-{name}").mkdir()
        server.bind(str(short_path / f"lastwords-{name}" / "agent"))
    servers[0].listen()
    servers[1].close()
    long_ago_s = time.time() - 2 * ABANDONED_S
    for name in ("lives", "killed"):
        os.utime(short_path / f"lastwords-{name}" / "agent", (long_ago_s, long_ago_s))
    remove_abandoned(short_path)
    for server in servers:
        server.close()
    assert sorted(path.name for path in short_path.iterdir()) == ["lastwords-begins", "lastwords-lives"]
