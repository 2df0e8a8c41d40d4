"""Ranks that stand still, as real processes: who is said to be behind, and what becomes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import golden
from tests.integration.harness import Cluster
from tests.integration.toy import Toy

pytestmark = pytest.mark.process

RANKS, STEP, STEPS = 3, 5, 8
WATCH = {"LASTWORDS_HANG_NOTICE_S": "6"}
"""Beyond the 3 s after which a rank looks where it stands."""


@pytest.fixture
def toy(cluster: Cluster, tmp_path: Path) -> Iterator[Toy]:
    toy = Toy(cluster, tmp_path, ranks=RANKS)
    yield toy
    toy.close()


def lines(said: str, word: str) -> list[str]:
    """Those with `word`, without what differs from run to run: lines of the script, and durations."""
    found = [line for line in said.splitlines() if word in line]
    return [re.sub(r"(?<=\.py:)\d+|[\d.e-]+(?= s\b)|(?<=process )\d+|(?<=: step )\d+", "_", line) for line in found]


def test_a_rank_that_sleeps_in_its_forward_pass_is_named_with_its_line_and_prints_its_stack(toy: Toy) -> None:
    assert set(toy.run("slow", env=WATCH, parts=1, steps=STEPS, sleeps=[1, STEP, 9.0]).values()) == {0}, toy.report()
    golden.says(lines(toy.said(0), "ended"))
    golden.says(lines(toy.said(1), "ended"))
    assert "time.sleep(" in toy.said(1)
    assert "time.sleep(" not in toy.said(0)
    assert toy.manifests() == [], "nothing is done about it"


def test_a_rank_that_is_stopped_is_named_and_training_goes_on_with_it(toy: Toy) -> None:
    assert set(toy.run("stopped", env=WATCH, parts=1, steps=STEPS, stops=[1, STEP, 7]).values()) == {0}, toy.report()
    golden.says(lines(toy.said(0), "stopped"))


def test_with_a_time_out_a_stuck_rank_ends_with_the_others_and_its_stack_is_on_record(toy: Toy) -> None:
    env = {"LASTWORDS_HANG_TIMEOUT_S": "4"}
    codes = toy.run("stuck", env=env, parts=1, steps=STEPS, sleeps=[1, STEP, 600.0])
    assert codes == dict.fromkeys(range(RANKS), 75), toy.report()
    (manifest,) = toy.manifests()
    assert (manifest["global_step"], manifest["cause_ranks"]) == (STEP - 1, [1])
    (line,) = (toy.checkpoints / "logs" / "incidents.jsonl").read_text().splitlines()
    (stack,) = [event for event in json.loads(line)["events"] if event["what"] == "stack"]
    assert stack["rank"] == 1
    assert "time.sleep" in stack["text"]
