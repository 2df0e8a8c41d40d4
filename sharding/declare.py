"""Units that a user declares, for layouts that cannot be seen in the tensors themselves.

Tensor parallelism by hand, pipeline stages, experts: the tensors are plain, so only the user knows which ranks hold
copies of them. What is declared here is compared with what the ranks really hold when they agree on their units, and
with the bytes when they are verified; nothing is believed.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol

from lastwords.checkpoint.boxes import Box, first_overlap, overlap, uncovered, whole
from lastwords.checkpoint.layout import check_unit_name
from lastwords.errors import NAMED_RANKS_MAX, ConfigError, counted, ranks_text, some
from lastwords.sharding.pieces import ANY_FORM, Piece
from lastwords.vocabulary import UNIT_REPLICATED

AXES = ("pp", "dp", "tp")
_EVERYTHING = "*"

# Parts of whole tensors that a user has cut by hand: which box a plain tensor is, and whether all boxes make a whole.
#
# The tensors themselves cannot say it (two halves of a matrix look like two copies), so it is declared with the unit:
# `Unit("tp1", (1, 3), ("*",), cuts={"*.up.weight": Part(dim=0, index=1, of=4)})`.

Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape of the whole, and offsets of a part in it."""

_FORMS = "Part(dim=0, index=1, of=4) for equal parts, Part(offsets=(4, 0), shape=(10, 6)) for any others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which part of a whole tensor the holders of a unit have, in elements. Its own shape is that of the tensor.

    Either one of equal parts (`dim`, `index`, `of`), or, for parts of different sizes or cut along several dimensions,
    `offsets` and `shape`.

    Args:
        dim: dimension along which it is cut; negative: from the end.
        index: number of the part, from 0.
        of: number of parts.
        offsets: of its first element in the whole.
        shape: of the whole.
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


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that exactly the ranks `holders` hold, bit for bit the same.

    Args:
        name: of one's own.
        holders: ranks.
        tensors: patterns (fnmatch, case matters) over the names of parameters and buffers. The first declared unit that
            a rank holds and whose patterns match takes the tensor; what no declared unit takes finds its unit by
            itself.
        cuts: pattern -> `Part`, for tensors that were cut by hand: which part of the whole the holders have. The first
            pattern that matches counts, what none matches is whole. Without it such a tensor can only be resumed in
            this very layout, because nobody knows how its parts belong together.
        mesh_ranks: set by `units_from_mesh`.
    """

    name: str
    holders: tuple[int, ...]
    tensors: tuple[str, ...] = (_EVERYTHING,)
    cuts: Mapping[str, Part] = field(default_factory=dict, hash=False)
    mesh_ranks: int = field(default=0, repr=False, compare=False, kw_only=True)
    """How many ranks the mesh has that this unit came from; 0 for one that was declared by itself."""

    def __post_init__(self) -> None:
        for name in ("holders", "tensors"):
            value = getattr(self, name)
            if isinstance(value, list | range):
                object.__setattr__(self, name, tuple(value))

    def takes(self, tensor: str) -> bool:
        """Whether one of the patterns matches the name.

        >>> Unit("experts", (0, 2), ("*.expert.*", "gate")).takes("layers.0.expert.weight")
        True
        """
        return any(fnmatchcase(tensor, pattern) for pattern in self.tensors)

    def cut_pattern(self, tensor: str) -> str | None:
        """The pattern of `cuts` that decides over the name; None if none matches."""
        return next((pattern for pattern in self.cuts if fnmatchcase(tensor, pattern)), None)


@dataclass(frozen=True, slots=True)
class _MeshPlace:
    """Where a rank stands on the mesh."""

    rank: int
    pp: int
    dp: int
    tp: int


class Mesh(Protocol):
    """What `units_from_mesh` reads of a `torch.distributed.device_mesh.DeviceMesh`; torch itself is not needed here."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    @property
    def mesh(self) -> Any: ...


