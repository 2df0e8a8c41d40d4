"""A cluster's core when its scheduler is killed and started again at every point: all schedules of small jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from lastwords.core_events import Tick
from lastwords.launcher.core import END_S, KEEP_AGAIN_S, KILLED_S, LEAVE_S, LauncherCore, RankPlace
from lastwords.launcher.events import (
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
    Over,
    Ready,
    Stop,
)
from lastwords.launcher.membership import _Standing
from lastwords.launcher.protocol import Done
from lastwords.processor.departure import EXIT_SAVED
from tests.launcher.copies import core_copied, twin, values

KILLED, TERMINATED = -9, -15
Rule = Callable[[int], LauncherCore]


def new_core(ranks: int) -> LauncherCore:
    return LauncherCore(tuple(range(ranks)), keeps=True)


@dataclass
class Worker:
    """A supervisor, and the process of its rank.

    state: "absent", "waits" (no process of the rank), "runs", or "ended" (well, which is kept, and it knows that).
    """

    state: str = "absent"
    stand: _Standing = field(default_factory=_Standing)
    told: str = ""
    """To end: "saves" by its controller, "ends" from here."""
    linked: bool = False
    known: bool = False
    """The scheduler takes it for linked."""
    admitted: bool = False
    """It is this process that has the name."""
    unseen: bool = False
    """The process that has the name has ended, and this scheduler has not heard of it."""

    @property
    def trains(self) -> bool:
        return self.state == "runs" and (Begun in self.stand.said or Guarded in self.stand.said)


@dataclass
class World:
    """Supervisors that people start, and a scheduler that may be gone.

    ends: ranks come to their end, "in time" after their loops or "at once", without any.
    """

    make: Rule
    core: LauncherCore | None
    workers: list[Worker]
    deaths_left: int
    schedulers_left: int
    losses_left: int
    """How often what a scheduler has kept is lost with it."""
    links_left: int
    """How many connections may be lost."""
    ends: str = ""
    kept: int = -1
    kept_ends: frozenset[int] = frozenset()
    """Ranks that have come to their end."""
    to_keep: int | None = None
    """Asked for by this scheduler, and not answered."""
    disk_full_left: int | None = None
    """How often nothing can be kept, and anything may happen before that is known; None: it is kept at once."""
    somebody_died: bool = False
    """In this generation."""
    released: bool = False
    """One has come to its end, so all others can."""
    may_stop: bool = False
    finished: bool = False
    wrong: list[str] = field(default_factory=list)

    def key(self) -> tuple[object, ...]:
        core = self.core
        known = core and (
            (core._ranks.guarded, core._ranks.begun, core._ranks.over, core._ranks.earliest_s),
            (*map(values, core._ranks.ranks.values()),),
            (
                core.entry,
                tuple(core._saved.items()),
                core._guarded,
                core.heals,
                core._leaving,
                core._left_out,
                core.stopped,
            ),
            repr(core._crashes),
            core._keep_due_s is None,
        )
        left = self.deaths_left, self.schedulers_left, self.losses_left, self.links_left, self.disk_full_left
        flags = self.somebody_died, self.released, self.may_stop, self.finished
        workers = [
            (one.state, one.told, one.linked, one.known, one.admitted, one.unseen, stand.entry, stand.loops,
             stand.done, (*stand.said,))
            for one in self.workers for stand in [one.stand]
        ]  # fmt: skip
        return known, left, flags, *workers, self.kept, self.kept_ends, self.to_keep

    # ------------------------------------------------------------------ the scheduler

    def handle(self, event: Event, now_s: float = 0.0) -> None:
        if self.core is None:
            return
        for effect in self.core.handle(event, now_s):
            self.obey(effect)
        again = {rank for rank in self.kept_ends if self.core and self.core.place(rank) is RankPlace.ABSENT}
        self.kept_ends -= again

    def obey(self, effect: Effect) -> None:
        match effect:
            case End(rank) if self.workers[rank].linked and self.workers[rank].state == "runs":
                if Begun in self.workers[rank].stand.said and Over not in self.workers[rank].stand.said:
                    self.wrong.append(f"rank {rank} is told to end while it saves")
                self.workers[rank].told = "ends"
            case Kill(rank):
                if not self.somebody_died:
                    self.wrong.append(f"rank {rank} is killed, though nobody had died")
                if self.workers[rank].linked and self.workers[rank].state == "runs":
                    self.workers[rank].told = "ends"
            case Keep(entry):
                self.to_keep = entry
                if self.disk_full_left is None:
                    self.keep()
            case Enter(entry):
                self.enter(entry)
            case Stop(failure):
                self.finished = True
                if failure and not self.may_stop:
                    self.wrong.append(f"the job is given up: {failure}")
                if not failure and not all(one.state == "ended" or one.stand.done for one in self.workers):
                    self.wrong.append("the job has ended, and a rank has not")

    def enter(self, entry: int) -> None:
        if self.kept != entry:
            self.wrong.append(f"{entry} begins, and {self.kept} is kept")
        self.somebody_died = self.released = False
        for rank, one in enumerate(self.workers):
            if one.state == "runs":
                self.wrong.append(f"rank {rank} is in {one.stand.entry} when {entry} begins")
            if one.stand.entry >= entry:
                self.wrong.append(f"rank {rank} was in {one.stand.entry}, and {entry} begins")
            if one.state == "waits" and one.linked:
                one.state, one.told = "runs", ""
                one.stand.entered(entry)

    def hear(self, rank: int, said: object) -> None:
        """As the scheduler does."""
        assert self.core is not None
        if not isinstance(said, Done):
            return self.handle(replace(said, rank=rank))  # type: ignore[type-var]
        if not self.core.heals and said.entry >= self.core.entry:
            self.kept_ends |= {rank}
            self.workers[rank].state = "ended"
            return self.handle(Ended(rank, 0))
        self.may_stop |= self.kept < 0  # nobody knows that its generation was not over
        if healed := self.core.heals:
            self.handle(Ended(rank, 0))
        if not healed or self.core.place(rank) is RankPlace.ABSENT:
            self.handle(Ready(rank, said.entry))

    def see_lost(self, rank: int) -> None:
        assert self.core is not None
        self.workers[rank].known = False
        if self.core.place(rank) is RankPlace.READY:
            self.handle(Gone(rank))

    def see(self, rank: int) -> None:
        self.workers[rank].unseen = False
        self.handle(Gone(rank))

    def link(self, rank: int) -> None:
        """It comes, or comes back, and repeats itself."""
        one = self.workers[rank]
        if one.unseen:
            self.see(rank)
        self.see_lost(rank)
        one.linked = one.known = one.admitted = True
        for said in one.stand.repeated():
            self.hear(rank, said)

    # ------------------------------------------------------------------ what may happen

    def moves(self) -> Iterator[Callable[[World], None]]:
        there = self.core is not None
        if self.core is None:
            yield World.start_scheduler
            if self.losses_left and self.kept >= 0:
                yield World.lose_state
        elif self.schedulers_left:
            yield World.kill_scheduler
        if there and self.to_keep is not None:
            yield World.keep
            if self.disk_full_left:
                yield World.fail_to_keep
            if self.schedulers_left:
                yield World.keep_and_kill_scheduler
        for rank, one in enumerate(self.workers):
            for move in self.moves_of(one, there, is_kept=rank in self.kept_ends):
                yield lambda world, rank=rank, move=move: move(world, rank)

    def moves_of(self, one: Worker, there: bool, is_kept: bool) -> Iterator[Callable[[World, int], None]]:
        alive = one.state in ("waits", "runs")
        if self.deaths_left and alive:
            yield World.kill_supervisor
            if one.state == "runs":
                yield World.kill
        if there and one.unseen:
            yield World.see
        if one.state == "absent" or (one.state == "ended" and not is_kept):
            yield World.start
        if there and alive and not one.linked:
            yield World.link
        if there and one.known and not one.linked:
            yield World.see_lost
        if self.links_left and one.linked:
            yield World.lose_link
        if one.state == "runs" and one.told:
            yield World.end_as_told
        elif one.state == "runs" and self.are_together and not one.trains:
            yield World.begin
        elif self.ends and one.trains and (self.released or all(other.trains for other in self.workers)):
            yield World.finish

    @property
    def are_together(self) -> bool:
        return {(one.state, one.stand.entry) for one in self.workers} == {("runs", self.workers[0].stand.entry)}

    @property
    def trains(self) -> bool:
        return self.are_together and all(one.trains for one in self.workers)

    def kill_scheduler(self) -> None:
        self.core, self.to_keep, self.schedulers_left = None, None, self.schedulers_left - 1
        for one in self.workers:
            one.linked = one.known = False

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
        self.kept, self.kept_ends, self.losses_left = -1, frozenset(), self.losses_left - 1

    def start_scheduler(self) -> None:
        self.core = self.make(len(self.workers))
        if self.kept >= 0:
            self.core.take_over(self.kept, 0)
        for rank, one in enumerate(self.workers):
            one.unseen = self.kept >= 0 and not one.admitted
            if rank in self.kept_ends:
                self.handle(Ended(rank, 0))

    def kill_supervisor(self, rank: int) -> None:
        one = self.workers[rank]
        runs, self.deaths_left = one.state == "runs", self.deaths_left - 1
        one.state, one.linked, one.admitted, one.unseen = "absent", False, False, one.admitted
        self.may_stop |= self.released  # that its rank has come to its end may not be known
        if runs:
            self.others_learn(rank)

    def kill(self, rank: int) -> None:
        self.deaths_left -= 1
        self.others_learn(rank)
        self.may_stop |= self.core is not None and not self.core._guarded
        self.report(rank, Ended(rank, KILLED))

    def others_learn(self, rank: int) -> None:
        """The controller tells those that it looks after."""
        self.may_stop |= self.released and self.ends == "in time"
        self.somebody_died = True
        for one in self.workers:
            if one.trains and not one.told and one is not self.workers[rank]:
                one.told = "saves"

    def report(self, rank: int, event: Event) -> None:
        one = self.workers[rank]
        if isinstance(event, Ended):
            one.state, one.told = "waits", ""
        one.stand.note(event)
        if one.linked:
            self.hear(rank, Done(one.stand.entry) if isinstance(event, Ended) and not event.code else event)

    def start(self, rank: int) -> None:
        self.workers[rank] = Worker("waits", unseen=self.workers[rank].unseen, known=self.workers[rank].known)

    def lose_link(self, rank: int) -> None:
        self.links_left -= 1
        self.workers[rank].linked = False

    def end_as_told(self, rank: int) -> None:
        saves = self.workers[rank].told == "saves"
        if saves:
            self.report(rank, Leaving(rank, 1))
        self.report(rank, Ended(rank, EXIT_SAVED if saves else TERMINATED))

    def begin(self, rank: int) -> None:
        self.report(rank, Guarded(rank))
        if self.ends != "at once":
            self.report(rank, Begun(rank))

    def finish(self, rank: int) -> None:
        self.released = True
        if self.ends == "in time":
            self.report(rank, Over(rank))
        if not self.finished:
            self.report(rank, Ended(rank, 0))


def late(world: World) -> None:
    world.handle(Tick(), END_S * 2)


def copied(world: World) -> World:
    after = twin(world)
    after.core = world.core and core_copied(world.core)
    after.workers, after.wrong = [twin(one) for one in world.workers], []
    for one in after.workers:
        one.stand = replace(one.stand, said=one.stand.said.copy())
    return after


def explore(
    ranks: int,
    deaths: int,
    schedulers: int = 0,
    losses: int = 0,
    links: int = 0,
    ends: str = "",
    make: Rule = new_core,
    disk_full: int | None = None,
) -> tuple[int, list[str]]:
    """Distinct states, and what was wrong in them."""
    workers = [Worker() for _ in range(ranks)]
    first = World(make, make(ranks), workers, deaths, schedulers, losses, links, ends, disk_full_left=disk_full)
    seen, queue, wrong = {first.key()}, [first], list[str]()
    while queue and len(wrong) < 20:
        world = queue.pop()
        if world.finished:
            continue
        moves = [*world.moves()]
        trains = world.trains and all(one.linked for one in world.workers)
        if world.core is not None and (trains or not moves):
            after = copied(world)
            late(after)
            moves += [late] if after.key() != world.key() else []
            if not moves and not (trains and not world.ends):
                wrong.append(f"stuck: {world.workers}, {[one.place for one in world.core._ranks.ranks.values()]}")
        for move in moves:
            after = copied(world)
            move(after)
            wrong += after.wrong
            if after.key() not in seen:
                seen.add(after.key())
                queue.append(after)
    return len(seen), wrong


@pytest.mark.parametrize(
    ("ranks", "deaths", "schedulers", "losses", "links"),
    [
        (2, 1, 1, 0, 0),
        (2, 1, 1, 1, 0),
        (2, 1, 0, 0, 1),
        pytest.param(2, 2, 1, 0, 0, marks=pytest.mark.ci),
        pytest.param(2, 2, 2, 1, 0, marks=pytest.mark.thorough),
        pytest.param(2, 1, 1, 1, 1, marks=pytest.mark.thorough),
        pytest.param(3, 1, 1, 1, 0, marks=pytest.mark.thorough),
    ],
)
def test_in_every_schedule_all_ranks_begin_together(
    ranks: int, deaths: int, schedulers: int, losses: int, links: int
) -> None:
    states, wrong = explore(ranks, deaths, schedulers, losses, links)
    print(f"{ranks} ranks, {deaths} deaths, {schedulers} schedulers that die, {losses} states lost: {states} states")
    assert wrong == []


@pytest.mark.parametrize("ends", ["in time", "at once"])
@pytest.mark.parametrize(
    ("losses", "links"), [(0, 0), pytest.param(1, 1, marks=pytest.mark.thorough)], ids=["", "with losses"]
)
def test_in_every_schedule_the_job_comes_to_its_end_or_all_ranks_begin_again(
    ends: str, losses: int, links: int
) -> None:
    states, wrong = explore(2, 1, 1, losses, links, ends)
    print(
        f"1 death, 1 scheduler that dies, {losses} states lost, {links} connections lost, ends {ends}: {states} states"
    )
    assert wrong == []


def test_in_every_schedule_in_which_the_disk_is_full_for_a_while_all_ranks_begin_together_in_what_is_kept() -> None:
    assert explore(2, 1, 1, disk_full=2)[1] == []


class Hasty(LauncherCore):
    """Begins before that is kept."""

    def _keep(self) -> list[Effect]:
        return [*super()._keep(), *(self._enter() if self._ranks.are_all(RankPlace.READY) else [])]


class Credulous(LauncherCore):
    """Takes what could not be kept for kept."""

    def _kept(self, event: Kept, now_s: float) -> list[Effect]:
        return super()._kept(Kept(event.entry), now_s)


class Resigned(LauncherCore):
    """Does not try it again."""

    def _kept(self, event: Kept, now_s: float) -> list[Effect]:
        return [] if event.failure else super()._kept(event, now_s)


class Impatient(LauncherCore):
    """Takes ranks that it has not heard of for ready."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for rank in self.world:
            self._ranks.put(rank, RankPlace.READY)


