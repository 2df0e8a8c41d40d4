"""Places in a running program: a name that is the same in a new process, and the way there, hop by hop.

No hop runs code of the user's: containers are read with the methods of the built-in types, attributes from `__dict__`
and slots, and what an object of a C type holds beside those (the function and the iterators of a `map`, what a
`MappingProxyType` shows) comes from `gc.get_referents`. `isinstance` is not asked: it may run code to read `__class__`.
"""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

_FRAMES_MAX = 32
_OUTSIDE = frozenset({"torch", "numpy", "lastwords", *sys.stdlib_module_names}) - {"__main__"}
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8
"""Of `type.__flags__`: the first is set for what a class statement makes, the second for types of the interpreter."""
_PYTHONS = _HEAP | _IMMUTABLE
_SHOW_LOCALS = frozenset({"locals", "vars", "dir", "eval", "exec"})

Link = tuple[Callable[[Any, Any], Any], Any]
"""A function that goes one hop on from an object, and what it needs for that."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a generator lies. root: an object, or the code of a function on the stack, whose local it begins at.

    lost: "", or why a new process may not find the same generator there: a sentence for people.
    """

    name: str
    root: Any
    links: tuple[Link, ...]
    lost: str = ""

    def then(self, name: str, link: Link) -> Place:
        """The place one hop further on."""
        return Place(self.name + name, self.root, (*self.links, link), self.lost)

    def now(self, frames: Collection[types.FrameType] | None = None) -> Any:
        """What lies there now; None if there is nothing. frames: the stack, if it is known already."""
        try:
            value = self.root
            if type(value) is types.CodeType:
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


# ------------------------------------------------------------------ what an object holds


def own_names(value: Any) -> dict[str, Any]:
    """An object's attributes, without asking its class."""
    try:
        names: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return names if isinstance(names, dict) else {}


_members: weakref.WeakKeyDictionary[type, tuple[types.MemberDescriptorType, ...]] = weakref.WeakKeyDictionary()


def members(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """Slots, and what types written in C have in their place (`partial.func`, `method.__self__`)."""
    found = _members.get(kind)
    if found is None:
        every = [slot for owner in kind.__mro__ for key, slot in vars(owner).items() if key != "__dict__"]
        found = _members[kind] = tuple(slot for slot in every if isinstance(slot, types.MemberDescriptorType))
    return found


def is_of_python(kind: type) -> bool:
    """Whether its objects hold nothing but attributes and slots: no base is written in C."""
    return all(owner is object or owner.__flags__ & _PYTHONS == _HEAP for owner in kind.__mro__)


def member(value: Any, slot: types.MemberDescriptorType) -> Any:
    """What is in a slot; None if it is not set."""
    try:
        return slot.__get__(value)
    except AttributeError:
        return None


def unnamed(value: Any) -> Iterator[tuple[tuple[str, int], Any]]:
    """What an object holds beside attributes and slots, each with the name of its type and a number for that type."""
    kind, names = type(value), own_names(value)
    if is_of_python(kind):
        return
    known = {id(kind), id(names), *map(id, names.values()), *(id(member(value, slot)) for slot in members(kind))}
    counts: dict[str, int] = {}
    for one in gc.get_referents(value):
        if id(one) not in known:
            name = type(one).__name__
            counts[name] = counts.get(name, -1) + 1
            yield (name, counts[name]), one


def names_of_threads(value: threading.local) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """What this thread has there, and what the others have. The `__init__` of a subclass is not run."""
    every: list[Mapping[str, Any]] = [names for one in gc.get_referents(value) if type(one) is dict
             for names in one.values() if type(names) is dict]  # fmt: skip
    if type(value).__init__ is object.__init__:
        own: dict[str, Any] = threading.local.__getattribute__(value, "__dict__")
        return own, [names for names in every if names is not own]
    return (every[0], []) if len(every) == 1 else ({}, every)


# ------------------------------------------------------------------ one hop


def attribute(thing: Any, name: str) -> Any:
    return own_names(thing)[name]


def attribute_of_thread(value: threading.local, name: str) -> Any:
    return names_of_threads(value)[0][name]


def key_number(container: dict[Any, Any], index: int) -> Any:
    return next(islice(dict.__iter__(container), index, None))


def element(array: np.ndarray[Any, Any], index: int) -> Any:
    return np.ndarray.item(array, index)


def held(value: Any, key: tuple[str, int]) -> Any:
    return next(one for name, one in unnamed(value) if name == key)


def referent(reference: Any, _: Any) -> Any:
    """Of a weak reference or proxy."""
    if issubclass(type(reference), weakref.ref):
        return weakref.ref.__call__(reference)
    return reference.__init__.__self__


def submodule(module: torch.nn.Module, name: str) -> Any:
    for part in name.split("."):
        module = own_names(module)["_modules"][part]
    return module


def local(frame: types.FrameType, name: str) -> Any:
    return locals_of(frame)[name]


def of_class(owner: type, name: str) -> Any:
    item = vars(owner)[name]
    plain = item.__func__ if issubclass(type(item), staticmethod | classmethod) else item
    return plain.fget if issubclass(type(plain), property) else plain


def of_closure(function: types.FunctionType, name: str) -> Any:
    cells = function.__closure__ or ()
    return cells[function.__code__.co_freevars.index(name)].cell_contents


def default(function: types.FunctionType, index: int) -> Any:
    return (function.__defaults__ or ())[index]


def named_default(function: types.FunctionType, name: str) -> Any:
    return (function.__kwdefaults__ or {})[name]
