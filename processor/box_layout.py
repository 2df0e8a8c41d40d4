"""What lies where in a black box file. Pure: turns a `BoxLayout` into offsets, and into a header and back.

The header describes the whole file, so that a reader needs nothing but the file. Everything that is read from it
is checked: the file belongs to another process, and the one that wrote it may have run another version.

    page 0        magic, version, length and CRC of the header JSON; the stand
    page 1...     header JSON, then the slots' head words, each slot's 64 bytes + one byte for each region
    data          for each slot: its regions, each on a 64-byte boundary, then its JSON on a page boundary
"""

from __future__ import annotations

import enum
import json
import math
import struct
import zlib
from dataclasses import dataclass
from typing import Any

from lastwords.errors import ConfigError, FormatError

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of an element by safetensors' dtype code."""

PAGE_BYTES = 4096
HEADER_BYTES_MAX = 64 * 1024 * 1024
REGION_ALIGN_BYTES = 64  # a cache line, and more than any dtype asks for
_VERSION = 3
_MAGIC = b"LWBOX\x00\x00\x01"
_PREAMBLE = struct.Struct("=8sIII")  # magic, version, bytes of the header JSON, their CRC-32

WORD_STAND = 8  # in page 0, in 8-byte words

# Offsets in a slot's head, in 8-byte words.
SLOT_SEQUENCE = 0
SLOT_KIND_AND_STEP = 1  # step << 8 | kind
SLOT_COUNTER = 2
SLOT_JSON_BYTES = 3  # length << 1 | 1 if there was no room for it
SLOT_HEAD_BYTES = 64

STEP_SLOTS = 4
EPOCH_SLOTS = 3
FACTS_SLOTS = 2


class SlotKind(enum.IntEnum):
    """What a slot holds. Step slots hold TENTATIVE or COMMITTED; the others one kind only."""

    TENTATIVE = 1
    COMMITTED = 2
    EPOCH = 3
    FACTS = 4


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """A named array of fixed size in each slot.

    lazy: takes no memory until it is activated, and is absent from copies made before.
    in_epoch: is also part of the record of an epoch's start. committed_only: is in no tentative copy, since the update
    changes it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    lazy: bool = False
    in_epoch: bool = False
    committed_only: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the region.

        >>> RegionSpec("buffer/bn.running_mean", "F32", (64,)).nbytes
        256
        """
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class BoxLayout:
    """Regions of the slots and the room for JSON beside them. Regions that are not lazy come first in the file."""

    regions: tuple[RegionSpec, ...]
    json_bytes_max: int = 4 * 1024 * 1024
    """Room in the file; memory is taken only for what is written."""

    def __post_init__(self) -> None:
        names = [region.name for region in self.regions]
        if len(set(names)) != len(names):
            raise ConfigError(f"black box: region {next(n for n in names if names.count(n) > 1)!r} is named twice")
        for region in self.regions:
            if region.dtype not in DTYPE_BYTES:
                raise ConfigError(f"black box: region {region.name!r} has the unknown dtype {region.dtype!r}")
            if not region.name or any(size < 0 for size in region.shape):
                raise ConfigError(f"black box: region {region.name!r} of shape {region.shape} cannot be stored")
        if not 0 < self.json_bytes_max <= 1 << 40:
            raise ConfigError(f"black box: json_bytes_max {self.json_bytes_max} must be positive")


@dataclass(frozen=True, slots=True)
class RegionPlace:
    """Where a region of one slot lies: byte offset in the file, and the index of its "present" byte."""

    spec: RegionSpec
    offset: int
    index: int


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Where one slot lies in the file; offsets in bytes."""

    head_at: int
    present_at: int
    eager_end: int
    regions: dict[str, RegionPlace]
    json_at: int

    @property
    def data_at(self) -> int:
        return min((place.offset for place in self.regions.values()), default=self.json_at)


@dataclass(frozen=True, slots=True)
class BoxMap:
    """All offsets of a file, computed from the layout alone, the same for writer and reader."""

    layout: BoxLayout
    header_json: bytes
    heads_at: int
    heads_end: int
    step_slots: tuple[int, ...]
    epoch_slots: tuple[int, ...]
    facts_slots: tuple[int, ...]
    slots: tuple[SlotPlace, ...]
    file_bytes: int

    def needed_from_the_start(self, json_bytes: int) -> list[tuple[int, int]]:
        """Offset and length of what is written whatever happens, with so much room for each slot's JSON."""
        regions = [(slot.data_at, slot.eager_end - slot.data_at) for slot in self.slots]
        texts = [(slot.json_at, min(json_bytes, self.layout.json_bytes_max)) for slot in self.slots]
        return [(0, self.heads_end), *((at, nbytes) for at, nbytes in regions if nbytes > 0), *texts]

    def preamble(self) -> bytes:
        """First bytes of the file."""
        return _PREAMBLE.pack(_MAGIC, _VERSION, len(self.header_json), zlib.crc32(self.header_json))


