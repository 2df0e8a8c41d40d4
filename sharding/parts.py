"""Parts of whole tensors that a user has cut by hand: which box a plain tensor is, and whether all boxes make a whole.

The tensors themselves cannot say it (two halves of a matrix look like two copies), so it is declared with the unit:
`Unit("tp1", (1, 3), ("*",), cuts={"*.up.weight": Part(dim=0, index=1, of=4)})`. No torch here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lastwords.checkpoint.boxes import Box, first_overlap, overlap, uncovered, whole
from lastwords.errors import ConfigError
from lastwords.sharding.pieces import ANY_FORM, Piece

if TYPE_CHECKING:
    from lastwords.sharding.declare import Unit

Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape of the whole, and offsets of a part in it."""

_FORMS = "Part(dim=0, index=1, of=4) for equal parts, Part(offsets=(4, 0), shape=(10, 6)) for any others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which part of a whole tensor the holders of a unit have.

    Either one of `of` equal parts along `dim` (negative: from the end), the one with number `index`, from 0. Or, for
    parts of different sizes or cut along several dimensions, `offsets` of its first element in a whole of `shape`.
    All in elements; the part's own shape is that of the tensor.
    """

    dim: int | None = None
    index: int | None = None
    of: int | None = None
    offsets: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("offsets", "shape"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))

    def check(self, called: str) -> None:
        """ConfigError, beginning with `called`, for a part that cannot be."""
        even, other = (self.dim, self.index, self.of), (self.offsets, self.shape)
        if not ((None not in even and other == (None, None)) or (even == (None,) * 3 and None not in other)):
            raise ConfigError(f"{called} is {self}; write {_FORMS}")
        if self.offsets is None or self.shape is None:
            if not all(type(number) is int for number in even):
                raise ConfigError(f"{called} is {self}; dim, index and of must be integers")
            assert self.index is not None
            assert self.of is not None
            if not 0 <= self.index < self.of:
                raise ConfigError(f"{called}: index is {self.index}; of {self.of} parts they are 0 to {self.of - 1}")
            return
        for name, numbers in (("offsets", self.offsets), ("shape", self.shape)):
            if not isinstance(numbers, tuple) or not all(type(one) is int and one >= 0 for one in numbers):
                raise ConfigError(f"{called}: {name} is {numbers!r}; it must be a tuple of integers of at least 0")
        if len(self.offsets) != len(self.shape):
            raise ConfigError(f"{called}: offsets {self.offsets} and shape {self.shape} differ in dimensions")

    def place(self, shape: Sequence[int], called: str) -> Place:
        """Shape of the whole and offsets in it of a tensor of `shape`. ConfigError if the tensor is no such part.

        >>> Part(dim=0, index=1, of=4).place((2, 6), "w"), Part(offsets=(7, 0), shape=(10, 6)).place((3, 6), "w")
        (((8, 6), (2, 0)), ((10, 6), (7, 0)))
        """
        if self.offsets is not None and self.shape is not None:
            ends = [at + size for at, size in zip(self.offsets, shape, strict=False)]
            if len(shape) != len(self.shape) or any(end > size for end, size in zip(ends, self.shape, strict=True)):
                raise ConfigError(
                    f"{called} is {tuple(shape)} here; at {self.offsets} that does not fit into the declared whole "
                    f"{self.shape}; correct cuts="
                )
            return self.shape, self.offsets
        assert self.dim is not None
        assert self.index is not None
        assert self.of is not None
        if not -len(shape) <= self.dim < len(shape):
            raise ConfigError(f"{called} is {tuple(shape)} and has no dimension {self.dim} to be cut; correct cuts=")
        dim = self.dim % len(shape)
        sizes, offsets = list(shape), [0] * len(shape)
        sizes[dim] *= self.of
        offsets[dim] = shape[dim] * self.index
        return tuple(sizes), tuple(offsets)


def check_cuts(lists: Iterable[tuple[Sequence[Piece], Sequence[int]]], declared: Sequence[Unit]) -> None:
    """ConfigError for cuts that take nothing, overlap, or leave a part of a tensor to nobody.

    lists: every rank's pieces, equal lists once, with their ranks.
    """
    with_cuts = {unit.name: unit for unit in declared if unit.cuts}
    if not with_cuts:
        return
    pieces = {piece: None for alike, _ in lists for piece in alike if piece.held}
    of_name: dict[tuple[str, str], list[Piece]] = {}
    used: set[str] = set()
    cut: dict[tuple[str, str], None] = {}
    for piece in pieces:
        of_name.setdefault((piece.kind, piece.name), []).append(piece)
        pattern = with_cuts[piece.unit].cut_pattern(piece.name) if piece.unit in with_cuts else None
        if pattern is not None and piece.dtype != ANY_FORM:
            used.add(pattern)
            cut[piece.kind, piece.name] = None
    for unit in with_cuts.values():
        # One pattern may stand in several units (all stages of a pipeline, say): one that has such a tensor is enough.
        unused = [pattern for pattern in unit.cuts if pattern not in used]
        if unused:
            raise ConfigError(
                f"cuts of the declared unit {unit.name!r}: {unused[0]!r} matches no parameter or persistent buffer "
                "that the unit takes; correct it, or leave it out (tied weights count under their first name; small "
                "buffers belong to single ranks, so they have no cuts)"
            )
    for key in cut:
        refuse_no_whole(of_name[key], "correct cuts=")


def refuse_no_whole(pieces: Collection[Piece], remedy: str) -> None:
    """ConfigError, naming tensor, units and region, where the different pieces of one name do not make up a whole."""
    first = next(iter(pieces))
    called = f"{'buffer' if first.kind == 'buffer' else 'parameter'} {first.name!r}"
    for piece in pieces:
        if (piece.dtype, piece.global_shape) != (first.dtype, first.global_shape):
            raise ConfigError(
                f"{called} is a part of {first.dtype} {first.global_shape} in {_where(first)}, and of {piece.dtype} "
                f"{piece.global_shape} in {_where(piece)}; {remedy}"
            )
    parts = sorted({(Box(piece.offsets, piece.shape), _where(piece)) for piece in pieces})
    boxes = [box for box, _ in parts]
    pair = first_overlap(boxes)
    if pair is not None:
        one, other = pair
        raise ConfigError(
            f"{called}, a whole of {first.global_shape}: {parts[one][1]} and {parts[other][1]} both hold "
            f"{overlap(boxes[one], boxes[other])} of it, as two tensors; {remedy}"
        )
    left = uncovered(whole(first.global_shape), boxes)
    if left:
        holders = ", ".join(dict.fromkeys(where for _, where in parts))
        raise ConfigError(
            f"{called}, a whole of {first.global_shape}: no rank holds {left[0]} of it, the rest is held by {holders}; "
            f"{remedy}"
        )


def pattern_dims(called: str, cut: object) -> Mapping[str, int]:
    """`cut=` of a mesh: pattern -> dimension. ConfigError for anything else."""
    if not isinstance(cut, Mapping):
        raise ConfigError(f'{called} is {cut!r}; it must be a dict of patterns and dimensions, {{"*.up.weight": 0}}')
    for pattern, dim in cut.items():
        if not isinstance(pattern, str) or not pattern or type(dim) is not int:
            raise ConfigError(
                f'{called} has {pattern!r}: {dim!r}; write a pattern and a dimension, {{"*.up.weight": 0}}'
            )
    return cut


def _where(piece: Piece) -> str:
    return f"the declared unit {piece.unit!r}" if piece.unit else "what no declared unit takes"
