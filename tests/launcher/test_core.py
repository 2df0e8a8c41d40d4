"""The launcher's decisions, each rule alone."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import pytest

from lastwords.launcher.core import LauncherCore
from lastwords.launcher.crash_loop import DEATHS_MAX, REPEAT_STEPS, REPEATS_MAX
from lastwords.launcher.events import (
    UNKNOWN_CODE,
    Abandon,
    Awaited,
    Begun,
    Effect,
    Ended,
    Enter,
    Imported,
    Inside,
    Kill,
    Look,
    Lost,
    Over,
    Start,
    Stop,
    Stopped,
    Tick,
    Waiting,
)
from lastwords.launcher.roster import (
    END_S,
    FIRST_NOTICE_S,
    LEAVE_NOTICE_S,
    LEAVE_S,
    LOOK_ANSWER_S,
    NAMED_RANKS_MAX,
    SPARE_S,
    START_NOTICE_S,
    START_PAUSES_S,
    START_S,
    Place,
    Rank,
    Roster,
)
from tests import golden

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
    return [effect for rank in ranks for effect in core.handle(waiting(core, rank, step), 1.0)]


def waiting(core: LauncherCore, rank: int, step: int) -> Waiting:
    """What its process says: a new one has not been in `main`."""
    return Waiting(rank, step, entered=0 if core.place(rank) is Place.IN_MAIN else -1)


def test_a_rank_that_comes_or_leaves_makes_no_work_for_each_of_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or 16,384 of them keep the launcher busy for minutes."""
    walks = 0

    def counted(roster: Roster, place: Place) -> Iterator[tuple[int, Rank]]:
        nonlocal walks
        walks += 1
        return shipped(roster, place)

    shipped = Roster.at
    monkeypatch.setattr(Roster, "at", counted)
    core = training(ranks=50)
    core.handle(Ended(1, KILLED), 0.0)
    wait(core, *range(50), step=7)
    assert core.entry == 1
    assert walks < 10


def test_nobody_enters_before_all_are_there() -> None:
    core = LauncherCore((0, 1))
    assert core.handle(Waiting(0), 0.0) == []
    assert core.handle(Waiting(1), 0.0) == [Enter(0)]


def test_only_the_dead_rank_is_started_and_all_enter_main_together() -> None:
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
    for entry, step in enumerate(range(10, 100, 10), 1):
        assert core.handle(Ended(1, KILLED), 0.0) == [Start(1)]
        assert [type(effect) for effect in wait(core, 0, 1, step=1)] == [Enter]
        for rank in (0, 1):
            assert core.handle(Begun(rank, step), 0.0) == []
        assert core.entry == entry


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
    return [(one.rank, one.seconds or 0.0) for one in effects if isinstance(one, Awaited)]


def test_for_whom_everybody_waits_is_said_once_and_soon() -> None:
    core = training()
    core.handle(Ended(1, KILLED), 0.0)
    wait(core, 0)  # at 1.0: rank 2 is stopped, say
    assert core.deadline_s == LEAVE_NOTICE_S
    assert core.handle(Tick(), 0.9 + LEAVE_NOTICE_S) == []
    assert awaited(core.handle(Tick(), 1.0 + LEAVE_NOTICE_S)) == [(2, LEAVE_S - LEAVE_NOTICE_S)]
    assert core.deadline_s == START_NOTICE_S - LOOK_ANSWER_S
    assert core.handle(Tick(), START_NOTICE_S - LOOK_ANSWER_S) == [Look(1)]
    assert awaited(core.handle(Tick(), START_NOTICE_S)) == [(1, START_S - START_NOTICE_S)]
    assert core.handle(Tick(), LEAVE_S) == [Look(1)]


def test_nobody_is_named_while_a_checkpoint_is_written_and_none_that_is_there_in_time() -> None:
    core = training()
    core.handle(Ended(1, KILLED), 0.0)
    wait(core, 1)
    assert core.handle(Tick(), END_S / 2) == [Look(0), Look(2)]
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
    golden.says(stop.failure)


