"""Tensors as plain bytes in C order, and back: without a copy where the memory allows it.

Of a DTensor only the part on this rank is looked at, stored and overwritten.

`Tensor.numpy()` is never called on a user's tensor: it makes the storage one that can never be resized, of which
observers of quantization-aware training and growing caches die in their next forward pass. A view made here leaves the
tensor as it is. It keeps the storage alive, though not the old memory of one that is resized while the view is held.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from lastwords.checkpoint.format import TYPE_NAMES, TensorSpec
from lastwords.errors import ConfigError, UnstorableError
from lastwords.sharding.dtensor import ShardBox, box_of, is_dtensor, is_shard, local_of

CODES: dict[torch.dtype, str] = {
    getattr(torch, name): code for code, name in TYPE_NAMES.items() if hasattr(torch, name)
}

COPIED_BYTES_MAX = 4096
"""Observers and their like hold a value, or one for each channel; a copy of a page takes less than a microsecond."""

Stage = Callable[[torch.Tensor], memoryview]
"""Copies a tensor whose memory cannot be handed out as it lies."""


def problem_of(tensor: torch.Tensor, *, meta: bool = False) -> str:
    """Why a tensor's bytes are not simply its elements; "" if they are. Of a DTensor give the part on this rank."""
    if torch.nn.parameter.is_lazy(tensor):
        return "is not initialised yet; run the model once before this"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}; only strided (dense) tensors can be stored"
    if tensor.is_nested:
        return "is nested; only tensors of one shape can be stored"
    if tensor.is_quantized:
        return "is quantized; store its int_repr() and scales instead"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"is a {class_name(tensor)}; " + (
            "what belongs to no parameter must be whole on every rank"
            if is_dtensor(tensor)
            else "tensors of such a class cannot be stored"
        )
    if tensor.device.type == "meta":
        return "" if meta else "is on the meta device and has no content; materialise the model first"
    return _without_memory(tensor)


def refuse_unsupported(tensor: torch.Tensor, path: str, *, sharded: bool = False, meta: bool = False) -> None:
    """UnstorableError with `path` for a tensor whose bytes are not simply its elements.

    sharded: a DTensor is welcome, if its part on this rank is one box of the whole. meta: so is one without content.
    """
    if sharded and is_dtensor(tensor):
        box_of(tensor, path)
        tensor = local_of(tensor)
    what = problem_of(tensor, meta=meta)
    if what:
        raise UnstorableError(f"{path} {what}", f"{path} ({type(tensor).__qualname__}: {what})")


def spec_of(name: str, tensor: torch.Tensor, box: ShardBox | None = None) -> TensorSpec:
    """How `tensor` is written down. A type that safetensors lacks (complex128) becomes bytes in one more dimension.

    box: which part of a whole a plain tensor is, where that was declared.

    >>> spec_of("local/0/x", torch.zeros(2, dtype=torch.complex128))
    TensorSpec(name='local/0/x', dtype='U8', shape=(2, 16), global_shape=(2, 16), offsets=(0, 0))
    """
    code = CODES.get(tensor.dtype)
    more = () if code else (tensor.element_size(),)
    if box is None and not is_shard(tensor):
        return TensorSpec(name, code or "U8", (*tensor.shape, *more))
    shape, whole, offsets = box_of(tensor, name)
    if box is not None:
        whole, offsets = box.global_shape, box.offsets
    return TensorSpec(name, code or "U8", (*shape, *more), (*whole, *more), (*offsets, *(0 for _ in more)))


def class_name(value: Any) -> str:
    """Name of its class, with the module's."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def dtype_name(dtype: torch.dtype | torch.layout | torch.memory_format) -> str:
    """Name of a dtype, a layout or a memory format, without "torch.".

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Inverse of `dtype_name`; ConfigError for a name that this torch does not know."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"this torch {torch.__version__} has no element type {name!r}; use the torch version of the saved run"
        )
    return dtype


def dtype_of_code(code: str) -> str:
    """Name of the dtype with this safetensors code.

    >>> dtype_of_code("BF16")
    'bfloat16'
    """
    return TYPE_NAMES[code]


def code_of_dtype(name: str) -> str | None:
    """The safetensors code of the dtype with this name; None if there is none.

    >>> code_of_dtype("float64"), code_of_dtype("complex128")
    ('F64', None)
    """
    return next((code for code, known in TYPE_NAMES.items() if known == name), None)


