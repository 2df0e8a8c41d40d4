"""A loop that ends its step before its log, with real processes: a death in the log's collective costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import Cluster
from tests.integration.toy import Toy

pytestmark = pytest.mark.process

RANKS = 3
PLAN = {"parts": 1, "average": True}
OVER = [[0, "over"], [2, "over"]]
"""The others stand in the log's collective when the rank is killed."""


@pytest.fixture
def toy(cluster: Cluster, tmp_path: Path) -> Iterator[Toy]:
    toy = Toy(cluster, tmp_path, ranks=RANKS)
    yield toy
    toy.close()


def killed_in_the_log(toy: Toy, **plan: Any) -> str:
    """Which of its copies the dead rank's state is from."""
    codes = toy.run("killed", kill=[1, 4, "over"], kill_after=OVER, **PLAN, **plan)
    assert codes == {0: 75, 1: -9, 2: 75}, toy.report()
    (manifest,) = toy.manifests()
    return str(manifest["locals"]["1"]["meta"]["kind"])


def resumes_equal(toy: Toy, **plan: Any) -> None:
    """Resume, and compare every rank's every step with a run of torch alone."""
    draws = {"log_draws": plan.get("log_draws", False)}
    assert set(toy.run("reference", plain=True, **PLAN, **draws).values()) == {0}, toy.report()
    assert set(toy.run("resumed", recover=True, **PLAN, **plan).values()) == {0}, toy.report()
    reference, ours = toy.computed("reference"), toy.computed("killed", "resumed")
    for rank in range(RANKS):
        assert ours[rank] == {step: reference[rank][step] for step in ours[rank]}, rank
        assert 6 in ours[rank]


@pytest.mark.parametrize("own_loop", [False, True], ids=["steps", "own loop"])
def test_a_death_in_the_log_after_the_steps_end_leaves_a_committed_copy(toy: Toy, own_loop: bool) -> None:
    plan = {"early": True, "own_loop": own_loop}
    assert killed_in_the_log(toy, **plan) == "committed"
    resumes_equal(toy, **plan)
    assert toy.resumed("resumed") == [1, 4, 4, True, []]


def test_without_the_early_end_the_dead_ranks_copy_is_that_of_before_its_update(toy: Toy) -> None:
    """Negative control."""
    assert killed_in_the_log(toy) == "tentative"


@pytest.mark.thorough
def test_a_log_that_draws_random_numbers_is_told(toy: Toy) -> None:
    killed_in_the_log(toy, early=True, log_draws=True)
    assert set(toy.run("resumed", recover=True, early=True, log_draws=True, **PLAN).values()) == {0}, toy.report()
    *_, exact, reasons = toy.resumed("resumed")
    assert not exact
    assert any("rng/torch changed between step_end() and the next batch" in reason for reason in reasons), reasons


def test_what_the_log_draws_is_saved_with_its_step_once_the_log_is_over(toy: Toy) -> None:
    plan = {"early": True, "log_draws": True}
    codes = toy.run("killed", kill=[1, 5, "backward"], **PLAN, **plan)
    assert codes == {0: 75, 1: -9, 2: 75}, toy.report()
    resumes_equal(toy, **plan)
    assert toy.resumed("resumed") == [1, 4, 4, True, []]
