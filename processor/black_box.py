"""A rank's last words: a file in shared memory that is always readable, also after kill -9 in the middle of a write.

One writer (the training thread), any number of readers (other processes; savers of this one). A page of a tmpfs
file keeps every store of a killed process, in program order, so nothing is ever flushed.

**Which copies can be needed.** Let the dead rank have ended M. The controller picks N = the largest step that a
healthy rank h has ended or begun to update.
- N >= M-1: the collective of M completed for the dead rank, so h had entered it and therefore had ended M-1.
- N <= M+1: h has begun N only after the collective of N completed, so the dead rank had entered that one; it
  enters the collective of M+2 only after it has ended M+1.
- N = M+1 is possible although M+1 was not ended here: hence the *tentative* copy of M+1, taken when the forward is
  done and before the collective. As it is complete before the collective is entered, N = M+1 implies that it is.
So the committed copies of M-1 and M and the newest tentative copy are all that can be needed at any instant.

**The rule.** A write goes into a slot that holds none of these three. Hence four slots, and a kill at any store
leaves all three whole; readers know the slot under way by its odd sequence number. Three slots would do if the
tentative copy were taken exactly once in a step (its write may then take the place of the older one, the committed
write that of M-1, which is not needed any more once the collective is passed); but a loop that calls the model
twice in a step rewrites the tentative copy when it may already be needed, and one more slot is cheaper than that
condition.

Epoch records: M-1, M and M+1 lie in at most three consecutive epochs, the record of the newest is complete before its
first tentative copy is, and while it is written only the two before it can be needed. Facts alternate between two.

A loop that skips steps without any collective can run further ahead; then `read` finds nothing: "not exact".
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

from lastwords.checkpoint.system import REAL_OS, pwrite_all
from lastwords.errors import ConfigError, StorageError
from lastwords.liveness import paths
from lastwords.processor.box_layout import (
    PAGE_BYTES,
    SLOT_COUNTER,
    SLOT_JSON_BYTES,
    SLOT_KIND_AND_STEP,
    SLOT_SEQUENCE,
    WORD_STAND,
    BoxLayout,
    BoxMap,
    SlotKind,
    map_layout,
)

# A black box that goes on from another one of this process, with other regions: what both have is copied.


def carry_over(old: BlackBox, new: BlackBox) -> None:
    """Give `new`, which nobody reads yet, all copies of `old` and what that one knows of them.

    StorageError where there is no room.
    """
    for name, place in old._map.slots[0].regions.items():
        if place.spec.lazy and old.is_active(name) and name in new._map.slots[0].regions:
            new.activate(name)
    for slot in range(len(old._map.slots)):
        _regions(old, new, slot)
        _head(old, new, slot)
    new._words[WORD_STAND] = old._words[WORD_STAND]
    new._committed, new._committed_step = old._committed, old._committed_step
    new._committed_before = old._committed_before
    new._tentative, new._tentative_step = old._tentative, -1  # it lacks what is new: nothing to compare with
    new._counter, new._sequences, new._next_of = old._counter, [*old._sequences], {**old._next_of}


def _regions(old: BlackBox, new: BlackBox, slot: int) -> None:
    there, here = old._map.slots[slot], new._map.slots[slot]
    for name, place in there.regions.items():
        known = here.regions.get(name)
        if known is not None and known.spec == place.spec and old._bytes[there.present_at + place.index]:
            if place.spec.lazy:
                new._reserve(known.offset, place.spec.nbytes)  # it may be in use in older copies alone
            new._bytes[here.present_at + known.index] = 1
            new.region(slot, name)[:] = old.region(slot, name)


def _head(old: BlackBox, new: BlackBox, slot: int) -> None:
    there, here = old._head_words[slot], new._head_words[slot]
    nbytes, lost = divmod(old._words[there + SLOT_JSON_BYTES], 2)
    if not lost:
        if nbytes > new._json_reserved and not new._reserve_json(nbytes):
            raise StorageError(f"no room for {nbytes} bytes of JSON in the black box {new.path}; enlarge /dev/shm")
        at, to = old._json_at[slot], new._json_at[slot]
        new._bytes[to : to + nbytes] = old._bytes[at : at + nbytes]
    for word in (SLOT_KIND_AND_STEP, SLOT_COUNTER, SLOT_JSON_BYTES, SLOT_SEQUENCE):
        new._words[here + word] = old._words[there + word]


_JSON_RESERVE_BYTES = 4 * PAGE_BYTES
_NO_SLOT = -1

_COPY_BYTES_MAX = 64 * 1024
"""Up to here a copy in an object that Python compares by itself is quicker than a call through ctypes (7 us in situ).
Two memoryviews would be compared byte by byte, through Python's format codes."""


