"""The harness itself: cheap launches, nothing left behind, and a comparison that can fail."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.compare import Track, differing, first_difference
from tests.integration.harness import Cluster, HarnessTimeoutError, Port
from tests.integration.kills import Kill
from tests.integration.pairwise import pairs_of, pairwise
from tests.integration.plan import Fault, Layout, Plan
from tests.integration.rig import Rig
from tests.integration.zygote import descendants
from tests.selection import more

pytestmark = pytest.mark.process

EVERYTHING = Layout(
    model="medium", tied=True, frozen=True, accumulate=2, augment=True, workers=2, inf_steps=(2,), log_reduce="after"
)


def plain(rig: Rig, layout: Layout, launcher: str = "fork") -> Track:
    launch = rig.launch(layout, mode="plain", launcher=launcher)
    launch.finish()
    assert set(launch.codes.values()) == {0}, launch.job.report()
    return launch.track


def test_ranks_are_forked_from_one_thread(cluster: Cluster) -> None:
    assert cluster.ready["threads"] == 1


def test_what_a_launcher_starts_by_a_fork_is_given_what_it_would_be_given_by_exec(
    cluster: Cluster, tmp_path: Path
) -> None:
    seen: dict[bool, dict[str, Any]] = {}
    for by_exec in (False, True):
        job = cluster.start(
            tmp_path / str(by_exec),
            module="tests.integration.seen",
            arguments=[str(tmp_path / "out"), "a b", ""],
            world_size=1,
            launcher="torchrun",
            ignored=[signal.SIGHUP, signal.SIGUSR2],
            by_exec=by_exec,
        )
        assert job.wait(60)[-1].code == 1, job.report()
        assert "exitcode  : 3" in (job.directory / "torchrun.err").read_text()
        seen[by_exec] = json.loads((tmp_path / "out").read_text())
        (tmp_path / "out").unlink()
        assert seen[by_exec].pop("parent") == job.pids[-1]
        assert seen[by_exec].pop("is a fork") is not by_exec
        job.close()
    assert seen[False] == seen[True]


@pytest.mark.parametrize("launcher", ["fork", more("torchrun"), more("hand")])
def test_every_launcher_computes_the_same_bits(rig: Rig, launcher: str) -> None:
    assert first_difference(rig.reference(EVERYTHING), plain(rig, EVERYTHING, launcher)) is None


@pytest.mark.parametrize(
    ("change", "step", "name"),
    [
        ({"seed": 2}, 1, "batch0"),
        ({"inf_steps": (3,)}, 2, "loss0"),
        more({"scheduler": False}, 1, "optim/group0/lr"),
        more({"accumulate": 1}, 1, "batch1"),
        more({"frozen": False}, 1, "model/inlet.weight"),
    ],
)
def test_the_comparison_names_the_first_step_and_value_that_differ(
    rig: Rig, change: dict[str, object], step: int, name: str
) -> None:
    other = rig.reference(dataclasses.replace(EVERYTHING, **change))  # type: ignore[arg-type]
    difference = first_difference(rig.reference(EVERYTHING), other)
    assert difference is not None
    assert (difference.step, name in difference.names) == (step, True), difference


def test_a_value_that_only_one_side_has_is_a_difference() -> None:
    assert differing({"a": "1"}, {"a": "1", "b": "2"}) == ["b"]
    assert differing({"a": "1", "b": "2"}, {"a": "1"}) == ["b"]


def test_a_step_that_was_never_recorded_is_a_difference(rig: Rig) -> None:
    reference = rig.reference(Layout())
    assert first_difference(reference, reference, steps=range(1, 9)) is None
    missing = first_difference(reference, reference, steps=range(1, 10))
    assert missing is not None
    assert missing.step == 9


@pytest.mark.parametrize(
    ("phase", "survivors", "reached"),
    [
        more("epoch_start", "free", 4),
        more("body", "free", 4),
        ("forward", "free", 4),
        more("backward", "free", 4),
        ("backward_last", "ahead", 4),
        more("before_step", "ahead", 4),
        ("update", "ahead", 4),
        more("update_end", "ahead", 4),
        more("after_update", "ahead", 4),
        ("end", "ahead", 5),
    ],
)
def test_a_kill_hits_its_phase_and_nothing_else(rig: Rig, phase: str, survivors: str, reached: int) -> None:
    layout = Layout(model="medium")
    kill = Kill(phase, 5, (1, 2), survivors)
    launch = rig.launch(layout, mode="plain", faults=kill.faults(layout))
    launch.finish()
    assert {rank: code for rank, code in launch.codes.items() if code == -9} == {1: -9, 2: -9}, launch.job.report()
    assert first_difference(rig.reference(layout), launch.track) is None
    assert launch.track.last_step(1) == launch.track.last_step(2) == reached
    assert launch.track.last_step(0) == (5 if survivors == "ahead" else 4)


def test_a_job_leaves_no_process_behind_not_even_in_a_session_of_its_own(rig: Rig, cluster: Cluster) -> None:
    faults = [Fault(0, 2, "body", ("stop:30", "hang")), Fault(1, 2, "body", ("hang",))]
    launch = rig.launch(Layout(workers=2), mode="plain", faults=faults)
    launch.job.wait_for(lambda: launch.track_now(1) == 1 and launch.track_now(0) == 1, 30, "step 1")
    launch.job.wait_for(lambda: any("sleep 30" in text for text in launch.job.processes()), 30, "the helper")
    assert len(launch.job.processes()) >= 4 + 2
    killed = launch.job.close()
    assert len(killed) >= 4 + 2
    assert not [pid for pid in descendants(cluster.pid) if pid in launch.job.pids.values()]


@pytest.mark.thorough
def test_a_wait_that_runs_out_shows_the_logs_and_the_stacks(rig: Rig) -> None:
    launch = rig.launch(Layout(), mode="plain", faults=[Fault(2, 3, "forward", ("hang",))])
    launch.job.wait_for(lambda: launch.track_now(2) == 2, 30, "step 2")
    with pytest.raises(HarnessTimeoutError, match=r"(?s)rank_2\.err.*rank 2.*forward"):
        launch.job.wait(3)


def test_a_signal_reaches_the_rank_that_it_is_for(rig: Rig) -> None:
    launch = rig.launch(Layout(), mode="plain", faults=[Fault(3, 3, "forward", ("hang",))])
    launch.job.wait_for(lambda: launch.track_now(3) == 2, 30, "step 2")
    launch.job.signal(3, signal.SIGKILL)
    assert launch.job.wait(30, ranks=[3])[3].code == -9


def test_two_ports_are_never_the_same() -> None:
    ports = [Port() for _ in range(50)]
    assert len({port.number for port in ports}) == 50
    for port in ports:
        port.release()


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    faults = (Fault(1, 2, "forward", ("kill",)),)
    plan = Plan(EVERYTHING, "/d", faults=faults, sabotage=("x",), overrides=((1, "epochs", 3),))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.of_rank(1).layout.epochs == 3
    assert plan.of_rank(0) == plan


def test_pairwise_rows_cover_every_pair_that_is_allowed() -> None:
    parameters = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (1, 2, 3, 4)}
    rows, never = pairwise(parameters, lambda row: not (row["a"] == 3 and row["b"] == "y"))
    assert {tuple(value for _, value in pair) for pair in never} == {(3, "y")}
    covered = set().union(*map(pairs_of, rows))
    assert len(covered) == 3 * 2 + 3 * 2 + 3 * 4 + 2 * 2 + 2 * 4 + 2 * 4 - 1
    assert len(rows) < 20
    assert all(not (row["a"] == 3 and row["b"] == "y") for row in rows)
