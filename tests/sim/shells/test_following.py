"""The controller is stopped in random schedules of the shells, for a while or for good: nobody loses anything by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from lastwords.processor.silence import Silence
from tests.sim.shells.following import behind_a_silent_controller
from tests.sim.shells.stack import Stack

SCHEDULES = 40
FOUND = {1542: "an attempt was discarded while the storage was released, which then gave up half-way"}


def sweep(seeds: Iterable[int]) -> tuple[Counter[str], int, list[str]]:
    """How the jobs ended, how often a controller was followed, and what is wrong."""
    endings: Counter[str] = Counter()
    followed = 0
    failures = []
    for seed in seeds:
        stack = Stack(behind_a_silent_controller(seed))
        stack.run()
        outcome = stack.core.outcome
        endings[outcome.kind.value if outcome is not None else "none"] += 1
        assert stack.following is not None
        followed += stack.following.begun > 1
        failures += [f"seed {seed}: {text}" for text in stack.complaints()[:1]]
    return endings, followed, failures


def test_behind_a_silent_controller_nothing_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    endings, followed, failures = sweep([*range(1, SCHEDULES + 1), *FOUND])
    with capsys.disabled():
        print(
            f"\n  {endings.total()} schedules with a silent controller, {followed} followed, endings: {dict(endings)}"
        )
    assert failures == []
    assert followed > SCHEDULES // 4
    assert endings["saved"] > SCHEDULES // 5


def test_without_a_watch_for_silence_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(Silence, "is_over", lambda *_, **__: False)
    _, followed, failures = sweep(range(1, 9))
    assert not followed
    assert any("i3_what_can_be_saved_is_saved" in text for text in failures)
