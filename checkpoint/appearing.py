"""A file or a directory that appears under its name whole or not at all: a hidden name beside it first, then a rename.

Everything on a disk that somebody else may read goes this way; `publish` adds what is special about checkpoints
(fences, and what becomes of a checkpoint that is replaced). Files in shared memory appear through
`liveness.paths.replacing`, which makes nothing durable. Torch-free.

    write_file       a small file whose bytes are there; any number of writers at any time
    making_file      a large file that is written in the block, by one process at a time
    making_directory likewise a directory
    give_name        the last step alone: rename, and the directory's fsync

The order is the same everywhere: the content is durable, then the name is given, then the name is durable. A crash
leaves the hidden name at most. A random part makes hidden names unique where several writers may be at work (a process
id would not do: two hosts that share the file system may give one twice); where a lock lets in one at a time, the
hidden name is fixed, so that the next one finds and removes what a killed process has left. So it does where a file is
written again and again.
"""

from __future__ import annotations

import contextlib
import errno
import os as posix
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from lastwords.checkpoint.layout import CheckpointName
from lastwords.checkpoint.lock_file import LockFile
from lastwords.checkpoint.manifest import Claimed
from lastwords.checkpoint.part import write_document
from lastwords.checkpoint.system import (
    REAL_OS,
    Os,
    make_directories,
    make_directory,
    remove_tree,
    storage_errors,
    sync_directory,
    sync_file,
    where_it_leads,
)
from lastwords.errors import BusyError, ConfigError, StorageError

TEMPORARY = ".tmp-"
"""How every hidden name begins."""

_RANDOM = re.compile(r"[0-9a-f]{8}")


def refuse_existing(target: Path, os: Os = REAL_OS) -> None:
    """ConfigError if there is anything at `target`, or if it would lie in a checkpoint."""
    if os.exists(target):
        raise ConfigError(f"{target} exists already and is left as it is; choose another name, or remove it first")
    refuse_checkpoint(target.parent, os)


def refuse_checkpoint(directory: Path, os: Os = REAL_OS) -> None:
    """ConfigError if it is a checkpoint or lies in one: what is foreign there keeps it from ever being removed.

    StorageError where that cannot be seen.
    """
    place = where_it_leads(directory)
    for one in (place, *place.parents):
        if CheckpointName.parse(one.name) is not None or Claimed.read(one, os) != Claimed():
            raise ConfigError(f"{one} is a checkpoint; give the directory that holds it: {one.parent}")


def give_name(hidden: Path, target: Path, os: Os = REAL_OS, *, replace: bool = False) -> None:
    """Renames what is finished and durable to `target`, in the same directory; the name is durable on return.

    StorageError: with errno EEXIST if the name is taken, unless a file may `replace` a file.
    """
    with storage_errors("giving its name to", target):
        if replace:
            os.replace(hidden, target)
        else:
            os.rename(hidden, target)
    sync_name(target, os)


def sync_name(target: Path, os: Os) -> None:
    """Makes a name durable that others see already; the StorageError says so."""
    try:
        sync_directory(target.parent, os)
    except StorageError as error:
        raise StorageError(
            f"{target} is complete and has its final name, but may not survive a power loss: {error}", errno=error.errno
        ) from error


def write_file(target: Path, raw: bytes, os: Os = REAL_OS, *, replace: bool = False) -> None:
    """Writes a small file. Its directory has to exist. StorageError as `give_name`; then nothing is left behind.

    replace: it is written again and again, so what killed writers have left goes. The hidden file is its writer's lock
    then; whoever takes that of another one removes it by giving the lock back.
    """
    target = target.absolute()
    begins = f"{TEMPORARY}{target.name}-"
    if replace:
        _sweep(target.parent, begins, os)
    while True:
        hidden = target.with_name(f"{begins}{secrets.token_hex(4)}")
        try:
            with LockFile(hidden, os).held() if replace else contextlib.nullcontext(True) as mine:
                if mine:  # else another writer has just taken it for that of a killed one
                    write_document(hidden, raw, os, made=replace)
                    give_name(hidden, target, os, replace=replace)
                    return
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(hidden)
            raise


def _sweep(directory: Path, begins: str, os: Os) -> None:
    with storage_errors("listing", directory):
        names = os.listdir(directory)
    for name in names:
        if name.startswith(begins) and _RANDOM.fullmatch(name.removeprefix(begins)):
            with LockFile(directory / name, os).held():
                pass


@contextlib.contextmanager
def making_file(target: Path, os: Os = REAL_OS) -> Iterator[Path]:
    """A hidden name to create and write a file at; durable, and named `target`, at the end of the block.

    If the block fails, the file is removed, and so is first what a killed process has left there. ConfigError if
    `target` exists, BusyError if another process is making it.
    """
    with _hidden(target, os) as hidden:
        with storage_errors("removing", hidden), contextlib.suppress(FileNotFoundError):
            os.unlink(hidden)
        try:
            yield hidden
            sync_file(hidden, os)
            give_name(hidden, target, os)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(hidden)
            raise


@contextlib.contextmanager
def making_directory(target: Path, os: Os = REAL_OS) -> Iterator[Path]:
    """As `making_file`, for a directory, there when the block begins; the files in it are the block's to fsync."""
    refuse_existing(target, os)
    make_directories(target.parent, os)
    with _hidden(target, os) as hidden:
        remove_tree(hidden, os)
        make_directory(hidden, os)
        try:
            yield hidden
            sync_directory(hidden, os)
            give_name(hidden, target, os)
        except BaseException:
            with contextlib.suppress(StorageError):
                remove_tree(hidden, os)
            raise


@contextlib.contextmanager
def _hidden(target: Path, os: Os) -> Iterator[Path]:
    with alone_at(target, os):
        refuse_existing(target, os)
        yield target.parent / f"{TEMPORARY}{target.name}"


@contextlib.contextmanager
def alone_at(target: Path, os: Os) -> Iterator[None]:
    """Nobody makes `target` during the block. BusyError if another process does already."""
    with LockFile(target.parent / f"{TEMPORARY}{target.name}.lock", os).held() as mine:
        if not mine:
            raise BusyError(f"{target} is being written by another process; wait for it, or choose another name")
        yield


# A file of lines that grows, such as incidents.jsonl or a log; several processes append to it.


def read_end(path: Path, bytes_max: int) -> bytes:
    """The last bytes of a regular file that grows; OSError."""
    with open(REAL_OS.open_read(path), "rb") as file:
        file.seek(max(0, file.seek(0, posix.SEEK_END) - bytes_max))
        return file.read(bytes_max)


def append_line(path: Path, line: str) -> None:
    """Appends to a regular file, which is created if there is none; OSError.

    One write, since others append as well; more only where a disk takes a part. What is left of a line that did not fit
    on a full disk, or whose writer was killed, is ended first: it makes no line unreadable but itself. Not durable. A
    FIFO could block for ever, so it is refused.
    """
    fd = posix.open(path, posix.O_RDWR | posix.O_APPEND | posix.O_CREAT | posix.O_CLOEXEC | posix.O_NONBLOCK, 0o644)
    try:
        if not stat.S_ISREG(posix.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        size = posix.fstat(fd).st_size
        is_whole = not size or posix.pread(fd, 1, size - 1) == b"\n"
        left = memoryview((b"" if is_whole else b"\n") + line.encode() + b"\n")
        while left:
            left = left[posix.write(fd, left) :]
    finally:
        posix.close(fd)
