"""One rank's part in an incident: frozen, settled, told to proceed, to save, or to go on.

Owned by `processor.core`, which says where the rank stands and sends what comes out. Everything here is void once
the incident ends in Resume; an Exit ends it with the process.
"""

from __future__ import annotations

from lastwords.core_events import Log
from lastwords.processor.events import (
    HELLO_PAUSE_MAX_S,
    INFO,
    RESEND_INTERVAL_S,
    CancelSave,
    Effect,
    ProcessorOptions,
    SaveErrored,
    SaveFinished,
    SaveProgressed,
    SayHello,
    SendReport,
    StartSave,
)
from lastwords.vocabulary import (
    Freeze,
    Left,
    LoopBegin,
    PeerDied,
    Phase,
    Proceed,
    Raised,
    Report,
    Resume,
    Save,
    Saved,
    SaveFailed,
    SaveProgress,
    SaveWanted,
    Settled,
    Signalled,
    Stand,
)

# A bounded wait that begins when it is first asked for. Pure.


class Grace:
    """Runs while it is `wanted`, and is over `seconds` after that began."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until_s: float | None = None

    def over(self, wanted: bool, now_s: float) -> bool:
        """True once, when the time is up; begins the wait if need be.

        >>> grace = Grace(0.5)
        >>> grace.over(True, 1.0), grace.over(True, 1.4), grace.over(True, 1.6)
        (False, False, True)
        """
        if not wanted:
            self._until_s = None
        elif self._until_s is None:
            self._until_s = now_s + self.seconds
        elif now_s >= self._until_s:
            self._until_s = None
            return True
        return False

    def deadline_s(self, wanted: bool, now_s: float) -> float | None:
        """When `over` has to be asked again; at once if the wait has not begun."""
        return self._until_s if self._until_s is not None or not wanted else now_s


# What one rank has told the controller and waits on, the session they share, and how long it waits.
#
# Owned by `processor.core`. A report is owed until the order that answers it arrives: it goes out again with every new
# session, and now and then in between, so that nothing that was lost with a stream stays lost.


class Correspondence:
    """Reports that still matter, and the state of the session. `closed`: nothing is owed or waited for any more."""

    def __init__(self, part: Participation, outbox: Outbox, options: ProcessorOptions) -> None:
        self._part = part
        self._outbox = outbox
        self._options = options
        self.loop: LoopBegin | None = None
        self.loop_open = False
        self.raised: Raised | None = None
        self.signalled: Signalled | None = None
        self.left: Left | None = None
        self.wanted: SaveWanted | None = None  # until the state for one is copied
        self.copied: SaveWanted | None = None  # then, until the next one is ordered: whoever follows may not know of it
        self.deaths: dict[int, PeerDied] = {}  # of neighbours, said in each session: another controller may serve
        self.closed = False
        self.session_up = False
        self.unprotected = False  # training goes on without a controller, and that has been said
        self._was_up = False
        self._down_since_s: float | None = None
        self._resend_at_s: float | None = None
        self.unanswered = False  # nobody has welcomed the Hello of this session
        self._hello_pause = Grace(RESEND_INTERVAL_S)

    # ------------------------------------------------------------------ what is owed

    def owed(self) -> tuple[Report, ...]:
        """What the controller may not know yet."""
        if self.closed:
            return ()
        said = self._part.writing.said
        owed = (
            None if self.loop_open else self.loop,
            self.signalled,
            self.raised,
            self.wanted,
            self.left,  # nothing is wanted once all have left
            self._part.settled,
            said if isinstance(said, Saved | SaveFailed) else None,
        )
        return tuple(report for report in owed if report is not None)

    def repeat(self) -> None:
        for report in self.owed():
            self._outbox.send(report)

    @property
    def waits(self) -> bool:
        """True if this rank can do nothing but wait for the controller."""
        return bool(self._part.incident or self.left or self.raised or (self.loop and not self.loop_open))

    @property
    def asks(self) -> bool:
        """True if this rank has something to say that only a controller can act upon."""
        return not self.closed and bool(self.waits or self.signalled or self.deaths)

    def wait_text(self) -> str:
        """What a rank that has to leave without a controller was doing: after "this rank had ended step 5 and"."""
        if self._part.attempt:
            return f"was taking part in saving a checkpoint in incident {self._part.incident}"
        if self._part.incident:
            return f"was stopped in incident {self._part.incident}"
        if self.raised is not None:
            return f"had reported an exception ({self.raised.summary})"
        return "was waiting for the other ranks to begin the training loop"

    # ------------------------------------------------------------------ session and time

    def on_session_up(self) -> bool:
        """A session is open. True if this rank had said that it was unprotected."""
        was_unprotected, self.unprotected = self.unprotected, False
        self.session_up = self._was_up = True
        self._down_since_s = None
        self.unanswered, self._hello_pause = True, Grace(RESEND_INTERVAL_S)
        if self.copied is not None and not self.closed:
            self._outbox.send(self.copied)
        self.repeat()
        for death in self.deaths.values():
            self._outbox.send(death)
        return was_unprotected

    def on_session_down(self, now_s: float) -> None:
        """The session is broken; the first of several such words counts."""
        if self.session_up:
            self.session_up = False
            self._down_since_s = now_s

    def watch(self, now_s: float) -> None:
        """A rank that never had a session is without one since its first event."""
        if self._down_since_s is None and not self.session_up:
            self._down_since_s = now_s

    def controller_lost(self, now_s: float) -> bool:
        """True if it is time to do something about a controller that is not there."""
        at_s = self._lost_at_s()
        return at_s is not None and now_s >= at_s

    def run_timer(self, now_s: float) -> None:
        """Repeat what is owed if it has been owed long enough."""
        if not self.session_up or not self.owed():
            self._resend_at_s = None
        elif self._resend_at_s is None:
            self._resend_at_s = now_s + RESEND_INTERVAL_S
        elif now_s >= self._resend_at_s:
            self._resend_at_s = now_s + RESEND_INTERVAL_S
            self.repeat()
        if self._hello_pause.over(self._greets, now_s):
            self._hello_pause = Grace(min(2 * self._hello_pause.seconds, HELLO_PAUSE_MAX_S))
            self._outbox.emit(SayHello())

    @property
    def _greets(self) -> bool:
        return self.unanswered and self.session_up and not self.closed

    def deadline_s(self, now_s: float) -> float | None:
        """When `run_timer` or `controller_lost` has to be asked again, at the latest."""
        if not self.session_up:
            return self._lost_at_s()
        if self._resend_at_s is None and self.owed():
            return now_s  # a call of the training thread has made it so: start the timer
        wanted = (self._resend_at_s, self._hello_pause.deadline_s(self._greets, now_s))
        return min((at_s for at_s in wanted if at_s is not None), default=None)

    def _lost_at_s(self) -> float | None:
        if self.session_up or self._down_since_s is None or self.closed:
            return None
        if not self.waits and self.unprotected:
            return None
        soon = self._was_up and not self.waits
        return self._down_since_s + (self._options.unprotected_s if soon else self._options.controller_lost_s)


class OwnPart:
    """One rank's part of a checkpoint, as far as it has come: what a writer has in hand, and what was said last."""

    def __init__(self, rank: int, generation: int, outbox: Outbox) -> None:
        self._rank = rank
        self._generation = generation
        self._outbox = outbox
        self.order: Save | None = None
        """In the hands of a writer."""
        self.said: SaveProgress | Saved | SaveFailed | None = None

    def begin(self, order: Save) -> None:
        """A writer is to take this order."""
        self.order = order
        self._outbox.emit(StartSave(order))

    def hear(self, event: SaveProgressed | SaveFinished | SaveErrored) -> None:
        """What the writer says, if it is still the one that has this order in hand."""
        order = self.order
        if order is None or (order.incident, order.attempt) != (event.incident, event.attempt):
            return
        match event:
            case SaveProgressed():
                self.go_on(order, event.bytes_written, syncing=event.syncing)
            case SaveFinished():
                self.order = None
                identity = (self._rank, self._generation, order.incident, order.attempt)
                self._say(Saved(*identity, order.step, event.bytes_written))
            case SaveErrored():
                self.order = None
                self.refuse(order, event.reason, storage=event.storage)

    def cancel(self) -> None:
        """Stop the writer, if there is one."""
        if self.order is not None:
            self._outbox.emit(CancelSave(self.order.incident, self.order.attempt))
            self.order = None

    def go_on(self, order: Save, bytes_written: int = 0, *, syncing: bool = False) -> None:
        """Say that this order is being followed."""
        progress = SaveProgress(self._rank, self._generation, order.incident, order.attempt, bytes_written, syncing)
        self._say(progress)

    def refuse(self, order: Save, reason: str, *, storage: bool = False, missed: bool = False) -> None:
        """Say that nothing comes of this order."""
        identity = (self._rank, self._generation, order.incident, order.attempt)
        self._say(SaveFailed(*identity, order.step, reason, storage, missed))

    def repeat(self) -> None:
        """What was said last once more: it may have been lost."""
        if self.said is not None:
            self._outbox.send(self.said)

    def _say(self, answer: SaveProgress | Saved | SaveFailed) -> None:
        self.said = answer
        self._outbox.send(answer)


