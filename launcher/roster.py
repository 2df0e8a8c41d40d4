"""Where the process of each rank is, and when something has to have happened to it; part of core.py, and pure.

With thousands of ranks no event may look at all of them: how many are where is counted as they move.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

LEAVE_S = 120.0
"""From the first rank that has left until one that has not is killed: it may write files."""

END_S = 3600.0
"""The same where no rank has left yet, since a checkpoint is being written, which takes as long as the disk needs."""

TOLD_S = 5.0
"""From SIGTERM to a rank that nobody looks after until it is killed."""

KILLED_S = 120.0
"""From then on until its end has to be seen: the kernel may be waiting for a device."""

LEAVE_NOTICE_S = 5.0
"""From the first rank that has left until people are told for whom everybody waits, and it is looked at."""

KEEP_AGAIN_S = 1.0
"""From what could not be kept until it is tried again."""

NAMED_RANKS_MAX = 8
"""Of thousands of late ranks they are told the first ones."""


class Place(enum.Enum):
    """Where a rank's process is."""

    ABSENT = "absent"
    """There is none, and nobody who could start one: its launcher has not come, say."""
    READY = "ready"
    """There is none, and one can be started."""
    RUNNING = "running"
    DONE = "done"
    """It has come to its end."""


@dataclass(slots=True)
class Rank:
    """What is known of one rank's process. Times are in seconds, by the caller's clock."""

    place: Place = Place.ABSENT
    guarded: bool = False
    """A controller looks after it."""
    begun: bool = False
    """A loop of it has begun, and has not come to its end."""
    loops: int = 0
    """How many have begun: a script may have several in turn."""
    lacks: str = ""
    """What it has to do that has not called `resume()` before its loop began."""
    left: bool = False
    """Its controller has told it to end, after an incident; that may be one of its own exception."""
    told: bool = False
    """It was told from here to end."""
    killed: bool = False
    """By us, and its end has not been seen: whatever the process says is too late."""
    due_s: float | None = None
    """When it has to have ended."""
    told_s: float | None = None
    """When people are told that it is waited for."""
    look_s: float | None = None
    """When it is looked whether it is stopped."""

    @property
    def runs(self) -> bool:
        """Its process has not ended."""
        return self.place is Place.RUNNING

    @property
    def loop(self) -> int:
        """Number of the one that it is in, or comes to."""
        return self.loops if self.begun else self.loops + 1


@dataclass(slots=True)
class Roster:
    """All ranks of a job."""

    world: tuple[int, ...]
    ranks: dict[int, Rank] = field(default_factory=dict)
    guarded: int = 0
    """Number of the newest loop for which a controller looks after all ranks that are in it, or come to it; 0: none."""
    begun: int = 0
    """Number of the newest loop that has begun, on any rank; 0: none."""
    over: int = 0
    """And of the newest one that has come to its end on all of them, as one has said."""
    earliest_s: float | None = None
    """Nothing is due before."""
    _places: Counter[Place] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.ranks = {rank: Rank() for rank in self.world}
        self._places[Place.ABSENT] = len(self.ranks)

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def at(self, place: Place) -> Iterator[tuple[int, Rank]]:
        """Those whose process is there; it may move meanwhile."""
        return ((rank, one) for rank, one in [*self.ranks.items()] if one.place is place)

    def are_all(self, place: Place) -> bool:
        """No rank is elsewhere."""
        return self._places[place] == len(self.ranks)

    def are_any(self, place: Place) -> bool:
        """Some rank is there."""
        return self._places[place] > 0

    def put(self, rank: int, place: Place) -> None:
        """Its process has got there, and is due nowhere."""
        one = self.ranks[rank]
        self._places[one.place] -= 1
        self._places[place] += 1
        one.place, one.due_s, one.told_s, one.look_s = place, None, None, None

    @property
    def is_over(self) -> bool:
        """All loops have come to their end that have begun, so to begin again would be to train again."""
        return self.over > 0 and self.over >= self.begun

    def renew(self) -> None:
        """New processes run, of which nothing is known."""
        self.ranks = {rank: Rank(place=Place.RUNNING) for rank in self.world}
        self._places = Counter({Place.RUNNING: len(self.ranks)})
        self.guarded = self.begun = self.over = 0
        self.earliest_s = None

    def loop_begins(self, rank: int) -> None:
        """That of this rank."""
        one = self.ranks[rank]
        self.guarded, self.begun = max(self.guarded, one.loop), max(self.begun, one.loop)

    def due(self, one: Rank, at_s: float | None, told_s: float | None = None, look_s: float | None = None) -> None:
        """When it has to have ended (None: whenever it does), people are told, and it is looked at."""
        one.due_s, one.told_s, one.look_s = at_s, told_s, look_s
        self.awake_at(at_s, told_s, look_s)

    def is_told_to_end(self, one: Rank, now_s: float) -> None:
        """By a signal."""
        self.due(one, now_s + TOLD_S)

    def others_leave(self, now_s: float) -> None:
        """A rank has left, so that all can."""
        for _, one in self.at(Place.RUNNING):
            if not one.killed:
                self.leaves(one, now_s)

    def leaves(self, one: Rank, now_s: float) -> None:
        """It can: a rank has left. One that was stopped before is due sooner, and looked at again."""
        due_s, notice_s = now_s + LEAVE_S, now_s + LEAVE_NOTICE_S
        self.due(one, due_s if one.due_s is None else min(one.due_s, due_s), told_s=notice_s, look_s=notice_s)

    def go_on(self) -> None:
        """Nobody has to end."""
        for one in self.ranks.values():
            self.due(one, None)

    def saves(self, one: Rank, now_s: float) -> None:
        """It ends once there is a checkpoint."""
        self.due(one, now_s + END_S, told_s=now_s + END_S - LEAVE_S, look_s=now_s + LEAVE_NOTICE_S)

    def awake_at(self, *instants_s: float | None) -> None:
        """Something is due then, where it is not None."""
        self.earliest_s = min((at_s for at_s in (self.earliest_s, *instants_s) if at_s is not None), default=None)

    def look(self) -> None:
        """What is due has been done; when is the next?"""
        self.earliest_s = None
        for one in self.ranks.values():
            self.awake_at(one.due_s, one.told_s, one.look_s)
