"""The storage jobs of the controller: every order is answered exactly once, whatever the files are like."""

from __future__ import annotations

import errno
import json
import os
import queue
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint import layout, publish, retention, starts, system
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.load import latest, open_checkpoint, verify
from lastwords.checkpoint.meta import LocalMeta
from lastwords.checkpoint.part import LocalState, UnitState, write_part
from lastwords.controller import events, storage
from lastwords.controller.handover import ControllerSpec
from lastwords.controller.storage import StorageJobs
from lastwords.controller.timeline import recorded_exit
from tests import golden
from tests.checkpoint.states import Job
from tests.checkpoint.test_retention import filled, flipped, sound_in, steps_in
from tests.patience import until

WAIT_S = 20.0
JOB = Job()
STEP = 7
LAUNCH = starts.Launch("", "run", "agent", "localhost:1", "process", False)


class Answers:
    """Storage jobs, and a queue of what they answer."""

    def __init__(self, root: Path, may_read: Callable[[], bool] = lambda: True, *, own_only: bool = False) -> None:
        self.root = root
        spec = ControllerSpec(
            "127.0.0.1", 30051, "digits", 2, 3, root, fallback_root=root / "fallback", own_only=own_only
        )
        self.events: queue.Queue[events.Event] = queue.Queue()
        self.jobs = StorageJobs(spec, self.events.put, may_read=may_read)

    def next(self) -> events.Event:
        return self.events.get(timeout=WAIT_S)

    def settle(self) -> None:
        assert self.jobs.wait_idle(WAIT_S)
        assert self.events.empty(), "an answer too many"

    def tmp_dir(self, attempt: int, target: int = 0) -> Path:
        root = self.root if target == 0 else self.root / "fallback"
        return layout.TemporaryName(STEP, "digits", 2, 1, attempt).under(root)

    def write(self, rank: int, attempt: int, units: tuple[str, ...], locals_: tuple[int, ...], target: int = 0) -> None:
        state = {
            unit: UnitState([(TensorSpec(f"unit/{unit}/model/w", "U8", (64,)), lambda: memoryview(bytes(64)))])
            for unit in units
        }
        local = {owner: LocalState([], LocalMeta(slot={"rank": owner})) for owner in locals_}
        write_part(self.tmp_dir(attempt, target), rank, 1, STEP, STEP, state, local, {}, job="digits")


@pytest.fixture(autouse=True)
def _however_slow_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PROGRESS_INTERVAL_S", 3600.0)


@pytest.fixture
def answers(tmp_path: Path) -> Answers:
    return Answers(tmp_path)


ALONE = (events.PartPlan(0, 1, ("u",), (0, 1, 2)),)

LOOK = events.LookForNewest(incident=2)


def publish_order(parts: tuple[events.PartPlan, ...], attempt: int = 1, target: int = 0, lost: tuple[int, ...] = ()):  # type: ignore[no-untyped-def]
    return events.StartPublish(1, attempt, STEP, target, parts, "rank 1 died", (1,), (1,), lost)


def test_sound_parts_are_verified_and_published(answers: Answers) -> None:
    answers.write(0, 1, ("u",), (0, 1, 2))
    answers.jobs.carry_out(events.StartVerify(1, 1, STEP, 0, ALONE))
    assert answers.next() == events.Verified(1, 1)
    answers.jobs.carry_out(publish_order(ALONE))
    final = layout.checkpoint_dir(answers.root, STEP)
    assert answers.next() == events.Published(1, 1, str(final))
    assert verify(final) == []
    manifest = open_checkpoint(final).manifest
    assert (manifest.reason, manifest.cause_ranks, manifest.facts["dead_ranks"]) == ("rank 1 died", (1,), [1])
    answers.settle()


