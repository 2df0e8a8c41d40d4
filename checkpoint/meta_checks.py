"""What the types of `meta` cannot say: trees of values, and tensors that are named and have to be in the file.

A checksum tells that bytes are those which somebody wrote, not that it was this program. Code behind this takes types
and lengths as they should be; what is wrong is told with the file's name and the path of the value, once, here.
Publication never asks: what it wrongly refused would be lost, and what a reader wrongly refuses is still there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lastwords.checkpoint.codec import Number, typed
from lastwords.checkpoint.format import DTYPE_BITS, TYPE_NAMES, TensorSpec
from lastwords.checkpoint.meta import BucketRecord, InlineExtras, LocalMeta, MetaHead, UnitMeta
from lastwords.checkpoint.run_facts import RunFacts
from lastwords.checkpoint.state_trees import leaves
from lastwords.checkpoint.versions import META_VERSION
from lastwords.errors import FormatError

_DTYPE_BYTES = {name: DTYPE_BITS[code] // 8 for code, name in TYPE_NAMES.items()}
_OTHER_BYTES = {"complex32": 4, "complex128": 16}

Names = Mapping[str, TensorSpec]


def unit_problem(said: Mapping[str, Any], tensors: Iterable[TensorSpec], unit: str) -> str | None:
    """First thing in a unit's meta that nobody could use, in words; None if there is none.

    Of another version only what is read before the version is asked for. tensors: those of the unit.
    """
    try:
        typed(said, MetaHead, "meta")
        if said.get("version") == META_VERSION:
            _check_unit(UnitMeta.read(said), {spec.name: spec for spec in tensors}, f"unit/{unit}/")
    except FormatError as error:
        return str(error)
    return None


def local_problem(said: Mapping[str, Any]) -> str | None:
    """As `unit_problem`, of a local state's meta."""
    try:
        meta = LocalMeta.read(said)
        document = meta.document
        for said_by, path in ((document, "meta.slot"), (meta.epoch_document, "meta.epoch_start")):
            said_by.generators_inline(f"{path}.generators")
            for holder, values in said_by.attributes_inline(f"{path}.attributes").items():
                for key, (tree, tensors) in values.items():
                    _check_value(tree, tensors, f"{path}.attributes[{holder!r}][{key!r}]")
        inline = document.extras_inline("meta.slot.local_extras")
        if inline is not None:
            _check_inline(inline, "meta.slot.local_extras")
    except FormatError as error:
        return str(error)
    return None


def facts_problem(facts: Mapping[str, Any]) -> str | None:
    """As `unit_problem`, of a manifest's or a part's facts."""
    try:
        BucketRecord.read(RunFacts.read(facts).buckets or {}, "facts.buckets")
    except FormatError as error:
        return str(error)
    return None


def _wrong(path: str, what: str) -> FormatError:
    return FormatError(f"{path} {what}")


# ---------------------------------------------------------------------- a unit


def _check_unit(meta: UnitMeta, names: Names, prefix: str) -> None:
    for kind, types in (("model", meta.parameters), ("buffer", meta.buffers)):
        for name, dtype in types.items():
            where = "parameters" if kind == "model" else "buffers"
            _stored_as(names, f"{prefix}{kind}/{name}", dtype, None, f"meta.{where}[{name!r}]")
    for index, group in enumerate(meta.groups):
        _check_table(group, names, f"meta.groups[{index}]")
    for name, state in meta.optimizer_state.items():
        path = f"meta.optimizer_state[{name!r}]"
        _check_table(state, names, path)
        _check_state_names(state, f"{prefix}optim/{name}/", path)
    for index, (parameter, key, tree) in enumerate(meta.optimizer_own):
        path = f"meta.optimizer_own[{index}]"
        _check_key(key, path)
        check_tree(tree, names, path)
        if parameter is not None and parameter not in meta.parameters:
            raise _wrong(path, "is of a parameter that the unit does not have")
    _check_every_tensor_is_named(meta, names, f"{prefix}optim/")
    for alias, name in meta.aliases.items():
        if name not in meta.parameters and name not in meta.buffers:
            raise _wrong(f"meta.aliases[{alias!r}]", "is tied to a name that the unit does not have")
    for field_, found in (("group_parameters", meta.group_parameters), ("group_numbers", meta.group_numbers)):
        if len(found) != len(meta.groups):
            raise _wrong(f"meta.{field_}", f"has {len(found)} items for {len(meta.groups)} param groups")
    if meta.extras is not None:
        for name, state in meta.extras.states.items():
            check_tree(state, names, f"meta.extras.states[{name!r}]")
        if not {*meta.extras.step_on_resume} <= meta.extras.states.keys():
            raise _wrong("meta.extras.step_on_resume", "names an extra that does not exist")
    BucketRecord.read(meta.buckets or {}, "meta.buckets")


def _check_state_names(state: Any, prefix: str, path: str) -> None:
    """A tensor of the state has the name that follows from its parameter and key: whoever moves it builds that."""
    for key, node in state["dict"]:
        if "tensor" in node and node["tensor"] != f"{prefix}{key}":
            raise _wrong(f"{path}.{key}", f"is stored as {node['tensor']!r}, not as {prefix + key!r}")


