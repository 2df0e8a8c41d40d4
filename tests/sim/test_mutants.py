"""Broken rules are caught by the very checkers that the shipped cores pass, in a few schedules that are known."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable

import pytest

from lastwords.controller import core as controller_core
from tests.sim.mutants import MUTANTS
from tests.sim.run import command, replay
from tests.sim.schedule import COPIES_FROM

SEEDS_MAX = 8000
"""The shipped cores pass far more; the rarest of the broken rules shows once in about a thousand."""


def _first_caught(name: str, seeds: Iterable[int]) -> tuple[int, str] | None:
    mutant = MUTANTS[name]
    with mutant.applied():
        for seed in seeds:
            for text in replay(seed)[0]:
                if text.split(":")[0] in mutant.caught_by:
                    return seed, text
    return None


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_broken_rule_is_caught(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    caught = _first_caught(name, MUTANTS[name].seeds)
    assert caught is not None, (
        f"none of the known schedules notices that {MUTANTS[name].rule}; if the cores or the schedules have changed, "
        f"take other seeds into tests/sim/mutants.py: python -m tests.sim.run --seed 1 --count {SEEDS_MAX} "
        f"--mutant {name}"
    )
    seed, text = caught
    with capsys.disabled():
        print(f"\n  {MUTANTS[name].rule}: {text[:110]} ({command(seed, mutant=name)})")
    assert replay(seed)[0] == [], "the schedule is caught, not the broken rule"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_broken_rule_is_caught_within_a_bounded_number_of_schedules(name: str) -> None:
    first = COPIES_FROM if MUTANTS[name].seeds[0] >= COPIES_FROM else 1
    assert _first_caught(name, range(first, first + SEEDS_MAX)) is not None, f"nobody notices that {MUTANTS[name].rule}"


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_broken_rule_is_broken_inside_the_block_and_whole_again_afterwards(name: str) -> None:
    patches = MUTANTS[name].patches
    shipped = {patched: _shipped(patched) for patched in patches}
    with MUTANTS[name].applied():
        assert all(_shipped(patched) != shipped[patched] for patched in patches)
    assert {patched: _shipped(patched) for patched in patches} == shipped


def _shipped(patched: str) -> object:
    """What a name leads to at the moment; a copy of the table of handlers."""
    return dict(controller_core._HANDLERS) if patched == "_HANDLERS" else pkgutil.resolve_name(patched)
