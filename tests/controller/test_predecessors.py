"""A start waits for what an earlier one may still publish, whatever port and host that one's controller has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lastwords.checkpoint import layout, load
from lastwords.checkpoint.starts import Claim
from lastwords.controller import handover
from lastwords.controller.handover import ControllerSpec, RunFile, RunRecord, await_publications, run_file_path
from lastwords.errors import BusyError, UnavailableError
from lastwords.liveness import process_id
from tests import golden
from tests.checkpoint.states import Job

BEFORE = Job(name="mine", generation=1)


def spec(root: Path, job: str = "mine") -> ControllerSpec:
    return ControllerSpec("127.0.0.1", 30099, job, 2, 2, root)


class Publishing:
    """A controller that publishes after some looks of whoever waits."""

    def __init__(self, root: Path, claim: Claim, looks: int = 3) -> None:
        self.root, self.claim, self.looks = root, claim, looks
        self.directory = BEFORE.write(root, 30)

    def __call__(self, pause_s: float) -> None:
        self.looks -= 1
        if self.looks == 0:
            BEFORE.save(self.root / "aside", 30)
            self.directory.rename(self.root / "gone")
            layout.checkpoint_dir(self.root / "aside", 30).rename(layout.checkpoint_dir(self.root, 30))


def test_a_publication_under_way_is_waited_for_on_another_port_and_host(tmp_path: Path) -> None:
    claim = Claim.take(tmp_path, BEFORE.name, BEFORE.generation)
    assert claim is not None
    (tmp_path / "aside").mkdir()
    publishing = Publishing(tmp_path, claim)
    assert load.latest(tmp_path) is None
    await_publications(spec(tmp_path), shm_root=tmp_path, sleep=publishing)
    assert load.latest(tmp_path) == layout.checkpoint_dir(tmp_path, 30)
    claim.release()


def test_what_a_killed_controller_left_is_not_waited_for(tmp_path: Path) -> None:
    BEFORE.write(tmp_path, 30)
    await_publications(spec(tmp_path), shm_root=tmp_path, sleep=refuse)
    layout.claim_path(tmp_path, BEFORE.name, BEFORE.generation).touch()
    await_publications(spec(tmp_path), shm_root=tmp_path, sleep=refuse)


def test_a_job_that_trains_in_the_same_directory_is_not_waited_for(tmp_path: Path) -> None:
    claim = Claim.take(tmp_path, "other", 1)
    assert claim is not None
    await_publications(spec(tmp_path), shm_root=tmp_path, sleep=refuse)
    claim.release()


def refuse(pause_s: float) -> None:
    raise AssertionError("there is nothing to wait for")


@pytest.mark.parametrize(("stage", "waits"), [("saving", True), ("verifying", True), ("watching", False)])
def test_on_the_same_host_a_run_file_says_that_an_incident_is_on(tmp_path: Path, stage: str, waits: bool) -> None:
    ticks = process_id.start_ticks(os.getpid()) or 0
    log = str(spec(tmp_path).log_path)
    record = RunRecord("127.0.0.1:30050", os.getpid(), ticks, "mine", 1, "token", log, stage=stage)
    file = RunFile(run_file_path("127.0.0.1", 30050, root=tmp_path), record)
    file.update(stage=stage, live=0, progress=0)
    slept = []

    def sleep(pause_s: float) -> None:
        slept.append(pause_s)
        file.remove()

    await_publications(spec(tmp_path), shm_root=tmp_path, sleep=sleep)
    assert bool(slept) is waits


@pytest.mark.parametrize("job", ["mine", "other"])
def test_a_job_whose_ranks_have_outlived_their_launcher_is_not_started_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    ticks = process_id.start_ticks(os.getpid()) or 0
    log = str(spec(tmp_path).log_path)
    record = RunRecord("127.0.0.1:30050", os.getpid(), ticks, "mine", 1, "token", log)
    file = RunFile(run_file_path("127.0.0.1", 30050, root=tmp_path), record)
    file.update(stage="watching", live=2, progress=0)
    if job == "other":
        return await_publications(spec(tmp_path, job), shm_root=tmp_path, sleep=refuse)
    await_publications(spec(tmp_path), shm_root=tmp_path, sleep=lambda _: file.remove())  # they have just been killed
    file = RunFile(run_file_path("127.0.0.1", 30050, root=tmp_path), record)
    file.update(stage="watching", live=2, progress=0)
    monkeypatch.setattr(handover, "LIVE_GRACE_S", 0.0)
    with golden.raises(BusyError):
        await_publications(spec(tmp_path), shm_root=tmp_path, sleep=lambda _: None)


@pytest.mark.parametrize("job", ["mine", "other"])
def test_one_that_does_not_move_is_given_up(
    tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    claim = Claim.take(tmp_path, BEFORE.name, BEFORE.generation)
    assert claim is not None
    BEFORE.write(tmp_path, 30)
    now_s = [0.0]
    monkeypatch.setattr("lastwords.controller.handover.clock.mono_s", lambda: now_s[0])

    def sleep(pause_s: float) -> None:
        now_s[0] += 10.0

    if job == "mine":
        with golden.raises(UnavailableError):
            await_publications(spec(tmp_path, job), shm_root=tmp_path, sleep=sleep)
    else:
        await_publications(spec(tmp_path, job), shm_root=tmp_path, sleep=sleep)
        golden.says(caplog.messages)
    assert now_s[0] > handover.STALL_S
    claim.release()


def test_a_file_that_grows_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = Claim.take(tmp_path, BEFORE.name, BEFORE.generation)
    assert claim is not None
    directory = BEFORE.write(tmp_path, 30)
    file = next(directory.glob("rank_0/*.ckpt"))
    now_s = [0.0]
    monkeypatch.setattr("lastwords.controller.handover.clock.mono_s", lambda: now_s[0])

    def sleep(pause_s: float) -> None:
        now_s[0] += 10.0
        os.utime(file, (now_s[0], now_s[0]))  # as a write does, which touches no directory
        if now_s[0] > 3 * handover.STALL_S:
            directory.rename(tmp_path / "gone")

    await_publications(spec(tmp_path), shm_root=tmp_path, sleep=sleep)
    assert now_s[0] > 3 * handover.STALL_S
    claim.release()
