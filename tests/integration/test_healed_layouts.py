"""`lastwords run` in every parallel layout: after a death all ranks go on, and all bits are as if nobody had died."""

from __future__ import annotations

import pytest

from tests.integration.kills import Kill
from tests.integration.parallel_kills import ShardedKill
from tests.integration.parallel_layouts import parallel_layout
from tests.integration.plan import Fault, Layout
from tests.integration.rig import Rig
from tests.selection import more

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("parallel", "kill"),
    [
        more("hsdp", ShardedKill("update", 5, (1,))),
        more("pp", ShardedKill("backward", 3, (0,))),
        more("tp", ShardedKill("gate", 4, (3,))),
        more("zero1", ShardedKill("after_update", 5, (2,))),
        more("moe", ShardedKill("forward", 3, (0, 3))),
        more("fsdp-tp", ShardedKill("gate_enter", 4, (5,))),
        more("pp-tp", ShardedKill("end", 3, (0,))),
        more("tp", ShardedKill("backward", 5, (0, 1))),
    ],
    ids=str,
)
def test_only_the_dead_have_died_and_nothing_differs(rig: Rig, parallel: str, kill: ShardedKill) -> None:
    launch = rig.heal(parallel_layout(parallel), kill)
    (recovery,) = [one for one in launch.incidents() if one["outcome"] == "RECOVERED"]
    ranks = set(range(launch.layout.world_size))
    assert {one["rank"] for one in recovery["events"] if one["what"] == "died"} == {*kill.victims}
    assert {one["rank"] for one in recovery["events"] if one["what"] == "left"} == ranks - {*kill.victims}


@pytest.mark.parametrize(
    "faults",
    [
        more([Fault(1, 3, "backward", ("kill",)), Fault(2, 0, "before_loop", ("kill",), restart=1)]),
        more([Fault(0, 3, "update", ("kill",)), Fault(0, 4, "forward", ("kill",), restart=1)]),
        more([Fault(rank, 2 + rank, "backward", ("kill",), restart=rank) for rank in range(3)]),
    ],
    ids=["before its loop has begun", "in its first step", "three in turn, rank 0 first"],
)
def test_whoever_dies_while_a_run_is_healed_comes_back_too(rig: Rig, faults: list[Fault]) -> None:
    launch, difference = rig.healed(Layout(), faults)
    assert difference is None, launch.fail(str(difference))
    (recovery,) = [one for one in launch.incidents() if one["outcome"] == "RECOVERED"][-1:]
    told = [(one["generation"], one["incident"]) for one in launch.incidents() if one["outcome"] != "RECOVERED"]
    assert (recovery["generation"], recovery["incident"]) == told[-1], "it leads to the controller's newest line"
    survivors = {*range(Layout().world_size)} - {fault.rank for fault in faults}
    assert survivors <= {one["rank"] for one in recovery["events"] if one["what"] == "left"}


@pytest.mark.thorough
def test_ten_deaths_in_one_run(rig: Rig) -> None:
    layout = Layout(epochs=3)
    phases = ("backward", "update", "forward", "after_update", "body")
    faults = [Fault(count % 4, 2 + count, phases[count % 5], ("kill",), restart=count) for count in range(10)]
    launch, difference = rig.healed(layout, faults)
    assert difference is None, launch.fail(str(difference))
    died = [event for one in launch.incidents() if one["outcome"] == "RECOVERED" for event in one["events"]]
    assert sum(event["what"] == "died" for event in died) == 10


@pytest.mark.thorough
def test_without_the_replay_of_buckets_a_healed_run_differs(rig: Rig) -> None:
    kill = Kill("before_step", 6, (2,), "ahead")
    _, difference = rig.healed(Layout(), kill.faults(Layout()), sabotage=("no_bucket_replay",))
    assert difference is not None
    assert difference.step == 7
