"""The launcher's decisions, each rule alone."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import pytest

from lastwords.core_events import Tick
from lastwords.launcher.core import (
    DEATHS_MAX,
    END_S,
    KILLED_S,
    LEAVE_NOTICE_S,
    LEAVE_S,
    NAMED_RANKS_MAX,
    REPEAT_STEPS,
    REPEATS_MAX,
    TOLD_S,
    LauncherCore,
    Rank,
    RankPlace,
    Roster,
)
from lastwords.launcher.events import (
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
from tests import golden

KILLED, ASKED, SAVED = -9, -15, 75


def started(ranks: int = 3) -> LauncherCore:
    """A job whose first generation has begun."""
    core = LauncherCore(tuple(range(ranks)))
    assert effects_of(core, *map(Ready, range(ranks))) == [Enter(0)]
    return core


def training(ranks: int = 3) -> LauncherCore:
    """A job whose loop has begun."""
    core = started(ranks)
    begins(core, *range(ranks))
    return core


def effects_of(core: LauncherCore, *events: Event, now_s: float = 0.0) -> list[Effect]:
    return [effect for event in events for effect in core.handle(event, now_s)]


def begins(core: LauncherCore, *ranks: int, step: int = 0, resumes: bool = True) -> None:
    for rank in ranks:
        assert (
            effects_of(
                core, Guarded(rank), Begun(rank, step, lacks="" if resumes else "call that before the loop, every time")
            )
            == []
        )


def leave(core: LauncherCore, *ranks: int, step: int = 0, now_s: float = 0.0) -> list[Effect]:
    """They are told to, and end."""
    events: list[Event] = [event for rank in ranks for event in (Leaving(rank, step), Ended(rank, SAVED))]
    return effects_of(core, *events, now_s=now_s)


def fails(core: LauncherCore, rank: int, step: int = 0, raised: str = "", *, begun: bool = True) -> list[Effect]:
    """It dies, or raises; the others leave. All begin again."""
    if raised:
        effects = effects_of(core, Leaving(rank, step), Ended(rank, 1, raised=raised))
    else:
        effects = effects_of(core, Ended(rank, KILLED))
    effects += leave(core, *(other for other in core.world if other != rank), step=step)
    if begun and not core.stopped:
        begins(core, *core.world, step=step)
    return effects


def failure_of(effects: list[Effect]) -> str:
    """Of the one that stops the job."""
    (stop,) = effects
    assert isinstance(stop, Stop)
    assert stop.failure is not None
    return stop.failure


def ranks_of(effects: list[Effect], kind: type[End] | type[Kill] | type[Look] | type[Awaited]) -> list[int]:
    return [one.rank for one in effects if isinstance(one, kind)]


# ---------------------------------------------------------------------- a generation after the other


def test_a_rank_that_comes_or_ends_makes_no_work_for_each_of_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or 16,384 of them keep the launcher busy for minutes."""
    walks = 0

    def counted(roster: Roster, place: RankPlace) -> Iterator[tuple[int, Rank]]:
        nonlocal walks
        walks += 1
        return shipped(roster, place)

    shipped = Roster.at
    monkeypatch.setattr(Roster, "at", counted)
    core = training(ranks=50)
    assert fails(core, 1, step=7) == [Enter(1, step=7)]
    assert walks < 10


def test_nobody_begins_before_all_can() -> None:
    core = LauncherCore((0, 1))
    assert effects_of(core, Ready(0)) == []
    assert effects_of(core, Ready(1)) == [Enter(0)]


@pytest.mark.parametrize("seen_first", [True, False], ids=["its end", "the others"])
def test_after_a_death_all_begin_anew_once_all_have_ended(seen_first: bool) -> None:
    core = training()
    death = [Ended(1, KILLED)]
    assert effects_of(core, *(death if seen_first else [])) == []
    assert leave(core, 0, step=7) == []
    assert effects_of(core, Leaving(2, 7), Updated(2), *([] if seen_first else death)) == []
    assert effects_of(core, Ended(2, SAVED)) == [Enter(1, step=7)]
    assert core.entry == 1


def test_a_job_of_one_rank_begins_anew_once_for_each_failure() -> None:
    assert effects_of(training(1), Ended(0, KILLED)) == [Enter(1)]


