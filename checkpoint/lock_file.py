"""Lock files: held by one process or shared by several, ended with the process, and never held twice.

A lock belongs to a file, not to its name: if a held lock's name were removed, a second process could create and lock
the name anew. So only a process that holds a lock alone removes its name, and every process that has taken a lock looks
whether the name still leads to that file, and begins again if it does not.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from lastwords.checkpoint.system import REAL_OS, Os, close, storage_errors
from lastwords.errors import BusyError

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


@contextlib.contextmanager
def alone(path: Path, target: Path, os: Os = REAL_OS) -> Iterator[None]:
    """Holds the lock `path` while `target` is made. BusyError if another process has it."""
    with LockFile(path, os).held() as mine:
        if not mine:
            raise BusyError(f"{target} is being written by another process; wait for it, or choose another name")
        yield
