from __future__ import annotations

import errno
import functools
import json
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from lastwords.checkpoint import direct_io, layout, load
from lastwords.checkpoint.direct_io import CHUNK_BYTES
from lastwords.checkpoint.document import encode_document
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.manifest import Manifest
from lastwords.checkpoint.part import UnitState
from lastwords.checkpoint.system import Os
from lastwords.cli.main import ExitCode, main
from lastwords.errors import CheckpointError, FormatError, IncompleteError, NewerFormatError, StorageError
from tests import golden
from tests.checkpoint.interposed import InterposedOs, counting
from tests.checkpoint.states import Job, content_of, content_written, published

JOB = Job(elements=9)
FILE_0, FILE_1 = "rank_0/ttp_rank_0-4_7.ckpt", "rank_1/ttp_rank_1-4_7.ckpt"


@functools.cache
def _original() -> Path:
    root = Path(tempfile.mkdtemp(prefix="lastwords-test-"))
    JOB.save(root, 37)
    JOB.again(generation=2, seed=4).save(root, 36)
    return root


@pytest.fixture(scope="module", autouse=True)
def _remove_original() -> object:
    yield
    shutil.rmtree(_original())
    _original.cache_clear()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of step 37."""
    target = tmp_path / "root" / "tft_saved_checkpoints-step_37"
    shutil.copytree(_original() / target.name, target)
    return target


def flip(path: Path, at: int, bits: int = 1) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= bits
    path.write_bytes(raw)


# ---------------------------------------------------------------------- damage


@pytest.mark.ci
def test_one_changed_byte_anywhere_in_a_file_is_found(saved: Path) -> None:
    """In the length, in the header and in the data; by `verify` and by reading what it is in."""
    path = saved / FILE_0
    raw = path.read_bytes()
    header_bytes = 8 + struct.unpack("<Q", raw[:8])[0]
    in_header = in_data = 0
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << (at % 8)
        path.write_bytes(damaged)
        [problem] = load.verify(saved)
        assert problem.file == FILE_0
        assert str(path) in problem.text
        if at < header_bytes:
            in_header += 1
            with pytest.raises(FormatError):
                load.open_checkpoint(saved)
            if at % 16 == 0:
                assert load.verify(saved, deep=False)
                assert load.latest(saved.parent) is None
        else:
            in_data += 1
            with golden.raises(FormatError):
                content_of(saved)
    assert in_header > 500
    assert in_data > 100


Damage = Callable[[Path], object]


def _truncate(path: Path, size: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(size)


def _manifest_of_a_newer_format(directory: Path) -> None:
    content = json.loads((directory / "manifest.json").read_bytes())
    del content["checksum"]
    (directory / "manifest.json").write_bytes(encode_document({**content, "format_version": 2}))


def _file_of_a_newer_format(directory: Path) -> None:
    raw = (directory / FILE_0).read_bytes()
    (directory / FILE_0).write_bytes(raw.replace(b'\\"format\\":1', b'\\"format\\":2'))


DEFECTS: dict[str, tuple[Damage, type[CheckpointError]]] = {
    "an empty directory": (lambda d: (shutil.rmtree(d), d.mkdir()), IncompleteError),
    "a partial directory": (lambda d: (d / "manifest.json").unlink(), IncompleteError),
    "no directory": (shutil.rmtree, IncompleteError),
    "an empty manifest": (lambda d: (d / "manifest.json").write_bytes(b""), FormatError),
    "a manifest of a newer format": (_manifest_of_a_newer_format, NewerFormatError),
    "a file of a newer format": (_file_of_a_newer_format, NewerFormatError),
    "a missing file": (lambda d: (d / FILE_1).unlink(), IncompleteError),
    "a missing rank directory": (lambda d: shutil.rmtree(d / "rank_1"), IncompleteError),
    "an empty file": (lambda d: _truncate(d / FILE_1, 0), FormatError),
    "a file that lacks a byte": (lambda d: _truncate(d / FILE_1, 900), FormatError),
    "a file that is too long": (lambda d: _truncate(d / FILE_1, 9000), FormatError),
    "the file of another step": (
        lambda d: shutil.copy(_original() / f"tft_saved_checkpoints-step_36/{FILE_1[:-6]}6.ckpt", d / FILE_1),
        FormatError,
    ),
    "the file of another rank": (lambda d: shutil.copy(d / FILE_0, d / FILE_1), FormatError),
    "a renamed directory": (lambda d: d.rename(d.parent / "tft_saved_checkpoints-step_38"), IncompleteError),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_defect_is_found_on_opening_and_says_what_to_do(saved: Path, defect: str) -> None:
    damage, kind = DEFECTS[defect]
    damage(saved)
    with golden.raises(kind) as caught:
        load.open_checkpoint(saved)
    assert type(caught.value) is kind
    assert load.verify(saved)
    if kind is not NewerFormatError:
        assert load.latest(saved.parent) is None
        return
    assert main(["latest", str(saved.parent)]) == ExitCode.DAMAGED
    with golden.raises(NewerFormatError):
        load.latest(saved.parent)


def test_missing_files_are_listed(saved: Path) -> None:
    (saved / FILE_1).unlink()
    with pytest.raises(IncompleteError) as caught:
        load.open_checkpoint(saved)
    assert caught.value.missing == (FILE_1,)


def test_a_directory_under_the_name_of_another_step_is_refused(saved: Path) -> None:
    other = saved.rename(saved.parent / "tft_saved_checkpoints-step_38")
    with golden.raises(FormatError):
        load.open_checkpoint(other)
    assert load.latest(saved.parent) is None


def test_a_checkpoint_may_be_copied_to_a_directory_of_any_other_name(saved: Path) -> None:
    best = saved.rename(saved.parent / "best-so-far")
    assert content_of(best) == content_written(JOB, 37)


def test_swapping_two_chunks_is_found(tmp_path: Path) -> None:
    path = big_checkpoint(tmp_path)
    file = next(path.rglob("*.ckpt"))
    raw = bytearray(file.read_bytes())
    a, b = slice(CHUNK_BYTES, 2 * CHUNK_BYTES), slice(2 * CHUNK_BYTES, 3 * CHUNK_BYTES)
    raw[a], raw[b] = raw[b], raw[a]
    file.write_bytes(raw)
    [problem] = load.verify(path)
    # Several threads read; whichever finds its chunk damaged first ends the reading of the file.
    either = [f"bytes {place.start} to {place.stop}" for place in (a, b)]
    assert any(text in problem.text for text in either)


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_no_endless_loop(saved: Path) -> None:
    checkpoint = load.open_checkpoint(saved)

    class Shrinking(Os):
        def preadv(self, fd: int, views: object, offset: int) -> int:
            return 0

    checkpoint._os = Shrinking()
    with golden.raises(FormatError):
        checkpoint.read(checkpoint.manifest.units["a"])


def test_whoever_stops_a_long_read_is_heard_and_no_thread_goes_on(tmp_path: Path) -> None:
    path = big_checkpoint(tmp_path)

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load.verify(path, progress=stop)
    assert not [thread for thread in threading.enumerate() if thread.name == "lastwords-read"]


def test_a_failing_disk_is_a_storage_error(saved: Path) -> None:
    checkpoint = load.open_checkpoint(saved)

    class Failing(Os):
        def preadv(self, fd: int, views: object, offset: int) -> int:
            raise OSError(errno.EIO, "Input/output error")

    checkpoint._os = Failing()
    with golden.raises(StorageError) as caught:
        checkpoint.read(checkpoint.manifest.units["a"])
    assert caught.value.errno == errno.EIO


def test_damage_that_another_thread_finds_is_raised_in_the_caller_s(tmp_path: Path) -> None:
    path = big_checkpoint(tmp_path)
    file = next(path.rglob("*.ckpt"))
    for chunk in range(4):
        flip(file, chunk * CHUNK_BYTES + 5000)
        with pytest.raises(FormatError, match=f"bytes {chunk * CHUNK_BYTES} to"):
            content_of(path)
        flip(file, chunk * CHUNK_BYTES + 5000)
    assert load.verify(path) == []


# ---------------------------------------------------------------------- which one is newest


def test_newest_is_what_was_published_last_and_not_what_was_touched_last(tmp_path: Path) -> None:
    import os

    first, second = JOB.save(tmp_path, 40), JOB.again(generation=2).save(tmp_path, 12)
    os.utime(first)
    assert load.latest(tmp_path) == second
    assert [found.path for found in load.scan(tmp_path)] == [second, first]


@pytest.mark.parametrize("incident", [0, 1])
def test_the_newest_is_of_either_kind(tmp_path: Path, incident: int) -> None:
    JOB.again(incident=1 - incident).save(tmp_path, 36)
    newer = JOB.again(incident=incident).save(tmp_path, 37)
    assert load.newest([tmp_path]) == newer


def test_a_damaged_newest_one_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older, newer = JOB.save(tmp_path, 36), JOB.save(tmp_path, 37)
    flip(newer / FILE_1, 100)
    assert load.latest(tmp_path) == older
    golden.says(caplog.messages)
    assert [found.status for found in load.scan(tmp_path)] == [
        load.DirectoryStatus.DAMAGED,
        load.DirectoryStatus.COMPLETE,
    ]


def test_what_is_pruned_between_a_listing_and_a_look_leaves_a_newer_one_to_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but a listing once more finds it: without it, a resume would begin anew."""
    older = JOB.save(tmp_path, 36)
    listed, prunes = load.candidates, [True]

    def candidates(*args: Any) -> list[Path]:
        found = listed(*args)
        if prunes.pop() if prunes else False:
            JOB.save(tmp_path, 37)
            shutil.rmtree(older)
        return found

    monkeypatch.setattr(load, "candidates", candidates)
    newest = load.latest(tmp_path)
    assert newest == tmp_path / "tft_saved_checkpoints-step_37"


