"""Everything but a plain kill: exceptions, a saver that dies, signals, launchers that restart, ranks that leave."""

from __future__ import annotations

import re
import signal

import pytest

from tests.integration.harness import Port
from tests.integration.kills import Kill
from tests.integration.plan import Fault, Layout
from tests.integration.rig import EXIT_NOT_SAVED, EXIT_SAVED, KILLED, Launch, Rig
from tests.selection import more

pytestmark = pytest.mark.process

LAYOUT = Layout(augment=True)
OTHERS = {0: EXIT_SAVED, 1: EXIT_SAVED, 2: EXIT_SAVED, 3: EXIT_SAVED}
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it gloo finds the addresses of dead workers in torchrun's store after a restart (torch 2.13, alone too)."""

QUICK = {"LASTWORDS_LEAVE_TIMEOUT_S": "1.5", "LASTWORDS_PROGRESS_TIMEOUT_S": "3"}


def died(rig: Rig, launch: Launch, codes: dict[int, int], expected: set[int]) -> int:
    """The launch ends with these codes and one sound checkpoint of an expected step."""
    launch.finish()
    if launch.codes != codes:
        raise launch.fail(f"the ranks ended with {launch.codes}")
    victims = [rank for rank, code in codes.items() if code == KILLED]
    return rig.check_step(launch, victims, expected)


# ---------------------------------------------------------------------- exceptions


@pytest.mark.parametrize("rank", [more(0), 2])
@pytest.mark.thorough
def test_an_exception_in_a_forward_costs_nothing(rig: Rig, rank: int) -> None:
    kill = Kill("forward", 6, (rank,))
    faults = [fault for fault in kill.faults(LAYOUT) if fault.rank != rank]
    launch = rig.launch(LAYOUT, faults=[*faults, raising(kill, rank, LAYOUT)])
    step = died(rig, launch, OTHERS | {rank: 1}, {5})
    assert "InjectedError: injected on rank" in launch.job.output(rank)
    assert launch.manifest(launch.checkpoints[-1])["cause_ranks"] == [rank]
    rig.check_resume(launch, step)


def raising(kill: Kill, rank: int, layout: Layout) -> Fault:
    """The fault that raises where `kill` would have killed."""
    (fault,) = [fault for fault in kill.faults(layout) if fault.rank == rank]
    return Fault(rank, fault.step, fault.phase, (*fault.actions[:-1], "raise"))


def test_an_exception_in_a_job_of_one_costs_nothing(rig: Rig) -> None:
    layout = Layout(world_size=1, augment=True)
    launch = rig.launch(layout, faults=[Fault(0, 6, "forward", ("raise",))])
    step = died(rig, launch, {0: 1}, {5})
    rig.check_resume(launch, step)


@pytest.mark.parametrize(("value", "code"), [("3", 3), more("no such file", 1)])
def test_a_rank_that_calls_sys_exit_keeps_its_exit_code_and_costs_nothing(rig: Rig, value: str, code: int) -> None:
    launch = rig.launch(LAYOUT, faults=[Fault(1, 6, "forward", (f"exit:{value}",))])
    step = died(rig, launch, OTHERS | {1: code}, {4, 5})
    assert launch.manifest(launch.checkpoints[-1])["cause_ranks"] == [1]
    assert len(launch.last_words(1)) == 1
    assert ("no such file" in launch.job.output(1).splitlines()) is (code == 1)
    rig.check_resume(launch, step)


@pytest.mark.thorough
def test_an_exception_without_a_with_block_is_held_by_the_excepthook(rig: Rig) -> None:
    launch = rig.launch(LAYOUT, faults=[Fault(1, 6, "forward", ("raise",))], context=False)
    step = died(rig, launch, OTHERS | {1: 1}, {4, 5})
    assert "InjectedError" in launch.job.output(1)
    rig.check_resume(launch, step)


@pytest.mark.parametrize("torn", [0, more(3)])
def test_an_exception_inside_the_update_tears_one_rank_and_another_saves(rig: Rig, torn: int) -> None:
    ahead = 1
    faults = [
        Fault(torn, 6, "update", ("await:ahead", "garbage", "raise")),
        Fault(ahead, 6, "end", ("mark:ahead",)),
    ]
    launch = rig.launch(LAYOUT, faults=faults)
    step = died(rig, launch, OTHERS | {torn: 1}, {6})
    unit = launch.manifest(launch.checkpoints[-1])["units"]["replicated"]
    assert unit["writer"] != torn
    rig.check_resume(launch, step)


