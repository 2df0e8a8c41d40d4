"""The demo itself, small: the whole story, and the training script started by hand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from demo.launch import free_port

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--hidden", "64", "--epochs", "2")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.mark.process
@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_demo_kills_a_rank_and_ends_with_the_same_bits(tmp_path: Path, ranks: int) -> None:
    command = [sys.executable, "-m", "demo.run", *SMALL, "--ranks", str(ranks), "--out", str(tmp_path / "out")]
    demo = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=ENVIRONMENT, cwd=ROOT)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stdout.strip().splitlines()[-1] == "resumed run is bitwise identical to the uninterrupted run"
    for row in ("known after", "decided after", "published after", "bytes", "steps lost"):
        assert row in demo.stdout
    killed = (tmp_path / "out" / "killed" / "output.txt").read_text(encoding="utf-8")
    assert len(re.findall(r"^lastwords: rank \d: rank \d died", killed, flags=re.MULTILINE)) == ranks - 1, killed
    assert len(re.findall(r"exitcode +: 75 ", killed)) == ranks - 1, (
        "torchrun's SIGTERM may not change a survivor's exit code"
    )
    assert (tmp_path / "out" / "last-words.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.process
@pytest.mark.thorough
def test_the_demo_in_a_parallel_layout_ends_with_the_bits_of_torch_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "demo.transformer.run", "--windows", "128", "--out", str(tmp_path / "out")]
    demo = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=280, env={**ENVIRONMENT, "LAYOUT": "tp"}, cwd=ROOT
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stdout.strip().splitlines()[-1] == "resumed run is bitwise identical to the uninterrupted run"
    (checkpoint,) = (tmp_path / "out" / "killed" / "checkpoints").glob("tft_saved_checkpoints-step_*")
    assert len(list(checkpoint.glob("rank_*/*.ckpt"))) == 2, "one file for each half of the model"


@pytest.mark.process
@pytest.mark.thorough
def test_the_training_script_runs_in_processes_that_were_started_by_hand(tmp_path: Path) -> None:
    arguments = ["--hidden", "32", "--epochs", "1", "--ckpt-path", str(tmp_path), "--ctrl-port", str(free_port())]
    command = [sys.executable, "-m", "demo.train", *arguments]
    place = {"WORLD_SIZE": "3", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**ENVIRONMENT, **place, "RANK": str(rank)},
            cwd=ROOT,
        )
        for rank in range(3)
    ]
    try:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0, 0], "\n".join(outputs)
    checksums = {re.search(r"checksum ([0-9a-f]{16})", output)[1] for output in outputs}  # type: ignore[index]
    assert len(checksums) == 1, "all ranks end with the same weights and optimizer state"
