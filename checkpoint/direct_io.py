"""Streaming a file of known size past the page cache, with its checksums taken on the way.

The caller cuts the file into chunks; a few threads each take one, copy it into an aligned buffer, hash the copy and
write it. All three release the interpreter lock. That no thread waits for another at every chunk matters on a busy
machine: one copying thread, with writing threads behind it, took twice as long there. The copy costs little and makes
sure that the checksum is of the very bytes that go to the disk, even if somebody changes the tensor meanwhile; written
straight from the tensor, such a chunk could never be read again.
Why O_DIRECT: the kernel neither copies the bytes a second time nor has to find memory for them, in a process whose
memory is full of tensors.
"""

from __future__ import annotations

import errno
import mmap
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from lastwords import threads
from lastwords.checkpoint.system import BLOCK_BYTES, REAL_OS, Os, close, storage_error, storage_errors
from lastwords.errors import StorageError, UnavailableError

CHUNK_BYTES = 4 << 20
"""Bytes under one checksum, and of one write. Large enough to keep the disk busy, small enough to re-read alone."""

BUFFERS = 6
"""6 x 4 MiB = 24 MiB: one for each thread, one for the caller, the others wait for a thread."""

_WRITERS = 3
"""While one chunk is copied and hashed, two are being written: the disk is never idle."""

_DEFERRED_BYTES = 64 << 10
"""Smaller pieces are copied by the caller: to remember them would cost more than to copy them."""

_HUGE_PAGE_BYTES = 2 << 20

_SYNC_EVERY_CHUNKS = 64
"""Without O_DIRECT, fsync every 256 MiB: errors come early, and the last fsync is short enough to show progress."""

Bytes = npt.NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview | mmap.mmap | npt.NDArray[Any]
"""Contiguous memory of any element type (collections.abc.Buffer needs Python 3.12)."""


@dataclass(frozen=True, slots=True)
class FileSum:
    """Size of a file and the xxh3_64 of each of its chunks of 4 MiB (the last one may be shorter), as hexadecimal."""

    bytes: int
    chunks: tuple[str, ...]


def as_bytes(data: Buffer) -> Bytes:
    """The memory of a contiguous buffer as uint8, without a copy; ValueError if it is not contiguous.

    >>> as_bytes(memoryview(b"ab")).tolist()
    [97, 98]
    """
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    if not view.c_contiguous:
        raise ValueError(f"memory of shape {view.shape} and strides {view.strides} is not contiguous: copy it first")
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(view, np.uint8)


