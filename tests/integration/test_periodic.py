"""Periodic checkpoints of real jobs: what is published while training goes on is sound, exact, and costs no bit."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint.manifest import Claimed
from lastwords.cli.main import main as cli
from lastwords.controller import handover
from tests import golden
from tests.integration.compare import first_difference
from tests.integration.kills import Kill
from tests.integration.parallel_layouts import groups, parallel_layout
from tests.integration.plan import Fault, Layout
from tests.integration.rig import FINAL_PREFIX, KILLED, Launch, Rig, check_sound
from tests.selection import more, usually

pytestmark = pytest.mark.process

EVERY = 3
STANDS_IN = 8
"""Ranks stand in this step, with the checkpoint of step 6 published, when they die."""

LAYOUTS: Mapping[str, Layout] = {
    "ddp": Layout(),
    "ddp, local buffers": Layout(broadcast_buffers=False, accumulate=2, augment=True, workers=2),
    "ddp, skipped steps": Layout(inf_steps=(3, 6)),
    **{name: Layout(parallel=name) for name in ("tp", "hsdp", "zero1", "pp", "moe", "fsdp-tp")},
}
USUAL = ("ddp",)


def step_of(checkpoint: Path) -> int:
    """The global step in its name."""
    return int(checkpoint.name.removeprefix(FINAL_PREFIX))


def steps_of(launch: Launch) -> list[int]:
    """Of all that is published, oldest first."""
    return [step_of(path) for path in launch.checkpoints]


def hold(step: int) -> tuple[Fault, ...]:
    """Rank 0 comes to the forward pass of `step` and no further."""
    return (Fault(0, step, "forward", ("await:never",)),)


def kill_all(launch: Launch) -> None:
    """Everything at once, so that nobody is left to write last words."""
    launch.job.kill_all()
    launch.finish()
    assert set(launch.codes.values()) == {KILLED}


@pytest.mark.parametrize("name", usually(LAYOUTS, USUAL))
def test_a_job_of_which_nobody_is_left_goes_on_from_the_newest_checkpoint(rig: Rig, name: str) -> None:
    layout = LAYOUTS[name]
    launch = rig.launch(layout, faults=hold(STANDS_IN), every=6)
    launch.job.wait_for(lambda: 6 in steps_of(launch), 60, "the checkpoint of step 6")
    kill_all(launch)
    checkpoint = launch.new_checkpoint
    assert checkpoint is not None
    check_sound(checkpoint)
    claimed = Claimed.read(checkpoint)
    assert (claimed.global_step, launch.manifest(checkpoint)["incident"]) == (6, 0)
    rig.check_resume(launch, 6)


@pytest.mark.thorough
def test_last_words_are_newer_than_the_newest_periodic_checkpoint(rig: Rig) -> None:
    layout = Layout()
    kill = Kill("forward", STANDS_IN, (2,))
    launch = rig.launch(layout, faults=kill.faults(layout), every=EVERY)
    launch.finish()
    step = rig.check_last_words(launch, kill.victims, {STANDS_IN - 1})
    assert set(steps_of(launch)) <= {3, 6, step}
    rig.check_resume(launch, step)


@pytest.mark.parametrize("every", [1, more(EVERY)])
def test_training_is_the_same_with_checkpoints(rig: Rig, every: int) -> None:
    layout = Layout()
    launch = rig.launch(layout, every=every)
    launch.finish()
    assert set(launch.codes.values()) == {0}, launch.job.report()
    assert first_difference(rig.reference(layout), launch.track, range(1, layout.steps + 1)) is None
    assert steps_of(launch)
    assert all(step % every == 0 for step in steps_of(launch))
    for checkpoint in launch.checkpoints:
        check_sound(checkpoint)


def test_one_that_is_asked_for_is_written(rig: Rig) -> None:
    launch = rig.launch(Layout(), faults=(Fault(1, 4, "end", ("save",)), *hold(STANDS_IN)))
    launch.job.wait_for(lambda: bool(steps_of(launch)), 60, "the checkpoint")
    kill_all(launch)
    (step,) = steps_of(launch)
    assert step >= 4
    rig.check_resume(launch, step)


@pytest.mark.parametrize("phase", usually(("end", "left"), ("left",)))
def test_one_that_is_asked_for_in_the_last_step_or_after_it_is_of_that_step(rig: Rig, phase: str) -> None:
    layout = Layout()
    launch = rig.launch(layout, faults=(Fault(1, layout.steps, phase, ("save",)),))
    launch.finish()
    assert set(launch.codes.values()) == {0}, launch.job.report()
    assert steps_of(launch) == [layout.steps]
    check_sound(launch.checkpoints[0])
    assert first_difference(rig.reference(layout), launch.track, range(1, layout.steps + 1)) is None


@pytest.mark.thorough
def test_only_so_many_are_kept(rig: Rig) -> None:
    launch = rig.launch(Layout(epochs=6), every=EVERY, keep=2)
    launch.finish()
    kept = steps_of(launch)
    assert kept == sorted(kept)[-2:]
    assert 1 <= len(kept) <= 2


def slow(layout: Layout) -> list[Fault]:
    """No step takes less than 0.25 s, so that there is time for checkpoints between two of them."""
    return [Fault(0, step, "end", ("sleep:0.25",)) for step in range(1, layout.steps + 1)]


def logs_of(launch: Launch) -> list[Path]:
    """The controllers' logs, in order."""
    return sorted((Path(launch.plan.checkpoints) / "logs").glob("controller-*.log"))


def written_by(launch: Launch) -> list[int]:
    """The step of each periodic checkpoint that was published, by the controllers' logs."""
    return [int(step) for log in logs_of(launch) for step in re.findall(r"checkpoint of step (\d+): ", log.read_text())]