@pytest.mark.parametrize("order", [1, -1])
def test_a_rank_that_ends_well_without_run_where_others_wait_for_it_is_named(order: int) -> None:
    core = LauncherCore((0, 1, 2))
    (stop,) = [effect for event in [Waiting(0), Ended(1, 0)][::order] for effect in core.handle(event, 0.0)]
    assert isinstance(stop, Stop)
    golden.says(stop.failure)


def test_where_no_rank_calls_run_all_may_end_well() -> None:
    core = LauncherCore((0, 1))
    assert core.handle(Ended(1, 0), 0.0) == []
    assert core.handle(Ended(0, 0), 0.0) == [Stop(None)]


def test_a_crash_loop_stops() -> None:
    core = training(2)
    for _ in range(1 + DEATHS_MAX):  # after the first one a step was saved, so it does not count
        assert core.handle(Ended(1, KILLED), 0.0) == [Start(1)]
        wait(core, 0, 1, step=5)
        for rank in (0, 1):
            core.handle(Begun(rank), 0.0)
    core.handle(Ended(1, KILLED), 0.0)
    (stop,) = wait(core, 0, step=5)
    assert isinstance(stop, Stop)
    golden.says(stop.failure)


@pytest.mark.parametrize("code", [KILLED, 0])
@pytest.mark.parametrize("saves", [True, False])
def test_whether_it_is_of_no_use_to_go_on_does_not_depend_on_who_leaves_main_first(saves: bool, code: int) -> None:
    """Survivors may come out with one more step that is saved, which makes it no crash loop."""
    core = training()
    for _ in range(1 + DEATHS_MAX):
        fails(core, 5, 1)
    said = set()
    for events in itertools.permutations([Ended(1, code), *(Waiting(rank, 5 + saves) for rank in (0, 2))]):
        one = copy.deepcopy(core)
        effects = [effect for event in events for effect in one.handle(event, 0.0)]
        assert one.stopped is not saves
        said |= {effect.failure for effect in effects if isinstance(effect, Stop)}
    assert len(said) == 1 - saves
    for failure in said:
        golden.says(str(failure))


def test_a_rank_that_has_ended_well_is_not_named_for_the_exception_of_another() -> None:
    """In a script without a training loop, whose ranks do not come to its end together."""
    core = LauncherCore((0, 1))
    stops: list[Stop] = []
    while not stops:
        wait(core, 0, 1)
        effects = core.handle(Ended(0, 0), 0.0) + core.handle(Ended(1, 1, raised="ValueError: bad batch"), 0.0)
        stops = [effect for effect in effects if isinstance(effect, Stop)]
    golden.says(str(stops[0].failure))


@pytest.mark.parametrize("saved", [1, REPEAT_STEPS, REPEAT_STEPS + 1])
def test_how_many_steps_are_saved_between_exceptions_does_not_depend_on_who_leaves_main_first(saved: int) -> None:
    for orders in itertools.product([True, False], repeat=1 + REPEATS_MAX):
        core = training(2)
        for turn, first in enumerate(orders, 1):
            events = [Ended(1, 1, raised="ValueError: bad batch"), Waiting(0, turn * saved)]
            for event in events[:: 1 if first else -1]:
                core.handle(event, 0.0)
            wait(core, 1)
            begins(core, 0, 1, step=turn * saved)
        assert core.stopped is (saved <= REPEAT_STEPS), orders


def test_deaths_between_which_steps_are_saved_go_on_for_ever() -> None:
    core = training(2)
    for step in range(1, 20):
        assert core.handle(Ended(1, KILLED), 0.0) == [Start(1)]
        assert wait(core, 0, 1, step=step) == [Enter(step, step=step)]
        for rank in (0, 1):
            core.handle(Begun(rank), 0.0)


def begins(core: LauncherCore, *ranks: int, step: int = 0) -> None:
    for rank in ranks:
        core.handle(Begun(rank, step), 0.0)


