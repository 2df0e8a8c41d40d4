"""Random schedules of the shipped cores, checked against the invariants; a tenth of a whole campaign in each run."""

from __future__ import annotations

import pytest

from tests.sim import coverage
from tests.sim.run import Seen, Setting, assert_clean, run_all, run_some
from tests.sim.schedule import COPIES_FROM
from tests.sim.world import At

pytestmark = pytest.mark.ci

SCHEDULES = 1_500
CAMPAIGN = 23_000
WITH_DEATH_MIN = 20_000
WITHOUT_DEATH = 400

RARE = (1831, 1884, 13147, 21792, 29392)
"""Schedules with transitions that few have: a death while others still proceed, an exception after a skipped update."""

PLACES = {
    f"at {place.name}": least
    for place, least in {
        At.FORWARD: 1000,
        At.REDUCE: 1000,  # inside the all-reduce, so that survivors split
        At.BACK: 200,
        At.READY: 200,
        At.GATE: 200,
        At.UPDATE: 1000,
        At.LOG: 500,
        At.END: 200,
        At.COMMITTED: 200,
        At.PARK_UPDATE: 50,
        At.PARK_END: 20,
        At.PARK_ENDED: 200,
        At.STUCK: 200,
        At.HELD: 200,
        At.LEFT: 200,
    }.items()
}
STAGES = {
    "during settling": 1000,
    "during proceeding": 20,
    "during saving": 1000,
    "during verifying": 200,
    "during publishing": 200,
    "during ending": 100,
}
"""How many deaths at least hit each phase of a step and each stage of an incident, in a whole campaign."""


@pytest.fixture(scope="module")
def deadly() -> Seen:
    seen = run_all(1, SCHEDULES)
    seen.add(run_some(RARE, watched=True))
    return seen


def _say(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        print(text)


def _too_rare(seen: Seen, wanted: dict[str, int]) -> list[str]:
    return [name for name, least in wanted.items() if seen.deaths[name] < least * seen.schedules // CAMPAIGN]


def test_no_random_schedule_breaks_an_invariant(deadly: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    _say(capsys, f"\n{deadly.schedules} schedules, {deadly.counts['with_death']} with deaths in a step or an incident")
    _say(capsys, f"  endings: {dict(deadly.endings)}")
    assert_clean(deadly)


def test_enough_schedules_have_a_death_that_overlaps_a_step_or_an_incident(deadly: Seen) -> None:
    assert deadly.counts["with_death"] >= WITH_DEATH_MIN * SCHEDULES // CAMPAIGN


def test_deaths_hit_every_phase_of_a_step(deadly: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    _say(capsys, f"\n  deaths {dict(deadly.deaths)}")
    assert _too_rare(deadly, PLACES) == []


def test_deaths_hit_every_stage_of_an_incident(deadly: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    _say(capsys, f"\n  deaths {dict(deadly.deaths)}")
    assert _too_rare(deadly, STAGES) == []


def test_every_transition_of_the_processors_table_is_covered(deadly: Seen) -> None:
    assert coverage.WANTED_PHASES - deadly.phases == set()
    assert deadly.phases - coverage.WANTED_PHASES == set(), "a transition that the table does not have"


def test_every_transition_of_the_controllers_states_is_covered(deadly: Seen) -> None:
    assert coverage.WANTED_STATES - deadly.states == set()
    assert deadly.states - coverage.WANTED_STATES == set(), "a transition that the picture does not have"


def test_no_schedule_without_a_death_breaks_an_invariant() -> None:
    """False alarms, signals, exceptions, early leaves. Only a rank that is told to proceed may still be killed."""
    setting = Setting(with_death=False)
    seen = run_all(1, WITHOUT_DEATH, setting)
    assert_clean(seen, setting)
    assert seen.counts["with_death"] == seen.deaths["during proceeding"] <= WITHOUT_DEATH // 100
    assert seen.endings["released"] > WITHOUT_DEATH // 10, "too few jobs have trained to their end"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_schedule_of_a_long_campaign_breaks_an_invariant() -> None:
    seen = run_all(1_000_000, 300_000)
    assert_clean(seen)
    assert _too_rare(seen, {**PLACES, **STAGES}) == []
    assert coverage.WANTED_STATES - seen.states == set()


def test_no_schedule_of_a_job_with_whole_copies_breaks_an_invariant(capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank alone holds a part, so whatever is saved after a death is from a copy."""
    seen = run_all(COPIES_FROM, 600)
    _say(capsys, f"\n{seen.schedules} schedules with whole copies: {dict(seen.endings)}")
    assert_clean(seen)
    assert seen.endings["saved"]
