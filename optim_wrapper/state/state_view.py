"""A model and its optimizer as one unit's state, or as several: enumerated through the optimizer's own references.

`model.state_dict()` is never called: hooks of sharded models move parameters about, and it leaves frozen
moments and non-persistent buffers out. The tensors that are listed *are* the training's tensors; on the CPU
their memory is handed to the writer as it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.layout import unit_tensor_name
from lastwords.checkpoint.meta import Tree, UnitMeta
from lastwords.checkpoint.part import UnitState
from lastwords.checkpoint.storable import refuse_unstorable
from lastwords.errors import ConfigError, UnstorableError
from lastwords.optim_wrapper.ddp.ddp_found import unwrap, with_those_beside
from lastwords.optim_wrapper.joined_optimizer import optimizer_kind, state_of
from lastwords.optim_wrapper.state.global_names import GlobalNames, Naming
from lastwords.optim_wrapper.state.own_state import OptimizerTrees, is_usual, placed, shared_in
from lastwords.optim_wrapper.state.plain_values import copy_groups
from lastwords.optim_wrapper.tensors.tensor_bytes import (
    Stage,
    Staged,
    class_name,
    dtype_name,
    lasting_source_of,
    problem_of,
    refuse_unsupported,
    source_of,
    spec_of,
)
from lastwords.optim_wrapper.tensors.tensor_places import TensorPlaces
from lastwords.optim_wrapper.tensors.tensor_tree import ATOMS, inner_names, is_composite
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.sharding import zero
from lastwords.sharding.dtensor import (
    ShardBox,
    box_of,
    is_dtensor,
    is_shard,
    local_of,
    managed_by_fsdp1,
    managed_by_fsdp2,
    taken_out_by_ddp,
)
from lastwords.sharding.pieces import Members
from lastwords.torch_private import non_persistent
from lastwords.vocabulary import UNIT_REPLICATED

# Whether a model and an optimizer are still made of what they were: a fraction of the time that it takes to list it.
#
# To list thousands of tensors with their names, forms and places takes tens of milliseconds. Nearly always the list is
# the one of the step before. What it is made from is kept, so no other object can have the same identity; and compared
# by identity, name by name, with what is there now. Numbers that change stay out of a list: it has tensors only.


class Listing:
    """Of what these objects are made. tensors: all that their list depends on."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, tensors: Iterable[torch.Tensor]) -> None:
        self._modules = [*model.modules()]
        self._optimizer = optimizer
        self._tensors = [*tensors]
        self._locals = [*map(local_of, self._tensors)]
        self._parts = [(one, local) for one, local in zip(self._tensors, self._locals, strict=True) if is_dtensor(one)]
        self._found, self._names = self._now(state_of(optimizer))
        self._forms = self._formed()
        self._unsaved = self._volatile()
        self._places = TensorPlaces(self._locals)

    @staticmethod
    def suits(state: Mapping[Any, Any], tensors: Sequence[torch.Tensor]) -> bool:
        """Whether identities tell: of a list in the optimizer's state, or a tensor around others, they do not."""
        states = [*state.values()]
        return (
            all(type(state) is dict for state in states)
            and all(
                type(one) in ATOMS or (isinstance(one, torch.Tensor) and not inner_names(one))
                for state in states
                for one in [*state.values()]
            )
            and all(
                local.layout is torch.strided and not local.is_complex() and not local.is_inference()
                for local in map(local_of, tensors)
            )
        )

    def still(self, optimizer: Optimizer) -> bool:
        """Whether all is as it was. optimizer: that of now."""
        state = state_of(optimizer)
        if optimizer is not self._optimizer or not all(type(one) is dict for one in [*state.values()]):
            return False
        found, names = self._now(state)
        return (
            len(found) == len(self._found)
            and all(map(is_, found, self._found))
            and names == self._names
            and all(local_of(one) is local for one, local in self._parts)
            and self._places.still()
            and self._formed() == self._forms
            and self._volatile() == self._unsaved
        )

    def _now(self, state: Mapping[Any, Any]) -> tuple[list[Any], list[Any]]:
        """Each object in each place, and the places' names."""
        tables = [*self._tables(), *state.values()]
        members = [group["params"] for group in self._optimizer.param_groups]
        objects = [*tables, *state, *chain.from_iterable(map(dict.values, tables))]
        names = [*chain.from_iterable(tables), *map(len, tables), *map(len, members)]
        return [*objects, *chain.from_iterable(members)], names

    def _tables(self) -> Iterator[dict[Any, Any]]:
        for module in self._modules:
            yield module._modules
            yield module._parameters
            yield module._buffers

    def _formed(self) -> list[Any]:
        return [
            (local.shape, local.stride(), local.dtype, local.is_neg(), type(one), one.requires_grad)
            for one, local in zip(self._tensors, self._locals, strict=True)
        ]

    def _volatile(self) -> list[Any]:
        return [frozenset(non_persistent(module)) for module in self._modules]


