"""What simulations have found: each bug as the shortest transcript that shows it, with the seed that found it."""

from __future__ import annotations

import pytest

from lastwords.processor import events
from lastwords.processor.core import ProcessorCore
from lastwords.vocabulary import Freeze, Phase, Proceed, Save, Settled, Stand
from tests.sim.run import command, replay

FREEZE = Freeze(1, 1, 30.0, "rank 1 died")


def _save(units: tuple[str, ...], step: int) -> Save:
    return Save(1, 1, 1, step, units, (2,), 0, (0, 2), "a reason")


def _ready_and_frozen() -> ProcessorCore:
    core = ProcessorCore(2, 1, 0)
    core.handle(events.SessionUp(), 0.0)
    core.mark_ready()
    core.handle(events.FromController(FREEZE), 1.0)
    assert not core.try_update()
    return core


def test_a_rank_that_only_copied_black_boxes_can_still_proceed() -> None:
    """Seed 11938: the only unit writer hung, the last rank that could reach the step refused, nothing was saved."""
    core = _ready_and_frozen()
    core.handle(events.FromController(_save(units=(), step=1)), 2.0)
    core.handle(events.SaveFinished(1, 1, 10), 3.0)
    core.handle(events.FromController(Proceed(1, 1, step=1)), 4.0)
    assert core.try_update()
    core.mark_updated()
    assert core.try_end_step()
    settled = [effect.report for effect in core.take_effects() if isinstance(effect, events.SendReport)]
    assert settled[-1] == Settled(2, 1, 1, 2, Stand(Phase.COMPUTING, 1))


def test_a_rank_whose_weights_were_read_for_a_checkpoint_never_proceeds() -> None:
    """Negative control: had they been read, the update would tear the file."""
    core = _ready_and_frozen()
    core.handle(events.FromController(_save(units=("replicated",), step=0)), 2.0)
    core.handle(events.FromController(Proceed(1, 1, step=1)), 4.0)
    assert not core.try_update()


@pytest.mark.parametrize("seed", [6139, 11938, 18963, 19784])
def test_seeds_that_once_failed_hold_now(seed: int) -> None:
    found, _ = replay(seed)
    assert not found, f"{found}\n{command(seed)}"
