"""State that an optimizer's `state_dict()`, or a module's `get_extra_state()`, has and nobody else shows.

The optimizer's part (slow weights, counters) is an extra, the same on every rank: taken at each step's end, and
restored through its `load_state_dict()`. A module's is rank-local, like a buffer. Both cost one call and a copy of that
part in each step, and only where there is such a thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from lastwords.errors import UnstorableError
from lastwords.optim_wrapper.joined_optimizer import nested_in, state_of
from lastwords.optim_wrapper.state.plain_values import copy_groups
from lastwords.optim_wrapper.tensors.tensor_tree import leaves_of, take_apart
from lastwords.optim_wrapper.tensors.value_copies import copied, differ
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.sharding import zero
from lastwords.torch_private import has_state_dict_hooks

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
