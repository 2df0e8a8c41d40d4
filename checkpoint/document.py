"""A JSON file that knows when one of its bytes is wrong: manifest.json and part.json.

It is ASCII with one top-level key a line, these sorted, and no other white space. The field `checksum` is the xxh3_64
of the very bytes of the file, with sixteen zeros in its own place, so that a flip in mere white space is found too.
Inner keys keep their order, because a dict of the user's comes back in the order that it had.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import xxhash

from lastwords.errors import FormatError

_NO_SUM = "0" * 16
_CHECKSUM = re.compile(rb'^"checksum": "([0-9a-f]{16})",?$', re.MULTILINE)
DOCUMENT_BYTES_MAX = 1 << 30
"""A manifest has about 200 bytes a tensor and 17 a chunk of 4 MiB: this is far more than any job needs."""


CHECKPOINT_REMEDY = "restore the file or use another checkpoint (`lastwords verify` lists them)"
"""What to do about a damaged file of a checkpoint."""


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def encode_document(content: Mapping[str, Any]) -> bytes:
    """Bytes of the file, checksum included."""
    assert "checksum" not in content
    lines = [f"{_compact(key)}: {_compact(value)}" for key, value in sorted({**content, "checksum": _NO_SUM}.items())]
    raw = ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")
    place = _CHECKSUM.search(raw)
    assert place is not None
    return raw[: place.start(1)] + xxhash.xxh3_64_hexdigest(raw).encode("ascii") + raw[place.end(1) :]


def decode_document(raw: bytes, *, where: Path, version_max: int, remedy: str = CHECKPOINT_REMEDY) -> dict[str, Any]:
    """Content of the file; FormatError, with `remedy`, if it is damaged or of a format newer than `version_max`."""
    # A newline inside a JSON text is written as an escape, so only the top level can match.
    places = list(_CHECKSUM.finditer(raw))
    if len(places) != 1:
        raise FormatError(damage(where, "it has no checksum", remedy))
    begin, end = places[0].span(1)
    if xxhash.xxh3_64_hexdigest(raw[:begin] + _NO_SUM.encode("ascii") + raw[end:]).encode("ascii") != raw[begin:end]:
        raise FormatError(damage(where, "its bytes do not fit its checksum", remedy))
    try:
        content: Any = json.loads(raw.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise FormatError(damage(where, f"it is not JSON ({error})", remedy)) from error
    if not isinstance(content, dict):
        raise FormatError(damage(where, "it is not a JSON object", remedy))
    content.pop("checksum", None)
    version = content.get("format_version")
    if type(version) is not int or version < 1:
        raise FormatError(damage(where, f"its format version is {version!r}", remedy))
    if version > version_max:
        raise FormatError(
            f"{where} was written by a newer lastwords, format {version}; this one reads up to {version_max}; upgrade"
        )
    return content


def damage(where: Path | str, what: str, remedy: str = CHECKPOINT_REMEDY) -> str:
    """Text of a FormatError about a damaged file. remedy: what to do about it."""
    return f"{where} is damaged: {what}; {remedy}"


class Fields:
    """Typed access to a JSON object; every complaint is a FormatError that names the file, the field and `remedy`."""

    def __init__(self, table: Any, where: Path | str, path: str = "", remedy: str = CHECKPOINT_REMEDY) -> None:
        self._where = where
        self._path = path
        self._remedy = remedy
        if not isinstance(table, dict):
            self.refuse(f"{path or 'it'} is not an object")
        self._table: dict[str, Any] = table

    def refuse(self, what: str) -> NoReturn:
        raise FormatError(damage(self._where, what, self._remedy))

    def _get(self, key: str) -> Any:
        if key not in self._table:
            self.refuse(f"{self._path}{key} is missing")
        return self._table[key]

    def keys(self) -> list[str]:
        return sorted(self._table)

    def raw(self, key: str) -> Any:
        return self._get(key)

    def integer(self, key: str, *, least: int = 0) -> int:
        value = self._get(key)
        if type(value) is not int or value < least:
            self.refuse(f"{self._path}{key} is {value!r}, not an integer of at least {least}")
        return value

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str):
            self.refuse(f"{self._path}{key} is not text")
        return value

    def truth(self, key: str) -> bool:
        value = self._get(key)
        if type(value) is not bool:
            self.refuse(f"{self._path}{key} is not true or false")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.refuse(f"{self._path}{key} is not a list of texts")
        return tuple(value)

    def integers(self, key: str) -> tuple[int, ...]:
        value = self._get(key)
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            self.refuse(f"{self._path}{key} is not a list of numbers")
        return tuple(value)

    def inner(self, key: str) -> Fields:
        return Fields(self._get(key), self._where, f"{self._path}{key}.", self._remedy)

    def inners(self, key: str) -> list[Fields]:
        value = self._get(key)
        if not isinstance(value, list):
            self.refuse(f"{self._path}{key} is not a list")
        return [
            Fields(item, self._where, f"{self._path}{key}[{index}].", self._remedy) for index, item in enumerate(value)
        ]
