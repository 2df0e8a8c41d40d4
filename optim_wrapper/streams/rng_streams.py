"""Random number streams of a process, each as a region of bytes that can be taken in about a microsecond.

Python's `random` and numpy's legacy generator are both Mersenne twisters; both are stored in the same form:

    uint32 key[624] | uint32 position | uint32 has_gauss | float64 gauss        (2 512 bytes)

`has_gauss`/`gauss` are the cached second value of the Gaussian pair, without which the very next `gauss()` or
`randn()` would differ. Their public `getstate()` builds a tuple of 625 Python ints (14 us, and 33 us for numpy's),
so the state is copied straight out of the C object. Where it lies there is not assumed but found, by planting a
known state in a second object of the same type, and proved on the stream itself; if anything does not fit (another
interpreter, another build), the public way is taken and only the time is lost.

Of torch's generators what `get_state()` gives is kept, which takes a microsecond more than such a copy.
"""

from __future__ import annotations

import ctypes
import logging
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lastwords.errors import MismatchError
from lastwords.processor.box_layout import RegionSpec

_log = logging.getLogger(__name__)

_KEY_WORDS = 624
_KEY_BYTES = 4 * _KEY_WORDS
_POSITION_AT = _KEY_BYTES
_HAS_GAUSS_AT = _KEY_BYTES + 4
_GAUSS_AT = _KEY_BYTES + 8
TWISTER_BYTES = _KEY_BYTES + 16
_GAUSS = struct.Struct("=Id")
_NO_GAUSS = _GAUSS.pack(0, 0.0)
_TWISTER = struct.Struct(f"={_KEY_WORDS}IIId")
_UNKNOWN = _TWISTER.pack(*[0] * _KEY_WORDS, 0xFFFFFFFF, 0, 0.0)


class PythonStream:
    """Python's global `random` stream, or another one."""

    region = RegionSpec("rng/python", "U8", (TWISTER_BYTES,), in_epoch=True)
    problem = ""

    def __init__(self, owner: random.Random | None = None) -> None:
        self._owner: random.Random = owner or random.random.__self__  # type: ignore[attr-defined]
        self._raw = _python_raw(self._owner)

    def into(self, target: memoryview) -> Callable[[], None]:
        owner = self._owner
        if self._raw is None:

            def slow() -> None:
                _, words, gauss = owner.getstate()
                target[:] = _TWISTER.pack(*words, gauss is not None, gauss or 0.0)

            return slow
        key, position = self._raw
        to_key, to_position = target[:_KEY_BYTES], target[_POSITION_AT:_HAS_GAUSS_AT]
        to_gauss = target[_HAS_GAUSS_AT:]

        def copy() -> None:
            to_key[:] = key
            to_position[:] = position
            gauss = owner.gauss_next  # type: ignore[attr-defined]
            to_gauss[:] = _NO_GAUSS if gauss is None else _GAUSS.pack(1, gauss)

        return copy

    def restore(self, data: bytes | bytearray | memoryview) -> None:
        *words, has_gauss, gauss = _TWISTER.unpack(_sized(self.region, data))
        self._owner.setstate((3, tuple(words), gauss if has_gauss else None))


