"""What each document has to say, and in which form: anything else is refused, with the file, the field and a remedy."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint import manifest, publish
from lastwords.checkpoint.document import compact, encode_document, in_steps
from lastwords.checkpoint.entries import Reason
from lastwords.checkpoint.manifest import Manifest
from lastwords.checkpoint.part import PartHead, RankPart
from lastwords.checkpoint.remote.uploader import Record
from lastwords.checkpoint.reshard.strategy import Strategy, strategy_of
from lastwords.checkpoint.starts import Launch, Start
from lastwords.checkpoint.system import REAL_OS
from lastwords.errors import FormatError
from tests import golden
from tests.checkpoint.states import Job

WHERE = Path("/ckpt/manifest.json")
REMEDIES = ("restore the file or use another checkpoint", "remove it; it is written again", "save the strategy again")

OTHERS: dict[type, tuple[Any, ...]] = {
    bool: (None, 1, "true", [], {}),
    int: (None, True, -1, 1 << 63, 1 << 200, 0.5, "7", "\ud800", [], {}),
    str: (None, True, 1, 0.5, [], {}),
    list: (None, True, 1, "x", "\ud800", {}, [None], [[[]]]),
    dict: (None, True, 1, "x", "\ud800", [], {"x": None}),
}
"""What cannot stand where a value of a type belongs."""

SET_ASIDE = {"manifest": (), "large": (), "part": ("summary",), "head": ("units", "locals"), "start": (),
             "record": (), "strategy": (), "glance": ("parent_job", "epoch", "step", "world_size", "reason",
             "cause_ranks", "units", "locals", "reasons")}  # fmt: skip
"""Top-level keys that a reader leaves to others."""

BY_NAME, FREE = ("units", "locals", "tensors"), ("meta", "facts")
"""Tables, of which an item may be missing; and objects in which anything may be."""


def glanced(raw: bytes, where: Path) -> object:
    """All that a glance says; the files themselves are not looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "EXAMINED_BYTES_MAX", 0)
        patch.setattr(manifest, "read_document", lambda *_: raw)
        patch.setattr(manifest, "check_sizes", lambda *_: None)
        patch.setattr(manifest, "_check_presence", lambda *_: None)
        return manifest.glance(where.parent, REAL_OS)


READERS: dict[str, Callable[[bytes, Path], object]] = {
    "manifest": Manifest.decode, "large": Manifest.decode, "glance": glanced, "part": RankPart.decode,
    "head": PartHead.decode, "start": Start.decode, "record": Record.decode, "strategy": Strategy.decode,
}  # fmt: skip


def content_of(kind: str, root: Path) -> dict[str, Any]:
    """Of a sound document."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish, "TABLES_BYTES_MAX", 0 if kind in ("large", "glance") else 1 << 20)
        directory = Job().write(root, 37)
        part = (directory / "rank_1/part.json").read_bytes()
        manifest = (Job().again(generation=2).save(root, 37) / "manifest.json").read_bytes()
    start = Start(3, "digits", Launch("", "run", "agent", "endpoint", "process"), ("other",))
    raw = {
        "start": start.encode,
        "record": Record("s3://bucket", frozenset(("a", "b"))).encode,
        "strategy": lambda: strategy_of(Manifest.decode(manifest, WHERE)).encode(),
    }.get(kind, lambda: part if kind in ("part", "head") else manifest)()
    content: dict[str, Any] = json.loads(raw)
    return {key: value for key, value in content.items() if key not in ("checksum", "format_version")}


def places_in(value: Any, *way: Any) -> Iterator[tuple[Any, ...]]:
    """Ways to everything that has a type."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*way, key)
        if key not in FREE:
            yield from places_in(inner, *way, key)


def changed(content: dict[str, Any], way: tuple[Any, ...], *value: Any) -> dict[str, Any]:
    """A copy with another value there; with none, without it."""
    content = copy.deepcopy(content)
    owner = at(content, way[:-1])
    if value:
        owner[way[-1]] = value[0]
    else:
        del owner[way[-1]]
    return content


def at(value: Any, way: tuple[Any, ...]) -> Any:
    """What is there."""
    for key in way:
        value = value[key]
    return value


