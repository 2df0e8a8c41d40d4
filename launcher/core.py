"""The launcher's decisions, pure: what workers say and how they end comes in, what to do about it goes out.

How it works. All workers of generation g are in `main`, or have left it and wait. Once one of them has died, generation
g is over: the dead one is started anew, each survivor leaves `main` (told by the controller after the checkpoint, or by
`Abandon` where no controller protects it yet) and waits. Only when *every* rank waits does g+1 begin, by one `Enter`.
So no rank of g runs any more when g+1 begins, and whoever resumes finds the checkpoint of g complete.

A rank whose process misses its deadline is killed and replaced as well. What goes wrong again and again ends in `Stop`,
and so does a failure after a training loop has come to its end: to begin again would be to train again.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

LEAVE_S = 120.0
"""From the first rank that has left `main` until one that has not is killed: `finally` blocks may write files."""

END_S = 3600.0
"""The same where no rank has left yet, since a checkpoint is being written, which takes as long as the disk needs."""

START_S = 900.0
"""How long a process that replaces another one may take for its imports."""

LEAVE_NOTICE_S = 5.0
START_NOTICE_S = 30.0
"""From the same instants as LEAVE_S and START_S until people are told for whom everybody waits."""

NAMED_RANKS_MAX = 8
"""Of thousands of late ranks they are told the first ones."""

FAILURES_MAX = 2
"""Generations in a row that may fail before their loop has begun."""

DEATHS_MAX = 3
"""Generations in a row that may fail without a step that was saved in between."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """`rank` is not in `main`, holds no group, and waits.

    step: the newest one that it knows to be saved; 0: none. record: path of the controller's incidents.jsonl, where it
    knows that. sources: a digest of each file of the user's code that it has imported, by path.
    """

    rank: int
    step: int = 0
    record: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Begun:
    """The training loop of `rank` has begun after `step`, so a controller looks after it."""

    rank: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class Updated:
    """`rank` has ended its first step in this generation; nothing follows from that."""

    rank: int


@dataclass(frozen=True, slots=True)
class Over:
    """The training loop of `rank` has come to its end, and nobody looks after it any more."""

    rank: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The launcher of another host cannot be reached any more."""

    why: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The process of `rank` has ended. code: as of `Popen.returncode`."""

    rank: int
    code: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Waiting | Begun | Updated | Over | Ended | Lost | Tick


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process for `rank`; where a spare is ready, that one."""

    rank: int


@dataclass(frozen=True, slots=True)
class Enter:
    """All ranks wait: they enter `main` in this generation. port: of its store, which the shell makes.

    step: the newest one that is known to be saved: where the loop has to go on.
    """

    generation: int
    port: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class Abandon:
    """`rank` leaves `main`; no controller will tell it."""

    rank: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process of `rank`."""

    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class Awaited:
    """For people: the others wait for `rank`. what: it has not done; seconds: until it is killed and replaced."""

    rank: int
    what: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Nothing is healed any more. failure: why; None where all ranks have ended well."""

    failure: str | None


Effect = Start | Enter | Abandon | Kill | Awaited | Stop


class Place(enum.Enum):
    """Where a rank's process is."""

    STARTING = "starting"
    WAITING = "waiting"
    IN_MAIN = "in main"
    DONE = "done"


@dataclass(slots=True)
class _Rank:
    place: Place = Place.STARTING
    known: bool = False
    """It has called `lastwords.run`."""
    begun: bool = False
    """Its loop has begun in this generation."""
    over: bool = False
    """And has come to its end."""
    due_s: float | None = None
    """When it has to have arrived."""
    told_s: float | None = None
    """When people are told that it is waited for."""
    killed: bool = False
    """Since it had not arrived."""


