"""What last words rest on: ranks that should hold the same bits do, at every step, in each parallel layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from demo.transformer.layouts import LAYOUTS
from tests.integration.compare import Track, first_difference
from tests.integration.parallel_layouts import groups, holders, parallel_layout
from tests.integration.plan import Layout
from tests.integration.rig import Rig
from tests.selection import more, usually

pytestmark = pytest.mark.process

USUALLY = usually(sorted({*LAYOUTS} - {"fsdp"}), ("hsdp", "pp", "zero1"))
"""Plain FSDP has no replicas."""


def states(layout: Layout, track: Track) -> Iterator[tuple[int, list[dict[str, str]]]]:
    """Each step, and what every rank held at its end: name of a tensor -> digest of this rank's part."""
    for step in range(1, layout.steps + 1):
        yield (
            step,
            [
                {
                    name: value
                    for name, value in track.steps(rank)[step].items()
                    if name.startswith(("model/", "optim/"))
                }
                for rank in range(layout.world_size)
            ],
        )


@pytest.mark.parametrize("parallel", USUALLY)
def test_ranks_that_should_hold_the_same_bits_do_at_every_step(rig: Rig, parallel: str) -> None:
    layout = parallel_layout(parallel)
    for step, held in states(layout, rig.reference(layout)):
        for rank, other in itertools.combinations(range(layout.world_size), 2):
            shared = {name for name in held[rank].keys() & held[other].keys() if other in holders(layout, name, rank)}
            differing = sorted(name for name in shared if held[rank][name] != held[other][name])
            assert not differing, f"step {step}, ranks {rank} and {other}"
            if other in next(group for group in groups(layout) if rank in group):
                assert held[rank].keys() == held[other].keys() == shared


@pytest.mark.parametrize("parallel", USUALLY)
def test_ranks_that_hold_different_parts_do_not_hold_copies_by_chance(rig: Rig, parallel: str) -> None:
    """Or the test above would pass for a layout that cuts nothing."""
    layout = parallel_layout(parallel)
    cut: set[str] = set()
    for step, held in states(layout, rig.reference(layout)):
        for rank, other in itertools.combinations(range(layout.world_size), 2):
            moments = {name for name in held[rank] if name.endswith("/exp_avg")}
            own = {name for name in moments if other not in holders(layout, name, rank)}
            cut |= own
            same = sorted(name for name in own if held[rank][name] == held[other].get(name))
            assert not same, f"step {step}, ranks {rank} and {other}"
    assert bool(cut) == (parallel != "ddp")


@pytest.mark.parametrize("parallel", USUALLY)
def test_every_layout_computes_the_same_bits_in_every_run(rig: Rig, parallel: str) -> None:
    layout = parallel_layout(parallel)
    again = rig.launch(layout, mode="plain")
    again.finish()
    assert set(again.codes.values()) == {0}, again.job.report()
    assert first_difference(rig.reference(layout), again.track, steps=range(1, layout.steps + 1)) is None


def test_with_dropout_seeded_by_rank_tensor_parallel_ranks_drift_and_replicas_do_not(rig: Rig) -> None:
    """Why not only replicas have to be compared: every check among them is clean here."""
    layout = parallel_layout("tp")
    overrides = tuple((rank, "dropout_seed", 10 * rank) for rank in range(layout.world_size))
    launch = rig.launch(layout, mode="plain", overrides=overrides)
    launch.finish()
    *_, (_, held) = states(layout, launch.track)
    for group in groups(layout):
        assert all(held[rank] == held[group[0]] for rank in group)
    drifted = {name for name in held[0] if 1 in holders(layout, name, 0) and held[0][name] != held[1][name]}
    assert {"model/blocks.0.norm1.weight", "model/head.weight"} <= drifted


@pytest.mark.parametrize("parallel", ["tp", more("hsdp"), "zero1", more("fsdp-tp")])
def test_a_layout_trains_what_plain_data_parallelism_trains(rig: Rig, parallel: str) -> None:
    """Up to rounding: the parts are put together rightly, and gradients are averaged and clipped as a whole."""
    layout = parallel_layout(parallel, dropout=False)
    plain = parallel_layout("ddp", dropout=False, world_size=layout.world_size)
    for step in range(1, layout.steps + 1):
        assert mean_loss(rig, layout, step) == pytest.approx(mean_loss(rig, plain, step), rel=1e-5)


def mean_loss(rig: Rig, layout: Layout, step: int) -> float:
    track = rig.reference(layout)
    losses = [float.fromhex(track.steps(rank)[step]["loss0"]) for rank in range(layout.world_size)]
    return sum(losses) / len(losses)
