"""The files of a job, read again and again; browsers that read too slowly."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import pytest

from lastwords.page.columns import JobLook
from lastwords.page.watch import UNREAD_MAX, BrowserStream, JobFiles, JobWatch
from lastwords.state import ControllerState
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
    files = JobFiles(tmp_path)
    assert files.read().incidents.newest_id == len(LINE) + 1
    with log.open("a") as file:
        file.write(json.dumps(RECOVERED))
    assert files.read().incidents.recoveries == 0
    with log.open("a") as file:
        file.write("\n")
    found = files.read().incidents
    assert (found.recoveries, found.counts["death", "SAVED"]) == (1, 1)


def test_a_file_that_was_cut_or_replaced_is_read_anew(log: Path, tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    files.read()
    other = log.with_name("other")
    other.write_text(f"{LINE}\n{LINE}\n")
    other.rename(log)
    assert files.read().incidents.counts["death", "SAVED"] == 2
    log.write_text("")
    assert not files.read().incidents.items


def test_a_directory_may_come_later_and_go(log: Path, tmp_path: Path) -> None:
    files = JobFiles(tmp_path / "later")
    assert files.read().note
    shutil.copytree(log.parent, tmp_path / "later" / "logs")
    found = files.read()
    assert not found.note
    assert found.incidents.items
    shutil.rmtree(tmp_path / "later")
    found = files.read()
    assert found.note
    assert found.incidents.items, "what was known stays on the page"


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in JobFiles(tmp_path / "file").read().note


def test_checkpoints_are_listed_the_newest_first(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    assert files.read().checkpoints == ()
    for step in (5, 9):
        Job().save(tmp_path, step)
    assert [(one["step"], one["complete"]) for one in files.read().checkpoints] == [(9, True), (5, True)]


def test_a_browser_that_does_not_read_is_dropped_and_the_others_are_not() -> None:
    async def course() -> None:
        watch, slow, fast = JobWatch(None, None), BrowserStream(), BrowserStream()
        with watch.opened(slow), watch.opened(fast):
            for step in range(UNREAD_MAX + 5):
                watch.tell(JobLook(state_of(4, step)), whole=False)
                await fast.messages.get()
            assert watch.streams == {fast}
            assert [message async for message in slow] == []

    asyncio.run(course())


class Clock:
    """Seconds that pass only where somebody says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("lastwords.page.watch.clock.mono_s", lambda: self.now_s)


class Told(JobWatch):
    """Of a controller that says these states in turn, and takes so long for each."""

    def __init__(self, clock: Clock, states: Iterable[ControllerState], takes_s: float = 0.01) -> None:
        super().__init__(None, "node:1")
        self._clock, self._states, self._takes_s = clock, iter(states), takes_s

    def _ask(self) -> tuple[str, ControllerState]:
        self.requests += 1
        self._clock.now_s += self._takes_s
        return "node:1", next(self._states)

    def looks(self, count: int, apart_s: float) -> list[JobLook]:
        """At so many instants."""
        found = []
        for _ in range(count):
            found.append(asyncio.run(self.fresh()))
            self._clock.now_s += apart_s
        return found


def test_a_controller_is_asked_once_a_second_and_one_that_answers_slowly_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for takes_s, requests in ((0.01, 4), (0.5, 1)):
        watch = Told(Clock(monkeypatch), repeat(state_of(4)), takes_s)
        watch.looks(8, apart_s=0.5)
        assert watch.requests == requests


def test_that_a_job_has_resumed_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    before, begun = state_of(4, step=80), replace(state_of(4, step=0), generation=2)
    after = [replace(state_of(4, step=step), generation=2) for step in (85, 87, 89)]
    rates = [look.steps_per_s for look in Told(Clock(monkeypatch), (before, begun, *after)).looks(5, apart_s=1.99)]
    assert rates == [None, None, None, None, pytest.approx(1.0)]


def test_who_comes_gets_the_whole_state_first_and_nothing_is_sent_when_nothing_has_changed() -> None:
    async def course() -> list[str]:
        watch, stream = JobWatch(None, None), BrowserStream()
        with watch.opened(stream):
            for step in (1, 1, 2):
                watch.tell(JobLook(state_of(4, step)), whole=False)
            watch.tell(JobLook(state_of(4, 2)), whole=True)
        return [stream.messages.get_nowait()[0] for _ in range(stream.messages.qsize())]  # type: ignore[index]

    assert asyncio.run(course()) == ["state", "diff", "diff", "state"]
