"""kill -9 in every phase, of every kind of victim, over every kind of layout: a pairwise selection of the matrix.

Each test kills, checks the last words, resumes, and compares every rank's every later step, bit for bit, with a
run that was never killed. test_matrix.py has the full cross product.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import pytest

from tests.integration.kills import BEFORE_ALL_REDUCE, Kill
from tests.integration.pairwise import pairs_of, pairwise
from tests.integration.plan import Fault, Layout
from tests.integration.rig import Rig
from tests.selection import each_value_once, more

pytestmark = pytest.mark.process

EPOCH = 4
VICTIMS = {"rank 0": (0,), "another": (2,), "two": (1, 3), "all but one": (0, 1, 3)}
STEPS = {"first": 1, "first epoch": 3, "new epoch": EPOCH + 1, "second epoch": EPOCH + 2}
PARAMETERS: dict[str, tuple[Hashable, ...]] = {
    "phase": (
        "epoch_start",
        "forward",
        "backward",
        "backward_last",
        "before_step",
        "update",
        "after_update",
        "end",
    ),
    "survivors": ("free", "ahead", "behind", "split"),
    "victims": tuple(VICTIMS),
    "step": tuple(STEPS),
    "model": ("small", "medium"),
    "buffers": ("broadcast", "local", "none"),
    "accumulate": ("1", "2", "2 without sync"),
    "loader": ("distributed", "plain"),
    "augment": (False, True),
    "workers": (0, 2),
    "scaler": ("none", "skips before", "skips then"),
    "log_reduce": ("", "before", "after"),
    "odd": (False, True),
}


def layout_of(row: Mapping[str, Any]) -> Layout:
    step = STEPS[row["step"]]
    inf_step = {"none": None, "skips before": step - 1, "skips then": step}[row["scaler"]]
    return Layout(
        model=row["model"],
        batch_norm=row["buffers"] != "none",
        broadcast_buffers=row["buffers"] != "local",
        tied=row["odd"],
        frozen=row["odd"],
        accumulate=int(row["accumulate"][0]),
        no_sync="without" in row["accumulate"],
        loader=row["loader"],
        augment=row["augment"],
        workers=row["workers"],
        inf_steps=None if inf_step is None else (inf_step,),
        log_reduce=row["log_reduce"],
        steps_per_epoch=EPOCH,
    )


def kill_of(row: Mapping[str, Any]) -> Kill:
    return Kill(row["phase"], STEPS[row["step"]], VICTIMS[row["victims"]], row["survivors"])


def is_allowed(row: Mapping[str, Any]) -> bool:
    if row["survivors"] != "free" and row["phase"] in BEFORE_ALL_REDUCE:
        return False
    if row["scaler"] == "skips before" and row["step"] == "first":
        return False
    return kill_of(row).is_possible(layout_of(row))


ROWS, NEVER = pairwise(PARAMETERS, is_allowed, seed=3)  # of a few seeds the one with the fewest rows


def row_id(row: Mapping[str, Any]) -> str:
    return f"{kill_of(row)}-{layout_of(row).key[:6]}"


@pytest.mark.parametrize("row", each_value_once(ROWS), ids=row_id)
def test_a_killed_run_resumes_with_the_same_bits(rig: Rig, row: Mapping[str, Any]) -> None:
    rig.survive(layout_of(row), kill_of(row))


def test_the_selection_covers_every_pair_that_can_be() -> None:
    covered = set().union(*map(pairs_of, ROWS))
    for first, second in NEVER:
        names = {first, second}
        assert names & {("phase", phase) for phase in (*BEFORE_ALL_REDUCE, "update", "end")} or (
            names & {("survivors", "split"), ("scaler", "skips before")}
        ), f"{first} with {second} is not covered"
    for name, values in PARAMETERS.items():
        for value in values:
            assert any((name, value) in pair for pair in covered)


@pytest.mark.parametrize(
    ("launcher", "kill"),
    [
        ("torchrun", Kill("forward", 5, (2,))),
        more("torchrun", Kill("backward", 3, (0, 2))),
        more("torchrun", Kill("before_step", 6, (0,), "split")),
        more("torchrun", Kill("update", 4, (0, 1, 3), "ahead")),
        more("hand", Kill("backward_last", 6, (1, 3), "split")),
        more("hand", Kill("update_end", 3, (0,), "behind")),
    ],
    ids=str,
)
def test_a_killed_run_of_a_real_launcher_resumes_with_the_same_bits(rig: Rig, launcher: str, kill: Kill) -> None:
    ranks = 4 if 3 in kill.victims else 3
    workers = 2 if kill.step % 2 else 0
    layout = Layout(world_size=ranks, model="medium", augment=True, workers=workers, log_reduce="after")
    killed, step = rig.die(layout, kill, launcher=launcher)
    assert step
    rig.check_resume(killed, step)


def test_a_rank_that_dies_after_somebody_has_emptied_shared_memory_comes_back_as_it_was(rig: Rig) -> None:
    """As systemd does when the user logs out. The ranks have open what was there."""
    layout = Layout(broadcast_buffers=False, augment=True)
    kill = Kill("forward", 6, (0, 2))
    emptied = Fault(1, 5, "body", ("empty_shm",))
    launch = rig.launch(layout, faults=[emptied, *kill.faults(layout)])
    launch.finish()
    step = rig.check_last_words(launch, kill.victims, kill.steps_expected(layout))
    assert step
    rig.check_resume(launch, step)
