"""Flags of `lastwords run` that cannot work, and what killed launchers leave."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.launcher.api as torchs_launcher
import torch.distributed.run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException, _terminate_process_handler

from lastwords.errors import ConfigError
from lastwords.launcher import agent as agent_module
from lastwords.launcher import command
from lastwords.launcher.agent import HANDLED, HealingAgent
from lastwords.launcher.host import HowLeft, Program
from lastwords.processor.departure import EXIT_NOT_SAVED, EXIT_SAVED
from lastwords.processor.signals import UNHANDLED_STOPS
from tests import golden


def test_every_flag_has_its_place_in_the_docs() -> None:
    """Red with a newer torch: find out what its new flag does to forks, and say so there."""
    page = (Path(__file__).parents[2] / "docs/running.md").read_text(encoding="utf-8")
    placed = re.findall(r"`(--[a-z-]+)`", page.partition("### Flags")[2].partition("\n### ")[0])
    names = [name for action in command.parser()._actions for name in action.option_strings]
    assert {name for name in names if name.startswith("--") and "_" not in name} - {"--help"} == {*placed}
    assert len({*placed}) == len(placed)


@pytest.mark.parametrize(
    "flags",
    [
        ["--nnodes", "1:4"],
        ["--nnodes", "two"],
        ["--nproc-per-node", "x"],
        ["--nproc-per-node", "0"],
        ["--max-restarts", "-2"],
        ["--run-path"],
        ["--logs-specs", "absent"],
    ],
    ids=" ".join,
)
def test_flags_that_cannot_work_are_refused_before_anything_starts(flags: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with golden.raises(ConfigError):
        command.run([*flags, str(script)])


KEPT = (
    "--role trainer", "--max-restarts 3", "--monitor-interval 0.7", "--shutdown-timeout 7", "--start-method fork",
    "--virtual-local-rank", "--local-addr 127.0.0.7", "--master-addr 127.0.0.7", "--master-port 7", "--node-rank 1",
    "--rdzv-id a-job", "--rdzv-conf timeout=7", "--event-log-handler mine", "--local-ranks-filter 0",
    "--duplicate-stdout-filters loss", "--duplicate-stderr-filters loss", "--redirects 1", "--tee 2",
    "--numa-binding node",
)  # fmt: skip
AT_A_PORT = "--master-port", "9"


@pytest.mark.usefixtures("torchs")
@pytest.mark.parametrize("flags", KEPT)
def test_a_flag_of_torchruns_means_the_same_to_torchs_agent(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if flags.split()[0] not in torchrun.get_args_parser()._option_string_actions:
        pytest.skip("this release of torch does not have it")
    ours, torchs = (settings(**given) for given in agents(tmp_path, monkeypatch, *AT_A_PORT, *flags.split()))
    without, _ = agents(tmp_path, monkeypatch, *AT_A_PORT)
    assert ours == torchs
    assert ours != settings(**without)


@pytest.mark.usefixtures("torchs")
def test_one_host_meets_where_torchruns_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a free port, so that two jobs of one host do not meet; before torch 2.13 at a fixed one."""
    ours, torchs = (given["spec"].rdzv_handler for given in agents(tmp_path, monkeypatch))
    assert type(ours) is type(torchs)
    assert ours.get_run_id() != "none" or torchs.get_run_id() == "none"