def test_before_a_controller_looks_after_the_others_they_are_ended_from_here() -> None:
    core = training()
    fails(core, 1, step=7, begun=False)
    assert effects_of(core, Ended(1, KILLED)) == [End(0), End(2)]
    assert core.deadline_s == TOLD_S
    assert effects_of(core, Ended(0, ASKED)) == []
    assert ranks_of(effects_of(core, Tick(), now_s=TOLD_S), Kill) == [2]
    assert effects_of(core, Ended(2, KILLED)) == [Enter(2, step=7)]


@pytest.mark.parametrize("says", [Guarded(0), Begun(0)], ids=["guarded", "begun"])
def test_one_that_is_looked_after_says_so_for_all_since_they_have_registered_together(says: Event) -> None:
    """What another rank has said may be on its way: ended from here, it would leave without saving."""
    core = started()
    assert effects_of(core, says, Ended(1, KILLED)) == []
    assert leave(core, 0, 2, step=7) == [Enter(1, step=7)]


def test_between_two_loops_nobody_is_looked_after_until_all_have_registered_again() -> None:
    core = training(2)
    effects_of(core, Over(0), Over(1))
    assert effects_of(copy.deepcopy(core), Ended(1, KILLED)) == [End(0)]
    effects_of(core, Guarded(0))
    assert effects_of(copy.deepcopy(core), Ended(1, KILLED)) == [], "rank 0 is told by its controller"
    effects_of(core, Begun(0), Over(0))
    assert effects_of(core, Ended(0, KILLED)) == [], "rank 1 has not come to the end of this loop"


def test_what_was_resumed_from_counts_as_progress() -> None:
    core = training(2)
    for step in range(10, 100, 10):
        assert Enter in map(type, fails(core, 1, begun=False))
        begins(core, 0, 1, step=step)


def test_deaths_between_which_steps_are_saved_go_on_for_ever() -> None:
    core = training(2)
    for step in range(1, 20):
        assert fails(core, 1, step) == [Enter(step, step=step)]


def test_a_rank_that_had_come_to_its_end_begins_again_too() -> None:
    core = training(2)
    assert effects_of(core, Ended(0, 0)) == []
    assert effects_of(core, Ended(1, KILLED)) == [Enter(1)]


def test_the_job_ends_when_all_have_ended_well() -> None:
    core = training(2)
    assert effects_of(core, Over(0), Ended(0, 0), Over(1)) == []
    assert effects_of(core, Ended(1, 0)) == [Stop(None)]


# ---------------------------------------------------------------------- who is waited for, and for how long


def test_a_rank_that_does_not_leave_is_killed_and_all_begin_anew() -> None:
    core = training()
    effects_of(core, Ended(1, KILLED))
    leave(core, 0, step=7, now_s=1.0)
    assert Kill not in map(type, effects_of(core, Tick(), now_s=LEAVE_S))
    assert ranks_of(effects_of(core, Tick(), now_s=1.0 + LEAVE_S), Kill) == [2]
    assert effects_of(core, Ended(2, KILLED)) == [Enter(1, step=7)]


def test_for_whom_everybody_waits_is_said_once_and_soon_and_it_is_looked_at() -> None:
    core = training()
    effects_of(core, Ended(1, KILLED))
    leave(core, 0, now_s=1.0)
    assert core.deadline_s == LEAVE_NOTICE_S
    assert effects_of(core, Tick(), now_s=1.0) == []
    assert effects_of(core, Tick(), now_s=1.0 + LEAVE_NOTICE_S) == [
        Look(2), Awaited(2, "has not ended", LEAVE_S - LEAVE_NOTICE_S)
    ]  # fmt: skip
    assert ranks_of(effects_of(core, Tick(), now_s=LEAVE_S), Awaited) == []


def test_nobody_is_named_while_a_checkpoint_is_written_and_none_that_has_ended_in_time() -> None:
    core = training()
    effects_of(core, Ended(1, KILLED))
    assert effects_of(core, Tick(), now_s=END_S / 2) == [Look(0), Look(2)]
    assert leave(core, 0, 2, step=7) == [Enter(1, step=7)]
    assert core.deadline_s is None
    assert effects_of(core, Tick(), now_s=END_S) == []


