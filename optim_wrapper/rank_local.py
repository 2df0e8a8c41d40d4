"""What no other rank holds: random number streams and buffers, taken in every step into the black box.

The training thread calls `BoxRecorder.tentative` when the forward of a step is done and before the collective that
lets a peer update, `committed` at the step's end, `epoch_start` when an epoch begins. See black_box.py for why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Protocol

import torch
from torch.nn.modules.batchnorm import _NormBase

from lastwords.errors import ConfigError, MismatchError, StorageError
from lastwords.optim_wrapper.rng_streams import Stream, TorchStream, default_streams
from lastwords.processor.black_box import BlackBox, RegionCopy, RegionSpec, SlotKind

_log = logging.getLogger(__name__)

SMALL_BUFFER_BYTES_MAX = 64 * 1024
"""Copying this much takes about 5 us; looking whether it has changed would not be cheaper for native kernels that
change a buffer without counting its version up."""

_DTYPE_CODES: dict[torch.dtype, str] = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip


class Capture(Protocol):
    """A part of the rank-local state. `refresh` comes before each copy is begun, `capture` while it is open."""

    @property
    def regions(self) -> tuple[RegionSpec, ...]: ...

    @property
    def reasons(self) -> tuple[str, ...]: ...

    def bind(self, box: BlackBox) -> None: ...

    def refresh(self) -> None: ...

    def capture(self, slot: int) -> None: ...

    def restore(self, regions: Mapping[str, RegionCopy]) -> tuple[str, ...]: ...


class RngCapture:
    """All random number streams of this process: python, numpy, torch, the accelerator, and the user's generators.

    generators: torch generators of the loader, of a sampler and the like, by name.
    devices: accelerator devices to include; None: the current one, if an accelerator is in use.
    fast=False takes python's and numpy's streams the public way; only for tests.
    """

    def __init__(
        self,
        *,
        generators: Mapping[str, torch.Generator] | None = None,
        devices: Sequence[torch.device] | None = None,
        fast: bool = True,
    ) -> None:
        self._streams: list[Stream] = default_streams(devices, fast=fast)
        for name, generator in sorted((generators or {}).items()):
            self._streams.append(TorchStream(f"generator/{name}", generator))
        self._takes: dict[int, list[Callable[[], None]]] = {}

    @property
    def regions(self) -> tuple[RegionSpec, ...]:
        """What each copy needs room for."""
        return tuple(stream.region for stream in self._streams)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why some stream cannot be captured."""
        return tuple(stream.problem for stream in self._streams if stream.problem)

    def bind(self, box: BlackBox) -> None:
        """Prepare the captures into each slot of `box`, whose layout has `regions`."""
        for slot in box.step_slots + box.epoch_slots:
            self._takes[slot] = [stream.into(box.region(slot, stream.region.name)) for stream in self._streams]

    def refresh(self) -> None:
        """Nothing to look at beforehand."""

    def capture(self, slot: int) -> None:
        """Take all streams into an open slot."""
        for take in self._takes[slot]:
            take()

    def snapshot(self) -> dict[str, RegionCopy]:
        """All streams as they are now, beside the box: for putting them back after something that must not count."""
        copies = {}
        for stream in self._streams:
            data = bytearray(stream.region.nbytes)
            stream.into(memoryview(data))()
            copies[stream.region.name] = RegionCopy(stream.region.dtype, stream.region.shape, data)
        return copies

    def restore(self, regions: Mapping[str, RegionCopy]) -> tuple[str, ...]:
        """Put the streams back; other regions are ignored. Returns why the outcome is not exact, if it is not.

        Raises MismatchError, before anything is changed, if a stream's size is not the one of this platform.
        """
        reasons = []
        known = {stream.region.name: stream for stream in self._streams}
        saved = {name: copy for name, copy in regions.items() if name.startswith("rng/")}
        for name in sorted(known.keys() & saved.keys()):
            if len(memoryview(saved[name].data)) != known[name].region.nbytes:
                text = f"saved {len(saved[name].data)} bytes, here {known[name].region.nbytes}"
                raise MismatchError(
                    f"the random number stream {name!r} has another size: {text}; torch or numpy differ too much",
                    different={name: text},
                )
        for name in sorted(known.keys() | saved.keys()):
            if name not in saved:
                reasons.append(f"the random number stream {name!r} was not saved")
            elif name not in known:
                reasons.append(f"the random number stream {name!r} was saved but does not exist here")
            else:
                try:
                    known[name].restore(saved[name].data)
                except MismatchError as error:
                    reasons.append(str(error))
        return tuple(reasons)


