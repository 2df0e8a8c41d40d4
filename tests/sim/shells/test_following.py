"""The controller is stopped or killed in random schedules of the shells: nobody loses anything by it.

Stopped, for a while or for good, with the shipped watch of the ranks: `behind_a_silent_controller`. Killed or stopped,
with the shipped `takeover`, which one or two processes at once begin: `draw_followed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from lastwords.controller import takeover
from lastwords.processor.ring import Silence
from lastwords.processor.session import Session
from tests.sim.shells.following import behind_a_silent_controller
from tests.sim.shells.plan import draw_followed
from tests.sim.shells.run import command, sweep

SCHEDULES = 40
NOBODY_FOLLOWS = (140, 181, 234)
"""Schedules in which the controller hangs, and nobody is left on its host who could start another one."""


def behind(seeds: Iterable[int], kind: str = "stop_controller") -> tuple[Counter[str], list[tuple[int, str]]]:
    """As `sweep`, of jobs whose controller is silent."""
    return sweep(behind_a_silent_controller(seed, kind) for seed in seeds)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["stop_controller", "hang_controller"])
def test_behind_a_silent_controller_nothing_is_lost(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    endings, failures = behind([*range(1, SCHEDULES + 1), *NOBODY_FOLLOWS], kind)
    with capsys.disabled():
        print(f"\n  {kind}: {dict(endings)}")
    assert failures == []
    assert endings["followed"] > SCHEDULES // 4
    assert endings["saved"] > SCHEDULES // 5


@pytest.mark.ci
def test_without_a_watch_for_silence_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(Silence, "is_over", lambda *_, **__: False)
    endings, failures = behind(range(1, 9))
    assert not endings["followed"]
    assert any("i3_what_can_be_saved_is_saved" in text for _, text in failures)


@pytest.mark.ci
def test_who_never_asks_a_controller_that_hangs_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: where nobody can follow it, its sessions stay up, and no deadline of a rank begins."""
    monkeypatch.setattr(Session, "ask_if_silent", lambda *_: None)
    _, failures = behind(NOBODY_FOLLOWS, "hang_controller")
    assert [text.partition("_")[0] for _, text in failures] == ["i7"] * len(NOBODY_FOLLOWS)


FOLLOWED = 20


def _assert_followed(seeds: range) -> None:
    endings, failures = sweep(map(draw_followed, seeds))
    assert failures == [], "\n".join(f"{text}\n    replay: {command(seed, followed=True)}" for seed, text in failures)
    assert endings["followed"] > len(seeds) // 3
    assert endings["saved"] > len(seeds) // 10


@pytest.mark.ci
def test_one_controller_serves_at_a_time_and_loses_nothing_of_the_one_before() -> None:
    _assert_followed(range(1, FOLLOWED + 1))


@pytest.mark.thorough
def test_one_controller_serves_at_a_time_in_many_schedules() -> None:
    _assert_followed(range(FOLLOWED + 1, 400))


@pytest.mark.ci
def test_without_the_lock_two_of_them_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(takeover, "_take_lock", lambda directory, wait_s: True)
    _, failures = sweep(map(draw_followed, range(1, 11)))
    assert any(text.startswith("one_controller_at_a_time") for _, text in failures)
