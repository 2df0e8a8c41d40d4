"""Hyperparameters as they are at one moment: copies that share nothing with the optimizer that can change in place."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from operator import is_, is_not
from typing import Any

from torch.optim.optimizer import Optimizer

from lastwords.errors import UnstorableError
from lastwords.optim_wrapper.tensors.value_copies import advance

_ATOMS = frozenset({type(None), bool, int, float, str})


@dataclass(slots=True)
class _Seen:
    """A group's values when `copy` was made of them. changeable: keys of those that may change and stay one object."""

    keys: list[str]
    values: list[Any]
    changeable: frozenset[str]
    copy: dict[str, Any]


class GroupCopies:
    """`copy_groups` for every step: a value that cannot change is looked at again when it is another object."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._seen: list[_Seen] = []
        self._copies: list[dict[str, Any]] = []

    def take(self) -> list[dict[str, Any]]:
        """Hyperparameters of every group as they are now; not to be changed."""
        groups, seen = self._optimizer.param_groups, self._seen
        if len(groups) != len(seen):
            self._seen = [_look(group) for group in groups]
        elif not all(map(_unchanged, groups, seen)):
            self._seen = [*map(_look_again, groups, seen)]
        else:
            return self._copies
        self._copies = [one.copy for one in self._seen]
        return self._copies


def copy_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Hyperparameters of every param group, without the parameters."""
    return [_look(group).copy for group in optimizer.param_groups]


def _unchanged(group: dict[str, Any], seen: _Seen) -> bool:
    return not seen.changeable and [*group] == seen.keys and all(map(is_, group.values(), seen.values))


def _look(group: dict[str, Any]) -> _Seen:
    changeable = frozenset(key for key, value in group.items() if key != "params" and not _is_fixed(value))
    copy = {key: copied(value) if key in changeable else value for key, value in group.items() if key != "params"}
    return _Seen([*group], [*group.values()], changeable, copy)


def _look_again(group: dict[str, Any], seen: _Seen) -> _Seen:
    """`_look`, which looks only at what may be different from what was seen: a scheduler changes one value a step."""
    keys, values = [*group], [*group.values()]
    if keys != seen.keys:
        return _look(group)
    copy, changeable = seen.copy.copy(), seen.changeable
    for key in compress(keys, map(is_not, values, seen.values)):
        if key == "params":
            continue
        if key in changeable or not _is_fixed(group[key]):
            return _look(group)
        copy[key] = group[key]
    for key in changeable:
        copy[key] = copied(group[key])
    return _Seen(keys, values, changeable, copy)


def _is_fixed(value: Any) -> bool:
    """Whether a value is the same as long as it is the same object, by its type and by those inside."""
    kind = type(value)
    return kind in _ATOMS or (kind is tuple and all(map(_is_fixed, value)))


def copies_differ(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    """Whether two takes differ; of what cannot be stored, whether it is another object."""
    if before is now:
        return False
    return len(before) != len(now) or any(map(_differs, before, now))


def _differs(before: dict[str, Any], now: dict[str, Any]) -> bool:
    try:
        return before.keys() != now.keys() or any(
            value is not before[key] and advance(before[key], value)[1] for key, value in now.items()
        )
    except (UnstorableError, RecursionError):  # it could be copied before
        return True


def copied(value: Any) -> Any:
    """A copy that shares nothing that can change; of what cannot be stored, the value itself."""
    try:
        return advance(None, value)[0]
    except (UnstorableError, RecursionError):
        return value  # it will be left out of what is saved, and that is said