def map_layout(layout: BoxLayout) -> BoxMap:
    """Give every slot and region its place.

    >>> places = map_layout(BoxLayout((RegionSpec("a", "U8", (10,)), RegionSpec("b", "F32", (2, 3)))))
    >>> slot = places.slots[0]
    >>> slot.regions["b"].offset - slot.regions["a"].offset
    64
    """
    header_json = _encode(layout)
    if len(header_json) > HEADER_BYTES_MAX:
        raise ConfigError(f"black box: its description takes {len(header_json)} bytes, more than {HEADER_BYTES_MAX}")
    ordered = sorted(enumerate(layout.regions), key=lambda pair: pair[1].lazy)
    in_epoch = [(index, region) for index, region in ordered if region.in_epoch]
    facts: list[tuple[int, RegionSpec]] = []
    kinds = [ordered] * STEP_SLOTS + [in_epoch] * EPOCH_SLOTS + [facts] * FACTS_SLOTS

    heads_at = _up(PAGE_BYTES + len(header_json), PAGE_BYTES)
    head_bytes = _up(SLOT_HEAD_BYTES + len(layout.regions), REGION_ALIGN_BYTES)
    heads_end = _up(heads_at + head_bytes * len(kinds), PAGE_BYTES)
    at = heads_end
    slots: list[SlotPlace] = []
    for number, regions in enumerate(kinds):
        places: dict[str, RegionPlace] = {}
        eager_end = at
        for index, region in regions:
            if region.lazy:  # on pages of its own, so that reserving one touches no other
                at = _up(at, PAGE_BYTES)
            places[region.name] = RegionPlace(region, at, index)
            if not region.lazy:
                eager_end = at + region.nbytes
            at = _up(at + region.nbytes, REGION_ALIGN_BYTES)
        at = _up(at, PAGE_BYTES)
        head_at = heads_at + number * head_bytes
        slots.append(SlotPlace(head_at, head_at + SLOT_HEAD_BYTES, eager_end, places, at))
        at = _up(at + layout.json_bytes_max, PAGE_BYTES)
    numbers = tuple(range(len(kinds)))
    return BoxMap(
        layout=layout,
        header_json=header_json,
        heads_at=heads_at,
        heads_end=heads_end,
        step_slots=numbers[:STEP_SLOTS],
        epoch_slots=numbers[STEP_SLOTS : STEP_SLOTS + EPOCH_SLOTS],
        facts_slots=numbers[STEP_SLOTS + EPOCH_SLOTS :],
        slots=tuple(slots),
        file_bytes=at,
    )


def header_bytes(first_page: bytes, path: str) -> tuple[int, int]:
    """Length and CRC of the header JSON, from the file's first page; raises FormatError if it is no black box."""
    if len(first_page) < _PREAMBLE.size:
        raise FormatError(f"{path} is not a black box: it ends after {len(first_page)} bytes")
    magic, version, nbytes, crc = _PREAMBLE.unpack_from(first_page)
    if magic != _MAGIC:
        raise FormatError(f"{path} is not a black box")
    if version != _VERSION:
        raise FormatError(f"{path} is a black box of format {version}; this lastwords reads format {_VERSION}")
    if nbytes > HEADER_BYTES_MAX:
        raise FormatError(f"{path}: the header claims {nbytes} bytes")
    return nbytes, crc


def map_header(header: bytes, crc: int, file_bytes: int, path: str) -> BoxMap:
    """Offsets of the file that this header JSON describes; raises FormatError unless everything fits."""
    if zlib.crc32(header) != crc:
        raise FormatError(f"{path}: the header's checksum does not match")
    try:
        places = map_layout(_decode(json.loads(header)))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(f"{path}: the header does not describe a black box: {error}") from error
    if places.header_json != header or places.file_bytes != file_bytes:
        raise FormatError(f"{path}: {file_bytes} bytes, but the header describes {places.file_bytes}")
    return places


def _encode(layout: BoxLayout) -> bytes:
    document = {
        "json_bytes_max": layout.json_bytes_max,
        "regions": [
            {
                "name": r.name,
                "dtype": r.dtype,
                "shape": list(r.shape),
                "lazy": r.lazy,
                "in_epoch": r.in_epoch,
                "committed_only": r.committed_only,
            }
            for r in layout.regions
        ],
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _decode(document: dict[str, Any]) -> BoxLayout:
    return BoxLayout(
        regions=tuple(
            RegionSpec(
                name=str(r["name"]),
                dtype=str(r["dtype"]),
                shape=tuple(int(size) for size in r["shape"]),
                lazy=bool(r["lazy"]),
                in_epoch=bool(r["in_epoch"]),
                committed_only=bool(r["committed_only"]),
            )
            for r in document["regions"]
        ),
        json_bytes_max=int(document["json_bytes_max"]),
    )


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
