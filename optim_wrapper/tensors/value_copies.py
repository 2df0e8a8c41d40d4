"""Copies of the user's values as they are at one moment, sharing what has not changed; and putting them back."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
import torch

from lastwords.checkpoint.storable import is_factory, pack, refuse_unstorable, unstorable
from lastwords.errors import UnstorableError
from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of, problem_of, writing
from lastwords.optim_wrapper.tensors.tree_objects import Parts, inner_names, is_object, made_of, parts_of
from lastwords.sharding.dtensor import local_of

ATOMS = frozenset({type(None), bool, int, float, str, bytes})
DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})
_MADE_ANEW = frozenset({set, frozenset, bytearray})
"""Containers of nothing that can change."""


def advance(before: Any, now: Any) -> tuple[Any, bool]:
    """A copy of `now` that shares with `before` (a copy made earlier) what is equal; and whether anything differs.

    Called for all extras in every step. UnstorableError for what cannot be stored, RecursionError for what contains
    itself.
    """
    kind = type(now)
    if now is before and kind in ATOMS:
        return now, False
    if type(before) is not kind:
        before = None
    if kind in ATOMS:
        return now, before is None or _other_bits(before, now)
    if kind is list or kind is tuple or kind is deque:
        olds = before if before is not None and len(before) == len(now) else None
        if kind is deque and olds is not None and olds.maxlen != now.maxlen:
            olds = None
        pairs = [advance(old, item) for old, item in zip([None] * len(now) if olds is None else olds, now, strict=True)]
        if olds is not None and not any(pair[1] for pair in pairs):
            return before, False
        items = [pair[0] for pair in pairs]
        return deque(items, now.maxlen) if kind is deque else kind(items), True
    if kind in DICTS:
        result: Any = kind()
        if kind is defaultdict:
            result.default_factory = now.default_factory
            if not is_factory(now.default_factory):
                raise unstorable(now, "")
            if before is not None and before.default_factory is not now.default_factory:
                before = None
        known = before if before is not None else {}
        differs = before is None or len(before) != len(now)
        for key, item in now.items():
            result[key], moved = advance(known.get(key), item)
            differs = differs or moved or key not in known
        differs = differs or any(old is not key and advance(old, key)[1] for old, key in zip(known, now, strict=True))
        return (result, True) if differs else (before, False)
    if isinstance(now, torch.Tensor) and now.layout is torch.strided and not inner_names(now):
        _refuse_odd(now)
        if before is not None and bytes_equal(before, now.detach()):
            return before, False
        return _cloned(now), True
    if kind in _MADE_ANEW:
        # Equal sets may hold 1 and True, which are equal.
        if before == now and (kind is bytearray or _text(before) == _text(now)):
            return before, False
        refuse_unstorable(now, "")
        return kind(now), True
    return _advance_rare(before, now)


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


def _refuse_odd(tensor: torch.Tensor) -> None:
    """DTensors are welcome: hyperparameters of their kind are stored with their parameter."""
    if what := problem_of(local_of(tensor)):
        raise UnstorableError(f"a tensor {what}", f"a tensor that {what}")


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.detach().clone()
    except RuntimeError as error:  # integers of less than a byte: NotImplementedError in newer releases
        raise UnstorableError(f"a tensor cannot be copied: {error}", f"a tensor of {tensor.dtype}") from error


def _advance_rare(before: Any, now: Any) -> tuple[Any, bool]:
    """`advance` for what is neither an atom nor a container. UnstorableError for what cannot be stored."""
    if isinstance(now, torch.Tensor):
        if (parts := parts_of(now)) is None:
            raise unstorable(now, "")
        old = None if before is None else parts_of(before)
        alike = old is not None and (old.kind, old.about) == (parts.kind, parts.about)
        inside, moved = advance([*old.inside] if old is not None and alike else None, [*parts.inside])
        return (before, False) if not moved else (_made(parts, inside), True)
    if is_object(now):
        if parts_of(now) is None:
            raise unstorable(now, "")
        if isinstance(now, np.ndarray):
            same = before is not None and (before.dtype, before.shape) == (now.dtype, now.shape)
            return (before, False) if same and before.tobytes() == now.tobytes() else (now.copy(order="K"), True)
        if isinstance(now, torch.Generator):
            same = before is not None and bytes_equal(before.get_state(), now.get_state())
            return (before, False) if same else (now.clone_state(), True)
    else:
        refuse_unstorable(now, "")
        return now, before is None or _text(before) != _text(now)  # equal times may be of different zones
    return now, now != before


def _made(parts: Parts, inside: Sequence[Any]) -> Any:
    try:
        return made_of(parts.kind, parts.about, inside, "a tensor")
    except Exception as error:  # of a class of the user's: handed to whoever asks what can be stored
        raise UnstorableError(f"a tensor cannot be copied: {error}", f"a {parts.kind} tensor") from error


def _other_bits(before: Any, now: Any) -> bool:
    """Whether two atoms of one type differ. As floats go, 0.0 equals -0.0, and a NaN does not equal itself."""
    if now == before:
        return type(now) is float and not now and math.copysign(1, now) != math.copysign(1, before)
    return bool(now == now or pack(before) != pack(now))


def _text(value: Any) -> str:
    """The value as it would be stored. Packed values alone may be equal where 1 is not True, or 0.0 is not -0.0."""
    return json.dumps(pack(value))


def overwrite_values(
    target: dict[Any, Any],
    value: dict[Any, Any],
    *,
    keep: bool = False,
    whole: Container[int] = (),
    is_foreign: Callable[[Any], bool] | None = None,
) -> None:
    """Make `target` equal to `value`, order included; tensors, generators and dicts in it stay the same objects.

    keep: what is not in `value` was left out of it, and stays. whole, is_foreign: see `into`.
    """
    made = {key: into(target.get(key), item, whole, is_foreign or _nobody) for key, item in value.items()}
    kept = {key: item for key, item in target.items() if keep and key not in made}
    target.clear()
    target.update(made | kept)


def _nobody(here: Any) -> bool:
    """Nothing belongs to anything else."""
    return False


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
        alike = alike and not (here.layout is torch.strided and here.numel() and 0 in here.stride())  # expand()
        if alike and here.layout is torch.strided and here is not item:
            with writing(here):
                here.copy_(item)
            return here
    elif isinstance(here, torch.Generator) and isinstance(item, torch.Generator):
        if here.device == item.device:
            here.set_state(item.get_state())
            return here
    elif type(here) is not kind or here is item:
        return item
    elif kind in DICTS:
        if kind is not defaultdict or here.default_factory is item.default_factory:
            overwrite_values(here, item, whole=whole, is_foreign=is_foreign)
            return here
    elif kind is list or (kind is deque and here.maxlen == item.maxlen):
        olds = [*here] if len(here) == len(item) else [None] * len(item)
        items = [into(old, one, whole, is_foreign) for old, one in zip(olds, item, strict=True)]
        here.clear()
        here.extend(items)
        return here
    elif kind is set:
        here.clear()
        here.update(item)
        return here
    elif kind is bytearray and len(here) == len(item):
        here[:] = item
        return here
    elif kind is np.ndarray and (here.dtype, here.shape) == (item.dtype, item.shape) and here.flags.writeable:
        here[...] = item
        return here
    return item


def bytes_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits (a NaN equals itself)."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    views = bytes_of(one.cpu().contiguous()), bytes_of(other.cpu().contiguous())
    return views[0] is not None and views[1] is not None and views[0] == views[1]


def put_gradient(parameter: torch.Tensor, data: torch.Tensor) -> None:
    """Make `data` the gradient of `parameter`; into the one that is there, if it fits: it may be a view."""
    gradient = parameter.grad
    if gradient is not None and _form(gradient) == _form(data):
        gradient.detach().copy_(data)
    else:
        parameter.grad = data


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.layout
