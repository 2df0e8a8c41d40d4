"""Broken rules are caught by the very checkers that the shipped cores pass, within a bounded number of schedules."""

from __future__ import annotations

import pytest

from tests.sim.checkers import complaints
from tests.sim.mutants import MUTANTS
from tests.sim.run import command
from tests.sim.schedule import draw
from tests.sim.timed import TimedWorld

SEEDS_MAX = 8000
"""The shipped cores pass far more; the rarest of the broken rules shows once in about a thousand."""


def _first_caught(name: str) -> tuple[int, str] | None:
    mutant = MUTANTS[name]
    with mutant.applied():
        for seed in range(1, SEEDS_MAX + 1):
            plan = draw(seed)
            for text in complaints(plan.job, TimedWorld(plan).run()):
                if text.split(":")[0] in mutant.caught_by:
                    return seed, text
    return None


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_broken_rule_is_caught(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    caught = _first_caught(name)
    assert caught is not None, f"nobody notices that {MUTANTS[name].rule}"
    seed, text = caught
    with capsys.disabled():
        print(f"\n  {MUTANTS[name].rule}: {text[:110]} ({command(seed, mutant=name)})")


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_broken_rule_is_whole_again_afterwards(name: str) -> None:
    """Negative control: what is caught above is the broken rule and not the schedule."""
    plan = draw(1)
    with MUTANTS[name].applied():
        pass
    assert complaints(plan.job, TimedWorld(plan).run()) == []
