"""Whoever reads a checkpoint holds its manifest locked, shared with other readers; whoever removes it holds it alone.

The lock is on the file, not beside it: it needs no right to write, nobody has to tidy it up, and it stays on the file
when the directory is renamed. It ends with the process. Where the file system has no locks, or keeps them to one host,
a reader is told of a removal by ReplacedError (`reading`), and its checksums keep it from wrong bytes.
"""

from __future__ import annotations

import contextlib
import logging
import os as posix
import weakref
from pathlib import Path

from lastwords.checkpoint import layout
from lastwords.checkpoint.system import REAL_OS, Os, close
from lastwords.errors import BusyError, StorageError

logger = logging.getLogger(__name__)

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

    def release(self) -> None:
        """Others may remove the checkpoint. Does nothing the second time."""
        self.held = False
        self._release()


def is_at(path: Path, fd: int, os: Os) -> bool:
    """As `lock_file.has_name`, by a look-up: a reader may have no descriptor left."""
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
