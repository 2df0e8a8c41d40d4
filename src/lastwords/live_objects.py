"""Objects of a class, wherever they are."""

from __future__ import annotations

import gc
from typing import TypeVar

FEW = 16

_T = TypeVar("_T")


def live_instances(kind: type[_T]) -> list[_T]:
    """Every living instance of a class that Python code has defined, and of classes that inherit from it. Any thread.

    Not those that `gc.freeze()` has set aside: `gc.unfreeze()` first, and do not freeze again, since that would be
    whatever lives by then, and none of it would be freed. Other objects are not written to if the class has FEW heirs:
    to count references to all of them copies each page that a fork shares.
    """
    kinds = _with_subclasses(kind)
    found = gc.get_referrers(*kinds) if len(kinds) <= FEW else gc.get_objects()  # each object refers to its class
    # By type(): isinstance() would ask objects of all libraries for their __class__, and proxies answer with effects.
    return [one for one in found if issubclass(type(one), kind)]


def _with_subclasses(kind: type[_T]) -> list[type[_T]]:
    found = {id(kind): kind}
    todo = [kind]
    while todo:
        for one in type.__subclasses__(todo.pop()):
            if id(one) not in found:
                found[id(one)] = one
                todo.append(one)
    return [*found.values()]
