"""A file of lines that grows, such as incidents.jsonl or a log; several processes append to it."""

from __future__ import annotations

import errno
import os as posix
import stat
from pathlib import Path

from lastwords.checkpoint.system import REAL_OS


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
