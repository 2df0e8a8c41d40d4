"""Jobs that lose ranks and go on on fewer: real processes, real kills, other layouts, then inference on one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.moving import check_inference, check_losses, check_moved, elastic, move, samples_seen
from tests.integration.parallel_kills import ShardedKill
from tests.integration.plan import Fault, Layout
from tests.integration.rig import EXIT_SAVED, Launch, Rig
from tests.selection import usually

pytestmark = pytest.mark.process

TP4 = {"parts": 4, "layers": 2}
TWELVE = {"sequences": 12}
SHARDED = elastic("sharded-tp", 8, **TP4)
FSDP4 = elastic("hsdp", 4, parts=4, **TWELVE)
STEP = 3


def ended_by_kill(rig: Rig, layout: Layout) -> Launch:
    """kill -9 of one rank in the gate of a step: some may have updated (a rank of DDP, at its end)."""
    kill = ShardedKill("end" if layout.parallel == "ddp" else "gate", STEP, (layout.world_size - 2,), "free")
    launch, step = rig.die(layout, kill)
    assert step in (STEP - 1, STEP)
    return launch


def ended_by_signal(rig: Rig, layout: Layout) -> Launch:
    """SIGTERM to one rank, as when a host is taken away: nobody is lost."""
    launch = rig.launch(layout, faults=[Fault(1, STEP, "end", ("term",))])
    launch.finish()
    assert set(launch.codes.values()) == {EXIT_SAVED}
    rig.check_step(launch, (), {STEP, STEP + 1})
    return launch


def ended_by_error(rig: Rig, layout: Layout) -> Launch:
    """An exception in one rank's forward pass, such as out of memory."""
    launch = rig.launch(layout, faults=[Fault(6, STEP, "forward", ("raise",))])
    launch.finish()
    assert launch.codes == {rank: 1 if rank == 6 else EXIT_SAVED for rank in range(layout.world_size)}
    rig.check_step(launch, (), {STEP - 1})
    return launch


MOVES: dict[str, tuple[Layout, Callable[[Rig, Layout], Launch], Layout]] = {
    "tp4xdp2-killed-tp4": (elastic("tp", 8, **TP4), ended_by_kill, elastic("tp", 4, **TP4)),
    "sharded-tp4xdp2-sigterm-tp4": (SHARDED, ended_by_signal, elastic("tp", 4, **TP4)),
    "pp2xtp2xdp2-killed-tp2xdp2": (elastic("pp-tp", 8), ended_by_kill, elastic("tp", 4)),
    "ddp3-killed-ddp4": (elastic("ddp", 3, **TWELVE), ended_by_kill, elastic("ddp", 4, **TWELVE)),
}
USUAL_MOVES = ("ddp3-killed-ddp4",)
MORE_MOVES = {
    "fsdp2xtp2xdp2-killed-tp4": (elastic("fsdp-tp", 8), ended_by_kill, elastic("tp", 4, **TP4)),
    "sharded-tp4xdp2-error-tp2xfsdp2": (SHARDED, ended_by_error, elastic("sharded-tp", 4)),
    "fsdp4-sigterm-fsdp3": (FSDP4, ended_by_signal, elastic("hsdp", 3, parts=3, **TWELVE)),
}


@pytest.mark.parametrize(
    "name", [*usually(MOVES, USUAL_MOVES), *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_MOVES)]
)
def test_other_ranks_go_on_in_another_layout_and_then_one_process_answers(rig: Rig, name: str) -> None:
    before, ending, after = {**MOVES, **MORE_MOVES}[name]
    launch = ending(rig, before)
    [path] = launch.checkpoints
    step = launch.saved_step
    moved = move(rig, launch, after)
    reasons = check_moved(moved, path)
    assert sum("a different order" in reason for reason in reasons) == 1
    check_losses(moved, rig.reference(before), step + 1)
    check_inference(moved, path)
    every = samples_seen([(launch.track, range(1, step + 1)), (moved.track, range(step + 1, 5))], epoch=1)
    assert every == dict.fromkeys(range(4 * before.sequences), 1)


@pytest.mark.slow
def test_eight_ranks_then_four_then_two_then_eight_again_see_every_sample_of_the_epoch_once(rig: Rig) -> None:
    def layout(ranks: int, parts: int) -> Layout:
        return elastic("tp", ranks, parts=parts, steps_per_epoch=8)

    runs, ends = [ended_by_kill(rig, layout(8, 4))], [0]
    for ranks, shared in ((4, 4), (2, 2)):
        ends.append(runs[-1].saved_step)
        ending = [Fault(rank, ends[-1] + 2, "end", ("term",)) for rank in range(ranks)]
        runs.append(move(rig, runs[-1], layout(ranks, shared), faults=ending))
    ends += [runs[-1].saved_step, 16]
    assert ends[2:] == [ends[1] + 2, ends[1] + 4, 16]
    runs.append(move(rig, runs[-1], layout(8, 2)))
    paths = {int(path.name.rpartition("_")[2]): path for path in runs[0].checkpoints}
    for launch, step in zip(runs[1:], ends[1:], strict=False):
        check_moved(launch, paths[step])
        check_inference(launch, paths[step])
    check_losses(runs[-1], rig.reference(layout(8, 4)), ends[3] + 1)
    parts = [
        (launch.track, range(begin + 1, end + 1))
        for launch, begin, end in zip(runs, ends[:-1], ends[1:], strict=True)
    ]  # fmt: skip
    for epoch in (1, 2):
        assert samples_seen(parts, epoch) == dict.fromkeys(range(64), 1)
