"""The launcher's decisions in all schedules of small jobs, with deaths at every point."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

import pytest

from lastwords.launcher.core import LauncherCore
from lastwords.launcher.crash_loop import CrashLoop
from lastwords.launcher.events import (
    Abandon,
    Begun,
    Effect,
    Ended,
    Enter,
    Event,
    Imported,
    Kill,
    Look,
    Over,
    Start,
    Stop,
    Stopped,
    Tick,
    Waiting,
)
from lastwords.launcher.roster import LOOK_ANSWER_S, SPARE_S, Place, Rank

KILLED = -9
T = TypeVar("T")

ALIVE = ("starting", "waiting", "main")


@dataclass
class Process:
    """Of one rank: "starting", "waiting", "main", "gone", or "done"."""

    state: str = "starting"
    known: bool = False
    entries: int = 0
    generation: int = -1
    goes_on_at: int = 0
    """The step that it was told when it entered `main`."""
    holds: int = 0
    """The step that its loop has begun after."""
    begun: bool = False
    trained: bool = False
    """A loop has begun in it, so what is outside of `main` may have changed."""
    over: bool = False
    """It has said that its loop is over."""
    told: bool = False
    """To leave main: by the controller once all had begun, or by the launcher."""
    condemned: bool = False
    """To be killed; what it does before arrives as well."""
    unseen: int | None = None
    """Its exit code, of which the launcher has not heard."""
    refused: bool = False
    """By lastwords, as each process in its place would be."""
    started_s: float = 0.0
    stopped: bool = False
    """By a signal, and for ever, before it waits."""


@dataclass
class World:
    """A core and the processes that it directs.

    faulty: `main` raises wherever a process enters it once more. careless: it may begin anew although a step is saved.
    spares: how many replacements are spares, the first ones. stops: how many replacements may be stopped. quits: a
    death may be an end with 0; others that wait for it in `main` get an error in the end.
    """

    core: LauncherCore
    deaths_left: int
    faulty: bool
    processes: list[Process]
    careless: bool = False
    spares: int = 0
    stops: int = 0
    quits: bool = False
    asleep: tuple[int, ...] = ()
    """Generations of processes that others have replaced though they had not ended: stopped, they may wake up."""
    newest: int = -1
    """Generation that was entered last; its store has this name."""
    step: int = 0
    """Newest one that is saved; 0: none."""
    released: bool = False
    """All loops have come to their end."""
    said: bool = False
    """By a rank: those that died before they could are the only ones who knew else."""
    may_stop: bool = False
    late: int = 0
    """How often a deadline may pass although something else could have happened."""
    now_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def key(self) -> tuple[object, ...]:
        core = self.core
        counts = core.entry, core._step, core._failed_loop, self.deaths_left
        flags = (
            core._healing,
            core.stopped,
            core._leaving,
            repr(core._crashes),
            self.released,
            self.said,
            self.step,
            self.late,
            self.spares,
            self.stops,
        )
        ranks = map(values, (*core._ranks.ranks.values(), *self.processes))
        return *ranks, counts, flags, self.asleep, self.newest

    def handle(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, self.now_s)
        for effect in [*effects]:
            match effect:
                case Start(rank):
                    if (before := self.processes[rank]).state in ALIVE:
                        self.asleep = (*self.asleep, before.generation)
                    self.processes[rank] = Process(known=before.known, started_s=self.now_s)
                    if self.spares:
                        self.spares -= 1
                        effects += self.handle(Imported(rank))
                case Look(rank) if self.processes[rank].stopped:
                    effects += self.handle(Stopped(rank))
                case Abandon(rank):
                    self.processes[rank].told = True
                case Kill(rank):
                    one = self.processes[rank]
                    one.condemned = True
                    if one.stopped and self.now_s - one.started_s > SPARE_S + LOOK_ANSWER_S:
                        self.wrong.append(f"rank {rank} is stopped, and was waited for as if it imported something")
                case Enter(generation, step=step):
                    self.enter(generation, step)
                case Stop(failure) if failure is not None and not self.may_stop:
                    self.wrong.append(f"the job is given up: {failure}")
        return effects

    def enter(self, generation: int, step: int) -> None:
        if generation <= self.newest:
            self.wrong.append(f"I8: generation {generation} meets in a store where ranks have met before")
        self.newest = generation
        if self.said:
            self.wrong.append("a job that has ended trains again")
        self.released = False
        for rank, one in enumerate(self.processes):
            if one.state == "main":
                self.wrong.append(f"I8: rank {rank} is in generation {one.generation} when {generation} begins")
            if one.state != "waiting":
                continue
            if one.condemned:
                self.wrong.append(f"rank {rank} enters main, and is to be killed")
            if one.trained and not self.core._step:
                self.wrong.append(f"rank {rank} begins anew in a process that has trained")
            one.state, one.generation, one.entries = "main", generation, one.entries + 1
            one.begun = one.told = one.over = False
            one.goes_on_at = step if generation else 0

    def moves(self) -> Iterator[Callable[[World], object]]:
        all_in = all(one.state == "main" for one in self.processes)
        trains = all_in and all(one.begun and not one.told for one in self.processes)
        for rank, one in enumerate(self.processes):
            if self.deaths_left and one.state in ALIVE:
                yield lambda world, rank=rank: world.kill(rank)
                if self.quits:
                    yield lambda world, rank=rank: world.kill(rank, code=0)
                if trains and not self.released and not self.step:
                    yield lambda world, rank=rank: world.kill(rank, saves=True)
            if one.condemned and one.state in ALIVE:
                yield lambda world, rank=rank: world.die(rank, KILLED)
            if one.unseen is not None:
                yield lambda world, rank=rank: world.see(rank)
            elif one.state == "starting" and not one.stopped:
                yield lambda world, rank=rank: world.arrive(rank)
                if self.stops and one.known:
                    yield lambda world, rank=rank: world.stop(rank)
            elif one.state == "main":
                yield from self.moves_in_main(rank, one, all_in)
        if trains and not self.released:
            yield lambda world: world.release()
        if trains and self.asleep:
            yield lambda world: world.wake_up()
        if self.late and any(one.state == "main" and one.told for one in self.processes):
            yield lambda world: world.be_late()

    def moves_in_main(self, rank: int, one: Process, all_in: bool) -> Iterator[Callable[[World], object]]:
        fails = self.faulty and one.entries > 1
        if one.told and (one.over or not self.released):
            yield lambda world: world.arrive(rank)
        if self.released and not one.over:
            yield lambda world: world.end_loop(rank)
        if self.released and one.over:
            yield lambda world: world.finish(rank)
        left_alone = any(other.state == "gone" and other.unseen is None for other in self.processes)
        if (fails or (self.quits and left_alone)) and not one.told:
            yield lambda world: world.die(rank, 1)
        if all_in and not one.begun and not fails:
            yield lambda world: world.begin(rank, world.step)
            if self.careless and self.step:
                yield lambda world: world.begin(rank, 0)

    def kill(self, rank: int, saves: bool = False, code: int = KILLED) -> None:
        one = self.processes[rank]
        self.deaths_left -= 1
        self.may_stop |= self.released or not one.known
        self.step += saves
        self.die(rank, code)

    def die(self, rank: int, code: int) -> None:
        one = self.processes[rank]
        trained = all(other.state == "main" and other.begun for other in self.processes) and not self.released
        one.state, one.unseen = "gone", code
        for other in self.processes:
            other.told |= trained and other.state == "main"

    def see(self, rank: int) -> None:
        one = self.processes[rank]
        code, one.unseen = one.unseen, None
        assert code is not None
        effects = self.handle(
            Ended(rank, code, raised="refused" if one.refused else "once only" * (code == 1), lasting=one.refused)
        )
        if one.refused and not one.condemned and effects != [Stop(f"rank {rank}: refused", lasting=True)]:
            self.wrong.append(f"refused: rank {rank}, and the job goes on")

    def arrive(self, rank: int) -> None:
        one = self.processes[rank]
        left = one.state == "main"
        one.state, one.begun, one.told, one.known = "waiting", False, False, True
        self.handle(Waiting(rank, self.step if left else 0, entered=one.generation))

    def begin(self, rank: int, step: int) -> None:
        """Its loop, after this step; a loop that does not go on where it has to raises (`stay.Stay.begun`)."""
        one = self.processes[rank]
        if step < one.goes_on_at:
            one.refused = True
            return self.die(rank, 2)
        one.begun = one.trained = True
        one.holds = step
        self.handle(Begun(rank, step))
        if all(other.begun for other in self.processes) and len({other.holds for other in self.processes}) > 1:
            self.wrong.append(f"I8: ranks train from different steps: {[other.holds for other in self.processes]}")

    def wake_up(self) -> None:
        self.wrong.append(f"I8: a process of generation {self.asleep[0]} goes on when {self.newest} trains")

    def stop(self, rank: int) -> None:
        self.stops -= 1
        self.processes[rank].stopped = True

    def release(self) -> None:
        self.released = True

    def end_loop(self, rank: int) -> None:
        self.processes[rank].over = self.said = True
        self.handle(Over(rank))

    def finish(self, rank: int) -> None:
        self.processes[rank].state, self.processes[rank].unseen = "done", 0

    def be_late(self) -> None:
        self.late -= 1
        self.wait()

    def wait(self) -> bool:
        """Until something is due that changes anything; False if nothing ever is."""
        while (due_s := self.core.deadline_s) is not None:
            self.now_s = due_s
            if {type(effect) for effect in self.handle(Tick())} & {Start, Kill, Stop}:
                return True
        return False


def explore(
    ranks: int,
    deaths: int,
    make: Callable[[tuple[int, ...]], LauncherCore],
    faulty: bool = False,
    late: int = 0,
    careless: bool = False,
    spares: int = 0,
    stops: int = 0,
    quits: bool = False,
) -> tuple[int, list[str]]:
    """Distinct states, and what was wrong in them. With two disturbances a job may be given up."""
    processes = [Process() for _ in range(ranks)]
    may_stop = careless or deaths + faulty + late > 2
    core = make(tuple(range(ranks)))
    first = World(core, deaths, faulty, processes, careless, spares, stops, quits, may_stop=may_stop, late=late)
    seen, queue, wrong = {first.key()}, [first], []
    while queue and len(wrong) < 20:
        world = queue.pop()
        if world.core.stopped:
            continue
        moves = list(world.moves())
        if not moves:
            if not world.wait():
                wrong.append(f"stuck: {world.processes}, {[one.place for one in world.core._ranks.ranks.values()]}")
            wrong += world.wrong
            moves = [lambda world: None]
        for move in moves:
            after = copied(world)
            move(after)
            wrong += after.wrong
            if after.key() not in seen:
                seen.add(after.key())
                queue.append(after)
    return len(seen), wrong


def copied(world: World) -> World:
    """`copy.deepcopy` takes twenty times as long."""
    after = twin(world)
    after.core, after.processes, after.wrong = core_copied(world.core), [twin(one) for one in world.processes], []
    return after


def core_copied(core: LauncherCore) -> LauncherCore:
    """What no event of these explorations changes is shared: the versions of the user's code."""
    core, ranks, crashes = twin(core), twin(core._ranks), twin(core._crashes)
    ranks.ranks = {rank: twin(one) for rank, one in ranks.ranks.items()}
    ranks._places = ranks._places.copy()
    crashes.repeated = {rank: twin(one) for rank, one in crashes.repeated.items()}
    crashes.raised, crashes.ended_since = crashes.raised.copy(), crashes.ended_since.copy()
    core._ranks, core._crashes = ranks, crashes
    return core