def test_statuses_tell_incomplete_from_damaged(tmp_path: Path) -> None:
    for step in (36, 37, 38, 39):
        JOB.save(tmp_path, step)
    (tmp_path / "tft_saved_checkpoints-step_36/manifest.json").unlink()
    (tmp_path / "tft_saved_checkpoints-step_37/manifest.json").write_text("{}")
    (tmp_path / f"tft_saved_checkpoints-step_38/{FILE_1[:-6]}8.ckpt").unlink()
    assert {found.path.name[-2:]: found.status.value for found in load.scan(tmp_path)} == {
        "39": "complete",
        "38": "incomplete",
        "37": "damaged",
        "36": "incomplete",
    }


def test_only_this_job_s_checkpoints_count_if_asked(tmp_path: Path) -> None:
    mine = JOB.save(tmp_path, 36)
    theirs = Job(name="other").save(tmp_path, 37)
    assert load.latest(tmp_path) == theirs
    assert load.latest(tmp_path, "job") == mine
    assert load.latest(tmp_path, "nobody") is None
    assert [found.path for found in load.scan(tmp_path, job="job")] == [mine]


def test_what_is_being_written_is_never_found(tmp_path: Path) -> None:
    JOB.write(tmp_path, 37)
    (tmp_path / "other-directory").mkdir()
    (tmp_path / "tft_saved_checkpoints-step_5").write_text("a file")
    assert load.scan(tmp_path) == []
    assert load.latest(tmp_path) is None


