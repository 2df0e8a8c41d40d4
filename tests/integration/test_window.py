"""Two optimizers with a collective between their updates: nobody is in a whole step when a rank dies there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastwords.optim_wrapper.training_hooks import CUT_OFF
from tests.integration.harness import Cluster, Port
from tests.integration.window_training import STEPS

pytestmark = pytest.mark.process

RANKS = 3
LIMIT_S = 90.0


class Runs:
    """Launches of the training script in one directory."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.jobs: list[Any] = []

    def run(self, name: str, **changes: Any) -> dict[int, int]:
        """Exit codes of one launch."""
        port = Port()
        folder = self.directory / name
        folder.mkdir()
        checkpoints = self.directory / "checkpoints"
        plan = {
            "checkpoints": str(checkpoints), "port": port.number, "local_copy": False, "recover": False,
            "out": str(folder), "plain": False, "kill": None, "every": 1, "twice": 0,
        } | changes  # fmt: skip
        (folder / "plan.json").write_text(json.dumps(plan))
        job = self.cluster.start(
            folder,
            module="tests.integration.window_training",
            arguments=[str(folder / "plan.json")],
            world_size=RANKS,
            launcher="fork",
            watched=[checkpoints],
            ports=[port],
            env={"LASTWORDS_SETTLE_TIMEOUT_S": "3"},
        )
        self.jobs.append(job)
        exits = job.wait(LIMIT_S)
        job.wait_gone(LIMIT_S)
        job.close()
        return {rank: end.code for rank, end in exits.items()}

    def computed(self, *names: str) -> list[dict[int, tuple[str, str]]]:
        """What each rank computed in each step, over these launches."""
        found: list[dict[int, tuple[str, str]]] = []
        for rank in range(RANKS):
            steps: dict[int, tuple[str, str]] = {}
            for name in names:
                path = self.directory / name / f"rank_{rank}.jsonl"
                for line in path.read_text().splitlines() if path.exists() else ():
                    item = json.loads(line)
                    steps[item["step"]] = (item["loss"], item["state"])
            found.append(steps)
        return found

    def saved(self) -> list[int]:
        """Steps of the published checkpoints."""
        found = (self.directory / "checkpoints").glob("tft_saved_checkpoints-step_*/manifest.json")
        return sorted(json.loads(path.read_text())["global_step"] for path in found)


@pytest.fixture
def runs(cluster: Cluster, tmp_path: Path) -> Iterator[Runs]:
    runs = Runs(cluster, tmp_path)
    yield runs
    for job in runs.jobs:
        job.close()


@pytest.mark.parametrize(
    ("victim", "place", "every"),
    [(0, "window", 1), (1, "window", 1), (0, "between", 1), (1, "between", 1), (1, "window", 4), (0, "between", 4)],
)
def test_with_a_local_copy_a_death_between_two_updates_costs_nothing(
    runs: Runs, victim: int, place: str, every: int
) -> None:
    """every=4: the second optimizer comes for the first time in the step of the kill."""
    assert set(runs.run("reference", plain=True, every=every).values()) == {0}
    codes = runs.run("killed", local_copy=True, every=every, kill=[victim, 4, place])
    assert codes[victim] == -9
    assert {code for rank, code in codes.items() if rank != victim} == {75}
    assert runs.saved()[0] in (3, 4)
    assert set(runs.run("resumed", local_copy=True, every=every, recover=True).values()) == {0}
    reference, ours = runs.computed("reference"), runs.computed("killed", "resumed")
    for rank in range(RANKS):
        assert sorted(reference[rank]) == list(range(1, STEPS + 1))
        for step, value in ours[rank].items():
            assert value == reference[rank][step], (rank, step)
        assert STEPS in ours[rank]


def test_without_a_copy_a_death_in_the_window_is_told_and_nothing_partial_is_published(runs: Runs) -> None:
    """Negative control: the copy is what saves the step."""
    codes = runs.run("killed", kill=[1, 4, "window"])
    assert codes[1] == -9
    assert {code for rank, code in codes.items() if rank != 1} == {76}
    assert runs.saved() == []


def test_a_run_with_two_optimizers_that_nobody_kills_computes_what_torch_alone_does(runs: Runs) -> None:
    assert set(runs.run("reference", plain=True, every=3).values()) == {0}
    assert set(runs.run("ours", every=3).values()) == {0}
    assert runs.computed("ours") == runs.computed("reference")


def test_an_optimizer_that_comes_twice_in_a_step_ends_the_job_and_the_step_it_cut_off_is_not_exact(runs: Runs) -> None:
    codes = runs.run("wrong", twice=4)
    assert 1 in codes.values()
    assert set(codes.values()) <= {1, 75}
    assert runs.saved()[-1] == 4
    [text] = [path.read_text() for path in (runs.directory / "checkpoints").glob("*-step_4/manifest.json")]
    manifest = json.loads(text)
    assert not manifest["exact"]
    assert any(CUT_OFF in reason for reason in manifest["reasons"])
