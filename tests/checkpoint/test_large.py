"""The tables of a large checkpoint stay in its parts, and readers open what they need."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lastwords.checkpoint import layout, load, publish
from lastwords.checkpoint.document import encode_document
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.manifest import Manifest, read_manifest
from lastwords.checkpoint.meta import EMPTY_UNIT, LocalMeta
from lastwords.checkpoint.part import LocalState, UnitState, write_part
from lastwords.checkpoint.system import Os
from lastwords.errors import CheckpointError, FormatError, IncompleteError, NewerFormatError, StorageError
from lastwords.optim_wrapper.resume.resume_choice import look_for
from tests import golden
from tests.checkpoint.states import Job, content_of, content_written, published

JOB = Job()


@pytest.fixture(autouse=True)
def every_checkpoint_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "TABLES_BYTES_MAX", 0)


class Opened(Os):
    """Counts what is opened for reading, and the bytes that are read."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.bytes_read = 0

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        count = super().preadv(fd, views, offset)
        self.bytes_read += count
        return count

    def open_read(self, path: Path) -> int:
        self.paths.append(path)
        return super().open_read(path)


def save_many(root: Path, ranks: int, tensors: int = 3, step: int = 1) -> Path:
    """Every rank holds a unit of its own."""
    states, locals_ = {}, {}
    for rank in range(ranks):
        specs = [TensorSpec(f"unit/u{rank}/model/w{number}", "U8", (8,)) for number in range(tensors)]
        unit = UnitState([(spec, bytes([rank % 251]) * 8) for spec in specs], replace(EMPTY_UNIT, holders=[rank]))
        states[rank], locals_[rank] = {f"u{rank}": unit}, LocalState([], LocalMeta(slot={"rank": rank}))
    return published(root, states, step=step, locals_=locals_)


def test_what_is_in_a_large_checkpoint_comes_back(tmp_path: Path) -> None:
    path = JOB.save(tmp_path, 37)
    content = json.loads((path / "manifest.json").read_bytes())
    assert content["tables_in_parts"]
    assert content["units"] == {"a": {"writer": 0}, "bb": {"writer": 1}}
    assert sorted(item.name for item in (path / "rank_1").iterdir()) == ["part.json", "ttp_rank_1-4_7.ckpt"]
    assert load.latest(tmp_path) == path
    assert load.verify(path) == []
    assert content_of(path) == content_written(JOB, 37)


def test_both_places_of_the_tables_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = read_manifest(JOB.save(tmp_path / "large", 37))
    monkeypatch.setattr(publish, "TABLES_BYTES_MAX", 1 << 20)
    small = read_manifest(JOB.save(tmp_path / "small", 37))
    assert (large.tables is None, small.tables is None) == (False, True)
    assert dict(large.units) == dict(small.units)
    assert dict(large.locals) == dict(small.locals)
    assert large.local_reasons == small.local_reasons
    assert [large.holders_of(unit) for unit in large.units] == [small.holders_of(unit) for unit in small.units]
    for name in ("epoch", "step", "exact", "reasons", "facts", "world_size"):
        assert getattr(large, name) == getattr(small, name)
    assert [large.with_chunks(entry) for entry in large.files] == list(small.files)


def test_a_manifest_without_tables_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = JOB.save(tmp_path, 37) / "manifest.json"
    manifest = read_manifest(path.parent)
    assert manifest.encode() == path.read_bytes()
    assert Manifest.decode(path.read_bytes(), path) == manifest


def test_a_rank_opens_what_it_reads(tmp_path: Path) -> None:
    path = save_many(tmp_path, 20)
    os = Opened()
    checkpoint = load.open_checkpoint(path, os)
    assert {opened.name for opened in os.paths} == {"manifest.json"}
    tensors = checkpoint.read(checkpoint.manifest.units["u7"])
    assert [data.tobytes() for _, data in tensors.values()] == [bytes([7]) * 8] * 3
    assert {opened.parent.name for opened in os.paths[1:]} <= {"rank_7", path.name}
    assert checkpoint.manifest.holders_of("u11") == (11,)
    assert not any(opened.parent.name == "rank_11" for opened in os.paths)


def test_the_newest_is_found_without_reading_a_table(tmp_path: Path) -> None:
    read = []
    for tensors in (3, 300):
        path = save_many(tmp_path / str(tensors), 10, tensors)
        os = Opened()
        assert load.latest(path.parent, os=os) == path
        read.append(os.bytes_read)
    assert read[1] < 1.5 * read[0]


