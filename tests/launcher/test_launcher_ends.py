"""What becomes of a job whose launcher is told to end, or is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lastwords.checkpoint import load
from tests.integration.faults import is_gone
from tests.launcher.test_heal import RANKS, ROOT, SCRIPT, environment, pids

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

PATIENCE_S = 400.0


def until(true: Callable[[], bool], what: str) -> None:
    """Looks ten times a second."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S * 10)):
        if true():
            return
        pause.wait(0.1)
    raise AssertionError(f"waited for {PATIENCE_S:g} s: {what}")


def trained(directory: Path) -> bool:
    return all((directory / f"trace-{rank}").exists() for rank in range(RANKS))


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A job that trains for ever, and its launcher; all of it is gone after the test."""
    command = [sys.executable, "-m", "lastwords.cli", "run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["-m", SCRIPT, str(tmp_path), "100000"]
    with (tmp_path / "log").open("wb") as log:
        launcher = subprocess.Popen(
            command, env=environment() | getattr(request, "param", {}), cwd=ROOT, stdout=log, stderr=log
        )
    try:
        until(lambda: trained(tmp_path), "all ranks train")
        yield launcher
    finally:
        launcher.kill()
        launcher.wait()
        for rank in range(RANKS):
            for pid in pids(tmp_path, rank):
                if not is_gone(pid):
                    os.kill(pid, signal.SIGKILL)


def test_a_launcher_passes_signals_on_and_when_it_is_terminated_nothing_is_lost(
    job: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    workers = [pids(tmp_path, rank)[0] for rank in range(RANKS)]
    job.send_signal(signal.SIGUSR1)
    until(lambda: all((tmp_path / f"told-{rank}").exists() for rank in range(RANKS)), "all ranks have got SIGUSR1")
    job.terminate()
    assert job.wait(60) != 0
    assert load.latest(tmp_path / "ckpt") is not None, (tmp_path / "log").read_text()
    assert all(is_gone(pid) for pid in workers)


@pytest.mark.parametrize("job", [{"OWN_SIGUSR1": "1"}], indirect=True)
def test_sigusr1_to_a_rank_or_to_the_launcher_is_a_checkpoint_now(job: subprocess.Popen[bytes], tmp_path: Path) -> None:
    ranks = [pids(tmp_path, rank)[0] for rank in range(RANKS)]
    os.kill(ranks[0], signal.SIGUSR1)
    until(lambda: load.latest(tmp_path / "ckpt") is not None, "a checkpoint")
    first = load.latest(tmp_path / "ckpt")
    assert not (tmp_path / "told-1").exists()
    job.send_signal(signal.SIGUSR1)
    until(lambda: load.latest(tmp_path / "ckpt") != first, "another checkpoint")
    until((tmp_path / "told-1").exists, "the rank whose script handles it")
    assert not any(is_gone(pid) for pid in ranks)


def test_without_a_launcher_a_death_ends_the_job_with_a_checkpoint(
    job: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    workers = [pids(tmp_path, rank)[0] for rank in range(RANKS)]
    job.kill()
    job.wait()
    os.kill(workers[1], signal.SIGKILL)
    until(lambda: all(is_gone(pid) for pid in workers), "the survivors end")
    assert load.latest(tmp_path / "ckpt") is not None, (tmp_path / "log").read_text()
