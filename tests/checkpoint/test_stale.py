"""Whose temporary directories may go: never those of a controller that lives, whatever stage it is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastwords.checkpoint import layout
from lastwords.checkpoint.stale import Claim, remove_stale
from lastwords.checkpoint.system import REAL_OS, Os
from tests.checkpoint.states import Job

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
    claim.release()
    # Negative control: it was the claim that kept it.
    assert remove_stale(tmp_path, "mine", 3) == [directory]


def test_a_claim_whose_controller_was_killed_is_removed_with_what_it_wrote(tmp_path: Path) -> None:
    directory = nearly_published(tmp_path)
    path = layout.claim_path(tmp_path, OTHER.name, OTHER.generation)
    path.touch()  # the file is there, and nobody holds its lock
    assert remove_stale(tmp_path, "mine", 3) == [directory]
    assert not path.exists()


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


def test_a_root_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    assert Claim.take(tmp_path / "nowhere", "mine", 3) is None


def test_a_whole_checkpoint_that_only_lacks_its_name_is_left_for_a_person(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = OTHER.write(tmp_path, 30)
    REAL_OS.rename(OTHER.save(tmp_path, 37), directory / "whole")  # only to have a manifest
    (directory / "whole/manifest.json").rename(directory / "manifest.json")
    assert remove_stale(tmp_path, OTHER.name, 3) == []
    assert f"rename it to {layout.checkpoint_dir(tmp_path, 30)}" in caplog.text
    # Negative control: with a checkpoint of that step in place, it is what was pushed aside, and may go.
    layout.checkpoint_dir(tmp_path, 30).mkdir()
    assert remove_stale(tmp_path, OTHER.name, 3) == [directory]
