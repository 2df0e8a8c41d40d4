"""Boxes of a tensor: which elements of the whole a shard has, what two shards have in common, where that lies.

Pure functions over whole numbers; sizes and offsets are in elements of the whole tensor, never in bytes.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lastwords.errors import FormatError, IncompleteError, MismatchError


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements at `offsets`, `sizes` of them along each dimension. A scalar has no dimension and one element."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes) or min((*self.offsets, *self.sizes), default=0) < 0:
            raise FormatError(f"no box has the offsets {self.offsets} and the sizes {self.sizes}")

    @property
    def elements(self) -> int:
        """Number of elements; 0 for a shard that an uneven division has left empty."""
        return math.prod(self.sizes)

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether all of it lies in a tensor of this shape.

        >>> Box((2,), (2,)).inside((4,)), Box((3,), (2,)).inside((4,)), Box((0,), (1,)).inside((1, 1))
        (True, False, False)
        """
        ends = zip(self.offsets, self.sizes, shape, strict=False)
        return len(shape) == len(self.sizes) and all(at + size <= whole for at, size, whole in ends)

    def __str__(self) -> str:
        """As it is written in Python: `[0:2, 4:8]`."""
        ranges = (f"{at}:{at + size}" for at, size in zip(self.offsets, self.sizes, strict=True))
        return f"[{', '.join(ranges)}]"


def whole(shape: Sequence[int]) -> Box:
    """The box of an undivided tensor.

    >>> str(whole((2, 3)))
    '[0:2, 0:3]'
    """
    return Box((0,) * len(shape), tuple(shape))


def overlap(one: Box, other: Box) -> Box | None:
    """Elements that both boxes have; None if there are none. FormatError if they differ in dimensions.

    >>> overlap(Box((0,), (4,)), Box((3,), (4,)))
    Box(offsets=(3,), sizes=(1,))
    >>> overlap(Box((0,), (4,)), Box((4,), (4,))) is None
    True
    """
    if len(one.sizes) != len(other.sizes):
        raise FormatError(f"{one} and {other} are not boxes of one tensor: their dimensions differ")
    begin = tuple(max(a, b) for a, b in zip(one.offsets, other.offsets, strict=True))
    ends = (min(a, b) for a, b in zip(_ends(one), _ends(other), strict=True))
    sizes = tuple(end - at for at, end in zip(begin, ends, strict=True))
    return Box(begin, sizes) if all(size > 0 for size in sizes) else None


def without(box: Box, taken: Box) -> list[Box]:
    """What is left of `box` when the elements of `taken` are gone: disjoint boxes, in order of the first dimension.

    >>> [str(rest) for rest in without(Box((0, 0), (4, 4)), Box((1, 1), (2, 9)))]
    ['[0:1, 0:4]', '[1:3, 0:1]', '[3:4, 0:4]']
    """
    common = overlap(box, taken)
    if common is None:
        return [box] if box.elements else []
    before, after, rest = [], [], box
    for axis in range(len(box.sizes)):
        low, high = common.offsets[axis], common.offsets[axis] + common.sizes[axis]
        begin, end = rest.offsets[axis], rest.offsets[axis] + rest.sizes[axis]
        if begin < low:
            before.append(_narrowed(rest, axis, begin, low))
        if high < end:
            after.append(_narrowed(rest, axis, high, end))
        rest = _narrowed(rest, axis, low, high)
    return [*before, *reversed(after)]


def uncovered(box: Box, covers: Sequence[Box]) -> list[Box]:
    """The parts of `box` that none of `covers` has.

    >>> [str(rest) for rest in uncovered(Box((0,), (9,)), [Box((0,), (3,)), Box((6,), (9,))])]
    ['[3:6]']
    """
    left = [box] if box.elements else []
    for cover in covers:
        left = [rest for part in left for rest in without(part, cover)]
    return left


def is_run(outer: Box, region: Box) -> bool:
    """Whether the elements of `region` lie side by side in the memory of `outer` (C order).

    >>> is_run(Box((0, 0), (4, 4)), Box((1, 0), (2, 4))), is_run(Box((0, 0), (4, 4)), Box((0, 1), (2, 2)))
    (True, False)
    """
    partial = [axis for axis, size in enumerate(region.sizes) if size != outer.sizes[axis]]
    return not partial or all(size == 1 for size in region.sizes[: partial[-1]])


