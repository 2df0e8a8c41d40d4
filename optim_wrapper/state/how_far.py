"""What of a value that nobody can store differs once it has changed: how far an iterator is, what a container holds.

Runs nobody's code: it looks at what an object refers to.
"""

from __future__ import annotations

import array
import ctypes
import functools
import gc
import itertools
import math
import operator
import queue
import random
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader

from lastwords.optim_wrapper.state.running import is_of_the_user, is_users
from lastwords.optim_wrapper.tensors.tensor_tree import DICTS

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
SEQUENCES = frozenset({list, tuple, deque})

WHICH = " #"
"""In the kind of what cannot be stored, before what tells it from others of its kind in this process."""

GENERATORS = (
    torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator,
    np.random.SeedSequence,
)  # fmt: skip

WHOLE_BYTES_MAX, ITEM_BYTES = 16 << 20, 256
"""So many bytes of one attribute are compared in full, in 3 ms; an item of a container counts as so many, and takes
about as long."""

_CONTAINERS_DEEP, _ITERATORS_DEEP, _ITEMS, _INNER_ITEMS, _ELEMENTS = 2, 8, 1000, 32, 4096
_LEVELS, _OBJECTS_MAX, _SMALL_BYTES, _SAMPLES = 3, 20_000, 1024, 16

_COUNTED = (list, tuple, range, dict, set, str, bytes)
_COUNTING = (*(type(iter(kind())) for kind in _COUNTED if kind is not range), type(iter(range(0))), type(reversed([])))
"""Iterators that say how much is left, and ask nobody for it."""

_CDATA: Any = ctypes.c_int.__mro__[-2]
_PYTHONS = ("builtins", "itertools")
_BEHIND = 200
_TRAINS = (torch.nn.Module, torch.optim.Optimizer, DataLoader)
_NOTHING_BEHIND = (*_TRAINS, torch.Tensor, np.ndarray, types.ModuleType, types.FunctionType, type)

_HIDDEN = itertools.count()
"""Differs each time, for what does not show where it is."""


def how_far(one: Any, depth: int = 0) -> str:
    """What an iterator is, and what differs once it has gone on: found in what it refers to. Runs nobody's code."""
    kind = type(one)
    if kind in _COUNTING:
        return f"{kind.__qualname__} with {operator.length_hint(one)} left"
    if kind is types.GeneratorType:
        if one.gi_running or one.gi_frame is None:
            return f"{kind.__qualname__}{WHICH}{one.gi_running}"
        at: Any = one.gi_frame.f_lasti
    elif kind is itertools.count:
        at = repr(one)
    elif kind is itertools.cycle:
        at = next(_HIDDEN)
    elif kind.__module__ not in _PYTHONS:
        return f"{kind.__qualname__} at {_given(one)}"  # torch's, over a loader
    else:
        at = ""
    return f"{kind.__qualname__}{WHICH}{at} {digest(gc.get_referents(one), depth)}"


def is_the_loops(kind: type[Any], path: str) -> bool:
    """Whether a loader has this iterator of a library's for itself, as Ray's has: the loop puts it to its place."""
    root, _, key = path.partition(".")
    return root == "loader" and "." not in key and kind.__module__ not in _PYTHONS


def _given(one: Any) -> Any:
    """How many items torch's iterator over a loader has given."""
    return _own(one).get("_num_yielded", "?")


def _own(one: Any) -> dict[str, Any]:
    try:
        own = object.__getattribute__(one, "__dict__")
    except AttributeError:
        return {}
    return own if type(own) is dict else {}


def digest(parts: Iterable[Any], depth: int) -> str:
    """Of values that nobody can store: differs where one has changed, or another stands in its place."""
    found = []
    for one in islice(parts, _INNER_ITEMS if depth else _ITEMS):
        kind = type(one)
        if kind in ATOMS:
            found.append(repr(one))
        elif depth < _CONTAINERS_DEEP and (kind in SEQUENCES or kind in DICTS or kind is set):
            inside = [*one.keys(), *one.values()] if kind in DICTS else one
            found.append(f"{len(one)} {digest(inside, depth + 1)}")
        elif depth < _ITERATORS_DEEP and has(kind, "__next__"):
            found.append(how_far(one, depth + 1))
        elif issubclass(kind, np.ndarray):
            found.append(f"{id(one)} {of_array(one, depth)}")
        else:
            tensor = issubclass(kind, torch.Tensor) and not one.is_inference()
            found.append(f"{id(one)}.{one._version if tensor else 0}")
    return xxhash.xxh3_64_hexdigest(" ".join(found).encode("utf-8", "surrogatepass"))


def of_array(values: np.ndarray[Any, Any], depth: int = 0, *, whole: bool = False) -> str:
    """Of an array of any kind: objects, fields, a mask. Differs where it has changed; a large one only if `whole`."""
    plain = np.ndarray.view(values, np.ndarray)
    inside = digest(islice(plain.flat, _ITEMS), depth + 1) if plain.dtype.hasobject else _of_elements(plain, whole)
    mask = vars(values).get("_mask") if isinstance(values, np.ma.MaskedArray) else None
    return inside if mask is None else f"{inside} {_of_elements(np.asarray(mask), whole)}"