@pytest.mark.thorough
def test_a_torn_rank_does_not_save_even_where_it_alone_had_begun_the_step(rig: Rig) -> None:
    faults = [Fault(0, 6, "update", ("garbage", "raise"))]
    faults += [Fault(rank, 6, "before_step", ("await_frozen",)) for rank in (1, 2, 3)]
    launch = rig.launch(LAYOUT, faults=faults)
    step = died(rig, launch, OTHERS | {0: 1}, {5})
    assert launch.manifest(launch.checkpoints[-1])["units"]["replicated"]["writer"] == 1
    rig.check_resume(launch, step)


@pytest.mark.thorough
def test_an_error_that_looks_like_a_peers_death_in_a_split_backward_is_secondary(rig: Rig) -> None:
    """One survivor's collective has raised, another's has not and the update is done: the step is kept."""
    faults = [
        Fault(2, 6, "backward_last", ("await:ahead", "kill")),
        Fault(0, 6, "backward_last", ("await_death:2", "raise:[gloo/transport/tcp/pair.cc:545] Connection closed")),
        Fault(1, 6, "end", ("mark:ahead",)),
    ]
    launch = rig.launch(LAYOUT, faults=faults)
    step = died(rig, launch, OTHERS | {2: KILLED}, {6})
    assert launch.manifest(launch.checkpoints[-1])["cause_ranks"] == [2]
    rig.check_resume(launch, step)


# ---------------------------------------------------------------------- a second death in the incident


@pytest.mark.thorough
def test_a_saver_that_dies_while_it_writes_takes_its_step_with_it(rig: Rig) -> None:
    """Rank 0 alone has made step 6; it dies as the saver, so the last words are of step 5 and nothing else is seen."""
    kill = Kill("before_step", 6, (3,), "split")
    launch = rig.launch(LAYOUT, faults=kill.faults(LAYOUT), sabotage=("dies_while_writing:0",))
    step = died(rig, launch, OTHERS | {3: KILLED, 0: KILLED}, {5})
    manifest = launch.manifest(launch.checkpoints[-1])
    assert manifest["attempt"] > 1
    assert sorted(manifest["cause_ranks"]) == [0, 3]
    assert [path.name for path in launch.checkpoints] == ["tft_saved_checkpoints-step_5"]
    rig.check_resume(launch, step)


def test_a_saver_that_dies_while_it_writes_is_replaced_by_a_holder_of_the_same_step(rig: Rig) -> None:
    kill = Kill("before_step", 6, (3,), "ahead")
    layout = LAYOUT
    faults = [*kill.faults(layout), *(Fault(rank, 6, "end", (f"mark:done-{rank}",)) for rank in (1, 2))]
    faults = [
        Fault(3, 6, "before_step", ("await:done-1", "await:done-2", *fault.actions)) if fault.rank == 3 else fault
        for fault in faults
    ]
    launch = rig.launch(layout, faults=faults, sabotage=("dies_while_writing:0",))
    step = died(rig, launch, OTHERS | {3: KILLED, 0: KILLED}, {6})
    rig.check_resume(launch, step)


@pytest.mark.thorough
def test_a_saver_that_stops_writing_is_replaced(rig: Rig) -> None:
    kill = Kill("forward", 6, (3,))
    launch = rig.launch(LAYOUT, faults=kill.faults(LAYOUT), sabotage=("hangs_while_writing:0",), env=QUICK)
    launch.finish()
    step = rig.check_step(launch, [3], {5})
    assert launch.manifest(launch.checkpoints[-1])["units"]["replicated"]["writer"] == 1
    rig.check_resume(launch, step)


# ---------------------------------------------------------------------- deaths while the black box is written


@pytest.mark.parametrize(
    "kill",
    [
        more(Kill("slot_tentative", 6, (2,))),
        more(Kill("slot_committed", 6, (2,), "ahead")),
        Kill("slot_committed", 6, (0,), "behind"),
    ],
    ids=str,
)
def test_a_death_while_the_black_box_is_written_costs_nothing(rig: Rig, kill: Kill) -> None:
    rig.survive(Layout(augment=True, loader="plain", broadcast_buffers=False), kill)


