"""Nested Python values with tensors in them, taken apart for storage and put together again, exactly.

A value becomes a tree (see `lastwords.checkpoint.entries`) and named tensors. What is neither plain nor simply a
tensor is of a *kind* (a text), has plain values about it, and values inside, tensors among them: containers; numpy
arrays; sparse tensors; tensors that are made of others (torch calls their classes traceable: quantized moments, say);
torch's generators, its types, devices, shapes and layouts. Only what is listed here is ever made again.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import torch

from lastwords.checkpoint.entries import PAIRS, folded, node_of
from lastwords.checkpoint.meta import Tree
from lastwords.checkpoint.storable import (
    DEPTH_MAX,
    FACTORIES,
    NUMPY_KINDS,
    is_factory,
    loses_order,
    numpy_dtype,
    pack,
    refuse_unstorable,
    unstorable,
)
from lastwords.errors import FormatError, MismatchError, UnstorableError
from lastwords.optim_wrapper.tensors.tensor_bytes import (
    bytes_in,
    dtype_name,
    dtype_named,
    problem_of,
    refuse_unsupported,
    tensor_over,
)
from lastwords.sharding.dtensor import ShardBox, is_dtensor, local_of, placements_to_json

# Copies of the user's values as they are at one moment, sharing what has not changed.

DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})


def advance(before: Any, now: Any) -> tuple[Any, bool]:
    """A copy of `now` that shares with `before` (a copy made earlier) what is equal; and whether anything differs.

    Called for all extras in every step. UnstorableError for what cannot be stored, RecursionError for what contains
    itself.
    """
    kind = type(now)
    if kind in ATOMS:
        return now, now is not before and (type(before) is not kind or _other_bits(before, now))
    if type(before) is not kind:
        before = None
    if kind is dict or kind is OrderedDict:
        known, result, differs = {} if before is None else before, now.copy(), False
        for key, item in now.items():
            old = known.get(key)
            if item is not old or type(item) not in ATOMS:
                result[key], moved = advance(old, item)
                differs = differs or moved
        same = not differs and before is not None and _same_keys(before, now)
        return (before, False) if same else (result, True)
    parts = parts_of(now)
    if parts is None:
        return _advance_leaf(before, now)
    if kind is np.ndarray:  # cheaper as a whole
        same = before is not None and (before.dtype, before.shape) == (now.dtype, now.shape)
        return (before, False) if same and before.tobytes() == now.tobytes() else (now.copy(order="K"), True)
    name, about, inside = parts
    old, differs = None if before is None else parts_of(before), False
    if old is None or old[1] != about or len(old[2]) != len(inside):
        old, differs = ("", None, [None] * len(inside)), True
    items = []
    for known, item in zip(old[2], inside, strict=True):
        if item is not known or type(item) not in ATOMS:
            item, moved = advance(known, item)
            differs = differs or moved
        items.append(item)
    if not differs:
        return before, False
    try:
        return MAKE[name](about, items), True
    except Exception as error:  # of a class of the user's: handed to whoever asks what can be stored
        raise UnstorableError(f"a tensor cannot be copied: {error}", f"a {name} tensor") from error


def is_fixed(value: Any) -> bool:
    """Whether a value is the same as long as it is the same object, by its type and by those inside."""
    kind = type(value)
    return kind in ATOMS or (kind is tuple and all(map(is_fixed, value)))


def copied(value: Any) -> Any:
    """A copy that shares nothing that can change; of what cannot be stored, the value itself."""
    if is_fixed(value):
        return value
    try:
        return advance(None, value)[0]
    except (UnstorableError, RecursionError):
        return value  # it will be left out of what is saved, and that is said


def differ(before: Any, now: Any) -> bool:
    """Whether `now` is another value than `before`; of what cannot be stored, whether it is another object."""
    try:
        return now is not before and advance(before, now)[1]
    except (UnstorableError, RecursionError):
        return True


def _same_keys(known: Any, now: Any) -> bool:
    return len(known) == len(now) and (
        all(map(is_, known, now))
        or not any(old is not key and advance(old, key)[1] for old, key in zip(known, now, strict=True))
    )


def _advance_leaf(before: Any, now: Any) -> tuple[Any, bool]:
    """`advance` for what has no parts. DTensors are welcome: hyperparameters of their kind lie with their parameter."""
    if not isinstance(now, torch.Tensor):
        text = _text(now)  # equal sets may hold 1 and True, and equal times may be of different zones
        same = before is not None and text == _text(before)
        return (before, False) if same else (_made_anew(now), True)
    if what := problem_of(local_of(now)):
        raise UnstorableError(f"a tensor {what}", f"a tensor that {what}")
    form = None if before is None else (before.shape, before.dtype, before.device)
    if form == (now.shape, now.dtype, now.device) and bytes_in(before) == bytes_in(now):
        return before, False
    try:
        return now.detach().clone(), True
    except RuntimeError as error:  # integers of less than a byte: NotImplementedError in newer releases
        raise UnstorableError(f"a tensor cannot be copied: {error}", f"a tensor of {now.dtype}") from error


def _made_anew(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return type(value)([*value])  # of a set it would have another order
    return bytearray(value) if isinstance(value, bytearray) else value


def disordered(value: Any) -> bool:
    """Whether there is a set in it whose order cannot be restored."""
    kind = type(value)
    if kind is set or kind is frozenset:
        return loses_order(value)
    if kind in DICTS:
        return any(type(one) not in ATOMS and disordered(one) for one in value.values())
    return kind in (list, tuple, deque) and any(type(one) not in ATOMS and disordered(one) for one in value)


UNORDERED = "holds a set whose order cannot be restored: sort it where its order matters"


def _other_bits(before: Any, now: Any) -> bool:
    """Whether two atoms of one type differ. As floats go, 0.0 equals -0.0, and a NaN does not equal itself."""
    if now == before:
        return type(now) is float and not now and math.copysign(1, now) != math.copysign(1, before)
    return bool(now == now or pack(before) != pack(now))


def _text(value: Any) -> str:
    """The value as it would be stored. Packed values alone may be equal where 1 is not True, or 0.0 is not -0.0."""
    return json.dumps(pack(value))


def put_gradient(parameter: torch.Tensor, data: torch.Tensor) -> None:
    """Make `data` the gradient of `parameter`; into the one that is there, if it fits: it may be a view."""
    gradient = parameter.grad
    if gradient is not None and _form(gradient) == _form(data):
        gradient.detach().copy_(data)
    else:
        parameter.grad = data


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.layout


_ARRAY_KINDS = NUMPY_KINDS | {"U", "S"}
ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_NESTED = (dict, list, tuple, deque, Mapping)
_SINGLE = ATOMS | {torch.Tensor, torch.nn.Parameter}
_CURRENT = "current"
_TRACEABLE = "traceable"


Parts = tuple[str, Any, Sequence[Any]]
"""What is stored in a value's place: its kind, plain values about it, and any values inside; of dicts pairs."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor found in a value: the name it is stored under, and where it was, for messages."""

    name: str
    path: str
    tensor: torch.Tensor
    box: ShardBox | None = None
    """Which part of a whole a plain tensor is, where that is known: a moment is the part that its parameter is."""


