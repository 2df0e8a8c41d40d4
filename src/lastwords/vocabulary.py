"""The words that controller, processor and wire share: phases, reports, orders.

Everything here is a frozen value. A *report* goes from a rank's processor to the controller, an
*order* the other way. Every order carries the generation and the incident it belongs to, and every
report that answers an order repeats them, so that a late or duplicated message is recognised and dropped.

Steps are global optimizer steps, 1-based; step 0 is "before the first update". Seconds are durations
(never points in time: hosts do not share a clock).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

RAISED_TEXT_CHARS_MAX = 200
"""An exception's text in a reason is cut here. The whole traceback is in the rank's own log."""

UNIT_REPLICATED = "replicated"
"""Name of the one unit of a pure data-parallel job."""


class Phase(enum.IntEnum):
    """Where a rank stands inside a global step. `Stand` adds which step."""

    COMPUTING = 1
    READY = 2
    UPDATING = 3
    UPDATED = 4
    SKIPPED = 5
    TORN = 6
    DONE = 7


@dataclass(frozen=True, slots=True, order=True)
class Stand:
    """A phase together with its step.

    `COMPUTING` and `DONE` carry the step that was *ended* last (N); all other phases carry the step that
    is *under way* (N+1).
    """

    phase: Phase
    step: int

    def __str__(self) -> str:
        return f"{self.phase.name}({self.step})"

    @property
    def ended_step(self) -> int:
        """Newest step that this rank has ended.

        >>> Stand(Phase.COMPUTING, 7).ended_step, Stand(Phase.UPDATED, 8).ended_step
        (7, 7)
        """
        return self.step if self.phase in (Phase.COMPUTING, Phase.DONE) else self.step - 1

    @property
    def begun_step(self) -> int:
        """Newest step that this rank has ended or begun to update; a torn update does not count.

        >>> Stand(Phase.READY, 8).begun_step, Stand(Phase.UPDATING, 8).begun_step, Stand(Phase.TORN, 8).begun_step
        (7, 8, 7)
        """
        if self.phase in (Phase.UPDATING, Phase.UPDATED, Phase.COMPUTING, Phase.DONE):
            return self.step
        return self.step - 1

    @property
    def reach(self) -> frozenset[int]:
        """Steps at which this rank, if it is healthy and settled, can hold its units whole.

        >>> sorted(Stand(Phase.READY, 8).reach), sorted(Stand(Phase.TORN, 8).reach)
        ([7, 8], [])
        """
        if self.phase in (Phase.READY, Phase.SKIPPED):
            return frozenset((self.step - 1, self.step))
        if self.phase in (Phase.COMPUTING, Phase.UPDATED, Phase.DONE):
            return frozenset((self.step,))
        return frozenset()

    def holds(self, step: int) -> bool:
        """The safety predicate: a settled rank here holds its units whole at global step `step` as they are.

        "Never a torn checkpoint" rests on it, on both sides of the wire: the controller chooses writers by it, and a
        rank refuses what it does not allow. Every step within `reach` but one: READY(N+1) still has to apply its
        gradients, on `Proceed`, before it holds N+1.

        >>> Stand(Phase.READY, 8).holds(7), Stand(Phase.READY, 8).holds(8), Stand(Phase.UPDATED, 8).holds(8)
        (True, False, True)
        """
        return step in self.reach and not (self.phase is Phase.READY and self.step == step)


class DeathSource(enum.IntEnum):
    """Who says that a process is dead or gone."""

    ROBUST_MUTEX = 1
    PIDFD = 2
    STREAM = 3  # the session broke: a suspicion, not yet a death
    KEEPALIVE = 4  # nothing was heard for too long: a suspicion that its time-out turns into a death
    LAUNCHER = 5


class ExitKind(enum.IntEnum):
    """How an incident ended, as the survivors are told."""

    SAVED = 1  # a checkpoint was published
    NOTHING_TO_SAVE = 2  # no step had been ended anywhere
    NOT_SAVED = 3  # no healthy holder, or storage refused: `reason` says which


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, distinguishable from every other that ever ran.

    host_id: opaque, equal for processes that share /dev/shm and a pid namespace.
    start_ticks: field 22 of /proc/PID/stat (clock ticks since boot); nonce: random, drawn at start-up.
    """

    host_id: str
    pid: int
    start_ticks: int
    nonce: str


# --------------------------------------------------------------------------- reports (processor -> controller)


@dataclass(frozen=True, slots=True)
class Hello:
    """First report of a session, repeated with the same `process` after a reconnect."""

    rank: int
    generation: int
    world_size: int
    process: ProcessId
    units: tuple[str, ...]
    stand: Stand


@dataclass(frozen=True, slots=True)
class LoopBegin:
    """The training loop is about to start. All ranks must agree on everything but `rank`.

    steps_per_epoch and epochs are 0 where the loop is the user's own and they are not known.
    """

    rank: int
    generation: int
    steps_per_epoch: int
    epochs: int
    start_step: int


@dataclass(frozen=True, slots=True)
class Status:
    """The newest stand of a rank, coalesced: at most ten a second."""

    rank: int
    generation: int
    stand: Stand


