"""One rank's side of the protocol, pure: calls and events go in, effects come out.

How it works. The training thread says where it stands (`mark_ready`, `try_update`, `mark_updated`,
`try_end_step`, ...); that moves the phase along `TRANSITIONS`. The controller freezes the rank with `Freeze`: from
then on `try_update` answers False, so the weights cannot change, and the rank *settles*, that is, reports its exact
stand. The weights of a settled rank change only by `Proceed`, never after a `Save`, and it trains on only after
`Resume`. Every incident ends for a rank with `Resume` or `Exit`.

The shell holds one lock around every call. That lock makes "check the freeze, set UPDATING" and "set the freeze,
read the phase" atomic: either the update began before the freeze, and then the rank is UPDATING and not settled,
or the freeze came first, and then the update does not begin. There is no third case.

API::

    core = ProcessorCore(rank, generation, start_step, options)
    training thread: begin_loop, mark_ready, try_update, mark_updated, mark_torn, mark_skipped, try_end_step,
                     mark_left, mark_raised       any thread: mark_signalled
    shell:           handle(event, now_s), take_effects(), has_effects, deadline_s
    queries:         stand, phase, frozen, may_train, may_end_step, loop_open, welcomed, released, leaving

The calls of the training thread cost well under 2 µs and take no time argument: where one of them starts a timer,
`deadline_s` is at once due, and the next `handle` (a Tick will do) starts it. `begin_loop` sets the step from which
this loop goes on. A step without an update is SKIPPED: `mark_skipped` says so before the gate of that step;
without a gate `try_end_step` in COMPUTING does both. The phases are those of docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lastwords.errors import ConfigError
from lastwords.processor.events import (
    ERROR,
    INFO,
    RESEND_INTERVAL_S,
    WARNING,
    CancelSave,
    Effect,
    Event,
    FromController,
    Leave,
    Log,
    ProcessorOptions,
    Released,
    SaveErrored,
    SaveFinished,
    SaveProgressed,
    SendReport,
    SessionDown,
    SessionUp,
    StartSave,
    Tick,
    Wake,
)
from lastwords.vocabulary import (
    Exit,
    Freeze,
    Goodbye,
    Left,
    LoopBegin,
    LoopGo,
    Order,
    Phase,
    Proceed,
    Raised,
    Refused,
    Release,
    Report,
    Resume,
    Save,
    Saved,
    SaveFailed,
    SaveProgress,
    Settled,
    Signalled,
    Stand,
    Welcome,
)

__all__ = [
    "PARKED",
    "TRANSITIONS",
    "CancelSave",
    "Effect",
    "Event",
    "FromController",
    "Leave",
    "Log",
    "ProcessorCore",
    "ProcessorOptions",
    "Released",
    "SaveErrored",
    "SaveFinished",
    "SaveProgressed",
    "SendReport",
    "SessionDown",
    "SessionUp",
    "StartSave",
    "Tick",
    "Wake",
    "holds",
]

_COMPUTING, _READY, _UPDATING, _UPDATED, _SKIPPED, _TORN, _DONE = (
    Phase.COMPUTING,
    Phase.READY,
    Phase.UPDATING,
    Phase.UPDATED,
    Phase.SKIPPED,
    Phase.TORN,
    Phase.DONE,
)

TRANSITIONS: Final[Mapping[tuple[Phase, str], Phase]] = {
    (_COMPUTING, "begin_loop"): _COMPUTING,
    (_COMPUTING, "mark_ready"): _READY,
    (_READY, "mark_ready"): _READY,  # the closure ran twice, or the gate was given up and entered again
    (_READY, "try_update"): _UPDATING,
    (_UPDATING, "mark_updated"): _UPDATED,
    (_UPDATING, "mark_torn"): _TORN,
    (_COMPUTING, "mark_skipped"): _SKIPPED,
    (_READY, "mark_skipped"): _SKIPPED,  # the update itself found that there is nothing to do (found_inf)
    (_UPDATED, "try_end_step"): _COMPUTING,
    (_SKIPPED, "try_end_step"): _COMPUTING,
    (_COMPUTING, "try_end_step"): _COMPUTING,  # a step without an update, by way of SKIPPED
    (_COMPUTING, "mark_left"): _DONE,
    (_READY, "mark_left"): _DONE,
    (_DONE, "mark_left"): _DONE,
    (_TORN, "mark_left"): _TORN,  # reported as an exception: these weights are of no step
    (_COMPUTING, "mark_raised"): _COMPUTING,
    (_READY, "mark_raised"): _COMPUTING,  # nobody is left to apply the gradients: N+1 is out of reach
    (_UPDATING, "mark_raised"): _TORN,
    (_UPDATED, "mark_raised"): _UPDATED,
    (_SKIPPED, "mark_raised"): _SKIPPED,
    (_TORN, "mark_raised"): _TORN,
    (_DONE, "mark_raised"): _DONE,
}
"""Phase after a call of the training thread that does not park. Every pair that is missing is a ConfigError."""

PARKED: Final[Mapping[tuple[Phase, str], Phase]] = {
    (_READY, "try_update"): _READY,
    (_UPDATED, "try_end_step"): _UPDATED,
    (_SKIPPED, "try_end_step"): _SKIPPED,
    (_COMPUTING, "try_end_step"): _SKIPPED,
}
"""Phase after a call that answers False because the rank is frozen."""

_MISUSE: Final[Mapping[str, str]] = {
    "begin_loop": "a training loop was begun in the middle of a step",
    "mark_ready": "optimizer.step() was called again before the step was ended; call step_end() once after each step()",
    "try_update": "an update was entered without READY",
    "mark_updated": "an update was ended that had not begun",
    "mark_torn": "an update was torn that had not begun",
    "mark_skipped": "a step was marked as skipped in which an update took place",
    "try_end_step": "step_end() was called in the middle of an update or without a step",
    "mark_left": "the loop was left in the middle of a step; end the step first",
}


def _row(method: str) -> tuple[Phase | None, ...]:
    """The column of TRANSITIONS for one method, indexed by phase: faster than a dict of pairs."""
    return (None, *(TRANSITIONS.get((phase, method)) for phase in Phase))


_ROWS: Final[Mapping[str, tuple[Phase | None, ...]]] = {method: _row(method) for _, method in TRANSITIONS}
_READY_ROW: Final = _ROWS["mark_ready"]
_END_ROW: Final = _ROWS["try_end_step"]


def holds(stand: Stand, step: int) -> bool:
    """True if a settled rank at `stand` holds its units whole at global step `step` without doing anything.

    >>> holds(Stand(Phase.READY, 8), 7), holds(Stand(Phase.READY, 8), 8), holds(Stand(Phase.UPDATED, 8), 8)
    (True, False, True)
    """
    if stand.phase is _READY:
        return stand.step == step + 1
    if stand.phase is _SKIPPED:
        return step in (stand.step - 1, stand.step)
    return stand.phase in (_COMPUTING, _DONE, _UPDATED) and stand.step == step


class ProcessorCore:
    """State of one rank in the protocol; see the module's docstring. Not thread-safe: the shell has the lock."""

    def __init__(
        self, rank: int, generation: int, start_step: int = 0, options: ProcessorOptions | None = None
    ) -> None:
        self.rank = rank
        self.generation = generation
        self.options = options or ProcessorOptions()
        self._phase = _COMPUTING
        self._ended_step = start_step
        # incident
        self._incident = 0  # the one that this rank is frozen in, 0 if none
        self._incident_over = 0  # newest one that ended in Resume: it and all before it are void
        self._sequence = 0
        self._settled: Settled | None = None
        self._proceed_step = 0
        self._attempt = 0  # newest Save of this incident; > 0 means that this rank never trains on
        self._saving: Save | None = None
        self._save_answer: SaveProgress | Saved | SaveFailed | None = None
        # what this rank has said and waits on
        self._loop: LoopBegin | None = None
        self._loop_open = False
        self._raised: Raised | None = None
        self._signalled: Signalled | None = None
        self._left: Left | None = None
        self._welcomed = False
        self._released = False
        self._leaving = False
        # session and time
        self._session_up = False
        self._unprotected = False
        self._now_s = 0.0
        self._down_since_s: float | None = None
        self._grace_until_s: float | None = None
        self._resend_at_s: float | None = None
        self._effects: list[Effect] = []

    # ------------------------------------------------------------------ queries

    @property
    def phase(self) -> Phase:
        """The phase alone."""
        return self._phase

    @property
    def stand(self) -> Stand:
        """Exactly where this rank stands."""
        phase = self._phase
        return Stand(phase, self._ended_step if phase in (_COMPUTING, _DONE) else self._ended_step + 1)

    @property
    def ended_step(self) -> int:
        """Newest global step that this rank has ended."""
        return self._ended_step

    @property
    def frozen(self) -> bool:
        """True from Freeze to Resume: no update may begin. An Exit ends it with the process."""
        return self._incident != 0

    @property
    def incident(self) -> int:
        """The incident in which this rank is frozen, 0 if none."""
        return self._incident

    @property
    def may_train(self) -> bool:
        """True if the training thread may go on with its loop."""
        return not (self._incident or self._leaving or self._left or self._raised)

    @property
    def may_end_step(self) -> bool:
        """True if `try_end_step` would end the step now.

        A rank that has settled in UPDATED stays there: its committed rank-local state must not move any more,
        because another process may be reading it.
        """
        if self._leaving or self._released or self._phase not in (_COMPUTING, _UPDATED, _SKIPPED):
            return False
        return not self._incident or (self._phase is _UPDATED and self._settled is None)

    @property
    def loop_open(self) -> bool:
        """True once all ranks have agreed on the loop that `begin_loop` announced."""
        return self._loop_open

    @property
    def welcomed(self) -> bool:
        """True once the controller has said that all ranks are registered."""
        return self._welcomed

    @property
    def released(self) -> bool:
        """True once every rank has left the loop; this process may go on after it."""
        return self._released

    @property
    def leaving(self) -> bool:
        """True once this process has been told to end."""
        return self._leaving

    @property
    def has_effects(self) -> bool:
        """True if `take_effects` would return something."""
        return bool(self._effects)

    def take_effects(self) -> list[Effect]:
        """All effects since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects

    # ------------------------------------------------------------------ training thread

    def begin_loop(self, steps_per_epoch: int, epochs: int, start_step: int) -> None:
        """The loop is about to start, `start_step` steps being done; wait for `loop_open`."""
        self._move("begin_loop")
        self._ended_step = start_step
        self._loop = LoopBegin(self.rank, self.generation, steps_per_epoch, epochs, start_step)
        self._loop_open = False
        self._send(self._loop)
        self._after_move()

    def mark_ready(self) -> None:
        """The gradients of the step under way are final."""
        phase = _READY_ROW[self._phase]
        if phase is None:
            raise self._misuse("mark_ready")
        self._phase = phase
        if self._incident:
            self._after_move()

    def try_update(self) -> bool:
        """May the optimizer write now? False: park, and call again after Wake."""
        if self._phase is not _READY:
            raise self._misuse("try_update")
        if (self._incident and self._proceed_step != self._ended_step + 1) or self._leaving:
            return False
        self._phase = _UPDATING
        if self._incident:
            # The answer that was given (READY) is no longer true; the next one follows after the update.
            self._settled = None
            self._proceed_step = 0
        return True

    def mark_updated(self) -> None:
        """The optimizer has written everything."""
        if self._phase is not _UPDATING:
            raise self._misuse("mark_updated")
        self._phase = _UPDATED
        if self._incident:
            self._after_move()

    def mark_torn(self) -> None:
        """The update raised half-way: the weights of this rank are of no step."""
        self._move("mark_torn")
        self._after_move()

    def mark_skipped(self) -> None:
        """No update takes place in this step; its gate, if there is one, comes next."""
        self._move("mark_skipped")
        self._after_move()

    def try_end_step(self) -> bool:
        """End the step under way; in COMPUTING that is a step without an update. False: park, call again after Wake."""
        if _END_ROW[self._phase] is None:
            raise self._misuse("try_end_step")
        if self._incident or self._leaving:
            if not self.may_end_step:
                if self._phase is _COMPUTING:
                    self._phase = _SKIPPED
                    self._after_move()
                return False
            self._phase = _COMPUTING
            self._ended_step += 1
            self._after_move()
            return True
        self._phase = _COMPUTING
        self._ended_step += 1
        return True

    def mark_left(self) -> None:
        """The loop is over on this rank; wait for `released` (or for the end of an incident)."""
        self._move("mark_left")
        if self._phase is _TORN:
            self.mark_raised("the loop was left although an update had failed half-way", secondary=False)
            return
        if self._left is None:
            self._left = Left(self.rank, self.generation, self.stand)
            self._send(self._left)
        self._after_move()

    def mark_raised(self, text: str, secondary: bool) -> None:
        """An exception has left the loop; wait for the end of the incident that follows. The first one counts."""
        self._move("mark_raised")
        if self._raised is None:
            self._raised = Raised(self.rank, self.generation, text, secondary, self.stand)
            self._send(self._raised)
        self._after_move()

    def mark_signalled(self, signal_number: int) -> None:
        """Any thread: this process was asked to stop. Training goes on until the controller freezes it."""
        if self._signalled is None and not self._released:
            self._signalled = Signalled(self.rank, self.generation, signal_number, self.stand)
            self._send(self._signalled)

    # ------------------------------------------------------------------ events

    def handle(self, event: Event, now_s: float) -> None:
        """Take in one event; `now_s` is monotonic and never goes back."""
        self._now_s = now_s
        if self._down_since_s is None and not self._session_up:
            self._down_since_s = now_s
        match event:
            case FromController(order):
                self._on_order(order)
            case SessionUp():
                self._on_session_up()
            case SessionDown():
                if self._session_up:
                    self._session_up = False
                    self._down_since_s = now_s
            case SaveProgressed(incident, attempt, written):
                if self._is_saving(incident, attempt):
                    self._answer_save(SaveProgress(self.rank, self.generation, incident, attempt, written))
            case SaveFinished(incident, attempt, written):
                if (saving := self._saving) is not None and self._is_saving(incident, attempt):
                    self._saving = None
                    self._answer_save(Saved(self.rank, self.generation, incident, attempt, saving.step, written))
            case SaveErrored(incident, attempt, reason, storage):
                if (saving := self._saving) is not None and self._is_saving(incident, attempt):
                    self._saving = None
                    self._refuse_save(saving, reason, storage)
            case Tick():
                pass
        self._run_timers()

    @property
    def deadline_s(self) -> float | None:
        """When the next Tick is due; None if nothing is waited for."""
        due_s = [at_s for at_s in (self._grace_until_s, self._resend_at_s, self._lost_at_s()) if at_s is not None]
        if self._grace_wanted() and self._grace_until_s is None:
            due_s.append(self._now_s)
        if self._resend_at_s is None and self._session_up and self._owed():
            due_s.append(self._now_s)
        return min(due_s, default=None)

    def _lost_at_s(self) -> float | None:
        if self._session_up or self._down_since_s is None or self._leaving or self._released:
            return None
        if self._unprotected and not self._waits():
            return None
        return self._down_since_s + self.options.controller_lost_s

    def _run_timers(self) -> None:
        now_s = self._now_s
        if not self._grace_wanted():
            self._grace_until_s = None
        elif self._grace_until_s is None:
            self._grace_until_s = now_s + self.options.step_end_grace_s
        if self._grace_until_s is not None and now_s >= self._grace_until_s:
            self._grace_until_s = None
            self._settle()
        lost_at_s = self._lost_at_s()
        if lost_at_s is not None and now_s >= lost_at_s:
            self._on_controller_lost()
        owed = self._owed() if self._session_up else ()
        if not owed:
            self._resend_at_s = None
        elif self._resend_at_s is None:
            self._resend_at_s = now_s + RESEND_INTERVAL_S
        elif now_s >= self._resend_at_s:
            self._resend_at_s = now_s + RESEND_INTERVAL_S
            for report in owed:
                self._send(report)

    # ------------------------------------------------------------------ orders

    def _on_order(self, order: Order) -> None:
        if order.generation != self.generation or self._leaving or self._released:
            return
        match order:
            case Welcome():
                self._welcomed = True
            case LoopGo():
                self._loop_open = self._loop is not None
            case Freeze():
                self._on_freeze(order)
            case Proceed():
                if order.incident == self._incident and self._attempt == 0 and self.stand == Stand(_READY, order.step):
                    self._proceed_step = order.step
            case Save():
                self._on_save(order)
            case Resume():
                self._on_resume(order)
            case Exit():
                if order.incident >= self._incident and order.incident > self._incident_over:
                    self._leave(order, order.reason)
            case Refused():
                self._leave(order, order.reason)
            case Release():
                if self._left is not None:
                    self._release()
        self._effects.append(Wake())

    def _on_freeze(self, order: Freeze) -> None:
        if order.incident <= self._incident_over or order.incident < self._incident:
            return  # late: that incident is over
        if order.incident == self._incident:
            if self._settled is not None:
                self._send(self._settled)
            return
        self._cancel_save()
        self._forget_incident()
        self._incident = order.incident
        self._effects.append(Log(WARNING, f"rank {self.rank} stops at {self.stand}: {order.reason}"))
        self._after_move()

    def _on_resume(self, order: Resume) -> None:
        if order.incident < self._incident or self._attempt:
            return
        self._incident_over = max(self._incident_over, order.incident)
        if self._incident:
            self._forget_incident()
            self._incident = 0
            self._effects.append(Log(INFO, f"rank {self.rank} goes on at {self.stand}: false alarm"))

    def _on_save(self, order: Save) -> None:
        if order.incident != self._incident or order.attempt < self._attempt:
            return
        if order.attempt == self._attempt:
            if self._save_answer is not None:
                self._send(self._save_answer)
            return
        self._cancel_save()
        self._attempt = order.attempt
        self._proceed_step = 0
        self._save_answer = None
        if self._settled is None:
            self._refuse_save(order, f"rank {self.rank} has not settled; it stands at {self.stand}", storage=False)
        elif order.units and not holds(self.stand, order.step):
            text = f"rank {self.rank} does not hold step {order.step}; it stands at {self.stand}"
            self._refuse_save(order, text, storage=False)
        else:
            self._saving = order
            self._effects.append(StartSave(order))
            self._answer_save(SaveProgress(self.rank, self.generation, order.incident, order.attempt, 0))

    def _leave(self, order: Exit | Refused | None, reason: str) -> None:
        self._cancel_save()
        self._leaving = True
        if self._session_up:
            self._send(Goodbye(self.rank, self.generation))
        self._effects.append(Leave(order, reason))

    def _release(self) -> None:
        self._released = True
        if self._session_up:
            self._send(Goodbye(self.rank, self.generation))
        self._effects.append(Released())

    # ------------------------------------------------------------------ session

    def _on_session_up(self) -> None:
        self._session_up = True
        self._down_since_s = None
        if self._unprotected:
            self._unprotected = False
            self._effects.append(Log(WARNING, f"rank {self.rank} has a controller again and is protected"))
        for report in self._owed():
            self._send(report)

    def _on_controller_lost(self) -> None:
        lost_s = self.options.controller_lost_s
        if not self._waits():
            self._unprotected = True
            text = f"rank {self.rank} has had no controller for {lost_s:g} s; training goes on unprotected"
            self._effects.append(Log(ERROR, text))
        elif self._left is not None and not self._incident and self._raised is None:
            text = f"rank {self.rank} has done its loop and has had no controller for {lost_s:g} s; it goes on alone"
            self._effects.append(Log(WARNING, text))
            self._release()
        else:
            self._leave(None, f"the controller was lost for {lost_s:g} s while rank {self.rank} {self._wait_text()}")
        self._effects.append(Wake())

    def _waits(self) -> bool:
        """True if this rank can do nothing but wait for the controller."""
        return bool(self._incident or self._left or self._raised or (self._loop is not None and not self._loop_open))

    def _wait_text(self) -> str:
        if self._attempt:
            return f"was taking part in saving the last words (incident {self._incident})"
        if self._incident:
            return f"was stopped at {self.stand} (incident {self._incident})"
        if self._raised is not None:
            return f"waited for its incident ({self._raised.text})"
        return "waited for the others to begin the loop"

    def _owed(self) -> tuple[Report, ...]:
        """What the controller may not know yet; it gets it again until it answers."""
        if self._leaving or self._released:
            return ()
        owed = (
            self._loop if not self._loop_open else None,
            self._signalled,
            self._raised,
            self._left,
            self._settled,
            self._save_answer,
        )
        return tuple(report for report in owed if report is not None)

    # ------------------------------------------------------------------ inside

    def _move(self, method: str) -> None:
        phase = _ROWS[method][self._phase]
        if phase is None:
            raise self._misuse(method)
        self._phase = phase

    def _misuse(self, method: str) -> ConfigError:
        text = _MISUSE.get(method, "the calls of the training loop are out of order")
        if self._phase is _TORN:
            text = "an update failed half-way, so the weights are of no step; this rank cannot train on"
        elif self._phase is _DONE:
            text = "the training loop has been left already"
        return ConfigError(f"rank {self.rank} at {self.stand}: {text} ({method})")

    def _after_move(self) -> None:
        """The stand of a possibly frozen rank has moved: settle (again), unless the weights may still change."""
        if not self._incident or self._leaving:
            return
        if self._grace_wanted():
            return
        if self._phase is not _UPDATING:
            self._settle()

    def _grace_wanted(self) -> bool:
        """True while a frozen rank in UPDATED may still reach its step's end. After an exception it will not."""
        return bool(
            self._incident
            and self._phase is _UPDATED
            and self._settled is None
            and self._raised is None
            and not self._leaving
        )

    def _settle(self) -> None:
        stand = self.stand
        if self._settled is not None and self._settled.stand == stand:
            return
        self._sequence += 1
        self._settled = Settled(self.rank, self.generation, self._incident, self._sequence, stand)
        self._send(self._settled)

    def _forget_incident(self) -> None:
        self._sequence = 0
        self._settled = None
        self._proceed_step = 0
        self._attempt = 0
        self._saving = None
        self._save_answer = None

    def _is_saving(self, incident: int, attempt: int) -> bool:
        return self._saving is not None and (self._saving.incident, self._saving.attempt) == (incident, attempt)

    def _cancel_save(self) -> None:
        if self._saving is not None:
            self._effects.append(CancelSave(self._saving.incident, self._saving.attempt))
            self._saving = None

    def _answer_save(self, answer: SaveProgress | Saved | SaveFailed) -> None:
        self._save_answer = answer
        self._send(answer)

    def _refuse_save(self, order: Save, reason: str, storage: bool) -> None:
        self._answer_save(
            SaveFailed(
                self.rank, self.generation, order.incident, order.attempt, order.step, reason=reason, storage=storage
            )
        )

    def _send(self, report: Report) -> None:
        self._effects.append(SendReport(report))
