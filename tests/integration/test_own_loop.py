"""Loops of one's own, with real processes: what a step is called is known when it ends, and not before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import golden
from tests.integration.harness import Cluster
from tests.integration.toy import Toy

pytestmark = pytest.mark.process

RANKS = 3
LOOP = {"own_loop": True, "per_epoch": 3, "steps": 6}
UPDATED = [[0, "end"], [2, "end"]]
BEGUN = [[0, "forward"], [2, "forward"]]
"""All others have ended the step before, or it would be saved without this rank's."""
FROZEN_S = 60.0
"""Beyond all deadlines: the rank is settled where it stands, between its update and the end of its step, and ended."""


@pytest.fixture
def toy(cluster: Cluster, tmp_path: Path) -> Iterator[Toy]:
    toy = Toy(cluster, tmp_path, ranks=RANKS)
    yield toy
    toy.close()


def resumes_exactly(toy: Toy, **plan: Any) -> None:
    """Resume, and compare every rank's every step with a run of torch alone."""
    shape = {key: plan[key] for key in ("parts", "average", *LOOP) if key in plan}
    assert set(toy.run("reference", plain=True, **shape).values()) == {0}, toy.report()
    assert set(toy.run("resumed", recover=True, **plan).values()) == {0}, toy.report()
    reference, ours = toy.computed("reference"), toy.computed("killed", "resumed")
    for rank in range(RANKS):
        assert max(ours[rank]) == max(reference[rank])
        assert {step: reference[rank][step] for step in ours[rank]} == ours[rank], rank


def test_writers_of_a_step_that_one_of_them_has_not_ended_agree_on_what_is_known(toy: Toy) -> None:
    """The units are on {0, 2} and {1}. Global step 4 is the first one of epoch 2; rank 1 never comes to its end."""
    plan = {**LOOP, "parts": 2}
    codes = toy.run("killed", kill=[2, 4, "end"], kill_after=[[0, "recorded"]], slow_end=[1, 4, FROZEN_S], **plan)
    assert codes == {0: 75, 1: 75, 2: -9}, toy.report()
    (manifest,) = toy.manifests()
    assert (manifest["global_step"], manifest["epoch"], manifest["step"]) == (4, 2, 1), "rank 0 has ended it"
    resumes_exactly(toy, **plan)
    assert toy.resumed("resumed")[:4] == [2, 1, 4, True]


def test_a_step_that_nobody_has_ended_has_no_name_and_is_not_called_exact(toy: Toy) -> None:
    """Replicas that average their loss after the update: nobody gets past that once a peer is dead."""
    plan = {**LOOP, "parts": 1, "average": True}
    codes = toy.run("killed", kill=[1, 4, "end"], kill_after=UPDATED, **plan)
    assert codes == {0: 75, 1: -9, 2: 75}, toy.report()
    resumes_exactly(toy, **plan)
    epoch, step, global_step, exact, reasons = toy.resumed("resumed")
    assert (epoch, step, global_step, exact) == (None, None, 4, False)
    assert any("epoch 1, step 3" in reason for reason in reasons), "the last step that was named"


def test_a_loop_that_knows_only_global_steps_needs_no_names(toy: Toy) -> None:
    plan = {**LOOP, "parts": 1, "average": True, "nameless": True}
    codes = toy.run("killed", kill=[1, 4, "end"], kill_after=UPDATED, **plan)
    assert codes == {0: 75, 1: -9, 2: 75}, toy.report()
    resumes_exactly(toy, **plan)
    assert toy.resumed("resumed") == [None, None, 4, True, []]


def test_a_loop_that_begins_again_after_a_resume_is_refused_on_every_rank_and_nothing_of_it_is_saved(toy: Toy) -> None:
    plan = {**LOOP, "parts": 1}
    assert toy.run("killed", kill=[1, 5, "forward"], kill_after=BEGUN, **plan) == {0: 75, 1: -9, 2: 75}, toy.report()
    saved = toy.manifests()
    # Rank 2 comes to the end of its step when the incident that the others would begin had long been over.
    codes = toy.run("forgetful", recover=True, forgets=True, slow_end=[2, 1, 2.0], **plan)
    assert codes == {0: 1, 1: 1, 2: 1}, toy.report()
    for rank in range(RANKS):
        golden.says([line for line in toy.said(rank).splitlines() if "errors.ConfigError" in line])
    assert toy.manifests() == saved
    assert [manifest["global_step"] for manifest in saved] == [4]
    resumes_exactly(toy, **plan)


def test_a_loop_without_names_is_told_once_where_its_steps_have_other_batches(toy: Toy) -> None:
    plan = {**LOOP, "parts": 1, "nameless": True}
    codes = toy.run("killed", kill=[1, 4, "forward"], kill_after=BEGUN, accumulate=2, **plan)
    assert 75 in codes.values(), toy.report()
    assert set(toy.run("resumed", recover=True, **plan | {"steps": 9}).values()) == {0}, toy.report()
    lines = [line for rank in range(RANKS) for line in toy.said(rank).splitlines() if "backward pass" in line]
    golden.says(lines)


EXPORT_S = 3.0
"""Longer than every time after which a process is ended here, and longer than the patience with early leavers."""
ENV = {"LASTWORDS_LEAVE_TIMEOUT_S": "1"}


def exported(toy: Toy, name: str) -> list[str]:
    return (toy.directory / name / "export").read_text().splitlines()


WHOLE = [str(number) for number in range(100)]


@pytest.mark.parametrize("own_loop", [True, False], ids=["own loop", "steps"])
def test_a_rank_that_writes_on_after_its_loop_is_waited_for(toy: Toy, own_loop: bool) -> None:
    codes = toy.run("long", own_loop=own_loop, parts=1, export=[0, EXPORT_S], env=ENV)
    assert set(codes.values()) == {0}, toy.report()
    assert exported(toy, "long") == WHOLE
    assert toy.manifests() == [], "nothing has happened"


@pytest.mark.thorough
def test_a_death_after_all_steps_lets_nobody_be_ended_while_it_writes_the_users_files(toy: Toy) -> None:
    codes = toy.run("killed", parts=1, kill=[1, 6, "export"], export=[0, EXPORT_S], env=ENV)
    assert codes == {0: 75, 1: -9, 2: 75}, toy.report()
    assert exported(toy, "killed") == WHOLE
    assert [manifest["global_step"] for manifest in toy.manifests()] == [6]


@pytest.mark.thorough
def test_a_rank_that_dies_when_all_others_are_done_as_well_holds_nobody_up(toy: Toy) -> None:
    """It has left its loop and waits for the others; rank 0 alone is still writing."""
    codes = toy.run("killed", parts=1, own_loop=True, kill_waiting=1, export=[0, EXPORT_S], env=ENV)
    assert codes == {0: 0, 1: -9, 2: 0}, toy.report()
    assert exported(toy, "killed") == WHOLE
