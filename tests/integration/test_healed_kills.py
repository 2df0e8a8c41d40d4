"""kill -9 under `lastwords run`, by phase, victims and spares: only the dead are replaced, and no bit differs.

The kills of one case come one after the other in one run, since most of the time is spent on starting processes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.faults import dying
from tests.integration.kills import Kill
from tests.integration.pairwise import pairwise
from tests.integration.plan import Fault, Layout
from tests.integration.rig import Launch, Rig
from tests.selection import more

pytestmark = pytest.mark.process

PHASES = {"forward": "forward", "backward": "backward", "window": "after_update"}
VICTIMS = {"rank 0": (0,), "another": (1,), "two": (2, 0)}
PARAMETERS: dict[str, tuple[Hashable, ...]] = {
    "phase": tuple(PHASES),
    "victims": tuple(VICTIMS),
    "spares": (0, 1),
}
LAYOUT = Layout(world_size=3, epochs=3)

ROWS, NEVER = pairwise(PARAMETERS, lambda row: True)
ALL = [dict(zip(PARAMETERS, values, strict=True)) for values in itertools.product(*PARAMETERS.values())]
OTHERS = [row for row in ALL if row not in ROWS]


def kills_of(rows: Sequence[Mapping[str, Any]], spares: int) -> list[Kill]:
    """One in each generation; the generation before has taken a step of its own."""
    chosen = [row for row in rows if row["spares"] == spares]
    return [Kill(PHASES[row["phase"]], 2 + 2 * count, VICTIMS[row["victims"]]) for count, row in enumerate(chosen)]


def faults_of(kills: Sequence[Kill], spares: int) -> Iterator[Fault]:
    """Who kills the victims has seen that a spare is ready, if there are any."""
    for generation, kill in enumerate(kills):
        for fault in kill.faults(LAYOUT):
            first = (f"await_spare:spare-{generation}",) if spares and fault.actions[-1] == "kill" else ()
            yield dataclasses.replace(fault, actions=(*first, *fault.actions), restart=generation)


def check_processes(launch: Launch, kills: Sequence[Kill], spares: int) -> None:
    """A rank has one process more for each time that it was killed, one of them from each spare."""
    pids = [launch.track.pids(rank) for rank in range(LAYOUT.world_size)]
    for rank, found in enumerate(pids):
        assert len(found) == 1 + sum(rank in kill.victims for kill in kills), launch.fail(f"rank {rank} was {found}")
    for generation, kill in enumerate(kills if spares else ()):
        spare = int((launch.directory / f"mark-spare-{generation}").read_text())
        later = [sum(rank in one.victims for one in kills[: generation + 1]) for rank in kill.victims]
        successors = [pids[rank][count] for rank, count in zip(kill.victims, later, strict=True)]
        assert spare in successors, launch.fail(f"{kill}: the spare {spare} was not used, but {successors}")


@pytest.mark.parametrize(
    ("rows", "spares"),
    [(ROWS, 1), more(ROWS, 0), more(OTHERS, 1), more(OTHERS, 0)],
    ids=["with a spare", "without", "others with a spare", "others without"],
)
def test_only_the_killed_are_replaced_and_no_bit_differs(
    rig: Rig, rows: Sequence[Mapping[str, Any]], spares: int
) -> None:
    kills = kills_of(rows, spares)
    launch, difference = rig.healed(LAYOUT, [*faults_of(kills, spares)], spares=spares)
    assert difference is None, launch.fail(str(difference))
    check_processes(launch, kills, spares)
    saved = [one["step"] for one in launch.incidents() if one["outcome"] == "SAVED"]
    assert len(saved) == len(kills), launch.fail(f"saved {saved}")
    for step, kill in zip(saved, kills, strict=True):
        assert step in kill.steps_expected(LAYOUT), launch.fail(f"{kill}: step {step} was saved")
    resumes = [one for records in launch.track.records for one in records if one["kind"] == "resumed"]
    assert len(resumes) == LAYOUT.world_size * len(kills)
    assert all(one["exact"] for one in resumes), launch.fail("a resume was not exact")


def test_the_kills_of_every_run_cover_every_pair() -> None:
    assert not NEVER
    assert len(ROWS) == len(OTHERS) == 9
    assert all(kill.step < LAYOUT.steps for rows in (ROWS, OTHERS) for kill in kills_of(rows, 0) + kills_of(rows, 1))


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["stop_spare", "kill_spare"])
def test_a_spare_that_is_stopped_or_dies_as_it_is_needed_is_not_waited_for(rig: Rig, how: str) -> None:
    fault = Fault(1, 3, "backward", ("await_spare:spare", how, "kill"))
    launch, difference = rig.healed(Layout(world_size=2), [fault], spares=1, by_exec=how == "stop_spare")
    assert difference is None, launch.fail(str(difference))
    _, successor = launch.track.pids(1)
    assert successor != int((launch.directory / "mark-spare").read_text())


@pytest.mark.thorough
def test_a_controller_that_dies_once_its_checkpoint_is_published_is_followed(rig: Rig, tmp_path: Path) -> None:
    death = Fault(1, 3, "forward", ("kill",))
    launch, difference = rig.healed(LAYOUT, [death], env=dying(tmp_path / "site", "exiting", acts=False))
    assert difference is None, launch.fail(str(difference))
    assert (tmp_path / "site" / "died").exists()
    assert [len(launch.track.pids(rank)) for rank in range(LAYOUT.world_size)] == [1, 2, 1], launch.job.report()


@pytest.mark.thorough
@pytest.mark.parametrize("pause", ["sleep:8", "stop:8"])
def test_a_rank_that_pauses_is_waited_for_with_a_death_beside_it_and_without(rig: Rig, pause: str) -> None:
    alone = Fault(0, 2, "forward", (pause,))
    beside = [Fault(0, 5, "forward", ("mark:here", pause)), Fault(1, 5, "forward", ("await:here", "kill"))]
    launch, difference = rig.healed(LAYOUT, [alone, *beside])
    assert difference is None, launch.fail(str(difference))
    assert [len(launch.track.pids(rank)) for rank in range(LAYOUT.world_size)] == [1, 2, 1], launch.job.report()
    assert [one["step"] for one in launch.incidents() if one["outcome"] == "SAVED"] == [4]
    assert [one["outcome"] for one in launch.incidents()].count("RECOVERED") == 1


@pytest.mark.thorough
def test_a_rank_that_is_stopped_for_longer_than_it_is_waited_for_is_replaced(rig: Rig) -> None:
    """Who waits for 6 s replaces it, where who waits for 120 s has let it pause for 8 s."""
    stopped = Fault(0, 5, "forward", ("mark:here", "stop:25"))
    dead = Fault(1, 5, "forward", ("await:here", "kill"))
    launch, difference = rig.healed(LAYOUT, [stopped, dead], launcher="impatient")
    assert difference is None, launch.fail(str(difference))
    assert [len(launch.track.pids(rank)) for rank in range(LAYOUT.world_size)] == [2, 2, 1], launch.job.report()
    assert [one["step"] for one in launch.incidents() if one["outcome"] == "SAVED"] == [4]


@pytest.mark.thorough
def test_a_rank_that_leaves_its_loop_early_is_taken_back_and_no_process_is_replaced(rig: Rig) -> None:
    soon = {"LASTWORDS_LEAVE_TIMEOUT_S": "5"}
    launch, difference = rig.healed(LAYOUT, [Fault(1, 3, "end", ("break",))], env=soon)
    assert difference is None, launch.fail(str(difference))
    assert [len(launch.track.pids(rank)) for rank in range(LAYOUT.world_size)] == [1, 1, 1], launch.job.report()
    (incident,) = [one for one in launch.incidents() if one["outcome"] == "SAVED"]
    assert (incident["step"], incident["cause_ranks"]) == (3, [1])
    assert not [event for event in incident["events"] if event["what"] == "ended"], "nobody is taken for dead"
