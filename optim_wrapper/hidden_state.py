"""Attributes of an optimizer that move and are in no state_dict(): a resume begins with those of a new optimizer.

Nobody can tell what such an attribute is for, so it is neither saved nor set; it is named. A look takes some
microseconds for each tensor, and comes after 1, 2, 4, 8, ... steps.

A flag that a first step sets, once and for all, stays a reason: a resumed run begins with it unset and does again what
comes with it, such as copying slow weights or emptying a buffer. To set it would be no better: what was made along with
it would be missing. Only a value that is back where it began is the one that a resumed run begins with.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch.optim.optimizer import Optimizer

from lastwords.optim_wrapper.nested_optimizers import nested_in
from lastwords.optim_wrapper.tensors.tensor_bytes import problem_of, staged_bytes
from lastwords.sharding.dtensor import local_of

HASHED_BYTES_MAX = 1 << 20
"""Larger tensors, and those on a device, are told apart by where they lie and by how often they were written."""

_DEPTH_MAX = 4
_ITEMS_MAX = 1000
_LEAVES_MAX = 10_000
"""Of one attribute are looked at."""

KNOWN = frozenset({"state", "param_groups", "defaults", "grad_scale", "found_inf", "_step_count", "_opt_called"})
"""Saved, or set by schedulers and scalers of torch's and read by nobody else."""

_CACHES = frozenset({"_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured", "_numel_cache"})
"""torch's own optimizers make these again."""


class Saved(Protocol):
    """What the optimizer says itself, if it says anything."""

    def state_dict(self) -> Mapping[str, Any]: ...


class HiddenState:
    """Looks at the attributes of `optimizer`, which is called `name`, and of those nested in it.

    saved: what it says itself. model: its tensors are saved, or looked at, wherever they are.
    """

    def __init__(self, optimizer: Optimizer, name: str, saved: Saved | None, model: torch.nn.Module) -> None:
        self._optimizer = optimizer
        self._model = model
        self._name = name
        self._saved = saved
        self._first = self._look()

    def look(self) -> list[str]:
        """A reason for each attribute that is not what it was when it was first seen."""
        now = self._look()
        self._first = {**now, **self._first}
        moved = [place for place, mark in now.items() if self._first[place] != mark]
        return [
            f"{place} changes but is in no state_dict(), so a resumed run starts with a different value; "
            f"keep it in `state`, or save it in state_dict() and restore it in load_state_dict()"
            for place in moved
        ]

    def _look(self) -> dict[str, str]:
        """Place -> what tells its value from another one; without what is saved."""
        saved = [] if self._saved is None else [*_leaves(_said(self._saved), "", _DEPTH_MAX)]
        every = {"": self._optimizer, **nested_in(self._optimizer)}
        known = {id(tensor) for one in every.values() for tensor in tensors_in([*one.state.values(), one.param_groups])}
        known |= {id(value) for _, value in saved}
        known |= {id(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())}
        numbers = {_mark(value) for _, value in saved if not isinstance(value, torch.Tensor)}
        marks: dict[str, str] = {}
        for prefix, one in every.items():
            where = f"{self._name}.{prefix}." if prefix else f"{self._name}."
            for key, attribute in list(getattr(one, "__dict__", {}).items()):
                if key in KNOWN or key in _CACHES or key.startswith("_optimizer_"):
                    continue
                for place, value in islice(_leaves(attribute, f"{where}{key}", _DEPTH_MAX), _LEAVES_MAX):
                    if id(value) not in known and (mark := _mark(value)) and mark not in numbers:
                        marks[place] = mark
        return marks


def _said(saved: Saved) -> Mapping[str, Any]:
    try:
        return saved.state_dict()
    except Exception:  # of the user's own code: handed to the log by whoever saves it
        return {}


def tensors_in(value: Any, depth: int = 32) -> Iterator[torch.Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item, depth - 1)


def _leaves(value: Any, place: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Tensors, arrays and numbers in an attribute, also in plain objects of the user's. Generators are captured."""
    if isinstance(value, Optimizer | torch.nn.Module | type) or (callable(value) and not hasattr(value, "__dict__")):
        return
    if isinstance(value, torch.Tensor | np.ndarray | np.generic | int | float | complex):
        yield place, value
    elif depth and isinstance(value, Mapping):
        yield f"{place}'s length", len(value)
        for key, item in list(value.items())[:_ITEMS_MAX]:
            shown = key if isinstance(key, str | int) else type(key).__name__
            yield from _leaves(item, f"{place}[{shown!r}]", depth - 1)
    elif depth and isinstance(value, list | tuple | deque):
        yield f"{place}'s length", len(value)
        for index, item in enumerate(islice(value, _ITEMS_MAX)):
            yield from _leaves(item, f"{place}[{index}]", depth - 1)
    elif isinstance(value, set | frozenset):
        yield f"{place}'s length", len(value)
    elif depth and _is_users(value):
        for key, item in list(vars(value).items())[:_ITEMS_MAX]:
            yield from _leaves(item, f"{place}.{key}", depth - 1)


def _is_users(value: Any) -> bool:
    """Whether this is an object of a class that is neither Python's nor torch's."""
    module = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and not callable(value) and module not in ("builtins", "torch", "weakref")


def _mark(value: Any) -> str:
    """What tells a value from another one; "" for what cannot be looked at."""
    if isinstance(value, torch.Tensor):
        return _tensor_mark(local_of(value))
    if isinstance(value, np.ndarray):
        return "" if value.dtype.hasobject else _digest(value.tobytes())
    return f"{type(value).__name__} {value!r}"


def _tensor_mark(tensor: torch.Tensor) -> str:
    if problem_of(tensor):
        return ""
    if tensor.device.type != "cpu" or tensor.nbytes > HASHED_BYTES_MAX:
        return f"{tensor.data_ptr()} {0 if tensor.is_inference() else tensor._version}"
    return f"{tensor.dtype} {tuple(tensor.shape)} {_digest(staged_bytes(tensor))}"


def _digest(content: Any) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
