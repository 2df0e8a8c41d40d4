"""Recipes of the zoo as scripts under `lastwords drill`: its verdicts have to be those that are frozen.

LASTWORDS_ZOO_N of them (30) are drawn from LASTWORDS_ZOO_SEED, each with one of its phases; without a seed, from that
of the last commit. LASTWORDS_ZOO_CASE, as `RECIPE:PHASE`, names one.

An `epoch` of the zoo comes before what the loop does at an epoch's end, the drill's `epoch-end` after it unless the
loop is the user's own: what is exact in the one has to be exact in the other, and what is told in the one may be equal
in the other. Not mapped is `end`, where a step's body is over and the step is not: the drill kills directly after the
update, or once the step has ended. `evaluation` and `fewer-ranks` have no frozen verdict. Heavy recipes are not drawn:
they are compiled, or of four ranks, and a drill starts each three times.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.drilling import drilled
from tests.zoo.frozen import PERIODIC, Outcomes, frozen
from tests.zoo.loop import CARDS, Loop, Words
from tests.zoo.recipes import __all__ as every_recipe
from tools import mutants

assert every_recipe

PHASES = {
    "fwd": "forward",
    "bwd": "backward",
    "mid": "between-updates",
    "win": "after-update",
    "epoch": "epoch-end",
    PERIODIC: PERIODIC,
}
"""Phases of the zoo that are places of the drill, too."""

TOO_LATE = ("late_attr",)
"""Recipes in which what they are about happens after the step in which a drill kills."""

ONCE_MORE = "between resume() and the first step_begin()"
"""Part of the reason where a loop of one's own does again what it does at the end of the epoch that was saved."""

CASE, COUNT = os.environ.get("LASTWORDS_ZOO_CASE", ""), int(os.environ.get("LASTWORDS_ZOO_N", "30"))


def seed() -> str:
    """Of this run."""
    return os.environ.get("LASTWORDS_ZOO_SEED") or str(mutants.tree_seed())


def drawn(count: int) -> list[str]:
    """The recipes of this run, each with a phase of the zoo."""
    draw, known = random.Random(seed()), frozen()
    able = [name for name, card in CARDS.items() if not card.heavy and name not in TOO_LATE]
    return [
        f"{name}:{draw.choice([phase for phase in PHASES if phase in known[name]])}"
        for name in draw.sample(able, min(count, len(able)))
    ]


def mismatch(
    phases: Mapping[str, Outcomes], phase: str, found: dict[str, Any], beside: Words = (), told: Words = ()
) -> str:
    """What a drill says that the frozen verdict of that phase does not; empty if nothing.

    beside: names, of which one is suspected where nobody saves it, whether bits differ by then or not. The drill kills
    in another step: what is told in some phases alone may be equal there, but not what is exact in none; and one that
    is exact may be told if one of the words in `told` is in each reason.
    """
    known = phases[phase]
    if found["verdict"] == "failed":
        return f"failed: {found['problem']}"
    reasons = found["reasons"]
    expected = bool(reasons) and all(any(word in str(reason) for word in told) for reason in reasons)
    fits = found["verdict"] in ("bitwise", "told") and (expected or not reasons)
    if known.keys() == {"exact"} and not fits:
        return f"frozen as exact, drilled as {found['verdict']}: {reasons} {found['first']}"
    exact_in_none = not any("exact" in one for one in phases.values())
    is_named = bool({*beside} & {part for name in found["suspects"] for part in name.split(".")})
    if exact_in_none and found["verdict"] == "bitwise" and not (reasons or is_named):
        return f"frozen as {known}, drilled as bitwise without a word"
    if found["verdict"] == "differs" and beside and not is_named:
        return f"none of {beside} is suspected, but {found['suspects']}"
    return ""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("number", range(1 if CASE else COUNT))  # git is asked for a seed only by what runs
