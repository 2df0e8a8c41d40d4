"""Rows, advice and the JSON document."""

from __future__ import annotations

import dataclasses
import json

from lastwords.checkpoint.drill_record import Covered
from lastwords.drill.compare import BITWISE, DIFFERS, FAILED, TOLD, DrillVerdict, Leaf
from lastwords.drill.phases import FEWER, Drill
from lastwords.drill.report import Report
from lastwords.optim_wrapper.launch.drill_plan import Death
from tests import golden
from tests.drill.made import begin

FORWARD, FEW = Drill("forward", Death((0, 2), 5, "forward", 1)), Drill(FEWER, Death((1,), 6, "forward", 1))
LEAF = Leaf("parameter", "w", 6, 1, 3)


def report(*verdicts: DrillVerdict) -> Report:
    return Report({"script": "train.py"}, 3, 12, None, [*verdicts], {"evaluation": "there is none"})


def test_each_verdict_has_a_row_and_so_has_each_phase_that_was_missed() -> None:
    every = report(
        DrillVerdict(FORWARD, BITWISE, 4, 8),
        DrillVerdict(FORWARD, BITWISE, 4, 8, reasons=("another torch",)),
        DrillVerdict(FORWARD, BITWISE, 0, 12),
        DrillVerdict(FORWARD, TOLD, 4, 8, LEAF, reasons=("model.t is too large",)),
        DrillVerdict(FORWARD, DIFFERS, 4, 8, LEAF),
        DrillVerdict(FORWARD, DIFFERS, 4, 8, LEAF, Leaf("buffer", "mean", 4, 0)),
        DrillVerdict(FORWARD, FAILED, problem="the run hung"),
        DrillVerdict(FEW, BITWISE, 5, 0, reasons=("other ranks",)),
    )
    golden.says("\n".join(" | ".join(row) for row in every.rows()))


def test_advice_names_what_to_register_or_where_to_look() -> None:
    suspected = report(DrillVerdict(FORWARD, DIFFERS, 4, 8, LEAF, suspects=("main() of __main__.t.scale",)))
    nothing = report(DrillVerdict(FORWARD, DIFFERS, 4, 8, LEAF))
    read_by_nobody = report(DrillVerdict(FORWARD, BITWISE, 4, 8, suspects=("total",)))
    told = report(
        DrillVerdict(FORWARD, TOLD, 4, 8, LEAF, reasons=("the attribute model.t is too large",), suspects=("model.t",))
    )
    golden.says("\n".join([*suspected.advice(), *nothing.advice(), *read_by_nobody.advice()]))
    assert not told.advice(), "the reason says what to do"
    assert not report(DrillVerdict(FORWARD, BITWISE, 4, 8)).advice()


def test_state_that_is_dead_is_named_with_the_line_to_write_unless_another_drill_has_differed_for_it() -> None:
    told = "the attribute {} changes, and is not saved".format
    every = DrillVerdict(
        FORWARD, BITWISE, 4, 8, reasons=(told("model.a"), told("model.b")), dead=("model.a", "model.b")
    )
    one = DrillVerdict(FORWARD, TOLD, 4, 8, LEAF, reasons=(told("model.b"),))
    assert (report(every, one).dead, report(one).dead) == (["model.a"], [])
    assert not report(every, dataclasses.replace(every, dead=())).dead, "there, another attribute was missing it"
    assert report(every, DrillVerdict(FEW, BITWISE, 5, 0, reasons=(told("model.a"),))).dead == ["model.a", "model.b"]
    golden.says("\n".join([*report(every).advice(), *report(every, one).advice()]))
    assert report(every).to_json()["forget"] == ["model.a", "model.b"]


def test_what_is_kept_beside_checkpoints_says_what_was_covered_and_what_ran() -> None:
    every = report(DrillVerdict(FORWARD, BITWISE, 4, 8), DrillVerdict(FEW, DIFFERS, 5, 0, LEAF))
    every.of, every.began = {"torch": "2.13.0", "lastwords": "0.1.0"}, dataclasses.replace(begin(), sha256="a")
    record = every.to_record()
    assert record.drills == (Covered("forward", (0, 2), 5, "bitwise", 4), Covered("fewer-ranks", (1,), 6, "differs", 5))
    assert (record.bitwise, record.world_size, record.steps, record.missed) == (False, 3, 12, ("evaluation",))
    assert (record.sha256, record.torch) == ("a", "2.13.0")


def test_only_equal_bits_everywhere_are_bitwise() -> None:
    good = DrillVerdict(FORWARD, BITWISE, 4, 8)
    assert report(good, good).is_bitwise
    for kind in (TOLD, DIFFERS, FAILED):
        assert not report(good, DrillVerdict(FORWARD, kind, 4, 8, LEAF)).is_bitwise
    unsteady = report(good)
    unsteady.irreproducible = LEAF
    assert not unsteady.is_bitwise


def test_the_document_is_json_and_says_all() -> None:
    document = json.loads(json.dumps(report(DrillVerdict(FORWARD, DIFFERS, 4, 8, LEAF, suspects=("s",))).to_json()))
    (one,) = document["drills"]
    assert (one["phase"], one["ranks"], one["verdict"], one["resumed_after"]) == ("forward", [0, 2], "differs", 4)
    assert one["first"] == {"kind": "parameter", "name": "w", "step": 6, "rank": 1, "more": 3}
    assert one["suspects"] == ["s"]
    assert document["missed"] == {"evaluation": "there is none"}
    assert (document["bitwise"], document["reproducible"]) == (False, True)
