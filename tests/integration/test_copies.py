"""Plain FSDP: each rank alone holds its part, and the copy of a part outlives the process that made it."""

from __future__ import annotations

import dataclasses

import pytest

from tests.integration.parallel_kills import ShardedKill
from tests.integration.parallel_layouts import parallel_layout
from tests.integration.rig import Rig
from tests.integration.test_sharded_kills import fail_clearly
from tests.selection import more

pytestmark = pytest.mark.process

FSDP = parallel_layout("hsdp", parts=4)
TWO = (1, 3)


@pytest.mark.parametrize(
    "kill",
    [
        ShardedKill("forward", 4, (2,)),
        more(ShardedKill("backward", 5, (0,))),
        more(ShardedKill("gate_enter", 3, TWO)),
        ShardedKill("update", 4, TWO),
        more(ShardedKill("after_update", 3, (3,), "ahead")),
        more(ShardedKill("gate", 5, (1,), "split")),
        more(ShardedKill("end", 2, (0,))),
        ShardedKill("copying", 3, (2,)),
        more(ShardedKill("copying", 4, TWO)),
    ],
    ids=str,
)
def test_parts_that_only_the_dead_have_held_are_saved_from_their_copies(rig: Rig, kill: ShardedKill) -> None:
    step = rig.survive(FSDP, kill, copy=True)
    assert step >= kill.step - 1, "at most one step is done again"


@pytest.mark.parametrize(
    "kill",
    [
        ShardedKill("update", 5, TWO),
        more(ShardedKill("forward", 6, (0,))),
        more(ShardedKill("end", 5, (3,))),
        more(ShardedKill("copying", 6, (2,))),
    ],
    ids=str,
)
def test_where_only_some_steps_are_copied_all_ranks_go_back_to_the_last_one(rig: Rig, kill: ShardedKill) -> None:
    step = rig.survive(FSDP, kill, copy=3)
    assert step in ((3, 6) if kill.phase == "copying" else (kill.step - 1 - (kill.step - 1) % 3,))


def test_before_the_first_of_them_there_is_nothing_to_save(rig: Rig) -> None:
    fail_clearly(rig, FSDP, ShardedKill("backward", 3, (1,)), copy=3)


@pytest.mark.thorough
def test_all_but_one_of_a_host_die(rig: Rig) -> None:
    rig.survive(FSDP, ShardedKill("forward", 4, (0, 1, 2)), copy=True)


@pytest.mark.thorough
@pytest.mark.parametrize("kill", [ShardedKill("backward", 4, (2,)), ShardedKill("update", 5, TWO)], ids=str)
@pytest.mark.parametrize("copy", [True, 3])
def test_it_heals(rig: Rig, kill: ShardedKill, copy: bool | int) -> None:
    rig.heal(FSDP, kill, copy=copy)


@pytest.mark.parametrize("layout", ["tp", *map(more, ("pp", "moe", "zero1", "fsdp-tp", "pp-tp"))])
def test_ranks_with_several_units_copy_each_as_it_is(rig: Rig, layout: str) -> None:
    """Some of them on several ranks, whatever the order of their names."""
    rig.survive(parallel_layout(layout), ShardedKill("update", 4, (1,)), copy=True)


def test_without_copies_nothing_can_be_saved(rig: Rig) -> None:
    """The control."""
    fail_clearly(rig, FSDP, ShardedKill("forward", 4, (2,)))


def test_the_layout_has_no_replicas() -> None:
    assert dataclasses.astuple(ShardedKill("forward", 4, (2,)))[2] == (2,)
    assert ShardedKill("forward", 4, (2,)).is_lost(FSDP)