# One rank's part in periodic checkpoints: told the step, it copies its state there and writes behind the training.
#
# Owned by `processor.core`. An order waits until its step has ended. Between two steps the training thread then copies
# the state, and a writer of its own takes the copy. The newest order counts, and an incident ends all of it.


class Snapshots:
    """At most one checkpoint: ordered, copied, being written, or answered."""

    def __init__(self, rank: int, generation: int, outbox: Outbox) -> None:
        self._rank = rank
        self.attempt = 0
        self.waiting: Save | None = None
        """Ordered, and its step has not been copied."""
        self.writing = OwnPart(rank, generation, outbox)

    def due(self, ended_step: int) -> Save | None:
        """What is to be copied now, `ended_step` being over and the next update still to come."""
        order = self.waiting
        return order if order is not None and order.step == ended_step else None

    def on_save(self, order: Save, ended_step: int, *, may_copy: bool) -> None:
        """A checkpoint of a step is wanted. may_copy: the state is still that of `ended_step`."""
        if order.attempt < self.attempt:
            return
        if order.attempt == self.attempt:
            self.writing.repeat()  # asked again: the answer was lost
            return
        self.cancel()
        self.attempt = order.attempt
        if order.step > ended_step or (order.step == ended_step and may_copy):
            self.waiting = order
            self.writing.go_on(order)
        else:
            self.writing.refuse(order, f"rank {self._rank} has ended step {ended_step} already", missed=True)

    def copied(self, order: Save) -> None:
        """The state is copied: write it, if it is still wanted."""
        if self.waiting == order:
            self.waiting = None
            self.writing.begin(order)

    def not_copied(self, order: Save, reason: str) -> None:
        """The state could not be copied."""
        if self.waiting == order:
            self.waiting = None
            self.writing.refuse(order, reason)

    def on_left(self, ended_step: int) -> None:
        """The loop is over after this step, which can still be copied: no other one comes."""
        order = self.waiting
        if order is not None and order.step > ended_step:
            self.waiting = None
            self.writing.refuse(order, f"rank {self._rank} has left the training loop", missed=True)

    def on_step_ended(self, ended_step: int) -> None:
        """A step is over; one whose state was not copied in time is not copied any more."""
        order = self.waiting
        if order is not None and order.step < ended_step:
            self.waiting = None
            self.writing.refuse(order, f"rank {self._rank} has trained on past step {order.step}", missed=True)

    def cancel(self) -> None:
        """Nothing that has been ordered is wanted any more."""
        self.waiting = None
        self.writing.cancel()
        self.writing.said = None


