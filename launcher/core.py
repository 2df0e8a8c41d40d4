"""The launcher's decisions, pure: what happens to ranks comes in, what to do about it goes out.

How it works. A generation is one process for each rank, all begun together: each is a new one and runs the script from
its first line. Once one of them has ended badly, the generation is over, and all others end as well: by themselves,
told by their controller after the checkpoint, or ended from here where no controller looks after them yet. Only when
*every* rank's process has ended does the next generation begin, by one `Enter`. So no code of n runs any more when n+1
begins, and whoever resumes finds the checkpoint of n complete. Where another launcher may follow this one, n+1 is kept
first (`Keep`), and as long as that fails all wait. (A generation in the checkpoint directory is a start that the ranks
have agreed on with their controller: at most one for each of these.)

Messages of one rank may arrive after the end of another. So one rank that a controller looks after stands for all that
have come as far, since a controller serves only once all have registered. Whether all loops have ended, or another
generation would be of no use, is decided when every process has ended, and everything that they said has arrived.

What goes wrong again and again ends in `Stop`. So does a failure before anything was protected, or after a training
loop has come to its end, since to begin again would be to train again; one of a loop that does not resume; and one
that would last, such as a refusal by lastwords: each new process would meet it as well.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lastwords.core_events import Tick
from lastwords.launcher.events import (
    NOT_ENDED,
    UNKNOWN_CODE,
    Awaited,
    Begun,
    Effect,
    End,
    Ended,
    Enter,
    Event,
    Gone,
    Guarded,
    Inside,
    Keep,
    Kept,
    Kill,
    Leaving,
    Look,
    Lost,
    Over,
    Ready,
    Stop,
    Stopped,
    Updated,
)

# Whether a job fails again and again, so that it is of no use to go on. Pure.

DEATHS_MAX = 3
"""Generations in a row that may fail without a step that was saved in between."""

REPEATS_MAX = 3
"""Generations in a row that may fail by the same exception of the same rank, with REPEAT_STEPS saved in between."""

REPEAT_STEPS = 10
"""An error in each step, or each time that something is logged, say; a network that fails once a day is no loop."""

NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
"""Steps, samples and addresses differ each time that an exception comes again."""


@dataclass(slots=True)
class Repeated:
    """Of one rank: the newest exception with which a process has ended, without its numbers.

    entry: the generation that follows the failed one. step: the newest that was saved then. count: in a row.
    """

    text: str
    entry: int
    step: int
    count: int


@dataclass(slots=True)
class CrashLoop:
    """What has failed since a step was saved."""

    deaths: int = 0
    repeated: dict[int, Repeated] = field(default_factory=dict)
    ended_since: set[int] = field(default_factory=set, repr=False)
    """Ranks whose processes have ended by themselves since a step was saved."""
    raised: dict[int, str] = field(default_factory=dict)
    """What processes have ended with in the generation that is over, without its numbers; by rank. Not counted yet."""
    blamed: Ended | None = field(default=None, repr=False)
    """The first process that has ended by itself since the generation is over; one that has ended well only for want
    of another."""
    useless: str = ""
    """Why another generation would be none."""
    lasting: bool = False
    """No start by a launcher would be another one."""

    @property
    def last(self) -> str:
        """Which rank's process has ended, and why; "" where none has by itself."""
        return "" if self.blamed is None else f"rank {self.blamed.rank}: {self.blamed.words}"

    def over(self) -> None:
        """A generation has failed."""
        self.blamed = None
        self.deaths += 1

    def ended(self, event: Ended) -> None:
        """A process has ended by itself since the generation is over."""
        self.ended_since.add(event.rank)
        if self.blamed is None or (event.code and not self.blamed.code):
            self.blamed = event
        self.raised[event.rank] = NUMBERS.sub("#", event.raised)

    def give_up(self, why: str, *, lasting: bool) -> None:
        """Another generation would not go on from this one; all ranks may end as after any failure."""
        self.useless, self.lasting = self.useless or why, self.lasting or lasting

    def judge(self, entry: int, step: int) -> str | None:
        """Why it is of no use to go on with `entry` from `step`; None as long as it may be.

        All ranks have ended by then, or they might still save a step, or fail themselves.
        """
        self._count(entry, step)
        if self.useless:
            return self.useless
        if not self.deaths:
            self.ended_since.clear()
        last = f", the last with {self.last}" if self.last else ""
        count = max((one.count for one in self.repeated.values() if one.entry == entry), default=0)
        if count > REPEATS_MAX:
            return (
                f"{count} failures in a row by the same exception of the same rank, with at most "
                f"{REPEAT_STEPS} steps saved in between{last}"
            )
        if self.deaths > DEATHS_MAX:
            ranks = ", ".join(map(str, sorted(self.ended_since))) or "unknown"
            return (
                f"{self.deaths} failures in a row, and no step after {step} was saved; processes ended of ranks "
                f"{ranks}{last}"
            )
        return None

    def _count(self, entry: int, step: int) -> None:
        for rank, text in self.raised.items():
            before = self.repeated.pop(rank, None)
            same = before and (before.text, before.entry) == (text, entry - 1) and step <= before.step + REPEAT_STEPS
            if text:
                self.repeated[rank] = Repeated(text, entry, step, before.count + 1 if before and same else 1)
        self.raised.clear()


