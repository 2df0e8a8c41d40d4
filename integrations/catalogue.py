"""What a checkpoint holds, seen as whole tensors by their names in the model, whatever layout it was saved in."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lastwords.checkpoint import load
from lastwords.checkpoint.boxes import Box, slabs, whole
from lastwords.checkpoint.direct_io import Buffer
from lastwords.checkpoint.entries import UnitEntry
from lastwords.checkpoint.format import DTYPE_BITS, TensorSpec
from lastwords.checkpoint.load import Checkpoint
from lastwords.checkpoint.reshard.saved_units import unit_of
from lastwords.checkpoint.reshard_plan import Divided, Shard, check_covered, check_shards, slices_for
from lastwords.checkpoint.slice_reader import SliceReader, Target
from lastwords.errors import ConfigError, FormatError, IncompleteError, MismatchError
from lastwords.optim_wrapper.resume.state_restore import stored_shape
from lastwords.optim_wrapper.tensors.tensor_bytes import dtype_of_code
from lastwords.optim_wrapper.tensors.tensor_tree import Tree, filled, tensor_nodes
from lastwords.vocabulary import UNIT_REPLICATED

_SHOWN_MAX = 8
_BLOCK_ELEMENTS = 2 << 20
"""Of two tensors that much is in memory at a time while they are compared."""

find_checkpoint = load.find_checkpoint


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor as the training knows it, and the stored shards that make it up.

    name: "model/FQN", "buffer/FQN" or "optim/FQN/KEY". dtype: torch's name, such as "float32". shape: in elements of
    that type; `divided` is in stored elements, which have one more axis where safetensors lacks the type.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    divided: Divided

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.divided.shape) * DTYPE_BITS[self.divided.dtype] // 8

    @property
    def box(self) -> Box:
        """All of it."""
        return whole(self.shape)

    def narrowed(self, box: Box) -> Box:
        """A box of stored elements as one of elements."""
        return Box(box.offsets[: len(self.shape)], box.sizes[: len(self.shape)])

    def stored(self, box: Box) -> Box:
        """A box of elements as one of stored elements."""
        more = self.divided.shape[len(self.shape) :]
        return Box((*box.offsets, *(0 for _ in more)), (*box.sizes, *more))

    def target(self, box: Box, memory: Buffer) -> Target:
        """For a `SliceReader`: `box` of it goes into `memory`, contiguous and of exactly its size."""
        stored = self.stored(box)
        return Target(stored, memory, slices_for(self.divided, stored))


@dataclass(frozen=True, slots=True)
class Group:
    """One param group of the optimizer: its place, its parameters' names, its hyperparameters (tensors as Whole)."""

    number: int
    parameters: tuple[str, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Everything in a checkpoint that can be named without knowing ranks.

    parameters, buffers: name in the model -> tensor. aliases: other names of tied ones -> the name they stand under.
    state: parameter -> key -> value, tensors as Whole. not_persistent: buffers that state_dict() leaves out.
    """

    parameters: Mapping[str, Whole]
    buffers: Mapping[str, Whole]
    aliases: Mapping[str, str]
    not_persistent: frozenset[str]
    state: Mapping[str, Mapping[str, Any]]
    groups: tuple[Group, ...]
    optimizer: str

    def tensor(self, name: str) -> Whole | None:
        """Parameter or buffer of this name, tied names included."""
        name = self.aliases.get(name, name)
        return self.parameters.get(name) or self.buffers.get(name)

    def model(self) -> dict[str, Whole]:
        """What the model's state_dict() has: parameters, persistent buffers, and tied names."""
        found = dict(self.parameters)
        found |= {name: whole for name, whole in self.buffers.items() if name not in self.not_persistent}
        return found | {alias: found[name] for alias, name in self.aliases.items() if name in found}

    def tied(self, ties: Mapping[str, str], checkpoint: Checkpoint, *, checked: bool = True) -> Catalogue:
        """With tensors that were saved under two names once. ties: other name -> the name that stays, with its state.

        Reads both. ConfigError for a name that is not there, MismatchError if the two are not the same bit for bit.
        """
        found = self
        for other, stays in ties.items():
            one, two = (found.aliases.get(name, name) for name in (stays, other))
            a, b = found.tensor(one), found.tensor(two)
            if a is None or b is None:
                raise ConfigError(f"{checkpoint.path} has no tensor {one if a is None else two!r} that could be tied")
            if one != two:
                _check_same(a, b, checkpoint, checked)
                found = found._without(two, one)
        return found

    def _without(self, gone: str, stays: str) -> Catalogue:
        aliases = {alias: stays if name == gone else name for alias, name in self.aliases.items()}
        return replace(
            self,
            parameters={name: whole for name, whole in self.parameters.items() if name != gone},
            buffers={name: whole for name, whole in self.buffers.items() if name != gone},
            aliases=aliases | {gone: stays},
            state={name: keys for name, keys in self.state.items() if name != gone},
            groups=tuple(
                replace(g, parameters=tuple(name for name in g.parameters if name != gone)) for g in self.groups
            ),
        )

    def only(self, patterns: Sequence[str]) -> Catalogue:
        """Tensors one of whose names fits a pattern such as "layers.*", and their state; everything without patterns.

        ConfigError if no tensor of the model has such a name.
        """
        if not patterns:
            return self
        every = {*self.parameters, *self.buffers, *self.aliases}
        fits = {name for name in every if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
        fits |= {self.aliases.get(name, name) for name in fits}
        found = replace(
            self,
            parameters={name: whole for name, whole in self.parameters.items() if name in fits},
            buffers={name: whole for name, whole in self.buffers.items() if name in fits},
            aliases={alias: name for alias, name in self.aliases.items() if name in fits},
            state={name: keys for name, keys in self.state.items() if name in fits},
            groups=tuple(
                replace(g, parameters=tuple(name for name in g.parameters if name in fits)) for g in self.groups
            ),
        )
        if not found.model():
            raise ConfigError(f"no tensor has a name like {' or '.join(patterns)}")
        return found


def _check_same(a: Whole, b: Whole, checkpoint: Checkpoint, checked: bool) -> None:
    one, two = (whole.name.partition("/")[2] for whole in (a, b))
    what = f"{one!r} and {two!r} of {checkpoint.path} cannot be tied: "
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        text = f"{a.dtype} {a.shape} and {b.dtype} {b.shape}"
        raise MismatchError(what + text, different={two: text})
    with SliceReader(checkpoint, checked=checked, keep_edges=True) as reader:
        for box in slabs(a.box, _BLOCK_ELEMENTS):
            nbytes = math.prod(a.stored(box).sizes) * DTYPE_BITS[a.divided.dtype] // 8
            both = bytearray(nbytes), bytearray(nbytes)
            reader.read([whole.target(box, memory) for whole, memory in zip((a, b), both, strict=True)])
            if both[0] != both[1]:
                text = "their values differ, so the training did not keep them tied"
                raise MismatchError(what + text, different={two: text})


def catalogue(checkpoint: Checkpoint, units: Collection[str] = (), *, clash_by_unit: bool = False) -> Catalogue:
    """Catalogue of `checkpoint`, or of some of its `units` (for stages or shards that use the same names).

    ConfigError if one name stands for different tensors in several units, or if `units` names one that is not there.
    clash_by_unit: such tensors are listed as NAME@UNIT instead. IncompleteError if pieces of a tensor are missing.
    """
    manifest = checkpoint.manifest
    unknown = sorted(set(units) - manifest.units.keys())
    if unknown:
        raise ConfigError(
            f"{checkpoint.path} has no unit {unknown[0]!r}; its units are: {', '.join(sorted(manifest.units))}"
        )
    chosen = {unit: entry for unit, entry in manifest.units.items() if not units or unit in units}
    return _Making(checkpoint, chosen, clash_by_unit).catalogue()


class _Making:
    def __init__(self, checkpoint: Checkpoint, units: Mapping[str, UnitEntry], clash_by_unit: bool) -> None:
        self._path = checkpoint.path
        self._manifest = checkpoint.manifest
        # "replicated" first: what all ranks hold goes before what some do.
        self._units = dict(sorted(units.items(), key=lambda item: (item[0] != UNIT_REPLICATED, item[0])))
        self._clash_by_unit = clash_by_unit
        self._found: dict[str, list[tuple[str, str, TensorSpec]]] = {}
        self._clashes: dict[str, list[str]] = {}
        self._wholes: dict[str, Whole] = {}

    def catalogue(self) -> Catalogue:
        for unit, entry in self._units.items():
            self._collect(unit, entry)
        for name, found in self._found.items():
            self._join(name, found)
        if self._clashes and not self._clash_by_unit:
            some = sorted(self._clashes.items())[:_SHOWN_MAX]
            text = "; ".join(f"{name} in {' and '.join(units)}" for name, units in some)
            more = f" and {len(self._clashes) - _SHOWN_MAX} more" if len(self._clashes) > _SHOWN_MAX else ""
            raise ConfigError(
                f"in {self._path} one name refers to different tensors: {text}{more}. This is usual for "
                f"pipeline stages and hand-cut shards; select units with units= (on the command line --unit)"
            )
        parameters = self._of_kind("model/")
        buffers = self._of_kind("buffer/") | self._rank_local_buffers()
        aliases = {alias: name for entry in self._units.values() for alias, name in entry.meta.aliases.items()}
        volatile = [name for entry in self._units.values() for name in entry.meta.volatile_buffers]
        kinds = sorted({entry.meta.optimizer for entry in self._units.values()} - {""})
        return Catalogue(
            parameters, buffers, aliases, frozenset(volatile), self._state(), self._groups(), ", ".join(kinds)
        )

    # ------------------------------------------------------------------ tensors

    def _collect(self, unit: str, entry: UnitEntry) -> None:
        meta = entry.meta
        saved = unit_of(self._path, self._manifest, unit)
        dtypes = {f"unit/{unit}/model/{name}": dtype for name, dtype in meta.parameters.items()}
        dtypes |= {f"unit/{unit}/buffer/{name}": dtype for name, dtype in meta.buffers.items()}
        for tree in (*meta.optimizer_state.values(), *meta.groups):
            nodes = tensor_nodes(tree, f"{self._path}: optimizer state of unit {unit}")
            dtypes |= {name: node["dtype"] for name, node in nodes.items()}
        for spec in saved.specs.values():
            if spec.name in dtypes:
                name = self._renumbered(spec.name.removeprefix(f"unit/{unit}/"), entry)
                self._found.setdefault(name, []).append((unit, dtypes[spec.name], spec))

    def _renumbered(self, name: str, entry: UnitEntry) -> str:
        """Tensors in param groups are named by the group's place in the unit; here by its place in the optimizer."""
        prefix = "optim/~groups."
        if not name.startswith(prefix):
            return name
        place, slash, rest = name.removeprefix(prefix).partition("/")
        return f"{prefix}{entry.meta.numbers[int(place)]}{slash}{rest}"

    def _join(self, name: str, found: Sequence[tuple[str, str, TensorSpec]]) -> None:
        _, _, spec = found[0]
        shapes = {(dtype, stored_whole(one, dtype)) for _, dtype, one in found}
        undivided = [one for one in found if one[2].shape == one[2].global_shape]
        parts = [one for one in found if one[2].shape != one[2].global_shape and 0 not in one[2].shape]
        # A counter such as Adam's "step" is whole beside each shard of its parameter: all of them are the same.
        copies = 0 in spec.global_shape or (name.startswith("optim/") and self._owner_of(name) not in self._clashes)
        if len(shapes) > 1 or (undivided and parts) or (len(undivided) > 1 and not copies):
            self._clashes[name] = [one[0] for one in found]
            if self._clash_by_unit:
                for other in found:
                    self._wholes[f"{name}@{other[0]}"] = self._whole(f"{name}@{other[0]}", [other])
            return
        self._wholes[name] = self._whole(name, undivided[:1] or found)

    def _owner_of(self, name: str) -> str:
        return "model/" + name.removeprefix("optim/").rpartition("/")[0]

    def _whole(self, name: str, found: Sequence[tuple[str, str, TensorSpec]]) -> Whole:
        _, dtype, first = found[0]
        shards = tuple(
            Shard(spec.name, Box(spec.offsets, spec.shape), f"unit {unit}")
            for unit, _, spec in sorted(found, key=lambda one: one[2].offsets)
            if 0 not in spec.shape
        )
        divided = Divided(name, first.dtype, first.global_shape, shards)
        try:
            check_shards(divided)
            check_covered([divided])
        except FormatError as error:
            raise FormatError(f"{self._path}: {error}") from error
        except IncompleteError as error:
            more = "" if len(self._units) == len(self._manifest.units) else ", or choose more units"
            raise IncompleteError(f"{self._path}: {error}{more}", missing=error.missing) from error
        return Whole(name, dtype, stored_whole(first, dtype), divided)

    def _of_kind(self, prefix: str) -> dict[str, Whole]:
        return {name.removeprefix(prefix): whole for name, whole in self._wholes.items() if name.startswith(prefix)}

    def _rank_local_buffers(self) -> dict[str, Whole]:
        """Small buffers that each rank saves for itself: of the lowest rank that has them, as a resume does it."""
        ranks = {
            rank
            for unit, entry in self._units.items()
            if unit != UNIT_REPLICATED or len(self._units) == 1
            for rank in entry.meta.holders or range(self._manifest.world_size)
        }
        if not ranks or self._manifest.moved:  # then the units' holders are not the ranks that saved local state
            ranks = set(range(self._manifest.world_size))
        found: dict[str, Whole] = {}
        for rank, entry in sorted(self._manifest.locals.items()):
            prefix = f"local/{rank}/buffer/"
            for spec in entry.tensors if rank in ranks else ():
                name = spec.name.removeprefix(prefix)
                if spec.name.startswith(prefix) and name not in found and f"buffer/{name}" not in self._wholes:
                    found[name] = self._whole(f"buffer/{name}", [("", dtype_of_code(spec.dtype), spec)])
        return found

    # ------------------------------------------------------------------ the optimizer

    def _state(self) -> dict[str, dict[str, Any]]:
        state: dict[str, dict[str, Any]] = {}
        for unit, entry in self._units.items():
            for parameter, tree in entry.meta.optimizer_state.items():
                own = parameter
                if f"model/{parameter}" in self._clashes:
                    own = f"{parameter}@{unit}"
                keys = state.setdefault(own, {})
                for key, node in tree["dict"]:
                    if key not in keys:
                        keys[key] = self._value(node, unit, entry)
        return state

    def _groups(self) -> tuple[Group, ...]:
        """Param groups, put together from the units: each lists only groups that have one of its parameters."""
        members: dict[int, dict[str, None]] = {}
        values: dict[int, dict[str, Any]] = {}
        for unit, entry in self._units.items():
            if entry.meta.holders is not None and entry.meta.group_numbers is None:
                continue  # an early part, which does not say which groups it lists: better none than wrong ones
            for number, names, tree in zip(
                entry.meta.numbers, entry.meta.group_parameters, entry.meta.groups, strict=True
            ):
                members.setdefault(number, {}).update(dict.fromkeys(names))
                if number not in values:
                    values[number] = {key: self._value(node, unit, entry) for key, node in tree["dict"]}
        return tuple(Group(number, tuple(members[number]), values[number]) for number in sorted(members))

    def _value(self, node: Any, unit: str, entry: UnitEntry) -> Any:
        def leaf(stored: str, _: Tree) -> Whole:
            name = self._renumbered(stored.removeprefix(f"unit/{unit}/"), entry)
            return self._wholes[f"{name}@{unit}" if name in self._clashes else name]

        return filled(node, leaf, f"{self._path}: optimizer state of unit {unit}")


def stored_whole(spec: TensorSpec, dtype: str) -> tuple[int, ...]:
    """Global shape of a stored tensor in elements of its own type."""
    return spec.global_shape[: len(stored_shape(spec, dtype))]


def wholes_in(value: Any) -> Iterator[Whole]:
    """Every tensor inside a value of `Catalogue.state` or of a group."""
    if isinstance(value, Whole):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from wholes_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from wholes_in(inner)