@pytest.mark.thorough
def test_one_is_due_every_so_many_seconds(rig: Rig) -> None:
    layout = Layout()
    began_mono_s = time.monotonic()
    launch = rig.launch(layout, faults=slow(layout), every_s=0.5)
    launch.finish()
    assert set(launch.codes.values()) == {0}, launch.job.report()
    assert first_difference(rig.reference(layout), launch.track, range(1, layout.steps + 1)) is None
    assert written_by(launch) == steps_of(launch)
    assert 2 <= len(steps_of(launch)) <= (time.monotonic() - began_mono_s) / 0.5
    assert len(steps_of(launch)) < layout.steps
    for checkpoint in launch.checkpoints:
        check_sound(checkpoint)


@pytest.mark.thorough
def test_one_in_so_many_minutes_is_kept_and_the_newest(rig: Rig) -> None:
    """The whole run takes less than a minute."""
    layout = Layout()
    launch = rig.launch(layout, faults=slow(layout), every=1, keep_minutes=1)
    launch.finish()
    assert set(launch.codes.values()) == {0}, launch.job.report()
    written = written_by(launch)
    assert len(written) > 2
    assert steps_of(launch) == [written[0], written[-1]]


@pytest.mark.thorough
def test_a_config_with_seconds_and_minutes_is_done_as_it_says(rig: Rig) -> None:
    """Of four or five seconds of training."""
    layout = Layout(epochs=4)
    config = {
        "save_checkpoint_steps": 0,
        "save_checkpoint_seconds": 1,
        "keep_checkpoint_max": 0,
        "keep_checkpoint_per_n_minutes": 1,
    }
    began_mono_s = time.monotonic()
    launch = rig.launch(layout, faults=slow(layout), config=config)
    launch.finish()
    assert set(launch.codes.values()) == {0}, launch.job.report()
    written = written_by(launch)
    assert 3 <= len(written) <= time.monotonic() - began_mono_s
    assert steps_of(launch) == [written[0], written[-1]]
    for checkpoint in launch.checkpoints:
        check_sound(checkpoint)


def test_a_resumed_job_goes_on_with_its_checkpoints(rig: Rig) -> None:
    layout = Layout()
    launch = rig.launch(layout, faults=hold(5), every=EVERY)
    launch.job.wait_for(lambda: 3 in steps_of(launch), 60, "the checkpoint of step 3")
    kill_all(launch)
    resumed = rig.check_resume(launch, 3, every=2)
    assert {step for step in steps_of(resumed) if step > 3} <= {4, 6, 8}
    assert steps_of(resumed)[-1] > 3


def shown(launch: Launch, capsys: pytest.CaptureFixture[str]) -> str:
    """What `lastwords status` prints of the controller that runs now, in one line."""
    logs = str(Path(launch.plan.checkpoints) / "logs")
    (running,) = [one for one in handover.running_here() if one.log.startswith(logs)]
    assert cli(["status", "--controller", running.address]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_what_nobody_holds_any_more_comes_from_the_newest_checkpoint(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the controller's log, the list of incidents and `lastwords status` say what that costs."""
    layout = parallel_layout("tp")
    lost = groups(layout)[1]
    actions = ("await_saved:3", *(f"kill:{rank}" for rank in lost[1:]), "kill")
    faults = [Fault(lost[0], 5, "forward", actions), Fault(0, 6, "forward", ("mark:healed", "await:seen"), restart=1)]
    said: list[str] = []

    def look(launch: Launch) -> None:
        launch.job.wait_for((launch.directory / "mark-healed").exists, 150, "step 6")
        said.append(shown(launch, capsys))
        (launch.directory / "mark-seen").touch()

    launch, difference = rig.healed(layout, faults, meanwhile=look, every=3)
    assert difference is None, launch.fail(str(difference))
    assert launch.resumed_after() == 3
    (incident,) = [one for one in launch.incidents() if one["outcome"] == "NOT_SAVED"]
    reason = re.sub(r"died \([^)]*\)", "died (_)", incident["reason"])  # how may be known a moment too late
    golden.says(reason[reason.index("ranks-1-3") :])
    assert f"({incident['reason']}): NOT_SAVED" in said[0]
    assert any(incident["reason"] in log.read_text() for log in logs_of(launch)), launch.job.report()


@pytest.mark.thorough
def test_a_healed_job_goes_on_with_its_checkpoints(rig: Rig) -> None:
    layout = Layout(epochs=3)
    kill = Fault(1, 5, "backward", ("await_saved:3", "kill"))
    launch, difference = rig.healed(layout, [kill], every=3)
    assert difference is None, launch.fail(str(difference))
    periodic = [step_of(path) for path in launch.checkpoints if launch.manifest(path)["incident"] == 0]
    assert periodic[0] == 3
    assert len(periodic) > 1


@pytest.mark.thorough
def test_a_directory_that_rejects_writes_does_not_stop_the_training(rig: Rig, tmp_path: Path) -> None:
    layout = Layout()
    launch = rig.launch(layout, faults=(Fault(0, 2, "body", ("mark:there", "await:go")),), every=EVERY)
    launch.job.wait_for(lambda: (launch.directory / "mark-there").exists(), 60, "the second step")
    root = Path(launch.plan.checkpoints)
    moved: Any = root.rename(root.with_name("moved"))
    root.write_text("no directory any more")
    (launch.directory / "mark-go").touch()
    launch.job.wait(90)
    root.unlink()
    moved.rename(root)
    assert set(launch.codes.values()) == {0}, launch.job.report()
    assert first_difference(rig.reference(layout), launch.track, range(1, layout.steps + 1)) is None
