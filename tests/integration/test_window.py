"""Two optimizers with a collective between their updates: nobody is in a whole step when a rank dies there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastwords.optim_wrapper.trainer.protected_step import CUT_OFF
from tests.integration.harness import Cluster
from tests.integration.toy import Toy
from tests.integration.window_training import STEPS
from tests.selection import more

pytestmark = pytest.mark.process

RANKS = 3


class Runs(Toy):
    """Launches of the script with two optimizers."""

    def launch(self, name: str, **changes: Any) -> dict[int, int]:
        """Exit codes of one launch; a rank that waits for a dead one gives up soon."""
        never = dict.fromkeys(("copy", "recover", "plain", "together"), False)
        plan = {**never, "kill": None, "swallow": None, "every": 1, "twice": 0, **changes}
        return self.run(name, env={"LASTWORDS_SETTLE_TIMEOUT_S": "3"}, **plan)

    def saved(self) -> list[int]:
        """Steps of the published checkpoints."""
        return [manifest["global_step"] for manifest in self.manifests()]


@pytest.fixture
def runs(cluster: Cluster, tmp_path: Path) -> Iterator[Runs]:
    runs = Runs(cluster, tmp_path, module="tests.integration.window_training", ranks=RANKS)
    yield runs
    runs.close()


@pytest.mark.parametrize(
    ("victim", "place", "every"),
    [
        more(0, "window", 1),
        (1, "window", 1),
        more(0, "between", 1),
        more(1, "between", 1),
        more(1, "window", 4),
        (0, "between", 4),
    ],
)
def test_with_a_copy_a_death_between_two_updates_costs_nothing(runs: Runs, victim: int, place: str, every: int) -> None:
    """every=4: the second optimizer comes for the first time in the step of the kill."""
    assert set(runs.launch("reference", plain=True, every=every).values()) == {0}
    codes = runs.launch("killed", copy=True, every=every, kill=[victim, 4, place])
    assert codes[victim] == -9
    assert {code for rank, code in codes.items() if rank != victim} == {75}
    assert runs.saved()[0] in (3, 4)
    assert set(runs.launch("resumed", copy=True, every=every, recover=True).values()) == {0}
    reference, ours = runs.computed("reference"), runs.computed("killed", "resumed")
    for rank in range(RANKS):
        assert sorted(reference[rank]) == list(range(1, STEPS + 1))
        for step, value in ours[rank].items():
            assert value == reference[rank][step], (rank, step)
        assert STEPS in ours[rank]


def test_without_a_copy_a_death_in_the_window_is_told_and_nothing_partial_is_published(runs: Runs) -> None:
    """Negative control: the copy is what saves the step."""
    codes = runs.launch("killed", kill=[1, 4, "window"], together=True)
    assert codes[1] == -9
    assert {code for rank, code in codes.items() if rank != 1} == {76}, runs.report()
    assert runs.saved() == []


def test_a_run_with_two_optimizers_that_nobody_kills_computes_what_torch_alone_does(runs: Runs) -> None:
    assert set(runs.launch("reference", plain=True, every=3).values()) == {0}
    assert set(runs.launch("ours", every=3).values()) == {0}
    assert runs.computed("ours") == runs.computed("reference")


def test_an_optimizer_that_comes_twice_in_a_step_ends_the_job_and_the_step_it_cut_off_is_not_exact(runs: Runs) -> None:
    codes = runs.launch("wrong", twice=4)
    assert 1 in codes.values()
    assert set(codes.values()) <= {1, 75}
    assert runs.saved()[-1] == 4
    manifest = runs.manifests()[-1]
    assert not manifest["exact"]
    assert any(CUT_OFF in reason for reason in manifest["reasons"])


def test_a_rank_that_swallows_what_keeps_it_from_updating_ends_the_job_and_is_named(runs: Runs) -> None:
    """Its loop has skipped step_end(), so no later step() is one: the others would train on with its old weights."""
    codes = runs.launch("swallowed", swallow=[1, 4])
    # Once the checkpoint is there, its loop goes on with collectives of its own, for which gloo may end the others.
    assert all(code for rank, code in codes.items() if rank != 1), runs.report()
    assert runs.saved()[-1] in (4, 5)
    assert runs.manifests()[-1]["cause_ranks"] == [1]
    assert "rank 1 at UPDATED(4)" in (runs.checkpoints / "logs" / "incidents.jsonl").read_text()
