"""A job of two hosts, two launchers on this one: a death on either begins all ranks anew, and nothing else changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lastwords.checkpoint import load
from tests.integration.harness import free_port
from tests.integration.zygote import command_line, processes
from tests.launcher.test_heal import ROOT, SCRIPT, STEPS, check_equal, environment, pids, run
from tests.launcher.test_launcher_ends import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

HOSTS, PER_HOST = 2, 2
RANKS = HOSTS * PER_HOST


def start(directory: Path, steps: int, *deaths: str) -> list[subprocess.Popen[bytes]]:
    """A launcher for each host; what they say is in `directory`."""
    flags = ["--nnodes", str(HOSTS), "--nproc-per-node", str(PER_HOST), "--rdzv-backend", "c10d"]
    flags += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "two-hosts"]
    command = [sys.executable, "-m", "lastwords.cli", "run", *flags, "-m", SCRIPT, str(directory), str(steps), *deaths]
    launchers = []
    for host in range(HOSTS):
        with (directory / f"host-{host}").open("wb") as log:
            launchers.append(subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=log, stderr=log))
    return launchers


def told(directory: Path) -> str:
    return "\n".join((directory / f"host-{host}").read_text() for host in range(HOSTS))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same ranks on one host under torchrun, where nobody dies."""
    directory = tmp_path_factory.mktemp("undisturbed")
    run(directory, launcher="torchrun", ranks=RANKS)
    return directory


@pytest.mark.thorough
def test_whichever_host_a_rank_dies_on_those_of_both_begin_anew_and_nothing_differs(
    tmp_path: Path, undisturbed: Path
) -> None:
    launchers = start(tmp_path, STEPS, "3:5:bwd", "1:1:alone", "0:11:fwd")
    try:
        assert [launcher.wait(400) for launcher in launchers] == [0, 0], told(tmp_path)
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    check_equal(tmp_path, undisturbed, heals=2, ranks=RANKS)


def controllers_of(launcher_pid: int) -> list[int]:
    """The one that serves, and perhaps another one in advance."""
    found = [pid for pid, (parent, _) in processes().items() if parent == launcher_pid]
    return [pid for pid in found if "lastwords.controller" in command_line(pid)]


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_all_ranks_of_the_controllers_host_die_with_it_and_nothing_is_lost(
    tmp_path: Path, number: signal.Signals
) -> None:
    launchers = start(tmp_path, 100_000)
    try:
        until(lambda: all((tmp_path / f"trace-{rank}").exists() for rank in range(RANKS)), "all ranks train")
        first = [pids(tmp_path, rank)[0] for rank in range(RANKS)]
        found = controllers_of(processes()[first[0]][0])
        assert found, told(tmp_path)
        for controller in found:
            os.kill(controller, number)
        for pid in first[:PER_HOST]:
            os.kill(pid, signal.SIGKILL)
        until(lambda: all(len(pids(tmp_path, rank)) == 2 for rank in range(RANKS)), "all begin anew")
        for rank in range(RANKS):
            steps = [int(line.split()[0]) for line in (tmp_path / f"trace-{rank}").read_text().splitlines()]
            assert steps == sorted({*steps}), (rank, told(tmp_path))
    finally:
        for launcher in launchers:
            launcher.terminate()
        for launcher in launchers:
            launcher.wait(100)


@pytest.mark.thorough
def test_a_host_that_is_lost_ends_the_job_with_a_checkpoint(tmp_path: Path) -> None:
    launchers = start(tmp_path, 100_000, "3:8:parent")
    try:
        assert all(launcher.wait(200) != 0 for launcher in launchers), told(tmp_path)
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    assert load.latest(tmp_path / "ckpt") is not None, told(tmp_path)
