"""Random streams on another number of ranks: whose a rank goes on with, that it can be repeated, and who shares one."""

from __future__ import annotations

import dataclasses

import pytest

from tests.integration.moving import check_moved, elastic, move, reason_line
from tests.integration.parallel_kills import ShardedKill
from tests.integration.plan import Fault, Layout
from tests.integration.rig import Launch, Rig

pytestmark = pytest.mark.process

STEP = 2


def ended(rig: Rig, layout: Layout) -> Launch:
    """Ended after step 2, with everybody's streams: by a death where copies are left, else by SIGTERM."""
    if layout.parallel == "ddp":
        launch, step = rig.die(layout, ShardedKill("end", STEP, (layout.world_size - 1,), "ahead"))
        assert step == STEP
        return launch
    launch = rig.launch(layout, faults=[Fault(rank, STEP, "end", ("term",)) for rank in range(layout.world_size)])
    launch.finish()
    assert launch.saved_step == STEP
    return launch


def streams_of(moved: Launch) -> list[dict[str, str]]:
    """Digest of each rank's streams right after the resume."""
    records = [moved.track.one(rank, "resumed") for rank in range(moved.layout.world_size)]
    return [record["streams"] for record in records if record is not None]


def first_streams(moved: Launch) -> list[str]:
    """The same where the first step's forward pass finds them."""
    return [moved.track.steps(rank)[STEP + 1]["streams0"] for rank in range(moved.layout.world_size)]


def test_ranks_keep_their_streams_and_more_ranks_get_streams_of_their_own_that_can_be_repeated(rig: Rig) -> None:
    layout = elastic("ddp", 2, dropout=True, sequences=12)
    launch = ended(rig, layout)
    [path] = launch.checkpoints
    runs = [move(rig, launch, elastic("ddp", 4, dropout=True, sequences=12)) for _ in range(2)]
    for moved in runs:
        reasons = check_moved(moved, path)
        assert reasons == [reason_line(2, 4)]
        assert moved.job.output(0).count("not exact, because") == 1
        for rank, streams in enumerate(streams_of(moved)):
            saved = launch.track.steps(rank % 2)[STEP]
            kept = {name for name, value in streams.items() if value == saved[name]}
            assert kept == ({*streams} if rank < 2 else set())
        assert len(set(first_streams(moved))) == 4
    one, other = (moved.track for moved in runs)
    assert [one.steps(rank) for rank in range(4)] == [other.steps(rank) for rank in range(4)]


def test_new_ranks_that_share_a_replica_s_work_share_a_stream(rig: Rig) -> None:
    launch = ended(rig, elastic("tp", 2, dropout=True))
    moved = move(rig, launch, elastic("tp", 4, dropout=True))
    [path] = launch.checkpoints
    check_moved(moved, path)
    first, second, third, fourth = first_streams(moved)
    assert first == second
    assert third == fourth
    assert first != third


@pytest.mark.parametrize("ranks", [4, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_ranks_that_share_more_work_than_before_share_a_stream_too(rig: Rig, ranks: int) -> None:
    """Two replicas of two ranks become one of all: what was drawn twice in different ways is drawn once."""
    launch = ended(rig, elastic("tp", 4, dropout=True))
    moved = move(rig, launch, elastic("tp", ranks, parts=ranks, dropout=True))
    [path] = launch.checkpoints
    check_moved(moved, path)
    assert len(set(first_streams(moved))) == 1
    assert len({str(streams) for streams in streams_of(moved)}) == 1


@pytest.mark.thorough
def test_a_rank_whose_own_streams_were_lost_still_draws_what_its_partner_draws(rig: Rig) -> None:
    layout = elastic("tp", 4, dropout=True)
    faults = ShardedKill("gate", STEP + 1, (1,), "behind").faults(layout)
    lost = [
        dataclasses.replace(fault, actions=(*fault.actions[:-1], "lose_box", "kill")) if fault.rank == 1 else fault
        for fault in faults
    ]
    launch = rig.launch(layout, faults=lost)
    launch.finish()
    assert launch.saved_step == STEP
    moved = move(rig, launch, elastic("tp", 2, dropout=True))
    [path] = launch.checkpoints
    reasons = check_moved(moved, path)
    assert [reason.partition(":")[0] for reason in reasons[1:]] == ["rank 1"]
    assert len(set(first_streams(moved))) == 1


@pytest.mark.thorough
def test_without_sharing_ranks_of_one_replica_would_draw_different_numbers(rig: Rig) -> None:
    launch = ended(rig, elastic("tp", 4, dropout=True))
    moved = move(rig, launch, elastic("tp", 4, parts=4, dropout=True), sabotage=("no_shared_streams",))
    assert len(set(first_streams(moved))) == 2
    # The LayerNorms of all ranks are one tensor, and have come apart.
    norms = {moved.track.steps(rank)[8]["model/norm.weight"] for rank in range(4)}
    assert len(norms) == 2