@dataclass(slots=True)
class LauncherCore:
    """The ranks of a job, on all hosts. `handle` takes events in any order; a stopped core does nothing."""

    world: tuple[int, ...]
    generation: int = 0
    stopped: bool = False
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _healing: bool = True
    """Between the first sign that a generation is over and the `Enter` of the next one; also at the start."""
    _step: int = 0
    _failures: int = 0
    _deaths: int = 0
    _ended_since: set[int] = field(default_factory=set)
    """Ranks whose processes have ended since a step was saved."""
    _sources: dict[str, str] = field(default_factory=dict)
    _places: Counter[Place] = field(default_factory=Counter)
    """How many ranks are where: with thousands of them, no event may look at all."""
    _begun: int = 0
    """How many loops have begun."""
    _leaving: bool = False
    """A rank has left `main` since the generation was over."""
    _earliest_s: float | None = None
    """No rank is due before."""

    def __post_init__(self) -> None:
        self._ranks = {rank: _Rank() for rank in self.world}
        self._places[Place.STARTING] = len(self._ranks)

    @property
    def deadline_s(self) -> float | None:
        """When a Tick is due, at the latest."""
        return self._earliest_s

    def place(self, rank: int) -> Place:
        """Where this rank's process is."""
        return self._ranks[rank].place

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """What to do now, in this order."""
        if self.stopped:
            return []
        match event:
            case Waiting(rank, step, _, sources):
                changed = [path for path, digest in sources.items() if self._sources.setdefault(path, digest) != digest]
                if changed:
                    return self._stop(
                        f"rank {rank} was started with another version of {changed[0]} than the other ranks have: the "
                        "file has been changed since they began"
                    )
                return self._waiting(rank, step, now_s)
            case Over(rank):
                self._note(rank, begun=False, over=True)
                return []
            case Begun(rank, step):
                self._note(rank, begun=True)
                self._progress(step)
                if self._begun == len(self._ranks):
                    self._failures = 0
                return []
            case Updated():
                return []
            case Lost(why):
                return self._stop(why)
            case Ended(rank, code):
                return self._ended(rank, code, now_s)
            case Tick():
                return self._tick(now_s)

    def _waiting(self, rank: int, step: int, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        self._progress(step)
        if not self._healing:
            effects += self._over(rank, now_s)
        one = self._ranks[rank]
        has_left = one.place is Place.IN_MAIN
        self._note(rank, begun=False)
        self._put(rank, Place.WAITING)
        one.known = True
        if not self.stopped and self._are_all(Place.WAITING):
            return [*effects, *self._enter()]
        if has_left and not self._leaving:
            self._leaving = True
            self._others_leave_by(now_s + LEAVE_S, told_s=now_s + LEAVE_NOTICE_S)
        return effects

    def _progress(self, step: int) -> None:
        """A checkpoint of this step exists, of whatever kind: no crash loop."""
        if step > self._step:
            self._step, self._deaths = step, 0
            self._ended_since.clear()

    def _enter(self) -> list[Effect]:
        self._healing = self._leaving = False
        self._earliest_s = None
        for rank in self._ranks:
            self._put(rank, Place.IN_MAIN)
        return [Enter(self.generation, step=self._step)]

    def _ended(self, rank: int, code: int, now_s: float) -> list[Effect]:
        one = self._ranks[rank]
        if code == 0 and not (self._healing and one.known):
            self._put(rank, Place.DONE)
            return self._stop(None) if self._are_all(Place.DONE) else []
        if not one.known:
            return self._stop(f"rank {rank} ended with {code} before it called lastwords.run(main)")
        if one.over:
            return self._stop(f"rank {rank} ended with {code} after its training loop was over")
        self._ended_since.add(rank)
        effects = [] if self._healing else self._over(rank, now_s)
        if one.place is Place.STARTING:
            self._failures += 1
            if self._failures > FAILURES_MAX:
                return self._stop(f"the process that replaces rank {rank} ended with {code} before it entered main()")
        if self.stopped:
            return effects
        self._note(rank, begun=False)
        return [*effects, self._start(rank, now_s)]

    def _start(self, rank: int, now_s: float) -> Effect:
        self._put(rank, Place.STARTING)
        self._due(self._ranks[rank], now_s + START_S, told_s=now_s + START_NOTICE_S)
        return Start(rank)

    def _over(self, rank: int, now_s: float) -> list[Effect]:
        """This generation is over, and `rank` was the first to show it."""
        begun = self._begun == len(self._ranks)
        self._failures += not begun
        self._deaths += 1
        if self._failures > FAILURES_MAX:
            return self._stop(f"{self._failures} generations in a row have failed before their training loop began")
        if self._deaths > DEATHS_MAX:
            return self._stop(
                f"{self._deaths} failures in a row, and no step after {self._step} was saved; processes ended of ranks "
                f"{', '.join(map(str, sorted(self._ended_since))) or 'unknown'}"
            )
        self._healing = True
        self.generation += 1
        effects: list[Effect] = []
        for other, one in self._ranks.items():
            if one.place is Place.DONE:
                effects.append(self._start(other, now_s))
            elif one.place is Place.IN_MAIN and other != rank:
                if begun:
                    self._due(one, now_s + END_S)
                else:
                    self._due(one, now_s + LEAVE_S, told_s=now_s + LEAVE_NOTICE_S)
                    effects.append(Abandon(other))
        return effects

    def _tick(self, now_s: float) -> list[Effect]:
        if self._earliest_s is None or now_s < self._earliest_s:
            return []
        effects: list[Effect] = []
        for rank, one in self._ranks.items():
            if one.due_s is None:
                continue
            what = "has not left main()" if one.place is Place.IN_MAIN else "has not reached lastwords.run(main)"
            if now_s >= one.due_s and one.killed:
                return self._stop(f"the process of rank {rank} was killed {LEAVE_S:g} s ago and has not ended")
            if now_s >= one.due_s:
                one.due_s, one.told_s, one.killed = now_s + LEAVE_S, None, True
                effects.append(Kill(rank, f"it {what} in time"))
            elif one.told_s is not None and now_s >= one.told_s:
                one.told_s = None
                if sum(isinstance(effect, Awaited) for effect in effects) < NAMED_RANKS_MAX:
                    effects.append(Awaited(rank, what, one.due_s - now_s))
        instants = (at_s for one in self._ranks.values() for at_s in (one.due_s, one.told_s) if at_s is not None)
        self._earliest_s = min(instants, default=None)
        return effects

    def _others_leave_by(self, deadline_s: float, told_s: float) -> None:
        for one in self._ranks.values():
            if one.place is Place.IN_MAIN and not one.killed:
                self._due(one, deadline_s if one.due_s is None else min(one.due_s, deadline_s), told_s)

    def _due(self, one: _Rank, at_s: float, told_s: float | None = None) -> None:
        one.due_s, one.told_s = at_s, told_s
        self._earliest_s = min(known for known in (self._earliest_s, at_s, told_s) if known is not None)

    def _put(self, rank: int, place: Place) -> None:
        """Its process has got there, and is due nowhere."""
        one = self._ranks[rank]
        self._places[one.place] -= 1
        self._places[place] += 1
        one.place, one.due_s, one.told_s, one.killed = place, None, None, False

    def _are_all(self, place: Place) -> bool:
        return self._places[place] == len(self._ranks)

    def _note(self, rank: int, *, begun: bool, over: bool = False) -> None:
        """Where the loop of a rank is."""
        one = self._ranks[rank]
        self._begun += begun - one.begun
        one.begun, one.over = begun, over

    def _stop(self, failure: str | None) -> list[Effect]:
        self.stopped = True
        return [Stop(failure)]