@pytest.mark.parametrize("code", [1, KILLED])
def test_a_replacement_that_never_gets_into_main_is_tried_again_later_and_then_stops_the_job(code: int) -> None:
    core = training(2)
    assert core.handle(Ended(1, KILLED), 0.0) == [Start(1)]
    now_s = 0.0
    for pause_s in START_PAUSES_S[1:]:
        assert core.handle(Ended(1, code), now_s) == []
        assert Start(1) not in core.handle(Tick(), now_s + pause_s - 0.1)
        now_s += pause_s
        assert Start(1) in core.handle(Tick(), now_s)
    (stop,) = core.handle(Ended(1, code, raised="ImportError: no module" * (code == 1)), now_s)
    assert isinstance(stop, Stop)
    golden.says(stop.failure)


def test_processes_that_did_not_start_count_for_their_own_rank_only_and_until_one_waits() -> None:
    core = training(5)
    for rank in range(5):
        core.handle(Ended(rank, KILLED), 0.0)
        core.handle(Ended(rank, KILLED), 0.0)
        assert core.handle(Tick(), START_PAUSES_S[1]) == [Start(rank)]
    wait(core, *range(5), step=3)
    begins(core, *range(5))
    for _ in START_PAUSES_S:
        assert not core.stopped
        core.handle(Ended(4, KILLED), 0.0)
    assert not core.stopped


def fails_again(core: LauncherCore, rank: int, raised: str = "") -> tuple[list[Effect], list[Effect]]:
    """`rank` ends before its loop begins; the others leave. What the core does at its end, and when all wait."""
    effects = core.handle(Ended(rank, 1, raised=raised), 0.0)
    return effects, [] if core.stopped else wait(core, *core.world, step=7)


def condemned(effects: list[Effect]) -> list[int]:
    return [one.rank for one in effects if isinstance(one, Kill)]


def test_where_main_fails_whenever_it_is_entered_again_all_processes_are_replaced_once() -> None:
    core = training()
    core.handle(Ended(1, KILLED), 0.0)
    wait(core, 0, 1, 2, step=7)
    assert fails_again(core, 0) == ([Abandon(1), Abandon(2), Start(0)], [Enter(2, step=7)])
    effects, when_all_wait = fails_again(core, 1)
    assert effects == [Abandon(0), Abandon(2), Start(1)]
    assert condemned(when_all_wait) == [0, 2]
    assert wait(core, 0, 2) == [], "what the condemned have said before their end does not count"
    assert [core.handle(Ended(rank, KILLED), 0.0) for rank in (0, 2)] == [[Start(0)], [Start(2)]]
    assert wait(core, 0, 2) == [Enter(3, step=7)]
    begun = copy.deepcopy(core)
    assert core.handle(Ended(2, 1), 0.0) == [Abandon(0), Abandon(1), Start(2)]
    (stop,) = wait(core, 0, 1, step=7)
    assert isinstance(stop, Stop)
    begins(begun, 0, 1, 2)
    assert begun.handle(Ended(2, 1), 0.0) == [Start(2)]
    assert wait(begun, 0, 1, 2, step=8) == [Enter(4, step=8)], "failures before a loop that has begun do not count"


@pytest.mark.parametrize("order", [1, -1])
def test_an_end_with_0_before_the_loop_is_a_failure_of_main_whoever_leaves_first(order: int) -> None:
    core = LauncherCore((0, 1))
    wait(core, 0, 1)
    wait(core, 0, 1)
    for rank in (1, 0):
        events = [Ended(rank, 0), waiting(core, 1 - rank, 0)]
        for event in events[::order]:
            core.handle(event, 0.0)
        effects = wait(core, rank)
    assert condemned(effects) == [1]