def test_a_drill_says_of_a_recipe_what_is_frozen(tmp_path: Path, number: int) -> None:
    case = CASE or drawn(COUNT)[number]
    again = f"{case}, seed {seed()}; again: make zoo-drill CASE={case}"
    name, _, phase = case.partition(":")
    assert phase in PHASES, f"{case}: a drill has no such place; CASE=RECIPE:PHASE with one of {[*PHASES]}"
    loop: type[Loop] = CARDS[name].loop
    said = drilled(
        tmp_path,
        *("--phases", PHASES[phase], "--steps", str(loop.epochs * loop.per_epoch)),
        *("--nproc-per-node", str(loop.ranks), "-m"),
        command=("tests.zoo.drilled", name),
        limit_s=1800,
    )
    assert said.report is not None, f"{said.text}\n{again}"
    assert said.report["drills"], f"{said.text}\n{again}"
    card = CARDS[name]
    told = (*card.words(phase), *card.told.get("end", ()), *([ONCE_MORE] if phase == "epoch" and loop.own_loop else ()))
    problem = mismatch(frozen()[name], phase, said.report["drills"][0], card.beside, told)
    assert not problem, f"{problem}\n{said.text}\n{again}"


def test_each_commit_draws_others_unless_it_is_given_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "tree_seed", itertools.count(1).__next__)
    monkeypatch.setenv("LASTWORDS_ZOO_SEED", "")  # as of a Makefile that was given none
    first, second = drawn(30), drawn(30)
    assert first != second
    monkeypatch.setenv("LASTWORDS_ZOO_SEED", "1")
    assert drawn(30) == drawn(30) == first
    assert {case.partition(":")[2] for case in drawn(1000)} == {*PHASES}


EQUAL: dict[str, Any] = {"verdict": "bitwise", "reasons": [], "suspects": [], "first": None, "problem": ""}
DIFFERS = {**EQUAL, "verdict": "differs", "suspects": ["main() of m.loop.hidden"], "first": {"name": "w"}}


@pytest.mark.parametrize(
    ("known", "found", "fits"),
    [
        ({"exact": []}, EQUAL, True),
        ({"exact": []}, DIFFERS, False),
        ({"exact": []}, {**EQUAL, "reasons": ["it is odd"]}, False),
        ({"exact": []}, {**EQUAL, "verdict": "failed", "problem": "it hung"}, False),
        ({"told": ["it is odd"]}, {**EQUAL, "verdict": "told", "reasons": ["it is odd"]}, True),
        ({"told": ["it is odd"]}, DIFFERS, True),
        ({"told": ["it is odd"]}, EQUAL, False),
        ({"named": ["from step 6 on"]}, DIFFERS, True),
        ({"named": ["from step 6 on"]}, {**DIFFERS, "suspects": ["main() of m.loop.step"]}, False),
        ({"named": ["from step 6 on"]}, {**DIFFERS, "verdict": "bitwise"}, True),
        ({"named": ["from step 6 on"]}, EQUAL, False),
    ],
)
def test_a_drill_that_says_something_else_is_noticed(known: Outcomes, found: dict[str, Any], fits: bool) -> None:
    assert (mismatch({"fwd": known}, "fwd", found, ("hidden",)) == "") is fits


def test_what_is_told_in_one_phase_alone_may_be_equal_in_another_step() -> None:
    phases = {"fwd": {"told": ["it is odd"]}, "win": {"exact": list[str]()}}
    assert not mismatch(phases, "fwd", EQUAL)
    told = {**EQUAL, "reasons": ["it is odd"]}
    assert not mismatch(phases, "win", told, told=("odd",))
    assert mismatch(phases, "win", told, told=("even",))
    assert not mismatch(phases, "win", {**told, "verdict": "told"}, told=("odd",))
    assert mismatch(phases, "win", {**told, "verdict": "told"}, told=("even",))
    assert mismatch(phases, "win", {**told, "verdict": "differs"}, told=("odd",))
