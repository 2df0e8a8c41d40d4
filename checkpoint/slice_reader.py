"""Reading slices of stored tensors into memory of another layout: the one reader of resume, conversion and comparison.

What lies side by side both in the file and in the target goes straight there. All else passes through one chunk of
4 MiB for each of two threads, so no tensor is ever whole in memory beside its target. Of one `read` everything that
lies in a chunk is served by reading it once, the columns of a tensor for several targets included.

checked=True: whole chunks are read and held against their checksums, so that every byte that is used was checked; at
either end of a slice up to a chunk more is read than is kept, and of columns what lies between them.
checked=False: only what is wanted is read, up to `EXCESS_MAX` times its bytes; chunks that are read whole are checked.
Rows no longer than a page are the exception: what lies between their wanted columns is read too, since the file system
would fetch the page anyway, and a call for each run took 4 (of 2 KiB) to 18 times (of 256 bytes) as long.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from lastwords import threads
from lastwords.checkpoint.boxes import Box, Slice, between, is_run, overlap, span
from lastwords.checkpoint.direct_io import CHUNK_BYTES, Buffer, Bytes, as_bytes
from lastwords.checkpoint.document import damage
from lastwords.checkpoint.entries import FileEntry
from lastwords.checkpoint.format import DTYPE_BITS, TensorSpec
from lastwords.checkpoint.part import open_part_file
from lastwords.checkpoint.system import REAL_OS, Os, close, storage_errors
from lastwords.errors import ConfigError, FormatError, UnavailableError

# Reading a file chunk by chunk straight into the memory where the bytes belong, each chunk checked on the way.
#
# A chunk is read once, whatever is wanted of it: the parts that want some of it are served together.

_READERS = 2
"""The caller's thread and one more: while one copies out of the page cache, the other hashes, and the reverse."""

_PIECES_MAX = 511
"""preadv takes 1024 pieces (IOV_MAX), and before and after each tensor there may be a gap. A chunk with more tensors
than this is read whole and copied out."""

EXCESS_MAX = 1.05
"""Where only what is wanted is read, this much is read for each wanted byte at most, to save calls and gain a check."""

OnBytes = Callable[[int], None]
Runs = tuple[npt.NDArray[np.int64], int]
"""First bytes of runs, in order, and the length that all of them have."""


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Bytes [begin, end) of the file and where they go: the simplest part. Any thread may ask it."""

    begin: int
    end: int
    target: memoryview

    def chunks(self) -> Iterable[int]:
        """Numbers of the chunks of which something is wanted."""
        return range(self.begin // CHUNK_BYTES, -(-self.end // CHUNK_BYTES))

    def within(self, low: int, high: int) -> FilePiece:
        """What of it lies in [low, high)."""
        begin, end = max(self.begin, low), min(self.end, high)
        return FilePiece(begin, end, self.target[begin - self.begin : end - self.begin])

    def runs(self, low: int, high: int) -> list[Runs]:
        """What is to be read of [low, high) so that `copy` finds all that is wanted; runs do not overlap."""
        inner = self.within(low, high)
        return [(np.array([inner.begin]), inner.end - inner.begin)]

    def copy(self, low: int, content: Bytes) -> None:
        """Copies what is wanted out of `content`, the file's bytes from `low` on."""
        inner = self.within(low, low + len(content))
        inner.target[:] = content[inner.begin - low : inner.end - low].data


@dataclass(slots=True)
class Count:
    """Bytes that were asked of the file system, and those of them that were held against a checksum."""

    read: int = 0
    checked: int = 0


@dataclass(slots=True)
class KeptChunk:
    """The last chunk of a file that was read and checked, for a later reading that begins in it. index: -1 for none."""

    index: int = -1
    content: Bytes = field(default_factory=lambda: np.empty(CHUNK_BYTES, np.uint8))


def read_file(path: Path, entry: FileEntry, os: Os, on_bytes: OnBytes | None) -> None:
    """Reads a whole file into nothing, to check every chunk: FormatError if a checksum is wrong.

    `on_bytes` hears of the bytes so far, on the caller's thread.
    """
    fd = open_part_file(path, entry, os)
    try:
        with storage_errors("reading", path):
            os.advise_sequential(fd)
        read_parts(fd, path, entry, None, checked=True, os=os, on_bytes=on_bytes)
    finally:
        close(fd, path, os)


