"""The record of a drill: it comes back as it was, says what has changed, and never fails whoever reads it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint import drill_record
from lastwords.checkpoint.drill_record import BYTES_MAX, Covered, Drilled
from tests import golden

RECORD = Drilled(
    drilled_unix_ns=1_700_000_000_000_000_000,
    script="/home/me/train.py",
    sha256="a" * 64,
    arguments_sha256="b" * 64,
    torch="2.13.0",
    lastwords="0.1.0",
    world_size=2,
    steps=12,
    bitwise=False,
    drills=(Covered("forward", (0, 1), 7, "told", 6), Covered("backward", (1,), 8, "bitwise", 7)),
    missed=("evaluation",),
    data="d8b322e967005539",
)
SAME = (RECORD.sha256, RECORD.arguments_sha256)


def test_a_record_comes_back_as_it_was_and_the_newest_counts(tmp_path: Path) -> None:
    drill_record.write(tmp_path, replace(RECORD, steps=4))
    drill_record.write(tmp_path, replace(RECORD, changed=("it is of another time",)))
    assert drill_record.read(tmp_path) == (RECORD, ""), "what has changed is of the reader"
    assert [path.name for path in tmp_path.iterdir()] == ["drill.json"]


def test_what_is_not_as_it_was_drilled_is_said_each_by_a_sentence() -> None:
    versions = {"torch": "2.13.0", "lastwords": "0.1.0", "world_size": 2, "data": RECORD.data}
    assert RECORD.beside(SAME, **versions).changed == ()  # type: ignore[arg-type]
    assert RECORD.beside().changed == (), "what is not known is not compared"
    others = RECORD.beside(("c", "d"), torch="2.14.0", lastwords="0.2.0", world_size=4, data="e")
    assert len(others.changed) == 6
    golden.says("\n".join(others.changed))


def test_the_script_that_runs_is_told_by_its_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "1"])
    monkeypatch.setattr("sys.modules", {"__main__": type("Main", (), {"__file__": str(script)})})
    unread = drill_record.running()
    script.write_text("1")
    first = drill_record.running()
    assert unread == (str(script), ("", first[1][1]))
    script.write_text("2")
    assert drill_record.running()[1][0] != first[1][0]
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "2"])
    assert drill_record.running()[1][1] != first[1][1]


def document(**changed: Any) -> bytes:
    return json.dumps({"format": 1, **json.loads(json.dumps(vars_of(RECORD))), **changed}).encode()


def vars_of(record: Drilled) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__ if name not in ("drills", "changed")}


BAD = {
    "empty": b"",
    "cut off": document()[:50],
    "not text": b"\xff\xfe\x00",
    "half of a pair": document(script="\ud800"),
    "another's": b'{"steps": 3}',
    "a list": b"[]",
    "nested": b"[" * 100_000,
    "of a later version": document(format=2),
    "wrong type": document(world_size="2"),
    "negative": document(steps=-1),
    "no script": json.dumps({"format": 1}).encode(),
    "huge": b" " * (BYTES_MAX + 1),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_record_is_ignored_with_a_word(tmp_path: Path, name: str) -> None:
    (tmp_path / "drill.json").write_bytes(BAD[name])
    found, why = drill_record.read(tmp_path)
    assert found is None
    assert why.startswith(f"{tmp_path / 'drill.json'} is ignored: ")


def test_a_record_as_bad_files_are_made_of_is_read(tmp_path: Path) -> None:
    (tmp_path / "drill.json").write_bytes(document())
    assert drill_record.read(tmp_path) == (replace(RECORD, drills=()), "")


@pytest.mark.parametrize("kind", ["directory", "pipe", "link to itself"])
def test_what_is_no_file_is_ignored_with_a_word_and_nobody_waits_for_it(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "drill.json"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path)
    found, why = drill_record.read(tmp_path)
    assert found is None
    assert why