def units_from_mesh(
    mesh: Mesh | None = None,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    optimizer_shard_size: int = 1,
    expert_parallel: int = 1,
    order: str = "pp-dp-tp",
    replicated: Sequence[str] = (),
    experts: Sequence[str] = ("*expert*",),
    cut: Mapping[str, int] | None = None,
    world_size: int | None = None,
) -> tuple[Unit, ...]:
    """Units of a job whose ranks form a mesh of `pp` stages, `dp` replicas and `tp` tensor-parallel parts.

    Ranks along dp are copies of each other, but for optimizer_shard_size and expert_parallel. A unit of all ranks is
    called "replicated", others after their coordinates.

    Args:
        mesh: the job's DeviceMesh over all of its ranks, with dimensions named "pp", "dp" and "tp", in any order and as
            many of them as there are; then dp, tp, pp and order are left out.
        dp: replicas.
        tp: tensor-parallel parts.
        pp: pipeline stages.
        optimizer_shard_size: the optimizer is sharded over as many *consecutive* members of dp; copies are then the
            ranks with the same place in their blocks.
        expert_parallel: tensors that match `experts` are held by the ranks whose index along dp is equal modulo this
            number; an optimizer shard then lies within those ranks, and if they are fewer than optimizer_shard_size,
            all of them share one.
        order: the axes from the slowest to the fastest, as for `init_device_mesh`; axes of size 1 may be left out.
        replicated: patterns of tensors that tensor parallelism leaves whole (LayerNorm, some biases): along tp they are
            copies too.
        experts: patterns of the experts' tensors.
        cut: pattern -> the dimension along which tensor parallelism has cut such tensors by hand into `tp` equal parts,
            in the order of the tp index, such as {"*.up.weight": 0, "*.down.weight": 1}; then they can be resumed in
            another layout.
        world_size: compared with the mesh, where it is known.

    Raises:
        ConfigError: sizes that do not fit, or a name that is not known.

    Example:
        >>> [(unit.name, unit.holders) for unit in units_from_mesh(dp=2, tp=4)]
        [('tp0', (0, 4)), ('tp1', (1, 5)), ('tp2', (2, 6)), ('tp3', (3, 7))]
    """
    in_mesh: list[int] | None = None
    if mesh is not None:
        if (dp, tp, pp, order) != (1, 1, 1, "pp-dp-tp"):
            raise ConfigError("units_from_mesh: a mesh already determines dp, tp, pp and their order; omit them")
        shape, in_mesh = _of_device_mesh(mesh)
        dp, tp, pp = (shape.get(axis, 1) for axis in ("dp", "tp", "pp"))
        order = "-".join(shape)
    sizes = {"dp": dp, "tp": tp, "pp": pp}
    numbers = {**sizes, "optimizer_shard_size": optimizer_shard_size, "expert_parallel": expert_parallel}
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"units_from_mesh: {name} must be an integer of at least 1, not {value!r}")
    if world_size is not None and (type(world_size) is not int or world_size < 1):
        raise ConfigError(f"units_from_mesh: world_size must be an integer of at least 1, not {world_size!r}")
    _check_mesh(sizes, world_size)
    dims = pattern_dims("units_from_mesh: cut", {} if cut is None else cut)
    for name in ("optimizer_shard_size", "expert_parallel"):
        if dp % numbers[name]:
            raise ConfigError(
                f"units_from_mesh: {name}={numbers[name]} does not divide dp={dp}, so the dp ranks would not fall into "
                f"equal groups; give a divisor of {dp}"
            )
    _check_patterns("units_from_mesh: replicated", replicated, may_be_empty=True)
    _check_patterns("units_from_mesh: experts", experts, may_be_empty=expert_parallel == 1)
    members = dp // expert_parallel
    expert_shard_size = min(optimizer_shard_size, members)
    if members % expert_shard_size:
        raise ConfigError(
            f"units_from_mesh: optimizer_shard_size={optimizer_shard_size} does not divide the {members} ranks along "
            f"dp that hold the same experts (dp={dp}, expert_parallel={expert_parallel}); declare the experts' units "
            "yourself: lastwords.Unit(name, holders, patterns)"
        )
    places = _places(sizes, _axes(order, sizes), in_mesh)
    units: list[Unit] = []

    def divide(patterns: Sequence[str], coordinates_of: Mapping[_MeshPlace, tuple[tuple[str, int], ...]]) -> None:
        """One unit for each different set of coordinates; they also give its name, and its part of what tp has cut."""
        ranks: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for place, coordinates in coordinates_of.items():
            ranks.setdefault(coordinates, []).append(place.rank)
        for coordinates, holders in sorted(ranks.items()):
            name = "-".join(f"{axis}{index}" if index >= 0 else axis for axis, index in coordinates)
            index = dict(coordinates).get("tp")
            cuts = {} if index is None else {one: Part(dim=dim, index=index, of=tp) for one, dim in dims.items()}
            units.append(
                Unit(name or UNIT_REPLICATED, tuple(sorted(holders)), tuple(patterns), cuts, mesh_ranks=dp * tp * pp)
            )

    # Experts come before what is replicated: a norm inside an expert is held by the expert's ranks, not by all.
    if expert_parallel > 1:
        split = {"pp": pp, "tp": tp, "expert": expert_parallel, "shard": expert_shard_size}
        divide(
            experts,
            {
                place: _named(
                    split,
                    pp=place.pp,
                    tp=place.tp,
                    expert=place.dp % expert_parallel,
                    shard=place.dp // expert_parallel % expert_shard_size,
                )
                for place in places
            },
        )
    split = {"pp": pp, "tp": tp, "shard": optimizer_shard_size}
    if tp > 1 and replicated:
        whole = {place: _named(split, pp=place.pp, shard=place.dp % optimizer_shard_size) for place in places}
        # -1: a word without a number. Where nothing else is split, the unit is that of all ranks.
        divide(replicated, {place: (*at, (UNIT_REPLICATED, -1)) if at else () for place, at in whole.items()})
    divide(
        (_EVERYTHING,),
        {place: _named(split, pp=place.pp, tp=place.tp, shard=place.dp % optimizer_shard_size) for place in places},
    )
    return tuple(units)


