"""A platform that sends SIGTERM to every rank, and SIGKILL after a grace period, while a disk hangs.

When the controller gives up within that period is for tests/controller/test_preemption.py, which has no clock. Here
nobody who has been told the period is killed: what a busy machine does late does not count, and they end by themselves.
"""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests import golden
from tests.integration.plan import Fault, Layout
from tests.integration.rig import EXIT_NOT_SAVED, EXIT_SAVED, KILLED, Launch, Rig
from tests.patience import LONG_S

pytestmark = [pytest.mark.process, pytest.mark.thorough]

LAYOUT = Layout(world_size=3, augment=True)
STEP, GRACE_S = 6, 18.0
TOLD = {"LASTWORDS_PREEMPTION_GRACE_S": str(GRACE_S)}


def preempted(rig: Rig, sabotage: str, env: dict[str, str]) -> Launch:
    """All ranks are in a step when they are told to end; without the setting, they are killed `GRACE_S` later."""
    ranks = range(LAYOUT.world_size)
    faults = [Fault(rank, STEP, "body", (f"mark:here-{rank}", "hang")) for rank in ranks]
    launch = rig.launch(LAYOUT, faults=faults, sabotage=(sabotage,), env=env)
    marks = [launch.directory / f"mark-here-{rank}" for rank in ranks]
    launch.job.wait_for(lambda: all(mark.exists() for mark in marks), 60, "the step")
    over_mono_s = time.monotonic() + GRACE_S
    for rank in ranks:
        launch.job.signal(rank, signal.SIGTERM)

    def is_over() -> bool:
        return len(launch.job.exits) == len(ranks) or (not env and time.monotonic() > over_mono_s)

    launch.job.wait_for(is_over, LONG_S, "the end of every rank, or of the grace period")
    for rank in ranks:
        launch.job.signal(rank, signal.SIGKILL)
    launch.finish()
    return launch


def test_where_the_disk_of_one_rank_hangs_another_one_saves_in_time(rig: Rig) -> None:
    launch = preempted(rig, "hangs_while_writing:0", TOLD)
    assert set(launch.codes.values()) == {EXIT_SAVED}, launch.job.report()
    step = rig.check_step(launch, [], {STEP - 1})
    assert launch.manifest(launch.checkpoints[-1])["units"]["replicated"]["writer"] == 1
    rig.check_resume(launch, step)


def test_the_control_without_the_setting_nothing_is_saved_before_the_end(rig: Rig) -> None:
    launch = preempted(rig, "hangs_while_writing:0", {})
    assert set(launch.codes.values()) == {KILLED}, launch.job.report()
    assert launch.checkpoints == []


def test_where_every_disk_hangs_each_rank_says_so_and_ends(rig: Rig) -> None:
    launch = preempted(rig, "hangs_while_writing", TOLD)
    assert set(launch.codes.values()) == {EXIT_NOT_SAVED}, launch.job.report()
    assert launch.checkpoints == []
    for rank in range(LAYOUT.world_size):
        (line,) = launch.last_words(rank)
        golden.says(re.sub(rf"rank {rank}\b", "rank _", line, count=1))
