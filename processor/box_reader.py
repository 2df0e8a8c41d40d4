"""The reader's side of a black box: what a rank left behind, or writes at this moment."""

from __future__ import annotations

import json
import mmap
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lastwords.errors import FormatError, StorageError, UnavailableError
from lastwords.processor.box_layout import (
    PAGE_BYTES,
    SLOT_COUNTER,
    SLOT_JSON_BYTES,
    SLOT_KIND_AND_STEP,
    SLOT_SEQUENCE,
    WORD_STAND,
    BoxLayout,
    SlotKind,
    header_bytes,
    map_header,
)
from lastwords.processor.held_files import open_by_name
from lastwords.vocabulary import Phase, Stand


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

    @property
    def layout(self) -> BoxLayout:
        return self._map.layout

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
