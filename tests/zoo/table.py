"""The table of tests/zoo/README.md, made of the frozen verdicts by `tests.zoo.frozen`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.zoo import recipes
from tests.zoo.loop import CARDS, Card

assert recipes.__doc__

PAGE = Path(__file__).resolve().parents[2] / "tests" / "zoo" / "README.md"
BEGIN, END = "<!-- the zoo's table -->", "<!-- end of the table -->"
HEAD = "| recipe | what it is | exact | not exact, and told | price |\n|---|---|---|---|---|"
ORDER = ("fwd", "bwd", "mid", "win", "end", "epoch")
NAMED, HOLE = "not saved, but named, in", "**a hole**: called exact, and is not, in"

Outcomes = Mapping[str, object]
"""What has come of a phase; a phase in which chance decides has several."""


def row_text(card: Card, phases: Mapping[str, Outcomes]) -> str:
    """The line of a recipe. phases: phase -> what has come of it."""
    told = [phase for phase in ORDER if phases.get(phase, {}).keys() & {"told", "nothing"}]
    exact = [phase for phase in ORDER if "exact" in phases.get(phase, {}) and phase not in told]
    holes = [phase for phase in ORDER if "silent" in phases.get(phase, {})]
    named = [phase for phase in ORDER if "named" in phases.get(phase, {})]
    price = f"{HOLE} {', '.join(holes)}" if holes else f"{NAMED} {', '.join(named)}" if named else card.price
    return f"| `{card.name}` | {card.what} | {', '.join(exact)} | {', '.join(told)} | {price} |"


def page_with(page: str, verdicts: Mapping[str, Mapping[str, Outcomes]]) -> str:
    """The page with the table that these verdicts give. verdicts: recipe -> phase -> outcomes."""
    before, _, rest = page.partition(BEGIN)
    rows = [row_text(card, verdicts.get(card.name, {})) for card in CARDS.values()]
    return "\n".join([f"{before}{BEGIN}", HEAD, *rows, f"{END}{rest.partition(END)[2]}"])
