"""Values that are neither plain nor simply a tensor: taken apart into plain values and tensors, and made again.

numpy arrays, sparse tensors, tensors that are made of others (torch calls their classes traceable: quantized moments,
say), torch's generators, its types, devices, shapes and layouts; and deques and defaultdicts with tensors inside. Each
becomes a kind (a text), plain values about it, and values inside it, tensors among them. Only what is listed here is
ever made again.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lastwords.checkpoint.storable import FACTORIES, NUMPY_KINDS, is_factory
from lastwords.errors import FormatError, MismatchError
from lastwords.sharding.dtensor import is_dtensor

_ARRAY_KINDS = NUMPY_KINDS | {"U", "S"}
_COMPRESSED = {
    layout: str(layout) for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}
_CURRENT = "current"
TRACEABLE = "traceable"


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
        return _of_traceable(value) or _of_sparse(value)
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
    """The object again. FormatError for what `parts_of` has not made, or of a device that is not here.

    MismatchError where its class is not here.
    """
    refuse_missing_class(kind, about, where)
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


# ---------------------------------------------------------------------- tensors that are made of others


def inner_names(tensor: torch.Tensor) -> list[str]:
    """Attributes with the tensors that this one is made of, if its class is traceable; none for any other tensor.

    Nested tensors and DTensors are looked at elsewhere.
    """
    kind = type(tensor)
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or not _is_traceable(kind):
        return []
    if is_dtensor(tensor) or tensor.is_nested:
        return []
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [*names] if all(isinstance(getattr(tensor, name, None), torch.Tensor) for name in names) else []


def is_composite(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are not simply its elements: it is sparse, quantized, nested, or made of others."""
    if torch.nn.parameter.is_lazy(tensor):
        return False
    return tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or bool(inner_names(tensor))


def _is_traceable(kind: Any) -> bool:
    flatten, unflatten = (getattr(kind, name, None) for name in ("__tensor_flatten__", "__tensor_unflatten__"))
    return isinstance(kind, type) and issubclass(kind, torch.Tensor) and callable(flatten) and callable(unflatten)


def _of_traceable(tensor: torch.Tensor) -> Parts | None:
    names, kind = inner_names(tensor), type(tensor)
    if not names:
        return None
    _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    about = [kind.__module__, kind.__qualname__, names, list(tensor.shape), list(tensor.stride())]
    if not _is_named(kind):
        return None
    return Parts(TRACEABLE, about, [*(getattr(tensor, name) for name in names), context])


def _traceable(about: Any, inside: Sequence[Any]) -> torch.Tensor:
    _, _, names, size, stride = about
    *tensors, context = inside
    inner = dict(zip(names, tensors, strict=True))
    made: torch.Tensor = _class_of(about).__tensor_unflatten__(inner, context, torch.Size(size), tuple(stride))
    return made


def _is_named(kind: type[Any]) -> bool:
    """Whether its name leads to this class: not where a function has made it."""
    try:
        return _class_of([kind.__module__, kind.__qualname__]) is kind
    except (KeyError, TypeError, AttributeError):
        return False


def _class_of(about: Any) -> Any:
    """The class, of a module that this process has imported by itself."""
    module, name, *_ = about
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    if not _is_traceable(found):
        raise TypeError(found)
    return found


def refuse_missing_class(kind: Any, about: Any, where: str) -> None:
    """MismatchError where an object of this kind is of a class that this process does not have."""
    if kind != TRACEABLE or not isinstance(about, list):
        return
    try:
        _class_of(about)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        name = ".".join(map(str, about[:2]))
        raise MismatchError(
            f"{where} holds a {name}, and no module that has been imported here has a traceable tensor class of that "
            "name; import it before resume()",
            different={where: name},
        ) from error


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
    TRACEABLE: _traceable,
    "device": _device,
    "size": lambda about, inside: torch.Size(about),
    "deque": lambda about, inside: deque(inside, about),
    "defaultdict": lambda about, inside: defaultdict(about and FACTORIES[about], inside[0]),
    **{kind.__name__: _named(kind) for kind in (torch.dtype, torch.layout, torch.memory_format)},
}
