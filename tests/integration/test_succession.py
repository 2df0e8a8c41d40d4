"""kill -9 of the controller of real jobs: another one follows, training goes on, and the next death is saved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lastwords.launcher.new_process import EXIT_BUSY
from tests.integration.faults import controller_state, dying, is_gone
from tests.integration.kills import Kill
from tests.integration.plan import Fault, Layout
from tests.integration.rig import Launch, Rig
from tests.selection import more

pytestmark = pytest.mark.process

LAYOUT = Layout(world_size=3, augment=True)
KILL = Kill("forward", 6, (2,))


def faults(*others: Fault) -> tuple[Fault, ...]:
    return (*KILL.faults(LAYOUT), *others)


def with_the_controller(kill: Kill) -> list[Fault]:
    """The controller is killed by whom the rank is killed, just before."""
    return [
        replace(fault, actions=(*fault.actions[:-1], "kill_controller", "kill")) if "kill" in fault.actions else fault
        for fault in kill.faults(LAYOUT)
    ]


def survive(rig: Rig, launch: Launch) -> None:
    """The last words are sound, and the resumed run has the same bits."""
    launch.finish()
    step = rig.check_last_words(launch, KILL.victims, KILL.steps_expected(LAYOUT))
    assert step
    rig.check_resume(launch, step)


@pytest.mark.parametrize("launcher", ["fork", more("torchrun")])
def test_a_job_whose_controller_was_killed_is_saved_all_the_same(rig: Rig, launcher: str) -> None:
    fault = Fault(1, 4, "forward", ("kill_controller", "await_controller"))
    survive(rig, rig.launch(LAYOUT, faults=faults(fault), launcher=launcher))


@pytest.mark.thorough
def test_without_another_one_nothing_is_saved(rig: Rig) -> None:
    """The negative control: what the killed one has kept is gone."""
    fault = Fault(1, 4, "forward", ("lose_controller",))
    env = {"LASTWORDS_CONTROLLER_LOST_S": "2", "LASTWORDS_UNPROTECTED_S": "0.2"}
    launch = rig.launch(LAYOUT, faults=faults(fault), env=env)
    launch.job.wait(120)
    assert not launch.checkpoints


@pytest.mark.parametrize(
    ("victim", "launcher"),
    [more(2, "fork"), more(2, "torchrun"), (0, "fork"), more(0, "torchrun")],
    ids=[
        "another-fork",
        "another-torchrun",
        "the one that would start it-fork",
        "the one that would start it-torchrun",
    ],
)
def test_a_controller_and_a_rank_that_are_killed_at_once_lose_nothing(rig: Rig, victim: int, launcher: str) -> None:
    kill = Kill("forward", 6, (victim,))
    launch = rig.launch(LAYOUT, faults=with_the_controller(kill), launcher=launcher)
    launch.finish()
    step = rig.check_last_words(launch, kill.victims, kill.steps_expected(LAYOUT))
    assert step
    rig.check_resume(launch, step)


STAGES = [
    *(more("settling", True), ("saving", True), more("publishing", False)),
    *(more("saving", False), more("verifying", True), more("publishing", True), more("exiting", False)),
    *(more("settling", False), more("verifying", False), more("exiting", True)),
]


@pytest.mark.parametrize(("state", "acts"), STAGES)
def test_a_controller_that_is_killed_in_an_incident_is_followed(
    rig: Rig, tmp_path: Path, state: str, acts: bool
) -> None:
    """When it has kept that it is there, or when it has also done what follows from that."""
    site = tmp_path / "site"
    launch = rig.launch(LAYOUT, faults=faults(), env=dying(site, state, acts=acts))
    survive(rig, launch)
    assert (site / "died").read_text() == state


@pytest.mark.thorough
def test_a_controller_that_is_killed_when_all_have_been_told_leaves_nothing_behind(rig: Rig) -> None:
    """Nobody needs another one then, but to clear up."""
    fault = Fault(1, 6, "forward", ("await_told", "kill_controller", "hang"))
    launch = rig.launch(LAYOUT, faults=faults(fault))
    launch.finish()
    assert rig.check_last_words(launch, KILL.victims, KILL.steps_expected(LAYOUT))


@pytest.mark.parametrize("acts", [False, more(True)])
def test_a_controller_that_is_killed_while_ranks_wait_at_the_end_releases_them(
    rig: Rig, tmp_path: Path, acts: bool
) -> None:
    site = tmp_path / "site"
    launch = rig.launch(LAYOUT, env=dying(site, "releasing", acts=acts))
    launch.finish()
    rig.check_untouched(launch)
    assert (site / "died").read_text() == "releasing"


@pytest.mark.thorough
def test_a_controller_that_is_killed_again_and_again_is_started_by_hand(rig: Rig) -> None:
    again = ("kill_controller", "await_controller")
    fault = Fault(1, 4, "forward", (*again, *again, "kill_controller", "mark:dead", "await:go"))
    launch = rig.launch(LAYOUT, faults=faults(fault))
    launch.job.wait_for(lambda: (launch.directory / "mark-dead").exists(), 60, "the mark")
    launch.job.wait_for(lambda: "was started 3 times within" in launch.job.report(), 60, "the refusal")
    pid, state = controller_state(launch.plan.ctrl_port)
    assert is_gone(pid)
    command = [sys.executable, "-m", "lastwords.cli", "controller", "--json", "--recover"]
    done = subprocess.run([*command, str(state.parent)], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["pid"] == controller_state(launch.plan.ctrl_port)[0]
    refused = subprocess.run([*command, str(state)], check=False, capture_output=True, text=True)
    assert refused.returncode == 5, refused
    (launch.directory / "mark-go").touch()
    survive(rig, launch)


@pytest.mark.thorough
def test_one_that_is_stopped_is_ended_before_another_one_serves(rig: Rig) -> None:
    """It wakes up nevermore: whatever it was about to publish is not published behind the other one's back."""
    fault = Fault(1, 4, "forward", ("mark:here", "await:go"))
    launch = rig.launch(LAYOUT, faults=faults(fault))
    launch.job.wait_for(lambda: (launch.directory / "mark-here").exists(), 60, "the mark")
    pid, state = controller_state(launch.plan.ctrl_port)
    os.kill(pid, signal.SIGSTOP)
    command = [sys.executable, "-m", "lastwords.cli", "controller", "--recover", str(state)]
    recovered = subprocess.run(command, check=False, capture_output=True, timeout=60)
    assert recovered.returncode in (0, EXIT_BUSY), "busy: where this takes long, a rank is faster"
    launch.job.wait_for(lambda: is_gone(pid), 60, "the end of the stopped one")
    (launch.directory / "mark-go").touch()
    survive(rig, launch)


