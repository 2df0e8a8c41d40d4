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
    training thread: begin_loop, mark_ready, try_update, mark_updated, mark_torn, mark_corrupt, mark_skipped,
                     mark_gate_failed, try_end_step, mark_copying, mark_copied, mark_not_copied, mark_left, mark_raised
    any thread:      mark_signalled, mark_peer_died, want_save
    shell:           handle(event, now_s), take_effects(), effects, deadline_s
    queries:         stand, phase, ended_step, copy_due, frozen, may_train, may_proceed, may_end_step, loop_open,
                     welcomed, asks, released, leaving

The calls of the training thread cost well under 2 µs and take no time argument: where one of them starts a timer,
`deadline_s` is at once due, and the next `handle` (a Tick will do) starts it. `begin_loop` sets the step from which
this loop goes on. A step without an update is SKIPPED: `mark_skipped` says so before the gate of that step;
without a gate `try_end_step` in COMPUTING does both. The phases are those of docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lastwords.core_events import Log, Tick
from lastwords.errors import ConfigError
from lastwords.processor.events import (
    ERROR,
    WARNING,
    Effect,
    Event,
    FromController,
    Leave,
    PassOn,
    ProcessorOptions,
    Released,
    SaveErrored,
    SaveFinished,
    SaveProgressed,
    SessionDown,
    SessionUp,
    ShowStack,
    Wake,
)
from lastwords.processor.participation import Correspondence, Grace, Outbox, Participation, Snapshots
from lastwords.vocabulary import (
    NO_SCHEDULE,
    PERIODIC,
    Exit,
    Freeze,
    Goodbye,
    Left,
    LoopBegin,
    LoopGo,
    Notice,
    Order,
    PeerDied,
    Phase,
    Proceed,
    Raised,
    Refused,
    Release,
    Resume,
    Save,
    SaveWanted,
    Schedule,
    Signalled,
    Stand,
    Welcome,
)

# The phases of a step as data: which call of the training thread leads where.
#
# `TRANSITIONS` is the whole of it; docs/protocol.md draws the same table. `PARKED` is what a call leads to if the rank
# is frozen and has to answer False.

_COMPUTING, _READY, _UPDATING = Phase.COMPUTING, Phase.READY, Phase.UPDATING
_UPDATED, _SKIPPED, _TORN, _DONE = Phase.UPDATED, Phase.SKIPPED, Phase.TORN, Phase.DONE

TRANSITIONS: Final[Mapping[tuple[Phase, str], Phase]] = {
    (_COMPUTING, "begin_loop"): _COMPUTING,
    (_COMPUTING, "mark_ready"): _READY,
    (_READY, "mark_ready"): _READY,  # the closure ran twice, or the gate was given up and entered again
    (_READY, "try_update"): _UPDATING,
    (_UPDATING, "mark_updated"): _UPDATED,
    (_UPDATING, "mark_torn"): _TORN,
    (_COMPUTING, "mark_corrupt"): _TORN,  # its replicas say that its weights are wrong
    (_UPDATED, "mark_corrupt"): _TORN,  # its loop has trained steps again that are saved already
    (_COMPUTING, "mark_skipped"): _SKIPPED,
    (_READY, "mark_skipped"): _SKIPPED,  # the update itself found that there is nothing to do (found_inf)
    (_READY, "mark_gate_failed"): _READY,  # the gradients can still be applied, if Proceed says so
    (_SKIPPED, "mark_gate_failed"): _SKIPPED,
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
    "begin_loop": "a training loop was started in the middle of a step",
    "mark_ready": "optimizer.step() was called again before the step was ended; call step_end() once after each "
    "step(), also where the loop catches an exception in between; what tries learning rates goes before protect()",
    "try_update": "an update was entered without READY",
    "mark_updated": "an update was ended that had not begun",
    "mark_torn": "an update was torn that had not begun",
    "mark_skipped": "a step was marked as skipped in which an update took place",
    "mark_corrupt": "weights were found to be wrong in the middle of an update",
    "mark_gate_failed": "a gate failed outside of a step",
    "try_end_step": "step_end() was called in the middle of an update or without a step",
    "mark_left": "the loop was left in the middle of a step; end the step first",
}

