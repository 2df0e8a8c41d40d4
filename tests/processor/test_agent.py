"""The shell around a rank's core: what a freeze finds at each moment of a step's end."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint import part
from lastwords.errors import StorageError
from lastwords.processor.agent import Agent
from lastwords.processor.core import ProcessorCore
from lastwords.processor.departure import Departure
from lastwords.processor.saver import Position, SaverSpec, Writers
from lastwords.vocabulary import (
    Exit,
    ExitKind,
    Freeze,
    Goodbye,
    Left,
    LoopBegin,
    LoopGo,
    Notice,
    Order,
    Phase,
    Release,
    Report,
    Resume,
    Save,
    SaveFailed,
    SaveProgress,
    Settled,
    Stack,
    Stand,
    Status,
    Welcome,
)
from tests import golden
from tests.shortage import no_threads


class Heard:
    """A session that keeps what was said."""

    agent: Agent

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.answers: dict[type[Report], Order] = {LoopBegin: LoopGo(1)}

    def send(self, report: Report) -> None:
        self.reports.append(report)
        answer = self.answers.get(type(report))
        if answer is not None:
            threading.Thread(target=self.agent.on_order, args=[answer]).start()

    def ask_if_silent(self, asks: bool, now_s: float) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        pass

    def heard(self, kind: type[Report]) -> list[Report]:
        return [report for report in self.reports if isinstance(report, kind)]


class Held:
    """A rank without state, whose writer waits for `go_on` before it makes its directory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writing, self.go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(part, "write_part", self._write_part)

    def _write_part(self, *arguments: object, **settings: object) -> None:
        self.writing.set()
        assert self.go_on.wait(30.0)
        raise StorageError("enough")

    def position(self, step: int) -> Position:
        return Position(1, step)

    def unit_state(self, unit: str, step: int, stand: Stand) -> part.UnitState:
        raise AssertionError(unit)

    def local_states(self, ranks: Sequence[int], step: int) -> Mapping[int, part.LocalState]:
        return {rank: part.LocalState([]) for rank in ranks}

    def facts(self, step: int) -> dict[str, Any]:
        return {}


class Staying(Departure):
    """The way out of a rank whose process does not end."""

    def __init__(self) -> None:
        super().__init__(0)
        self.ends = threading.Event()

    def end_now(self) -> None:
        self.ends.set()

    def end_within(self, seconds: float, code: int) -> None:
        self.ends.set()


UNUSED: Any = None


def in_a_loop(
    session: Heard | None = None,
    departure: Departure | None = None,
    saver: SaverSpec | None = None,
) -> Agent:
    session, saver = session or Heard(), saver or SaverSpec(0, "job", (), UNUSED)
    session.agent = agent = Agent(ProcessorCore(0, 1, 0), UNUSED, saver, departure or Departure(0))
    agent.start(session)
    agent.on_session_up()
    agent.on_order(Welcome(1))
    agent.begin_loop(10, 1, 0)
    return agent


@pytest.mark.parametrize("updates", [True, False])
def test_a_freeze_while_a_step_s_copies_are_replaced_finds_the_step_that_they_are_of(updates: bool) -> None:
    """A writer that is asked for the step before would find its copies gone."""
    agent = in_a_loop()
    agent.end_step(lambda step: None)

    def commit(step: int) -> None:
        assert step == 2
        agent.on_order(Freeze(1, 1, "rank 1 died"))
        assert agent.stand == Stand(Phase.UPDATED if updates else Phase.SKIPPED, 2)
        agent.on_order(Resume(1, 1))

    if updates:
        agent.begin_update()
        agent.end_update()
    agent.end_step(commit)
    assert agent.stand == Stand(Phase.COMPUTING, 2)
    agent.close()


def test_a_copy_after_the_loop_is_told_before_it_begins() -> None:
    """It may take long, and nothing can be told meanwhile. This one fails: there is no state."""
    session = Heard()
    agent = in_a_loop(session)
    session.answers |= {Left: Save(1, 0, 1, 0, (), (0,), 0, "due"), SaveFailed: Release(1)}
    agent.left()
    said = [report for report in session.reports if isinstance(report, SaveProgress | SaveFailed)]
    assert said[:2] == [SaveProgress(0, 1, 0, 1, 0), SaveProgress(0, 1, 0, 1, 0, syncing=True)]
    assert isinstance(said[-1], SaveFailed)
    agent.close()