@pytest.mark.thorough
def test_a_job_that_is_started_beside_one_without_a_controller_takes_nothing_from_it(rig: Rig, tmp_path: Path) -> None:
    """Both save to one directory; the first one's last words are verified, and its next controller publishes them."""
    site, go = tmp_path / "site", tmp_path / "go"
    patience = {"LASTWORDS_CONTROLLER_LOST_S": "100", "LASTWORDS_UNPROTECTED_S": "100"}
    env = dying(site, "publishing", acts=False, follow_after=go) | patience | {"LASTWORDS_JOB": "first"}
    first = rig.launch(LAYOUT, faults=faults(), env=env)
    first.job.wait_for(lambda: (site / "died").exists(), 60, "the controller's end")
    [verified] = Path(first.plan.checkpoints).glob(".tmp-*")
    parts = sorted(verified.rglob("*"))
    second = rig.launch(LAYOUT, env={"LASTWORDS_JOB": "second"})
    second.job.wait(120)
    assert set(second.codes.values()) == {0}, second.job.report()
    assert sorted(verified.rglob("*")) == parts
    go.touch()
    survive(rig, first)


def test_a_job_that_loses_both_is_healed(rig: Rig) -> None:
    launch, difference = rig.healed(LAYOUT, with_the_controller(KILL))
    assert difference is None, launch.job.report()
    assert [incident["outcome"] for incident in launch.incidents() if incident["outcome"] == "SAVED"]


def test_periodic_checkpoints_go_on(rig: Rig) -> None:
    again = ("kill_controller", "await_controller", "sleep:1.5")
    launch = rig.launch(LAYOUT, faults=[Fault(1, 3, "forward", again)], every=2)
    launch.finish()
    assert set(launch.codes.values()) == {0}, launch.job.report()
    assert launch.saved_step > 3  # of those that come fast one after the other some are left out
