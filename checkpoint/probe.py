"""What the file system of a checkpoint directory can do, tried at the start with the calls that a death will need."""

from __future__ import annotations

import errno
import mmap
import os as posix
import secrets
from collections.abc import Callable
from pathlib import Path

from lastwords.checkpoint.system import (
    BLOCK_BYTES,
    REAL_OS,
    UNSUPPORTED,
    Os,
    close,
    make_directory,
    pwrite_all,
    remove_tree,
    storage_errors,
)
from lastwords.errors import StorageError

NO_DIRECT = (
    "O_DIRECT is not supported: writing goes through the page cache, which is slower and needs memory, and fsync "
    "takes long (LASTWORDS_SYNC_TIMEOUT_S limits it)"
)
NO_DIRECTORY_FSYNC = (
    "fsync of a directory is not supported: a checkpoint survives the death of its processes, but may not survive "
    "a power loss soon after"
)
NO_LOCKS = "flock is not supported: unfinished files of killed jobs stay until you remove them"
NO_FALLOCATE = "space cannot be reserved: a full disk is noticed only while a part is written"


def probe(root: Path, os: Os = REAL_OS) -> tuple[str, ...]:
    """What is missing in `root` and what that means, one sentence each; nothing of the probe is left behind.

    Raises StorageError where last words could not be published at all: a directory and a file are created, written,
    fsynced, and the directory is renamed.
    """
    here = root / f".lastwords-probe-{posix.getpid()}-{secrets.token_hex(4)}"
    renamed = here.with_name(f"{here.name}-renamed")
    make_directory(here, os)
    try:
        missing = _try_file(here / "file", os)
        missing += _try_directory(here, os)
        with storage_errors("renaming the directory", here):
            os.rename(here, renamed)
        missing += [text for text in _try_directory(root, os) if text not in missing]
    finally:
        for directory in (here, renamed):
            try:
                remove_tree(directory, os)
            except StorageError:
                pass  # what led here matters more, and an empty directory harms nobody
    return tuple(missing)


def _try_file(path: Path, os: Os) -> list[str]:
    missing: list[str] = []
    with storage_errors("writing", path):
        if not _writes_directly(path, os):
            missing.append(NO_DIRECT)
            fd = os.create(path.with_name("plain"), direct=False)
            try:
                pwrite_all(os, fd, bytes(BLOCK_BYTES))
                os.fsync(fd)
            finally:
                os.close(fd)
        fd = os.create(path.with_name("other"), direct=False)
        try:
            if not _works(lambda: os.try_lock(fd)):
                missing.append(NO_LOCKS)
            if not _works(lambda: os.fallocate(fd, BLOCK_BYTES)):
                missing.append(NO_FALLOCATE)
        finally:
            os.close(fd)
    return missing


def _writes_directly(path: Path, os: Os) -> bool:
    try:
        fd = os.create(path, direct=True)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return False
        raise
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as aligned, memoryview(aligned) as view:
            if os.pwrite(fd, view, 0) < BLOCK_BYTES:
                return False
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        os.close(fd)
    return True


def _try_directory(path: Path, os: Os) -> list[str]:
    with storage_errors("making the entries durable of", path):
        fd = os.open_directory(path)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            return [NO_DIRECTORY_FSYNC]
        finally:
            close(fd, path, os)
    return []


def _works(call: Callable[[], object]) -> bool:
    """Whether the call does not raise OSError; that of a full disk is another matter."""
    try:
        call()
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return True
