"""What goes into the controller's core and what comes out: plain frozen values, shared with its shell."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from lastwords.core_events import Log, Tick
from lastwords.vocabulary import NO_SCHEDULE, DeathSource, Order, ProcessId, Report, Schedule, Stand

INFO = 20
WARNING = 30
ERROR = 40
"""Levels of `Log`; the numbers are those of the `logging` module, which a core does not import."""

RESEND_INTERVAL_S = 0.5
"""An order that has not been answered goes out again after this pause, which then doubles up to RESEND_INTERVAL_MAX_S
(Freeze, Proceed, Save, Exit, Release, Refused). gRPC loses nothing while a stream lives, so in practice this repairs
only what was lost with a stream."""

RESEND_INTERVAL_MAX_S = 4.0

STORAGE_FAILURES_MAX = 8
"""So often, and once more for every fourth host, may writers be refused by one directory; then it counts as broken for
all, until all get another chance. One bad quota or mount must not cost the run; and where thousands of ranks share one
full file system it takes no thousand attempts to see that."""

LESSER_RETRY_S = 2.0
"""So long are refused writers tried again where something can be saved without them: an older step, or the same one
without the rank-local state of a host. A short disturbance must not cost that; a longer wait puts all of it at risk."""


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Deadlines of the controller; each bounds one wait. The defaults of a job are these: nobody else has any.

    keepalive_time_s: silence on a connection until a ping; keepalive_timeout_s: from the ping to a lost session.
    settle_timeout_s: from Freeze (or Proceed) to Settled; half of the 30 s that torchrun leaves, so that there is time
    to write. From a lost session to a death: silence_timeout_s, where nothing else has happened (a host that was moved
    or stopped for 6 s, or a switch that was, has its ranks back within 10.1 s: a rank's own keepalive takes 10);
    lost_confirm_s, once the job ends anyway; stall_timeout_s, for a rank whose process the host watch sees to live,
    such as a stopped one.
    progress_timeout_s: between two signs of progress of a writer; sync_timeout_s: of that, while it says that it is
    inside fsync or another call that shows no progress. storage_timeout_s: between two of the controller's
    own work on the finished files, to verify and to publish them. storage_retry_s: how long what a file system has
    refused (writing, reading back, publishing) is tried again. leave_timeout_s: how long a rank that left the loop
    early waits while no other rank moves; finish_timeout_s: the same for a rank that has done all its steps.
    exit_timeout_s: from Exit (Release, Refused) to the last closed session. start_timeout_s: for all ranks to
    register, and for all to begin the loop. hang_notice_s: without a step that ends until people are told which rank is
    behind, and never less than some of the job's steps take; hang_timeout_s: until that is an incident, 0: never.
    straggler_notice_s: of being slower than its peers until a rank is named.
    newest_timeout_s: where nothing can be saved, until it is known what there is to go on from instead.
    preemption_grace_s: from the first signal to stop until the processes are taken away, 0: nobody says when. Other
    deadlines are cut to it, see `context.in_a_hurry`.
    has_fallback_target: there is a second directory (target 1).
    """

    keepalive_time_s: float = 0.8
    keepalive_timeout_s: float = 1.0
    settle_timeout_s: float = 15.0
    silence_timeout_s: float = 10.0
    lost_confirm_s: float = 2.0
    stall_timeout_s: float = 300.0
    progress_timeout_s: float = 30.0
    sync_timeout_s: float = 300.0
    storage_timeout_s: float = 120.0
    storage_retry_s: float = 20.0
    leave_timeout_s: float = 30.0
    finish_timeout_s: float = 600.0
    exit_timeout_s: float = 10.0
    start_timeout_s: float = 300.0
    newest_timeout_s: float = 5.0
    hang_notice_s: float = 10.0
    hang_timeout_s: float = 0.0
    straggler_notice_s: float = 30.0
    preemption_grace_s: float = 0.0
    has_fallback_target: bool = False


class JobStage(enum.Enum):
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