class NumpyStream:
    """numpy's legacy global stream (`np.random.rand` and friends), or another one."""

    region = RegionSpec("rng/numpy", "U8", (TWISTER_BYTES,), in_epoch=True)

    def __init__(self, owner: np.random.RandomState | None = None) -> None:
        self._legacy: Any = owner or np.random
        self._raw = _numpy_raw(owner)
        self.problem = ""

    def into(self, target: memoryview) -> Callable[[], None]:

        def slow() -> None:
            state = self._legacy.get_state(legacy=False)
            if state["bit_generator"] != "MT19937":
                self.problem = f"numpy's global stream is a {state['bit_generator']}; only MT19937 can be captured"
                target[:] = _UNKNOWN
                return
            target[:_KEY_BYTES] = state["state"]["key"].tobytes()
            target[_POSITION_AT:] = struct.pack("=IId", state["state"]["pos"], state["has_gauss"], state["gauss"])

        if self._raw is None:
            return slow
        owner, generator, twister, has_gauss, gauss = self._raw
        to_twister, to_gauss = target[:_HAS_GAUSS_AT], target[_GAUSS_AT:]
        to_has_gauss = target[_HAS_GAUSS_AT:_GAUSS_AT]

        def copy() -> None:
            if owner._bit_generator is not generator:  # np.random.set_bit_generator was called
                slow()
                return
            to_twister[:] = twister
            to_has_gauss[:] = has_gauss
            to_gauss[:] = gauss

        return copy

    def restore(self, data: bytes | bytearray | memoryview) -> None:
        """Put the stream back; raises MismatchError if it could not be captured."""
        *words, position, has_gauss, gauss = _TWISTER.unpack(_sized(self.region, data))
        if position > _KEY_WORDS:
            raise MismatchError("numpy's global stream could not be captured")
        self._legacy.set_state(("MT19937", np.array(words, dtype=np.uint32), position, has_gauss, gauss))


class TorchStream:
    """A torch generator: the CPU's default one, or one of the user's own."""

    problem = ""

    def __init__(self, name: str, generator: torch.Generator) -> None:
        self._generator = generator
        self.region = RegionSpec(f"rng/{name}", "U8", (generator.get_state().numel(),), in_epoch=True)

    def into(self, target: memoryview) -> Callable[[], None]:
        copy_, get_state = torch.frombuffer(target, dtype=torch.uint8).copy_, self._generator.get_state

        def copy() -> None:
            copy_(get_state())

        return copy

    def restore(self, data: bytes | bytearray | memoryview) -> None:
        self._generator.set_state(_bytes_tensor(_sized(self.region, data)))


class DeviceStream:
    """The default generator of one accelerator device. Its state lives on the host: taking it waits for nothing."""

    problem = ""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device.type)
        self.region = RegionSpec(f"rng/{device}", "U8", (self._module.get_rng_state(device).numel(),), in_epoch=True)

    def into(self, target: memoryview) -> Callable[[], None]:
        copy_ = torch.frombuffer(target, dtype=torch.uint8).copy_
        get_rng_state, device = self._module.get_rng_state, self._device

        def copy() -> None:
            copy_(get_rng_state(device))

        return copy

    def restore(self, data: bytes | bytearray | memoryview) -> None:
        self._module.set_rng_state(_bytes_tensor(_sized(self.region, data)), self._device)


Stream = PythonStream | NumpyStream | TorchStream | DeviceStream
"""`into` prepares a capture into fixed memory, of the region's size: calling what it returns takes the state.

`problem` is "" or says why the newest capture is not the stream's state.
"""


