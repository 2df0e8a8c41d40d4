"""Saved values put into live ones: tensors, generators and containers stay the same objects.

What a new process has at two places may be one tensor there (`zero = torch.zeros(3); {"h": zero, "c": zero}`), while
the saved run held two by then. So what one restore has written is not written again with anything else.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_in, memory_of, writing
from lastwords.optim_wrapper.tensors.tensor_tree import DICTS, differ, inner_names, parts_of


def _nobody(here: Any) -> bool:
    return False


class Overwriting:
    """One restore. taken: tensors that have their values already, as they are not part of it."""

    def __init__(self, taken: Iterable[torch.Tensor] = ()) -> None:
        self.whole: set[int] = set()
        """Ids of live objects that stand themselves where a saved value names them."""
        self._objects: dict[int, tuple[Any, Any]] = {}
        """What was written into, and with what, by the former's id; both are kept alive."""
        self._memory: dict[int, list[tuple[Any, Any]]] = defaultdict(list)
        """Tensors and arrays that were written into, and with what, by where their memory begins."""
        self._taken = {*map(memory_of, taken)} - {0}

    def values(
        self,
        target: dict[Any, Any],
        value: dict[Any, Any],
        *,
        keep: bool = False,
        is_foreign: Callable[[Any], bool] = _nobody,
    ) -> None:
        """Make `target` equal to `value`, order included.

        keep: what is not in `value` was left out of it, and stays. is_foreign: see `into`.
        """
        made = {key: self.into(target.get(key), item, is_foreign) for key, item in value.items()}
        kept = {key: item for key, item in target.items() if keep and key not in made}
        target.clear()
        target.update(made | kept)

    def into(self, here: Any, item: Any, is_foreign: Callable[[Any], bool] = _nobody) -> Any:
        """`item`, as the object `here` if that can take it over.

        is_foreign: whether an object belongs to something else as well, which is not to be written by the way.
        """
        kind = type(item)
        if id(item) in self.whole:
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
            return here if self._written(here, item) else item
        if type(here) is not kind or here is item:
            return item
        if kind is np.ndarray:
            if (here.dtype, here.shape) != (item.dtype, item.shape) or not here.flags.writeable:
                return item
            return here if self._written(here, item) else item
        mine, its = parts_of(here), parts_of(item)
        if mine is not None and its is not None and mine[1] != its[1]:  # another factory, length or device
            return item
        if kind not in _FILLED and not (kind is bytearray and len(here) == len(item)):
            return item
        if (before := self._objects.setdefault(id(here), (here, item))[1]) is not item:
            return item if differ(before, item) else here
        if kind in DICTS:
            self.values(here, item, is_foreign=is_foreign)
        elif kind is list or kind is deque:
            olds = [*here] if len(here) == len(item) else [None] * len(item)
            items = [self.into(old, one, is_foreign) for old, one in zip(olds, item, strict=True)]
            here.clear()
            here.extend(items)
        elif kind is set:
            here.clear()
            here.update([*item])  # one by one: of a set it would have another order
        elif kind is bytearray:
            here[:] = item
        else:
            here.set_state(item.get_state())
        return here

    def _written(self, here: Any, item: Any) -> bool:
        """Write `item` into the memory of `here`; False, with nothing changed, if other values lie there already."""
        at = memory_of(here)
        if at in self._taken:
            return _alike(here, item)
        before = self._memory[at] if at else []
        old = _copy(here) if before else None
        _write(here, item)
        if not all(_alike(one, value) for one, value in before):
            _write(here, old)
            return False
        before.append((here, item))
        return True


_FILLED = DICTS | {list, deque, set, torch.Generator}
"""Types of what is filled anew as it is."""


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()


def _write(here: Any, item: Any) -> None:
    if isinstance(here, torch.Tensor):
        with writing(here):
            here.copy_(item)
    else:
        here[...] = item


def _alike(one: Any, other: Any) -> bool:
    """Of two of the same type and shape, whether they have the same bytes. They may lie on different devices."""
    if isinstance(one, torch.Tensor):
        return bytes_in(one) == bytes_in(other)
    return bool(one.tobytes() == other.tobytes())