_COMPILED, _OF_ONE = "_orig_mod.", ("torch.", "a ")
_NOTHING: Mapping[Any, Any] = {}


def own_name(prefix: str, key: str) -> str:
    """What a model calls a tensor of one of its modules, compiled or not."""
    return f"{prefix}.{key}".replace(_COMPILED, "") if prefix else key


def buffers_in(
    model: torch.nn.Module, called: Naming
) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor | None]]:
    """Name in the job, module, name in it and tensor of all buffers that are registered, also as None. Any thread."""
    for prefix, module in model.named_modules():
        for key, buffer in [*module._buffers.items()]:
            yield called(own_name(prefix, key)), module, key, buffer


@dataclass(frozen=True, slots=True)
class Names:
    """Every tensor of a unit by its name. A tied tensor stands under its first name, `aliases` has the others."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    aliases: dict[str, str]
    absent_buffers: tuple[str, ...]
    volatile_buffers: frozenset[str]
    """Those that state_dict() leaves out, also of the ones that each rank saves for itself."""
    groups: tuple[tuple[str, ...], ...]
    """Names of each param group's parameters; of a unit that is a part, only groups that have one of its own."""
    group_numbers: tuple[int, ...]
    """Where each of `groups` stands in the optimizer's param_groups."""
    owners: dict[str, tuple[torch.nn.Module, str]] = field(repr=False)
    """Buffer name -> (module, name in it), absent ones included."""
    refused: dict[str, UnstorableError] = field(default_factory=dict)
    """Parameters and buffers that have become what cannot be stored since the start; they are in none of the above."""
    composite_buffers: tuple[str, ...] = ()
    """Those that are in no unit, but values of the module's, see `attributes`: sparse ones, say."""


class _Listed(NamedTuple):
    """What a unit has: its tensors, each with where it was found; and the rest, but for the groups' numbers."""

    names: Names
    tensors: list[tuple[TensorSpec, torch.Tensor, str]]
    meta: UnitMeta
    sources: Sequence[memoryview | Staged] = ()


class _Known(NamedTuple):
    """The last list. of: the buffers that it leaves out, and the number of groups."""

    of: tuple[frozenset[str], int]
    listing: Listing
    listed: _Listed


