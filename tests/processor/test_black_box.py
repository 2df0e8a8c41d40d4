"""The black box: whatever is killed whenever, the copies that can be needed are there and whole."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lastwords.checkpoint.entries import Reason
from lastwords.errors import ConfigError, FormatError, StorageError, UnavailableError
from lastwords.processor import black_box, box_layout
from lastwords.processor.black_box import BlackBox
from lastwords.processor.box_layout import (
    SLOT_SEQUENCE,
    BoxLayout,
    BoxReader,
    RegionSpec,
    SlotCopy,
    SlotKind,
    map_layout,
)
from lastwords.vocabulary import Phase, Stand
from tests import golden
from tests.shortage import open_files

TENTATIVE, COMMITTED = SlotKind.TENTATIVE, SlotKind.COMMITTED
LAYOUT = BoxLayout(
    (
        RegionSpec("rng/torch", "U8", (37,), in_epoch=True),
        RegionSpec("buffer/bn.mean", "F32", (5,)),
        RegionSpec("buffer/bn.count", "I64", ()),
    ),
    json_bytes_max=256,
)
STEPS = 6


def no_pause(_: float) -> None:
    """Readers of a dead writer's box have nothing to wait for."""


# --------------------------------------------------------------------------- a writer that can be killed anywhere


class Killed(BaseException):
    """The writer ends here."""


class Stores:
    """A view of the box's memory that reports each store."""

    def __init__(self, view: memoryview, after_store: Callable[[], None]) -> None:
        self._view = view
        self._after_store = after_store

    def __setitem__(self, key: Any, value: Any) -> None:
        self._view[key] = value
        self._after_store()

    def __getitem__(self, key: Any) -> Any:
        return self._view[key]


