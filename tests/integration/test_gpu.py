"""On a real GPU, over NCCL: deaths at each place of a step, resumed and healed, bit for bit. `make test-gpu`."""

from __future__ import annotations

import pytest

from tests.integration.kills import Kill
from tests.integration.parallel_kills import ShardedKill
from tests.integration.parallel_layouts import parallel_layout
from tests.integration.plan import Layout
from tests.integration.rig import Rig

pytestmark = [pytest.mark.process, pytest.mark.gpu]

NCCL = {"device": "cuda", "backend": "nccl"}
DDP = Layout(steps_per_epoch=3, inf_steps=(2,), log_reduce="before", **NCCL)
HSDP, FSDP, TP = (
    parallel_layout("hsdp", **NCCL),
    parallel_layout("hsdp", parts=4, **NCCL),
    parallel_layout("tp", **NCCL),
)
TWO = (1, 3)


@pytest.mark.parametrize(
    "kill",
    [
        Kill("forward", 4, (2,)),
        Kill("backward", 5, (0,)),
        Kill("before_step", 3, TWO, "ahead"),
        Kill("update", 4, (1, 2, 3)),
        Kill("end", 5, (3,)),
    ],
    ids=str,
)
def test_replicas(rig: Rig, kill: Kill) -> None:
    rig.survive(DDP, kill)


def test_collectives_that_go_through_the_host(rig: Rig) -> None:
    rig.survive(Layout(steps_per_epoch=3, device="cuda"), Kill("backward", 4, (1,)))


@pytest.mark.parametrize(
    ("layout", "kill"),
    [
        (HSDP, ShardedKill("forward", 4, (0,))),
        (HSDP, ShardedKill("backward", 5, (3,))),
        (HSDP, ShardedKill("gate", 4, (1,), "split")),
        (HSDP, ShardedKill("update", 3, (2, 3))),
        (TP, ShardedKill("update", 4, (2,))),
    ],
    ids=str,
)
def test_shards_with_replicas(rig: Rig, layout: Layout, kill: ShardedKill) -> None:
    rig.survive(layout, kill)


@pytest.mark.parametrize("kill", [ShardedKill("forward", 4, (2,)), ShardedKill("update", 5, TWO)], ids=str)
def test_shards_that_only_the_dead_have_held(rig: Rig, kill: ShardedKill) -> None:
    step = rig.survive(FSDP, kill, copy=True)
    assert step >= kill.step - 1, "at most one step is done again"


@pytest.mark.parametrize(
    ("layout", "kill"), [(DDP, Kill("forward", 4, (0,))), (HSDP, ShardedKill("backward", 4, (3,)))], ids=["ddp", "hsdp"]
)
def test_it_heals(rig: Rig, layout: Layout, kill: Kill) -> None:
    rig.heal(layout, kill)


def test_without_the_random_numbers_of_the_dead_rank_its_next_step_differs(rig: Rig) -> None:
    """The control."""
    kill = Kill("before_step", 4, (2,), "ahead")
    killed, step = rig.die(DDP, kill)
    resumed = rig.resume(killed, sabotage=("no_random_numbers:2",))
    difference = rig.difference(resumed, step)
    assert difference is not None
    assert "rng/cuda" in difference.names or difference.rank != 2
