"""Lock files: held by one process or shared by several, ended with the process, and never held twice.

A lock belongs to a file, not to its name: if a held lock's name were removed, a second process could create and lock
the name anew. So only a process that holds a lock alone removes its name, and every process that has taken a lock looks
whether the name still leads to that file, and begins again if it does not.
"""

from __future__ import annotations

import contextlib
import logging
import os as posix
import weakref
from collections.abc import Iterator
from pathlib import Path

from lastwords.checkpoint import layout
from lastwords.checkpoint.system import REAL_OS, Os, close, storage_errors
from lastwords.errors import BusyError, StorageError

logger = logging.getLogger(__name__)

_PAUSE_FIRST_S = 0.01
_PAUSE_MAX_S = 1.0


class LockFile:
    """The lock `path`, a name beside what it guards; its directory has to exist. Any thread may hold it.

    Where the file system has no locks, every process gets it, and a warning says so.
    """

    def __init__(self, path: Path, os: Os = REAL_OS) -> None:
        self._path = path
        self._os = os

    @contextlib.contextmanager
    def held(self, *, shared: bool = False, wait_s: float = 0.0) -> Iterator[bool]:
        """Whether it could be taken within `wait_s`; it is given back at the end of the block. StorageError."""
        with storage_errors("locking", self._path):
            fd = self._take(shared, wait_s)
        try:
            yield fd is not None
        finally:
            if fd is not None:
                with storage_errors("unlocking", self._path):
                    self._give_back(fd)

    def _take(self, shared: bool, wait_s: float) -> int | None:
        pause_s = _PAUSE_FIRST_S
        while True:
            fd = self._open()
            mine = False
            try:
                mine = self._lock(fd, shared=shared)
                if mine and has_name(self._path, fd, self._os):
                    return fd
            except BaseException:
                close(fd, self._path, self._os)
                raise
            close(fd, self._path, self._os)
            if mine:
                continue  # somebody removed the name between our opening and locking it: there may be a new one
            if wait_s <= 0:
                return None
            self._os.pause(pause_s)
            wait_s -= pause_s
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def _open(self) -> int:
        while True:
            try:
                return self._os.open_lock(self._path)
            except FileNotFoundError:
                try:
                    close(self._os.create(self._path, direct=False), self._path, self._os)
                except FileExistsError:  # another process has been faster
                    if self._os.is_link(self._path):  # or it leads to nothing
                        raise

    def _lock(self, fd: int, *, shared: bool) -> bool:
        try:
            return self._os.try_lock(fd, shared=shared)
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): make sure that only one process at a time writes there", self._path, error
            )
            return True

    def _give_back(self, fd: int) -> None:
        try:
            # Of several holders the last one removes the name. Between a shared lock and this one another process may
            # have had it alone and removed the name itself, hence the second question.
            if self._lock(fd, shared=False) and has_name(self._path, fd, self._os):
                self._os.unlink(self._path)
        finally:
            close(fd, self._path, self._os)


def has_name(path: Path, fd: int, os: Os) -> bool:
    """Whether the name still leads to the file of this descriptor: a lock is held on a file, not on its name.

    The name is opened, since NFS answers a mere look-up from its cache.
    """
    try:
        other = os.open_read(path)
    except FileNotFoundError:
        return False
    try:
        return os.stamp(other)[:2] == os.stamp(fd)[:2]
    finally:
        close(other, path, os)


# Whoever reads a checkpoint holds its manifest locked, shared with other readers; whoever removes it holds it alone.
#
# The lock is on the file, not beside it: it needs no right to write, nobody has to tidy it up, and it stays on the
# file when the directory is renamed. It ends with the process. Where the file system has no locks, or keeps them to
# one host, a reader is told of a removal by ReplacedError (`load`), and its checksums keep it from wrong bytes.

_TRIES = 100
_PAUSE_S = 0.05
"""5 s: whoever has it alone is about to rename it, which takes as long as the file system takes for a rename."""


class ReaderLock:
    """Held from `take` until `release`, at most as long as this object lives. Any thread.

    A child that is forked meanwhile has a copy of the object and no say in the lock, which stays its parent's.
    """

    def __init__(self, fd: int | None = None, path: Path = Path(), os: Os = REAL_OS) -> None:
        self.held = fd is not None
        self._release = weakref.finalize(self, _give_back, fd, path, os, posix.getpid())

    @classmethod
    def take(cls, directory: Path, os: Os = REAL_OS) -> ReaderLock:
        """Not `held` where there is no manifest, or there are no locks: reading tells the first, the log the other.

        BusyError if another process is about to remove the checkpoint and does not come to it.
        """
        path = directory / layout.MANIFEST_NAME
        for _ in range(_TRIES):
            try:
                fd = os.open_read(path)
            except OSError:  # told by whoever reads it
                return cls()
            mine = False
            try:
                mine = os.try_lock(fd, shared=True)
                if mine and is_at(path, fd, os):
                    return cls(fd, path, os)
            except OSError as error:
                logger.info("%s cannot be locked (%s): nothing keeps others from removing it", directory, error)
                _give_back(fd, path, os)
                return cls()
            except BaseException:
                _give_back(fd, path, os)
                raise
            _give_back(fd, path, os)
            if not mine:
                os.pause(_PAUSE_S)
        raise BusyError(f"{directory} is about to be removed by another process; try again, or use another checkpoint")

    def __enter__(self) -> ReaderLock:
        return self

    def __exit__(self, *ended: object) -> None:
        self.release()

    def release(self) -> None:
        """Others may remove the checkpoint. Does nothing the second time."""
        self.held = False
        self._release()


def is_at(path: Path, fd: int, os: Os) -> bool:
    """As `has_name`, by a look-up: a reader may have no descriptor left."""
    try:
        return os.stamp(path)[:2] == os.stamp(fd)[:2]
    except (FileNotFoundError, NotADirectoryError):
        return False


def _give_back(fd: int | None, path: Path, os: Os, taken_by: int | None = None) -> None:
    """taken_by: the process that holds it; None: this one."""
    if fd is None:
        return
    if taken_by in (None, posix.getpid()):  # the lock is one for this process and every child that was forked since
        with contextlib.suppress(OSError):  # such a child has the descriptor too: closing alone would not unlock it
            os.unlock(fd)
    with contextlib.suppress(StorageError):
        close(fd, path, os)
