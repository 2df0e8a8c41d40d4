"""kill -9 under `lastwords run`, by phase and victims: all ranks are started again, and no bit differs.

The kills come one after the other in one run, since most of the time is spent on starting processes.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import golden
from tests.integration.faults import dying
from tests.integration.kills import Kill
from tests.integration.plan import Fault, Layout
from tests.integration.rig import Launch, Rig
from tests.selection import more

pytestmark = pytest.mark.process

PHASES = ("forward", "backward", "after_update")
VICTIMS = ((0,), (1,), (2, 0))
MOST = ((0, 1, 2),)
"""Of four ranks."""
LAYOUT = Layout(world_size=3, epochs=3)
LONG = dataclasses.replace(LAYOUT, epochs=5)


def kills_of(victims: Sequence[tuple[int, ...]]) -> list[Kill]:
    """One in each generation; the generation before has taken a step of its own."""
    return [Kill(phase, 2 + 2 * count, dead) for count, (phase, dead) in enumerate(itertools.product(PHASES, victims))]


def check_processes(launch: Launch, generations: int) -> None:
    """Each generation has a process of its own for each rank, and what one has written comes before the next one's."""
    for rank, records in enumerate(launch.track.records):
        pids = [pid for pid, _ in itertools.groupby(records, lambda record: record["pid"])]
        assert len(pids) == len({*pids}) == generations, launch.fail(f"rank {rank} was {pids}")


def saved_steps(launch: Launch) -> list[int]:
    return [one["step"] for one in launch.incidents() if one["outcome"] == "SAVED"]


def said(launch: Launch) -> str:
    """By the launcher."""
    return (launch.directory / f"{launch.job.launcher}.err").read_text()


def killed(launch: Launch) -> list[str]:
    """Ranks that the launcher has killed, and why."""
    return re.findall(r"^rank \d+ is killed.*", said(launch), flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("ranks", "victims"), [(3, VICTIMS), more(4, MOST)], ids=["one or two of three", "three of four"]
)
def test_all_ranks_are_started_again_after_each_kill_and_no_bit_differs(
    ranks: int, victims: Sequence[tuple[int, ...]], rig: Rig
) -> None:
    kills, layout = kills_of(victims), dataclasses.replace(LONG, world_size=ranks)
    faults = [
        dataclasses.replace(fault, restart=generation)
        for generation, kill in enumerate(kills)
        for fault in kill.faults(layout)
    ]
    launch, difference = rig.healed(layout, faults)
    assert difference is None, launch.fail(str(difference))
    check_processes(launch, 1 + len(kills))
    saved = saved_steps(launch)
    assert len(saved) == len(kills), launch.fail(f"saved {saved}")
    for step, kill in zip(saved, kills, strict=True):
        assert step in kill.steps_expected(layout), launch.fail(f"{kill}: step {step} was saved")
    resumes = [one for records in launch.track.records for one in records if one["kind"] == "resumed"]
    assert len(resumes) == layout.world_size * len(kills)
    assert all(one["exact"] for one in resumes), launch.fail("a resume was not exact")
    assert not killed(launch)
    assert "outlived" not in said(launch), "there are only the launcher's own processes, some from before"


def healed(rig: Rig, faults: Sequence[Fault], step: int, **settings: object) -> Launch:
    """One failure, with which this step is saved."""
    launch, difference = rig.healed(LAYOUT, faults, **settings)
    assert difference is None, launch.fail(str(difference))
    check_processes(launch, 2)
    assert saved_steps(launch) == [step]
    return launch


@pytest.mark.thorough
def test_a_controller_that_dies_once_its_checkpoint_is_published_is_followed(rig: Rig, tmp_path: Path) -> None:
    healed(rig, [Fault(1, 3, "forward", ("kill",))], 2, env=dying(tmp_path / "site", "exiting", acts=False))
    assert (tmp_path / "site" / "died").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("pause", ["sleep:8", "stop:8"])
def test_a_rank_that_pauses_is_waited_for_with_a_death_beside_it_and_without(rig: Rig, pause: str) -> None:
    alone = Fault(0, 2, "forward", (pause,))
    beside = [Fault(0, 5, "forward", ("mark:here", pause)), Fault(1, 5, "forward", ("await:here", "kill"))]
    launch = healed(rig, [alone, *beside], 4)
    assert [one["outcome"] for one in launch.incidents()].count("RECOVERED") == 1
    assert not killed(launch)


@pytest.mark.thorough
def test_a_rank_that_is_stopped_when_all_others_have_left_is_not_waited_for(rig: Rig) -> None:
    """Without it they save after 15 s."""
    stopped = Fault(0, 5, "forward", ("mark:here", "stop:40"))
    launch = healed(rig, [stopped, Fault(1, 5, "forward", ("await:here", "kill"))], 4)
    golden.says(killed(launch))


@pytest.mark.thorough
def test_a_rank_that_leaves_its_loop_early_is_started_again_with_all_others(rig: Rig) -> None:
    launch = healed(rig, [Fault(1, 3, "end", ("break",))], 3, env={"LASTWORDS_LEAVE_TIMEOUT_S": "5"})
    (incident,) = [one for one in launch.incidents() if one["outcome"] == "SAVED"]
    assert incident["cause_ranks"] == [1]
    assert not [event for event in incident["events"] if event["what"] == "ended"], "nobody is taken for dead"
