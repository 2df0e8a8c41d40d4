"""What a checkpoint holds, seen as whole tensors by their names in the model, whatever layout it was saved in."""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lastwords.checkpoint.boxes import Box, Divided, slabs, slices_for, whole
from lastwords.checkpoint.direct_io import Buffer
from lastwords.checkpoint.entries import OWN_TAGS, folded, keys_of, leaves, renamed
from lastwords.checkpoint.format import DTYPE_BITS, TensorSpec
from lastwords.checkpoint.load import Checkpoint
from lastwords.checkpoint.manifest import Manifest
from lastwords.checkpoint.meta import Tree
from lastwords.checkpoint.reshard.saved_state import (
    SavedState,
    SavedUnit,
    buffers_of_ranks,
    join,
    own_in_each,
    units_of,
)
from lastwords.checkpoint.slice_reader import SliceReader, Target
from lastwords.errors import ConfigError, FormatError, IncompleteError, MismatchError, some
from lastwords.optim_wrapper.resume.state_restore import stored_shape
from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of, dtype_named
from lastwords.optim_wrapper.tensors.tensor_tree import MAKE
from lastwords.vocabulary import UNIT_REPLICATED

_SHOWN_MAX = 8
_BLOCK_ELEMENTS = 2 << 20
"""Of two tensors that much is in memory at a time while they are compared."""


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