# ---------------------------------------------------------------------- trees


def take_apart(
    value: Any, name: str, path: str, home: torch.device | None = None, *, sharded: bool = False
) -> tuple[Tree, list[NamedTensor]]:
    """Tree of `value` and the tensors in it, named `name` or `name`.key.key...

    home: the device of the parameter that the value belongs to; tensors elsewhere ("step" counters stay on the CPU)
    are marked. sharded: the value belongs to a sharded parameter and may hold DTensors.
    Raises UnstorableError with the `path` of the first part that cannot be stored.

    >>> take_apart({"lr": torch.tensor(0.1), "betas": (0.9, 0.999)}, "g", "param_groups[0]")[0]["dict"]
    [['lr', {'tensor': 'g.lr', 'dtype': 'float32', 'shape': []}], ['betas', {'plain': (0.9, 0.999)}]]
    """
    found: dict[str, NamedTensor] = {}

    def node(value: Any, name: str, path: str, levels: int) -> Tree:
        if type(value) in ATOMS or levels < 0 or not (isinstance(value, _TORCHS) or _takes_a_tree(value, levels)):
            refuse_unstorable(value, path, levels)
            return {"plain": value}
        parts = parts_of(value)
        if parts is None:
            if isinstance(value, torch.Tensor):
                return leaf(value, name, path)
            raise unstorable(value, path, "" if isinstance(value, _TORCHS) else " with tensors inside")
        kind, about, inside = parts
        refuse_unstorable(about, path)
        nodes: list[Any] = []
        paired = kind in PAIRS
        for place, one in enumerate(inside):
            key, item = one if paired else (place, one)
            refuse_unstorable(key, f"{path} key")
            at = key if type(key) in (str, int) else place
            made = node(item, f"{name}.{at}", f"{path}[{key!r}]", levels - 1)
            nodes.append([key, made] if paired else made)
        return node_of(kind, about, nodes)

    def leaf(tensor: torch.Tensor, name: str, path: str) -> Tree:
        refuse_unsupported(tensor, path, sharded=sharded)
        # Keys that differ may read alike ("1" and 1, or a dot inside), and a name has to be text that can be printed.
        stored = unique = name if name.isprintable() else "".join(map(_printable, name))
        number = 2
        while unique in found:
            unique, number = f"{stored}~{number}", number + 1
        found[unique] = NamedTensor(unique, path, tensor)
        tree: Tree = {"tensor": unique, "dtype": dtype_name(tensor.dtype), "shape": list(local_of(tensor).shape)}
        if is_dtensor(tensor):
            tree |= {"placements": placements_to_json(tensor), "global_shape": list(tensor.shape)}
        if isinstance(tensor, torch.nn.Parameter):
            tree["parameter"] = tensor.requires_grad
        if home is not None and tensor.device != home:
            tree["apart"] = "cpu"
        return tree

    return node(value, name, path, DEPTH_MAX), list(found.values())


