"""A JSON file that knows when one of its bytes is wrong: manifest.json and part.json.

It is ASCII with one top-level key a line, these sorted, and no other white space. The field `checksum` is the xxh3_64
of the very bytes of the file, with sixteen zeros in its own place, so that a flip in mere white space is found too.
Inner keys keep their order, because a dict of the user's comes back in the order that it had.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from lastwords.checkpoint.codec import brief, from_json
from lastwords.checkpoint.system import Os, read_whole
from lastwords.errors import FormatError, NewerFormatError

_NO_SUM = "0" * 16
_CHECKSUM = re.compile(rb'\n"checksum": "([0-9a-f]{16})",?\n')
_CHECKSUM_BEGINS = b'\n"checksum": "'
DOCUMENT_BYTES_MAX = 1 << 30
"""What one rank holds has about 200 bytes a tensor and 17 a chunk of 4 MiB: this is far more than any rank needs."""

_BLOCK_BYTES = 1 << 20
"""The checksum stands in the first block: only a few numbers are sorted before it."""

_LINES_MAX = 64
"""More than a document has keys at its top level."""

_LINE_BYTES = 128
"""Longer than a number, or the name of a job."""


CHECKPOINT_REMEDY = "restore the file or use another checkpoint (`lastwords verify` lists them)"
"""What to do about a damaged file of a checkpoint."""


_STEP_ITEMS = 256
"""So many items of a long list or object are encoded at once: a millisecond."""


def _plain(value: Any) -> Any:
    """A frozen type says what stands in the file, if only by its fields."""
    if not is_dataclass(value):
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")
    return value.to_json() if hasattr(value, "to_json") else brief(value)


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=_plain)


def compact(value: Any) -> str:
    """JSON without white space, also of frozen types."""
    return _ENCODER.encode(value)


def in_steps(value: Any, depth: int = 4) -> str:
    """JSON without white space, in small steps: one call for 100 000 tensors would keep every other thread waiting."""
    if is_dataclass(value):
        value = _plain(value)
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        if len(value) > _STEP_ITEMS:
            pairs = iter(value.items())
            tables = iter(lambda: dict(itertools.islice(pairs, _STEP_ITEMS)), {})
            return "{" + ",".join([compact(step)[1:-1] for step in tables]) + "}"
        if depth:
            inner = [f"{compact(str(key))}:{in_steps(item, depth - 1)}" for key, item in value.items()]
            return "{" + ",".join(inner) + "}"
    if type(value) in (list, tuple) and len(value) > _STEP_ITEMS:
        steps = (value[at : at + _STEP_ITEMS] for at in range(0, len(value), _STEP_ITEMS))
        return "[" + ",".join([compact(step)[1:-1] for step in steps]) + "]"
    return compact(value)


def encode_document(content: Mapping[str, Any]) -> bytes:
    """Bytes of the file, checksum included."""
    assert "checksum" not in content
    lines = [f"{compact(key)}: {in_steps(value)}" for key, value in sorted({**content, "checksum": _NO_SUM}.items())]
    raw = ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")
    place = _checksum_place(raw)
    assert place is not None
    return raw[: place[0]] + xxhash.xxh3_64_hexdigest(raw).encode("ascii") + raw[place[1] :]


def _lines(raw: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Key, begin and end of each line of the top level.

    A newline inside a JSON text is written as an escape, so only the top level has any. They are found at the speed of
    memory: nothing else is looked at.
    """
    begin = 0
    for _ in range(_LINES_MAX):
        end = raw.find(b"\n", begin)
        if end < 0:
            return
        yield raw[begin : raw.find(b":", begin, min(end, begin + _LINE_BYTES))], begin, end
        begin = end + 1


def _checksum_place(raw: bytes) -> tuple[int, int] | None:
    """Where the sixteen digits are; None unless there is exactly one such line."""
    found = [begin for key, begin, _ in _lines(raw) if key == b'"checksum"']
    match = _CHECKSUM.match(raw, found[0] - 1) if len(found) == 1 and found[0] else None
    return None if match is None else match.span(1)


def lines_of(raw: bytes, keys: Collection[str]) -> bytes:
    """A JSON object with some of the top level's keys, without a look at the others."""
    wanted = {compact(key).encode("ascii") for key in keys}
    lines = {key: raw[begin:end].removesuffix(b",") for key, begin, end in _lines(raw) if key in wanted}
    return b"{" + b",".join(lines.values()) + b"}"


