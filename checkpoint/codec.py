"""JSON as frozen dataclasses: every type, length and range checked, and what is wrong told with its path.

One call of msgspec does the checking (docs/adr/0015). It leaves the keys of dictionaries out of its paths; they are
looked for here, only where something is wrong.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Final, TypeVar, get_type_hints

import msgspec

from lastwords.errors import FormatError

T = TypeVar("T")

INTEGER_MAX: Final = (1 << 63) - 1
Number = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]
"""A size, a place, a step: what may be negative is nowhere in a file."""
Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
"""A place in a list that is made as long as the largest one says."""
STEP_MAX: Final = 10**18 - 1
"""Names on disk have numbers of at most 18 digits (`layout`), and so has whoever takes a glance (`Claimed`)."""
Named = Annotated[int, msgspec.Meta(ge=0, le=STEP_MAX)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=STEP_MAX)]
"""A step or another number from 1, which names have."""
Checksum = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
"""The form of every xxh3_64 here."""

_MESSAGE = re.compile(r"(.*?)(?: - at (`key` in )?`\$(.*)`)?", re.DOTALL)
_STEPS = re.compile(r"\.(\w+)|\[(\d+)\]|\[\.\.\.\]")


def typed(value: Any, kind: type[T], path: str) -> T:
    """`value`, as JSON has it, as a value of `kind`. Keys that `kind` does not know are left out.

    FormatError names what is wrong by its path, which begins with `path` (""; of a file as a whole): the caller adds
    the file.

    >>> typed({"a": [1, "2"]}, dict[str, list[int]], "sizes")
    Traceback (most recent call last):
        ...
    lastwords.errors.FormatError: sizes.a[1]: expected `int`, got `str`
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise FormatError(_told(value, kind, str(error), path)) from None
    except (UnicodeError, AttributeError) as error:
        # Half of a surrogate pair, which JSON can say and no UTF-8: the complaint cannot be worded. And where a mapping
        # belongs, a range or a number of numpy's is asked for its keys.
        if is_dataclass(kind) and isinstance(value, dict):
            kinds = get_type_hints(kind, include_extras=True)
            for name in kinds.keys() & value.keys():
                typed(value[name], kinds[name], f"{path}.{name}")
        what = "text that is no Unicode" if isinstance(error, UnicodeError) else "a value that does not belong there"
        raise FormatError(f"{path.removeprefix('.') or 'it'}: holds {what}") from None


def prepare(*kinds: type[Any]) -> None:
    """Have what the first `typed` of each kind works out, and all processes that are forked from this one as well."""
    for kind in kinds:
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.convert(None, kind)


def brief(value: Any) -> dict[str, Any]:
    """Fields of a frozen type as they stand in a file, but for those that have their default: `typed` knows it.

    Frozen types in them stay what they are until they are encoded (`document`).
    """
    return {name: item for name, default in _fields(value.__class__) if (item := getattr(value, name)) != default}


@functools.cache
def _fields(kind: Any) -> list[tuple[str, Any]]:
    return [(one.name, one.default) for one in fields(kind)]


def from_json(raw: bytes | str, kind: type[T], *, dec_hook: Callable[[type, Any], Any] | None = None) -> T:
    """JSON as a value of `kind`; FormatError, of which the caller says the place, for any other bytes whatever.

    For what is small, or bounded before it is read. Numbers are as in the standard: no NaN, and 64 bits. dec_hook: as
    of msgspec.

    >>> from_json(b"[1", list[int])
    Traceback (most recent call last):
        ...
    lastwords.errors.FormatError: Input data was truncated
    """
    try:
        return msgspec.json.decode(raw, type=kind, dec_hook=dec_hook)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        # Beside msgspec's own: bytes that are no UTF-8, brackets nested too deep, and what dec_hook raises.
        raise FormatError(str(error)) from error


def _told(value: Any, kind: Any, message: str, path: str) -> str:
    found = _MESSAGE.fullmatch(message)
    assert found is not None, message
    what, of_key, at = found.groups()
    keys: list[str | int] = []
    for step in _STEPS.finditer(at or ""):
        name, index = step.groups()
        keys.append(name or (int(index) if index else _wrong_key(value, kind, message, keys)))
    for key in keys:
        known = isinstance(key, str) and key.isidentifier()
        path += f".{key}" if known else f"[{key!r}]"
    place = path.removeprefix(".")
    return f"{'a key of ' if of_key else ''}{place}{': ' if place else ''}{what[:1].lower()}{what[1:]}"


def _wrong_key(value: Any, kind: Any, message: str, keys: list[str | int]) -> str:
    """The first key of the dictionary at `keys` whose value is wrong: of the items before it, none is."""
    table: Mapping[str, Any] = value
    for key in keys:
        table = table[key]  # type: ignore[index]
    names = list(table)
    sound, wrong = 0, len(names)
    while wrong - sound > 1:
        middle = (sound + wrong) // 2
        some = _with(value, keys, {name: table[name] for name in names[:middle]})
        sound, wrong = (middle, wrong) if _message(some, kind) != message else (sound, middle)
    return names[wrong - 1]


def _with(value: Any, keys: list[str | int], table: Mapping[str, Any]) -> Any:
    """A copy of `value` with another dictionary at `keys`."""
    if not keys:
        return table
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[keys[0]] = _with(value[keys[0]], keys[1:], table)  # type: ignore[index]
    return copy


def _message(value: Any, kind: Any) -> str:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return str(error)
    except (UnicodeError, AttributeError):
        return "no JSON"
    return ""
