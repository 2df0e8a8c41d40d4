"""Reads device tensors for the writer's thread while the device's other streams may wait for ever.

The host runs ahead of an accelerator. When a peer has died, the current stream may stand behind a collective that never
ends, and a copy that is queued there never begins. What the writer reads is final before that: a rank counts as updated
only when its fence has seen the end of the update on the device (`device_fence.py`), and nothing after an update writes
to what it has written. So each copy goes to a stream of its own, waits for nothing, and only that stream is waited for.

Nothing is allocated on the device, since that may synchronise with all of its streams, and the pinned buffers are made
at the start, because pinning memory may do so too. `tests/optim_wrapper/test_device_reader.py` has a stand-in whose
copies happen only when their stream is waited for, and whose current stream never ends; test_gpu.py has a real one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of, staged_bytes
from lastwords.sharding.dtensor import local_of

BUFFER_BYTES = 2 << 20
"""A copy of 2 MiB takes some 80 us at 25 GB/s, so the 10 us to queue it are hidden behind the one before."""

BUFFERS = 2
"""While one is being filled by the device, the other is copied into the tensor's memory: 4 MiB of pinned memory."""

_HOST = ("cpu", "meta")

DeviceModule = Any
"""What `torch.get_device_module` returns: `Stream(device)` and the context manager `stream(...)` are used of it."""


class DeviceReader:
    """A function from tensors to their bytes in C order, for one thread at a time.

    devices: the accelerators in use; a tensor on the CPU is copied as `staged_bytes` does it. module: makes streams for
    a device. pin: makes a buffer for copies that do not block the host.
    """

    def __init__(
        self,
        devices: Iterable[torch.device],
        *,
        module: Callable[[torch.device], DeviceModule] = torch.get_device_module,
        pin: Callable[[int], torch.Tensor] = lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True),
    ) -> None:
        self._module = module
        self._streams: dict[torch.device, Any] = {}
        for device in sorted(set(devices), key=str):
            self._stream_of(device)
        self._buffers = [pin(BUFFER_BYTES) for _ in range(BUFFERS)] if self._streams else []

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, whatever this thread asks of a device goes to the reader's stream (a user's state_dict(), say)."""
        with contextlib.ExitStack() as stack:
            for device, stream in self._streams.items():
                stack.enter_context(self._module(device).stream(stream))
            yield

    def __call__(self, tensor: torch.Tensor) -> memoryview:
        """The tensor's bytes, in memory of their own."""
        plain = local_of(tensor).detach()
        if plain.device.type == "cpu" or plain.is_conj() or plain.is_neg():  # lazy ones: no parameter is, nor its state
            return staged_bytes(tensor)
        # Elements are copied in the order in which they lie in memory: to reorder them takes memory on the device.
        span, stream = _span(plain), self._stream_of(plain.device)
        memory = torch.empty(span, dtype=plain.dtype)
        with self.aside():
            flat = plain.as_strided((span,), (1,), plain.storage_offset()).view(torch.uint8)
            self._copy(flat, memory.view(torch.uint8), stream)
        host = memory.as_strided(plain.shape, plain.stride())
        view = bytes_of(host.contiguous())
        assert view is not None
        return view

    def _stream_of(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = self._module(device).Stream(device=device)
        return self._streams[device]

    def _copy(self, source: torch.Tensor, target: torch.Tensor, stream: Any) -> None:
        """Device to host through the pinned buffers: one is on its way while the other is emptied."""
        pieces = list(zip(torch.split(source, BUFFER_BYTES), torch.split(target, BUFFER_BYTES), strict=True))
        arrived: tuple[torch.Tensor, torch.Tensor] | None = None
        for number, (there, here) in enumerate(pieces):
            buffer = self._buffers[number % BUFFERS][: there.numel()]
            buffer.copy_(there, non_blocking=True)
            if arrived is not None:
                arrived[1].copy_(arrived[0])
            stream.synchronize()
            arrived = buffer, here
        if arrived is not None:
            arrived[1].copy_(arrived[0])


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one of a strided tensor, those between them that are not its own included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def reader_for(tensors: Iterable[torch.Tensor]) -> DeviceReader:
    """A reader for the devices that hold `tensors`; without any, it is `staged_bytes`."""
    return DeviceReader({device for tensor in tensors if (device := local_of(tensor).device).type not in _HOST})
