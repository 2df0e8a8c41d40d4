"""Real jobs with a remote store: training does not wait for it, and a directory that is lost is fetched again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lastwords.checkpoint import load
from lastwords.checkpoint.manifest import Claimed
from lastwords.checkpoint.remote.store import RemotePath, os_for
from tests.checkpoint.stores import file_store
from tests.integration.compare import first_difference
from tests.integration.plan import Layout
from tests.integration.rig import Rig
from tests.integration.test_periodic import hold, kill_all

pytestmark = pytest.mark.process


def steps_in(root: RemotePath) -> list[int]:
    found = load.scan(root, os_for([root]))
    return sorted(
        one.manifest.global_step for one in found if one.status is load.DirectoryStatus.COMPLETE and one.manifest
    )


def test_a_job_whose_directory_is_lost_goes_on_from_the_store(rig: Rig, tmp_path: Path) -> None:
    layout, there = Layout(), file_store(tmp_path / "store")
    env = {"LASTWORDS_REMOTE": str(there), "LASTWORDS_JOB": "remote"}
    launch = rig.launch(layout, faults=hold(8), every=6, keep=1, env=env)
    launch.job.wait_for(lambda: 6 in steps_in(there), 60, "the upload of step 6")
    kill_all(launch)
    here = Path(launch.plan.checkpoints)
    shutil.rmtree(here)
    resumed = rig.check_resume(launch, 6, env=env, every=3)
    (fetched,) = (path for path in here.iterdir() if path.name.count("-") == 2 and "step_6-" in path.name)
    before = Claimed.read(fetched).generation
    assert all(Claimed.read(path).generation > before for path in resumed.checkpoints if "step_6" not in path.name)


def test_a_store_that_refuses_does_not_touch_the_training(rig: Rig, tmp_path: Path) -> None:
    layout = Layout()
    (tmp_path / "store").write_text("a file where a directory is needed")
    launch = rig.launch(layout, every=3, env={"LASTWORDS_REMOTE": str(file_store(tmp_path / "store"))})
    launch.job.wait(90)
    assert set(launch.codes.values()) == {0}, launch.job.report()
    assert first_difference(rig.reference(layout), launch.track, range(1, layout.steps + 1)) is None
    assert launch.checkpoints
