"""One walk over objects: their attributes, and what Python's containers in these hold. It runs no code of the user's.

An attribute of an object is a *cell*. What is in it is told in plain values: atoms, containers and tensors as they
are, and a `Place` for each thing that is somewhere else as well, or is no data: another object (whose attributes are
cells of their own), a container that was met before, a tensor that is saved by its name, a function.

Random generators are leaves of their own, known by where they lie. `Beyond` is the same walk for generators alone,
which goes further: into functions, classes, modules, and the local variables of what is running.
"""

from __future__ import annotations

import argparse
import enum
import functools
import inspect
import random
import types
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer
from torch.quasirandom import SobolEngine
from torch.utils.data import DataLoader, Dataset, Sampler

from lastwords.checkpoint.storable import Place, is_factory, is_storable, loses_order
from lastwords.optim_wrapper.state.how_far import (
    ATOMS,
    GENERATORS,
    ITEM_BYTES,
    SEQUENCES,
    WHICH,
    WHOLE_BYTES_MAX,
    digest,
    has,
    how_far,
    is_the_loops,
    leads_to,
    of_array,
    of_items,
    samples,
    which,
)
from lastwords.optim_wrapper.state.running import (
    called,
    is_users,
    locals_of,
    named_modules,
    stored_by,
    user_frames,
    user_modules,
)
from lastwords.optim_wrapper.tensors.tensor_bytes import class_name, memory_of, problem_of
from lastwords.optim_wrapper.tensors.tensor_tree import DICTS, parts_of
from lastwords.sharding.dtensor import is_dtensor, local_of

OBJECTS_MAX = 20_000
"""Objects and containers; the walk ends there."""

ITEMS_MAX, ALL_ITEMS_MAX = 1000, 200_000
"""A container with more items, and every container after so many in all, is told by a checksum."""

VALUE_BYTES_MAX = 64 << 10
"""Of one attribute; what is larger is told by its form."""

_ADDRESSES_FROM = 1 << 16
ID, DATA_PTR = "id", "data_ptr"
"""Kinds of a `Place` that stands for an integer."""

_LOADERS = "loader."
_OURS = ("lastwords", "logging")
_PYTHONS = random.random.__self__  # type: ignore[attr-defined]
_SHARED = "multiprocessing.sharedctypes"
_DEPTH_MAX = 24

CONTENTS: tuple[Any, ...] = (list, deque, OrderedDict, dict, set)
_SINGLE: tuple[Any, ...] = (int, float, str, bytes, tuple)
_BOUND = (types.MethodType, types.BuiltinFunctionType)
_NO_DATA = (
    *_BOUND, types.FunctionType, types.ModuleType, types.CodeType, type, staticmethod, classmethod, property,
    functools.partial,
)  # fmt: skip
_HOOKS = "hooks"
"""Names of attributes that have hooks end in this."""
_TENSORS, _HOOKS_OF_TENSORS = (torch.Tensor, torch.nn.Parameter), ("_backward_hooks", "_post_accumulate_grad_hooks")


class AttributesOf:
    """For `variables=`: the attributes of a library's object are state. It is not kept alive.

    Args:
        of: the object.
        without: names that are not looked at; None: those that begin with "_".
    """

    __slots__ = ("__dict__", "of", "without")

    def __init__(self, of: Any, without: Collection[str] | None = None) -> None:
        self.__dict__ = vars(of)
        self.of, self.without = id(of), without


_WALKED = (
    AttributesOf, torch.nn.Module, Optimizer, DataLoader, Sampler, Dataset, SobolEngine, types.SimpleNamespace,
    argparse.Namespace, LRScheduler, ReduceLROnPlateau, GradScaler, ChainMap, UserDict, UserList,
)  # fmt: skip
"""Looked into whoever has made the class; of other classes only those of the user's own."""