def _check_every_tensor_is_named(meta: UnitMeta, names: Names, prefix: str) -> None:
    """A tensor of the optimizer's state that no tree names would be lost, and nobody would notice.

    A unit that names none at all (`EMPTY_UNIT`) is one of tensors alone.
    """
    own = (tree for _, _, tree in meta.optimizer_own)
    named = {
        leaf["tensor"] for tree in (*meta.groups, *meta.optimizer_state.values(), *own) for leaf in leaves(tree, "meta")
    }
    for name in names:
        if named and name.startswith(prefix) and name not in named:
            raise _wrong("meta.optimizer_state", f"does not name the tensor {name!r}, which is there")


# ---------------------------------------------------------------------- trees of values (see `state_trees`)


def _check_table(tree: Any, names: Names, path: str) -> None:
    """A tree that is a dictionary with text keys."""
    check_tree(tree, names, path)
    if "dict" not in tree:
        raise _wrong(path, "is not a dictionary")
    for key, _ in tree["dict"]:
        if not isinstance(key, str):
            raise _wrong(f"a key of {path}", "is not text")


def check_tree(tree: Any, names: Names | None, path: str) -> None:
    """FormatError unless it is a tree whose tensors are among `names`; None: they are not looked up."""
    for leaf in leaves(tree, path):
        _check_leaf(leaf, names, path)


def _check_key(value: Any, path: str) -> None:
    try:
        hash(value)
    except TypeError:
        raise _wrong(path, "cannot be a key") from None


@dataclass(frozen=True, slots=True)
class _Leaf:
    tensor: str
    dtype: str
    shape: Sequence[Number]
    apart: str = ""
    parameter: bool = False
    placements: Sequence[Any] | None = None
    global_shape: Sequence[Number] | None = None


def _check_leaf(node: dict[str, Any], names: Names | None, path: str) -> None:
    leaf = typed(node, _Leaf, path)
    for index, one in enumerate(leaf.placements or ()):
        _check_placement(one, f"{path}.placements[{index}]")
    if leaf.placements is not None and leaf.global_shape is None:
        raise _wrong(f"{path}.global_shape", "is missing")
    if names is None:
        return
    spec = _stored_as(names, leaf.tensor, leaf.dtype, leaf.shape, path)
    sizes = spec.global_shape[: len(leaf.shape)]
    if leaf.global_shape is not None and tuple(leaf.global_shape) != sizes:
        raise _wrong(f"{path}.global_shape", f"is not that of {leaf.tensor!r}, {sizes}")
    if any(not -len(sizes) <= one[1] < len(sizes) for one in leaf.placements or () if one[0] in ("S", "SS")):
        raise _wrong(f"{path}.placements", "shards a dimension that does not exist")


def _check_placement(value: Any, path: str) -> None:
    """See `sharding.dtensor.placements_to_json`."""
    numbers = {"R": 0, "S": 1, "SS": 2}
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise _wrong(path, "is not a placement")
    if len(value) - 1 != numbers.get(value[0], len(value) - 1):
        raise _wrong(path, f"is not a placement of kind {value[0]!r}")
    if not all(type(number) is int for number in value[1:]):
        raise _wrong(path, "contains values that are not numbers")


def _stored_as(names: Names, name: str, dtype: str, shape: Sequence[int] | None, path: str) -> TensorSpec:
    """The tensor in the file, which has this type and shape; shape None: whatever it is."""
    spec = names.get(name)
    if spec is None:
        raise _wrong(path, f"names the tensor {name!r}, but it is not there")
    own = TYPE_NAMES.get(spec.dtype) == dtype
    # A type that safetensors has no code for is bytes, in one dimension more.
    as_bytes = not own and dtype not in _DTYPE_BYTES and spec.dtype == "U8" and len(spec.shape) > 0
    as_bytes = as_bytes and spec.shape[-1] == _OTHER_BYTES.get(dtype, spec.shape[-1])
    if not own and not as_bytes:
        raise _wrong(path, f"says {dtype}, but {name!r} is {spec.dtype}")
    stored = spec.shape if own else spec.shape[:-1]
    if shape is not None and tuple(shape) != stored:
        raise _wrong(f"{path}.shape", f"is {list(shape)}, but {name!r} has {list(stored)}")
    return spec


# ---------------------------------------------------------------------- a local state


def _check_inline(inline: InlineExtras, path: str) -> None:
    for name, state in inline.tree.states.items():
        _check_value(state, inline.tensors, f"{path}[{name!r}]")


def _check_value(tree: Any, tensors: Mapping[str, tuple[Sequence[int], bytes]], path: str) -> None:
    """A tree, and the bytes of the tensors that it names."""
    check_tree(tree, None, path)
    for leaf in leaves(tree, path):
        stored = tensors.get(leaf["tensor"])
        size = _DTYPE_BYTES.get(leaf["dtype"])
        if stored is None or (size is not None and len(stored[1]) != size * math.prod(leaf["shape"])):
            raise _wrong(path, f"names the tensor {leaf['tensor']!r}, whose bytes are missing")