def read_parts(
    fd: int,
    path: Path,
    entry: FileEntry | None,
    parts: Sequence[FilePart] | None,
    *,
    checked: bool,
    os: Os,
    on_bytes: OnBytes | None = None,
    kept: KeptChunk | None = None,
) -> Count:
    """Reads all chunks of which a part wants something, or all of the file if None, and checks every one.

    FormatError if a checksum is wrong; the targets then hold rubbish.
    checked=False: only what is wanted is read, and a chunk of which nearly all is wanted is read whole and checked.
    entry: None if no checksums are known; nothing is checked then. kept (checked=True only): the chunk in it is not
    read again, and the last one that is read goes into it.
    """
    plan = _plan(entry, parts)
    if kept is not None and plan and plan[0][0] == kept.index:
        for part in plan.pop(0)[1]:
            part.copy(kept.index * CHUNK_BYTES, kept.content)
    return _FileReading(fd, path, entry, plan, checked, os, kept).run(on_bytes)


def _plan(entry: FileEntry | None, parts: Sequence[FilePart] | None) -> list[tuple[int, list[FilePart]]]:
    """Chunks to read, each with the parts that want something of it."""
    if parts is None:
        assert entry is not None, "of a file without checksums there is nothing to be read into nothing"
        return [(index, []) for index in range(len(entry.chunks))]
    plan: dict[int, list[FilePart]] = {}
    for part in parts:
        for index in part.chunks():
            plan.setdefault(index, []).append(part)
    return sorted(plan.items(), key=lambda step: step[0])


class _FileReading:
    """One file being read by a few threads, each of which takes the next chunk when it has done its last."""

    def __init__(
        self,
        fd: int,
        path: Path,
        entry: FileEntry | None,
        plan: list[tuple[int, list[FilePart]]],
        checked: bool,
        os: Os,
        kept: KeptChunk | None = None,
    ) -> None:
        self._kept = kept
        self._last = plan[-1][0] if plan else -1
        self._fd = fd
        self._path = path
        self._entry = entry
        self._checked = checked
        self._steps = iter(plan)
        self._readers = min(_READERS, len(plan))
        self._os = os
        self._lock = threading.Lock()
        self._count = Count()
        self._error: BaseException | None = None

    def run(self, on_bytes: OnBytes | None) -> Count:
        others: list[threading.Thread] = []
        with contextlib.suppress(UnavailableError):  # this thread reads, too
            for _ in range(1, self._readers):
                others.append(threads.start(self._work, None, name="lastwords-read"))
        self._work(on_bytes)
        for thread in others:
            thread.join()
        if self._error is not None:
            raise self._error
        if on_bytes is not None:
            on_bytes(self._count.read)
        return self._count

    def _work(self, on_bytes: OnBytes | None) -> None:
        scratch = np.empty(CHUNK_BYTES, np.uint8)
        try:
            while self._error is None:
                with self._lock:
                    step = next(self._steps, None)
                if step is None:
                    return
                read, checked = self._read_chunk(*step, scratch)
                with self._lock:
                    self._count.read += read
                    self._count.checked += checked
                if on_bytes is not None:
                    on_bytes(self._count.read)
        except BaseException as error:  # a thread's outermost loop: `run` raises it in the caller's thread
            with self._lock:
                self._error = self._error or error

    def _read_chunk(self, index: int, parts: list[FilePart], scratch: Bytes) -> tuple[int, int]:
        """Bytes that were read, and how many of them were checked."""
        start = index * CHUNK_BYTES
        end = start + CHUNK_BYTES if self._entry is None else min(start + CHUNK_BYTES, self._entry.bytes)
        pieces = _disjoint(parts, start, end)
        runs: list[tuple[int, int]] = []
        if not self._checked or self._entry is None:
            runs = _joined(parts, start, end)
            done = sum(high - low for low, high in runs)
            if self._entry is None or done * EXCESS_MAX < end - start:
                if pieces is None:
                    for low, high in runs:
                        self._fill([scratch[low - start : high - start].data], low)
                    for part in parts:
                        part.copy(start, scratch[: end - start])
                else:
                    for low, high in runs:
                        self._fill([piece.target for piece in pieces if low <= piece.begin < high], low)
                return done, 0
        views = [scratch[: end - start].data] if pieces is None else _views(pieces, start, end, scratch.data)
        self._fill(views, start)
        self._check(index, start, end, views)
        if self._kept is not None and index == self._last:
            np.concatenate([np.frombuffer(view, np.uint8) for view in views], out=self._kept.content[: end - start])
            self._kept.index = index
        if pieces is None:
            for part in parts:
                part.copy(start, scratch[: end - start])
        return end - start, end - start

    def _check(self, index: int, start: int, end: int, views: list[memoryview]) -> None:
        assert self._entry is not None
        if len(views) == 1:
            digest = xxhash.xxh3_64_hexdigest(views[0])
        else:
            state = xxhash.xxh3_64()
            for view in views:
                state.update(view)
            digest = state.hexdigest()
        if digest != self._entry.chunks[index]:
            raise FormatError(damage(self._path, f"its bytes {start} to {end} do not match their checksum"))

    def _fill(self, views: list[memoryview], offset: int) -> None:
        rest = list(views)
        while rest:
            with storage_errors("reading", self._path):
                count = self._os.preadv(self._fd, rest, offset)
            if count == 0:
                raise FormatError(damage(self._path, f"it ends at byte {offset}"))
            offset += count
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if rest and count:
                rest[0] = rest[0][count:]


