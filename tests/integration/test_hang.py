"""Ranks that stand still, as real processes: who is said to be behind, and what becomes of it."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import golden
from tests.integration.harness import Cluster
from tests.integration.plan import Fault, Layout
from tests.integration.rig import EXIT_SAVED, KILLED, RUN_TIMEOUT_S, Rig
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
    # Ranks that end at once afterwards may have left before they hear that training goes on.
    plan = {"parts": 1, "steps": STEPS, "sleeps": [1, STEP, 9.0], "slow_end": [1, STEP + 1, 2.0]}
    assert set(toy.run("slow", env=WATCH, **plan).values()) == {0}, toy.report()
    golden.says(lines(toy.said(0), "ended"))
    golden.says(lines(toy.said(1), "ended"))
    assert "time.sleep(" in toy.said(1)
    assert "time.sleep(" not in toy.said(0)
    assert toy.manifests() == [], "nothing is done about it"


@pytest.mark.thorough
def test_a_rank_that_is_stopped_is_named_and_training_goes_on_with_it(toy: Toy) -> None:
    plan = {"parts": 1, "steps": STEPS, "stops": [1, STEP, 7], "slow_end": [1, STEP + 1, 2.0]}
    assert set(toy.run("stopped", env=WATCH, **plan).values()) == {0}, toy.report()
    golden.says(lines(toy.said(0), "stopped"))


@pytest.mark.thorough
def test_with_a_time_out_a_stuck_rank_ends_with_the_others_and_its_stack_is_on_record(toy: Toy) -> None:
    env = {"LASTWORDS_HANG_TIMEOUT_S": "4"}
    codes = toy.run("stuck", env=env, parts=1, steps=STEPS, sleeps=[1, STEP, 600.0])
    assert codes == dict.fromkeys(range(RANKS), 75), toy.report()
    (manifest,) = toy.manifests()
    assert (manifest["global_step"], manifest["cause_ranks"]) == (STEP - 1, [1])
    (line,) = (toy.checkpoints / "logs" / "incidents.jsonl").read_text().splitlines()
    stacks = {event["rank"]: event["text"] for event in json.loads(line)["events"] if event["what"] == "stack"}
    assert [rank for rank in range(RANKS) if "time.sleep(" in stacks[rank]] == [1]
    assert [rank for rank in range(RANKS) if "all_reduce(" in stacks[rank]] == [0, 2]


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["exits", "leaves_out"])
def test_a_rank_without_which_the_others_wait_in_an_own_loop_is_named_long_before_they_end(toy: Toy, what: str) -> None:
    """One calls sys.exit(0), the other one swallows an exception and goes on, until the last step is not its own."""
    env = {"LASTWORDS_LEAVE_TIMEOUT_S": "9"}
    codes = toy.run("waits", env=env, own_loop=True, parts=1, steps=STEPS, **{what: [1, STEP]})
    assert codes == dict.fromkeys(range(RANKS), 75), toy.report()
    golden.says(lines(toy.said(0), "left"))


LAYOUT = Layout(world_size=RANKS, augment=True)
SOON = {"LASTWORDS_HANG_NOTICE_S": "4", "LASTWORDS_HANG_TIMEOUT_S": "6", "LASTWORDS_SETTLE_TIMEOUT_S": "2"}


def test_a_rank_that_keeps_the_interpreters_lock_is_said_not_to_answer_and_the_others_save(rig: Rig) -> None:
    launch = rig.launch(LAYOUT, faults=[Fault(1, STEP, "forward", ("hold_lock",))], env=SOON)
    launch.job.wait(RUN_TIMEOUT_S, ranks=(0, 2))
    launch.job.signal(1, signal.SIGKILL)  # nothing in it can end it, and plain launchers do so
    launch.finish()
    assert launch.codes == {0: EXIT_SAVED, 1: KILLED, 2: EXIT_SAVED}, launch.job.report()
    step = rig.check_step(launch, [1], {STEP - 1})
    reason = launch.manifest(launch.checkpoints[-1])["reason"]
    said = [line.rpartition("; ")[2] for line in lines(launch.job.output(0), "lock")]
    golden.says([*said, *lines(reason, "stood")])
    rig.check_resume(launch, step)


@pytest.mark.thorough
@pytest.mark.parametrize("action", ["hang", "hold_lock"])
def test_a_stuck_rank_holds_nobody_up_under_lastwords_run(rig: Rig, action: str) -> None:
    """One that keeps the interpreter's lock cannot end itself, so the launcher ends it."""
    fault = Fault(1, STEP, "forward", (action,))
    launch, difference = rig.healed(LAYOUT, [fault], env=SOON, launcher="impatient")
    assert difference is None, launch.fail(str(difference))
    (recovery,) = [one for one in launch.incidents() if one["outcome"] == "RECOVERED"]
    left = {one["rank"] for one in recovery["events"] if one["what"] == "left"}
    assert left == ({0, 1, 2} if action == "hang" else {0, 2})
    died = [one["rank"] for one in recovery["events"] if one["what"] == "died"]
    assert died == ([] if action == "hang" else [1])
    (incident,) = [one for one in launch.incidents() if one["outcome"] == "SAVED"]
    golden.says(lines(incident["reason"], "stood"))
