"""Where the process of each rank is, and when something has to have happened to it; part of core.py, and pure.

With thousands of ranks no event may look at all of them: how many are where is counted as they move.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from lastwords.launcher.events import NOT_ANSWERED, NOT_COME, NOT_LEFT

LEAVE_S = 120.0
"""From the first rank that has left `main` until one that has not is killed: `finally` blocks may write files."""

OWN_LEAVE_S = 20.0
"""How long a survivor may take, while it runs and writes no files, until it has left `main` and its groups; then it
ends itself, so that LEAVE_S is for those that cannot: stopped, or with the interpreter's lock held."""

END_S = 3600.0
"""The same where no rank has left yet, since a checkpoint is being written, which takes as long as the disk needs."""

START_S = 900.0
"""How long a process that replaces another one may take for its imports."""

SPARE_S = 60.0
"""The same of a spare, which has its imports behind it and only has to answer; and of a process that is stopped in its
imports, which says nothing of how long they take."""

LEAVE_NOTICE_S = 5.0
START_NOTICE_S = 30.0
"""From the same instants as LEAVE_S and START_S until people are told for whom everybody waits."""

LOOK_ANSWER_S = 5.0
"""A launcher says of a rank of its host that it is stopped so soon after it was asked, or it is not."""

FIRST_NOTICE_S = 10.0
"""The same at the first start, from the first rank that waits."""

START_PAUSES_S = (0.0, 1.0, 5.0, 25.0)
"""Before the first, second, ... process that is started in turn for one rank and never waits; then the job ends."""

KEEP_AGAIN_S = 1.0
"""From what could not be kept until it is tried again."""

NAMED_RANKS_MAX = 8
"""Of thousands of late ranks they are told the first ones."""


class Place(enum.Enum):
    """Where a rank's process is."""

    STARTING = "starting"
    WAITING = "waiting"
    IN_MAIN = "in main"
    DONE = "done"
    KILLED = "killed"
    """By us, and its end has not been seen: whatever the process says is too late."""


@dataclass(slots=True)
class Rank:
    """What is known of one rank. Times are in seconds, by the caller's clock."""

    place: Place = Place.STARTING
    known: bool = False
    """It has called `lastwords.run`."""
    begun: bool = False
    """Its loop has begun since it entered `main`."""
    over: bool = False
    """And has come to its end."""
    loops: int = 0
    """How many have begun since then: `main` may have several in turn."""
    trained: bool = False
    """A loop has begun in this process."""
    entered: bool = False
    """This process had been in `main` when it last came to wait."""
    again: bool = False
    """It had been there before it entered it this time."""
    failed_starts: int = 0
    """Processes in a row that have ended before they waited."""
    start_s: float | None = None
    """When its next process is started."""
    due_s: float | None = None
    """When it has to have arrived."""
    told_s: float | None = None
    """When people are told that it is waited for."""
    look_s: float | None = None
    """When it is looked whether it is stopped."""
    spare: bool = False
    """The process was one until it was started for this rank."""
    runs_due_s: float | None = None
    """The process was found stopped, so `due_s` was brought forward: the deadline to restore if the process is no
    longer stopped at the second check."""
    asked: bool = False
    """The second check is under way."""

    @property
    def missing(self) -> str:
        """What it has not done, where others wait for it."""
        if self.place is Place.IN_MAIN:
            return NOT_LEFT
        return NOT_ANSWERED if self.spare else NOT_COME


