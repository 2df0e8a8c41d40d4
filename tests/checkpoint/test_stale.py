"""Whose temporary directories may go: never those of a controller that lives, whatever stage it is in."""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint import layout, load, starts
from lastwords.checkpoint.starts import Claim, remove_stale
from lastwords.checkpoint.system import REAL_OS, Os, host_id
from tests import golden
from tests.checkpoint.interposed import InterposedOs
from tests.checkpoint.states import Job, content_of, content_written

OTHER = Job(name="other", generation=1)


def nearly_published(root: Path) -> Path:
    """What `publish` leaves just before it writes the manifest's last byte: no part.json, no open file."""
    directory = OTHER.write(root, 30)
    for rank in (0, 1):
        (directory / f"rank_{rank}/part.json").unlink()
    return directory


def just_begun(root: Path) -> Path:
    """What a writer leaves between its first directory and its first file."""
    directory = OTHER.tmp_dir(root, 30)
    (directory / "rank_0").mkdir(parents=True)
    return directory


@pytest.mark.parametrize("stage", [nearly_published, just_begun])
def test_what_a_living_controller_is_about_to_publish_stays_and_goes_once_it_has_ended(
    stage: object, tmp_path: Path
) -> None:
    directory = stage(tmp_path)  # type: ignore[operator]
    claim = Claim.take(tmp_path, OTHER.name, OTHER.generation)
    assert claim is not None
    assert remove_stale(tmp_path, "mine", 3) == []
    REAL_OS.close(claim._fd)  # as kill -9 does
    # Negative control: it was the claim that kept it.
    assert remove_stale(tmp_path, "mine", 3) == [directory]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", [b"another kernel", host_id().partition(b"/")[0] + b"/0"])
def test_another_jobs_directory_goes_at_once_only_if_its_controller_was_killed_on_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: bytes
) -> None:
    """Where locks end at a host's border, a lock that is free says nothing of another host's controller.

    In another container of this kernel, with a /dev/shm of its own, ranks may live that nobody sees from here.
    """

    directory = nearly_published(tmp_path)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(starts, "host_id", lambda: host)
        claim = Claim.take(tmp_path, OTHER.name, OTHER.generation)
    assert claim is not None
    REAL_OS.close(claim._fd)
    assert remove_stale(tmp_path, "mine", 3) == []
    assert layout.claim_path(tmp_path, OTHER.name, OTHER.generation).exists()
    # Negative control: the same job started again knows that what was before it has ended.
    assert remove_stale(tmp_path, OTHER.name, 3) == [directory]


def test_what_another_job_has_left_goes_after_a_day_without_a_change(tmp_path: Path) -> None:
    directory = nearly_published(tmp_path)
    assert remove_stale(tmp_path, "mine", 3) == []
    for path in (directory, *directory.rglob("*")):
        os.utime(path, (0, 0))
    assert remove_stale(tmp_path, "mine", 3) == [directory]


def test_the_claim_of_a_controller_that_follows_meanwhile_stays(tmp_path: Path) -> None:
    """It has the name of the one before it, and without a claim a start on another host would not wait for it."""
    killed = Claim.take(tmp_path, "other", 9)
    assert killed is not None
    REAL_OS.close(killed._fd)
    Job(name="other", generation=9).tmp_dir(tmp_path, 30).mkdir()
    taken: list[Claim | None] = []

    def follows(job: str, generation: int) -> bool:
        taken.append(Claim.take(tmp_path, job, generation))
        return False

    remove_stale(tmp_path, "mine", 3, may_be_followed=follows)
    assert starts.held(tmp_path, [path.name for path in tmp_path.iterdir()]) == {("other", 9)}
    for claim in taken:
        assert claim is not None
        claim.release()


def test_generations_of_other_jobs_are_not_compared_with_this_ones(tmp_path: Path) -> None:
    """Two jobs with one fallback directory drew their generations in two different places."""
    later = Job(name="other", generation=9).tmp_dir(tmp_path, 30)
    later.mkdir()
    layout.claim_path(tmp_path, "other", 9).write_bytes(host_id())
    assert remove_stale(tmp_path, "mine", 3) == [later]


class LikeNfs(Os):
    """NFS: flock is a byte-range lock, which is exclusive only through a descriptor that can write."""

    def try_lock(self, fd: int) -> bool:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return super().try_lock(fd)


def test_on_nfs_stale_directories_go_too(tmp_path: Path) -> None:
    directory = nearly_published(tmp_path)
    claim = Claim.take(tmp_path, OTHER.name, OTHER.generation, LikeNfs())
    assert claim is not None
    assert remove_stale(tmp_path, OTHER.name, 3, LikeNfs()) == []
    REAL_OS.close(claim._fd)
    assert remove_stale(tmp_path, OTHER.name, 3, LikeNfs()) == [directory]


