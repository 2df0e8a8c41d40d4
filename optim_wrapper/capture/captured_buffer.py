"""One buffer of a model, by its place in a module, and the region of a black box that it is copied into."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import NamedTuple

import torch

from lastwords.optim_wrapper.tensors.tensor_bytes import problem_of
from lastwords.processor.black_box import RegionSpec
from lastwords.sharding.dtensor import is_dtensor, local_of
from lastwords.torch_private import NormBase

REFORMS_MAX = 16
"""A cache that grows in each step would have the black box made anew in each."""

_DTYPE_CODES: dict[torch.dtype, str] = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; -1 if it was made under `torch.inference_mode`, where nobody counts."""
    return -1 if tensor.is_inference() else tensor._version


def region_dtype(dtype: torch.dtype) -> str | None:
    """What a black box calls an element type; None for one that it has no name for."""
    return _DTYPE_CODES.get(dtype)


class SavedForms(NamedTuple):
    """What a checkpoint says of its buffers. volatile: names of those that no state_dict() has. reshaped: of those that
    had got another form, or come, since the saved run began."""

    volatile: Collection[str] = ()
    reshaped: Collection[str] = ()


NO_FORMS = SavedForms()


class CapturedBuffer:
    """One buffer by its place in the module, since the tensor there may be replaced."""

    __slots__ = ("dtype", "first", "first_version", "given_up", "key", "name", "of_norm", "reforms", "region", "table")

    def __init__(self, name: str, module: torch.nn.Module, key: str, tensor: torch.Tensor, *, lazy: bool) -> None:
        self.name = name
        self.table = module._buffers
        self.key = key
        self.first = tensor
        self.first_version = version_of(tensor)
        self.of_norm = isinstance(module, NormBase)
        self.dtype = tensor.dtype
        self.given_up = False
        self.reforms = 0
        shape = tuple(local_of(tensor).shape)
        self.region = RegionSpec(f"buffer/{name}", _DTYPE_CODES[tensor.dtype], shape, lazy=lazy)

    def changed(self) -> bool:
        """Whether the buffer is another tensor than at the start, or has been written to."""
        tensor = self.table.get(self.key)
        return tensor is not self.first or version_of(self.first) != self.first_version

    def reformed(self) -> CapturedBuffer | None:
        """The same with room for the form that it has now; None if there can be none, or it changes too often."""
        tensor = self.table.get(self.key)
        if tensor is None or unstorable(tensor) or is_dtensor(tensor) or not tensor.numel():
            return None
        if self.reforms == REFORMS_MAX:
            return None
        twin = copy.copy(self)
        shape, twin.dtype = form_of(tensor)
        twin.region = RegionSpec(self.region.name, _DTYPE_CODES[twin.dtype], tuple(shape), lazy=self.region.lazy)
        twin.given_up, twin.reforms = False, self.reforms + 1
        return twin

    def misfit(self) -> str:
        """Why the buffer cannot be copied into its region as it is now; "" if it can."""
        tensor = self.table.get(self.key)
        if tensor is None:
            return "was removed"
        problem = unstorable(tensor)
        if problem:
            return problem
        shape, dtype = form_of(local_of(tensor))
        if (tuple(shape), dtype) == (self.region.shape, self.dtype):
            return ""
        return f"was replaced by a buffer of {dtype} {tuple(shape)}"


Form = tuple[torch.Size, torch.dtype]


def has_memory(tensor: torch.Tensor) -> bool:
    """False where the storage has been resized to less than the tensor takes: reading it would end the process."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes or not unstorable(tensor)


def form_of(tensor: torch.Tensor) -> Form:
    return tensor.shape, tensor.dtype


def unstorable(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return f"cannot be captured ({tensor.layout} on {tensor.device})"
    if what := problem_of(local_of(tensor)):
        return f"cannot be captured: it {what}"
    if tensor.dtype not in _DTYPE_CODES:
        return f"cannot be captured ({tensor.dtype})"
    return ""


def empty_of(dtype: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Zeros for a region's type and shape."""
    types = {code: kind for kind, code in _DTYPE_CODES.items()}
    return torch.zeros(shape, dtype=types[dtype], device=device)
