"""One walk over objects: their attributes, and what Python's containers in these hold. It runs no code of the user's.

An attribute of an object is a *cell*. What is in it is told in plain values: atoms, containers and tensors as they
are, and a `Place` for each thing that is somewhere else as well, or is no data: another object (whose attributes are
cells of their own), a container that was met before, a tensor that is saved by its name, a function.
"""

from __future__ import annotations

import enum
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from lastwords.checkpoint.storable import Place, refuse_unstorable
from lastwords.errors import UnstorableError
from lastwords.optim_wrapper.streams.places import is_of_the_user
from lastwords.optim_wrapper.tensors.tensor_bytes import problem_of
from lastwords.optim_wrapper.tensors.tree_objects import is_object, parts_of
from lastwords.sharding.dtensor import local_of

OBJECTS_MAX = 20_000
"""Objects and containers; the walk ends there."""

ITEMS_MAX = 1000
"""A container with more items is told by their number and by some of them."""

VALUE_BYTES_MAX = 64 << 10
"""Of one attribute; what is larger is told by its form."""

_ADDRESSES_FROM = 1 << 16
ID, DATA_PTR = "id", "data_ptr"
"""Kinds of a `Place` that stands for an integer."""

_SAMPLES = 16
_DEPTH_MAX = 24

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_SEQUENCES = frozenset({list, tuple, deque})
_DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_NO_DATA = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.GeneratorType,
    types.CodeType, type, staticmethod, classmethod, property,
)  # fmt: skip


class Shadow:
    """Has the attributes of an object, and does not keep it alive."""

    def __init__(self, of: Any) -> None:
        self.__dict__ = vars(of)


_WALKED = (Shadow, torch.nn.Module, Optimizer, DataLoader, Sampler, Dataset)
"""Looked into whoever has made the class; of other classes only those of the user's own."""

_OF_ANY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
_OF_ANY_OPTIMIZER = frozenset(
    {"state", "param_groups", "defaults", "grad_scale", "found_inf", "_step_count", "_opt_called", "step",
     "_zero_grad_profile_name", "_patched_optim", "_need_device_dtype_check_for_fused", "_numel_cache",
     "_warned_capturable_if_run_uncaptured"}
)  # fmt: skip
"""Saved with the optimizer, or set by torch's own schedulers and scalers, which nobody else reads, or made again."""

_MACHINERY = ("torch.distributed", "torch._", "torch.nn.parallel")

GONE = Place("", "gone")
"""There is no such attribute any more."""

CODE = Place("", "code")
"""A function, a method, a class: no state, whatever is assigned."""


class Cell(NamedTuple):
    """An attribute. told: what was in it when it was looked at last."""

    holder: Any
    key: str
    told: Any


