"""The state of a rank at one step, copied into memory of its own, for a checkpoint that is written while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy

from lastwords.checkpoint.direct_io import as_bytes
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.part import LocalState, TensorSource, UnitState
from lastwords.processor.saver import Position, StateSource
from lastwords.vocabulary import Save, Stand


class CopyMemory:
    """Host memory that one copy after the other is taken into; it is allocated once, and grows with the state."""

    def __init__(self) -> None:
        self._buffers: dict[str, numpy.ndarray[Any, numpy.dtype[numpy.uint8]]] = {}
        self._used: dict[str, numpy.ndarray[Any, numpy.dtype[numpy.uint8]]] = {}

    def begin(self) -> None:
        """A new copy: what the one before used may be overwritten."""
        self._buffers, self._used = {**self._buffers, **self._used}, {}

    def end(self) -> None:
        """The copy is taken: memory of tensors that are gone is given back."""
        self._buffers = {}

    def copy(self, spec: TensorSpec, source: TensorSource) -> memoryview:
        """The tensor's bytes, which nothing else writes."""
        memory = self._buffers.get(spec.name)
        if memory is None or memory.nbytes != spec.nbytes:
            memory = numpy.empty(spec.nbytes, numpy.uint8)
        memory[:] = as_bytes(source() if callable(source) else source)
        self._used[spec.name] = memory
        return memory.data


class CopiedState:
    """`StateSource` of one order: everything that it names, as it was when this was made. Any thread."""

    def __init__(self, source: StateSource, order: Save, stand: Stand, memory: CopyMemory) -> None:
        """Copies, in the training thread. Raises what `source` raises."""
        memory.begin()
        step = order.step
        units = {unit: source.unit_state(unit, step, stand) for unit in order.units}
        locals_ = source.local_states(order.local_ranks, step)
        self._units = {unit: replace(one, tensors=_copies(one.tensors, memory)) for unit, one in units.items()}
        self._locals = {rank: replace(one, tensors=_copies(one.tensors, memory)) for rank, one in locals_.items()}
        self._position = source.position(step)
        self._facts = source.facts(step)
        memory.end()

    def position(self, step: int) -> Position | None:
        """What the loop calls the step."""
        return self._position

    def unit_state(self, unit: str, step: int, stand: Stand) -> UnitState:
        """The unit's tensors."""
        return self._units[unit]

    def copied_unit(self, unit: str, step: int) -> UnitState:
        """Not asked for: an order that this is made of names none."""
        return self._units[unit]

    def local_states(self, ranks: Sequence[int], step: int) -> Mapping[int, LocalState]:
        """Rank-local state."""
        return self._locals

    def facts(self, step: int) -> dict[str, Any]:
        """What a resume has to know about the run."""
        return self._facts


def _copies(tensors: Sequence[tuple[TensorSpec, TensorSource]], memory: CopyMemory) -> list[tuple[TensorSpec, Any]]:
    return [(spec, memory.copy(spec, source)) for spec, source in tensors]
