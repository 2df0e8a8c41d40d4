"""Reading slices of stored tensors into memory of another layout; every byte is checked on the way.

What lies side by side both in the file and in the target goes straight there. All else is read in slabs of a few MiB
and copied, so no tensor is ever whole in memory beside its target. Checksums cover chunks of 4 MiB, so at either end of
a slice up to a chunk more is read than is kept; a slice of columns reads what lies between them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lastwords.checkpoint.boxes import Box, is_run, slabs, span
from lastwords.checkpoint.chunk_reader import Piece
from lastwords.checkpoint.format import DTYPE_BITS
from lastwords.checkpoint.load import Checkpoint
from lastwords.checkpoint.reshard_plan import Slice

SLAB_BYTES = 32 << 20
"""Eight chunks: what is read twice at the ends of a slab is then an eighth at most."""


@dataclass(frozen=True, slots=True)
class Target:
    """Memory for `box` of a tensor, in C order, and the slices that fill it."""

    box: Box
    memory: memoryview
    slices: Sequence[Slice]


def read_slices(checkpoint: Checkpoint, targets: Iterable[Target]) -> int:
    """Fills all targets; returns the bytes that were read. FormatError if a checksum is wrong: they hold rubbish then.

    The caller has planned the slices with `reshard_plan`, so that each target's box is covered.
    """
    straight: dict[str, list[Piece]] = {}
    staged: list[tuple[Target, Slice]] = []
    for target in targets:
        for piece in target.slices:
            if is_run(piece.shard.box, piece.region) and is_run(target.box, piece.region):
                file, begin, size = _place(checkpoint, piece)
                low, high = (at * size for at in span(piece.shard.box, piece.region))
                to_low, to_high = (at * size for at in span(target.box, piece.region))
                straight.setdefault(file, []).append(Piece(begin + low, begin + high, target.memory[to_low:to_high]))
            else:
                staged.append((target, piece))
    done = 0
    for file in sorted(straight):
        for disjoint in _passes(straight[file]):
            done += checkpoint.read_pieces(file, disjoint)
    for target, piece in staged:
        done += _read_staged(checkpoint, target, piece)
    return done


def _read_staged(checkpoint: Checkpoint, target: Target, piece: Slice) -> int:
    source = piece.shard.box
    file, begin, size = _place(checkpoint, piece)
    into = np.frombuffer(target.memory, np.uint8).reshape(*target.box.sizes, size)
    done = 0
    for region in slabs(source, piece.region, SLAB_BYTES // size):
        low, high = span(source, region)
        buffer = np.empty((high - low) * size, np.uint8)
        done += checkpoint.read_pieces(file, [Piece(begin + low * size, begin + high * size, buffer.data)])
        into[_within(target.box, region)] = _strided(buffer, source, region, size)
    return done


def _strided(buffer: Any, source: Box, region: Box, size: int) -> Any:
    """`buffer` begins with the region's first element and is laid out like `source`."""
    strides = [size]
    for width in reversed(source.sizes[1:]):
        strides.insert(0, strides[0] * width)
    if not source.sizes:
        strides = []
    return np.lib.stride_tricks.as_strided(buffer, (*region.sizes, size), (*strides, 1), writeable=False)


def _within(box: Box, region: Box) -> tuple[slice, ...]:
    starts = [at - base for at, base in zip(region.offsets, box.offsets, strict=True)]
    return tuple(slice(at, at + size) for at, size in zip(starts, region.sizes, strict=True))


def _place(checkpoint: Checkpoint, piece: Slice) -> tuple[str, int, int]:
    """File, first byte of the shard in it, bytes of an element."""
    file, begin = checkpoint.place(piece.shard.name)
    return file, begin, DTYPE_BITS[checkpoint.spec(piece.shard.name).dtype] // 8


def _passes(pieces: list[Piece]) -> list[list[Piece]]:
    """Lists of pieces without overlap: two targets may want the same bytes."""
    passes: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: (piece.begin, piece.end)):
        room = next((one for one in passes if one[-1].end <= piece.begin), None)
        if room is None:
            passes.append([piece])
        else:
            room.append(piece)
    return passes
