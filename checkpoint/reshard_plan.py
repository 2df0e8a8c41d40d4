"""Which slices of stored tensors make up a tensor of another layout: the intersection of boxes, nothing is read.

Like the planner of torch.distributed.checkpoint, a plan is checked as a whole before anybody acts on it: every stored
box lies inside its tensor, no two of them share an element, and together they have every element that is wanted.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lastwords.checkpoint.boxes import Box, BoxIndex, first_overlap, index_of, overlap, uncovered
from lastwords.errors import FormatError, IncompleteError, MismatchError


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


def slices_for(tensor: Divided, wanted: Box, holes: Mapping[str, str] | None = None) -> tuple[Slice, ...]:
    """The slices that make up `wanted`, sorted by region. `check_shards` is the caller's.

    holes: names of shards that are lost -> why. Raises MismatchError if `wanted` is not a box of this tensor, and
    IncompleteError, naming tensor and region, for what no shard has.

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
    lost = holes or {}
    found: list[Slice] = []
    for shard in (tensor.shards[number] for number in tensor.index.overlapping(wanted)):
        region = overlap(shard.box, wanted)
        if region is not None and shard.name not in lost:
            found.append(Slice(shard, region))
    if sum(piece.region.elements for piece in found) < wanted.elements:
        left = uncovered(wanted, [piece.region for piece in found])
        why = next((lost[shard.name] for shard in tensor.shards if shard.name in lost and _any(shard, left)), "")
        raise IncompleteError(
            f"{tensor.name}{left[0]} is in no file" + (f": {why}" if why else "") + "; use another checkpoint",
            missing=tuple(f"{tensor.name}{region}" for region in left),
        )
    return tuple(sorted(found, key=lambda piece: piece.region))


def check_covered(tensors: Sequence[Divided]) -> None:
    """IncompleteError, naming tensor and region, where the shards of a tensor do not make up the whole."""
    for tensor in tensors:
        slices_for(tensor, Box((0,) * len(tensor.shape), tensor.shape))


def _any(shard: Shard, regions: Sequence[Box]) -> bool:
    return any(overlap(shard.box, region) is not None for region in regions)


def _called(shard: Shard) -> str:
    return shard.where or shard.name