def of_items(items: Collection[Any], count_max: int) -> str:
    """Of what many items are, and of what these hold; empty where that is more than `count_max`, or takes long.

    By value what is an atom, by its identity what is not.
    """
    hashed = xxhash.xxh3_64()
    level: Collection[Any] = items
    for _ in range(_LEVELS):
        kinds = {*map(type, level)} if len(level) <= count_max else None
        if kinds is None or (not kinds <= ATOMS and len(level) > _OBJECTS_MAX):
            return ""
        characters = sum(len(one) for one in level if type(one) in (str, bytes)) if kinds & {str, bytes} else 0
        if characters > count_max * ITEM_BYTES:
            return ""
        count_max -= len(level)
        if kinds == {float}:
            hashed.update(array.array("d", level))  # thirty times as fast
        else:
            told = [one if type(one) in ATOMS else _sign(one) for one in level]
            hashed.update(repr(told).encode("utf-8", "surrogatepass"))
        level = [] if kinds <= ATOMS else [*islice(chain.from_iterable(map(_inside, level)), count_max + 1)]
    return hashed.hexdigest()


def samples(value: Any) -> str:
    """Some atoms of a container with many items: of a list from everywhere, else from where it begins and ends."""
    kind = type(value)
    if kind in (list, tuple):
        found = [value[at] for at in range(0, len(value), max(len(value) // _SAMPLES, 1))][:_SAMPLES]
    elif kind is deque:
        found = [value[at] for at in (*range(_SAMPLES // 2), *range(-_SAMPLES // 2, 0))]
    else:
        found = [*islice(chain.from_iterable(value.items()) if kind in DICTS else value, _SAMPLES)]
    return repr([one if type(one) in ATOMS else type(one).__name__ for one in found])[:1000]


def _sign(one: Any) -> Any:
    kind = type(one)
    if kind in SEQUENCES or kind in DICTS or kind is set:
        return len(one)
    if issubclass(kind, np.ndarray):
        return id(one), _of_elements(one, whole=True) if one.nbytes <= _SMALL_BYTES else ""
    return id(one), one._version if issubclass(kind, torch.Tensor) and not one.is_inference() else 0


def _inside(one: Any) -> Iterable[Any]:
    kind = type(one)
    if kind in SEQUENCES or kind is set:
        return one  # type: ignore[no-any-return]
    if kind in DICTS:
        return [*one.keys(), *one.values()]
    return [*_own(one).values()] if is_users(kind) and not issubclass(kind, _NOTHING_BEHIND) else ()


def which(value: Any) -> str:
    """What tells something that cannot be stored from others of its kind in this process, or from what it was."""
    kind = type(value)
    if kind is array.array or issubclass(kind, _CDATA):
        return f"{WHICH}{xxhash.xxh3_64_hexdigest(bytes(memoryview(value)))}"
    held = _held_in(value)
    return "" if held is None else f"{WHICH}{digest(held, 0)}"


def leads_to(value: Any) -> dict[str, Any]:
    """What a method, a `partial` or an object of a library's has from which one comes to an object or a function of the
    user's, or to a random generator, by name. Runs nobody's code.

    Not to what trains (an object that has the model, the optimizer or a loader): it changes with each step anyway.
    """
    kind = type(value)
    if kind is types.MethodType:
        held = {"self": value.__self__}
    elif kind is functools.partial:
        held = {"func": value.func, "args": value.args, "keywords": value.keywords}
    elif issubclass(kind, _NOTHING_BEHIND):
        return {}
    else:
        held = _own(value)
    return {name: one for name, one in held.items() if type(name) is str and _is_anyones([one])}


def _is_anyones(todo: list[Any]) -> bool:
    """Whether one comes from these to what is the user's, or to a random generator."""
    seen: set[int] = set()
    for one in todo:  # it grows
        kind = type(one)
        if len(seen) > _BEHIND:
            return False
        if issubclass(kind, GENERATORS) or (kind is types.FunctionType and is_of_the_user(one.__globals__)):
            return True
        if id(one) in seen or kind in ATOMS or issubclass(kind, _NOTHING_BEHIND):
            continue
        seen.add(id(one))
        if kind in SEQUENCES or kind in DICTS:
            todo.extend(islice(one.values() if kind in DICTS else one, _INNER_ITEMS))
        elif kind is types.MethodType:
            todo.append(one.__self__)
        elif kind is functools.partial:
            todo.extend([one.func, one.args, one.keywords])
        elif own := _own(one):
            if not is_users(kind):
                todo.extend(own.values())
            elif not any(issubclass(type(item), _TRAINS) for item in own.values()):
                return True
    return False


def _held_in(one: Any) -> Iterable[Any] | None:
    """What a queue or a weak container of Python's own holds; None for any other object."""
    kind = type(one)
    if kind in _QUEUES:
        return list(one.queue)
    if kind in _WEAK:
        data = one.data
        return [*data.values()] if isinstance(data, dict) else [*data]
    return None


_QUEUES = (queue.Queue, queue.LifoQueue, queue.PriorityQueue)
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)


def _of_elements(values: np.ndarray[Any, Any], whole: bool) -> str:
    """A checksum of an array; if it is large, and not `whole`, of some elements out of all of its rows and columns."""
    if values.dtype.hasobject:
        return ""
    stride = 1 if whole else max(values.size // _ELEMENTS, 1)
    while stride > 1 and math.gcd(stride, values.size) > 1:  # else the same columns each time
        stride += 1
    some = values if stride == 1 else values.flat[::stride]
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(some).reshape(-1).view(np.uint8).data)


def has(kind: type[Any], *names: str) -> bool:
    """Whether a class has one of these, whatever its metaclass does when it is asked."""
    for owner in kind.__mro__:
        own = vars(owner)
        for name in names:
            if name in own:
                return True
    return False
