"""A copy, in host memory, of everything that a rank holds, as it was at the end of the last step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy

from lastwords.checkpoint.direct_io import as_bytes
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.part import UnitState


class HostCopy:
    """Taken by the training thread at each step's end, read by the writer's thread while this rank is settled.

    It costs the memory of the state and one copy of it in each step; it is for loops in which an update can get stuck
    half-way. While it is being taken it holds no step.
    """

    def __init__(self) -> None:
        self._step = -1
        self._states: Mapping[str, UnitState] = {}
        self._memory: dict[str, bytearray] = {}

    def take(self, step: int, states: Mapping[str, UnitState]) -> None:
        """The units as they are at the end of `step`."""
        self._step = -1
        memory: dict[str, bytearray] = {}
        copies = {unit: _copy(state, self._memory, memory) for unit, state in states.items()}
        self._states, self._memory = copies, memory
        self._step = step

    def get(self, unit: str, step: int) -> UnitState | None:
        """The unit at `step`; None if the copy is of another step."""
        states = self._states
        return states.get(unit) if self._step == step else None


def _copy(state: UnitState, old: Mapping[str, bytearray], new: dict[str, bytearray]) -> UnitState:
    tensors: list[tuple[TensorSpec, Any]] = []
    for spec, source in state.tensors:
        memory = old.get(spec.name)
        if memory is None or len(memory) != spec.nbytes:
            memory = bytearray(spec.nbytes)
        content = source() if callable(source) else source
        numpy.frombuffer(memory, numpy.uint8)[:] = as_bytes(content)
        new[spec.name] = memory
        tensors.append((spec, memoryview(memory)))
    return UnitState(tensors=tensors, meta=state.meta)
