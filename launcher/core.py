"""The launcher's decisions, pure: what workers say and how they end comes in, what to do about it goes out.

How it works. All ranks enter `main` together, and these entries are counted. All workers of entry n are in `main`, or
have left it and wait. Once one of them has died, entry n is over: the dead one is started anew, each survivor leaves
`main` (told by the controller after the checkpoint, or by `Abandon` where no controller protects it yet) and waits.
Only when *every* rank waits does n+1 begin, by one `Enter`. So no rank of n runs any more when n+1 begins, and whoever
resumes finds the checkpoint of n complete. Where another launcher may follow this one, n+1 is kept first (`Keep`), and
as long as that fails all ranks wait. (A generation is something else: a start of a job in its checkpoint directory,
which the ranks agree on with the controller, once in each entry.)

A rank whose process misses its deadline is killed and replaced as well. Where `main` fails each time that it is entered
again, or would go on with a model that nobody can put back, all survivors are replaced. What goes wrong all the same
ends in `Stop`, and so does a failure after a training loop has come to its end, since to begin again would be to train
again, and one that would last, such as a refusal by lastwords: each new process would meet it as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lastwords.launcher.crash_loop import CrashLoop
from lastwords.launcher.events import (
    Abandon,
    Awaited,
    Begun,
    Effect,
    Ended,
    Enter,
    Event,
    Imported,
    Inside,
    Keep,
    Kept,
    Kill,
    Look,
    Lost,
    Over,
    Start,
    Stop,
    Stopped,
    Tick,
    Updated,
    Waiting,
)
from lastwords.launcher.roster import (
    FIRST_NOTICE_S,
    KEEP_AGAIN_S,
    LEAVE_S,
    LOOK_ANSWER_S,
    NAMED_RANKS_MAX,
    START_NOTICE_S,
    START_PAUSES_S,
    START_S,
    Place,
    Rank,
    Roster,
)
from lastwords.launcher.versions import Ask, Sources, Versions

AGAIN_AND_AGAIN = "main() has failed before its first step each time that it was entered again"

UNSAVED = "it has trained, and nothing is saved that could be loaded"


@dataclass(slots=True)
class LauncherCore:
    """The ranks of a job, on all hosts. `handle` takes events in any order; a stopped core does nothing."""

    world: tuple[int, ...]
    entry: int = 0
    """The newest one; or the next one, once that is over."""
    start_s: float | None = START_S
    """How long a process that replaces another one may take; None where people start it."""
    keeps: bool = False
    """Whether another launcher may follow this one, and goes by what was kept."""
    stopped: bool = False
    _ranks: Roster = field(init=False)
    _healing: bool = True
    """Between the first sign that an entry is over and the `Enter` of the next one; also at the start."""
    _step: int = 0
    _crashes: CrashLoop = field(default_factory=CrashLoop)
    _versions: Versions = field(default_factory=Versions)
    _held: dict[int, Waiting] = field(default_factory=dict)
    """Of ranks whose version of the user's code is not known."""
    _failed_loop: int = 0
    """Of the loops that `main` has in turn, the one in which processes have ended since the entry is over; else 0."""
    _leaving: bool = False
    """A rank has left `main` since the entry was over."""
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
        """Follow a launcher that has let all ranks enter `main`, by this entry. step: the newest saved then.

        Their loops count as begun until they say otherwise: a rank that is told to leave `main` though a controller
        looks after it would leave without saving.
        """
        self.entry, self._step, self._healing = entry, step, False
        for rank in self.world:
            self._is_inside(rank, begun=True, loops=1)

    def place(self, rank: int) -> Place:
        """Where this rank's process is."""
        return self._ranks[rank].place

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """What to do now, in this order."""
        if self.stopped:
            return []
        match event:
            case Waiting(rank, sources=version) if not self._versions.knows(version):
                self._held[rank] = event
                return [Ask(one) for one in self._versions.hold(rank, version)]
            case Waiting():
                return self._waiting(event, now_s)
            case Sources(rank, files):
                return self._compare(rank, files, now_s)
            case Inside():
                return self._inside(event, now_s)
            case Over(rank):
                return self._loop_over(rank)
            case Begun(rank, step):
                self._ranks.note(rank, begun=True)
                self._ranks[rank].loops += 1
                self._ranks[rank].trained = True
                self._progress(step)
                if self._ranks.all_begun():
                    self._crashes.begun()
                return []
            case Updated():
                return []
            case Stopped(rank):
                return self._stopped(rank, now_s)
            case Imported(rank):
                return self._imported(rank, now_s)
            case Lost(why):
                return self._stop(why)
            case Kept():
                return self._kept(event, now_s)
            case Ended(rank):
                return [*map(Ask, self._versions.ended(rank)), *self._ended(event, now_s)]
            case Tick():
                return self._tick(now_s)

    def _waiting(self, event: Waiting, now_s: float) -> list[Effect]:
        rank, one = event.rank, self._ranks[event.rank]
        killed = one.place is Place.KILLED
        effects = [] if self._healing or killed else self._over(rank, now_s)
        self._progress(event.step)  # after that: the failure with which a step was saved is none of a crash loop
        if killed:
            return []  # it has said so before it ends
        self.entry = max(self.entry, event.entered + 1)
        if event.entered < 0:
            one.trained = False  # though the launcher before this one had kept that all enter `main`
        one.entered = event.entered >= 0
        has_left = one.place is Place.IN_MAIN
        self._ranks.note(rank, begun=False)
        self._ranks.put(rank, Place.WAITING)
        one.failed_starts = 0
        is_first = not self._ranks.known
        self._ranks.know(rank)
        if (why := self._crash_loop()) is not None:
            return self._stop(why)
        if is_first and (stop := self._without(*self._ranks.world)):
            return stop
        if self._ranks.are_all(Place.WAITING):
            effects += self._replace_survivors(now_s) or self._enter()
        elif has_left and not self._leaving:
            self._leaving = True
            self._ranks.others_leave(now_s)
        elif not has_left and self._ranks.are_any(Place.IN_MAIN):
            effects += self._recall(now_s)
        elif self._ranks.known == 1:  # the first one, for all others
            for _, other in self._ranks.at(Place.STARTING):
                if other.told_s is None:
                    self._ranks.due(other, None, told_s=now_s + FIRST_NOTICE_S)
        return effects

    def _compare(self, rank: int, files: Mapping[str, str], now_s: float) -> list[Effect]:
        changed, released = self._versions.compare(rank, files)
        if changed is not None:
            return self._stop(
                f"rank {rank} was started with another version of {changed} than the other ranks have: the file has "
                "been changed since they began"
            )
        return [effect for one in released for effect in self.handle(self._held.pop(one), now_s)]

    def _is_inside(self, rank: int, *, begun: bool, loops: int) -> None:
        self._ranks.put(rank, Place.IN_MAIN)
        self._ranks.note(rank, begun=begun)
        one = self._ranks[rank]
        one.trained, one.loops = loops > 0, loops
        one.again = True
        self._ranks.know(rank)

    def _inside(self, event: Inside, now_s: float) -> list[Effect]:
        if self._ranks[event.rank].place is Place.KILLED:
            return []
        self._is_inside(event.rank, begun=event.begun, loops=event.loops)
        if not self._healing:
            self.entry = max(self.entry, event.generation)
            return []
        if self._ranks.are_all(Place.IN_MAIN):  # what the launcher before this one had kept was lost
            self._healing = False
            self.entry = max(self.entry, event.generation)
            return self._keep()
        self.entry = max(self.entry, event.generation + 1)
        return self._recall(now_s)

    def _recall(self, now_s: float) -> list[Effect]:
        """Some ranks are in `main`, let in by another launcher, and others are not: once all have been heard of.

        Whoever has not been may be in `main` as well, and training.
        """
        inside = [*self._ranks.at(Place.IN_MAIN)]
        if not self._ranks.all_known() or all(one.due_s is not None for _, one in inside):
            return []
        if not all(one.begun for _, one in inside):
            return [self._abandon(rank, now_s) for rank, _ in inside]
        for _, one in inside:
            if one.due_s is None:
                self._ranks.saves(one, now_s)
        return []

    def _abandon(self, rank: int, now_s: float) -> Effect:
        self._ranks.leaves(self._ranks[rank], now_s)
        return Abandon(rank)

    def _progress(self, step: int) -> None:
        """A checkpoint of this step exists, of whatever kind: no crash loop."""
        if step > self._step:
            self._step = step
            self._crashes.progressed()

    def _enter(self) -> list[Effect]:
        """All ranks wait."""
        return self._keep() if self.keeps else self._let_in()

    def _keep(self) -> list[Effect]:
        self._keep_due_s = None
        return [Keep(self.entry, self._step)] if self.keeps and self._is_to_keep else []

    def _kept(self, event: Kept, now_s: float) -> list[Effect]:
        if event.entry != self.entry or not self._is_to_keep:
            return []  # a rank has ended meanwhile: it is kept once more when all wait again
        if event.failure:
            self._keep_due_s = now_s + KEEP_AGAIN_S
            return []
        return self._let_in() if self._ranks.are_all(Place.WAITING) else []

    @property
    def _is_to_keep(self) -> bool:
        return self._ranks.are_all(Place.WAITING) or self._ranks.are_all(Place.IN_MAIN)

    def _keep_again(self, now_s: float) -> list[Effect]:
        if self._keep_due_s is None or now_s < self._keep_due_s:
            return []
        return self._keep()

    def _let_in(self) -> list[Effect]:
        self._healing = self._leaving = False
        self._failed_loop = 0
        for rank in self.world:
            self._ranks.put(rank, Place.IN_MAIN)
            one = self._ranks[rank]
            one.loops, one.again = 0, one.entered
        self._ranks.look()
        return [Enter(self.entry, step=self._step)]

    def _replace_survivors(self, now_s: float) -> list[Effect]:
        """Where they are of no use; all ranks wait.

        Without a checkpoint only a new process has the weights of the beginning, wherever the script makes them.
        """
        effects = []
        for rank, one in self._ranks.at(Place.WAITING):
            if one.trained and not self._step:
                effects.append(self._kill(rank, UNSAVED, now_s))
            elif one.entered and self._crashes.renews:
                effects.append(self._kill(rank, AGAIN_AND_AGAIN, now_s))
        return effects

    def _ended(self, event: Ended, now_s: float) -> list[Effect]:
        rank, code = event.rank, event.code
        one = self._ranks[rank]
        if event.lasting and code and one.place is not Place.KILLED:
            self.stopped = True
            return [Stop(f"rank {rank}: {event.raised}", lasting=True)]
        if code == 0 and not (self._healing and one.known):
            self._ranks.put(rank, Place.DONE)
            return self._stop(None) if self._ranks.are_all(Place.DONE) else self._without(rank)
        if not one.known:
            return self._stop(f"rank {rank} ended before it called lastwords.run(main): {event.words}")
        if self._is_over(one):
            return self._stop(f"a process has ended after its training loop was over: rank {rank}: {event.words}")
        effects: list[Effect] = []
        if one.place is not Place.KILLED:
            self._failed_loop = max(self._failed_loop, one.loops)
            effects += [] if self._healing else self._over(rank, now_s)
            self._crashes.ended(event, was_in_main=one.place is Place.IN_MAIN, again=one.again)
        one.failed_starts += one.place is Place.STARTING
        if one.failed_starts >= len(START_PAUSES_S):
            return self._stop(f"the process that replaces rank {rank} ended before it entered main(): {event.words}")
        effects += self._start(rank, now_s)
        why = self._crash_loop()
        return effects if why is None else self._stop(why)

    def _without(self, *ranks: int) -> list[Effect]:
        """One of these that has ended well without `lastwords.run` is none that the others could enter `main` with."""
        done = (rank for rank in ranks if self._ranks[rank].place is Place.DONE and not self._ranks[rank].known)
        gone = next(done, None) if self._ranks.known else None
        return (
            [] if gone is None else self._stop(f"rank {gone} ended before it called lastwords.run(main): exit code 0")
        )

    def _crash_loop(self) -> str | None:
        """Why it is of no use to go on. Nobody knows as long as a rank may come out of `main` with one more step."""
        if self._ranks.are_any(Place.IN_MAIN) or self._ranks.are_any(Place.KILLED):
            return None
        return self._crashes.judge(self.entry, self._step)

    def _is_over(self, one: Rank) -> bool:
        """Its loop has come to its end, or that of another rank, which happens when all have."""
        return one.over or any(other.over and other.loops >= one.loops > 0 for other in self._ranks.ranks.values())

    def _loop_over(self, rank: int) -> list[Effect]:
        """Nobody looks after this loop any more. All ranks have come to its end, those that have died since as well."""
        self._ranks.note(rank, begun=False, over=True)
        one = self._ranks[rank]
        if one.place is Place.IN_MAIN and one.loops >= self._failed_loop > 0:
            return self._stop(f"a process has ended after its training loop was over: {self._crashes.last}")
        return []

    def _start(self, rank: int, now_s: float) -> list[Effect]:
        one = self._ranks.renew(rank)
        if pause_s := START_PAUSES_S[one.failed_starts]:
            one.start_s = now_s + pause_s
            self._ranks.awake_at(one.start_s)
            return []
        return [self._start_now(rank, now_s)]

    def _start_now(self, rank: int, now_s: float) -> Effect:
        one = self._ranks[rank]
        one.start_s = None
        self._ranks.imports(one, now_s, self.start_s)
        return Start(rank)

    def _imported(self, rank: int, now_s: float) -> list[Effect]:
        one = self._ranks[rank]
        if one.place is Place.STARTING:
            one.spare = True
            self._ranks.answers(one, now_s)
        return []

    def _kill(self, rank: int, why: str, now_s: float) -> Effect:
        self._ranks[rank].failed_starts += self._ranks[rank].place is Place.STARTING
        self._ranks.put(rank, Place.KILLED)
        self._ranks.due(self._ranks[rank], now_s + LEAVE_S)
        return Kill(rank, why)

    def _over(self, rank: int, now_s: float) -> list[Effect]:
        """This entry is over, and `rank` was the first to show it."""
        begun = self._ranks.all_begun()
        self._crashes.over(begun=begun)
        self._healing = True
        self.entry += 1
        effects: list[Effect] = []
        for other, one in self._ranks.at(Place.DONE):
            self._crashes.ended(Ended(other, 0), was_in_main=True, again=one.again)
            effects += self._start(other, now_s)
        for other, one in self._ranks.at(Place.IN_MAIN):
            if other == rank:
                continue
            if begun:
                self._ranks.saves(one, now_s)
            else:
                effects.append(self._abandon(other, now_s))
        return effects

    def _tick(self, now_s: float) -> list[Effect]:
        if self.deadline_s is None or now_s < self.deadline_s:
            return []
        effects = self._keep_again(now_s)
        named = 0
        for rank, one in self._ranks.ranks.items():
            if one.start_s is not None and now_s >= one.start_s:
                effects.append(self._start_now(rank, now_s))
            elif one.due_s is not None and now_s >= one.due_s:
                if one.runs_due_s is not None:
                    effects += self._look_again(rank, now_s)
                elif one.place is not Place.KILLED:
                    effects.append(self._kill(rank, f"it {one.missing} in time", now_s))
                elif self.start_s is not None:
                    return self._stop(f"the process of rank {rank} was killed {LEAVE_S:g} s ago and has not ended")
                else:  # it may be stopped, on a host of its own
                    self._ranks.due(one, None)
                    effects.append(Awaited(rank, "was told to end, and has not", None))
                continue
            if one.look_s is not None and now_s >= one.look_s:
                one.look_s = now_s + START_NOTICE_S
                effects.append(Look(rank))
            if one.told_s is not None and now_s >= one.told_s:
                one.told_s = None
                named += 1
                if named <= NAMED_RANKS_MAX:
                    effects.append(Awaited(rank, one.missing, None if one.due_s is None else one.due_s - now_s))
        self._ranks.look()
        return effects

    def _stopped(self, rank: int, now_s: float) -> list[Effect]:
        one = self._ranks[rank]
        if one.asked:
            return [self._kill(rank, f"it {one.missing} in time", now_s)]
        self._ranks.is_stopped(one, now_s)
        return []

    def _look_again(self, rank: int, now_s: float) -> list[Effect]:
        """Whoever was stopped may have gone on, and write a checkpoint: then it has its full time."""
        one = self._ranks[rank]
        if one.asked:
            self._ranks.due(one, one.runs_due_s, look_s=now_s + START_NOTICE_S)
            return []
        one.asked, one.due_s = True, now_s + LOOK_ANSWER_S
        return [Look(rank)]

    def _stop(self, failure: str | None) -> list[Effect]:
        self.stopped = True
        return [Stop(failure)]
