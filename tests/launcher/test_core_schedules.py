"""The launcher's decisions in all schedules of small jobs, with deaths at every point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from lastwords.core_events import Tick
from lastwords.launcher.core import LEAVE_NOTICE_S, LEAVE_S, REPEATS_MAX, LauncherCore, Rank, RankPlace
from lastwords.launcher.events import (
    Begun,
    Effect,
    End,
    Ended,
    Enter,
    Event,
    Guarded,
    Kill,
    Leaving,
    Look,
    Over,
    Ready,
    Stop,
    Stopped,
)
from tests.launcher.copies import core_copied, twin, values

KILLED, ASKED, SAVED, REFUSED = -9, -15, 75, 2


@dataclass
class Process:
    """Of one rank, in one generation: "new", "registered", "guarded", "trains", "over" or "leaves", and "ended"."""

    state: str = "new"
    loop: int = 1
    """Of the script's loops in turn, the one that it is in, or comes to."""
    holds: int = 0
    """The step that its loop has begun after."""
    told: bool = False
    """To leave, by its controller."""
    raised: str = ""
    """Its own exception, with which it ends once it is told to leave."""
    asked: bool = False
    """To end, by a signal from the launcher."""
    condemned: bool = False
    """To be killed by the launcher; what it does before arrives as well."""
    stopped: bool = False
    """By a signal, and for ever."""
    code: int | None = None
    """With which it has ended."""
    unheard: tuple[Event, ...] = ()
    """What it has said, or its end, and the launcher has not heard yet."""

    @property
    def runs(self) -> bool:
        return self.code is None


