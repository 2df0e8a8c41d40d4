"""Names in shared memory: what becomes a path, and what does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lastwords.errors import ConfigError, StorageError
from lastwords.liveness import paths
from tests import golden


@pytest.mark.parametrize("job", ["", "a/b", "../etc", "a b", "ä", "x" * 65, "a\n", "a\0b"])
def test_a_job_name_that_could_leave_the_directory_is_refused(job: str) -> None:
    with golden.raises(ConfigError):
        paths.job_dir(job, 0)


@pytest.mark.parametrize("job", ["a", "..", "digits-42_x.y", "x" * 64])
def test_a_plain_job_name_stays_below_the_root(job: str, tmp_path: Path) -> None:
    path = paths.job_dir(job, 3, root=tmp_path)
    assert path.parent == tmp_path
    assert path.name == f"lastwords-{os.getuid()}-{job}-g3"


@pytest.mark.parametrize("nonce", ["../x", "g1", "a-b", "F", "a" * 33, "a\n"])
def test_a_nonce_that_is_none_is_refused(nonce: str) -> None:
    with pytest.raises(ConfigError, match="nonce"):
        paths.job_dir("job", 0, nonce)


def test_negative_ranks_and_generations_are_refused() -> None:
    with pytest.raises(ConfigError):
        paths.life_path("job", 0, -1)
    with pytest.raises(ConfigError):
        paths.box_path("job", -1, 0)


def test_the_directory_is_private_and_may_be_made_by_every_rank(tmp_path: Path) -> None:
    first = paths.make_job_dir("job", 0, root=tmp_path)
    second = paths.make_job_dir("job", 0, root=tmp_path)
    assert first == second
    assert first.stat().st_mode & 0o777 == 0o700


def test_a_link_in_the_directorys_place_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    paths.job_dir("job", 0, root=tmp_path).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="not a directory"):
        paths.make_job_dir("job", 0, root=tmp_path)


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    path = paths.job_dir("job", 0, root=tmp_path)
    path.mkdir()
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        paths.make_job_dir("job", 0, root=tmp_path)


def test_a_root_that_does_not_exist_is_a_storage_error(tmp_path: Path) -> None:
    with golden.raises(StorageError):
        paths.make_job_dir("job", 0, root=tmp_path / "nowhere")


def test_removal_takes_our_files_and_nothing_else(tmp_path: Path) -> None:
    path = paths.make_job_dir("job", 0, root=tmp_path)
    for name in ("rank_0.life", "rank_12.box", "rank_3.box.77.new"):
        (path / name).touch()
    paths.remove_job_dir("job", 0, root=tmp_path)
    assert not path.exists()

    path = paths.make_job_dir("job", 0, root=tmp_path)
    (path / "rank_0.life").touch()
    (path / "notes.txt").touch()
    paths.remove_job_dir("job", 0, root=tmp_path)
    assert [entry.name for entry in path.iterdir()] == ["notes.txt"]


def test_removal_does_not_follow_a_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rank_0.box").touch()
    paths.job_dir("job", 0, root=tmp_path).symlink_to(elsewhere)
    paths.remove_job_dir("job", 0, root=tmp_path)
    assert (elsewhere / "rank_0.box").exists()


def test_removing_what_is_not_there_is_harmless(tmp_path: Path) -> None:
    paths.remove_job_dir("job", 9, root=tmp_path)
