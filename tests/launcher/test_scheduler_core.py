"""A cluster's core when its scheduler is killed and started again at every point: all schedules of small jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from lastwords.launcher.core import LauncherCore
from lastwords.launcher.events import (
    Abandon,
    Awaited,
    Begun,
    Effect,
    Ended,
    Enter,
    Inside,
    Keep,
    Kept,
    Kill,
    Over,
    Start,
    Stop,
    Tick,
    Waiting,
)
from lastwords.launcher.roster import END_S, KEEP_AGAIN_S, LEAVE_S, Place
from tests.launcher.test_core_schedules import core_copied, twin, values

KILLED = -9
Rule = Callable[[int], LauncherCore]


def new_core(ranks: int) -> LauncherCore:
    return LauncherCore(tuple(range(ranks)), start_s=None, keeps=True)


@dataclass
class World:
    """Processes that people start, and a scheduler that may be gone. A process: as in test_core."""

    make: Rule
    core: LauncherCore | None
    deaths_left: int
    schedulers_left: int
    losses_left: int
    """How often what a scheduler has kept is lost with it."""
    process: list[str]
    entered: list[int]
    begun: list[bool]
    told: list[bool]
    unseen: list[bool]
    """The process before this one, or this one, has ended, and this scheduler has not heard of it."""
    linked: list[bool]
    kept: int = -1
    to_keep: int | None = None
    """Asked for by this scheduler, and not answered."""
    disk_full_left: int | None = None
    """How often nothing can be kept, and anything may happen before that is known; None: it is kept at once."""
    somebody_died: bool = False
    wrong: list[str] = field(default_factory=list)

    @staticmethod
    def new(ranks: int, deaths: int, schedulers: int, losses: int, make: Rule, disk_full: int | None) -> World:
        no, process = [False] * ranks, ["starting"] * ranks
        return World(
            make, make(ranks), deaths, schedulers, losses, process, [-1] * ranks, [*no], [*no], [*no], [*no],
            disk_full_left=disk_full,
        )  # fmt: skip

    def key(self) -> tuple[object, ...]:
        core = self.core
        known = core and (
            (core._ranks.begun, core._ranks.known, core._ranks.earliest_s),
            (*map(values, core._ranks.ranks.values()),),
            core.entry,
            repr(core._crashes),
            core._healing,
            core._leaving,
            core._failed_loop,
            core.stopped,
            core._keep_due_s is None,
        )
        facts = map(tuple, (self.process, self.entered, self.begun, self.told, self.unseen, self.linked))
        left = self.deaths_left, self.schedulers_left, self.losses_left, self.disk_full_left
        return known, left, *facts, self.kept, self.to_keep

    def handle(self, event: Waiting | Inside | Begun | Ended | Tick, now_s: float = 0.0) -> None:
        if self.core is None:
            return
        for effect in self.core.handle(event, now_s):
            self.obey(effect)

    def obey(self, effect: Effect) -> None:
        match effect:
            case Abandon(rank):
                if self.linked[rank]:
                    if self.told[rank] and all(self.begun):
                        self.wrong.append(f"rank {rank} is told to leave while it saves")
                    self.told[rank] = True
            case Kill(rank):
                if not self.somebody_died:
                    self.wrong.append(f"rank {rank} is killed, though nobody had died")
                self.die(rank)
            case Keep(entry):
                self.to_keep = entry
                if self.disk_full_left is None:
                    self.keep()
            case Enter(entry):
                if self.kept != entry:
                    self.wrong.append(f"{entry} begins, and {self.kept} is kept")
                for rank, process in enumerate(self.process):
                    if process == "main":
                        self.wrong.append(f"rank {rank} is in {self.entered[rank]} when {entry} begins")
                    if self.entered[rank] >= entry:
                        self.wrong.append(f"rank {rank} was in {self.entered[rank]}, and {entry} begins")
                    self.process[rank], self.entered[rank] = "main", entry
                    self.begun[rank] = self.told[rank] = False
            case _:
                pass

    def trains(self) -> bool:
        return all(self.begun) and set(self.process) == {"main"}

    def die(self, rank: int) -> None:
        if self.process[rank] in ("gone", "done"):
            return
        protected = self.trains()
        self.somebody_died = True
        self.process[rank], self.unseen[rank], self.linked[rank] = "gone", True, False
        if protected:
            self.told = [process == "main" for process in self.process]

    # ------------------------------------------------------------------ what may happen

    def moves(self) -> Iterator[Callable[[World], None]]:
        if self.core is None:
            yield World.start_scheduler
            if self.losses_left and self.kept >= 0:
                yield World.lose_state
        elif self.schedulers_left:
            yield World.kill_scheduler
        if self.core is not None and self.to_keep is not None:
            yield World.keep
            if self.disk_full_left:
                yield World.fail_to_keep
            if self.schedulers_left:
                yield World.keep_and_kill_scheduler
        for rank, process in enumerate(self.process):
            if self.deaths_left and process in ("starting", "waiting", "main"):
                yield lambda world, rank=rank: world.kill(rank)
            if self.core is not None and self.unseen[rank]:
                yield lambda world, rank=rank: world.see(rank)
            if process == "gone":
                yield lambda world, rank=rank: world.start(rank)
            elif process == "starting" and self.core is not None:
                yield lambda world, rank=rank: world.arrive(rank)
            elif process in ("waiting", "main") and self.core is not None and not self.linked[rank]:
                yield lambda world, rank=rank: world.link(rank)
            elif process == "main" and self.told[rank]:
                yield lambda world, rank=rank: world.leave(rank)
            elif process == "main" and not self.begun[rank] and set(self.process) == {"main"}:
                yield lambda world, rank=rank: world.begin(rank)

    def kill_scheduler(self) -> None:
        self.core, self.to_keep, self.schedulers_left = None, None, self.schedulers_left - 1
        self.linked = [False] * len(self.linked)

    def keep(self) -> None:
        assert self.to_keep is not None
        self.kept, self.to_keep = self.to_keep, None
        self.handle(Kept(self.kept))

    def fail_to_keep(self) -> None:
        assert self.to_keep is not None
        assert self.disk_full_left is not None
        entry, self.to_keep, self.disk_full_left = self.to_keep, None, self.disk_full_left - 1
        self.handle(Kept(entry, "no space left"))

    def keep_and_kill_scheduler(self) -> None:
        assert self.to_keep is not None
        self.kept = self.to_keep
        self.kill_scheduler()

    def lose_state(self) -> None:
        self.kept, self.losses_left = -1, self.losses_left - 1

    def start_scheduler(self) -> None:
        self.core = self.make(len(self.process))
        if self.kept >= 0:
            self.core.take_over(self.kept, 0)
        self.unseen = [self.kept >= 0 and process in ("gone", "starting") for process in self.process]

    def kill(self, rank: int) -> None:
        self.deaths_left -= 1
        self.die(rank)

    def see(self, rank: int) -> None:
        assert self.core is not None
        self.unseen[rank] = False
        if self.core.place(rank) is not Place.STARTING:
            self.handle(Ended(rank, KILLED))

    def start(self, rank: int) -> None:
        self.process[rank], self.entered[rank] = "starting", -1

    def arrive(self, rank: int) -> None:
        """It registers: what became of the process before it is known then."""
        if self.unseen[rank]:
            self.see(rank)
        self.linked[rank] = True
        self.leave(rank)

    def leave(self, rank: int) -> None:
        self.process[rank], self.begun[rank], self.told[rank] = "waiting", False, False
        if self.linked[rank]:
            self.handle(Waiting(rank, entered=self.entered[rank]))

    def link(self, rank: int) -> None:
        """A process that was there before this scheduler repeats itself."""
        self.linked[rank], self.unseen[rank] = True, False
        if self.process[rank] == "main":
            self.handle(Inside(rank, self.entered[rank], self.begun[rank], int(self.begun[rank])))
        else:
            self.handle(Waiting(rank, entered=self.entered[rank]))

    def begin(self, rank: int) -> None:
        self.begun[rank] = True
        if self.linked[rank]:
            self.handle(Begun(rank))


def late(world: World) -> None:
    world.handle(Tick(), END_S * 2)


def copied(world: World) -> World:
    after = twin(world)
    after.core = world.core and core_copied(world.core)
    after.process, after.entered, after.begun = world.process.copy(), world.entered.copy(), world.begun.copy()
    after.told, after.unseen, after.linked = world.told.copy(), world.unseen.copy(), world.linked.copy()
    after.wrong = world.wrong.copy()
    return after


def explore(
    ranks: int, deaths: int, schedulers: int, losses: int, make: Rule, disk_full: int | None = None
) -> tuple[int, list[str]]:
    """Distinct states, and what was wrong in them."""
    first = World.new(ranks, deaths, schedulers, losses, make, disk_full)
    seen, queue, wrong = {first.key()}, [first], list[str]()
    while queue and len(wrong) < 20:
        world = queue.pop()
        moves = [*world.moves()]
        trains = world.trains() and all(world.linked)
        if world.core is not None and not world.core.stopped and (trains or not moves):
            after = copied(world)
            late(after)
            moves += [late] if after.key() != world.key() else []
            if not moves and not trains:
                wrong.append(f"stuck: {world.process}, {[one.place for one in world.core._ranks.ranks.values()]}")
        for move in moves:
            after = copied(world)
            move(after)
            wrong += after.wrong
            if after.key() not in seen:
                seen.add(after.key())
                queue.append(after)
    return len(seen), wrong


@pytest.mark.parametrize(
    ("ranks", "deaths", "schedulers", "losses"),
    [
        (2, 1, 1, 0),
        (2, 1, 1, 1),
        (2, 2, 1, 0),
        pytest.param(2, 2, 2, 1, marks=pytest.mark.thorough),
        pytest.param(3, 1, 1, 1, marks=pytest.mark.thorough),
    ],
)
def test_in_every_schedule_all_ranks_enter_together(ranks: int, deaths: int, schedulers: int, losses: int) -> None:
    states, wrong = explore(ranks, deaths, schedulers, losses, new_core)
    print(f"{ranks} ranks, {deaths} deaths, {schedulers} schedulers that die, {losses} states lost: {states} states")
    assert wrong == []


def test_in_every_schedule_in_which_the_disk_is_full_for_a_while_all_ranks_enter_together_in_what_is_kept() -> None:
    assert explore(2, 1, 1, 0, new_core, disk_full=2)[1] == []


def test_nobody_enters_what_could_not_be_kept_and_it_is_tried_again() -> None:
    core = new_core(2)
    assert core.handle(Waiting(0), 0.0) == []
    assert core.handle(Waiting(1), 0.0) == [Keep(0, 0)]
    assert core.handle(Kept(0, "no space left"), 0.0) == []
    assert core.deadline_s == KEEP_AGAIN_S
    assert core.handle(Tick(), KEEP_AGAIN_S) == [Keep(0, 0)]
    assert core.handle(Ended(1, KILLED), 2.0) == [Start(1)]
    assert core.handle(Kept(0), 2.0) == [], "rank 1 does not wait"
    assert core.handle(Waiting(1), 3.0) == [Keep(0, 0)]
    assert core.handle(Kept(0), 3.0) == [Enter(0)]
    assert core.handle(Kept(0), 3.0) == []


def test_that_another_entry_is_kept_lets_nobody_in_and_a_failure_that_is_of_no_use_is_not_repaired() -> None:
    core = new_core(2)
    for event in (Waiting(0), Waiting(1), Kept(0), Begun(0), Begun(1), Ended(0, KILLED), Waiting(1), Waiting(0)):
        effects = core.handle(event, 0.0)
    assert [type(one) for one in effects] == [Keep]
    assert core.entry == 1
    assert core.handle(Kept(0), 1.0) == [], "it was late"
    assert core.handle(Ended(1, KILLED), 1.0) == [Start(1)]
    due_s = core.deadline_s
    assert core.handle(Kept(1, "no space left"), 1.0) == []
    assert core.deadline_s == due_s
    (keep,) = core.handle(Waiting(1), 2.0)
    assert core.handle(Kept(1), 2.0) == [Enter(1)]
    assert isinstance(keep, Keep)


def test_it_is_not_tried_again_while_a_rank_does_not_wait() -> None:
    core = new_core(2)
    for event in (Waiting(0), Waiting(1), Kept(0, "no space left")):
        core.handle(event, 0.0)
    assert core.handle(Ended(1, KILLED), 0.0) == [Start(1)]
    assert core.handle(Tick(), KEEP_AGAIN_S) == []
    assert core.handle(Waiting(1), 2.0) == [Keep(0, 0)]


def test_what_ranks_have_said_to_a_scheduler_that_knew_nothing_is_kept_and_tried_again() -> None:
    core = new_core(2)
    assert core.handle(Inside(0, 5, True, 1), 0.0) == []
    (keep,) = core.handle(Inside(1, 5, True, 1), 0.0)
    assert isinstance(keep, Keep)
    assert keep.entry >= 5
    assert core.handle(Kept(keep.entry, "no space left"), 0.0) == []
    assert core.handle(Tick(), KEEP_AGAIN_S) == [keep]
    assert core.handle(Kept(keep.entry), KEEP_AGAIN_S) == []
    assert core.deadline_s is None


@pytest.mark.parametrize("loops", [0, 1])
def test_a_scheduler_after_the_one_that_knew_nothing_sees_the_job_come_to_its_end(loops: int) -> None:
    second, third, end = new_core(2), new_core(2), list[Effect]()
    said = [Over(0)] if loops else []
    kept = -1
    for event in (*(Inside(rank, 5, loops > 0, loops) for rank in range(2)), *said, Ended(0, 0)):
        for effect in second.handle(event, 0.0):
            kept = effect.entry if isinstance(effect, Keep) else kept
    if kept >= 0:  # as a scheduler begins
        third.take_over(kept, 0)
        end += third.handle(Ended(0, 0), 0.0)
    for event in (Inside(1, 5, loops > 0, loops), *([Over(1)] if loops else []), Ended(1, 0)):
        end += third.handle(event, 0.0)
    assert end == [Stop(None)]


class Hasty(LauncherCore):
    """Lets ranks in before that is kept."""

    def _enter(self) -> list[Effect]:
        return [*super()._enter(), *self._let_in()]


class Credulous(LauncherCore):
    """Takes what could not be kept for kept."""

    def _kept(self, event: Kept, now_s: float) -> list[Effect]:
        return super()._kept(Kept(event.entry), now_s)


class Resigned(LauncherCore):
    """Does not try it again."""

    def _keep_again(self, now_s: float) -> list[Effect]:
        return []


class Impatient(LauncherCore):
    """Takes ranks that it has not heard of for dead."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for rank in self.world:
            self._ranks.know(rank)