def test_work_that_takes_long_says_that_it_comes_further(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PROGRESS_INTERVAL_S", 0.0)
    answers.write(0, 1, ("u",), (0, 1, 2))
    answers.jobs.carry_out(events.StartVerify(1, 1, STEP, 0, ALONE))
    assert [answers.next(), answers.next()] == [events.StorageProgress(1, 1), events.Verified(1, 1)]
    answers.jobs.carry_out(publish_order(ALONE))
    assert answers.next() == events.StorageProgress(1, 1)


def test_a_part_that_an_earlier_attempt_finished_is_gathered(answers: Answers) -> None:
    answers.write(0, 1, ("u",), (0, 1))
    answers.write(2, 2, ("v",), (2,))
    parts = (events.PartPlan(0, 1, ("u",), (0, 1)), events.PartPlan(2, 2, ("v",), (2,)))
    for _ in range(2):  # asked twice, as after a lost answer: what has been moved is found where it is
        answers.jobs.carry_out(events.StartVerify(1, 2, STEP, 0, parts))
        assert answers.next() == events.Verified(1, 2)
    answers.jobs.carry_out(publish_order(parts, attempt=2))
    assert isinstance(answers.next(), events.Published)
    assert verify(layout.checkpoint_dir(answers.root, STEP)) == []
    answers.settle()


def test_parts_of_earlier_attempts_alone_need_no_directory_of_this_one(answers: Answers) -> None:
    answers.write(0, 1, ("u",), (0, 1, 2))
    answers.jobs.carry_out(events.StartVerify(1, 3, STEP, 0, ALONE))
    assert answers.next() == events.Verified(1, 3)
    answers.settle()


def test_a_missing_part_is_a_problem_of_its_writer(answers: Answers) -> None:
    answers.write(0, 1, ("u",), (0, 1))
    parts = (events.PartPlan(0, 1, ("u",), (0, 1)), events.PartPlan(2, 1, ("v",), (2,)))
    answers.jobs.carry_out(events.StartVerify(1, 1, STEP, 0, parts))
    answer = answers.next()
    assert isinstance(answer, events.VerifyFailed)
    assert [rank for rank, _ in answer.problems] == [2]
    answers.settle()


def test_a_directory_that_is_not_there_is_a_problem_and_no_exception(answers: Answers) -> None:
    answers.jobs.carry_out(events.StartVerify(1, 9, STEP, 1, ALONE))
    assert isinstance(answers.next(), events.VerifyFailed)
    answers.jobs.carry_out(publish_order(ALONE, attempt=9))
    failed = answers.next()
    assert isinstance(failed, events.PublishFailed)
    assert failed.reason
    answers.jobs.carry_out(events.Discard(1, 9, STEP, 0))
    answers.settle()


def test_a_mistake_in_the_code_is_answered_too(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(storage.publish, "verify_parts", fail)
    monkeypatch.setattr(storage.publish, "publish", fail)
    answers.jobs.carry_out(events.StartVerify(1, 1, STEP, 0, ALONE))
    assert answers.next() == events.VerifyBlocked(1, 1, "ZeroDivisionError: a mistake")
    answers.jobs.carry_out(publish_order(ALONE))
    assert isinstance(answers.next(), events.PublishFailed)
    monkeypatch.undo()
    answers.write(0, 1, ("u",), (0, 1, 2))
    answers.jobs.carry_out(events.StartVerify(1, 1, STEP, 0, ALONE))
    assert answers.next() == events.Verified(1, 1)
    answers.settle()


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ESTALE, "Stale"), MemoryError()]
)
@pytest.mark.parametrize("call", ["open_read", "exists", "preadv"])
def test_a_verification_that_could_not_look_says_so_and_works_the_next_time(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, error: Exception, call: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    answers.write(0, 1, ("u",), (0, 1))
    answers.write(2, 2, ("v",), (2,))
    parts = (events.PartPlan(0, 1, ("u",), (0, 1)), events.PartPlan(2, 2, ("v",), (2,)))
    with monkeypatch.context() as patch:
        patch.setattr(system.Os, call, fail)
        answers.jobs.carry_out(events.StartVerify(1, 2, STEP, 0, parts))
        assert isinstance(answers.next(), events.VerifyBlocked)
    answers.jobs.carry_out(events.StartVerify(1, 2, STEP, 0, parts))
    assert answers.next() == events.Verified(1, 2)
    answers.settle()


def test_what_is_kept_survives_the_next_start_of_the_job(answers: Answers, caplog: pytest.LogCaptureFixture) -> None:
    answers.write(0, 1, ("u",), (0, 1, 2))
    answers.jobs.carry_out(events.KeepParts(1, 1, STEP, 0))
    answers.settle()
    kept = answers.root / f"unpublished-step_{STEP}-digits-g2-i1-a1"
    assert str(kept) in caplog.text
    starts.remove_stale(answers.root, "digits", 9)
    assert (kept / "rank_0" / layout.PART_NAME).exists()
    assert latest(answers.root) is None


def test_what_is_not_finished_is_not_kept(answers: Answers) -> None:
    (answers.tmp_dir(1) / "rank_0").mkdir(parents=True)
    (answers.tmp_dir(1) / "rank_0" / "ttp_rank_0-1_7.ckpt").write_bytes(b"half of it")
    answers.jobs.carry_out(events.KeepParts(1, 1, STEP, 0))
    answers.jobs.carry_out(events.KeepParts(1, 2, STEP, 0))
    answers.settle()
    assert not list(answers.root.glob("unpublished-*"))
    assert not answers.tmp_dir(1).exists()


def test_a_directory_that_cannot_be_renamed_at_once_is_kept_all_the_same(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(errno.ESTALE, "Stale"), OSError(errno.EIO, "Input/output error")]
    rename = system.Os.rename

    def fail(self: system.Os, source: Path, target: Path) -> None:
        if failures:
            raise failures.pop()
        rename(self, source, target)

    monkeypatch.setattr(storage, "KEEP_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(system.Os, "rename", fail)
    answers.write(0, 1, ("u",), (0, 1, 2))
    answers.jobs.carry_out(events.KeepParts(1, 1, STEP, 0))
    answers.settle()
    assert (answers.root / f"unpublished-step_{STEP}-digits-g2-i1-a1").exists()


def test_local_state_that_is_lost_makes_the_manifest_say_so(answers: Answers) -> None:
    parts = (events.PartPlan(0, 1, ("u",), (0, 1)),)
    answers.write(0, 1, ("u",), (0, 1))
    answers.jobs.carry_out(publish_order(parts, lost=(2,)))
    assert isinstance(answers.next(), events.Published)
    manifest = open_checkpoint(layout.checkpoint_dir(answers.root, STEP)).manifest
    assert not manifest.exact
    golden.says(reason.detail for reason in manifest.reasons if 2 in reason.ranks)


def test_the_fallback_directory_is_target_1(answers: Answers) -> None:
    answers.write(0, 1, ("u",), (0, 1, 2), target=1)
    answers.jobs.carry_out(publish_order(ALONE, target=1))
    final = layout.checkpoint_dir(answers.root / "fallback", STEP)
    assert answers.next() == events.Published(1, 1, str(final))


def test_discard_removes_one_attempt_only(answers: Answers) -> None:
    answers.write(0, 1, ("u",), (0,))
    answers.write(0, 2, ("u",), (0,))
    answers.jobs.carry_out(events.Discard(1, 1, STEP, 0))
    answers.settle()
    assert not answers.tmp_dir(1).exists()
    assert answers.tmp_dir(2).exists()


@pytest.mark.parametrize("order", ["discard", "keep"])
def test_what_could_not_be_removed_is_tried_once_more_at_the_end(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    def fail(self: system.Os, path: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    (answers.tmp_dir(1) / "rank_0").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(system.Os, "rmdir", fail)
        if order == "discard":
            answers.jobs.carry_out(events.Discard(1, 1, STEP, 0))
        else:
            answers.jobs.carry_out(events.KeepParts(1, 1, STEP, 0))
        answers.settle()
        assert answers.tmp_dir(1).exists()
    answers.jobs.release()
    answers.settle()
    assert not answers.tmp_dir(1).exists()


def test_what_a_late_writer_makes_again_is_removed_at_the_end(answers: Answers) -> None:
    answers.write(0, 1, ("u",), ())
    answers.jobs.carry_out(events.Discard(1, 1, STEP, 0))
    answers.settle()
    answers.write(0, 1, ("u",), ())
    answers.jobs.release()
    answers.settle()
    assert not answers.tmp_dir(1).exists()


def test_an_attempt_that_is_discarded_meanwhile_does_not_cut_the_release_short(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Found by a random schedule of the shells."""
    (tmp_path / "fallback").mkdir()
    answers.jobs.clear_up()
    answers.jobs.carry_out(events.Discard(1, 1, STEP, 0))
    answers.settle()
    discarded = answers.jobs._discarded

    def discard_another(path: Path) -> None:
        if len(discarded) < 2:
            answers.jobs.carry_out(events.Discard(1, 2, STEP, 0))
            until(lambda: len(discarded) == 2, "an attempt discarded by the directory's thread")

    monkeypatch.setattr(storage.starts, "discard_own", discard_another)
    answers.jobs.release()
    answers.settle()
    assert not list(tmp_path.rglob(".lastwords-digits-*"))


def test_a_hanging_directory_does_not_hold_up_the_other_one(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stuck: queue.Queue[None] = queue.Queue()
    monkeypatch.setattr(storage.starts, "discard_own", lambda path: stuck.get())
    answers.jobs.carry_out(events.Discard(1, 1, STEP, 0))
    answers.write(0, 1, ("u",), (0, 1, 2), target=1)
    answers.jobs.carry_out(events.StartVerify(1, 1, STEP, 1, ALONE))
    assert answers.next() == events.Verified(1, 1)
    assert answers.jobs.busy
    assert not answers.jobs.wait_idle(0.01)
    stuck.put(None)
    assert answers.jobs.wait_idle(WAIT_S)


def test_lines_are_appended_and_a_full_disk_is_only_mentioned(
    answers: Answers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers.jobs.record(tmp_path / "logs" / "lines", "one")
    answers.jobs.record(tmp_path / "logs" / "lines", "two")
    answers.jobs.record(Path("/proc/nowhere/lines"), "three")
    answers.settle()
    assert (tmp_path / "logs" / "lines").read_text() == "one\ntwo\n"
    assert "/proc/nowhere" in caplog.text


def test_a_new_controller_removes_what_dead_ones_left_and_nothing_of_a_living_one(tmp_path: Path) -> None:
    (tmp_path / "fallback").mkdir()
    dead = [layout.TemporaryName(STEP, "digits", 1, 1, 1).under(root) for root in (tmp_path, tmp_path / "fallback")]
    living = layout.TemporaryName(STEP, "slow", 0, 1, 1).under(tmp_path)
    for directory in (*dead, living):
        (directory / "rank_0").mkdir(parents=True)
    claim = starts.Claim.take(tmp_path, "slow", 0)
    assert claim is not None
    answers = Answers(tmp_path)
    answers.jobs.clear_up()
    answers.settle()
    assert not any(directory.exists() for directory in dead)
    assert living.exists()
    assert layout.claim_path(tmp_path, "digits", 2).exists()
    answers.jobs.release()
    answers.settle()
    assert not list(tmp_path.rglob(".lastwords-digits-*"))
    claim.release()


def _file_of(rank_dir: Path) -> Path:
    [path] = rank_dir.glob("*.ckpt")
    return path


LATE: dict[str, tuple[Callable[[Path], object], str]] = {
    "file deleted": (lambda rank_dir: _file_of(rank_dir).unlink(), "is missing"),
    "file cut": (lambda rank_dir: os.truncate(_file_of(rank_dir), 100), "truncated"),
    "part.json deleted": (lambda rank_dir: (rank_dir / "part.json").unlink(), "its writer did not finish"),
    "part.json cut": (lambda rank_dir: os.truncate(rank_dir / "part.json", 100), "damaged"),
    "directory deleted": (shutil.rmtree, "its writer did not finish"),
}
"""What may happen to a writer's directory after it was verified, and what is said of it."""


@pytest.mark.parametrize("tables_bytes_max", [publish.TABLES_BYTES_MAX, 0], ids=["in the manifest", "in the parts"])
@pytest.mark.parametrize("defect", LATE)
def test_what_was_lost_after_it_was_verified_is_not_published(
    answers: Answers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    defect: str,
    tables_bytes_max: int,
) -> None:
    monkeypatch.setattr(publish, "TABLES_BYTES_MAX", tables_bytes_max)
    lose, words = LATE[defect]
    final = layout.checkpoint_dir(answers.root, STEP)
    for attempt in (1, 2):
        alone = (events.PartPlan(0, attempt, ("u",), (0, 1, 2)),)
        answers.write(0, attempt, ("u",), (0, 1, 2))
        answers.jobs.carry_out(events.StartVerify(1, attempt, STEP, 0, alone))
        assert answers.next() == events.Verified(1, attempt)
        if attempt == 2:
            lose(answers.tmp_dir(2) / "rank_0")
        answers.jobs.carry_out(publish_order(alone, attempt=attempt))
        answer = answers.next()
        if attempt == 1:
            assert answer == events.Published(1, 1, str(final))
    assert isinstance(answer, events.PublishFailed)
    assert words in answer.reason
    assert "Traceback" not in caplog.text
    assert open_checkpoint(final).manifest.attempt == 1, "the good one was exchanged for it"
    assert verify(final) == []


def test_a_file_that_is_lost_before_publication_is_tried_again_is_not_published(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers.write(0, 1, ("u",), (0, 1, 2))
    answers.jobs.carry_out(events.StartVerify(1, 1, STEP, 0, ALONE))
    assert answers.next() == events.Verified(1, 1)

    def no_rename(*_: object) -> None:
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as broken:
        broken.setattr(system.Os, "rename", no_rename)
        answers.jobs.carry_out(publish_order(ALONE))
        assert isinstance(answers.next(), events.PublishFailed)
    _file_of(answers.tmp_dir(1) / "rank_0").unlink()
    answers.jobs.carry_out(publish_order(ALONE))
    answer = answers.next()
    assert isinstance(answer, events.PublishFailed)
    golden.says(answer.reason)
    assert not layout.checkpoint_dir(answers.root, STEP).exists()


def test_what_a_late_writer_made_again_is_published_as_it_is(answers: Answers) -> None:
    answers.write(0, 1, ("u",), (0, 1, 2))
    answers.jobs.carry_out(events.StartVerify(1, 1, STEP, 0, ALONE))
    assert answers.next() == events.Verified(1, 1)
    shutil.rmtree(answers.tmp_dir(1) / "rank_0")
    answers.write(0, 1, ("u",), (0, 1, 2))
    answers.jobs.carry_out(publish_order(ALONE))
    assert isinstance(answers.next(), events.Published)
    assert verify(layout.checkpoint_dir(answers.root, STEP)) == []


def test_the_newest_checkpoint_is_looked_for_in_both_directories(answers: Answers) -> None:
    answers.jobs.carry_out(LOOK)
    assert answers.next() == events.NewestKnown(2, 0, "")
    answers.write(0, 1, ("u",), (0, 1, 2), target=1)
    answers.jobs.carry_out(publish_order(ALONE, target=1))
    assert isinstance(answers.next(), events.Published)
    answers.jobs.carry_out(LOOK)
    path = layout.checkpoint_dir(answers.root / "fallback", STEP)
    assert answers.next() == events.NewestKnown(2, STEP, str(path))


def test_the_newest_is_that_of_the_highest_step_whatever_the_clocks_say(answers: Answers) -> None:
    job = Job(name="digits")
    for root, step, stamp in ((answers.root, 500, 9000), (answers.root / "fallback", 900, 5000)):
        directory = job.write(root, step)
        publish.publish(root, directory, job.facts(step), published_unix_ns=stamp)
    answers.jobs.carry_out(LOOK)
    path = layout.checkpoint_dir(answers.root / "fallback", 900)
    assert answers.next() == events.NewestKnown(2, 900, str(path))


@pytest.mark.parametrize("own_only", [True, False])
def test_the_newest_is_that_of_the_job_or_else_of_one_that_it_has_resumed_from(tmp_path: Path, own_only: bool) -> None:
    answers = Answers(tmp_path, own_only=own_only)

    def put(job: str, step: int) -> Path:
        other = Job(name=job)
        return publish.publish(answers.root, other.write(answers.root, step), other.facts(step))

    def found() -> events.Event:
        answers.jobs.carry_out(LOOK)
        return answers.next()

    path = put("stranger", 500)
    for start in starts.Start(1, "stranger", LAUNCH), starts.Start(2, "digits", LAUNCH, jobs=("before",)):
        (answers.root / layout.start_name(start.generation)).write_bytes(start.encode())
    assert found() == (events.NewestKnown(2, 0, "") if own_only else events.NewestKnown(2, 500, str(path), own=False))
    path = put("before", 30)
    assert found() == events.NewestKnown(2, 30, str(path), own=False)
    path = put("digits", 20)
    put("stranger", 510)
    assert found() == events.NewestKnown(2, 20, str(path))


def test_a_search_that_fails_gives_nothing_and_says_so(answers: Answers, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (answers.root / "fallback").write_text("no directory")
    answers.jobs.carry_out(LOOK)
    assert answers.jobs.wait_idle(WAIT_S)
    golden.says(caplog.messages)


def test_a_line_that_cannot_be_appended_for_a_moment_is_not_lost(
    answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [errno.EMFILE, errno.EIO, errno.ESTALE]
    open_file = os.open

    def open_later(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).endswith("lines") and failures:
            raise OSError(failures.pop(), "not now")
        return open_file(path, *arguments, **named)

    monkeypatch.setattr(os, "open", open_later)
    monkeypatch.setattr(system, "PAUSES_S", (0.001,) * len(failures))
    answers.jobs.record(tmp_path / "lines", "one")
    answers.settle()
    assert (tmp_path / "lines").read_text() == "one\n"


def test_a_line_that_a_full_disk_cuts_off_is_told_and_spoils_no_other_one(
    answers: Answers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, limit = tmp_path / "incidents.jsonl", 4 << 20
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))  # as a file system that is full after so much
    try:
        answers.jobs.record(path, exit_line(1, "x" * limit))
        answers.settle()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == limit
    golden.says(caplog.messages)
    answers.jobs.record(path, exit_line(2, "rank 1 died"))
    answers.settle()
    found = recorded_exit(path, "digits", 2)
    assert found is not None
    assert found.incident == 2


def exit_line(incident: int, reason: str) -> str:
    facts = {"job": "digits", "generation": 2, "incident": incident, "outcome": "NOT_SAVED", "step": 0, "path": ""}
    return json.dumps({**facts, "reason": reason, "cause_ranks": [1]})


def test_attempts_that_were_discarded_do_not_add_up(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "DISCARDED_MAX", 3)
    attempts = [events.Discard(0, attempt, 40, 0) for attempt in range(1, 6)]
    for effect in attempts:
        answers.jobs.carry_out(effect)
    answers.settle()
    assert len(answers.jobs._discarded) == 3
    again = [answers.jobs._tmp_dir(effect) for effect in attempts[2:]]
    for path in again:
        path.mkdir(parents=True)  # by a writer that has its order late
    answers.jobs.release()
    answers.settle()
    assert not any(path.exists() for path in again)


# ---------------------------------------------------------------------- pruning

KEEP_1 = events.Prune(keep_max=1, keep_minutes=0)
PERIODIC = Job(name="digits", generation=2, incident=0)


def test_a_newest_one_that_is_damaged_removes_no_sound_one(answers: Answers, caplog: pytest.LogCaptureFixture) -> None:
    filled(answers.root, range(31, 34), PERIODIC)
    flipped(answers.root, 33)
    answers.jobs.carry_out(KEEP_1)
    answers.settle()
    assert (steps_in(answers.root), sound_in(answers.root)) == ([32, 33], [32])
    golden.says(caplog.messages)
    caplog.clear()
    answers.jobs.carry_out(KEEP_1)
    answers.settle()
    assert caplog.messages == []  # read once, and said once
    filled(answers.root, range(34, 35), PERIODIC.again(attempt=9))
    answers.jobs.carry_out(KEEP_1)
    answers.settle()
    assert steps_in(answers.root) == [33, 34]


def test_reading_is_given_up_when_something_else_needs_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    has_time = False
    answers = Answers(filled(tmp_path, range(31, 34), PERIODIC), lambda: has_time)
    answers.jobs.carry_out(KEEP_1)
    answers.settle()
    assert steps_in(tmp_path) == [31, 32, 33]
    golden.says(caplog.messages)
    has_time = True
    answers.jobs.carry_out(KEEP_1)
    answers.settle()
    assert steps_in(tmp_path) == [33]


def test_nobody_waits_for_what_is_read_before_others_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Any] = []
    looked = retention.prune
    monkeypatch.setattr(retention, "prune", lambda *given, **named: looks.append(looked(*given, **named)))
    reading, go_on = threading.Event(), threading.Event()
    asked: list[int] = []

    def waits() -> bool:
        asked.append(os.getpriority(os.PRIO_PROCESS, 0))
        reading.set()
        return go_on.wait(WAIT_S)

    answers = Answers(filled(tmp_path, range(31, 34), PERIODIC), waits)
    answers.jobs.carry_out(KEEP_1)
    assert reading.wait(WAIT_S)
    answers.jobs.clear_up()
    answers.jobs.carry_out(LOOK)
    assert answers.next() == events.NewestKnown(2, 33, str(layout.checkpoint_dir(tmp_path, 33)))
    answers.jobs.release()
    assert not answers.jobs.wait_idle(0.2)
    until(lambda: not answers.jobs.busy)  # it may be ended
    filled(tmp_path, range(34, 35), PERIODIC.again(attempt=9))
    for _ in range(3):
        answers.jobs.carry_out(KEEP_1)
    go_on.set()
    answers.settle()
    assert steps_in(tmp_path) == [34]
    assert len(looks) == 2  # of the orders that came meanwhile one was left
    assert {*asked} == {max(os.getpriority(os.PRIO_PROCESS, os.getpid()), storage.PRUNING_NICE)}
