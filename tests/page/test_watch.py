"""The files of a job, read again and again; browsers that read too slowly."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from lastwords.page.columns import Look
from lastwords.page.watch import UNREAD_MAX, Files, Stream, Watch
from tests.checkpoint.states import Job
from tests.page.fake_controller import state_of
from tests.page.test_incidents import RECOVERED, SAVED

LINE = json.dumps(SAVED)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "logs" / "incidents.jsonl"
    path.parent.mkdir()
    path.write_text(f"{LINE}\n")
    return path


def test_only_whole_lines_are_read_and_each_once(log: Path, tmp_path: Path) -> None:
    files = Files(tmp_path)
    assert files.look().incidents.newest_id == len(LINE) + 1
    with log.open("a") as file:
        file.write(json.dumps(RECOVERED))
    assert files.look().incidents.recoveries == 0
    with log.open("a") as file:
        file.write("\n")
    found = files.look().incidents
    assert (found.recoveries, found.counts["death", "SAVED"]) == (1, 1)


def test_a_file_that_was_cut_or_replaced_is_read_anew(log: Path, tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.look()
    other = log.with_name("other")
    other.write_text(f"{LINE}\n{LINE}\n")
    other.rename(log)
    assert files.look().incidents.counts["death", "SAVED"] == 2
    log.write_text("")
    assert not files.look().incidents.items


def test_a_directory_may_come_later_and_go(log: Path, tmp_path: Path) -> None:
    files = Files(tmp_path / "later")
    assert files.look().note
    shutil.copytree(log.parent, tmp_path / "later" / "logs")
    found = files.look()
    assert not found.note
    assert found.incidents.items
    shutil.rmtree(tmp_path / "later")
    found = files.look()
    assert found.note
    assert found.incidents.items, "what was known stays on the page"


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in Files(tmp_path / "file").look().note


def test_checkpoints_are_listed_the_newest_first(tmp_path: Path) -> None:
    files = Files(tmp_path)
    assert files.look().checkpoints == ()
    for step in (5, 9):
        Job().save(tmp_path, step)
    assert [(one["step"], one["complete"]) for one in files.look().checkpoints] == [(9, True), (5, True)]


def test_a_browser_that_does_not_read_is_dropped_and_the_others_are_not() -> None:
    async def course() -> None:
        watch, slow, fast = Watch(None, None), Stream(), Stream()
        with watch.opened(slow), watch.opened(fast):
            for step in range(UNREAD_MAX + 5):
                watch.tell(Look(state_of(4, step)), whole=False)
                await fast.messages.get()
            assert watch.streams == {fast}
            assert [message async for message in slow] == []

    asyncio.run(course())


def test_who_comes_gets_the_whole_state_first_and_nothing_is_sent_when_nothing_has_changed() -> None:
    async def course() -> list[str]:
        watch, stream = Watch(None, None), Stream()
        with watch.opened(stream):
            for step in (1, 1, 2):
                watch.tell(Look(state_of(4, step)), whole=False)
            watch.tell(Look(state_of(4, 2)), whole=True)
        return [stream.messages.get_nowait()[0] for _ in range(stream.messages.qsize())]  # type: ignore[index]

    assert asyncio.run(course()) == ["state", "diff", "diff", "state"]
