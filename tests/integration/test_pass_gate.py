"""The training thread at the gate, with the real agent: parked by an incident, sent on, or told to proceed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lastwords.errors import GateFailedError
from lastwords.processor.agent import Agent
from lastwords.processor.core import ProcessorCore
from lastwords.processor.departure import Departure
from lastwords.vocabulary import (
    Exit,
    ExitKind,
    Freeze,
    Phase,
    Proceed,
    Raised,
    Report,
    Resume,
    Settled,
    Stand,
)
from tests.patience import LONG_S, until


class FakeGate:
    """A gate whose doors the test moves."""

    def __init__(self) -> None:
        self.open = False
        self.broken = False
        self.looks = 0

    def passed(self) -> bool:
        self.looks += 1
        if self.broken:
            raise GateFailedError("the gate of step 1 has failed: connection closed by peer")
        return self.open


class Listener:
    """Keeps what the agent reports."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def ask_if_silent(self, asks: bool, now_s: float) -> None:
        pass

    def send(self, report: Report) -> None:
        self.reports.append(report)

    def close(self, timeout_s: float) -> None:
        pass

    def stands(self) -> list[Stand]:
        return [report.stand for report in self.reports if isinstance(report, Settled)]


class Rank:
    """An agent, and a thread that trains one step."""

    def __init__(self, *, skip: bool = False) -> None:
        self.gate = FakeGate()
        self.listener = Listener()
        self.departure = Departure(0)
        unused: Any = None
        self.agent = Agent(ProcessorCore(0, 1, 0), hello=unused, saver=unused, departure=self.departure)
        self.agent.start(self.listener)
        self.agent.on_session_up()
        self.left_with: BaseException | None = None
        self._skip = skip
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def _train(self) -> None:
        try:
            if self._skip:
                self.agent.skip_update()
                self.agent.pass_gate(self.gate.passed)
            else:
                self.agent.ready()
                self.agent.pass_gate(self.gate.passed)
                self.agent.begin_update()
                self.agent.end_update()
            self.agent.end_step(lambda step: None)
        except BaseException as error:
            self.left_with = error

    def wait(self, what: Callable[[], bool]) -> None:
        until(what, lambda: f"{self.agent.stand}, {self.listener.reports}")

    def looked(self) -> None:
        """Returns once the training thread has looked at the gate again."""
        before = self.gate.looks
        self.wait(lambda: self.gate.looks > before)

    def freeze(self) -> None:
        self.agent.on_order(Freeze(1, 1, "rank 1 died"))


@pytest.fixture
def rank() -> Any:
    rank = Rank()
    yield rank
    rank.agent.close()


def test_a_rank_at_the_gate_settles_in_ready_and_leaves_the_gate_alone(rank: Rank) -> None:
    rank.looked()
    rank.freeze()
    rank.wait(lambda: rank.listener.stands() == [Stand(Phase.READY, 1)])
    time.sleep(0.05)
    looks = rank.gate.looks
    rank.gate.open = True
    time.sleep(0.05)
    assert rank.gate.looks == looks
    assert rank.agent.stand == Stand(Phase.READY, 1)


def test_after_a_false_alarm_the_same_gate_is_waited_for_again(rank: Rank) -> None:
    rank.looked()
    rank.freeze()
    rank.wait(lambda: bool(rank.listener.stands()))
    rank.agent.on_order(Resume(1, 1))
    rank.looked()
    assert rank.agent.stand == Stand(Phase.READY, 1), "the gate is not passed yet"
    rank.gate.open = True
    rank.wait(lambda: rank.agent.stand == Stand(Phase.COMPUTING, 1))


def test_a_rank_that_is_told_to_proceed_updates_without_the_gate(rank: Rank) -> None:
    rank.looked()
    rank.freeze()
    rank.wait(lambda: bool(rank.listener.stands()))
    rank.agent.on_order(Proceed(1, 1, 1))
    rank.wait(lambda: rank.listener.stands()[-1] == Stand(Phase.COMPUTING, 1))


def test_a_gate_that_fails_is_reported_and_does_not_take_the_step_out_of_reach(rank: Rank) -> None:
    rank.looked()
    rank.gate.broken = True
    rank.wait(lambda: any(isinstance(report, Raised) for report in rank.listener.reports))
    raised = next(report for report in rank.listener.reports if isinstance(report, Raised))
    assert (raised.secondary, raised.stand) == (True, Stand(Phase.READY, 1))
    rank.freeze()
    rank.agent.on_order(Proceed(1, 1, 1))
    rank.wait(lambda: rank.listener.stands()[-1:] == [Stand(Phase.UPDATED, 1)])


def test_an_exit_takes_the_training_thread_from_the_gate(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank.departure, "end_within", lambda seconds, code: None)
    rank.looked()
    rank.freeze()
    rank.agent.on_order(Exit(1, 1, ExitKind.SAVED, 1, "/c", "rank 1 died", (1,)))
    rank.thread.join(LONG_S)
    assert isinstance(rank.left_with, SystemExit)
    assert rank.left_with.code == 75


def test_a_step_without_an_update_waits_at_the_gate_too() -> None:
    rank = Rank(skip=True)
    try:
        rank.looked()
        assert rank.agent.stand == Stand(Phase.SKIPPED, 1)
        rank.gate.open = True
        rank.wait(lambda: rank.agent.stand == Stand(Phase.COMPUTING, 1))
    finally:
        rank.agent.close()