def check_units(units: Sequence[Unit], world_size: int) -> None:
    """ConfigError, naming the unit, for declarations that contradict themselves, each other or the job's size."""
    by_name: dict[str, Unit] = {}
    everything: dict[int, str] = {}
    for unit in units:
        if not isinstance(unit, Unit):
            raise ConfigError(
                f"units= holds {unit!r}, which is not a lastwords.Unit; write Unit(name, holders, patterns), or "
                "use units_from_mesh(...)"
            )
        if not isinstance(unit.name, str):
            raise ConfigError(f"the name of a declared unit must be a str such as 'tp0', not {unit.name!r}")
        check_unit_name(unit.name)
        if unit.mesh_ranks not in (0, world_size):
            raise ConfigError(
                f"units_from_mesh: the mesh has {unit.mesh_ranks} ranks (dp * tp * pp), but this job has {world_size}; "
                "give the sizes that multiply to the number of ranks"
            )
        called = f"the declared unit {unit.name!r}"
        if unit.name in by_name:
            raise ConfigError(
                f"two declared units are called {unit.name!r}, held by "
                f"{ranks_text(by_name[unit.name].holders)}, and by {ranks_text(unit.holders)}; give each a different "
                "name"
            )
        by_name[unit.name] = unit
        _check_holders(called, unit, world_size)
        _check_patterns(f"{called}: tensors", unit.tensors)
        _check_cuts(called, unit.cuts)
        for rank in unit.holders:
            if rank in everything:
                raise ConfigError(
                    f"{called} can take nothing on rank {rank}: {everything[rank]!r} is declared before it, is held by "
                    f"rank {rank} too, and its pattern {_EVERYTHING!r} takes everything there; declare {unit.name!r} "
                    "first, or narrow the patterns"
                )
        if _EVERYTHING in unit.tensors:
            everything.update(dict.fromkeys(unit.holders, unit.name))


def _check_holders(called: str, unit: Unit, world_size: int) -> None:
    holders = unit.holders
    if isinstance(holders, str) or not isinstance(holders, Sequence) or not all(type(rank) is int for rank in holders):
        raise ConfigError(f"{called}: holders is {holders!r}; it must be a tuple of ranks, such as (0, 4)")
    if not holders:
        raise ConfigError(f"{called} has no holder; name the ranks that hold its tensors, or leave it out")
    if len(set(holders)) != len(holders):
        raise ConfigError(f"{called} names a rank twice among its holders {some(holders, NAMED_RANKS_MAX)}")
    outside = [rank for rank in holders if not 0 <= rank < world_size]
    if outside:
        raise ConfigError(
            f"{called} is held by rank {outside[0]}, but this job has {counted(world_size, 'rank')}, from 0; "
            "correct its holders, or start as many ranks"
        )
    if unit.name == UNIT_REPLICATED and len(holders) != world_size:
        raise ConfigError(
            f"{called} is held by {ranks_text(holders)} only; that name is reserved for state that all "
            f"{world_size} ranks hold: choose another name"
        )


