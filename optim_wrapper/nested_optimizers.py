"""Optimizers inside an optimizer: Lookahead around Adam, SAM around SGD. Their state is state of the same parameters.

torch's own `state_dict()` of such a wrapper leaves the inner state out, unless its author has thought of it. Here it is
part of the parameter's state, under names that begin with the attribute's: `base_optimizer.momentum_buffer`. So it is
saved and restored like any moment: without a copy in each step, in its own type, in other layouts too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch.optim.optimizer import Optimizer

from lastwords.sharding import zero

_DEPTH_MAX = 4


def nested_in(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Optimizers among the attributes, with a state of their own; also in lists and dicts, and in one another."""
    found: dict[str, Optimizer] = {}
    seen = {id(optimizer), id(optimizer.state)}
    if zero.stateful(optimizer) is optimizer:  # of ZeRO's the local one is known already
        _find(getattr(optimizer, "__dict__", {}), "", found, seen, _DEPTH_MAX)
    return found


def optimizers_in(optimizer: Optimizer) -> dict[str, Optimizer]:
    """All that have a state of their own: the parts of a set, of ZeRO's the local one, and those nested in each.

    By what stands before the names of what they have: `[1].base_optimizer.`, say.
    """
    found: dict[str, Optimizer] = {}
    for number, part in enumerate(zero.parts_of(optimizer)):
        prefix = f"[{number}]." if hasattr(optimizer, "parts") else ""
        found |= {prefix: zero.stateful(part), **{f"{prefix}{name}.": one for name, one in nested_in(part).items()}}
    return found


def _find(values: Mapping[Any, Any], prefix: str, found: dict[str, Optimizer], seen: set[int], depth: int) -> None:
    for key, value in list(values.items()):
        name = f"{prefix}{key}".replace("/", "_")
        if isinstance(value, Optimizer):
            inner = zero.stateful(value)
            if id(inner) in seen or id(inner.state) in seen:
                continue
            seen |= {id(inner), id(inner.state)}
            found[name] = inner
            if depth:
                _find(getattr(inner, "__dict__", {}), f"{name}.", found, seen, depth - 1)
        elif depth and key not in ("state", "param_groups", "defaults") and type(value) in (list, tuple, dict):
            items = value if isinstance(value, dict) else dict(enumerate(value))
            _find(items, f"{name}.", found, seen, depth - 1)


def stateful(optimizer: Optimizer) -> Any:
    """What has `state` and `param_groups` of the optimizer and of those nested in it; see also `zero.stateful`."""
    nested = nested_in(optimizer) if not hasattr(optimizer, "parts") else {}
    return _WithNested(optimizer, nested) if nested else zero.stateful(optimizer)


class _WithNested:
    def __init__(self, outer: Optimizer, nested: Mapping[str, Optimizer]) -> None:
        self.param_groups = outer.param_groups
        self.state = NestedState(outer, nested)


class NestedState(MutableMapping[Any, Any]):
    """The states of an optimizer and of those in it as one. A parameter's is a new dict; setting it sets all of them.

    State of no parameter, and what is no dict, is the outer optimizer's alone.
    """

    def __init__(self, outer: Optimizer, nested: Mapping[str, Optimizer]) -> None:
        self._outer = outer.state
        self._nested = {f"{name}.": one.state for name, one in nested.items()}

    def __getitem__(self, key: Any) -> Any:
        if key not in self:
            raise KeyError(key)  # a look into a defaultdict would make an entry
        inside = {name: state[key] for name, state in self._nested.items() if key in state}
        if not inside:
            return self._outer[key]
        own = self._outer.get(key, {})
        if type(own) is not dict:
            return own
        merged = dict(own)
        for name, state in inside.items():
            merged |= {f"{name}{inner}": value for inner, value in state.items()}
        return merged

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(value) is not dict:
            self._outer[key] = value
            return
        parts: dict[str, dict[Any, Any]] = {} if value else {"": {}}
        for inner, item in value.items():
            prefix = next((name for name in self._nested if str(inner).startswith(name)), "")
            parts.setdefault(prefix, {})[str(inner).removeprefix(prefix) if prefix else inner] = item
        for prefix, state in (("", self._outer), *self._nested.items()):
            if prefix in parts:
                state[key] = parts[prefix]
            else:
                state.pop(key, None)

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        for state in (self._outer, *self._nested.values()):
            state.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return any(key in state for state in (self._outer, *self._nested.values()))

    def __iter__(self) -> Iterator[Any]:
        return iter(dict.fromkeys(key for state in (self._outer, *self._nested.values()) for key in state))

    def __len__(self) -> int:
        return len(set(map(id, self)))
