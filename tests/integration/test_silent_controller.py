"""The controller of real jobs lives and does nothing: another one ends it and follows, and the next death is saved."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.faults import controller_state, hanging
from tests.integration.kills import Kill
from tests.integration.plan import Fault, Layout
from tests.integration.rig import EXIT_NOT_SAVED, KILLED, RUN_TIMEOUT_S, Launch, Rig
from tests.selection import more

pytestmark = pytest.mark.process

LAYOUT = Layout(world_size=3, augment=True)
KILL = Kill("forward", 6, (2,))
SOON = {"LASTWORDS_UNANSWERED_S": "1"}
NEVER = {"LASTWORDS_UNANSWERED_S": "600", "LASTWORDS_CONTROLLER_LOST_S": "2"}
"""Nobody follows. (A stopped controller's sessions break after 10 s.)"""


def faults(*others: Fault) -> tuple[Fault, ...]:
    return (*KILL.faults(LAYOUT), *others)


def struck_first(action: str) -> tuple[Fault, ...]:
    """What rank 1 does to the controller is done when rank 2 dies."""
    *others, death = KILL.faults(LAYOUT)
    death = replace(death, actions=("await:struck", *death.actions))
    return (*others, death, Fault(1, 6, "body", (action, "mark:struck")))


def survive(rig: Rig, launch: Launch) -> None:
    """The last words are sound, and the resumed run has the same bits."""
    launch.finish()
    step = rig.check_last_words(launch, KILL.victims, KILL.steps_expected(LAYOUT))
    assert step
    rig.check_resume(launch, step)


@pytest.mark.parametrize("launcher", ["fork", more("torchrun")])
def test_a_death_behind_a_stopped_controller_is_saved(rig: Rig, launcher: str) -> None:
    death = struck_first("stop_controller")
    launch = rig.launch(LAYOUT, faults=death, launcher=launcher, env=SOON if launcher == "fork" else None)
    survive(rig, launch)


@pytest.mark.thorough
def test_a_death_behind_a_controller_that_hangs_is_saved(rig: Rig, tmp_path: Path) -> None:
    """Its sessions stay open: gRPC's own threads answer."""
    death = struck_first("hang_controller")
    survive(rig, rig.launch(LAYOUT, faults=death, env={**SOON, **hanging(tmp_path / "site")}))


@pytest.mark.thorough
def test_without_a_successor_that_death_costs_everything(rig: Rig) -> None:
    """The negative control."""
    launch = rig.launch(LAYOUT, faults=struck_first("stop_controller"), env=NEVER)
    launch.job.wait(60)
    assert launch.codes == {0: EXIT_NOT_SAVED, 1: EXIT_NOT_SAVED, 2: KILLED}, launch.job.report()
    assert not launch.checkpoints
    os.kill(controller_state(launch.plan.ctrl_port)[0], signal.SIGKILL)


@pytest.mark.parametrize("after_s", [more(after_s) for after_s in (0.0, 0.005, 0.01, 0.02, 0.04, 0.1)])
def test_one_that_is_stopped_in_an_incident_is_followed(rig: Rig, after_s: float) -> None:
    """Freezing, settling, saving, verifying, publishing, telling: whatever it was doing then.

    One that has told all ranks to leave is needed by nobody, so it ends when it goes on.
    """
    fault = Fault(1, 6, "forward", ("await_death:2", f"sleep:{after_s}", "stop_controller", "hang"))
    launch = rig.launch(LAYOUT, faults=faults(fault), env=SOON)
    launch.job.wait(RUN_TIMEOUT_S)
    with contextlib.suppress(AssertionError, ProcessLookupError):  # it has ended, its files with it
        os.kill(controller_state(launch.plan.ctrl_port)[0], signal.SIGCONT)
    survive(rig, launch)


@pytest.mark.thorough
def test_one_that_wakes_up_behind_its_successor_changes_nothing(rig: Rig) -> None:
    fault = Fault(1, 6, "forward", ("stop_controller", "await_controller", "wake_controller", "hang"))
    survive(rig, rig.launch(LAYOUT, faults=faults(fault), env=SOON))


@pytest.mark.thorough
def test_a_job_that_only_trains_has_a_silent_one_replaced_too(rig: Rig) -> None:
    """So it is protected by the time that somebody dies."""
    fault = Fault(1, 4, "forward", ("stop_controller", "await_controller"))
    survive(rig, rig.launch(LAYOUT, faults=faults(fault), env={**SOON, "LASTWORDS_CONTROLLER_SILENT_S": "2"}))


def controllers_logs(launch: Launch) -> list[str]:
    """One for each start."""
    return [path.read_text() for path in (Path(launch.plan.checkpoints) / "logs").glob("controller-*.log")]


def served(launch: Launch) -> set[str]:
    """The processes that have served."""
    return {pid for log in controllers_logs(launch) for pid in re.findall(r"\(process (\d+)\)", log)}


@pytest.mark.thorough
def test_one_that_goes_on_in_time_saves_a_death_as_ever(rig: Rig) -> None:
    fault = Fault(1, 6, "body", ("pause:controller,0,6", "sleep:0.2"))
    launch = rig.launch(LAYOUT, faults=faults(fault))
    survive(rig, launch)
    assert len(served(launch)) == len(controllers_logs(launch)) == 2


@pytest.mark.thorough
def test_one_that_goes_on_in_time_is_not_replaced(rig: Rig) -> None:
    """It answers the process that was about to follow it, after 1.5 s and for 2 s."""
    fault = Fault(1, 4, "forward", ("pause:controller,0,3", "sleep:5"))
    env = {"LASTWORDS_UNANSWERED_S": "1", "LASTWORDS_CONTROLLER_SILENT_S": "1"}
    launch = rig.launch(LAYOUT, faults=[fault], env=env)
    launch.finish()
    rig.check_untouched(launch)
    assert len(served(launch)) == len(controllers_logs(launch)) == 1


@pytest.mark.thorough
def test_a_job_behind_a_stopped_controller_is_healed(rig: Rig) -> None:
    launch, difference = rig.healed(LAYOUT, struck_first("stop_controller"), env=SOON)
    assert difference is None, launch.job.report()
    assert [incident["outcome"] for incident in launch.incidents() if incident["outcome"] == "SAVED"]
