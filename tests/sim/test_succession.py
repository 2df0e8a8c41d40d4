"""The controller is killed at every instant of small jobs, and another one follows: the invariants hold."""

from __future__ import annotations

import pytest

from lastwords.controller.core import ControllerCore
from lastwords.controller.events import Effect, Remember
from lastwords.controller.membership import Member, Membership
from lastwords.controller.succession import Succession
from lastwords.vocabulary import Hello
from tests.sim.small_jobs import JOBS
from tests.sim.succession import explore_succession

JOB = JOBS["ddp-two-break"].job


@pytest.mark.parametrize(("name", "states"), [("ddp-two-break", 69_141), ("two-break", 51_099)])
def test_a_controller_may_be_killed_at_any_instant(name: str, states: int) -> None:
    found = explore_succession(JOBS[name].job, kills_max=1)
    assert found.bad == []
    assert found.complete
    assert found.states == states


def test_without_the_fence_the_older_one_publishes_too_late() -> None:
    found = explore_succession(JOB, kills_max=1, fenced=False)
    assert found.bad


def test_what_is_remembered_after_the_act_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    remembering = ControllerCore._remembering

    def afterwards(core: ControllerCore, effects: list[Effect]) -> list[Effect]:
        return sorted(remembering(core, effects), key=lambda effect: isinstance(effect, Remember))

    monkeypatch.setattr(ControllerCore, "_remembering", afterwards)
    assert explore_succession(JOB, kills_max=1).bad


def test_without_the_step_of_the_start_nothing_would_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Membership.admit

    def as_at_a_start(members: Membership, hello: Hello) -> Member:
        members.base_step = max(members.base_step, hello.stand.ended_step)
        return admit(members, hello)

    monkeypatch.setattr(Membership, "admit", as_at_a_start)
    assert explore_succession(JOBS["ddp-two"].job, kills_max=1).bad


def test_without_the_dead_nobody_would_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not come back has to be asked for: the dead say nothing any more."""
    monkeypatch.setattr(Succession, "take_absent", lambda succession: [])
    monkeypatch.setattr("tests.sim.succession.ANNOUNCES_AGAIN", False)
    assert explore_succession(JOB, kills_max=1).bad