def span(outer: Box, region: Box) -> tuple[int, int]:
    """First element of `region` in the memory of `outer`, and the one behind its last; `region` is not empty.

    >>> span(Box((0, 0), (4, 4)), Box((1, 1), (2, 2)))
    (5, 11)
    """
    first, last, stride = 0, 0, 1
    for axis in reversed(range(len(outer.sizes))):
        at = region.offsets[axis] - outer.offsets[axis]
        first += at * stride
        last += (at + region.sizes[axis] - 1) * stride
        stride *= outer.sizes[axis]
    return first, last + 1


def between(outer: Box, region: Box, first: int, last: int) -> list[Box]:
    """The parts of `region` whose elements lie at [first, last) in the memory of `outer`, in C order.

    >>> [str(part) for part in between(Box((0, 0), (4, 4)), Box((0, 1), (4, 2)), 2, 10)]
    ['[0:1, 2:3]', '[1:2, 1:3]', '[2:3, 1:2]']
    """
    low, high = span(outer, region)
    if first <= low and high <= last:
        return [region]
    if high <= first or last <= low:
        return []
    axis = next(axis for axis, size in enumerate(region.sizes) if size > 1)
    at, count, stride = region.offsets[axis], region.sizes[axis], math.prod(outer.sizes[axis + 1 :])
    width = high - low - (count - 1) * stride
    # Of those with one index on this axis, [begin, end) lie inside; the one before and the one after may in part.
    begin = min(max(-(-(first - low) // stride), 0), count)
    end = min(max((last - low - width) // stride + 1, 0), count)
    found: list[Box] = []
    if begin > 0:
        found += between(outer, _narrowed(region, axis, at + begin - 1, at + begin), first, last)
    if begin < end:
        found.append(_narrowed(region, axis, at + begin, at + end))
    if begin <= end < count:
        found += between(outer, _narrowed(region, axis, at + end, at + end + 1), first, last)
    return found


def slabs(box: Box, elements_max: int) -> Iterator[Box]:
    """`box` cut into boxes of at most `elements_max` elements (but one, at least), in C order.

    >>> [str(slab) for slab in slabs(Box((0, 0), (3, 4)), 9)], [str(slab) for slab in slabs(Box((2, 0), (1, 4)), 3)]
    (['[0:2, 0:4]', '[2:3, 0:4]'], ['[2:3, 0:3]', '[2:3, 3:4]'])
    """
    if box.elements <= max(elements_max, 1):
        if box.elements:
            yield box
        return
    axis = next(axis for axis, size in enumerate(box.sizes) if size > 1)
    rows = max(1, elements_max // math.prod(box.sizes[axis + 1 :]))
    end = box.offsets[axis] + box.sizes[axis]
    for at in range(box.offsets[axis], end, rows):
        yield from slabs(_narrowed(box, axis, at, min(at + rows, end)), elements_max)


class BoxIndex:
    """Boxes of one tensor, to be asked which of them share elements with another box. Empty ones never do.

    A level for each dimension: the ranges that boxes have there, sorted, and below each range the boxes that have it.
    So a question about a grid costs the logarithm of its size, and what is found. FormatError if dimensions differ.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = boxes
        self._dimensions = len(boxes[0].sizes) if boxes else 0
        odd = next((box for box in boxes if len(box.sizes) != self._dimensions), None)
        if odd is not None:
            raise FormatError(f"{boxes[0]} and {odd} are not boxes of one tensor: their dimensions differ")
        self._root = self._level([number for number, box in enumerate(boxes) if 0 not in box.sizes], 0)

    def overlapping(self, wanted: Box) -> list[int]:
        """Numbers of the boxes that share an element with `wanted`, sorted.

        >>> BoxIndex([Box((0,), (4,)), Box((4,), (4,)), Box((8,), (0,))]).overlapping(Box((3,), (9,)))
        [0, 1]
        """
        if not self.boxes or 0 in wanted.sizes:
            return []
        if len(wanted.sizes) != self._dimensions:
            raise FormatError(f"{wanted} is no box of a tensor with {self.boxes[0]}: their dimensions differ")
        levels = [self._root]
        for begin, end in zip(wanted.offsets, _ends(wanted), strict=True):
            levels = [
                below
                for starts, furthest, ends, inner in levels
                for place in range(bisect_right(furthest, begin), bisect_left(starts, end))
                if ends[place] > begin
                for below in (inner[place],)
            ]
        return sorted(itertools.chain.from_iterable(levels))

    def _level(self, numbers: list[int], axis: int) -> Any:
        """starts, furthest end so far, ends and what is below of each range; below the last dimension the numbers."""
        if axis == self._dimensions:
            return numbers
        groups: dict[tuple[int, int], list[int]] = {}
        for number in numbers:
            box = self.boxes[number]
            groups.setdefault((box.offsets[axis], box.sizes[axis]), []).append(number)
        ranges = sorted(groups)
        ends = [at + size for at, size in ranges]
        inner = [self._level(groups[one], axis + 1) for one in ranges]
        return [at for at, _ in ranges], list(itertools.accumulate(ends, max)), ends, inner


@functools.lru_cache(maxsize=32)
def index_of(boxes: tuple[Box, ...]) -> BoxIndex:
    """The index of these boxes. Tensors that are cut alike, as most of a model are, have one in common."""
    return BoxIndex(boxes)


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indices of the first two boxes that share an element; None if all are disjoint."""
    index = index_of(tuple(boxes))
    order = sorted(range(len(boxes)), key=lambda number: boxes[number])
    for number in order:
        others = [other for other in index.overlapping(boxes[number]) if other != number]
        if others:
            return number, min(others, key=lambda other: (boxes[other], other))
    return None


def _ends(box: Box) -> tuple[int, ...]:
    return tuple(at + size for at, size in zip(box.offsets, box.sizes, strict=True))


def _narrowed(box: Box, axis: int, begin: int, end: int) -> Box:
    offsets = (*box.offsets[:axis], begin, *box.offsets[axis + 1 :])
    return Box(offsets, (*box.sizes[:axis], end - begin, *box.sizes[axis + 1 :]))


# Which slices of stored tensors make up a tensor of another layout: the intersection of boxes, nothing is read.
#
# Like the planner of torch.distributed.checkpoint, a plan is checked as a whole before anybody acts on it: every
# stored box lies inside its tensor, no two of them share an element, and together they have every element that is
# wanted.


@dataclass(frozen=True, slots=True)
class Shard:
    """A stored box of a tensor. `name`: what it is stored as. `where`: for people: a unit, a rank, a file."""

    name: str
    box: Box
    where: str = ""


@dataclass(frozen=True)
class Divided:
    """A tensor and the shards that it is stored as. dtype: safetensors code; shape: of the whole."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]

    @functools.cached_property
    def index(self) -> BoxIndex:
        """Of the shards' boxes."""
        return index_of(tuple(shard.box for shard in self.shards))


@dataclass(frozen=True, slots=True)
class Slice:
    """`region` (in elements of the whole) comes out of `shard`."""

    shard: Shard
    region: Box


def check_shards(tensor: Divided) -> None:
    """FormatError, naming tensor and region, for shards outside the whole, or two that share an element."""
    for shard in tensor.shards:
        if not shard.box.inside(tensor.shape):
            raise FormatError(
                f"{tensor.name}: {_called(shard)} has {shard.box}, which is not inside its shape {tensor.shape}"
            )
    pair = first_overlap([shard.box for shard in tensor.shards])
    if pair is not None:
        one, other = (tensor.shards[index] for index in pair)
        raise FormatError(
            f"{tensor.name}: {_called(one)} and {_called(other)} both have {overlap(one.box, other.box)}, so "
            f"these are two different tensors with one name (pipeline stages, hand-cut shards); resume with "
            f"the layout of the saved run, or select units where the command allows it"
        )


def slices_for(tensor: Divided, wanted: Box) -> tuple[Slice, ...]:
    """The slices that make up `wanted`, sorted by region. `check_shards` is the caller's.

    Raises MismatchError if `wanted` is not a box of this tensor, and IncompleteError, naming tensor and region, for
    what no shard has.

    >>> halves = Divided("w", "F32", (4,), (Shard("a", Box((0,), (2,))), Shard("b", Box((2,), (2,)))))
    >>> [(piece.shard.name, str(piece.region)) for piece in slices_for(halves, Box((1,), (2,)))]
    [('a', '[1:2]'), ('b', '[2:3]')]
    """
    if not wanted.inside(tensor.shape):
        raise MismatchError(
            f"{tensor.name} was saved with the shape {tensor.shape}; {wanted} of it is needed here; use the "
            f"model of the saved run",
            different={tensor.name: f"saved {tensor.shape}, here {wanted}"},
        )
    found: list[Slice] = []
    for shard in (tensor.shards[number] for number in tensor.index.overlapping(wanted)):
        region = overlap(shard.box, wanted)
        if region is not None:
            found.append(Slice(shard, region))
    if sum(piece.region.elements for piece in found) < wanted.elements:
        left = uncovered(wanted, [piece.region for piece in found])
        raise IncompleteError(
            f"{tensor.name}{left[0]} is in no file; use another checkpoint",
            missing=tuple(f"{tensor.name}{region}" for region in left),
        )
    return tuple(sorted(found, key=lambda piece: piece.region))


def _called(shard: Shard) -> str:
    return shard.where or shard.name
