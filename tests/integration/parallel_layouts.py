"""The parallel layouts of the tests, and who holds what in them."""

from __future__ import annotations

import dataclasses
import functools

from tests.integration.plan import Layout

RANKS = {"fsdp-tp": 8, "pp-tp": 8, "sharded-tp": 8}
SMALL = Layout(epochs=2, steps_per_epoch=3)


@functools.cache
def parallel_layout(parallel: str, **more: object) -> Layout:
    """A layout of the demo on its number of ranks: 8 for those with three axes, 4 for the others."""
    settings = {"parallel": parallel, "world_size": RANKS.get(parallel, 4), **more}
    return dataclasses.replace(SMALL, **settings)  # type: ignore[arg-type]


def groups(layout: Layout) -> list[tuple[int, ...]]:
    """Redundancy groups: the ranks of a group hold copies of the same pieces."""
    world, parts = range(layout.world_size), layout.parts
    if layout.parallel == "ddp":
        return [tuple(world)]
    if layout.parallel == "pp":
        each = layout.world_size // parts
        return [tuple(world[stage * each : stage * each + each]) for stage in range(parts)]
    if layout.parallel == "pp-tp":
        each = layout.world_size // parts
        stages = [world[stage * each : stage * each + each] for stage in range(parts)]
        return [tuple(stage[part::parts]) for stage in stages for part in range(parts)]
    if layout.parallel == "sharded-tp":
        return [(rank,) for rank in world]
    if layout.parallel == "fsdp-tp":
        parts = parts * parts
    return [tuple(world[part::parts]) for part in range(parts)]


def partners(layout: Layout, rank: int) -> set[int]:
    """Ranks without which this one cannot finish its update: ZeroRedundancyOptimizer broadcasts inside of it."""
    if layout.parallel != "zero1":
        return set()
    first = rank - rank % layout.parts
    return set(range(first, first + layout.parts)) - {rank}


def holders(layout: Layout, name: str, rank: int) -> tuple[int, ...]:
    """The ranks that hold the same part as `rank` of a value that ranks record ("model/...", "optim/...")."""
    world = range(layout.world_size)
    is_cut_by_tp = any(part in name for part in ("query.", "key.", "value.", "out.weight", "up.", "down.weight"))
    is_everywhere = {
        "ddp": True,
        "zero1": name.startswith("model/"),
        "tp": not is_cut_by_tp,
        "moe": ".experts." not in name,
    }
    if is_everywhere.get(layout.parallel, False):
        return tuple(world)
    if layout.parallel == "fsdp-tp" and not is_cut_by_tp:
        return tuple(other for other in world if (other // layout.parts - rank // layout.parts) % layout.parts == 0)
    if layout.parallel == "pp-tp" and not is_cut_by_tp:
        each = layout.world_size // layout.parts
        return tuple(other for other in world if other // each == rank // each)
    (group,) = [group for group in groups(layout) if rank in group]
    return group
