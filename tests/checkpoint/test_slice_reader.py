"""Slices come out of files as a naive cut of the whole gives them, at the cost that they should have, and checked."""

from __future__ import annotations

import itertools
import tempfile
import tracemalloc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lastwords.checkpoint import slice_reader
from lastwords.checkpoint.boxes import Box, Divided, Shard, slices_for, whole
from lastwords.checkpoint.direct_io import CHUNK_BYTES
from lastwords.checkpoint.entries import FileEntry
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.slice_reader import SliceReader, StoredTensor, Target
from lastwords.checkpoint.system import Os
from lastwords.errors import ConfigError, FormatError, IncompleteError
from tests import golden

ITEM = {"U8": 1, "I16": 2, "F32": 4, "I64": 8}


class Files:
    """Shards of one tensor in files of their own, somewhere in the middle, with checksums of chunks of any size."""

    def __init__(
        self,
        root: Path,
        content: np.ndarray,
        dtype: str,
        boxes: Sequence[Box],
        lead: int = 64,
        chunk: int = CHUNK_BYTES,
    ) -> None:
        self.content = content
        self.size = ITEM[dtype]
        self.where: dict[str, StoredTensor] = {}
        for number, box in enumerate(boxes):
            data = bytes(lead) + content[place(box)].tobytes() + b"behind"
            path = root / f"{number}.bin"
            path.write_bytes(data)
            sums = tuple(xxhash.xxh3_64_hexdigest(data[at : at + chunk]) for at in range(0, len(data), chunk))
            entry = FileEntry(path.name, len(data), 8, "0" * 16, sums)
            self.where[f"shard {number}"] = StoredTensor(path, lead, TensorSpec("w", dtype, box.sizes), entry)
        shards = tuple(Shard(f"shard {number}", box) for number, box in enumerate(boxes))
        self.divided = Divided("w", dtype, content.shape[:-1], shards)

    def stored(self, name: str) -> tuple[StoredTensor, ...]:
        return (self.where[name],)

    def target(self, box: Box) -> tuple[Target, np.ndarray]:
        """A target, and its memory as an array."""
        memory = np.full((*box.sizes, self.size), 255, np.uint8)
        return Target(box, memory, slices_for(self.divided, box)), memory

    def bare(self) -> Files:
        """The same without checksums."""
        for name, one in self.where.items():
            self.where[name] = StoredTensor(one.path, one.begin, one.spec, None)
        return self


class Counting(Os):
    """Notes each read's bytes, and how many files are open."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.open_now = self.open_most = 0

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        count = super().preadv(fd, views, offset)
        self.reads.append(count)
        return count

    def open_read(self, path: Path) -> int:
        self.open_now += 1
        self.open_most = max(self.open_most, self.open_now)
        return super().open_read(path)

    def close(self, fd: int) -> None:
        self.open_now -= 1
        super().close(fd)


def place(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))


def bytes_shaped(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Arbitrary content, the bytes of an element as last axis."""
    count = int(np.prod(shape)) * ITEM[dtype]
    return np.random.default_rng(0).integers(0, 256, count, np.uint8).reshape(*shape, ITEM[dtype])


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """The whole cut along each axis at any places."""
    axes = []
    for extent in shape:
        at = [0, *sorted(draw(st.lists(st.integers(0, extent), max_size=3))), extent]
        axes.append(list(itertools.pairwise(at)))
    corners = itertools.product(*axes)
    return [Box(tuple(a for a, _ in one), tuple(b - a for a, b in one)) for one in corners]


def boxes_of(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    """Any box of a whole, and any other: one may lie in another."""
    ranges = [st.tuples(*[st.integers(0, extent)] * 2).map(sorted) for extent in shape]
    return st.tuples(*ranges).map(lambda pairs: Box(tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs)))


@pytest.mark.ci
@given(st.data())
def test_any_boxes_of_any_cut_are_what_slices_of_the_whole_are(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 9), max_size=4).map(tuple))
    dtype = data.draw(st.sampled_from(sorted(ITEM)))
    chunk = data.draw(st.sampled_from([16, 37, 64, 1000]))  # of 37 bytes: elements lie across its ends
    checked, bare = data.draw(st.sampled_from([(True, False), (False, False), (False, True)]))
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(slice_reader, "CHUNK_BYTES", chunk)
        patch.setattr(slice_reader, "CHUNK_BYTES", chunk)
        patch.setattr(slice_reader, "PAGE_BYTES", data.draw(st.sampled_from([1, 8, 64])))
        patch.setattr(slice_reader, "_PIECES_MAX", data.draw(st.sampled_from([0, 2, 511])))
        lead = data.draw(st.integers(0, 40))
        files = Files(Path(root), bytes_shaped(shape, dtype), dtype, data.draw(grids(shape)), lead, chunk)
        if bare:
            files.bare()
        wanted = data.draw(st.lists(boxes_of(shape), max_size=4))
        pairs = [files.target(box) for box in wanted]
        calls = data.draw(st.sampled_from([1, 2, 4]))
        with SliceReader(files, checked=checked, keep_edges=data.draw(st.booleans())) as reader:
            for call in range(calls):
                reader.read(target for target, _ in pairs[call::calls])
        for box, (_, memory) in zip(wanted, pairs, strict=True):
            assert np.array_equal(memory, files.content[place(box)])
        if checked:
            assert reader.bytes_checked == reader.bytes_read