class Repeating(LauncherCore):
    """Begins a generation that ranks were in."""

    def _inside(self, event: Inside, now_s: float) -> list[Effect]:
        effects = super()._inside(event, now_s)
        self.entry = event.generation
        return effects


class Counting(LauncherCore):
    """Takes another generation for the one that runs."""

    def _inside(self, event: Inside, now_s: float) -> list[Effect]:
        effects = super()._inside(event, now_s)
        self.entry += not self.heals
        return effects


class Trusting(LauncherCore):
    """Leaves ranks alone that nobody looks after, though others wait."""

    def _end_inside(self, rank: int, now_s: float) -> list[Effect]:
        return []


class Resentful(LauncherCore):
    """Kills who had to end before it was known that all go on."""

    def _inside(self, event: Inside, now_s: float) -> list[Effect]:
        dues = {rank: (one.due_s, one.told_s, one.look_s) for rank, one in self._ranks.at(RankPlace.RUNNING)}
        effects = super()._inside(event, now_s)
        for rank, due in dues.items():
            self._ranks.due(self._ranks[rank], *due)
        return effects


class Forgiving(LauncherCore):
    """Does not begin again for the want of those that have come to their end."""

    def _over(self, rank: int, now_s: float) -> list[Effect]:
        done = [other for other, _ in self._ranks.at(RankPlace.DONE)]
        effects = super()._over(rank, now_s)
        for other in done:
            self._ranks.put(other, RankPlace.DONE)
        return effects