def refused(kind: str, content: dict[str, Any]) -> str:
    """What is said of a document with a right checksum; "" if it is taken."""
    try:
        READERS[kind](encode_document({"format_version": 1, **content}), WHERE)
    except FormatError as error:
        return str(error)
    return ""


@pytest.mark.ci
@pytest.mark.parametrize("kind", READERS)
def test_every_value_of_another_type_or_out_of_bounds_is_refused(tmp_path: Path, kind: str) -> None:
    content = content_of(kind, tmp_path)
    assert refused(kind, content) == "", "negative control"
    for way in places_in(content):
        if way[0] in SET_ASIDE[kind] or way[-2:-1] == (
            "global_shape",
        ):  # that of a shard is bounded, the whole's is not
            continue
        *_, owner, last = ("", *way)
        others = OTHERS[type(at(content, way))]
        wrong = [changed(content, way, other) for other in others if last not in FREE or not isinstance(other, dict)]
        if not isinstance(last, int) and owner not in BY_NAME:
            wrong.append(changed(content, way))
        for one in wrong:
            said = refused(kind, one)
            assert str(WHERE) in said, (way, at(one, way[:-1]))
            assert any(remedy in said for remedy in REMEDIES), said


SMUGGLED = {
    "part": {"part_bytes": 7, "part_sum": "0" * 16},
    "head": {"part_bytes": 7, "part_sum": "0" * 16, "units": {}, "locals": {}},
    "start": {"restarted": True, "launch": {"job": "another", "restarted": True}},
}
OF_ENTRIES = {"said": {"reasons": ["x"]}, "shares": [{}], "wholes": {"x": 1}, "part_bytes": 3}


@pytest.mark.parametrize("kind", READERS)
def test_what_only_memory_has_is_not_read_from_a_file(tmp_path: Path, kind: str) -> None:
    content = content_of(kind, tmp_path)
    more = {**content, **SMUGGLED.get(kind, {}), "later": 1}
    for table in {"units", "locals"} & content.keys() - {*SET_ASIDE[kind]}:
        more[table] = {name: {**one, **OF_ENTRIES} for name, one in content[table].items()}
    sound, read = (READERS[kind](encode_document({"format_version": 1, **one}), WHERE) for one in (content, more))
    if isinstance(sound, PartHead) and isinstance(read, PartHead):  # they say how long their file is
        read = replace(read, part_bytes=sound.part_bytes, part_sum=sound.part_sum)
    assert read == sound


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("manifest", {"part_bytes": 7, "part_sum": "0" * 16}),
        ("manifest", {"chunks": [], "part_bytes": 7, "part_sum": "0" * 16}),
        ("large", {"chunks": ["0" * 16]}),
        ("large", {"part_bytes": 0}),
        ("large", {"part_sum": ""}),
        ("large", {"part_bytes": 0, "part_sum": "", "chunks": ["0" * 16]}),
        ("glance", {"part_bytes": 0, "part_sum": "", "chunks": ["0" * 16]}),
        ("part", {"chunks": [], "part_bytes": 7, "part_sum": "0" * 16}),
        ("head", {"chunks": [], "part_bytes": 7, "part_sum": "0" * 16}),
    ],
)
def test_a_file_has_its_chunks_where_its_tables_are(tmp_path: Path, kind: str, file: dict[str, Any]) -> None:
    content = content_of(kind, tmp_path)
    forged = {**content["file"], **file} if "file" in content else [{**one, **file} for one in content["files"]]
    golden.says(refused(kind, {**content, ("file" if "file" in content else "files"): forged}))


def test_a_document_in_steps_is_the_same() -> None:
    reasons = {number: Reason("late", ranks=(number,)) for number in range(1000)}
    content = {"by rank": reasons, "listed": tuple(reasons.values()), "deep": {"a": {"b": [*reasons]}}, "none": None}
    assert in_steps(content) == compact(content)
    assert json.loads(compact(content))["by rank"]["7"] == {"detail": "late", "ranks": [7]}
    with pytest.raises(TypeError, match="object"):
        compact({"x": object()})
