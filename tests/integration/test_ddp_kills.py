"""A rank of a job with DDPs elsewhere than around the registered model is killed: the resumed run is equal, or told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.ddp_training import STEPS
from tests.integration.harness import Cluster
from tests.integration.toy import Toy
from tests.selection import more

pytestmark = pytest.mark.process

RANKS = 3


class Runs(Toy):
    """Launches of the script."""

    def after_a_kill(
        self, job: str, kill: list[int], without: str = ""
    ) -> tuple[dict[str, Any], list[tuple[int, int]]]:
        """What `resume()` said, and each (rank, step) that differs from torch alone."""
        never = {"job": job, "recover": False, "plain": False, "kill": None, "without": ""}
        assert set(self.run("reference", **{**never, "plain": True}).values()) == {0}, self.report()
        codes = self.run("killed", **{**never, "kill": kill, "without": without})
        assert codes == {rank: -9 if rank == kill[0] else 75 for rank in range(RANKS)}, self.report()
        ended = self.run("resumed", **{**never, "recover": True, "without": without})
        assert set(ended.values()) == {0}, self.report()
        reference, ours, point = self.computed("reference"), self.computed("resumed"), self.resumed("resumed")
        assert point["step"] == kill[1] - 1
        wanted = range(kill[1], STEPS + 1)
        return point, [(rank, step) for rank in range(RANKS) for step in wanted
                       if ours[rank][step] != reference[rank][step]]  # fmt: skip


@pytest.fixture
def runs(cluster: Cluster, tmp_path: Path) -> Iterator[Runs]:
    runs = Runs(cluster, tmp_path, module="tests.integration.ddp_training", ranks=RANKS)
    yield runs
    runs.close()


@pytest.mark.parametrize(
    ("job", "kill"),
    [
        ("TwoAndOneRegistered", [1, 5]),
        more("TheInnerOne", [2, 4]),
        ("Replicated", [0, 4]),
        more("OtherOrder", [0, 2]),
        more("TwoInAModule", [0, 4]),
        more("MadeLater", [1, 2]),
        more("OtherOrder", [0, 5]),
    ],
)
def test_the_resumed_run_is_equal_in_all_bits(runs: Runs, job: str, kill: list[int]) -> None:
    point, different = runs.after_a_kill(job, kill)
    assert (point["exact"], point["reasons"], different) == (True, [], [])


@pytest.mark.parametrize(
    ("job", "kill", "without"),
    [
        ("TwoAndOneRegistered", [1, 5], "beside"),
        ("OtherOrder", [0, 2], "rank 0's order"),
        more("TheInnerOne", [2, 4], "replay"),
        more("Replicated", [0, 4], "replay"),
        more("TwoInAModule", [0, 4], "replay"),
        more("HookedLate", [1, 4], "hooks"),
    ],
)
def test_without_its_mechanism_it_is_called_equal_and_is_not(
    runs: Runs, job: str, kill: list[int], without: str
) -> None:
    """Negative controls."""
    point, different = runs.after_a_kill(job, kill, without)
    assert point["exact"]
    assert different


def test_a_hook_that_is_registered_when_the_loop_begins_is_named_with_what_it_is_bound_to(runs: Runs) -> None:
    point, different = runs.after_a_kill("HookedLate", [1, 4])
    assert not point["exact"]
    assert any("Feedback.reduce has its own state" in reason for reason in point["reasons"])
    assert different, "the hook has to matter for this test to mean anything"