def test_survivors_stay_where_new_processes_fail_as_well() -> None:
    """Their loop may begin and raise before its first step, as a loop of the script's own does."""
    core = training()
    for failures in range(1, 2 + DEATHS_MAX):  # the first one comes with a newly saved step
        effects, when_all_wait = fails_again(core, 1, raised=f"sample {failures} of another kind" + failures * "!")
        assert effects[-1] == Start(1)
        assert condemned(when_all_wait) == []
    (stop,) = fails_again(core, 1, raised="ValueError: bad batch")[1]
    assert isinstance(stop, Stop)
    golden.says(stop.failure)


def fails(core: LauncherCore, step: int, *ranks: int, raised: str = "", begun: bool = True) -> list[Effect]:
    """After so many steps that are saved; the other ranks go on with a new process."""
    effects = [effect for rank in ranks for effect in core.handle(Ended(rank, 1, raised=raised), 0.0)]
    if not core.stopped:
        wait(core, *core.world, step=step)
        begins(core, *(core.world if begun else ()), step=step)
    return effects


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)], ids=str)
def test_the_same_exception_again_and_again_is_a_crash_loop_though_each_time_a_step_is_saved(
    begun: bool, ranks: tuple[int, int]
) -> None:
    core = training(2)
    for step in range(1, 1 + REPEATS_MAX):
        order = ranks if step % 2 else ranks[::-1]
        assert fails(core, step, *order, raised=f"ValueError: bad batch {step} at 0x7f{step}c", begun=begun)
        assert not core.stopped
    fails(core, step, 1, raised="ValueError: bad batch 17 at 0xa")
    assert core.stopped


@pytest.mark.parametrize("what", ["another rank", "another exception", "no exception", "progress", "a good entry"])
def test_failures_that_differ_are_no_crash_loop(what: str) -> None:
    core = training(2)
    for turn in range(1, 3 * REPEATS_MAX):
        step = turn * (REPEAT_STEPS + 1 if what == "progress" else 1)
        raised = "" if what == "no exception" else "ValueError: bad batch" + "!" * (turn if "exception" in what else 0)
        fails(core, step, turn % 2 if what == "another rank" else 1, raised=raised)
        if what == "a good entry" and turn % REPEATS_MAX == 0:
            fails(core, step, 0)
        assert not core.stopped


def test_the_survivor_that_shows_the_last_failure_is_replaced_as_well() -> None:
    core = training()
    core.handle(Ended(1, KILLED), 0.0)
    wait(core, 0, 1, 2, step=7)
    fails_again(core, 0)
    assert wait(core, 2) == [Abandon(0), Abandon(1)]
    core.handle(Ended(1, 1), 0.0)
    assert condemned(wait(core, 0, 1)) == [0, 2]


def test_who_has_raised_is_known_before_the_job_is_given_up_though_survivors_leave_first() -> None:
    core = training(2)
    fails(core, 5, 1)
    for _ in range(DEATHS_MAX):
        fails(core, 5, 1)
    assert wait(core, 0, step=5) == []
    (stop,) = core.handle(Ended(1, 1, "exit code 1", "ValueError: bad batch"), 0.0)
    assert isinstance(stop, Stop)
    golden.says(stop.failure)


@pytest.mark.parametrize("seen_first", [True, False], ids=["its end", "a survivor"])
def test_the_failure_with_which_a_step_is_saved_does_not_count_whatever_is_seen_first(seen_first: bool) -> None:
    core = training(2)
    for _ in range(1 + DEATHS_MAX):
        events = [Ended(1, KILLED), Waiting(0, 5)]
        for event in events if seen_first else events[::-1]:
            core.handle(event, 0.0)
        wait(core, 1)
        begins(core, 0, 1)
    assert not core.stopped
    core.handle(Waiting(0, 5), 0.0)
    core.handle(Ended(1, KILLED), 0.0)
    assert core.stopped


def test_where_no_process_ends_a_crash_loop_is_one_all_the_same() -> None:
    core = training(2)
    assert wait(core, 0, 1, step=7) == [Enter(1, step=7)]
    for _ in range(DEATHS_MAX):
        assert wait(core, 0, 1) == [Abandon(1), Enter(core.entry, step=7)], "the loop of this entry had not begun"
    (stop,) = [one for one in wait(core, 0, 1) if isinstance(one, Stop)]
    golden.says(stop.failure)


