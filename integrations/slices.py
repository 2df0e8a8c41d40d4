"""Boxes of stored tensors, read without what lies around them. Torch-free.

A box is read in runs of neighbouring bytes. Where the gap between two runs is no larger than a memory page, it is read
too, since the kernel would fetch it anyway. A 4 MiB chunk that was read from its first byte to its last in one go is
held against its checksum; a chunk of which only a part was wanted cannot be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from lastwords.checkpoint.direct_io import CHUNK_BYTES
from lastwords.checkpoint.document import damage
from lastwords.checkpoint.load import Checkpoint
from lastwords.checkpoint.part import FileEntry
from lastwords.checkpoint.partfile import open_part_file
from lastwords.checkpoint.system import REAL_OS, Os, close, storage_errors
from lastwords.errors import FormatError

GAP_BYTES_MAX = 4096
"""A page: between runs that are closer than this nothing is saved by leaving the gap out."""

Bytes = npt.NDArray[np.uint8]
Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One stored tensor as a box of a whole: its name in the file, its offsets and shape in elements."""

    stored: str
    offsets: Sizes
    shape: Sizes


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor as the training knows it, put together from pieces that cover it without overlap.

    name: "model/FQN", "buffer/FQN" or "optim/FQN/KEY". dtype: torch's name, such as "float32".
    """

    name: str
    dtype: str
    shape: Sizes
    element_bytes: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.element_bytes


def overlap(
    one_offsets: Sequence[int], one_sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> tuple[Sizes, Sizes] | None:
    """Offsets and sizes of what two boxes share, in elements; None if that is nothing.

    >>> overlap((0, 0), (4, 4), (2, 3), (4, 4))
    ((2, 3), (2, 1))
    >>> overlap((0,), (4,), (4,), (4,)) is None
    True
    """
    begins = tuple(max(one, other) for one, other in zip(one_offsets, other_offsets, strict=True))
    ends = [
        min(one + size, other + other_size)
        for one, size, other, other_size in zip(one_offsets, one_sizes, other_offsets, other_sizes, strict=True)
    ]
    sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return None if any(size <= 0 for size in sizes) else (begins, sizes)


class SliceReader:
    """Reads boxes out of an open checkpoint. For one thread; `close` when done, or use it in a `with` statement.

    bytes_read: what was asked of the file system so far. bytes_checked: what was held against a checksum.
    """

    def __init__(self, checkpoint: Checkpoint, os: Os = REAL_OS) -> None:
        self.checkpoint = checkpoint
        self.bytes_read = 0
        self.bytes_checked = 0
        self._os = os
        self._files: dict[str, _OpenFile] = {}

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files; the reader may be used again and opens them anew."""
        while self._files:
            self._files.popitem()[1].close()

    def read(self, whole: Whole, offsets: Sequence[int], sizes: Sequence[int], into: memoryview) -> None:
        """Copies the box `sizes` at `offsets` of `whole` into contiguous, writable memory of exactly its size.

        FormatError if a checksum is wrong or a file has changed, IncompleteError if one is missing, StorageError.
        """
        target = np.frombuffer(into, np.uint8).reshape((*sizes, whole.element_bytes))
        for piece in whole.pieces:
            shared = overlap(offsets, sizes, piece.offsets, piece.shape)
            if shared is None:
                continue
            begins, lengths = shared
            here = tuple(
                slice(begin - at, begin - at + length)
                for begin, at, length in zip(begins, offsets, lengths, strict=True)
            )
            inside = [begin - at for begin, at in zip(begins, piece.offsets, strict=True)]
            self.read_piece(piece, whole.element_bytes, inside, lengths, target[here])

    def read_piece(
        self, piece: Piece, element_bytes: int, inside: Sequence[int], lengths: Sequence[int], target: Bytes
    ) -> None:
        """Copies the box `lengths` at `inside` of one stored tensor into `target`, shaped (*lengths, element_bytes)."""
        if not target.flags.c_contiguous:
            between = np.empty(target.shape, np.uint8)
            self.read_piece(piece, element_bytes, inside, lengths, between)
            target[...] = between
            return
        entry, begin, _ = self.checkpoint.file_range(piece.stored)
        file = self._files.get(entry.path)
        if file is None:
            file = self._files[entry.path] = _OpenFile(self, entry, self._os)
        dims, at, count = [*piece.shape, element_bytes], [*inside, 0], [*lengths, element_bytes]
        while len(dims) > 1 and count[-1] == dims[-1]:  # whole rows: one longer run
            size = dims.pop()
            at.pop()
            count.pop()
            dims[-1], at[-1], count[-1] = dims[-1] * size, at[-1] * size, count[-1] * size
        flat = target.reshape(count)
        if len(dims) == 1:
            file.read_run(begin + at[0], flat)
            return
        strides = [math.prod(dims[axis + 1 :]) for axis in range(len(dims))]
        for outer in np.ndindex(*count[:-2]):
            start = begin + sum((at[axis] + index) * strides[axis] for axis, index in enumerate(outer))
            file.read_rows(start + at[-2] * dims[-1] + at[-1], dims[-1], flat[outer])


