"""A checkpoint of one layout, described as if it had been saved in another: what a rank's `RestorePlan` is made of.

For each unit that this rank holds, the saved units' tensors and JSON are put together anew under the unit's own name,
and every tensor gets a plan: which slices of which stored tensors fill this rank's box of it. Nothing is read here.

What is divided with a parameter: state of the optimizer that has its parameter's shape (a moment), by the same box.
What every shard has a copy of: scalars (`step`). Any other shape of state is understood only where it is not divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lastwords.checkpoint.boxes import Box, Divided, Slice, check_shards, slices_for, whole
from lastwords.checkpoint.entries import leaves, renamed
from lastwords.checkpoint.format import DTYPE_BITS, TensorSpec
from lastwords.checkpoint.manifest import Manifest
from lastwords.checkpoint.meta import Tree, UnitMeta
from lastwords.checkpoint.reshard.saved_state import (
    MOVED_BY_SCHEDULERS,
    SavedGroup,
    SavedState,
    SavedUnit,
    join,
    options_of,
    renumbered,
)
from lastwords.errors import MismatchError
from lastwords.optim_wrapper.joined_optimizer import optimizer_kind
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.sharding.dtensor import is_dtensor, local_of, placements_to_json
from lastwords.sharding.pieces import Members, UnitTable

_ZERO = "ZeroRedundancyOptimizer"

_COUNTER_BITS_MAX = 128
"""State of a shape of its own is a counter up to here, and the same whatever part of the parameter it stands beside."""


@dataclass(frozen=True, slots=True)
class VirtualUnit:
    """A unit of this job as a checkpoint of this layout would have it, and the slices that fill each of its tensors.

    boxes: the part of the whole that a tensor is; a plain tensor's spec does not say it.
    """

    tensors: tuple[TensorSpec, ...]
    meta: UnitMeta
    boxes: Mapping[str, Box]
    slices: Mapping[str, tuple[Slice, ...]]


def fits_as_it_is(manifest: Manifest, table: UnitTable, rank: int, view: UnitView) -> bool:
    """Whether the checkpoint is of this very layout (or of replicas, however many), as far as this rank can tell.

    Never of one that was transformed: its units are where the new layout has them, what belongs to ranks is not.

    table: this job's units, and this rank's share. view: this rank's everything.
    """
    if manifest.moved or manifest.units.keys() != table.units.keys():
        return False
    every = view.all_names().parameters
    for unit in manifest.units:
        if not table.pure and manifest.holders_of(unit) != table.units[unit]:
            return False
        if rank not in table.units[unit]:
            continue
        entry = manifest.units[unit]  # of a large checkpoint only what this rank holds is read
        mine = table.mine.get(unit, Members()).parameters
        if not table.pure and entry.meta.parameters.keys() != set(mine):
            return False  # stages that were cut elsewhere, between the same ranks
        specs = {spec.name: spec for spec in entry.tensors}
        for name in mine:
            live, spec = every.get(name), specs.get(f"unit/{unit}/model/{name}")
            if live is None or spec is None:
                continue  # another model, which is told by name where it is restored
            if not table.pure and not view.same_part(spec, name, live):
                return False
            # A mesh of one rank holds everything, as a plain tensor does, but its state is made of DTensors.
            moments = _moments(entry.meta.optimizer_state.get(name), spec)
            if any(("placements" in node) != is_dtensor(live) for node in moments):
                return False
    return True


def _moments(state: Tree | None, parameter: TensorSpec) -> list[Tree]:
    """State tensors of a parameter's own shape."""
    pairs = [] if state is None else state["dict"]
    return [node for key, node in pairs if key != "step" and tuple(node.get("shape", ())) == parameter.shape != ()]


