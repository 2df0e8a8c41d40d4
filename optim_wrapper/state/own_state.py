"""State that an optimizer's `state_dict()`, or a module's `get_extra_state()`, has and nobody else shows.

The optimizer's part (slow weights, counters) is an extra, the same on every rank: taken at each step's end, and
restored through its `load_state_dict()`. A module's is rank-local, like a buffer. Both cost one call and a copy of that
part in each step, and only where there is such a thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from lastwords.checkpoint.entries import folded, node_of
from lastwords.checkpoint.layout import unit_tensor_name
from lastwords.checkpoint.meta import Tree
from lastwords.errors import UnstorableError
from lastwords.optim_wrapper.joined_optimizer import nested_in, state_of
from lastwords.optim_wrapper.state.plain_values import copy_groups
from lastwords.optim_wrapper.tensors.tensor_bytes import extent_of
from lastwords.optim_wrapper.tensors.tensor_tree import NamedTensor, copied, differ, leaves_of, take_apart
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.sharding import zero
from lastwords.sharding.dtensor import ShardBox, is_dtensor, local_of
from lastwords.torch_private import has_state_dict_hooks

# What is in an optimizer's state and groups, as trees and tensors; what cannot be stored is left out.


@dataclass(slots=True)
class OptimizerTrees:
    """What has been taken out of an optimizer so far. left_out: (state's name, key, or None for all of it)."""

    unit: str
    tensors: list[NamedTensor] = field(default_factory=list)
    left_out: list[tuple[str, str | None]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def leave_out(self, reason: str, name: str, key: str | None) -> None:
        self.left_out.append((name, key))
        self.reasons.append(f"{reason} cannot be stored")

    def dict_tree(self, value: dict[str, Any], name: str, path: str, parameter: torch.Tensor | None) -> Tree:
        pairs = []
        for key, item in list(value.items()):
            problem = (
                "" if is_usual_key(key) else ("is empty or contains '/'" if type(key) is str else "is not a string")
            )
            if problem:
                self.leave_out(f"{path}[{key!r}] (its name {problem})", name, str(key))
                continue
            try:
                stored = unit_tensor_name(self.unit, "optim", name, key)
                pairs.append([key, self.tree(item, stored, f"{path}[{key!r}]", parameter)])
            except UnstorableError as error:
                self.leave_out(error.reason, name, key)
        return {"dict": pairs}

    def tree(self, value: Any, stored: str, path: str, parameter: torch.Tensor | None) -> Tree:
        home = None if parameter is None else parameter.device
        sharded = parameter is not None and is_dtensor(parameter)
        node, found = take_apart(value, stored, path, home, sharded=sharded)
        if sharded:
            _refuse_other_mesh(parameter, found)
        self.tensors += found
        return _unshared(node, path)


def shared_in(
    tensors: Sequence[NamedTensor], elsewhere: Iterable[torch.Tensor] = ()
) -> tuple[dict[str, str], list[str]]:
    """Name of each tensor that lies where another one lies -> that one's name; and reasons why the rest is not exact.

    The rest lies partly in another one's memory, or in that of a tensor `elsewhere`, which is in no file or another.
    """
    places = {item.name: _place_of(item.tensor) for item in tensors}
    first: dict[Any, NamedTensor] = {}
    shared = {
        item.name: first[place].name
        for item in tensors
        if (place := places[item.name]) is not None and first.setdefault(place, item) is not item
    }
    spans = sorted((place[0], place[1], item.path) for place, item in first.items())
    reasons = [
        f"{one} and {other} share part of their memory, but will not after a resume"
        for (_, end, one), (begin, _, other) in pairwise(spans)
        if begin < end
    ]
    outside = {place[:2] for tensor in elsewhere if (place := _place_of(tensor)) is not None}
    reasons += [
        f"{item.path} shares memory with state of another unit, but will not after a resume"
        for place, item in first.items()
        if place[:2] in outside
    ]
    return shared, reasons


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """First byte, the one behind the last, and what else two tensors have to have in common to be the same."""
    local = local_of(tensor)
    if local.layout is not torch.strided or not local.numel() or local.device.type == "meta":
        return None
    begin = local.data_ptr()
    form = tuple(local.shape), local.stride(), str(local.dtype), str(local.device)
    return (begin, begin + extent_of(local) * local.element_size(), *form) if begin else None


def _unshared(tree: Tree, path: str) -> Tree:
    """With copies of plain lists and dicts: a step's copy in the host's memory outlives the next update."""

    def made(kind: str, about: Any, inside: list[Any]) -> Tree:
        return node_of(kind, copied(about) if kind == "plain" else about, inside)

    return folded(tree, dict, made, path)  # type: ignore[no-any-return]


def generators_in(tree: Tree) -> set[str]:
    """Names of the tensors in a tree that are states of random generators.

    >>> generators_in({"object": ["generator", "cpu", [{"tensor": "noise.0", "dtype": "uint8"}]]})
    {'noise.0'}
    """
    found: set[str] = set()

    def made(kind: str, about: Any, inside: list[Any]) -> None:
        found.update(inside if kind == "generator" else ())

    folded(tree, lambda node: node["tensor"], made, "the optimizer's state")
    return found


def is_usual(key: Any, state: Any) -> bool:
    """Whether state has the form that torch's optimizers give it, which every layout and every tool understands."""
    return type(state) is dict and (type(key) is str or isinstance(key, torch.Tensor)) and all(map(is_usual_key, state))


def is_usual_key(key: Any) -> bool:
    """Whether a tensor can be named after this key."""
    return type(key) is str and key != "" and "/" not in key


def placed(item: NamedTensor, state: dict[str, Any], box: ShardBox) -> NamedTensor:
    """A moment, which has its parameter's shape, is the part that its parameter is; a counter is no part."""
    moment = tuple(item.tensor.shape) == box.shape
    moment = moment and any(value is item.tensor and key != "step" for key, value in state.items())
    return replace(item, box=box) if moment else item


def _refuse_other_mesh(parameter: Any, found: list[NamedTensor]) -> None:
    for item in found:
        tensor: Any = item.tensor
        if is_dtensor(tensor) and tensor.device_mesh != parameter.device_mesh:
            what = f"on the mesh {tensor.device_mesh}, its parameter on {parameter.device_mesh}"
            raise UnstorableError(
                f"{item.path} is {what}; such an optimizer's state cannot be stored", f"{item.path} ({what})"
            )


GROUPS_OF = "param_groups of "
"""Stands before the name of a nested optimizer that does not share its param_groups with the one around it."""


class OwnState:
    """Base of what stands among the extras without the user's doing. reasons: why the state is not all there."""

    final_after_update = False
    """Whether it moves in the update only: then it is final as soon as that is over."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reasons: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        raise NotImplementedError

    def not_saved(self) -> None:
        """The checkpoint has none: the saved run had no such thing."""
        self.say(f"{self.name} has state beside its parameters' state, and the checkpoint has none of it")

    def say(self, reason: str) -> None:
        """Add a reason, once."""
        if reason not in self.reasons:
            self.reasons.append(reason)


class OwnOptimizerState(OwnState):
    """What `state_dict()` of a wrapped optimizer has beside the state and the groups that are saved anyway.

    whole: whether each rank holds all of the job's state. Where it does not, nobody knows which rank's tensors these
    are, so they are left out, with a reason.
    """

    final_after_update = True

    def __init__(self, wrapper: OptTFTWrapper, name: str, whole: Callable[[], bool]) -> None:
        super().__init__(f"{name}.state_dict()")
        self._wrapper = wrapper
        self._whole = whole

    def state_dict(self) -> dict[str, Any]:
        """The part that is not saved otherwise."""
        inner = self._wrapper.inner
        own = self._own(self._wrapper.state_dict())
        for name, nested in nested_in(inner).items():
            if not _share_groups(inner, nested):
                own[GROUPS_OF + name] = copy_groups(nested)
        return own

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Hand it to the optimizer's load_state_dict(), with the state as it has been restored already.

        torch's casts moments to their parameters' type and makes new groups, so both are put back afterwards.
        """
        wrapper = self._wrapper
        own = {key: value for key, value in saved.items() if not str(key).startswith(GROUPS_OF)}
        nested = nested_in(wrapper.inner)
        before = _Restored([wrapper.inner, *nested.values()])
        if own:
            wrapper.load_state_dict({**wrapper.state_dict(), **copied(own)})
            before.put_back()
        for name, one in nested.items():
            for group, values in zip(one.param_groups, saved.get(GROUPS_OF + name, ()), strict=False):
                group.update(copied(values))
        now = self.state_dict()
        for key in saved:
            if key not in now or differ(saved[key], now[key]):
                self.say(f"{self.name}[{key!r}] differs from the state that was passed to load_state_dict()")

    # ------------------------------------------------------------------ inside

    def _own(self, full: Mapping[str, Any]) -> dict[str, Any]:
        inner = self._wrapper.inner
        every = [inner, *nested_in(inner).values()]
        known = {id(tensor) for tensor in _tensors_of(every)}
        usual = [_packed(one) for one in every]
        own: dict[str, Any] = {}
        for key, value in full.items():
            if any(key in one and _alike(value, one[key]) for one in usual):
                continue
            tensors = _tensors_in(value)
            if tensors and key not in ("state", "param_groups") and all(id(one) in known for one in tensors):
                continue
            if tensors and not self._whole():
                what = "holds tensors that are in no parameter's state, and the job's state is sharded"
                self.say(f"{self.name}[{key!r}] {what}: it is not saved")
                continue
            own[key] = value
        return own


class ModuleStates(OwnState):
    """`get_extra_state()` of all modules that have one, by the module's name."""

    def __init__(self, model: torch.nn.Module, called: Callable[[str], str]) -> None:
        super().__init__("model.get_extra_state()")
        self._model = model
        self._called = called

    def state_dict(self) -> dict[str, Any]:
        """What can be stored of it."""
        found: dict[str, Any] = {}
        for name, module in self.modules():
            value = module.get_extra_state()
            try:
                take_apart(value, "x", f"{name}.get_extra_state()")
            except (UnstorableError, RecursionError) as error:
                self.say(f"{getattr(error, 'reason', error)} cannot be stored")
            else:
                found[name] = value
        return found

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Hand each module its own."""
        modules = dict(self.modules())
        for name, value in saved.items():
            if name in modules:
                modules[name].set_extra_state(value)
        for name in sorted(saved.keys() ^ modules.keys()):
            where = "here" if name in modules else "in the checkpoint"
            self.say(f"the module {name!r} has get_extra_state() {where} only")

    def modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Those that can give and take a state."""
        for name, module in self._model.named_modules():
            kind, plain = type(module), torch.nn.Module
            if kind.get_extra_state is not plain.get_extra_state and kind.set_extra_state is not plain.set_extra_state:
                yield self._called(name.replace("_orig_mod.", "")) if name else "", module


def of_optimizers(wrappers: Sequence[OptTFTWrapper], whole: Callable[[], bool]) -> dict[str, OwnState]:
    """Those of a job's optimizers; torch's own have none. whole: see `OwnOptimizerState`."""
    names = ["optimizer"] if len(wrappers) == 1 else [f"optimizer[{number}]" for number in range(len(wrappers))]
    pairs = zip(wrappers, names, strict=True)
    every = [OwnOptimizerState(wrapper, name, whole) for wrapper, name in pairs if _speaks_for_itself(wrapper)]
    return {own.name: own for own in every}


def of_modules(model: torch.nn.Module, called: Callable[[str], str]) -> dict[str, OwnState]:
    """That of a model's modules; torch's own have none. called: see `GlobalNames`."""
    own = ModuleStates(model, called)
    return {own.name: own} if any(True for _ in own.modules()) else {}


def _speaks_for_itself(wrapper: OptTFTWrapper) -> bool:
    inner = wrapper.inner
    if zero.stateful(inner) is not inner:
        return False  # its state_dict() asks for a collective first
    hooks = has_state_dict_hooks(wrapper) or has_state_dict_hooks(inner)
    own_groups = any(not _share_groups(inner, one) for one in nested_in(inner).values())
    return type(inner).state_dict is not Optimizer.state_dict or "state_dict" in vars(inner) or own_groups or hooks


class _Restored:
    """State and groups as they are now, to be put back into whatever objects load_state_dict() leaves."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        first = optimizers[0]
        self._shared = [_share_groups(first, one) for one in optimizers]
        self._kept = [
            (one, {key: dict(value) if type(value) is dict else value for key, value in one.state.items()},
             [dict(group) for group in one.param_groups])
            for one in optimizers
        ]  # fmt: skip

    def put_back(self) -> None:
        first = self._kept[0][0]
        for (optimizer, state, groups), shared in zip(self._kept, self._shared, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)
            if shared:
                optimizer.param_groups = first.param_groups
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(values)


def _share_groups(outer: Optimizer, nested: Optimizer) -> bool:
    return [*map(id, outer.param_groups)] == [*map(id, nested.param_groups)]


def _packed(optimizer: Optimizer) -> dict[str, Any]:
    """What torch's own state_dict() gives, without running anybody's hooks."""
    numbers: dict[int, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            numbers.setdefault(id(parameter), len(numbers))
    state = {
        numbers.get(id(key), key) if isinstance(key, torch.Tensor) else key: value
        for key, value in optimizer.state.items()
    }
    groups = [{**group, "params": [numbers[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def _tensors_of(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from _tensors_in(list(group.values()))
        yield from _tensors_in(list(state_of(optimizer).values()))


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def _alike(one: Any, other: Any) -> bool:
    """Whether two values are the same down to their tensors, which have to be the same objects."""
    if one is other:
        return True
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if type(one) is not type(other) or not isinstance(one, str | int | float | bool | complex | bytes):
        return False
    return bool(one == other)
