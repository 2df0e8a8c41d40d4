"""kill -9 at every place of a step of a sharded job, in each parallel layout: a pairwise selection of the matrix.

Each test kills, checks the last words, resumes, and compares every rank's every later step, bit for bit, with a run of
torch alone. test_sharded_matrix.py has the full cross product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import pytest

from tests.integration.pairwise import pairs_of, pairwise
from tests.integration.parallel_kills import AFTER_GATE, BEFORE_GATE, ShardedKill
from tests.integration.parallel_layouts import groups, parallel_layout
from tests.integration.plan import Fault, Layout
from tests.integration.rig import EXIT_NOT_SAVED, KILLED, Launch, Rig
from tests.selection import each_value_once, more, usually

pytestmark = pytest.mark.process

STEPS = {"first": 1, "third": 3, "new epoch": 4, "fifth": 5}
PARAMETERS: dict[str, tuple[Hashable, ...]] = {
    "parallel": ("tp", "hsdp", "pp", "zero1", "moe"),
    "phase": ("forward", "backward", "gate_enter", "gate", "update", "after_update", "end"),
    "survivors": ("free", "ahead", "behind", "split"),
    "victims": ("rank 0", "another", "a group", "two"),
    "step": tuple(STEPS),
    "log_reduce": ("", "before", "after"),
    "skips": ("none", "before", "then"),
}


def victims_of(who: str, layout: Layout) -> tuple[int, ...]:
    """Who dies; "two" are of different groups."""
    first, *_, last = groups(layout)
    return {"rank 0": (0,), "another": (layout.world_size - 1,), "a group": first, "two": (first[0], last[-1])}[who]


def layout_of(row: Mapping[str, Any]) -> Layout:
    step = STEPS[row["step"]]
    skipped = {"none": None, "before": (step - 1,), "then": (step,)}[row["skips"]]
    return parallel_layout(row["parallel"], log_reduce=row["log_reduce"], inf_steps=skipped)


def kill_of(row: Mapping[str, Any]) -> ShardedKill:
    victims = victims_of(row["victims"], parallel_layout(row["parallel"]))
    return ShardedKill(row["phase"], STEPS[row["step"]], victims, row["survivors"])


def is_allowed(row: Mapping[str, Any]) -> bool:
    if row["skips"] == "before" and row["step"] == "first":
        return False
    return kill_of(row).is_possible(layout_of(row))


ROWS, NEVER = pairwise(PARAMETERS, is_allowed, seed=3)  # of a few seeds the one with the fewest rows


def row_id(row: Mapping[str, Any]) -> str:
    return f"{row['parallel']}-{kill_of(row)}-{layout_of(row).key[:6]}"


def cost(row: Mapping[str, Any]) -> int:
    """Roughly, beside others: ranks with DTensors take two or three times the processor time of those without."""
    return {"hsdp": 3, "tp": 2}.get(row["parallel"], 1)


@pytest.mark.parametrize("row", each_value_once(sorted(ROWS, key=cost), but=("phase",)), ids=row_id)
def test_a_killed_run_resumes_with_the_same_bits(rig: Rig, row: Mapping[str, Any]) -> None:
    layout, kill = layout_of(row), kill_of(row)
    if kill.is_lost(layout):
        fail_clearly(rig, layout, kill)
    else:
        rig.survive(layout, kill)


@pytest.mark.parametrize(
    "kill",
    [
        more(ShardedKill("backward", 5, (0,))),
        more(ShardedKill("gate", 3, (0, 7))),
        more(ShardedKill("update", 4, (7,), "split")),
        more(ShardedKill("end", 1, (3,), "ahead")),
    ],
    ids=str,
)
def test_a_killed_run_of_eight_ranks_on_three_axes_resumes_with_the_same_bits(rig: Rig, kill: ShardedKill) -> None:
    rig.survive(parallel_layout("fsdp-tp"), kill)


@pytest.mark.thorough
def test_both_holders_of_a_part_on_three_axes_are_missed(rig: Rig) -> None:
    fail_clearly(rig, parallel_layout("fsdp-tp"), ShardedKill("forward", 4, (1, 5)))


def fail_clearly(rig: Rig, layout: Layout, kill: ShardedKill, **settings: Any) -> Launch:
    """Nobody is left who holds some part of the state: nothing is published, and every survivor says what is lost."""
    launch = rig.launch(layout, faults=kill.faults(layout), **settings)
    launch.finish()
    survivors = kill.survivor_ranks(layout)
    codes = {rank: EXIT_NOT_SAVED if rank in survivors else KILLED for rank in range(layout.world_size)}
    if launch.codes != codes or launch.checkpoints:
        raise launch.fail(f"the ranks ended with {launch.codes}, and {launch.checkpoints} were published")
    may_be_too_early = min(kill.steps_expected(layout)) == 0
    for rank in survivors:
        said = " / ".join(launch.last_words(rank))
        names_it = "cannot be saved" in said and all(f"rank {dead} died" in said for dead in kill.victims)
        if len(launch.last_words(rank)) != 1 or not (names_it or (may_be_too_early and "nothing new to save" in said)):
            raise launch.fail(f"rank {rank} said {said!r}, and should say once what cannot be saved, and who died")
    return launch


def test_the_selection_covers_every_pair_that_can_be() -> None:
    held = ("ahead", "behind", "split")
    before_gate = [phase for phase in PARAMETERS["phase"] if phase in BEFORE_GATE]
    assert {frozenset(pair) for pair in NEVER} == {
        *(frozenset({("phase", phase), ("survivors", how)}) for phase in before_gate for how in held),
        *(frozenset({("victims", "a group"), ("survivors", how)}) for how in held),
        *(frozenset({("skips", "then"), ("phase", phase)}) for phase in ("update", "after_update", "end")),
        *(frozenset({("skips", "then"), ("survivors", how)}) for how in ("ahead", "split")),
        frozenset({("skips", "before"), ("step", "first")}),
    }
    covered = set().union(*map(pairs_of, ROWS))
    for name, values_of in PARAMETERS.items():
        for value in values_of:
            assert any((name, value) in pair for pair in covered)


LAGGARD = ShardedKill("update", 4, (3,), "split")


@pytest.mark.parametrize("parallel", usually(["tp", "hsdp", "pp", "moe"], ["pp"]))
def test_a_laggard_that_is_the_last_holder_catches_up(rig: Rig, parallel: str) -> None:
    layout = parallel_layout(parallel)
    assert LAGGARD.must_proceed(layout)
    launch, step = rig.die(layout, LAGGARD)
    assert step == LAGGARD.step
    (incident,) = launch.incidents()
    assert "proceed" in str(incident["events"]), incident
    rig.check_resume(launch, step)


@pytest.mark.parametrize("parallel", [more("tp"), "pp"])
def test_without_proceed_a_split_job_loses_its_state(rig: Rig, parallel: str) -> None:
    layout = parallel_layout(parallel)
    launch = rig.launch(
        layout, faults=LAGGARD.faults(layout), sabotage=("no_proceed",), env={"LASTWORDS_SETTLE_TIMEOUT_S": "2"}
    )
    launch.finish()
    with pytest.raises(AssertionError, match="published"):
        rig.check_last_words(launch, LAGGARD.victims, LAGGARD.steps_expected(layout))


def test_a_laggard_whose_update_needs_a_rank_that_may_not_proceed_is_saved_all_the_same(rig: Rig) -> None:
    """ZeRO broadcasts inside of its step: rank 3 gets no answer from rank 2, but its own part is whole by then."""
    layout = parallel_layout("zero1")
    kill = ShardedKill("after_update", 4, (1,), "split")
    assert kill.must_proceed(layout)
    assert kill.held_ranks(layout) == [2, 3]
    assert rig.survive(layout, kill) == kill.step


def cut_off_after_update(rig: Rig, layout: Layout, slow_rank: int) -> Launch:
    """Last words of step 4 from ranks at different places of it: one has updated and is not at its scheduler yet."""
    kill = ShardedKill("end", 4, (3,))
    slow = Fault(slow_rank, 4, "after_update", ("sleep:3",))
    # The victim waits a little, or the slow one may still look at its gate, which all others have passed.
    late = [dataclasses.replace(fault, actions=("sleep:0.7", *fault.actions)) for fault in kill.faults(layout)]
    launch = rig.launch(layout, faults=[*late, slow])
    launch.finish()
    rig.check_last_words(launch, kill.victims, {4})
    (incident,) = launch.incidents()
    stands = {event["rank"]: event["stand"] for event in incident["events"] if event["what"] == "settled"}
    assert stands[slow_rank] == "UPDATED(4)", stands
    return launch


@pytest.mark.parametrize("slow_rank", [0, more(1)])
def test_writers_at_different_places_of_a_step_give_one_learning_rate(rig: Rig, slow_rank: int) -> None:
    layout = parallel_layout("tp")
    rig.check_resume(cut_off_after_update(rig, layout, slow_rank), 4)


@pytest.mark.thorough
def test_without_one_moment_for_all_units_a_learning_rate_is_that_of_another_step(rig: Rig) -> None:
    layout = parallel_layout("tp")
    resumed = rig.resume(cut_off_after_update(rig, layout, 0), sabotage=("no_one_moment",))
    difference = rig.difference(resumed, 4)
    assert difference is not None
    assert "optim/group0/lr" in difference.names, difference


@pytest.mark.thorough
def test_of_groups_0_4_and_1_5_and_2_6_and_3_7_ranks_0_2_3_and_5_write_when_rank_1_dies(rig: Rig) -> None:
    """The example of MindIO TTP's documentation: the lowest rank of each group that lives."""
    layout = parallel_layout("hsdp", world_size=8, parts=4)
    assert groups(layout) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    launch, step = rig.die(layout, ShardedKill("forward", 4, (1,)))
    (checkpoint,) = launch.checkpoints
    files = {str(path.relative_to(checkpoint)) for path in checkpoint.glob("rank_*/*")}
    assert files == {f"rank_{rank}/ttp_rank_{rank}-1_3.ckpt" for rank in (0, 2, 3, 5)}
    rig.check_resume(launch, step)


@pytest.mark.thorough
def test_plain_data_parallel_needs_no_gate(rig: Rig) -> None:
    layout = parallel_layout("ddp")
    assert rig.survive(layout, ShardedKill("backward", 4, (2,))) == 3


@pytest.mark.parametrize("parallel", usually([*PARAMETERS["parallel"], "fsdp-tp"], ["zero1"]))
def test_a_run_in_which_nobody_dies_has_the_bits_of_torch_alone(rig: Rig, parallel: str) -> None:
    launch = rig.launch(parallel_layout(parallel, inf_steps=(2,)))
    launch.finish()
    rig.check_untouched(launch)


def test_kills_are_spread_over_both_sides_of_the_gate() -> None:
    phases = {row["phase"] for row in ROWS}
    assert phases & set(BEFORE_GATE)
    assert phases & set(AFTER_GATE)
    assert sum(kill_of(row).must_proceed(layout_of(row)) for row in ROWS) >= 3
    assert sum(kill_of(row).is_lost(layout_of(row)) for row in ROWS) >= 3
