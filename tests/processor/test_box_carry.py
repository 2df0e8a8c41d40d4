"""A black box that is made anew holds what the one before it held, and a reader finds one of the two whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastwords.errors import StorageError
from lastwords.processor import black_box
from lastwords.processor.black_box import BlackBox
from lastwords.processor.box_layout import BoxLayout, BoxReader, RegionSpec, SlotKind

KEPT, GONE = RegionSpec("rng/torch", "U8", (4,), in_epoch=True), RegionSpec("buffer/old", "U8", (4,))
LARGE = RegionSpec("buffer/large", "U8", (5000,), lazy=True)
NEW = RegionSpec("model/new", "U8", (4,), lazy=True, committed_only=True)


def write(box: BlackBox, kind: SlotKind, step: int, value: int, json_bytes: bytes = b"{}") -> None:
    slot = box.begin(kind, step)
    for region in box.layout.regions:
        if box.is_active(region.name) and (kind is not SlotKind.EPOCH or region.in_epoch):
            box.region(slot, region.name)[:] = bytes([value]) * region.nbytes
    box.commit(slot, json_bytes)


@pytest.fixture
def old(tmp_path: Path) -> BlackBox:
    box = BlackBox.create(tmp_path / "rank_0.box", BoxLayout((KEPT, GONE, LARGE)))
    box.set_stand(3, 7)
    box.set_facts(b'{"reasons": ["why"]}')
    write(box, SlotKind.EPOCH, 1, 9)
    write(box, SlotKind.COMMITTED, 6, 6)
    box.activate(LARGE.name)
    write(box, SlotKind.COMMITTED, 7, 7, b'{"text": "' + b"x" * 40_000 + b'"}')
    write(box, SlotKind.TENTATIVE, 8, 8)
    return box


def anew(old: BlackBox) -> BlackBox:
    return BlackBox.create(old.path, BoxLayout((KEPT, LARGE, NEW)), carried=old)


def test_all_copies_are_there_in_the_regions_that_both_have(old: BlackBox) -> None:
    new = anew(old)
    with BoxReader(new.path) as reader:
        assert reader.facts() == {"reasons": ["why"]}
        assert (reader.stand() or old).step == 7  # type: ignore[union-attr]
        epoch = reader.read_epoch(1)
        assert epoch is not None
        assert bytes(epoch.regions[KEPT.name].data) == bytes([9]) * 4
        for step in (6, 7, 8):
            copy = reader.read(step)
            assert copy is not None
            assert bytes(copy.regions[KEPT.name].data) == bytes([step]) * 4
            assert (LARGE.name in copy.regions) == (step >= 7)
            assert copy.regions.keys() <= {KEPT.name, LARGE.name}
        copy = reader.read(7)
        assert copy is not None
        assert len(copy.json["text"]) == 40_000


def test_it_goes_on_from_there(old: BlackBox) -> None:
    new = anew(old)
    new.activate(NEW.name)
    write(new, SlotKind.COMMITTED, 8, 80)
    assert new.compare_tentative() is None, "the tentative copy of that step lacks what is new"
    write(new, SlotKind.TENTATIVE, 9, 90)
    write(new, SlotKind.COMMITTED, 9, 91)
    assert new.compare_tentative() == KEPT.name
    with BoxReader(new.path) as reader:
        committed, before = reader.read(9), reader.read(8)
        assert committed is not None
        assert before is not None
        assert bytes(committed.regions[NEW.name].data) == bytes([91]) * 4
        assert bytes(before.regions[KEPT.name].data) == bytes([80]) * 4


def test_what_an_update_changes_is_in_committed_copies_only(old: BlackBox) -> None:
    new = anew(old)
    new.activate(NEW.name)
    write(new, SlotKind.COMMITTED, 8, 1)
    write(new, SlotKind.TENTATIVE, 9, 2)
    with BoxReader(new.path) as reader:
        committed, tentative = reader.read(8), reader.read(9)
        assert committed is not None
        assert tentative is not None
        assert (NEW.name in committed.regions, NEW.name in tentative.regions) == (True, False)
    slot = new.begin(SlotKind.COMMITTED, 9)
    for region, value in ((KEPT, 2), (LARGE, 2), (NEW, 3)):
        new.region(slot, region.name)[:] = bytes([value]) * region.nbytes
    new.commit(slot)
    assert new.compare_tentative() is None, "it is no difference"


def test_without_room_the_old_one_stays(old: BlackBox, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(black_box.os, "posix_fallocate", refuse)
    with pytest.raises(StorageError):
        anew(old)
    with BoxReader(old.path) as reader:
        copy = reader.read(7)
        assert copy is not None
        assert GONE.name in copy.regions
    assert [path.name for path in old.path.parent.iterdir()] == [old.path.name]
