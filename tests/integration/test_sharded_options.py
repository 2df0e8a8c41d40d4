"""Options and odd loops of a sharded job, with real processes: every claim beside what happens without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import Cluster
from tests.integration.toy import RANKS, Toy
from tests.selection import usually

pytestmark = pytest.mark.process


@pytest.fixture
def toy(cluster: Cluster, tmp_path: Path) -> Iterator[Toy]:
    toy = Toy(cluster, tmp_path)
    yield toy
    toy.close()


def resumes_exactly(toy: Toy, victim: int, **plan: Any) -> None:
    """Kill, resume, and compare every rank's every step with a run of torch alone."""
    shape = {key: plan[key] for key in ("parts", "accumulate", "closure", "existing", "own_loop") if key in plan}
    assert set(toy.run("reference", plain=True, **shape).values()) == {0}, toy.report()
    codes = toy.run("killed", **plan)
    assert codes == {rank: -9 if rank == victim else 75 for rank in range(RANKS)}, toy.report()
    plan.pop("kill")
    assert set(toy.run("resumed", recover=True, **plan).values()) == {0}, toy.report()
    reference, ours = toy.computed("reference"), toy.computed("killed", "resumed")
    for rank in range(RANKS):
        assert max(ours[rank]) == max(reference[rank])
        assert {step: reference[rank][step] for step in ours[rank]} == ours[rank], rank


@pytest.mark.parametrize("place", usually(["forward", "backward", "end"], ["backward"]))
def test_a_loop_that_has_a_gate_of_its_own_needs_none_of_ours(toy: Toy, place: str) -> None:
    resumes_exactly(toy, 2, existing=True, options={"gate": "existing"}, kill=[2, 4, place])
    assert "the loop's own" in toy.said(0)


@pytest.mark.parametrize(
    "more", usually([{"accumulate": 2}, {"closure": True}, {"own_loop": True}], [{"own_loop": True}]), ids=str
)
def test_accumulation_closures_and_own_loops_pass_the_gate_once_a_step(toy: Toy, more: dict[str, Any]) -> None:
    resumes_exactly(toy, 1, kill=[1, 4, "forward"], **more)


def test_a_bit_that_flips_is_named_before_that_replica_can_be_chosen(toy: Toy) -> None:
    codes = toy.run("flipped", flip=[0, 3], options={"verify_every": 2}, parts=1)
    assert codes[0] != 0
    assert all(code != 0 for code in codes.values())
    for rank in range(RANKS):
        assert "rank 0 differs from ranks 1, 2 and 3" in toy.said(rank), toy.report()
        assert "0.weight" in toy.said(rank)
    (manifest,) = toy.manifests()
    assert manifest["global_step"] == 4
    assert {unit["writer"] for unit in manifest["units"].values()} == {1}, "rank 0 may not write"


def test_without_the_check_the_wrong_replica_would_be_saved(toy: Toy) -> None:
    """Negative control."""
    codes = toy.run("flipped", flip=[0, 3], parts=1, kill=[3, 5, "backward"])  # all have ended step 4
    assert codes[3] == -9
    (manifest,) = toy.manifests()
    assert {unit["writer"] for unit in manifest["units"].values()} == {0}


def test_of_two_holders_that_differ_neither_is_saved(toy: Toy) -> None:
    codes = toy.run("flipped", flip=[1, 3], options={"verify_every": 3})
    assert all(code != 0 for code in codes.values())
    assert "ranks 1 and 3" in toy.said(0) or "rank 1 and rank 3" in toy.said(0), toy.report()
    assert toy.manifests() == []


def test_parts_that_are_not_declared_are_found_to_be_no_replicas_before_the_first_step(toy: Toy) -> None:
    codes = toy.run("undeclared", declare=False)
    assert all(code == 1 for code in codes.values()), toy.report()
    for rank in range(RANKS):
        assert "replicas differ before the first step" in toy.said(rank)
        assert "units=" in toy.said(rank)
    assert toy.manifests() == []


def test_an_exception_in_a_job_without_redundancy_is_saved_whole(toy: Toy) -> None:
    codes = toy.run("raised", parts=4, raises=[2, 4])
    assert codes[2] == 1
    assert {code for rank, code in codes.items() if rank != 2} == {75}, toy.report()
    assert "no redundancy" in toy.said(0)
    (manifest,) = toy.manifests()
    assert manifest["global_step"] == 3
    assert set(toy.run("resumed", parts=4, recover=True).values()) == {0}
    assert set(toy.run("reference", parts=4, plain=True).values()) == {0}
    reference, ours = toy.computed("reference"), toy.computed("raised", "resumed")
    for rank in range(RANKS):
        assert {step: reference[rank][step] for step in ours[rank]} == ours[rank]


def test_a_death_in_a_job_without_redundancy_names_what_is_lost_and_keeps_the_older_checkpoint(toy: Toy) -> None:
    toy.run("raised", parts=4, raises=[2, 4])
    (older,) = toy.manifests()
    codes = toy.run("killed", parts=4, recover=True, kill=[1, 5, "forward"])
    assert codes == {0: 76, 1: -9, 2: 76, 3: 76}, toy.report()
    for rank in (0, 2, 3):
        assert "part1" in toy.said(rank)
        assert f"step_{older['global_step']}" in toy.said(rank), "the newest older checkpoint is named"
    assert toy.manifests() == [older]


def test_a_rank_that_never_comes_to_the_gate_is_named_and_the_others_save(toy: Toy) -> None:
    env = {"LASTWORDS_GATE_TIMEOUT_S": "4", "LASTWORDS_GATE_NOTICE_S": "1", "LASTWORDS_SETTLE_TIMEOUT_S": "3"}
    codes = toy.run("skipped", env=env, skip_gate=[3, 4])
    assert all(code != 0 for code in codes.values())
    assert any("rank 3" in toy.said(rank) and "gate of step 4" in toy.said(rank) for rank in (0, 1, 2)), toy.report()
    (manifest,) = toy.manifests()
    assert manifest["global_step"] == 3


@pytest.mark.thorough
def test_a_rank_that_is_only_late_at_the_gate_is_waited_for(toy: Toy) -> None:
    codes = toy.run("late", late=[3, 4, 2.0], env={"LASTWORDS_GATE_NOTICE_S": "0.5"})
    assert set(codes.values()) == {0}, toy.report()
    assert set(toy.run("reference", plain=True).values()) == {0}
    assert toy.computed("late") == toy.computed("reference")


def test_a_rank_that_leaves_out_a_step_of_its_own_loop_is_named_at_the_next_gate(toy: Toy) -> None:
    codes = toy.run("left_out", own_loop=True, steps=8, leaves_out=[3, 4])
    assert 0 not in codes.values()
    text = "rank 3 at epoch 1, step 5, all other ranks at epoch 1, step 4"
    for rank in range(RANKS):
        assert text in " ".join(toy.said(rank).split()), toy.report()
    (manifest,) = toy.manifests()
    assert manifest["global_step"] == 4
    assert any(text in reason for reason in manifest["reasons"])
