"""Copies of the user's values as they are at one moment, sharing what has not changed; and putting them back."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container
from operator import is_
from typing import Any

import numpy as np
import torch

from lastwords.checkpoint.storable import pack
from lastwords.errors import UnstorableError
from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of, problem_of, staged_bytes, writing
from lastwords.optim_wrapper.tensors.tensor_tree import ATOMS, MAKE, inner_names, parts_of
from lastwords.sharding.dtensor import local_of

DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})
_MADE_ANEW = (set, frozenset, bytearray)
"""Containers of nothing that can change."""


def advance(before: Any, now: Any) -> tuple[Any, bool]:
    """A copy of `now` that shares with `before` (a copy made earlier) what is equal; and whether anything differs.

    Called for all extras in every step. UnstorableError for what cannot be stored, RecursionError for what contains
    itself.
    """
    kind = type(now)
    if kind in ATOMS:
        return now, now is not before and (type(before) is not kind or _other_bits(before, now))
    if type(before) is not kind:
        before = None
    if kind is dict or kind is OrderedDict:
        known, result, differs = {} if before is None else before, now.copy(), False
        for key, item in now.items():
            old = known.get(key)
            if item is not old or type(item) not in ATOMS:
                result[key], moved = advance(old, item)
                differs = differs or moved
        same = not differs and before is not None and _same_keys(before, now)
        return (before, False) if same else (result, True)
    parts = parts_of(now)
    if parts is None:
        return _advance_leaf(before, now)
    if kind is np.ndarray:  # cheaper as a whole
        same = before is not None and (before.dtype, before.shape) == (now.dtype, now.shape)
        return (before, False) if same and before.tobytes() == now.tobytes() else (now.copy(order="K"), True)
    name, about, inside = parts
    old, differs = None if before is None else parts_of(before), False
    if old is None or old[1] != about or len(old[2]) != len(inside):
        old, differs = ("", None, [None] * len(inside)), True
    items = []
    for known, item in zip(old[2], inside, strict=True):
        if item is not known or type(item) not in ATOMS:
            item, moved = advance(known, item)
            differs = differs or moved
        items.append(item)
    if not differs:
        return before, False
    try:
        return MAKE[name](about, items), True
    except Exception as error:  # of a class of the user's: handed to whoever asks what can be stored
        raise UnstorableError(f"a tensor cannot be copied: {error}", f"a {name} tensor") from error


def is_fixed(value: Any) -> bool:
    """Whether a value is the same as long as it is the same object, by its type and by those inside."""
    kind = type(value)
    return kind in ATOMS or (kind is tuple and all(map(is_fixed, value)))


def copied(value: Any) -> Any:
    """A copy that shares nothing that can change; of what cannot be stored, the value itself."""
    if is_fixed(value):
        return value
    try:
        return advance(None, value)[0]
    except (UnstorableError, RecursionError):
        return value  # it will be left out of what is saved, and that is said


def differ(before: Any, now: Any) -> bool:
    """Whether `now` is another value than `before`; of what cannot be stored, whether it is another object."""
    try:
        return now is not before and advance(before, now)[1]
    except (UnstorableError, RecursionError):
        return True


def _same_keys(known: Any, now: Any) -> bool:
    return len(known) == len(now) and (
        all(map(is_, known, now))
        or not any(old is not key and advance(old, key)[1] for old, key in zip(known, now, strict=True))
    )


def _advance_leaf(before: Any, now: Any) -> tuple[Any, bool]:
    """`advance` for what has no parts. DTensors are welcome: hyperparameters of their kind lie with their parameter."""
    if not isinstance(now, torch.Tensor):
        text = _text(now)  # equal sets may hold 1 and True, and equal times may be of different zones
        same = before is not None and text == _text(before)
        return (before, False) if same else (type(now)(now) if isinstance(now, _MADE_ANEW) else now, True)
    if what := problem_of(local_of(now)):
        raise UnstorableError(f"a tensor {what}", f"a tensor that {what}")
    form = None if before is None else (before.shape, before.dtype, before.device)
    if form == (now.shape, now.dtype, now.device) and _bytes(before) == _bytes(now):
        return before, False
    try:
        return now.detach().clone(), True
    except RuntimeError as error:  # integers of less than a byte: NotImplementedError in newer releases
        raise UnstorableError(f"a tensor cannot be copied: {error}", f"a tensor of {now.dtype}") from error


def _other_bits(before: Any, now: Any) -> bool:
    """Whether two atoms of one type differ. As floats go, 0.0 equals -0.0, and a NaN does not equal itself."""
    if now == before:
        return type(now) is float and not now and math.copysign(1, now) != math.copysign(1, before)
    return bool(now == now or pack(before) != pack(now))


def _text(value: Any) -> str:
    """The value as it would be stored. Packed values alone may be equal where 1 is not True, or 0.0 is not -0.0."""
    return json.dumps(pack(value))


def _nobody(here: Any) -> bool:
    return False


def overwrite_values(
    target: dict[Any, Any],
    value: dict[Any, Any],
    *,
    keep: bool = False,
    whole: Container[int] = (),
    is_foreign: Callable[[Any], bool] = _nobody,
) -> None:
    """Make `target` equal to `value`, order included; tensors, generators and dicts in it stay the same objects.

    keep: what is not in `value` was left out of it, and stays. whole, is_foreign: see `into`.
    """
    made = {key: into(target.get(key), item, whole, is_foreign) for key, item in value.items()}
    kept = {key: item for key, item in target.items() if keep and key not in made}
    target.clear()
    target.update(made | kept)


def into(here: Any, item: Any, whole: Container[int] = (), is_foreign: Callable[[Any], bool] = _nobody) -> Any:
    """`item`, as the object `here` if that can take it over.

    whole: ids of what is to stand there itself. is_foreign: whether an object belongs to something else as well, which
    is not to be written by the way.
    """
    kind = type(item)
    if id(item) in whole:
        return item
    if is_foreign(here):
        return item if differ(here, item) else here
    if isinstance(here, torch.Tensor) and isinstance(item, torch.Tensor):
        alike = (here.shape, here.dtype, here.layout) == (item.shape, item.dtype, item.layout)
        alike = alike and not inner_names(here) and not inner_names(item)  # copy_() of a quantized one rounds anew
        if not alike or here.layout is not torch.strided or here is item:
            return item
        if here.numel() and 0 in here.stride():  # expand()
            return item
        with writing(here):
            here.copy_(item)
        return here
    if type(here) is not kind or here is item:
        return item
    if kind is np.ndarray:
        if (here.dtype, here.shape) != (item.dtype, item.shape) or not here.flags.writeable:
            return item
        here[...] = item
        return here
    mine, its = parts_of(here), parts_of(item)
    if mine is not None and its is not None and mine[1] != its[1]:  # another factory, length or device
        return item
    if kind in DICTS:
        overwrite_values(here, item, whole=whole, is_foreign=is_foreign)
    elif kind is list or kind is deque:
        olds = [*here] if len(here) == len(item) else [None] * len(item)
        items = [into(old, one, whole, is_foreign) for old, one in zip(olds, item, strict=True)]
        here.clear()
        here.extend(items)
    elif kind is set:
        here.clear()
        here.update(item)
    elif kind is bytearray and len(here) == len(item):
        here[:] = item
    elif kind is torch.Generator:
        here.set_state(item.get_state())
    else:
        return item
    return here


def _bytes(tensor: torch.Tensor) -> memoryview:
    return bytes_of(tensor) or staged_bytes(tensor)


def put_gradient(parameter: torch.Tensor, data: torch.Tensor) -> None:
    """Make `data` the gradient of `parameter`; into the one that is there, if it fits: it may be a view."""
    gradient = parameter.grad
    if gradient is not None and _form(gradient) == _form(data):
        gradient.detach().copy_(data)
    else:
        parameter.grad = data


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.layout
