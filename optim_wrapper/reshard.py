"""A checkpoint of one layout, described as if it had been saved in another: what a rank's `RestorePlan` is made of.

For each unit that this rank holds, the saved units' tensors and JSON are put together anew under the unit's own name,
and every tensor gets a plan: which slices of which stored tensors fill this rank's box of it. Nothing is read here.

What is divided with a parameter: state of the optimizer that has its parameter's shape (a moment), by the same box.
What every shard has a copy of: scalars (`step`). Any other shape of state is understood only where it is not divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lastwords.checkpoint.boxes import Box
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.layout import unit_tensor_name
from lastwords.checkpoint.manifest import Manifest
from lastwords.checkpoint.part import UnitEntry
from lastwords.checkpoint.reshard_plan import Divided, Shard, Slice, check_shards, slices_for
from lastwords.errors import FormatError, MismatchError
from lastwords.optim_wrapper.hyperparameters import MOVED_BY_SCHEDULERS
from lastwords.optim_wrapper.joined_optimizer import optimizer_kind
from lastwords.optim_wrapper.state_view import META_VERSION, Names, UnitView
from lastwords.optim_wrapper.tensor_tree import Tree
from lastwords.sharding.dtensor import is_dtensor, local_of, placements_to_json
from lastwords.vocabulary import UNIT_REPLICATED

_ZERO = "ZeroRedundancyOptimizer"


@dataclass(frozen=True, slots=True)
class VirtualUnit:
    """A unit of this job as a checkpoint of this layout would have it, and the slices that fill each of its tensors.

    boxes: the part of the whole that a tensor is; a plain tensor's spec does not say it.
    """

    tensors: tuple[TensorSpec, ...]
    meta: Mapping[str, Any]
    boxes: Mapping[str, Box]
    slices: Mapping[str, tuple[Slice, ...]]


def saved_names(manifest: Manifest) -> set[str]:
    """Names of all saved parameters and buffers."""
    return {
        name for entry in manifest.units.values() for kind in ("parameters", "buffers") for name in entry.meta[kind]
    }


def fits_as_it_is(manifest: Manifest, units: Mapping[str, tuple[int, ...]], rank: int, view: UnitView) -> bool:
    """Whether the checkpoint is of this very layout (or of replicas, however many), as far as this rank can tell.

    units: this job's, with their holders. view: this rank's everything.
    """
    if manifest.units.keys() != units.keys():
        return False
    if units.keys() == {UNIT_REPLICATED}:
        return True
    every = view.all_names().parameters
    for unit, entry in manifest.units.items():
        if tuple(entry.meta.get("holders", range(manifest.world_size))) != units[unit]:
            return False
        prefix = f"unit/{unit}/model/"
        for spec in entry.tensors if rank in units[unit] else ():
            name = spec.name.removeprefix(prefix)
            live = every.get(name) if spec.name.startswith(prefix) else None
            if live is not None and not view.same_part(spec, name, live):
                return False
    return True


class Resharded:
    """All saved units together, by the names of parameters and buffers.

    The constructor raises FormatError where saved units contradict each other, MismatchError where the optimizer's
    state is divided in a way that is not understood.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        ended = manifest.units[UNIT_REPLICATED].meta.get("step_ended")

        def order(item: tuple[str, UnitEntry]) -> tuple[bool, bool, str]:
            """Units of the extras' moment of the step come first: what all have is taken from the first."""
            return item[0] != UNIT_REPLICATED, item[1].meta.get("step_ended", ended) != ended, item[0]

        self._units = dict(sorted(manifest.units.items(), key=order))
        for unit, entry in self._units.items():
            if entry.meta.get("version") != META_VERSION:
                raise FormatError(
                    f"{path}: the state of unit {unit} is of version {entry.meta.get('version')!r}, this lastwords "
                    f"reads {META_VERSION}; upgrade it"
                )
        self._specs = {spec.name: spec for entry in self._units.values() for spec in entry.tensors}
        self._homes: dict[str, dict[str, list[tuple[str, UnitEntry]]]] = {"parameters": {}, "buffers": {}}
        for unit, entry in self._units.items():
            for kind, homes in self._homes.items():
                for name in entry.meta[kind]:
                    homes.setdefault(name, []).append((unit, entry))

    def unit(self, view: UnitView, unit: str, names: Names) -> VirtualUnit:
        """What `unit` would be in this layout; `names` are its members, as `view.names()` gives them."""
        making = _Making(unit)
        parameters = {}
        for name, parameter in names.parameters.items():
            if name in self._homes["parameters"]:
                parameters[name] = self._tensor(making, view, "parameters", "model", name, parameter)
        buffers = {}
        for name in names.owners:
            if name in self._homes["buffers"]:
                volatile = name in names.volatile_buffers
                buffers[name] = self._tensor(making, view, "buffers", "buffer", name, names.buffers.get(name), volatile)
        state = {
            name: tree
            for name, parameter in names.parameters.items()
            if name in making.alike and (tree := self._state(making, view, name, parameter)) is not None
        }
        metas = [entry.meta for entry in self._units.values()]
        known = {*names.parameters, *names.buffers, *names.owners}
        groups = [self._group(making, place, group) for place, group in enumerate(names.groups)]
        meta = {
            "version": META_VERSION,
            "optimizer": self._kind(view, groups),
            "parameters": parameters,
            "buffers": buffers,
            "aliases": {a: name for one in metas for a, name in one["aliases"].items() if name in known},
            "absent_buffers": [name for one in metas for name in one["absent_buffers"] if name in names.owners],
            "groups": groups,
            "group_parameters": [list(group) for group in names.groups],
            "optimizer_state": state,
        }
        return VirtualUnit(tuple(making.specs), meta, making.boxes, making.slices)

    # ------------------------------------------------------------------ inside

    def _tensor(
        self,
        making: _Making,
        view: UnitView,
        kind: str,
        stored_kind: str,
        name: str,
        here: torch.Tensor | None,
        volatile: bool = False,
    ) -> str:
        homes = self._homes[kind][name]
        dtypes = {entry.meta[kind][name] for _, entry in homes}
        if len(dtypes) > 1:
            raise FormatError(f"{self._path}: {name!r} was saved as {' and as '.join(sorted(dtypes))}")
        shards = [(unit, self._spec(unit_tensor_name(unit, stored_kind, name))) for unit, _ in homes]
        divided = _divided(name, shards[:1] if volatile else shards)
        check_shards(divided)
        stored = unit_tensor_name(making.unit, stored_kind, name)
        live = None if here is None else view.spec_of(stored, name, here)
        if live is not None and (live.dtype, live.global_shape) == (divided.dtype, divided.shape):
            making.alike.add(name)
            making.add(live, Box(live.offsets, live.shape), divided)
        else:  # another form: whoever compares it says so
            making.add(TensorSpec(stored, divided.dtype, divided.shape), Box((0,) * len(divided.shape), divided.shape),
                       divided)  # fmt: skip
        return str(dtypes.pop())

    def _state(self, making: _Making, view: UnitView, name: str, parameter: torch.Tensor) -> Tree | None:
        having = [
            (unit, entry) for unit, entry in self._homes["parameters"][name] if name in entry.meta["optimizer_state"]
        ]
        if not having:
            return None
        keys = [[key for key, _ in entry.meta["optimizer_state"][name]["dict"]] for _, entry in having]
        if any(sorted(one) != sorted(keys[0]) for one in keys):
            raise FormatError(f"{self._path}: the optimizer's state of {name!r} has other keys in each of its shards")
        pairs = []
        nodes = [dict(entry.meta["optimizer_state"][name]["dict"]) for _, entry in having]
        for key in keys[0]:
            found = [(unit, node[key]) for (unit, _), node in zip(having, nodes, strict=True)]
            pairs.append([key, self._state_node(making, view, name, parameter, key, found)])
        return {"dict": pairs}

    def _state_node(
        self,
        making: _Making,
        view: UnitView,
        name: str,
        parameter: torch.Tensor,
        key: str,
        found: list[tuple[str, Tree]],
    ) -> Tree:
        unit, first = found[0]
        stored = unit_tensor_name(making.unit, "optim", name, key)
        path = f"the optimizer's {key!r} of {name!r}"
        if "tensor" not in first:
            if any(_shape_of(node) != _shape_of(first) for _, node in found):
                raise FormatError(f"{self._path}: {path} differs between the parameter's shards")
            return self._whole_copy(making, first, lambda old: old.replace(f"unit/{unit}/", f"unit/{making.unit}/", 1))
        moments = [self._as_parameter(one, name, node, key) for one, node in found]
        if all(spec is not None for spec in moments):
            shards = [(one, spec) for (one, _), spec in zip(found, moments, strict=True) if spec is not None]
            divided = _divided(f"{name}/{key}", shards)
            check_shards(divided)
            return self._moment(making, view.spec_of(stored, name, parameter), first, parameter, divided)
        if any("placements" in node for _, node in found) or (
            len(found) > 1 and any(self._spec(node["tensor"]).nbytes > 16 for _, node in found)
        ):
            raise MismatchError(
                f"{self._path}: {path} has a shape of its own, {tuple(first['shape'])}, and it is not known how that "
                "is divided; resume with the layout of the saved run",
                different={f"{name}/{key}": "divided in a way of its own"},
            )
        return self._whole_copy(making, first, lambda _: stored)

    def _as_parameter(self, unit: str, name: str, node: Tree, key: str) -> TensorSpec | None:
        """The state tensor as the same box of a whole that its parameter is; None if it has another shape."""
        if "tensor" not in node:
            return None
        spec, own = self._spec(node["tensor"]), self._spec(unit_tensor_name(unit, "model", name))
        more = spec.shape[len(own.shape) :]  # bytes of an element that safetensors has no code for
        if len(more) > 1 or tuple(node["shape"]) != spec.shape[: len(node["shape"])]:
            return None
        if "placements" in node:
            return spec if tuple(node["global_shape"]) == own.global_shape[: len(node["global_shape"])] else None
        if key == "step" or tuple(node["shape"]) != own.shape:
            return None
        return replace(
            spec, shape=(*own.shape, *more), global_shape=(*own.global_shape, *more),
            offsets=(*own.offsets, *(0 for _ in more)),
        )  # fmt: skip

    def _moment(self, making: _Making, own: TensorSpec, leaf: Tree, parameter: torch.Tensor, divided: Divided) -> Tree:
        """own: how the parameter here would be stored under the moment's name."""
        stored = own.name
        more = divided.shape[len(own.global_shape) :]
        box = Box((*own.offsets, *(0 for _ in more)), (*own.shape, *more))
        node = {key: value for key, value in leaf.items() if key not in ("placements", "global_shape")}
        node |= {"tensor": stored, "shape": list(local_of(parameter).shape)}
        spec = TensorSpec(stored, divided.dtype, box.sizes)
        if is_dtensor(parameter):
            node |= {"placements": placements_to_json(parameter), "global_shape": list(parameter.shape)}
            spec = TensorSpec(stored, divided.dtype, box.sizes, divided.shape, box.offsets)
        making.add(spec, box, divided)
        return node

    def _group(self, making: _Making, place: int, names: tuple[str, ...]) -> Tree:
        """Hyperparameters of one group; every saved group that has one of its parameters has to agree."""
        found: tuple[str, int, Tree] | None = None
        wanted = frozenset(names)
        ended = self._units[UNIT_REPLICATED].meta.get("step_ended")
        for unit, entry in self._units.items():
            # Written at another place of the step, it may lack the scheduler's step: `hyperparameters.align` adds it.
            ignored = frozenset() if entry.meta.get("step_ended", ended) == ended else MOVED_BY_SCHEDULERS
            for number, (group, tree) in enumerate(
                zip(entry.meta["group_parameters"], entry.meta["groups"], strict=True)
            ):
                if wanted.isdisjoint(group):
                    continue
                if found is None:
                    found = unit, number, tree
                elif _options(tree, ignored) != _options(found[2], ignored):
                    raise MismatchError(
                        f"{self._path}: parameter group {place} of the optimizer here has parameters of several groups "
                        f"of the saved run, with other hyperparameters, such as {sorted(wanted & set(group))[0]!r}; "
                        "make the optimizer's groups as the saved run did",
                        different={f"optimizer.param_groups[{place}]": "saved as several groups"},
                    )
        if found is None:
            return {"dict": []}  # nothing of it was saved: its parameters are named as missing
        unit, number, tree = found
        old, new = f"unit/{unit}/optim/~groups.{number}/", f"unit/{making.unit}/optim/~groups.{place}/"
        return self._whole_copy(making, tree, lambda name: new + name.removeprefix(old))

    def _whole_copy(self, making: _Making, tree: Tree, renamed: Callable[[str], str]) -> Tree:
        """The same tree under other names, its tensors as they are."""

        def walk(node: Any) -> Any:
            if isinstance(node, dict) and "tensor" in node:
                spec = self._spec(node["tensor"])
                stored = renamed(node["tensor"])
                divided = _divided(stored, [("", replace(spec, global_shape=spec.shape,
                                                         offsets=(0,) * len(spec.shape)))])  # fmt: skip
                making.add(TensorSpec(stored, spec.dtype, spec.shape), divided.shards[0].box, divided)
                return {**node, "tensor": stored}
            if isinstance(node, dict):
                [(tag, body)] = node.items()
                if tag in ("list", "tuple"):
                    return {tag: [walk(item) for item in body]}
                if tag in ("dict", "ordered"):
                    return {tag: [[key, walk(item)] for key, item in body]}
            return node

        copied: Tree = walk(tree)
        return copied

    def _kind(self, view: UnitView, groups: Iterable[Tree]) -> str:
        """The saved optimizer's class. ZeRO is a way to divide an optimizer, not another one, where options agree."""
        here = optimizer_kind(view.optimizer)
        saved = next(iter({entry.meta["optimizer"] for entry in self._units.values()}))
        if here == saved or _ZERO not in (here, saved):
            return str(saved)
        live = [{*group} - {"params"} for group in view.optimizer.param_groups]
        options = [{key for key, _ in tree["dict"]} for tree in groups]
        return here if all(one in live for one in options) else str(saved)

    def _spec(self, stored: str) -> TensorSpec:
        try:
            return self._specs[stored]
        except KeyError:
            raise FormatError(f"{self._path}: its JSON names the tensor {stored!r}, but it is not there") from None


