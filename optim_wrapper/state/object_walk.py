"""One walk over objects: their attributes, and what Python's containers in these hold. It runs no code of the user's.

An attribute of an object is a *cell*. What is in it is told in plain values: atoms, containers and tensors as they
are, and a `Place` for each thing that is somewhere else as well, or is no data: another object (whose attributes are
cells of their own), a container that was met before, a tensor that is saved by its name, a function.

Random generators are leaves of their own, known by where they lie. `Beyond` is the same walk for generators alone,
which goes further: into functions, classes, modules, and the local variables of what is running.
"""

from __future__ import annotations

import enum
import functools
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer
from torch.quasirandom import SobolEngine
from torch.utils.data import DataLoader, Dataset, Sampler

from lastwords.checkpoint.storable import Place, refuse_unstorable
from lastwords.errors import UnstorableError
from lastwords.optim_wrapper.state.running import called, is_of_the_user, locals_of, user_frames, user_modules
from lastwords.optim_wrapper.tensors.tensor_bytes import problem_of
from lastwords.optim_wrapper.tensors.tree_objects import is_object, parts_of
from lastwords.sharding.dtensor import local_of

OBJECTS_MAX = 20_000
"""Objects and containers; the walk ends there."""

ITEMS_MAX, ALL_ITEMS_MAX = 1000, 200_000
"""A container with more items is told by their number and by some of them, and so is each once there were so many."""

VALUE_BYTES_MAX = 64 << 10
"""Of one attribute; what is larger is told by its form."""

_ADDRESSES_FROM = 1 << 16
ID, DATA_PTR = "id", "data_ptr"
"""Kinds of a `Place` that stands for an integer."""

_OURS = ("lastwords", "logging")
_PYTHONS = random.random.__self__  # type: ignore[attr-defined]
_SAMPLES = 16
_DEPTH_MAX = 24

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_SEQUENCES = frozenset({list, tuple, deque})
_DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})
GENERATORS = (
    torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator,
    np.random.SeedSequence,
)  # fmt: skip
_BOUND = (types.MethodType, types.BuiltinFunctionType)
_NO_DATA = (
    *_BOUND, types.FunctionType, types.ModuleType, types.GeneratorType, types.CodeType, type, staticmethod,
    classmethod, property, functools.partial,
)  # fmt: skip
_HOOKS = "hooks"
"""Names of attributes that have hooks end in this."""


class Shadow:
    """Has the attributes of an object, and does not keep it alive."""

    def __init__(self, of: Any) -> None:
        self.__dict__ = vars(of)


_WALKED = (Shadow, torch.nn.Module, Optimizer, DataLoader, Sampler, Dataset, SobolEngine)
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
"""A function, a method, a class, a random generator: no value, whatever is assigned."""


class Cell(NamedTuple):
    """An attribute. told: what was in it when it was looked at last."""

    holder: Any
    key: str
    told: Any


class Lying(NamedTuple):
    """A random generator, and where it lies: `holder[key]`, in a cell of a closure, or a variable of running code."""

    generator: Any
    holder: Any
    key: Any

    def now(self, frames: Collection[types.FrameType] = ()) -> Any:
        """What lies there now; None if nothing does."""
        holder = self.holder
        if type(holder) is types.CodeType:
            holder = next((locals_of(frame) for frame in frames if frame.f_code is holder), {})
        try:
            return holder.cell_contents if type(holder) is types.CellType else holder[self.key]
        except (LookupError, ValueError):
            return None


