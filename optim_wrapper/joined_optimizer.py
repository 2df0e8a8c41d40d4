"""Several optimizers seen as one, for everything that reads or restores state: a job's, and those inside each other.

Lookahead around Adam, SAM around SGD: torch's own `state_dict()` of such a wrapper leaves the inner state out, unless
its author has thought of it. Here it is part of the parameter's state, under names that begin with the attribute's:
`base_optimizer.momentum_buffer`. So it is saved and restored like any moment: without a copy in each step, in its own
type, in other layouts too. Of a ZeroRedundancyOptimizer the local one has the state: this rank's share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch.optim.optimizer import Optimizer

from lastwords.errors import ConfigError
from lastwords.sharding import zero

_DEPTH_MAX = 4


class JoinedOptimizer(Optimizer):
    """`param_groups` and `state` of all `parts`, in their order. Both are live: what is written goes to the parts.

    It never steps. Raises ConfigError if two parts share a parameter: its state could not be told apart.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        # Optimizer.__init__ would make a state and groups of its own.
        self.parts = tuple(parts)
        self.defaults: dict[str, Any] = {}
        owners: dict[int, int] = {}
        for number, part in enumerate(self.parts):
            for group in part.param_groups:
                for parameter in group["params"]:
                    if owners.setdefault(id(parameter), number) != number:
                        raise ConfigError(
                            f"optimizers {owners[id(parameter)]} and {number} share a parameter of shape "
                            f"{tuple(parameter.shape)}; each parameter belongs to one optimizer"
                        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all parts: a new list, the same dicts."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return _JoinedState(self.parts)


def optimizer_kind(optimizer: Optimizer) -> str:
    """Name of an optimizer's class; those of all parts where there are several.

    >>> optimizer_kind(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    'SGD'
    """
    return "+".join(type(part).__name__ for part in zero.parts_of(optimizer))


def state_of(optimizer: Optimizer) -> MutableMapping[Any, Any]:
    """The state of an optimizer, or of a set of them, with that of those nested in each."""
    alone = not hasattr(optimizer, "parts") and not nested_in(optimizer)
    return zero.stateful(optimizer).state if alone else _JoinedState(zero.parts_of(optimizer))


def order_state(optimizer: Optimizer) -> None:
    """Entries in the order of the parameters, as an optimizer makes them: a loop may add them up."""
    for one in with_state(optimizer).values():
        state, trained = one.state, [parameter for group in one.param_groups for parameter in group["params"]]
        first = {parameter: state[parameter] for parameter in trained if parameter in state}
        every = first | {key: entry for key, entry in state.items() if key not in first}
        state.clear()
        state.update(every)


def with_state(optimizer: Optimizer) -> dict[str, Optimizer]:
    """All that have a state of their own: parts of a set, and those nested in each; by what their names begin with."""
    joined = hasattr(optimizer, "parts")
    return {
        f"[{number}].{name}" if joined else name: one
        for number, part in enumerate(zero.parts_of(optimizer))
        for name, one in _inside(part).items()
    }


def nested_in(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Optimizers among the attributes, with a state of their own; also in lists and dicts, and in one another."""
    found: dict[str, Optimizer] = {}
    seen = {id(optimizer), id(optimizer.state)}
    if zero.stateful(optimizer) is optimizer:  # of ZeRO's the local one is known already
        _find(getattr(optimizer, "__dict__", {}), "", found, seen, _DEPTH_MAX)
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


def _inside(part: Optimizer) -> dict[str, Optimizer]:
    return {"": zero.stateful(part), **{f"{name}.": one for name, one in nested_in(part).items()}}


class _JoinedState(MutableMapping[Any, Any]):
    """A parameter's is a new dict where nested optimizers have some of it; setting it sets all of them.

    State of no parameter, and what is no dict, is that of the outer optimizer alone.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = [(part, {name: one.state for name, one in _inside(part).items()}) for part in parts]

    def _of(self, key: Any) -> dict[str, Any]:
        """The states of the part that has this, or is to have it."""
        for _, states in self._parts:
            if any(key in state for state in states.values()):
                return states
        having = (
            states for part, states in self._parts for group in part.param_groups for p in group["params"] if p is key
        )
        return next(having, self._parts[0][1])

    def __getitem__(self, key: Any) -> Any:
        inside = {name: state[key] for name, state in self._of(key).items() if key in state}
        if not inside:
            raise KeyError(key)  # a look into a defaultdict would make an entry
        own = inside.pop("", {})
        if not inside or type(own) is not dict:
            return own
        return own | {f"{name}{inner}": value for name, state in inside.items() for inner, value in state.items()}

    def __setitem__(self, key: Any, value: Any) -> None:
        states = self._of(key)
        if len(states) == 1 or type(value) is not dict:
            states[""][key] = value
            return
        parts: dict[str, dict[Any, Any]] = {} if value else {"": {}}
        for inner, item in value.items():
            prefix = next((name for name in states if name and str(inner).startswith(name)), "")
            parts.setdefault(prefix, {})[str(inner).removeprefix(prefix) if prefix else inner] = item
        for prefix, state in states.items():
            if prefix in parts:
                state[key] = parts[prefix]
            else:
                state.pop(key, None)

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        for state in self._of(key).values():
            state.pop(key, None)

    def __iter__(self) -> Iterator[Any]:
        return iter(dict.fromkeys(key for _, states in self._parts for state in states.values() for key in state))

    def __len__(self) -> int:
        return sum(1 for _ in self)  # not [*self], which asks for the length
