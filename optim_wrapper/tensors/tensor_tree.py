"""Nested Python values with tensors in them, taken apart for storage and put together again, exactly.

A value becomes a *tree*: the same nesting in plain Python (see `lastwords.checkpoint.storable`), where each
tensor is replaced by its name. A node is a dictionary with one tag:

    {"plain": value}                  no tensor anywhere inside
    {"tensor": name, "dtype": ..., "shape": ...}   one tensor, stored beside the tree under `name`;
                            a DTensor's node has its "placements" and "global_shape" too, "shape" is of this rank's part
    {"list" | "tuple": [nodes]}
    {"dict" | "ordered": [[key, node], ...]}
    {"object": [kind, about, [nodes]]}   see `tree_objects`
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lastwords.checkpoint.storable import DEPTH_MAX, refuse_unstorable, unstorable
from lastwords.errors import FormatError
from lastwords.optim_wrapper.tensors.tensor_bytes import dtype_name, refuse_unsupported
from lastwords.optim_wrapper.tensors.tree_objects import Parts, is_object, made_of, parts_of, refuse_missing_class
from lastwords.sharding.dtensor import Box, is_dtensor, local_of, placements_to_json

Tree = dict[str, Any]

_ATOMS = (type(None), bool, int, float, str, bytes)


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor found in a value: the name it is stored under, and where it was, for messages."""

    name: str
    path: str
    tensor: torch.Tensor
    box: Box | None = None
    """Which part of a whole a plain tensor is, where that is known: a moment is the part that its parameter is."""


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
    tree = _take_apart(value, name, path, found, 0, sharded)
    if home is not None and any(item.tensor.device != home for item in found.values()):
        apart = {item.name for item in found.values() if item.tensor.device != home}
        _each_tensor(tree, lambda name, node: node.update(apart="cpu") if name in apart else None, path)
    return tree, list(found.values())


def _take_apart(value: Any, name: str, path: str, found: dict[str, NamedTensor], depth: int, sharded: bool) -> Tree:
    if depth > DEPTH_MAX or not _holds_tensor(value, depth):
        refuse_unstorable(value, path, DEPTH_MAX - depth)
        return {"plain": value}
    parts = parts_of(value)
    if parts is not None:
        return _object(parts, name, path, found, depth, sharded)
    if isinstance(value, torch.Tensor):
        return _leaf(value, name, path, found, sharded)
    kind = type(value)
    if kind is list or kind is tuple:
        return {kind.__name__: _nodes(value, name, path, found, depth, sharded)}
    if kind is dict or kind is OrderedDict:
        pairs = []
        for place, (key, item) in enumerate(value.items()):
            refuse_unstorable(key, f"{path} key")
            inner = f"{name}.{key if type(key) in (str, int) else place}"
            pairs.append([key, _take_apart(item, inner, f"{path}[{key!r}]", found, depth + 1, sharded)])
        return {"dict" if kind is dict else "ordered": pairs}
    raise unstorable(value, path, "" if is_object(value) else " with tensors inside")


def _leaf(tensor: torch.Tensor, name: str, path: str, found: dict[str, NamedTensor], sharded: bool) -> Tree:
    refuse_unsupported(tensor, path, sharded=sharded)
    # Keys that differ may read alike ("1" and 1, or a dot inside), and a name has to be text that can be printed.
    stored = unique = name if name.isprintable() else "".join(map(_printable, name))
    number = 2
    while unique in found:
        unique, number = f"{stored}~{number}", number + 1
    found[unique] = NamedTensor(unique, path, tensor)
    node: Tree = {"tensor": unique, "dtype": dtype_name(tensor.dtype), "shape": list(local_of(tensor).shape)}
    if is_dtensor(tensor):
        node |= {"placements": placements_to_json(tensor), "global_shape": list(tensor.shape)}
    if isinstance(tensor, torch.nn.Parameter):
        node["parameter"] = tensor.requires_grad
    return node


def _printable(one: str) -> str:
    return one if one.isprintable() else one.encode("unicode_escape").decode()


