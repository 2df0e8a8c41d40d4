"""A black box that goes on from another one of this process, with other regions: what both have is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lastwords.errors import StorageError
from lastwords.processor.box_layout import (
    SLOT_COUNTER,
    SLOT_JSON_BYTES,
    SLOT_KIND_AND_STEP,
    SLOT_SEQUENCE,
    WORD_STAND,
)

if TYPE_CHECKING:
    from lastwords.processor.black_box import BlackBox


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
