"""A source as one state, whatever units it was saved in: every tensor with its shards, and the JSON that goes with it.

Pure, and checked as a whole before anybody reads or writes a byte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lastwords.checkpoint.boxes import Box, Divided, Shard, check_shards, slices_for, whole
from lastwords.checkpoint.entries import keys_of, leaves, renamed, without_names
from lastwords.checkpoint.format import TYPE_NAMES, TensorSpec
from lastwords.checkpoint.layout import LocalTensorName, parse_tensor_name
from lastwords.checkpoint.manifest import Manifest
from lastwords.checkpoint.meta import EMPTY_UNIT, ExtrasMeta, Tree, UnitMeta
from lastwords.errors import FormatError, MismatchError
from lastwords.vocabulary import UNIT_REPLICATED

# The units of a source, each tensor with its place in the whole: a checkpoint's, out of its manifest.
#
# A manifest says of most tensors which part of the whole they are. Of the optimizer's state it does not always: where
# a parameter's part is a plain tensor, so is its moment, and only the parameter knows the place. That is settled here.

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


MOVED_BY_SCHEDULERS = frozenset({"lr", "momentum", "betas"})
"""What torch's schedulers change in a group. Where anything else differs, two ranks have different groups."""

_SCALAR_BYTES_MAX = 16
"""State of another shape than its parameter's is a counter or the like up to here: all shards have the same."""


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A param group. number: its place in the optimizer. ended: `step_ended` of the unit that its values are from."""

    number: int
    parameters: tuple[str, ...]
    tree: Tree
    ended: bool | None


@dataclass(frozen=True, slots=True)
class SavedState:
    """All of a source, by the names of a strategy.

    tensors: name -> what it is and which shards there are. parameters, buffers: name in the model -> torch's type.
    states: parameter -> key -> tree. copied: names of tensors that are whole wherever they are needed and that no
    strategy speaks of. more: of a tensor with elements that safetensors has no code for, its last sizes, in bytes.
    """

    tensors: Mapping[str, Divided]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    volatile: frozenset[str]
    absent: tuple[str, ...]
    aliases: Mapping[str, str]
    states: Mapping[str, Mapping[str, Tree]]
    groups: tuple[SavedGroup, ...]
    optimizer: str
    extras: ExtrasMeta | None
    copied: frozenset[str]
    more: Mapping[str, tuple[int, ...]]
    copies: Mapping[str, Mapping[str, Shard]] = field(default_factory=dict)
    """State tensors (`step`) that are whole beside each shard of their parameter: name -> unit's label -> the copy."""
    about: UnitMeta = EMPTY_UNIT
    """Of the unit that has the extras: the moment of the step, hyperparameters and reasons count for all."""

    def near(self, name: str, places: Collection[str]) -> Divided:
        """The tensor; of copies one in a unit that is among `places` and read anyway, if there is any."""
        tensor = self.tensors[name]
        found = next((shard for place, shard in self.copies.get(name, {}).items() if place in places), None)
        return tensor if found is None else replace(tensor, shards=(found,))

    def check(self) -> None:
        """FormatError or IncompleteError, naming tensor and region, for shards that overlap or leave something out."""
        for tensor in self.tensors.values():
            check_shards(tensor)
        for tensor in self.tensors.values():
            slices_for(tensor, whole(tensor.shape))


def join(units: Sequence[SavedUnit], *, copies: bool, divisible: bool = True) -> SavedState:
    """One state out of units, those first that have what all have.

    copies: several units may have the very same part of a tensor; any will do. FormatError where units contradict each
    other; MismatchError where state is divided in a way that is not understood, unless it need not be `divisible`.
    """
    return _Joining(units, copies, divisible).saved()


