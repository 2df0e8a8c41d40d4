"""Every interleaving of small jobs with periodic checkpoints, with the shipped cores, as `test_exhaustive` has it."""

from __future__ import annotations

import dataclasses

import pytest

from tests.selection import more, usually
from tests.sim.explore import Found, explore
from tests.sim.periodic_mutants import MUTANTS
from tests.sim.small_jobs import PERIODIC, Explored
from tests.sim.test_exhaustive import assert_clean, assert_the_same_ends, documented


def _published(found: Found, *, periodic: bool) -> set[int]:
    """Steps that some end has a checkpoint of."""
    publications = [publication for _, published, _ in found.ends for publication in published]
    return {step for step, _, files, _ in publications if (files[0].incident == 0) is periodic}


SMALL = [name for name, explored in PERIODIC.items() if not explored.slow]


def _assert_explored(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    explored = PERIODIC[name]
    found = explore(explored.job, explored.kills, explored.breaks)
    with capsys.disabled():
        print(f"\n  {name}: {explored.words}: {found}")
    assert_clean(name, found)
    assert found.states == documented()[name][3], "tests/sim/README.md says another number of states"
    job = explored.job
    due = {step for step in range(1, job.steps + 1) if step % job.schedule.steps == 0}
    assert _published(found, periodic=True) == due
    if explored.kills and len(job.unit_names) == 1:
        assert _published(found, periodic=False) == set(range(1, job.steps + 1))


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", usually(SMALL, lambda name: name not in ("periodic-later", "periodic-two-deaths", "periodic-skip"))
)
def test_a_small_job_with_periodic_checkpoints_keeps_every_invariant(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    _assert_explored(name, capsys)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [name for name, explored in PERIODIC.items() if explored.slow])
def test_a_larger_small_job_with_periodic_checkpoints_keeps_every_invariant(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    _assert_explored(name, capsys)


@pytest.mark.ci
@pytest.mark.parametrize("name", [more("periodic"), "periodic-gate"])
def test_the_reductions_lose_no_end_of_jobs_with_periodic_checkpoints(name: str) -> None:
    job = dataclasses.replace(PERIODIC[name].job, steps=1)
    assert_the_same_ends(Explored("", job, 1))


@pytest.mark.ci
@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.small])
def test_a_broken_rule_of_periodic_checkpoints_is_found(name: str) -> None:
    mutant = MUTANTS[name]
    explored = PERIODIC[mutant.small]
    with mutant.applied():
        found = explore(explored.job, explored.kills, explored.breaks)
    assert found.bad, f"nobody notices that {mutant.rule}"
