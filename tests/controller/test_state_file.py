"""What a controller keeps for the next one: whole, private, and refused where it cannot be believed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastwords.controller import events, handover
from lastwords.controller.events import (
    Discard,
    GoneRank,
    JobMemory,
    LoopShape,
    Outcome,
    OutcomeKind,
    PartPlan,
    Registered,
    Remember,
    StartPublish,
)
from lastwords.controller.handover import ControllerSpec, StateFile, StateOwner
from lastwords.errors import ConfigError, FormatError, LastWordsError, UnavailableError
from lastwords.liveness import paths
from lastwords.vocabulary import DeathSource, Phase, ProcessId, Schedule, Stand
from tests import golden
from tests.killed import at_each_call

PARTS = (PartPlan(0, 3, ("replicated",), (0, 1)),)
MEMORY = JobMemory(
    gone=(GoneRank(1, DeathSource.ROBUST_MUTEX, Stand(Phase.DONE, 8)), GoneRank(2, DeathSource.STREAM, None)),
    base_step=4,
    loop=LoopShape(10, 2, 4, Schedule(steps=5, keep_max=3)),
    incident=2,
    resumed=1,
    certain=True,
    attempts=(Discard(2, 1, 8, 0), Discard(2, 3, 8, 1)),
    publishing=StartPublish(2, 3, 8, 0, PARTS, "rank 1 died", (1,), (1,), ()),
    periodic=Discard(0, 7, 5, 0),
    wanted=True,
    pace_s=6.5,
    outcome=Outcome(OutcomeKind.SAVED, 8, "/c/step_8", "rank 1 died", (1,)),
)
REMEMBERED = Remember(tuple(Registered(ProcessId("host", 100 + r, 7, "n"), ("u", f"u{r}")) for r in range(3)), MEMORY)
OWNER = StateOwner(4242, 17, (1.5, 9.25))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = paths.state_path("state-file", 2, "5f3a", root=tmp_path)
    place.parent.mkdir(mode=0o700)
    return place


def spec_of(tmp_path: Path) -> ControllerSpec:
    options = events.ControllerOptions(lost_confirm_s=3.5)
    return ControllerSpec("127.0.0.1", 30051, "state-file", 2, 3, tmp_path / "c", tmp_path / "f", 12, options, "5f3a")


def written(path: Path, tmp_path: Path, **changes: Any) -> StateFile:
    """A state file, with fields of its JSON changed afterwards."""
    file = StateFile(path, OWNER, spec_of(tmp_path), "t0ken")
    file.write(REMEMBERED)
    if changes:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return file


def test_what_was_written_is_read(path: Path, tmp_path: Path) -> None:
    written(path, tmp_path)
    kept = handover.read(path)
    assert kept.remembered == REMEMBERED
    assert (kept.owner, kept.spec, kept.token) == (OWNER, spec_of(tmp_path), "t0ken")
    assert handover.owner(path) == OWNER
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(path.parent)) == [path.name]


def test_the_newest_counts(path: Path, tmp_path: Path) -> None:
    file = written(path, tmp_path)
    file.write(Remember(REMEMBERED.members, JobMemory(incident=9)))
    assert handover.read(path).remembered == Remember(REMEMBERED.members, JobMemory(incident=9))
    file.write(Remember((), JobMemory()))
    assert handover.read(path).remembered == Remember((), JobMemory())


def test_what_cannot_be_written_leaves_nothing_older(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = written(path, tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        file.write(Remember((), JobMemory(incident=1)))
        file.write(Remember((), JobMemory(incident=2)))
        assert sorted(os.listdir(path.parent)) == []
    assert len(caplog.records) == 1
    file.write_again()
    assert handover.read(path).memory.incident == 2
    file.write(Remember((), JobMemory(incident=3)))
    file.write_again()
    assert handover.read(path).memory.incident == 3


def test_there_is_none(path: Path) -> None:
    with golden.raises(UnavailableError):
        handover.read(path)
    assert handover.owner(path) is None


@pytest.mark.parametrize(
    "changes",
    [{"memory": {"incident": "many"}}, {"spec": {}}, {"members": [{"pid": 1}]}],
    ids=["memory", "spec", "members"],
)
def test_what_cannot_be_believed_is_refused_and_stays(path: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    written(path, tmp_path, **changes)
    before = path.read_bytes()
    with golden.raises(FormatError):
        handover.read(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"{}"], ids=["empty", "torn", "a list", "nothing"])
def test_what_is_torn_is_refused(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    with golden.raises(FormatError):
        handover.read(path)
    assert handover.owner(path) is None


@pytest.mark.parametrize("text", [b'"\xff"', b"[" * 100_000, b'"\\ud800"'], ids=["no text", "deep", "half a pair"])
def test_bytes_that_no_controller_has_written_are_damage(path: Path, tmp_path: Path, text: bytes) -> None:
    written(path, tmp_path)
    for name in (b"token", b"members"):
        path.write_bytes(b'{"%s":%s,' % (name, text) + path.read_bytes()[1:])
        with pytest.raises(FormatError):
            handover.read(path)
    path.write_bytes(b'{"owner":{"pid":%s,' % text)
    assert handover.owner(path) is None


def test_the_file_of_another_job_is_refused(path: Path, tmp_path: Path) -> None:
    written(path, tmp_path)
    foreign = paths.state_path("another", 2, "5f3a", root=tmp_path)
    foreign.parent.mkdir()
    foreign.write_bytes(path.read_bytes())
    with golden.raises(FormatError):
        handover.read(foreign)


def test_a_link_is_refused(path: Path, tmp_path: Path) -> None:
    written(path, tmp_path)
    link = path.with_name("link.json")
    link.symlink_to(path)
    with golden.raises(ConfigError):
        handover.read(link)


NEWER = Remember(REMEMBERED.members, dataclasses.replace(MEMORY, incident=3))


def kills(path: Path, tmp_path: Path) -> list[int | str]:
    """What is read after each kill while the newer state takes the place of the older one."""
    older = StateFile(path, OWNER, spec_of(tmp_path), "t0ken")
    newer = StateFile(path, dataclasses.replace(OWNER, pid=OWNER.pid + 1), spec_of(tmp_path), "t0ken")
    found: list[int | str] = []
    for _ in at_each_call(lambda: newer.write(NEWER)):
        try:
            kept = handover.read(path)
        except LastWordsError as error:
            found.append(type(error).__name__)
        else:
            memory = {OWNER.pid: MEMORY, OWNER.pid + 1: NEWER.memory}[kept.owner.pid]
            found.append(kept.memory.incident if kept.memory == memory else "mixed")
            assert handover.owner(path) == kept.owner
        older.write(REMEMBERED)
    return found


def test_killed_at_any_system_call_it_leaves_the_older_state_or_the_newer_one(path: Path, tmp_path: Path) -> None:
    written(path, tmp_path)
    found = kills(path, tmp_path)
    assert len(found) > 5
    assert {*found} == {2, 3}
    assert found[-1] == 3


def test_killed_before_there_is_any_it_leaves_none_or_a_whole_one(path: Path, tmp_path: Path) -> None:
    file = StateFile(path, OWNER, spec_of(tmp_path), "t0ken")
    found: list[bool | None] = []
    for _ in at_each_call(lambda: file.write(REMEMBERED)):
        try:
            found.append(handover.read(path).remembered == REMEMBERED)
        except UnavailableError:
            found.append(None)
        path.unlink(missing_ok=True)
    assert found[-1] is True
    assert False not in found
    assert [*path.parent.iterdir()], "nothing is left to remove"
    paths.remove_job_dir("state-file", 2, "5f3a", root=tmp_path)
    assert not path.parent.exists(), "what a killed controller was writing stays"


@contextlib.contextmanager
def in_place(path: Path) -> Iterator[int]:
    yield os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)


def test_a_file_that_is_written_in_place_is_torn(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    written(path, tmp_path)
    monkeypatch.setattr(paths, "replacing", in_place)
    assert "FormatError" in kills(path, tmp_path)
