"""The demo of a dynamic cluster: the whole story once, its scripts, and that its comparison can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo.recover import IDENTICAL, SCRIPTS, inconsistency

ROOT = Path(__file__).resolve().parents[2]
LOSSES = [{"pid": 11}, {"pid": 12}, {"pid": 13}, {"global_step": 1, "loss": 0.5}, {"global_step": 2, "loss": 0.25}]
AGAIN = {"pid": 14}


def written(folder: Path, *records: dict[str, object]) -> Path:
    (folder / "rank_0.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return folder


def test_a_step_that_was_repeated_with_the_same_loss_is_no_difference(tmp_path: Path) -> None:
    assert inconsistency(written(tmp_path, *LOSSES, AGAIN, LOSSES[-1])) is None


def test_a_step_that_was_repeated_with_another_loss_is_a_difference(tmp_path: Path) -> None:
    repeated = {"global_step": 2, "loss": 0.125}
    assert inconsistency(written(tmp_path, *LOSSES, AGAIN, repeated)) is not None
    assert inconsistency(written(tmp_path, *LOSSES, AGAIN, repeated, LOSSES[-1])) is not None


@pytest.mark.parametrize("more", [[], [AGAIN, {"pid": 15}]], ids=["fewer", "more"])
def test_a_rank_that_ran_in_more_processes_or_fewer_is_a_difference(
    more: list[dict[str, object]], tmp_path: Path
) -> None:
    assert inconsistency(written(tmp_path, *LOSSES, *more)) is not None


def script(name: str, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OUT": str(out)}
    command = ["bash", str(SCRIPTS / name), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.process
def test_a_directory_that_has_a_job_or_none_is_said(tmp_path: Path) -> None:
    (tmp_path / "environment").touch()
    assert script("run.sh", tmp_path).returncode == 2
    assert script("recover.sh", tmp_path, "worker").returncode == 2
    assert script("recover.sh", tmp_path / "none").returncode == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["environment"], "nothing was started"


@pytest.mark.process
@pytest.mark.thorough
def test_the_demo_kills_a_worker_the_scheduler_both_and_all_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "demo.recover", "--workers", "2", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    demo = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, env=environment, cwd=ROOT)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    lines = demo.stdout.strip().splitlines()
    assert lines[-1] == IDENTICAL
    assert sum("kill -9 of" in line for line in lines) == 4
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in content(path)]
    assert left == []


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