def _disjoint(parts: list[FilePart], start: int, end: int) -> list[FilePiece] | None:
    """All parts within [start, end) in file order, if they are few pieces that share no byte: no copies then."""
    if len(parts) > _PIECES_MAX:
        return None
    pieces: list[FilePiece] = []
    for part in parts:
        if not isinstance(part, FilePiece):
            return None
        pieces.append(part.within(start, end))
    pieces.sort(key=lambda piece: piece.begin)
    return pieces if all(a.end <= b.begin for a, b in itertools.pairwise(pieces)) else None


def _joined(parts: list[FilePart], start: int, end: int) -> list[tuple[int, int]]:
    """What the parts want of [start, end), in order; runs that touch or overlap are one."""
    found = [run for part in parts for run in part.runs(start, end)]
    begins = np.concatenate([begins for begins, _ in found])
    ends = np.concatenate([begins + length for begins, length in found])
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], begins[1:] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return list(zip(begins[first].tolist(), ends[last].tolist(), strict=True))


def _views(pieces: list[FilePiece], start: int, end: int, scratch: memoryview) -> list[memoryview]:
    """Memory for a whole chunk in file order: the pieces' own, and scratch for what lies between them."""
    views: list[memoryview] = []
    at = start
    for piece in pieces:
        if piece.begin > at:
            views.append(scratch[at - start : piece.begin - start])
        views.append(piece.target)
        at = piece.end
    if at < end:
        views.append(scratch[at - start : end - start])
    return views


PAGE_BYTES = 4096

EDGES_MAX = 8
"""32 MiB: a part of another layout comes out of few files at a time."""

_FILES_MAX = 64
"""Files that are kept open from one `read` to the next: a job of a thousand ranks has more than `ulimit -n` allows."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes lie. begin: of the first one in the file. entry: None if no checksums are known.

    offsets: of a slice in the tensor, () if it is all of it.
    """

    path: Path
    begin: int
    spec: TensorSpec
    entry: FileEntry | None
    offsets: tuple[int, ...] = ()


class StoredFiles(Protocol):
    """What slices are read from: a `Checkpoint`, or files without a manifest."""

    def stored(self, name: str) -> Sequence[StoredTensor]:
        """Where the tensor of this name is, or its slices are; IncompleteError if there is none."""


@dataclass(frozen=True, slots=True)
class Target:
    """Memory for `box` of a tensor, in C order, and the slices that fill it (of `boxes.slices_for`)."""

    box: Box
    memory: Buffer
    slices: Sequence[Slice]


