"""One rank's part in periodic checkpoints: told the step, it copies its state there and writes behind the training.

Owned by `processor.core`. An order waits until its step has ended. Between two steps the training thread then copies
the state, and a writer of its own takes the copy. The newest order counts, and an incident ends all of it.
"""

from __future__ import annotations

from lastwords.processor.events import CancelSave, StartSave
from lastwords.processor.participation import Outbox
from lastwords.vocabulary import Save, Saved, SaveFailed, SaveProgress


class Snapshots:
    """At most one checkpoint: ordered, copied, being written, or answered."""

    def __init__(self, rank: int, generation: int, outbox: Outbox) -> None:
        self._rank = rank
        self._generation = generation
        self._outbox = outbox
        self._attempt = 0
        self._waiting: Save | None = None  # for its step
        self._writing: Save | None = None
        self._said: SaveProgress | Saved | SaveFailed | None = None

    def due(self, ended_step: int) -> Save | None:
        """What is to be copied now, `ended_step` being over and the next update still to come."""
        order = self._waiting
        return order if order is not None and order.step == ended_step else None

    def is_new(self, order: Save) -> bool:
        """Whether a checkpoint is ordered that this rank has not heard of."""
        return order.attempt > self._attempt

    def on_save(self, order: Save, ended_step: int, *, may_copy: bool) -> None:
        """A checkpoint of a step is wanted. may_copy: the state is still that of `ended_step`."""
        if order.attempt < self._attempt:
            return
        if order.attempt == self._attempt:
            self.repeat()  # asked again: the answer was lost
            return
        self.cancel()
        self._attempt = order.attempt
        if order.step > ended_step or (order.step == ended_step and may_copy):
            self._waiting = order
            self._answer(SaveProgress(self._rank, self._generation, order.incident, order.attempt, 0))
        else:
            self._refuse(order, f"rank {self._rank} has ended step {ended_step} already", missed=True)

    def repeat(self) -> None:
        """The newest answer once more, in a new session."""
        if self._said is not None:
            self._outbox.send(self._said)

    def copying(self, order: Save) -> None:
        """The copy begins. It is one call in which nothing can be told, as fsync is, and has as long."""
        self._answer(SaveProgress(self._rank, self._generation, order.incident, order.attempt, 0, syncing=True))

    def copied(self, order: Save) -> None:
        """The state is copied: write it, if it is still wanted."""
        if self._waiting == order:
            self._waiting, self._writing = None, order
            self._outbox.emit(StartSave(order))

    def not_copied(self, order: Save, reason: str) -> None:
        """The state could not be copied."""
        if self._waiting == order:
            self._waiting = None
            self._refuse(order, reason)

    def on_left(self, ended_step: int) -> None:
        """The loop is over after this step, which can still be copied: no other one comes."""
        order = self._waiting
        if order is not None and order.step > ended_step:
            self._waiting = None
            self._refuse(order, f"rank {self._rank} has left the training loop", missed=True)

    def on_step_ended(self, ended_step: int) -> None:
        """A step is over; one whose state was not copied in time is not copied any more."""
        order = self._waiting
        if order is not None and order.step < ended_step:
            self._waiting = None
            self._refuse(order, f"rank {self._rank} has trained on past step {order.step}", missed=True)

    def on_progressed(self, attempt: int, bytes_written: int, syncing: bool) -> None:
        """The writer moves, or is inside a call that makes it durable."""
        order = self._of(attempt)
        if order is not None:
            self._answer(SaveProgress(self._rank, self._generation, order.incident, attempt, bytes_written, syncing))

    def on_finished(self, attempt: int, bytes_written: int) -> None:
        """The writer is done."""
        order = self._of(attempt)
        if order is not None:
            self._writing = None
            self._answer(Saved(self._rank, self._generation, order.incident, attempt, order.step, bytes_written))

    def on_errored(self, attempt: int, reason: str, storage: bool) -> None:
        """The writer gave up."""
        order = self._of(attempt)
        if order is not None:
            self._writing = None
            self._refuse(order, reason, storage=storage)

    def cancel(self) -> None:
        """Nothing that has been ordered is wanted any more."""
        if self._writing is not None:
            self._outbox.emit(CancelSave(self._writing.incident, self._writing.attempt))
        self._waiting = self._writing = self._said = None

    def _of(self, attempt: int) -> Save | None:
        order = self._writing
        return order if order is not None and order.attempt == attempt else None

    def _refuse(self, order: Save, reason: str, *, storage: bool = False, missed: bool = False) -> None:
        self._answer(
            SaveFailed(self._rank, self._generation, order.incident, order.attempt, order.step, reason, storage, missed)
        )

    def _answer(self, answer: SaveProgress | Saved | SaveFailed) -> None:
        self._said = answer
        self._outbox.send(answer)