def twin(one: T) -> T:
    """A dataclass with the same values: `copy.copy`, without asking the object how that is done."""
    other = object.__new__(type(one))
    for name in names_of(type(one)):
        setattr(other, name, getattr(one, name))
    return other


def values(one: object) -> tuple[object, ...]:
    """Of a dataclass; its `repr` takes ten times as long."""
    return tuple([getattr(one, name) for name in names_of(type(one))])


@functools.cache
def names_of(kind: type) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


@pytest.mark.parametrize(
    ("ranks", "deaths", "faulty", "late"),
    [
        (2, 2, False, 0),
        (3, 1, False, 0),
        (3, 1, True, 0),
        (2, 1, True, 1),
        (3, 1, False, 1),
        pytest.param(3, 2, False, 1, marks=pytest.mark.thorough),
    ],
)
def test_in_every_schedule_all_ranks_enter_together_or_the_job_stops(
    ranks: int, deaths: int, faulty: bool, late: int
) -> None:
    states, wrong = explore(ranks, deaths, LauncherCore, faulty, late)
    print(f"{ranks} ranks, {deaths} deaths: {states} states")
    assert wrong == []


def test_in_every_schedule_a_process_that_ends_with_0_is_replaced_or_the_job_stops() -> None:
    states, wrong = explore(2, 2, LauncherCore, quits=True)
    print(f"2 ranks, 2 deaths, perhaps with 0: {states} states")
    assert wrong == []


