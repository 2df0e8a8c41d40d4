"""Periodic checkpoints in the simulated world: copied between two steps, written while the rank trains, published.

The shell's part in them (`Agent.copy_if_due`, `Writers`, `StorageJobs`) is told again here: a copy takes the training
thread some time, one memory holds one copy at most, and a writer that was cancelled may still read it for a while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lastwords.controller import events as to_controller
from lastwords.processor import events as to_processor
from lastwords.processor.core import ENDED_PHASES
from lastwords.vocabulary import Order, Report, Save, Saved
from tests.sim.ledger import Written

if TYPE_CHECKING:
    from tests.sim.world import At, Trainer, World

FilesJob = to_controller.StartVerify | to_controller.StartPublish


class Content(NamedTuple):
    """What a part is made of: the step of the weights, and that of the rank-local state."""

    weights: int
    local: int


class Writer(NamedTuple):
    """A thread that writes a copy. `first`: what the memory held when it began to read."""

    order: Save
    first: Content
    cancelled: bool = False


NOTHING = Content(-1, -1)


def begins_copy(world: World, trainer: Trainer, then: At, copying: At) -> bool:
    """As `Agent.copy_if_due` begins: True if a copy takes the training thread's time now; it goes on at `then`."""
    order = trainer.core.copy_due
    if order is None:
        return False
    if trainer.writer is not None:
        world.on_copy_refused(trainer, order)
        trainer.core.mark_not_copied(order, "the checkpoint before it is still being written")
        return False
    trainer.copying, trainer.copy_then = order, then
    world.on_periodic("copying")
    trainer.at = copying
    world.on_moved(trainer)
    return True


def ends_copy(trainer: Trainer) -> None:
    """The memory holds the copy."""
    order, trainer.copying = trainer.copying, None
    assert order is not None
    trainer.memory = live(trainer, order)
    trainer.core.mark_copied(order)


def live(trainer: Trainer, order: Save) -> Content:
    """The state of the rank as it is."""
    return Content(trainer.record.held, order.step if trainer.box_has(order.step) else -1)


def content(trainer: Trainer, order: Save) -> Content:
    """What a writer behind the training reads."""
    return trainer.memory


def starts(world: World, trainer: Trainer, order: Save) -> None:
    """A writer begins with the copy."""
    assert trainer.writer is None, "two writers would read one copy"
    trainer.writer = Writer(order, content(trainer, order))
    world.on_periodic("writing")
    world.on_writer_started(trainer)


def cancels(world: World, trainer: Trainer) -> None:
    """The writer is to stop, and does at its next chunk."""
    if trainer.writer is not None and not trainer.writer.cancelled:
        trainer.writer = trainer.writer._replace(cancelled=True)
        world.on_writer_cancelled(trainer)


def writes(world: World, trainer: Trainer, failure: str = "") -> None:
    """The thread of the writer ends."""
    writer, trainer.writer = trainer.writer, None
    assert writer is not None
    if writer.cancelled:
        return
    order, last = writer.order, content(trainer, writer.order)
    if failure:
        event: to_processor.Event = to_processor.SaveErrored(0, order.attempt, failure, storage=True)
    else:
        first = writer.first
        file = Written(
            writer=trainer.rank,
            generation=order.generation,
            incident=0,
            attempt=order.attempt,
            step=order.step,
            units=tuple((unit, first.weights, last.weights) for unit in order.units),
            local_steps=tuple((rank, last.local) for rank in order.local_ranks),
            whole=True,
        )
        world.disk.put(order.target, file)
        world.ledger.periodic_files.add((order.attempt, trainer.rank))
        event = to_processor.SaveFinished(0, order.attempt, 100)
    world.feed(trainer, event)


def files_done(world: World, effect: FilesJob, failure: str = "") -> None:
    """The controller's storage thread is done with its work on a periodic checkpoint."""
    attempt = effect.attempt
    if world.periodic_files is effect:
        world.periodic_files = None
    if isinstance(effect, to_controller.StartVerify):
        problems = world.disk.verify(effect)
        if failure:
            world.feed_controller(to_controller.VerifyBlocked(0, attempt, failure))
        elif problems:
            world.feed_controller(to_controller.VerifyFailed(0, attempt, problems))
        else:
            world.feed_controller(to_controller.Verified(0, attempt))
    elif failure:
        world.feed_controller(to_controller.PublishFailed(0, attempt, failure))
    else:
        world.rename(effect)
        world.on_published(effect)


def note_saved(world: World, report: Saved) -> None:
    """A rank says that its part is on disk."""
    if (report.attempt, report.rank) not in world.ledger.periodic_files:
        world.ledger.untrue.append(f"rank {report.rank} says that it has saved step {report.step}, and has not")


def comes_too_late(trainer: Trainer, order: Order) -> bool:
    """Whether a rank is past the step of a periodic checkpoint when it is told of it."""
    if not isinstance(order, Save) or order.incident:
        return False
    ended, phase = trainer.record.ended, trainer.core.stand.phase
    return order.step < ended or (order.step == ended and phase not in ENDED_PHASES) or trainer.copying is not None


def is_of_none(message: Order | Report) -> bool:
    """Whether an order or a report is about a periodic checkpoint."""
    return getattr(message, "incident", -1) == 0
