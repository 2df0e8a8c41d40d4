"""A script with Ray Train's TorchTrainer: a worker is killed, Ray starts all of them again, and no bit differs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.test_frameworks import RANKS, check_equal
from tests.launcher.forked import ROOT
from tests.launcher.test_heal import environment

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: make ci-frameworks"),
]

WAIT_S = 600.0
DEATHS = ("1:3:fwd", "0:12:win")
"""In a forward pass, and after the update at an epoch's end."""


def run(directory: Path, *deaths: str, **more: str) -> None:
    directory.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.frameworks.ray_script", str(directory), *deaths],
        env={**environment(), "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src"))), **more},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_workers_that_ray_starts_again_go_on_with_the_same_bits(tmp_path: Path) -> None:
    undisturbed, ours = tmp_path / "whole", tmp_path / "killed"
    run(undisturbed)
    run(ours, *DEATHS, PROTECTED="1")
    check_equal(ours, undisturbed, files=("final",))
    assert len([*ours.glob("died-*")]) == len(DEATHS)
    for rank in range(RANKS):
        assert {path.read_text() for path in ours.glob(f"resumed-{rank}-[1-9]*")} == {"(True, ())"}, "not exact"