class BlackBox:
    """The writer's side, for the training thread. Its mapping stays as long as it or a view of it is kept."""

    def __init__(self, path: Path, places: BoxMap, fd: int) -> None:
        self.path = path
        self.layout = places.layout
        self._map = places
        self._fd = fd
        self._mapping = mmap.mmap(fd, places.file_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._bytes = memoryview(self._mapping)
        self._words: Any = self._bytes.cast("Q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._head_words = tuple(slot.head_at // 8 for slot in places.slots)
        self._json_at = tuple(slot.json_at for slot in places.slots)
        # Regions that are not lazy lie side by side, and the gaps between them are never written.
        self._eager = tuple(self._bytes[slot.data_at : slot.eager_end] for slot in places.slots)
        self._active_lazy: tuple[str, ...] = ()
        self._sequences = [0] * len(places.slots)
        self._counter = 0
        self._json_reserved = min(_JSON_RESERVE_BYTES, places.layout.json_bytes_max)
        # Which lazy regions are in use, and up to which activation each slot's head says so.
        self._present = bytearray(0 if region.lazy else 1 for region in places.layout.regions)
        self._activations = 1
        self._slot_activations = [0] * len(places.slots)
        self._of_committed = tuple(place for place, region in enumerate(places.layout.regions) if region.committed_only)
        self._committed = _NO_SLOT
        self._committed_step = -1
        self._committed_before = _NO_SLOT
        self._tentative = _NO_SLOT
        self._tentative_step = -1
        self._next_of = {SlotKind.EPOCH: places.epoch_slots[0], SlotKind.FACTS: places.facts_slots[0]}
        self.step_slots = places.step_slots
        """Slot numbers that `begin` gives for TENTATIVE and COMMITTED."""
        self.epoch_slots = places.epoch_slots
        """And for EPOCH; only regions with `in_epoch` are in them."""
        self.open_kind = SlotKind.TENTATIVE
        """What the step slot is that `begin` gave last: TENTATIVE or COMMITTED."""
        self._open_step = 0

    @classmethod
    def create(
        cls,
        path: Path,
        layout: BoxLayout,
        *,
        carried: BlackBox | None = None,
    ) -> BlackBox:
        """Make the file, with its memory reserved, and open it for writing; an older file of that name is replaced.

        carried: a box of this process whose copies the new one begins with, in the regions that both have; a process
        that dies here leaves one of the two whole. Raises StorageError if there is no room (the default /dev/shm of a
        container has 64 MB): without the reservation the process would be killed by SIGBUS at some later store instead.
        """
        places = map_layout(layout)
        try:
            with paths.replacing(path) as fd:
                os.ftruncate(fd, places.file_bytes)
                for at, nbytes in places.needed_from_the_start(_JSON_RESERVE_BYTES):
                    os.posix_fallocate(fd, at, nbytes)
                pwrite_all(REAL_OS, fd, places.preamble())
                pwrite_all(REAL_OS, fd, places.header_json, PAGE_BYTES)
                box = cls(path, places, os.dup(fd))
                if carried is not None:
                    carry_over(carried, box)
            os.close(fd)
            return box
        except OSError as error:
            raise StorageError(
                f"cannot create the black box {path}: {error.strerror}; enlarge /dev/shm (docker: --shm-size)",
                errno=error.errno or 0,
            ) from error

    def __del__(self) -> None:
        os.close(self._fd)

    def set_stand(self, phase: int, step: int) -> None:
        """Say where the rank stands: one 8-byte store, readable from outside at any time."""
        self._words[WORD_STAND] = step << 8 | phase

    def region(self, slot: int, name: str) -> memoryview:
        """Bytes of one region of one slot. Stable for the life of the box: make tensors over them once.

        A lazy region must be activated before its bytes are touched.
        """
        place = self._map.slots[slot].regions[name]
        return self._bytes[place.offset : place.offset + place.spec.nbytes]

    def is_active(self, name: str) -> bool:
        """Whether a region is part of the copies that are written from now on."""
        place = self._map.slots[0].regions.get(name)
        return place is not None and bool(self._present[place.index])

    def activate(self, name: str) -> None:
        """Make a lazy region part of all copies begun from now on. Raises StorageError if there is no room for it."""
        if self.is_active(name):
            return
        for slot in self._map.slots:
            place = slot.regions.get(name)
            if place is not None and place.spec.nbytes:
                self._reserve(place.offset, place.spec.nbytes)
        self._set_present(name, 1)

    def deactivate(self, name: str) -> None:
        """Leave a region out of all copies begun from now on."""
        self._set_present(name, 0)

    def has_in(self, slot: int, name: str) -> bool:
        """Whether the copy in `slot` has this region. Any thread, while nothing is written there."""
        place = self._map.slots[slot]
        return name in place.regions and bool(self._bytes[place.present_at + place.regions[name].index])

    def leave_out(self, slot: int, name: str) -> None:
        """The copy that is open in `slot` has no such region after all."""
        place = self._map.slots[slot]
        self._bytes[place.present_at + place.regions[name].index] = 0

    def begin(self, kind: SlotKind, step: int) -> int:
        """Open a slot for a copy of `step` (of an epoch: its number; facts: 0); returns the slot's number.

        The slot is not readable until `commit`; if that never comes, it is as if `begin` had not happened.
        """
        slot = self._free_slot(kind, step)
        words = self._words
        head = self._head_words[slot]
        sequence = (self._sequences[slot] + 1) | 1
        self._sequences[slot] = sequence
        words[head + SLOT_SEQUENCE] = sequence  # odd: before anything else in the slot changes
        words[head + SLOT_KIND_AND_STEP] = step << 8 | kind
        if self._slot_activations[slot] != self._activations or self._of_committed:
            at = self._map.slots[slot].present_at
            self._bytes[at : at + len(self._present)] = self._present if kind != SlotKind.TENTATIVE else self._early()
            self._slot_activations[slot] = self._activations
        if kind <= SlotKind.COMMITTED:  # facts may be written while a step's slot is open
            self.open_kind = kind
            self._open_step = step
        return slot

    def commit(self, slot: int, json_bytes: bytes = b"{}") -> None:
        """Close the slot that `begin` gave. `json_bytes` is an encoded JSON object.

        JSON for which there is no room is left out and the copy says so (`SlotCopy.problem`): training goes on.
        """
        words = self._words
        head = self._head_words[slot]
        nbytes = len(json_bytes)
        if nbytes <= self._json_reserved or self._reserve_json(nbytes):
            at = self._json_at[slot]
            self._bytes[at : at + nbytes] = json_bytes
            words[head + SLOT_JSON_BYTES] = nbytes << 1
        else:
            words[head + SLOT_JSON_BYTES] = nbytes << 1 | 1  # lost
        self._counter += 1
        words[head + SLOT_COUNTER] = self._counter
        sequence = self._sequences[slot] + 1
        self._sequences[slot] = sequence
        words[head + SLOT_SEQUENCE] = sequence  # even: the very last store
        if slot >= len(self.step_slots):
            kind = SlotKind.EPOCH if slot in self._map.epoch_slots else SlotKind.FACTS
            slots = self._map.epoch_slots if kind is SlotKind.EPOCH else self._map.facts_slots
            self._next_of[kind] = slots[(slots.index(slot) + 1) % len(slots)]
        elif self.open_kind is SlotKind.COMMITTED:
            if self._open_step != self._committed_step:
                self._committed_before = self._committed
                self._committed_step = self._open_step
            self._committed = slot
        else:
            self._tentative = slot
            self._tentative_step = self._open_step

    def set_facts(self, facts: bytes) -> None:
        """Store what holds for the whole run (an encoded JSON object); may be replaced later."""
        self.commit(self.begin(SlotKind.FACTS, 0), facts)

    def slot_of(self, step: int, *, committed: bool = False) -> int | None:
        """Where the copy of `step` is that a reader gets: the committed one if there is one, or it alone."""
        slots: tuple[int, ...] = (self._committed, self._committed_before, *(() if committed else (self._tentative,)))
        for slot in slots:
            if slot != _NO_SLOT and self._words[self._head_words[slot] + SLOT_KIND_AND_STEP] >> 8 == step:
                return slot
        return None

    def compare_tentative(self) -> str | None:
        """Compare the newest committed copy with the tentative one of the same step.

        Returns the name of the first region that differs, None if all are equal (or there is no such pair).
        Costs a memcmp of the regions in use.
        """
        if self._tentative_step != self._committed_step or self._committed < 0:
            return None
        return self.first_difference(self._committed, self._tentative)

    def _free_slot(self, kind: SlotKind, step: int) -> int:
        if kind > SlotKind.COMMITTED:
            return self._next_of[kind]
        if step < self._committed_step or (kind is SlotKind.TENTATIVE and step == self._committed_step):
            raise ConfigError(
                f"black box: a {kind.name.lower()} copy of step {step} after step {self._committed_step} was ended"
            )
        for slot in self.step_slots:
            if slot != self._committed and slot != self._committed_before and slot != self._tentative:
                return slot
        raise AssertionError("three of four slots at most are in use")

    def _early(self) -> bytearray:
        """Which regions a tentative copy has."""
        present = self._present.copy()
        for place in self._of_committed:
            present[place] = 0
        return present

    def first_difference(self, one: int, other: int) -> str | None:
        """Name of the first region in which the copies in two step slots differ, None if they are equal."""
        same_set = self._slot_activations[one] == self._slot_activations[other]
        if same_set and self._eager_equal(one, other):
            lazy = self._active_lazy
            if not lazy or all(self._same(name, one, other) for name in lazy):
                return None
        here, there = self._map.slots[one], self._map.slots[other]
        for name, place in here.regions.items():
            if place.spec.committed_only:
                continue
            if self._bytes[here.present_at + place.index] != self._bytes[there.present_at + place.index]:
                return name
            if self._present[place.index] and not self._same(name, one, other):
                return name
        return None

    def _eager_equal(self, one: int, other: int) -> bool:
        here, there = self._eager[one], self._eager[other]
        if len(here) <= _COPY_BYTES_MAX:
            return bytearray(here) == there
        at = self._address
        places = self._map.slots
        return bool(_memcmp(at + places[one].data_at, at + places[other].data_at, len(here)) == 0)

    def _set_present(self, name: str, present: int) -> None:
        regions = self._map.slots[0].regions
        place = regions[name]
        self._present[place.index] = present
        self._activations += 1
        if place.spec.lazy and not place.spec.committed_only:
            others = tuple(other for other in self._active_lazy if other != name)
            self._active_lazy = (*others, name) if present else others

    def _same(self, name: str, one: int, other: int) -> bool:
        here, there = self._map.slots[one].regions[name], self._map.slots[other].regions[name]
        return bool(_memcmp(self._address + here.offset, self._address + there.offset, here.spec.nbytes) == 0)

    def _reserve_json(self, nbytes: int) -> bool:
        if nbytes > self.layout.json_bytes_max:
            return False
        # Twice what is needed now, so that slowly growing JSON does not reserve in every step.
        wanted = min(self.layout.json_bytes_max, 2 * nbytes)
        try:
            for at in self._json_at:
                self._reserve(at, wanted)
        except StorageError:
            return False
        self._json_reserved = wanted
        return True

    def _reserve(self, at: int, nbytes: int) -> None:
        try:
            os.posix_fallocate(self._fd, at, nbytes)
        except OSError as error:
            raise StorageError(
                f"no room for {nbytes} more bytes in the black box {self.path}: {error.strerror}; enlarge /dev/shm",
                errno=error.errno or 0,
            ) from error


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcmp.restype = ctypes.c_int
