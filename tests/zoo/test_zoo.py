"""Each recipe of the zoo is killed and resumed: it is equal in all bits, or it was told why not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import cluster, references
from tests.integration.harness import Cluster
from tests.zoo import mixtures
from tests.zoo.loop import CARDS
from tests.zoo.not_yet import NOT_YET
from tests.zoo.verdict import Keeper

__all__ = ["cluster", "references"]
pytestmark = pytest.mark.process


@pytest.fixture
def keeper(cluster: Cluster, references: Path, tmp_path: Path) -> Iterator[Keeper]:
    keeper = Keeper(cluster, tmp_path, references)
    yield keeper
    keeper.close()


def cases() -> list[Any]:
    """Every recipe in every phase of its own; the usual run has each recipe once, the phases by turns."""
    found: list[Any] = []
    for turn, card in enumerate(CARDS.values()):
        phases = list(card.phases)
        for place, phase in enumerate(phases):
            usual = place == turn % len(phases) and not card.heavy
            marks = [] if usual else [pytest.mark.thorough]
            if f"{card.name}:{phase}" in NOT_YET:
                marks.append(pytest.mark.xfail(strict=phase != "bwd", raises=AssertionError))
            found.append(pytest.param(card.name, phase, marks=marks))
    return found


@pytest.mark.parametrize(("name", "phase"), cases())
def test_a_recipe_is_exact_or_was_told(keeper: Keeper, name: str, phase: str) -> None:
    card = mixtures.card_of(name)
    problem = keeper.judge(name, phase).problem(card, phase)
    assert not problem, f"{name} killed in {phase}: {problem}"


def test_nothing_is_asked_for_that_no_recipe_has() -> None:
    """A case that has been renamed would be taken for one that works."""
    assert {f"{card.name}:{phase}" for card in CARDS.values() for phase in card.phases} >= NOT_YET
    for card in CARDS.values():
        assert card.told.keys() <= card.phases.keys(), card.name
