"""The start-up probe says what a file system cannot do, refuses where last words would be lost, and leaves nothing."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint.system import NO_DIRECT, NO_DIRECTORY_FSYNC, NO_FALLOCATE, NO_LOCKS, Os, probe, sync_directory
from lastwords.errors import StorageError
from tests.checkpoint.interposed import InterposedOs
from tests.checkpoint.simulated_disk import SimulatedOs

UNSUPPORTED = OSError(errno.EOPNOTSUPP, "Operation not supported")


class Lame(Os):
    """The real system without one of its abilities."""

    def __init__(self, *lacks: str, error: OSError = UNSUPPORTED) -> None:
        self.lacks = lacks
        self.error = error
        self.directories: set[int] = set()

    def _refuse(self, what: str) -> None:
        if what in self.lacks:
            raise self.error

    def create(self, path: Path, *, direct: bool) -> int:
        if direct:
            self._refuse("direct")
        return super().create(path, direct=direct)

    def open_directory(self, path: Path) -> int:
        fd = super().open_directory(path)
        self.directories.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self.directories.discard(fd)
        super().close(fd)

    def fsync(self, fd: int) -> None:
        self._refuse("directory fsync" if fd in self.directories else "fsync")
        super().fsync(fd)

    def try_lock(self, fd: int) -> bool:
        self._refuse("flock")
        return super().try_lock(fd)

    def fallocate(self, fd: int, size: int) -> None:
        self._refuse("fallocate")
        super().fallocate(fd, size)

    def rename(self, source: Path, target: Path) -> None:
        self._refuse("rename")
        super().rename(source, target)


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("direct", NO_DIRECT),
        ("directory fsync", NO_DIRECTORY_FSYNC),
        ("flock", NO_LOCKS),
        ("fallocate", NO_FALLOCATE),
    ],
)
def test_what_is_missing_is_said_once_and_nothing_is_left(tmp_path: Path, lacks: str, said: str) -> None:
    whole = probe(tmp_path)
    assert said not in whole or lacks in ("direct", "fallocate")  # some file systems of test machines lack these
    assert probe(tmp_path, Lame(lacks)).count(said) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lacks", ["fsync", "rename"])
def test_a_directory_in_which_nothing_can_be_published_is_refused(tmp_path: Path, lacks: str) -> None:
    with pytest.raises(StorageError, match=str(tmp_path)):
        probe(tmp_path, Lame(lacks))
    assert not list(tmp_path.iterdir())


def test_a_failing_directory_fsync_is_no_missing_one(tmp_path: Path) -> None:
    """EIO is a broken disk; only what a file system does not have at all is lived with."""
    broken = Lame("directory fsync", error=OSError(errno.EIO, "Input/output error"))
    with pytest.raises(StorageError):
        probe(tmp_path, broken)
    with pytest.raises(StorageError):
        sync_directory(tmp_path, broken)
    sync_directory(tmp_path, Lame("directory fsync"))


def test_any_failing_call_is_an_answer_or_a_storage_error_and_leaves_nothing_open() -> None:
    for at in range(1, 100):
        disk = SimulatedOs()
        disk.mkdir(Path("/ckpt"))

        def before(number: int, name: str, args: tuple[Any, ...], at: int = at) -> None:
            if number == at:
                raise OSError(errno.EIO, "Input/output error")

        os = InterposedOs(before, disk)
        with contextlib.suppress(StorageError):
            probe(Path("/ckpt"), os)
        if os.count < at:
            break
        assert len(os.open_fds) <= 1  # the one whose close failed
    assert at > 15