def read_box(reader: SliceReader, whole: Whole, box: Box) -> torch.Tensor:
    """A new tensor with `box` of a stored one. Errors as of `SliceReader.read`."""
    tensor = torch.empty(box.sizes, dtype=dtype_named(whole.dtype))
    view = bytes_of(tensor)
    assert view is not None
    reader.read([whole.target(box, view)])
    return tensor


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """One param group of the optimizer: its place, its parameters' names, its hyperparameters (tensors as Whole).

    Several have one number where units differ in their values.
    """

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
    groups: tuple[ParamGroup, ...]
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
        return replace(self._with(lambda name: name != gone), aliases=aliases | {gone: stays})

    def _with(self, stays: Callable[[str], bool]) -> Catalogue:
        """Of the tensors, and their state, those whose names stay. Other names of theirs are all left."""
        return replace(
            self,
            parameters={name: whole for name, whole in self.parameters.items() if stays(name)},
            buffers={name: whole for name, whole in self.buffers.items() if stays(name)},
            state={name: keys for name, keys in self.state.items() if stays(name)},
            groups=tuple(replace(one, parameters=tuple(filter(stays, one.parameters))) for one in self.groups),
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
        aliases = {alias: name for alias, name in self.aliases.items() if name in fits}
        found = replace(self._with(fits.__contains__), aliases=aliases)
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
            both = [read_box(reader, whole, box).reshape(-1).view(torch.uint8) for whole in (a, b)]
            if not torch.equal(*both):
                text = "their values differ, so the training did not keep them tied"
                raise MismatchError(what + text, different={two: text})


def ambiguous_numbers(groups: Sequence[ParamGroup]) -> set[int]:
    """Numbers of which there are several groups: units that differ in their values (stages may) are kept apart."""
    return {number for number, count in Counter(group.number for group in groups).items() if count > 1}


def catalogue(checkpoint: Checkpoint, units: Collection[str] = (), *, clash_by_unit: bool = False) -> Catalogue:
    """Catalogue of `checkpoint`, or of some of its `units` (for stages or shards that use the same names).

    ConfigError if one name stands for different tensors in several units, or if `units` names one that is not there.
    clash_by_unit: such tensors are listed as NAME@UNIT instead. State of the optimizer that is another one beside each
    part of its parameter always is, as KEY@UNIT. FormatError where units contradict each other otherwise,
    IncompleteError if pieces of a tensor are missing.
    """
    path, manifest = checkpoint.path, checkpoint.manifest
    unknown = sorted(set(units) - manifest.units.keys())
    if unknown:
        raise ConfigError(f"{path} has no unit {unknown[0]!r}; its units are: {', '.join(sorted(manifest.units))}")
    chosen = dict(units_of(path, manifest, set(units)))
    clashes = _clashes(chosen)
    ambiguous = {name: among for name, among in clashes.items() if not name.startswith("optim/")}
    if ambiguous and not clash_by_unit:
        among = (f"{name} in {' and '.join(units)}" for name, units in sorted(ambiguous.items()))
        raise ConfigError(
            f"in {path} one name refers to different tensors: {some(among, _SHOWN_MAX, '; ')}. This is usual for "
            "pipeline stages and hand-cut shards; select units with units= (on the command line --unit)"
        )
    parts = [_apart(name, unit, clashes) for name, unit in chosen.items()]
    parts.append(buffers_of_ranks(_local_specs(manifest, chosen), parts))
    try:
        saved = join(parts, copies=manifest.moved, divisible=False)
        saved.check()
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    except IncompleteError as error:
        more = "" if len(chosen) == len(manifest.units) else ", or choose more units"
        raise IncompleteError(f"{path}: {error}{more}", missing=error.missing) from error
    return _seen(saved, parts, str(path))


def _clashes(units: Mapping[str, SavedUnit]) -> dict[str, list[str]]:
    """Names that stand for another tensor in each of several units, and these units."""
    found: dict[str, dict[str, tuple[str, TensorSpec]]] = {}
    for label, unit in units.items():
        dtypes = {f"model/{name}": dtype for name, dtype in unit.meta.parameters.items()}
        dtypes |= {f"buffer/{name}": dtype for name, dtype in unit.meta.buffers.items()}
        nodes = (node for keys in unit.states.values() for node in keys.values())
        dtypes |= {leaf["tensor"]: leaf["dtype"] for node in nodes for leaf in leaves(node, unit.label)}
        for name in unit.specs.keys() & dtypes.keys():
            found.setdefault(name, {})[label] = dtypes[name], unit.specs[name]
    clashes: dict[str, list[str]] = {}
    for name, specs in sorted(found.items()):  # parameters before their state
        owner = name.removeprefix("optim/").rpartition("/")[0] if name.startswith("optim/") else ""
        if owner and f"model/{owner}" in clashes:
            continue  # it is apart with its parameter
        forms = {(dtype, spec.dtype, spec.global_shape) for dtype, spec in specs.values()}
        undivided = sum(spec.shape == spec.global_shape for _, spec in specs.values())
        parts = sum(spec.shape != spec.global_shape and 0 not in spec.shape for _, spec in specs.values())
        # A counter such as Adam's "step" is whole beside each shard of its parameter: all of them are the same.
        counter = owner and not own_in_each([units[label] for label in specs], owner, name)
        several = undivided > 1 and not counter and not any(0 in shape for _, _, shape in forms)
        if len(forms) > 1 or (undivided and parts) or several:
            clashes[name] = list(specs)
    return clashes


def _apart(label: str, unit: SavedUnit, clashes: Collection[str]) -> SavedUnit:
    """The unit with @UNIT behind every name that stands for another tensor elsewhere."""

    def called(name: str) -> str:
        owner, _, key = name.removeprefix("optim/").rpartition("/")
        if name.startswith("optim/") and f"model/{owner}" in clashes:
            return f"optim/{owner}@{label}/{key}"
        return f"{name}@{label}" if name in clashes else name

    def fqn_of(kind: str, fqn: str) -> str:
        return called(f"{kind}/{fqn}").removeprefix(f"{kind}/")

    def key_of(key: str, node: Tree) -> str:
        return f"{key}@{label}" if any(leaf["tensor"] in clashes for leaf in leaves(node, unit.label)) else key

    meta = replace(
        unit.meta,
        parameters={fqn_of("model", fqn): dtype for fqn, dtype in unit.meta.parameters.items()},
        buffers={fqn_of("buffer", fqn): dtype for fqn, dtype in unit.meta.buffers.items()},
    )
    states = {
        fqn_of("model", fqn): {key_of(key, node): renamed(node, called, unit.label) for key, node in keys.items()}
        for fqn, keys in unit.states.items()
    }
    specs = {called(name): spec for name, spec in unit.specs.items()}
    return replace(unit, meta=meta, specs=specs, states=states)


def _local_specs(manifest: Manifest, units: Mapping[str, SavedUnit]) -> dict[str, TensorSpec]:
    """What ranks of these units save for themselves, lowest first: small buffers are in no unit."""
    among = [unit.meta.holders for name, unit in units.items() if name != UNIT_REPLICATED or len(units) == 1]
    ranks: Collection[int] = range(manifest.world_size)
    if among and None not in among and not manifest.moved:  # else their holders are not those that saved local state
        ranks = {rank for holders in among if holders for rank in holders}
    found = (spec for rank, entry in sorted(manifest.locals.items()) if rank in ranks for spec in entry.tensors)
    return {spec.name: spec for spec in found}


def _seen(saved: SavedState, units: Sequence[SavedUnit], path: str) -> Catalogue:
    where = f"{path}: optimizer state"

    def whole_of(name: str, dtype: str) -> Whole:
        divided = saved.tensors[name]
        shards = sorted((shard for shard in divided.shards if shard.box.elements), key=lambda shard: shard.box)
        shape = stored_shape(TensorSpec(name, divided.dtype, divided.shape), dtype)
        return Whole(name, dtype, shape, replace(divided, shards=tuple(shards)))

    def made(kind: str, about: Any, inside: list[Any]) -> Any:
        """Of an object (an array, say) the list of what is inside, or what is known about it."""
        return MAKE[kind](about, inside) if kind in OWN_TAGS else inside or about

    def values(keys: Mapping[str, Tree]) -> dict[str, Any]:
        return {
            key: folded(node, lambda leaf: whole_of(leaf["tensor"], leaf["dtype"]), made, where)
            for key, node in keys.items()
        }

    found: dict[str, dict[str, Whole]] = {"model": {}, "buffer": {}}
    dtypes = {"model": saved.parameters, "buffer": saved.buffers}
    for name in dict.fromkeys(name for unit in units for name in unit.specs):
        kind, _, fqn = name.partition("/")
        if fqn in dtypes.get(kind, ()):
            found[kind][fqn] = whole_of(name, dtypes[kind][fqn])
    groups = [ParamGroup(one.number, one.parameters, values(keys_of(one.tree, where))) for one in saved.groups]
    return Catalogue(
        found["model"],
        found["buffer"],
        saved.aliases,
        saved.volatile,
        {fqn: values(keys) for fqn, keys in saved.states.items()},
        tuple(sorted(groups, key=lambda group: (group.number, min(group.parameters, default="")))),
        ", ".join(sorted({unit.meta.optimizer for unit in units} - {""})),
    )
