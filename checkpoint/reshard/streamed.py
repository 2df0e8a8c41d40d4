"""Planned tensors, read when their turn to be written has come: one tensor in memory, or some small ones together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from lastwords.checkpoint.direct_io import Bytes
from lastwords.checkpoint.format import TensorSpec, file_order
from lastwords.checkpoint.reshard.transform_plan import Planned
from lastwords.checkpoint.slice_reader import SliceReader, Stored, Target

BATCH_BYTES = 32 << 20
"""Small tensors are read together up to here: of a chunk of 4 MiB that several share, most is then read once."""

_ALIGN_BYTES = 64


class Streamed:
    """Sources of bytes for `write_part` or `write_rank_file`, which call each once, in the order of the file.

    owners: what each unit (or the one file) has. `tensors` are for the writer as they are, one list for each of them.
    One piece of memory is used for all tensors again and again.
    """

    def __init__(self, reader: SliceReader, source: Stored, owners: Sequence[Sequence[Planned]]) -> None:
        self._reader = reader
        by_source = [sorted(planned, key=lambda one: _first_place(source, one)) for planned in owners]
        self._planned = [one for planned in by_source for one in planned]
        self._counts = [len(planned) for planned in by_source]
        self._batch_of: dict[int, int] = {}
        self._batches: list[list[int]] = []
        filled = 0
        for index in file_order(one.spec for one in self._planned):
            size = _padded(self._planned[index].spec.nbytes)
            if not self._batches or filled + size > BATCH_BYTES:
                self._batches.append([])
                filled = 0
            self._batches[-1].append(index)
            self._batch_of[index] = len(self._batches) - 1
            filled += size
        self._loaded = -1
        self._views: dict[int, Bytes] = {}
        self._memory: Bytes | None = None

    @property
    def tensors(self) -> list[list[tuple[TensorSpec, Callable[[], Bytes]]]]:
        """For each owner its tensors, each with a function that reads it."""
        every = iter([(one.spec, self._later(index)) for index, one in enumerate(self._planned)])
        return [list(itertools.islice(every, count)) for count in self._counts]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.spec.nbytes for one in self._planned)

    def _later(self, index: int) -> Callable[[], Bytes]:
        def read() -> Bytes:
            if self._batch_of[index] != self._loaded:
                self._load(self._batch_of[index])
            return self._views[index]

        return read

    def _load(self, batch: int) -> None:
        if self._memory is None:
            most = max(sum(_padded(self._planned[index].spec.nbytes) for index in one) for one in self._batches)
            self._memory = np.empty(most, np.uint8)
        at = 0
        self._views = {}
        targets = []
        for index in self._batches[batch]:
            one = self._planned[index]
            self._views[index] = view = self._memory[at : at + one.spec.nbytes]
            at += _padded(one.spec.nbytes)
            if one.spec.nbytes:
                targets.append(Target(one.box, view, one.slices))
        self._reader.read(targets)
        self._loaded = batch


def _padded(size: int) -> int:
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES


def _first_place(source: Stored, planned: Planned) -> tuple[str, int]:
    """Where the first of its bytes lies: neighbours in the source are then read together."""
    if not planned.slices:
        return "", 0
    stored = source.stored(planned.slices[0].shard.name)[0]
    return str(stored.path), stored.begin
