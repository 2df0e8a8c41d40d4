"""Python values that survive a checkpoint exactly, and their JSON form.

JSON alone would turn tuples into lists, number keys into strings and refuse inf and nan, all of which occur in
schedulers' state (a `MultiStepLR` has a Counter with int keys, a `ReduceLROnPlateau` starts at inf). Such values
are written as an object with the single key "~"+type. Every value comes back with its exact type; a type that is not
known here, a subclass for instance, is refused. Nothing here can name a class or call anything, unlike pickle.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import re
import struct
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np

from lastwords.errors import FormatError, UnstorableError

DEPTH_MAX = 32
"""Most levels of a value that a user may store."""
_DEPTH_MAX = 8 * DEPTH_MAX
"""Levels of a whole document. A user's level becomes at most 3 of a tree of tensors (dict, pairs, pair), and what is
in a black box is packed once more, where such a level is 5: at most 3 + 5 of Python's calls, far below its 1000."""
_INT_BITS_MAX = 8192
"""Far above any RNG state, far below Python's limit for reading digits (4300 of them, 14 000 bits)."""

_DTYPE = re.compile(r"[<>|][A-Za-z][0-9]{1,10}(\[[0-9]{0,10}[A-Za-z]{1,2}\])?", re.ASCII)

STORABLE = (
    "None, numbers (Python's and numpy's), text, bytes, ranges, dates and times, paths, tensors, arrays, and lists, "
    "tuples, dicts, sets, deques and defaultdicts of these"
)


class _TypeForm(NamedTuple):
    """How values of one type are written: `encode` makes a storable value of simpler types, `decode` reverses it.

    encoded: the type of what `encode` makes. Nothing else is decoded: where bytes or a list belong, bytearray and
    others take a number, or a range, for a size, and one line of a forged file would ask for all of the memory.
    """

    tag: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    encoded: type[Any] = list


FACTORIES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, Counter, OrderedDict)
}
"""What a defaultdict may call for a missing key."""

_PATHS: dict[str, type[Any]] = {"Path": type(Path()), "PurePosix": PurePosixPath, "PureWindows": PureWindowsPath}


class Place(NamedTuple):
    """Stands for what is stored elsewhere, at `path`, or is no data (then there is none). kind: what it is."""

    path: str
    kind: str


def _must_be(kind: type[Any], content: Any) -> Any:
    if type(content) is not kind:
        raise TypeError(content)
    return content


def numpy_dtype(text: Any, kinds: Collection[str]) -> np.dtype[Any]:
    """The element type of one of these kinds that has `text` for its `str`; TypeError, ValueError for any other text.

    numpy would read structures too, and what looks like one as Python: a SyntaxError, or a type that nobody has saved.
    """
    if not _DTYPE.fullmatch(text):
        raise ValueError(text)
    dtype: np.dtype[Any] = np.dtype(text)
    if dtype.kind not in kinds or dtype.str != text:
        raise ValueError(text)
    return dtype


def _numpy_scalar(encoded: Any) -> Any:
    kind, content = encoded
    if kind in ("str", "bytes"):
        return np.str_(_must_be(str, content)) if kind == "str" else np.bytes_(_must_be(bytes, content))
    [scalar] = np.frombuffer(_must_be(bytes, content), numpy_dtype(kind, NUMPY_KINDS))
    return scalar


def _moment(value: datetime.datetime | datetime.time) -> list[Any]:
    zone = value.tzinfo
    if zone is None:
        return [value.isoformat(), value.fold]
    return [value.replace(tzinfo=None).isoformat(), value.fold, *zone.__getinitargs__()]  # type: ignore[attr-defined]


def _read_moment(kind: Any, encoded: Any) -> Any:
    text, fold, *zone = encoded
    # timezone.utc is one object, and code may ask whether it `is`.
    tzinfo = None
    if zone:
        tzinfo = datetime.UTC if zone == [datetime.timedelta(0)] else datetime.timezone(*zone)
    return kind.fromisoformat(text).replace(fold=fold, tzinfo=tzinfo)


def _read_decimal(text: Any) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation as error:
        raise ValueError(text) from error


def _read_fraction(parts: Any) -> Fraction:
    over, under = (_must_be(int, part) for part in parts)
    if under < 1:
        raise ValueError(parts)
    return Fraction(over, under)


def _read_slice(parts: Any) -> slice:
    start, stop, step = parts
    return slice(start, stop, step)


NUMPY_KINDS = frozenset("biufcmM")
"""numpy's kinds of elements that are nothing but bytes: numbers, truth values, dates and spans of time."""