def test_of_very_many_late_ranks_a_few_are_named() -> None:
    core = training(100)
    effects_of(core, Ended(1, KILLED))
    leave(core, 0)
    assert len(ranks_of(effects_of(core, Tick(), now_s=LEAVE_NOTICE_S), Awaited)) == NAMED_RANKS_MAX


def test_where_nobody_leaves_all_are_killed_in_the_end() -> None:
    core = training()
    effects_of(core, Ended(1, KILLED))
    assert ranks_of(effects_of(core, Tick(), now_s=END_S - LEAVE_S), Awaited) == [0, 2]
    assert ranks_of(effects_of(core, Tick(), now_s=END_S), Kill) == [0, 2]


def test_one_that_does_not_end_though_it_is_killed_stops_the_job() -> None:
    core = training(2)
    effects_of(core, Ended(1, KILLED), Tick(), now_s=END_S)
    assert effects_of(core, Tick(), now_s=2 * END_S) == [Kill(0, "has not ended")]
    assert effects_of(core, Over(0), Tick(), now_s=2 * END_S + TOLD_S) == [], "which it had said before"
    golden.says(failure_of(effects_of(core, Tick(), now_s=2 * END_S + KILLED_S)))


def test_one_that_is_stopped_is_killed_at_once_when_others_have_left_and_long_before_one_that_writes() -> None:
    core = training()
    effects_of(core, Ended(1, KILLED), Stopped(0), now_s=LEAVE_NOTICE_S)
    assert ranks_of(effects_of(core, Tick(), now_s=LEAVE_NOTICE_S), Awaited) == [0]
    left = copy.deepcopy(core)
    assert ranks_of(effects_of(core, Tick(), now_s=LEAVE_NOTICE_S + LEAVE_S), Kill) == [0]
    leave(left, 2, step=7)
    assert effects_of(left, Stopped(0)) == [Kill(0, "it is stopped")]
    assert effects_of(left, Stopped(0)) == [], "it is killed"


def test_whoever_is_stopped_while_nobody_has_to_end_may_go_on() -> None:
    core = training()
    assert effects_of(core, Stopped(0)) == []
    assert core.deadline_s is None
    assert effects_of(core, Ended(0, KILLED), Stopped(0)) == []


def test_what_is_heard_of_a_rank_after_its_end_makes_nobody_end() -> None:
    """A supervisor repeats itself."""
    core = training()
    assert effects_of(core, Ended(1, KILLED), Leaving(1, 7), Over(1)) == []
    assert ranks_of(effects_of(core, Tick(), now_s=LEAVE_S), Kill) == []


def test_one_that_has_lost_its_controller_does_not_say_that_the_others_have_no_more_to_save() -> None:
    core = training()
    effects_of(core, Ended(1, KILLED), Leaving(0, ended=7, alone=True), Ended(0, 76))
    assert ranks_of(effects_of(core, Tick(), now_s=2 * LEAVE_S), Kill) == []
    effects_of(core, Leaving(2, 7), now_s=3 * LEAVE_S)
    assert ranks_of(effects_of(core, Tick(), now_s=4 * LEAVE_S), Kill) == [2]


def test_one_that_comes_to_the_end_of_its_loop_when_others_have_left_has_no_more_time_for_it() -> None:
    core = training()
    begins(core, 1)
    leave(core, 1, step=7)
    effects_of(core, Over(0), now_s=1.0)
    assert ranks_of(effects_of(core, Tick(), now_s=1.0 + LEAVE_S), Kill) == [0, 2]


# ---------------------------------------------------------------------- what stops the job


def test_a_rank_that_ends_before_anything_was_protected_is_not_healed() -> None:
    golden.says(failure_of(effects_of(started(2), Ended(1, 2))))


def test_a_launcher_of_another_host_that_is_lost_stops_the_job() -> None:
    core = training()
    assert effects_of(core, Lost("the other host has ended")) == [Stop("the other host has ended")]
    assert effects_of(core, Ready(0), Ended(1, KILLED), Lost("again"), Tick(), now_s=1e6) == []