def test_a_root_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert load.latest(tmp_path / "nothing") is None
    assert load.scan(tmp_path / "nothing") == []


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError):
        load.latest(tmp_path / "file")


# ---------------------------------------------------------------------- reading


def big_checkpoint(root: Path, *, small: int = 0) -> Path:
    """Four chunks in a few tensors whose borders lie everywhere, and `small` tensors of a few bytes."""
    sizes = [CHUNK_BYTES // 4 - 13, 3, 2 * CHUNK_BYTES // 4 + 1, 0, CHUNK_BYTES // 4 + 77, *([2] * small)]
    tensors = [
        (TensorSpec(f"unit/u/model/w{index:05}", "F32", (size,)), np.random.default_rng(index).random(size, np.float32))
        for index, size in enumerate(sizes)
    ]
    return published(root, {0: {"u": UnitState(tensors)}}, step=1, world_size=2)


def expected(checkpoint: load.Checkpoint) -> dict[str, bytes]:
    specs = checkpoint.manifest.units["u"].tensors
    return {
        spec.name: np.random.default_rng(index).random(spec.shape[0], np.float32).tobytes()
        for index, spec in enumerate(specs)
    }


def test_tensors_are_read_straight_into_the_caller_s_memory(tmp_path: Path) -> None:
    checkpoint = load.open_checkpoint(big_checkpoint(tmp_path))
    memory = {spec.name: bytearray(spec.nbytes) for spec in checkpoint.manifest.units["u"].tensors}
    asked: list[str] = []

    def into(spec: TensorSpec) -> memoryview:
        asked.append(spec.name)
        return memoryview(memory[spec.name])

    checkpoint.read_tensors(memory, into)
    assert {name: bytes(data) for name, data in memory.items()} == expected(checkpoint)
    assert asked == [*memory]


def test_a_few_tensors_cost_only_the_chunks_they_lie_in(tmp_path: Path) -> None:
    path = big_checkpoint(tmp_path)
    read: list[int] = []

    class Counting(Os):
        def preadv(self, fd: int, views: list[memoryview], offset: int) -> int:  # type: ignore[override]
            count = super().preadv(fd, views, offset)
            read.append(count)
            return count

    checkpoint = load.open_checkpoint(path, Counting())
    read.clear()
    name = "unit/u/model/w00001"
    memory = bytearray(12)
    checkpoint.read_tensors([name], lambda spec: memoryview(memory))
    assert bytes(memory) == expected(checkpoint)[name]
    assert sum(read) <= 2 * CHUNK_BYTES


def test_more_tensors_in_a_chunk_than_one_system_call_takes(tmp_path: Path) -> None:
    checkpoint = load.open_checkpoint(big_checkpoint(tmp_path, small=3000))
    found = checkpoint.read(checkpoint.manifest.units["u"])
    assert {name: data.tobytes() for name, (_, data) in found.items()} == expected(checkpoint)
    assert len(found) == 3005


@pytest.mark.parametrize("wanted", [511, 512, 513])
def test_each_gap_between_tensors_is_a_piece_of_the_system_call_too(tmp_path: Path, wanted: int) -> None:
    tensors = [(TensorSpec(f"unit/u/model/w{index}", "F32", ()), np.float32(index)) for index in range(2 * wanted)]
    checkpoint = load.open_checkpoint(published(tmp_path, {0: {"u": UnitState(tensors)}}))
    memory = {f"unit/u/model/w{index}": np.zeros((), np.float32) for index in range(0, 2 * wanted, 2)}
    checkpoint.read_tensors(memory, lambda spec: memoryview(memory[spec.name]))
    assert [*memory.values()] == [*range(0, 2 * wanted, 2)]


def test_every_short_read_is_continued(tmp_path: Path) -> None:
    class Short(Os):
        def preadv(self, fd: int, views: list[memoryview], offset: int) -> int:  # type: ignore[override]
            return super().preadv(fd, [views[0][:100_003]], offset)

    checkpoint = load.open_checkpoint(big_checkpoint(tmp_path), Short())
    found = checkpoint.read(checkpoint.manifest.units["u"])
    assert {name: data.tobytes() for name, (_, data) in found.items()} == expected(checkpoint)


def test_memory_that_does_not_fit_is_refused_before_anything_is_read(saved: Path) -> None:
    checkpoint = load.open_checkpoint(saved)
    with golden.raises(ValueError):
        checkpoint.read_tensors(["unit/a/model/fc.weight"], lambda spec: memoryview(bytearray(1)))


def test_what_is_not_there_is_named(saved: Path) -> None:
    checkpoint = load.open_checkpoint(saved)
    for read in (
        lambda: checkpoint.read_tensors(["x"], lambda spec: memoryview(bytearray(1))),
        lambda: checkpoint.stored("x"),
    ):
        with pytest.raises(IncompleteError) as caught:
            read()
        assert caught.value.missing == ("x",)


def test_fresh_tensors_are_aligned_for_every_type(saved: Path) -> None:
    checkpoint = load.open_checkpoint(saved)
    for _, data in checkpoint.read(checkpoint.manifest.units["a"]).values():
        assert data.ctypes.data % 64 == 0 or not data.size


def test_every_file_is_closed_again(saved: Path) -> None:
    os = InterposedOs(counting())
    content_of(saved, os)
    assert load.verify(saved, os=os) == []
    flip(saved / FILE_0, (saved / FILE_0).stat().st_size - 1)
    assert load.verify(saved, os=os)
    with pytest.raises(FormatError):
        content_of(saved, os)
    load.scan(saved.parent, os)
    assert not os.open_fds


def test_chunks_of_the_manifest_can_be_checked_by_anyone(saved: Path) -> None:
    """The checksum is what docs/format.md says: xxh3_64 of every 4 MiB of the file, the header included."""
    manifest = Manifest.decode((saved / "manifest.json").read_bytes(), saved)
    for entry in manifest.files:
        raw = (saved / entry.path).read_bytes()
        assert entry.chunks == tuple(
            xxhash.xxh3_64(raw[at : at + 4 * 1024 * 1024]).hexdigest() for at in range(0, len(raw), 4 * 1024 * 1024)
        )
        assert direct_io.CHUNK_BYTES == 4 * 1024 * 1024
        assert layout.PartPath.parse(entry.path, where="x")
