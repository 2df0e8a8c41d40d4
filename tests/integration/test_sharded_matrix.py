"""The full cross product of layout x phase x survivors x victims in sharded jobs: an hour, for `make matrix`."""

from __future__ import annotations

import itertools

import pytest

from tests.integration.parallel_kills import ShardedKill
from tests.integration.parallel_layouts import parallel_layout
from tests.integration.plan import Layout
from tests.integration.rig import Rig
from tests.integration.test_sharded_kills import PARAMETERS, STEPS, fail_clearly, victims_of

pytestmark = [pytest.mark.process, pytest.mark.slow]

VICTIMS = ("rank 0", "another", "a group", "two")
PHASES = ("forward", "backward", "before_step", "gate_enter", "gate", "update", "update_end", "after_update", "end")


def rows() -> list[tuple[str, ShardedKill, Layout]]:
    """Every layout x phase x survivors x victims that is possible; step, skips and all-reduce take turns."""
    found = []
    product = itertools.product((*PARAMETERS["parallel"], "fsdp-tp"), PHASES, PARAMETERS["survivors"], VICTIMS)
    for turn, (parallel, phase, survivors, who) in enumerate(product):
        world = parallel_layout(str(parallel))
        victims = victims_of(who, world)
        kills = [
            (
                ShardedKill(phase, step, victims, str(survivors)),
                parallel_layout(str(parallel), log_reduce=log_reduce, inf_steps=inf_steps),
            )
            for step in STEPS.values()
            for log_reduce in ("", "before", "after")
            for inf_steps in (None, (2,))
        ]
        possible = [(kill, layout) for kill, layout in kills if kill.is_possible(layout)]
        if possible:
            kill, layout = possible[turn * 7 % len(possible)]
            found.append((str(parallel), kill, layout))
    return found


def rows_of_eight() -> list[tuple[str, ShardedKill, Layout]]:
    """The same on 8 ranks, in 2 parts with 4 holders and in 4 parts with 2, for fewer kinds of death."""
    found = []
    product = itertools.product(("tp", "hsdp", "pp", "zero1", "moe"), (2, 4), ("forward", "gate", "update"), VICTIMS)
    for parallel, parts, phase, who in product:
        layout = parallel_layout(parallel, world_size=8, parts=parts)
        for survivors in ("free", "split"):
            kill = ShardedKill(phase, 4, victims_of(who, layout), survivors)
            if kill.is_possible(layout):
                found.append((f"{parallel}-{parts}", kill, layout))
    return found


def row_id(value: object) -> str:
    return value.key[:6] if isinstance(value, Layout) else str(value)


@pytest.mark.parametrize(("parallel", "kill", "layout"), [*rows(), *rows_of_eight()], ids=row_id)
def test_a_killed_run_resumes_with_the_same_bits(rig: Rig, parallel: str, kill: ShardedKill, layout: Layout) -> None:
    if kill.is_lost(layout):
        fail_clearly(rig, layout, kill)
    else:
        rig.survive(layout, kill)
