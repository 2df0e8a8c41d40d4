"""What may stand in the `meta` of a unit and of a local state, and in `facts`: checked where a reader decodes them.

A checksum tells that bytes are those which somebody wrote, not that it was this program. Code behind this takes types
and lengths as they should be; what is wrong is told with the file's name and the path of the value, once, here.
Publication never asks: what it wrongly refused would be lost, and what a reader wrongly refuses is still there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lastwords.checkpoint.format import DTYPE_BITS, TYPE_NAMES, TensorSpec
from lastwords.checkpoint.storable import unpack
from lastwords.errors import FormatError

META_VERSION = 1
"""Version of what a unit's `meta` says."""

_DTYPE_BYTES = {name: DTYPE_BITS[code] // 8 for code, name in TYPE_NAMES.items()}
_OTHER_BYTES = {"complex32": 4, "complex128": 16}
_RANKS_MAX = 1 << 20


class _Wrong(Exception):
    """path: of the value in question. what: is wrong with it. Never leaves this module."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path} {what}")


Check = Callable[[Any, str], object]


def require_version(meta: Mapping[str, Any], where: str) -> None:
    """FormatError unless this lastwords knows what the unit's `meta` means."""
    if meta.get("version") != META_VERSION:
        raise FormatError(
            f"{where}: its state is of version {meta.get('version')!r}, this lastwords reads {META_VERSION}; upgrade it"
        )


def unit_problem(meta: Mapping[str, Any], tensors: Iterable[TensorSpec], unit: str) -> str | None:
    """First thing in a unit's meta that nobody could use, in words; None if there is none.

    Of another version only what is read before the version is asked for. tensors: those of the unit.
    """
    names = {spec.name: spec for spec in tensors}
    forms = _HEAD if meta.get("version") != META_VERSION else {**_HEAD, **_unit_forms(names, f"unit/{unit}/")}
    try:
        _fields(meta, forms, "meta")
        if meta.get("version") == META_VERSION:
            _one_for_each_group(meta)
    except (_Wrong, FormatError) as error:
        return str(error)
    return None


def local_problem(meta: Mapping[str, Any]) -> str | None:
    """As `unit_problem`, of a local state's meta."""
    try:
        _fields(meta, {"kind?": _text, "slot?": _slot, "epoch_start?": _object}, "meta")
    except (_Wrong, FormatError) as error:
        return str(error)
    return None


def facts_problem(facts: Mapping[str, Any]) -> str | None:
    """As `unit_problem`, of a manifest's or a part's facts."""
    try:
        _fields(facts, {"buckets?": _buckets, "moved?": _object}, "facts")
    except _Wrong as error:
        return str(error)
    return None


# ---------------------------------------------------------------------- simple forms


def _fields(value: Any, forms: Mapping[str, Check], path: str) -> None:
    """An object with these keys, among others; one that ends in "?" may be missing."""
    _object(value, path)
    for key, check in forms.items():
        name = key.removesuffix("?")
        if name in value:
            check(value[name], f"{path}.{name}")
        elif name == key:
            raise _Wrong(f"{path}.{name}", "is missing")


def _object(value: Any, path: str) -> None:
    if not isinstance(value, dict):
        raise _Wrong(path, "is not an object")


def _text(value: Any, path: str) -> None:
    if not isinstance(value, str):
        raise _Wrong(path, "is not text")


def _truth(value: Any, path: str) -> None:
    if type(value) is not bool:
        raise _Wrong(path, "is not true or false")


def _number(value: Any, path: str) -> None:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise _Wrong(path, "is not an integer that can be meant")


def _rank(value: Any, path: str) -> None:
    if type(value) is not int or not 0 <= value < _RANKS_MAX:
        raise _Wrong(path, "is not a rank")


def _list(of: Check) -> Check:
    def check(value: Any, path: str) -> None:
        if not isinstance(value, list):
            raise _Wrong(path, "is not a list")
        for index, item in enumerate(value):
            of(item, f"{path}[{index}]")

    return check


def _by_name(of: Check) -> Check:
    """An object with text keys."""

    def check(value: Any, path: str) -> None:
        _object(value, path)
        for key, item in value.items():
            _text(key, f"a key of {path}")
            of(item, f"{path}[{key!r}]")

    return check


def _or_none(of: Check) -> Check:
    def check(value: Any, path: str) -> None:
        if value is not None:
            of(value, path)

    return check


def _tuple(*of: Check) -> Check:
    """A list of this length."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, list) or len(value) != len(of):
            raise _Wrong(path, f"is not a list of {len(of)}")
        for index, (one, item) in enumerate(zip(of, value, strict=True)):
            one(item, f"{path}[{index}]")

    return check


def _key(value: Any, path: str) -> None:
    """What can be a key of a dictionary."""
    try:
        hash(value)
    except TypeError:
        raise _Wrong(path, "cannot be a key") from None


def _holders(value: Any, path: str) -> None:
    _list(_rank)(value, path)
    if not value:
        raise _Wrong(path, "names no rank")


_texts = _list(_text)

_HEAD: Mapping[str, Check] = {"holders?": _holders, "reasons?": _texts, "step_ended?": _truth}

# ---------------------------------------------------------------------- a unit


def _unit_forms(names: Mapping[str, TensorSpec], prefix: str) -> dict[str, Check]:
    tree = _tree_of(names)

    def types(kind: str) -> Check:
        def check(value: Any, path: str) -> None:
            _by_name(_text)(value, path)
            for name, dtype in value.items():
                _stored_as(names, f"{prefix}{kind}/{name}", dtype, None, f"{path}[{name!r}]")

        return check

    def table(value: Any, path: str) -> None:
        """A tree that is a dictionary with text keys."""
        tree(value, path)
        if "dict" not in value:
            raise _Wrong(path, "is not a dictionary")
        for key, _ in value["dict"]:
            _text(key, f"a key of {path}")

    extras: dict[str, Check] = {
        "states": _by_name(tree),
        "left_out?": _by_name(_texts),
        "steps": _number,
        "regular": _texts,
        "moved": _texts,
        "moves?": _list(_tuple(_text, _text, *[_number] * 6)),
        "step_on_resume": _texts,
    }
    return {
        "optimizer": _text,
        "parameters": types("model"),
        "buffers": types("buffer"),
        "aliases": _by_name(_text),
        "absent_buffers": _texts,
        "groups": _list(table),
        "group_parameters": _list(_texts),
        "group_numbers?": _list(_number),
        "volatile_buffers?": _texts,
        "reshaped_buffers?": _texts,
        "frozen?": _texts,
        "optimizer_state": _by_name(table),
        "optimizer_own?": _list(_tuple(_or_none(_text), _key, tree)),
        "left_out?": _list(_tuple(_text, _or_none(_text))),
        "hyperparameters?": _list(_object),
        "buckets?": _buckets,
        "extras?": lambda value, path: _fields(value, extras, path),
    }


def _one_for_each_group(meta: Mapping[str, Any]) -> None:
    count = len(meta["groups"])
    for key in ("group_parameters", "group_numbers"):
        if len(meta.get(key, meta["groups"])) != count:
            raise _Wrong(f"meta.{key}", f"has {len(meta[key])} items for {count} param groups")
    known = meta["parameters"].keys()
    for alias, name in meta["aliases"].items():
        if name not in known and name not in meta["buffers"]:
            raise _Wrong(f"meta.aliases[{alias!r}]", "is tied to something that the unit does not have")
    if "extras" in meta and not {*meta["extras"]["step_on_resume"]} <= meta["extras"]["states"].keys():
        raise _Wrong("meta.extras.step_on_resume", "names something that is not there")
    for index, own in enumerate(meta.get("optimizer_own", ())):
        if own[0] is not None and own[0] not in known:
            raise _Wrong(f"meta.optimizer_own[{index}]", "is of a parameter that the unit does not have")


def _anything(value: Any, path: str) -> None:
    pass


def _buckets(value: Any, path: str) -> None:
    """The order of DDP's buckets, as `ddp_buckets` records it, of one DDP or of several; empty without DDP."""
    _object(value, path)
    if value and value.get("version") == 1:
        passes = _list(_list(_number))
        forms = {"static_graph": _truth, "find_unused_parameters": _truth, "parameters": _texts, "passes": passes,
                 "buckets": _or_none(passes), "reasons": _texts, "step": _or_none(_number), "hooks?": _texts,
                 "unconfirmed?": _text, "synced?": _by_name(_truth), "options?": _by_name(_anything)}  # fmt: skip
        _fields(value, forms, path)
    elif value and value.get("version") == 2:
        _fields(value, {"ddps": _list(_buckets)}, path)


# ---------------------------------------------------------------------- trees of values (see `state_trees`)


def _tree_of(names: Mapping[str, TensorSpec] | None) -> Check:
    """Of trees whose tensors are among `names`; None: they are not looked up."""

    def check(tree: Any, path: str) -> None:
        if not isinstance(tree, dict) or not tree:
            raise _Wrong(path, "is not a tree of values")
        if "tensor" in tree:
            _leaf(tree, names, path)
            return
        for node in _nodes(tree, path):
            check(node, path)

    return check


def _nodes(tree: dict[str, Any], path: str) -> Iterator[Any]:
    """Nodes directly inside."""
    tag, body = next(iter(tree.items()))
    tag = tag if len(tree) == 1 else "several tags"
    if tag == "plain":
        return
    if tag in ("list", "tuple"):
        _list(_anything)(body, path)
        yield from body
    elif tag in ("dict", "ordered"):
        _list(_tuple(_key, _anything))(body, path)
        yield from (node for _, node in body)
    elif tag == "object":
        _tuple(_text, _anything, _list(_anything))(body, path)
        yield from body[2]
    else:
        raise _Wrong(path, f"holds an unknown kind of value {tag!r}: written by a newer lastwords?")


def _leaf(node: dict[str, Any], names: Mapping[str, TensorSpec] | None, path: str) -> None:
    forms: dict[str, Check] = {"tensor": _text, "dtype": _text, "shape": _list(_number), "apart?": _text,
                               "parameter?": _truth}  # fmt: skip
    if "placements" in node:
        forms |= {"placements": _list(_placement), "global_shape": _list(_number)}
    _fields(node, forms, path)
    if names is None:
        return
    spec = _stored_as(names, node["tensor"], node["dtype"], node["shape"], path)
    sizes = spec.global_shape[: len(node["shape"])]
    if "placements" in node and tuple(node["global_shape"]) != sizes:
        raise _Wrong(f"{path}.global_shape", f"is not that of {node['tensor']!r}, {sizes}")
    if any(not -len(sizes) <= one[1] < len(sizes) for one in node.get("placements", ()) if one[0] in ("S", "SS")):
        raise _Wrong(f"{path}.placements", "divides a dimension that is not there")


def _placement(value: Any, path: str) -> None:
    """See `sharding.dtensor.placements_to_json`."""
    numbers = {"R": 0, "S": 1, "SS": 2}
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise _Wrong(path, "is no placement")
    if len(value) - 1 != numbers.get(value[0], len(value) - 1):
        raise _Wrong(path, f"is no placement of kind {value[0]!r}")
    if not all(type(number) is int for number in value[1:]):
        raise _Wrong(path, "has something else than numbers")


def _stored_as(
    names: Mapping[str, TensorSpec], name: str, dtype: str, shape: list[int] | None, path: str
) -> TensorSpec:
    """The tensor in the file, which has this type and shape; shape None: whatever it is."""
    spec = names.get(name)
    if spec is None:
        raise _Wrong(path, f"names the tensor {name!r}, but it is not there")
    own = TYPE_NAMES.get(spec.dtype) == dtype
    # A type that safetensors has no code for is bytes, in one dimension more.
    as_bytes = not own and dtype not in _DTYPE_BYTES and spec.dtype == "U8" and len(spec.shape) > 0
    as_bytes = as_bytes and spec.shape[-1] == _OTHER_BYTES.get(dtype, spec.shape[-1])
    if not own and not as_bytes:
        raise _Wrong(path, f"says {dtype}, but {name!r} is {spec.dtype}")
    stored = spec.shape if own else spec.shape[:-1]
    if shape is not None and tuple(shape) != stored:
        raise _Wrong(f"{path}.shape", f"is {shape}, but {name!r} has {list(stored)}")
    return spec


# ---------------------------------------------------------------------- a local state


def _slot(value: Any, path: str) -> None:
    _object(value, path)
    _fields(value, {"epoch?": _or_none(_number), "step?": _or_none(_number), "after?": _or_none(_list(_number)),
                    "reasons?": _texts, "early?": _texts,
                    "extras?": _tuple(_number, _by_name(_text)), "numbers?": _by_name(_anything)}, path)  # fmt: skip
    packed = value.get("local_extras")
    if packed is None:
        return
    # In the black box it is JSON already, so that in the manifest it is packed twice.
    inner, path = unpack(packed, f"{path}.local_extras"), f"{path}.local_extras"
    tree = _tree_of(None)
    document: dict[str, Check] = {
        "states": _by_name(tree), "left_out?": _by_name(_texts), "steps": _number, "regular": _texts, "moved": _texts,
        "step_on_resume": _texts,
    }  # fmt: skip
    tensors = _by_name(_tuple(_list(_number), _bytes))
    _fields(inner, {"tree": lambda one, at: _fields(one, document, at), "tensors": tensors}, path)
    for name, state in inner["tree"]["states"].items():
        for leaf in _leaves(state, path):
            stored = inner["tensors"].get(leaf["tensor"])
            size = _DTYPE_BYTES.get(leaf["dtype"])
            if stored is None or (size is not None and len(stored[1]) != size * math.prod(leaf["shape"])):
                raise _Wrong(f"{path}[{name!r}]", f"names the tensor {leaf['tensor']!r}, whose bytes are not there")


def _leaves(tree: dict[str, Any], path: str) -> Iterator[dict[str, Any]]:
    if "tensor" in tree:
        yield tree
        return
    for node in _nodes(tree, path):
        yield from _leaves(node, path)


def _bytes(value: Any, path: str) -> None:
    if not isinstance(value, bytes):
        raise _Wrong(path, "is not bytes")