_FORMS: dict[type[Any], _TypeForm] = {
    complex: _TypeForm("~complex", lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    bytearray: _TypeForm("~bytearray", bytes, bytearray, bytes),
    range: _TypeForm("~range", lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    datetime.datetime: _TypeForm("~datetime", _moment, lambda parts: _read_moment(datetime.datetime, parts)),
    datetime.time: _TypeForm("~time", _moment, lambda parts: _read_moment(datetime.time, parts)),
    datetime.date: _TypeForm("~date", lambda value: value.isoformat(), datetime.date.fromisoformat, str),
    datetime.timedelta: _TypeForm(
        "~timedelta",
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    Decimal: _TypeForm("~decimal", str, _read_decimal, str),
    Fraction: _TypeForm("~fraction", lambda value: [value.numerator, value.denominator], _read_fraction),
    slice: _TypeForm("~slice", lambda value: [value.start, value.stop, value.step], _read_slice),
    uuid.UUID: _TypeForm("~uuid", lambda value: value.hex, uuid.UUID, str),
    deque: _TypeForm("~deque", lambda value: [*value, value.maxlen], lambda parts: deque(parts[:-1], parts[-1])),
    defaultdict: _TypeForm(
        "~defaultdict",
        lambda value: [value.default_factory and value.default_factory.__name__, dict(value)],
        lambda parts: defaultdict(parts[0] and FACTORIES[parts[0]], parts[1]),
    ),
    Place: _TypeForm("~place", list, lambda parts: Place(*(_must_be(str, part) for part in parts))),
    np.generic: _TypeForm("~numpy", lambda value: [value.dtype.str, value.tobytes()], _numpy_scalar),
    np.str_: _TypeForm("~numpy", lambda value: ["str", str.__str__(value)], _numpy_scalar),
    np.bytes_: _TypeForm("~numpy", lambda value: ["bytes", bytes(value)], _numpy_scalar),
    **dict.fromkeys(
        _PATHS.values(),
        _TypeForm(
            "~path",
            lambda value: [next(name for name, kind in _PATHS.items() if kind is type(value)), str(value)],
            lambda parts: _PATHS[parts[0]](parts[1]),
        ),
    ),
}
_BY_TAG = {form.tag: form for form in _FORMS.values()}


def _form_of(value: Any) -> _TypeForm | None:
    """How a value that JSON has nothing like is written; None if it cannot be stored (or is a container of JSON's)."""
    kind = type(value)
    if isinstance(value, np.generic) and kind not in (np.str_, np.bytes_):
        return _FORMS[np.generic] if value.dtype.kind in NUMPY_KINDS else None
    if kind in (datetime.datetime, datetime.time) and type(value.tzinfo) not in (type(None), datetime.timezone):
        return None  # a zone out of a database, which may differ where it is read
    if kind is defaultdict and not is_factory(value.default_factory):
        return None
    return _FORMS.get(kind)


def is_factory(factory: Any) -> bool:
    """Whether a defaultdict with this factory can be stored: one of the built-in types, or None."""
    return factory is None or any(factory is known for known in FACTORIES.values())


def pack(value: Any, path: str = "value") -> Any:
    """JSON form of a storable value. UnstorableError names the path of the first part that is not storable.

    >>> pack({"lr": 0.1, "betas": (0.9, 0.999), "best": float("inf")})
    {'lr': 0.1, 'betas': {'~tuple': [0.9, 0.999]}, 'best': {'~float': 'inf'}}
    """
    return _pack(value, path, _DEPTH_MAX)


def _pack(value: Any, path: str, levels: int) -> Any:
    """levels: how many more the value may have."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return value
    if kind is int:
        if value.bit_length() > _INT_BITS_MAX:
            what = f"an integer of {value.bit_length()} bits"
            raise UnstorableError(f"{path} is {what}; at most {_INT_BITS_MAX} are stored", f"{path} ({what})")
        return value
    if kind is float:
        return value if math.isfinite(value) else {"~float": _float_name(value)}
    if levels <= 0:
        what = f"is nested more than {DEPTH_MAX} deep, or contains itself"
        raise UnstorableError(f"{path} {what}", f"{path} ({what})")
    if kind is bytes:
        return {"~bytes": base64.b64encode(value).decode("ascii")}
    if kind is list:
        return [_pack(item, f"{path}[{index}]", levels - 1) for index, item in enumerate(value)]
    if kind is tuple:
        return {"~tuple": [_pack(item, f"{path}[{index}]", levels - 1) for index, item in enumerate(value)]}
    if kind is set or kind is frozenset:
        items = [_pack(item, f"{path}{{}}", levels - 1) for item in value]
        if not has_order(value) or loses_order(value):
            items.sort(key=json.dumps)  # equal sets give equal bytes
        return {f"~{kind.__name__}": items}
    if kind is dict and all(type(key) is str and not key.startswith("~") for key in value):
        return {key: _pack(item, f"{path}[{key!r}]", levels - 1) for key, item in value.items()}
    if kind is dict or kind is OrderedDict or kind is Counter:
        name = {dict: "~dict", OrderedDict: "~ordered", Counter: "~counter"}[kind]
        return {
            name: [
                [_pack(key, f"{path} key", levels - 1), _pack(item, f"{path}[{key!r}]", levels - 1)]
                for key, item in value.items()
            ]
        }
    form = _form_of(value)
    if form is not None:
        return {form.tag: _pack(form.encode(value), path, levels - 1)}
    raise unstorable(value, path)


def has_order(value: set[Any] | frozenset[Any]) -> bool:
    """Whether the order of a set depends on what was done with it alone, and not on the process.

    >>> has_order({1, (2.5, 3)}), has_order({"a"}) and not _TEXT_IS_FIXED
    (True, False)
    """
    return all(map(_has_fixed_hash, value))


def loses_order(value: set[Any] | frozenset[Any]) -> bool:
    """Whether its order has come about otherwise than by adding its items in that order, which is all a reader can do.

    >>> loses_order({1, 2}), loses_order({8, 0}), loses_order({0, 8})
    (False, False, False)
    """
    if len(value) < 2 or not has_order(value):
        return False
    items = [*value]
    return any(one is not other for one, other in zip(items, type(value)(items), strict=True))


def _starts_with_fixed_hashes() -> bool:
    """Whether this process has begun with PYTHONHASHSEED as a number. A script may have set it since, to no effect."""
    try:
        environment = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(one.partition(b"=")[2].isdigit() for one in environment if one.startswith(b"PYTHONHASHSEED="))


_TEXT_IS_FIXED = _starts_with_fixed_hashes()


def _has_fixed_hash(item: Any) -> bool:
    kind = type(item)
    if kind in (int, bool) or (item is None and hash(None) == _HASH_OF_NONE):
        return True
    if kind in (float, complex):
        return bool(item == item)  # a NaN's is its address
    if kind is tuple or kind is frozenset:
        return all(map(_has_fixed_hash, item))
    return kind in (str, bytes) and _TEXT_IS_FIXED


_HASH_OF_NONE = 0xFCA86420
"""Since Python 3.12; before that its address."""


def unstorable(value: Any, path: str, inside: str = "") -> UnstorableError:
    """What is to be raised for a value of a type that cannot be stored. inside: what it holds, where that matters."""
    name = f"{type(value).__module__}.{type(value).__qualname__}{inside}"
    return UnstorableError(
        f"{path} is a {name}, which a checkpoint cannot store: only {STORABLE}; convert it in the object's "
        "state_dict(), or leave it out",
        f"{path} ({name})",
    )


def _float_name(value: float) -> str:
    """Of a float that JSON has no word for. A NaN has 2**53 forms; the usual one has a name, others are their bits."""
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    bits = struct.pack(">d", value)
    return "nan" if bits == struct.pack(">d", math.nan) else bits.hex()


def _float_named(name: str) -> float:
    known = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.get(name)
    if known is not None:
        return known
    [value] = struct.unpack(">d", bytes.fromhex(name))
    if not math.isnan(value):
        raise ValueError(name)
    return float(value)


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
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, struct.error, IndexError) as error:
            raise FormatError(f"{where}: {tag} holds a value that it cannot hold: damaged or forged") from error
    raise FormatError(f"{where} holds an unknown kind of value {sorted(value)}: written by a newer lastwords? Upgrade")


def _unpack_tagged(tag: str, body: Any, where: str, depth: int) -> Any:
    if tag == "~float":
        return _float_named(body)
    if tag == "~bytes":
        return base64.b64decode(body, validate=True)
    if tag in _BY_TAG:
        form = _BY_TAG[tag]
        return form.decode(_must_be(form.encoded, _unpack(body, where, depth + 1)))
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


def refuse_unstorable(obj: Any, path: str, levels: int = DEPTH_MAX) -> None:
    """UnstorableError with the path of the first part of `obj` that a checkpoint cannot store; None if all is well.

    levels: of nesting that are allowed.

    >>> refuse_unstorable({"a": [1, object()]}, "extras")
    Traceback (most recent call last):
        ...
    lastwords.errors.UnstorableError: extras['a'][1] is a builtins.object, which a checkpoint cannot store: only None, \
numbers (Python's and numpy's), text, bytes, ranges, dates and times, paths, tensors, arrays, and lists, tuples, \
dicts, sets, deques and defaultdicts of these; convert it in the object's state_dict(), or leave it out
    """
    _pack(obj, path, levels)


def is_storable(obj: Any) -> bool:
    """Whether a checkpoint can store all of it, and it takes no tensors for that."""
    try:
        refuse_unstorable(obj, "")
    except UnstorableError:
        return False
    return True
