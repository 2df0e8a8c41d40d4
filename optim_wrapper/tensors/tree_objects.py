"""Values that are neither plain nor simply a tensor: taken apart into plain values and tensors, and made again.

numpy arrays, sparse tensors, torch's generators, its types, devices, shapes and layouts; and deques and defaultdicts
with tensors inside. Each becomes a kind (a
text), plain values about it, and values inside it, tensors among them. Only what is listed here is ever made again.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lastwords.checkpoint.storable import FACTORIES, NUMPY_KINDS, is_factory
from lastwords.errors import FormatError

_ARRAY_KINDS = NUMPY_KINDS | {"U", "S"}
_COMPRESSED = {
    layout: str(layout) for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}
_CURRENT = "current"


class Parts(NamedTuple):
    """What is stored in the object's place. about: plain values. inside: values that may be tensors."""

    kind: str
    about: Any
    inside: Sequence[Any]


def parts_of(value: Any) -> Parts | None:
    """Parts of an object of these kinds; None for any other value."""
    kind = type(value)
    if kind is np.ndarray:
        return _of_array(value) if value.dtype.kind in _ARRAY_KINDS else None
    if isinstance(value, torch.Tensor):
        return _of_sparse(value)
    if kind is torch.Generator:
        return Parts("generator", _device_name(value.device), [value.get_state()])
    if kind is torch.device:
        return Parts("device", _device_name(value), [])
    if kind is torch.Size:
        return Parts("size", list(value), [])
    if kind in (torch.dtype, torch.layout, torch.memory_format):
        return Parts(kind.__name__, str(value).removeprefix("torch."), [])
    if kind is deque:
        return Parts("deque", value.maxlen, list(value))
    if kind is defaultdict and is_factory(value.default_factory):
        return Parts("defaultdict", value.default_factory and value.default_factory.__name__, [dict(value)])
    return None


def is_object(value: Any) -> bool:
    """Whether `value` is of one of these kinds, or one of their kin that cannot be stored."""
    return isinstance(value, _KINDS)


_KINDS = (
    np.ndarray, torch.Generator, torch.device, torch.Size, torch.dtype, torch.layout, torch.memory_format
)  # fmt: skip


def made_of(kind: Any, about: Any, inside: Sequence[Any], where: str) -> Any:
    """The object again. FormatError for what `parts_of` has not made, or of a device that is not here."""
    try:
        return _MAKE[kind](about, inside)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise FormatError(
            f"{where} holds a {kind!r} that cannot be made here ({error!r}): damaged, written by a newer lastwords, or "
            "of a device that this process does not have"
        ) from error


# ---------------------------------------------------------------------- arrays


def _of_array(array: np.ndarray[Any, Any]) -> Parts:
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    flat = array.ravel(order=order)  # type: ignore[arg-type]
    if not flat.flags.writeable:
        flat = flat.copy()  # torch warns of memory that must not be written to
    if flat.dtype.isnative and isinstance(getattr(torch, flat.dtype.name, None), torch.dtype):
        elements = torch.from_numpy(flat)
    else:
        elements = torch.from_numpy(flat.view(np.uint8) if flat.dtype.itemsize else np.empty(0, np.uint8))
    return Parts("ndarray", [array.dtype.str, list(array.shape), order], [elements])


def _array(about: Any, inside: Sequence[Any]) -> np.ndarray[Any, Any]:
    text, shape, order = about
    dtype = np.dtype(str(text))
    if dtype.kind not in _ARRAY_KINDS or order not in ("C", "F"):
        raise ValueError(text, order)
    [elements] = inside
    memory = elements.detach().cpu().contiguous().numpy()
    if not dtype.itemsize or not math.prod(shape):
        return np.empty(shape, dtype, order=order)
    array: np.ndarray[Any, Any] = memory.view(np.uint8).view(dtype).copy().reshape(shape, order=order)
    return array


# ---------------------------------------------------------------------- sparse tensors


def _of_sparse(tensor: torch.Tensor) -> Parts | None:
    if tensor.layout is torch.strided:
        return None
    tensor, size = tensor.detach(), list(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        return Parts("sparse_coo", [size, tensor.is_coalesced()], [tensor._indices(), tensor._values()])
    if tensor.layout not in _COMPRESSED:
        return None
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = [tensor.crow_indices(), tensor.col_indices()] if by_row else [tensor.ccol_indices(), tensor.row_indices()]
    return Parts("sparse_compressed", [size, _COMPRESSED[tensor.layout].removeprefix("torch.")],
                 [*indices, tensor.values()])  # fmt: skip


def _coo(about: Any, inside: Sequence[Any]) -> torch.Tensor:
    size, coalesced = about
    indices, values = inside
    return torch.sparse_coo_tensor(indices, values, size, is_coalesced=bool(coalesced), check_invariants=True)


def _compressed(about: Any, inside: Sequence[Any]) -> torch.Tensor:
    size, layout = about
    compressed, plain, values = inside
    return torch.sparse_compressed_tensor(
        compressed, plain, values, size, layout=_named(torch.layout)(layout, ()), check_invariants=True
    )


# ---------------------------------------------------------------------- generators, devices and names of torch's


def _device_name(device: torch.device) -> str:
    """Each rank has its own accelerator: what is on the writer's is on the reader's when it is read."""
    accelerator = torch.accelerator.current_accelerator()
    on_it = accelerator is not None and device.type == accelerator.type and device.index is not None
    if on_it and device.index == torch.accelerator.current_device_index():
        return f"{device.type}:{_CURRENT}"
    return str(device)


def _device(about: Any, inside: Sequence[Any] = ()) -> torch.device:
    kind, _, index = str(about).partition(":")
    if index == _CURRENT:
        return torch.device(kind, torch.accelerator.current_device_index())
    return torch.device(str(about))


def _generator(about: Any, inside: Sequence[Any]) -> torch.Generator:
    made = torch.Generator(_device(about))
    [state] = inside
    made.set_state(state.cpu())
    return made


def _named(kind: type[Any]) -> Callable[[Any, Sequence[Any]], Any]:
    def named(about: Any, inside: Sequence[Any]) -> Any:
        found = getattr(torch, str(about))
        if type(found) is not kind:
            raise ValueError(about)
        return found

    return named


_MAKE: dict[str, Callable[[Any, Sequence[Any]], Any]] = {
    "ndarray": _array,
    "sparse_coo": _coo,
    "sparse_compressed": _compressed,
    "generator": _generator,
    "device": _device,
    "size": lambda about, inside: torch.Size(about),
    "deque": lambda about, inside: deque(inside, about),
    "defaultdict": lambda about, inside: defaultdict(about and FACTORIES[about], inside[0]),
    **{kind.__name__: _named(kind) for kind in (torch.dtype, torch.layout, torch.memory_format)},
}
