"""Frameworks around the loop, where they are installed (they are not part of the development environment)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.integration.framework_training import EPOCHS, RANKS, STEPS_PER_EPOCH
from tests.integration.harness import Cluster
from tests.integration.toy import Toy

pytestmark = [pytest.mark.process, pytest.mark.slow]

PACKAGES = {
    "fabric": "lightning_fabric",
    "fabric loader": "lightning_fabric",
    "accelerate": "accelerate",
    "torchdata": "torchdata",
    "torchdata, own loop": "torchdata",
}
STEP = 9
"""In the second epoch, where a loader that begins to count anew goes wrong."""


@pytest.mark.parametrize("framework", PACKAGES)
def test_a_run_with_a_framework_goes_on_with_the_same_bits(framework: str, cluster: Cluster, tmp_path: Path) -> None:
    if importlib.util.find_spec(PACKAGES[framework]) is None:
        pytest.skip(f"{PACKAGES[framework]} is not installed")
    runs = Toy(cluster, tmp_path, module="tests.integration.framework_training", ranks=RANKS)
    try:
        plan = {"framework": framework, "recover": False, "kill": None}
        assert set(runs.run("reference", **plan).values()) == {0}, runs.report()
        runs.checkpoints = tmp_path / "killed-checkpoints"
        assert runs.run("killed", **{**plan, "kill": [1, STEP]}) == {0: 75, 1: -9}, runs.report()
        assert set(runs.run("resumed", **{**plan, "recover": True}).values()) == {0}, runs.report()
        resumed = [json.loads((tmp_path / "resumed" / f"rank_{rank}.resumed").read_text()) for rank in range(RANKS)]
        assert resumed == [[True, []]] * RANKS
        ours, reference = runs.computed("killed", "resumed"), runs.computed("reference")
        same = all(ours[rank][step] == reference[rank][step] for rank in range(RANKS) for step in ours[rank])
        assert [max(steps) for steps in runs.computed("resumed")] == [EPOCHS * STEPS_PER_EPOCH] * RANKS
        assert same
    finally:
        for job in runs.jobs:
            job.close()
