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
import logging
import math
import mmap
import os
import re
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lastwords.checkpoint.codec import from_json
from lastwords.checkpoint.format import DTYPE_BITS
from lastwords.errors import ConfigError, FormatError, StorageError, UnavailableError
from lastwords.vocabulary import Phase, Stand

DTYPE_BYTES = {code: bits // 8 for code, bits in DTYPE_BITS.items()}
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
    header_json = json.dumps(asdict(layout), sort_keys=True, separators=(",", ":")).encode()
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
        places = map_layout(from_json(header, BoxLayout))
    except (FormatError, ConfigError) as error:
        raise FormatError(f"{path}: the header does not describe a black box: {error}") from error
    if places.header_json != header or places.file_bytes != file_bytes:
        raise FormatError(f"{path}: {file_bytes} bytes, but the header describes {places.file_bytes}")
    return places


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# Open files of a job's directory in /dev/shm, in case somebody empties that while the job runs.
#
# systemd removes whatever a user has there as soon as he logs out (`RemoveIPC=yes`, its default), and so do clean-up
# scripts. Black boxes and copies are found by name; those of a rank that dies afterwards would be lost with their
# names.

_log = logging.getLogger(__name__)

_NAMES = re.compile(r"rank_\d+\.(box|copy\d)")
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def open_by_name(path: Path) -> int:
    """A descriptor to read from; OSError."""
    return os.open(path, _FLAGS)


class HeldFiles:
    """Descriptors of all ranks' black boxes and copies in `directory`. Any thread.

    A file that is gone while others are there was removed by its owner: its memory is kept until the next `follow`.
    """

    def __init__(self, directory: Callable[[], Path]) -> None:
        self._directory = directory
        self._held: dict[str, tuple[int, int]] = {}
        """Name -> inode and descriptor."""
        self._lock = threading.Lock()
        self._told = self._closed = False

    def follow(self) -> None:
        """See which files there are now; some 50 µs with eight ranks."""
        there = self._there()
        if there is None:
            return
        with self._lock:
            if self._closed:
                return
            if not self._told and self._emptied(there):
                self._tell()
            for name in () if self._told else self._held.keys() - there.keys():
                os.close(self._held.pop(name)[1])
            for name, inode in there.items():
                if name in self._held and self._held[name][0] == inode:
                    continue
                try:
                    fd = open_by_name(self._directory() / name)
                except OSError:  # gone again; or no descriptor is left, which costs nothing as long as there are names
                    continue
                if name in self._held:
                    os.close(self._held[name][1])
                self._held[name] = os.fstat(fd).st_ino, fd

    def open(self, path: Path) -> int:
        """A descriptor to read from, of the file that was there last; OSError."""
        try:
            return open_by_name(path)
        except FileNotFoundError:
            with self._lock:
                if path.name not in self._held:
                    raise
                return os.dup(self._held[path.name][1])

    def copies(self) -> list[Path]:
        """Where files with whole copies of ranks are, or were before the directory was emptied, sorted."""
        there = self._there()
        with self._lock:
            lost = there is None or self._told or self._emptied(there)
            names = {*self._held, *(there or ())} if lost else there or ()
            return [self._directory() / name for name in sorted(names) if ".copy" in name]

    def close(self) -> None:
        """Hold none any more."""
        with self._lock:
            self._closed = True
            while self._held:
                os.close(self._held.popitem()[1][1])

    def _there(self) -> dict[str, int] | None:
        """None if that cannot be seen now: no descriptor is left, say."""
        try:
            with os.scandir(self._directory()) as found:
                return {one.name: one.inode() for one in found if _NAMES.fullmatch(one.name)}
        except FileNotFoundError:
            return {}
        except OSError as error:
            _log.warning("the files in %s cannot be looked for: %s", self._directory(), error)
            return None

    def _emptied(self, there: dict[str, int]) -> bool:
        return bool(self._held) and self._held.keys().isdisjoint(there)

    def _tell(self) -> None:
        self._told = True
        _log.warning(
            "somebody has emptied %s while the job runs: a rank that dies is saved all the same, but a controller "
            "that dies cannot be followed. Where systemd does so when you log out, run `loginctl enable-linger`",
            self._directory(),
        )


# The reader's side of a black box: what a rank left behind, or writes at this moment.


@dataclass(frozen=True, slots=True)
class RegionCopy:
    """A region as it was read."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """One copy out of a box, whole. `problem` is "" or says why `json` is missing."""

    kind: SlotKind
    step: int
    regions: dict[str, RegionCopy]
    json: dict[str, Any]
    problem: str = ""


_READ_TRIES = 50
_READ_PAUSE_S = 0.0002
"""A slot that is being written is ready again after some tens of microseconds; a dead writer's never is. So a
reader waits 10 ms at most."""


class BoxReader:
    """Reads a box, of a process that lives or of one that is dead. Works from the file alone.

    Data is fetched with pread, not through a mapping: a hole or a shortened file can then never raise SIGBUS.
    """

    def __init__(
        self,
        path: Path,
        *,
        opened: Callable[[Path], int] = open_by_name,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises UnavailableError if there is no such file, FormatError if it is not a black box.

        opened: gives a descriptor of it.
        """
        self.path = path
        self._pause = pause
        try:
            self._fd = opened(path)
        except FileNotFoundError as error:
            raise UnavailableError(f"no black box at {path}") from error
        except OSError as error:
            raise StorageError(f"cannot open the black box {path}: {error.strerror}", errno=error.errno or 0) from error
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                raise FormatError(f"{path} is not a black box: it is no regular file")
            file_bytes = found.st_size
            nbytes, crc = header_bytes(os.pread(self._fd, PAGE_BYTES, 0), str(path))
            self._map = map_header(os.pread(self._fd, nbytes, PAGE_BYTES), crc, file_bytes, str(path))
            mapping = mmap.mmap(self._fd, self._map.heads_end, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            os.close(self._fd)
            raise
        self._words = memoryview(mapping).cast("Q")
        self._mapping = mapping

    def close(self) -> None:
        """Give the file back; the reader is not used afterwards."""
        self._words.release()
        self._mapping.close()
        os.close(self._fd)

    def __enter__(self) -> BoxReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stand(self) -> Stand | None:
        """Where the rank stands, None if it has not said so yet."""
        word = self._words[WORD_STAND]
        if word == 0:
            return None
        try:
            return Stand(Phase(word & 0xFF), word >> 8)
        except ValueError as error:
            raise FormatError(f"{self.path}: {word:#x} is not a phase and a step") from error

    def read(self, step: int) -> SlotCopy | None:
        """The copy of `step`, the committed one if there is one; None if the box does not hold that step whole."""
        return self._read(self._map.step_slots, (SlotKind.COMMITTED, SlotKind.TENTATIVE), step)

    def read_epoch(self, epoch: int) -> SlotCopy | None:
        """The record of the start of `epoch`."""
        return self._read(self._map.epoch_slots, (SlotKind.EPOCH,), epoch)

    def facts(self) -> dict[str, Any]:
        """What holds for the whole run; empty if nothing was written, a reason where there was no room for it."""
        copy = self._read(self._map.facts_slots, (SlotKind.FACTS,), 0)
        return {} if copy is None else {"reasons": [{"detail": copy.problem}]} if copy.problem else copy.json

    def contents(self) -> tuple[tuple[SlotKind, int], ...]:
        """Kind and step of every copy that is whole, in the order in which they were written."""
        found = []
        for slot in self._map.step_slots + self._map.epoch_slots:
            copy = self._try_slot(slot)
            if copy is not None:
                found.append((self._words[self._head(slot) + SLOT_COUNTER], copy.kind, copy.step))
        return tuple((kind, step) for _, kind, step in sorted(found))

    def _read(self, slots: tuple[int, ...], kinds: tuple[SlotKind, ...], step: int) -> SlotCopy | None:
        for attempt in range(_READ_TRIES):
            if attempt:
                self._pause(_READ_PAUSE_S)
            found: list[tuple[int, int, SlotCopy]] = []
            torn = False
            for slot in slots:
                head = self._head(slot)
                counter, written = self._words[head + SLOT_COUNTER], self._words[head + SLOT_SEQUENCE] != 0
                copy = self._try_slot(slot, step)
                torn = torn or (written and copy is None)
                if copy is not None and copy.step == step and copy.kind in kinds:
                    found.append((-kinds.index(copy.kind), counter, copy))
            if found:
                return max(found, key=lambda entry: entry[:2])[2]
            if not torn:
                return None
        return None

    def _head(self, slot: int) -> int:
        return self._map.slots[slot].head_at // 8

    def _try_slot(self, slot: int, wanted: int | None = None) -> SlotCopy | None:
        """The slot's copy; None if it is being written or was never written.

        Data is read only if `wanted` is None or the slot's step.
        """
        place, words, head = self._map.slots[slot], self._words, self._head(slot)
        sequence = words[head + SLOT_SEQUENCE]
        if sequence % 2 or sequence == 0:
            return None
        step, kind = divmod(words[head + SLOT_KIND_AND_STEP], 256)
        json_bytes, lost = divmod(words[head + SLOT_JSON_BYTES], 2)
        regions: dict[str, RegionCopy] = {}
        text = b"{}"
        if wanted is None or step == wanted:
            present = os.pread(self._fd, len(self._map.layout.regions), place.present_at)
            for name, region in place.regions.items():
                if present[region.index]:
                    data = _pread_all(self._fd, region.spec.nbytes, region.offset)
                    regions[name] = RegionCopy(region.spec.dtype, region.spec.shape, data)
            if not lost and json_bytes <= self._map.layout.json_bytes_max:
                text = _pread_all(self._fd, json_bytes, place.json_at) or b"{}"
        if words[head + SLOT_SEQUENCE] != sequence:
            return None
        try:
            document = json.loads(text)
            if not isinstance(document, dict):
                raise ValueError("not an object")
            copy_kind = SlotKind(kind)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{self.path}: slot {slot} is damaged: {error}") from error
        problem = f"{json_bytes} bytes of JSON did not fit into the black box" if lost else ""
        return SlotCopy(copy_kind, step, regions, document, problem)


def _pread_all(fd: int, nbytes: int, at: int) -> bytes:
    """Exactly `nbytes`: one pread returns 2 GiB at most."""
    data = os.pread(fd, nbytes, at)
    if len(data) == nbytes:
        return data
    parts = [data]
    while (missing := nbytes - sum(map(len, parts))) > 0:
        parts.append(os.pread(fd, missing, at + nbytes - missing))
        if not parts[-1]:
            raise FormatError(f"black box: ends {missing} bytes too early")
    return b"".join(parts)
