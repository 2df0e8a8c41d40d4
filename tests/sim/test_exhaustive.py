"""Every interleaving of a small job: three ranks, one unit, two steps, a death at any point."""

from __future__ import annotations

import pytest

from tests.sim.explore import explore
from tests.sim.job import data_parallel
from tests.sim.mutants import MUTANTS


@pytest.mark.timeout(900)
def test_no_interleaving_of_a_small_job_breaks_an_invariant(capsys: pytest.CaptureFixture[str]) -> None:
    found = explore(data_parallel(3, 2), 1)
    with capsys.disabled():
        print(f"\n{found.states} distinct states, {found.moves} moves, {found.ends} ends, {found.published} published")
    assert not found.bad, "\n".join(text for text, _ in found.bad)
    assert found.states > 50_000
    assert found.published


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_interleaving_with_two_deaths_breaks_an_invariant(capsys: pytest.CaptureFixture[str]) -> None:
    found = explore(data_parallel(3, 2), 2)
    with capsys.disabled():
        print(f"\n{found.states} distinct states, {found.moves} moves, {found.ends} ends, {found.published} published")
    assert not found.bad, "\n".join(text for text, _ in found.bad)


def test_the_exploration_catches_an_update_that_ignores_the_freeze() -> None:
    with MUTANTS["no-lock"].applied():
        found = explore(data_parallel(3, 2), 1)
    assert found.bad