BROKEN = [Hasty, Credulous, Resigned, Impatient, Repeating, Counting, Trusting, Resentful, Forgiving]


@pytest.mark.ci
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_rule_is_found(broken: type[LauncherCore]) -> None:
    def make(ranks: int) -> LauncherCore:
        return broken(tuple(range(ranks)), keeps=True)

    assert any(explore(2, 1, 1, 1, 0, ends, make, disk_full)[1] for ends, disk_full in (("", 1), *ENDS))


ENDS = (("in time", None), ("at once", None))


def running(*ranks: int) -> LauncherCore:
    """A core whose ranks train, and which has heard of these."""
    core = new_core(2)
    core.take_over(0, 0)
    for rank in ranks:
        core.handle(Inside(rank, 0, begun=True), 0.0)
    return core


def effects_of(core: LauncherCore, *events: Event, now_s: float = 0.0) -> list[Effect]:
    """Of all of them."""
    return [effect for event in events for effect in core.handle(event, now_s)]


def test_nobody_begins_what_could_not_be_kept_and_it_is_tried_again() -> None:
    core = new_core(2)
    assert effects_of(core, Ready(0), Ready(1)) == [Keep(0, 0)]
    assert effects_of(core, Kept(0, "no space left")) == []
    assert core.deadline_s == KEEP_AGAIN_S
    assert effects_of(core, Tick(), now_s=KEEP_AGAIN_S) == [Keep(0, 0)]
    assert effects_of(core, Gone(1), Kept(0)) == [], "rank 1 is not there"
    assert effects_of(core, Ready(1)) == [Keep(0, 0)]
    assert effects_of(core, Kept(0)) == [Enter(0)]
    assert effects_of(core, Kept(0)) == []


