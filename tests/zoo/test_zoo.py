"""Each recipe of the zoo is killed and resumed: what comes of it is its frozen verdict."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import Cluster
from tests.zoo import mixtures
from tests.zoo.frozen import frozen, mismatch
from tests.zoo.loop import CARDS
from tests.zoo.verdict import Keeper, NoLoopError, note

pytestmark = pytest.mark.process


@pytest.fixture
def keeper(cluster: Cluster, references: Path, tmp_path: Path) -> Iterator[Keeper]:
    keeper = Keeper(cluster, tmp_path, references)
    yield keeper
    keeper.close()


def usual_cases() -> set[tuple[str, str]]:
    """Of every second kind of recipe (a module of this folder) one, in a phase that is another one each time."""
    found = by_kind_and_phase()
    chosen: dict[str, str] = {}
    for kind in [*dict.fromkeys(kind for kind, _ in found)][::2]:
        phases = [phase for of, phase in found if of == kind]
        chosen[kind] = min(phases, key=[*chosen.values()].count)
    return {(found[case][0], case[1]) for case in chosen.items()}


def by_kind_and_phase() -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for card in CARDS.values():
        for phase in () if card.heavy else card.phases:
            found.setdefault((card.loop.__module__, phase), []).append(card.name)
    return found


def cases() -> list[Any]:
    """Every recipe in every phase of its own; the usual run has some of each kind."""
    found: list[Any] = []
    usual = usual_cases()
    for card in CARDS.values():
        for phase in card.phases:
            marks = [] if (card.name, phase) in usual else [pytest.mark.thorough]
            found.append(pytest.param(card.name, phase, marks=marks))
    return found


@pytest.mark.parametrize(("name", "phase"), cases())
def test_a_recipe_has_its_frozen_verdict(keeper: Keeper, name: str, phase: str) -> None:
    verdict = keeper.judge(name, phase)
    note(name, phase, verdict)
    problem = mismatch(CARDS[name], phase, verdict, frozen().get(name, {}).get(phase))
    assert not problem, problem


def drawn() -> list[str]:
    """The mixtures of this run: LASTWORDS_ZOO_N of them from LASTWORDS_ZOO_SEED, or the one that is named."""
    if case := os.environ.get("LASTWORDS_ZOO_CASE"):
        return [case]
    count, seed = int(os.environ.get("LASTWORDS_ZOO_N", "20")), int(os.environ.get("LASTWORDS_ZOO_SEED", "1"))
    return [mixtures.draw(seed, number) for number in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("name", drawn())
def test_a_mixture_of_recipes_is_exact_or_was_told(keeper: Keeper, name: str) -> None:
    card = mixtures.card_of(name)
    (phase,) = card.phases
    try:
        verdict = keeper.judge(name, phase)
    except NoLoopError as error:
        pytest.skip(f"{name}: {str(error).splitlines()[0]}")
    note(name, phase, verdict)
    problem = verdict.problem(card, phase)
    assert not problem, f"{problem}\nagain: make zoo CASE={name}"


def test_mixtures_are_drawn_again_alike_and_never_have_two_of_one_hook() -> None:
    names = [mixtures.draw(3, number) for number in range(50)]
    assert names == [mixtures.draw(3, number) for number in range(50)]
    assert len(set(names)) > 45
    for name in names:
        parts = [CARDS[part].loop for part in name.partition(":")[0].split("+")]
        assert mixtures.go_together(parts)
        assert mixtures.card_of(name).loop.ranks == max(part.ranks for part in parts)
    assert not mixtures.go_together([CARDS["moco"].loop, CARDS["find_unused"].loop])
    assert not mixtures.go_together([CARDS["amp_inf"].loop, CARDS["lr_of_the_other"].loop])


def test_nothing_is_told_in_a_phase_that_a_recipe_does_not_have() -> None:
    for card in CARDS.values():
        assert card.told.keys() <= {*card.phases, "all"}, card.name
