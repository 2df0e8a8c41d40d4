"""What a Trainer's callbacks hold: plain attributes, and modules of their own such as averaged weights."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch

from lastwords.optim_wrapper.state.object_walk import AttributesOf, is_walked


def modules_in(holders: Iterable[Any], model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules in attributes of these, outside of the model, by class and attribute: for `extras`."""
    of_model = {*map(id, model.modules())}
    return {
        f"{name}.{key}": value
        for name, one in _named(holders).items()
        for key, value in vars(one).items()
        if isinstance(value, torch.nn.Module) and id(value) not in of_model and value.state_dict()
    }


def objects_in(holders: Iterable[Any], model: torch.nn.Module) -> Mapping[str, Any]:
    """Those whose attributes may be state, by class: for `variables`. The user's own, and whoever holds a module."""
    named = _named(holders)
    averaging = {name.partition(".")[0] for name in modules_in(holders, model)}
    found = {name: one if is_walked(one) else AttributesOf(one, ()) for name, one in named.items() if name in averaging}
    return found | {name: one for name, one in named.items() if is_walked(one)}


def names_set_by(kind: type[Any]) -> frozenset[str]:
    """Attributes of `self` that the methods of a class, and of its bases, set."""
    found: set[str] = set()
    for one in [one for owner in kind.__mro__ for one in vars(owner).values()]:
        function = one.fget if isinstance(one, property) else inspect.unwrap(one) if callable(one) else None
        if (code := getattr(function, "__code__", None)) is not None:
            for before, step in pairwise(dis.get_instructions(code)):
                of_self = before.argval == "self" or (
                    isinstance(before.argval, tuple) and before.argval[-1:] == ("self",)
                )
                found |= {step.argval} if of_self and step.opname == "STORE_ATTR" else set()
    return frozenset(found)


def _named(holders: Iterable[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in holders:
        name = type(one).__name__
        if hasattr(one, "__dict__"):
            found[name if name not in found else f"{name} {len(found)}"] = one
    return found
