"""Finding out whether an optimizer writes before it calls its closure (SAM does, LBFGS does not)."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import Optimizer


def fingerprint_of(inner: Optimizer) -> list[Any]:
    """Enough of parameters and state to see whether an optimizer has written; entries (place, version, norm)."""
    entries: list[Any] = []

    def add(place: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                plain = getattr(value, "_local_tensor", value).detach()  # a DTensor's norm would be a collective
                has_norm = plain.is_complex() or (plain.is_floating_point() and plain.element_size() > 1)
                norm = plain.norm() if has_norm else plain.double().norm()
            # Writing through `.data` leaves the version as it is, so the norm is looked at too.
            entries.append((place, value._version, repr(norm.item())))
        elif isinstance(value, int | float | str | bool | None):
            entries.append((place, value, ""))

    for g, group in enumerate(inner.param_groups):
        for i, parameter in enumerate(group["params"]):
            add((g, i), parameter)
            for key, value in inner.state.get(parameter, {}).items() if parameter in inner.state else ():
                add((g, i, key), value)
    return entries


def same_fingerprint(before: list[Any], now: list[Any]) -> bool:
    """Whether everything that was there before is unchanged.

    >>> same_fingerprint([((0, 0), 1, "2.0")], [((0, 0), 1, "2.0"), ((0, 0, "step"), 0, "")])
    True
    """
    # State that an optimizer creates on its first step (LBFGS sets its counters up) is new, not written over.
    known = {entry[0]: entry[1:] for entry in now}
    return all(known.get(place) == tuple(rest) for place, *rest in before)
