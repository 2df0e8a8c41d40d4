"""What one rank has told the controller and waits on, the session they share, and how long it waits.

Owned by `processor.core`. A report is owed until the order that answers it arrives: it goes out again with every new
session, and now and then in between, so that nothing that was lost with a stream stays lost.
"""

from __future__ import annotations

from lastwords.processor.events import HELLO_PAUSE_MAX_S, RESEND_INTERVAL_S, ProcessorOptions, SayHello
from lastwords.processor.grace import Grace
from lastwords.processor.participation import Outbox, Participation
from lastwords.vocabulary import Left, LoopBegin, PeerDied, Raised, Report, SaveWanted, Signalled


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
        self._unanswered = False  # nobody has welcomed the Hello of this session
        self._hello_pause = Grace(RESEND_INTERVAL_S)

    # ------------------------------------------------------------------ what is owed

    def owed(self) -> tuple[Report, ...]:
        """What the controller may not know yet."""
        if self.closed:
            return ()
        owed = (
            None if self.loop_open else self.loop,
            self.signalled,
            self.raised,
            self.wanted,
            self.left,  # nothing is wanted once all have left
            self._part.settled,
            self._part.save_result,
        )
        return tuple(report for report in owed if report is not None)

    def repeat(self) -> None:
        """Send everything that is owed."""
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

    @property
    def only_left(self) -> bool:
        """True if all that this rank waits for is that the others leave the loop, too."""
        return self.left is not None and not self._part.incident and self.raised is None

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
        self._unanswered, self._hello_pause = True, Grace(RESEND_INTERVAL_S)
        if self.copied is not None and not self.closed:
            self._outbox.send(self.copied)
        self.repeat()
        for death in self.deaths.values():
            self._outbox.send(death)
        return was_unprotected

    def on_copied(self) -> None:
        """The state for what was wanted is copied, or could not be."""
        self.wanted, self.copied = None, self.wanted

    def on_welcome(self) -> None:
        """The Hello of this session has arrived, and all ranks are registered."""
        self._unanswered = False

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
        return self._unanswered and self.session_up and not self.closed

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
