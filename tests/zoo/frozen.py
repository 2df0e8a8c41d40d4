"""The frozen verdicts: what has come of each recipe in each phase, in `verdicts.json`, and of nothing else.

The tests compare with it what comes of a recipe today. `make verdicts` runs the zoo, and writes the file and the table
of tests/zoo/README.md: review the diff. `python -m tests.zoo.frozen RESULTS.jsonl` writes both from what runs with
LASTWORDS_ZOO_RESULTS=RESULTS.jsonl have noted.

Outcomes: "exact" (equal, and called so), "told" (not exact; with the reasons that were given), "named" (bits differ
because of something that is saved by nobody, and that `resume()` names; with what differs first), "silent" (bits
differ, and nothing is said: a defect), "nothing" (nobody could save). A phase whose outcome depends on timing may list
several.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.zoo import recipes, table
from tests.zoo.loop import CARDS, Card
from tests.zoo.verdict import Verdict

assert recipes.__doc__

FILE = Path(__file__).with_name("verdicts.json")
BY_CHANCE = frozenset({"bwd", "end"})
"""Phases that a death meets at any instant, or while others go on: what it costs there is chance."""

UNNAMED = "was saved before the training loop had reported its epoch and step"
"""Why a step that no survivor has ended is told, whatever the recipe: in a loop without names, and by chance."""

PERIODIC = "periodic"
"""The phase of a resume from a periodic checkpoint."""

Outcomes = Mapping[str, list[str]]
"""Outcome -> what was said with it, see `said_of`."""


def frozen() -> dict[str, dict[str, Outcomes]]:
    """Recipe -> phase -> what has come of it."""
    found: dict[str, dict[str, Outcomes]] = json.loads(FILE.read_text())
    return found


def said_of(verdict: Verdict) -> list[str]:
    """What is frozen beside the outcome: the reasons, or where a resume that is called exact first differs."""
    return [verdict.where] if verdict.kind in ("silent", "named") else list(verdict.reasons)


def mismatch(card: Card, phase: str, verdict: Verdict, known: Outcomes | None) -> str:
    """What differs between a verdict and the frozen one; empty if nothing does."""
    outcome, said = verdict.kind, said_of(verdict)
    if known is None:
        return f"{card.name} killed in {phase} has no frozen verdict; today's is {outcome}: {verdict.text}"
    if outcome in known:
        same = set(said) == set(known[outcome]) or (phase in BY_CHANCE and _alike(card, phase, verdict, known[outcome]))
    elif "silent" in known:  # a hole that is closed is frozen anew
        same = phase in BY_CHANCE and outcome == "told" and all(UNNAMED in reason for reason in said)
    else:
        same = phase in BY_CHANCE and not verdict.problem(card, phase)
    if same:
        return ""
    return f"{card.name} killed in {phase} was {json.dumps(known)} and is {outcome} {said}: {verdict.text}"


def _alike(card: Card, phase: str, verdict: Verdict, known: list[str]) -> bool:
    """Whether the same has come of a kill at another instant: which step is saved may differ."""
    if verdict.kind in ("silent", "named"):
        return verdict.where.partition(" ")[0] in {where.partition(" ")[0] for where in known}
    if card.words(phase):
        return not verdict.problem(card, phase)
    return bool(set(verdict.reasons) & set(known))


def of_results(lines: Iterable[str]) -> dict[str, dict[str, dict[str, list[str]]]]:
    """Recipe -> phase -> outcomes, in the order of the recipes."""
    found: dict[str, dict[str, dict[str, list[str]]]] = {name: {} for name in CARDS}
    for item in map(json.loads, lines):
        if (card := CARDS.get(item["recipe"])) is None:
            continue  # a mixture of several
        if item["kind"] == "broken":
            raise SystemExit(f"{card.name} killed in {item['phase']} is broken, and nothing is frozen:\n{item['text']}")
        outcomes = found[card.name].setdefault(item["phase"], {})
        verdict = Verdict(item["kind"], item.get("text", ""), tuple(item["reasons"]), where=item.get("where", ""))
        said = outcomes.setdefault(verdict.kind, [])
        said += [one for one in said_of(verdict) if one not in said]
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
    new = of_results(Path(sys.argv[1]).read_text().splitlines())
    old = frozen() if FILE.exists() else {}
    merged = {}
    for name, card in CARDS.items():
        phases = {**old.get(name, {}), **new[name]}
        merged[name] = {phase: found for phase, found in phases.items() if phase in (*card.phases, PERIODIC)}
    wanted = [(name, phase) for name, card in CARDS.items() for phase in (*card.phases, PERIODIC)]
    missing = [f"{name}:{phase}" for name, phase in wanted if phase not in merged[name]]
    kept = sum(phase not in new[name] and phase in merged[name] for name, phase in wanted)
    print(f"{len(wanted) - kept - len(missing)} cases from these results, {kept} as they were", file=sys.stderr)
    if missing:
        print(f"neither a result nor an older verdict: {' '.join(missing)}", file=sys.stderr)
    FILE.write_text(text_of(merged))
    table.PAGE.write_text(table.page_with(table.PAGE.read_text(), merged))


if __name__ == "__main__":
    main()