# Where the process of each rank is, and when something has to have happened to it; part of core.py, and pure.
#
# With thousands of ranks no event may look at all of them: how many are where is counted as they move.

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


class RankPlace(enum.Enum):
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

    place: RankPlace = RankPlace.ABSENT
    guarded: bool = False
    """A controller looks after it."""
    begun: bool = False
    """A loop of it has begun, and has not come to its end."""
    loops: int = 0
    """How many have begun: a script may have several in turn."""
    lacks: str = ""
    """What it has to do that has not called `resume()` before its loop began."""
    saved_only: bool = False
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
        return self.place is RankPlace.RUNNING

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
    _places: Counter[RankPlace] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.ranks = {rank: Rank() for rank in self.world}
        self._places[RankPlace.ABSENT] = len(self.ranks)

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def at(self, place: RankPlace) -> Iterator[tuple[int, Rank]]:
        """Those whose process is there; it may move meanwhile."""
        return ((rank, one) for rank, one in [*self.ranks.items()] if one.place is place)

    def are_all(self, place: RankPlace) -> bool:
        """No rank is elsewhere."""
        return self._places[place] == len(self.ranks)

    def are_any(self, place: RankPlace) -> bool:
        """Some rank is there."""
        return self._places[place] > 0

    def put(self, rank: int, place: RankPlace) -> None:
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
        self.ranks = {rank: Rank(place=RankPlace.RUNNING) for rank in self.world}
        self._places = Counter({RankPlace.RUNNING: len(self.ranks)})
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

    def leaves(self, one: Rank, now_s: float) -> None:
        """It can: a rank has left. One that was stopped before is due sooner, and looked at again."""
        due_s, notice_s = now_s + LEAVE_S, now_s + LEAVE_NOTICE_S
        self.due(one, due_s if one.due_s is None else min(one.due_s, due_s), told_s=notice_s, look_s=notice_s)

    def saves(self, one: Rank, now_s: float) -> None:
        """It ends once there is a checkpoint."""
        self.due(one, now_s + END_S, told_s=now_s + END_S - LEAVE_S, look_s=now_s + LEAVE_NOTICE_S)

    def awake_at(self, *instants_s: float | None) -> None:
        """Something is due then, where it is not None."""
        self.earliest_s = min((at_s for at_s in (self.earliest_s, *instants_s) if at_s is not None), default=None)

    def find_earliest(self) -> None:
        """What is due has been done; when is the next?"""
        self.earliest_s = None
        for one in self.ranks.values():
            self.awake_at(one.due_s, one.told_s, one.look_s)


