"""The storage jobs of the controller: every order is answered exactly once, whatever the files are like."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from lastwords.checkpoint import layout, stale
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.load import open_checkpoint, verify
from lastwords.checkpoint.part import LocalState, UnitState, write_part
from lastwords.controller import events, storage
from lastwords.controller.spec import ControllerSpec
from lastwords.controller.storage import StorageJobs

WAIT_S = 20.0
STEP = 7


class Answers:
    """Storage jobs, and a queue of what they answer."""

    def __init__(self, root: Path) -> None:
        self.root = root
        spec = ControllerSpec("127.0.0.1", 30051, "digits", 2, 3, root, fallback_root=root / "fallback")
        self.events: queue.Queue[events.Event] = queue.Queue()
        self.jobs = StorageJobs(spec, self.events.put)

    def next(self) -> events.Event:
        return self.events.get(timeout=WAIT_S)

    def settle(self) -> None:
        assert self.jobs.wait_idle(WAIT_S)
        assert self.events.empty(), "an answer too many"

    def tmp_dir(self, attempt: int, target: int = 0) -> Path:
        return layout.tmp_dir(self.root if target == 0 else self.root / "fallback", STEP, 2, 1, attempt)

    def write(self, rank: int, attempt: int, units: tuple[str, ...], locals_: tuple[int, ...], target: int = 0) -> None:
        state = {
            unit: UnitState([(TensorSpec(f"unit/{unit}/model/w", "U8", (64,)), lambda: memoryview(bytes(64)))])
            for unit in units
        }
        local = {owner: LocalState([], {"rank": owner}) for owner in locals_}
        write_part(self.tmp_dir(attempt, target), rank, 1, STEP, STEP, state, local, {}, job="digits")


@pytest.fixture
def answers(tmp_path: Path) -> Answers:
    return Answers(tmp_path)


ALONE = (events.PartPlan(0, 1, ("u",), (0, 1, 2)),)


def publish_order(parts: tuple[events.PartPlan, ...], attempt: int = 1, target: int = 0, lost: tuple[int, ...] = ()):  # type: ignore[no-untyped-def]
    return events.StartPublish(1, attempt, STEP, target, parts, "rank 1 died", (1,), (1,), lost)


def test_sound_parts_are_verified_and_published(answers: Answers) -> None:
    answers.write(0, 1, ("u",), (0, 1, 2))
    answers.jobs.verify(events.StartVerify(1, 1, STEP, 0, ALONE))
    assert answers.next() == events.Verified(1, 1)
    answers.jobs.publish(publish_order(ALONE))
    final = layout.checkpoint_dir(answers.root, STEP)
    assert answers.next() == events.Published(1, 1, str(final))
    assert verify(final) == []
    manifest = open_checkpoint(final).manifest
    assert (manifest.reason, manifest.cause_ranks, manifest.facts["dead_ranks"]) == ("rank 1 died", (1,), [1])
    answers.settle()


def test_a_part_that_an_earlier_attempt_finished_is_gathered(answers: Answers) -> None:
    answers.write(0, 1, ("u",), (0, 1))
    answers.write(2, 2, ("v",), (2,))
    parts = (events.PartPlan(0, 1, ("u",), (0, 1)), events.PartPlan(2, 2, ("v",), (2,)))
    for _ in range(2):  # asked twice, as after a lost answer: what has been moved is found where it is
        answers.jobs.verify(events.StartVerify(1, 2, STEP, 0, parts))
        assert answers.next() == events.Verified(1, 2)
    answers.jobs.publish(publish_order(parts, attempt=2))
    assert isinstance(answers.next(), events.Published)
    assert verify(layout.checkpoint_dir(answers.root, STEP)) == []
    answers.settle()


def test_parts_of_earlier_attempts_alone_need_no_directory_of_this_one(answers: Answers) -> None:
    answers.write(0, 1, ("u",), (0, 1, 2))
    answers.jobs.verify(events.StartVerify(1, 3, STEP, 0, ALONE))
    assert answers.next() == events.Verified(1, 3)
    answers.settle()


def test_a_missing_part_is_a_problem_of_its_writer(answers: Answers) -> None:
    answers.write(0, 1, ("u",), (0, 1))
    parts = (events.PartPlan(0, 1, ("u",), (0, 1)), events.PartPlan(2, 1, ("v",), (2,)))
    answers.jobs.verify(events.StartVerify(1, 1, STEP, 0, parts))
    answer = answers.next()
    assert isinstance(answer, events.VerifyFailed)
    assert [rank for rank, _ in answer.problems] == [2]
    answers.settle()


def test_a_directory_that_is_not_there_is_a_problem_and_no_exception(answers: Answers) -> None:
    answers.jobs.verify(events.StartVerify(1, 9, STEP, 1, ALONE))
    assert isinstance(answers.next(), events.VerifyFailed)
    answers.jobs.publish(publish_order(ALONE, attempt=9))
    failed = answers.next()
    assert isinstance(failed, events.PublishFailed)
    assert failed.reason
    answers.jobs.discard(events.Discard(1, 9, STEP, 0))
    answers.settle()


def test_a_mistake_in_the_code_is_answered_too(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(storage.publish, "verify_parts", fail)
    monkeypatch.setattr(storage.publish, "publish", fail)
    answers.jobs.verify(events.StartVerify(1, 1, STEP, 0, ALONE))
    assert isinstance(answers.next(), events.VerifyFailed)
    answers.jobs.publish(publish_order(ALONE))
    assert isinstance(answers.next(), events.PublishFailed)
    monkeypatch.undo()
    answers.write(0, 1, ("u",), (0, 1, 2))
    answers.jobs.verify(events.StartVerify(1, 1, STEP, 0, ALONE))
    assert answers.next() == events.Verified(1, 1)
    answers.settle()


def test_local_state_that_is_lost_makes_the_manifest_say_so(answers: Answers) -> None:
    parts = (events.PartPlan(0, 1, ("u",), (0, 1)),)
    answers.write(0, 1, ("u",), (0, 1))
    answers.jobs.publish(publish_order(parts, lost=(2,)))
    assert isinstance(answers.next(), events.Published)
    manifest = open_checkpoint(layout.checkpoint_dir(answers.root, STEP)).manifest
    assert not manifest.exact
    assert any("rank 2" in reason and "black box" in reason for reason in manifest.reasons)


def test_the_fallback_directory_is_target_1(answers: Answers) -> None:
    answers.write(0, 1, ("u",), (0, 1, 2), target=1)
    answers.jobs.publish(publish_order(ALONE, target=1))
    final = layout.checkpoint_dir(answers.root / "fallback", STEP)
    assert answers.next() == events.Published(1, 1, str(final))


def test_discard_removes_one_attempt_only(answers: Answers) -> None:
    answers.write(0, 1, ("u",), (0,))
    answers.write(0, 2, ("u",), (0,))
    answers.jobs.discard(events.Discard(1, 1, STEP, 0))
    answers.settle()
    assert not answers.tmp_dir(1).exists()
    assert answers.tmp_dir(2).exists()


def test_a_hanging_directory_does_not_hold_up_the_other_one(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stuck: queue.Queue[None] = queue.Queue()
    monkeypatch.setattr(storage.stale, "discard", lambda path: stuck.get())
    answers.jobs.discard(events.Discard(1, 1, STEP, 0))
    answers.write(0, 1, ("u",), (0, 1, 2), target=1)
    answers.jobs.verify(events.StartVerify(1, 1, STEP, 1, ALONE))
    assert answers.next() == events.Verified(1, 1)
    assert answers.jobs.busy
    assert not answers.jobs.wait_idle(0.01)
    stuck.put(None)
    assert answers.jobs.wait_idle(WAIT_S)


def test_lines_are_appended_and_a_full_disk_is_only_mentioned(
    answers: Answers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers.jobs.append_line(tmp_path / "logs" / "lines", "one")
    answers.jobs.append_line(tmp_path / "logs" / "lines", "two")
    answers.jobs.append_line(Path("/proc/nowhere/lines"), "three")
    answers.settle()
    assert (tmp_path / "logs" / "lines").read_text() == "one\ntwo\n"
    assert "/proc/nowhere" in caplog.text


def test_a_new_controller_removes_what_dead_ones_left_and_nothing_of_a_living_one(tmp_path: Path) -> None:
    (tmp_path / "fallback").mkdir()
    dead = [layout.tmp_dir(root, STEP, 1, 1, 1) for root in (tmp_path, tmp_path / "fallback")]
    living = layout.tmp_dir(tmp_path, STEP, 0, 1, 1)
    for directory in (*dead, living):
        (directory / "rank_0").mkdir(parents=True)
    claim = stale.Claim.take(tmp_path, "slow", 0)
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


def test_the_newest_checkpoint_is_looked_for_in_both_directories(answers: Answers) -> None:
    answers.jobs.look_for_newest()
    assert answers.next() == events.NewestKnown(0, "")
    answers.write(0, 1, ("u",), (0, 1, 2), target=1)
    answers.jobs.publish(publish_order(ALONE, target=1))
    assert isinstance(answers.next(), events.Published)
    answers.jobs.look_for_newest()
    path = layout.checkpoint_dir(answers.root / "fallback", STEP)
    assert answers.next() == events.NewestKnown(STEP, str(path))


def test_a_search_that_fails_gives_nothing_and_says_so(answers: Answers, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (answers.root / "fallback").write_text("no directory")
    answers.jobs.look_for_newest()
    assert answers.jobs.wait_idle(WAIT_S)
    assert "cannot tell which checkpoint is the newest" in caplog.text
