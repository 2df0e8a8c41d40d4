"""Launches of a toy training script in a directory of the test's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.integration.harness import Cluster, Port, with_texts

MODULE = "tests.integration.toy_training"
RANKS = 4
LIMIT_S = 90.0


class Toy:
    """Runs jobs of `ranks` ranks, and reads what they computed, said and saved.

    module: a script whose one argument is a plan (JSON) with at least "checkpoints", "port" and "out".
    """

    def __init__(self, cluster: Cluster, directory: Path, module: str = MODULE, ranks: int = RANKS) -> None:
        self.cluster = cluster
        self.directory = directory
        self.module = module
        self.ranks = ranks
        self.checkpoints = directory / "checkpoints"
        self.jobs: list[Any] = []

    def run(self, name: str, *, env: Mapping[str, str] | None = None, **changes: Any) -> dict[int, int]:
        """Exit codes of one launch."""
        port = Port()
        folder = self.directory / name
        folder.mkdir()
        plan = {"checkpoints": str(self.checkpoints), "port": port.number, "out": str(folder)} | changes
        (folder / "plan.json").write_text(json.dumps(plan))
        job = self.cluster.start(
            folder,
            module=self.module,
            arguments=[str(folder / "plan.json")],
            world_size=self.ranks,
            launcher="fork",
            watched=[self.checkpoints],
            ports=[port],
            env=dict(env or {}),
        )
        self.jobs.append(job)
        exits = job.wait(LIMIT_S)
        job.wait_gone(LIMIT_S)
        job.close()
        return {rank: end.code for rank, end in exits.items()}

    def said(self, rank: int) -> str:
        """What a rank of the newest launch wrote to stderr."""
        return str(self.jobs[-1].output(rank))

    def report(self) -> str:
        """Everything about the newest launch."""
        return str(self.jobs[-1].report())

    def computed(self, *names: str) -> list[dict[int, tuple[str, str]]]:
        """Loss and state of each rank after each step, over these launches; a later launch wins."""
        found: list[dict[int, tuple[str, str]]] = []
        for rank in range(self.ranks):
            steps: dict[int, tuple[str, str]] = {}
            for name in names:
                path = self.directory / name / f"rank_{rank}.jsonl"
                for line in path.read_text().splitlines() if path.exists() else ():
                    item = json.loads(line)
                    steps[item["step"]] = (item["loss"], item["state"])
            found.append(steps)
        return found

    def resumed(self, name: str, rank: int = 0) -> Any:
        """What resume() returned there: epoch, step, global step, exact and the reasons."""
        return json.loads((self.directory / name / f"resumed_{rank}.json").read_text())

    def manifests(self) -> list[dict[str, Any]]:
        """Manifests of the published checkpoints, the oldest step first."""
        found = [with_texts(json.loads(path.read_text())) for path in self.checkpoints.glob("tft_saved*/manifest.json")]
        return sorted(found, key=lambda manifest: manifest["global_step"])

    def close(self) -> None:
        """End everything."""
        for job in self.jobs:
            job.close()