def test_a_claim_that_is_removed_between_its_creation_and_its_lock_is_taken_again(tmp_path: Path) -> None:
    class Racing(Os):
        raced = False

        def try_lock(self, fd: int) -> bool:
            if not self.raced:
                self.raced = True
                layout.claim_path(tmp_path, "mine", 3).unlink()  # another controller tidies up
            return super().try_lock(fd)

    claim = Claim.take(tmp_path, "mine", 3, Racing())
    assert claim is not None
    with open(layout.claim_path(tmp_path, "mine", 3), "rb+") as file:
        assert not REAL_OS.try_lock(file.fileno())
    claim.release()


def test_a_claim_at_which_others_look_is_taken(tmp_path: Path) -> None:
    """Each of them has it locked for a moment, so only time helps."""
    path = layout.claim_path(tmp_path, "mine", 3)
    path.touch()

    class Waiting(Os):
        pauses = 0

        def pause(self, seconds: float) -> None:
            self.pauses += 1
            if self.pauses == 7:
                REAL_OS.close(fd)

    fd = REAL_OS.open_lock(path)
    assert REAL_OS.try_lock(fd)
    claim = Claim.take(tmp_path, "mine", 3, Waiting())
    assert claim is not None
    claim.release()


def test_two_controllers_do_not_hold_one_claim(tmp_path: Path) -> None:
    claim = Claim.take(tmp_path, "mine", 3)
    assert claim is not None
    assert Claim.take(tmp_path, "mine", 3) is None
    claim.release()


def test_the_claims_of_this_and_newer_generations_are_left_alone(tmp_path: Path) -> None:
    kept = [layout.claim_path(tmp_path, "mine", generation) for generation in (3, 4)]
    for path in kept:
        path.touch()
    remove_stale(tmp_path, "mine", 3)
    assert all(path.exists() for path in kept)


def test_a_released_claim_leaves_nothing_behind(tmp_path: Path) -> None:
    claim = Claim.take(tmp_path, "mine", 3)
    assert claim is not None
    claim.release()
    assert list(tmp_path.iterdir()) == []


def test_where_locks_do_not_work_nothing_is_claimed_and_whatever_may_be_in_use_stays(tmp_path: Path) -> None:
    class WithoutLocks(Os):
        def try_lock(self, fd: int) -> bool:
            raise OSError(95, "Operation not supported")

    nearly_published(tmp_path)
    layout.claim_path(tmp_path, OTHER.name, OTHER.generation).touch()
    assert Claim.take(tmp_path, "mine", 3, WithoutLocks()) is None
    assert remove_stale(tmp_path, "mine", 3, WithoutLocks()) == []