def _printable(one: str) -> str:
    return one if one.isprintable() else one.encode("unicode_escape").decode()


def leaves_of(value: Any, depth: int = DEPTH_MAX) -> list[Any]:
    """What is inside of dicts, lists, tuples and deques, down to so many levels; values, no keys."""
    if not depth or not isinstance(value, _NESTED) or isinstance(value, torch.Size):
        return [value]
    found: list[Any] = []
    for one in value.values() if isinstance(value, dict | Mapping) else value:
        if type(one) in _SINGLE:
            found.append(one)
        else:
            found += leaves_of(one, depth - 1)
    return found


def _takes_a_tree(value: Any, levels: int) -> bool:
    return any(
        type(one) not in ATOMS
        and (isinstance(one, _TORCHS) or (isinstance(one, set | frozenset) and _takes_a_tree([*one], levels)))
        for one in leaves_of(value, levels)
    )


def tensor_nodes(tree: Tree, where: str) -> dict[str, Tree]:
    """Name -> node of every tensor in a tree, in order. FormatError for a foreign tree.

    MismatchError if something in it cannot be made in this process.
    """
    nodes: dict[str, Tree] = {}
    folded(
        tree,
        lambda node: nodes.setdefault(node["tensor"], node),
        lambda kind, about, _: _refuse_missing_class(kind, about, where),
        where,
    )
    return nodes


def put_together(tree: Tree, tensor_of: Callable[[Tree], torch.Tensor], where: str) -> Any:
    """What `take_apart` took apart; `tensor_of(node)` supplies the tensors.

    FormatError for a foreign tree, or of a device that is not here; MismatchError where a class is not here.
    """

    def leaf(node: Tree) -> torch.Tensor:
        tensor = tensor_of(node)
        if "parameter" in node:
            return torch.nn.Parameter(tensor, requires_grad=bool(node["parameter"]))
        return tensor

    def made(kind: str, about: Any, inside: list[Any]) -> Any:
        _refuse_missing_class(kind, about, where)
        try:
            return MAKE[kind](about, inside)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
            raise FormatError(
                f"{where} holds a {kind!r} that cannot be made here ({error!r}): damaged, written by a newer "
                "lastwords, or of a device that this process does not have"
            ) from error

    return folded(tree, leaf, made, where)


def out_of(tensors: Mapping[str, tuple[Any, bytes]], where: str) -> Callable[[Tree], torch.Tensor]:
    """For `put_together`: tensors out of their shapes and bytes, by name. FormatError for those that are damaged."""

    def tensor_of(node: Tree) -> torch.Tensor:
        try:
            data = bytearray(tensors[node["tensor"]][1])
            return tensor_over(data, dtype_named(node["dtype"]), tuple(node["shape"]))
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise FormatError(f"{where} holds a tensor that is damaged: {error!r}") from error

    return tensor_of


# ---------------------------------------------------------------------- kinds


def parts_of(value: Any) -> Parts | None:
    """Parts of a container or an object of these kinds; None for any other value."""
    kind = _BY_TYPE.get(type(value))
    if kind is None:
        return _of_traceable(value) or _of_sparse(value) if isinstance(value, torch.Tensor) else None
    name, _, apart, _ = kind
    parts = apart(value)
    return None if parts is None else (name, *parts)


def _of_array(array: np.ndarray[Any, Any]) -> tuple[Any, Sequence[Any]] | None:
    if array.dtype.kind not in _ARRAY_KINDS:
        return None
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    flat = array.ravel(order=order)  # type: ignore[arg-type]
    if not flat.flags.writeable:
        flat = flat.copy()  # torch warns of memory that must not be written to
    if flat.dtype.isnative and isinstance(getattr(torch, flat.dtype.name, None), torch.dtype):
        elements = torch.from_numpy(flat)
    else:
        elements = torch.from_numpy(flat.view(np.uint8) if flat.dtype.itemsize else np.empty(0, np.uint8))
    return [array.dtype.str, list(array.shape), order], [elements]


