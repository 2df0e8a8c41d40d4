"""Each recipe of the zoo is resumed from a periodic checkpoint: it is equal in all bits, or it was told why not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import Cluster
from tests.selection import usually
from tests.zoo.frozen import frozen, mismatch
from tests.zoo.loop import CARDS
from tests.zoo.verdict import Keeper, note

pytestmark = pytest.mark.process

EVERY = 5
"""One checkpoint is written, in the last step that is a multiple: of eight steps, in the first of the second epoch. One
that falls due while another is being written would be left out.
"""


@pytest.fixture
def keeper(cluster: Cluster, references: Path, tmp_path: Path) -> Iterator[Keeper]:
    keeper = Keeper(cluster, tmp_path, references)
    yield keeper
    keeper.close()


def usual_names() -> set[str]:
    """One of each kind of recipe, in every sixth kind."""
    by_kind: dict[str, str] = {}
    for card in CARDS.values():
        if not card.heavy:
            by_kind.setdefault(card.loop.__module__, card.name)
    return set(list(by_kind.values())[::6])


@pytest.mark.parametrize("name", usually(CARDS, usual_names()))
def test_a_recipe_has_its_frozen_verdict_from_a_periodic_checkpoint(keeper: Keeper, name: str) -> None:
    loop = CARDS[name].loop
    verdict = keeper.judge_periodic(name, loop.epochs * loop.per_epoch // EVERY * EVERY)
    note(name, "periodic", verdict)
    problem = mismatch(CARDS[name], "periodic", verdict, frozen().get(name, {}).get("periodic"))
    assert not problem, problem
