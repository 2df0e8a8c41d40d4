"""What a loader iterates over, as far as it is there to be seen: which samples, in a digest.

Two draws of one split have the same length, and nothing else tells them apart. Of a data set of the user's own these
are the sequences and tensors in its attributes, and its length. No sample is asked for: that may draw random numbers
(an augmentation), from generators that nobody knows, count its calls, or take seconds; and here, rather than in a
worker, it may open what workers must not share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from lastwords.optim_wrapper.loop.data_position import len_of
from lastwords.optim_wrapper.state.object_walk import own_of
from lastwords.optim_wrapper.state.running import is_users

SAMPLES = 64
"""Of what has more, so many at equal distances are looked at; of which samples a subset has, all."""

_DEPTH_MAX = 8
_ATOMS = (int, float, bool, str, bytes, range)


def data_digest(loader: Any) -> str:
    """Of the loader's data set, or of the loader where it has none; "" if nothing of it can be seen.

    >>> from torch.utils.data import DataLoader
    >>> one, other = (DataLoader(Subset(range(9), indices)) for indices in ([0, 3], [3, 0]))
    >>> data_digest(one) == data_digest(other), data_digest(iter([1, 2]))
    (False, '')
    """
    dataset = getattr(loader, "dataset", None)
    found = [*_seen(loader if dataset is None else dataset, _DEPTH_MAX), *_drawn_from(loader)]
    return hashlib.sha256(b"\0".join(found)).hexdigest()[:16] if found else ""


def _drawn_from(loader: Any) -> Iterator[bytes]:
    """Which samples a sampler of torch's chooses from. Each time that it begins it asks for their number as well."""
    batches = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(loader if batches is None else batches, "sampler", None)
    if type(sampler) is SubsetRandomSampler:
        yield _of_indices(sampler.indices)
    elif type(sampler) in (SequentialSampler, RandomSampler):
        yield repr(len_of(sampler.data_source)).encode()
    elif type(sampler) is DistributedSampler:
        yield repr(len_of(sampler.dataset)).encode()


def _seen(data: Any, depth: int) -> Iterator[bytes]:
    kind = type(data)
    if depth == 0:
        return
    if kind is Subset:
        yield _of_indices(data.indices)
        yield from _seen(data.dataset, depth - 1)
    elif kind is ConcatDataset:
        for one in data.datasets[:SAMPLES]:
            yield from _seen(one, depth - 1)
    elif kind is TensorDataset:
        for tensor in data.tensors:
            yield from _seen(tensor, depth - 1)
    elif kind in (list, tuple):
        yield repr(len(data)).encode()
        for one in data[:: _distance(len(data))]:
            yield from _seen(one, depth - 1)
    elif kind is torch.Tensor and data.device.type == "cpu" and data.layout is torch.strided and data.dim():
        yield repr((data.shape, data.dtype)).encode()
        yield data[:: _distance(len(data))].detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif kind is np.ndarray and data.dtype != object and data.ndim:
        yield repr((data.shape, data.dtype)).encode()
        yield data[:: _distance(len(data))].tobytes()
    elif kind in _ATOMS:
        yield repr(data).encode()
    elif is_users(kind) and isinstance(own := own_of(data), dict):
        for one in (own[name] for name in sorted(own)):
            if type(one) not in _ATOMS:  # such as when it was made
                yield from _seen(one, depth - 1)


def _of_indices(indices: Any) -> bytes:
    try:
        return np.asarray(indices, dtype=np.int64).tobytes()
    except (TypeError, ValueError, OverflowError):
        return b""


def _distance(length: int) -> int:
    return max(1, length // SAMPLES)