def _check_patterns(called: str, patterns: object, *, may_be_empty: bool = False) -> None:
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise ConfigError(f'{called} is {patterns!r}; it must be a tuple of patterns, such as ("*.norm.*",)')
    if not patterns and not may_be_empty:
        raise ConfigError(f'{called} has no pattern, so no tensor can belong to it; ("*",) takes all')
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"{called} has the pattern {pattern!r}, which matches no name")


def _check_cuts(called: str, cuts: object) -> None:
    if not isinstance(cuts, Mapping):
        raise ConfigError(
            f'{called}: cuts is {cuts!r}; it must be a dict of patterns and parts, such as {{"*.up.weight": '
            "lastwords.Part(dim=0, index=1, of=4)}"
        )
    for pattern, part in cuts.items():
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"{called}: cuts has the pattern {pattern!r}, which matches no name")
        if not isinstance(part, Part):
            raise ConfigError(
                f"{called}: cuts has {part!r} for {pattern!r}, which is not a lastwords.Part; write "
                f"Part(dim=0, index=1, "
                "of=4)"
            )
        part.check(f"{called}: the part {pattern!r}")


def _check_mesh(sizes: Mapping[str, int], world_size: int | None) -> None:
    product = sizes["dp"] * sizes["tp"] * sizes["pp"]
    if world_size is not None and product != world_size:
        raise ConfigError(
            f"units_from_mesh: dp={sizes['dp']} x tp={sizes['tp']} x pp={sizes['pp']} makes {product} ranks, but this "
            f"job has {world_size}; every rank has to have one place on the mesh"
        )


def _axes(order: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """All three axes, from the slowest to the fastest."""
    given = order.split("-") if isinstance(order, str) else []
    left_out = [axis for axis in AXES if axis not in given]
    if len(set(given)) != len(given) or not set(given) <= set(AXES) or any(sizes[axis] > 1 for axis in left_out):
        raise ConfigError(
            f"units_from_mesh: order is {order!r}; it has to name each axis with more than one rank once, from the "
            "slowest to the fastest, such as 'pp-dp-tp'"
        )
    return (*left_out, *given)


def _of_device_mesh(mesh: Mesh) -> tuple[dict[str, int], list[int]]:
    """Sizes by axis, from the slowest to the fastest, and the ranks in this order."""
    names, table = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "mesh", None)
    if table is None:
        raise ConfigError(f"units_from_mesh: mesh is a {type(mesh).__name__}, not a DeviceMesh")
    if not names or len(set(names)) != len(names) or not set(names) <= set(AXES):
        raise ConfigError(
            f"units_from_mesh: the mesh's dimensions are named {names!r}; name them 'pp', 'dp' or 'tp' "
            "(mesh_dim_names= of init_device_mesh), or give the sizes: units_from_mesh(dp=2, tp=4)"
        )
    ranks = [int(rank) for rank in table.flatten().tolist()]
    if sorted(ranks) != list(range(len(ranks))):
        raise ConfigError(f"units_from_mesh: give the mesh of the whole job; this one has {ranks_text(ranks)}")
    return dict(zip(names, map(int, table.shape), strict=True)), ranks


def _places(sizes: Mapping[str, int], axes: Sequence[str], ranks: Sequence[int] | None) -> list[_MeshPlace]:
    """Each rank's coordinates. ranks: in the order of the mesh, where they are not simply numbered."""
    indices = itertools.product(*(range(sizes[axis]) for axis in axes))
    places = (dict(zip(axes, index, strict=True)) for index in indices)
    return [_MeshPlace(rank=rank if ranks is None else ranks[rank], **place) for rank, place in enumerate(places)]


def _named(split: Mapping[str, int], **coordinates: int) -> tuple[tuple[str, int], ...]:
    """Those coordinates along which there is more than one unit."""
    return tuple((axis, index) for axis, index in coordinates.items() if split[axis] > 1)


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