@pytest.mark.thorough
def test_a_death_while_the_start_of_an_epoch_is_written_costs_nothing(rig: Rig) -> None:
    layout = Layout(augment=True, loader="plain")
    faults = [Fault(rank, 4, "end", (f"mark:done-{rank}",)) for rank in (0, 1, 3)]
    faults.append(Fault(2, 2, "slot_epoch", (*(f"await:done-{rank}" for rank in (0, 1, 3)), "kill")))
    launch = rig.launch(layout, faults=faults)
    step = died(rig, launch, OTHERS | {2: KILLED}, {4})
    rig.check_resume(launch, step)


# ---------------------------------------------------------------------- signals


def test_a_stop_of_a_second_is_a_false_alarm_at_most_and_training_goes_on(rig: Rig) -> None:
    faults = [Fault(1, 3, "forward", ("stop:1.0",)), Fault(0, 6, "before_step", ("stop:1.0",))]
    launch = rig.launch(LAYOUT, faults=faults)
    launch.finish()
    rig.check_untouched(launch)


@pytest.mark.thorough
def test_a_stop_far_longer_than_a_lost_host_is_given_is_a_false_alarm_where_the_process_is_seen_to_live(
    rig: Rig,
) -> None:
    quick = {"LASTWORDS_KEEPALIVE_TIME_S": "0.2", "LASTWORDS_KEEPALIVE_TIMEOUT_S": "0.3"}
    launch = rig.launch(
        LAYOUT, faults=[Fault(1, 3, "forward", ("stop:3.0",))], env={**quick, "LASTWORDS_SILENCE_TIMEOUT_S": "0.3"}
    )
    launch.finish()
    rig.check_untouched(launch)
    assert {incident["outcome"] for incident in launch.incidents()} == {"FALSE_ALARM"}


@pytest.mark.thorough
def test_a_rank_that_sleeps_through_the_end_of_its_job_learns_what_was_saved(rig: Rig) -> None:
    quick = {"LASTWORDS_KEEPALIVE_TIME_S": "0.2", "LASTWORDS_KEEPALIVE_TIMEOUT_S": "0.3"}
    waits = {"LASTWORDS_STALL_TIMEOUT_S": "0.5", "LASTWORDS_CONTROLLER_LOST_S": "1"}
    launch = rig.launch(LAYOUT, faults=[Fault(1, 3, "forward", ("stop:8.0",))], env=quick | waits)
    step = died(rig, launch, OTHERS, {2, 3})
    (line,) = launch.last_words(1)
    assert f"step_{step}" in line


@pytest.mark.thorough
def test_a_terminated_job_saves_the_step_it_is_in(rig: Rig) -> None:
    faults = [Fault(rank, 6, "body", (f"mark:here-{rank}", "hang")) for rank in range(4)]
    launch = rig.launch(LAYOUT, faults=faults)
    await_marks(launch, [f"here-{rank}" for rank in range(4)])
    for rank in range(4):
        launch.job.signal(rank, signal.SIGTERM)
    step = died(rig, launch, OTHERS, {5, 6})
    rig.check_resume(launch, step)


@pytest.mark.thorough
def test_one_terminated_rank_ends_the_job_and_costs_nothing(rig: Rig) -> None:
    launch = rig.launch(LAYOUT, faults=[Fault(2, 6, "before_step", ("term",))])
    step = died(rig, launch, OTHERS, {*range(5, LAYOUT.steps)})  # training goes on until the order to stop arrives
    rig.check_resume(launch, step)


def await_marks(launch: Launch, names: list[str]) -> None:
    marks = [launch.directory / f"mark-{name}" for name in names]
    launch.job.wait_for(lambda: all(mark.exists() for mark in marks), 60, f"the marks {names}")


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
def test_torchruns_signals_do_not_tear_a_long_update(rig: Rig, workers: int) -> None:
    """torchrun's SIGTERM and the SIGCHLD of the loader's workers reach survivors in the middle of an update."""
    layout = Layout(augment=True, workers=workers)
    survivors = (0, 2, 3)
    faults = [Fault(rank, 6, "update", (f"mark:update-{rank}", "flip", "sleep:2.0", "flip")) for rank in survivors]
    faults.append(Fault(1, 6, "before_step", (*(f"await:update-{rank}" for rank in survivors), "kill")))
    launch = rig.launch(layout, faults=faults, launcher="torchrun")
    launch.finish()
    step = rig.check_last_words(launch, [1], {6})
    rig.check_resume(launch, step)


# ---------------------------------------------------------------------- again and again


