"""A start waits for what an earlier one may still publish, whatever port and host that one's controller has."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint import layout, load
from lastwords.checkpoint.lock_file import LockFile
from lastwords.checkpoint.starts import Claim
from lastwords.controller import handover
from lastwords.controller.events import JobMemory, Outcome, OutcomeKind, Registered, Remember, StartPublish
from lastwords.controller.handover import (
    ControllerSpec,
    RunFile,
    RunRecord,
    StateFile,
    StateOwner,
    await_publications,
    run_file_path,
)
from lastwords.errors import BusyError, UnavailableError
from lastwords.liveness import leftovers, paths, process_id
from lastwords.vocabulary import ProcessId
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


@pytest.mark.parametrize(
    ("stage", "waits"), [("saving", True), ("verifying", True), ("watching", True), ("exiting", False)]
)
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
        assert not await_publications(spec(tmp_path, job), shm_root=tmp_path, sleep=refuse)
        return
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


SELF = process_id.this_process("n")
ENDED = replace(SELF, start_ticks=SELF.start_ticks - 1)
ELSEWHERE = ProcessId("another host", SELF.pid, SELF.start_ticks, "n")


def killed(root: Path, *ranks: ProcessId, **memory: Any) -> Path:
    """The state of a controller that was killed after it had begun to save for these ranks."""
    directory = paths.make_job_dir(BEFORE.name, BEFORE.generation, "5f3a", root=root)
    (directory / paths.LOCK_NAME).touch()
    before = replace(spec(root), generation=BEFORE.generation, world_size=len(ranks), nonce="5f3a")
    path = directory / paths.STATE_NAME
    owner = StateOwner(ENDED.pid, ENDED.start_ticks)
    remembered = Remember(tuple(Registered(rank, ("u",)) for rank in ranks), JobMemory(certain=True, **memory))
    StateFile(path, owner, before, "t0ken").write(remembered)
    return path


class Following:
    """Another controller that follows there, one act for each look of whoever waits, and publishes step 30 at last."""

    def __init__(self, root: Path, state: Path) -> None:
        self.root, self.state = root, state
        self.acts = iter(self.run())

    def __call__(self, pause_s: float) -> None:
        next(self.acts)

    def run(self) -> Iterator[None]:
        yield  # its process begins
        with LockFile(self.state.with_name(paths.LOCK_NAME)).held() as held:
            assert held
            yield
            log = str(spec(self.root).log_path)
            record = RunRecord(
                "127.0.0.1:30099", SELF.pid, SELF.start_ticks, BEFORE.name, BEFORE.generation, "token", log
            )
            file = RunFile(run_file_path("127.0.0.1", 30099, root=self.root), record)
            for stage, live in (("watching", 0), ("watching", 1), ("settling", 1), ("saving", 1), ("publishing", 1)):
                file.update(stage=stage, live=live, progress=0)
                yield
            BEFORE.save(self.root, 30)
            shutil.rmtree(self.state.parent)
            file.update(stage="exiting", live=1, progress=0)
        yield


@pytest.mark.parametrize(
    ("last", "publishing"),
    [(SELF, None), (ELSEWHERE, None), (ENDED, StartPublish(1, 1, 30, 0, (), "rank 0 died", (0,), (0,), ()))],
    ids=["for a rank of this host", "for one of another host", "to finish a publication"],
)
def test_a_controller_that_follows_one_that_was_killed_is_waited_for(
    tmp_path: Path, last: ProcessId, publishing: StartPublish | None, caplog: pytest.LogCaptureFixture
) -> None:
    state = killed(tmp_path, ENDED, last, publishing=publishing)
    caplog.set_level(logging.INFO)
    assert await_publications(spec(tmp_path), shm_root=tmp_path, sleep=Following(tmp_path, state))
    assert load.latest(tmp_path) == layout.checkpoint_dir(tmp_path, 30)
    golden.says(caplog.messages)


def test_ranks_whom_no_controller_follows_are_not_left_to_a_second_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path, ENDED, SELF)
    monkeypatch.setattr(handover, "LIVE_GRACE_S", 0.0)
    with golden.raises(BusyError):
        await_publications(spec(tmp_path), shm_root=tmp_path, sleep=lambda _: None)


def test_ranks_of_other_hosts_whom_no_controller_follows_are_given_up_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever restarts a job has ended them."""
    killed(tmp_path, ENDED, ELSEWHERE)
    now_s = [0.0]
    monkeypatch.setattr("lastwords.controller.handover.clock.mono_s", lambda: now_s[0])

    def sleep(pause_s: float) -> None:
        now_s[0] += 1.0

    assert await_publications(spec(tmp_path), shm_root=tmp_path, sleep=sleep)
    assert handover.LIVE_GRACE_S < now_s[0] < 2 * handover.LIVE_GRACE_S
    golden.says(caplog.messages)


def test_nobody_starts_who_is_too_short_of_descriptors_to_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(tmp_path, ENDED, SELF)

    def short(directory: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(leftovers, "no_controller_serves", short)
    with golden.raises(UnavailableError):
        await_publications(spec(tmp_path), shm_root=tmp_path, sleep=refuse)


OVER = Outcome(OutcomeKind.SAVED, 30, "path", "rank 0 died", (0,))


@pytest.mark.parametrize("why", ["all have ended", "over", "another job", "another directory", "a later start"])
def test_what_nobody_publishes_any_more_or_is_not_this_jobs_is_not_waited_for(tmp_path: Path, why: str) -> None:
    killed(tmp_path, ENDED, ENDED if why == "all have ended" else SELF, outcome=OVER if why == "over" else None)
    mine = {
        "another job": spec(tmp_path, "other"),
        "another directory": replace(spec(tmp_path), root=tmp_path / "other"),
        "a later start": replace(spec(tmp_path), generation=BEFORE.generation),
    }.get(why, spec(tmp_path))
    mine.root.mkdir(exist_ok=True)
    assert not await_publications(mine, shm_root=tmp_path, sleep=refuse)
