"""Jobs that lose ranks and go on on fewer: real processes, real kills, other layouts, then inference on one process."""

from __future__ import annotations

import pytest

from tests.integration.moving import check_inference, check_losses, check_moved, elastic, move, samples_seen
from tests.integration.parallel_kills import ShardedKill
from tests.integration.plan import Fault, Layout
from tests.integration.rig import EXIT_SAVED, Launch, Rig

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


@pytest.mark.parametrize(
    ("before", "ending", "after"),
    [
        pytest.param(elastic("tp", 8, **TP4), ended_by_kill, elastic("tp", 4, **TP4), id="tp4xdp2-killed-tp4"),
        pytest.param(SHARDED, ended_by_signal, elastic("tp", 4, **TP4), id="sharded-sigterm-tp4"),
        pytest.param(SHARDED, ended_by_error, elastic("sharded-tp", 4), id="sharded-error-sharded"),
        pytest.param(elastic("fsdp-tp", 8), ended_by_kill, elastic("tp", 4, **TP4), id="fsdp2xtp2xdp2-killed-tp4"),
        pytest.param(elastic("pp-tp", 8), ended_by_kill, elastic("tp", 4), id="pp2xtp2xdp2-killed-tp2xdp2"),
        pytest.param(elastic("ddp", 3, **TWELVE), ended_by_kill, elastic("ddp", 4, **TWELVE), id="ddp3-killed-ddp4"),
        pytest.param(FSDP4, ended_by_signal, elastic("hsdp", 3, parts=3, **TWELVE), id="fsdp4-sigterm-fsdp3"),
    ],
)  # fmt: skip
def test_other_ranks_go_on_in_another_layout_and_then_one_process_answers(
    rig: Rig, before: Layout, ending: object, after: Layout
) -> None:
    launch = ending(rig, before)  # type: ignore[operator]
    [path] = launch.checkpoints
    step = launch.saved_step
    moved = move(rig, launch, after)
    reasons = check_moved(moved, path)
    assert sum("another order" in reason for reason in reasons) == 1
    check_losses(moved, rig.reference(before), step + 1)
    check_inference(moved, path)
    every = samples_seen([(launch.track, range(1, step + 1)), (moved.track, range(step + 1, 5))], epoch=1)
    assert every == dict.fromkeys(range(4 * before.sequences), 1)