def accelerator_devices() -> tuple[torch.device, ...]:
    """The current accelerator device if there is an accelerator that this process has begun to use.

    >>> accelerator_devices() if not torch.cuda.is_available() else ()
    ()
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return ()
    module = torch.get_device_module(accelerator.type)
    if not getattr(module, "is_initialized", lambda: True)() or not hasattr(module, "get_rng_state"):
        return ()
    return (torch.device(accelerator.type, torch.accelerator.current_device_index()),)


def default_streams() -> list[Stream]:
    """Streams that every process has, and that of the accelerator device in use."""
    of_torch = TorchStream("torch", torch.default_generator)
    return [PythonStream(), NumpyStream(), of_torch, *map(DeviceStream, accelerator_devices())]


def _sized(region: RegionSpec, data: bytes | bytearray | memoryview) -> bytes | bytearray | memoryview:
    if memoryview(data).nbytes != region.nbytes:
        raise MismatchError(
            f"{region.name}: saved {memoryview(data).nbytes} bytes, here {region.nbytes}",
            different={region.name: f"saved {memoryview(data).nbytes} bytes, here {region.nbytes}"},
        )
    return data


def _bytes_tensor(data: bytes | bytearray | memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _memory_of(thing: object, nbytes: int) -> memoryview:
    """The bytes of a C object. The caller keeps it alive."""
    return memory_at(id(thing), nbytes)


def memory_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _python_raw(owner: random.Random) -> tuple[memoryview, memoryview] | None:
    """Key and position inside `owner`'s C object, or None if they are not where they must be."""
    try:
        nbytes = random.Random.__base__.__basicsize__  # type: ignore[union-attr]
        scratch = random.Random(20_000_303)
        image = _memory_of(scratch, nbytes).tobytes()
        key_at = image.find(struct.pack(f"={_KEY_WORDS}I", *scratch.getstate()[1][:-1]))
        # The position is the word before the key or the one behind it: 624 now, another number after three draws.
        scratch.setstate((3, (*scratch.getstate()[1][:-1], 600), None))
        for _ in range(3):
            scratch.getrandbits(32)
        image = _memory_of(scratch, nbytes).tobytes()
        places = [at for at in (key_at - 4, key_at + _KEY_BYTES) if image[at : at + 4] == struct.pack("=I", 603)]
        if key_at < 0 or len(places) != 1:
            raise ValueError("the state was not found in the object")
        memory = _memory_of(owner, nbytes)
        raw = memory[key_at : key_at + _KEY_BYTES], memory[places[0] : places[0] + 4]
        words = owner.getstate()[1]
        if b"".join(raw) != struct.pack(f"={_KEY_WORDS + 1}I", *words) or not hasattr(owner, "gauss_next"):
            raise ValueError("the bytes found are not the stream's state")
        return raw
    except (AttributeError, TypeError, ValueError, struct.error) as error:
        _log.info("python's random state is copied by a slower method: %s", error)
        return None


def _numpy_raw(one: Any) -> tuple[Any, Any, memoryview, memoryview, memoryview] | None:
    """The RandomState (None: the global one), its bit generator, and where twister, has_gauss, gauss lie; or None."""
    marker = -1.234567890123e-45
    try:
        owner: Any = one or np.random.mtrand._rand  # type: ignore[attr-defined]
        generator = owner._bit_generator
        if not isinstance(generator, np.random.MT19937):
            raise ValueError(f"the stream is a {type(generator).__name__}")
        address = generator.ctypes.state_address
        twister = memoryview((ctypes.c_ubyte * _HAS_GAUSS_AT).from_address(address)).cast("B")

        scratch: Any = np.random.RandomState(20_000_303)
        nbytes = type(scratch).__basicsize__
        state = scratch.get_state(legacy=False)
        scratch.set_state({**state, "has_gauss": 1, "gauss": marker})
        image = _memory_of(scratch, nbytes).tobytes()
        gauss_at = image.find(struct.pack("=d", marker))
        has_gauss_at = gauss_at - 8  # struct aug_bitgen { bitgen_t *; int has_gauss; double gauss; }
        scratch.set_state({**state, "has_gauss": 0, "gauss": marker})
        image_without = _memory_of(scratch, nbytes).tobytes()
        flags = [struct.unpack_from("=I", i, has_gauss_at)[0] for i in (image, image_without)]
        if gauss_at < 8 or type(owner) is not type(scratch) or flags != [1, 0]:
            raise ValueError("the cached Gaussian was not found in the object")

        memory = _memory_of(owner, nbytes)
        raw = twister, memory[has_gauss_at : has_gauss_at + 4], memory[gauss_at : gauss_at + 8]
        now = owner.get_state(legacy=False)
        expected = now["state"]["key"].tobytes() + struct.pack(
            "=IId", now["state"]["pos"], now["has_gauss"], now["gauss"]
        )
        if b"".join(raw) != expected:
            raise ValueError("the bytes found are not the stream's state")
        return (owner, generator, *raw)
    except (AttributeError, KeyError, TypeError, ValueError, struct.error) as error:
        _log.info("numpy's random state is copied by a slower method: %s", error)
        return None
