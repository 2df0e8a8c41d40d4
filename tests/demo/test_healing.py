"""The demo of healing: the whole story once, small, and that its verdict can be another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo.compare import read_logs
from demo.heal import IDENTICAL, KILLS, difference
from demo.recoveries import read_recoveries

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--hidden", "64", "--epochs", "2", "--ranks", "3", "--seed", "5")


@pytest.mark.process
@pytest.mark.thorough
def test_the_demo_kills_two_ranks_in_turn_and_its_verdict_depends_on_every_bit_and_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "demo.heal", *SMALL, "--out", str(out)]
    demo = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment, cwd=ROOT)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stdout.strip().splitlines()[-1] == IDENTICAL
    assert (out / "healing.png").read_bytes().startswith(b"\x89PNG")

    whole, healed = read_logs(out / "never-killed"), out / "healed"
    recoveries = read_recoveries(healed / "checkpoints", [0.0] * KILLS, len(whole))
    assert len({one.dead_rank for one in recoveries}) == KILLS
    assert difference(whole, healed, recoveries) is None
    (survivor,) = whole.keys() - {one.dead_rank for one in recoveries}
    assert difference(whole, healed, recoveries[:1]) is not None, "each recovery has a process of its own for each rank"
    log = healed / f"rank_{survivor}.jsonl"
    log.write_text("".join(map(changed, log.read_text(encoding="utf-8").splitlines(keepends=True))))
    assert difference(whole, healed, recoveries) is not None


def changed(line: str) -> str:
    """The line of a rank's log, with the last bits of the loss of step 3 changed."""
    record = json.loads(line)
    if record.get("global_step") == 3:
        record["loss"] *= 1 + 2**-50
    return json.dumps(record) + "\n"
