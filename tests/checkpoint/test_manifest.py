from __future__ import annotations

import functools
import json
import os
import tempfile
import tracemalloc
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastwords.checkpoint import layout, load
from lastwords.checkpoint.direct_io import CHUNK_BYTES
from lastwords.checkpoint.document import decode_document, encode_document
from lastwords.checkpoint.entries import Cause, FileEntry, LocalEntry, Reason, UnitEntry
from lastwords.checkpoint.format import DTYPE_BITS, TensorSpec
from lastwords.checkpoint.manifest import (
    CheckpointKind,
    Claimed,
    Manifest,
    build_manifest,
    contradiction,
    glance,
    read_manifest,
    read_published,
)
from lastwords.checkpoint.part import RankPart, read_part, read_part_head
from lastwords.checkpoint.system import REAL_OS
from lastwords.errors import FormatError, IncompleteError, NewerFormatError
from lastwords.vocabulary import RANKS_MAX
from tests import golden
from tests.checkpoint.states import Job
from tests.checkpoint.test_storable import VALUES, same

WHERE = Path("/ckpt/manifest.json")
SUMS = st.integers(0, 2**64 - 1).map(lambda number: f"{number:016x}")
METAS = st.dictionaries(st.text(max_size=3), VALUES, max_size=2)
COUNTS = st.integers(0, 2**40)
REASONS = st.builds(
    Reason,
    st.text(max_size=5),
    st.sampled_from(Cause),
    st.lists(st.integers(0, 99), max_size=3, unique=True).map(sorted).map(tuple),
    st.sampled_from(["", "a", "r0-3"]),
)


@st.composite
def specs(draw: Any, prefix: str) -> tuple[TensorSpec, ...]:
    names = draw(st.lists(st.text("abc./", min_size=1, max_size=4), max_size=2, unique=True))
    found = []
    for name in names:
        shape = draw(st.lists(st.integers(0, 4), max_size=2))
        offsets = [draw(st.integers(0, 3)) for _ in shape]
        whole = [size + offset + draw(st.integers(0, 3)) for size, offset in zip(shape, offsets, strict=True)]
        dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
        found.append(TensorSpec(prefix + name, dtype, tuple(shape), tuple(whole), tuple(offsets)))
    return tuple(found)


