"""The shell around a rank's core: what a freeze finds at each moment of a step's end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lastwords.processor.agent import Agent
from lastwords.processor.core import ProcessorCore
from lastwords.processor.departure import Departure
from lastwords.vocabulary import Freeze, LoopBegin, LoopGo, Phase, Report, Resume, Stand, Welcome


class Heard:
    """A session that keeps what was said."""

    agent: Agent

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def send(self, report: Report) -> None:
        self.reports.append(report)
        if isinstance(report, LoopBegin):
            threading.Thread(target=self.agent.on_order, args=[LoopGo(1)]).start()

    def close(self, timeout_s: float) -> None:
        pass


def in_a_loop() -> Agent:
    unused: Any = None
    agent, session = Agent(ProcessorCore(0, 1, 0), unused, unused, Departure(0)), Heard()
    session.agent = agent
    agent.start(session)
    agent.on_session_up()
    agent.on_order(Welcome(1, 0, 1))
    agent.begin_loop(10, 1, 0)
    return agent


@pytest.mark.parametrize("updates", [True, False])
def test_a_freeze_while_a_step_s_copies_are_replaced_finds_the_step_that_they_are_of(updates: bool) -> None:
    """A writer that is asked for the step before would find its copies gone."""
    agent = in_a_loop()
    agent.end_step(lambda step: None)

    def commit(step: int) -> None:
        assert step == 2
        agent.on_order(Freeze(1, 1, 30.0, "rank 1 died"))
        assert agent.stand == Stand(Phase.UPDATED if updates else Phase.SKIPPED, 2)
        agent.on_order(Resume(1, 1))

    if updates:
        agent.begin_update()
        agent.end_update()
    agent.end_step(commit)
    assert agent.stand == Stand(Phase.COMPUTING, 2)
    agent.close()
