"""What becomes of a job whose launcher is told to end, or is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lastwords.checkpoint import load
from tests.integration.faults import is_gone
from tests.integration.harness import Cluster, Process
from tests.launcher.test_heal import RANKS, SCRIPT, environment, pids

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
def launcher(cluster: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Process]:
    """The one of a job that trains for ever; all of it is gone after the test. Parameters: more for `Cluster.start`."""
    more = dict(getattr(request, "param", {}))
    env = environment() | more.pop("env", {})
    job = cluster.start(
        tmp_path / "launched",
        module=SCRIPT,
        arguments=[str(tmp_path), "100000"],
        world_size=RANKS,
        launcher="healing",
        env=env,
        **more,
    )
    try:
        until(lambda: trained(tmp_path), "all ranks train")
        yield Process(job)
    finally:
        job.close()


@pytest.mark.parametrize("launcher", [{"by_exec": True}], ids=["by exec"], indirect=True)
def test_a_launcher_passes_signals_on_and_when_it_is_terminated_nothing_is_lost(
    launcher: Process, tmp_path: Path
) -> None:
    workers = [pids(tmp_path, rank)[0] for rank in range(RANKS)]
    launcher.send_signal(signal.SIGUSR1)
    until(lambda: all((tmp_path / f"told-{rank}").exists() for rank in range(RANKS)), "all ranks have got SIGUSR1")
    launcher.terminate()
    assert launcher.wait(60) != 0
    assert load.latest(tmp_path / "ckpt") is not None, launcher.job.report()
    assert all(is_gone(pid) for pid in workers)
    said = (launcher.job.directory / "healing.err").read_text().splitlines()
    assert sum(line.startswith("lastwords: ") for line in said) == RANKS, "each was asked to stop, and misses nobody"


@pytest.mark.parametrize("launcher", [{"env": {"OWN_SIGUSR1": "1"}}], ids=["own handler"], indirect=True)
def test_sigusr1_to_a_rank_or_to_the_launcher_is_a_checkpoint_now(launcher: Process, tmp_path: Path) -> None:
    ranks = [pids(tmp_path, rank)[0] for rank in range(RANKS)]
    os.kill(ranks[0], signal.SIGUSR1)
    until(lambda: load.latest(tmp_path / "ckpt") is not None, "a checkpoint")
    first = load.latest(tmp_path / "ckpt")
    assert not (tmp_path / "told-1").exists()
    launcher.send_signal(signal.SIGUSR1)
    until(lambda: load.latest(tmp_path / "ckpt") != first, "another checkpoint")
    until((tmp_path / "told-1").exists, "the rank whose script handles it")
    assert not any(is_gone(pid) for pid in ranks)
