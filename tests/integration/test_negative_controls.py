"""With one part of the product switched off the comparison must find a difference: else its tests prove nothing."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from tests.integration.compare import resumed_difference
from tests.integration.kills import Kill
from tests.integration.plan import Layout
from tests.integration.rig import Rig
from tests.selection import more

pytestmark = pytest.mark.process

AHEAD = Kill("before_step", 6, (2,), "ahead")


@pytest.mark.parametrize("model", ["small", more("medium")])
def test_without_the_bucket_replay_the_first_resumed_step_differs(rig: Rig, model: str) -> None:
    layout = Layout(model=model)
    killed, step = rig.died(layout, AHEAD)
    resumed = rig.resume(killed, sabotage=("no_bucket_replay",))
    difference = rig.difference(resumed, step)
    assert difference is not None
    assert difference.step == step + 1
    assert not [name for name in difference.names if name.startswith(("loss", "batch", "rng"))], difference


def test_without_the_random_numbers_of_the_dead_rank_its_next_step_differs(rig: Rig) -> None:
    layout = Layout()
    killed, step = rig.died(layout, AHEAD)
    resumed = rig.resume(killed, sabotage=("no_random_numbers:2",))
    difference = rig.difference(resumed, step)
    assert difference is not None
    assert (difference.rank, difference.step) == (2, step + 1) or difference.step == step + 1
    assert any(name.startswith("rng/") for name in difference.names) or difference.rank != 2


@pytest.mark.thorough
def test_without_the_tentative_slot_the_dead_rank_differs_and_the_manifest_says_so(rig: Rig) -> None:
    layout = Layout()
    launch = rig.launch(layout, faults=AHEAD.faults(layout), sabotage=("no_tentative_slot",))
    launch.finish()
    step = rig.check_last_words(launch, AHEAD.victims, {AHEAD.step}, exact=False)
    manifest = launch.manifest(launch.checkpoints[-1])
    assert any("black box has no state of step 6" in reason for reason in manifest["reasons"]), manifest["reasons"]
    resumed = rig.resume(launch)
    assert any("not exact" in resumed.job.output(rank) for rank in range(layout.world_size)), resumed.job.report()
    assert rig.difference(resumed, step) is not None


def test_a_black_box_that_is_lost_is_said_and_the_other_ranks_are_exact(rig: Rig) -> None:
    layout = Layout(broadcast_buffers=False)
    kill = Kill("forward", 6, (2,))
    faults = [fault for fault in kill.faults(layout) if fault.rank != 2]
    (own,) = [fault for fault in kill.faults(layout) if fault.rank == 2]
    lost = dataclasses.replace(own, actions=(*own.actions[:-1], "lose_box", "kill"))
    launch = rig.launch(layout, faults=[*faults, lost])
    launch.finish()
    step = rig.check_last_words(launch, [2], {5}, exact=False)
    reasons = launch.manifest(launch.checkpoints[-1])["reasons"]
    assert all(reason.startswith("rank 2:") for reason in reasons), reasons
    resumed = rig.resume(launch)
    for rank in range(layout.world_size):
        record = resumed.track.one(rank, "resumed")
        assert record is not None
        assert not record["exact"]
        assert record["step"] == step
    assert "not exact, because rank 2" in resumed.job.output(0)
    restored = resumed_difference(rig.reference(layout), resumed.track)
    assert restored is not None
    assert restored.rank == 2
    assert all(name.startswith("buffer/") for name in restored.names), restored


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "settings", "reason"),
    [
        (Layout(augment=True, workers=2, persistent_workers=True), {}, "persistent"),
        (Layout(augment=True, workers=2), {"data": "skip"}, "skipped by index"),
    ],
    ids=["persistent workers", "skipped by index"],
)
def test_what_cannot_be_exact_is_said(rig: Rig, layout: Layout, settings: dict[str, Any], reason: str) -> None:
    kill = Kill("forward", 7, (1,))
    launch = rig.launch(layout, faults=kill.faults(layout), **settings)
    launch.finish()
    step = rig.check_last_words(launch, [1], {6}, exact=False)
    reasons = launch.manifest(launch.checkpoints[-1])["reasons"]
    assert any(reason in text for text in reasons), reasons
    resumed = rig.resume(launch, **settings)
    assert re.search(rf"not exact, because .*{reason}", resumed.job.output(0))
    difference = rig.difference(resumed, step)
    assert difference is not None
    assert difference.step == step + 1
    assert "batch0" in difference.names, difference


@pytest.mark.thorough
def test_without_the_buffers_of_each_rank_the_resumed_state_differs(rig: Rig) -> None:
    layout = Layout(broadcast_buffers=False)
    killed, step = rig.died(layout, AHEAD)
    resumed = rig.resume(killed, sabotage=("no_local_buffers",))
    difference = rig.difference(resumed, step)
    assert difference is not None
    assert any(name.startswith("buffer/") for name in difference.names), difference


@pytest.mark.thorough
def test_without_the_epochs_start_a_shuffling_loader_goes_on_with_other_samples(rig: Rig) -> None:
    layout = Layout(loader="plain")
    killed, step = rig.died(layout, AHEAD)
    resumed = rig.resume(killed, sabotage=("no_epoch_start",))
    difference = rig.difference(resumed, step)
    assert difference is not None
    assert "batch0" in difference.names, difference