def test_every_wanted_box_of_this_file_would_be_seen_if_it_were_shifted_by_one(tmp_path: Path) -> None:
    """The control of the test above: the contents differ from place to place."""
    files = Files(tmp_path, bytes_shaped((6, 6), "I16"), "I16", [whole((6, 6))])
    target, memory = files.target(Box((1, 1), (3, 3)))
    with SliceReader(files, checked=True) as reader:
        reader.read([target])
    assert np.array_equal(memory, files.content[1:4, 1:4])
    assert not np.array_equal(memory, files.content[1:4, 2:5])


# ------------------------------------------------------------------ what it costs


def columns(rows: int, width: int, parts: int) -> list[Box]:
    """The columns of each of `parts` ranks, cut as torch's chunk does it."""
    size = -(-width // parts)
    return [Box((0, at), (rows, min(size, width - at))) for at in range(0, width, size)]


def rows_of(rows: int, width: int, parts: int) -> list[Box]:
    return [Box((box.offsets[1], 0), (box.sizes[1], width)) for box in columns(width, rows, parts)]


def ratio(files: Files, boxes: Iterable[Box], os: Os | None = None, *, checked: bool = False) -> float:
    """Bytes read for a byte that is wanted, when each box is read by itself as a rank of its own does it."""
    read = wanted = 0
    for box in boxes:
        target, memory = files.target(box)
        with SliceReader(files, checked=checked, os=os or Os()) as reader:
            reader.read([target])
        assert np.array_equal(memory, files.content[place(box)])
        read += reader.bytes_read
        wanted += memory.nbytes
    return read / wanted


@pytest.mark.parametrize("row_bytes", [6 << 10, 8 << 10, 16 << 10, 64 << 10])
@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_columns_cost_what_they_should_in_rows_longer_than_a_page(tmp_path: Path, row_bytes: int, parts: int) -> None:
    rows, width = (9 << 20) // row_bytes, row_bytes // 4
    files = Files(tmp_path, bytes_shaped((rows, width), "F32"), "F32", rows_of(rows, width, 3))
    assert ratio(files, columns(rows, width, parts)) <= 1.05


def test_rows_cost_no_more_than_their_bytes_and_are_read_in_long_reads(tmp_path: Path) -> None:
    files = Files(tmp_path, bytes_shaped((3000, 1024), "F32"), "F32", [whole((3000, 1024))])
    os = Counting()
    assert ratio(files, rows_of(3000, 1024, 4)[1:2], os) == 1
    assert len(os.reads) <= 2
    os = Counting()
    assert ratio(files, rows_of(3000, 1024, 1), os) <= 1.05
    assert max(os.reads) == CHUNK_BYTES
    assert len(os.reads) == 3


def test_columns_of_rows_no_longer_than_a_page_are_read_with_what_lies_between_them(tmp_path: Path) -> None:
    files = Files(tmp_path, bytes_shaped((2000, 512), "F32"), "F32", [whole((2000, 512))])
    os = Counting()
    assert ratio(files, columns(2000, 512, 4)[1:2], os) == pytest.approx(4, rel=0.01)
    assert len(os.reads) == 1


def test_columns_for_all_ranks_are_read_once_if_they_are_read_together(tmp_path: Path) -> None:
    files = Files(tmp_path, bytes_shaped((3000, 1024), "F32"), "F32", [whole((3000, 1024))])
    size = files.where["shard 0"].path.stat().st_size
    together = [files.target(box) for box in columns(3000, 1024, 4)]
    with SliceReader(files, checked=True) as reader:
        reader.read(target for target, _ in together)
        assert reader.bytes_read == reader.bytes_checked == size
        reader.read([together[0][0]])
        assert reader.bytes_read == 2 * size, "the control: a call of its own reads again"


def test_neighbours_that_are_read_one_after_another_share_a_chunk_if_edges_are_kept(tmp_path: Path) -> None:
    files = Files(tmp_path, bytes_shaped((3000, 1024), "F32"), "F32", [whole((3000, 1024))], lead=0)
    chunks = -(-files.where["shard 0"].path.stat().st_size // CHUNK_BYTES)
    read = {}
    for keeps in (True, False):
        with SliceReader(files, checked=True, keep_edges=keeps) as reader:
            for box in rows_of(3000, 1024, 5):
                target, memory = files.target(box)
                reader.read([target])
                assert np.array_equal(memory, files.content[place(box)])
            read[keeps] = reader.bytes_read
    assert read[True] == files.where["shard 0"].path.stat().st_size
    assert read[False] > read[True] + (chunks // 2) * CHUNK_BYTES


def test_chunks_that_nobody_wants_anything_of_are_not_read(tmp_path: Path) -> None:
    """Rows of twelve MiB: the columns of one chunk in each."""
    files = Files(tmp_path, bytes_shaped((2, 3 * CHUNK_BYTES), "U8"), "U8", [whole((2, 3 * CHUNK_BYTES))], lead=0)
    os = Counting()
    assert ratio(files, [Box((0, CHUNK_BYTES + 7), (2, 100))], os, checked=True) == 2 * CHUNK_BYTES / 200
    assert os.reads == [CHUNK_BYTES] * 2


def test_beside_the_targets_there_is_a_chunk_for_each_thread(tmp_path: Path) -> None:
    files = Files(tmp_path, bytes_shaped((6000, 1024), "F32"), "F32", [whole((6000, 1024))])
    for checked in (True, False):
        target, _ = files.target(columns(6000, 1024, 2)[1])
        tracemalloc.start()
        with SliceReader(files, checked=checked) as reader:
            reader.read([target])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert CHUNK_BYTES <= peak <= 2 * CHUNK_BYTES + (1 << 20)


def test_of_many_files_only_some_are_kept_open(tmp_path: Path) -> None:
    files = Files(tmp_path, bytes_shaped((100, 3), "I64"), "I64", rows_of(100, 3, 100))
    os = Counting()
    with SliceReader(files, checked=True, os=os) as reader:
        for _ in range(2):
            target, memory = files.target(whole((100, 3)))
            reader.read([target])
            assert np.array_equal(memory, files.content)
    assert os.open_most <= 65
    assert os.open_now == 0


def test_progress_counts_the_bytes_of_a_call(tmp_path: Path) -> None:
    files = Files(tmp_path, bytes_shaped((3000, 1024), "F32"), "F32", rows_of(3000, 1024, 2))
    heard: list[int] = []
    with SliceReader(files, checked=True) as reader:
        reader.read([files.target(whole((3000, 1024)))[0]], heard.append)
        assert heard == sorted(heard)
        assert heard[-1] == reader.bytes_read


# ------------------------------------------------------------------ what is wrong with files


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_is_refused_wherever_chunks_are_read_whole(tmp_path: Path) -> None:
    files = Files(tmp_path, bytes_shaped((600, 4096), "F32"), "F32", [whole((600, 4096))])
    path = files.where["shard 0"].path
    half = columns(600, 4096, 2)[0]

    def read(box: Box, checked: bool) -> np.ndarray:
        target, memory = files.target(box)
        with SliceReader(files, checked=checked) as reader:
            reader.read([target])
        return memory

    before = read(half, False)
    flip(path, 64 + 16384 * 300)  # of the second chunk, and of the first column
    for box, checked in ((whole((600, 4096)), False), (whole((600, 4096)), True), (half, True)):
        with golden.raises(FormatError):
            read(box, checked)
    assert not np.array_equal(read(half, False), before), "the control, and the documented limit of checked=False"
    read(Box((0, 0), (10, 4096)), True)  # another chunk


def test_files_without_checksums_are_read_but_never_as_checked_ones(tmp_path: Path) -> None:
    files = Files(tmp_path, bytes_shaped((50, 3), "F32"), "F32", rows_of(50, 3, 2)).bare()
    target, memory = files.target(whole((50, 3)))
    with SliceReader(files, checked=False) as reader:
        reader.read([target])
        assert np.array_equal(memory, files.content)
        assert reader.bytes_checked == 0
    with SliceReader(files, checked=True) as reader, golden.raises(ConfigError):
        reader.read([target])


@pytest.mark.parametrize("bare", [True, False])
def test_a_file_that_is_missing_or_too_short_is_named(tmp_path: Path, bare: bool) -> None:
    files = Files(tmp_path, bytes_shaped((50, 3), "F32"), "F32", rows_of(50, 3, 2))
    if bare:
        files.bare()
    target, _ = files.target(whole((50, 3)))
    path = files.where["shard 1"].path
    path.write_bytes(path.read_bytes()[:100])
    with SliceReader(files, checked=False) as reader, golden.raises(FormatError):
        reader.read([target])
    path.unlink()
    with SliceReader(files, checked=False) as reader, golden.raises(IncompleteError):
        reader.read([target])


def test_memory_of_another_size_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    files = Files(tmp_path, bytes_shaped((4, 3), "F32"), "F32", [whole((4, 3))])
    box = Box((0, 0), (2, 3))
    for memory in (bytearray(23), bytearray(25)):
        wrong: Any = Target(box, memory, slices_for(files.divided, box))
        with (
            SliceReader(files, checked=True) as reader,
            pytest.raises(ValueError, match=r"\[0:2, 0:3\] of w, 24 bytes"),
        ):
            reader.read([wrong])
