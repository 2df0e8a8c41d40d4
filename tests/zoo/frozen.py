"""The frozen verdicts: what has come of each recipe in each phase, in `verdicts.json`, and of nothing else.

The tests compare with it what comes of a recipe today. `make verdicts` runs the zoo, and writes the file and the table
of docs/exactness.md: review the diff. `python -m tests.zoo.frozen RESULTS.jsonl` writes both from what runs with
LASTWORDS_ZOO_RESULTS=RESULTS.jsonl have noted.

Outcomes: "exact" (equal, and called so), "told" (not exact, with the reasons that were said), "silent" (called exact,
and different: a hole), "unreachable" (the same, and documented), "nothing" (nobody could save). A phase in which
chance decides has several.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.zoo import recipes, table
from tests.zoo.loop import CARDS, Card
from tests.zoo.verdict import Verdict

assert recipes.__doc__

FILE = Path(__file__).with_name("verdicts.json")
BY_CHANCE = frozenset({"bwd", "end"})
"""Phases that a death meets at any instant, or while others go on: what it costs there is chance."""

Outcomes = Mapping[str, list[str]]
"""Outcome -> reasons that were said with it."""


def frozen() -> dict[str, dict[str, Outcomes]]:
    """Recipe -> phase -> what has come of it."""
    found: dict[str, dict[str, Outcomes]] = json.loads(FILE.read_text())
    return found


def outcome_of(card: Card, kind: str) -> str:
    """The kind of a verdict, but for a difference that is documented to go unnoticed."""
    return "unreachable" if kind == "silent" and card.silent else kind


def changed(card: Card, phase: str, verdict: Verdict, known: Outcomes | None) -> str:
    """What differs between a verdict and the frozen one; empty if nothing does."""
    outcome = outcome_of(card, verdict.kind)
    if known is None:
        return f"{card.name} killed in {phase} has no frozen verdict; today's is {outcome}: {verdict.text}"
    if outcome not in known and not (phase in BY_CHANCE and not verdict.problem(card, phase)):
        return f"{card.name} killed in {phase} was {' or '.join(known)} and is {outcome}: {verdict.text}"
    if phase not in BY_CHANCE and set(verdict.reasons) != set(known.get(outcome, ())):
        return f"{card.name} killed in {phase} was told {known[outcome]} and is told {list(verdict.reasons)}"
    return ""


def of_results(lines: Iterable[str]) -> dict[str, dict[str, dict[str, list[str]]]]:
    """Recipe -> phase -> outcomes, in the order of the recipes."""
    found: dict[str, dict[str, dict[str, list[str]]]] = {name: {} for name in CARDS}
    for item in map(json.loads, lines):
        if (card := CARDS.get(item["recipe"])) is None:
            continue  # a mixture of several
        if item["kind"] == "broken":
            raise SystemExit(f"{card.name} killed in {item['phase']} is broken, and nothing is frozen:\n{item['text']}")
        outcomes = found[card.name].setdefault(item["phase"], {})
        reasons = outcomes.setdefault(outcome_of(card, item["kind"]), [])
        reasons += [reason for reason in item["reasons"] if reason not in reasons]
    return found


def text_of(verdicts: Mapping[str, Mapping[str, Outcomes]]) -> str:
    """One line for each phase."""
    blocks = []
    for name, phases in verdicts.items():
        lines = [
            f"  {json.dumps(phase)}: {json.dumps(dict(sorted(phases[phase].items())))}" for phase in sorted(phases)
        ]
        blocks.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main() -> None:
    new: dict[str, Any] = of_results(Path(sys.argv[1]).read_text().splitlines())
    old = frozen() if FILE.exists() else {}
    merged = {name: {**old.get(name, {}), **phases} for name, phases in new.items()}
    FILE.write_text(text_of(merged))
    table.PAGE.write_text(table.page_with(table.PAGE.read_text(), merged))


if __name__ == "__main__":
    main()