def test_without_a_checkpoint_nobody_that_has_trained_enters_again() -> None:
    core = training()
    core.handle(Ended(1, KILLED), 0.0)
    effects = [effect for rank in (0, 1, 2) for effect in core.handle(Waiting(rank, entered=-(rank == 1)), 1.0)]
    assert [one.rank for one in effects if isinstance(one, Kill)] == [0, 2]
    for rank in (0, 2):
        assert core.handle(Ended(rank, KILLED), 0.0) == [Start(rank)]
    assert wait(core, 0, step=0) == []
    assert wait(core, 2, step=0) == [Enter(1)]


@pytest.mark.parametrize("entered", [-1, 4], ids=["a start", "another launcher had let it in"])
def test_for_whom_the_first_start_waits_is_said_and_nobody_is_killed_for_it(entered: int) -> None:
    core = LauncherCore((0, 1, 2))
    core.handle(Waiting(1, entered=entered), 1.0)
    assert core.deadline_s == 1.0 + FIRST_NOTICE_S
    effects = core.handle(Tick(), 1.0 + FIRST_NOTICE_S)
    assert [(one.rank, one.seconds) for one in effects if isinstance(one, Awaited)] == [(0, None), (2, None)]
    assert core.deadline_s is None
    assert wait(core, 0, 2) == [Enter(entered + 1)]


def test_that_the_first_rank_starts_anew_puts_nothing_off() -> None:
    core = LauncherCore((0, 1, 2))
    core.handle(Waiting(0), 0.0)
    assert core.handle(Ended(0, KILLED), 1.0) == [Start(0)]
    core.handle(Waiting(0), 5.0)
    assert [rank for rank, _ in awaited(core.handle(Tick(), FIRST_NOTICE_S))] == [1, 2]


def test_a_survivor_that_is_stopped_is_said_and_killed_long_before_one_that_writes() -> None:
    core = training(2)
    core.handle(Ended(1, KILLED), 0.0)
    wait(core, 1)
    assert core.handle(Tick(), LEAVE_NOTICE_S) == [Look(0)]
    assert core.handle(Stopped(0), LEAVE_NOTICE_S) == []
    assert awaited(core.handle(Tick(), LEAVE_NOTICE_S)) == [(0, LEAVE_S - LEAVE_NOTICE_S)]
    assert core.handle(Tick(), LEAVE_S) == [Look(0)]
    (kill,) = core.handle(Stopped(0), LEAVE_S)
    assert isinstance(kill, Kill)
    assert kill.rank == 0


def test_a_writer_that_was_stopped_for_a_moment_has_its_full_time() -> None:
    core = training(2)
    core.handle(Ended(1, KILLED), 0.0)
    wait(core, 1)
    core.handle(Stopped(0), LEAVE_NOTICE_S)
    core.handle(Tick(), LEAVE_NOTICE_S)
    assert core.handle(Tick(), LEAVE_S) == [Look(0)]
    assert core.handle(Tick(), LEAVE_S + LOOK_ANSWER_S) == []
    assert core.handle(Tick(), LEAVE_S + LOOK_ANSWER_S + START_NOTICE_S) == [Look(0)]
    (kill,) = core.handle(Tick(), END_S)
    assert isinstance(kill, Kill)


def test_of_several_that_were_stopped_each_is_looked_at() -> None:
    core = training()
    core.handle(Ended(1, KILLED), 0.0)
    for rank in (0, 2):
        core.handle(Stopped(rank), LEAVE_NOTICE_S)
    core.handle(Tick(), LEAVE_NOTICE_S)
    effects = core.handle(Tick(), LEAVE_S)
    assert {0, 2} <= {one.rank for one in effects if isinstance(one, Look)}