class Repeating(LauncherCore):
    """Lets ranks enter by an entry that they were in."""

    def _inside(self, event: Inside, now_s: float) -> list[Effect]:
        effects = super()._inside(event, now_s)
        self.entry = event.generation
        return effects


class Careless(LauncherCore):
    """Takes the loops of all ranks for not begun."""

    def take_over(self, entry: int, step: int) -> None:
        super().take_over(entry, step)
        for rank in self.world:
            self._ranks.note(rank, begun=False)


class Trusting(LauncherCore):
    """Leaves ranks alone that have not begun, though others wait."""

    def _inside(self, event: Inside, now_s: float) -> list[Effect]:
        super()._inside(event, now_s)
        return []

    def _tick(self, now_s: float) -> list[Effect]:
        return []


@pytest.mark.parametrize("broken", [Careless, Trusting, Impatient, Repeating, Hasty, Credulous, Resigned])
def test_a_broken_rule_is_found(broken: type[LauncherCore]) -> None:
    assert explore(2, 1, 1, 1, lambda ranks: broken(tuple(range(ranks)), start_s=None, keeps=True), disk_full=1)[1]


def test_a_rank_that_cannot_be_ended_is_waited_for_by_all_others() -> None:
    """It is stopped, on a host of its own."""
    core = new_core(2)
    for event in (Waiting(0), Waiting(1), Kept(0), Begun(0), Begun(1), Waiting(0, 7)):
        core.handle(event, 0.0)
    assert [type(effect) for effect in core.handle(Tick(), LEAVE_S)] == [Kill]
    assert [type(effect) for effect in core.handle(Tick(), 2 * LEAVE_S)] == [Awaited]
    assert core.handle(Tick(), 1e9) == []
    assert core.handle(Ended(1, KILLED), 1e9)[:1] == [Start(1)]


def test_two_loops_in_turn_are_told_apart_by_a_scheduler_that_comes_between() -> None:
    core = new_core(2)
    core.take_over(0, 0)
    for event in (Inside(0, 0, True, 1), Over(0), Inside(1, 0, True, 2)):
        core.handle(event, 0.0)
    assert Start(1) in core.handle(Ended(1, KILLED), 1.0), "its loop is another one"


def test_a_rank_that_people_start_is_waited_for_without_end() -> None:
    core = new_core(2)
    for event in (Waiting(0), Waiting(1), Kept(0), Begun(0), Begun(1)):
        core.handle(event, 0.0)
    assert core.handle(Ended(1, KILLED), 1.0)[:1] == [Start(1)]
    core.handle(Waiting(0, 7), 2.0)
    assert [effect for effect in core.handle(Tick(), 1e9) if isinstance(effect, Kill)] == []
    assert core.handle(Waiting(1), 1e9 + 1) == [Keep(1, 7)]
    assert core.handle(Kept(1), 1e9 + 1) == [Enter(1, step=7)]
