"""Writes the table of docs/exactness.md: `python -m tests.zoo.table RESULTS.jsonl`.

RESULTS is what a run of the zoo has noted: `LASTWORDS_ZOO_RESULTS=RESULTS.jsonl make test-all ARGS=tests/zoo`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.zoo import recipes
from tests.zoo.loop import CARDS, Card

assert recipes.__doc__

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exactness.md"
BEGIN, END = "<!-- the zoo's table -->", "<!-- end of the table -->"
HEAD = "| recipe | what it is | exact | not exact, and told | price |\n|---|---|---|---|---|"
ORDER = ("fwd", "bwd", "mid", "win", "end", "epoch")
OUT_OF_REACH = "out of reach: not saved, and not told"


@dataclass(frozen=True)
class Row:
    """One line of the table: a recipe's name, and in which phases it was exact or told."""

    name: str
    exact: tuple[str, ...]
    told: tuple[str, ...]


def row_text(card: Card, kinds: Mapping[str, str]) -> str:
    """The line of a recipe. kinds: phase -> what came of it."""
    exact = ", ".join(phase for phase in ORDER if kinds.get(phase) == "exact")
    allowed = [phase for phase in ORDER if card.words(phase) or phase in card.nothing]
    told = ", ".join(phase for phase in allowed if kinds.get(phase) in ("told", "nothing"))
    price = OUT_OF_REACH if card.silent else card.price
    return f"| `{card.name}` | {card.what} | {exact} | {told} | {price} |"


def rows(page: str) -> list[Row]:
    """The lines of a page's table."""
    found = []
    for line in page.partition(BEGIN)[2].partition(END)[0].splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 5 and cells[0].startswith("`"):
            exact, told = (tuple(filter(None, cells[place].split(", "))) for place in (2, 3))
            found.append(Row(cells[0].strip("`"), exact, told))
    return found


def results_of(path: Path) -> dict[str, dict[str, str]]:
    """Recipe -> phase -> what came of it, the newest line winning."""
    found: dict[str, dict[str, str]] = {}
    for line in path.read_text().splitlines():
        item = json.loads(line)
        found.setdefault(item["recipe"], {})[item["phase"]] = item["kind"]
    return found


def main() -> None:
    results = results_of(Path(sys.argv[1]))
    lines = [row_text(card, results.get(card.name, {})) for card in CARDS.values()]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text("\n".join([f"{before}{BEGIN}", HEAD, *lines, f"{END}{rest.partition(END)[2]}"]))


if __name__ == "__main__":
    main()