def test_a_survivor_that_goes_on_when_others_have_left_has_as_long_as_they_wait() -> None:
    core = training()
    core.handle(Ended(1, KILLED), 0.0)
    wait(core, 1)
    core.handle(Stopped(0), 10.0)
    core.handle(Tick(), 10.0)
    core.handle(Waiting(2, 7), 20.0)
    stopped_until_s = 10.0 + LEAVE_S - LEAVE_NOTICE_S
    assert core.handle(Tick(), stopped_until_s) == [Look(0)]
    assert core.handle(Tick(), stopped_until_s + LOOK_ANSWER_S) == []
    (kill,) = core.handle(Tick(), 20.0 + LEAVE_S)
    assert isinstance(kill, Kill)


def test_a_stopped_survivor_is_said_once_with_the_same_seconds_whoever_leaves_when() -> None:
    for leaves_first in (True, False):
        core = training()
        core.handle(Ended(1, KILLED), 0.0)
        wait(core, 1)
        said: list[tuple[int, float]] = []
        for now_s in (1.0, LEAVE_NOTICE_S, 1.0 + LEAVE_NOTICE_S, 3 * LEAVE_NOTICE_S, LEAVE_S - 1.0):
            effects = core.handle(Tick(), now_s)
            for one in effects:
                if isinstance(one, Look) and one.rank == 0:
                    core.handle(Stopped(0), now_s)
            said += awaited([*effects, *core.handle(Tick(), now_s)])
            if now_s == (1.0 if leaves_first else 1.0 + LEAVE_NOTICE_S):
                core.handle(Waiting(2, 7), now_s)
        assert said == [(0, LEAVE_S - LEAVE_NOTICE_S)]


@pytest.mark.parametrize("over_first", [True, False])
def test_who_dies_between_the_end_of_all_loops_and_saying_so_makes_nobody_train_again(over_first: bool) -> None:
    core = training()
    events = [Over(0), Ended(1, 1, raised="ValueError: bad batch")]
    effects = [effect for event in events[:: 1 if over_first else -1] for effect in core.handle(event, 0.0)]
    assert isinstance(effects[-1], Stop)
    golden.says(effects[-1].failure)


def test_the_end_of_an_earlier_loop_of_another_rank_does_not_end_the_job() -> None:
    core = training(2)
    core.handle(Over(1), 0.0)
    core.handle(Begun(1), 0.0)
    assert core.handle(Ended(1, KILLED), 0.0)[-1] == Start(1)
    assert core.handle(Over(0), 0.0) == [], "of the first loop, while the second one has begun"


def test_loops_of_an_earlier_entry_are_not_those_of_this_one() -> None:
    core = training(2)
    core.handle(Ended(1, KILLED), 0.0)
    assert wait(core, 1, 0, step=5)[-1] == Enter(1, step=5)
    core.handle(Begun(0), 1.0)
    assert core.handle(Ended(1, KILLED), 1.0)[-1] == Start(1), "before its loop has begun here"
    assert core.handle(Over(0), 1.0) == [], "of the loop that rank 1 has not begun"
    core.handle(Ended(1, KILLED), 2.0)
    assert core.handle(Tick(), 2.0 + START_PAUSES_S[1]) == [Start(1)], "nor has the process that replaces it"


def test_a_save_takes_its_time_however_soon_a_spare_is_ready() -> None:
    core = training()
    core.handle(Ended(1, KILLED), 0.0)
    assert wait(core, 1) == []
    assert {type(effect) for effect in core.handle(Tick(), END_S - LEAVE_S - 1.0)} == {Look}
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


def killed_at(core: LauncherCore, *stopped: int, until_s: float) -> list[tuple[float, int]]:
    """Who is killed when, up to then; whoever is asked says that these ranks are stopped."""
    kills: list[tuple[float, int]] = []
    while core.deadline_s is not None and core.deadline_s <= until_s:
        now_s = core.deadline_s
        effects = core.handle(Tick(), now_s)
        looked = [one.rank for one in effects if isinstance(one, Look) and one.rank in stopped]
        effects += [effect for rank in looked for effect in core.handle(Stopped(rank), now_s)]
        kills += [(now_s, one.rank) for one in effects if isinstance(one, Kill)]
    return kills


