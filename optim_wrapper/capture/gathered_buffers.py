"""Many small buffers, copied into a black box with one gather for those that lie side by side there.

A `copy_` takes most of a microsecond however small the tensor is, and a BatchNorm has three buffers. Here one numpy
call copies the words of all of them, once it is seen that each lies where it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from lastwords.optim_wrapper.streams.rng_streams import memory_at
from lastwords.optim_wrapper.tensors.tensor_places import Settled, TensorPlaces, Words, word_index
from lastwords.processor.box_layout import REGION_ALIGN_BYTES

EACH_BYTES_MAX = 16 * 1024
"""A larger buffer is copied more quickly by itself: a gather takes some 0.5 ns for each word."""

FEWEST = 8
"""For fewer buffers the look whether they lie there takes as long as copying each."""

_WORD = 8
_ZERO = np.zeros(1, np.int64)
"""Goes where the room between two regions is, which has to be the same in all copies."""


def can_be_gathered(tensor: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the tensor's bytes are whole words side by side in the host's memory, as the target's are."""
    alike = tensor.shape == target.shape and tensor.dtype == target.dtype and tensor.is_contiguous()
    if tensor.device.type != "cpu" or not alike or tensor.untyped_storage().nbytes() < tensor.nbytes:
        return False
    return 0 < tensor.nbytes <= EACH_BYTES_MAX and not (tensor.nbytes | tensor.data_ptr() | target.data_ptr()) % _WORD


class GatheredBuffers:
    """Copies of tensors that `can_be_gathered`, and that keep their shape. Training thread.

    targets: of each slot, where the copy of each tensor goes.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], targets: Mapping[int, Sequence[torch.Tensor]]) -> None:
        self._settled: Settled = TensorPlaces(tensors).settle()
        sources = [(one.data_ptr(), one.nbytes) for one in tensors]
        self._gathers = {
            slot: _gathers(
                sorted((target.data_ptr(), *source) for target, source in zip(of_slot, sources, strict=True))
            )
            for slot, of_slot in targets.items()
        }

    def copy(self, slot: int) -> bool:
        """Copy all of them; nothing, and False, where not all lie where they did."""
        settled = self._settled
        if not settled.still():
            return False
        for words, target in self._gathers[slot]:
            settled.copy(words, target)
        return True


def _gathers(copies: Sequence[tuple[int, int, int]]) -> list[tuple[Words, Words]]:
    """For each run of regions side by side where its words come from, and its memory.

    copies: where to, where from, and how many bytes, by where to.
    """
    zero = word_index(np.array([_ZERO.ctypes.data]))
    begin, end, words = 0, -REGION_ALIGN_BYTES, [zero]
    runs: list[tuple[int, list[Words]]] = []
    for target, source, nbytes in copies:
        if target - end >= REGION_ALIGN_BYTES:  # more than what fills up a line: something else lies in between
            begin, words = target, []
            runs.append((begin, words))
        else:
            words.append(np.repeat(zero, (target - end) // _WORD))
        words.append(word_index(np.arange(source, source + nbytes, _WORD)))
        end = target + nbytes
    joined = [(begin, np.concatenate(words)) for begin, words in runs]
    return [(words, np.frombuffer(memory_at(begin, words.nbytes), np.int64)) for begin, words in joined]