@pytest.mark.parametrize("spares", [0, 1])
def test_in_every_schedule_a_replacement_that_is_stopped_is_replaced_soon(spares: int) -> None:
    states, wrong = explore(2, 2, LauncherCore, spares=spares, stops=1)
    print(f"2 ranks, 2 deaths, {spares} spares, 1 stop: {states} states")
    assert wrong == []


class Hasty(LauncherCore):
    """Enters as soon as somebody waits while nobody starts."""

    def _waiting(self, event: Waiting, now_s: float) -> list[Effect]:
        effects = super()._waiting(event, now_s)
        if Place.STARTING not in {one.place for one in self._ranks.ranks.values()} and not effects and self._healing:
            return self._enter()
        return effects


class Forgetful(LauncherCore):
    """Starts nobody in the place of the dead."""

    def _ended(self, event: Ended, now_s: float) -> list[Effect]:
        return [effect for effect in super()._ended(event, now_s) if not isinstance(effect, Start)]


class Deaf(LauncherCore):
    """Tells nobody to leave a generation that no controller looks after, and never loses patience."""

    def _over(self, rank: int, now_s: float) -> list[Effect]:
        return [effect for effect in super()._over(rank, now_s) if not isinstance(effect, Abandon)]

    def _tick(self, now_s: float) -> list[Effect]:
        self._ranks.earliest_s = None
        return []


