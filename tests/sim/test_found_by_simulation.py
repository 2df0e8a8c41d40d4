"""What simulations have found: each bug as the shortest transcript that shows it, with the seed that found it.

Seeds belong to the commit before the one that mends the bug: schedules change as the simulation learns more.
"""

from __future__ import annotations

from lastwords.controller import events as to_controller
from lastwords.controller.core import ControllerCore
from lastwords.controller.events import ControllerOptions
from lastwords.processor import events
from lastwords.processor.core import ProcessorCore
from lastwords.vocabulary import (
    DeathSource,
    Freeze,
    Hello,
    Phase,
    Proceed,
    ProcessId,
    Report,
    Save,
    Saved,
    Settled,
    Stand,
)

FREEZE = Freeze(1, 1, 30.0, "rank 1 died")


def _save(units: tuple[str, ...], step: int) -> Save:
    return Save(1, 1, 1, step, units, (2,), 0, "a reason")


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


class _Job:
    """A controller of three ranks: 0 and 1 on one host, 2 on another."""

    def __init__(self, units: tuple[str, str, str] = ("replicated", "replicated", "replicated")) -> None:
        self.core = ControllerCore(3, 1, ControllerOptions(has_fallback_target=True))
        self.now_s = 0.0
        for rank in range(3):
            process = ProcessId(f"host{rank // 2}", 100 + rank, 1, "n")
            self.hear(Hello(rank, 1, 3, process, (units[rank],), Stand(Phase.COMPUTING, 0)))

    def hear(self, report: Report) -> list[to_controller.Effect]:
        return self.happens(to_controller.FromRank(report))

    def happens(self, event: to_controller.Event) -> list[to_controller.Effect]:
        self.now_s += 0.01
        return self.core.handle(event, self.now_s)

    def dies(self, rank: int) -> list[to_controller.Effect]:
        return self.happens(to_controller.Died(rank, DeathSource.ROBUST_MUTEX))


def _saves(effects: list[to_controller.Effect]) -> dict[int, Save]:
    sends = [effect for effect in effects if isinstance(effect, to_controller.Send)]
    return {send.rank: send.order for send in sends if isinstance(send.order, Save)}


def test_a_dead_writers_file_is_used_although_another_directory_was_tried_meanwhile() -> None:
    """Seed 31262: the one file of the newest step was thrown away when a box's file next to it could not be read."""
    job = _Job()
    job.dies(1)
    job.hear(Settled(0, 1, 1, 1, Stand(Phase.COMPUTING, 3)))
    orders = _saves(job.hear(Settled(2, 1, 1, 1, Stand(Phase.COMPUTING, 4))))
    assert orders[2].units == ("replicated",)
    assert (orders[0].units, orders[0].target) == ((), 0)
    job.hear(Saved(0, 1, 1, 1, 4, 10))
    job.hear(Saved(2, 1, 1, 1, 4, 10))
    # when the file of rank 0 cannot be read back, all is to be written to the fallback directory ...
    orders = _saves(job.happens(to_controller.VerifyFailed(1, 1, ((0, "a checksum differs"),))))
    assert {order.target for order in orders.values()} == {1}
    # ... but rank 2 dies before it can; rank 0 gets another chance in the first directory, where its file still lies
    job.dies(2)
    job.now_s += 0.3
    orders = _saves(job.happens(to_controller.Tick()))
    assert (orders[0].units, orders[0].target) == ((), 0)
    effects = job.hear(Saved(0, 1, 1, orders[0].attempt, 4, 10))
    (verify,) = [effect for effect in effects if isinstance(effect, to_controller.StartVerify)]
    assert (verify.step, verify.target, verify.units, verify.writers) == (4, 0, ("replicated",), (0, 2))


def test_a_rank_that_answered_before_it_came_to_the_gate_is_waited_for() -> None:
    """Seed 69123: a frozen rank still computed when it settled; its way to the gate let another one update."""
    job = _Job(units=("tp0", "tp1", "tp0"))
    job.dies(2)
    job.hear(Settled(1, 1, 1, 1, Stand(Phase.COMPUTING, 4)))
    effects = job.hear(Settled(0, 1, 1, 1, Stand(Phase.COMPUTING, 5)))
    assert job.core.outcome is None, "tp1 has no holder at step 5 yet, but rank 1 must have come to the gate"
    assert not _saves(effects)
    effects = job.hear(Settled(1, 1, 1, 2, Stand(Phase.READY, 5)))
    assert to_controller.Send(1, Proceed(1, 1, 5)) in effects


def test_a_rank_that_never_comes_to_the_gate_is_not_waited_for_for_ever() -> None:
    """Negative control: its word was true after all (it raised), so time runs out, and nothing can be saved."""
    job = _Job(units=("tp0", "tp1", "tp0"))
    job.dies(2)
    job.hear(Settled(1, 1, 1, 1, Stand(Phase.COMPUTING, 4)))
    job.hear(Settled(0, 1, 1, 1, Stand(Phase.COMPUTING, 5)))
    job.now_s += 30.0
    job.happens(to_controller.Tick())
    assert job.core.outcome is not None
    assert job.core.outcome.kind is to_controller.OutcomeKind.NOT_SAVED


def _only_writer_hangs(other: Stand) -> ControllerCore:
    job = _Job()
    job.dies(2)
    job.hear(Settled(1, 1, 1, 1, other))
    orders = _saves(job.hear(Settled(0, 1, 1, 1, Stand(Phase.COMPUTING, 1))))
    assert list(orders) == [0]
    job.now_s += 30.0
    job.happens(to_controller.Tick())
    return job.core


def test_a_step_that_only_an_excluded_rank_had_begun_is_not_owed() -> None:
    """Seeds 7018913, 122152: the writes of rank 0 hang, and it alone had ended the first step. The other one could
    still reach that step, but a rank without progress is no survivor: the run begins again where it had started."""
    core = _only_writer_hangs(other=Stand(Phase.READY, 1))
    assert core.outcome is not None
    assert core.outcome.kind is to_controller.OutcomeKind.NOTHING_TO_SAVE


def test_a_step_that_a_survivor_had_begun_is_written_by_it() -> None:
    """Negative control."""
    core = _only_writer_hangs(other=Stand(Phase.UPDATED, 1))
    assert core.outcome is None
    assert core.state is to_controller.State.SAVING