class UnitView:
    """State of `model` and `optimizer` as one unit; see `part`.

    exclude_buffers: names of buffers that are rank-local, and therefore not part of the unit. forms_only: nothing will
    be stored, so the model may be on the meta device. names: see `GlobalNames`; all names here are those of the job.
    The constructor looks at names only and raises ConfigError for what cannot be stored or does not fit together;
    `check` looks at everything that is there by then (optimizer state appears with the first step).
    Methods may be called from any thread while the weights do not change.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        *,
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
        if managed_by_fsdp1(self.model):
            raise ConfigError(
                "FullyShardedDataParallel keeps parameters in flat buffers that show no layout; "
                "use torch.distributed.fsdp.fully_shard (FSDP2) instead"
            )
        zero.refuse_unusable(self.optimizer)
        self.called = GlobalNames(names)
        self.unit = UNIT_REPLICATED
        self.exclude_buffers: frozenset[str] = frozenset()
        self.members: Members | None = None
        self.holders: tuple[int, ...] = ()
        self._forms_only = forms_only
        self.cut_by_hand: Mapping[str, ShardBox] = {}
        """Plain parameters and buffers that are declared to be parts, by name: which ones."""
        self._seen: dict[str, torch.Tensor] = {}
        # While FSDP2 computes, the model's own names lead to whole parameters that are no state of anything; and where
        # DDP trains on local tensors of a parallelized model, the names are gone after the first forward pass.
        fsdp2 = managed_by_fsdp2(self.model)
        self._lasting: dict[str, torch.Tensor] = {
            raw: parameter
            for raw, parameter in self.model.named_parameters(remove_duplicate=False)
            if (is_dtensor(parameter) and fsdp2) or (is_shard(parameter) and not is_dtensor(parameter))
        }
        self._lasting |= taken_out_by_ddp(self.model, self.trained)
        self.model = with_those_beside(self.model, self.refuse_strangers(), self.trained)
        self._first_forms = self._forms()
        self._begun_with: dict[str, str] = {}
        self._known: _Known | None = None
        self._starting = True
        self.names()
        self._starting = False

    def refuse_strangers(self) -> set[int]:
        """ConfigError if the optimizer has none of the model's parameters (any more). Returns the ids of all."""
        in_model = {id(parameter) for parameter in (*self.model.parameters(), *self._lasting.values())}
        if not any(id(parameter) in in_model for parameter in self.trained):
            raise ConfigError(
                f"model ({type(self.model).__name__}) and optimizer ({optimizer_kind(self.optimizer)}) share no "
                f"parameters; pass the model from whose parameters() the optimizer was made{zero.told_of_deepspeed()}"
            )
        return in_model

    @property
    def trained(self) -> list[torch.Tensor]:
        """Every parameter that the optimizer has."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def optimizer_state(self) -> MutableMapping[Any, Any]:
        """The `state` that counts: ZeRO keeps its share in a local one, and Lookahead nests another."""
        return state_of(self.optimizer)

    def part(self, unit: str, members: Members | None, holders: tuple[int, ...]) -> UnitView:
        """A view of what `members` names of the same state, or all. holders: the ranks that hold the unit."""
        view: UnitView = object.__new__(UnitView)
        view.__dict__.update(self.__dict__, unit=unit, members=members, holders=holders, _known=None)
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
        return every if self.members is None else _restricted(every, self.members, self.exclude_buffers)

    def every_parameter(self) -> dict[str, torch.Tensor]:
        """The model's, by its own names, those that come twice, too; of FSDP2 the lasting ones.

        What is none and stands in a parameter's place is there for a call (`torch.func.functional_call`), on a thread
        that may be looked at meanwhile.
        """
        every: dict[str, torch.Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        for raw, tensor in every.items():
            if isinstance(tensor, torch.nn.Parameter):
                self._seen[raw] = tensor
            elif raw in self._seen:
                every[raw] = self._seen[raw]
        return {**every, **self._lasting}

    def all_names(self) -> Names:
        """Everything this rank has, whatever unit it belongs to."""
        parameters: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        first: dict[int, str] = {}
        refused: dict[str, UnstorableError] = {}
        for raw, parameter in self.every_parameter().items():
            name = self.called(raw.replace(_COMPILED, ""))
            if id(parameter) in first:
                if first[id(parameter)] != name:
                    aliases[name] = first[id(parameter)]
                continue
            first[id(parameter)] = name
            if self._may_be_stored(parameter, name, f"parameter {name!r}", refused):
                parameters[name] = parameter
        groups = []
        for g, group in enumerate(self.optimizer.param_groups):
            group_names = []
            for i, parameter in enumerate(group["params"]):
                if id(parameter) not in first:
                    name = f"~group{g}.{i}"
                    where = f"optimizer.param_groups[{g}]['params'][{i}]"
                    first[id(parameter)] = name
                    if self._may_be_stored(parameter, name, where, refused):
                        parameters[name] = parameter
                group_names.append(first[id(parameter)])
            groups.append(tuple(group_names))
        buffers: dict[str, torch.Tensor] = {}
        composite: list[str] = []
        absent: list[str] = []
        volatile: list[str] = []
        owners: dict[str, tuple[torch.nn.Module, str]] = {}
        for name, module, key, buffer in buffers_in(self.model, self.called):
            if key in non_persistent(module):
                volatile.append(name)
            if name in self.exclude_buffers:
                continue
            if buffer is not None and is_composite(buffer):
                composite.append(name)
                continue
            owners[name] = (module, key)
            if buffer is None:
                absent.append(name)
            elif id(buffer) in first:
                aliases[name] = first[id(buffer)]
            elif self._may_be_stored(buffer, name, f"buffer {name!r}", refused):
                first[id(buffer)] = name
                buffers[name] = buffer
        numbers, taken = tuple(range(len(groups))), tuple(groups)
        return Names(
            parameters, buffers, aliases, tuple(absent), frozenset(volatile), taken, numbers, owners, refused,
            tuple(composite),
        )  # fmt: skip

    def begin(self) -> None:
        """The loop begins: this is what a resume finds, before it comes to where the loop changes the model."""
        self._begun_with.clear()
        self._begun_with.update(self._structure(self.all_names()))

    def restructured(self, names: Names | None = None) -> list[str]:
        """Why what is saved of `names` fits no model that is built as this one was when the loop began."""
        if not self._begun_with:
            return []
        before = self._begun_with
        now = self._structure(self.all_names() if names is None or self.members else names)
        found = [f"{name} is gone" for name in before if name not in now]
        found += [f"{name} has come" for name in now if name not in before]
        for name, form in now.items():
            if form != (was := before.get(name, form)) and form and was:
                tied = not (was.startswith(_OF_ONE) and form.startswith(_OF_ONE))
                found.append(f"{name} is {'tied otherwise' if tied else f'now {form}'}")
        if not found:
            return []
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return [f"the loop has changed the model: {found[0]}{more}; change it likewise before resume()"]

    def _structure(self, names: Names) -> dict[str, str]:
        """Each parameter -> the one that it is tied to, or else its form; each module -> its class.

        Empty where the first forward pass may make it another one.
        """
        parameters = names.parameters.items()
        found = {
            f"parameter {name!r}": "" if is_lazy(it) else f"{it.dtype} {tuple(it.shape)}" for name, it in parameters
        }
        tied = [(alias, name) for alias, name in names.aliases.items() if name in names.parameters]
        found |= {f"parameter {alias!r}": name for alias, name in tied}
        for raw, module in self.model.named_modules(remove_duplicate=False):
            becomes = issubclass(type(module), LazyModuleMixin)
            found[f"module {raw.replace(_COMPILED, '')!r}"] = "" if becomes else f"a {class_name(module)}"
        return found

    def reshaped(self) -> list[str]:
        """Names of buffers that have got another form, or come, since the start: observers resize theirs, caches grow.

        A checkpoint names them, since a new model has them in their first form and would be taken for another model.
        """
        return sorted(name for name, form in self._forms().items() if self._first_forms.get(name) != form)

    def _forms(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        return {
            name: (buffer.dtype, buffer.shape)
            for name, _, _, buffer in buffers_in(self.model, self.called)
            if buffer is not None and not problem_of(local_of(buffer), meta=True)
        }

    def _may_be_stored(self, tensor: torch.Tensor, name: str, path: str, refused: dict[str, UnstorableError]) -> bool:
        """At the start UnstorableError if not; a step that ends later is not stopped by it."""
        try:
            refuse_unsupported(tensor, path, sharded=True, meta=self._forms_only)
        except UnstorableError as error:
            if self._starting:
                raise
            refused[name] = error
            return False
        return True

    def check(self) -> None:
        """ConfigError for anything that could not be stored now: found at start (and after step 1), not at death."""
        self.state()

    def left_out(self) -> list[str]:
        """What of the optimizer's state and groups cannot be stored now, and why: one line each."""
        names, taken = self.names(), OptimizerTrees(self.unit)
        self._optimizer_state(names, taken)
        self._group_trees(names, None, taken)
        return [*(f"{error.reason} cannot be stored" for error in names.refused.values()), *taken.reasons]

    def state(
        self,
        groups: list[dict[str, Any]] | None = None,
        stage: Stage | None = None,
        lent: Mapping[Any, dict[Any, Any] | None] = _NOTHING,
        trained: Mapping[int, bool] = _NOTHING,
        *,
        keep: bool = False,
    ) -> UnitState:
        """Everything of the unit, to be written by `lastwords.checkpoint.part.write_part`.

        groups: hyperparameters to store instead of the live ones, as `copy_groups` returns them; groups that have been
        added since are no part of that state. stage: copies what does not lie in host memory as it is needed. What of
        the optimizer cannot be stored is left out; the meta's `reasons` say so. Weights are never left out. trained: of
        parameters by id, `requires_grad` to store instead of theirs now. keep: the list is kept until the next call,
        which is spared most of the work if nothing else is there by then.
        """
        listed = self._list(len(self.optimizer.param_groups if groups is None else groups), lent, keep)
        of_groups = OptimizerTrees(self.unit)
        group_trees = self._group_trees(listed.names, groups, of_groups)
        more = [(spec_of(one.name, one.tensor, one.box), one.tensor, one.path) for one in of_groups.tensors]
        _refuse_twice([*listed.tensors, *more] if more else ())
        meta = replace(
            listed.meta,
            groups=group_trees,
            frozen=[
                name for name, one in listed.names.parameters.items() if not trained.get(id(one), one.requires_grad)
            ],
            reshaped_buffers=sorted({*self.reshaped(), *listed.names.composite_buffers}),
            left_out=[*listed.meta.left_out, *of_groups.left_out],
            reasons=[*listed.meta.reasons, *of_groups.reasons],
        )
        tensors = [
            (spec, source_of(tensor, stage, known))
            for (spec, tensor, _), known in zip(listed.tensors, listed.sources or repeat(None), strict=False)
        ]
        tensors += [(spec, source_of(tensor, stage)) for spec, tensor, _ in more]
        return UnitState(tensors=tensors, meta=meta)

    def _list(self, groups: int, lent: Mapping[Any, dict[Any, Any] | None], keep: bool) -> _Listed:
        """What the unit has, but for the numbers of that many groups."""
        known, own = self._known, (self.exclude_buffers, groups)
        if known is not None and not lent and known.of == own and known.listing.still(self.optimizer):
            return known.listed
        self._known = None
        listed = self._listed_anew(groups, lent)
        tensors = [tensor for _, tensor, _ in listed.tensors]
        missing = lent or listed.names.refused or listed.meta.left_out
        if keep and not missing and Listing.suits(self.optimizer_state, tensors):
            listed = listed._replace(sources=[*map(lasting_source_of, tensors)])
            tensors += self._state_elsewhere(listed.names)  # which memory may be shared with
            self._known = _Known(own, Listing(self.model, self.optimizer, tensors), listed)
        return listed

    def let_go(self) -> None:
        self._known = None

    def _listed_anew(self, groups: int, lent: Mapping[Any, dict[Any, Any] | None]) -> _Listed:
        names = _with_groups(self.names(), groups)
        for name, error in names.refused.items():
            if name not in names.owners:
                raise error
        tensors: list[tuple[TensorSpec, torch.Tensor, str]] = []

        def add(spec: TensorSpec, tensor: torch.Tensor, path: str) -> None:
            tensors.append((spec, tensor, path))

        for name, parameter in names.parameters.items():
            stored = unit_tensor_name(self.unit, "model", name)
            add(self.spec_of(stored, name, parameter), parameter, f"parameter {name!r}")
        for name, buffer in names.buffers.items():
            stored = unit_tensor_name(self.unit, "buffer", name)
            add(self.spec_of(stored, name, buffer), buffer, f"buffer {name!r}")
        taken_apart = OptimizerTrees(self.unit)
        optimizer_state, optimizer_own = self._optimizer_state(names, taken_apart, lent)
        shared, of_sharing = shared_in(taken_apart.tensors, self._state_elsewhere(names))
        for item in taken_apart.tensors:
            add(spec_of(item.name, item.tensor, item.box), item.tensor, item.path)
        _refuse_twice(tensors)
        meta = UnitMeta(
            optimizer=optimizer_kind(self.optimizer),
            parameters={name: dtype_name(p.dtype) for name, p in names.parameters.items()},
            buffers={name: dtype_name(b.dtype) for name, b in names.buffers.items()},
            aliases=names.aliases,
            absent_buffers=names.absent_buffers,
            groups=(),
            group_parameters=names.groups,
            group_numbers=names.group_numbers,
            volatile_buffers=sorted(names.volatile_buffers),
            optimizer_state=optimizer_state,
            optimizer_own=optimizer_own,
            shared=shared,
            left_out=taken_apart.left_out,
            reasons=[
                *(f"{e.reason} cannot be stored" for e in names.refused.values()),
                *taken_apart.reasons,
                *of_sharing,
                *self.restructured(names),
            ],
            holders=None if self.members is None else self.holders,
        )
        return _Listed(names, tensors, meta)

    def _optimizer_state(
        self, names: Names, taken: OptimizerTrees, lent: Mapping[Any, dict[Any, Any] | None] = _NOTHING
    ) -> tuple[dict[str, Tree], list[tuple[str | None, Any, Tree]]]:
        """Trees by parameter; and what is not of the usual form, as (parameter or None, key or None, tree)."""
        name_of = {id(parameter): name for name, parameter in names.parameters.items()}
        trees: dict[str, Tree] = {}
        own: list[tuple[str | None, Any, Tree]] = []
        for key, value in _with_lent(self.optimizer_state, lent):
            parameter = key if isinstance(key, torch.Tensor) else None
            name = f"~{key}" if parameter is None else name_of.get(id(key))
            if name is None:
                continue  # of another unit, or of a parameter that has left every group
            path = f"optimizer.state[{(key if parameter is None else name)!r}]"
            if parameter is None and self.members is not None:
                taken.leave_out(
                    f"{path} (it belongs to no parameter, so it is unknown which ranks hold it)", name, None
                )
            elif is_usual(key, value):
                before = len(taken.tensors)
                trees[name] = taken.dict_tree(value, name, path, parameter)
                box = None if parameter is None else self._plain_part(name, parameter)
                if box is not None:
                    taken.tensors[before:] = [placed(item, value, box) for item in taken.tensors[before:]]
            else:
                stored = unit_tensor_name(self.unit, "optim", f"~own.{len(own)}", "~")
                try:
                    refuse_unstorable(None if parameter is not None else key, f"{path}'s key")
                    tree = taken.tree(value, stored, path, parameter)
                except UnstorableError as error:
                    taken.leave_out(error.reason, name, None)
                else:
                    own.append((None if parameter is None else name, None if parameter is not None else key, tree))
        return trees, own

    def _state_elsewhere(self, names: Names) -> Iterator[torch.Tensor]:
        """State of parameters that other units have."""
        own = {id(parameter) for parameter in names.parameters.values()}
        for key, value in [*self.optimizer_state.items()] if self.members is not None else ():
            if isinstance(key, torch.Tensor) and id(key) not in own and isinstance(value, dict):
                yield from (one for one in [*value.values()] if isinstance(one, torch.Tensor))

    def _plain_part(self, name: str, parameter: torch.Tensor) -> ShardBox | None:
        """Which part of a whole a parameter is although it is a plain tensor; None for all others."""
        if is_shard(parameter) and not is_dtensor(parameter):
            return box_of(parameter, f"parameter {name!r}")
        return self.cut_by_hand.get(name)

    def _group_trees(self, names: Names, groups: list[dict[str, Any]] | None, taken: OptimizerTrees) -> list[Tree]:
        trees = []
        stored = copy_groups(self.optimizer) if groups is None else groups
        for place, g in enumerate(names.group_numbers):
            first = next(iter(self.optimizer.param_groups[g]["params"]), None)
            trees.append(taken.dict_tree(stored[g], f"~groups.{place}", f"optimizer.param_groups[{g}]", first))
        return trees