@pytest.mark.parametrize("core", [training(), started(2)], ids=["trains", "before it"])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize(("code", "lasting"), [(2, True), (2, False), (0, True)])
def test_what_each_new_process_would_meet_again_ends_the_job_at_once_with_its_line(
    core: LauncherCore, left: bool, code: int, lasting: bool
) -> None:
    """Unless the script has caught it, and has ended well."""
    core = copy.deepcopy(core)
    ended = Ended(1, code, raised="train.py:7: no such setting", lasting=lasting)
    effects = effects_of(core, *([Leaving(1)] if left else []), ended)
    assert any(isinstance(one, Stop) and one.lasting for one in effects) == (lasting and code > 0)


def test_what_a_process_says_that_is_to_be_killed_does_not_end_the_job() -> None:
    core = training(2)
    effects_of(core, Ended(1, KILLED), Tick(), now_s=END_S)
    effects_of(core, Tick(), now_s=2 * END_S)
    assert effects_of(core, Ended(0, 2, raised="too late", lasting=True)) == [Enter(1)]


def test_a_loop_that_does_not_resume_is_not_begun_again() -> None:
    core = started(2)
    begins(core, 0, 1, resumes=False)
    assert effects_of(core, Ended(1, KILLED)) == [], "the others save first"
    golden.says(failure_of(leave(core, 0, step=7)))


@pytest.mark.parametrize("step", [7, 0], ids=["saved", "not saved"])
def test_a_loop_that_no_start_resumes_is_not_begun_by_torchs_agents_either_once_it_is_saved(step: int) -> None:
    core = started(2)
    effects_of(core, *(one for rank in (0, 1) for one in (Guarded(rank), Begun(rank, lacks="that", saved_only=True))))
    assert effects_of(core, Ended(1, KILLED)) == []
    (stop,) = leave(core, 0, step=step)
    assert isinstance(stop, Stop)
    assert (stop.saved, stop.lasting) == (step == 7, step == 7)
    golden.says(str(stop.failure))


@pytest.mark.parametrize("over_first", [True, False])
def test_who_dies_between_the_end_of_all_loops_and_saying_so_makes_nobody_train_again(over_first: bool) -> None:
    core = training(2)
    events = [Over(0), Ended(1, 1, raised="ValueError: bad batch")]
    assert effects_of(core, *events[:: 1 if over_first else -1]) == [End(0)], "nobody looks after it any more"
    golden.says(failure_of(effects_of(core, Ended(0, ASKED))))


def test_a_failure_after_the_loop_stops_the_job_once_all_have_ended() -> None:
    core = training()
    assert effects_of(core, *map(Over, range(3)), Ended(0, 0), Ended(1, 1, raised="ValueError: no disk")) == [End(2)]
    golden.says(failure_of(effects_of(core, Ended(2, ASKED))))


def test_who_is_told_to_leave_between_two_loops_does_not_train_again_either() -> None:
    """One of them was stopped, say, which is no end by itself."""
    core = training(2)
    effects_of(core, Over(0), Over(1), Guarded(0), Guarded(1))
    golden.says(failure_of(leave(core, 0, 1)))


@pytest.mark.parametrize("late", [True, False], ids=["heard of late", "heard of"])
def test_the_end_of_an_earlier_loop_does_not_end_the_job(late: bool) -> None:
    core = training(2)
    said = [Over(0), Guarded(0), Begun(0)]
    assert effects_of(core, Over(1), Guarded(1), Begun(1), *([] if late else said)) == []
    assert effects_of(core, Ended(1, KILLED), *(said if late else [])) == []
    assert leave(core, 0, step=5) == [Enter(1, step=0)], "step 5 of the second loop says nothing of the first one"
    begins(core, 0, 1)
    assert effects_of(core, Ended(1, KILLED)) == []
    assert leave(core, 0, step=3) == [Enter(2, step=3)], "loops are counted anew"


def test_a_register_that_is_left_without_a_loop_counts_as_one() -> None:
    core = started(2)
    effects_of(core, *(event for rank in (0, 1) for event in (Guarded(rank), Over(rank))))
    assert effects_of(copy.deepcopy(core), Ended(0, KILLED)) == [End(1)]
    begins(core, 0, 1)
    assert effects_of(core, Ended(0, KILLED)) == []
    assert leave(core, 1) == [Enter(1)]


# ---------------------------------------------------------------------- crash loops


def failing(failures: int, step: int = 5) -> LauncherCore:
    """A job of two in which rank 1 has died so often; with the first failure the step was saved."""
    core = training(2)
    for _ in range(failures):
        fails(core, 1, step)
    assert not core.stopped
    return core