def bytes_of(tensor: torch.Tensor) -> memoryview | None:
    """The memory of a CPU tensor whose elements lie in C order, writable and without a copy; None for all others."""
    plain = local_of(tensor).detach()
    if plain.device.type != "cpu" or not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
        return None
    if not plain.nbytes:
        return memoryview(bytearray())
    _refuse_without_memory(plain)
    return np.asarray(_TensorMemory(plain)).data


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; -1 if it was made under `torch.inference_mode`, where nobody counts."""
    return -1 if tensor.is_inference() else tensor._version


def bytes_in(tensor: torch.Tensor) -> memoryview:
    """The bytes of any tensor that has some, in C order; where possible without a copy."""
    return bytes_of(tensor) or staged_bytes(tensor)


def memory_of(value: Any) -> int:
    """Where the memory begins that a tensor or an array lies in, with all of its views; 0 if there is none."""
    kind = type(value)
    while issubclass(kind, np.ndarray) and issubclass(type(value.base), np.ndarray | torch.Tensor):
        value = value.base
        kind = type(value)
    if issubclass(kind, np.ndarray):
        return int(value.__array_interface__["data"][0]) if value.nbytes else 0
    if not issubclass(kind, torch.Tensor) or problem_of(local := local_of(value)):
        return 0
    return local.untyped_storage().data_ptr() if local.nbytes else 0


def extent_of(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one of a strided tensor, those between them that are not its own included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _without_memory(plain: torch.Tensor) -> str:
    """Whether a tensor's storage has been freed (resized to less) behind it: reading it would end the process."""
    there = plain.untyped_storage().nbytes()
    if there >= plain.nbytes and plain.is_contiguous() and not plain.storage_offset():
        return ""
    last = plain.storage_offset() + extent_of(plain)
    if not plain.numel() or there >= last * plain.element_size():
        return ""
    return f"has a storage of {there} bytes now and no content; resize it back before the step ends"


def _refuse_without_memory(plain: torch.Tensor) -> None:
    what = _without_memory(plain)
    if what:
        raise UnstorableError(f"a tensor of {plain.dtype} {tuple(plain.shape)} {what}", f"a tensor that {what}")


class _TensorMemory:
    """What numpy needs to make an array over a tensor's memory. The array keeps this, and this keeps the storage."""

    def __init__(self, plain: torch.Tensor) -> None:
        self._plain = plain

    @property
    def __array_interface__(self) -> dict[str, Any]:
        plain = self._plain
        return {"version": 3, "typestr": "|u1", "shape": (plain.nbytes,), "data": (plain.data_ptr(), False)}


def staged_bytes(tensor: torch.Tensor) -> memoryview:
    """A copy in C order, on the CPU. Of a device tensor it comes after what the current stream has to do before."""
    with torch.no_grad():
        _refuse_without_memory(local_of(tensor).detach())
        copy = local_of(tensor).detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    view = bytes_of(copy)
    assert view is not None
    return view


class Staged:
    """A copy of a tensor's bytes, made when it is called. stage: makes it."""

    def __init__(self, tensor: torch.Tensor, stage: Stage) -> None:
        self.tensor = tensor
        self._stage = stage

    def __call__(self) -> memoryview:
        return self._stage(self.tensor)


def source_of(
    tensor: torch.Tensor, stage: Stage | None = None, known: memoryview | Staged | None = None
) -> memoryview | Staged:
    """The tensor's memory itself where that is possible, else a function that copies it when it is called.

    A small tensor is copied at once: it costs as much as the view, and the user's code may resize it meanwhile.
    stage: makes the copy; `staged_bytes` if None. known: see `lasting_source_of`.
    """
    fits = isinstance(known, memoryview) or (known is not None and stage is None)
    source = known if known is not None and fits else lasting_source_of(tensor, stage)
    if isinstance(source, memoryview) and source.nbytes <= COPIED_BYTES_MAX:
        return memoryview(bytearray(source))
    return source


def lasting_source_of(tensor: torch.Tensor, stage: Stage | None = None) -> memoryview | Staged:
    """The same, but for small tensors: it is right as long as the tensor lies where it does."""
    view = bytes_of(tensor)
    return Staged(tensor, stage or staged_bytes) if view is None else view


def writing(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Inside, `tensor` may be written in place, also if it was made under `torch.inference_mode`."""
    return torch.inference_mode() if local_of(tensor).is_inference() else torch.no_grad()


def overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.copy_(value)`, `value` being this rank's part; also into tensors that were made by expand()."""
    target, source = local_of(tensor).detach(), value
    for dimension, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(dimension, 0, 1), source.narrow(dimension, 0, 1)
    with writing(tensor):
        target.copy_(source)


def tensor_over(memory: bytearray | memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A CPU tensor whose memory is `memory`."""
    if not memory:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
