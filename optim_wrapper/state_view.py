"""A model and its optimizer as one unit's state, or as several: enumerated through the optimizer's own references.

`model.state_dict()` is never called: hooks of sharded models move parameters about, and it leaves frozen
moments and non-persistent buffers out. The tensors that are listed *are* the training's tensors; on the CPU
their memory is handed to the writer as it lies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.optimizer import Optimizer

from lastwords.checkpoint import saved_units
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.layout import unit_tensor_name
from lastwords.checkpoint.part import UnitState
from lastwords.errors import ConfigError
from lastwords.optim_wrapper.global_names import GlobalNames, Naming
from lastwords.optim_wrapper.joined_optimizer import optimizer_kind
from lastwords.optim_wrapper.tensor_bytes import Source, dtype_name, refuse_unsupported, source_of, spec_of
from lastwords.optim_wrapper.tensor_tree import NamedTensor, Tree, take_apart
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.sharding import zero
from lastwords.sharding.dtensor import (
    Box,
    box_of,
    is_dtensor,
    is_shard,
    managed_by_fsdp1,
    managed_by_fsdp2,
    taken_out_by_ddp,
)
from lastwords.sharding.pieces import Members
from lastwords.vocabulary import UNIT_REPLICATED

META_VERSION = saved_units.META_VERSION
_COMPILED = "_orig_mod."
_PLAIN = frozenset({type(None), bool, int, float, str, tuple, list})

AVERAGING_OPTIMIZERS = frozenset({"PostLocalSGDOptimizer"})
"""torch's own optimizers that let weights differ from rank to rank although the model is DDP's."""


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module under DDP, DataParallel and torch.compile, in any order."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):  # torch.compile's OptimizedModule
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


@dataclass(frozen=True, slots=True)
class Names:
    """Every tensor of a unit by its name. A tied tensor stands under its first name, `aliases` has the others."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    aliases: dict[str, str]
    absent_buffers: tuple[str, ...]
    volatile_buffers: frozenset[str]
    groups: tuple[tuple[str, ...], ...]
    """Names of each param group's parameters; of a unit that is a part, only groups that have one of its own."""
    group_numbers: tuple[int, ...]
    """Where each of `groups` stands in the optimizer's param_groups."""
    owners: dict[str, tuple[torch.nn.Module, str]] = field(repr=False)
    """Buffer name -> (module, name in it), absent ones included."""


