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
from typing import Final

from lastwords.schedule import NO_SCHEDULE as NO_SCHEDULE
from lastwords.schedule import Schedule as Schedule
from lastwords.share import SHARES_MAX as SHARES_MAX
from lastwords.share import Share as Share
from lastwords.share import whole_units as whole_units
from lastwords.stand import Phase as Phase
from lastwords.stand import Stand as Stand

RAISED_TEXT_CHARS_MAX = 200
"""An exception's text in a reason is cut here. The whole traceback is in the rank's own log."""

PERIODIC: Final = 0
"""In place of an incident's number, which is 1 or more: a periodic checkpoint belongs to no incident."""

RANKS_MAX: Final = 1 << 20
"""Ranks that a job can have, and the end of what a message or a file is believed: some work is done for each."""

UNIT_REPLICATED = "replicated"
"""Name of the one unit of a pure data-parallel job."""


class DeathSource(enum.IntEnum):
    """Who says that a process is dead or gone."""

    ROBUST_MUTEX = 1
    PIDFD = 2
    STREAM = 3  # the session broke: a suspicion, which a time-out turns into a death


class ExitKind(enum.IntEnum):
    """How an incident ended, as the survivors are told."""

    SAVED = 1  # a checkpoint was published
    NOTHING_TO_SAVE = 2  # no rank has ended a step since the start, or since the checkpoint that was resumed from
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
    """First report of a session, repeated with the same `process` after a reconnect.

    shared: those of the units that are large enough to be written in shares, by several of their holders.
    """

    rank: int
    generation: int
    world_size: int
    process: ProcessId
    units: tuple[str, ...]
    stand: Stand
    shared: tuple[str, ...] = ()


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
    schedule: Schedule = NO_SCHEDULE


@dataclass(frozen=True, slots=True)
class Status:
    """The newest stand of a rank, coalesced: at most ten a second.

    waits_at: file and line of the collective or backward pass that its training thread has long been in, or "".
    stands_at: the same of anything else that it has long been in.
    work_s: what a step takes it until it meets the others, the median of the newest steps; 0.0: not known.
    """

    rank: int
    generation: int
    stand: Stand
    waits_at: str = ""
    stands_at: str = ""
    work_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stack:
    """Answer to a `Notice` that asks for it: the Python frames of this rank's training thread, the outermost first."""

    rank: int
    generation: int
    text: str


@dataclass(frozen=True, slots=True)
class WholeCopy:
    """All units of a rank as they were at the end of a step, in shared memory of its host, whoever lives there."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Answer to `Freeze`: this rank's weights do not change any more, and it stands exactly here.

    Sent again whenever the stand of a frozen rank moves (COMPUTING -> READY, after PROCEED, ...); the newest
    `sequence` (per rank and incident, from 1) counts. copies: those of all ranks of its host, of the dead, too.
    doubts: why the copies of what belongs to this rank alone are not exact, as it sees itself.
    """

    rank: int
    generation: int
    incident: int
    sequence: int
    stand: Stand
    copies: tuple[WholeCopy, ...] = ()
    doubts: str = ""


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
    missed: it has trained on past the step of a periodic checkpoint.
    """

    rank: int
    generation: int
    incident: int
    attempt: int
    step: int
    reason: str
    storage: bool
    missed: bool = False


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
    """A processor saw another process of its host die (robust mutex or pidfd).

    how: it has ended, for people; said once more with it, as soon as that is known.
    """

    rank: int  # the observer
    generation: int
    dead_rank: int
    source: DeathSource
    how: str = ""


@dataclass(frozen=True, slots=True)
class SaveWanted:
    """A checkpoint of a step after `after_step`, the next one if possible, is wanted, beside those that are due."""

    rank: int
    generation: int
    after_step: int


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The process leaves on purpose and after permission (`Release` or `Exit`); its end is not a death."""

    rank: int
    generation: int


Report = (
    Hello
    | LoopBegin
    | Status
    | Stack
    | Settled
    | SaveProgress
    | Saved
    | SaveFailed
    | Raised
    | Signalled
    | Left
    | PeerDied
    | SaveWanted
    | Goodbye
)


# --------------------------------------------------------------------------- orders (controller -> processor)


@dataclass(frozen=True, slots=True)
class Welcome:
    """All ranks of the job are registered (sent once they are, and again after a reconnect)."""

    generation: int


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
    """Enter no update from now on; settle and answer with `Settled`."""

    generation: int
    incident: int
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

    units: names of units, or of shares of them (`Share`). copied: those of them that are to be read from a `WholeCopy`
    of a rank of this host, which may be dead; the others are read from this rank's memory.
    target: 0 is the configured directory, 1 the fallback directory.
    After the first `Save` of an incident a rank never trains on. incident PERIODIC: this is a periodic
    checkpoint; the rank copies the state at the end of that step, trains on, and writes behind the training.
    """

    generation: int
    incident: int
    attempt: int
    step: int
    units: tuple[str, ...]
    local_ranks: tuple[int, ...]
    target: int
    reason: str
    copied: tuple[str, ...] = ()


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


@dataclass(frozen=True, slots=True)
class Notice:
    """A line for the people who look at the job's output: for whom it waits, say. The receiver prints it.

    stack: with the Python stack of its training thread, which it answers with (`Stack`), too.
    """

    generation: int
    text: str
    stack: bool = False


Order = Welcome | Refused | LoopGo | Freeze | Proceed | Save | Resume | Exit | Release | Notice
