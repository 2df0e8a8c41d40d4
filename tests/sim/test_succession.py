"""The controller is killed at every instant of small jobs, and another one follows: the invariants hold.

Two controllers at once (no fence) make many more states, so they are explored with two ranks only; the random schedules
of `test_followed_schedules` have them with more.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lastwords.controller.core import ControllerCore, Succession
from lastwords.controller.events import Effect, Remember
from lastwords.controller.membership import Member, Membership
from lastwords.vocabulary import Hello
from tests.selection import more
from tests.sim.small_jobs import JOBS, PERIODIC
from tests.sim.succession import SHIPPED, How, explore_succession

SMALL = JOBS | PERIODIC
JOB = JOBS["ddp-two-break"].job


@dataclass(frozen=True, slots=True)
class Case:
    """So many deaths of ranks and of controllers in a small job, and the number of its states."""

    name: str
    deaths: int
    restarts: int
    states: int
    how: How = SHIPPED

    def __str__(self) -> str:
        others = [name for name in ("late_orders", "lost") if getattr(self.how, name)]
        return "-".join((self.name, f"{self.deaths}-deaths", f"{self.restarts}-restarts", *others))


CASES = [
    Case("ddp-two-break", 1, 1, 12_060),
    Case("two-break", 1, 1, 8_857),
    Case("mixed", 0, 1, 17_697),
    Case("mixed-skip", 0, 1, 32_255),
    Case("ddp-shares", 0, 1, 30_167),
    Case("periodic-gate", 0, 1, 29_934),
    more(Case("ddp-two-break", 1, 1, 13_893, How(late_orders=True))),
    more(Case("ddp-two-break", 1, 1, 12_753, How(lost=True))),
    more(Case("mixed", 0, 2, 116_130)),
    more(Case("mixed-hang", 0, 1, 14_403)),
    more(Case("periodic-break", 0, 1, 39_796)),
    more(Case("periodic-gate", 1, 1, 132_156)),
]
LONG = [
    Case("ddp-two", 1, 1, 37_179),
    Case("ddp-two-break", 1, 2, 81_309),
    Case("ddp-shares", 0, 2, 236_690),
    Case("periodic-mixed", 0, 1, 2_799_505),
]


def assert_explored(case: Case) -> None:
    found = explore_succession(SMALL[case.name].job, case.deaths, case.restarts, case.how)
    assert found.bad == []
    assert found.complete
    assert found.states == case.states


@pytest.mark.ci
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_controller_may_be_killed_at_any_instant(case: Case) -> None:
    assert_explored(case)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_a_controller_of_a_larger_small_job_may_be_killed_at_any_instant(case: Case) -> None:
    assert_explored(case)


@pytest.mark.ci
def test_the_reductions_lose_no_end() -> None:
    """How everything ends, with and without the short cuts."""
    job = JOBS["two-break"].job
    assert explore_succession(job, 0).ends == explore_succession(job, 0, whole=True).ends


# ------------------------------------------------------------------ negative controls


@pytest.mark.ci
def test_without_the_fence_the_older_one_acts_too_late() -> None:
    assert explore_succession(JOBS["two-break"].job, 0, how=How(fenced=False)).bad


@pytest.mark.ci
@pytest.mark.parametrize("name", ["two-break", "mixed", "mixed-skip", "ddp-shares", "periodic-gate"])
def test_what_is_remembered_after_the_act_comes_too_late(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remembering = ControllerCore._remembering

    def afterwards(core: ControllerCore, effects: list[Effect]) -> list[Effect]:
        return sorted(remembering(core, effects), key=lambda effect: isinstance(effect, Remember))

    monkeypatch.setattr(ControllerCore, "_remembering", afterwards)
    assert explore_succession(SMALL[name].job, 0).bad


@pytest.mark.ci
@pytest.mark.parametrize("name", ["two-break", "mixed", "mixed-skip", "ddp-shares", "periodic-gate"])
def test_a_file_that_is_older_than_the_last_act_leads_astray(name: str) -> None:
    """What the shipped one keeps may be lost where nothing has been done that rests on it, and no more than that."""
    assert explore_succession(SMALL[name].job, 0, how=How(stale=True)).bad


@pytest.mark.ci
def test_without_the_step_of_the_start_nothing_would_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Membership.admit

    def as_at_a_start(members: Membership, hello: Hello) -> Member:
        members.base_step = max(members.base_step, hello.stand.ended_step)
        return admit(members, hello)

    monkeypatch.setattr(Membership, "admit", as_at_a_start)
    assert explore_succession(JOBS["ddp-two"].job, 1).bad


@pytest.mark.ci
def test_without_the_dead_nobody_would_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not come back has to be asked for: the dead say nothing any more."""
    monkeypatch.setattr(Succession, "take_absent", lambda succession: [])
    monkeypatch.setattr("tests.sim.succession.ANNOUNCES_AGAIN", False)
    assert explore_succession(JOB, 1).bad
