"""What really happened in a simulated job, written down by the simulated world and never by a core.

The checkers look at nothing else. Where two orders of the same events make no difference to any checker they
leave the same ledger behind, so that the exhaustive exploration can tell states apart by it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple


class Life(enum.IntEnum):
    """Where a simulated process is in its life."""

    ALIVE = 1
    KILLED = 2  # by the schedule
    LEFT = 3  # it ended by itself: told to, released, or given up waiting


class Written(NamedTuple):
    """One rank's part of a checkpoint as it is on the simulated disk."""

    writer: int
    generation: int
    incident: int
    attempt: int
    step: int  # as the order and the file's name say
    units: tuple[tuple[str, int, int], ...]  # unit, content of the weights when reading began, and when it ended
    local_steps: tuple[tuple[int, int], ...]  # rank, step of its rank-local state (-1 if its box had none)
    whole: bool  # completely written, and not one bit has changed since


class Publication(NamedTuple):
    """One directory that got its final name."""

    generation: int
    incident: int
    attempt: int
    step: int
    target: int
    files: tuple[Written, ...]
    lost_local_ranks: tuple[int, ...]  # whose rank-local state the manifest says is lost
    verified: bool  # a verification of exactly these files had succeeded before
    controller: int = 0  # so many had been followed before the one that ordered it


class Directory(NamedTuple):
    """What a final name leads to."""

    generation: int
    step: int
    units: tuple[str, ...]
    whole: bool


class Renaming(NamedTuple):
    """The directories under their final names just before and just after one system call (or one crash)."""

    before: tuple[tuple[str, Directory], ...]
    after: tuple[tuple[str, Directory], ...]


@dataclass(slots=True)
class RankRecord:
    """The truth about one rank."""

    held: int = 0  # step whose update made these weights, or TORN
    ended: int = 0  # newest step that was ended
    reach: tuple[int, ...] = (
        0,
    )  # steps that it holds or could still hold (it has final gradients and no update begun)
    life: Life = Life.ALIVE
    farewell: str = ""  # why it left
    ill: set[str] = field(default_factory=set)  # why it does not count as healthy: "torn", "silent", ...
    gave_up: bool = False  # it left its loop, by an exception or not, with final gradients that it never applied
    frozen_s_max: float = 0.0  # longest time from a Freeze that arrived to what ended it
    whole: tuple[tuple[int, int], ...] = ()  # of its whole copies: step, and step whose update made these weights

    def healthy(self) -> bool:
        """It took part to the end of the incident: neither killed, nor torn, nor out of reach for too long."""
        return self.life is not Life.KILLED and not self.ill


@dataclass(slots=True)
class Ledger:
    """The truth about one job in one generation."""

    ranks: list[RankRecord]
    publications: list[Publication] = field(default_factory=list)
    renamings: list[Renaming] = field(default_factory=list)
    heard_saved: set[tuple[int, int, int, str]] = field(default_factory=set)
    """(target, writer, step, unit) of finished files that the controller knows of."""
    refused: set[tuple[int, int]] = field(default_factory=set)
    """(rank, target): what this rank writes there fails, hangs, or cannot be read back."""
    closed_targets: set[int] = field(default_factory=set)
    """Directories in which nothing can be verified, or renamed."""
    refused_for_a_moment: set[int] = field(default_factory=set)
    """Ranks whose writes failed, and would have worked again."""
    left_on_disk: set[tuple[int, int, int, str]] = field(default_factory=set)
    """(target, writer, step, unit) of whole files that are there at the end without having been published."""
    storage_failures: int = 0
    """How often a file system has refused so far: the controller does not try for ever."""
    stale_effects: list[str] = field(default_factory=list)
    """Messages of an older incident or generation that made a difference."""
    periodic_files: set[tuple[int, int]] = field(default_factory=set)
    """(attempt, rank) of each part of a periodic checkpoint that was ever finished."""
    untrue: list[str] = field(default_factory=list)
    """What a rank said that is not so."""
    certain_faults: int = 0
    """Faults after which a job cannot simply train on (a death, an exception, a signal, an early leave)."""
    controller_killed: bool = False
    controller_stopped: bool = False
    untold: set[int] = field(default_factory=set)
    """Ranks that lived and had a session when the controller stopped, and never heard how the job ended."""
    ended: bool = False
    """Nothing can happen any more, or the simulation's horizon has been reached."""
    crossed_horizon: bool = False

    @property
    def last_words(self) -> list[Publication]:
        """What incidents have published."""
        return [publication for publication in self.publications if publication.incident]

    def can_write(self, rank: int, targets: tuple[int, ...]) -> bool:
        """Whether some directory that is still in play takes what this rank writes."""
        return any(target not in self.closed_targets and (rank, target) not in self.refused for target in targets)

    def survives(self, rank: int, targets: tuple[int, ...]) -> bool:
        """Whether this rank is one whose steps count: healthy, and not excluded for being unable to write."""
        return self.ranks[rank].healthy() and self.can_write(rank, targets)
