"""Python values that survive a checkpoint exactly, and their JSON form.

JSON alone would turn tuples into lists, number keys into strings and refuse inf and nan, all of which occur in
schedulers' state (a `MultiStepLR` has a Counter with int keys, a `ReduceLROnPlateau` starts at inf). Such values
are written as an object with the single key "~"+type. Nothing here can name a class or call anything, unlike pickle.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any

from lastwords.errors import ConfigError, FormatError

_DEPTH_MAX = 64
_INT_BITS_MAX = 8192
"""Far above any RNG state, far below Python's limit for reading digits (4300 of them, 14 000 bits)."""


def pack(value: Any, path: str = "value") -> Any:
    """JSON form of a storable value. ConfigError names the path of the first part that is not storable.

    >>> pack({"lr": 0.1, "betas": (0.9, 0.999), "best": float("inf")})
    {'lr': 0.1, 'betas': {'~tuple': [0.9, 0.999]}, 'best': {'~float': 'inf'}}
    """
    return _pack(value, path, 0)


def _pack(value: Any, path: str, depth: int) -> Any:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return value
    if kind is int:
        if value.bit_length() > _INT_BITS_MAX:
            raise ConfigError(f"{path} is an integer of {value.bit_length()} bits; at most {_INT_BITS_MAX} are stored")
        return value
    if isinstance(value, float):  # numpy.float64 is a float and comes back as one, bit for bit
        plain = float(value)
        if math.isfinite(plain):
            return plain
        return {"~float": "nan" if math.isnan(plain) else ("inf" if plain > 0 else "-inf")}
    if depth >= _DEPTH_MAX:
        raise ConfigError(f"{path} is nested more than {_DEPTH_MAX} deep, or contains itself")
    if kind is bytes:
        return {"~bytes": base64.b64encode(value).decode("ascii")}
    if kind is list:
        return [_pack(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    if kind is tuple:
        return {"~tuple": [_pack(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]}
    if kind is set or kind is frozenset:
        # Sorted by their JSON text, so that equal sets give equal bytes.
        items = sorted((_pack(item, f"{path}{{}}", depth + 1) for item in value), key=json.dumps)
        return {f"~{kind.__name__}": items}
    if kind is dict and all(type(key) is str and not key.startswith("~") for key in value):
        return {key: _pack(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
    if kind is dict or kind is OrderedDict or kind is Counter:
        name = {dict: "~dict", OrderedDict: "~ordered", Counter: "~counter"}[kind]
        return {
            name: [
                [_pack(key, f"{path} key", depth + 1), _pack(item, f"{path}[{key!r}]", depth + 1)]
                for key, item in value.items()
            ]
        }
    raise ConfigError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot store: only None, bool, int, "
        "float, str, bytes, tensors, and lists, tuples, dicts and sets of these; convert it in the object's "
        "state_dict() (a numpy number with .item()), or leave it out"
    )


def unpack(value: Any, where: str = "value") -> Any:
    """Inverse of `pack`; FormatError if the JSON is not of its making.

    >>> unpack(pack({1: (float("-inf"), b"x")}))
    {1: (-inf, b'x')}
    """
    return _unpack(value, where, 0)


def _unpack(value: Any, where: str, depth: int) -> Any:
    if depth > _DEPTH_MAX + 1:
        raise FormatError(f"{where} is nested more than {_DEPTH_MAX} deep: damaged or forged")
    if isinstance(value, list):
        return [_unpack(item, where, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("~") for key in value):
        return {key: _unpack(item, where, depth + 1) for key, item in value.items()}
    if len(value) == 1:
        [(tag, body)] = value.items()
        try:
            return _unpack_tagged(tag, body, where, depth)
        except (TypeError, ValueError, KeyError) as error:
            raise FormatError(f"{where}: {tag} holds something that it cannot: damaged or forged") from error
    raise FormatError(f"{where} holds an unknown kind of value {sorted(value)}: written by a newer lastwords? Upgrade")


def _unpack_tagged(tag: str, body: Any, where: str, depth: int) -> Any:
    if tag == "~float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[body]
    if tag == "~bytes":
        return base64.b64decode(body, validate=True)
    if not isinstance(body, list):
        raise TypeError(tag)
    if tag in ("~tuple", "~set", "~frozenset"):
        items: Iterable[Any] = (_unpack(item, where, depth + 1) for item in body)
        return {"~tuple": tuple, "~set": set, "~frozenset": frozenset}[tag](items)
    if tag in ("~dict", "~ordered", "~counter"):
        pairs = [(_unpack(key, where, depth + 1), _unpack(item, where, depth + 1)) for key, item in body]
        if tag == "~dict":
            return dict(pairs)
        return OrderedDict(pairs) if tag == "~ordered" else Counter(dict(pairs))
    raise FormatError(f"{where} holds an unknown kind of value {tag!r}: written by a newer lastwords? Upgrade")


def refuse_unstorable(obj: Any, path: str) -> None:
    """ConfigError with the path of the first part of `obj` that a checkpoint cannot store; None if all is well.

    >>> refuse_unstorable({"a": [1, object()]}, "extras")
    Traceback (most recent call last):
        ...
    lastwords.errors.ConfigError: extras['a'][1] is a builtins.object, which a checkpoint cannot store: only None, \
bool, int, float, str, bytes, tensors, and lists, tuples, dicts and sets of these; convert it in the object's \
state_dict() (a numpy number with .item()), or leave it out
    """
    pack(obj, path)
