"""Ranks that die in other ways than by kill -9: what is said of it, and that it costs nothing either."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests import golden
from tests.integration.plan import Fault, Layout
from tests.integration.rig import EXIT_SAVED, KILLED, Launch, Rig
from tests.liveness.cgroups import memory_cgroup
from tests.selection import more

pytestmark = pytest.mark.process

LAYOUT = Layout(world_size=3, augment=True)
STEP, VICTIM = 6, 1
CODES = {"segv": -11, "abort": -6, "os_exit:3": 3}
LITTLE_BYTES = 512 << 20


def ended(launch: Launch) -> dict[int, str]:
    """How ranks have ended, as the controller knows."""
    events = [event for one in launch.incidents() for event in one["events"]]
    return {event["rank"]: event["how"] for event in events if event["what"] == "ended"}


def left(launch: Launch) -> list[int]:
    """Ranks whose `on_leave` function was called."""
    return [rank for rank in range(LAYOUT.world_size) if (launch.directory / f"rank_{rank}.left").exists()]


def die(rig: Rig, action: str, phase: str, code: int, launcher: str = "fork", **settings: Any) -> None:
    """A rank dies in this way; the others save, say how it has died, and the resumed run is bitwise the same."""
    launch = rig.launch(LAYOUT, faults=[Fault(VICTIM, STEP, phase, (action,))], launcher=launcher, **settings)
    launch.finish()
    step = rig.check_step(launch, [VICTIM], {STEP - 1, STEP})
    if launcher == "fork":
        assert launch.codes == {0: EXIT_SAVED, VICTIM: code, 2: EXIT_SAVED}, launch.job.report()
    reason = launch.manifest(launch.checkpoints[-1])["reason"]
    golden.says([ended(launch), reason])
    assert all(reason in line for rank in (0, 2) for line in launch.last_words(rank))
    assert launch.last_words(0), launch.job.report()
    assert left(launch) == [0, 2]
    rig.check_resume(launch, step)


@pytest.mark.parametrize(
    ("action", "phase", "launcher"),
    [
        ("segv", "forward", "fork"),
        more("abort", "update", "fork"),
        more("os_exit:3", "before_step", "fork"),
        more("segv", "update", "torchrun"),
        more("abort", "backward", "torchrun"),
        more("os_exit:3", "forward", "torchrun"),
    ],
)
def test_a_rank_that_dies_of_itself_costs_nothing_and_it_is_said_how(
    rig: Rig, action: str, phase: str, launcher: str
) -> None:
    die(rig, action, phase, CODES[action], launcher)


@pytest.mark.parametrize(
    ("action", "phase"),
    [more("segv", "before_step"), ("abort", "forward"), more("os_exit:3", "update")],
)
def test_a_job_goes_on_from_that_under_lastwords_run_which_says_so_too(rig: Rig, action: str, phase: str) -> None:
    launch, difference = rig.healed(LAYOUT, [Fault(VICTIM, STEP, phase, (action,))])
    assert difference is None, launch.fail(str(difference))
    (recovery,) = [one for one in launch.incidents() if one["outcome"] == "RECOVERED"]
    (died,) = [one for one in recovery["events"] if one["what"] == "died"]
    assert (died["rank"], died["code"]) == (VICTIM, CODES[action])
    assert left(launch) == [0, 2]
    golden.says(sentences(launch))  # the launcher's own knowledge: it may reap the process before a rank has looked


def sentences(launch: Launch) -> list[str]:
    """What the launcher has said of its recoveries, without the durations, and without imports: they take long enough
    to be spoken of where the machine is busy."""
    text = (launch.directory / "healing.err").read_text()
    text = re.sub(r" \([\d.]+ s of it were imports: [^)]*\)", "", text)
    lines = [line for line in text.splitlines() if line.startswith("lastwords run: rank")]
    return [re.sub(r"[\d.]+ m?s\b|(?<=step )\d+", "_", line) for line in lines]


@pytest.mark.root
@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["fork", "healing"])
def test_a_rank_that_the_kernel_kills_for_lack_of_memory(rig: Rig, launcher: str) -> None:
    with memory_cgroup(LITTLE_BYTES) as folder:
        sabotage = (f"in_cgroup:{VICTIM}={folder}",)
        if launcher == "fork":
            return die(rig, f"take:{2 * LITTLE_BYTES}", "forward", KILLED, sabotage=sabotage)
        fault = Fault(VICTIM, STEP, "forward", (f"take:{2 * LITTLE_BYTES}",))
        launch, difference = rig.healed(LAYOUT, [fault], sabotage=sabotage)
    assert difference is None, launch.fail(str(difference))
    golden.says([ended(launch), *sentences(launch)])