class _Joining:
    def __init__(self, units: Sequence[SavedUnit], copies: bool, divisible: bool) -> None:
        self._units = units
        self._copies = copies
        self._divisible = divisible
        self._tensors: dict[str, Divided] = {}
        self._copied: set[str] = set()
        self._more: dict[str, tuple[int, ...]] = {}
        self._found_copies: dict[str, dict[str, Shard]] = {}
        metas = [unit.meta for unit in units]
        self._parameters = self._types((unit.label, unit.meta.parameters) for unit in units)
        self._buffers = self._types((unit.label, unit.meta.buffers) for unit in units)
        self._volatile = frozenset(name for meta in metas for name in meta.volatile_buffers)

    def saved(self) -> SavedState:
        for kind, names in (("model", self._parameters), ("buffer", self._buffers)):
            for name in names:
                self._add(f"{kind}/{name}", alike=kind == "buffer" and name in self._volatile)
        states = self._states()
        groups = self._groups()
        metas = [unit.meta for unit in self._units]
        host = next((unit for unit in self._units if unit.meta.extras is not None), None)
        extras = None if host is None or host.meta.extras is None else self._extras(host, host.meta.extras)
        kinds = sorted({meta.optimizer for meta in metas})
        return SavedState(
            tensors=self._tensors,
            parameters=self._parameters,
            buffers=self._buffers,
            volatile=self._volatile,
            absent=tuple(dict.fromkeys(name for meta in metas for name in meta.absent_buffers)),
            aliases={alias: name for meta in metas for alias, name in meta.aliases.items()},
            states=states,
            groups=groups,
            optimizer=kinds[0] if kinds else "",
            extras=extras,
            copied=frozenset(self._copied),
            more=self._more,
            copies=self._found_copies,
            about=EMPTY_UNIT if host is None else host.meta,
        )

    # ------------------------------------------------------------------ tensors

    def _types(self, said: Iterable[tuple[str, Mapping[str, str]]]) -> dict[str, str]:
        found: dict[str, str] = {}
        for label, types in said:
            for name, dtype in types.items():
                if found.setdefault(name, dtype) != dtype:
                    raise FormatError(f"{label}: {name!r} is {dtype} there, and {found[name]} elsewhere")
        return found

    def _add(self, name: str, *, alike: bool = False) -> None:
        """alike: units that have all of it have the same, or any will do."""
        found = [(unit, unit.specs[name]) for unit in self._units if name in unit.specs]
        if not found:
            raise FormatError(f"{self._units[0].label}: its JSON names the tensor {name!r}, but it is not there")
        undivided = [one for one in found if one[1].shape == one[1].global_shape]
        if undivided and (alike or name in self._copied):
            found = undivided[:1]
        self._tensors[name] = self._divided(name, found)

    def _divided(self, name: str, found: Sequence[tuple[SavedUnit, TensorSpec]]) -> Divided:
        first = found[0][1]
        shards: dict[Any, Shard] = {}
        for place, (unit, spec) in enumerate(found):
            if (spec.dtype, spec.global_shape) != (first.dtype, first.global_shape):
                raise FormatError(
                    f"{name} is {first.dtype} {first.global_shape} in {found[0][0].label} and {spec.dtype} "
                    f"{spec.global_shape} in {unit.label}: two different tensors with one name cannot be "
                    f"moved to another layout"
                )
            box = Box(spec.offsets, spec.shape)
            shards.setdefault(box if self._copies else place, Shard(spec.name, box, unit.label))
        return Divided(name, first.dtype, first.global_shape, tuple(shards.values()))

    def _add_copy(self, unit: SavedUnit, name: str, stored: str | None = None) -> None:
        """A tensor that is whole, wherever it goes; `stored`: what it is called in the unit."""
        spec = unit.place(stored or name)
        self._copied.add(name)
        self._tensors[name] = Divided(name, spec.dtype, spec.shape, (Shard(spec.name, whole(spec.shape), unit.label),))

    # ------------------------------------------------------------------ the optimizer

    def _states(self) -> dict[str, dict[str, Tree]]:
        states: dict[str, dict[str, Tree]] = {}
        for unit in self._units:
            for fqn, keys in unit.states.items():
                known = states.setdefault(fqn, {})
                for key, node in keys.items():
                    if key not in known:
                        known[key] = self._state(unit, fqn, key, node)
                    elif without_names(_bare(node), unit.label) != without_names(known[key], unit.label):
                        raise FormatError(f"{unit.label}: the optimizer's {key!r} of {fqn!r} differs between shards")
        for fqn, keys in states.items():
            having = [unit for unit in self._units if fqn in unit.states]
            if self._divisible and not self._copies and any(unit.states[fqn].keys() != keys.keys() for unit in having):
                raise FormatError(f"{having[0].label}: the state of {fqn!r} has other keys in each of its shards")
        return states

    def _state(self, unit: SavedUnit, fqn: str, key: str, node: Tree) -> Tree:
        if not self._divisible:
            for leaf in leaves(node, unit.label):
                self._add(leaf["tensor"], alike=True)
            return _bare(node)
        if "tensor" not in node:
            for leaf in leaves(node, unit.label):
                self._refuse_divided(leaf["tensor"], leaf, fqn, key)
                self._add_copy(unit, leaf["tensor"])
            return _bare(node)
        name = node["tensor"]
        spec = unit.place(name)
        if spec.shape[len(node["shape"]) :]:
            self._more[name] = spec.shape[len(node["shape"]) :]
        having = [one for one in self._units if name in one.specs]
        if fqn.startswith("~"):
            self._add_copy(unit, name)
        elif any(name in one.own_forms for one in having):
            self._refuse_divided(name, node, fqn, key)
            self._add_copies(name, having)
        elif all(one.specs[name].shape == one.specs[name].global_shape for one in having):
            self._add_copies(name, having)
        else:
            self._add(name)
        return _bare(node)

    def _add_copies(self, name: str, having: Sequence[SavedUnit]) -> None:
        """A state tensor that is whole in each of these units."""
        specs = {unit.label: unit.specs[name] for unit in having}
        shards = {label: Shard(spec.name, whole(spec.shape), label) for label, spec in specs.items()}
        first = having[0].specs[name]
        self._tensors[name] = Divided(name, first.dtype, first.shape, (shards[having[0].label],))
        self._found_copies[name] = {
            label: shards[label]
            for label, spec in specs.items()
            if (spec.dtype, spec.shape) == (first.dtype, first.shape)
        }

    def _refuse_divided(self, name: str, node: Tree, fqn: str, key: str) -> None:
        """MismatchError if a tensor of a shape of its own may be another one in each of its parameter's shards."""
        having = [unit for unit in self._units if name in unit.specs]
        if "placements" in node or own_in_each(having, fqn, name):
            raise MismatchError(
                f"{having[0].label}: the optimizer's {key!r} of {fqn!r} has the shape {tuple(node['shape'])}, "
                "unlike its parameter, so lastwords cannot reshard it; resume on the layout of the saved run",
                different={f"{fqn}/{key}": "divided in a way of its own"},
            )

    def _groups(self) -> tuple[SavedGroup, ...]:
        """Param groups of all units. Those of one number with other values (stages may differ) stay apart."""
        found: list[SavedGroup] = []
        ended = self._units[0].meta.step_ended if self._units else None
        for unit in self._units:
            moment = ended if unit.meta.step_ended is None else unit.meta.step_ended
            for number, names, tree in unit.groups:
                ignored = frozenset() if moment == ended else MOVED_BY_SCHEDULERS
                place = next((k for k, one in enumerate(found) if one.number == number
                              and options_of(one.tree, ignored) == options_of(tree, ignored)), None)  # fmt: skip
                if place is not None:
                    known = found[place]
                    joined = tuple(dict.fromkeys((*known.parameters, *names)))
                    found[place] = SavedGroup(number, joined, known.tree, known.ended)
                    continue
                old = next((leaf["tensor"] for leaf in leaves(tree, unit.label)), "").split("/", 2)[:2]
                before, after = "/".join(old) + "/", f"{GROUPS}{len(found)}/"
                for leaf in leaves(tree, unit.label):
                    self._add_copy(unit, after + leaf["tensor"].removeprefix(before), leaf["tensor"])
                tree = renamed(tree, lambda name, b=before, a=after: a + name.removeprefix(b), unit.label)  # type: ignore[misc]
                found.append(SavedGroup(number, names, tree, moment))
        return tuple(found)

    def _extras(self, unit: SavedUnit, extras: ExtrasMeta) -> ExtrasMeta:
        states = {}
        for name, tree in extras.states.items():
            states[name] = renamed(tree, plain_extra, unit.label)
            for leaf in leaves(states[name], unit.label):
                self._add_copy(unit, leaf["tensor"])
        return replace(extras, states=states)