def agents(directory: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> list[dict[str, Any]]:
    """What the agent of `lastwords run` is made with, and that of torchrun."""
    made: list[dict[str, Any]] = []

    def make(**given: Any) -> None:
        made.append(given)
        raise SystemExit

    monkeypatch.setattr(command, "HealingAgent", make)
    monkeypatch.setattr(torchs_launcher, "LocalElasticAgent", make)
    script = directory / "train.py"
    script.touch()
    for run in (command.run, torchrun.main):
        with pytest.raises(SystemExit):
            run([*flags, str(script)])
    return made


def settings(spec: Any, logs_specs: Any, start_method: str, shutdown_timeout: int = 0, **_: object) -> dict[str, Any]:
    """What an agent is made with; the store's address is in both handlers, and a directory for logs in none."""
    elsewhere = {"rdzv_handler", "master_addr", "master_port"}
    found = {one.name: getattr(spec, one.name) for one in dataclasses.fields(spec) if one.name not in elsewhere}
    found |= vars(spec.rdzv_handler) | vars(logs_specs) | {"_root_log_dir": None}
    return found | {"start_method": start_method, "shutdown_timeout": shutdown_timeout}


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

    def __call__(self, agent: object, death_sig: int, *_: object, **__: object) -> None:
        self.sent.append(death_sig)
        self.meanwhile.append([signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)])


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those that were there are there again after the test."""
    before = {number: signal.getsignal(number) for number in signal.Signals}
    yield
    for number, handler in before.items():
        if handler is not signal.getsignal(number):
            signal.signal(number, handler)


class Agent(HealingAgent):
    """Without a job: nothing is started, and all that happens is that signals come while it looks after its ranks."""

    def __init__(self, comes: tuple[signal.Signals, ...] = ()) -> None:
        spec = SimpleNamespace(max_restarts=0, role="", local_world_size=1, rdzv_handler=None)
        super().__init__(spec, None, program=Program("", False, 1))  # type: ignore[arg-type]
        self._comes = comes

    def _invoke_run(self, role: str = "") -> RunResult:
        self._start_workers(SimpleNamespace(spec=SimpleNamespace(local_world_size=1)))  # type: ignore[arg-type]
        signal.pthread_sigmask(signal.SIG_BLOCK, self._comes)
        for number in self._comes:
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._comes)  # as a launcher that was stopped gets all at once
        raise AssertionError("nothing has come")


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, handlers: None) -> Shutdown:
    def start(agent: object, group: object) -> dict[int, int]:
        for name in os.environ[HANDLED].split(","):
            signal.signal(signal.Signals[name], _terminate_process_handler)
        return {}

    shutdown = Shutdown()
    monkeypatch.setattr(LocalElasticAgent, "_start_workers", start)
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", lambda *arguments, **more: shutdown(*arguments, **more))
    host = SimpleNamespace(left=lambda: HowLeft({0: 75}, 31, None))
    monkeypatch.setattr(agent_module, "_Round", lambda *_: SimpleNamespace(host=host, end=lambda: None))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(HANDLED, "SIGTERM,SIGHUP,SIGUSR2,SIGXCPU")
    return shutdown


def test_ranks_get_sigterm_whatever_has_ended_the_launcher_and_nothing_but_ctrl_c_cuts_it_short(
    torchs: Shutdown,
) -> None:
    agent = Agent()
    interrupt = signal.getsignal(signal.SIGINT)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGINT):
        agent._shutdown(number, timeout=30)
    assert torchs.sent == [signal.SIGTERM, signal.SIGTERM, signal.SIGTERM, signal.SIGINT]
    assert torchs.meanwhile == [[signal.SIG_IGN, signal.SIG_IGN, interrupt]] * 4
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "the last line is the last one"
    for left, expected in ((agent.left, EXIT_NOT_SAVED), (None, 1)):
        code, text = command.ended_by_signal(left)
        assert code == expected
        golden.says(text)


def test_of_many_signals_at_once_one_ends_the_launcher_and_its_ranks_are_told(torchs: Shutdown) -> None:
    """Each that raised would cut short what the one before it has begun."""
    agent = Agent((signal.SIGHUP, signal.SIGTERM, signal.SIGXCPU, signal.SIGUSR2))
    with pytest.raises(SignalException) as ended:
        agent.run()
    assert ended.value.sigval == signal.SIGHUP
    assert torchs.sent == [signal.SIGTERM]
    assert agent.left == HowLeft({0: 75}, 31, None)


@pytest.mark.parametrize(
    ("ignored", "sent"),
    [
        ([signal.SIGTERM], signal.SIGINT),
        ([signal.SIGTERM, signal.SIGINT], signal.SIGHUP),
        ([signal.SIGTERM, signal.SIGINT, *UNHANDLED_STOPS], signal.SIGTERM),
    ],
    ids=["SIGTERM", "SIGINT as well", "all"],
)
def test_ranks_that_ignore_sigterm_are_told_by_another_signal(
    torchs: Shutdown, ignored: list[signal.Signals], sent: int
) -> None:
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    agent = Agent()
    agent._shutdown(signal.SIGHUP, timeout=30)
    agent._stop_workers(SimpleNamespace())  # type: ignore[arg-type]
    assert torchs.sent == [sent, sent]


@pytest.mark.usefixtures("torchs")
def test_ranks_that_the_launcher_could_not_wait_for_are_told_before_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[int, str]] = []

    class Interrupted(Agent):
        def run(self, role: str = "") -> RunResult:
            raise SignalException("", signal.SIGINT)

        def pass_on(self, number: int) -> None:
            told.append((number, capfd.readouterr().err))

    monkeypatch.setattr(command, "HealingAgent", lambda **_: Interrupted())
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(SystemExit):
        command.run(["--standalone", str(script)])
    assert told == [(signal.SIGTERM, "")]
    golden.says(capfd.readouterr().err)


@pytest.mark.usefixtures("torchs")
@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")  # torch says so
def test_a_launcher_whose_stderr_is_dead_ends_with_its_exit_code(
    tmp_path: Path, close_stderr: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    close_stderr()
    monkeypatch.setattr(command, "HealingAgent", lambda **_: Agent((signal.SIGHUP,)))
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(SystemExit) as ended:
        command.run(["--standalone", str(script)])
    assert ended.value.code == EXIT_SAVED


def test_spares_are_accepted_and_do_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(ConfigError):
        command.run(["--spares", "2", "--nproc-per-node", "0", str(script)])
    golden.says(capfd.readouterr().err)