def may_write(stand: Stand, step: int) -> bool:
    """Whether a rank writes `step` when it is told to: it trusts no controller in this."""
    return stand.holds(step)


class Outbox:
    """Effects on their way to the shell."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def send(self, report: Report) -> None:
        self.effects.append(SendReport(report))


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
        self.writing = OwnPart(rank, generation, outbox)
        self._sequence = 0
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
        self.writing.cancel()
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

    def on_save(self, order: Save, stand: Stand) -> None:
        """Write, if this rank can; of two orders the one of the newer attempt counts."""
        if order.incident != self.incident or order.attempt < self.attempt:
            return
        if order.attempt == self.attempt:
            self.writing.repeat()  # asked again: the answer was lost
            return
        self.writing.cancel()
        self.attempt = order.attempt
        self.proceed_step = 0
        if self.settled is None:
            self.writing.refuse(order, f"rank {self._rank} has not stopped yet; it is at {stand}")
        elif {*order.units}.difference(order.copied) and not may_write(stand, order.step):
            self.writing.refuse(order, f"rank {self._rank} does not hold step {order.step}; it is at {stand}")
        else:
            self._read_units = self._read_units or bool(order.units)
            self.writing.begin(order)
            self.writing.go_on(order)

    def forsake(self, why: str) -> None:
        """Whatever is being written from here, or has been, must not be used."""
        order = self.writing.order
        if order is not None:
            self.writing.cancel()
            self.writing.refuse(order, f"rank {self._rank}: {why}")

    # ------------------------------------------------------------------ inside

    def _forget(self) -> None:
        self._sequence = 0
        self.settled = None
        self.proceed_step = 0
        self.attempt = 0
        self.writing.said = None
        self._read_units = False
