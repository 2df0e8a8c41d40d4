"""Random generators that a program keeps for itself: where they lie, and how to come to the same place again.

The search begins at objects that the caller names (the model, the loader, extras) and at the stack of the calling
thread: the local variables of the user's functions on it and the global names that they use. From there it goes on
through attributes, lists, tuples and dicts, closures, defaults, and the global names of functions and of the methods of
classes. It looks, and runs nothing of the user's: no properties, no `__getattr__`. Code of the standard library and of
installed packages is not followed; their objects' attributes are.

A place has a name that is the same in a new process of the same script ("__main__.main.rng",
"model.backbone.noise", "mypackage.augment.RNG"), and a way of looking there again in about a microsecond.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import inspect
import logging
import random
import sys
import sysconfig
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.quasirandom import SobolEngine

_log = logging.getLogger(__name__)

_DEPTH_MAX = 8
_ITEMS_MAX = 256
_OBJECTS_MAX = 20_000
_FRAMES_MAX = 32
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random, np.random.BitGenerator,
              np.random.SeedSequence, SobolEngine)  # fmt: skip
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), range, torch.Tensor, np.ndarray, np.generic,
          torch.dtype, torch.device, random.SystemRandom)  # fmt: skip
_SAVED_OF_OPTIMIZERS = ("state", "param_groups")
_QUICKLY_PASSED = frozenset({str, bytes, int, float, bool, type(None), torch.Tensor, torch.nn.Parameter})
_CONTAINERS = frozenset({dict, list, tuple, OrderedDict})
_OUTSIDE = frozenset({"torch", "numpy", "lastwords", *sys.stdlib_module_names}) - {"__main__"}
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})

_Cache = type(functools.lru_cache(lambda: None))
_SHOW_LOCALS = frozenset({"locals", "vars", "dir", "eval", "exec"})

Link = tuple[Callable[[Any, Any], Any], Any]
"""A function that goes one hop on from an object, and what it needs for that."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a generator lies. root: an object, or the code of a function on the stack, whose local it begins at."""

    name: str
    root: Any
    links: tuple[Link, ...]

    def now(self, frames: Collection[types.FrameType] | None = None) -> Any:
        """What lies there now; None if there is nothing. frames: the stack, if it is known already."""
        try:
            value = self.root
            if isinstance(value, types.CodeType):
                value = next(frame for frame in (frames or user_frames()) if frame.f_code is value)
            for follow, key in self.links:
                value = follow(value, key)
        except Exception:  # of the user's own containers: handed to the caller as nothing
            return None
        return value


def user_frames() -> list[types.FrameType]:
    """The functions of the user's that are being run on this thread, the outermost first."""
    found: list[types.FrameType] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_of_the_user(frame.f_globals):
            found.append(frame)
        frame = frame.f_back
    return found[: -_FRAMES_MAX - 1 : -1]


def is_of_the_user(names: Mapping[str, Any]) -> bool:
    """Whether a module with these global names is the user's, and not of the library or an installed package."""
    return _is_of_the_user(str(names.get("__name__", "")), str(names.get("__file__", "")))


@functools.lru_cache(maxsize=4096)
def _is_of_the_user(module: str, file: str) -> bool:
    return module.partition(".")[0] not in _OUTSIDE and (module == "__main__" or not file.startswith(_INSTALLED))


@functools.lru_cache(maxsize=4096)
def _may_show_locals(code: types.CodeType) -> bool:
    """Whether it calls `locals()` or the like: a name of its own, not a method's (`model.eval()`)."""
    if _SHOW_LOCALS.isdisjoint(code.co_names):
        return False
    return any(
        one.opname in ("LOAD_GLOBAL", "LOAD_NAME") and one.argval in _SHOW_LOCALS for one in dis.get_instructions(code)
    )


def locals_of(frame: types.FrameType) -> Mapping[str, Any]:
    """A function's local variables. Nothing where it may have called `locals()`: reading them writes into that dict."""
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:  # a module or a class, whose names are a dict anyway
        return frame.f_locals
    if _may_show_locals(code):
        return {}
    names: Any = frame.f_locals
    found = dict(names)
    if type(names) is dict:  # up to Python 3.12: it would keep a batch alive that the loop has let go of
        names.clear()
    return found


@dataclass(slots=True)
class Unreached:
    """reasons: generators that are there and have no place of their own. limits: where the search has ended early."""

    reasons: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)


def search(
    roots: Mapping[str, Any], skip: Collection[Any] = (), *, frames: bool = True, unreached: Unreached | None = None
) -> dict[str, tuple[Place, Any]]:
    """Place and object of every generator that is found, each once, by name. skip: objects not to look into.

    frames: search what is on the stack, too. unreached: is told what was not found.
    """
    found: dict[str, tuple[Place, Any]] = {}
    unreached = Unreached() if unreached is None else unreached
    for place, generator in _Search(roots, skip, user_frames() if frames else [], unreached).all():
        if place.name in found:
            unreached.reasons.append(f"two random generators lie at {place.name}, and only the first one is saved")
            continue
        found[place.name] = place, generator
    return found