def test_that_another_generation_is_kept_lets_nobody_begin() -> None:
    core = running(0, 1)
    assert effects_of(core, Leaving(1, 7), Ended(1, EXIT_SAVED), Ended(0, KILLED)) == [Keep(1, 7)]
    assert effects_of(core, Kept(0)) == [], "it was late"
    assert effects_of(core, Kept(1)) == [Enter(1, step=7)]


def test_it_is_not_tried_again_while_a_rank_is_not_there() -> None:
    core = new_core(2)
    effects_of(core, Ready(0), Ready(1), Kept(0, "no space left"), Gone(1))
    assert effects_of(core, Tick(), now_s=KEEP_AGAIN_S) == []
    assert effects_of(core, Ready(1)) == [Keep(0, 0)]


def test_what_ranks_have_said_to_a_scheduler_that_knew_nothing_is_kept_and_tried_again() -> None:
    core = new_core(2)
    assert effects_of(core, Inside(0, 5, begun=True)) == []
    assert effects_of(core, Inside(1, 5, begun=True)) == [Keep(5, 0)]
    assert effects_of(core, Kept(5, "no space left")) == []
    assert effects_of(core, Tick(), now_s=KEEP_AGAIN_S) == [Keep(5, 0)]
    assert effects_of(core, Kept(5)) == []
    assert core.deadline_s is None, "and nobody has to end"


