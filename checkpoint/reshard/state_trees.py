"""Trees of values, as `optim_wrapper.tensors.tensor_tree` makes them, walked without torch: their tensors by name.

A node is a dictionary with one tag; see there. Only names and shapes matter here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lastwords.checkpoint.meta import Tree
from lastwords.errors import FormatError


def mapped(tree: Any, leaf: Callable[[Tree], Tree], where: str) -> Tree:
    """The same tree with `leaf(node)` in each tensor's place. FormatError for a foreign tree.

    >>> mapped({"list": [{"plain": 1}, {"tensor": "a"}]}, lambda node: {**node, "tensor": "b"}, "here")
    {'list': [{'plain': 1}, {'tensor': 'b'}]}
    """
    if not isinstance(tree, dict) or not tree:
        raise FormatError(f"{where} is not a tree of values: damaged, or written by a newer lastwords")
    if "tensor" in tree:
        if not isinstance(tree["tensor"], str) or not isinstance(tree.get("shape", []), list):
            raise FormatError(f"{where} names no tensor: damaged, or written by a newer lastwords")
        return leaf(tree)
    [(tag, body)] = tree.items() if len(tree) == 1 else [("several tags", None)]
    if tag == "plain":
        return {"plain": body}
    if tag in ("list", "tuple") and isinstance(body, list):
        return {tag: [mapped(item, leaf, where) for item in body]}
    if tag in ("dict", "ordered") and isinstance(body, list) and all(isinstance(p, list) and len(p) == 2 for p in body):
        return {tag: [[key, mapped(item, leaf, where)] for key, item in body]}
    if tag == "object" and isinstance(body, list) and len(body) == 3 and isinstance(body[2], list):
        return {tag: [body[0], body[1], [mapped(item, leaf, where) for item in body[2]]]}
    raise FormatError(f"{where} holds an unknown kind of value {tag!r}: damaged, or written by a newer lastwords")


def renamed(tree: Any, name: Callable[[str], str], where: str) -> Tree:
    """The same tree, its tensors under other names."""
    return mapped(tree, lambda node: {**node, "tensor": name(node["tensor"])}, where)


def leaves(tree: Any, where: str) -> Iterator[Tree]:
    """Every tensor's node, in order."""
    found: list[Tree] = []

    def see(node: Tree) -> Tree:
        found.append(node)
        return node

    mapped(tree, see, where)
    yield from found


def without_names(tree: Any, where: str) -> Tree:
    """What two trees of equal values have in common: equal, but for the tensors' content."""
    return renamed(tree, lambda _: "", where)


def keys_of(tree: Any, where: str) -> dict[str, Any]:
    """Key -> node of a tree that is a dictionary with text keys."""
    pairs = tree.get("dict") if isinstance(tree, dict) else None
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise FormatError(f"{where} is not a dictionary: damaged, or written by a newer lastwords")
    return {str(key): node for key, node in pairs}