class Resharded:
    """Saved units together, by the names of parameters and buffers. copies: see `join`.

    The constructor raises FormatError where saved units contradict each other, MismatchError where the optimizer's
    state is divided in a way that is not understood.
    """

    def __init__(self, path: Path, units: Sequence[SavedUnit], *, copies: bool) -> None:
        self._path = path
        self._saved = join(units, copies=copies)

    def unit(self, view: UnitView) -> VirtualUnit:
        """What the view's unit would be in a checkpoint of this layout."""
        names, saved = view.names(), self._saved
        making = _Making(saved, view)
        parameters = {}
        for name, parameter in names.parameters.items():
            if name in saved.parameters:
                self._tensor(making, "model", name, parameter)
                parameters[name] = saved.parameters[name]
        buffers = {}
        for name in names.owners:
            if name in saved.buffers:
                self._tensor(making, "buffer", name, names.buffers.get(name))
                buffers[name] = saved.buffers[name]
        state = {
            name: {"dict": [[key, self._state_node(making, name, parameter, key, node)] for key, node in keys.items()]}
            for name, parameter in names.parameters.items()
            if name in making.alike and (keys := saved.states.get(name)) is not None
        }
        known = {*names.parameters, *names.buffers, *names.owners}
        groups = [self._group(making, place, group) for place, group in enumerate(names.groups)]
        meta = UnitMeta(
            optimizer=self._kind(view, groups),
            parameters=parameters,
            buffers=buffers,
            aliases={alias: name for alias, name in saved.aliases.items() if name in known},
            absent_buffers=[name for name in saved.absent if name in names.owners],
            groups=groups,
            group_parameters=names.groups,
            group_numbers=names.group_numbers,
            optimizer_state=state,
        )
        return VirtualUnit(tuple(making.specs), meta, making.boxes, making.slices)

    # ------------------------------------------------------------------ inside

    def _tensor(self, making: _Making, kind: str, name: str, here: torch.Tensor | None) -> None:
        divided = self._saved.tensors[f"{kind}/{name}"]
        check_shards(divided)
        stored = making.called(divided.name)
        live = None if here is None else making.view.spec_of(stored, name, here)
        if live is not None and (live.dtype, live.global_shape) == (divided.dtype, divided.shape):
            making.alike.add(name)
            making.add(live, Box(live.offsets, live.shape), divided)
        else:  # another form: whoever compares it says so
            making.add_whole(divided)

    def _state_node(self, making: _Making, name: str, parameter: torch.Tensor, key: str, node: Tree) -> Tree:
        if "tensor" not in node:
            return making.copied(node, making.called)
        divided = self._saved.tensors[node["tensor"]]
        check_shards(divided)
        own, more = self._saved.tensors[f"model/{name}"].shape, self._saved.more.get(divided.name, ())
        if key != "step" and divided.shape in (own, (*own, *more)):
            return self._moment(making, node, name, parameter, divided)
        live = making.view.spec_of(divided.name, name, parameter)
        if live.shape != live.global_shape and math.prod(divided.shape) * DTYPE_BITS[divided.dtype] > _COUNTER_BITS_MAX:
            raise MismatchError(
                f"{self._path}: the optimizer's {key!r} of {name!r} has the shape {divided.shape}, unlike "
                f"its parameter, so lastwords cannot shard it with the parameter; resume on a layout in "
                f"which the parameter is not sharded",
                different={f"{name}/{key}": "divided in a way of its own"},
            )
        # Each shard has a copy: one beside what is read anyway, instead of a chunk of the first unit's file for each.
        near = {piece.shard.where for piece in making.slices[making.called(f"model/{name}")]}
        making.add_whole(self._saved.near(divided.name, near))
        shape = list(divided.shape[: len(divided.shape) - len(more)])
        return {**node, "tensor": making.called(divided.name), "shape": shape}

    def _moment(self, making: _Making, leaf: Tree, name: str, parameter: torch.Tensor, divided: Divided) -> Tree:
        stored = making.called(divided.name)
        own = making.view.spec_of(stored, name, parameter)
        more = divided.shape[len(own.global_shape) :]
        box = Box((*own.offsets, *(0 for _ in more)), (*own.shape, *more))
        node = {**leaf, "tensor": stored, "shape": list(local_of(parameter).shape)}
        spec = TensorSpec(stored, divided.dtype, box.sizes)
        if is_dtensor(parameter):
            node |= {"placements": placements_to_json(parameter), "global_shape": list(parameter.shape)}
            spec = TensorSpec(stored, divided.dtype, box.sizes, divided.shape, box.offsets)
        making.add(spec, box, divided)
        return node

    def _group(self, making: _Making, place: int, names: tuple[str, ...]) -> Tree:
        """Hyperparameters of one group; every saved group that has one of its parameters has to agree."""
        found: SavedGroup | None = None
        wanted = frozenset(names)
        ended = self._saved.about.step_ended
        for group in self._saved.groups:
            if wanted.isdisjoint(group.parameters):
                continue
            # Written at another place of the step, it may lack the scheduler's step: `plain_values.align` adds it.
            ignored = frozenset() if group.ended == ended else MOVED_BY_SCHEDULERS
            if found is None:
                found = group
            elif options_of(group.tree, ignored) != options_of(found.tree, ignored):
                raise MismatchError(
                    f"{self._path}: parameter group {place} of the optimizer here combines parameters of "
                    f"several groups of the saved run, whose hyperparameters differ, such as "
                    f"{sorted(wanted & {*group.parameters})[0]!r}"
                    "; create the same parameter groups as the saved run",
                    different={f"optimizer.param_groups[{place}]": "saved as several groups"},
                )
        if found is None:
            return {"dict": []}  # nothing of it was saved: its parameters are named as missing
        return making.copied(found.tree, lambda name: making.called(renumbered(name, place)))

    def _kind(self, view: UnitView, groups: Iterable[Tree]) -> str:
        """The saved optimizer's class. ZeRO is a way to divide an optimizer, not another one, where options agree."""
        here, saved = optimizer_kind(view.optimizer), self._saved.optimizer
        if here == saved or _ZERO not in (here, saved):
            return saved
        live = [{*group} - {"params"} for group in view.optimizer.param_groups]
        options = [{key for key, _ in tree["dict"]} for tree in groups]
        return here if all(one in live for one in options) else saved


class _Making:
    """A virtual unit while it is put together."""

    def __init__(self, saved: SavedState, view: UnitView) -> None:
        self.view = view
        self._saved = saved
        self.alike: set[str] = set()
        """Names of tensors that have the saved form here."""
        self.specs: list[TensorSpec] = []
        self.boxes: dict[str, Box] = {}
        self.slices: dict[str, tuple[Slice, ...]] = {}

    def called(self, name: str) -> str:
        """A tensor's name in this unit."""
        return f"unit/{self.view.unit}/{name}"

    def add(self, spec: TensorSpec, box: Box, divided: Divided) -> None:
        self.specs.append(spec)
        self.boxes[spec.name] = box
        self.slices[spec.name] = slices_for(divided, box)

    def add_whole(self, divided: Divided, stored: str | None = None) -> None:
        stored = stored or self.called(divided.name)
        self.add(TensorSpec(stored, divided.dtype, divided.shape), whole(divided.shape), divided)

    def copied(self, tree: Tree, name_of: Callable[[str], str]) -> Tree:
        """The same tree under other names, its tensors as they are."""
        for leaf in leaves(tree, self.view.unit):
            self.add_whole(self._saved.tensors[leaf["tensor"]], name_of(leaf["tensor"]))
        return renamed(tree, name_of, self.view.unit)