def _refuse_twice(tensors: Sequence[tuple[TensorSpec, torch.Tensor, str]]) -> None:
    taken: dict[str, str] = {}
    for spec, _, path in tensors:
        if spec.name in taken:
            raise ConfigError(
                f"{path} and {taken[spec.name]} would both be stored as {spec.name!r}; rename one of them"
            )
        taken[spec.name] = path


def _with_lent(
    state: Mapping[Any, Any], lent: Mapping[Any, dict[Any, Any] | None]
) -> Iterator[tuple[Any, dict[Any, Any]]]:
    every = {**dict.fromkeys(state), **dict.fromkeys(lent)} if lent else state
    for key in [*every]:
        missing = lent.get(key, {})
        if missing is not None:
            value = state.get(key, {})
            yield key, {**value, **missing} if missing else value


def _with_groups(every: Names, count: int) -> Names:
    """Of `every`, what was there when there were so many groups: the step under way adds those again that it added."""
    if not every.group_numbers or every.group_numbers[-1] < count:
        return every
    late = {name for number, group in zip(every.group_numbers, every.groups, strict=True) if number >= count
            for name in group if name.startswith("~")}  # fmt: skip
    kept = sum(number < count for number in every.group_numbers)
    return replace(
        every,
        parameters={name: p for name, p in every.parameters.items() if name not in late},
        groups=every.groups[:kept],
        group_numbers=every.group_numbers[:kept],
    )


def _restricted(every: Names, members: Members, rank_local: frozenset[str]) -> Names:
    """The part of `every` that belongs to one unit. Of rank-local buffers nothing else than this says what they are."""
    own, own_buffers = frozenset(members.parameters), frozenset(members.buffers)
    groups = [(number, tuple(name for name in group if name in own)) for number, group in enumerate(every.groups)]
    kept = [(number, group) for number, group in groups if group]
    return Names(
        parameters={name: p for name, p in every.parameters.items() if name in own},
        buffers={name: b for name, b in every.buffers.items() if name in own_buffers},
        aliases={alias: name for alias, name in every.aliases.items() if name in own or name in own_buffers},
        absent_buffers=tuple(name for name in every.absent_buffers if name in own_buffers),
        volatile_buffers=every.volatile_buffers & (own_buffers | rank_local),
        groups=tuple(group for _, group in kept),
        group_numbers=tuple(number for number, _ in kept),
        owners={name: owner for name, owner in every.owners.items() if name in own_buffers},
        refused={name: error for name, error in every.refused.items() if name in own or name in own_buffers},
        composite_buffers=every.composite_buffers,
    )