class Walk:
    """The cells reached from `roots`, by the holder's path and the attribute's name, in the order they are met.

    saved: name -> tensors that are saved by these.
    """

    _values = True

    def __init__(self, roots: Mapping[str, Any], saved: Mapping[str, torch.Tensor]) -> None:
        self.cells: dict[tuple[str, str], Cell] = {}
        self.objects: dict[str, Any] = {}
        """By their paths."""
        self.containers: dict[str, Any] = {}
        self.generators: dict[str, Lying] = {}
        """By their paths; each once."""
        self.code: list[tuple[str, Any]] = []
        """Functions, methods, classes that were met."""
        self.ended_at = ""
        """Where it ended, if that was before everything had been met."""
        self._room, self._items = OBJECTS_MAX, 0
        self._drawn: set[int] = set()
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
            for key in [key for key in own_of(one) if key.endswith(_HOOKS)]:
                self.told(own_of(one)[key], f"{path}.{key}", 0)
            if self._values and isinstance(one, torch.nn.Module):
                for key in ("_parameters", "_buffers"):  # of a module that nobody has registered
                    if any(
                        id(tensor) not in self._saved for tensor in [*own_of(one)[key].values()] if tensor is not None
                    ):
                        self._cell(path, key, one)

    def _cell(self, path: str, key: str, one: Any) -> Cell:
        own = own_of(one)
        value = own.get(key, GONE)
        cell = Cell(one, key, GONE if value is GONE else self.told(value, f"{path}.{key}", 0, own, key))
        if self._values:
            self.cells[path, key] = cell
        return cell

    def _meet(self, path: str, one: Any) -> str:
        """The path of an object, which is this one if it is met for the first time."""
        known = self._paths.get(id(one))
        if known is not None:
            return known
        if len(self._paths) + len(self._containers) >= self._room:
            self.ended_at = self.ended_at or path
            return ""
        self._paths[id(one)] = path
        self.objects[path] = one
        self._queue.append((path, one))
        return path

    def told(self, value: Any, path: str, depth: int, holder: Any = None, key: Any = None) -> Any:
        """What is told of a value that lies at `path`, which is `holder[key]`."""
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
        if isinstance(value, GENERATORS):
            if holder is not None and id(value) not in self._drawn and not _is_a_librarys(value):
                self._drawn.add(id(value))
                self.generators.setdefault(path, Lying(value, holder, key))
            return CODE
        if isinstance(value, _NO_DATA):
            self._code(value, path, depth)
            return CODE
        if isinstance(value, enum.Enum):
            return Place("", f"{_kind(value)}.{own_of(value)['_name_']}")
        if isinstance(value, np.ndarray) and value.nbytes > VALUE_BYTES_MAX:
            return Place("", f"numpy.ndarray of {value.shape} at {value.__array_interface__['data'][0]}")
        if is_walked(value):
            return Place(self._meet(path, value), _kind(value))
        return value if _is_storable(value) else Place("", _kind(value))

    def _code(self, value: Any, path: str, depth: int) -> None:
        self.code.append((path, value))

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
        self._items += len(value)
        if len(value) > ITEMS_MAX or self._items > ALL_ITEMS_MAX:
            return Place("", f"{kind.__name__} of {len(value)}{self._samples(value, kind)}")
        if kind in _DICTS:
            if not all(map(self._is_key, [*value])):
                return Place("", f"{kind.__name__} of {len(value)} with objects for keys")
            items = {
                self.told(key, f"{path} key", depth + 1): self.told(item, f"{path}[{key!r}]", depth + 1, value, key)
                for key, item in [*value.items()]
            }
            if all(item is value.get(key, self) for key, item in items.items()):
                return value
            return items if kind is not defaultdict else defaultdict(value.default_factory, items)
        if kind is set or kind is frozenset:
            return value if all(type(item) in _ATOMS for item in value) else Place("", f"{kind.__name__} of objects")
        told = [self.told(item, f"{path}[{at}]", depth + 1, value, at) for at, item in enumerate([*value])]
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


class Beyond(Walk):
    """Random generators that `walk` has not come to: where the user's code has them.

    roots: objects that belong to the job as well. Then come the functions that `walk` has met, the local variables of
    the user's functions that are running, the outermost first, and the global names of the user's modules.
    """

    _values = False

    def __init__(self, walk: Walk, roots: Mapping[str, Any]) -> None:
        super().__init__({}, {})
        self._paths, self._containers, self._drawn = {**walk._paths}, {**walk._containers}, {*walk._drawn}
        self._room += len(self._paths) + len(self._containers)
        for name, root in roots.items():
            self.told(root, name, 0, roots, name)
        for path, met in walk.code:
            self.told(met, path, 0)
        for frame in user_frames():
            self._names(called(frame), frame.f_code, locals_of(frame))
        for module, names in user_modules():
            self._names(module, names, names)
        self._go_on()

    def _names(self, place: str, holder: Any, names: Mapping[str, Any]) -> None:
        for key, value in [*names.items()]:
            if not key.startswith("__"):
                self.told(value, f"{place}.{key}", 0, holder, key)

    def _meet(self, path: str, one: Any) -> str:
        self._of_class(type(one))
        return super()._meet(path, one)

    def _code(self, value: Any, path: str, depth: int) -> None:
        """What functions have with them: closures, defaults, what they wrap; what methods are bound to."""
        if id(value) in self._paths or depth > _DEPTH_MAX:
            return
        if isinstance(value, type):
            self._of_class(value)
            return
        if isinstance(value, _BOUND) and not isinstance(value.__self__, types.ModuleType):
            self.told(value.__self__, f"{path}.__self__", depth + 1, (value.__self__,), 0)
        if isinstance(value, functools.partial):
            parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        elif isinstance(value, property):
            parts = {"fget": value.fget}
        elif isinstance(value, types.MethodType | staticmethod | classmethod):
            parts = {"__func__": value.__func__}
        elif not isinstance(value, types.FunctionType) or str(value.__globals__.get("__name__")).startswith(_OURS):
            return
        else:
            parts = {"__defaults__": value.__defaults__, "__kwdefaults__": value.__kwdefaults__, **value.__dict__}
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    self.told(cell.cell_contents, f"{path}.{name}", depth + 1, cell)
                except ValueError:  # not filled yet
                    continue
        self._paths[id(value)] = path
        for name, part in parts.items():
            self.told(part, f"{path}.{name}", depth + 1, parts, name)

    def _of_class(self, kind: type[Any]) -> None:
        """Attributes of a class of the user's, and of its bases."""
        for owner in kind.__mro__:
            if id(owner) in self._paths or not _is_of_the_user(owner):
                continue
            self._paths[id(owner)] = ""
            for name, value in [*vars(owner).items()]:
                if not name.startswith("__"):
                    place = f"{owner.__module__}.{owner.__qualname__}.{name}"
                    self.told(value, place, 0, vars(owner), name)


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


def _is_a_librarys(generator: Any) -> bool:
    """Whether it is the stream of a whole library, which is saved as such."""
    return generator is torch.default_generator or generator is _PYTHONS or generator is np.random.mtrand._rand


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
