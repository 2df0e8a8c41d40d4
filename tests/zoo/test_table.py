"""The table of docs/exactness.md lists what the zoo has, and promises nothing that a recipe does not ask for."""

from __future__ import annotations

from tests.zoo.loop import CARDS
from tests.zoo.table import PAGE, Row, row_text, rows


def test_the_page_lists_every_recipe_once() -> None:
    assert [row.name for row in rows(PAGE.read_text())] == list(CARDS)


def test_the_page_says_told_only_where_a_recipe_allows_it() -> None:
    for row in rows(PAGE.read_text()):
        card = CARDS[row.name]
        assert {*row.exact, *row.told} <= card.phases.keys(), row
        assert not [phase for phase in row.told if not card.words(phase) and phase not in card.nothing], row


def test_a_row_is_read_as_it_was_written() -> None:
    card = CARDS["ema"]
    page = f"<!-- the zoo's table -->\n{row_text(card, {'win': 'told', 'bwd': 'exact', 'end': 'exact'})}\n"
    assert rows(page) == [Row("ema", ("bwd", "end"), ("win",))]


def test_a_recipe_that_is_missing_is_noticed() -> None:
    lines = PAGE.read_text().splitlines()
    without = "\n".join(line for line in lines if not line.startswith("| `moco` "))
    assert [row.name for row in rows(without)] != list(CARDS)