class BufferCapture:
    """Buffers of a model: of BatchNorm-like modules and small ones always, larger ones once they have changed.

    model: the module itself, not its DDP wrapper; names are as in `model.named_buffers()`, a tied buffer under its
    first name. A larger buffer counts as changed when it is another tensor or its `_version` has moved; what
    changes the memory of a larger buffer without either is not seen (kernels that do so belong to `_NormBase`).
    """

    def __init__(self, model: torch.nn.Module, *, small_bytes_max: int = SMALL_BUFFER_BYTES_MAX) -> None:
        self._model = model
        self._eager: dict[str, _Buffer] = {}
        self._lazy: dict[str, _Buffer] = {}
        self._reasons: list[str] = []
        self._box: BlackBox | None = None
        self._foreach_copy = getattr(torch, "_foreach_copy_", _copy_one_by_one)
        self._active: list[_Buffer] = []
        self._known: list[torch.Tensor] = []
        self._targets: dict[int, list[torch.Tensor]] = {}
        self._activated_early: set[str] = set()
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for key, tensor in module._buffers.items():
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                name = f"{prefix}.{key}" if prefix else key
                problem = _unstorable(tensor)
                if problem:
                    self._reasons.append(f"the buffer {name!r} {problem}")
                elif tensor.numel() > 0:
                    always = isinstance(module, _NormBase) or tensor.nbytes <= small_bytes_max
                    (self._eager if always else self._lazy)[name] = _Buffer(name, module, key, tensor, lazy=not always)

    @property
    def regions(self) -> tuple[RegionSpec, ...]:
        """What each copy needs room for; larger buffers take memory only once they change."""
        return tuple(buffer.region for buffer in (*self._eager.values(), *self._lazy.values()))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why not every buffer is captured."""
        return tuple(self._reasons)

    @property
    def captured(self) -> frozenset[str]:
        """Names of the buffers that are captured by now: they belong to the rank, all others to the unit."""
        names = self._eager.keys() | self._activated_early
        if self._box is not None:
            names |= {name for name, buffer in self._lazy.items() if self._box.is_active(buffer.region.name)}
        return frozenset(names)

    def bind(self, box: BlackBox) -> None:
        """Prepare the captures into each step slot of `box`, whose layout has `regions`; replaces an earlier box."""
        wanted = self._activated_early | {buffer.name for buffer in self._active if buffer.name in self._lazy}
        self._box = box
        self._active, self._known = [], []  # of the box before this one, if there was one
        self._targets = {slot: [] for slot in box.step_slots}
        for buffer in self._eager.values():
            if not buffer.given_up:
                self._activate(buffer)
        for name in sorted(wanted):
            self._activate_lazy(name)

    def refresh(self) -> None:
        """See which larger buffers have changed, and whether any buffer was replaced; before a copy is begun."""
        if self._lazy:
            for name in [name for name, buffer in self._lazy.items() if buffer.changed()]:
                self._activate_lazy(name)
        if not all(map(is_, self._known, [buffer.table.get(buffer.key) for buffer in self._active])):
            self._adopt_replaced()

    def capture(self, slot: int) -> None:
        """Take the buffers into an open step slot."""
        if self._known:
            self._foreach_copy(self._targets[slot], self._known)

    def restore(self, regions: Mapping[str, RegionCopy]) -> tuple[str, ...]:
        """Put the buffers back; other regions are ignored. Returns why the outcome is not exact, if it is not.

        A larger buffer that is not among them had not changed and stays as it is.
        Raises MismatchError, before anything is changed, for a buffer that does not exist here or has another form.
        """
        known = self._eager | self._lazy
        saved = {name.removeprefix("buffer/"): copy for name, copy in regions.items() if name.startswith("buffer/")}
        different = {
            name: f"saved {saved[name].dtype} {saved[name].shape}, here {known[name].region.dtype} "
            f"{known[name].region.shape}"
            for name in sorted(known.keys() & saved.keys())
            if (saved[name].dtype, tuple(saved[name].shape)) != (known[name].region.dtype, known[name].region.shape)
        }
        extra = sorted(saved.keys() - known.keys())
        if extra or different:
            raise MismatchError(
                f"saved buffers do not fit this model: not in it {extra}, of another form {different}",
                extra=extra,
                different=different,
            )
        with torch.no_grad():
            for name, copy in sorted(saved.items()):
                buffer = known[name]
                data = torch.frombuffer(bytearray(copy.data), dtype=buffer.dtype).reshape(buffer.region.shape)
                tensor = buffer.table[buffer.key]
                assert tensor is not None
                tensor.copy_(data)
                if name in self._lazy:
                    # It differs from what a fresh model has: whoever reads the next copy needs it too.
                    self._activate_lazy(name)
        missing = sorted(self._eager.keys() - saved.keys())
        return tuple(f"the buffer {name!r} was not saved" for name in missing)

    def _activate_lazy(self, name: str) -> None:
        if self._box is None:
            self._activated_early.add(name)
            return
        buffer = self._lazy.get(name)
        if buffer is None or buffer.given_up or self._box.is_active(buffer.region.name):
            return
        try:
            self._box.activate(buffer.region.name)
        except StorageError as error:
            buffer.given_up = True
            self._reasons.append(f"the buffer {name!r} has changed but could not be kept: {error}")
            _log.warning("%s", self._reasons[-1])
            return
        self._activate(buffer)

    def _activate(self, buffer: _Buffer) -> None:
        tensor = buffer.table[buffer.key]
        assert tensor is not None
        self._active.append(buffer)
        self._known.append(tensor)
        for slot, targets in self._targets.items():
            view = torch.frombuffer(self._bound.region(slot, buffer.region.name), dtype=buffer.dtype)
            targets.append(view.reshape(buffer.region.shape))

    @property
    def _bound(self) -> BlackBox:
        assert self._box is not None, "bind() comes first"
        return self._box

    def _adopt_replaced(self) -> None:
        """Follow buffers that are another tensor now; one that does not fit any more is given up, and it is said."""
        for index in reversed(range(len(self._active))):
            buffer = self._active[index]
            tensor = buffer.table.get(buffer.key)
            problem = "was removed" if tensor is None else _unstorable(tensor)
            if tensor is not None and (tensor.dtype, tuple(tensor.shape)) != (buffer.dtype, buffer.region.shape):
                problem = f"was replaced by one of {tensor.dtype} {tuple(tensor.shape)}"
            if problem:
                self._reasons.append(f"the buffer {buffer.name!r} {problem}")
                _log.warning("%s: the resume will not be exact", self._reasons[-1])
                self._bound.deactivate(buffer.region.name)
                buffer.given_up = True
                del self._active[index], self._known[index]
                for targets in self._targets.values():
                    del targets[index]
            else:
                assert tensor is not None
                self._known[index] = tensor


class _Buffer:
    """One buffer by its place in the module, since the tensor there may be replaced."""

    __slots__ = ("dtype", "first", "first_version", "given_up", "key", "name", "region", "table")

    def __init__(self, name: str, module: torch.nn.Module, key: str, tensor: torch.Tensor, *, lazy: bool) -> None:
        self.name = name
        self.table = module._buffers
        self.key = key
        self.first = tensor
        self.first_version = tensor._version
        self.dtype = tensor.dtype
        self.given_up = False
        self.region = RegionSpec(f"buffer/{name}", _DTYPE_CODES[tensor.dtype], tuple(tensor.shape), lazy=lazy)

    def changed(self) -> bool:
        """Whether the buffer is another tensor than at the start, or has been written to."""
        tensor = self.table.get(self.key)
        return tensor is not self.first or self.first._version != self.first_version


class BoxRecorder:
    """Writes rank-local state into the black box, in step with training. Belongs to the training thread.

    None of its methods raises because of what is captured: what cannot be kept becomes a line in `reasons`.
    """

    def __init__(self, box: BlackBox, captures: Sequence[Capture]) -> None:
        """`box` was made with `regions(captures)` in its layout."""
        self.box = box
        self._captures = tuple(captures)
        for capture in self._captures:
            capture.bind(box)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the copies are not exact, as far as is known now."""
        return tuple(reason for capture in self._captures for reason in capture.reasons)

    def tentative(self, step: int, json_bytes: bytes = b"{}") -> None:
        """Take the state for `step`, which is under way: after its forward, before its last collective."""
        self._record(SlotKind.TENTATIVE, step, json_bytes)

    def committed(self, step: int, json_bytes: bytes) -> None:
        """Take the state at the end of `step` and compare it with the tentative copy."""
        self._record(SlotKind.COMMITTED, step, json_bytes)
        self.box.compare_tentative()

    def epoch_start(self, epoch: int, json_bytes: bytes = b"{}") -> None:
        """Take the random number streams before the first batch of `epoch` is asked for."""
        slot = self.box.begin(SlotKind.EPOCH, epoch)
        for capture in self._captures:
            if any(region.in_epoch for region in capture.regions):
                capture.capture(slot)
        self.box.commit(slot, json_bytes)

    def restore(self, regions: Mapping[str, RegionCopy]) -> tuple[str, ...]:
        """Put everything back; returns why the outcome is not exact, if it is not."""
        return tuple(reason for capture in self._captures for reason in capture.restore(regions))

    def _record(self, kind: SlotKind, step: int, json_bytes: bytes) -> None:
        captures = self._captures
        for capture in captures:
            capture.refresh()
        box = self.box
        slot = box.begin(kind, step)
        for capture in captures:
            capture.capture(slot)
        box.commit(slot, json_bytes)


def regions(captures: Sequence[Capture]) -> tuple[RegionSpec, ...]:
    """Regions of all captures together, for the box's layout."""
    found = tuple(region for capture in captures for region in capture.regions)
    if len({region.name for region in found}) != len(found):
        raise ConfigError("two captures take a region of the same name")
    return found


def _unstorable(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return f"cannot be captured ({tensor.layout} on {tensor.device})"
    if tensor.dtype not in _DTYPE_CODES:
        return f"cannot be captured ({tensor.dtype})"
    if hasattr(tensor, "_local_tensor"):
        return "cannot be captured (it is distributed)"
    return ""


def _copy_one_by_one(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
