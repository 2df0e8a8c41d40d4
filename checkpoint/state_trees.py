"""Trees: nested Python values in which tensors are named, in the form in which they are stored; walked without torch.

A node is a dictionary with one tag:

    {"plain": value}                  no tensor anywhere inside (see `storable`)
    {"tensor": name, "dtype": ..., "shape": ...}   one tensor, stored beside the tree under `name`;
                            a DTensor's node has its "placements" and "global_shape" too, "shape" is of this rank's part
    {"list" | "tuple": [nodes]}
    {"dict" | "ordered": [[key, node], ...]}
    {"object": [kind, about, [nodes]]}   see `optim_wrapper.tensors.tensor_tree`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lastwords.checkpoint.meta import Tree
from lastwords.errors import FormatError

PAIRS = ("dict", "ordered")
"""Kinds in which there are pairs of a key and what it leads to."""
OWN_TAGS = ("plain", "list", "tuple", *PAIRS)


def node_of(kind: str, about: Any, inside: list[Any]) -> Tree:
    """The node of what is of this kind. about: plain values; the value itself if all is plain. inside: see `folded`."""
    if kind == "plain":
        return {kind: about}
    return {kind: inside} if kind in OWN_TAGS else {"object": [kind, about, inside]}


def folded(tree: Any, leaf: Callable[[Tree], Any], made: Callable[[Any, Any, list[Any]], Any], where: str) -> Any:
    """What `made(kind, about, inside)` makes of the nodes, the innermost first. FormatError for a foreign tree.

    leaf: makes something of a tensor's node. inside: what has been made of the nodes there, or pairs of key and that.

    >>> folded({"list": [{"plain": 1}, {"plain": 2}]}, dict, lambda kind, about, inside: about or sum(inside), "here")
    3
    """
    if isinstance(tree, dict) and "tensor" in tree:
        name, dtype, shape = tree["tensor"], tree.get("dtype"), tree.get("shape", [])
        if not (isinstance(name, str) and isinstance(dtype, str) and isinstance(shape, list)):
            raise FormatError(f"{where} names no tensor: damaged, or written by a newer lastwords")
        return leaf(tree)
    kind, about, keys, nodes = _opened(tree, where)
    inside = [folded(node, leaf, made, where) for node in nodes]
    return made(kind, about, inside if keys is None else [[key, one] for key, one in zip(keys, inside, strict=True)])


def _opened(tree: Any, where: str) -> tuple[str, Any, list[Any] | None, list[Any]]:
    """Kind of a node, what is said about it, its keys if it has any, and the nodes inside."""
    try:
        [(tag, body)] = tree.items()
        if tag == "plain":
            return tag, body, None, []
        kind, about, inside = body if tag == "object" else (tag, None, body)
        if (kind in OWN_TAGS) is (tag == "object") or not isinstance(kind, str) or not isinstance(inside, list):
            raise TypeError(tag)
        if tag not in PAIRS:
            return kind, about, None, inside
        keys = [key for key, _ in inside]
        hash((*keys,))
        return kind, about, keys, [node for _, node in inside]
    except (AttributeError, TypeError, ValueError) as error:
        what = f"is not a tree of values, or of an unknown kind ({error!r:.80})"
        raise FormatError(f"{where} {what}: damaged, or written by a newer lastwords") from error


def renamed(tree: Any, name: Callable[[str], str], where: str) -> Tree:
    """The same tree, its tensors under other names. FormatError for a foreign tree.

    >>> renamed({"list": [{"plain": 1}, {"tensor": "a", "dtype": "int8"}]}, str.upper, "here")
    {'list': [{'plain': 1}, {'tensor': 'A', 'dtype': 'int8'}]}
    """
    tree = folded(tree, lambda node: {**node, "tensor": name(node["tensor"])}, node_of, where)
    return tree  # type: ignore[no-any-return]


def leaves(tree: Any, where: str) -> list[Tree]:
    """Every tensor's node, in order. FormatError for a foreign tree."""
    found: list[Tree] = []
    folded(tree, found.append, lambda kind, about, inside: None, where)
    return found


def without_names(tree: Any, where: str) -> Tree:
    """What two trees of equal values have in common: equal, but for the tensors' content."""
    return renamed(tree, lambda _: "", where)


def keys_of(tree: Any, where: str) -> dict[str, Any]:
    """Key -> node of a tree that is a dictionary with text keys."""
    pairs = tree.get("dict") if isinstance(tree, dict) else None
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise FormatError(f"{where} is not a dictionary: damaged, or written by a newer lastwords")
    return {str(key): node for key, node in pairs}
