"""What is in an optimizer's state and groups, as trees and tensors; what cannot be stored is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from lastwords.checkpoint.entries import folded, node_of
from lastwords.checkpoint.layout import unit_tensor_name
from lastwords.checkpoint.meta import Tree
from lastwords.errors import UnstorableError
from lastwords.optim_wrapper.tensors.tensor_tree import NamedTensor, take_apart
from lastwords.optim_wrapper.tensors.value_copies import copied
from lastwords.sharding.dtensor import Box, is_dtensor, local_of


@dataclass(slots=True)
class OptimizerTrees:
    """What has been taken out of an optimizer so far. left_out: (state's name, key, or None for all of it)."""

    unit: str
    tensors: list[NamedTensor] = field(default_factory=list)
    left_out: list[tuple[str, str | None]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def leave_out(self, reason: str, name: str, key: str | None) -> None:
        self.left_out.append((name, key))
        self.reasons.append(f"{reason} cannot be stored")

    def dict_tree(self, value: dict[str, Any], name: str, path: str, parameter: torch.Tensor | None) -> Tree:
        pairs = []
        for key, item in list(value.items()):
            problem = (
                "" if is_usual_key(key) else ("is empty or contains '/'" if type(key) is str else "is not a string")
            )
            if problem:
                self.leave_out(f"{path}[{key!r}] (its name {problem})", name, str(key))
                continue
            try:
                stored = unit_tensor_name(self.unit, "optim", name, key)
                pairs.append([key, self.tree(item, stored, f"{path}[{key!r}]", parameter)])
            except UnstorableError as error:
                self.leave_out(error.reason, name, key)
        return {"dict": pairs}

    def tree(self, value: Any, stored: str, path: str, parameter: torch.Tensor | None) -> Tree:
        home = None if parameter is None else parameter.device
        sharded = parameter is not None and is_dtensor(parameter)
        node, found = take_apart(value, stored, path, home, sharded=sharded)
        if sharded:
            _refuse_other_mesh(parameter, found)
        self.tensors += found
        return _unshared(node, path)


def shared_in(
    tensors: Sequence[NamedTensor], elsewhere: Iterable[torch.Tensor] = ()
) -> tuple[dict[str, str], list[str]]:
    """Name of each tensor that lies where another one lies -> that one's name; and reasons why the rest is not exact.

    The rest lies partly in another one's memory, or in that of a tensor `elsewhere`, which is in no file or another.
    """
    places = {item.name: _place_of(item.tensor) for item in tensors}
    first: dict[Any, NamedTensor] = {}
    shared = {
        item.name: first[place].name
        for item in tensors
        if (place := places[item.name]) is not None and first.setdefault(place, item) is not item
    }
    spans = sorted((place[0], place[1], item.path) for place, item in first.items())
    reasons = [
        f"{one} and {other} share part of their memory, but will not after a resume"
        for (_, end, one), (begin, _, other) in pairwise(spans)
        if begin < end
    ]
    outside = {place[:2] for tensor in elsewhere if (place := _place_of(tensor)) is not None}
    reasons += [
        f"{item.path} shares memory with state of another unit, but will not after a resume"
        for place, item in first.items()
        if place[:2] in outside
    ]
    return shared, reasons


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """First byte, the one behind the last, and what else two tensors have to have in common to be the same."""
    local = local_of(tensor)
    if local.layout is not torch.strided or not local.numel() or local.device.type == "meta":
        return None
    extent = 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    begin = local.data_ptr()
    form = tuple(local.shape), local.stride(), str(local.dtype), str(local.device)
    return (begin, begin + extent * local.element_size(), *form) if begin else None


def _unshared(tree: Tree, path: str) -> Tree:
    """With copies of plain lists and dicts: a step's copy in the host's memory outlives the next update."""

    def made(kind: str, about: Any, inside: list[Any]) -> Tree:
        return node_of(kind, copied(about) if kind == "plain" else about, inside)

    return folded(tree, dict, made, path)  # type: ignore[no-any-return]


def generators_in(tree: Tree) -> set[str]:
    """Names of the tensors in a tree that are states of random generators.

    >>> generators_in({"object": ["generator", "cpu", [{"tensor": "noise.0", "dtype": "uint8"}]]})
    {'noise.0'}
    """
    found: set[str] = set()

    def made(kind: str, about: Any, inside: list[Any]) -> None:
        found.update(inside if kind == "generator" else ())

    folded(tree, lambda node: node["tensor"], made, "the optimizer's state")
    return found


def is_usual(key: Any, state: Any) -> bool:
    """Whether state has the form that torch's optimizers give it, which every layout and every tool understands."""
    return type(state) is dict and (type(key) is str or isinstance(key, torch.Tensor)) and all(map(is_usual_key, state))


def is_usual_key(key: Any) -> bool:
    """Whether a tensor can be named after this key."""
    return type(key) is str and key != "" and "/" not in key


def placed(item: NamedTensor, state: dict[str, Any], box: Box) -> NamedTensor:
    """A moment, which has its parameter's shape, is the part that its parameter is; a counter is no part."""
    moment = tuple(item.tensor.shape) == box.shape
    moment = moment and any(value is item.tensor and key != "step" for key, value in state.items())
    return replace(item, box=box) if moment else item


def _refuse_other_mesh(parameter: Any, found: list[NamedTensor]) -> None:
    for item in found:
        tensor: Any = item.tensor
        if is_dtensor(tensor) and tensor.device_mesh != parameter.device_mesh:
            what = f"on the mesh {tensor.device_mesh}, its parameter on {parameter.device_mesh}"
            raise UnstorableError(
                f"{item.path} is {what}; such an optimizer's state cannot be stored", f"{item.path} ({what})"
            )