class Trusting(LauncherCore):
    """Lets those that have trained go on without a checkpoint."""

    def _replace_survivors(self, now_s: float) -> list[Effect]:
        return []


class Lenient(LauncherCore):
    """Believes those that are to be killed."""

    def _kill(self, rank: int, why: str, now_s: float) -> Effect:
        place = self.place(rank)
        effect = super()._kill(rank, why, now_s)
        self._ranks.put(rank, place)
        return effect


class Untiring(LauncherCore):
    """Goes on with healing where the loops have come to their end."""

    def _is_over(self, one: Rank) -> bool:
        return one.over

    def _loop_over(self, rank: int) -> list[Effect]:
        self._ranks.note(rank, begun=False, over=True)
        return []


class Unshaken(CrashLoop):
    @property
    def renews(self) -> bool:
        return False


class Conservative(LauncherCore):
    """Keeps the processes whose `main` fails whenever they enter it again."""

    def __post_init__(self) -> None:
        LauncherCore.__post_init__(self)
        self._crashes = Unshaken()


def test_in_every_schedule_ranks_that_train_hold_the_same_step_also_where_main_may_begin_anew() -> None:
    states, wrong = explore(3, 1, LauncherCore, careless=True)
    print(f"3 ranks, 1 death, main may begin anew: {states} states")
    assert wrong == []


class Unordered(LauncherCore):
    """Does not say where the loops go on."""

    def _enter(self) -> list[Effect]:
        return [Enter(effect.generation) for effect in super()._enter() if isinstance(effect, Enter)]


class Repeating(LauncherCore):
    """Lets all meet where those of the first generation have met."""

    def _enter(self) -> list[Effect]:
        return [Enter(0, step=effect.step) for effect in super()._enter() if isinstance(effect, Enter)]


class Impatient(LauncherCore):
    """Starts another process before the one that it kills has ended."""

    def _tick(self, now_s: float) -> list[Effect]:
        effects = super()._tick(now_s)
        return effects + [more for one in effects if isinstance(one, Kill) for more in self._start(one.rank, now_s)]


class Blind(LauncherCore):
    """Looks at nobody, and takes a spare for any process."""

    def _stopped(self, rank: int, now_s: float) -> list[Effect]:
        return []

    def _imported(self, rank: int, now_s: float) -> list[Effect]:
        return []


@pytest.mark.parametrize("spares", [0, 1])
def test_a_replacement_that_is_stopped_and_waited_for_is_found(spares: int) -> None:
    assert explore(2, 1, Blind, spares=spares, stops=1)[1]


@pytest.mark.parametrize("broken", [Hasty, Repeating])
def test_a_generation_that_begins_too_early_or_in_an_old_store_is_found(broken: type[LauncherCore]) -> None:
    assert violates_i8(explore(3, 1, broken)[1])


def test_a_rank_that_holds_another_step_is_found_where_nothing_says_which() -> None:
    assert violates_i8(explore(3, 1, Unordered, careless=True)[1])


def test_a_stopped_process_that_wakes_up_in_a_later_generation_is_found() -> None:
    assert violates_i8(explore(2, 1, Impatient, late=1)[1])


class Stubborn(LauncherCore):
    """Tries once more what can never succeed."""

    def _ended(self, event: Ended, now_s: float) -> list[Effect]:
        return super()._ended(replace(event, lasting=False), now_s)


def test_a_job_that_goes_on_after_a_refusal_is_found() -> None:
    assert any(one.startswith("refused: ") for one in explore(2, 1, Stubborn, careless=True)[1])


def violates_i8(wrong: list[str]) -> bool:
    return any(one.startswith("I8: ") for one in wrong)


@pytest.mark.parametrize("broken", [Hasty, Forgetful, Deaf, Trusting, Untiring])
def test_a_broken_rule_is_found(broken: type[LauncherCore]) -> None:
    assert explore(3, 1, broken)[1]


def test_a_broken_rule_is_found_where_main_fails_or_a_deadline_passes() -> None:
    assert explore(2, 1, Conservative, faulty=True)[1]
    assert explore(2, 1, Lenient, late=1)[1]