_OF_ANY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
_OF_ANY_OPTIMIZER = frozenset(
    {"state", "param_groups", "defaults", "grad_scale", "found_inf", "_step_count", "_opt_called", "step",
     "_zero_grad_profile_name", "_patched_optim", "_need_device_dtype_check_for_fused", "_numel_cache",
     "_warned_capturable_if_run_uncaptured"}
)  # fmt: skip
"""Saved with the optimizer, or set by torch's own schedulers and scalers, which nobody else reads, or made again."""

_NOTHING: Any = [0]
_OF_ANY_LOADER = frozenset(key for key in (*vars(DataLoader(_NOTHING)), "_iterator") if key.startswith("_"))

_MACHINERY = ("torch.distributed", "torch._", "torch.nn.parallel")

LARGE_ARRAY, MANY = "numpy.ndarray of (", " items, such as "
"""Begins the kind of an array, and is in that of a container, that is told by a checksum."""

GONE = Place("", "gone")
"""There is no such attribute any more."""

CODE = Place("", "code")
"""A function, a method, a class, a random generator, a file, a lock: no value, whatever is assigned."""

CONTENT = "[]"
"""In an attribute's place: the items of an object whose class is made of a list, a deque or a dict."""

MEMORY, SAME = "memory ", "the same memory"
"""Begins the kind of the `Place` of a tensor or an array in the memory of another; the kind of the same part of it."""

NAMED_TUPLE = "named tuple"
"""Kind of the `Place` that stands before the items of one: its path is the class's."""

MEMBER = "member "
"""Begins the kind of the `Place` of one of an Enum, before its name: its path is the class's."""

VARIABLES = "() of "
"""In the name of a root that is what a function's variables hold, between function and module."""

_CHILD = "."
"""Begins what leads from a module to one in it; attributes do not."""


class Cell(NamedTuple):
    """An attribute. told: what was in it when it was looked at last."""

    holder: Any
    key: str
    told: Any


