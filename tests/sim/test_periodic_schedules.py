"""Random schedules with periodic checkpoints, with and without faults; and broken rules, which they have to show."""

from __future__ import annotations

import pytest

from lastwords.controller.periodic import Periodic
from tests.sim.periodic_checkers import what_is_due_is_published
from tests.sim.periodic_mutants import MUTANTS
from tests.sim.periodic_schedule import draw_periodic
from tests.sim.periodic_world import PeriodicWorld, Record
from tests.sim.run import PERIODIC, Seen, Setting, assert_clean, command, replay, run_some

pytestmark = pytest.mark.ci

SCHEDULES = 900
QUIET = 300
UNDISTURBED = Setting("periodic", quiet=True)

STAGES = {
    "periodic: ordered": 200,
    "periodic: copying": 15,
    "periodic: writing": 80,
    "periodic: verifying it": 10,
    "periodic: publishing it": 10,
}
"""How many deaths at least hit each stage of a periodic checkpoint."""


@pytest.fixture(scope="module")
def troubled() -> Seen:
    return run_some(range(1, SCHEDULES + 1), PERIODIC)


def test_no_random_schedule_with_periodic_checkpoints_breaks_an_invariant(
    troubled: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"\n  {troubled.counts['published']} checkpoints; {dict(troubled.endings)}; {dict(troubled.deaths)}")
    assert_clean(troubled, PERIODIC)


def test_deaths_hit_every_stage_of_a_periodic_checkpoint(troubled: Seen) -> None:
    assert [stage for stage, least in STAGES.items() if troubled.deaths[stage] < least] == []
    assert troubled.counts["both"] > SCHEDULES // 50, "too few schedules with a periodic checkpoint and last words"


def test_whatever_is_due_is_published_where_nothing_goes_wrong() -> None:
    seen = run_some(range(1, QUIET + 1), UNDISTURBED)
    assert_clean(seen, UNDISTURBED)
    assert seen.endings["released"] == seen.schedules
    assert seen.counts["published"] > QUIET


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("setting", [PERIODIC, UNDISTURBED], ids=["troubled", "quiet"])
def test_no_schedule_of_a_long_campaign_with_periodic_checkpoints_breaks_an_invariant(setting: Setting) -> None:
    assert_clean(run_some(range(1_000_000, 1_060_000), setting), setting)


# ------------------------------------------------------------------ negative controls


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_broken_rule_of_periodic_checkpoints_is_caught(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    mutant = MUTANTS[name]
    setting = UNDISTURBED if what_is_due_is_published.__name__ in mutant.caught_by else PERIODIC
    with mutant.applied():
        caught = [text for seed in mutant.seeds for text in replay(seed, setting)[0]]
    assert {text.split(":")[0] for text in caught} & set(mutant.caught_by), (
        f"none of the known schedules notices that {mutant.rule}; if the cores or the schedules have changed, take "
        f"others: {command(1, setting, name)} --count 2000"
    )
    with capsys.disabled():
        print(f"\n  {mutant.rule}: {caught[0][:110]}")
    for seed in mutant.seeds:
        assert replay(seed, setting)[0] == [], "the schedule is caught, not the broken rule"


def test_a_step_that_is_left_out_for_nothing_is_a_complaint() -> None:
    seed = next(seed for seed in range(1, 100) if draw_periodic(seed, quiet=True)[0].job.schedule.steps == 1)
    plan, behind = draw_periodic(seed, quiet=True)
    _, world = replay(seed, UNDISTURBED)
    assert isinstance(world, PeriodicWorld)
    assert world.record.published
    empty = Record(passed_s=dict(world.record.passed_s))
    assert what_is_due_is_published(plan, behind, world.ledger, empty)


def test_a_controller_that_orders_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Periodic, "order_next", lambda self: None)
    seen = run_some(range(1, 20), UNDISTURBED)
    assert len(seen.failures) > 10
