"""What goes into the controller's core and what comes out: plain frozen values, shared with its shell."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from lastwords.vocabulary import DeathSource, Order, Report

INFO = 20
WARNING = 30
ERROR = 40
"""Levels of `Log`; the numbers are those of the `logging` module, which a core does not import."""

RESEND_INTERVAL_S = 0.5
"""An order that has not been answered goes out again this often (Freeze, Proceed, Save, Exit, Release, Refused).
gRPC loses nothing while a stream lives, so in practice this repairs only what was lost with a stream."""

STORAGE_FAILURES_MAX = 8
"""So often, and once more for every fourth host, may writers be refused by one directory; then it counts as broken for
all. A full disk stays full, but one bad quota or mount must not cost the run; and where thousands of ranks share one
full file system it takes no thousand attempts to see that."""


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Deadlines of the controller; each bounds one wait.

    settle_timeout_s: from Freeze (or Proceed) to Settled. lost_confirm_s: from a lost session to a death.
    progress_timeout_s: between two signs of progress of a writer. verify_timeout_s, publish_timeout_s: for the
    controller's own work on the finished files. leave_timeout_s: how long a rank that left the loop early waits
    while no other rank moves; finish_timeout_s: the same for a rank that has done all its steps.
    exit_timeout_s: from Exit (Release, Refused) to the last closed session. start_timeout_s: for all ranks to
    register, and for all to begin the loop. has_fallback_target: there is a second directory (target 1).
    """

    settle_timeout_s: float = 30.0
    lost_confirm_s: float = 2.0
    progress_timeout_s: float = 30.0
    verify_timeout_s: float = 120.0
    publish_timeout_s: float = 120.0
    leave_timeout_s: float = 30.0
    finish_timeout_s: float = 600.0
    exit_timeout_s: float = 10.0
    start_timeout_s: float = 300.0
    has_fallback_target: bool = False


class State(enum.Enum):
    """Where the job stands, as the controller sees it; SETTLING to PUBLISHING are the stages of an incident."""

    REGISTERING = "registering"
    WATCHING = "watching"
    SETTLING = "settling"
    PROCEEDING = "proceeding"
    SAVING = "saving"
    VERIFYING = "verifying"
    PUBLISHING = "publishing"
    EXITING = "exiting"
    RELEASING = "releasing"
    REFUSING = "refusing"
    STOPPED = "stopped"


NEXT_STATES: Mapping[State, frozenset[State]] = {
    State.REGISTERING: frozenset((State.WATCHING, State.SETTLING, State.REFUSING)),
    State.WATCHING: frozenset((State.SETTLING, State.RELEASING, State.REFUSING)),
    State.SETTLING: frozenset((State.REGISTERING, State.WATCHING, State.PROCEEDING, State.SAVING, State.EXITING)),
    State.PROCEEDING: frozenset((State.SETTLING, State.SAVING, State.EXITING)),
    State.SAVING: frozenset((State.SETTLING, State.VERIFYING, State.EXITING)),
    State.VERIFYING: frozenset((State.SETTLING, State.PUBLISHING, State.EXITING)),
    State.PUBLISHING: frozenset((State.SETTLING, State.EXITING)),
    State.EXITING: frozenset((State.STOPPED,)),
    State.RELEASING: frozenset((State.STOPPED,)),
    State.REFUSING: frozenset((State.STOPPED,)),
    State.STOPPED: frozenset(),
}
"""Where each state can lead. Only SETTLING leads back to training, and only before anything has been chosen; SAVING
and VERIFYING lead to EXITING only if a publication that had been given up succeeds after all."""


class OutcomeKind(enum.Enum):
    """How the job ended."""

    SAVED = "saved"
    NOTHING_TO_SAVE = "nothing to save"
    NOT_SAVED = "not saved"
    RELEASED = "released"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of the job in one value. `step` and `path` are 0 and "" where nothing was published."""

    kind: OutcomeKind
    step: int
    path: str
    reason: str
    cause_ranks: tuple[int, ...]


# --------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class FromRank:
    """A report has arrived, on a session that belongs to that rank (or on a new one, if it is a Hello)."""

    report: Report


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The session bound to this rank is gone; never sent for a session that a newer Hello has replaced."""

    rank: int


@dataclass(frozen=True, slots=True)
class Died:
    """The host watch or the launcher says that the process of this rank has ended."""

    rank: int
    source: DeathSource


@dataclass(frozen=True, slots=True)
class Verified:
    """Every part of this attempt is there, whole, and of the right step."""

    incident: int
    attempt: int


@dataclass(frozen=True, slots=True)
class VerifyFailed:
    """What is wrong, by the rank that wrote it."""

    incident: int
    attempt: int
    problems: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Published:
    """The directory has its final name."""

    incident: int
    attempt: int
    path: str


@dataclass(frozen=True, slots=True)
class PublishFailed:
    """The directory could not get its final name."""

    incident: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class NewestKnown:
    """What there is to go on from where nothing can be saved; looked for beside the incident, never waited for.

    step: of the newest complete checkpoint. path: "" if there is none.
    """

    step: int
    path: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; wanted at the latest at `ControllerCore.deadline_s`, harmless at any time."""


Event = FromRank | SessionClosed | Died | Verified | VerifyFailed | Published | PublishFailed | NewestKnown | Tick


# --------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Send:
    """Send `order` on the session bound to `rank`; dropped if there is none."""

    rank: int
    order: Order


@dataclass(frozen=True, slots=True)
class Reply:
    """Send `order` on the session that the report just handled came in on, and do not bind that session."""

    order: Order


@dataclass(frozen=True, slots=True)
class PartPlan:
    """What rank `rank` wrote (or is to write), and in which attempt's directory it lies."""

    rank: int
    attempt: int
    units: tuple[str, ...]
    local_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartVerify:
    """Gather and verify the parts of a checkpoint.

    A part with `part.attempt != attempt` is first moved into this attempt's directory (one rename of `rank_k`;
    it stays there even if verification fails). Answer: Verified or VerifyFailed.
    """

    incident: int
    attempt: int
    step: int
    target: int
    parts: tuple[PartPlan, ...]

    @property
    def writers(self) -> tuple[int, ...]:
        """The ranks whose files make up the checkpoint, sorted."""
        return tuple(sorted(part.rank for part in self.parts))

    @property
    def units(self) -> tuple[str, ...]:
        """All units that must be there, sorted."""
        return tuple(sorted(unit for part in self.parts for unit in part.units))

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """All ranks whose rank-local state must be there, sorted."""
        return tuple(sorted(rank for part in self.parts for rank in part.local_ranks))


@dataclass(frozen=True, slots=True)
class StartPublish:
    """Give the verified directory its final name. Answer: Published or PublishFailed.

    lost_local_ranks: ranks whose rank-local state nobody could write (their whole host is lost); the manifest
    says that their resume is not exact.
    """

    incident: int
    attempt: int
    step: int
    target: int
    parts: tuple[PartPlan, ...]
    reason: str
    cause_ranks: tuple[int, ...]
    dead_ranks: tuple[int, ...]
    lost_local_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove the temporary directory of this attempt, if it is there. No answer."""

    incident: int
    attempt: int
    step: int
    target: int


@dataclass(frozen=True, slots=True)
class Log:
    """One line for an operator. `level` as in `logging`."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The controller's work is done; end the process."""

    reason: str


Effect = Send | Reply | StartVerify | StartPublish | Discard | Log | Stop