def _object(parts: Parts, name: str, path: str, found: dict[str, NamedTensor], depth: int, sharded: bool) -> Tree:
    refuse_unstorable(parts.about, path)
    return {"object": [parts.kind, parts.about, _nodes(parts.inside, name, path, found, depth, sharded)]}


def _nodes(
    values: Sequence[Any], name: str, path: str, found: dict[str, NamedTensor], depth: int, sharded: bool
) -> list[Tree]:
    return [
        _take_apart(item, f"{name}.{index}", f"{path}[{index}]", found, depth + 1, sharded)
        for index, item in enumerate(values)
    ]


def _holds_tensor(value: Any, depth: int) -> bool:
    """Whether it takes a tree to store this: there is a tensor somewhere inside, or one of `tree_objects`."""
    if isinstance(value, _ATOMS) or depth > DEPTH_MAX:
        return False
    if isinstance(value, torch.Tensor) or is_object(value):
        return True
    if isinstance(value, Mapping):
        return any(_holds_tensor(item, depth + 1) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return any(_holds_tensor(item, depth + 1) for item in value)
    return False


def tensor_nodes(tree: Tree, where: str) -> dict[str, Tree]:
    """Name -> node of every tensor in a tree, in order. FormatError for a foreign tree."""
    nodes: dict[str, Tree] = {}
    _each_tensor(tree, nodes.__setitem__, where)
    return nodes


def put_together(tree: Tree, tensor_of: Callable[[str], torch.Tensor], where: str) -> Any:
    """What `take_apart` took apart; `tensor_of(name)` supplies the tensors. FormatError for a foreign tree."""

    def leaf(name: str, node: Tree) -> torch.Tensor:
        tensor = tensor_of(name)
        if "parameter" in node:
            return torch.nn.Parameter(tensor, requires_grad=bool(node["parameter"]))
        return tensor

    return _put_together(tree, leaf, where, made_of)


def refuse_missing_classes(tree: Tree, where: str) -> None:
    """MismatchError if something in a tree cannot be made in this process; FormatError for a foreign tree."""
    _put_together(
        tree, lambda name, node: None, where, lambda kind, about, _, at: refuse_missing_class(kind, about, at)
    )


def filled(tree: Tree, leaf: Callable[[str, Tree], Any], where: str) -> Any:
    """The value of a tree with `leaf(name, node)` in each tensor's place. FormatError for a foreign tree.

    An object (an array, say) is not made: the list of what is inside stands in its place, or what is known about it.
    """
    return _put_together(tree, leaf, where, lambda _kind, about, inside, _where: inside or about)


def _each_tensor(tree: Tree, see: Callable[[str, Tree], object], where: str) -> None:
    filled(tree, see, where)


def _put_together(
    tree: Any, leaf: Callable[[str, Tree], Any], where: str, made: Callable[[Any, Any, list[Any], str], Any]
) -> Any:
    if not isinstance(tree, dict) or not tree:
        raise FormatError(f"{where} is not a tree of values: damaged, or written by a newer lastwords")
    if "tensor" in tree:
        if not isinstance(tree["tensor"], str) or not isinstance(tree.get("dtype"), str):
            raise FormatError(f"{where} names no tensor: damaged, or written by a newer lastwords")
        return leaf(tree["tensor"], tree)
    [(tag, body)] = tree.items() if len(tree) == 1 else [("several tags", None)]
    if tag == "plain":
        return body
    if tag in ("list", "tuple") and isinstance(body, list):
        items = [_put_together(item, leaf, where, made) for item in body]
        return items if tag == "list" else tuple(items)
    if tag in ("dict", "ordered") and isinstance(body, list) and all(isinstance(p, list) and len(p) == 2 for p in body):
        pairs = [(key, _put_together(item, leaf, where, made)) for key, item in body]
        return dict(pairs) if tag == "dict" else OrderedDict(pairs)
    if tag == "object" and isinstance(body, list) and len(body) == 3 and isinstance(body[2], list):
        kind, about, nodes = body
        return made(kind, about, [_put_together(item, leaf, where, made) for item in nodes], where)
    raise FormatError(f"{where} holds an unknown kind of value {tag!r}: damaged, or written by a newer lastwords")
