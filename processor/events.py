"""What goes into the processor's core and what comes out: plain frozen values, shared with its shell."""

from __future__ import annotations

from dataclasses import dataclass

from lastwords.core_events import Log, Tick
from lastwords.vocabulary import Exit, Order, Refused, Report, Save

INFO = 20
WARNING = 30
ERROR = 40
"""Levels of `Log`; the numbers are those of the `logging` module, which a core does not import."""

RESEND_INTERVAL_S = 1.0
"""A report that still waits for its order goes out again this often. gRPC loses nothing while a stream lives, so
in practice this repairs only what was lost with a stream; one small message a second per frozen rank is no load."""

HELLO_PAUSE_MAX_S = 4.0
"""A Hello goes out again after 1 s, then in pauses that double up to this: all ranks of a large job may wait for its
last one, and 16 384 of them then say 4 096 Hellos a second."""


@dataclass(frozen=True, slots=True)
class ProcessorOptions:
    """Deadlines of one rank.

    step_end_grace_s: how long a frozen rank in UPDATED may take to reach its step's end before it settles as it is
    (a logging collective there may never return). unprotected_s: how long a rank that trains goes without a session
    before it says so, and before a signal takes the way that it would take without us. controller_lost_s: how long one
    that can do nothing but wait for the controller goes without a session before it leaves on its own. unanswered_s,
    controller_silent_s: how long the controller may show no sign of life before a rank of its host starts another one;
    the first where this rank has something to say, the second where it merely trains. A rank of another host that has
    something to say asks after unanswered_s whether the controller answers, and has lost it if not. has_copy: this rank
    keeps a copy of its state at the end of each step; a frozen rank that is UPDATING for longer than update_grace_s, or
    whose update has torn, then stands by that copy.
    """

    step_end_grace_s: float = 0.5
    unprotected_s: float = 5.0
    controller_lost_s: float = 30.0
    unanswered_s: float = 5.0
    controller_silent_s: float = 10.0
    has_copy: bool = False
    update_grace_s: float = 1.0


# --------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class FromController:
    """An order has arrived."""

    order: Order


@dataclass(frozen=True, slots=True)
class SessionUp:
    """A session with the controller is open and its Hello has been sent."""


@dataclass(frozen=True, slots=True)
class SessionDown:
    """The session is broken; the shell connects again by itself."""


@dataclass(frozen=True, slots=True)
class SaveProgressed:
    """The writer has written `bytes_written` so far; `syncing`: it is inside fsync or the like."""

    incident: int
    attempt: int
    bytes_written: int
    syncing: bool = False


@dataclass(frozen=True, slots=True)
class SaveFinished:
    """The writer's part is complete and fsynced."""

    incident: int
    attempt: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class SaveErrored:
    """The writer gave up. `storage`: the file system refused."""

    incident: int
    attempt: int
    reason: str
    storage: bool


Event = FromController | SessionUp | SessionDown | SaveProgressed | SaveFinished | SaveErrored | Tick


# --------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class SendReport:
    """Send this to the controller. Without a session it may be dropped: the core repeats what it owes."""

    report: Report


@dataclass(frozen=True, slots=True)
class SayHello:
    """Send another Hello in the session that is open: the first one has not been answered."""


@dataclass(frozen=True, slots=True)
class StartSave:
    """Start to write what `order` names; answer with SaveProgressed and one of SaveFinished, SaveErrored."""

    order: Save


@dataclass(frozen=True, slots=True)
class CancelSave:
    """Stop that writer; its answers are ignored from now on."""

    incident: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Wake:
    """The training thread, if parked, should look again."""


@dataclass(frozen=True, slots=True)
class Leave:
    """This process has to end. `order` says how the incident ended, or why this rank was refused.

    It is None where the controller was lost; `reason` is always for people.
    """

    order: Exit | Refused | None
    reason: str


@dataclass(frozen=True, slots=True)
class PassOn:
    """Nobody is there who could save anything: this signal has to do what it would do without us."""

    signal_number: int


@dataclass(frozen=True, slots=True)
class Released:
    """The loop is over everywhere; this process may go on after its loop."""


@dataclass(frozen=True, slots=True)
class ShowStack:
    """Print `text` and the stack of the training thread below it, and report that stack."""

    text: str


Effect = SendReport | SayHello | StartSave | CancelSave | Wake | Leave | PassOn | Released | Log | ShowStack
