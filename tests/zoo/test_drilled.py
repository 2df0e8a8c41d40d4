"""Recipes of the zoo as scripts under `lastwords drill`: its verdicts have to be those that are frozen.

LASTWORDS_ZOO_N of them (30) are drawn from LASTWORDS_ZOO_SEED (1), each with one of its phases; LASTWORDS_ZOO_CASE, as
`RECIPE:PHASE`, names one.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.integration.drilling import drilled
from tests.zoo.frozen import PERIODIC, frozen
from tests.zoo.loop import CARDS, Loop
from tests.zoo.recipes import __all__ as every_recipe

assert every_recipe

PHASES = {"fwd": "forward", "bwd": "backward", "mid": "between-updates", "win": "after-update", PERIODIC: PERIODIC}
"""Phases of the zoo that are places of the drill, too."""


def drawn() -> list[str]:
    """The recipes of this run, each with a phase of the zoo."""
    if case := os.environ.get("LASTWORDS_ZOO_CASE"):
        return [case]
    count, draw = int(os.environ.get("LASTWORDS_ZOO_N", "30")), random.Random(os.environ.get("LASTWORDS_ZOO_SEED", "1"))
    known = frozen()
    able = [name for name, card in CARDS.items() if not card.heavy]
    return [
        f"{name}:{draw.choice([phase for phase in PHASES if phase in known[name]])}"
        for name in draw.sample(able, min(count, len(able)))
    ]


def mismatch(known: dict[str, Any], found: dict[str, Any]) -> str:
    """What a drill says that the frozen verdict of that phase does not; empty if nothing. Of told, any bits may differ.

    The drill kills in another step: of a resume that is told, the reason need not have come up by then.
    """
    if found["verdict"] == "failed":
        return f"failed: {found['problem']}"
    if known.keys() == {"exact"} and (found["verdict"] != "bitwise" or found["reasons"]):
        return f"frozen as exact, drilled as {found['verdict']}: {found['reasons']} {found['first']}"
    if "exact" not in known and found["verdict"] == "bitwise" and not (found["reasons"] or found["suspects"]):
        return f"frozen as {known}, drilled as bitwise without a word"
    return ""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("case", drawn())
def test_a_drill_says_of_a_recipe_what_is_frozen(tmp_path: Path, case: str) -> None:
    name, _, phase = case.partition(":")
    loop: type[Loop] = CARDS[name].loop
    said = drilled(
        tmp_path,
        *("--phases", PHASES[phase], "--steps", str(loop.epochs * loop.per_epoch)),
        *("--nproc-per-node", str(loop.ranks), "-m"),
        command=("tests.zoo.drilled", name),
        limit_s=1800,
    )
    assert said.report is not None, said.text
    assert said.report["drills"], said.text
    problem = mismatch(frozen()[name][phase], said.report["drills"][0])
    assert not problem, f"{problem}\n{said.text}\nagain: LASTWORDS_ZOO_CASE={case}"
