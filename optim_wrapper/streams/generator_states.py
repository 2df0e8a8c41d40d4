"""The state of a random generator of the user's own, whatever its kind, as a fixed number of bytes.

torch's generators and Mersenne twisters of Python and numpy are taken as `rng_streams` takes the global ones. A
numpy `Generator` is what its bit generator is:

    PCG64, PCG64DXSM    state and increment, 16 bytes each, and what is kept of a 64 bit number for the next 32 bits
    MT19937             the twister
    any other           its public `state`, as JSON

and the number of children that its seed sequence has spawned. A seed sequence by itself is that number, and torch's
Sobol engine the number of points that it has drawn.
"""

from __future__ import annotations

import json
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.quasirandom import SobolEngine

from lastwords.errors import MismatchError
from lastwords.optim_wrapper.streams.rng_streams import NumpyStream, PythonStream, Stream, TorchStream, memory_at
from lastwords.processor.box_layout import RegionSpec

_PCG = struct.Struct("<16s16sII")
_JSON_BYTES = 4096
_TWISTER_WORDS = 624
_SPAWNED = "n_children_spawned"
_PERMUTED = ("PCG64", "PCG64DXSM")


def stream_of(generator: Any) -> Stream | None:
    """What takes and restores the state of a generator; None if it has one that cannot be taken."""
    try:
        if isinstance(generator, torch.Generator):
            return TorchStream("own", generator)
        if isinstance(generator, random.Random):
            return PythonStream(generator) if type(generator).getstate is random.Random.getstate else None
        if isinstance(generator, np.random.SeedSequence | SobolEngine):
            return CountStream(generator)
        if isinstance(generator, np.random.RandomState):
            if generator.get_state(legacy=False)["bit_generator"] == "MT19937":  # type: ignore[call-overload]
                return NumpyStream(generator)
            return None
        return BitStream(generator if isinstance(generator, np.random.BitGenerator) else generator.bit_generator)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RuntimeError):
        return None


def kind_of(generator: Any) -> str:
    """What a state belongs to: another kind of generator cannot take it.

    >>> kind_of(np.random.default_rng()), kind_of(random.Random()), kind_of(torch.Generator())
    ('numpy.random.PCG64', 'random.Random', 'torch.Generator on cpu')
    """
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device.type}"
    if isinstance(generator, random.Random):
        return "random.Random"
    if isinstance(generator, np.random.Generator):
        generator = generator.bit_generator
    home = type(generator).__module__
    home = "numpy.random" if home.startswith("numpy.random.") else home
    return f"{home}.{type(generator).__name__}"


class CountStream:
    """What can be set to a position by counting alone: numpy's SeedSequence, torch's SobolEngine."""

    problem = ""
    region = RegionSpec("rng/own", "U8", (8,), in_epoch=True)

    def __init__(self, counted: Any) -> None:
        self._counted = counted

    def into(self, target: memoryview) -> Callable[[], None]:
        """A function that takes the count into `target`."""
        counted, name = self._counted, "num_generated" if isinstance(self._counted, SobolEngine) else _SPAWNED

        def copy() -> None:
            target[:] = getattr(counted, name).to_bytes(8, "little")

        return copy

    def restore(self, data: bytes | bytearray | memoryview) -> None:
        """Count on to there; MismatchError for a seed sequence that is further on already."""
        count = int.from_bytes(bytes(data), "little")
        if isinstance(self._counted, np.random.SeedSequence):
            _spawn_up_to(self._counted, count)
            return
        self._counted.reset()
        if count:
            self._counted.fast_forward(count)


def _spawn_up_to(seeds: Any, count: int) -> None:
    missing = count - getattr(seeds, _SPAWNED, count)
    if missing < 0:
        raise MismatchError(f"its seed sequence had spawned {count} children, and {count - missing} here")
    if missing:
        seeds.spawn(missing)