@st.composite
def manifests(draw: Any) -> Manifest:
    epoch, step = draw(st.tuples(st.integers(1, 99), st.integers(1, 99)))
    ranks = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True))
    files = {}
    for rank in ranks:
        size = draw(st.integers(8, 3 * CHUNK_BYTES))
        chunks = tuple(draw(SUMS) for _ in range(-(-size // CHUNK_BYTES)))
        header = draw(st.integers(8, size))
        files[rank] = FileEntry(str(layout.PartPath(rank, epoch, step)), size, header, draw(SUMS), chunks)
    units = {
        f"u{index}": UnitEntry(rank, files[rank].path, draw(specs(f"unit/u{index}/model/")), draw(METAS))
        for index, rank in enumerate(ranks)
    }
    locals_ = {
        owner: LocalEntry(
            ranks[0],
            files[ranks[0]].path,
            draw(specs(f"local/{owner}/")),
            draw(METAS),
            draw(st.booleans()),
            tuple(draw(st.lists(REASONS, max_size=2))),
        )
        for owner in draw(st.lists(st.integers(0, 9), max_size=2, unique=True).map(sorted))
    }
    return Manifest(
        job=draw(st.text(max_size=5)),
        parent_job=draw(st.text(max_size=5)),
        generation=draw(COUNTS),
        incident=draw(COUNTS),
        attempt=draw(COUNTS),
        global_step=draw(st.integers(1, 2**40)),
        epoch=epoch,
        step=step,
        world_size=draw(st.integers(10, 99)),
        reason=draw(st.text(max_size=9)),
        cause_ranks=tuple(draw(st.lists(st.integers(0, 9), max_size=2))),
        published_unix_ns=draw(COUNTS),
        files=tuple(files.values()),
        units=units,
        locals=locals_,
        exact=draw(st.booleans()),
        reasons=tuple(draw(st.lists(REASONS, max_size=2))),
        facts=draw(METAS),
    )


@pytest.mark.ci
@given(manifests())
def test_a_manifest_comes_back_as_it_was_written(manifest: Manifest) -> None:
    raw = manifest.encode()
    back = Manifest.decode(raw, WHERE)
    # Values with a NaN inside equal nothing by `==`; that the bytes are the same compares all the rest.
    assert same(back.facts, manifest.facts)
    for unit, entry in manifest.units.items():
        assert same(back.units[unit].said, entry.said)
    assert back.encode() == raw
    assert raw.isascii()
    json.loads(raw)


@functools.cache
def example() -> tuple[bytes, bytes]:
    """manifest.json and part.json of a small checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        job = Job()
        directory = job.write(Path(name), 37)
        part = (directory / "rank_1/part.json").read_bytes()
        return (job.again(generation=2).save(Path(name), 37) / "manifest.json").read_bytes(), part


@pytest.mark.parametrize("flip", [0x01, 0x20, 0x80, 0x10])
def test_one_changed_byte_anywhere_in_a_manifest_is_found(flip: int) -> None:
    raw = example()[0]
    for at in range(len(raw)):
        damaged = raw[:at] + bytes([raw[at] ^ flip]) + raw[at + 1 :]
        with pytest.raises(FormatError, match=r"manifest\.json.*"):
            Manifest.decode(damaged, WHERE)


def test_one_changed_byte_anywhere_in_a_part_is_found() -> None:
    raw = example()[1]
    for at in range(len(raw)):
        damaged = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        with pytest.raises(FormatError):
            RankPart.decode(damaged, WHERE)


def test_white_space_that_was_changed_is_found() -> None:
    """JSON would not mind, and neither would a checksum over the parsed content."""
    raw = example()[0]
    assert json.loads(raw.replace(b": ", b":\t")) == json.loads(raw)
    for damaged in (raw.replace(b": ", b":\t", 1), raw + b"\n", raw[:-1], raw.replace(b"\n", b"\r\n", 1)):
        with pytest.raises(FormatError, match="checksum"):
            Manifest.decode(damaged, WHERE)


def test_a_manifest_cut_off_anywhere_is_found() -> None:
    raw = example()[0]
    for size in range(len(raw)):
        with pytest.raises(FormatError, match="damaged"):
            Manifest.decode(raw[:size], WHERE)


def test_a_newer_format_is_named_with_what_to_do() -> None:
    content = json.loads(example()[0])
    del content["checksum"]
    newer = encode_document({**content, "format_version": 2, "units": "something else entirely"})
    with golden.raises(NewerFormatError):
        Manifest.decode(newer, WHERE)


def test_a_flipped_version_digit_is_damage_and_not_a_newer_format() -> None:
    raw = example()[0].replace(b'"format_version": 1', b'"format_version": 2')
    with pytest.raises(FormatError, match="checksum"):
        Manifest.decode(raw, WHERE)


JUNK = st.sampled_from([None, -1, 0, 1.5, True, "", "x", [], ["x"], {}, {"x": 1}, 2**70, "../x", [[1]], {"~class": 1}])


@pytest.mark.ci
@settings(max_examples=300)
@given(st.data())
def test_a_forged_manifest_raises_nothing_but_format_error(data: Any) -> None:
    content = json.loads(example()[0])
    del content["checksum"]
    place: Any = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inner = place[key]
        if not (isinstance(inner, dict | list) and inner) or data.draw(st.booleans()):
            break
        place = inner
    if isinstance(place, dict) and data.draw(st.booleans()):
        del place[key]
    else:
        place[key] = data.draw(JUNK)
    try:
        Manifest.decode(encode_document(content), WHERE)
    except FormatError:
        pass


def manifest_with(**changes: Any) -> Manifest:
    return replace(Manifest.decode(example()[0], WHERE), **changes)


def _moved(manifest: Manifest, path: str) -> dict[str, UnitEntry]:
    return {unit: replace(entry, file=path) for unit, entry in manifest.units.items()}


BASE = Manifest.decode(example()[0], WHERE)
FILE = BASE.files[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"files": (FILE, FILE)},
        {"units": {}},
        {"files": (replace(FILE, bytes=FILE.bytes + CHUNK_BYTES), BASE.files[1])},
        {"files": (replace(FILE, header_bytes=FILE.bytes + 1), BASE.files[1])},
        {"epoch": 5},
        {"epoch": 0, "step": BASE.global_step + 1},
        {"files": BASE.files[:1]},
        {"units": _moved(BASE, FILE.path)},
        {"units": {"a": BASE.units["a"], "c": replace(BASE.units["a"])}},
        {"world_size": 1},
        {"cause_ranks": (7,)},
        {"units": {"a/b": replace(BASE.units["a"], tensors=())}},
    ],
)
def test_each_contradiction_is_named(changes: dict[str, Any]) -> None:
    assert contradiction(BASE) is None
    manifest = manifest_with(**changes)
    golden.says(contradiction(manifest))
    with golden.raises(FormatError):
        Manifest.decode(manifest.encode(), WHERE)


@pytest.mark.parametrize("path", ["/etc/passwd", "../../x", "rank_0/../x.ckpt"])
def test_paths_in_a_manifest_cannot_lead_out_of_its_directory(path: str) -> None:
    forged = manifest_with(files=(replace(FILE, path=path), *BASE.files[1:]), units=_moved(BASE, path))
    with golden.raises(FormatError):
        Manifest.decode(forged.encode(), WHERE)


@pytest.mark.parametrize("key", ["9" * 5000, "9" * 19, "007", "-1", "x", "\u0663"])
def test_a_key_that_is_no_rank_is_refused(key: str) -> None:
    content = json.loads(example()[0])
    del content["checksum"]
    content["locals"][key] = content["locals"].pop("1")
    with golden.raises(FormatError) as caught:
        Manifest.decode(encode_document(content), WHERE)
    assert len(str(caught.value)) < 500


def test_every_field_is_in_the_file() -> None:
    assert {field.name for field in fields(Manifest)} == set(json.loads(example()[0])) - {
        "checksum",
        "format_version",
        "tables_in_parts",
    }


def test_a_directory_without_a_manifest_is_incomplete(tmp_path: Path) -> None:
    with pytest.raises(IncompleteError, match=r"manifest\.json") as caught:
        read_manifest(tmp_path)
    assert caught.value.missing == ("manifest.json",)
    with golden.raises(IncompleteError):
        read_manifest(tmp_path / "nothing")


def test_a_manifest_that_is_a_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(Exception, match="regular"):
        read_manifest(tmp_path)


def test_documents_are_canonical() -> None:
    one, other = encode_document({"b": 1, "a": [1, 2]}), encode_document({"a": [1, 2], "b": 1})
    assert one == other
    assert decode_document(encode_document({"format_version": 1}), where=WHERE, version_max=1) == {"format_version": 1}


@pytest.mark.parametrize("version", [None, "1", 0, -1, True, 1.0])
def test_a_document_without_a_sound_version_is_damaged(version: Any) -> None:
    with golden.raises(FormatError):
        decode_document(encode_document({"format_version": version}), where=WHERE, version_max=1)


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_but_format_error(raw: bytes) -> None:
    with pytest.raises(FormatError):
        decode_document(raw, where=WHERE, version_max=1)


@given(
    st.dictionaries(
        st.text(max_size=3).filter(lambda key: key != "checksum"), st.integers() | st.text(max_size=4), max_size=4
    )
)
def test_documents_come_back(content: dict[str, Any]) -> None:
    content = {**content, "format_version": 1}
    assert decode_document(encode_document(content), where=WHERE, version_max=1) == content


def test_parts_come_back(tmp_path: Path) -> None:
    directory = Job().write(tmp_path, 37)
    part = read_part(directory / "rank_0")
    assert RankPart.decode(part.encode(), WHERE) == part
    assert load.scan(tmp_path) == []


# --------------------------------------------------------------------------- what is read before it is believed


HUGE = {
    "zeros": b"",
    "a manifest's beginning, then zeros": b'{\n"attempt": 1,\n"checksum": "0123456789abcdef",\n',
}


@pytest.mark.parametrize("beginning", HUGE.values(), ids=HUGE)
def test_a_large_file_that_is_no_manifest_is_not_taken_into_memory(tmp_path: Path, beginning: bytes) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(beginning)
    os.truncate(path, 200 << 20)
    tracemalloc.start()
    try:
        assert Claimed.read(tmp_path).published_unix_ns == 0
        with golden.raises(FormatError):
            read_manifest(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_number_is_found_across_blocks(tmp_path: Path) -> None:
    for long in range((1 << 20) - 140, (1 << 20) - 40, 7):
        (tmp_path / "manifest.json").write_bytes(encode_document({"files": "x" * long, "published_unix_ns": 10**18}))
        assert Claimed.read(tmp_path).published_unix_ns == 10**18


@pytest.mark.parametrize(
    ("incident", "attempt", "kind"),
    [
        (0, 1, CheckpointKind.PERIODIC),
        (0, 0, CheckpointKind.CONVERTED),
        (1, 1, CheckpointKind.LAST_WORDS),
        (2, 0, CheckpointKind.LAST_WORDS),
    ],
)
def test_what_is_claimed_and_what_is_checked_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, incident: int, attempt: int, kind: CheckpointKind
) -> None:
    path = Job(incident=incident, attempt=attempt).save(tmp_path, 37)
    manifest, claimed = read_manifest(path), Claimed.read(path)
    monkeypatch.setattr("lastwords.checkpoint.manifest.EXAMINED_BYTES_MAX", 0)
    assert claimed == Claimed.of(manifest) == glance(path, REAL_OS) != Claimed()
    assert (manifest.kind, claimed.kind) == (kind, kind)


def test_what_cannot_be_read_is_not_periodic(tmp_path: Path) -> None:
    assert Claimed.read(tmp_path) == Claimed()
    assert Claimed().kind is not CheckpointKind.PERIODIC


def test_half_a_surrogate_pair_where_a_number_belongs_is_damage(tmp_path: Path) -> None:
    Job().save(tmp_path, 36)
    path = Job(attempt=2).save(tmp_path, 37) / layout.MANIFEST_NAME
    content = json.loads(path.read_bytes())
    del content["checksum"]
    path.write_bytes(encode_document({**content, "cause_ranks": "\ud800"}))
    with golden.raises(FormatError):
        read_manifest(path.parent)
    assert load.latest(tmp_path) == layout.checkpoint_dir(tmp_path, 36)


FORGED = {
    "a structure": {"~numpy": ["(1,", {"~bytes": "AAAA"}]},
    "a range": {"~range": [0, 9, 1]},
    "a number": {"~numpy": ["<f4", {"~bytes": "AAAAAA=="}]},
}


@pytest.mark.parametrize("value", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize(
    "way",
    [
        *("facts", "facts ddp", "facts moved", "facts buckets"),
        *("units a meta", "units a meta parameters", "units a meta extras", "locals 0 meta", "locals 0 meta slot"),
    ],
)
def test_a_forged_value_where_a_mapping_belongs_is_damage_and_the_one_before_is_taken(
    tmp_path: Path, way: str, value: Any
) -> None:
    Job().save(tmp_path, 36)
    path = Job(attempt=2).save(tmp_path, 37) / layout.MANIFEST_NAME
    content = json.loads(path.read_bytes())
    del content["checksum"]
    *keys, last = way.split()
    functools.reduce(dict.__getitem__, keys, content)[last] = value
    path.write_bytes(encode_document(content))
    with pytest.raises(FormatError) as caught:
        read_published(path.parent)
    assert str(path) in str(caught.value)
    assert load.latest(tmp_path) == layout.checkpoint_dir(tmp_path, 36)
    assert [found.status.name for found in load.scan(tmp_path)] == ["COMPLETE", "DAMAGED"]


@pytest.mark.parametrize("moved", [False, True])
def test_a_world_that_no_job_has_is_refused(moved: bool) -> None:
    def raw(world_size: int) -> bytes:
        facts = {"moved": {"world_size": world_size}} if moved else {}
        return manifest_with(world_size=3 if moved else world_size, facts=facts).encode()

    assert Manifest.decode(raw(RANKS_MAX), WHERE).holders_world_size == RANKS_MAX
    with pytest.raises(FormatError, match="world_size"):
        _ = Manifest.decode(raw(RANKS_MAX + 1), WHERE).holders_world_size


def test_very_many_ranks_without_local_state_are_one_reason_that_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Reason] = []

    def reason(*arguments: Any, **named: Any) -> Reason:
        made.append(Reason(*arguments, **named))
        return made[-1]

    directories = sorted(Job().write(tmp_path, 37).iterdir())
    heads, parts = ([read(path, REAL_OS) for path in directories] for read in (read_part_head, read_part))
    monkeypatch.setattr("lastwords.checkpoint.manifest.Reason", reason)
    incident = replace(Job().facts(37), world_size=5000, lost_locals={9: "it died"})
    built = build_manifest(incident, heads, parts, published_unix_ns=1)
    assert [(one.detail, one.ranks) for one in built.reasons] == [
        ("it was not written", (*range(2, 9), *range(10, 5000))),
        ("it died", (9,)),
    ]
    assert len(made) == 2


@pytest.mark.parametrize("name", ["generation", "incident", "attempt", "global_step"])
def test_a_number_that_a_glance_takes_for_another_is_refused(tmp_path: Path, name: str) -> None:
    for number in (10**18 - 1, 10**18):
        raw = manifest_with(**{name: number}).encode()
        (tmp_path / layout.MANIFEST_NAME).write_bytes(raw)
        seen = getattr(Claimed.read(tmp_path), name)
        if number < 10**18:
            assert seen == getattr(Manifest.decode(raw, WHERE), name) == number
        else:
            assert seen == 0, "negative control"
            with golden.raises(FormatError):
                Manifest.decode(raw, WHERE)