class _OpenFile:
    """One .ckpt file and the checksum of the chunk that is being read."""

    def __init__(self, reader: SliceReader, entry: FileEntry, os: Os) -> None:
        self._reader = reader
        self._entry = entry
        self._path = reader.checkpoint.path / entry.path
        self._os = os
        self._fd = open_part_file(reader.checkpoint.path, entry, os)
        self._at = -1
        self._sum: xxhash.xxh3_64 | None = None

    def close(self) -> None:
        close(self._fd, self._path, self._os)

    def read_rows(self, start: int, stride: int, rows: Bytes) -> None:
        """`rows`, of equal length, each `stride` bytes behind the one before."""
        length = rows.shape[1]
        if stride - length > GAP_BYTES_MAX:
            for index in range(rows.shape[0]):
                self.read_run(start + index * stride, rows[index])
            return
        most = max(1, CHUNK_BYTES // stride)
        for first in range(0, rows.shape[0], most):
            block = rows[first : first + most]
            span = np.empty((len(block) - 1) * stride + length, np.uint8)
            self.read_run(start + first * stride, span)
            block[...] = np.lib.stride_tricks.as_strided(span, block.shape, (stride, 1), writeable=False)

    def read_run(self, offset: int, target: Bytes) -> None:
        """Neighbouring bytes, in steps that end where chunks end, so that a chunk is checked while it is hot."""
        view = target.reshape(-1).data
        while len(view):
            part = view[: CHUNK_BYTES - offset % CHUNK_BYTES]
            done = 0
            while done < len(part):
                with storage_errors("reading", self._path):
                    got = self._os.preadv(self._fd, [part[done:]], offset + done)
                if got == 0:
                    raise FormatError(damage(self._path, f"it ends at byte {offset + done}"))
                done += got
            self._reader.bytes_read += len(part)
            self._check(offset, part)
            offset += len(part)
            view = view[len(part) :]

    def _check(self, offset: int, part: memoryview) -> None:
        index, inside = divmod(offset, CHUNK_BYTES)
        if inside == 0:
            self._sum = xxhash.xxh3_64()
        elif offset != self._at:
            self._sum = None
        self._at = offset + len(part)
        if self._sum is None:
            return
        self._sum.update(part)
        end = min((index + 1) * CHUNK_BYTES, self._entry.bytes)
        if self._at == end:
            start = index * CHUNK_BYTES
            if self._sum.hexdigest() != self._entry.chunks[index]:
                raise FormatError(damage(self._path, f"its bytes {start} to {end} do not fit their checksum"))
            self._reader.bytes_checked += end - start
            self._sum = None
