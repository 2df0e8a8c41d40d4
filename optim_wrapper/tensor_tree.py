"""Nested Python values with tensors in them, taken apart for storage and put together again, exactly.

A value becomes a *tree*: the same nesting in plain Python (see `lastwords.checkpoint.storable`), where each
tensor is replaced by its name. A node is a dictionary with one tag:

    {"plain": value}                  no tensor anywhere inside
    {"tensor": name, "dtype": ..., "shape": ...}   one tensor, stored beside the tree under `name`;
                            a DTensor's node has its "placements" and "global_shape" too, "shape" is of this rank's part
    {"list" | "tuple": [nodes]}
    {"dict" | "ordered": [[key, node], ...]}
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lastwords.checkpoint.storable import refuse_unstorable
from lastwords.errors import ConfigError, FormatError
from lastwords.optim_wrapper.tensor_bytes import dtype_name, refuse_unsupported
from lastwords.sharding.dtensor import Box, is_dtensor, local_of, placements_to_json

Tree = dict[str, Any]

_DEPTH_MAX = 32
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
    Raises ConfigError with the `path` of the first part that cannot be stored.

    >>> take_apart({"lr": torch.tensor(0.1), "betas": (0.9, 0.999)}, "g", "param_groups[0]")[0]["dict"]
    [['lr', {'tensor': 'g.lr', 'dtype': 'float32', 'shape': []}], ['betas', {'plain': (0.9, 0.999)}]]
    """
    found: list[NamedTensor] = []
    tree = _take_apart(value, name, path, found, 0, sharded)
    if home is not None and any(item.tensor.device != home for item in found):
        apart = {item.name for item in found if item.tensor.device != home}
        _each_tensor(tree, lambda name, node: node.update(apart="cpu") if name in apart else None, path)
    return tree, found


def _take_apart(value: Any, name: str, path: str, found: list[NamedTensor], depth: int, sharded: bool) -> Tree:
    if isinstance(value, torch.Tensor):
        refuse_unsupported(value, path, sharded=sharded)
        found.append(NamedTensor(name, path, value))
        node: Tree = {"tensor": name, "dtype": dtype_name(value.dtype), "shape": list(local_of(value).shape)}
        if is_dtensor(value):
            node |= {"placements": placements_to_json(value), "global_shape": list(value.shape)}
        if isinstance(value, torch.nn.Parameter):
            node["parameter"] = value.requires_grad
        return node
    if depth > _DEPTH_MAX:
        raise ConfigError(f"{path} is nested more than {_DEPTH_MAX} deep, or contains itself")
    if not _holds_tensor(value, 0):
        refuse_unstorable(value, path)
        return {"plain": value}
    kind = type(value)
    if kind is list or kind is tuple:
        items = [
            _take_apart(item, f"{name}.{index}", f"{path}[{index}]", found, depth + 1, sharded)
            for index, item in enumerate(value)
        ]
        return {kind.__name__: items}
    if kind is dict or kind is OrderedDict:
        pairs = []
        for key, item in value.items():
            if type(key) is not str and type(key) is not int:
                raise ConfigError(f"{path} has the key {key!r} beside tensors: only strings and integers can be stored")
            pairs.append([key, _take_apart(item, f"{name}.{key}", f"{path}[{key!r}]", found, depth + 1, sharded)])
        return {"dict" if kind is dict else "ordered": pairs}
    raise ConfigError(
        f"{path} is a {kind.__module__}.{kind.__qualname__} with tensors inside, which cannot be stored exactly; "
        "keep the tensors in plain lists, tuples or dicts"
    )


def _holds_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, _ATOMS) or depth > _DEPTH_MAX:
        return False
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(_holds_tensor(item, depth + 1) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset):
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

    return _put_together(tree, leaf, where)


def filled(tree: Tree, leaf: Callable[[str, Tree], Any], where: str) -> Any:
    """The value of a tree with `leaf(name, node)` in each tensor's place. FormatError for a foreign tree."""
    return _put_together(tree, leaf, where)


def _each_tensor(tree: Tree, see: Callable[[str, Tree], object], where: str) -> None:
    _put_together(tree, see, where)


def _put_together(tree: Any, leaf: Callable[[str, Tree], Any], where: str) -> Any:
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
        items = [_put_together(item, leaf, where) for item in body]
        return items if tag == "list" else tuple(items)
    if tag in ("dict", "ordered") and isinstance(body, list) and all(isinstance(p, list) and len(p) == 2 for p in body):
        pairs = [(key, _put_together(item, leaf, where)) for key, item in body]
        return dict(pairs) if tag == "dict" else OrderedDict(pairs)
    raise FormatError(f"{where} holds an unknown kind of value {tag!r}: damaged, or written by a newer lastwords")