ENDED_PHASES: Final = (_COMPUTING, _DONE)
"""Phases whose stand carries the step that was ended; the others carry the one under way."""


def misuse(rank: int, stand: Stand, method: str) -> ConfigError:
    """The error for a call that TRANSITIONS does not have; its text is for the author of the training loop."""
    text = _MISUSE.get(method, "the calls of the training loop are out of order")
    if stand.phase is _TORN:
        text = "an update failed half-way, so the weights belong to no step; this rank cannot continue training"
    elif stand.phase is _DONE:
        text = "the training loop has been left already"
    return ConfigError(f"rank {rank} at {stand}: {text}")


__all__ = ["ProcessorCore", "ProcessorOptions"]

_ROWS: Final[Mapping[str, tuple[Phase | None, ...]]] = {
    method: (None, *(TRANSITIONS.get((phase, method)) for phase in Phase)) for _, method in TRANSITIONS
}
"""The entries of TRANSITIONS for one method, indexed by phase: quicker than a dict of pairs."""
_READY_ROW: Final = _ROWS["mark_ready"]
_END_ROW: Final = _ROWS["try_end_step"]


class ProcessorCore:
    """State of one rank in the protocol; see the module's docstring. Not thread-safe: the shell has the lock."""

    def __init__(
        self, rank: int, generation: int, start_step: int = 0, options: ProcessorOptions | None = None
    ) -> None:
        self.rank = rank
        self.generation = generation
        self.options = options or ProcessorOptions()
        self.phase = _COMPUTING
        """That of the stand. Read by the shell in every step, and written here alone; so is `ended_step`."""
        self.ended_step = start_step
        """Newest global step that this rank has ended."""
        self._outbox = Outbox()
        self.effects = self._outbox.effects
        """What `take_effects` would return; to be looked at."""
        self._part = Participation(rank, generation, self._outbox)
        self._snapshots = Snapshots(rank, generation, self._outbox)
        self._said = Correspondence(self._part, self._outbox, self.options)
        self.welcomed = False
        """The controller has said that all ranks are registered. This and what follows is written here alone."""
        self.released = False
        """Every rank has left the loop; this process may go on after it."""
        self.leaving = False
        """This process has been told to end."""
        self._now_s = 0.0
        self._step_end_grace = Grace(self.options.step_end_grace_s)
        self._update_grace = Grace(self.options.update_grace_s)
        self._has_copy = self.options.has_copy
        self._retreated = False  # in this incident this rank stands by its copy of the last step

    # ------------------------------------------------------------------ queries

    @property
    def step(self) -> int:
        """That of the stand: the one that was ended last, or the one under way."""
        return self.ended_step if self.phase in ENDED_PHASES else self.ended_step + 1

    @property
    def stand(self) -> Stand:
        """Exactly where this rank stands."""
        return Stand(self.phase, self.step)

    @property
    def settled_stand(self) -> Stand:
        """What the controller is told: the stand, or that of the copy which this rank has gone back to."""
        return Stand(_COMPUTING, self.ended_step) if self._retreated else self.stand

    @property
    def frozen(self) -> bool:
        """True from Freeze to Resume: no update may begin. An Exit ends it with the process."""
        return self._part.incident != 0

    @property
    def may_train(self) -> bool:
        """True if the training thread may go on with its loop."""
        return not (self._part.incident or self.leaving or self._said.left or self._said.raised)

    @property
    def copy_due(self) -> Save | None:
        """The periodic checkpoint for which the state has to be copied now, before anything of it moves on."""
        order = self._snapshots.due(self.ended_step)
        return None if self.phase not in ENDED_PHASES or self._part.incident or self.leaving else order

    @property
    def may_end_step(self) -> bool:
        """True if `try_end_step` would end the step now.

        A rank that has settled in UPDATED stays there: its committed rank-local state must not move any more,
        because another process may be reading it.
        """
        if self.leaving or self.released or _END_ROW[self.phase] is None:
            return False
        return not self._part.incident or (self.phase is _UPDATED and self._part.settled is None)

    @property
    def may_proceed(self) -> bool:
        """True if `try_update` would answer True although this rank is frozen."""
        return self.phase is _READY and not self.leaving and self._part.proceed_step == self.ended_step + 1

    @property
    def loop_open(self) -> bool:
        """True once all ranks have agreed on the loop that `begin_loop` announced."""
        return self._said.loop_open

    @property
    def steps_done(self) -> bool:
        """True if every step of the loop that `begin_loop` announced has ended: what comes now is the user's alone."""
        loop = self._said.loop
        last = 0 if loop is None else loop.steps_per_epoch * loop.epochs
        return 0 < last <= self.ended_step and self.phase in ENDED_PHASES

    @property
    def asked_to_stop(self) -> bool:
        """True once this process has got a stop signal that was reported."""
        return self._said.signalled is not None

    @property
    def asks(self) -> bool:
        """True if this rank waits for the controller, was asked to stop, or knows of a death."""
        return self._said.asks

    # ------------------------------------------------------------------ effects

    def take_effects(self) -> list[Effect]:
        """All effects since the last call, in order."""
        effects = [*self.effects]
        self.effects.clear()
        return effects

    # ------------------------------------------------------------------ training thread

    def begin_loop(self, steps_per_epoch: int, epochs: int, start_step: int, schedule: Schedule = NO_SCHEDULE) -> None:
        """The loop is about to start, `start_step` steps being done; wait for `loop_open`."""
        self._move("begin_loop")
        self.ended_step = start_step
        if self._said.wanted is not None:
            self._said.wanted = SaveWanted(self.rank, self.generation, start_step)
        self._said.loop = LoopBegin(self.rank, self.generation, steps_per_epoch, epochs, start_step, schedule)
        self._said.loop_open = False
        self._outbox.send(self._said.loop)
        self._after_move()

    def mark_ready(self) -> None:
        """The gradients of the step under way are final."""
        phase = _READY_ROW[self.phase]
        if phase is None:
            raise misuse(self.rank, self.stand, "mark_ready")
        self.phase = phase
        if self._part.incident:
            self._after_move()

    def try_update(self) -> bool:
        """May the optimizer write now? False: park, and call again after Wake."""
        if self.phase is not _READY:
            raise misuse(self.rank, self.stand, "try_update")
        if self.leaving:
            return False
        if self._part.incident or self._said.raised is not None:  # raised: its gate has failed
            if self._part.proceed_step != self.ended_step + 1:
                return False
            self._part.enter_update()
        self.phase = _UPDATING
        return True

    def mark_updated(self) -> None:
        """The optimizer has written everything."""
        if self.phase is not _UPDATING:
            raise misuse(self.rank, self.stand, "mark_updated")
        self.phase = _UPDATED
        if self._part.incident:
            self._after_move()

    def mark_torn(self) -> None:
        """The update raised half-way: the weights of this rank are of no step."""
        self._move("mark_torn")
        self._after_move()

    def mark_corrupt(self, why: str = "its weights differ from those of its replicas") -> None:
        """These weights, and any copy of them, are not what they should be: nothing may be saved from here."""
        self._has_copy = False
        self._move("mark_corrupt")
        self._part.forsake(why)
        self._after_move()

    def mark_skipped(self) -> None:
        """No update takes place in this step; its gate, if there is one, comes next."""
        self._move("mark_skipped")
        self._after_move()

    def mark_gate_failed(self, text: str) -> None:
        """The gate of this step can never be passed any more (a peer or the network is gone): park, as if frozen.

        Reported like an exception out of a collective, but the training thread is still here: this rank stays in
        READY, so that Proceed can have its gradients applied. No Resume follows.
        """
        self._move("mark_gate_failed")
        self._report_raised(text, secondary=True)

    def try_end_step(self) -> bool:
        """End the step under way; in COMPUTING that is a step without an update.

        False: park, and call again after Wake. True while frozen: the step is ended, and the next call parks.
        """
        if _END_ROW[self.phase] is None:
            raise misuse(self.rank, self.stand, "try_end_step")
        if (self._part.incident or self.leaving) and not self.may_end_step:
            self.phase = PARKED[self.phase, "try_end_step"]
            self._after_move()
            return False
        self.phase = _COMPUTING
        self.ended_step += 1
        if self._part.incident:
            self._after_move()
        if self._snapshots.waiting is not None:
            self._snapshots.on_step_ended(self.ended_step)
        return True

    def mark_copying(self) -> bool:
        """After the loop: the state that `copy_due` asks for is about to be copied. False if it asks for none."""
        if (order := self.copy_due) is not None:
            self._snapshots.writing.go_on(order, syncing=True)  # one call, in which nothing can be told, as fsync is
        return order is not None

    def mark_copied(self, order: Save) -> None:
        """The state that `copy_due` asked for is copied."""
        self._snapshots.copied(order)
        self._answer_wish(order)

    def mark_not_copied(self, order: Save, reason: str) -> None:
        """It could not be copied; training goes on."""
        self._snapshots.not_copied(order, reason)
        self._answer_wish(order)

    def want_save(self) -> None:
        """A checkpoint of the next step's end is wanted; owed until the state for one is copied."""
        self._said.wanted = SaveWanted(self.rank, self.generation, self.ended_step)
        self._outbox.send(self._said.wanted)

    def _answer_wish(self, order: Save) -> None:
        """An order of a later step than that in which one was wanted; an order alone may be of a step far ahead."""
        wanted = self._said.wanted
        if wanted is not None and (order.step > wanted.after_step or self.phase is Phase.DONE):
            self._said.wanted, self._said.copied = None, wanted

    def mark_left(self) -> None:
        """The loop is over on this rank; wait for `released` (or for the end of an incident)."""
        self._move("mark_left")
        if self.phase is _TORN:
            self.mark_raised("the loop was left although an update had failed half-way", secondary=False)
            return
        if self._said.left is None:
            self._said.left = Left(self.rank, self.generation, self.stand)
            self._outbox.send(self._said.left)
            self._snapshots.on_left(self.ended_step)
        self._after_move()

    def mark_raised(self, text: str, secondary: bool) -> None:
        """An exception has left the loop; wait for the end of the incident that follows. The first one counts."""
        self._move("mark_raised")
        self._report_raised(text, secondary)

    def _report_raised(self, text: str, secondary: bool) -> None:
        if self._said.raised is None:
            self._said.raised = Raised(self.rank, self.generation, text, secondary, self.stand)
            self._outbox.send(self._said.raised)
        self._after_move()

    def mark_signalled(self, signal_number: int) -> None:
        """Any thread: this process was asked to stop. Training goes on until the controller freezes it."""
        if self._said.unprotected and not self._said.waits:
            self._outbox.emit(PassOn(signal_number))
        elif self._said.signalled is None and not self.released:
            self._said.signalled = Signalled(self.rank, self.generation, signal_number, self.stand)
            self._outbox.send(self._said.signalled)

    def mark_peer_died(self, report: PeerDied) -> None:
        """Any thread: a process of this host has died."""
        self._said.deaths[report.dead_rank] = report
        self._outbox.send(report)

    def _move(self, method: str) -> None:
        phase = _ROWS[method][self.phase]
        if phase is None:
            raise misuse(self.rank, self.stand, method)
        self.phase = phase

    def _after_move(self) -> None:
        """If frozen, say where this rank stands now, unless its weights may still change or its step may still end."""
        if not self._part.incident or self.leaving or self._grace_wanted():
            return
        if self.phase is _TORN and self._has_copy:
            self._retreated = True
        if self.phase is not _UPDATING or self._retreated:
            self._part.settle(self.settled_stand)

    def _grace_wanted(self) -> bool:
        """True while a frozen rank in UPDATED may still reach its step's end; after an exception it will not."""
        return bool(
            self._part.incident
            and self.phase is _UPDATED
            and self._part.settled is None
            and self._said.raised is None
            and not self.leaving
        )

    def _retreat_wanted(self) -> bool:
        """True while a frozen rank sits in an update that may never end, and has a copy of the step before."""
        return bool(
            self._has_copy
            and self._part.incident
            and self.phase is _UPDATING
            and not self._retreated
            and not self.leaving
        )

    # ------------------------------------------------------------------ events

    def handle(self, event: Event, now_s: float) -> None:
        """Take in one event; `now_s` is monotonic and never goes back."""
        self._now_s = now_s
        self._said.watch(now_s)
        match event:
            case FromController(order):
                self._on_order(order)
            case SessionUp():
                self._snapshots.writing.repeat()
                if self._said.on_session_up():
                    self._outbox.emit(
                        Log(WARNING, (f"rank {self.rank} has reconnected to its controller and is protected again"))
                    )
            case SessionDown():
                self._said.on_session_down(now_s)
            case SaveProgressed() | SaveFinished() | SaveErrored():
                (self._snapshots if event.incident == PERIODIC else self._part).writing.hear(event)
            case Tick():
                pass
        self._run_timers()

    def _on_order(self, order: Order) -> None:
        if order.generation != self.generation or self.leaving or self.released:
            return
        wakes = False
        match order:
            case Welcome():
                wakes, self.welcomed = not self.welcomed, True
                self._said.unanswered = False
            case LoopGo():
                wakes, self._said.loop_open = not self._said.loop_open, self._said.loop is not None
            case Freeze():
                if self._part.on_freeze(order, self.stand):
                    self._snapshots.cancel()
                    self._retreated = False
                    self._after_move()
            case Proceed():
                wakes = self._part.on_proceed(order, self.settled_stand)
            case Save() if order.incident == PERIODIC:
                if not self._part.incident:
                    if order.attempt > self._snapshots.attempt:
                        self._said.copied = None
                    self._snapshots.on_save(order, self.ended_step, may_copy=self.phase in ENDED_PHASES)
                    if self._said.left is not None:
                        self._snapshots.on_left(self.ended_step)
                        wakes = self.copy_due is not None
            case Save():
                self._part.on_save(order, self.settled_stand)
            case Resume():
                wakes = self._part.on_resume(order, self.stand)
                self._retreated = self._retreated and not wakes
            case Exit():
                if self._part.concerns(order.incident):
                    self._leave(order, order.reason)
            case Refused():
                self._leave(order, order.reason)
            case Release():
                if self._said.left is not None:
                    self._release()
            case Notice(text=text, stack=stack):
                self._outbox.emit(ShowStack(text) if stack else Log(WARNING, text))
        if wakes:  # a void order does nothing at all
            self._outbox.emit(Wake())

    def _leave(self, order: Exit | Refused | None, reason: str) -> None:
        self._part.writing.cancel()
        self.leaving = True
        self._end(Leave(order, reason))

    def _release(self) -> None:
        self.released = True
        self._end(Released())

    def _end(self, effect: Leave | Released) -> None:
        self._snapshots.cancel()
        self._said.closed = True
        if self._said.session_up:
            self._outbox.send(Goodbye(self.rank, self.generation))
        self._outbox.emit(effect)
        self._outbox.emit(Wake())

    @property
    def deadline_s(self) -> float | None:
        """When the next Tick is due; None if nothing is waited for."""
        wanted = (
            self._step_end_grace.deadline_s(self._grace_wanted(), self._now_s),
            self._update_grace.deadline_s(self._retreat_wanted(), self._now_s),
            self._said.deadline_s(self._now_s),
        )
        return min((at_s for at_s in wanted if at_s is not None), default=None)

    def _run_timers(self) -> None:
        now_s = self._now_s
        if self._step_end_grace.over(self._grace_wanted(), now_s):
            self._part.settle(self.stand)
        if self._update_grace.over(self._retreat_wanted(), now_s):
            self._retreated = True
            self._part.settle(self.settled_stand)
        if self._said.controller_lost(now_s):
            self._on_controller_lost()
        self._said.run_timer(now_s)

    def _on_controller_lost(self) -> None:
        lost_s = self.options.controller_lost_s
        if not self._said.waits:
            self._said.unprotected = True
            text = f"rank {self.rank} has lost its controller; training continues, but nothing is saved if a rank dies"
            self._outbox.emit(Log(ERROR, text))
            if (signalled := self._said.signalled) is not None:
                self._said.signalled = None
                self._outbox.emit(PassOn(signalled.signal_number))
        elif not self._part.incident and self._said.left is not None and self._said.raised is None:
            text = (
                f"rank {self.rank} has ended its training loop and could not reach the controller for {lost_s:g} s; "
                "it no longer waits for the other ranks"
            )
            self._outbox.emit(Log(WARNING, text))
            self._release()
        else:
            doing = f"this rank had ended step {self.stand.ended_step} and {self._said.wait_text()}"
            self._leave(None, f"the controller could not be reached for {lost_s:g} s; {doing}")