@pytest.mark.parametrize("call", ["create", "pwrite", "try_lock", "open_read"])
def test_a_claim_that_is_refused_for_a_moment_is_taken(tmp_path: Path, call: str) -> None:
    left = 2

    def before(number: int, name: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if name == call and left:
            left -= 1
            raise OSError(errno.EIO, "Input/output error")

    os = InterposedOs(before, Impatient())
    claim = Claim.take(tmp_path, "mine", 3, os)
    assert claim is not None
    path = layout.claim_path(tmp_path, "mine", 3)
    assert path.read_bytes() == host_id()
    assert len(os.open_fds) == 1
    claim.release()


class Impatient(Os):
    def pause(self, seconds: float) -> None:
        pass


def test_a_root_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    assert Claim.take(tmp_path / "nowhere", "mine", 3) is None


def test_a_whole_checkpoint_that_only_lacks_its_name_is_left_for_a_person(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = OTHER.write(tmp_path, 30)
    REAL_OS.rename(OTHER.save(tmp_path, 37), directory / "whole")  # only to have a manifest
    (directory / "whole/manifest.json").rename(directory / "manifest.json")
    assert remove_stale(tmp_path, OTHER.name, 3) == []
    golden.says(caplog.messages)
    # Negative control: with a checkpoint of that step in place, it is what was pushed aside, and may go.
    replace(OTHER, incident=2).save(tmp_path, 30)
    assert remove_stale(tmp_path, OTHER.name, 3) == [directory]


def unnamed(root: Path, job: Job, step: int, named_for: Job) -> Path:
    """A whole checkpoint under the temporary name of another attempt, or of its own."""
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    hidden = named_for.tmp_dir(root, step)
    job.save(elsewhere, step).rename(hidden)
    elsewhere.rmdir()
    return hidden


PERIODIC = replace(OTHER, incident=0)
NEXT = replace(PERIODIC, generation=2)


@pytest.mark.parametrize(
    "has_the_name", [Job(name="mine", incident=0), PERIODIC, replace(OTHER, incident=1, attempt=2)]
)
def test_a_whole_checkpoint_whose_name_is_taken_gets_another(
    tmp_path: Path, has_the_name: Job, caplog: pytest.LogCaptureFixture
) -> None:
    has_the_name.save(tmp_path, 30)
    hidden = unnamed(tmp_path, NEXT, 30, NEXT)
    assert remove_stale(tmp_path, OTHER.name, 3) == []
    assert not hidden.exists()
    aside = tmp_path / "tft_saved_checkpoints-step_30-replaced-1"
    assert content_of(aside) == content_written(NEXT, 30)
    assert load.latest(tmp_path, OTHER.name) == aside
    golden.says(caplog.messages)


def test_what_had_the_name_until_its_publisher_was_killed_goes_only_if_it_was_replaced(tmp_path: Path) -> None:
    """Killed between the exchange of names and the second look at what had the name."""
    final = NEXT.save(tmp_path, 30)
    hidden = unnamed(tmp_path, PERIODIC, 30, NEXT)
    assert remove_stale(tmp_path, OTHER.name, 3) == [hidden]
    hidden = unnamed(tmp_path, Job(name="mine", incident=0), 30, NEXT)
    assert remove_stale(tmp_path, OTHER.name, 3) == []
    assert content_of(final) == content_written(NEXT, 30)
    newest = load.latest(tmp_path, "mine")
    assert newest is not None
    assert content_of(newest) == content_written(Job(name="mine", incident=0), 30)


def test_an_attempt_that_is_given_up_takes_nothing_with_it_that_it_has_changed_places_with(tmp_path: Path) -> None:
    NEXT.save(tmp_path, 30)
    hidden = unnamed(tmp_path, Job(name="mine", incident=0), 30, NEXT)
    assert starts.discard_own(hidden)
    assert load.latest(tmp_path, "mine") is not None
    for own in (NEXT, PERIODIC):
        hidden = unnamed(tmp_path, own, 30, NEXT)
        assert starts.discard_own(hidden)
        assert not hidden.exists()
    assert len(load.scan(tmp_path)) == 2


def test_finished_parts_of_a_controller_that_was_killed_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where only one writer had finished, and where another job has a checkpoint of that step."""
    directory = OTHER.write(tmp_path, 30)
    (directory / "rank_1/part.json").unlink()
    Job(name="mine", generation=1).save(tmp_path, 30)
    assert remove_stale(tmp_path, OTHER.name, 3) == []
    kept = tmp_path / "unpublished-step_30-other-g1-i1-a1"
    assert (kept / "rank_0/part.json").exists()
    assert str(kept) in caplog.text
    assert not directory.exists()


def test_unpublished_files_of_another_user_hide_no_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = tmp_path / "unpublished-step_40-theirs-g1-i1-a1"
    theirs.mkdir()
    starts.keep(OTHER.write(tmp_path, 30), tmp_path / "unpublished-step_30-other-g1-i1-a1")

    class Private(Os):
        def listdir(self, path: Path) -> list[str]:
            if path == theirs:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return super().listdir(path)

    found = starts.find_unpublished(tmp_path, Private())
    assert [(one.job, one.ranks) for one in found] == [("theirs", ()), ("other", (0, 1))]
    golden.says(caplog.messages)


def test_finished_parts_that_cannot_be_moved_stay(tmp_path: Path) -> None:
    directory = OTHER.write(tmp_path, 30)
    (tmp_path / "unpublished-step_30-other-g1-i1-a1").mkdir()
    assert remove_stale(tmp_path, OTHER.name, 3) == []
    assert (directory / "rank_0/part.json").exists()


def test_finished_parts_of_a_step_that_the_job_has_published_go(tmp_path: Path) -> None:
    directory = OTHER.write(tmp_path, 30)
    replace(OTHER, incident=2).save(tmp_path, 30)
    assert remove_stale(tmp_path, OTHER.name, 3) == [directory]


def test_finished_parts_of_a_periodic_checkpoint_that_was_cut_short_go(tmp_path: Path) -> None:
    """Those of last words stay: `test_finished_parts_of_a_controller_that_was_killed_are_kept`."""
    directory = replace(OTHER, incident=0, attempt=4).write(tmp_path, 30)
    assert directory.name.endswith("-i0-a4")
    assert remove_stale(tmp_path, OTHER.name, 3) == [directory]
    assert list(tmp_path.iterdir()) == []
