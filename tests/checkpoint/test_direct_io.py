from __future__ import annotations

import errno
import itertools
import os as posix
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from lastwords import threads
from lastwords.checkpoint.direct_io import BUFFERS, CHUNK_BYTES, DirectWriter, FileSum
from lastwords.checkpoint.system import REAL_OS, Os
from lastwords.errors import StorageError, UnavailableError, is_shortage
from tests import golden
from tests.checkpoint.interposed import InterposedOs, failing
from tests.checkpoint.simulated_disk import SimulatedOs
from tests.shortage import TOO_LARGE, no_threads, open_files

SIZES = [0, 1, 511, 4095, 4096, 4097, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 4096 + 7]


def some_bytes(count: int) -> bytes:
    return np.random.default_rng(count).bytes(count)


def sums_of(content: bytes) -> tuple[str, ...]:
    pieces = [content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES)]
    return tuple(xxhash.xxh3_64_hexdigest(piece) for piece in pieces)


def write(path: Path, pieces: Sequence[bytes], os: Os = REAL_OS) -> FileSum:
    with DirectWriter(path, sum(map(len, pieces)), os=os) as writer:
        for piece in pieces:
            writer.write(piece)
        return writer.finish()


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_written_byte_for_byte_with_its_checksums(tmp_path: Path, size: int) -> None:
    content = some_bytes(size)
    total = write(tmp_path / "file", [content])
    assert (tmp_path / "file").read_bytes() == content
    assert total == FileSum(size, sums_of(content))


def test_pieces_of_any_size_make_the_same_file_as_one_piece(tmp_path: Path) -> None:
    content = some_bytes(2 * CHUNK_BYTES + 12345)
    cuts = [0, 1, 1, 8, 4097, CHUNK_BYTES - 3, CHUNK_BYTES + 9, 2 * CHUNK_BYTES + 1, len(content)]
    pieces = [content[begin:end] for begin, end in itertools.pairwise(cuts)]
    assert write(tmp_path / "pieces", pieces) == write(tmp_path / "one", [content])
    assert (tmp_path / "pieces").read_bytes() == content


