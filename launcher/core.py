"""The launcher's decisions, pure: what workers say and how they end comes in, what to do about it goes out.

How it works. All workers of generation g are in `main`, or have left it and wait. Once one of them has died, generation
g is over: the dead one is started anew, each survivor leaves `main` (told by the controller after the checkpoint, or by
`Abandon` where no controller protects it yet) and waits. Only when *every* rank waits does g+1 begin, by one `Enter`.
So no rank of g runs any more when g+1 begins, and whoever resumes finds the checkpoint of g complete.

A rank whose process misses the deadline is killed and replaced as well. What goes wrong again and again ends in `Stop`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

LEAVE_S = 30.0
"""From the first rank that has left `main` until one that has not is killed: `finally` blocks may write files."""

END_S = 900.0
"""The same where no rank has left yet: the controller bounds every wait of an incident by less."""

FAILURES_MAX = 2
"""Generations in a row that may fail before their loop has begun."""

DEATHS_MAX = 3
"""Generations in a row that may fail without a step that was saved in between."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """`rank` is not in `main`, holds no group, and waits. step: the newest one that it knows to be saved; 0: none."""

    rank: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class Begun:
    """The training loop of `rank` has begun, so a controller looks after it."""

    rank: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The process of `rank` has ended. code: as of `Popen.returncode`."""

    rank: int
    code: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Waiting | Begun | Ended | Tick


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process for `rank`; where a spare is ready, that one."""

    rank: int


@dataclass(frozen=True, slots=True)
class Enter:
    """All ranks wait: they enter `main` in this generation."""

    generation: int


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
class Stop:
    """Nothing is healed any more. failure: why; None where all ranks have ended well."""

    failure: str | None


Effect = Start | Enter | Abandon | Kill | Stop


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


@dataclass(slots=True)
class LauncherCore:
    """One agent's ranks. `handle` takes events in any order; a stopped core does nothing."""

    world: tuple[int, ...]
    generation: int = 0
    stopped: bool = False
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _healing: bool = True
    """Between the first sign that a generation is over and the `Enter` of the next one; also at the start."""
    _deadline_s: float | None = None
    _step: int = 0
    _failures: int = 0
    _deaths: int = 0
    _first_dead: int = -1

    def __post_init__(self) -> None:
        self._ranks = {rank: _Rank() for rank in self.world}

    @property
    def deadline_s(self) -> float | None:
        """When a Tick is due."""
        return self._deadline_s

    def place(self, rank: int) -> Place:
        """Where this rank's process is."""
        return self._ranks[rank].place

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """What to do now, in this order."""
        if self.stopped:
            return []
        match event:
            case Waiting(rank, step):
                return self._waiting(rank, step, now_s)
            case Begun(rank):
                self._ranks[rank].begun = True
                if all(one.begun for one in self._ranks.values()):
                    self._failures = 0
                return []
            case Ended(rank, code):
                return self._ended(rank, code, now_s)
            case Tick():
                return self._tick(now_s)

    def _waiting(self, rank: int, step: int, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        if step > self._step:
            self._step, self._deaths = step, 0
        if not self._healing:
            effects += self._over(rank, now_s)
        one = self._ranks[rank]
        one.place, one.known, one.begun = Place.WAITING, True, False
        if not self.stopped and all(each.place is Place.WAITING for each in self._ranks.values()):
            return [*effects, *self._enter()]
        if any(each.place is Place.IN_MAIN for each in self._ranks.values()):
            self._by(now_s + LEAVE_S)
        return effects

    def _enter(self) -> list[Effect]:
        self._healing, self._deadline_s = False, None
        for one in self._ranks.values():
            one.place = Place.IN_MAIN
        return [Enter(self.generation)]

    def _ended(self, rank: int, code: int, now_s: float) -> list[Effect]:
        one = self._ranks[rank]
        if code == 0 and not self._healing:
            one.place = Place.DONE
            return self._stop(None) if all(each.place is Place.DONE for each in self._ranks.values()) else []
        if not one.known:
            if code == 0:
                one.place = Place.DONE
                return self._stop(None) if all(each.place is Place.DONE for each in self._ranks.values()) else []
            return self._stop(f"rank {rank} ended with {code} before it called lastwords.run(main)")
        effects = [] if self._healing else self._over(rank, now_s)
        if one.place is Place.STARTING:
            self._failures += 1
            if self._failures > FAILURES_MAX:
                return self._stop(f"the process that replaces rank {rank} ended with {code} before it entered main()")
        one.place, one.begun = Place.STARTING, False
        return effects if self.stopped else [*effects, Start(rank)]

    def _over(self, rank: int, now_s: float) -> list[Effect]:
        """This generation is over, and `rank` was the first to show it."""
        begun = all(one.begun for one in self._ranks.values())
        self._failures += not begun
        self._deaths += 1
        self._first_dead = rank
        if self._failures > FAILURES_MAX:
            return self._stop(f"{self._failures} generations in a row have failed before their training loop began")
        if self._deaths > DEATHS_MAX:
            return self._stop(
                f"{self._deaths} failures in a row, the last of rank {rank}, and no step after {self._step} was saved"
            )
        self._healing = True
        self.generation += 1
        self._deadline_s = now_s + (END_S if begun else LEAVE_S)
        effects: list[Effect] = []
        for other, one in self._ranks.items():
            if one.place is Place.DONE:
                one.place = Place.STARTING
                effects.append(Start(other))
            elif one.place is Place.IN_MAIN and not begun and other != rank:
                effects.append(Abandon(other))
        return effects

    def _tick(self, now_s: float) -> list[Effect]:
        if self._deadline_s is None or now_s < self._deadline_s:
            return []
        self._deadline_s = None
        late = [rank for rank, one in self._ranks.items() if one.place is Place.IN_MAIN]
        return [Kill(rank, "it has not left main()") for rank in late]

    def _by(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s if self._deadline_s is None else min(self._deadline_s, deadline_s)

    def _stop(self, failure: str | None) -> list[Effect]:
        self.stopped = True
        return [Stop(failure)]