def test_a_crash_loop_stops() -> None:
    golden.says(failure_of(fails(failing(1 + DEATHS_MAX), 1, 5)))


def test_processes_that_never_get_as_far_as_their_loop_are_a_crash_loop() -> None:
    core = training(2)
    fails(core, 1, 7, begun=False)
    for _ in range(DEATHS_MAX):
        assert effects_of(core, Ended(1, 1, raised="ImportError: no module"))[0] == End(0)
        effects = effects_of(core, Ended(0, ASKED))
        assert [type(one) for one in effects] == [Enter]
    effects_of(core, Ended(1, 1, raised="ImportError: no module"))
    golden.says(failure_of(effects_of(core, Ended(0, ASKED))))


@pytest.mark.parametrize("code", [KILLED, 0])
@pytest.mark.parametrize("saves", [True, False])
def test_whether_it_is_of_no_use_to_go_on_does_not_depend_on_what_is_seen_first(saves: bool, code: int) -> None:
    """Others may leave with one more step that is saved, which makes it no crash loop."""
    core = training()
    for _ in range(1 + DEATHS_MAX):
        fails(core, 1, 5)
    said = set()
    for order in itertools.permutations((0, 1, 2)):
        one = copy.deepcopy(core)
        effects = [
            effect for rank in order
            for effect in (effects_of(one, Ended(1, code)) if rank == 1 else leave(one, rank, step=5 + saves))
        ]  # fmt: skip
        assert one.stopped is not saves
        said |= {effect.failure for effect in effects if isinstance(effect, Stop)}
    assert len(said) == 1 - saves
    for failure in said:
        golden.says(str(failure))


def test_a_rank_that_has_ended_well_is_not_named_for_the_exception_of_another() -> None:
    """In a script without a training loop, whose ranks do not come to its end together."""
    core = started(2)
    begins(core, 0, 1)
    effects: list[Effect] = []
    while not core.stopped:
        effects = effects_of(core, Ended(0, 0), Ended(1, 1, raised="ValueError: bad batch"))
    golden.says(failure_of(effects))


def test_an_exception_is_a_ranks_own_though_its_controller_has_told_it_to_leave() -> None:
    """It does so once a checkpoint is written."""
    core = failing(1 + DEATHS_MAX)
    assert leave(core, 0, step=5) == []
    golden.says(failure_of(effects_of(core, Leaving(1, 5), Ended(1, 1, "exit code 1", "ValueError: bad batch"))))


@pytest.mark.parametrize("saved", [1, REPEAT_STEPS, REPEAT_STEPS + 1])
def test_how_many_steps_are_saved_between_exceptions_does_not_depend_on_what_is_seen_first(saved: int) -> None:
    for orders in itertools.product([True, False], repeat=1 + REPEATS_MAX):
        core = training(2)
        for turn, first in enumerate(orders, 1):
            for rank in (1, 0) if first else (0, 1):
                end = Ended(1, 1, raised="ValueError: bad batch") if rank else Ended(0, SAVED)
                effects_of(core, Leaving(rank, turn * saved), end)
            if not core.stopped:
                begins(core, 0, 1, step=turn * saved)
        assert core.stopped is (saved <= REPEAT_STEPS), orders


@pytest.mark.parametrize("begun", [True, False])
def test_the_same_exception_again_and_again_is_a_crash_loop_though_each_time_a_step_is_saved(begun: bool) -> None:
    core = training(2)
    for step in range(1, 1 + REPEATS_MAX):
        fails(core, 1, step, raised=f"ValueError: bad batch {step} at 0x7f{step}c", begun=begun)
        assert not core.stopped
    fails(core, 1, 1 + REPEATS_MAX, raised="ValueError: bad batch 17 at 0xa")
    assert core.stopped


@pytest.mark.parametrize("what", ["another rank", "another exception", "no exception", "progress", "a good entry"])
def test_failures_that_differ_are_no_crash_loop(what: str) -> None:
    core = training(2)
    for turn in range(1, 3 * REPEATS_MAX):
        step = turn * (REPEAT_STEPS + 1 if what == "progress" else 1)
        raised = "" if what == "no exception" else "ValueError: bad batch" + "!" * (turn if "exception" in what else 0)
        fails(core, turn % 2 if what == "another rank" else 1, step, raised=raised)
        if what == "a good entry" and turn % REPEATS_MAX == 0:
            fails(core, 0, step)
        assert not core.stopped