def test_the_newest_of_very_many_ranks_is_found_without_opening_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_many(tmp_path, 20)
    monkeypatch.setattr("lastwords.checkpoint.manifest.EXAMINED_BYTES_MAX", 0)
    monkeypatch.setattr("lastwords.checkpoint.manifest.SIZES_MAX", 19)
    os = Opened()
    assert load.latest(tmp_path, os=os) == path
    assert {one.name for one in os.paths} == {"manifest.json"}
    assert load.latest(tmp_path, "another job") is None


@pytest.mark.parametrize("sizes_max", [2, 3])
@pytest.mark.parametrize("defect", ["directory", "file", "part", "length", "manifest", "name"])
def test_what_a_glance_finds_missing_or_changed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, defect: str, sizes_max: int
) -> None:
    older, path = save_many(tmp_path, 3), save_many(tmp_path, 3, step=2)
    if defect == "name":
        path = path.rename(tmp_path / "tft_saved_checkpoints-step_3")
    monkeypatch.setattr("lastwords.checkpoint.manifest.EXAMINED_BYTES_MAX", 0)
    monkeypatch.setattr("lastwords.checkpoint.manifest.SIZES_MAX", sizes_max)
    seen = defect in ("directory", "manifest", "name") or sizes_max == 3
    file = path / "rank_1/ttp_rank_1-1_2.ckpt"
    match defect:
        case "directory":
            (path / "rank_1").rename(tmp_path / "rank_1")
        case "file":
            file.unlink()
        case "part":
            (path / "rank_1/part.json").unlink()
        case "length":
            file.write_bytes(file.read_bytes()[:-1])
        case "manifest":
            raw = bytearray((path / "manifest.json").read_bytes())
            raw[len(raw) // 2] ^= 1
            (path / "manifest.json").write_bytes(raw)
    assert load.latest(tmp_path) == (older if seen else path)
    if not seen:  # whoever reads it finds it
        assert load.verify(path) != []
    with caplog.at_level("WARNING"):
        assert look_for([tmp_path], None)["path"] == str(older), "resume() looks at every file"
    golden.says(caplog.messages)


@pytest.mark.parametrize("examined_bytes_max", [0, 1 << 20])
def test_one_of_a_newer_format_may_be_the_newest_and_no_older_one_is_used_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examined_bytes_max: int
) -> None:
    _, path = save_many(tmp_path, 3), save_many(tmp_path, 3, step=2)
    manifest = json.loads((path / "manifest.json").read_bytes()) | {"format_version": 9}
    del manifest["checksum"]
    (path / "manifest.json").write_bytes(encode_document(manifest))
    monkeypatch.setattr("lastwords.checkpoint.manifest.EXAMINED_BYTES_MAX", examined_bytes_max)
    for look in (load.latest, lambda root: look_for([root], None)):
        with pytest.raises(NewerFormatError, match=path.name):
            look(tmp_path)
    assert load.latest(tmp_path, "another job") is None, "the control: it says whose it is"


def test_what_was_verified_is_published_without_being_read_again(tmp_path: Path) -> None:
    manifests = []
    for name in ("read again", "handed over"):
        root = tmp_path / name
        root.mkdir()
        directory = save_many(root, 3).rename(layout.TemporaryName(1, "job", 1, 1, 1).under(root))
        (directory / "manifest.json").unlink()
        heads: dict[int, publish.SeenPart] = {}
        units = [f"u{rank}" for rank in range(3)]
        assert publish.verify_parts(directory, range(3), units, range(3), 1, heads=heads) == []
        os = Opened()
        incident = publish.IncidentFacts("job", 1, 1, 1, 1, 3, (0, 1, 2), "a test")
        known = heads if name == "handed over" else None
        path = publish.publish(root, directory, incident, os, published_unix_ns=1, heads=known)
        assert len([one for one in os.paths if one.parent.name.startswith("rank_")]) == (0 if known else 6)
        manifests.append((path / "manifest.json").read_bytes())
    assert manifests[0] == manifests[1]