def test_a_spare_that_does_not_answer_is_waited_for_no_longer_than_a_minute() -> None:
    core = training(2)
    core.handle(Ended(1, KILLED), 0.0)
    assert core.handle(Imported(1), 0.0) == []
    wait(core, 0, step=7)
    (awaited_,) = core.handle(Tick(), LEAVE_NOTICE_S)
    (kill,) = core.handle(Tick(), SPARE_S)
    assert isinstance(awaited_, Awaited)
    assert isinstance(kill, Kill)
    golden.says(f"{awaited_.what}\n{kill.why}")
    assert core.handle(Ended(1, KILLED), SPARE_S) == []
    assert core.handle(Tick(), SPARE_S + START_PAUSES_S[1]) == [Start(1)]
    assert killed_at(core, until_s=START_S) == [], "it is a new process, which has to import everything"


def test_that_a_process_was_a_spare_is_too_late_once_it_waits_or_is_killed() -> None:
    core = training(2)
    core.handle(Ended(1, KILLED), 0.0)
    wait(core, 1)
    core.handle(Imported(1), 0.0)
    assert core.place(1) is Place.WAITING
    assert [rank for _, rank in killed_at(core, until_s=END_S)] == [0]


def test_a_new_process_that_is_stopped_in_its_imports_is_replaced_after_a_minute() -> None:
    core = training(2)
    core.handle(Ended(1, KILLED), 0.0)
    wait(core, 0, step=7)
    ((killed_s, rank),) = killed_at(core, 1, until_s=SPARE_S + LOOK_ANSWER_S)
    assert rank == 1
    assert killed_s > START_NOTICE_S


def test_a_new_process_that_goes_on_after_a_stop_has_the_time_that_imports_take() -> None:
    core = training(2)
    core.handle(Ended(1, KILLED), 0.0)
    wait(core, 0, step=7)
    assert core.handle(Tick(), START_NOTICE_S) != []
    core.handle(Stopped(1), START_NOTICE_S)
    assert killed_at(core, until_s=START_S) == [(START_S, 1)]


@pytest.mark.parametrize("event", [Ended(1, 1, "exit code 1", "ValueError: x"), Ended(1, UNKNOWN_CODE)], ids=["x", ""])
def test_why_a_process_has_ended_is_said_where_it_is_known(event: Ended) -> None:
    golden.says(event.words)


def test_a_failure_after_the_loop_stops_the_job_and_a_new_loop_is_looked_after() -> None:
    core = training()
    for rank in range(3):
        assert core.handle(Over(rank), 0.0) == []
    core.handle(Begun(0), 0.0)
    assert core.handle(Ended(0, KILLED), 0.0)[-1] == Start(0)
    (stop,) = core.handle(Ended(1, 1), 0.0)
    assert isinstance(stop, Stop)
    assert stop.failure is not None


@pytest.mark.parametrize("core", [training(), LauncherCore((0, 1))], ids=["in main", "before it"])
@pytest.mark.parametrize(("code", "lasting"), [(2, True), (2, False), (0, True)])
def test_what_each_new_process_would_meet_again_ends_the_job_at_once_with_its_line(
    core: LauncherCore, code: int, lasting: bool
) -> None:
    """Unless the script has caught it, and has ended well."""
    core = copy.deepcopy(core)
    effects = core.handle(Ended(1, code, raised="train.py:7: no such setting", lasting=lasting), 1.0)
    assert (effects == [Stop("rank 1: train.py:7: no such setting", lasting=True)]) == (lasting and code > 0)


def test_what_a_process_says_that_is_to_be_killed_does_not_end_the_job() -> None:
    core = training()
    core.handle(Ended(1, KILLED), 0.0)
    wait(core, 1)
    core.handle(Tick(), END_S)
    assert core.handle(Inside(0, 0, True), END_S) == []
    assert core.place(0) is Place.KILLED
    assert core.handle(Ended(0, 2, raised="too late", lasting=True), END_S) == [Start(0)]