class Walk:
    """The cells reached from `roots`, by the holder's path and the attribute's name, in the order they are met.

    saved: name -> tensors that are saved by these.
    """

    def __init__(self, roots: Mapping[str, Any], saved: Mapping[str, torch.Tensor]) -> None:
        self.cells: dict[tuple[str, str], Cell] = {}
        self.objects: dict[str, Any] = {}
        """By their paths."""
        self.containers: dict[str, Any] = {}
        self.ended_at = ""
        """Where it ended, if that was before everything had been met."""
        self._saved = {id(tensor): name for name, tensor in saved.items()}
        plain = {name: local for name, tensor in saved.items() if not problem_of(local := local_of(tensor))}
        self._pointers = {tensor.data_ptr(): name for name, tensor in plain.items()}
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in plain.values()} - {0}
        self._paths: dict[int, str] = {}
        self._containers: dict[int, str] = {}
        self._queue: deque[tuple[str, Any]] = deque()
        for name, root in roots.items():
            if is_walked(root):
                self._meet(name, root)
        self._go_on()

    def again(self, cells: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Any]:
        """What is told of these cells now, and of those of objects that have come into them."""
        self.containers, self._containers = {}, {}
        before = self.cells.keys()
        told = {(path, key): self._cell(path, key, self.objects[path]).told for path, key in cells}
        count = len(before)
        self._go_on()
        return told | {place: self.cells[place].told for place in islice(self.cells, count, None)}

    def _go_on(self) -> None:
        while self._queue:
            path, one = self._queue.popleft()
            if isinstance(one, torch.nn.Module):
                for name, child in [*one._modules.items()]:
                    if child is not None:
                        self._meet(f"{path}.{name}", child)
            for key in attributes_of(one):
                self._cell(path, key, one)
            if isinstance(one, torch.nn.Module):
                for key in ("_parameters", "_buffers"):  # of a module that nobody has registered
                    if any(
                        id(tensor) not in self._saved for tensor in [*own_of(one)[key].values()] if tensor is not None
                    ):
                        self._cell(path, key, one)

    def _cell(self, path: str, key: str, one: Any) -> Cell:
        value = own_of(one).get(key, GONE)
        cell = Cell(one, key, GONE if value is GONE else self.told(value, f"{path}.{key}", 0))
        self.cells[path, key] = cell
        return cell

    def _meet(self, path: str, one: Any) -> str:
        """The path of an object, which is this one if it is met for the first time."""
        known = self._paths.get(id(one))
        if known is not None:
            return known
        if len(self._paths) + len(self._containers) >= OBJECTS_MAX:
            self.ended_at = self.ended_at or path
            return ""
        self._paths[id(one)] = path
        self.objects[path] = one
        self._queue.append((path, one))
        return path

    def told(self, value: Any, path: str, depth: int) -> Any:
        """What is told of a value that lies at `path`."""
        kind = type(value)
        if kind in _ATOMS:
            if kind is int:
                return value if value < _ADDRESSES_FROM else self._address(value)
            large = kind in (str, bytes) and len(value) > VALUE_BYTES_MAX
            return Place("", f"{kind.__name__} of {len(value)} characters") if large else value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind in _SEQUENCES or kind in _DICTS or kind is set or kind is frozenset:
            return self._container(value, kind, path, depth)
        if isinstance(value, _NO_DATA):
            return CODE
        if isinstance(value, _GENERATORS):
            return Place("", "a random generator")
        if isinstance(value, enum.Enum):
            return Place("", f"{_kind(value)}.{own_of(value)['_name_']}")
        if isinstance(value, np.ndarray) and value.nbytes > VALUE_BYTES_MAX:
            return Place("", f"numpy.ndarray of {value.shape} at {value.__array_interface__['data'][0]}")
        if is_walked(value):
            return Place(self._meet(path, value), _kind(value))
        return value if _is_storable(value) else Place("", _kind(value))

    def _address(self, value: int) -> Any:
        """An integer, or whose `id()` or `data_ptr()` it is: in another process that has another one."""
        if value in self._saved:
            return Place(self._saved[value], ID)
        if value in self._paths:
            return Place(self._paths[value], ID)
        name = self._pointers.get(value)
        return value if name is None else Place(name, DATA_PTR)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        name = self._saved.get(id(tensor))
        if name is not None:
            return Place(name, "")
        if problem_of(tensor):
            return Place("", _kind(tensor))
        if tensor.nbytes and tensor.untyped_storage().data_ptr() in self._storages:
            return Place("", "a view of a tensor that is saved")
        return tensor

    def _container(self, value: Any, kind: type[Any], path: str, depth: int) -> Any:
        if depth > _DEPTH_MAX:
            return Place("", "deeper")
        if not value:
            return value
        if kind is not tuple and kind is not frozenset:
            met = self._containers.setdefault(id(value), path)
            if met != path:
                return Place(met, kind.__name__)
            self.containers[path] = value
        if len(value) > ITEMS_MAX:
            return Place("", f"{kind.__name__} of {len(value)}{self._samples(value, kind)}")
        if kind in _DICTS:
            if not all(map(self._is_key, [*value])):
                return Place("", f"{kind.__name__} of {len(value)} with objects for keys")
            items = {
                self.told(key, f"{path} key", depth + 1): self.told(item, f"{path}[{key!r}]", depth + 1)
                for key, item in [*value.items()]
            }
            if all(item is value.get(key, self) for key, item in items.items()):
                return value
            return items if kind is not defaultdict else defaultdict(value.default_factory, items)
        if kind is set or kind is frozenset:
            return value if all(type(item) in _ATOMS for item in value) else Place("", f"{kind.__name__} of objects")
        told = [self.told(item, f"{path}[{index}]", depth + 1) for index, item in enumerate([*value])]
        if all(map(_is, told, value)):
            return value
        return deque(told, value.maxlen) if kind is deque else kind(told)

    def _is_key(self, key: Any) -> bool:
        """Whether it can be told by a value: an atom, a tuple of such, or a tensor that has a name."""
        if isinstance(key, torch.Tensor):
            return id(key) in self._saved
        return type(key) in _ATOMS or (type(key) is tuple and all(map(self._is_key, key)))

    def _samples(self, value: Any, kind: type[Any]) -> str:
        """Some atoms of a container with many items."""
        if kind not in (list, tuple):
            return ""
        found = [value[at] for at in range(0, len(value), max(len(value) // _SAMPLES, 1))][:_SAMPLES]
        return f" {[one if type(one) in _ATOMS else type(one).__name__ for one in found]!r}"


def _is(one: Any, other: Any) -> bool:
    return one is other


def _is_storable(value: Any) -> bool:
    if is_object(value):
        return parts_of(value) is not None
    try:
        refuse_unstorable(value, "")
    except UnstorableError:
        return False
    return True


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def is_walked(value: Any) -> bool:
    """Whether the attributes of this object are looked at."""
    kind = type(value)
    if isinstance(value, _NO_DATA) or type(own_of(value)) is not dict:
        return False
    if isinstance(value, _WALKED):
        return True
    return not (hasattr(kind, "__next__") or hasattr(kind, "fileno")) and _is_of_the_user(kind)


def own_of(value: Any) -> Any:
    """Its `__dict__`, whatever its class does when it is asked; None if it has none."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def _is_of_the_user(kind: type[Any]) -> bool:
    home = sys.modules.get(str(kind.__module__))
    return home is None or is_of_the_user(vars(home))


def attributes_of(one: Any) -> list[str]:
    """Names of the attributes that are looked at."""
    own = own_of(one)
    if isinstance(one, torch.nn.Module):
        machinery = isinstance(one, DistributedDataParallel) or type(one).__module__.startswith(_MACHINERY)
        return [] if machinery else [key for key in own if key not in _OF_ANY_MODULE]
    if isinstance(one, Optimizer):
        return [key for key in own if key not in _OF_ANY_OPTIMIZER and not key.startswith("_optimizer_")]
    private = "_" if isinstance(one, DataLoader | Shadow) else "__"
    return [key for key in own if type(key) is str and not key.startswith(private)]