class BitStream:
    """A numpy bit generator, through its public `state`, or the memory that it shows, which is much quicker."""

    problem = ""

    def __init__(self, generator: Any) -> None:
        """Raises one of the errors that `stream_of` expects if the state is of a form that is not known."""
        self._generator = generator
        self._name = type(generator).__name__
        self._seeds = getattr(generator, "seed_seq", None)
        self._raw = self._memory()
        self.region = RegionSpec("rng/own", "U8", (len(self._taken()),), in_epoch=True)

    def into(self, target: memoryview) -> Callable[[], None]:
        """A function that takes the state into `target`."""
        taken, seeds = self._taken, self._seeds
        if self._raw is None:

            def copy() -> None:
                target[:] = taken()

            return copy
        at, pieces = 0, []
        for raw in self._raw:
            pieces.append((target[at : at + len(raw)], raw))
            at += len(raw)
        of_count = target[at:]

        def copy_memory() -> None:
            for piece, raw in pieces:
                piece[:] = raw
            of_count[:] = getattr(seeds, _SPAWNED, 0).to_bytes(8, "little")

        return copy_memory

    def restore(self, data: bytes | bytearray | memoryview) -> None:
        """Put the stream back; raises MismatchError for the state of another kind."""
        try:
            self._generator.state = self._state_in(bytes(data)[:-8])
        except (KeyError, TypeError, ValueError, struct.error) as error:
            raise MismatchError(f"this is not a state of a {self._name}: {error}") from error
        _spawn_up_to(self._seeds, int.from_bytes(bytes(data)[-8:], "little"))

    def _memory(self) -> tuple[memoryview, ...] | None:
        """Where the packed state lies in memory, in pieces; None if it is not there, or not of a kind that is known."""
        if self._name not in ("MT19937", *_PERMUTED):
            return None
        address = self._generator.ctypes.state_address
        if self._name == "MT19937":
            found: tuple[memoryview, ...] = (memory_at(address, 4 * _TWISTER_WORDS + 4),)
        else:  # struct { pcg64_random_t *; int has_uint32; uint32_t uinteger; }
            pointer = int.from_bytes(memory_at(address, 8), sys.byteorder)
            found = memory_at(pointer, 32), memory_at(address + 8, 8)
        return found if b"".join(found) == self._packed() else None

    def _taken(self) -> bytes:
        return self._packed() + getattr(self._seeds, _SPAWNED, 0).to_bytes(8, "little")

    def _packed(self) -> bytes:
        state = self._generator.state
        inner = state["state"]
        if self._name in _PERMUTED:
            numbers = inner["state"].to_bytes(16, "little"), inner["inc"].to_bytes(16, "little")
            return _PCG.pack(*numbers, state["has_uint32"], state["uinteger"])
        if self._name == "MT19937":
            return bytes(inner["key"].astype("<u4").tobytes() + struct.pack("<I", inner["pos"]))
        text = json.dumps(state, default=_listed).encode()
        if len(text) > _JSON_BYTES:
            raise ValueError(f"{len(text)} bytes of state")
        return text.ljust(_JSON_BYTES)

    def _state_in(self, data: bytes) -> dict[str, Any]:
        if self._name in _PERMUTED:
            state, increment, kept, half = _PCG.unpack(data)
            numbers = {"state": int.from_bytes(state, "little"), "inc": int.from_bytes(increment, "little")}
            return {"bit_generator": self._name, "state": numbers, "has_uint32": kept, "uinteger": half}
        if self._name == "MT19937":
            *key, position = struct.unpack(f"<{_TWISTER_WORDS + 1}I", data)
            return {"bit_generator": self._name, "state": {"key": np.array(key, dtype=np.uint32), "pos": position}}
        state_here: dict[str, Any] = self._generator.state
        return _shaped_as(state_here, json.loads(data))  # type: ignore[no-any-return]


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} in the state of a bit generator")


def _shaped_as(here: Any, saved: Any) -> Any:
    """The saved values, with arrays where there are arrays here."""
    if isinstance(here, dict):
        return {key: _shaped_as(item, saved[key]) for key, item in here.items()}
    return np.array(saved, dtype=here.dtype).reshape(here.shape) if isinstance(here, np.ndarray) else saved