@dataclass
class World:
    """A core and the processes that it directs.

    loops: of the script, in turn. resumes: the script does. careless: a loop may begin anew although a step is saved.
    quits: a death may be an end with 0. raises: or an exception of the script's own. faulty: rank 0 raises it whenever
    all train, and nothing else happens. stops: how many processes may be stopped. late: how often a deadline may pass
    although something else could have happened.
    """

    core: LauncherCore
    deaths_left: int
    processes: list[Process]
    loops: int = 1
    resumes: bool = True
    careless: bool = False
    quits: bool = False
    raises: bool = False
    faulty: bool = False
    stops: int = 0
    late: int = 0

    generation: int = -1
    serves: int = 0
    """The loop for which all have registered with a controller, until that is over; 0: none."""
    released: int = 0
    """The newest loop that has come to its end on all ranks."""
    over: int = 0
    """The newest loop of which a rank has said so."""
    begun: int = 0
    """The newest loop of which a rank has said that it begins."""
    trained: bool = False
    """All have begun to train, in this generation."""
    step: int = 0
    """Newest one that is saved; 0: none."""
    goes_on_at: int = 0
    """The step that all were told when this generation began."""
    may_stop: bool = False
    now_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def key(self) -> tuple[object, ...]:
        """All that changes, but for the time, which counts from now."""
        core = self.core
        known = (
            core.entry,
            tuple(sorted(core._saved.items())),
            core._ranks.guarded,
            core._ranks.begun,
            core._ranks.over,
            core.heals,
            core.stopped,
            core._leaving,
            core._guarded,
        )
        ranks = [(*values(one)[:-3], *self.from_now(one)) for one in core._ranks.ranks.values()]
        return *ranks, *map(values, self.processes), known, repr(core._crashes), self.deaths_left, values(self)[9:-2]

    def from_now(self, one: Rank) -> list[float | None]:
        return [None if at_s is None else at_s - self.now_s for at_s in (one.due_s, one.told_s, one.look_s)]

    def is_over(self) -> bool:
        """This generation, as everybody can see."""
        return any(one.told or one.code not in (None, 0) for one in self.processes)

    def are_all(self, *states: str, loop: int) -> bool:
        return all(one.runs and not one.told and one.state in states and one.loop == loop for one in self.processes)

    # ------------------------------------------------------------------ the launcher

    def handle(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, self.now_s)
        for effect in [*effects]:
            match effect:
                case Look(rank) if self.processes[rank].stopped and self.processes[rank].runs:
                    effects += self.handle(Stopped(rank))
                case End(rank):
                    self.processes[rank].asked = True
                case Kill(rank):
                    self.processes[rank].condemned = True
                case Enter(generation, step=step):
                    self.enter(generation, step)
                case Stop(None) if any(one.code != 0 for one in self.processes):
                    self.wrong.append("not all have ended well")
                case Stop(failure) if failure is not None and not self.may_stop:
                    self.wrong.append(f"the job is given up: {failure}")
        return effects

    def enter(self, generation: int, step: int) -> None:
        if generation <= self.generation:
            self.wrong.append(f"I8: generation {generation} meets in a store where ranks have met before")
        for rank, one in enumerate(self.processes):
            if self.generation >= 0 and (one.runs or one.unheard):
                self.wrong.append(f"I8: rank {rank} is in generation {self.generation} when {generation} begins")
        if self.over and self.over == self.begun:
            self.wrong.append("a job that has ended trains again")
        if self.trained and not self.resumes:
            self.wrong.append("a loop that does not resume begins again")
        self.generation, self.goes_on_at = generation, step
        self.serves = self.released = self.over = self.begun = 0
        self.trained = False
        self.processes = [Process() for _ in self.processes]

    def hear(self, rank: int) -> None:
        one = self.processes[rank]
        event, *rest = one.unheard
        one.unheard = tuple(rest)
        crashes = self.core._crashes
        before = rank in crashes.ended_since
        effects = self.handle(event)
        if isinstance(event, Ended) and (one.asked or one.condemned) and rank in crashes.ended_since and not before:
            self.wrong.append(f"rank {rank} was ended from here, and is taken for one that has failed")
        if isinstance(event, Ended) and event.lasting and not one.condemned and not self.core.stopped:
            self.wrong.append(f"refused: rank {rank}, and the job goes on with {effects}")

    def wait(self) -> bool:
        """Until something is due that changes anything; False if nothing ever is."""
        while (due_s := self.core.deadline_s) is not None:
            self.now_s = due_s
            if {type(effect) for effect in self.handle(Tick())} & {End, Enter, Kill, Stop}:
                return True
        return False

    def wait_in_vain(self) -> None:
        """Nothing else can happen."""
        since_s = self.now_s
        if not self.wait():
            failed = any(one.code not in (None, 0) for one in self.processes)
            if failed or not any(one.stopped for one in self.processes):
                self.wrong.append(f"stuck: {self.processes}, {[one.place for one in self.core._ranks.ranks.values()]}")
        elif self.now_s - since_s > LEAVE_S + LEAVE_NOTICE_S:
            self.wrong.append("all wait for one that does nothing, as if it saved")

    def be_late(self) -> None:
        self.late -= 1
        self.may_stop |= any(one.condemned for one in self.processes)
        self.wait()

    # ------------------------------------------------------------------ what may happen

    def moves(self) -> Iterator[Callable[[World], object]]:
        for rank, one in enumerate(self.processes):
            if one.unheard:
                yield lambda world, rank=rank: world.hear(rank)
            if not one.runs:
                continue
            if self.deaths_left and not one.condemned:
                yield from self.deaths(rank, one)
            if one.condemned:
                yield lambda world, rank=rank: world.end(rank, KILLED)
            if one.stopped:
                continue
            if self.stops:
                yield lambda world, rank=rank: world.stop(rank)
            if one.asked:
                yield lambda world, rank=rank: world.end(rank, ASKED)
            yield from self.progress(rank, one)
        if self.serves and self.are_all("trains", loop=self.serves):
            yield lambda world: world.release()
        if self.serves and not self.is_over() and any(one.stopped for one in self.processes):
            yield lambda world: world.tell_all()
        if self.late and self.is_over():
            yield lambda world: world.be_late()

    def deaths(self, rank: int, one: Process) -> Iterator[Callable[[World], object]]:
        train = bool(self.serves) and self.are_all("trains", loop=self.serves)
        if self.faulty:
            if rank == 0 and train:
                yield lambda world: world.fail(rank, 1, "once more", saves=True)
            return
        yield lambda world: world.fail(rank, KILLED)
        if train and not self.step:
            yield lambda world: world.fail(rank, KILLED, saves=True)
        if self.raises and not one.raised and one.state != "leaves":
            yield lambda world: world.fail(rank, 1, "once only")
        if self.quits:
            yield lambda world: world.fail(rank, 0)

    def progress(self, rank: int, one: Process) -> Iterator[Callable[[World], object]]:
        """What this rank does next, where nothing is in its way."""
        if one.state == "leaves":
            yield lambda world: world.end(rank, 1 if one.raised else SAVED, one.raised)
        elif one.told:
            yield lambda world: world.leave(rank)
        elif one.state == "new":
            yield lambda world: world.register(rank)
        elif one.state == "registered" and self.serves:
            yield lambda world: world.say(rank, "guarded", Guarded(rank))
        elif one.state == "guarded" and self.are_all("guarded", "trains", loop=one.loop):
            yield lambda world: world.begin(rank, world.step)
            if self.careless and self.step:
                yield lambda world: world.begin(rank, 0)
        elif one.state == "trains" and self.released == one.loop:
            yield lambda world: world.end_loop(rank)
        elif one.state == "over":
            yield lambda world: world.end(rank, 0)
        alone = not self.serves and any(other.stopped or other.code == 0 for other in self.processes)
        if one.state in ("new", "registered") and alone and not self.is_over():
            yield lambda world: world.fail(rank, 1, "nobody has come")

    # ------------------------------------------------------------------ what happens

    def say(self, rank: int, state: str, *events: Event) -> None:
        one = self.processes[rank]
        one.state, one.unheard = state, (*one.unheard, *events)

    def end(self, rank: int, code: int, raised: str = "", *, lasting: bool = False) -> None:
        self.say(rank, "ended", Ended(rank, code, raised=raised, lasting=lasting))
        self.processes[rank].code = code
        if self.serves:
            self.tell_all()

    def tell_all(self) -> None:
        """The controller's incident has ended."""
        self.may_stop |= self.over == self.begun > 0
        for one in self.processes:
            one.told |= one.runs

    def fail(self, rank: int, code: int, raised: str = "", *, saves: bool = False) -> None:
        """By itself. A rank that a controller looks after holds its exception until the incident has ended."""
        one = self.processes[rank]
        self.deaths_left -= self.deaths_left > 0
        if self.faulty:
            self.may_stop = True
            if not self.deaths_left:
                self.wrong.append("a crash loop without limit")
        outside = one.state in ("new", "registered")
        self.may_stop |= outside and (self.generation == 0 or one.loop > 1)
        self.may_stop |= self.released >= one.loop or (one.loop > 1 and one.state == "guarded")
        self.may_stop |= self.begun > 0 and not self.resumes
        self.step += saves
        if raised and self.serves == one.loop:
            one.raised = raised
            return self.tell_all()
        self.end(rank, code, raised)

    def leave(self, rank: int) -> None:
        self.say(rank, "leaves", Leaving(rank, self.step))

    def register(self, rank: int) -> None:
        one = self.processes[rank]
        one.state = "registered"
        if self.are_all("registered", loop=one.loop):
            self.serves = one.loop

    def begin(self, rank: int, step: int) -> None:
        """Its loop, after this step; one that does not go on where it has to is refused (`Run._open_loop`)."""
        one = self.processes[rank]
        if self.goes_on_at > step and one.loop == 1:
            self.may_stop = True
            one.raised = "refused"
            return self.end(rank, REFUSED, "refused", lasting=True)
        one.holds = step
        self.begun = one.loop
        self.say(rank, "trains", Begun(rank, step, lacks="" if self.resumes else "it"))
        if self.are_all("trains", loop=one.loop):
            self.trained = True
            if len({other.holds for other in self.processes}) > 1:
                self.wrong.append(f"I8: ranks train from different steps: {[other.holds for other in self.processes]}")

    def release(self) -> None:
        self.serves, self.released = 0, self.serves

    def end_loop(self, rank: int) -> None:
        one = self.processes[rank]
        self.over = one.loop
        is_last = one.loop == self.loops
        self.say(rank, "over" if is_last else "new", Over(rank))
        one.loop += not is_last

    def stop(self, rank: int) -> None:
        self.stops -= 1
        self.processes[rank].stopped = True


