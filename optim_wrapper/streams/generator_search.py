"""Random generators that a program keeps for itself: where they lie, and how to come to the same place again.

The search begins at objects that the caller names (the model, the loader, extras) and at the stack of the calling
thread: the local variables of the user's functions on it and the global names that they use. From there it goes on
through attributes, containers and whatever else an object holds, weak references, closures, defaults, and the global
names of functions and of the methods of classes. It looks, and runs nothing of the user's: no properties, no
`__getattr__`. Global names of the standard library and of installed packages are not followed, nor are functions that
are suspended.

A place has a name that is the same in a new process of the same script ("__main__.main.rng",
"model.backbone.noise", "mypackage.augment.RNG"), and a way of looking there again in about a microsecond. Where the
name may mean another generator in a new process (in a set of several), what is found is a reason, not a place.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import inspect
import logging
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.quasirandom import SobolEngine

from lastwords.optim_wrapper.streams import places
from lastwords.optim_wrapper.streams.places import Link, Place, is_of_the_user, locals_of, own_names, user_frames

_log = logging.getLogger(__name__)

_DEPTH_MAX = 8
_ITEMS_MAX = 256
_ITEMS_OF_MORE = 4
"""So many are looked at in a container of more than _ITEMS_MAX: enough to say that such as it holds are not saved."""
_OBJECTS_MAX = 20_000
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random, np.random.BitGenerator,
              np.random.SeedSequence, SobolEngine)  # fmt: skip
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), range, torch.Tensor, np.ndarray, np.generic,
          torch.dtype, torch.device, random.SystemRandom)  # fmt: skip
_SAVED_OF_OPTIMIZERS = ("state", "param_groups")
_QUICKLY_PASSED = frozenset({str, bytes, int, float, bool, type(None), torch.Tensor, torch.nn.Parameter})
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset, OrderedDict})
_SEQUENCES: tuple[Any, ...] = (list, tuple, deque)
_REFERENCES = (weakref.ref, weakref.ProxyType, weakref.CallableProxyType)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_SUSPENDED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, types.FrameType, types.CodeType)

_PYTHONS = random.random.__self__  # type: ignore[attr-defined]
_Cache = type(functools.lru_cache(lambda: None))
_ITEMS_ARE_ALL = (dict, list, tuple, deque, set, frozenset, np.ndarray, threading.local, _Cache)


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
            unreached.reasons.append(f"there are two random generators at {place.name}, and only the first is saved")
            continue
        found[place.name] = place, generator
    return found


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
        self._lost: deque[tuple[Any, Place, int]] = deque()  # after all others, which may lead to the same objects
        for name, root in roots.items():
            self._queue.append((root, Place(name, root, ()), 0))
        for frame in frames:
            self._enter(frame)

    def all(self) -> Iterator[tuple[Place, Any]]:
        while (self._queue or self._lost) and len(self._seen) < _OBJECTS_MAX:
            value, place, depth = (self._queue or self._lost).popleft()
            kind = type(value)
            if id(value) in self._seen or (issubclass(kind, _PLAIN) and not _has_objects(value, kind)):
                continue
            self._seen.add(id(value))
            self._kept.append(value)
            if issubclass(kind, GENERATORS):
                if not place.lost:
                    yield place, value
                elif place.lost not in self._unreached.reasons and not _is_global(value):
                    self._unreached.reasons.append(place.lost)
            elif depth < _DEPTH_MAX:
                self._look_safely(value, kind, place, depth + 1)
            elif not self._unreached.limits:
                self._unreached.limits.append(f"at {place.name}, {_DEPTH_MAX} references from the start")
        if left := self._queue or self._lost:
            self._unreached.limits.append(f"after {_OBJECTS_MAX} objects, before {left[0][1].name}")

    def _enter(self, frame: types.FrameType) -> None:
        code, names = frame.f_code, frame.f_globals
        module = str(names.get("__name__", ""))
        if code.co_flags & inspect.CO_OPTIMIZED:
            root = Place(f"{module}.{code.co_qualname}", code, ())
            for name, value in locals_of(frame).items():
                self._put(value, root, f".{name}", (places.local, name), 0)
        self._use(code, names)

    def _put(self, value: Any, place: Place, name: str, link: Link, depth: int) -> None:
        kind = type(value)
        if kind in _QUICKLY_PASSED or (kind in _CONTAINERS and not value):
            return
        if id(value) not in self._seen:
            (self._lost if place.lost else self._queue).append((value, place.then(name, link), depth))

    def _use(self, code: types.CodeType, names: dict[str, Any]) -> None:
        """The global names that a piece of code uses."""
        if not is_of_the_user(names):
            return
        module = Place(str(names.get("__name__", "")), names, ())
        for used in _codes(code):
            for name in used.co_names:
                if name in names and (id(names), name) not in self._seen_names:
                    value = names[name]
                    if issubclass(type(value), types.ModuleType):
                        self._use_module(value, used)
                    else:
                        self._seen_names.add((id(names), name))
                        self._put(value, module, f".{name}", (dict.get, name), 1)

    def _use_module(self, module: types.ModuleType, used: types.CodeType) -> None:
        names = vars(module)
        self._put_names(module, [name for name in used.co_names if name in names])

    def _put_names(self, module: types.ModuleType, chosen: Collection[str]) -> None:
        """Global names of a module of the user's."""
        names = vars(module)
        if is_of_the_user(names):
            place = Place(module.__name__, names, ())
            for name in chosen:
                if not issubclass(type(names[name]), types.ModuleType):
                    self._put(names[name], place, f".{name}", (dict.get, name), 1)

    def _look_safely(self, value: Any, kind: type, place: Place, depth: int) -> None:
        try:
            self._look_into(value, kind, place, depth)
        except Exception as error:  # of the user's own classes: handed to the log, and the search goes on
            _log.debug("%s could not be searched for random generators: %r", place.name, error)

    def _look_into(self, value: Any, kind: type, place: Place, depth: int) -> None:
        if kind in _CONTAINERS:
            self._look_into_items(value, kind, place, depth)
        elif issubclass(kind, types.ModuleType):
            self._put_names(value, [name for name in vars(value) if not name.startswith("__")])
        elif issubclass(kind, types.FunctionType):
            self._look_into_function(value, place, depth)
        elif issubclass(kind, type):
            self._look_into_class(value)
        elif issubclass(kind, torch.nn.Module):
            self._look_into_model(value, place, depth)
        elif not issubclass(kind, _SUSPENDED) and kind.__module__.partition(".")[0] not in ("lastwords", "logging"):
            self._look_into_items(value, kind, place, depth)
            self._look_into_object(value, kind, place, depth)

    def _look_into_items(self, value: Any, kind: type, place: Place, depth: int) -> None:
        """What is in a container, or behind a reference."""
        if kind is dict and "__spec__" in value and not is_of_the_user(value):
            return  # the global names of a module
        if issubclass(kind, dict):
            place, count = _bounded(place, dict.__len__(value))
            for index, (key, item) in enumerate(list(islice(dict.items(value), count))):
                if type(item) not in _QUICKLY_PASSED:
                    name = f"[{key!r}]" if type(key) in (str, int) else f"[{type(key).__name__} {index}]"
                    self._put(item, place, name, (dict.get, key), depth)
                if type(key) not in _QUICKLY_PASSED:
                    self._put(key, place, f"[key {index}]", (places.key_number, index), depth)
        elif base := next((base for base in _SEQUENCES if issubclass(kind, base)), None):
            place, count = _bounded(place, base.__len__(value))
            for index, item in enumerate(list(islice(base.__iter__(value), count))):
                if type(item) not in _QUICKLY_PASSED:
                    self._put(item, place, f"[{index}]", (base.__getitem__, index), depth)
        elif issubclass(kind, np.ndarray):
            place, count = _bounded(place, np.ndarray.size.__get__(value))
            for index in range(count):
                self._put(places.element(value, index), place, f"[{index}]", (places.element, index), depth)
        elif issubclass(kind, set | frozenset | _Cache):
            self._look_into_unordered(value, place, depth)
        elif issubclass(kind, _REFERENCES):
            self._put(places.referent(value, None), place, "()", (places.referent, None), depth)
        elif issubclass(kind, contextvars.ContextVar):
            self._put(value.get(None), place, ".get()", (contextvars.ContextVar.get, None), depth)
        elif issubclass(kind, threading.local):
            own, others = places.names_of_threads(value)
            for name, item in list(own.items()):
                self._put(item, place, f".{name}", (places.attribute_of_thread, name), depth)
            lost = replace(place, lost=f"random generators of other threads in {place.name} are not saved")
            self._put(others, lost, "", (_nothing, None), depth)

    def _look_into_unordered(self, value: Any, place: Place, depth: int) -> None:
        """A set, or a function with a cache: what is alone in it has a place there."""
        inside = _held_by(value)
        if len(inside) == 1:
            self._put(inside[0], place, "{}", (_only, None), depth)
        else:
            lost = f"random generators in {place.name} cannot be distinguished, and are not saved"
            self._put(inside, replace(place, lost=place.lost or lost), "{}", (_nothing, None), depth)

    def _look_into_object(self, value: Any, kind: type, place: Place, depth: int) -> None:
        saved = _SAVED_OF_OPTIMIZERS if issubclass(kind, torch.optim.Optimizer) else ()
        for key, item in list(own_names(value).items()):
            if key not in saved:
                self._put(item, place, f".{key}", (places.attribute, key), depth)
        for slot in places.members(kind):
            self._put(places.member(value, slot), place, f".{slot.__name__}", (places.member, slot), depth)
        if not issubclass(kind, _ITEMS_ARE_ALL):
            for (name, number), item in places.unnamed(value):
                self._put(item, place, f"{{{name} {number}}}", (places.held, (name, number)), depth)
        self._look_into_class(kind)

    def _look_into_model(self, model: torch.nn.Module, place: Place, depth: int) -> None:
        for name, module in model.named_modules():
            self._seen.add(id(module))
            inside = place.then(f".{name}", (places.submodule, name)) if name else place
            for key, item in list(own_names(module).items()):
                if key not in ("_parameters", "_buffers", "_modules") and type(item) not in _QUICKLY_PASSED:
                    self._put(item, inside, f".{key}", (places.attribute, key), depth)
            for key, parameter in module._parameters.items():
                for hooks in _TENSOR_HOOKS if parameter is not None else ():
                    self._put(getattr(parameter, hooks), inside, f".{key}.{hooks}", (_hooks, (key, hooks)), depth)
            self._look_into_class(type(module))

    def _look_into_class(self, kind: type) -> None:
        """Attributes of a class of the user's and of its bases, and what its methods use."""
        for owner in kind.__mro__:
            home = sys.modules.get(owner.__module__)
            if id(owner) in self._seen_classes or home is None or not is_of_the_user(vars(home)):
                continue
            self._seen_classes.add(id(owner))
            place = Place(f"{owner.__module__}.{owner.__qualname__}", owner, ())
            for name in list(vars(owner)):
                plain = places.of_class(owner, name)
                if not name.startswith("__") or type(plain) is types.FunctionType:
                    self._put(plain, place, f".{name}", (places.of_class, name), 1)

    def _look_into_function(self, value: types.FunctionType, place: Place, depth: int) -> None:
        if str(value.__globals__.get("__name__", "")).partition(".")[0] in ("lastwords", "logging"):
            return
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                self._put(cell.cell_contents, place, f".{name}", (places.of_closure, name), depth)
            except ValueError:  # not filled yet
                continue
        for index, item in enumerate(value.__defaults__ or ()):
            self._put(item, place, f".__defaults__[{index}]", (places.default, index), depth)
        for name, item in (value.__kwdefaults__ or {}).items():
            self._put(item, place, f".{name}", (places.named_default, name), depth)
        for name, item in list(value.__dict__.items()):  # what functools.wraps leaves, and attributes of the user's
            self._put(item, place, f".{name}", (places.attribute, name), depth)
        self._use(value.__code__, value.__globals__)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _bounded(place: Place, count: int) -> tuple[Place, int]:
    """How many of so many items to look at; in too large a container none of them has a place."""
    if count <= _ITEMS_MAX:
        return place, count
    lost = f"random generators in {place.name} are not saved: it has more than {_ITEMS_MAX} items"
    return replace(place, lost=place.lost or lost), _ITEMS_OF_MORE


def _has_objects(value: Any, kind: type) -> bool:
    return issubclass(kind, np.ndarray) and bool(np.ndarray.dtype.__get__(value).hasobject)


def _is_global(generator: Any) -> bool:
    """Whether it is the stream of a whole library, which is saved as such."""
    return generator is torch.default_generator or generator is _PYTHONS or generator is np.random.mtrand._rand


def _held_by(value: Any) -> list[Any]:
    """What is in a set; in a cache of functools the only generator, or else whatever may lead to some."""
    for base in (set, frozenset):
        if issubclass(type(value), base):
            return [one for one in list(base.__iter__(value)) if not issubclass(type(one), _PLAIN)]
    near = gc.get_referents(value)
    inside = [*near, *(item for one in near if type(one) is dict for item in one.values())]
    generators = [one for one in inside if issubclass(type(one), GENERATORS)]
    return generators if len(generators) == 1 else inside


def _only(container: Any, _: Any) -> Any:
    (value,) = _held_by(container)
    return value


def _nothing(*_: Any) -> None:
    """What has no place cannot be looked at again."""


def _hooks(module: torch.nn.Module, of: tuple[str, str]) -> Any:
    return getattr(module._parameters.get(of[0]), of[1], None)