def test_a_launcher_of_another_host_that_is_lost_stops_the_job() -> None:
    assert training().handle(Lost("the other host has ended"), 0.0) == [Stop("the other host has ended")]


@pytest.mark.parametrize("heard", [True, False], ids=["all have been heard of", "before a word of them"])
def test_a_death_after_a_launcher_has_followed_another_one_ends_the_entry(heard: bool) -> None:
    core = LauncherCore((0, 1, 2), keeps=True)
    core.take_over(4, 7)
    for rank in range(3 if heard else 0):
        assert core.handle(Inside(rank, 4, True), 0.0) == []
    assert (core.entry, core.deadline_s) == (4, None)
    assert core.handle(Ended(1, KILLED), 0.0) == [Start(1)]
    assert core.entry == 5
    core.handle(Waiting(0, 8, entered=4), 1.0)
    killed = [effect.rank for effect in core.handle(Tick(), 1.0 + LEAVE_S) if isinstance(effect, Kill)]
    assert killed == [2], "it does not leave, though others have"


def test_a_launcher_that_knows_nothing_learns_that_all_are_in_main() -> None:
    core = LauncherCore((0, 1, 2))
    for rank in range(3):
        assert core.handle(Inside(rank, 4, True), 0.0) == []
    assert core.deadline_s is None, "nobody has to leave"


def test_a_launcher_learns_that_a_later_entry_than_was_kept_has_begun() -> None:
    core = LauncherCore((0, 1), keeps=True)
    core.take_over(4, 7)
    core.handle(Inside(0, 6, True), 0.0)
    assert core.entry == 6


@pytest.mark.parametrize("begun", [(0, 1), (0,), ()], ids=str)
def test_a_launcher_that_knows_nothing_calls_those_back_that_another_one_has_let_in(begun: tuple[int, ...]) -> None:
    """Once all are heard of. A controller does it where it looks after all of them; who has trained is replaced."""
    core = LauncherCore((0, 1, 2))
    inside = [Inside(rank, 4, rank in begun, int(rank in begun)) for rank in (0, 1)]
    told: list[Effect] = [] if len(begun) == 2 else [Abandon(0), Abandon(1)]
    assert [effect for event in inside for effect in core.handle(event, 0.0)] == []
    assert core.handle(Waiting(2), 0.0) == told
    assert core.handle(inside[1], 0.0) == told, "its launcher has linked itself again"
    assert (core.entry, core.deadline_s is None) == (5, False)
    assert condemned(wait(core, 0, 1)) == [*begun]


def test_a_failure_in_main_counts_for_processes_that_another_launcher_has_let_in() -> None:
    core = LauncherCore((0, 1))
    for rank in (0, 1):
        core.handle(Inside(rank, 4, False, 0), 0.0)
    for rank in (1, 0):
        core.handle(Ended(rank, 1), 0.0)
        effects = wait(core, 0, 1)
    assert condemned(effects) == [1]


def test_a_launcher_that_knows_nothing_goes_on_after_the_newest_entry_of_all() -> None:
    core = LauncherCore((0, 1, 2))
    events = [Waiting(rank, 7, entered=entry) for rank, entry in enumerate((2, 4, -1))]
    assert [effect for event in events for effect in core.handle(event, 0.0)] == [Enter(5, step=7)]


def test_new_processes_have_not_trained_though_what_was_kept_says_that_all_are_in_main() -> None:
    core = LauncherCore((0, 1))
    core.take_over(4, 0)
    assert [one for rank in (0, 1) for one in core.handle(Waiting(rank), 1.0)] == [Enter(5)]


def test_a_launcher_that_has_stopped_does_nothing() -> None:
    core = training()
    assert core.handle(Lost("a host is lost"), 1.0) == [Stop("a host is lost")]
    for event in (Waiting(0), Ended(1, KILLED), Lost("again"), Tick()):
        assert core.handle(event, 1e6) == []