class UnitView:
    """State of `model` and `optimizer` as unit `unit`, or what `members` names of it.

    exclude_buffers: names of buffers that are rank-local, and therefore not part of the unit. members: None for
    everything. holders: the ranks that hold the unit, where it is a part; stored with it. forms_only: nothing will be
    stored, so the model may be on the meta device. names: see `GlobalNames`; all names here are those of the job.
    The constructor looks at names only and raises ConfigError for what cannot be stored or does not fit together;
    `check` looks at everything that is there by then (optimizer state appears with the first step).
    Methods may be called from any thread while the weights do not change.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        unit: str = UNIT_REPLICATED,
        *,
        exclude_buffers: Collection[str] = (),
        members: Members | None = None,
        holders: tuple[int, ...] = (),
        forms_only: bool = False,
        names: Naming | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"model must be a torch.nn.Module, the one that the loop calls, not {type(model).__name__}"
            )
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        self.model = unwrap(model)
        self.optimizer = optimizer.inner if isinstance(optimizer, OptTFTWrapper) else optimizer
        for one in zero.parts_of(self.optimizer):
            if all(kind.__name__ not in AVERAGING_OPTIMIZERS for kind in type(one).__mro__):
                continue
            raise ConfigError(
                f"{type(one).__name__} lets the ranks' weights drift apart between averages, so no rank "
                "holds what another loses; use its inner optimizer class on all parameters instead"
            )
        if managed_by_fsdp1(self.model):
            raise ConfigError(
                "FullyShardedDataParallel keeps parameters in flat buffers that show no layout; "
                "use torch.distributed.fsdp.fully_shard (FSDP2) instead"
            )
        zero.refuse_unusable(self.optimizer)
        self.called = GlobalNames(names)
        self.unit = unit
        self.exclude_buffers = frozenset(exclude_buffers)
        self.members = members
        self.holders = holders
        self._forms_only = forms_only
        self.cut_by_hand: Mapping[str, Box] = {}
        """Plain parameters and buffers that are declared to be parts, by name: which ones."""
        # While FSDP2 computes, the model's own names lead to whole parameters that are no state of anything; and where
        # DDP trains on local tensors of a parallelized model, the names are gone after the first forward pass.
        fsdp2 = managed_by_fsdp2(self.model)
        self._lasting: dict[str, torch.Tensor] = {
            raw: parameter
            for raw, parameter in self.model.named_parameters(remove_duplicate=False)
            if (is_dtensor(parameter) and fsdp2) or (is_shard(parameter) and not is_dtensor(parameter))
        }
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._lasting |= taken_out_by_ddp(self.model, trained)
        self.names()
        in_model = {id(parameter) for parameter in (*self.model.parameters(), *self._lasting.values())}
        if not any(id(parameter) in in_model for parameter in trained):
            raise ConfigError(
                f"model ({type(self.model).__name__}) and optimizer ({type(self.optimizer).__name__}) share no "
                "parameters; pass the model whose parameters() this optimizer was made from"
            )

    @property
    def stateful(self) -> Optimizer:
        """The optimizer whose `state` counts: ZeRO keeps its share in a local one."""
        return zero.stateful(self.optimizer)

    def part(self, unit: str, members: Members | None, holders: tuple[int, ...]) -> UnitView:
        """A view of some of the same state."""
        view: UnitView = object.__new__(UnitView)
        view.__dict__.update(self.__dict__, unit=unit, members=members, holders=holders)
        return view

    def spec_of(self, stored: str, name: str, tensor: torch.Tensor) -> TensorSpec:
        """How the parameter or buffer `name` is written down as `stored`: which part of which whole it is."""
        return spec_of(stored, tensor, self.cut_by_hand.get(name))

    def same_part(self, saved: TensorSpec, name: str, tensor: torch.Tensor) -> bool:
        """Whether the saved tensor is what the parameter or buffer `name` is here.

        What is cut by hand may have been saved before anybody had declared it: then only its own shape is known.
        """
        here = self.spec_of(saved.name, name, tensor)
        undeclared = name in self.cut_by_hand and saved.shape == saved.global_shape
        return saved == (spec_of(saved.name, tensor) if undeclared else here)

    def names(self) -> Names:
        """Enumerate again; the tensors are the live ones."""
        every = self.all_names()
        return every if self.members is None else _restricted(every, self.members)

    def all_names(self) -> Names:
        """Everything this rank has, whatever unit it belongs to."""
        parameters: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        first: dict[int, str] = {}
        live = dict(self.model.named_parameters(remove_duplicate=False))
        for raw, parameter in {**live, **self._lasting}.items():
            name = self.called(raw.replace(_COMPILED, ""))
            if id(parameter) in first:
                if first[id(parameter)] != name:
                    aliases[name] = first[id(parameter)]
                continue
            refuse_unsupported(parameter, f"parameter {name!r}", sharded=True, meta=self._forms_only)
            first[id(parameter)] = name
            parameters[name] = parameter
        groups = []
        for g, group in enumerate(self.optimizer.param_groups):
            group_names = []
            for i, parameter in enumerate(group["params"]):
                if id(parameter) not in first:
                    name = f"~group{g}.{i}"
                    where = f"optimizer.param_groups[{g}]['params'][{i}]"
                    refuse_unsupported(parameter, where, sharded=True, meta=self._forms_only)
                    first[id(parameter)] = name
                    parameters[name] = parameter
                group_names.append(first[id(parameter)])
            groups.append(tuple(group_names))
        buffers: dict[str, torch.Tensor] = {}
        absent: list[str] = []
        volatile: list[str] = []
        owners: dict[str, tuple[torch.nn.Module, str]] = {}
        for prefix, module in self.model.named_modules(remove_duplicate=True):
            for key, buffer in module._buffers.items():
                name = self.called(f"{prefix}.{key}".replace(_COMPILED, "") if prefix else key)
                if name in self.exclude_buffers:
                    continue
                owners[name] = (module, key)
                if key in module._non_persistent_buffers_set:
                    volatile.append(name)
                if buffer is None:
                    absent.append(name)
                elif id(buffer) in first:
                    aliases[name] = first[id(buffer)]
                else:
                    refuse_unsupported(buffer, f"buffer {name!r}", sharded=True, meta=self._forms_only)
                    first[id(buffer)] = name
                    buffers[name] = buffer
        numbers = tuple(range(len(groups)))
        return Names(parameters, buffers, aliases, tuple(absent), frozenset(volatile), tuple(groups), numbers, owners)

    def check(self) -> None:
        """ConfigError for anything that could not be stored now: found at start (and after step 1), not at death."""
        self.state()

    def state(self, groups: list[dict[str, Any]] | None = None) -> UnitState:
        """Everything of the unit, to be written by `lastwords.checkpoint.part.write_part`.

        groups: hyperparameters to store instead of the live ones, as `copy_groups` returns them.
        """
        names = self.names()
        tensors: list[tuple[TensorSpec, Source]] = []
        taken: dict[str, str] = {}

        def add(spec: TensorSpec, tensor: torch.Tensor, path: str) -> None:
            if spec.name in taken:
                raise ConfigError(
                    f"{path} and {taken[spec.name]} would both be stored as {spec.name!r}; rename one of them"
                )
            taken[spec.name] = path
            tensors.append((spec, source_of(tensor)))

        for name, parameter in names.parameters.items():
            stored = unit_tensor_name(self.unit, "model", name)
            add(self.spec_of(stored, name, parameter), parameter, f"parameter {name!r}")
        for name, buffer in names.buffers.items():
            stored = unit_tensor_name(self.unit, "buffer", name)
            add(self.spec_of(stored, name, buffer), buffer, f"buffer {name!r}")
        optimizer_state, found = self._optimizer_state(names)
        group_trees, found_in_groups = self._group_trees(names, groups)
        for item in (*found, *found_in_groups):
            add(spec_of(item.name, item.tensor, item.box), item.tensor, item.path)
        meta = {
            "version": META_VERSION,
            "optimizer": optimizer_kind(self.optimizer),
            "parameters": {name: dtype_name(p.dtype) for name, p in names.parameters.items()},
            "buffers": {name: dtype_name(b.dtype) for name, b in names.buffers.items()},
            "aliases": names.aliases,
            "absent_buffers": list(names.absent_buffers),
            "groups": group_trees,
            "group_parameters": [list(group) for group in names.groups],
            "group_numbers": list(names.group_numbers),
            "volatile_buffers": sorted(names.volatile_buffers),
            "optimizer_state": optimizer_state,
        }
        if self.members is not None:
            meta["holders"] = list(self.holders)
        return UnitState(tensors=tensors, meta=meta)

    def _optimizer_state(self, names: Names) -> tuple[dict[str, Tree], list[NamedTensor]]:
        name_of = {id(parameter): name for name, parameter in names.parameters.items()}
        trees: dict[str, Tree] = {}
        found: list[NamedTensor] = []
        for key, value in list(self.stateful.state.items()):
            name = name_of.get(id(key)) if isinstance(key, torch.Tensor) else f"~{key}"
            if name is None:
                continue  # of another unit, or of a parameter that has left every group
            path = f"optimizer.state[{name!r}]"
            if not isinstance(value, dict) or not all(isinstance(inner_key, str) for inner_key in value):
                raise ConfigError(f"{path} is not a dict with string keys; such an optimizer cannot be stored")
            if not isinstance(key, torch.Tensor) and self.members is not None:
                raise ConfigError(
                    f"{path} belongs to no parameter, so in a sharded job nobody knows which ranks hold it; "
                    "keep it under a parameter, or in extras="
                )
            parameter = key if isinstance(key, torch.Tensor) else None
            of_parameter: list[NamedTensor] = []
            trees[name] = self._dict_tree(value, name, path, parameter, of_parameter)
            box = None if parameter is None else self._plain_part(name, parameter)
            found += of_parameter if box is None else [_placed(item, value, box) for item in of_parameter]
        return trees, found

    def _plain_part(self, name: str, parameter: torch.Tensor) -> Box | None:
        """Which part of a whole a parameter is although it is a plain tensor; None for all others."""
        if is_shard(parameter) and not is_dtensor(parameter):
            return box_of(parameter, f"parameter {name!r}")
        return self.cut_by_hand.get(name)

    def _group_trees(self, names: Names, groups: list[dict[str, Any]] | None) -> tuple[list[Tree], list[NamedTensor]]:
        found: list[NamedTensor] = []
        trees = []
        live = copy_groups(self.optimizer)
        for place, g in enumerate(names.group_numbers):
            first = next(iter(self.optimizer.param_groups[g]["params"]), None)
            # A group that was added since has no older values than its own.
            group = live[g] if groups is None or g >= len(groups) else groups[g]
            trees.append(self._dict_tree(group, f"~groups.{place}", f"optimizer.param_groups[{g}]", first, found))
        return trees, found

    def _dict_tree(
        self, value: dict[str, Any], name: str, path: str, parameter: torch.Tensor | None, found: list[NamedTensor]
    ) -> Tree:
        pairs = []
        home = None if parameter is None else parameter.device
        sharded = parameter is not None and is_dtensor(parameter)
        for key, item in list(value.items()):
            stored = unit_tensor_name(self.unit, "optim", name, key)
            node, more = take_apart(item, stored, f"{path}[{key!r}]", home, sharded=sharded)
            if sharded:
                _refuse_other_mesh(parameter, more)
            pairs.append([key, node])
            found += more
        return {"dict": pairs}


def _placed(item: NamedTensor, state: dict[str, Any], box: Box) -> NamedTensor:
    """A moment, which has its parameter's shape, is the part that its parameter is; a counter is no part."""
    moment = tuple(item.tensor.shape) == box.shape
    moment = moment and any(value is item.tensor and key != "step" for key, value in state.items())
    return replace(item, box=box) if moment else item


