"""A tentative copy is trusted in steps in which what moves after it (a validation) is known not to come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lastwords
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.launch.world import World, next_prefix
from lastwords.processor.recurrence import Forecast, Late
from lastwords.processor.saver import Position

PER_EPOCH = 4
STEPS = range(1, 16)


def told(folder: Path, validates: Callable[[int], bool], *, known: bool = True) -> list[int]:
    """Steps of which a copy of before the update is not called exact. known: `steps()` says how long epochs are."""
    model = torch.nn.Linear(2, 2)
    wrapped = lastwords.OptTFTWrapper(torch.optim.SGD(model.parameters(), 0.1))
    recorder = StepRecorder(model, [wrapped], None, None)
    recorder.agree_units(World(), next_prefix(), ())
    writer = recorder.make_source(lambda rank: folder / "box", lambda step: {})
    recorder.open(folder / "box")
    recorder.begin(0, None, steps_per_epoch=PER_EPOCH if known else None)
    found = []
    for step in STEPS:
        position = Position((step - 1) // PER_EPOCH + 1, (step - 1) % PER_EPOCH + 1)
        if known:
            recorder.epoch_start(position.epoch)
            recorder.under_way(position)
        recorder.tentative()
        if not writer.local_states([0], step)[0].exact:
            found.append(step)
        if validates(step):
            torch.rand(1)
        recorder.end_step(step, position)
        assert writer.local_states([0], step)[0].exact, "the committed copy is"
    return found


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def at_ends(step: int) -> bool:
    return step % PER_EPOCH == 0


def every_third(step: int) -> bool:
    return step % 3 == 0


def test_a_validation_at_the_end_of_each_epoch_costs_only_the_ends_of_epochs(tmp_path: Path) -> None:
    """The first one cannot be foreseen."""
    assert told(tmp_path, at_ends) == [8, 12]


def test_a_validation_every_so_many_steps_costs_only_these_once_it_has_come_three_times(tmp_path: Path) -> None:
    assert told(tmp_path, every_third) == [4, 5, 6, 7, 8, 9, 12, 15]
    assert told(tmp_path, every_third, known=False) == [4, 5, 6, 7, 8, 9, 12, 15]


def test_where_epochs_are_not_known_their_ends_have_to_come_three_times(tmp_path: Path) -> None:
    assert told(tmp_path, at_ends, known=False) == [5, 6, 7, 8, 9, 10, 11, 12]


def test_what_comes_in_each_step_or_without_a_rule_is_told_in_each(tmp_path: Path) -> None:
    assert told(tmp_path, lambda step: True) == [*STEPS][1:]
    assert told(tmp_path, lambda step: step in (2, 3, 7)) == [*STEPS][2:]


def test_where_it_is_not_asked_when_it_comes_every_later_step_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control; and a copy is never trusted in a step in which it is wrong, but the first."""
    for validates in (at_ends, every_third):
        wrong = [step for step in STEPS if validates(step)][1:]
        assert {*wrong} <= {*told(tmp_path, validates)}
    for forecast, found in ((Forecast.UNKNOWN, [*STEPS][4:]), (Forecast.NOT_DUE, [])):
        monkeypatch.setattr(Late, "forecast", lambda *_, forecast=forecast: forecast)
        assert told(tmp_path, at_ends) == found
