"""Kills at random instants: `make chaos N=50 SEED=1`, and a few of them in every test run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration import chaos
from tests.integration.harness import Cluster

pytestmark = pytest.mark.process

FEW = range(7001, 7005)
MANY_SEED = int(os.environ.get("LASTWORDS_CHAOS_SEED", "1"))
MANY = range(MANY_SEED, MANY_SEED + int(os.environ.get("LASTWORDS_CHAOS_N", "20")))


def live_through(cluster: Cluster, seed: int, tmp_path: Path) -> None:
    try:
        chaos.run(cluster, seed, tmp_path)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{chaos.draw_story(seed)}\nreplay: {chaos.replay_command(seed)}") from None


@pytest.mark.parametrize("seed", FEW)
def test_a_kill_at_a_random_instant_costs_nothing(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    live_through(cluster, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MANY)
def test_many_kills_at_random_instants_cost_nothing(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    live_through(cluster, seed, tmp_path)


def test_a_seed_is_a_story_and_another_seed_is_another() -> None:
    assert chaos.draw_story(3) == chaos.draw_story(3)
    assert len({repr(chaos.draw_story(seed)) for seed in range(50)}) == 50
