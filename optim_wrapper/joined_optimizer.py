"""Several optimizers seen as one, for everything that reads or restores state. It never steps."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from torch.optim.optimizer import Optimizer

from lastwords.errors import ConfigError
from lastwords.optim_wrapper import nested_optimizers


class JoinedOptimizer(Optimizer):
    """`param_groups` and `state` of all `parts`, in their order. Both are live: what is written goes to the parts.

    Raises ConfigError if two parts share a parameter: its state could not be told apart.
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
        """The states of all parts; of a ZeroRedundancyOptimizer this rank's share."""
        return _JoinedState([nested_optimizers.stateful(part) for part in self.parts])

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Not to be called."""
        raise NotImplementedError("a JoinedOptimizer only reads state; call step() of its optimizers")

    def __repr__(self) -> str:
        return "+".join(type(part).__name__ for part in self.parts)


class _JoinedState(MutableMapping[Any, Any]):
    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = parts

    def _owner(self, key: Any) -> Optimizer:
        for part in self._parts:
            if key in part.state or any(key is p for group in part.param_groups for p in group["params"]):
                return part
        return self._parts[0]

    def __getitem__(self, key: Any) -> Any:
        return self._owner(key).state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._owner(key).state[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._owner(key).state[key]

    def __contains__(self, key: object) -> bool:
        return any(key in part.state for part in self._parts)  # a look into a defaultdict would make an entry

    def get(self, key: Any, default: Any = None) -> Any:
        """The state of a parameter, without making one."""
        for part in self._parts:
            if key in part.state:
                return part.state[key]
        return default

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            yield from part.state

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)


def optimizer_kind(optimizer: Optimizer) -> str:
    """Name of an optimizer's class; those of all parts where there are several.

    >>> optimizer_kind(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    'SGD'
    """
    return repr(optimizer) if isinstance(optimizer, JoinedOptimizer) else type(optimizer).__name__