class _Making:
    """A virtual unit while it is put together."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.alike: set[str] = set()
        """Names of tensors that have the saved form here."""
        self.specs: list[TensorSpec] = []
        self.boxes: dict[str, Box] = {}
        self.slices: dict[str, tuple[Slice, ...]] = {}

    def add(self, spec: TensorSpec, box: Box, divided: Divided) -> None:
        self.specs.append(spec)
        self.boxes[spec.name] = box
        self.slices[spec.name] = slices_for(divided, box)


def _divided(name: str, shards: list[tuple[str, TensorSpec]]) -> Divided:
    first = shards[0][1]
    for unit, spec in shards:
        if (spec.dtype, spec.global_shape) != (first.dtype, first.global_shape):
            raise FormatError(
                f"{name} is {first.dtype} {first.global_shape} in unit {shards[0][0]} and {spec.dtype} "
                f"{spec.global_shape} in unit {unit}: two tensors of one name cannot be moved to another layout"
            )
    return Divided(
        name,
        first.dtype,
        first.global_shape,
        tuple(Shard(spec.name, Box(spec.offsets, spec.shape), f"unit {unit}") for unit, spec in shards),
    )


def _options(tree: Tree, ignored: frozenset[str]) -> list[Any]:
    return [[key, _shape_of(node)] for key, node in tree["dict"] if key not in ignored]


def _shape_of(node: Any) -> Any:
    """A tree without the names of its tensors: equal for equal values."""
    if isinstance(node, dict) and "tensor" in node:
        return {key: value for key, value in node.items() if key != "tensor"}
    if isinstance(node, dict):
        return {key: _shape_of(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_shape_of(item) for item in node]
    return node
