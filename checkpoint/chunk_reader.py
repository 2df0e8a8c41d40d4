"""Reading a file chunk by chunk straight into the memory where the bytes belong, each chunk checked on the way.

A chunk is read once, whatever is wanted of it: the parts that want some of it are served together.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from lastwords import threads
from lastwords.checkpoint.direct_io import CHUNK_BYTES, Bytes
from lastwords.checkpoint.document import damage
from lastwords.checkpoint.entries import FileEntry
from lastwords.checkpoint.partfile import open_part_file
from lastwords.checkpoint.system import Os, close, storage_errors
from lastwords.errors import FormatError, UnavailableError

_READERS = 2
"""The caller's thread and one more: while one copies out of the page cache, the other hashes, and the reverse."""

_PIECES_MAX = 512
"""preadv takes 1024 pieces (IOV_MAX); a chunk with more tensors than this is read whole and copied out."""

EXCESS_MAX = 1.05
"""Where only what is wanted is read, this much is read for each wanted byte at most, to save calls and gain a check."""

OnBytes = Callable[[int], None]
Runs = tuple[npt.NDArray[np.int64], int]
"""First bytes of runs, in order, and the length that all of them have."""


class Part(Protocol):
    """What one slice wants of a file. Positions are bytes from the file's start. Any thread may ask it."""

    def chunks(self) -> Iterable[int]:
        """Numbers of the chunks of which something is wanted."""

    def runs(self, low: int, high: int) -> list[Runs]:
        """What is to be read of [low, high) so that `copy` finds all that is wanted; runs do not overlap."""

    def copy(self, low: int, content: Bytes) -> None:
        """Copies what is wanted out of `content`, the file's bytes from `low` on."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [begin, end) of the file and where they go: the simplest part."""

    begin: int
    end: int
    target: memoryview

    def chunks(self) -> Iterable[int]:
        return range(self.begin // CHUNK_BYTES, -(-self.end // CHUNK_BYTES))

    def within(self, low: int, high: int) -> Piece:
        """What of it lies in [low, high)."""
        begin, end = max(self.begin, low), min(self.end, high)
        return Piece(begin, end, self.target[begin - self.begin : end - self.begin])

    def runs(self, low: int, high: int) -> list[Runs]:
        inner = self.within(low, high)
        return [(np.array([inner.begin]), inner.end - inner.begin)]

    def copy(self, low: int, content: Bytes) -> None:
        inner = self.within(low, low + len(content))
        inner.target[:] = content[inner.begin - low : inner.end - low].data


@dataclass(slots=True)
class Count:
    """Bytes that were asked of the file system, and those of them that were held against a checksum."""

    read: int = 0
    checked: int = 0


@dataclass(slots=True)
class Kept:
    """The last chunk of a file that was read and checked, for a later reading that begins in it. index: -1 for none."""

    index: int = -1
    content: Bytes = field(default_factory=lambda: np.empty(CHUNK_BYTES, np.uint8))


def read_file(path: Path, entry: FileEntry, parts: Sequence[Part] | None, os: Os, on_bytes: OnBytes | None) -> int:
    """Reads all chunks of which a part wants something, or the whole file into nothing if None; every one is checked.

    Returns how many bytes were read; `on_bytes` hears of them so far, on the caller's thread. FormatError if a
    checksum is wrong; the targets then hold rubbish.
    """
    fd = open_part_file(path, entry, os)
    try:
        with storage_errors("reading", path):
            os.advise_sequential(fd)
        return read_parts(fd, path, entry, parts, checked=True, os=os, on_bytes=on_bytes).read
    finally:
        close(fd, path, os)


def read_parts(
    fd: int,
    path: Path,
    entry: FileEntry | None,
    parts: Sequence[Part] | None,
    *,
    checked: bool,
    os: Os,
    on_bytes: OnBytes | None = None,
    kept: Kept | None = None,
) -> Count:
    """The same for a file that is open, and with what was counted.

    checked=False: only what is wanted is read, and a chunk of which nearly all is wanted is read whole and checked.
    entry: None if no checksums are known; nothing is checked then. kept (checked=True only): the chunk in it is not
    read again, and the last one that is read goes into it.
    """
    plan = _plan(entry, parts)
    if kept is not None and plan and plan[0][0] == kept.index:
        for part in plan.pop(0)[1]:
            part.copy(kept.index * CHUNK_BYTES, kept.content)
    return _Reading(fd, path, entry, plan, checked, os, kept).run(on_bytes)


_Step = tuple[int, list[Part]]


def _plan(entry: FileEntry | None, parts: Sequence[Part] | None) -> list[_Step]:
    """Chunks to read, each with the parts that want something of it."""
    if parts is None:
        assert entry is not None, "of a file without checksums there is nothing to be read into nothing"
        return [(index, []) for index in range(len(entry.chunks))]
    plan: dict[int, list[Part]] = {}
    for part in parts:
        for index in part.chunks():
            plan.setdefault(index, []).append(part)
    return sorted(plan.items(), key=lambda step: step[0])


class _Reading:
    """One file being read by a few threads, each of which takes the next chunk when it has done its last."""

    def __init__(
        self,
        fd: int,
        path: Path,
        entry: FileEntry | None,
        plan: list[_Step],
        checked: bool,
        os: Os,
        kept: Kept | None = None,
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

    def _read_chunk(self, index: int, parts: list[Part], scratch: Bytes) -> tuple[int, int]:
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


def _disjoint(parts: list[Part], start: int, end: int) -> list[Piece] | None:
    """All parts within [start, end) in file order, if they are few pieces that share no byte: no copies then."""
    if len(parts) > _PIECES_MAX:
        return None
    pieces: list[Piece] = []
    for part in parts:
        if not isinstance(part, Piece):
            return None
        pieces.append(part.within(start, end))
    pieces.sort(key=lambda piece: piece.begin)
    return pieces if all(a.end <= b.begin for a, b in itertools.pairwise(pieces)) else None


def _joined(parts: list[Part], start: int, end: int) -> list[tuple[int, int]]:
    """What the parts want of [start, end), in order; runs that touch or overlap are one."""
    found = [run for part in parts for run in part.runs(start, end)]
    begins = np.concatenate([begins for begins, _ in found])
    ends = np.concatenate([begins + length for begins, length in found])
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], begins[1:] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return list(zip(begins[first].tolist(), ends[last].tolist(), strict=True))


def _views(pieces: list[Piece], start: int, end: int, scratch: memoryview) -> list[memoryview]:
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