@dataclass(slots=True)
class Roster:
    """All ranks of a job."""

    world: tuple[int, ...]
    ranks: dict[int, Rank] = field(default_factory=dict)
    begun: int = 0
    """How many loops have begun."""
    known: int = 0
    """How many ranks are known."""
    earliest_s: float | None = None
    """Nothing is due before."""
    _places: Counter[Place] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.ranks = {rank: Rank() for rank in self.world}
        self._places[Place.STARTING] = len(self.ranks)

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
        one.place, one.due_s, one.told_s, one.look_s, one.start_s = place, None, None, None, None
        one.runs_due_s, one.asked = None, False

    def renew(self, rank: int) -> Rank:
        """Its process has ended, and another one takes its place, of which nothing is known."""
        self.put(rank, Place.STARTING)
        self.note(rank, begun=False)
        one = self.ranks[rank]
        self.ranks[rank] = Rank(known=one.known, failed_starts=one.failed_starts)
        return self.ranks[rank]

    def know(self, rank: int) -> None:
        """Its process has called `lastwords.run`."""
        one = self.ranks[rank]
        self.known += not one.known
        one.known = True

    def all_known(self) -> bool:
        """Every rank has been heard of."""
        return self.known == len(self.ranks)

    def note(self, rank: int, *, begun: bool, over: bool = False) -> None:
        """Where the loop of a rank is."""
        one = self.ranks[rank]
        self.begun += begun - one.begun
        one.begun, one.over = begun, over

    def all_begun(self) -> bool:
        """A controller looks after every rank."""
        return self.begun == len(self.ranks)

    def due(self, one: Rank, at_s: float | None, told_s: float | None = None, look_s: float | None = None) -> None:
        """When it has to have arrived (None: whenever it does), people are told, and it is looked at."""
        one.due_s, one.told_s, one.look_s = at_s, told_s, look_s
        one.runs_due_s, one.asked = None, False
        self.awake_at(at_s, told_s, look_s)

    def leaves(self, one: Rank, now_s: float) -> None:
        """It is told to leave `main`, and others wait for it."""
        self.due(one, now_s + LEAVE_S, told_s=now_s + LEAVE_NOTICE_S)

    def others_leave(self, now_s: float) -> None:
        """A rank has left `main`, so that all can."""
        for _, one in self.at(Place.IN_MAIN):
            if one.due_s is None or one.due_s > now_s + LEAVE_S:  # else people have been told, or will be
                self.leaves(one, now_s)
            elif one.runs_due_s is not None:
                one.runs_due_s = min(one.runs_due_s, now_s + LEAVE_S)

    def saves(self, one: Rank, now_s: float) -> None:
        """It is told to leave `main` once there is a checkpoint."""
        self.due(one, now_s + END_S, told_s=now_s + END_S - LEAVE_S, look_s=now_s + LEAVE_NOTICE_S)

    def imports(self, one: Rank, now_s: float, start_s: float | None) -> None:
        """Its process is started, and may take so long; None: people start it, who need not be looked at."""
        told_s = now_s + START_NOTICE_S
        if start_s is None:
            self.due(one, None, told_s)
        else:
            self.due(one, now_s + start_s, told_s, look_s=told_s - LOOK_ANSWER_S)

    def answers(self, one: Rank, now_s: float) -> None:
        """Its process was a spare."""
        self.due(one, now_s + SPARE_S, told_s=now_s + LEAVE_NOTICE_S)

    def is_stopped(self, one: Rank, now_s: float) -> None:
        """If it has much more time than those that others wait for, it has as much as they from now on.

        It was looked at when people are told of those.
        """
        if one.due_s is None or one.due_s <= now_s + LEAVE_S:
            return
        runs_due_s = one.due_s
        whole_s, looked_s = (LEAVE_S, LEAVE_NOTICE_S) if one.place is Place.IN_MAIN else (SPARE_S, START_NOTICE_S)
        self.due(one, now_s + whole_s - looked_s, told_s=now_s)
        one.runs_due_s = runs_due_s

    def awake_at(self, *instants_s: float | None) -> None:
        """Something is due then, where it is not None."""
        self.earliest_s = min((at_s for at_s in (self.earliest_s, *instants_s) if at_s is not None), default=None)

    def look(self) -> None:
        """What is due has been done; when is the next?"""
        self.earliest_s = None
        for one in self.ranks.values():
            self.awake_at(one.start_s, one.due_s, one.told_s, one.look_s)
