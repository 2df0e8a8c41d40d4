"""The units of a source, each tensor with its place in the whole: a checkpoint's, out of its manifest.

A manifest says of most tensors which part of the whole they are. Of the optimizer's state it does not always: where a
parameter's part is a plain tensor, so is its moment, and only the parameter knows the place. That is settled here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lastwords.checkpoint.format import TYPE_NAMES, TensorSpec
from lastwords.checkpoint.layout import LocalTensorName, parse_tensor_name
from lastwords.checkpoint.manifest import Manifest
from lastwords.checkpoint.meta import EMPTY_UNIT, Tree, UnitMeta
from lastwords.checkpoint.state_trees import keys_of, renamed
from lastwords.errors import FormatError
from lastwords.vocabulary import UNIT_REPLICATED

GROUPS = "optim/~groups."


@dataclass(frozen=True, slots=True)
class SavedUnit:
    """Some of a source's state. Its tensors stand under the names of a strategy: `model/FQN`, `optim/FQN/KEY`, ...

    label: for people. specs: a spec's own name is what the source calls the tensor; shape, offsets and global_shape
    are its place in the whole. states: parameter -> key -> tree, tensors by the names of `specs`; groups likewise.
    own_forms: state that has a shape of its own, neither its parameter's nor one that is known to be divided.
    """

    label: str
    meta: UnitMeta
    specs: Mapping[str, TensorSpec]
    states: Mapping[str, Mapping[str, Tree]]
    groups: tuple[tuple[int, tuple[str, ...], Tree], ...]
    own_forms: frozenset[str] = field(default=frozenset())

    def place(self, name: str) -> TensorSpec:
        """FormatError if the JSON speaks of a tensor that is not there."""
        try:
            return self.specs[name]
        except KeyError:
            raise FormatError(f"{self.label}: its JSON names the tensor {name!r}, but it is not there") from None


def read_unit(where: str, label: str, meta: UnitMeta, prefix: str, specs: Mapping[str, TensorSpec]) -> SavedUnit:
    """A unit whose tensors begin with `prefix` in the source. `specs`: by their names without it."""
    states = {
        fqn: {
            key: renamed(node, lambda name: name.removeprefix(prefix), where)
            for key, node in keys_of(tree, where).items()
        }
        for fqn, tree in meta.optimizer_state.items()
    }
    for fqn, keys in states.items():
        for key, node in keys.items():
            if "tensor" in node and node["tensor"] != f"optim/{fqn}/{key}":
                raise FormatError(f"{where}: optimizer state {key!r} of {fqn} is stored as {node['tensor']!r}")
    if not len(meta.group_numbers) == len(meta.groups) == len(meta.group_parameters):
        raise FormatError(f"{where}: {len(meta.groups)} param groups and {len(meta.group_numbers)} numbers")
    groups = tuple(
        (number, tuple(names), renamed(tree, lambda name: name.removeprefix(prefix), where))
        for number, names, tree in zip(meta.group_numbers, meta.group_parameters, meta.groups, strict=True)
    )
    return SavedUnit(label, meta, specs, states, groups)


def units_of(path: Path, manifest: Manifest, chosen: Collection[str] = ()) -> Iterator[tuple[str, SavedUnit]]:
    """Units of a checkpoint, `replicated` and those of its moment of the step first: what all have is taken there.

    chosen: only these; without any, all.

    One at a time: of a large checkpoint those of other moments are read twice, and none stays in memory.
    """
    ended = manifest.units[UNIT_REPLICATED].meta.step_ended if UNIT_REPLICATED in manifest.units else None
    order = sorted(chosen or manifest.units, key=lambda name: (name != UNIT_REPLICATED, name))
    later = []
    for name in order:
        unit = unit_of(path, manifest, name)
        if name != UNIT_REPLICATED and unit.meta.step_ended not in (None, ended):
            later.append(name)
        else:
            yield name, unit
    for name in later:
        yield name, unit_of(path, manifest, name)


def unit_of(path: Path, manifest: Manifest, unit: str) -> SavedUnit:
    """One unit of a checkpoint. What a transformation has written says the place of every tensor."""
    entry, prefix = manifest.units[unit], f"unit/{unit}/"
    specs = {spec.name.removeprefix(prefix): spec for spec in entry.tensors}
    read = read_unit(f"{path}: unit {unit}", f"unit {unit}", entry.meta, prefix, specs)
    return read if manifest.moved else placed(read)


def buffers_of_ranks(specs: Mapping[str, TensorSpec], units: Sequence[SavedUnit]) -> SavedUnit:
    """Small buffers that each rank saves for itself, as a unit: whole, of the lowest rank that has them.

    specs: tensors of files of last words by their names there, local/RANK/buffer/NAME, among others; what units hold
    stands there. units: those beside which it is joined, at least one.
    """
    taken = {name for unit in units for name in unit.meta.buffers}
    found: dict[str, tuple[int, TensorSpec]] = {}
    for called, spec in specs.items():
        parsed = parse_tensor_name(called)
        if isinstance(parsed, LocalTensorName) and parsed.name.startswith("buffer/"):
            known = found.get(parsed.name)
            if parsed.name.removeprefix("buffer/") not in taken and (known is None or parsed.rank < known[0]):
                found[parsed.name] = parsed.rank, spec
    buffers = {name.removeprefix("buffer/"): TYPE_NAMES[spec.dtype] for name, (_, spec) in sorted(found.items())}
    meta = replace(EMPTY_UNIT, optimizer=units[0].meta.optimizer, buffers=buffers)
    return SavedUnit("buffers of single ranks", meta, {name: spec for name, (_, spec) in found.items()}, {}, ())


def placed(unit: SavedUnit) -> SavedUnit:
    """State tensors of their parameter's shape get their parameter's place; of all others that is noted."""
    specs, own_forms = dict(unit.specs), set()
    for fqn, keys in unit.states.items():
        for key, node in keys.items():
            if "tensor" not in node or fqn.startswith("~"):
                continue
            name = node["tensor"]
            as_parameter = _as_parameter(unit, fqn, key, node)
            if as_parameter is None:
                own_forms.add(name)
            else:
                specs[name] = as_parameter
    return replace(unit, specs=specs, own_forms=frozenset(own_forms))


def _as_parameter(unit: SavedUnit, fqn: str, key: str, node: Tree) -> TensorSpec | None:
    """The state tensor as the same box of a whole that its parameter is; None if it has another shape."""
    spec, own = unit.place(node["tensor"]), unit.place(f"model/{fqn}")
    shape = tuple(node["shape"])
    more = spec.shape[len(own.shape) :]  # bytes of an element that safetensors has no code for
    if len(more) > 1 or shape != spec.shape[: len(shape)]:
        return None
    if "placements" in node:
        whole = tuple(node["global_shape"])
        return spec if whole == own.global_shape[: len(whole)] else None
    if key == "step" or own.shape not in (shape, spec.shape):
        return None
    zeros = (0,) * len(more)
    return replace(spec, shape=(*own.shape, *more), global_shape=(*own.global_shape, *more),
                   offsets=(*own.offsets, *zeros))  # fmt: skip