@pytest.mark.parametrize("loops", [0, 1])
def test_a_scheduler_after_the_one_that_knew_nothing_sees_the_job_come_to_its_end(loops: int) -> None:
    second, third = new_core(2), new_core(2)
    said = [Over(0)] if loops else []
    inside = [Inside(rank, 5, loops > 0, loops) for rank in range(2)]
    (keep,) = effects_of(second, *inside, *said, Ended(0, 0))
    assert isinstance(keep, Keep)
    third.take_over(keep.entry, 0)
    end = effects_of(third, Ended(0, 0), inside[1], *([Over(1)] if loops else []), Ended(1, 0))
    assert end == [Stop(None)]


def test_whoever_has_not_been_heard_of_may_be_saving() -> None:
    core = running()
    assert effects_of(core, Ready(0, 0)) == []
    assert Kill not in map(type, effects_of(core, Tick(), now_s=LEAVE_S))
    assert effects_of(core, Inside(1, 0, begun=False)) == [End(1)], "it says that nobody looks after it"


def test_a_rank_that_cannot_be_ended_is_waited_for_by_all_others() -> None:
    """Its supervisor is stopped, on a host of its own, and may not have heard that the rank is to be killed."""
    core = running(0, 1)
    effects_of(core, Leaving(0, 7), Ended(0, EXIT_SAVED))
    assert Kill in map(type, effects_of(core, Tick(), now_s=LEAVE_S))
    assert [type(one) for one in effects_of(core, Tick(), now_s=LEAVE_S + KILLED_S)] == [Awaited]
    assert effects_of(core, Tick(), now_s=1e9) == []
    assert [type(one) for one in effects_of(core, Inside(1, 0, begun=True))] == [Kill]
    assert effects_of(core, Ended(1, KILLED)) == [Keep(1, 7)]


def test_a_rank_that_people_start_is_waited_for_without_end() -> None:
    core = running(0, 1)
    assert effects_of(core, Gone(1), Leaving(0, 7), Ended(0, EXIT_SAVED), Tick(), now_s=1e9) == []
    assert effects_of(core, Ready(1), Kept(1)) == [Keep(1, 7), Enter(1, step=7)]


def test_a_supervisor_that_dies_before_anything_was_protected_ends_nothing() -> None:
    core = new_core(2)
    effects_of(core, Ready(0), Ready(1), Kept(0))
    assert effects_of(core, Gone(1)) == [End(0)]
    assert effects_of(core, Ended(0, TERMINATED), Ready(1)) == [Keep(1, 0)]


def test_two_loops_in_turn_are_told_apart_by_a_scheduler_that_comes_between() -> None:
    core = running()
    effects_of(core, Inside(0, 0, begun=True), Over(0), Inside(1, 0, begun=True, loops=2))
    assert effects_of(core, Ended(1, KILLED)) == []
    assert core.heals, "its loop is another one"
    assert not core.stopped