def test_the_tables_of_many_tensors_are_encoded_in_small_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of json.dumps or a JSONEncoder keeps every other thread waiting until it is done."""
    encode, longest = json.JSONEncoder.encode, 0

    def measured(self: json.JSONEncoder, value: object) -> str:
        nonlocal longest
        text = encode(self, value)
        if not isinstance(value, str):  # metadata are one text, which takes no time
            longest = max(longest, len(text))
        return text

    monkeypatch.setattr(json.JSONEncoder, "encode", measured)
    names = [f"unit/u/model/layer_{number}" for number in range(5000)]
    unit = UnitState(
        [(TensorSpec(name, "U8", (1,)), b"1") for name in names], replace(EMPTY_UNIT, holders=list(range(5000)))
    )
    part = write_part(tmp_path, 0, 1, 1, 1, {"u": unit}, {0: LocalState([])}, {})
    assert part.file.header_bytes > 300_000
    assert longest < 50_000


@pytest.mark.parametrize("who", ["a writer", "the controller"])
def test_what_no_reader_would_take_is_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    if who == "the controller":
        directory = layout.TemporaryName(1, "job", 1, 1, 1).under(tmp_path)
        write_part(directory, 0, 1, 1, 1, {"u": UnitState([])}, {0: LocalState([])}, {}, job="job")
        monkeypatch.setattr("lastwords.checkpoint.part.DOCUMENT_BYTES_MAX", 1000)
        incident = publish.IncidentFacts("job", 1, 1, 1, 1, 1, (0,), "x" * 1000)
        with golden.raises(StorageError):
            publish.publish(tmp_path, directory, incident)
        assert [path.name for path in tmp_path.iterdir()] == [directory.name]
        assert not (directory / "manifest.json").exists()
        assert (directory / "rank_0" / layout.PART_NAME).exists()
    else:
        monkeypatch.setattr("lastwords.checkpoint.part.DOCUMENT_BYTES_MAX", 100)
        with golden.raises(StorageError):
            write_part(tmp_path, 0, 1, 1, 1, {"u": UnitState([])}, {0: LocalState([])}, {}, job="job")
        assert not list(tmp_path.rglob("*.*"))


def damage_of(path: Path, rank: int, kind: str) -> Path:
    part = path / f"rank_{rank}" / layout.PART_NAME
    raw = part.read_bytes()
    match kind:
        case "missing":
            part.unlink()
        case "cut off":
            part.write_bytes(raw[:-1])
        case "flipped":
            part.write_bytes(raw[:100] + bytes([raw[100] ^ 1]) + raw[101:])
        case "of another rank":
            part.write_bytes((path / f"rank_{1 - rank}" / layout.PART_NAME).read_bytes())
    return part


@pytest.mark.parametrize("kind", ["missing", "cut off", "flipped", "of another rank"])
def test_a_damaged_part_is_named_and_its_content_refused(tmp_path: Path, kind: str) -> None:
    path = JOB.save(tmp_path, 37)
    part = damage_of(path, 1, kind)
    problems = load.verify(path)
    assert [problem.file for problem in problems] == ["rank_1/ttp_rank_1-4_7.ckpt"]
    assert str(part) in problems[0].text
    checkpoint = load.open_checkpoint(path)
    assert checkpoint.read(checkpoint.manifest.units["a"])
    with pytest.raises(CheckpointError, match=str(part)):
        checkpoint.read(checkpoint.manifest.units["bb"])
    assert (load.latest(tmp_path) == path) == (kind == "flipped"), "sizes are looked at, bytes are not"


def test_a_missing_or_cut_file_is_no_complete_checkpoint(tmp_path: Path) -> None:
    path = JOB.save(tmp_path, 37)
    file = path / "rank_1/ttp_rank_1-4_7.ckpt"
    with file.open("r+b") as opened:
        opened.truncate(100)
    assert load.latest(tmp_path) is None
    with pytest.raises(FormatError, match="truncated"):
        content_of(path)
    file.unlink()
    assert load.latest(tmp_path) is None
    with golden.raises(IncompleteError):
        opened = load.open_checkpoint(path)
        opened.read(opened.manifest.locals[1])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("units", {}),
        ("units", {"a": {"writer": 7}}),
        ("units", {"a": {"writer": 1}, "bb": {"writer": 0}}),
        ("units", {"a": 3}),
        ("units", {"a": {"writer": 0, "holders": ["x"]}}),
        ("locals", {"0": {"writer": 0, "exact": 1, "reasons": []}}),
        ("files", []),
    ],
)
def test_a_forged_manifest_of_version_2_is_refused(tmp_path: Path, key: str, value: object) -> None:
    path = JOB.save(tmp_path, 37)
    content = json.loads((path / "manifest.json").read_bytes())
    del content["checksum"]
    (path / "manifest.json").write_bytes(encode_document({**content, key: value}))
    with golden.raises(FormatError):
        opened = load.open_checkpoint(path)
        opened.read(opened.manifest.units["a"])
    golden.says(load.verify(path)[0].text)


def test_a_checkpoint_of_version_2_is_replaced_and_published_again(tmp_path: Path) -> None:
    JOB.save(tmp_path, 37)
    newer = JOB.again(generation=3)
    path = newer.save(tmp_path, 37)
    assert read_manifest(path).generation == 3
    assert [item.name for item in tmp_path.iterdir() if item.name.startswith("tft")] == [path.name]