def plain_extra(name: str) -> str:
    """Name of an extra's tensor without its unit.

    >>> plain_extra("unit/replicated/extra/ema/w"), plain_extra("extra/ema/w")
    ('extra/ema/w', 'extra/ema/w')
    """
    return name if name.startswith("extra/") else name.split("/", 2)[-1]


def own_in_each(units: Sequence[SavedUnit], fqn: str, name: str) -> bool:
    """Whether this state tensor, whole in each of these units, may be another one beside each part of its parameter."""
    parts = {(one.offsets, one.shape) for unit in units if (one := unit.specs.get(f"model/{fqn}")) is not None}
    return len(parts) > 1 and max(unit.specs[name].nbytes for unit in units) > _SCALAR_BYTES_MAX


def _bare(tree: Tree) -> Tree:
    """Without what only the saved layout means: which part of what a tensor is."""
    if "tensor" not in tree:
        return tree
    return {key: value for key, value in tree.items() if key not in ("placements", "global_shape", "shape")}


def renumbered(name: str, place: int) -> str:
    """A group's tensor, named after another place of the group.

    >>> renumbered("optim/~groups.0/lr", 2), renumbered("model/w", 2)
    ('optim/~groups.2/lr', 'model/w')
    """
    if not name.startswith(GROUPS):
        return name
    return f"{GROUPS}{place}/" + name.removeprefix(GROUPS).partition("/")[2]


def options_of(tree: Tree, ignored: frozenset[str]) -> dict[str, Any]:
    """Values of a param group, tensors by their form only: equal for equal ones."""
    return {
        key: without_names(node, "a param group")
        for key, node in keys_of(tree, "a param group").items()
        if key not in ignored
    }
