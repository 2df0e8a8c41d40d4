"""The launcher's decisions: each rule alone, and all schedules of small jobs with deaths at every point."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from lastwords.launcher.core import (
    DEATHS_MAX,
    END_S,
    LEAVE_NOTICE_S,
    LEAVE_S,
    NAMED_RANKS_MAX,
    START_NOTICE_S,
    START_S,
    Abandon,
    Awaited,
    Begun,
    Effect,
    Ended,
    Enter,
    Kill,
    LauncherCore,
    Lost,
    Over,
    Place,
    Start,
    Stop,
    Tick,
    Waiting,
)

KILLED = -9


def training(ranks: int = 3) -> LauncherCore:
    """A job whose loop has begun."""
    core = LauncherCore(tuple(range(ranks)))
    for rank in range(ranks):
        core.handle(Waiting(rank), 0.0)
    for rank in range(ranks):
        core.handle(Begun(rank), 0.0)
    return core


def wait(core: LauncherCore, *ranks: int, step: int = 0) -> list[Effect]:
    return [effect for rank in ranks for effect in core.handle(Waiting(rank, step), 1.0)]


def test_nobody_enters_before_all_are_there() -> None:
    core = LauncherCore((0, 1))
    assert core.handle(Waiting(0), 0.0) == []
    assert core.handle(Waiting(1), 0.0) == [Enter(0)]


def test_only_the_dead_rank_is_started_and_all_enter_the_next_generation() -> None:
    core = training()
    assert core.handle(Ended(1, KILLED), 1.0) == [Start(1)]
    assert wait(core, 0, 2, step=7) == []
    assert wait(core, 1) == [Enter(1, step=7)]


def test_survivors_may_leave_before_the_death_is_seen() -> None:
    core = training()
    assert wait(core, 0, 2, step=7) == []
    assert core.handle(Ended(1, KILLED), 1.0) == [Start(1)]
    assert wait(core, 1) == [Enter(1, step=7)]


def test_what_was_resumed_from_counts_as_progress() -> None:
    core = training(2)
    for generation, step in enumerate(range(10, 100, 10), 1):
        assert core.handle(Ended(1, KILLED), 0.0) == [Start(1)]
        assert [type(effect) for effect in wait(core, 0, 1)] == [Enter]
        for rank in (0, 1):
            assert core.handle(Begun(rank, step), 0.0) == []
        assert core.generation == generation


def test_before_the_loop_has_begun_nobody_else_tells_the_survivors() -> None:
    core = LauncherCore((0, 1, 2))
    wait(core, 0, 1, 2)
    assert core.handle(Ended(1, KILLED), 1.0) == [Abandon(0), Abandon(2), Start(1)]


def test_a_survivor_that_does_not_leave_is_killed_and_replaced() -> None:
    core = training()
    core.handle(Ended(1, KILLED), 0.0)
    wait(core, 0)
    core.handle(Tick(), 1.0 + LEAVE_S - 0.1)
    (kill,) = core.handle(Tick(), 1.0 + LEAVE_S)
    assert isinstance(kill, Kill)
    assert kill.rank == 2
    assert core.handle(Ended(2, KILLED), 40.0) == [Start(2)]


def awaited(effects: list[Effect]) -> list[tuple[int, float]]:
    return [(one.rank, one.seconds) for one in effects if isinstance(one, Awaited)]


def test_for_whom_everybody_waits_is_said_once_and_soon() -> None:
    core = training()
    core.handle(Ended(1, KILLED), 0.0)
    wait(core, 0)  # at 1.0: rank 2 is stopped, say
    assert core.deadline_s == 1.0 + LEAVE_NOTICE_S
    assert core.handle(Tick(), 0.9 + LEAVE_NOTICE_S) == []
    assert awaited(core.handle(Tick(), 1.0 + LEAVE_NOTICE_S)) == [(2, LEAVE_S - LEAVE_NOTICE_S)]
    assert core.deadline_s == START_NOTICE_S
    assert awaited(core.handle(Tick(), START_NOTICE_S)) == [(1, START_S - START_NOTICE_S)]
    assert core.handle(Tick(), LEAVE_S) == []


def test_nobody_is_named_while_a_checkpoint_is_written_and_none_that_is_there_in_time() -> None:
    core = training()
    core.handle(Ended(1, KILLED), 0.0)
    wait(core, 1)
    assert core.handle(Tick(), END_S - 1.0) == []
    wait(core, 0, 2, step=7)
    assert core.handle(Tick(), END_S) == []


def test_of_very_many_late_ranks_a_few_are_named() -> None:
    core = LauncherCore(tuple(range(100)))
    wait(core, *range(100))
    core.handle(Ended(1, KILLED), 0.0)
    assert len(awaited(core.handle(Tick(), LEAVE_NOTICE_S))) == NAMED_RANKS_MAX


def test_where_nobody_leaves_all_are_replaced_in_the_end() -> None:
    core = training()
    core.handle(Ended(1, KILLED), 0.0)
    wait(core, 1)
    assert [one.rank for one in core.handle(Tick(), END_S) if isinstance(one, Kill)] == [0, 2]


def test_a_rank_that_had_finished_is_started_too() -> None:
    core = training(2)
    assert core.handle(Ended(0, 0), 1.0) == []
    assert core.handle(Ended(1, KILLED), 1.0) == [Start(0), Start(1)]


def test_the_job_ends_when_all_have_ended_well() -> None:
    core = training(2)
    core.handle(Ended(0, 0), 1.0)
    assert core.handle(Ended(1, 0), 1.0) == [Stop(None)]


def test_a_script_that_never_calls_run_is_not_healed() -> None:
    (stop,) = LauncherCore((0, 1)).handle(Ended(1, 2), 1.0)
    assert isinstance(stop, Stop)
    assert stop.failure is not None


def test_a_crash_loop_stops() -> None:
    core = training(2)
    for _ in range(1 + DEATHS_MAX):  # after the first one a step was saved, so it does not count
        assert core.handle(Ended(1, KILLED), 0.0) == [Start(1)]
        wait(core, 0, 1, step=5)
        for rank in (0, 1):
            core.handle(Begun(rank), 0.0)
    (stop,) = core.handle(Ended(1, KILLED), 0.0)
    assert isinstance(stop, Stop)
    assert stop.failure is not None
    assert stop.failure.endswith("ranks 1")


def test_deaths_between_which_steps_are_saved_go_on_for_ever() -> None:
    core = training(2)
    for step in range(1, 20):
        assert core.handle(Ended(1, KILLED), 0.0) == [Start(1)]
        assert wait(core, 0, 1, step=step) == [Enter(step, step=step)]
        for rank in (0, 1):
            core.handle(Begun(rank), 0.0)


@pytest.mark.parametrize("code", [1, KILLED])
def test_a_replacement_that_never_gets_into_main_stops_the_job(code: int) -> None:
    core = training(2)
    core.handle(Ended(1, KILLED), 0.0)
    effects = [core.handle(Ended(1, code), 0.0) for _ in range(3)]
    assert effects[:2] == [[Start(1)], [Start(1)]]
    assert isinstance(effects[2][0], Stop)


def test_a_replacement_that_runs_another_version_of_the_script_stops_the_job() -> None:
    core = LauncherCore((0, 1))
    for rank in (0, 1):
        core.handle(Waiting(rank, sources={"model.py": "one"}), 0.0)
    for rank in (0, 1):
        core.handle(Begun(rank), 0.0)
    core.handle(Ended(1, KILLED), 0.0)
    assert core.handle(Waiting(0, 5, sources={"model.py": "one"}), 0.0) == []
    (stop,) = core.handle(Waiting(1, sources={"more.py": "new", "model.py": "other"}), 0.0)
    assert isinstance(stop, Stop)
    assert stop.failure is not None
    assert "model.py" in stop.failure


def test_a_save_takes_its_time_however_soon_a_spare_is_ready() -> None:
    core = training()
    core.handle(Ended(1, KILLED), 0.0)
    assert wait(core, 1) == []
    assert core.handle(Tick(), END_S - 1.0) == []
    assert {type(effect) for effect in core.handle(Tick(), END_S)} == {Kill}


def test_a_replacement_that_never_arrives_is_killed_and_one_that_does_not_end_stops_the_job() -> None:
    core = training()
    core.handle(Ended(1, KILLED), 0.0)
    wait(core, 0, 2, step=7)
    core.handle(Tick(), START_S - 1.0)
    (kill,) = core.handle(Tick(), START_S)
    assert isinstance(kill, Kill)
    assert kill.rank == 1
    (stop,) = core.handle(Tick(), START_S + LEAVE_S)
    assert isinstance(stop, Stop)


def test_a_failure_after_the_loop_stops_the_job_and_a_new_loop_is_looked_after() -> None:
    core = training()
    for rank in range(3):
        assert core.handle(Over(rank), 0.0) == []
    core.handle(Begun(0), 0.0)
    assert core.handle(Ended(0, KILLED), 0.0)[-1] == Start(0)
    (stop,) = core.handle(Ended(1, 1), 0.0)
    assert isinstance(stop, Stop)
    assert stop.failure is not None


def test_a_launcher_of_another_host_that_is_lost_stops_the_job() -> None:
    assert training().handle(Lost("the other host has ended"), 0.0) == [Stop("the other host has ended")]


# ---------------------------------------------------------------------- all schedules


@dataclass
class World:
    """A core and the processes that it directs. A process: "starting", "waiting", "main", "gone", "done"."""

    core: LauncherCore
    deaths_left: int
    process: list[str]
    entered: list[int]
    begun: list[bool]
    unseen: list[int | None]
    """Exit codes that the agent has not heard of."""
    told: list[bool]
    """To leave main: by the controller once all had begun, or by the agent."""
    entries: int = 0
    wrong: list[str] = field(default_factory=list)

    @staticmethod
    def new(ranks: int, deaths: int, core: LauncherCore) -> World:
        return World(core, deaths, ["starting"] * ranks, [-1] * ranks, [False] * ranks, [None] * ranks, [False] * ranks)

    def key(self) -> str:
        core = self.core
        counts = core.generation, core._failures, core._deaths, self.deaths_left
        flags = core._healing, core.stopped
        return repr((core._ranks, counts, flags, self.process, self.entered, self.begun, self.unseen, self.told))

    def handle(self, event: Waiting | Begun | Ended | Tick, now_s: float = 0.0) -> None:
        for effect in self.core.handle(event, now_s):
            match effect:
                case Start(rank):
                    self.process[rank] = "starting"
                case Abandon(rank):
                    self.told[rank] = True
                case Kill(rank):
                    self.die(rank)
                case Enter(generation):
                    self.enter(generation)

    def enter(self, generation: int) -> None:
        for rank, process in enumerate(self.process):
            if process == "main":
                self.wrong.append(f"rank {rank} is still in generation {self.entered[rank]} when {generation} begins")
            if process == "waiting":
                self.process[rank], self.entered[rank] = "main", generation
                self.begun[rank] = self.told[rank] = False

    def die(self, rank: int) -> None:
        if self.process[rank] in ("gone", "done"):
            return
        protected = all(self.begun) and set(self.process) == {"main"}
        self.process[rank], self.unseen[rank] = "gone", KILLED
        if protected:
            self.told = [process == "main" for process in self.process]

    def moves(self) -> Iterator[Callable[[World], None]]:
        for rank, process in enumerate(self.process):
            if self.deaths_left and process in ("starting", "waiting", "main"):
                yield lambda world, rank=rank: world.kill(rank)
            if self.unseen[rank] is not None:
                yield lambda world, rank=rank: world.see(rank)
            elif process == "starting" or (process == "main" and self.told[rank]):
                yield lambda world, rank=rank: world.arrive(rank)
            elif process == "main" and not self.begun[rank] and set(self.process) == {"main"}:
                yield lambda world, rank=rank: world.begin(rank)
            elif process == "main" and all(self.begun) and not self.told[rank] and "gone" not in self.process:
                yield lambda world, rank=rank: world.finish(rank)

    def kill(self, rank: int) -> None:
        self.deaths_left -= 1
        self.die(rank)

    def see(self, rank: int) -> None:
        code, self.unseen[rank] = self.unseen[rank], None
        assert code is not None
        self.handle(Ended(rank, code))

    def arrive(self, rank: int) -> None:
        self.process[rank], self.begun[rank], self.told[rank] = "waiting", False, False
        self.handle(Waiting(rank))

    def begin(self, rank: int) -> None:
        self.begun[rank] = True
        self.handle(Begun(rank))

    def finish(self, rank: int) -> None:
        self.process[rank], self.unseen[rank] = "done", 0


def explore(ranks: int, deaths: int, make: Callable[[tuple[int, ...]], LauncherCore]) -> tuple[int, list[str]]:
    """Distinct states, and what was wrong in them."""
    first = World.new(ranks, deaths, make(tuple(range(ranks))))
    seen, queue, wrong = {first.key()}, [first], []
    while queue and len(wrong) < 20:
        world = queue.pop()
        moves = list(world.moves())
        if not moves and not world.core.stopped:
            late = copy.deepcopy(world)
            late.handle(Tick(), END_S * 2)
            moves = [lambda other: other.handle(Tick(), END_S * 2)] if late.key() != world.key() else []
            if not moves:
                wrong.append(f"stuck: {world.process}, {[one.place for one in world.core._ranks.values()]}")
        for move in moves:
            after = copy.deepcopy(world)
            move(after)
            wrong += after.wrong
            if after.key() not in seen:
                seen.add(after.key())
                queue.append(after)
    return len(seen), wrong


@pytest.mark.parametrize(("ranks", "deaths"), [(2, 2), (3, 1), (3, 2)])
def test_in_every_schedule_all_ranks_enter_together_or_the_job_stops(ranks: int, deaths: int) -> None:
    states, wrong = explore(ranks, deaths, LauncherCore)
    print(f"{ranks} ranks, {deaths} deaths: {states} states")
    assert wrong == []


class Hasty(LauncherCore):
    """Enters as soon as somebody waits while nobody starts."""

    def _waiting(self, rank: int, step: int, now_s: float) -> list[Effect]:
        effects = super()._waiting(rank, step, now_s)
        if Place.STARTING not in {one.place for one in self._ranks.values()} and not effects and self._healing:
            return self._enter()
        return effects


class Forgetful(LauncherCore):
    """Starts nobody in the place of the dead."""

    def _ended(self, rank: int, code: int, now_s: float) -> list[Effect]:
        return [effect for effect in super()._ended(rank, code, now_s) if not isinstance(effect, Start)]


class Deaf(LauncherCore):
    """Tells nobody to leave a generation that no controller looks after, and never loses patience."""

    def _over(self, rank: int, now_s: float) -> list[Effect]:
        return [effect for effect in super()._over(rank, now_s) if not isinstance(effect, Abandon)]

    def _tick(self, now_s: float) -> list[Effect]:
        return []


@pytest.mark.parametrize("broken", [Hasty, Forgetful, Deaf])
def test_a_broken_rule_is_found(broken: type[LauncherCore]) -> None:
    assert explore(3, 1, broken)[1]
