"""Kills at random instants: `make chaos N=50 SEED=1 MODE=kill,heal`, and a few of them in every test run."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration import chaos
from tests.integration.harness import Cluster
from tests.selection import usually

pytestmark = pytest.mark.process

FEW = range(7001, 7005)
MODES = os.environ.get("LASTWORDS_CHAOS_MODE", "kill,heal").split(",")
OTHER_MODES = ("storage", "pause", "stranger", "jobs", "heal", "heal-controller")
CHEAP_SEED = {"storage": 12, "pause": 5, "stranger": 2, "jobs": 13, "heal": 3, "heal-controller": 3}
MANY_SEED = int(os.environ.get("LASTWORDS_CHAOS_SEED", "1"))
MANY = range(MANY_SEED, MANY_SEED + int(os.environ.get("LASTWORDS_CHAOS_N", "20")))
"""The modes take turns; which one a seed has does not depend on the first seed."""


@pytest.fixture(scope="module")
def cluster_of(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Cluster]]:
    """The session's own processes, but for the mode whose processes need a library."""
    with contextlib.ExitStack() as opened:

        @functools.cache
        def preloaded() -> Cluster:
            try:
                return opened.enter_context(chaos.cluster_for("storage", tmp_path_factory.mktemp("library")))
            except LookupError as error:
                pytest.skip(str(error))

        yield lambda mode: preloaded() if mode == "storage" else cluster


def live_through(cluster: Cluster, seed: int, tmp_path: Path, mode: str = "kill") -> Counter[str]:
    try:
        return chaos.run(cluster, seed, tmp_path, mode)
    except AssertionError as error:
        story, replay = chaos.draw_story(seed, mode), chaos.replay_command(seed, mode)
        raise AssertionError(f"{error}\n{story}\nreplay: {replay}") from None


@pytest.mark.parametrize("seed", usually(FEW, FEW[:1]))
def test_a_kill_at_a_random_instant_costs_nothing(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    live_through(cluster, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "mode"), [(seed, MODES[seed % len(MODES)]) for seed in MANY])
def test_many_kills_at_random_instants_cost_nothing(
    cluster_of: Callable[[str], Cluster], tmp_path: Path, seed: int, mode: str
) -> None:
    live_through(cluster_of(mode), seed, tmp_path, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", OTHER_MODES)
def test_one_run_of_each_mode_costs_nothing(cluster_of: Callable[[str], Cluster], tmp_path: Path, mode: str) -> None:
    happened = live_through(cluster_of(mode), CHEAP_SEED[mode], tmp_path, mode)
    assert mode != "storage" or happened["calls failed"], "the file system did not fail while it was needed"


def test_a_seed_is_a_story_and_another_seed_is_another() -> None:
    assert chaos.draw_story(3) == chaos.draw_story(3)
    assert len({repr(chaos.draw_story(seed)) for seed in range(50)}) == 50
    for mode in OTHER_MODES:
        assert chaos.draw_story(3, mode) == chaos.draw_story(3, mode)
        assert mode == "heal" or chaos.draw_story(3, mode) != chaos.draw_story(3)