class Job:
    """A rank's training loop around its box, as far as the box can see it, and what its peers can ask for meanwhile.

    Every store into the box and every move of the rank passes `tick`, which a test uses to look into the file.
    Contents are made from kind, step and number of the copy, so that a mixture of two copies is recognised.
    """

    def __init__(self, box_type: type[BlackBox], path: Path, tick: Callable[[], None], *, forwards: int) -> None:
        self.tick: Callable[[], None] = lambda: None
        self.box: Any = box_type.create(path, LAYOUT)
        # The writer stores through these two alone, but for what goes into a region's own view.
        self.box._words, self.box._bytes = (
            Stores(view, lambda: self.tick()) for view in (self.box._words, self.box._bytes)
        )
        self.path = path
        self.forwards = forwards
        self.ended_step = 0
        self.may_be_needed: frozenset[int] = frozenset()
        self.steps_an_epoch = 1
        self.epochs_may_be_needed: frozenset[int] = frozenset()
        self._write(COMMITTED, 0, 0)
        self.may_be_needed = frozenset((0,))
        self.tick = tick

    def run(self, steps: int = STEPS) -> None:
        for step in range(1, steps + 1):
            # Ended M = step - 1. A healthy peer has ended M - 1 at least, and none has begun M + 1.
            before = frozenset((max(step - 2, 0), step - 1))
            self._moved(before)
            if (step - 1) % self.steps_an_epoch == 0:
                self._write_epoch((step - 1) // self.steps_an_epoch + 1)
            for number in range(self.forwards):
                self._write(TENTATIVE, step, number)
            # The collective of M + 1: entered. Once it completes for a peer, that peer may begin M + 1 ...
            self._moved(before | {step})
            if self.forwards > 1:
                # ... which this rank cannot know, when its loop calls the model again before it updates.
                self._write(TENTATIVE, step, self.forwards)
            # ... and once it completes here, every peer has ended M.
            self._moved(frozenset((step - 1, step)))
            self._write(COMMITTED, step, 0)
            self.box.compare_tentative()
            self.ended_step = step

    def _moved(self, may_be_needed: frozenset[int]) -> None:
        self.may_be_needed = may_be_needed
        self.epochs_may_be_needed = frozenset((step - 1) // self.steps_an_epoch + 1 for step in may_be_needed if step)
        self.tick()

    def _write(self, kind: SlotKind, step: int, number: int) -> None:
        slot = self.box.begin(kind, step)
        for name, value in contents(step).items():
            view = self.box.region(slot, name)
            for at in range(0, len(view), 9):
                view[at : at + 9] = value[at : at + 9]
                self.tick()
        self.box.commit(slot, document(kind, step))

    def _write_epoch(self, epoch: int) -> None:
        slot = self.box.begin(SlotKind.EPOCH, epoch)
        view = self.box.region(slot, "rng/torch")
        for at in range(0, len(view), 9):
            view[at : at + 9] = contents(epoch)["rng/torch"][at : at + 9]
            self.tick()
        self.box.commit(slot, document(SlotKind.EPOCH, epoch))


def contents(step: int) -> dict[str, bytes]:
    pattern = random.Random(step)
    return {region.name: pattern.randbytes(region.nbytes) for region in LAYOUT.regions}


def document(kind: SlotKind, step: int) -> bytes:
    return json.dumps({"kind": kind.name, "step": step, "padding": "x" * (step * 7 % 40)}).encode()


def defects(job: Job, reader_type: type[BoxReader]) -> Iterator[str]:
    """What a survivor finds wrong if the job's process ended at this very store."""
    with reader_type(job.path, pause=no_pause) as reader:
        for step in sorted(job.may_be_needed):
            copy = reader.read(step)
            if copy is None:
                yield f"step {step} is needed and not there"
            else:
                yield from mixed(copy)
        for epoch in sorted(job.epochs_may_be_needed):
            if reader.read_epoch(epoch) is None:
                yield f"epoch {epoch} is needed and not there"
        for _, step in reader.contents():
            held = reader.read(step)
            if held is not None:
                yield from mixed(held)


def mixed(copy: SlotCopy) -> Iterator[str]:
    expected = contents(copy.step)
    for name, region in copy.regions.items():
        if bytes(region.data) != expected[name]:
            yield f"torn copy accepted: {name} of {copy.kind.name} {copy.step}"
    if copy.json != json.loads(document(copy.kind, copy.step)):
        yield f"torn copy accepted: JSON of {copy.kind.name} {copy.step}"


def crash_at_every_store(
    directory: Path,
    *,
    box_type: type[BlackBox] = BlackBox,
    reader_type: type[BoxReader] = BoxReader,
    forwards: int = 1,
    steps_an_epoch: int = 1,
) -> tuple[int, set[str]]:
    """Look into the file after each store of a run, as a survivor would: (number of stores, all defects)."""
    found: set[str] = set()
    stores = 0

    def look() -> None:
        nonlocal stores
        stores += 1
        try:
            found.update(defects(job, reader_type))
        except FormatError as error:
            found.add(f"torn copy accepted: {error}")

    job = Job(box_type, directory / "rank_0.box", look, forwards=forwards)
    job.steps_an_epoch = steps_an_epoch
    job.run()
    return stores, found


@pytest.mark.ci
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("steps_an_epoch", [1, 2, 3])
def test_a_kill_at_any_store_leaves_every_copy_that_can_be_needed(
    tmp_path: Path, forwards: int, steps_an_epoch: int
) -> None:
    stores, found = crash_at_every_store(tmp_path, forwards=forwards, steps_an_epoch=steps_an_epoch)
    assert stores > 200
    assert found == set()


class _FewerSlots(BlackBox):
    """Negative controls: the same box with fewer slots, each chosen as well as it can be."""

    COUNT = 2

    def _free_slot(self, kind: SlotKind, step: int) -> int:
        if kind > COMMITTED:
            return super()._free_slot(kind, step)
        # What is dearest last: the newest committed copy, then the tentative one when committing, or M-1 otherwise.
        last = self._tentative if kind is COMMITTED else self._committed_before
        for slot in range(self.COUNT):
            if slot not in (self._committed, last):
                return slot
        return last if last != self._committed else 1 - self._committed


class _ThreeSlots(_FewerSlots):
    COUNT = 3


def test_two_slots_lose_a_copy_that_is_needed(tmp_path: Path) -> None:
    _, found = crash_at_every_store(tmp_path, box_type=_FewerSlots)
    assert any("needed" in defect for defect in found)


@pytest.mark.ci
def test_three_slots_are_enough_only_if_the_model_is_called_once_in_a_step(tmp_path: Path) -> None:
    assert crash_at_every_store(tmp_path, box_type=_ThreeSlots)[1] == set()
    _, found = crash_at_every_store(tmp_path, box_type=_ThreeSlots, forwards=2)
    assert any("needed" in defect for defect in found)


class _TwoEpochs(BlackBox):
    """Negative control: two records of epochs' starts instead of three."""

    def commit(self, slot: int, json_bytes: bytes = b"{}") -> None:
        super().commit(slot, json_bytes)
        first, second, _ = self.epoch_slots
        self._next_of[SlotKind.EPOCH] = second if self._next_of[SlotKind.EPOCH] == second else first


def test_two_epoch_records_are_not_enough_for_epochs_of_one_step(tmp_path: Path) -> None:
    _, found = crash_at_every_store(tmp_path, box_type=_TwoEpochs, steps_an_epoch=1)
    assert any(defect.startswith("epoch") for defect in found)


class _NeverOdd(BlackBox):
    """Negative control: a writer that does not mark the slot under way."""

    def begin(self, kind: SlotKind, step: int) -> int:
        words = self._words
        quiet = self._words = _SkipOddSequences(words, {head + SLOT_SEQUENCE for head in self._head_words})
        try:
            return super().begin(kind, step)
        finally:
            del quiet
            self._words = words


class _SkipOddSequences:
    def __init__(self, words: Any, sequence_words: set[int]) -> None:
        self._words, self._sequence_words = words, sequence_words

    def __setitem__(self, index: int, value: int) -> None:
        if not (index in self._sequence_words and value % 2):
            self._words[index] = value

    def __getitem__(self, index: int) -> int:
        word: int = self._words[index]
        return word


def test_without_sequence_numbers_torn_copies_are_accepted(tmp_path: Path) -> None:
    _, found = crash_at_every_store(tmp_path, box_type=_NeverOdd)
    assert any("torn" in defect for defect in found)


def test_a_reader_beside_a_living_writer_never_gets_a_torn_copy(tmp_path: Path) -> None:
    # The writer moves on in the middle of every read: at each of the reader's looks at a sequence number.
    box = BlackBox.create(tmp_path / "rank_0.box", LAYOUT)
    fill(box, COMMITTED, 1)
    reader = BoxReader(box.path, pause=no_pause)
    moves = iter(range(2, 40))
    original = os.pread

    def pread_while_writing(fd: int, nbytes: int, at: int) -> bytes:
        step = next(moves, None)
        if step is not None:
            fill(box, TENTATIVE, step)
            fill(box, COMMITTED, step)
        return original(fd, nbytes, at)

    reads = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lastwords.processor.box_layout.os.pread", pread_while_writing)
        for step in range(1, 40):
            copy = reader.read(step)
            if copy is not None:
                reads += 1
                assert list(mixed(copy)) == []
    assert reads > 0
    reader.close()


def write_slot(box: BlackBox, kind: SlotKind, step: int, fill: Callable[[int], None], json_bytes: bytes = b"{}") -> int:
    slot = box.begin(kind, step)
    fill(slot)
    box.commit(slot, json_bytes)
    return slot


def fill(box: BlackBox, kind: SlotKind, step: int) -> int:
    def regions(slot: int) -> None:
        for name, value in contents(step).items():
            if box.is_active(name):
                box.region(slot, name)[:] = value

    return write_slot(box, kind, step, regions, document(kind, step))


# --------------------------------------------------------------------------- what is read


@pytest.fixture
def box(tmp_path: Path) -> BlackBox:
    return BlackBox.create(tmp_path / "rank_0.box", LAYOUT)


def read(box: BlackBox, step: int) -> SlotCopy | None:
    with BoxReader(box.path, pause=no_pause) as reader:
        return reader.read(step)


def test_a_committed_copy_is_preferred_to_the_tentative_one(box: BlackBox) -> None:
    fill(box, TENTATIVE, 1)
    first = read(box, 1)
    fill(box, COMMITTED, 1)
    second = read(box, 1)
    assert first is not None
    assert second is not None
    assert (first.kind, second.kind) == (TENTATIVE, COMMITTED)


def test_the_newest_of_two_tentative_copies_is_read(box: BlackBox) -> None:
    fill(box, TENTATIVE, 1)
    slot = fill(box, TENTATIVE, 1)
    box.region(slot, "rng/torch")[:] = b"z" * 37
    copy = read(box, 1)
    assert copy is not None
    assert copy.regions["rng/torch"].data == b"z" * 37


def test_a_copy_brings_names_types_shapes_and_json(box: BlackBox) -> None:
    fill(box, COMMITTED, 3)
    copy = read(box, 3)
    assert copy is not None
    assert {name: (region.dtype, region.shape) for name, region in copy.regions.items()} == {
        "rng/torch": ("U8", (37,)),
        "buffer/bn.mean": ("F32", (5,)),
        "buffer/bn.count": ("I64", ()),
    }
    assert copy.json["step"] == 3
    assert copy.problem == ""


def test_a_step_that_the_box_does_not_hold_is_none(box: BlackBox) -> None:
    for step in range(1, 6):
        fill(box, COMMITTED, step)
    assert read(box, 6) is None
    assert read(box, 2) is None
    assert read(box, 4) is not None


def test_a_copy_that_was_begun_and_never_ended_is_as_if_it_had_not_been(box: BlackBox) -> None:
    fill(box, COMMITTED, 1)
    box.begin(TENTATIVE, 2)  # an exception in what fills it
    assert read(box, 2) is None
    fill(box, TENTATIVE, 2)
    assert read(box, 2) is not None
    assert read(box, 1) is not None


def test_a_committed_copy_may_be_written_twice_without_losing_the_one_before(box: BlackBox) -> None:
    fill(box, COMMITTED, 1)
    fill(box, COMMITTED, 2)
    fill(box, COMMITTED, 2)
    fill(box, TENTATIVE, 3)
    assert [read(box, step) is not None for step in (1, 2, 3)] == [True, True, True]


def test_steps_do_not_run_backwards(box: BlackBox) -> None:
    fill(box, COMMITTED, 5)
    with golden.raises(ConfigError):
        box.begin(COMMITTED, 4)
    with pytest.raises(ConfigError, match="tentative"):
        box.begin(TENTATIVE, 5)


def test_the_stand_is_one_word_that_others_read(box: BlackBox) -> None:
    with BoxReader(box.path) as reader:
        assert reader.stand() is None
        for phase in Phase:
            box.set_stand(phase, 2**40 + 3)
            assert reader.stand() == Stand(phase, 2**40 + 3)
        box.set_stand(99, 1)
        with pytest.raises(FormatError, match="not a phase"):
            reader.stand()


def test_facts_are_read_back_and_may_be_replaced(box: BlackBox) -> None:
    with BoxReader(box.path, pause=no_pause) as reader:
        assert reader.facts() == {}
        for count in range(5):
            box.set_facts(json.dumps({"steps_per_epoch": count}).encode())
            assert reader.facts() == {"steps_per_epoch": count}
        box.begin(SlotKind.FACTS, 0)  # killed while replacing them
        assert reader.facts() == {"steps_per_epoch": 4}


def test_facts_for_which_there_is_no_room_are_a_reason(tmp_path: Path) -> None:
    box = BlackBox.create(tmp_path / "rank_0.box", BoxLayout((), json_bytes_max=100))
    box.set_facts(b'{"reasons": []}')
    box.set_facts(b'{"reasons": ["%s"]}' % (b"x" * 200))
    with BoxReader(box.path, pause=no_pause) as reader:
        (reason,) = reader.facts()["reasons"]
    assert msgspec.convert(reason, Reason).detail == "217 bytes of JSON did not fit into the black box"


def test_facts_may_be_written_while_a_step_is_under_way(box: BlackBox) -> None:
    fill(box, TENTATIVE, 1)
    slot = box.begin(COMMITTED, 1)
    box.set_facts(b'{"reasons": ["late"]}')
    for name, value in contents(1).items():
        box.region(slot, name)[:] = value
    box.commit(slot, document(COMMITTED, 1))
    assert box.compare_tentative() is None
    fill(box, TENTATIVE, 2)
    copy = read(box, 1)
    assert copy is not None
    assert (copy.kind, list(mixed(copy))) == (COMMITTED, [])


def test_what_was_never_written_is_not_waited_for(box: BlackBox) -> None:
    def pause(_: float) -> None:
        raise AssertionError("nobody writes")

    with BoxReader(box.path, pause=pause) as reader:
        assert reader.read_epoch(1) is None
        assert reader.read(1) is None
    box.begin(SlotKind.EPOCH, 1)
    with BoxReader(box.path, pause=pause) as reader, pytest.raises(AssertionError):
        reader.read_epoch(1)


def test_epoch_records_hold_only_what_belongs_to_an_epoch(box: BlackBox) -> None:
    slot = box.begin(SlotKind.EPOCH, 7)
    box.region(slot, "rng/torch")[:] = b"e" * 37
    with pytest.raises(KeyError):
        box.region(slot, "buffer/bn.mean")
    box.commit(slot, b'{"sampler": 1}')
    with BoxReader(box.path, pause=no_pause) as reader:
        copy = reader.read_epoch(7)
        assert copy is not None
        assert copy.regions.keys() == {"rng/torch"}
        assert copy.json == {"sampler": 1}
        assert reader.read_epoch(6) is None
        assert reader.read(7) is None


# --------------------------------------------------------------------------- tentative against committed


@pytest.mark.parametrize("copied", [True, False], ids=["small", "large"])
@pytest.mark.parametrize("region", [region.name for region in LAYOUT.regions])
def test_one_different_bit_is_found_and_named(
    box: BlackBox, region: str, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(black_box, "_COPY_BYTES_MAX", 1 << 20 if copied else 0)
    for step in (1, 2, 3):
        fill(box, TENTATIVE, step)
        slot = fill(box, COMMITTED, step)
        if step == 2:
            box.region(slot, region)[-1] ^= 1
        assert box.compare_tentative() == (region if step == 2 else None)


def test_a_step_without_a_tentative_copy_is_not_compared(box: BlackBox) -> None:
    fill(box, TENTATIVE, 1)
    slot = fill(box, COMMITTED, 1)
    box.region(slot, "rng/torch")[-1] ^= 1
    assert box.compare_tentative() == "rng/torch"
    fill(box, COMMITTED, 2)
    assert box.compare_tentative() is None


# --------------------------------------------------------------------------- regions that come late, JSON that grows

LAZY = BoxLayout(
    (
        RegionSpec("buffer/large", "F32", (1 << 18,), lazy=True),
        RegionSpec("rng/torch", "U8", (8,)),
        RegionSpec("buffer/other", "F32", (1 << 18,), lazy=True),
    )
)


def memory_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_a_large_region_costs_nothing_until_it_is_activated(tmp_path: Path) -> None:
    box = BlackBox.create(tmp_path / "rank_0.box", LAZY)
    before = memory_bytes(box.path)
    assert before < 1 << 20 < box.path.stat().st_size
    box.activate("buffer/large")
    after = memory_bytes(box.path)
    box.activate("buffer/large")
    assert after - before == len(box.step_slots) * (1 << 20)
    assert memory_bytes(box.path) == after


def test_a_region_is_part_of_the_copies_begun_after_its_activation(tmp_path: Path) -> None:
    box = BlackBox.create(tmp_path / "rank_0.box", LAZY)
    write_slot(box, COMMITTED, 1, lambda _: None)
    box.activate("buffer/large")
    write_slot(box, COMMITTED, 2, lambda slot: box.region(slot, "buffer/large").__setitem__(0, 9))
    box.deactivate("buffer/large")
    write_slot(box, COMMITTED, 3, lambda _: None)
    held = [copy.regions.keys() for step in (2, 3) if (copy := read(box, step)) is not None]
    assert held == [{"buffer/large", "rng/torch"}, {"rng/torch"}]


def test_a_region_that_came_between_the_two_copies_counts_as_a_difference(tmp_path: Path) -> None:
    box = BlackBox.create(tmp_path / "rank_0.box", LAZY)
    write_slot(box, TENTATIVE, 1, lambda _: None)
    box.activate("buffer/large")
    write_slot(box, COMMITTED, 1, lambda _: None)
    assert box.compare_tentative() == "buffer/large"


def test_activated_regions_are_compared_too(tmp_path: Path) -> None:
    box = BlackBox.create(tmp_path / "rank_0.box", LAZY)
    box.activate("buffer/other")
    write_slot(box, TENTATIVE, 1, lambda _: None)
    write_slot(box, COMMITTED, 1, lambda slot: box.region(slot, "buffer/other").__setitem__(1 << 19, 1))
    assert box.compare_tentative() == "buffer/other"


def test_no_room_for_a_late_region_is_an_error_and_not_a_bus_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = BlackBox.create(tmp_path / "rank_0.box", LAZY)
    monkeypatch.setattr(black_box.os, "posix_fallocate", refuse)
    with pytest.raises(StorageError, match="enlarge /dev/shm") as error:
        box.activate("buffer/large")
    assert error.value.errno == errno.ENOSPC
    assert not box.is_active("buffer/large")


def test_no_room_at_the_start_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(black_box.os, "posix_fallocate", refuse)
    with pytest.raises(StorageError, match="shm-size"):
        BlackBox.create(tmp_path / "rank_0.box", LAYOUT)
    assert list(tmp_path.iterdir()) == []


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_json_may_grow_up_to_its_room_and_is_left_out_beyond(tmp_path: Path) -> None:
    box = BlackBox.create(tmp_path / "rank_0.box", BoxLayout((), json_bytes_max=100_000))
    for step, size in enumerate((20, 20_000, 99_980, 100_001, 20), start=1):
        write_slot(box, COMMITTED, step, lambda _: None, b'{"text": "' + b"x" * (size - 12) + b'"}')
        copy = read(box, step)
        assert copy is not None
        if size <= 100_000:
            assert len(copy.json["text"]) == size - 12
            assert copy.problem == ""
        else:
            assert copy.json == {}
            golden.says(copy.problem)


def test_json_for_which_memory_is_refused_is_left_out(box: BlackBox, monkeypatch: pytest.MonkeyPatch) -> None:
    larger = BlackBox.create(box.path.with_name("rank_1.box"), BoxLayout((), json_bytes_max=100_000))
    monkeypatch.setattr(black_box.os, "posix_fallocate", refuse)
    write_slot(larger, COMMITTED, 1, lambda _: None, b'{"text": "' + b"x" * 50_000 + b'"}')
    copy = read(larger, 1)
    assert copy is not None
    assert copy.problem


# --------------------------------------------------------------------------- files that are not what they should be


def test_a_missing_box_is_worth_a_retry(tmp_path: Path) -> None:
    with golden.raises(UnavailableError):
        BoxReader(tmp_path / "rank_0.box")


@pytest.mark.parametrize("cut", [0, 10, 20, 4096, 5000, -4096, -1])
def test_a_shortened_box_is_refused(box: BlackBox, cut: int) -> None:
    whole = box.path.read_bytes()
    short = box.path.with_name("short.box")
    short.write_bytes(whole[:cut])
    with pytest.raises(FormatError):
        BoxReader(short)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "rank_0.box")
    with pytest.raises(FormatError):
        BoxReader(tmp_path / "rank_0.box")


def test_every_flipped_bit_of_the_description_is_refused(box: BlackBox) -> None:
    whole = box.path.read_bytes()
    nbytes = struct.unpack_from("=I", whole, 12)[0]
    flipped = box.path.with_name("flipped.box")
    for at in [*range(20), *range(4096, 4096 + nbytes)]:
        flipped.write_bytes(whole[:at] + bytes((whole[at] ^ 4,)) + whole[at + 1 :])
        with pytest.raises(FormatError):
            BoxReader(flipped)


def test_a_box_of_a_newer_format_is_refused_with_both_numbers(box: BlackBox) -> None:
    whole = bytearray(box.path.read_bytes())
    struct.pack_into("=I", whole, 8, 9)
    box.path.write_bytes(whole)
    with golden.raises(FormatError):
        BoxReader(box.path)


def test_a_damaged_slot_is_refused(box: BlackBox) -> None:
    slot = fill(box, COMMITTED, 1)
    at = map_layout(LAYOUT).slots[slot].json_at
    with box.path.open("r+b") as file:
        file.seek(at)
        file.write(b"not JSON")
    with pytest.raises(FormatError, match="damaged"):
        read(box, 1)


@pytest.mark.parametrize(
    "regions",
    [
        (RegionSpec("a", "U8", (1,)), RegionSpec("a", "U8", (2,))),
        (RegionSpec("a", "PICKLE", (1,)),),
        (RegionSpec("", "U8", (1,)),),
        (RegionSpec("a", "U8", (-1,)),),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(regions: tuple[RegionSpec, ...]) -> None:
    with pytest.raises(ConfigError):
        BoxLayout(regions)


def test_regions_lie_on_cache_lines_within_the_file_and_apart() -> None:
    rng = random.Random(7)
    regions = tuple(
        RegionSpec(f"r{i}", rng.choice(["U8", "F32", "I64"]), (rng.randrange(300),), lazy=rng.random() < 0.4)
        for i in range(40)
    )
    layout = BoxLayout(regions, json_bytes_max=1000)
    places = map_layout(
        dataclasses.replace(layout, regions=tuple(dataclasses.replace(r, in_epoch=True) for r in regions))
    )
    taken: list[tuple[int, int]] = [(0, places.heads_end)]
    for slot in places.slots:
        taken += [(p.offset, p.offset + p.spec.nbytes) for p in slot.regions.values() if p.spec.nbytes]
        taken.append((slot.json_at, slot.json_at + 1000))
        assert all(p.offset % box_layout.REGION_ALIGN_BYTES == 0 for p in slot.regions.values())
    taken.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
    assert taken[-1][1] <= places.file_bytes


def test_a_second_box_of_the_same_name_replaces_the_first(box: BlackBox) -> None:
    fill(box, COMMITTED, 1)
    again = BlackBox.create(box.path, LAYOUT)
    assert read(again, 1) is None
    assert box.path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in box.path.parent.iterdir()] == ["rank_0.box"]


@pytest.mark.ci
def test_a_box_that_nobody_keeps_leaves_no_descriptor(tmp_path: Path) -> None:
    before = open_files()
    box = BlackBox.create(tmp_path / "box", LAYOUT)
    box = BlackBox.create(tmp_path / "box", LAYOUT, carried=box)
    view = box.region(0, "rng/torch")
    del box, view
    assert open_files() <= before