_Copy = tuple[Bytes, Bytes]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Work for a writing thread: `length` bytes of a buffer go to `offset`, once the copies (to, from) are made."""

    buffer: int
    length: int
    offset: int
    copies: tuple[_Copy, ...]


class DirectWriter:
    """Writes one new file of exactly `size` bytes. Used by one thread, as a context manager:

    ```python
    with DirectWriter(path, size) as writer:
        writer.write(memory)
        total = writer.finish()
    ```
    Without `finish()` the file is left as it is, closed and unsynced. Every failure of the file system is a
    StorageError. After one, and after a failed fsync in particular, the file is abandoned: the kernel has marked its
    pages clean, so a second fsync would report success for bytes that are lost.

    progress: called from the writing thread's caller (never concurrently) with the bytes written so far, at least
    once a chunk; it may raise to cancel.
    """

    def __init__(
        self, path: Path, size: int, *, os: Os = REAL_OS, progress: Callable[[int], None] | None = None
    ) -> None:
        self._path = path
        self._size = size
        self._os = os
        self._progress = progress
        self._fd = -1
        self._direct = True
        self._sums: list[str] = []
        self._deferred: list[_Copy] = []
        self._fill = 0
        self._offset = 0
        self._current = -1
        self._written = 0
        self._error: BaseException | None = None
        self._buffers: list[Bytes] = []
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # around what the writing threads change: _written, _error, _direct

    def __enter__(self) -> DirectWriter:
        self._create()
        try:
            self._reserve()
            count = min(BUFFERS, -(-self._size // CHUNK_BYTES))
            if count:
                self._buffers = _aligned_buffers(count)
                for index in range(count):
                    self._free.put(index)
                for _ in range(min(_WRITERS, count)):
                    self._start_thread()
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._abandon()

    @property
    def direct(self) -> bool:
        """False once the file system has refused O_DIRECT."""
        return self._direct

    def write(self, data: Buffer, *, stable: bool = False) -> None:
        """Appends the bytes of a contiguous buffer.

        They may change again as soon as this returns, unless `stable` promises that they stay until `finish()`: then
        other threads copy them, which is faster.
        """
        source = as_bytes(data)
        at = 0
        while at < source.size:
            if self._current < 0:
                self._current = self._free.get()
                self._check()
            count = min(CHUNK_BYTES - self._fill, source.size - at)
            target, piece = self._buffers[self._current][self._fill : self._fill + count], source[at : at + count]
            if stable and count >= _DEFERRED_BYTES:
                self._deferred.append((target, piece))
            else:
                np.copyto(target, piece)
            self._fill += count
            at += count
            if self._fill == CHUNK_BYTES:
                self._hand_over()

    def finish(self) -> FileSum:
        """Writes the rest and makes the file's content durable (its name is the caller's: fsync the directory)."""
        if self._fill:
            self._hand_over()
        self._stop_threads()
        self._check()
        assert self._offset == self._size, f"{self._path}: {self._offset} bytes were written, {self._size} announced"
        if self._size % BLOCK_BYTES:
            with storage_errors("setting the size of", self._path):
                self._os.ftruncate(self._fd, self._size)
        fd, self._fd = self._fd, -1
        try:
            with storage_errors("fsync of", self._path):
                self._os.fsync(fd)
        finally:
            close(fd, self._path, self._os)
        return FileSum(self._size, tuple(self._sums))

    # ------------------------------------------------------------------ the caller's thread

    def _create(self) -> None:
        with storage_errors("creating", self._path):
            try:
                self._fd = self._os.create(self._path, direct=True)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._direct = False
                try:
                    self._fd = self._os.create(self._path, direct=False)
                except FileExistsError:
                    # Some file systems create the name before they refuse the flag.
                    self._os.unlink(self._path)
                    self._fd = self._os.create(self._path, direct=False)
            try:
                self._os.try_lock(self._fd)
            except OSError:
                pass  # A file system without locks: only the tidying of stale directories looks at them.

    def _reserve(self) -> None:
        padded = -(-self._size // BLOCK_BYTES) * BLOCK_BYTES
        if not padded:
            return
        try:
            self._os.fallocate(self._fd, padded)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise self._full_disk(error) from error
            # Not every file system can reserve: then a full disk shows at some write.

    def _start_thread(self) -> None:
        """One is enough where there are no more; UnavailableError if there is none."""
        try:
            self._threads.append(threads.start(self._write_out, name="lastwords-write"))
        except UnavailableError:
            if not self._threads:
                raise

    def _full_disk(self, error: OSError) -> StorageError:
        failure = storage_error(f"reserving {self._size} bytes for", self._path, error)
        try:
            free = self._os.free_bytes(self._path.parent)
        except OSError:
            return failure
        return StorageError(f"{failure} ({free} bytes are free)", errno=failure.errno)

    def _hand_over(self) -> None:
        self._sums.append("")
        self._full.put(_Chunk(self._current, self._fill, self._offset, tuple(self._deferred)))
        self._offset += self._fill
        self._fill = 0
        self._current = -1
        self._deferred.clear()
        if self._progress is not None:
            self._progress(self._written)
        self._check()

    def _check(self) -> None:
        error = self._error
        if isinstance(error, OSError):
            raise storage_error("writing", self._path, error) from error
        if error is not None:
            raise error

    def _stop_threads(self) -> None:
        for _ in self._threads:
            self._full.put(None)
        for thread in self._threads:
            thread.join(timeout=0.25)
            while thread.is_alive():
                # What is queued (at most BUFFERS chunks) is still being written: keep saying so.
                if self._progress is not None and self._error is None:
                    self._progress(self._written)
                thread.join(timeout=0.25)

    def _abandon(self) -> None:
        """Stops without another write; harmless after `finish()`."""
        with self._lock:
            self._error = self._error or OSError(errno.ECANCELED, "abandoned")
        for _ in self._threads:
            self._full.put(None)
        for thread in self._threads:
            thread.join()  # the file must not be closed, and its number used again, under a write
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                self._os.close(fd)
            except OSError:
                pass  # it is given up anyway, and what led to that matters more

    # ------------------------------------------------------------------ the writing threads

    def _write_out(self) -> None:
        while (chunk := self._full.get()) is not None:
            buffer = self._buffers[chunk.buffer]
            if self._error is None:
                try:
                    for target, piece in chunk.copies:
                        np.copyto(target, piece)
                    digest = xxhash.xxh3_64_hexdigest(buffer[: chunk.length].data)
                    self._sums[chunk.offset // CHUNK_BYTES] = digest
                    self._write_chunk(buffer, chunk.length, chunk.offset)
                except BaseException as error:  # a thread's outermost loop: handed to the caller, who raises it
                    with self._lock:
                        self._error = self._error or error
                else:
                    with self._lock:
                        self._written += chunk.length
            self._free.put(chunk.buffer)

    def _write_chunk(self, buffer: Bytes, length: int, offset: int) -> None:
        padded = length
        if self._direct and length % BLOCK_BYTES:
            padded = -(-length // BLOCK_BYTES) * BLOCK_BYTES
            buffer[length:padded] = 0
        view = buffer.data
        done = 0
        while done < padded:
            direct = self._direct
            try:
                count = self._os.pwrite(self._fd, view[done:padded], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._plain()  # refused only now
                continue
            if count == 0:
                raise OSError(errno.EIO, "the file system wrote nothing")
            done += count
            if done % BLOCK_BYTES and done < padded:
                self._plain()  # a short write has left a rest that is not aligned
        if not self._direct and (offset // CHUNK_BYTES) % _SYNC_EVERY_CHUNKS == _SYNC_EVERY_CHUNKS - 1:
            self._os.fsync(self._fd)

    def _plain(self) -> None:
        """From here on through the page cache. Another thread's write may still be refused; it comes here too."""
        with self._lock:
            if self._direct:
                self._os.clear_direct(self._fd)
                self._direct = False


def _aligned_buffers(count: int) -> list[Bytes]:
    """Anonymous memory, aligned for O_DIRECT and in huge pages where there are any: fewer segments for each write."""
    memory = mmap.mmap(-1, count * CHUNK_BYTES + _HUGE_PAGE_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without them
    whole = np.frombuffer(memory, np.uint8)
    first = -whole.ctypes.data % _HUGE_PAGE_BYTES
    return [whole[first + index * CHUNK_BYTES :][:CHUNK_BYTES] for index in range(count)]
