"""What ended jobs leave in shared memory goes, and nothing that anybody may still need."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastwords.checkpoint.lock_file import LockFile
from lastwords.liveness import leftovers, paths
from lastwords.liveness.leftovers import remove_dead_job_dirs
from lastwords.liveness.robust_mutex import LifeLine

NONCE = "5f3a7700"


@pytest.fixture
def root() -> Iterator[Path]:
    """Robust mutexes need memory that processes share; /dev/shm is where jobs keep theirs."""
    path = Path(f"/dev/shm/test-leftovers-{os.getpid()}")
    path.mkdir()
    yield path
    shutil.rmtree(path)


def job(root: Path, name: str, *, ended: int, living: int = 0, extra: str = "") -> tuple[Path, list[LifeLine]]:
    path = paths.make_job_dir(name, 1, NONCE, root=root)
    lives = [LifeLine.create(paths.life_path(name, 1, rank, NONCE, root=root)) for rank in range(ended + living)]
    for life in lives[:ended]:
        life.release()
    paths.box_path(name, 1, 0, NONCE, root=root).write_bytes(bytes(1000))
    if extra:
        (path / extra).write_text("")
    os.utime(path, (1, 1))
    return path, lives[ended:]


def nobody(directory: Path) -> bool:
    """No controller may follow one that was killed."""
    return False


def test_a_job_whose_ranks_have_all_ended_is_removed(root: Path) -> None:
    path, _ = job(root, "over", ended=3)
    assert remove_dead_job_dirs(nobody, root=root) == [path]
    assert not path.exists()


def test_what_a_version_without_nonces_left_is_removed(root: Path) -> None:
    path, _ = job(root, "over", ended=3)
    former = path.rename(paths.job_dir("over", 1, root=root))
    os.utime(former, (1, 1))
    assert remove_dead_job_dirs(nobody, root=root) == [former]


def test_the_directory_of_a_controller_that_serves_stays_although_no_rank_of_its_host_lives(root: Path) -> None:
    """It saves for ranks of other hosts, and who follows it needs its state."""
    path, _ = job(root, "over", ended=3, extra=paths.STATE_NAME)
    lock = path / paths.LOCK_NAME
    with LockFile(lock).held() as held:
        assert held
        os.utime(path, (1, 1))
        assert remove_dead_job_dirs(nobody, root=root) == []
        assert (path / paths.STATE_NAME).exists()
    lock.touch()  # as a controller leaves it that is killed
    os.utime(path, (1, 1))
    assert remove_dead_job_dirs(nobody, root=root) == [path]


def test_a_look_at_the_lock_of_a_controller_leaves_it_to_no_process_that_was_forked_meanwhile(root: Path) -> None:
    path, _ = job(root, "over", ended=1)
    (path / paths.LOCK_NAME).touch()
    reader, writer = os.pipe()
    with leftovers.no_controller_serves(path) as nobody_does:
        assert nobody_does
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
    with leftovers.no_controller_serves(path) as nobody_does:
        assert nobody_does
    os.close(writer)
    os.close(reader)
    assert os.waitpid(child, 0)[1] == 0


def test_what_a_controller_needs_that_may_follow_a_killed_one_stays_and_memory_that_nobody_can_read_goes(
    root: Path,
) -> None:
    path, _ = job(root, "over", ended=2, extra=paths.STATE_NAME)
    (path / "rank_1.copy0").write_bytes(bytes(1000))
    (path / paths.LOCK_NAME).touch()
    os.utime(path, (1, 1))
    assert remove_dead_job_dirs(lambda directory: directory == path, root=root) == []
    left = ["controller.json", "controller.lock", "rank_0.life", "rank_1.life"]
    assert sorted(entry.name for entry in path.iterdir()) == left
    os.utime(path, (1, 1))
    assert remove_dead_job_dirs(nobody, root=root) == [path]
    assert not path.exists()


def test_a_job_with_one_living_rank_stays_whole(root: Path) -> None:
    path, lives = job(root, "alive", ended=2, living=1)
    assert remove_dead_job_dirs(nobody, root=root) == []
    assert sorted(entry.name for entry in path.iterdir()) == ["rank_0.box", "rank_0.life", "rank_1.life", "rank_2.life"]
    for life in lives:
        life.release()


def test_a_job_that_has_just_begun_stays(root: Path) -> None:
    path, _ = job(root, "young", ended=1)
    os.utime(path)
    assert remove_dead_job_dirs(nobody, root=root) == []
    assert path.exists()


def test_what_cannot_be_judged_stays(root: Path) -> None:
    without, _ = job(root, "without-life-lines", ended=0)
    broken, _ = job(root, "broken", ended=1)
    paths.life_path("broken", 1, 1, NONCE, root=root).write_bytes(b"x")
    os.utime(broken, (1, 1))
    for name in ("something-else", f"lastwords-{os.getuid() + 1}-other-g1", f"lastwords-{os.getuid()}-controllers"):
        (root / name).mkdir()
        os.utime(root / name, (1, 1))
    assert remove_dead_job_dirs(nobody, root=root) == []
    assert without.exists()
    assert broken.exists()


def test_a_place_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    assert remove_dead_job_dirs(nobody, root=tmp_path / "nowhere") == []


def test_a_controller_that_starts_meanwhile_gets_its_lock(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tries once: whoever has its lock serves the job already."""
    path = paths.make_job_dir("starts", 1, NONCE, root=root)
    (path / paths.LOCK_NAME).write_text("")
    looks, taken = leftovers._is_dead, []

    def look(path: Path, young_s: float) -> bool:
        with LockFile(path / paths.LOCK_NAME).held() as held:
            taken.append(held)
        return looks(path, young_s)

    monkeypatch.setattr(leftovers, "_is_dead", look)
    assert remove_dead_job_dirs(nobody, root=root) == []
    assert taken == [True]
