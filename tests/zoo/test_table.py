"""The frozen verdicts and the page's table: each recipe in each phase, and nothing that a recipe does not allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests import golden
from tests.zoo import recipes, recipes_strangers
from tests.zoo.frozen import UNNAMED, frozen, mismatch, of_results, text_of
from tests.zoo.loop import CARDS
from tests.zoo.table import PAGE, page_with, row_text
from tests.zoo.verdict import Verdict

assert recipes.__doc__

HOLES_MAX = 0
"""Cases of strangers' loops that are called exact and are not. The number may only fall."""


def test_each_recipe_has_a_verdict_in_each_of_its_phases_and_from_a_periodic_checkpoint() -> None:
    assert {name: set(phases) for name, phases in frozen().items()} == {
        card.name: {*card.phases, "periodic"} for card in CARDS.values()
    }


def test_the_page_has_the_table_of_the_frozen_verdicts() -> None:
    page = PAGE.read_text()
    assert page == page_with(page, frozen())


def test_a_recipe_is_told_only_where_it_allows_it_and_only_strangers_have_holes() -> None:
    holes = 0
    for name, phases in frozen().items():
        card = CARDS[name]
        for phase, outcomes in phases.items():
            holes += "silent" in outcomes
            for outcome, reasons in outcomes.items():
                if card.loop.__module__ == recipes_strangers.__name__:
                    continue  # strangers say what their loop does, and not what they expect
                verdict = Verdict(outcome, "", tuple(reasons))
                assert not verdict.problem(card, "fwd" if phase == "periodic" else phase), (name, phase)
    assert holes == HOLES_MAX


def test_what_has_been_noted_of_a_phase_is_put_together() -> None:
    lines = [
        '{"recipe": "ema", "phase": "bwd", "kind": "told", "reasons": ["a", "b"]}',
        '{"recipe": "ema", "phase": "bwd", "kind": "exact", "reasons": []}',
        '{"recipe": "counter", "phase": "bwd", "kind": "named", "reasons": [], "where": "from step 6 on"}',
        '{"recipe": "ema", "phase": "bwd", "kind": "told", "reasons": ["b", "c"]}',
    ]
    found = of_results(lines)
    assert found["ema"] == {"bwd": {"told": ["a", "b", "c"], "exact": []}}
    assert found["counter"] == {"bwd": {"named": ["from step 6 on"]}}
    assert text_of({"ema": found["ema"]}) == ('{\n "ema": {\n  "bwd": {"exact": [], "told": ["a", "b", "c"]}\n }\n}\n')


def test_a_broken_run_is_not_frozen() -> None:
    line = '{"recipe": "ema", "phase": "bwd", "kind": "broken", "reasons": [], "text": "exit code 1"}'
    with golden.raises(SystemExit):
        of_results([line])


EXACT = Verdict("exact", "")
TOLD, NONSENSE = (Verdict("told", "", (reason,)) for reason in ("extras['ema'] moved", "nonsense"))
LATER, WRONG = (Verdict("silent", "", where=where) for where in ("from step 6 on", "restored on rank 0: ['0.weight']"))
NAMELESS = Verdict("told", "", (f"global step 6 {UNNAMED}; continue by global step",))
OF_EMA = {"told": ["extras['ema'] moved"]}


@pytest.mark.parametrize(
    ("name", "phase", "verdict", "known"),
    [
        ("ema", "win", EXACT, None),
        ("ema", "win", EXACT, OF_EMA),
        ("ema", "win", TOLD, {"told": ["extras['ema'] was away"]}),
        ("ema", "bwd", LATER, {"exact": [], **OF_EMA}),
        ("ema", "bwd", NONSENSE, OF_EMA),
        ("moco", "bwd", TOLD, {"exact": []}),
        ("moco", "fwd", EXACT, {"silent": ["from step 6 on"]}),
        ("moco", "bwd", EXACT, {"silent": ["from step 6 on"]}),
        ("moco", "bwd", TOLD, {"silent": ["from step 6 on"]}),
        ("moco", "fwd", NAMELESS, {"silent": ["from step 6 on"]}),
        ("counter", "bwd", WRONG, {"named": ["from step 6 on"]}),
        ("counter", "bwd", LATER, {"named": ["from step 6 on"]}),
        ("actnorm", "epoch", WRONG, {"silent": ["from step 5 on"]}),
        ("error_feedback", "bwd", NONSENSE, {"told": ["a hook's state is not saved"]}),
    ],
)
def test_a_verdict_that_is_not_the_frozen_one_is_noticed(
    name: str, phase: str, verdict: Verdict, known: dict[str, list[str]] | None
) -> None:
    assert mismatch(CARDS[name], phase, verdict, known)


@pytest.mark.parametrize(
    ("name", "phase", "verdict", "known"),
    [
        ("ema", "win", TOLD, OF_EMA),
        ("ema", "bwd", TOLD, {"exact": []}),
        ("ema", "bwd", TOLD, {"told": ["extras['ema'] was away"]}),
        ("ema", "bwd", EXACT, OF_EMA),
        ("moco", "bwd", NAMELESS, {"silent": ["from step 6 on"]}),
        ("counter", "bwd", replace(LATER, kind="named"), {"named": ["from step 5 on"]}),
        ("actnorm", "epoch", LATER, {"silent": ["from step 6 on"]}),
    ],
)
def test_the_frozen_verdict_is_kept_and_a_kill_at_another_instant_may_find_another_step(
    name: str, phase: str, verdict: Verdict, known: dict[str, list[str]]
) -> None:
    assert not mismatch(CARDS[name], phase, verdict, known)


def test_a_recipe_that_is_missing_is_noticed() -> None:
    page = PAGE.read_text()
    assert page != page_with(page, {name: {} for name in frozen()})
    assert row_text(
        CARDS["ema"], {"win": {"told": []}, "bwd": {"exact": [], "told": []}, "end": {"exact": []}}
    ).endswith(" | end | bwd, win |  |")