class Walk:
    """The cells reached from `roots`, by the holder's path and the attribute's name, in the order they are met.

    saved: name -> tensors that are saved by these. skip: paths of what is not looked at, as if it were not there.
    apart: ids of what is saved in another way, and not looked at where variables lead to it, or one of these `lent`
    roots. gradients: see `flat_gradients`.
    """

    _values = True

    def __init__(
        self,
        roots: Mapping[str, Any],
        saved: Mapping[str, torch.Tensor],
        skip: Callable[[str], bool] = lambda path: False,
        apart: Collection[int] = frozenset(),
        lent: Collection[str] = (),
        gradients: Collection[int] = frozenset(),
    ) -> None:
        self._roots = dict(roots)
        self._skip = skip
        self._apart, self._lent = apart, lent
        self._saved = {id(tensor): name for name, tensor in saved.items()}
        self._with_attributes = {name: one for name, one in saved.items() if _is_tensor(one) and (
            attributes_of(one) or any(getattr(one, key) for key in _HOOKS_OF_TENSORS))}  # fmt: skip
        plain = {name: local for name, tensor in saved.items() if not problem_of(local := local_of(tensor))}
        self._pointers = {tensor.data_ptr(): name for name, tensor in plain.items()}
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in plain.values()} - {0}
        self.gradients = gradients
        self._only: Mapping[str, Collection[str]] | None = None
        self._known: Collection[str] = ()
        self._begin()

    def _begin(self) -> None:
        self.cells: dict[tuple[str, str], Cell] = {}
        self.objects: dict[str, Any] = {}
        """By their paths."""
        self.containers: dict[str, Any] = {}
        self.tensors: dict[str, Any] = {}
        """Tensors and arrays, by the paths at which their memory was met first."""
        self.generators: dict[str, Any] = {}
        """By their paths; each once."""
        self.code: list[tuple[str, Any]] = []
        """Functions, methods, classes that were met."""
        self.odd: dict[str, str] = {}
        """Objects that cannot be looked at, and why."""
        self.disordered: dict[tuple[str, str], str] = {}
        """Where a cell has a set whose order is lost."""
        self.ended_at = ""
        """Where it ended, if that was before everything had been met."""
        self._room, self._items, self._whole_bytes = OBJECTS_MAX, 0, WHOLE_BYTES_MAX
        self._drawn: set[int] = set()
        self._paths: dict[int, str] = {}
        self._containers: dict[int, str] = {}
        self._memory: dict[int, str] = {}
        self._origin: dict[str, tuple[str, str]] = {}
        self._at = "", ""
        self._addresses: dict[tuple[str, str], set[int]] = {}
        """Integers that may be addresses of what is not met yet, by their cells."""
        self._queue: deque[tuple[str, Any]] = deque()
        self._go()

    def _go(self) -> None:
        for name, root in self._roots.items():
            if own_of(root) is not None and not issubclass(type(root), _NO_DATA):  # a loader's class may be anybody's
                self._meet(name, root)
        for name, tensor in self._with_attributes.items():
            self._meet(name, tensor)
        self._go_on()
        self._tell_late_addresses()

    def part(self, way: Mapping[str, Collection[str]]) -> Self:
        """The same walk as of now, as far as this `way_to` goes; objects that are new are looked at as a whole.

        What lies at a path now may be another object than then.
        """
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, _only=way, _known=self.objects)
        new._begin()
        return new

    def way_to(self, cells: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
        """Path of an object -> which of its attributes lead to these cells, and to whatever is told of them.

        In the order of the walk: where two attributes hold one object, the first names it.
        """
        way: dict[str, set[str]] = {}
        todo = [*cells]
        while todo:
            path, key = todo.pop()
            if key in way.setdefault(path, set()):
                continue
            way[path].add(key)
            cell = self.cells.get((path, key))
            inside = [] if cell is None else _paths_in(cell.told)
            todo += [self._origin[one] for one in (path, *inside) if one in self._origin]
        return {path: self._in_order(path, keys) for path, keys in way.items()}

    def _in_order(self, path: str, keys: Collection[str]) -> list[str]:
        one = self.objects.get(path)
        if one is None or len(keys) == 1:
            return [*keys]
        own = own_of(one)
        children = [_CHILD + name for name in own.get("_modules", {})] if issubclass(type(one), torch.nn.Module) else []
        known = [key for key in (*children, *own) if key in keys]
        return known + sorted({*keys} - {*known})

    def see(self, path: str, key: str) -> None:
        """This attribute of an object has another value now."""
        self._cell(path, key, self.objects[path])

    def is_root(self, path: str) -> bool:
        """Whether this is no attribute of anything."""
        return path in self._roots

    def origin(self, path: str) -> tuple[str, str]:
        """The cell in which an object, a container or a generator was met."""
        return self._origin.get(path, ("", ""))

    def _go_on(self) -> None:
        while self._queue:
            path, one = self._queue.popleft()
            try:
                self._look_into(path, one)
            except Exception as error:  # of an object that nobody has foreseen: handed to the ledger
                self.odd[path] = f"{error!r:.200}"

    def _tell_late_addresses(self) -> None:
        """Of what was met after an integer that is its `id()` had been told."""
        for name, values in [*self._addresses.items()]:
            if name in self.cells and not values.isdisjoint(self._paths):
                self.see(*name)

    def _look_into(self, path: str, one: Any) -> None:
        module = issubclass(type(one), torch.nn.Module)
        children = own_of(one).get("_modules", {}) if module else {}
        if self._only is not None and path in self._known:
            for key in self._only.get(path, ()):
                if key[0] != _CHILD:
                    self._cell(path, key, one)
                elif children.get(key[1:]) is not None:
                    self._at = path, key
                    self._meet(path + key, children[key[1:]])
            return
        for name, child in [*children.items()]:
            if child is not None and not self._skip(f"{path}.{name}"):
                self._at = path, _CHILD + name
                self._meet(f"{path}.{name}", child)
        for key in attributes_of(one):
            if not self._skip(f"{path}.{key}"):
                self._cell(path, key, one)
        own = {key: getattr(one, key) for key in _HOOKS_OF_TENSORS} if _is_tensor(one) else own_of(one)
        for key in [key for key in own if type(key) is str and key.endswith(_HOOKS)]:
            self._at = path, key
            self.told(own[key], f"{path}.{key}", 0)
        if self._values and module:
            for key in ("_parameters", "_buffers"):  # of a module that nobody has registered
                kind = torch.Tensor if key == "_buffers" else torch.nn.Parameter  # else it is there for a call
                every = [*own_of(one).get(key, {}).values()]
                if any(id(tensor) not in self._saved for tensor in every if isinstance(tensor, kind)):
                    self._cell(path, key, one)

    def _cell(self, path: str, key: str, one: Any) -> None:
        self._at = path, key
        value = content_of(one) if key == CONTENT else own_of(one).get(key, GONE)
        cell = Cell(one, key, GONE if value is GONE else self.told(value, f"{path}.{key}", 0))
        if self._values:
            self.cells[path, key] = cell

    def _meet(self, path: str, one: Any) -> str:
        """The path of an object, which is this one if it is met for the first time."""
        known = self._paths.get(id(one))
        if known is not None:
            return known
        if self._skip(path):
            return path
        if len(self._paths) + len(self._containers) >= self._room:
            self.ended_at = self.ended_at or path
            return ""
        self._paths[id(one)] = path
        if type(one) is AttributesOf:
            self._paths[one.of] = path
        self._origin[path] = self._at
        self.objects[path] = one
        self._queue.append((path, one))
        return path

    def also_in(self, other: Walk) -> set[str]:
        """Paths of objects that the other one has met, too."""
        return {path for one, path in self._paths.items() if one in other._paths}

    def told(self, value: Any, path: str, depth: int) -> Any:
        """What is told of a value that lies at `path`. It shares nothing that can change but tensors and arrays."""
        kind = type(value)
        if not depth:
            self._whole_bytes = WHOLE_BYTES_MAX
        if kind in ATOMS:
            if kind is int:
                return value if value < _ADDRESSES_FROM else self._address(value)
            large = kind in (str, bytes) and len(value) > VALUE_BYTES_MAX
            return Place("", f"{kind.__name__} of {len(value)} characters") if large else value
        if id(value) in self._apart and (VARIABLES in path or path.partition(".")[0] in self._lent):
            return Place("", class_name(value))
        if issubclass(kind, torch.Tensor):
            return self._tensor(value, path)
        if kind in SEQUENCES or kind in DICTS or kind is set or kind is frozenset:
            return self._container(value, kind, path, depth)
        if issubclass(kind, GENERATORS):
            new = path and id(value) not in self._drawn and not _is_a_librarys(value)
            if new and VARIABLES not in path:  # else `Beyond` finds it, under the name that it had before the loop
                self._drawn.add(id(value))
                self.generators.setdefault(path, value)
                self._origin.setdefault(path, self._at)
            return CODE
        if issubclass(kind, _NO_DATA):
            self._code(value, path, depth)
            return self._opaque(CODE, value, path)
        if issubclass(kind, enum.Enum):
            return Place(class_name(value), f"{MEMBER}{own_of(value)['_name_']}")
        if issubclass(kind, np.ndarray) and (place := self._elsewhere(value, path)) is not None:
            return place
        if issubclass(kind, np.ndarray) and value.nbytes > VALUE_BYTES_MAX and not value.dtype.hasobject:
            whole = self._affords(value.nbytes)
            return (
                Place("", f"{LARGE_ARRAY}{str(value.shape)[1:]} {of_array(value, whole=whole)}")
                if self._values
                else CODE
            )
        if issubclass(kind, np.ndarray):
            about = f"{class_name(value)} of {value.dtype}{WHICH}"
            return value if parts_of(value) is not None else Place("", about + of_array(value, whole=True))
        if issubclass(kind, tuple) and type(getattr(kind, "_fields", None)) is tuple:
            fields = zip(kind._fields, value, strict=False)  # type: ignore[attr-defined]
            items = [self.told(item, f"{path}.{name}", depth + 1) for name, item in fields]
            return Place(class_name(value), NAMED_TUPLE), *items
        for base in _SINGLE if is_users(kind) else ():
            if issubclass(kind, base) and not attributes_of(value):  # it is replaced, never changed
                return Place("", f"{class_name(value)}{WHICH}{digest(base.__getnewargs__(value), 0)}")
        if is_walked(value):
            return Place(self._meet(path, value), class_name(value))
        if kind.__module__ == _SHARED and "_obj" in (own := own_of(value) or {}):
            return self.told(own["_obj"], path, depth)
        if has(kind, "fileno", "acquire"):
            return CODE
        if has(kind, "__next__"):
            return Place("", how_far(value)) if self._values and not is_the_loops(kind, path) else CODE
        if parts_of(value) is not None or is_storable(value):
            return value
        return self._opaque(Place("", f"{class_name(value)}{which(value)}"), value, path)

    def _opaque(self, told: Place, value: Any, path: str) -> Place:
        """What a loader calls (a library's object, a method, a `partial`) leads to what it uses."""
        if not (self._values and path.startswith(_LOADERS) and (held := leads_to(value))):
            return told
        through = (
            types.SimpleNamespace(**held) if type(value) in _NO_DATA else AttributesOf(value, vars(value).keys() - held)
        )
        return Place(self._paths.get(id(value)) or self._meet(path, through), class_name(value))

    def _code(self, value: Any, path: str, depth: int) -> None:
        self.code.append((path, value))

    def _address(self, value: int) -> Any:
        """An integer, or whose `id()` or `data_ptr()` it is: in another process that has another one."""
        if value in self._saved:
            return Place(self._saved[value], ID)
        if value in self._paths:
            return Place(self._paths[value], ID)
        name = self._pointers.get(value)
        if name is None:
            self._addresses.setdefault(self._at, set()).add(value)
        return value if name is None else Place(name, DATA_PTR)

    def _elsewhere(self, value: Any, path: str) -> Place | None:
        """What is told of a tensor or an array that lies in memory which was met before, or is saved by its name."""
        at = memory_of(value)
        if at in self._storages or (at in self.gradients and VARIABLES in path):
            return Place("", "a view of a tensor that is saved")
        met = self._memory.setdefault(at, path) if at and path else path
        if met != path:
            same = form_of(value) == form_of(self.tensors[met])  # a base that is put back may have another form
            return Place(met, SAME if same else form_of(value))
        if at:
            self.tensors[path] = value
            self._origin.setdefault(path, self._at)
        return None

    def home(self, value: Any) -> str:
        """Where a tensor's or an array's memory, or a container, was met first; "saved" if it is saved by its name."""
        at = memory_of(value)
        if not at:
            return self._containers.get(id(value), "")
        return "saved" if id(value) in self._saved or at in self._storages else self._memory.get(at, "")

    def _tensor(self, tensor: torch.Tensor, path: str) -> Any:
        name = self._saved.get(id(tensor))
        if name is not None:
            return Place(name, "")
        if problem_of(tensor):
            if parts_of(tensor) is not None:
                return tensor
            written = 0 if tensor.is_inference() else tensor._version
            return Place("", f"{class_name(tensor)}{WHICH}{id(tensor)}.{written}")
        place = self._elsewhere(tensor, path)
        return tensor if place is None else place

    def _container(self, value: Any, kind: type[Any], path: str, depth: int) -> Any:
        if depth > _DEPTH_MAX:
            return Place("", "deeper")
        if kind is not tuple and kind is not frozenset:
            met = self._containers.setdefault(id(value), path)
            if met != path:
                return Place(met, kind.__name__)
            self.containers[path] = value
            self._origin.setdefault(path, self._at)
        if not value:
            return value if kind is tuple or kind is frozenset else value.copy()
        if len(value) > ITEMS_MAX or self._items > ALL_ITEMS_MAX:
            self.ended_at = self.ended_at or (path if self._items > ALL_ITEMS_MAX else "")
            return Place(
                "", f"{kind.__name__} of {len(value)}{MANY}{samples(value)}{WHICH}{self._of_items(value, kind)}"
            )
        self._items += len(value)
        if kind in DICTS:
            if not all(map(self._is_key, [*value])):
                held = digest([*value.values()], 0) if self._values else ""
                return Place("", f"{kind.__name__} of {len(value)} with objects for keys{WHICH}{held}")
            pairs = [
                (self.told(key, "", depth + 1), self.told(item, self.item_path(path, key), depth + 1))
                for key, item in [*value.items()]
            ]
            if kind is defaultdict:
                factory = value.default_factory
                return defaultdict(factory, pairs) if is_factory(factory) else dict(pairs)
            return kind(dict(pairs))
        if kind is set or kind is frozenset:
            items = [*value]
            if not all(type(item) in ATOMS for item in items):
                return Place("", f"{kind.__name__} of objects")
            if loses_order(value):
                self.disordered[self._at] = path
            return kind(items)
        told = [self.told(item, f"{path}[{at}]", depth + 1) for at, item in enumerate([*value])]
        return deque(told, value.maxlen) if kind is deque else kind(told)

    def _of_items(self, value: Any, kind: type[Any]) -> str:
        count_max = self._whole_bytes // ITEM_BYTES
        if not self._values or not self._affords(len(value) * ITEM_BYTES):
            return ""
        return of_items([*value.keys(), *value.values()] if kind in DICTS else value, count_max)

    def _affords(self, nbytes: int) -> bool:
        """Whether so many more bytes of this attribute are compared in full."""
        if nbytes > self._whole_bytes:
            return False
        self._whole_bytes -= nbytes
        return True

    def item_path(self, path: str, key: Any) -> str:
        """Of what lies in a dict."""
        return f"{path}[{self._label(key)}]"

    def _label(self, key: Any) -> str:
        if type(key) is tuple:
            return f"({', '.join(map(self._label, key))})"
        if issubclass(type(key), enum.Enum):
            return f"{type(key).__qualname__}.{own_of(key)['_name_']}"
        return self._saved[id(key)] if issubclass(type(key), torch.Tensor) else repr(key)

    def _is_key(self, key: Any) -> bool:
        """Whether it can be told by a value: an atom, a tuple of such, an Enum's member, a tensor that has a name."""
        kind = type(key)
        if issubclass(kind, torch.Tensor):
            return id(key) in self._saved
        return (
            kind in ATOMS or issubclass(kind, np.generic | enum.Enum) or (kind is tuple and all(map(self._is_key, key)))
        )


def variables(thread: int) -> dict[str, dict[str, Any]]:
    """What the local variables of the user's functions hold that this thread runs, the outermost function first.

    Objects, containers, tensors and arrays, which can be put back in place; what else a variable is set to cannot.
    """
    found: dict[str, dict[str, Any]] = {}
    for frame in user_frames(thread):
        held = {name: one for name, one in locals_of(frame).items() if name.isidentifier() and _is_held(one)}
        module, function = frame.f_globals.get("__name__"), frame.f_code.co_qualname
        found.setdefault(f"{function}{VARIABLES}{module}", held)
    return found


def _is_held(one: Any) -> bool:
    kind = type(one)
    kept = kind in SEQUENCES or kind in DICTS or kind is set or issubclass(kind, torch.Tensor | np.ndarray)
    return (kept and kind is not tuple) or is_walked(one)


class Beyond(Walk):
    """Random generators that `walk` has not come to: where the user's code has them.

    roots: objects that belong to the job as well. Then come the functions that `walk` has met, the local variables of
    the user's functions that are running, the outermost first, and the global names of the user's modules.
    """

    _values = False

    def __init__(self, walk: Walk, roots: Mapping[str, Any], saved: Mapping[str, torch.Tensor] | None = None) -> None:
        self._walk = walk
        # What variables lead to is met here anew, from where it would have been met before the loop began.
        known = (walk._paths, walk._containers)
        self._before = [{one: at for one, at in of.items() if VARIABLES not in at} for of in known]
        self._functions = {path: one for path, one in walk.code if VARIABLES not in path}
        self._classes: dict[str, type[Any]] = {}
        super().__init__(roots, saved or {})

    def _met_before(self) -> None:
        self._paths, self._containers = (of.copy() for of in self._before)

    def _running(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        for frame in user_frames():
            if self._only is None or called(frame) in self._only:
                yield called(frame), locals_of(frame)

    def _go(self) -> None:
        walk = self._walk
        self._met_before()
        self._drawn = {*walk._drawn}
        self._room += len(self._paths) + len(self._containers)
        self._names("", self._roots)
        self._names("", self._functions)
        if self._only is None:
            for path, one in walk.objects.items():
                if VARIABLES not in path:
                    self._of_class(type(one))
        for place in self._only or ():
            if place in self._classes:
                self._of_class(self._classes[place])
        for place, held in self._running():
            self._names(place, held)
        for module, names in user_modules() if self._only is None else named_modules(self._only):
            self._names(module, names)
        self._go_on()

    def _names(self, place: str, names: Mapping[str, Any]) -> None:
        """place: "" for what has a path of its own."""
        for key in [*names] if self._only is None else self._only.get(place, ()):
            if key in names and not key.startswith("__"):
                self._at = place, key
                self._hold(place, key, names[key], f"{place}.{key}" if place else key)

    def _hold(self, place: str, key: str, value: Any, path: str, depth: int = 0) -> None:
        """A value that lies at a place."""
        self.told(value, path, depth)

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
            self.told(value.__self__, f"{path}.__self__", depth + 1)
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
                    self._hold(path, name, cell.cell_contents, f"{path}.{name}", depth + 1)
                except ValueError:  # not filled yet
                    continue
        self._paths[id(value)] = path
        for name, part in parts.items():
            self._hold(path, name, part, f"{path}.{name}", depth + 1)

    def _of_class(self, kind: type[Any]) -> None:
        """Attributes of a class of the user's, and of its bases."""
        for owner in kind.__mro__:
            if id(owner) in self._paths or not is_users(owner) or issubclass(owner, enum.Enum):
                continue
            self._paths[id(owner)] = ""
            at, place = self._at, f"{owner.__module__}.{owner.__qualname__}"
            own = vars(owner)
            self._classes[place] = owner
            for name in [*own] if self._only is None else self._only.get(place, ()):
                if name in own and not name.startswith("__"):
                    self._at = place, name
                    self._hold(place, name, own[name], f"{place}.{name}")
            self._at = at


def form_of(value: Any) -> str:
    """Which part of its memory a tensor or an array is."""
    if issubclass(type(value), np.ndarray):
        at = value.__array_interface__["data"][0] - memory_of(value)
        return f"{MEMORY}{value.dtype} {value.shape} {value.strides} at {at}"
    local = local_of(value)
    return f"{MEMORY}{local.dtype} {tuple(local.shape)} {local.stride()} at {local.storage_offset()}"


def flat_gradients(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Where memory begins of which gradients are a part: that of a flat buffer of all of them, say. Training thread."""
    gradients = [local_of(one.grad) for one in tensors if one.is_leaf and one.grad is not None]
    plain = [(one.untyped_storage(), one.nbytes) for one in gradients if not problem_of(one)]
    return {storage.data_ptr() for storage, nbytes in plain if storage.nbytes() > nbytes}


def _paths_in(told: Any) -> Iterator[str]:
    """Where what is told leads to."""
    kind = type(told)
    if kind is Place:
        yield told.path
    elif kind in DICTS:
        for pair in told.items():
            yield from _paths_in(pair)
    elif kind in SEQUENCES:
        for item in told:
            yield from _paths_in(item)


def _is_a_librarys(generator: Any) -> bool:
    """Whether it is the stream of a whole library, which is saved as such."""
    return generator is torch.default_generator or generator is _PYTHONS or generator is np.random.mtrand._rand


class _Slots(MutableMapping[str, Any]):
    """Attributes of an object that has slots and no `__dict__`."""

    def __init__(self, of: Any) -> None:
        self._of = of
        every = [item for owner in reversed(type(of).__mro__) if is_users(owner) for item in vars(owner).items()]
        self._members = {name: one for name, one in every if type(one) is types.MemberDescriptorType}

    def __getitem__(self, key: str) -> Any:
        try:
            return self._members[key].__get__(self._of)
        except AttributeError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        self._members[key].__set__(self._of, value)

    def __delitem__(self, key: str) -> None:
        self._members[key].__delete__(self._of)

    def __iter__(self) -> Iterator[str]:
        return (key for key in self._members if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def is_walked(value: Any) -> bool:
    """Whether the attributes of this object are looked at."""
    kind = type(value)
    if issubclass(kind, _NO_DATA) or own_of(value) is None:
        return False
    return issubclass(kind, _WALKED) or (not has(kind, "fileno") and is_users(kind))


def own_of(value: Any) -> Any:
    """Its `__dict__`, whatever its class does when it is asked, or what stands for it; None if it has none."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        kind = type(value)
        return _Slots(value) if is_users(kind) and any("__slots__" in vars(one) for one in kind.__mro__) else None
    return own if type(own) is dict else None


def content_of(one: Any) -> Any:
    """The items of an object that is a list, a deque, a dict or a set too, whatever its class does when it is asked."""
    for kind in CONTENTS:
        if issubclass(type(one), kind):
            items = kind.items(one) if issubclass(kind, dict) else kind.__iter__(one)
            return list(items) if kind in SEQUENCES else kind(items)
    return GONE


def is_attribute(one: Any, key: str) -> bool:
    """Whether an attribute of this name would be looked at, if the object had it."""
    probe = {"_parameters", "_buffers"} if issubclass(type(one), torch.nn.Module) else set()
    return key in probe or key in _attributes(one, [key])


def _is_tensor(one: Any) -> bool:
    """Whether it is torch's own, and has no attributes but those of the user's, and torch's with an underscore."""
    kind = type(one)  # nobody asks an object for its class
    return kind in _TENSORS or (issubclass(kind, torch.Tensor) and is_dtensor(one))


def attributes_of(one: Any) -> list[str]:
    """Names of the attributes that are looked at."""
    found = _attributes(one, own_of(one))
    return [*found, CONTENT] if issubclass(type(one), CONTENTS) else found


@functools.cache
def _set_by_torch(kind: type[Any]) -> frozenset[str]:
    """Attributes that a class of torch's machinery (DDP, what FSDP2 makes of a class) sets itself, and its bases.

    Any other that hangs on such a module is the user's: `model = DDP(net); model.best = 0.0`.
    """
    of_torch = [owner for owner in kind.__mro__ if owner.__module__.startswith(_MACHINERY)]
    codes = [one.__code__ for owner in of_torch for one in map(inspect.unwrap, filter(callable, vars(owner).values()))
             if isinstance(one, types.FunctionType)]  # fmt: skip
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(stored_by(code))
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return frozenset(names)


def _attributes(one: Any, own: Iterable[str]) -> list[str]:
    kind = type(one)
    if issubclass(kind, torch.nn.Module):
        torchs = _set_by_torch(kind)  # type: ignore[arg-type]
        return [key for key in own if key not in _OF_ANY_MODULE and key not in torchs and not key.startswith("__")]
    if issubclass(kind, Optimizer):
        return [key for key in own if key not in _OF_ANY_OPTIMIZER and not key.startswith("_optimizer_")]
    if issubclass(kind, DataLoader):
        return [key for key in own if key not in _OF_ANY_LOADER]
    without = one.without if issubclass(kind, AttributesOf) else ()
    private, left_out = ("_", ()) if without is None or _is_tensor(one) else ("__", without)
    return [key for key in own if type(key) is str and not key.startswith(private) and key not in left_out]
