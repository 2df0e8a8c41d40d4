"""Whether something else than `optimizer.step()` has written weights: told from where a few of them lie, how often they
were written, and a few of their values.

Averaged weights that are put in for a validation, clipping, an encoder with momentum: such loops write all of a model,
or all of a part that is not trained, so a few parameters of each are looked at, which costs some microseconds in a
step. A write through `.data` into the same memory, which is how most libraries swap weights, is counted nowhere: only
the values show it, and they are looked at where that is cheap, in the host's memory. Not seen: such a write on a
device, and one that spares what is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch

from lastwords.sharding.dtensor import local_of

EACH_MAX = 4
"""Parameters that are looked at of those that are trained, and of those that are not."""

PLACES, NEIGHBOURS_MAX = 4, 16
"""In each of them so many neighbouring values are looked at in so many places. Neighbours, of all parameters at once,
are copied in a fraction of a microsecond; values apart from each other would take a call for each parameter."""

Marks = tuple[Sequence[int], Sequence[int], bytes, Sequence[int]]
"""Of the parameters in their order: addresses, how often each was written, some values, and how many bytes of each."""

NO_MARKS: Marks = ((), (), b"", ())

_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_version: Callable[[torch.Tensor], int] = attrgetter("_version")
_UNCOUNTED = torch.empty(0)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; -1 if it was made under `torch.inference_mode`, where nobody counts.

    Of such tensors only the values tell, in the host's memory.
    """
    return -1 if tensor.is_inference() else tensor._version


class WeightMarks:
    """Marks of some parameters. names: gives all of them by name; asked again at `choose`. Any thread may call."""

    def __init__(self, names: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._all = names
        self._names: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._counted: list[torch.Tensor] = []  # the same, with a stand-in where torch does not count the writes
        # What follows from where the tensors lie.
        self._addresses: list[int] = []
        self._runs: list[list[memoryview]] = []
        self._all_runs: list[memoryview] = []
        self._nbytes: list[int] = []

    def choose(self) -> None:
        """Look at these from now on: some of each kind, the first and the last among them."""
        every = self._all()
        trained = [name for name, tensor in every.items() if tensor.requires_grad]
        frozen = [name for name, tensor in every.items() if not tensor.requires_grad]
        self._names = [*_spread(trained), *_spread(frozen)]
        tensors = [local_of(every[name]) for name in self._names]
        if len(tensors) != len(self._tensors) or not all(map(is_, tensors, self._tensors)):
            self._tensors = tensors
            self._counted = [_UNCOUNTED if version_of(tensor) < 0 else tensor for tensor in tensors]
            self._addresses, self._runs = [0] * len(tensors), [[] for _ in tensors]
            self._moved_to(self._addresses)

    def take(self) -> Marks:
        """What they are like now. Called twice in a step."""
        tensors = self._tensors
        addresses = [*map(_address, tensors)]
        if addresses != self._addresses:
            self._moved_to(addresses)
        return addresses, [*map(_version, self._counted)], b"".join(self._all_runs), self._nbytes

    def moved(self, since: Marks) -> list[str]:
        """Names of those that were written, or have other memory, since then."""
        before, now = _each(since), _each(self.take())
        if len(before) != len(now):
            return []
        return [name for name, was, mark in zip(self._names, before, now, strict=True) if was != mark]

    def _moved_to(self, addresses: list[int]) -> None:
        known = zip(self._tensors, addresses, self._addresses, self._runs, strict=True)
        self._runs = [runs if now == was else runs_of(tensor) for tensor, now, was, runs in known]
        self._all_runs = [run for runs in self._runs for run in runs]
        self._nbytes = [sum(map(len, runs)) for runs in self._runs]
        self._addresses = addresses


def _each(marks: Marks) -> list[tuple[int, int, bytes]]:
    addresses, versions, values, nbytes = marks
    ends = pairwise(accumulate(nbytes, initial=0))
    parts = [values[begin:end] for begin, end in ends]
    return list(zip(addresses, versions, parts, strict=True))


def runs_of(tensor: torch.Tensor) -> list[memoryview]:
    """Some values of a tensor as they lie in memory now, from its beginning to its end; none if that is not cheap.

    None of the elements between a strided tensor's own is among them.

    >>> [np.frombuffer(run, np.float32).tolist() for run in runs_of(torch.arange(12.).view(4, 3)[:, 1:])]
    [[1.0, 2.0], [4.0, 5.0], [7.0, 8.0], [10.0, 11.0]]
    """
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized
    if not plain or not tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
        return []  # without an address it is empty, or its storage is for now
    flat = tensor.is_contiguous()
    shape, strides = ((tensor.numel(),), (1,)) if flat else (tensor.shape, tensor.stride())
    lengths = [min(size, NEIGHBOURS_MAX if step == 1 else 1) for size, step in zip(shape, strides, strict=True)]
    begins = {
        sum(
            (size - length) * place // (PLACES - 1) * step
            for size, length, step in zip(shape, lengths, strides, strict=True)
        )
        for place in range(PLACES)
    }
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    values = tensor.detach().as_strided((extent,), (1,))
    kind = _INTEGERS.get(values.element_size())
    # numpy() would make the storage one that can never be resized, and a memoryview copies faster than an array.
    array: Any = np.from_dlpack(values if kind is None else values.view(kind))
    memory, nbytes = memoryview(array.view(np.uint8)), values.element_size()
    return [memory[begin * nbytes : (begin + max(lengths, default=1)) * nbytes] for begin in sorted(begins)]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""numpy has no bfloat16."""


def _spread(names: Sequence[str]) -> list[str]:
    """
    >>> _spread("abcdefghij"), _spread("ab"), _spread("")
    (['a', 'd', 'g', 'j'], ['a', 'b'], [])
    """
    if len(names) <= EACH_MAX:
        return list(names)
    return [names[place * (len(names) - 1) // (EACH_MAX - 1)] for place in range(EACH_MAX)]
