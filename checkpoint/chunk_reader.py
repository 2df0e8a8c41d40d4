"""Reading a file chunk by chunk straight into the memory where the bytes belong, each chunk checked on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from lastwords.checkpoint.direct_io import CHUNK_BYTES
from lastwords.checkpoint.document import damage
from lastwords.checkpoint.part import FileEntry
from lastwords.checkpoint.partfile import open_part_file
from lastwords.checkpoint.system import Os, close, storage_errors
from lastwords.errors import FormatError

_READERS = 2
"""The caller's thread and one more: while one copies out of the page cache, the other hashes, and the reverse."""

_PIECES_MAX = 512
"""preadv takes 1024 pieces (IOV_MAX); a chunk with more tensors than this is read whole and copied out."""

OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [begin, end) of the file and where they go."""

    begin: int
    end: int
    target: memoryview


def read_file(
    directory: Path, entry: FileEntry, pieces: Sequence[Piece] | None, os: Os, on_bytes: OnBytes | None
) -> int:
    """Reads the pieces (sorted by `begin`, without overlap), or the whole file into nothing if None.

    Returns how many bytes were read; `on_bytes` hears of them so far, on the caller's thread. FormatError if a
    checksum is wrong; the targets then hold rubbish.
    """
    fd = open_part_file(directory, entry, os)
    try:
        with storage_errors("reading", directory / entry.path):
            os.advise_sequential(fd)
        return _Reading(fd, directory / entry.path, entry, _plan(entry, pieces), os).run(on_bytes)
    finally:
        close(fd, directory / entry.path, os)


_Step = tuple[int, list[Piece]]


def _plan(entry: FileEntry, pieces: Sequence[Piece] | None) -> list[_Step]:
    """Chunks to read, each with the parts of pieces in it."""
    if pieces is None:
        return [(index, []) for index in range(len(entry.chunks))]
    plan: dict[int, list[Piece]] = {}
    for piece in pieces:
        for index in range(piece.begin // CHUNK_BYTES, -(-piece.end // CHUNK_BYTES)):
            begin, end = max(piece.begin, index * CHUNK_BYTES), min(piece.end, (index + 1) * CHUNK_BYTES)
            part = Piece(begin, end, piece.target[begin - piece.begin : end - piece.begin])
            plan.setdefault(index, []).append(part)
    return sorted(plan.items(), key=lambda step: step[0])


class _Reading:
    """One file being read by a few threads, each of which takes the next chunk when it has done its last."""

    def __init__(self, fd: int, path: Path, entry: FileEntry, plan: list[_Step], os: Os) -> None:
        self._fd = fd
        self._path = path
        self._entry = entry
        self._steps = iter(plan)
        self._readers = min(_READERS, len(plan))
        self._os = os
        self._lock = threading.Lock()
        self._done = 0
        self._error: BaseException | None = None

    def run(self, on_bytes: OnBytes | None) -> int:
        others = [
            threading.Thread(target=self._work, args=(None,), name="lastwords-read", daemon=True)
            for _ in range(1, self._readers)
        ]
        for thread in others:
            thread.start()
        self._work(on_bytes)
        for thread in others:
            thread.join()
        if self._error is not None:
            raise self._error
        if on_bytes is not None:
            on_bytes(self._done)
        return self._done

    def _work(self, on_bytes: OnBytes | None) -> None:
        scratch = np.empty(CHUNK_BYTES, np.uint8).data
        try:
            while self._error is None:
                with self._lock:
                    step = next(self._steps, None)
                if step is None:
                    return
                count = self._read_chunk(*step, scratch)
                with self._lock:
                    self._done += count
                if on_bytes is not None:
                    on_bytes(self._done)
        except BaseException as error:  # a thread's outermost loop: `run` raises it in the caller's thread
            with self._lock:
                self._error = self._error or error

    def _read_chunk(self, index: int, pieces: list[Piece], scratch: memoryview) -> int:
        start = index * CHUNK_BYTES
        length = min(CHUNK_BYTES, self._entry.bytes - start)
        views = [scratch[:length]] if len(pieces) > _PIECES_MAX else _views(pieces, start, length, scratch)
        with storage_errors("reading", self._path):
            self._fill(views, start)
        if len(views) == 1:
            digest = xxhash.xxh3_64_hexdigest(views[0])
        else:
            state = xxhash.xxh3_64()
            for view in views:
                state.update(view)
            digest = state.hexdigest()
        if digest != self._entry.chunks[index]:
            raise FormatError(damage(self._path, f"its bytes {start} to {start + length} do not fit their checksum"))
        if len(pieces) > _PIECES_MAX:
            for piece in pieces:
                piece.target[:] = scratch[piece.begin - start : piece.end - start]
        return length

    def _fill(self, views: list[memoryview], offset: int) -> None:
        rest = list(views)
        while rest:
            count = self._os.preadv(self._fd, rest, offset)
            if count == 0:
                raise FormatError(damage(self._path, f"it ends at byte {offset}"))
            offset += count
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if rest and count:
                rest[0] = rest[0][count:]


def _views(pieces: list[Piece], start: int, length: int, scratch: memoryview) -> list[memoryview]:
    """Memory for a whole chunk in file order: the pieces' own, and scratch for what lies between them."""
    views: list[memoryview] = []
    at = start
    for piece in pieces:
        if piece.begin > at:
            views.append(scratch[at - start : piece.begin - start])
        views.append(piece.target)
        at = piece.end
    if at < start + length:
        views.append(scratch[at - start : length])
    return views
