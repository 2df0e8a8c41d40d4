"""Copies what a GPU holds into the host's memory, beside what the GPU computes; and sees whether it changes meanwhile.

The host does not see the words of a GPU's tensors, and not every write is counted: one through `.data` is not. So the
first and last bytes of each tensor are gathered on the GPU at a step's end, which takes one kernel and no waiting. They
are gathered again before and after each part of a copy, in the copy's own stream; a part is some milliseconds' worth.
A loop that exchanges weights (for a validation with averages, say) and puts them back within one part is not seen.

A stream in which a collective waits for a dead peer never gets on. So nothing here waits in a stream for what another
one has to do: the host looks whether the other one has got there, and that only for so long. What is queued behind a
moment that has not come has not happened either.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import is_
from typing import Any, NamedTuple

import torch

from lastwords import clock
from lastwords.optim_wrapper.tensors.tensor_bytes import Staged
from lastwords.sharding.dtensor import local_of
from lastwords.torch_private import foreach_copy

PART_BYTES = 64 << 20
"""Copied between two looks: 1.2 ms at 55 GB/s."""

PATIENCE_S, _PAUSE_S = 2.0, 0.0005
"""So long the host waits in an incident until a device has come to a step's end; and between two looks."""

_EACH = 4
"""So many of the first and of the last bytes of a tensor are looked at."""


def is_seen(tensor: torch.Tensor) -> bool:
    """Whether this tensor is one of those that are copied here. Of a DTensor give the part on this rank."""
    plain = tensor.device.type == "cuda" and tensor.layout is torch.strided and not tensor.is_nested
    return plain and tensor.is_contiguous() and not tensor.is_complex() and not tensor.is_inference()


class _Words:
    """Of tensors on one device, side by side, what is looked at: one kernel reads all of it, wherever it lies."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """tensors: flat, of bytes, not empty. They have to be kept alive as long as this is used."""
        device, begin = tensors[0].device, min(tensor.data_ptr() for tensor in tensors)
        self._memory = _memory(begin, max(one.data_ptr() + one.numel() for one in tensors) - begin, device)
        places: list[int] = []
        self.ends: list[int] = []
        """Where in what is taken that of each tensor ends."""
        for tensor in tensors:
            first, end = tensor.data_ptr() - begin, tensor.data_ptr() - begin + tensor.numel()
            places += [*range(first, min(first + _EACH, end)), *range(max(first + _EACH, end - _EACH), end)]
            self.ends.append(len(places))
        self._places = torch.tensor(places, device=device)
        # In an incident nothing is allocated on a device: that may wait for all that the device has to do.
        self._now = torch.empty(len(places), dtype=torch.uint8, device=device)
        self._differs = torch.empty_like(self._now, dtype=torch.bool)
        self.changed(self.read())  # a kernel that runs for the first time is loaded, which waits for the device as well

    def read(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """As they are when the current stream has got here; of the tensors in between only."""
        start, stop = self.ends[begin - 1] if begin else 0, self.ends[-1 if end is None else end - 1]
        return self._memory.index_select(0, self._places[start:stop])

    def changed(self, since: torch.Tensor) -> list[int]:
        """Which of the tensors are others than when this was taken."""
        torch.index_select(self._memory, 0, self._places, out=self._now)
        differs = torch.ne(self._now, since, out=self._differs).cpu().cumsum(0)
        counts = [int(differs[end - 1]) for end in self.ends]
        return [at for at, (one, other) in enumerate(pairwise([0, *counts])) if other > one]


class _DeviceSpan:
    """Memory of a device from the first byte of some tensors to the last byte of others, as torch takes it over."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def _memory(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_DeviceSpan(address, nbytes), device=device)


class OfDevice(NamedTuple):
    """The tensors of one device: where each stands in the list of all, its bytes, and in which parts to copy them.

    lying: where their memory is. It may be freed behind them (`untyped_storage().resize_(0)`).
    """

    device: torch.device
    places: list[int]
    flat: list[torch.Tensor]
    words: _Words
    parts: list[tuple[int, int]]
    lying: list[tuple[int, int]]

    def elsewhere(self) -> list[int]:
        """Which of them have other memory now, or none."""
        now = _lying(self.flat)
        return [] if now == self.lying else [at for at, one in enumerate(now) if one != self.lying[at]]


class DeviceMark(NamedTuple):
    """A moment on the devices: of each what was there, and when."""

    of: Sequence[OfDevice]
    events: list[Any]
    words: list[torch.Tensor]


