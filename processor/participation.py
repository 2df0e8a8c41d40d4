"""One rank's part in an incident: frozen, settled, told to proceed, to save, or to go on.

Owned by `processor.core`, which says where the rank stands and sends what comes out. Everything here is void once
the incident ends in Resume; an Exit ends it with the process.
"""

from __future__ import annotations

from lastwords.processor.events import INFO, CancelSave, Effect, Log, SendReport, StartSave
from lastwords.vocabulary import (
    Freeze,
    Phase,
    Proceed,
    Report,
    Resume,
    Save,
    Saved,
    SaveFailed,
    SaveProgress,
    Settled,
    Stand,
)


def may_write(stand: Stand, step: int) -> bool:
    """Whether a rank writes `step` when it is told to: it trusts no controller in this."""
    return stand.holds(step)


class Outbox:
    """Effects on their way to the shell."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []

    def emit(self, effect: Effect) -> None:
        """Append an effect."""
        self.effects.append(effect)

    def send(self, report: Report) -> None:
        """Append a report to the controller."""
        self.effects.append(SendReport(report))

    def take(self) -> list[Effect]:
        """All effects since the last call, in order."""
        effects, self.effects = self.effects, []
        return effects


class Participation:
    """`incident` is 0 while this rank is not frozen. `attempt` > 0 means that it will never train on."""

    def __init__(self, rank: int, generation: int, outbox: Outbox) -> None:
        self._rank = rank
        self._generation = generation
        self._outbox = outbox
        self._over = 0  # newest incident that ended in Resume: it and all before it are void
        self.incident = 0
        self.settled: Settled | None = None  # the newest answer; None while the weights may still change
        self.proceed_step = 0  # the step whose gradients may be applied although this rank is frozen
        self.attempt = 0
        self.save_answer: SaveProgress | Saved | SaveFailed | None = None
        self._sequence = 0
        self._saving: Save | None = None
        self._read_units = False  # a Save of this incident has had these weights read

    # ------------------------------------------------------------------ freeze, settle, go on

    def on_freeze(self, order: Freeze, stand: Stand) -> bool:
        """Stop entering updates; True if this is news, and the rank has to settle."""
        if order.incident <= self._over or order.incident < self.incident:
            return False  # late: that incident is over
        if order.incident == self.incident:
            if self.settled is not None:
                self._outbox.send(self.settled)  # asked again: the answer was lost
            return False
        self.cancel_save()
        self._forget()
        self.incident = order.incident
        self._outbox.emit(Log(INFO, f"rank {self._rank} stops at {stand}: {order.reason}"))
        return True

    def settle(self, stand: Stand) -> None:
        """The weights do not change any more: say so, unless that has been said."""
        if self.settled is not None and self.settled.stand == stand:
            return
        self._sequence += 1
        self.settled = Settled(self._rank, self._generation, self.incident, self._sequence, stand)
        self._outbox.send(self.settled)

    def on_proceed(self, order: Proceed, stand: Stand) -> bool:
        """The gradients of this very step may be applied. Never after a Save of units: what is read must not change.

        True if it is accepted. A rank that only copied black boxes may be the last one that can reach the step.
        """
        if order.incident != self.incident or self._read_units or stand != Stand(Phase.READY, order.step):
            return False
        self.proceed_step = order.step
        return True

    def enter_update(self) -> None:
        """The rank proceeds: its answer is no longer true, and the next one follows after the update."""
        self.settled = None
        self.proceed_step = 0

    def on_resume(self, order: Resume, stand: Stand) -> bool:
        """A false alarm; True if this rank goes on. Also takes note of an incident whose Freeze is still on its way."""
        if order.incident < self.incident or self.attempt:
            return False
        self._over = max(self._over, order.incident)
        if not self.incident:
            return False
        self._forget()
        self.incident = 0
        self._outbox.emit(Log(INFO, f"rank {self._rank} continues at {stand}: false alarm"))
        return True

    def concerns(self, incident: int) -> bool:
        """False if an order of this incident is late: that incident is over, or a newer one is on."""
        return incident >= self.incident and incident > self._over

    # ------------------------------------------------------------------ save

    @property
    def save_result(self) -> Saved | SaveFailed | None:
        """How this rank's newest part ended, if it has."""
        return None if isinstance(self.save_answer, SaveProgress) else self.save_answer

    def on_save(self, order: Save, stand: Stand) -> None:
        """Write, if this rank can; of two orders the one of the newer attempt counts."""
        if order.incident != self.incident or order.attempt < self.attempt:
            return
        if order.attempt == self.attempt:
            if self.save_answer is not None:
                self._outbox.send(self.save_answer)  # asked again: the answer was lost
            return
        self.cancel_save()
        self.attempt = order.attempt
        self.proceed_step = 0
        if self.settled is None:
            self._refuse(order, f"rank {self._rank} has not stopped yet; it is at {stand}", storage=False)
        elif {*order.units}.difference(order.copied) and not may_write(stand, order.step):
            reason = f"rank {self._rank} does not hold step {order.step}; it is at {stand}"
            self._refuse(order, reason, storage=False)
        else:
            self._saving = order
            self._read_units = self._read_units or bool(order.units)
            self._outbox.emit(StartSave(order))
            self._answer(SaveProgress(self._rank, self._generation, order.incident, order.attempt, 0))

    def on_save_progressed(self, incident: int, attempt: int, bytes_written: int, syncing: bool) -> None:
        """The writer moves, or is inside a call that makes it durable."""
        if self._is_saving(incident, attempt) is not None:
            self._answer(SaveProgress(self._rank, self._generation, incident, attempt, bytes_written, syncing))

    def on_save_finished(self, incident: int, attempt: int, bytes_written: int) -> None:
        """The writer is done."""
        order = self._is_saving(incident, attempt)
        if order is not None:
            self._saving = None
            self._answer(Saved(self._rank, self._generation, incident, attempt, order.step, bytes_written))

    def on_save_errored(self, incident: int, attempt: int, reason: str, storage: bool) -> None:
        """The writer gave up."""
        order = self._is_saving(incident, attempt)
        if order is not None:
            self._saving = None
            self._refuse(order, reason, storage)

    def forsake(self, why: str) -> None:
        """Whatever is being written from here, or has been, must not be used."""
        order = self._saving
        if order is not None:
            self.cancel_save()
            self._refuse(order, f"rank {self._rank}: {why}", storage=False)

    def cancel_save(self) -> None:
        """Stop the writer, if there is one."""
        if self._saving is not None:
            self._outbox.emit(CancelSave(self._saving.incident, self._saving.attempt))
            self._saving = None

    # ------------------------------------------------------------------ inside

    def _forget(self) -> None:
        self._sequence = 0
        self.settled = None
        self.proceed_step = 0
        self.attempt = 0
        self.save_answer = None
        self._read_units = False

    def _is_saving(self, incident: int, attempt: int) -> Save | None:
        order = self._saving
        return order if order is not None and (order.incident, order.attempt) == (incident, attempt) else None

    def _refuse(self, order: Save, reason: str, storage: bool) -> None:
        self._answer(
            SaveFailed(self._rank, self._generation, order.incident, order.attempt, order.step, reason, storage)
        )

    def _answer(self, answer: SaveProgress | Saved | SaveFailed) -> None:
        self.save_answer = answer
        self._outbox.send(answer)
