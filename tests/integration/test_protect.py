"""`lastwords.protect`: no address, no port, no wrapper in the script, and the resume is exact all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lastwords.checkpoint import load
from tests.integration.harness import Cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(330)]  # two runs of torchrun, one after the other

ROOT = Path(__file__).parents[2]
MODULE = "tests.integration.protected_training"
STEPS, DIES_AT = 20, 8
WAIT_S = 110.0


def run(ckpt: Path, log: Path, dies_at: int = 0) -> subprocess.CompletedProcess[str]:
    log.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LASTWORDS_JOB"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", MODULE, str(ckpt), str(log), str(dies_at)]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=WAIT_S
    )


def lines(log: Path, rank: int) -> dict[int, str]:
    """The last line of each step: a step that was lost is trained again."""
    return {int(line.split()[0]): line for line in (log / str(rank)).read_text(encoding="utf-8").splitlines()}


@pytest.mark.thorough
def test_a_job_of_two_under_torchrun_is_killed_and_resumed_bit_for_bit(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    arguments = [str(tmp_path / "undisturbed"), str(tmp_path / "whole"), "0"]
    whole = cluster.start(tmp_path / "forked", module=MODULE, arguments=arguments, world_size=2)
    assert {end.code for end in whole.wait(WAIT_S).values()} == {0}, whole.report()
    ckpt, log = tmp_path / "ckpt", tmp_path / "log"
    killed = run(ckpt, log, DIES_AT)
    assert killed.returncode != 0
    saved = load.latest(ckpt)
    assert saved is not None, killed.stderr
    resumed = run(ckpt, log)
    assert resumed.returncode == 0, resumed.stderr
    for rank in (0, 1):
        undisturbed, found = lines(tmp_path / "whole", rank), lines(log, rank)
        # Whoever dies in a step writes no line of it, and a survivor that has updated may be frozen before its own.
        assert set(range(1, STEPS + 1)) - set(found) <= {DIES_AT}
        assert found == {step: line for step, line in undisturbed.items() if step in found}
