"""What dying ranks leave behind is read as far as it goes."""

from __future__ import annotations

import dataclasses
import json

from lastwords.drill.phases import lives_in
from lastwords.errors import FormatError
from tests import golden
from tests.drill.made import begin, life


def line(kind: str, one: object = None, **more: object) -> str:
    fields = {} if one is None else dataclasses.asdict(one)  # type: ignore[call-overload]
    return json.dumps({"kind": kind, **fields, **more})


def test_lives_follow_one_another_and_half_a_line_counts_for_nothing() -> None:
    step = life().steps[1]
    lines = [line("begin", begin()), line("step", step), line("dies", event="update"), line("step", step)[:40]]
    first, second = lives_in([*lines, line("spoilt", name="w"), line("begin", begin(1))], "rank_0.jsonl")
    assert (first.begin, first.steps, first.dies) == (begin(), {1: step}, "update")
    assert (second.begin.step, second.spoilt, second.steps) == (1, "w", {})


def test_a_line_that_no_rank_has_written_is_refused() -> None:
    with golden.raises(FormatError):
        lives_in([line("begin", begin(), world="two")], "rank_0.jsonl")