class SliceReader:
    """Reads from the files of one source. For one thread; `close` when done, or use it in a `with` statement.

    bytes_read: what was asked of the file system so far. bytes_checked: what was held against a checksum.
    keep_edges: for a caller that reads tensor after tensor in the order of the files: neighbours share a chunk, which
    is read once then. Of `EDGES_MAX` files the last chunk stays in memory. With checked=True only.
    unknown_too: with checked=True, files of which no checksums are known are read all the same, unchecked.
    """

    def __init__(
        self,
        source: StoredFiles,
        *,
        checked: bool,
        unknown_too: bool = False,
        keep_edges: bool = False,
        os: Os = REAL_OS,
    ) -> None:
        self.bytes_read = 0
        self.bytes_checked = 0
        self._source = source
        self._checked = checked
        self._unknown_too = unknown_too
        self._os = os
        self._files: dict[Path, int] = {}
        self._keep_edges = keep_edges and checked
        self._edges: dict[Path, KeptChunk] = {}

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files; the reader may be used again and opens them anew."""
        self._edges.clear()
        while self._files:
            path, fd = self._files.popitem()
            close(fd, path, self._os)

    def read(self, targets: Iterable[Target], progress: OnBytes | None = None) -> None:
        """Fills all targets, file after file, each from front to back. `progress` hears of this call's bytes so far.

        FormatError if a checksum is wrong or a file is not as long as it was, IncompleteError if one is missing,
        StorageError; the targets hold rubbish then. ConfigError if what is to be checked has no checksums.
        """
        entries: dict[Path, FileEntry | None] = {}
        parts: dict[Path, list[FilePart]] = {}
        for target in targets:
            for piece in target.slices:
                for stored in self._source.stored(piece.shard.name):
                    if self._checked and stored.entry is None and not self._unknown_too:
                        raise ConfigError(f"no checksums are known of {stored.path}; read it with checked=False")
                    part = _part(stored, piece, target)
                    if part is not None:
                        entries[stored.path] = stored.entry
                        parts.setdefault(stored.path, []).append(part)
        before = 0
        for path in sorted(parts):
            started = before
            # Without checksums there is no reason to read a whole chunk.
            entry, checked = entries[path], self._checked and entries[path] is not None

            def tell(done: int, started: int = started) -> None:
                if progress is not None:
                    progress(started + done)

            count = read_parts(
                self._open(path, entry), path, entry, parts[path], checked=checked, os=self._os, on_bytes=tell,
                kept=self._edge(path) if checked and self._keep_edges else None,
            )  # fmt: skip
            before += count.read
            self.bytes_read += count.read
            self.bytes_checked += count.checked

    def _edge(self, path: Path) -> KeptChunk:
        kept = self._edges.pop(path, None) or KeptChunk()
        while len(self._edges) >= EDGES_MAX:
            self._edges.pop(next(iter(self._edges)))
        self._edges[path] = kept
        return kept

    def _open(self, path: Path, entry: FileEntry | None) -> int:
        fd = self._files.get(path)
        if fd is not None:
            return fd
        while len(self._files) >= _FILES_MAX:
            oldest = next(iter(self._files))
            close(self._files.pop(oldest), oldest, self._os)
        fd = open_part_file(path, entry, self._os)
        self._files[path] = fd
        if self._checked and entry is not None:
            with storage_errors("reading", path):
                self._os.advise_sequential(fd)
        return fd


def _part(stored: StoredTensor, piece: Slice, target: Target) -> FilePart | None:
    """What is wanted of it; None if that is nothing."""
    size = DTYPE_BITS[stored.spec.dtype] // 8
    there, wanted = piece.shard.box, piece.region
    if stored.offsets:
        there = Box(tuple(map(operator.add, there.offsets, stored.offsets)), stored.spec.shape)
        found = overlap(there, wanted)
        if found is None:
            return None
        wanted = found
    memory, nbytes = as_bytes(target.memory), target.box.elements * size
    if memory.size != nbytes:
        raise ValueError(f"{memory.size} bytes of memory for {target.box} of {stored.spec.name}, {nbytes} bytes")
    if there == wanted == target.box:  # all of it, as of each tensor of a resume where nothing has moved
        return FilePiece(stored.begin, stored.begin + nbytes, memory.data)
    source, box, region = (_in_bytes(one, size) for one in (there, target.box, wanted))
    if is_run(source, region) and is_run(box, region):
        low, high = (stored.begin + at for at in span(source, region))
        to_low, to_high = span(box, region)
        return FilePiece(low, high, memory[to_low:to_high].data)
    return _Strided(stored.begin, source, region, box, memory.reshape(box.sizes))


def _in_bytes(box: Box, size: int) -> Box:
    """The same box with the bytes of an element as a last axis."""
    return Box((*box.offsets, 0), (*box.sizes, size))


@dataclass(frozen=True, slots=True)
class _Strided:
    """A part that lies in several runs in the file or in the target. Boxes are in bytes; begin: of `source`."""

    begin: int
    source: Box
    region: Box
    box: Box
    target: Bytes

    def chunks(self) -> Iterable[int]:
        # In a gap that is shorter than a chunk there is no whole chunk, so all of those around it are wanted.
        begins, length = _runs(self.source, self.region, _Strips.shares_chunks)
        found: dict[int, None] = {}
        for begin in (begins + self.begin).tolist():
            found.update(dict.fromkeys(range(begin // CHUNK_BYTES, -(-(begin + length) // CHUNK_BYTES))))
        return found

    def runs(self, low: int, high: int) -> list[Runs]:
        found: list[Runs] = []
        for part in between(self.source, self.region, low - self.begin, high - self.begin):
            begins, length = _runs(self.source, part, _Strips.is_cheap)
            found.append((begins + self.begin, length))
        return found

    def copy(self, low: int, content: Bytes) -> None:
        strides = _strides(self.source)
        for part in between(self.source, self.region, low - self.begin, low + len(content) - self.begin):
            first = self.begin + span(self.source, part)[0] - low
            self.target[_within(self.box, part)] = np.ndarray(part.sizes, np.uint8, content, first, strides)


FilePart = FilePiece | _Strided
"""What one slice wants of a file. Positions are bytes from the file's start."""


