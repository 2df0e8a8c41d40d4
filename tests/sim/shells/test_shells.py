"""The shells as they are shipped, in random schedules with a simulated network, clock, scheduler and disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lastwords.checkpoint import load
from lastwords.checkpoint.manifest import Claimed
from lastwords.processor import saver
from lastwords.processor.saver import Position
from tests.sim.shells.plan import draw
from tests.sim.shells.run import command, sweep
from tests.sim.shells.stack import Stack

SCHEDULES = 60
SAVES = 6
GUESSED = (289, 516)
"""Schedules in which a guessed name is a wrong one."""


def _assert_clean(failures: list[tuple[int, str]]) -> None:
    assert not failures, "\n".join(f"{text}\n    replay: {command(seed)}" for seed, text in failures)


@pytest.mark.ci
def test_no_random_schedule_of_the_shells_breaks_an_invariant(capsys: pytest.CaptureFixture[str]) -> None:
    endings, failures = sweep(map(draw, range(1, SCHEDULES + 1)))
    with capsys.disabled():
        print(f"\n  {SCHEDULES} schedules of the shells, endings: {dict(endings)}")
    _assert_clean(failures)
    assert endings["saved"] > SCHEDULES // 5, "too few checkpoints have been published"
    assert endings["released"] > SCHEDULES // 20, "too few jobs have trained to their end"


@pytest.mark.ci
def test_the_same_seed_tells_the_same_story() -> None:
    stories = []
    for _ in range(2):
        stack = Stack(draw(3))
        stack.run()
        stories.append([line for line in stack.lines if "process " not in line])
    assert stories[0] == stories[1]


# ------------------------------------------------------------------ negative controls


def _guessed(locals_: Iterable[Any]) -> Position | None:
    for local in locals_:
        slot = local.meta.slot
        if slot["epoch"] is not None:
            return Position(slot["epoch"], slot["step"])
        if slot["after"]:
            return Position(slot["after"][0], slot["after"][1] + 1)
    return None


@pytest.mark.ci
def test_a_guessed_name_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    """The name of a step that has not ended is taken for that of the last one plus one."""
    for seed in GUESSED:
        with mock.patch.object(saver, "_named_by", _guessed):
            stack = Stack(draw(seed))
            stack.run()
        texts = [text for text in stack.complaints() if text.startswith("a_name_is_never_guessed")]
        if texts:
            with capsys.disabled():
                print(f"\n  {texts[0]} (seed {seed})")
            whole = Stack(draw(seed))
            whole.run()
            assert whole.complaints() == []
            return
    pytest.fail("nobody notices that a name was guessed")


def _by_clock(claims: Mapping[Path, Claimed]) -> list[Path]:
    return sorted(claims, key=lambda path: claims[path].published_unix_ns, reverse=True)


def test_checkpoints_in_the_order_of_clocks_are_caught() -> None:
    """An older generation's checkpoint would be taken, since it was written where the clock was ahead."""
    plan = dataclasses.replace(draw(SAVES), older_is_ahead=True)
    whole = Stack(plan)
    whole.run()
    assert whole.ledger.publications
    assert whole.complaints() == []
    with mock.patch.object(load, "newest_first", _by_clock):
        stack = Stack(plan)
        stack.run()
    (text,) = stack.complaints()
    assert text.startswith("a_resume_takes_the_newest_step")
