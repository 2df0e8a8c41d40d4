"""Random schedules whose controllers are killed and followed, with and without other faults; and broken rules."""

from __future__ import annotations

import pytest

from lastwords.controller.core import ControllerCore, Succession
from lastwords.controller.events import Effect, Remember
from lastwords.controller.membership import Member, Membership
from lastwords.vocabulary import Hello
from tests.sim.run import FOLLOWED, Setting, assert_clean, replay, run_some

SCHEDULES = 250
QUIET = 60
CAMPAIGN = 20_000
ALONE = Setting("followed", quiet=True)

UNFENCED = {
    271: "i2_only_whole_verified_directories_are_published",
    327: "i6_nothing_older_changes_anything_newer",
    331: "rank_local_state_is_saved_or_said_to_be_lost",
}
"""Schedules in which two controllers that act at once break an invariant."""

STAGES = {
    "controller: training": 300,
    "controller: settling": 300,
    "controller: saving": 100,
    "controller: verifying": 50,
    "controller: publishing": 50,
    "controller: ending": 50,
    "controller: ordered": 300,
    "controller: copying": 10,
    "controller: writing": 30,
    "controller: verifying it": 5,
    "controller: publishing it": 5,
}
"""How many kills at least hit each stage of an incident, and of a periodic checkpoint, in 4,000 schedules."""


@pytest.mark.ci
def test_no_random_schedule_with_controllers_that_follow_breaks_an_invariant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = run_some([*range(1, SCHEDULES + 1), *UNFENCED], FOLLOWED)
    with capsys.disabled():
        print(f"\n  {seen.schedules} schedules, {seen.counts['follows']} followers, endings: {dict(seen.endings)}")
    assert_clean(seen, FOLLOWED)
    assert seen.counts["follows"] > SCHEDULES // 2
    assert seen.counts["twice"] > SCHEDULES // 20, "too few controllers have followed one that had followed another"
    assert seen.counts["late"] > SCHEDULES // 50, "too few have begun with an older file"
    assert seen.counts["without"] > SCHEDULES // 20, "too few jobs were left without one"


@pytest.mark.ci
def test_where_nothing_else_goes_wrong_periodic_checkpoints_go_on() -> None:
    seen = run_some(range(1, QUIET + 1), ALONE)
    assert_clean(seen, ALONE)
    assert seen.endings["released"] == seen.schedules
    assert seen.counts["follows"] > QUIET


@pytest.mark.thorough
def test_controllers_are_killed_in_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    seen = run_some(range(SCHEDULES + 1, SCHEDULES + 4_001), FOLLOWED)
    assert_clean(seen, FOLLOWED)
    with capsys.disabled():
        print(f"\n  {dict(seen.deaths)}")
    assert [stage for stage, least in STAGES.items() if seen.deaths[stage] < least] == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("setting", [FOLLOWED, ALONE], ids=["troubled", "quiet"])
def test_no_schedule_of_a_long_campaign_with_controllers_that_follow_breaks_an_invariant(setting: Setting) -> None:
    assert_clean(run_some(range(1_000_000, 1_000_000 + CAMPAIGN), setting), setting)


# ------------------------------------------------------------------ negative controls


@pytest.mark.parametrize("seed", UNFENCED)
def test_two_controllers_that_act_at_once_are_caught(seed: int) -> None:
    bad, _ = replay(seed, Setting("followed", fenced=False))
    assert bad[0].startswith(UNFENCED[seed])


@pytest.mark.ci
def test_what_is_remembered_after_the_act_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    remembering = ControllerCore._remembering

    def afterwards(core: ControllerCore, effects: list[Effect]) -> list[Effect]:
        return sorted(remembering(core, effects), key=lambda effect: isinstance(effect, Remember))

    monkeypatch.setattr(ControllerCore, "_remembering", afterwards)
    assert run_some([3, 407], FOLLOWED).failures


def test_without_the_step_of_the_start_it_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Membership.admit

    def as_at_a_start(members: Membership, hello: Hello) -> Member:
        members.base_step = max(members.base_step, hello.stand.ended_step)
        return admit(members, hello)

    monkeypatch.setattr(Membership, "admit", as_at_a_start)
    assert run_some([10, 19], FOLLOWED).failures


def test_a_rank_that_never_comes_back_is_waited_for_without_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Succession, "take_absent", lambda succession: [])
    bad, _ = replay(34, FOLLOWED)
    assert bad[0].startswith("i7_nobody_waits_for_ever")