def explore(
    make: Callable[[tuple[int, ...]], LauncherCore], ranks: int, deaths: int, **how: int
) -> tuple[int, list[str]]:
    """Distinct states, and what was wrong in them."""
    first = World(make(tuple(range(ranks))), deaths, [Process() for _ in range(ranks)], **how)  # type: ignore[arg-type]
    for rank in range(ranks):
        first.handle(Ready(rank))
    seen, queue, wrong = {first.key()}, [first], [*first.wrong]
    while queue and len(wrong) < 20:
        world = queue.pop()
        if world.core.stopped:
            continue
        for move in [*world.moves()] or [World.wait_in_vain]:
            after = copied(world)
            move(after)
            wrong += after.wrong
            if after.key() not in seen:
                seen.add(after.key())
                queue.append(after)
    return len(seen), wrong


def copied(world: World) -> World:
    after = twin(world)
    after.core, after.processes, after.wrong = core_copied(world.core), [twin(one) for one in world.processes], []
    return after


@pytest.mark.parametrize(
    ("ranks", "deaths", "how"),
    [
        pytest.param(2, 3, {}, marks=pytest.mark.ci),
        pytest.param(3, 1, {}, marks=pytest.mark.ci),
        pytest.param(2, 2, {"raises": True}, marks=pytest.mark.ci),
        (2, 2, {"quits": True}),
        pytest.param(2, 2, {"stops": 1}, marks=pytest.mark.ci),
        pytest.param(2, 1, {"stops": 2}, marks=pytest.mark.ci),
        pytest.param(2, 1, {"stops": 1, "late": 2}, marks=pytest.mark.ci),
        pytest.param(2, 2, {"loops": 2}, marks=pytest.mark.ci),
        pytest.param(2, 1, {"loops": 2, "stops": 1}, marks=pytest.mark.ci),
        (2, 1, {"careless": True}),
        (2, 2, {"resumes": False}),
        (2, 2 * REPEATS_MAX, {"faulty": True}),
        pytest.param(3, 1, {"stops": 1}, marks=pytest.mark.thorough),
        pytest.param(3, 1, {"loops": 2}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_in_every_schedule_all_ranks_begin_together_or_the_job_stops(
    ranks: int, deaths: int, how: dict[str, int]
) -> None:
    states, wrong = explore(LauncherCore, ranks, deaths, **how)
    print(f"{ranks} ranks, {deaths} deaths, {how}: {states} states")
    assert wrong == []


class Hasty(LauncherCore):
    """Begins as soon as one can be started."""

    def _go_on(self, now_s: float) -> list[Effect]:
        return self._enter() if self.heals and self.entry else super()._go_on(now_s)


class Impatient(LauncherCore):
    """Takes a process that is to be killed for one that has ended."""

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        effects = super().handle(event, now_s)
        ended = [Ended(one.rank, KILLED) for one in effects if isinstance(one, Kill)]
        return effects + [more for one in ended for more in super(Impatient, self).handle(one, now_s)]


class Repeating(LauncherCore):
    """Lets all meet where those of the first generation have met."""

    def _enter(self) -> list[Effect]:
        return [replace(effect, generation=0) for effect in super()._enter() if isinstance(effect, Enter)]


class Sparing(LauncherCore):
    """Ends nobody that no controller looks after."""

    def _end_inside(self, rank: int, now_s: float) -> list[Effect]:
        if super()._end_inside(rank, now_s):
            self._ranks.due(self._ranks[rank], None)
        return []


class Literal(LauncherCore):
    """Takes only those for looked after that have said so."""

    def _end_inside(self, rank: int, now_s: float) -> list[Effect]:
        self._ranks.guarded = 0
        return super()._end_inside(rank, now_s)


class Untiring(LauncherCore):
    """Goes on with healing where the loops have come to their end."""

    def _go_on(self, now_s: float) -> list[Effect]:
        self._ranks.over = 0
        return super()._go_on(now_s)


class Blind(LauncherCore):
    """Looks at nobody."""

    def _stopped(self, rank: int, now_s: float) -> list[Effect]:
        return []


class Patient(LauncherCore):
    """Waits for everybody, for ever."""

    def _tick(self, now_s: float) -> list[Effect]:
        self._ranks.earliest_s = None
        return []


class Suspicious(LauncherCore):
    """Takes the end of a process that it has ended itself for a failure."""

    def _ended(self, event: Ended, now_s: float) -> list[Effect]:
        self._ranks[event.rank].told = self._ranks[event.rank].killed = False
        return super()._ended(event, now_s)


class Excusing(LauncherCore):
    """Takes an exception that a controller has told of for none."""

    def _ended(self, event: Ended, now_s: float) -> list[Effect]:
        return super()._ended(replace(event, raised="") if self._ranks[event.rank].left else event, now_s)


class Stubborn(LauncherCore):
    """Tries once more what can never succeed."""

    def _ended(self, event: Ended, now_s: float) -> list[Effect]:
        return super()._ended(replace(event, lasting=False), now_s)


class Trusting(LauncherCore):
    """Takes all loops for ones that resume."""

    def _begun(self, event: Begun) -> list[Effect]:
        return super()._begun(replace(event, lacks=""))


class Unordered(LauncherCore):
    """Does not say where the loops go on."""

    def _enter(self) -> list[Effect]:
        return [replace(effect, step=0) for effect in super()._enter() if isinstance(effect, Enter)]


class Forgetful(LauncherCore):
    """Begins without those that had come to their end."""

    def _over(self, rank: int, now_s: float) -> list[Effect]:
        done = [other for other, _ in self._ranks.at(RankPlace.DONE)]
        effects = super()._over(rank, now_s)
        for other in done:
            self._ranks.put(other, RankPlace.DONE)
        return effects


@pytest.mark.ci
@pytest.mark.parametrize(
    ("broken", "deaths", "how", "found"),
    [
        (Hasty, 1, {}, "I8: rank"),
        (Impatient, 1, {"stops": 1}, "I8: rank"),
        (Repeating, 1, {}, "I8: generation"),
        (Sparing, 2, {}, "stuck"),
        (Literal, 1, {"careless": True}, "I8: ranks train from different steps"),
        (Literal, 1, {"resumes": False}, "a loop that does not resume"),
        (Untiring, 1, {}, "a job that has ended trains again"),
        (Untiring, 1, {"loops": 2}, "a job that has ended trains again"),
        (Blind, 1, {"stops": 1}, "all wait"),
        (Patient, 1, {"stops": 1}, "stuck"),
        (Suspicious, 2, {}, "is taken for one that has failed"),
        (Suspicious, 1, {"stops": 1}, "is taken for one that has failed"),
        (Excusing, 2 * REPEATS_MAX, {"faulty": True}, "a crash loop without limit"),
        (Stubborn, 1, {"careless": True}, "refused"),
        (Trusting, 1, {"resumes": False}, "a loop that does not resume"),
        (Unordered, 1, {"careless": True}, "I8: ranks train from different steps"),
        (Forgetful, 1, {"quits": True}, "stuck"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_a_broken_rule_is_found(broken: type[LauncherCore], deaths: int, how: dict[str, int], found: str) -> None:
    wrong = explore(broken, 2, deaths, **how)[1]
    assert any(found in one for one in wrong), wrong