@dataclass(slots=True)
class LauncherCore:
    """The ranks of a job, on all hosts. `handle` takes events in any order; a stopped core does nothing."""

    world: tuple[int, ...]
    entry: int = 0
    """Number of the generation that runs; of the next one, once that is over."""
    keeps: bool = False
    """Whether another launcher may follow this one, and goes by what was kept."""
    stopped: bool = False
    heals: bool = True
    """Between the first sign that a generation is over and the `Enter` of the next one; also at the start."""
    _ranks: Roster = field(init=False)
    _guarded: bool = False
    """A controller has looked after a rank, in this generation or an earlier one."""
    _saved: Mapping[int, int] = field(default_factory=dict)
    """Number of a loop of the script's -> the newest step of it that is saved."""
    _crashes: CrashLoop = field(default_factory=CrashLoop)
    _leaving: bool = False
    """A rank has left since the generation was over."""
    _left_out: bool = False
    """Ranks that nobody may look after run on, since not all have been heard of."""
    _keep_due_s: float | None = None
    """When it is tried again."""

    def __post_init__(self) -> None:
        self._ranks = Roster(self.world)

    @property
    def deadline_s(self) -> float | None:
        """When a Tick is due, at the latest."""
        dues_s = [due_s for due_s in (self._ranks.earliest_s, self._keep_due_s) if due_s is not None]
        return min(dues_s, default=None)

    def take_over(self, entry: int, step: int) -> None:
        """Follow a launcher that has begun this generation. step: the newest saved then.

        Its ranks count as guarded until they say otherwise: one that is ended from here would leave without saving.
        """
        self.entry, self._saved, self.heals, self._guarded = entry, {1: step}, False, True
        for rank in self.world:
            self._is_inside(rank, begun=True, loops=1)

    @property
    def _step(self) -> int:
        """Where the script's first loop has to go on. One that comes later may have another directory."""
        return self._saved.get(1, 0)

    def place(self, rank: int) -> RankPlace:
        """Where this rank's process is."""
        return self._ranks[rank].place

    def is_by_itself(self, event: Ended) -> bool:
        """Whether this end is a failure of the rank's own; its controller tells it to leave in either case."""
        one = self._ranks[event.rank]
        return event.code != 0 and not one.told and (event.raised != "" or not one.left)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """What to do now, in this order."""
        if self.stopped:
            return []
        match event:
            case Ready():
                return self._ready(event, now_s)
            case Inside():
                return self._inside(event, now_s)
            case Guarded(rank):
                self._is_guarded(rank)
                return []
            case Begun():
                return self._begun(event)
            case Over(rank):
                return self._loop_over(rank, now_s)
            case Leaving():
                return self._left(event, now_s)
            case Stopped(rank):
                return self._stopped(rank, now_s)
            case Lost(why):
                return self._stop(why)
            case Kept():
                return self._kept(event, now_s)
            case Ended():
                return self._ended(event, now_s)
            case Gone(rank):
                effects = self._ended(Ended(rank, UNKNOWN_CODE), now_s) if self._ranks[rank].runs else []
                self._ranks.put(rank, RankPlace.ABSENT)
                return effects
            case Tick():
                return self._tick(now_s)
            case Updated():
                return []

    # ------------------------------------------------------------------ all are ready

    def _ready(self, event: Ready, now_s: float) -> list[Effect]:
        rank, one = event.rank, self._ranks[event.rank]
        self.entry = max(self.entry, event.entered + 1)
        if one.runs and not self.heals:
            return self._ended(Ended(rank, UNKNOWN_CODE), now_s)
        self._ranks.put(rank, RankPlace.READY)
        return self._go_on(now_s)

    def _go_on(self, now_s: float) -> list[Effect]:
        """A process has ended, or one can be started: the next generation, once that is so of all ranks."""
        if self._ranks.is_over and not self._ranks.are_any(RankPlace.RUNNING):
            last = f": {self._crashes.last}" if self._crashes.last else ""
            return self._stop(f"a process has ended after its training loop was over{last}")
        if not self._ranks.are_all(RankPlace.READY):
            return self._end_those_left_out(now_s)
        saved = max(self._saved.values(), default=0)
        if (why := self._crashes.judge(self.entry, saved)) is None:
            return self._keep() if self.keeps else self._enter()
        if not (self._crashes.lasting and saved):
            return self._stop(why)
        again = f"step {saved} was saved; with that done, start the job again to go on from there"
        return self._stop(f"{why}\n{again}", saved=True)

    def _enter(self) -> list[Effect]:
        self.heals = self._leaving = self._left_out = False
        self._ranks.renew()
        return [Enter(self.entry, step=self._step)]

    def _keep(self) -> list[Effect]:
        self._keep_due_s = None
        return [Keep(self.entry, self._step)] if self.keeps and self._is_to_keep else []

    def _kept(self, event: Kept, now_s: float) -> list[Effect]:
        if event.entry != self.entry or not self._is_to_keep:
            return []  # a rank has gone meanwhile: it is kept once more when all are ready again
        if event.failure:
            self._keep_due_s = now_s + KEEP_AGAIN_S
            return []
        return self._enter() if self._ranks.are_all(RankPlace.READY) else []

    @property
    def _is_to_keep(self) -> bool:
        return self._ranks.are_all(RankPlace.READY) or self._ranks.are_all(RankPlace.RUNNING)

    # ------------------------------------------------------------------ what ranks say

    def _is_inside(self, rank: int, *, begun: bool, loops: int) -> None:
        self._ranks.put(rank, RankPlace.RUNNING)
        one = self._ranks[rank]
        one.guarded, one.begun, one.loops = begun, begun, loops

    def _inside(self, event: Inside, now_s: float) -> list[Effect]:
        """Another launcher has begun the generation that this rank is in."""
        if self._ranks[event.rank].killed:
            return [Kill(event.rank, NOT_ENDED)]  # it may not have heard of it
        self._guarded = True
        self._is_inside(event.rank, begun=event.begun, loops=event.loops)
        if event.begun:
            self._ranks.loop_begins(event.rank)
        if self.heals and self._ranks.are_all(RankPlace.RUNNING):  # what the launcher before this one had kept was lost
            self.heals = False
            for one in self._ranks.ranks.values():
                self._ranks.due(one, None)
            self.entry = event.generation
            return self._keep()
        if not self.heals:
            self.entry = max(self.entry, event.generation)
            return []
        self.entry = max(self.entry, event.generation + 1)
        return self._end_inside(event.rank, now_s) + self._end_those_left_out(now_s)

    def _begun(self, event: Begun) -> list[Effect]:
        self._is_guarded(event.rank)
        one = self._ranks[event.rank]
        one.loops, one.begun, one.lacks, one.saved_only = one.loop, True, event.lacks, event.saved_only
        self._ranks.loop_begins(event.rank)
        self._progress(one.loop, event.step)
        return []

    def _is_guarded(self, rank: int) -> None:
        """So are all others that have come as far: it could not be before all had registered."""
        self._guarded = self._ranks[rank].guarded = True
        self._ranks.guarded = max(self._ranks.guarded, self._ranks[rank].loop)

    def _loop_over(self, rank: int, now_s: float) -> list[Effect]:
        """Nobody looks after this rank any more. All ranks have come to the end of this loop."""
        one = self._ranks[rank]
        self._ranks.over = max(self._ranks.over, one.loop)
        one.loops, one.begun, one.guarded = one.loop, False, False
        if not one.runs or not self.heals or one.told or one.killed:
            return []
        return self._end_inside(rank, now_s)

    def _left(self, event: Leaving, now_s: float) -> list[Effect]:
        """It leaves since its controller has said so. A failure with which a step was saved is none of a crash loop.

        Where it has lost its controller instead, the others have as long as without its word: they may be writing.
        """
        one = self._ranks[event.rank]
        if not one.runs:
            return []
        effects = [] if self.heals else self._over(event.rank, now_s)
        self._guarded = one.left = True
        self._progress(one.loop, event.step)
        if not (self._leaving or event.alone):
            self._leaving = True
            for _, other in self._ranks.at(RankPlace.RUNNING):
                if not other.killed:
                    self._ranks.leaves(other, now_s)
        return effects

    def _progress(self, loop: int, step: int) -> None:
        """A checkpoint of this step of a loop exists, of whatever kind: no crash loop."""
        if step > self._saved.get(loop, 0):
            self._saved = {**self._saved, loop: step}
            self._crashes.deaths = 0
            self._crashes.ended_since.clear()

    # ------------------------------------------------------------------ how processes end

    def _ended(self, event: Ended, now_s: float) -> list[Effect]:
        rank, code = event.rank, event.code
        one = self._ranks[rank]
        if not one.runs:
            return []
        if event.lasting and code and not one.killed:
            self.stopped = True
            return [Stop(f"rank {rank}: {event.raised}", lasting=True)]
        if code == 0 and not self.heals:
            self._ranks.put(rank, RankPlace.DONE)
            return self._stop(None) if self._ranks.are_all(RankPlace.DONE) else []
        if one.told or one.killed or (one.left and not event.raised):
            self._ranks.put(rank, RankPlace.READY)
            return self._go_on(now_s)
        if not self._guarded and code != UNKNOWN_CODE:  # which may be that of whoever has started it
            return self._stop(f"rank {rank} ended before lastwords protected it: {event.words}")
        effects = [] if self.heals else self._over(rank, now_s)
        self._crashes.ended(event)
        self._ranks.put(rank, RankPlace.READY)
        if one.lacks:
            self._crashes.give_up(
                f"rank {rank}: {event.words}, and its training loop began without tft.resume(missing_ok=True), so it "
                f"would begin anew: {one.lacks}",
                lasting=one.saved_only,
            )
        return effects + self._go_on(now_s)

    def _over(self, rank: int, now_s: float) -> list[Effect]:
        """This generation is over, and `rank` was the first to show it."""
        self._crashes.over()
        self.heals = True
        self.entry += 1
        for other, _ in self._ranks.at(RankPlace.DONE):
            self._crashes.ended(Ended(other, 0))
            self._ranks.put(
                other, RankPlace.ABSENT if self.keeps else RankPlace.READY
            )  # its supervisor has ended with it
        return [
            end
            for other, _ in self._ranks.at(RankPlace.RUNNING)
            if other != rank
            for end in self._end_inside(other, now_s)
        ]

    def _end_inside(self, rank: int, now_s: float) -> list[Effect]:
        """A process of a generation that is over ends: a guarded one by itself, once there is a checkpoint."""
        one = self._ranks[rank]
        if one.guarded or self._ranks.guarded >= one.loop:
            (self._ranks.leaves if self._leaving else self._ranks.saves)(one, now_s)
            return []
        if self._ranks.are_any(RankPlace.ABSENT):
            self._left_out = True  # it may be guarded
            return []
        one.told = True
        self._ranks.due(one, now_s + TOLD_S)
        return [End(rank)]

    def _end_those_left_out(self, now_s: float) -> list[Effect]:
        if not self._left_out or self._ranks.are_any(RankPlace.ABSENT):
            return []
        self._left_out = False
        left_out = [rank for rank, one in self._ranks.at(RankPlace.RUNNING) if one.due_s is None]
        return [end for rank in left_out for end in self._end_inside(rank, now_s)]

    def _kill(self, rank: int, why: str, now_s: float) -> Effect:
        self._ranks[rank].killed = True
        self._ranks.due(self._ranks[rank], now_s + KILLED_S)
        return Kill(rank, why)

    def _tick(self, now_s: float) -> list[Effect]:
        if self.deadline_s is None or now_s < self.deadline_s:
            return []
        effects: list[Effect] = []
        if self._keep_due_s is not None and now_s >= self._keep_due_s:
            effects += self._keep()
        named = 0
        for rank, one in self._ranks.ranks.items():
            if one.due_s is not None and now_s >= one.due_s:
                if not one.killed:
                    effects.append(self._kill(rank, NOT_ENDED, now_s))
                elif self.keeps:  # it may be stopped, on a host of its own
                    self._ranks.due(one, None)
                    effects.append(Awaited(rank, "was killed, and has not ended", None))
                else:
                    return self._stop(f"the process of rank {rank} was killed {KILLED_S:g} s ago and has not ended")
                continue
            if one.look_s is not None and now_s >= one.look_s:
                one.look_s = now_s + LEAVE_S
                effects.append(Look(rank))
            if one.told_s is not None and now_s >= one.told_s:
                one.told_s = None
                named += 1
                if named <= NAMED_RANKS_MAX:
                    effects.append(Awaited(rank, NOT_ENDED, None if one.due_s is None else one.due_s - now_s))
        self._ranks.find_earliest()
        return effects

    def _stopped(self, rank: int, now_s: float) -> list[Effect]:
        """It holds nothing that others wait for once one of them has left; before that it may go on, and save."""
        one = self._ranks[rank]
        if not one.runs or one.killed or one.due_s is None:
            return []
        if self._leaving:
            return [self._kill(rank, "it is stopped", now_s)]
        self._ranks.due(one, min(one.due_s, now_s + LEAVE_S), told_s=now_s)
        return []

    def _stop(self, failure: str | None, *, saved: bool = False) -> list[Effect]:
        self.stopped = True
        return [Stop(failure, lasting=saved, saved=saved)]