def decode_document(
    raw: bytes,
    *,
    where: Path,
    version_max: int,
    remedy: str = CHECKPOINT_REMEDY,
    only: Collection[str] = (),
) -> dict[str, Any]:
    """Content of the file; FormatError, with `remedy`, if it is damaged or of a format newer than `version_max`.

    only: the top-level keys that are wanted, and have to be there; the bytes of the others are checked as well, but
    not decoded.
    """
    place = _checksum_place(raw)
    if place is None:
        raise FormatError(damage(where, "it has no checksum", remedy))
    begin, end = place
    sum_ = xxhash.xxh3_64()
    view = memoryview(raw)
    for piece in (view[:begin], _NO_SUM.encode("ascii"), view[end:]):
        sum_.update(piece)
    if sum_.hexdigest().encode("ascii") != raw[begin:end]:
        raise FormatError(damage(where, "its bytes do not match its checksum", remedy))
    try:
        content: Any = json.loads((lines_of(raw, ("format_version", *only)) if only else raw).decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise FormatError(damage(where, f"it is not JSON ({error})", remedy)) from error
    if not isinstance(content, dict):
        raise FormatError(damage(where, "it is not a JSON object", remedy))
    content.pop("checksum", None)
    version = content.get("format_version")
    if type(version) is not int or version < 1:
        raise FormatError(damage(where, f"its format version is {version!r}", remedy))
    if version > version_max:
        raise NewerFormatError(
            f"{where} was written by a newer lastwords, format {version}; this one reads up to {version_max}; upgrade"
        )
    if missing := [key for key in only if key not in content]:
        raise FormatError(damage(where, f"{missing[0]} is missing", remedy))
    return content


def items_of(raw: bytes, key: str) -> dict[str, msgspec.Raw]:
    """The items of a top-level object by their names, none of them decoded.

    For a document whose checksum has been found right. FormatError, inside `told`, for what is no such object.
    """
    try:
        found = from_json(lines_of(raw, (key,)), dict[str, dict[str, msgspec.Raw]])
    except FormatError as error:
        raise FormatError(f"{key} cannot be read ({error})") from error
    if key not in found:
        raise FormatError(f"{key} is missing")
    return found[key]


def read_document(path: Path, os: Os) -> bytes:
    """Bytes of such a file. A large one is held against its checksum block by block before it is taken into memory.

    FileNotFoundError, StorageError, or FormatError if it is large and nothing that `encode_document` has made.
    """
    blocks = _blocks(path, os)
    first = next(blocks, b"")
    if len(first) < _BLOCK_BYTES:
        return first
    place = _checksum_place(first)
    if place is None:
        raise FormatError(damage(path, "it has no checksum"))
    begin, end = place
    sum_ = xxhash.xxh3_64(first[:begin] + _NO_SUM.encode("ascii") + first[end:])
    for block in blocks:
        sum_.update(block)
    if sum_.hexdigest().encode("ascii") != first[begin:end]:
        raise FormatError(damage(path, "its bytes do not match its checksum"))
    return read_whole(path, os, bytes_max=DOCUMENT_BYTES_MAX)


def claimed_lines(path: Path, keys: Collection[str], os: Os) -> dict[str, bytes]:
    """Short values of the top level as they stand in the file, unchecked and fast, those that are there.

    FileNotFoundError or StorageError. Of what is no document the first block is read.
    """
    found: dict[str, bytes] = {}
    before = b""
    for number, block in enumerate(_blocks(path, os)):
        if number == 0 and _CHECKSUM_BEGINS not in block:
            return {}
        text = before + block
        for key in keys:
            begins = f'\n"{key}": '.encode("ascii")
            at = -1 if key in found else text.find(begins)
            end = text.find(b"\n", at + 1, at + len(begins) + _LINE_BYTES + 2) if at >= 0 else -1
            if end >= 0:
                found[key] = text[at + len(begins) : end].removesuffix(b",")
        if len(found) == len(keys):
            return found
        before = text[-2 * _LINE_BYTES :]
    return found


def _blocks(path: Path, os: Os) -> Iterator[bytes]:
    """Content of a file from its beginning; every block but the last has `_BLOCK_BYTES`. Errors as of `read_whole`."""
    at = 0
    while True:
        block = read_whole(path, os, bytes_max=DOCUMENT_BYTES_MAX, first=_BLOCK_BYTES, offset=at)
        if block:
            yield block
        if len(block) < _BLOCK_BYTES:
            return
        at += len(block)


def damage(where: Path | str, what: str, remedy: str = CHECKPOINT_REMEDY) -> str:
    """Text of a FormatError about a damaged file. remedy: what to do about it."""
    return f"{where} is damaged: {what}; {remedy}"


@contextlib.contextmanager
def told(where: Path | str, remedy: str = CHECKPOINT_REMEDY) -> Iterator[None]:
    """What is wrong with what a file says: a FormatError from in here comes out with its name and `remedy`."""
    try:
        yield
    except FormatError as error:
        raise FormatError(damage(where, str(error), remedy)) from error
