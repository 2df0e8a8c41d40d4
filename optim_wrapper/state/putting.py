"""Putting values back into the attributes of live objects: what these hold keeps its identity where it can."""

from __future__ import annotations

import enum
import sys
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import torch

from lastwords.checkpoint.storable import Place
from lastwords.errors import FormatError
from lastwords.optim_wrapper.state.how_far import WHICH
from lastwords.optim_wrapper.state.object_walk import (
    CONTENT,
    CONTENTS,
    DATA_PTR,
    GONE,
    ID,
    MEMBER,
    MEMORY,
    NAMED_TUPLE,
    SAME,
    VARIABLES,
    AttributesOf,
    Walk,
    content_of,
    form_of,
    is_attribute,
    own_of,
)
from lastwords.optim_wrapper.tensors.overwriting import Overwriting
from lastwords.optim_wrapper.tensors.tensor_bytes import class_name
from lastwords.sharding.dtensor import local_of


class Putting:
    """Puts values into the attributes that `walk` has found."""

    def __init__(self, walk: Walk, saved: Mapping[str, torch.Tensor]) -> None:
        self._walk = walk
        self._saved = saved
        self.reasons: list[str] = []
        self._missing = ""
        self._lost: list[str] = []
        """What was not made, so that what lies in it has no place: told once, where it began."""
        self._overwriting = Overwriting()
        self._inside: dict[str, Any] = {}
        """What is in the attribute that is being put, by its path there: it may be in it once more."""

    def put(self, path: str, key: str, value: Any) -> None:
        """Make this attribute what it was."""
        holder = self._walk.objects.get(path)
        if holder is None:
            if not any(_is_inside(path, lost) for lost in self._lost):
                self.reasons.append(f"the checkpoint has {path}.{key}, and there is no such object here")
            return
        own = own_of(holder)
        if key != CONTENT and not is_attribute(holder, key):
            raise FormatError(f"{path} has no attribute {key!r} that is saved: damaged or forged")
        if type(value) is Place and value == GONE:
            own.pop(key, None)
            return
        self._missing, self._inside = "", {}
        live = content_of(holder) if key == CONTENT else own.get(key)
        whole = self._filled(live, value, f"{path}.{key}")
        if self._missing:
            self._lost.append(f"{path}.{key}")
            self.reasons.append(f"{path}.{key} held {self._missing}, which cannot be made again")
        elif key == CONTENT:
            _fill(holder, whole)
        else:
            here = f"{path}.{key}"

            def is_foreign(one: Any) -> bool:
                home = self._walk.home(one)
                return home != "" and not _is_inside(home, here)

            own[key] = self._overwriting.into(live, whole, is_foreign)
            if own[key] is not live and VARIABLES in path and self._walk.is_root(path):
                self.reasons.append(f"{here} is another object by now: a variable cannot be set from outside")
            self._walk.see(path, key)

    def _filled(self, live: Any, value: Any, path: str) -> Any:
        """`value` with what stands here for each `Place` in it; live: what lies here at the same place."""
        if type(value) is Place:
            return self._there(live, value)
        made = self._filled_inside(live, value, path)
        if path:
            self._inside[path] = made
        return made

    def _filled_inside(self, live: Any, value: Any, path: str) -> Any:
        kind = type(value)
        if kind is tuple and value and type(value[0]) is Place and value[0].kind == NAMED_TUPLE:
            return self._named_tuple(live, value, path)
        if kind in (list, tuple, deque):
            old = [*live] if type(live) is kind and len(live) == len(value) else [None] * len(value)
            items = [
                self._filled(one, item, f"{path}[{at}]") for at, (one, item) in enumerate(zip(old, value, strict=True))
            ]
            return deque(items, value.maxlen) if kind is deque else kind(items)
        if isinstance(value, dict):
            known = live if type(live) is kind else {}
            keys = [(self._filled(None, at, ""), item) for at, item in value.items()]
            pairs = {key: self._filled(known.get(key), item, self._walk.item_path(path, key)) for key, item in keys}
            value.clear()
            value.update(pairs)
            if kind is dict and type(live) is defaultdict:
                return defaultdict(live.default_factory, value)
        return value

    def _named_tuple(self, live: Any, value: Any, path: str) -> Any:
        """Of the class that what lies here has, or that a module has under this name."""
        name = value[0].path
        kind = _class_of(live, name)
        if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_make")):
            self._missing = f"a {name}"
            return None
        olds = live if type(live) is kind else [None] * len(value)
        fields = [*getattr(kind, "_fields", ()), *map(str, range(len(value)))]
        items = [
            self._filled(old, item, f"{path}.{name}") for old, item, name in zip(olds, value[1:], fields, strict=False)
        ]
        return tuple.__new__(kind, items)

    def _there(self, live: Any, place: Place) -> Any:
        """What stands for this in this process."""
        if place.kind.startswith(MEMBER):
            kind = _class_of(live, place.path)
            members: Any = kind.__members__ if isinstance(kind, enum.EnumMeta) else {}
            if (member := members.get(place.kind.removeprefix(MEMBER))) is not None:
                return member
        if place.path in self._saved and place.kind in ("", ID, DATA_PTR):
            tensor = self._saved[place.path]
            return tensor if not place.kind else id(tensor) if place.kind == ID else local_of(tensor).data_ptr()
        inside = self._inside.get(place.path)
        if inside is not None and place.kind in (SAME, type(inside).__name__):
            self._overwriting.whole.add(id(inside))  # what is one thing here is written nowhere, or it would be two
            return inside
        if place.path:
            base = self._walk.tensors.get(place.path)
            if base is not None and place.kind in (SAME, form_of(base)):
                self._overwriting.whole.add(id(base))
                return base
            found = self._walk.objects.get(place.path, self._walk.containers.get(place.path))
            if found is not None and place.kind == ID:
                return id(found)
            if type(found) is AttributesOf and found.of == id(live):
                return live
            if found is not None and place.kind in (class_name(found), type(found).__name__):
                self._overwriting.whole.add(id(found))
                return found
        if place == self._walk.told(live, "", 0):
            return live
        shares = place.path and (place.kind == SAME or place.kind.startswith(MEMORY))
        self._missing = (
            f"a tensor or array that shares memory with {place.path}"
            if shares
            else f"a {place.kind.partition(WHICH)[0]}"
        )
        return None


def _class_of(live: Any, name: str) -> Any:
    """The class of `live` if it is called so, with its module; or what is, in this process; None if nothing is."""
    if name == class_name(live):
        return type(live)
    module, _, called = name.rpartition(".")
    while module and module not in sys.modules:
        module, _, outer = module.rpartition(".")
        called = f"{outer}.{called}"
    found: Any = sys.modules.get(module)
    for part in called.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _is_inside(path: str, cell: str) -> bool:
    """
    >>> _is_inside("model.a[0]", "model.a"), _is_inside("model.ab", "model.a"), _is_inside("saved", "model.a")
    (True, False, False)
    """
    return path.startswith(cell) and path[len(cell) : len(cell) + 1] in ("", "[", ".")


def _fill(one: Any, content: Any) -> None:
    """Make these the items of an object that is a list, a dict or the like, too."""
    kind = next(kind for kind in CONTENTS if issubclass(type(one), kind))
    kind.clear(one)
    (kind.update if issubclass(kind, dict | set) else kind.extend)(one, content)