@dataclass(frozen=True, slots=True)
class _Strips:
    """`count` runs of `length` bytes, each `stride` bytes behind the one before. wanted: how many bytes in all."""

    count: int
    length: int
    stride: int
    wanted: int

    @property
    def joined(self) -> int:
        """Bytes from the first to the last."""
        return (self.count - 1) * self.stride + self.length

    def is_cheap(self) -> bool:
        """Whether to read the gaps costs nothing: there is next to nothing in them, or the pages are wanted anyway."""
        return self.joined <= self.wanted * EXCESS_MAX or self.stride <= PAGE_BYTES

    def shares_chunks(self) -> bool:
        """Whether a chunk in between always has something wanted: no gap has room for a whole one."""
        return self.stride - self.length < CHUNK_BYTES


def _runs(outer: Box, region: Box, join: Callable[[_Strips], bool]) -> Runs:
    """Runs of `region` in the memory of `outer`, from its start; those for which `join` is true are one."""
    begins = np.zeros(1, np.int64)
    length = wanted = 1
    joining = True
    for stride, at, base, count in zip(
        reversed(_strides(outer)),
        reversed(region.offsets),
        reversed(outer.offsets),
        reversed(region.sizes),
        strict=True,
    ):
        row = _Strips(count, length, stride, wanted * count)
        joining = joining and (count == 1 or stride == length or join(row))
        if joining:
            length, wanted = row.joined, row.wanted
        elif count > 1:
            begins = (np.arange(count)[:, None] * stride + begins).ravel()
        begins = begins + (at - base) * stride
    return begins, length


def _strides(box: Box) -> tuple[int, ...]:
    return tuple(math.prod(box.sizes[axis + 1 :]) for axis in range(len(box.sizes)))


def _within(box: Box, region: Box) -> tuple[slice, ...]:
    starts = [at - base for at, base in zip(region.offsets, box.offsets, strict=True)]
    return tuple(slice(at, at + size) for at, size in zip(starts, region.sizes, strict=True))