def test_a_part_for_which_no_thread_can_be_started_has_failed_for_now() -> None:
    session = Heard()
    agent = in_a_loop(session)
    agent.end_step(lambda step: None)
    agent.on_order(Freeze(1, 1, "rank 1 died"))
    with no_threads():
        agent.on_order(Save(1, 1, 1, 1, ("u",), (0,), 0, "chosen"))
    (failed,) = (report for report in session.reports if isinstance(report, SaveFailed))
    assert (failed.attempt, failed.storage) == (1, True), "the controller asks again, and bars nobody"
    golden.says(failed.reason)
    agent.on_order(Save(1, 1, 2, 1, ("u",), (0,), 0, "chosen again"))
    assert agent.wait_until(lambda: any(getattr(one, "attempt", 0) == 2 for one in session.reports), 30.0)
    agent.close()


@pytest.mark.parametrize("closes", [True, False])
def test_nobody_says_goodbye_while_its_writer_may_still_make_a_directory(
    closes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last goodbye ends the controller, which removes what has not become a checkpoint."""
    session, held = Heard(), Held(monkeypatch)
    agent = in_a_loop(session, saver=SaverSpec(0, "job", (tmp_path,), held))
    session.answers |= {Left: Save(1, 0, 1, 0, (), (0,), 0, "due")}
    left = threading.Thread(target=agent.left)
    left.start()
    assert held.writing.wait(30.0)
    agent.on_order(Release(1))
    left.join(30.0)
    assert not left.is_alive()
    assert not session.heard(Goodbye)
    held.go_on.set()
    if closes:
        agent.close(30.0)
    assert agent.wait_until(lambda: bool(session.heard(Goodbye)), 30.0)
    agent.close()


def test_nor_where_an_incident_is_over_before_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the controller before has published the step that the one that follows it has ordered again."""
    session, held = Heard(), Held(monkeypatch)
    said: list[bool] = []  # when its writer is waited for
    wait = Writers.wait

    def wait_for_it(writers: Writers, timeout_s: float) -> None:
        said.append(bool(session.heard(Goodbye)))
        held.go_on.set()
        wait(writers, 30.0)

    def park() -> None:
        with pytest.raises(SystemExit):
            agent.end_step(lambda step: None)

    monkeypatch.setattr(Writers, "wait", wait_for_it)
    agent = in_a_loop(session, Staying(), SaverSpec(0, "job", (tmp_path,), held))
    session.answers |= {Settled: Save(1, 1, 1, 1, (), (0,), 0, "chosen")}
    agent.on_order(Freeze(1, 1, "rank 1 died"))
    parked = threading.Thread(target=park)
    parked.start()
    assert held.writing.wait(30.0)
    agent.on_order(Exit(1, 1, ExitKind.SAVED, 1, "/there", "rank 1 died", (1,)))
    parked.join(30.0)
    held.go_on.set()
    assert not parked.is_alive()
    assert said == [False]
    assert session.heard(Goodbye)


def test_a_stack_is_told_although_no_thread_can_be_started_that_logs_it() -> None:
    session = Heard()
    agent = in_a_loop(session)
    with no_threads():
        agent.on_order(Notice(1, "rank 0 is behind", stack=True))
    assert any(isinstance(report, Stack) for report in session.reports)
    agent.close()


class Stumbling(Heard):
    """One that raises what nobody expects, so often."""

    def __init__(self, looks: int = 0, closes: int = 0) -> None:
        super().__init__()
        self.looks, self.closes = looks, closes

    def ask_if_silent(self, asks: bool, now_s: float) -> None:
        self.looks -= 1
        if self.looks >= 0:
            raise ValueError("unexpected")

    def close(self, timeout_s: float) -> None:
        self.closes -= 1
        if self.closes >= 0:
            raise ValueError("unexpected")


def test_a_pulse_that_fails_goes_on_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """Without it no time passes for the core, and a rank that has lost its controller would wait for ever."""
    session = Stumbling(looks=3)
    agent = in_a_loop(session)
    assert agent.wait_until(lambda: session.looks < 0, 30.0)
    agent.end_step(lambda step: None)
    assert agent.wait_until(
        lambda: any(isinstance(said, Status) and said.stand.step == 1 for said in session.reports), 30.0
    )
    assert len([record for record in caplog.records if record.exc_info]) == 1
    agent.close()


def test_a_rank_that_is_told_to_leave_does_so_although_its_session_cannot_be_closed() -> None:
    departure = Staying()
    agent = in_a_loop(Stumbling(closes=1), departure)
    agent.on_order(Freeze(1, 1, "rank 1 died"))
    agent.on_order(Exit(1, 1, ExitKind.SAVED, 7, "/c", "rank 1 died", (1,)))
    assert departure.ends.wait(30.0)
    agent.close()