@pytest.mark.thorough
def test_five_kills_in_a_row_cost_nothing(rig: Rig) -> None:
    layout = Layout(model="medium", augment=True, epochs=3)
    kills = [
        Kill("forward", 2, (1,)),
        Kill("before_step", 4, (0,), "ahead"),
        Kill("update", 6, (2, 3), "ahead"),
        Kill("backward", 8, (0, 1, 3)),
        Kill("end", 11, (3,), "ahead"),
    ]
    port = Port()  # of all launches: each controller takes the address over from the one before
    launch, step = rig.die(layout, kills[0], port=port)
    for kill in kills[1:]:
        launch, step = rig.die(layout, kill, recover=True, port=port)
    rig.check_resume(launch, step, port=port)
    assert [path.name.rpartition("_")[2] for path in launch.checkpoints] == ["1", "4", "6", "7", "11"]


@pytest.mark.thorough
def test_torchrun_restarts_and_resumes_by_itself(rig: Rig) -> None:
    layout = Layout(augment=True)
    faults = [
        Fault(1, 3, "forward", ("kill",), restart=0),
        Fault(0, 6, "update", ("kill",), restart=1),
    ]
    launch = rig.launch(
        layout, faults=faults, launcher="torchrun", launcher_arguments=["--max-restarts=3"], env=FRESH_STORE
    )
    launch.finish(180)
    if launch.codes != {-1: 0}:
        raise launch.fail(f"torchrun ended with {launch.codes}")
    difference = rig.difference(launch, launch.resumed_after())
    if difference is not None:
        raise launch.fail(str(difference))


# ---------------------------------------------------------------------- leaving early


def test_ranks_that_all_break_at_the_same_step_just_end(rig: Rig) -> None:
    launch = rig.launch(LAYOUT, faults=[Fault(rank, 5, "end", ("break",)) for rank in range(4)])
    launch.finish()
    assert set(launch.codes.values()) == {0}, launch.job.report()
    assert not launch.checkpoints
    assert all(launch.track.last_step(rank) == 5 for rank in range(4))


def test_one_rank_that_breaks_is_waited_for_and_then_the_others_save(rig: Rig) -> None:
    launch = rig.launch(LAYOUT, faults=[Fault(2, 5, "end", ("break",))], env=QUICK)
    launch.finish()
    step = rig.check_step(launch, [], {5})
    rig.check_resume(launch, step)


def test_a_rank_that_dies_after_its_loop_while_others_still_train(rig: Rig) -> None:
    faults = [Fault(rank, 8, "end", (f"mark:done-{rank}", "await_death:1")) for rank in (0, 2, 3)]
    faults.append(Fault(1, 8, "left", (*(f"await:done-{rank}" for rank in (0, 2, 3)), "kill")))
    launch = rig.launch(LAYOUT, faults=faults)
    step = died(rig, launch, OTHERS | {1: KILLED}, {8})
    rig.check_resume(launch, step)


# ---------------------------------------------------------------------- before the first step


@pytest.mark.parametrize(
    "fault",
    [
        more(Fault(1, 0, "before_loop", ("kill",))),
        more(Fault(0, 0, "before_loop", ("kill",))),
        more(Fault(2, 1, "epoch_start", ("kill",))),
        more(Fault(3, 1, "forward", ("kill",))),
        Fault(0, 1, "backward", ("kill",)),
    ],
    ids=lambda fault: f"{fault.phase}-rank{fault.rank}",
)
def test_a_death_before_the_first_step_is_told_and_leaves_no_directory(rig: Rig, fault: Fault) -> None:
    launch = rig.launch(LAYOUT, faults=[fault])
    launch.finish()
    codes = dict.fromkeys(range(4), EXIT_NOT_SAVED) | {fault.rank: KILLED}
    if launch.codes != codes:
        raise launch.fail(f"the ranks ended with {launch.codes}")
    assert not launch.checkpoints
    for rank in set(range(4)) - {fault.rank}:
        (line,) = launch.last_words(rank)
        assert re.search(rf"rank {fault.rank}\b.*nothing new to save", line), line


@pytest.mark.thorough
def test_an_older_checkpoint_survives_a_death_before_the_first_step(rig: Rig) -> None:
    killed, step = rig.die(LAYOUT, Kill("forward", 6, (1,)))
    again = rig.launch(LAYOUT, faults=[Fault(1, 0, "before_loop", ("kill",))], recover=True)
    again.finish()
    assert [path.name for path in again.checkpoints] == [path.name for path in killed.checkpoints]
    rig.check_resume(killed, step)