class DeviceMarks:
    """Whether tensors on GPUs are what they were at a moment. `mark` belongs to the training thread."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._looking = threading.Lock()

    @staticmethod
    def mark(of: Sequence[OfDevice]) -> DeviceMark:
        """Queues a kernel for each device, and waits for nothing. MemoryError where one has no memory left."""
        words, events = [], []
        for one in of:
            with torch.cuda.device(one.device), _of_memory():
                words.append(one.words.read())
                events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                events[-1].record()
        return DeviceMark(of, events, words)

    def changed(self, mark: DeviceMark) -> list[int]:
        """Which of the tensors are others now. Any thread; waits for no stream that may wait for ever."""
        found: list[int] = []
        for one, event, words in zip(mark.of, mark.events, mark.words, strict=True):
            if gone := one.elsewhere():
                found += [one.places[at] for at in gone]
            elif has_come(event, PATIENCE_S):
                with self._looking, torch.cuda.stream(self.stream(one.device)):
                    found += [one.places[at] for at in one.words.changed(words)]
        return found

    def stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


class DeviceCopies:
    """`mark` belongs to the training thread, `copy` to one thread at a time: see `Devices` of whole_copies."""

    def __init__(self) -> None:
        self._marks = DeviceMarks()
        self._known: tuple[Sequence[Staged], list[OfDevice]] = (), []
        self._targets: weakref.WeakKeyDictionary[Any, tuple[list[slice], list[torch.Tensor]]]
        self._targets = weakref.WeakKeyDictionary()
        self._registered: weakref.WeakSet[Any] = weakref.WeakSet()

    def takes(self, source: object) -> bool:
        return isinstance(source, Staged) and is_seen(local_of(source.tensor))

    def mark(self, sources: Sequence[Staged]) -> DeviceMark:
        """At a step's end."""
        known, of = self._known
        if len(known) != len(sources) or not all(map(is_, known, sources)):
            of = by_device([local_of(source.tensor) for source in sources])
            self._known = sources, of
        return self._marks.mark(of)

    def copy(self, mark: DeviceMark, file: Any, places: Sequence[slice]) -> bool:
        """Copy what was marked to these places. False: not all was as it was then."""
        if not mark.of:
            return True  # none of them has a byte
        with torch.cuda.device(mark.of[0].device):
            self._register(file)
        known, tensors = self._targets.get(file, ([], []))
        if known != places:
            tensors = [torch.from_numpy(file.bytes[place]) for place in places]
            self._targets[file] = [*places], tensors
        looks: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        for one, event in zip(mark.of, mark.events, strict=True):
            before, after = [], []
            has_come(event)
            if one.elsewhere():
                return False
            with torch.cuda.stream(self._marks.stream(one.device)), torch.no_grad():
                for begin, end in one.parts:
                    before.append(one.words.read(begin, end))
                    targets = [tensors[at] for at in one.places[begin:end]]
                    foreach_copy(targets, one.flat[begin:end], non_blocking=True)
                    after.append(one.words.read(begin, end))
            looks.append((before, after))
        same = True
        for one, words, (before, after) in zip(mark.of, mark.words, looks, strict=True):
            stream = self._marks.stream(one.device)
            with torch.cuda.stream(stream):
                same &= torch.equal(words, torch.cat(before)) and torch.equal(words, torch.cat(after))
                stream.synchronize()
        return same

    def _register(self, file: Any) -> None:
        """Let devices write to it by themselves, at their full speed; where they cannot the driver does it."""
        if file in self._registered:
            return
        self._registered.add(file)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = file.bytes.ctypes.data
        if int(runtime.cudaHostRegister(address, file.nbytes, 0)) == 0:
            weakref.finalize(file, runtime.cudaHostUnregister, address).atexit = False
            return
        with contextlib.suppress(RuntimeError):  # torch would raise it at the next launch of a kernel
            torch.zeros(1, device="cuda")  # the current one


def by_device(tensors: Sequence[torch.Tensor]) -> list[OfDevice]:
    """Tensors that `is_seen`, as long as they lie where they do now. MemoryError as for a mark."""
    flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
    found = []
    for device in dict.fromkeys(one.device for one in flat if one.numel()):
        places = [at for at, one in enumerate(flat) if one.device == device and one.numel()]
        own = [flat[at] for at in places]
        parts = [*_parts([one.numel() for one in own])]
        with _of_memory():
            found.append(OfDevice(device, places, own, _Words(own), parts, _lying(own)))
    return found


@contextlib.contextmanager
def _of_memory() -> Iterator[None]:
    """What torch says of a device without memory is a RuntimeError, as most mistakes are."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error


def _lying(flat: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    return [(one.data_ptr(), one.untyped_storage().nbytes()) for one in flat]


def has_come(event: Any, patience_s: float = math.inf) -> bool:
    """Whether a device has got to this event; the host waits for that, and no other stream does."""
    until_s = clock.mono_s() + patience_s
    while not event.query():
        if clock.mono_s() > until_s:
            return False
        time.sleep(_PAUSE_S)
    return True


def _parts(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """From which to which of them there are so many bytes at a time.

    >>> [*_parts([PART_BYTES // 2, PART_BYTES // 2, PART_BYTES * 3, 1])]
    [(0, 2), (2, 3), (3, 4)]
    """
    ends = [*accumulate(sizes)]
    cuts = [at for at, end in enumerate(ends, 1) if end // PART_BYTES > (end - sizes[at - 1]) // PART_BYTES]
    yield from pairwise(dict.fromkeys([0, *cuts, len(sizes)]))