def _refuse_other_mesh(parameter: Any, found: list[NamedTensor]) -> None:
    for item in found:
        tensor: Any = item.tensor
        if is_dtensor(tensor) and tensor.device_mesh != parameter.device_mesh:
            raise ConfigError(
                f"{item.path} lives on the mesh {tensor.device_mesh}, its parameter on {parameter.device_mesh}; "
                "such an optimizer's state cannot be stored"
            )


def _restricted(every: Names, members: Members) -> Names:
    """The part of `every` that belongs to one unit."""
    own, own_buffers = frozenset(members.parameters), frozenset(members.buffers)
    groups = [(number, tuple(name for name in group if name in own)) for number, group in enumerate(every.groups)]
    kept = [(number, group) for number, group in groups if group]
    return Names(
        parameters={name: p for name, p in every.parameters.items() if name in own},
        buffers={name: b for name, b in every.buffers.items() if name in own_buffers},
        aliases={alias: name for alias, name in every.aliases.items() if name in own or name in own_buffers},
        absent_buffers=tuple(name for name in every.absent_buffers if name in own_buffers),
        volatile_buffers=every.volatile_buffers & own_buffers,
        groups=tuple(group for _, group in kept),
        group_numbers=tuple(number for number, _ in kept),
        owners={name: owner for name, owner in every.owners.items() if name in own_buffers},
    )


def copy_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Hyperparameters of every param group, without the parameters; tensors (a tensor lr) are cloned."""
    copies = []
    for group in optimizer.param_groups:
        plain = group.copy()
        del plain["params"]
        # Called in every step, so first the question that C answers at once: is there any tensor at all?
        if not _PLAIN.issuperset(map(type, plain.values())):
            plain = {
                key: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for key, value in plain.items()
            }
        copies.append(plain)
    return copies