def test_where_no_process_ends_by_itself_a_crash_loop_is_one_all_the_same() -> None:
    core = training(2)
    assert leave(core, 0, 1, step=7) == [Enter(1, step=7)]
    for _ in range(DEATHS_MAX):
        assert leave(core, 0, 1) == [End(1), Enter(core.entry, step=7)]
    golden.says(failure_of(leave(core, 0, 1)[1:]))


@pytest.mark.parametrize(
    ("told", "end"),
    [(Tick(), Ended(0, 1, raised="SystemExit: 1")), (Stopped(0), Ended(0, KILLED))],
    ids=["told to end", "killed"],
)
def test_a_rank_that_is_ended_from_here_is_not_taken_for_one_that_has_failed(told: Event, end: Ended) -> None:
    core = training()
    if isinstance(told, Tick):
        fails(core, 1, step=5, begun=False)
    effects_of(core, Ended(1, KILLED))
    leave(core, 2)
    effects_of(core, told, end)
    assert core._crashes.ended_since == {1}


@pytest.mark.parametrize("event", [Ended(1, 1, "exit code 1", "ValueError: x"), Ended(1, UNKNOWN_CODE)], ids=["x", ""])
def test_why_a_process_has_ended_is_said_where_it_is_known(event: Ended) -> None:
    golden.says(event.words)


# ---------------------------------------------------------------------- a launcher that follows another one


@pytest.mark.parametrize("heard", [True, False], ids=["all have been heard of", "before a word of them"])
def test_a_death_after_a_launcher_has_followed_another_one_ends_the_generation(heard: bool) -> None:
    core = LauncherCore((0, 1, 2), keeps=True)
    core.take_over(4, 7)
    assert effects_of(core, *(Inside(rank, 4, begun=True) for rank in range(3 if heard else 0))) == []
    assert (core.entry, core.deadline_s) == (4, None)
    assert effects_of(core, Ended(1, KILLED)) == []
    assert core.entry == 5
    leave(core, 0, step=8, now_s=1.0)
    assert ranks_of(effects_of(core, Tick(), now_s=1.0 + LEAVE_S), Kill) == [2], "it does not leave, others have"


def test_a_launcher_learns_that_a_later_generation_than_was_kept_has_begun() -> None:
    core = LauncherCore((0, 1), keeps=True)
    core.take_over(4, 7)
    effects_of(core, Inside(0, 6, begun=True))
    assert core.entry == 6


def test_a_launcher_that_knows_nothing_goes_on_after_the_newest_generation_of_all() -> None:
    core = LauncherCore((0, 1, 2), keeps=True)
    assert effects_of(core, Ready(0, 2), Ready(1, 4), Ready(2), Kept(5)) == [Keep(5, 0), Enter(5)]


def test_a_launcher_that_knows_nothing_ends_those_that_another_one_has_begun_with_once_all_are_heard_of() -> None:
    core = LauncherCore((0, 1, 2), keeps=True)
    assert effects_of(core, Inside(0, 4, begun=False, loops=0), Inside(1, 4, begun=False, loops=0)) == []
    assert effects_of(core, Ready(2)) == [End(0), End(1)]
    assert core.entry == 5


def test_whose_end_was_not_heard_of_has_ended_once_it_can_be_started_again() -> None:
    core = LauncherCore((0, 1), keeps=True)
    core.take_over(4, 7)
    assert effects_of(core, Ready(0, 4)) == []
    assert (core.place(0), core.heals) == (RankPlace.READY, True)


def test_a_rank_whose_supervisor_ends_is_waited_for() -> None:
    core = LauncherCore((0, 1), keeps=True)
    effects_of(core, Ready(0), Ready(1), Kept(0), Guarded(0), Guarded(1))
    effects_of(core, Gone(1), Leaving(0, 7), Ended(0, SAVED))
    assert core.place(1) is RankPlace.ABSENT
    assert effects_of(core, Ready(1), Kept(1)) == [Keep(1, 7), Enter(1, step=7)]