def _own_names(value: Any) -> dict[str, Any]:
    """An object's attributes, without asking its class."""
    try:
        names: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return names if isinstance(names, dict) else {}


class _Search:
    """Breadth first, so that a generator is found at its shortest place."""

    def __init__(
        self, roots: Mapping[str, Any], skip: Collection[Any], frames: list[types.FrameType], unreached: Unreached
    ) -> None:
        self._unreached = unreached
        self._seen = {id(thing) for thing in skip}
        self._seen_classes: set[int] = set()
        self._seen_names: set[tuple[int, str]] = set()
        self._kept: list[Any] = []  # or an id could belong to another object before the search is over
        self._queue: deque[tuple[Any, Place, int]] = deque()
        for name, root in roots.items():
            self._queue.append((root, Place(name, root, ()), 0))
        for frame in frames:
            self._enter(frame)

    def all(self) -> Iterator[tuple[Place, Any]]:
        while self._queue and len(self._seen) < _OBJECTS_MAX:
            value, place, depth = self._queue.popleft()
            kind = type(value)
            if issubclass(kind, _PLAIN) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._kept.append(value)
            if issubclass(kind, GENERATORS):
                yield place, value
            elif depth < _DEPTH_MAX:
                self._look_safely(value, kind, place, depth + 1)
            elif not self._unreached.limits:
                self._unreached.limits.append(f"at {place.name}, {_DEPTH_MAX} references from where it began")
        if self._queue:
            self._unreached.limits.append(f"after {_OBJECTS_MAX} objects, before {self._queue[0][1].name}")

    def _enter(self, frame: types.FrameType) -> None:
        code, names = frame.f_code, frame.f_globals
        module = str(names.get("__name__", ""))
        if code.co_flags & inspect.CO_OPTIMIZED:
            root = Place(f"{module}.{code.co_qualname}", code, ())
            for name, value in locals_of(frame).items():
                self._put(value, root, f".{name}", (_local, name), 0)
        self._use(code, names)

    def _put(self, value: Any, place: Place, name: str, link: Link, depth: int) -> None:
        kind = type(value)
        if kind in _QUICKLY_PASSED or (kind in _CONTAINERS and not value):
            return
        if id(value) not in self._seen:
            self._queue.append((value, Place(place.name + name, place.root, (*place.links, link)), depth))

    def _use(self, code: types.CodeType, names: dict[str, Any]) -> None:
        """The global names that a piece of code uses."""
        if not is_of_the_user(names):
            return
        module = Place(str(names.get("__name__", "")), names, ())
        for used in _codes(code):
            for name in used.co_names:
                if name in names and (id(names), name) not in self._seen_names:
                    value = names[name]
                    if isinstance(value, types.ModuleType):
                        self._use_module(value, used)
                    else:
                        self._seen_names.add((id(names), name))
                        self._put(value, module, f".{name}", (_item, name), 1)

    def _use_module(self, module: types.ModuleType, used: types.CodeType) -> None:
        names = vars(module)
        if is_of_the_user(names):
            place = Place(module.__name__, names, ())
            for name in used.co_names:
                if name in names and not isinstance(names[name], types.ModuleType):
                    self._put(names[name], place, f".{name}", (_item, name), 1)

    def _look_safely(self, value: Any, kind: type, place: Place, depth: int) -> None:
        try:
            self._look_into(value, kind, place, depth)
        except Exception as error:  # of the user's own classes: handed to the log, and the search goes on
            _log.debug("%s could not be searched for random generators: %r", place.name, error)

    def _look_into(self, value: Any, kind: type, place: Place, depth: int) -> None:
        if issubclass(kind, types.ModuleType):
            return
        if issubclass(kind, types.MethodType):
            self._put(value.__self__, place, "", (_attribute_of_method, "__self__"), depth)
            self._put(value.__func__, place, "", (_attribute_of_method, "__func__"), depth)
        elif issubclass(kind, types.FunctionType):
            self._look_into_function(value, place, depth)
        elif issubclass(kind, type):
            self._look_into_class(value)
        elif issubclass(kind, functools.partial):
            for name in ("func", "args", "keywords"):
                self._put(getattr(value, name), place, f".{name}", (getattr, name), depth)
        elif issubclass(kind, dict):
            if len(value) <= _ITEMS_MAX:
                for index, (key, item) in enumerate(list(dict.items(value))):
                    if type(item) not in _QUICKLY_PASSED:
                        name = f"[{key!r}]" if isinstance(key, str | int) else f"[{type(key).__name__} {index}]"
                        self._put(item, place, name, (_item, key), depth)
        elif issubclass(kind, types.BuiltinMethodType):
            if isinstance(value.__self__, GENERATORS):
                self._put(value.__self__, place, "", (_attribute_of_method, "__self__"), depth)
        elif issubclass(kind, list | tuple | deque):
            if len(value) <= _ITEMS_MAX:
                for index, item in enumerate(list(value)):
                    if type(item) not in _QUICKLY_PASSED:
                        self._put(item, place, f"[{index}]", (_item, index), depth)
        elif issubclass(kind, set | frozenset):
            self._look_into_unordered(value, place, depth)
        else:
            if issubclass(kind, _Cache):
                self._look_into_unordered(value, place, depth)
            self._look_into_object(value, kind, place, depth)

    def _look_into_unordered(self, value: Any, place: Place, depth: int) -> None:
        """A set, or a function with a cache: what is alone in it has a place there."""
        kinds = [type(one) for one in _held_by(value)]
        if len(kinds) == 1:
            self._put(_only(value, None), place, "{}", (_only, None), depth)
        elif any(issubclass(one, GENERATORS) for one in kinds):
            self._unreached.reasons.append(f"random generators in {place.name} cannot be told apart, and are not saved")

    def _look_into_object(self, value: Any, kind: type, place: Place, depth: int) -> None:
        if kind.__module__.partition(".")[0] in ("lastwords", "logging"):
            return
        if issubclass(kind, torch.nn.Module):
            for name, module in value.named_modules():
                self._seen.add(id(module))
                inside = (
                    Place(f"{place.name}.{name}", place.root, (*place.links, (_submodule, name))) if name else place
                )
                for key, item in list(module.__dict__.items()):
                    if key not in ("_parameters", "_buffers", "_modules") and type(item) not in _QUICKLY_PASSED:
                        self._put(item, inside, f".{key}", (_attribute, key), depth)
                self._look_into_class(type(module))
            return
        saved = _SAVED_OF_OPTIMIZERS if issubclass(kind, torch.optim.Optimizer) else ()
        for key, item in list(_own_names(value).items()):
            if key in saved:
                continue
            self._put(item, place, f".{key}", (_attribute, key), depth)
        for owner in kind.__mro__:
            for key, slot in list(vars(owner).items()) if "__slots__" in vars(owner) else ():
                if isinstance(slot, types.MemberDescriptorType):
                    with contextlib.suppress(AttributeError):  # not set
                        self._put(slot.__get__(value, kind), place, f".{key}", (getattr, key), depth)
        self._look_into_class(kind)

    def _look_into_class(self, kind: type) -> None:
        """Attributes of a class of the user's and of its bases, and what its methods use."""
        for owner in kind.__mro__:
            home = sys.modules.get(owner.__module__)
            if id(owner) in self._seen_classes or home is None or not is_of_the_user(vars(home)):
                continue
            self._seen_classes.add(id(owner))
            place = Place(f"{owner.__module__}.{owner.__qualname__}", owner, ())
            for name, item in list(vars(owner).items()):
                plain = item.__func__ if isinstance(item, staticmethod | classmethod) else item
                plain = plain.fget if isinstance(plain, property) else plain
                if not name.startswith("__") or isinstance(plain, types.FunctionType):
                    self._put(plain, place, f".{name}", (_of_class, name), 1)

    def _look_into_function(self, value: types.FunctionType, place: Place, depth: int) -> None:
        if not is_of_the_user(value.__globals__):
            return
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                self._put(cell.cell_contents, place, f".{name}", (_of_closure, name), depth)
            except ValueError:  # not filled yet
                continue
        for index, item in enumerate(value.__defaults__ or ()):
            self._put(item, place, f".__defaults__[{index}]", (_default, index), depth)
        for name, item in (value.__kwdefaults__ or {}).items():
            self._put(item, place, f".{name}", (_named_default, name), depth)
        for name, item in list(value.__dict__.items()):  # what functools.wraps leaves, and attributes of the user's
            self._put(item, place, f".{name}", (_attribute, name), depth)
        self._use(value.__code__, value.__globals__)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _held_by(value: Any) -> list[Any]:
    """What is in a set, or what a cache of functools has of generators, as its values."""
    if isinstance(value, set | frozenset):
        return [one for one in list(value) if not isinstance(one, _PLAIN)]
    near = gc.get_referents(value)
    inside = [item for one in near if type(one) is dict for item in one.values()]
    return [one for one in (*near, *inside) if isinstance(one, GENERATORS)]


# ------------------------------------------------------------------ one hop


def _only(container: Any, _: Any) -> Any:
    (value,) = _held_by(container)
    return value


def _item(container: Any, key: Any) -> Any:
    return container[key]


def _attribute(thing: Any, name: str) -> Any:
    return thing.__dict__[name]


def _attribute_of_method(method: Any, name: str) -> Any:
    return getattr(method, name)


def _submodule(module: torch.nn.Module, name: str) -> Any:
    for part in name.split("."):
        module = module.__dict__["_modules"][part]
    return module


def _local(frame: types.FrameType, name: str) -> Any:
    return locals_of(frame)[name]


def _of_class(owner: type, name: str) -> Any:
    item = vars(owner)[name]
    plain = item.__func__ if isinstance(item, staticmethod | classmethod) else item
    return plain.fget if isinstance(plain, property) else plain


def _of_closure(function: types.FunctionType, name: str) -> Any:
    cells = function.__closure__ or ()
    return cells[function.__code__.co_freevars.index(name)].cell_contents


def _default(function: types.FunctionType, index: int) -> Any:
    return (function.__defaults__ or ())[index]


def _named_default(function: types.FunctionType, name: str) -> Any:
    return (function.__kwdefaults__ or {})[name]