@dataclass(frozen=True, slots=True)
class Settled:
    """Answer to `Freeze`: this rank's weights do not change any more, and it stands exactly here.

    Sent again whenever the stand of a frozen rank moves (COMPUTING -> READY, after PROCEED, ...); the newest
    `sequence` (per rank and incident, from 1) counts.
    """

    rank: int
    generation: int
    incident: int
    sequence: int
    stand: Stand


@dataclass(frozen=True, slots=True)
class SaveProgress:
    """A writer is alive and moving: `bytes_written` so far in this attempt.

    syncing: it is inside fsync, or another call that can take long and shows no progress while it runs.
    """

    rank: int
    generation: int
    incident: int
    attempt: int
    bytes_written: int
    syncing: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """This rank's part of the checkpoint is on disk and fsynced.

    The part's description (files, tensors, checksums) lies beside it as `part.json`, see docs/format.md.
    """

    rank: int
    generation: int
    incident: int
    attempt: int
    step: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """This rank could not write its part.

    storage: the file system refused, or memory or descriptors could not be had; it may work later, or on another rank.
    """

    rank: int
    generation: int
    incident: int
    attempt: int
    step: int
    reason: str
    storage: bool


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception has left the training loop (or `step()`) on this rank.

    secondary: it came out of a collective, as happens on healthy ranks when a peer dies.
    """

    rank: int
    generation: int
    text: str
    secondary: bool
    stand: Stand

    @property
    def summary(self) -> str:
        """First line of the exception's text, cut, without pictograms (torch's messages have some).

        >>> Raised(0, 1, "DistNetworkError: \U0001f6ab timed out\\nmore", True, Stand(Phase.COMPUTING, 5)).summary
        'DistNetworkError: timed out'
        """
        first = self.text.strip().split("\n", 1)[0]
        plain = "".join(one if one.isascii() or one.isalnum() else " " for one in first)
        return " ".join(plain.split())[:RAISED_TEXT_CHARS_MAX]


@dataclass(frozen=True, slots=True)
class Signalled:
    """This rank was asked to stop (SIGTERM, SIGINT). The process is alive and healthy."""

    rank: int
    generation: int
    signal_number: int
    stand: Stand


@dataclass(frozen=True, slots=True)
class Left:
    """The loop is over on this rank (all steps done, or `break`); it waits for `Release`."""

    rank: int
    generation: int
    stand: Stand


@dataclass(frozen=True, slots=True)
class PeerDied:
    """A processor saw another process of its host die (robust mutex or pidfd)."""

    rank: int  # the observer
    generation: int
    dead_rank: int
    source: DeathSource


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The process leaves on purpose and after permission (`Release` or `Exit`); its end is not a death."""

    rank: int
    generation: int


Report = (
    Hello
    | LoopBegin
    | Status
    | Settled
    | SaveProgress
    | Saved
    | SaveFailed
    | Raised
    | Signalled
    | Left
    | PeerDied
    | Goodbye
)


# --------------------------------------------------------------------------- orders (controller -> processor)


@dataclass(frozen=True, slots=True)
class Welcome:
    """All ranks of the job are registered (sent once they are, and again after a reconnect)."""

    generation: int
    incident: int  # newest incident so far, 0 if none
    world_size: int


@dataclass(frozen=True, slots=True)
class Refused:
    """This process may not take part. `reason` is for its user: what is wrong and what to do."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class LoopGo:
    """All ranks have sent an equal `LoopBegin`; training may start."""

    generation: int


@dataclass(frozen=True, slots=True)
class Freeze:
    """Enter no update from now on; settle and answer with `Settled`.

    settle_timeout_s: a rank that has not settled after this long is treated as silent.
    """

    generation: int
    incident: int
    settle_timeout_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Proceed:
    """A rank in READY(step) applies its gradients after all, then parks."""

    generation: int
    incident: int
    step: int


@dataclass(frozen=True, slots=True)
class Save:
    """Write these units, and the rank-local state of these ranks (read from the black boxes of this host).

    target: 0 is the configured directory, 1 the fallback directory.
    After the first `Save` of an incident a rank never trains on.
    """

    generation: int
    incident: int
    attempt: int
    step: int
    units: tuple[str, ...]
    local_ranks: tuple[int, ...]
    target: int
    reason: str


@dataclass(frozen=True, slots=True)
class Resume:
    """False alarm: every suspect is back. Unfreeze and train on. Never after `Save`."""

    generation: int
    incident: int


@dataclass(frozen=True, slots=True)
class Exit:
    """The incident is over; leave. `path` is the published directory ("" if none).

    cause_ranks: the ranks that started the incident (dead, raised or signalled): the first of them, and the receiver if
    it is one.
    """

    generation: int
    incident: int
    kind: ExitKind
    step: int
    path: str
    reason: str
    cause_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Every rank has left the loop at the same step; no last words are needed any more."""

    generation: int


Order = Welcome | Refused | LoopGo | Freeze | Proceed | Save | Resume | Exit | Release
