"""A unit cut into shares, so that several of its holders write it together; and shares put together again. Pure.

Every writer computes all shares out of the unit's table, and writes its own. `plan_sum` is a checksum of all of them:
where it is the same in every share, and no share is missing, each element is in exactly one of them.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import xxhash

from lastwords.checkpoint.format import TensorSpec
from lastwords.errors import FormatError
from lastwords.vocabulary import Share

CUT_LEAST = 16
"""Where a share ends inside a tensor, that is cut, unless it is smaller than this part of a share: it stays whole."""


class ShareCut(NamedTuple):
    """What a share has of one tensor. tensor: its place in the unit; begin, end: bytes of it. spec: as stored."""

    tensor: int
    spec: TensorSpec
    begin: int
    end: int


class StoredPiece(NamedTuple):
    """Where a part of a tensor is stored: its place in the tensor (in elements, from the tensor's own first), and as
    what it stands in which share."""

    offsets: tuple[int, ...]
    share: int
    spec: TensorSpec


class WholeTensor(NamedTuple):
    """A tensor of a unit that was put together again."""

    spec: TensorSpec
    pieces: tuple[StoredPiece, ...]


def split(unit: str, specs: Sequence[TensorSpec], count: int) -> list[list[ShareCut]]:
    """All shares of a unit. Buffers, extras, and the values of param groups are in the first one.

    All other tensors, in the order of their names, are laid end to end and cut into shares of equal length, the first
    one's with what it has already. So a share has whole tensors, and at either end perhaps a slice of one. A slice is
    taken along the first axis that is longer than 1, so that its bytes lie side by side.

    >>> rows = TensorSpec("unit/a/model/w", "U8", (10, 3))
    >>> [[(cut.spec.name, cut.spec.shape, cut.spec.offsets) for cut in share] for share in split("a", [rows], 2)]
    [[('unit/a/0of2/model/w', (5, 3), (0, 0))], [('unit/a/1of2/model/w', (5, 3), (5, 0))]]
    """
    shares: list[list[ShareCut]] = [[] for _ in range(count)]
    moving = sorted((index for index, spec in enumerate(specs) if _may_move(unit, spec)), key=lambda i: specs[i].name)
    for index, spec in enumerate(specs):
        if not _may_move(unit, spec):
            shares[0].append(_cut(unit, specs, index, (0, spec.nbytes), Share(unit, 0, count)))
    kept = sum(cut.spec.nbytes for cut in shares[0])
    starts = list(itertools.accumulate((specs[index].nbytes for index in moving), initial=0))
    ends = _ends([specs[index] for index in moving], starts, kept, count)
    for index, at in zip(moving, starts, strict=False):
        size = specs[index].nbytes
        inside = ends[bisect.bisect_right(ends, at) : bisect.bisect_left(ends, at + size)]
        for low, high in itertools.pairwise((at, *dict.fromkeys(inside), at + size)):
            number = bisect.bisect_right(ends, low)
            shares[number].append(_cut(unit, specs, index, (low - at, high - at), Share(unit, number, count)))
    return shares


def _may_move(unit: str, spec: TensorSpec) -> bool:
    """What may differ between holders, or belongs to what is no tensor, stays with that."""
    name = spec.name.removeprefix(f"unit/{unit}/")
    return name.startswith("model/") or (name.startswith("optim/") and not name.startswith("optim/~"))


def _ends(specs: Sequence[TensorSpec], starts: Sequence[int], kept: int, count: int) -> list[int]:
    """Where each share but the last one ends, in bytes of the tensors laid end to end."""
    total = starts[-1]
    first = max(0, (total + kept) // count - kept)
    rest = total - first
    wanted = [first + rest * number // (count - 1) for number in range(count - 1)]
    return [_possible(specs, starts, end, rest // (count - 1)) for end in wanted]


def _possible(specs: Sequence[TensorSpec], starts: Sequence[int], end: int, share_bytes: int) -> int:
    """The place next to `end` where a share can end."""
    index = bisect.bisect_right(starts, end) - 1
    if starts[index] == end:
        return end
    at, spec = starts[index], specs[index]
    axis = cut_axis(spec.shape)
    if axis is None or spec.nbytes * CUT_LEAST < share_bytes:
        return at if end - at <= spec.nbytes // 2 else at + spec.nbytes
    row_bytes = spec.nbytes // spec.shape[axis]
    return at + (end - at + row_bytes // 2) // row_bytes * row_bytes


def cut_axis(shape: Sequence[int]) -> int | None:
    """The axis along which slices are contiguous; None if there is a single element, or none.

    >>> cut_axis((4, 2)), cut_axis((1, 2)), cut_axis((1, 1)), cut_axis(()), cut_axis((3, 0))
    (0, 1, None, None, None)
    """
    if not math.prod(shape):
        return None
    return next((axis for axis, size in enumerate(shape) if size > 1), None)


def _cut(unit: str, specs: Sequence[TensorSpec], index: int, run: tuple[int, int], share: Share) -> ShareCut:
    spec, (begin, end) = specs[index], run
    name = f"unit/{share}/{spec.name.removeprefix(f'unit/{unit}/')}"
    if (begin, end) == (0, spec.nbytes):
        return ShareCut(index, replace(spec, name=name), begin, end)
    axis = cut_axis(spec.shape)
    assert axis is not None
    row_bytes = spec.nbytes // spec.shape[axis]
    shape, offsets = list(spec.shape), list(spec.offsets)
    shape[axis], offsets[axis] = (end - begin) // row_bytes, offsets[axis] + begin // row_bytes
    return ShareCut(index, replace(spec, name=name, shape=tuple(shape), offsets=tuple(offsets)), begin, end)


def plan_sum(shares: Iterable[Iterable[TensorSpec]]) -> str:
    """Checksum of what is in each share, xxh3_64 as hexadecimal."""
    said = [
        [(spec.name, spec.dtype, spec.shape, spec.global_shape, spec.offsets) for spec in sorted(specs, key=_by_name)]
        for specs in shares
    ]
    return xxhash.xxh3_64_hexdigest(json.dumps(said, separators=(",", ":")).encode())


def _by_name(spec: TensorSpec) -> str:
    return spec.name


def joined(unit: str, shares: Sequence[Sequence[TensorSpec]]) -> dict[str, WholeTensor]:
    """The unit's tensors by their names, each with its pieces in their order, out of all its shares.

    FormatError where pieces of a tensor are not slices that follow each other.
    """
    found: dict[str, list[tuple[int, TensorSpec]]] = {}
    for number, specs in enumerate(shares):
        prefix = f"unit/{Share(unit, number, len(shares))}/"
        for spec in specs:
            if not spec.name.startswith(prefix):
                raise FormatError(f"tensor {spec.name!r} is listed under {prefix[:-1]}")
            found.setdefault(spec.name.removeprefix(prefix), []).append((number, spec))
    return {f"unit/{unit}/{name}": _whole(f"unit/{unit}/{name}", stored) for name, stored in found.items()}


def _whole(name: str, stored: Sequence[tuple[int, TensorSpec]]) -> WholeTensor:
    stored = sorted(stored, key=lambda one: one[1].offsets)
    if len({len(spec.shape) for _, spec in stored}) > 1:
        raise FormatError(f"the slices of {name!r} do not make up one tensor")
    first, shape = stored[0][1], list(stored[0][1].shape)
    axis = next((axis for axis, at in enumerate(stored[-1][1].offsets) if at != first.offsets[axis]), 0)
    pieces = [StoredPiece((0,) * len(shape), stored[0][0], first)]
    for number, spec in stored[1:]:
        at = (*(0,) * axis, shape[axis], *(0,) * (len(shape) - axis - 1)) if shape else ()
        follows = tuple(base + more for base, more in zip(first.offsets, at, strict=True))
        same = (spec.dtype, spec.global_shape) == (first.dtype, first.global_shape)
        if not shape or not same or not spec.nbytes or spec.offsets != follows or not _alike(spec, first, axis):
            raise FormatError(f"the slices of {name!r} do not make up one tensor")
        shape[axis] += spec.shape[axis]
        pieces.append(StoredPiece(at, number, spec))
    if len(pieces) > 1 and axis != cut_axis(shape):
        raise FormatError(f"the slices of {name!r} do not make up one tensor")
    return WholeTensor(replace(first, name=name, shape=tuple(shape)), tuple(pieces))


def _alike(spec: TensorSpec, other: TensorSpec, axis: int) -> bool:
    """Whether they have the same shape on all other axes."""
    return all(axis == place or size == other.shape[place] for place, size in enumerate(spec.shape))