def test_more_chunks_than_buffers_keep_their_order(tmp_path: Path) -> None:
    content = b"".join(bytes([index]) * CHUNK_BYTES for index in range(2 * BUFFERS))
    assert write(tmp_path / "file", [content]).chunks == sums_of(content)
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize("size", SIZES)
def test_stable_memory_gives_the_same_file(tmp_path: Path, size: int) -> None:
    content = some_bytes(size)
    cuts = sorted({0, size // 7, size // 2, max(0, size - 100_000), size})
    with DirectWriter(tmp_path / "file", size) as writer:
        for index, (begin, end) in enumerate(itertools.pairwise(cuts)):
            writer.write(content[begin:end], stable=index % 2 == 0)
        total = writer.finish()
    assert (tmp_path / "file").read_bytes() == content
    assert total == FileSum(size, sums_of(content))


def test_the_checksum_is_of_what_was_written_even_if_stable_memory_was_not(tmp_path: Path) -> None:
    """A tensor that changes while it is saved must not make its file unreadable."""
    memory = np.zeros(6 * CHUNK_BYTES, np.uint8)

    class Meddling(Os):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            memory[:] = 1 + offset // CHUNK_BYTES
            return super().pwrite(fd, data, offset)

    with DirectWriter(tmp_path / "file", memory.size, os=Meddling()) as writer:
        writer.write(memory, stable=True)
        total = writer.finish()
    content = (tmp_path / "file").read_bytes()
    assert set(content) != {0}, "it did change meanwhile"
    assert total.chunks == sums_of(content)


def test_memory_may_change_as_soon_as_write_returns(tmp_path: Path) -> None:
    memory = np.full(CHUNK_BYTES + 5, 1, np.uint8)
    with DirectWriter(tmp_path / "file", 2 * memory.size) as writer:
        writer.write(memory)
        memory[:] = 2
        writer.write(memory)
        writer.finish()
    assert (tmp_path / "file").read_bytes() == b"\1" * memory.size + b"\2" * memory.size


@pytest.mark.parametrize(
    "memory",
    [
        np.arange(6, dtype=np.float64).reshape(2, 3),
        np.float32(1).reshape(()),
        memoryview(np.arange(4, dtype=np.int16)),
        bytearray(b"abc"),
        np.empty((0, 3), np.float32),
    ],
    ids=["matrix", "scalar", "memoryview of int16", "bytearray", "empty"],
)
def test_any_contiguous_memory_is_written(tmp_path: Path, memory: Any) -> None:
    content = bytes(np.ascontiguousarray(memory).tobytes())
    with DirectWriter(tmp_path / "file", len(content)) as writer:
        writer.write(memory)
        writer.finish()
    assert (tmp_path / "file").read_bytes() == content


def test_memory_with_gaps_is_refused(tmp_path: Path) -> None:
    with DirectWriter(tmp_path / "file", 8) as writer, pytest.raises(ValueError, match="contiguous"):
        writer.write(np.arange(8, dtype=np.uint8)[::2])


# ---------------------------------------------------------------------- file systems that cannot do everything


class Without(Os):
    """A file system that refuses some calls."""

    def __init__(self, **refused: int) -> None:
        self.refused = refused
        self.written_direct = 0
        self._direct: set[int] = set()

    def _maybe(self, name: str) -> None:
        if name in self.refused:
            raise OSError(self.refused[name], posix.strerror(self.refused[name]))

    def create(self, path: Path, *, direct: bool) -> int:
        if direct:
            self._maybe("create")
        fd = super().create(path, direct=False)
        if direct:
            self._direct.add(fd)
        return fd

    def clear_direct(self, fd: int) -> None:
        self._direct.remove(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if fd in self._direct:
            self._maybe("pwrite")
            assert len(data) % 4096 == 0
            assert offset % 4096 == 0
            self.written_direct += 1
        return super().pwrite(fd, data, offset)

    def fallocate(self, fd: int, size: int) -> None:
        self._maybe("fallocate")
        super().fallocate(fd, size)

    def try_lock(self, fd: int) -> bool:
        self._maybe("try_lock")
        return super().try_lock(fd)


@pytest.mark.parametrize(
    "refused",
    [{"create": errno.EINVAL}, {"pwrite": errno.EINVAL}, {"fallocate": errno.EOPNOTSUPP}, {"try_lock": errno.ENOLCK}],
    ids=lambda refused: next(iter(refused)),
)
def test_what_a_file_system_cannot_do_is_done_without(tmp_path: Path, refused: dict[str, int]) -> None:
    content = some_bytes(3 * CHUNK_BYTES + 77)
    total = write(tmp_path / "file", [content], Without(**refused))
    assert total.chunks == sums_of(content)
    assert (tmp_path / "file").read_bytes() == content


def test_every_direct_write_is_aligned(tmp_path: Path) -> None:
    """`Without` checks length and offset of each; here it is made sure that it saw some."""
    os = Without()
    write(tmp_path / "file", [some_bytes(CHUNK_BYTES + 77)], os)
    assert os.written_direct == 2


def test_tmpfs_is_written_too() -> None:
    directory = Path("/dev/shm")
    if not directory.is_dir():
        pytest.skip("no /dev/shm here")
    path = directory / f"lastwords-test-{posix.getpid()}"
    try:
        content = some_bytes(CHUNK_BYTES + 3)
        assert write(path, [content]).chunks == sums_of(content)
        assert path.read_bytes() == content
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("most", [1, 100, 4096, 8192, CHUNK_BYTES - 512])
def test_short_writes_are_continued(tmp_path: Path, most: int) -> None:
    class Short(Without):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            whole = super().pwrite(
                fd, data, offset
            )  # the rest is there too, and is written again: that must not matter
            return min(most, whole)

    content = some_bytes(3 * most if most < 4096 else CHUNK_BYTES + 77)
    assert write(tmp_path / "file", [content], Short()).chunks == sums_of(content)
    assert (tmp_path / "file").read_bytes() == content


def test_a_write_of_nothing_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    class Nothing(Os):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            return 0

    with golden.raises(StorageError):
        write(tmp_path / "file", [b"abc"], Nothing())


# ---------------------------------------------------------------------- failures


def test_a_disk_that_is_too_small_is_known_before_the_first_write() -> None:
    disk = SimulatedOs(bytes_max=CHUNK_BYTES)

    def no_write(number: int, name: str, args: tuple[Any, ...]) -> None:
        assert name != "pwrite"

    with golden.raises(StorageError) as caught:
        write(Path("/file"), [bytes(CHUNK_BYTES + 1)], InterposedOs(no_write, disk))
    assert caught.value.errno == errno.ENOSPC
    assert f"{CHUNK_BYTES + 1} bytes" in str(caught.value)
    assert "free" in str(caught.value)


@pytest.mark.parametrize("at", range(1, 8))
def test_a_disk_that_becomes_full_at_any_write_is_reported(at: int) -> None:
    os = InterposedOs(failing(OSError(errno.ENOSPC, "No space left on device"), "pwrite", at), SimulatedOs())
    with golden.raises(StorageError) as caught:
        write(Path("/file"), [bytes(6 * CHUNK_BYTES + 1)], os)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("direct", [True, False])
def test_after_a_failed_fsync_the_file_is_never_fsynced_again(direct: bool) -> None:
    fsyncs = []
    fail = failing(OSError(errno.EIO, "Input/output error"), "fsync")

    def before(number: int, name: str, args: tuple[Any, ...]) -> None:
        if name == "fsync":
            fsyncs.append(args)
        fail(number, name, args)

    with pytest.raises(StorageError, match="fsync") as caught:
        write(Path("/file"), [bytes(CHUNK_BYTES)], InterposedOs(before, SimulatedOs(direct=direct)))
    assert caught.value.errno == errno.EIO
    assert len(fsyncs) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error"), MemoryError()])
def test_an_abandoned_file_is_closed_and_not_fsynced(tmp_path: Path, error: BaseException) -> None:
    calls = []
    os = InterposedOs(lambda number, name, args: calls.append(name))

    def abandon() -> None:
        with DirectWriter(tmp_path / "file", 10, os=os) as writer:
            writer.write(b"abc")
            raise error

    with pytest.raises(type(error)):
        abandon()
    assert not os.open_fds
    assert "fsync" not in calls


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"older")
    with golden.raises(StorageError):
        write(tmp_path / "file", [b"newer"])
    assert (tmp_path / "file").read_bytes() == b"older"


def test_a_wrong_number_of_bytes_is_our_own_mistake(tmp_path: Path) -> None:
    with DirectWriter(tmp_path / "file", 10) as writer:
        writer.write(b"abc")
        with pytest.raises(AssertionError, match="announced"):
            writer.finish()


def test_a_file_is_never_closed_under_a_write(tmp_path: Path) -> None:
    """Cancelled while the last chunk is still being written: its number could be another file's by then."""
    calls: list[str] = []
    may_end = threading.Event()

    class Slow(Os):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            assert may_end.wait(30)
            count = super().pwrite(fd, data, offset)
            calls.append("written")
            return count

        def close(self, fd: int) -> None:
            calls.append("closed")
            super().close(fd)

    asked = 0

    def cancel(written: int) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            may_end.set()
            raise KeyboardInterrupt

    with DirectWriter(tmp_path / "file", 3, os=Slow(), progress=cancel) as writer:
        writer.write(b"abc")
        with pytest.raises(KeyboardInterrupt):
            writer.finish()
    assert calls == ["written", "closed"]
    assert not [thread for thread in threading.enumerate() if thread.name == "lastwords-write"]


def test_progress_grows_to_the_size_and_may_cancel(tmp_path: Path) -> None:
    class Cancelled(Exception):
        pass

    seen: list[int] = []
    with DirectWriter(tmp_path / "whole", 8 * CHUNK_BYTES, progress=seen.append) as writer:
        writer.write(bytes(8 * CHUNK_BYTES))
        writer.finish()
    assert seen == sorted(seen)
    assert len(seen) >= 8

    def cancel(written: int) -> None:
        if written:
            raise Cancelled

    with DirectWriter(tmp_path / "part", 20 * CHUNK_BYTES, progress=cancel) as writer, pytest.raises(Cancelled):
        writer.write(bytes(20 * CHUNK_BYTES))


def test_one_thread_is_enough_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = some_bytes(2 * BUFFERS * CHUNK_BYTES)
    start = threads.start

    def once(*args: Any, name: str) -> threading.Thread:
        thread = start(*args, name=name)
        threading.stack_size(TOO_LARGE)
        return thread

    monkeypatch.setattr(threads, "start", once)
    try:
        assert write(tmp_path / "file", [content]) == FileSum(len(content), sums_of(content))
    finally:
        threading.stack_size(0)


def test_without_any_thread_nothing_is_written_and_no_file_stays_open(tmp_path: Path) -> None:
    before = open_files()
    with no_threads(), pytest.raises(UnavailableError) as caught:
        write(tmp_path / "file", [bytes(CHUNK_BYTES)])
    assert is_shortage(caught.value)
    assert open_files() <= before