NEXT_STATES: Mapping[JobStage, frozenset[JobStage]] = {
    JobStage.REGISTERING: frozenset((JobStage.WATCHING, JobStage.SETTLING, JobStage.REFUSING)),
    JobStage.WATCHING: frozenset((JobStage.SETTLING, JobStage.RELEASING, JobStage.REFUSING)),
    JobStage.SETTLING: frozenset(
        (JobStage.REGISTERING, JobStage.WATCHING, JobStage.PROCEEDING, JobStage.SAVING, JobStage.EXITING)
    ),
    JobStage.PROCEEDING: frozenset((JobStage.SETTLING, JobStage.SAVING, JobStage.EXITING)),
    JobStage.SAVING: frozenset((JobStage.SETTLING, JobStage.VERIFYING, JobStage.EXITING)),
    JobStage.VERIFYING: frozenset((JobStage.SETTLING, JobStage.PUBLISHING, JobStage.EXITING)),
    JobStage.PUBLISHING: frozenset((JobStage.SETTLING, JobStage.EXITING)),
    JobStage.EXITING: frozenset((JobStage.STOPPED,)),
    JobStage.RELEASING: frozenset((JobStage.STOPPED,)),
    JobStage.REFUSING: frozenset((JobStage.STOPPED,)),
    JobStage.STOPPED: frozenset(),
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
class EndKnown:
    """How the process of a rank that has died has ended, for people; comes after the death."""

    rank: int
    how: str


@dataclass(frozen=True, slots=True)
class StorageProgress:
    """The verification, or the publication, of this attempt has come further."""

    incident: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Watched:
    """The host watch will tell when the process of this rank ends, so its silence alone is no death.

    ended: it has ended, and not by dying. Whether it was allowed to go is for others to say; it only is silent now.
    """

    rank: int
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Verified:
    """Every part of this attempt is there, whole, and of the right step."""

    incident: int
    attempt: int


@dataclass(frozen=True, slots=True)
class VerifyFailed:
    """The content of parts is wrong, by the rank that wrote it. The other parts may be good."""

    incident: int
    attempt: int
    problems: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class VerifyBlocked:
    """The parts could not be looked at (a failing mount, no descriptor, no memory). That says nothing about them."""

    incident: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Published:
    """The directory has its final name."""

    incident: int
    attempt: int
    path: str


@dataclass(frozen=True, slots=True)
class PublishFailed:
    """The directory could not get its final name, which may work later: the same order goes on where it stopped."""

    incident: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class NewestKnown:
    """What there is to go on from where nothing can be saved: the answer to one LookForNewest.

    step: of the newest complete checkpoint. path: "" if there is none. own: it is this job's; steps of another one say
    nothing of how far this one has come.
    """

    incident: int
    step: int
    path: str
    own: bool = True


StorageEvent = StorageProgress | Verified | VerifyFailed | VerifyBlocked | Published | PublishFailed
"""About one attempt's files."""

Event = FromRank | SessionClosed | Died | EndKnown | Watched | StorageEvent | NewestKnown | Tick


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
    it stays there even if verification fails). Answer: Verified, VerifyFailed or VerifyBlocked.
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
    says that their resume is not exact. doubts: of which other ranks it says so, and why.
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
    doubts: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove the temporary directory of this attempt, if it is there. No answer."""

    incident: int
    attempt: int
    step: int
    target: int


@dataclass(frozen=True, slots=True)
class KeepParts:
    """Nothing was published, and finished parts lie in the directory of this attempt: keep it for a human.

    It gets a name that no later start of the job removes, and the log says which. No answer.
    """

    incident: int
    attempt: int
    step: int
    target: int


@dataclass(frozen=True, slots=True)
class LookForNewest:
    """Find the newest complete checkpoint. Answer: NewestKnown, or none where that cannot be determined."""

    incident: int


@dataclass(frozen=True, slots=True)
class Prune:
    """Remove periodic checkpoints of this job beyond those that are kept, as `Schedule` has it. No answer."""

    keep_max: int
    keep_minutes: int


@dataclass(frozen=True, slots=True)
class LoopShape:
    """What all ranks must agree on before the loop starts. 0 where a number is not known."""

    steps_per_epoch: int
    epochs: int
    start_step: int
    schedule: Schedule = NO_SCHEDULE

    @property
    def last_step(self) -> int:
        """Global step after which the loop is done, 0 if that is not known."""
        return self.steps_per_epoch * self.epochs

    def __str__(self) -> str:
        start = f"starting after step {self.start_step}"
        start += f" with {self.schedule}" if self.schedule != NO_SCHEDULE else ""
        if not self.last_step:
            return start
        return f"{self.epochs} epochs of {self.steps_per_epoch} steps, {start}"


# What a controller has to know of the one before it, where that was killed: plain values, and how they are used.
#
# The ranks repeat most of what they have said to whoever serves them, so little is kept: who takes part, since a dead
# rank says nothing any more; what all have agreed upon; numbers that must not be used twice; and what has been decided
# and can be told already. `Remember` says it before anything is done that rests on it.


@dataclass(frozen=True, slots=True)
class Registered:
    """One rank of the job."""

    process: ProcessId
    units: tuple[str, ...]
    shared: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GoneRank:
    """A rank whose process has ended; `left`: where it had left the loop, if it had."""

    rank: int
    source: DeathSource
    left: Stand | None


@dataclass(frozen=True, slots=True)
class JobMemory:
    """Beside the members; the defaults are those of a job that has just begun.

    certain: the incident that is open cannot be a false alarm. attempts: temporary directories that are in use.
    publishing: the newest order to publish in an incident that is open. periodic: the newest of its kind.
    wanted: one was asked for and is not written yet. pace_s: about what a step takes. outcome: how the job ends, once
    that is decided.
    """

    gone: tuple[GoneRank, ...] = ()
    base_step: int = 0
    loop: LoopShape | None = None
    incident: int = 0
    resumed: int = 0
    certain: bool = False
    attempts: tuple[Discard, ...] = ()
    publishing: StartPublish | None = None
    periodic: Discard | None = None
    wanted: bool = False
    pace_s: float = 0.0
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Remember:
    """Keep this for the controller that follows if this one is killed, before anything else is done. No answer.

    members: by rank; nobody until all are registered.
    """

    members: tuple[Registered, ...]
    memory: JobMemory


@dataclass(frozen=True, slots=True)
class EndController:
    """The controller's work is done; end the process."""

    reason: str


Effect = (
    Send
    | Reply
    | StartVerify
    | StartPublish
    | Discard
    | KeepParts
    | LookForNewest
    | Prune
    | Remember
    | Log
    | EndController
)