def _array(about: Any, inside: Sequence[Any]) -> np.ndarray[Any, Any]:
    text, shape, order = about
    dtype = numpy_dtype(text, _ARRAY_KINDS)
    if order not in ("C", "F"):
        raise ValueError(order)
    [elements] = inside
    memory = elements.detach().cpu().contiguous().numpy()
    if not dtype.itemsize or not math.prod(shape):
        return np.empty(shape, dtype, order=order)
    array: np.ndarray[Any, Any] = memory.view(np.uint8).view(dtype).copy().reshape(shape, order=order)
    return array


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
    """None as well where a function has made the class: its name does not lead to it."""
    if not (names := inner_names(tensor)):
        return None
    kind = type(tensor)
    about = [kind.__module__, kind.__qualname__, names, list(tensor.shape), list(tensor.stride())]
    if _class_of(about) is not kind:
        return None
    _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return _TRACEABLE, about, [*(getattr(tensor, name) for name in names), context]


def _traceable(about: Any, inside: Sequence[Any]) -> torch.Tensor:
    _, _, names, size, stride = about
    *tensors, context = inside
    kind: Any = _class_of(about)
    made: torch.Tensor = kind.__tensor_unflatten__(
        dict(zip(names, tensors, strict=True)), context, torch.Size(size), tuple(stride)
    )
    return made


def _class_of(about: Any) -> type[Any] | None:
    """The traceable class of this name, in a module that this process has imported by itself; None if there is none."""
    try:
        module, name, *_ = about
        found: Any = sys.modules[module]
        for part in name.split("."):
            found = getattr(found, part)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return found if _is_traceable(found) else None


def _refuse_missing_class(kind: Any, about: Any, where: str) -> None:
    if kind == _TRACEABLE and isinstance(about, list) and _class_of(about) is None:
        name = ".".join(map(str, about[:2]))
        raise MismatchError(
            f"{where} holds a {name}, and no module that has been imported here has a traceable tensor class of that "
            "name; import it before resume()",
            different={where: name},
        )


_INSIDE: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


def _of_sparse(tensor: torch.Tensor) -> Parts | None:
    if (names := _INSIDE.get(tensor.layout)) is None:
        return None
    tensor = tensor.detach()
    inside = [getattr(tensor, name)() for name in names]
    if tensor.layout is torch.sparse_coo:
        return "sparse_coo", [[*tensor.shape], tensor.is_coalesced()], inside
    return "sparse_compressed", [[*tensor.shape], dtype_name(tensor.layout)], inside


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


def _of_default(value: defaultdict[Any, Any]) -> tuple[Any, Sequence[Any]] | None:
    factory = value.default_factory
    return (factory and factory.__name__, [dict(value)]) if is_factory(factory) else None


_NAMES = (torch.dtype, torch.layout, torch.memory_format)

_KINDS: tuple[tuple[str, Any, Any, Callable[[Any, Sequence[Any]], Any]], ...] = (
    ("plain", None, None, lambda about, inside: about),
    ("list", list, lambda value: (None, value), lambda about, inside: [*inside]),
    ("tuple", tuple, lambda value: (None, value), lambda about, inside: (*inside,)),
    ("dict", dict, lambda value: (None, [*value.items()]), lambda about, inside: dict(inside)),
    ("ordered", OrderedDict, lambda value: (None, [*value.items()]), lambda about, inside: OrderedDict(inside)),
    ("counter", Counter, lambda value: (None, [dict(value)]), lambda about, inside: Counter(*inside)),
    ("defaultdict", defaultdict, _of_default, lambda about, inside: defaultdict(about and FACTORIES[about], *inside)),
    ("deque", deque, lambda value: (value.maxlen, value), lambda about, inside: deque(inside, about)),
    ("ndarray", np.ndarray, _of_array, _array),
    ("sparse_coo", None, None, _coo),
    ("sparse_compressed", None, None, _compressed),
    (_TRACEABLE, None, None, _traceable),
    ("generator", torch.Generator, lambda value: (_device_name(value.device), [value.get_state()]), _generator),
    ("device", torch.device, lambda value: (_device_name(value), []), _device),
    ("size", torch.Size, lambda value: ([*value], []), lambda about, inside: torch.Size(about)),
    *((kind.__name__, kind, lambda value: (dtype_name(value), []), _named(kind)) for kind in _NAMES),
)
"""Name; type, and how a value of it is taken apart (None: see `parts_of`); how it is made again of these parts."""
_BY_TYPE = {kind[1]: kind for kind in _KINDS if kind[1] is not None}
MAKE = {name: make for name, _, _, make in _KINDS}

_TORCHS = (torch.Tensor, np.ndarray, torch.Generator, torch.device, torch.Size, *_NAMES)
"""What takes a tree to be stored wherever it is, and their kin that cannot be stored."""
