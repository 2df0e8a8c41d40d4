"""Extras of a step that was cut off after its update: restored as the loop would have left them, or named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel

from lastwords.optim_wrapper.state import extras as extras_module
from lastwords.optim_wrapper.state.extras import Extras
from lastwords.optim_wrapper.tensors.tensor_tree import advance
from lastwords.processor.recurrence import Forecast, Late, about_to_change
from tests import golden
from tests.ledgers import told
from tests.optim_wrapper.test_extras import sgd, through_storage

PER_EPOCH, STEPS = 4, 16


class Recipe:
    """What a loop does with its extras: `early` before its log, `late` after that."""

    def __init__(self) -> None:
        self.optimizer = sgd()
        self.scheduler = lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.extras: dict[str, Any] = {"scheduler": self.scheduler}

    def early(self, step: int) -> None:
        """Of step `step`."""

    def late(self, step: int) -> None:
        """Of step `step`."""


class PerStep(Recipe):
    def late(self, step: int) -> None:
        self.scheduler.step()


class PerStepBeforeTheLog(Recipe):
    def early(self, step: int) -> None:
        self.scheduler.step()


class PerEpoch(Recipe):
    def late(self, step: int) -> None:
        if step % PER_EPOCH == 0:
            self.scheduler.step()


class Plateau(Recipe):
    def __init__(self) -> None:
        super().__init__()
        self.extras["scheduler"] = self.plateau = lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)

    def late(self, step: int) -> None:
        if step % PER_EPOCH == 0:
            self.plateau.step(1.0)


class WarmThenStop(Recipe):
    def __init__(self) -> None:
        super().__init__()
        self.extras["scheduler"] = self.scheduler = lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=4)

    def late(self, step: int) -> None:
        if step <= 4:
            self.scheduler.step()


class WarmThenMain(WarmThenStop):
    def __init__(self) -> None:
        super().__init__()
        self.extras["main"] = self.main = lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def late(self, step: int) -> None:
        (self.scheduler if step <= 3 else self.main).step()


class StopsSomewhere(Recipe):
    def late(self, step: int) -> None:
        if step <= 6:
            self.scheduler.step()


class Ema(Recipe):
    begins, every = 5, 1

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        nn.init.constant_(self.net.weight, 0.5)
        nn.init.zeros_(self.net.bias)
        self.extras["ema"] = self.ema = AveragedModel(self.net)

    def early(self, step: int) -> None:
        self.scheduler.step()
        with torch.no_grad():
            self.net.weight.add_(step)

    def late(self, step: int) -> None:
        if step >= self.begins and step % self.every == 0:
            self.ema.update_parameters(self.net)


class EmaEveryThird(Ema):
    begins, every = 3, 3


class SwaSwitch(Ema):
    def __init__(self) -> None:
        super().__init__()
        self.extras["swalr"] = self.swalr = SWALR(self.optimizer, 0.01)

    def early(self, step: int) -> None:
        with torch.no_grad():
            self.net.weight.add_(step)

    def late(self, step: int) -> None:
        if step < 7:
            self.scheduler.step()
        else:
            self.ema.update_parameters(self.net)
            self.swalr.step()


class SwaSwitchBeforeTheLog(SwaSwitch):
    def early(self, step: int) -> None:
        super().early(step)
        super().late(step)

    def late(self, step: int) -> None:
        """What takes over has moved by then."""


class Counters(Recipe):
    def __init__(self) -> None:
        super().__init__()
        self.mine: dict[str, Any] = {"samples": 0, "meters": {"loss_sum": 0.0}, "best": None}
        self.extras["mine"] = self.mine

    def early(self, step: int) -> None:
        self.scheduler.step()
        self.mine["samples"] += 4

    def late(self, step: int) -> None:
        self.mine["meters"]["loss_sum"] += 0.5
        if step % PER_EPOCH == 0 and step != 12:
            self.mine["best"] = float(step)


class Best(Counters):
    """Nothing but a metric of each epoch comes after the log, and not of every epoch."""

    def early(self, step: int) -> None:
        super().early(step)
        self.mine["meters"]["loss_sum"] += 0.5

    def late(self, step: int) -> None:
        if step % PER_EPOCH == 0 and step != 12:
            self.mine["best"] = float(step)


class Tracker:
    """An object with a state of its own, two values of which move with each step."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"count": 0, "sum": 0.0, "window": 100}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


class Tracked(Recipe):
    def __init__(self) -> None:
        super().__init__()
        self.extras["tracker"] = self.tracker = Tracker()

    def early(self, step: int) -> None:
        self.scheduler.step()
        self.tracker.state["count"] += 1
        self.tracker.state["sum"] += step


class Twice(Recipe):
    def early(self, step: int) -> None:
        self.scheduler.step()

    late = early


def cut(make: Callable[[], Recipe], at: int, *, known: bool = True) -> tuple[bool, list[str], list[str]]:
    """Whether a resume from step `at`, cut off in its log, gives what the loop gives; why not; what is said later."""
    loop, again = make(), make()
    extras, resumed = Extras(loop.extras), Extras(again.extras)

    def ends(step: int) -> bool | None:
        return step % PER_EPOCH == 0 if known else None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        snapshot, late = extras.first(), Late()
        for step in range(1, at):
            loop.early(step)
            loop.late(step)
            snapshot = extras.ended(snapshot)
            late.happened(snapshot.moved, step, ends(step))
        loop.early(at)
        saved, found = extras.after_update(snapshot, late, ends(at))
        again.optimizer.param_groups[0]["lr"] = loop.optimizer.param_groups[0]["lr"]  # the optimizer's state has it
        resumed.restore(*through_storage(extras, saved))
        loop.late(at)
        equal = not any(
            advance(there, here)[1]
            for there, here in zip(extras.first().states.values(), resumed.first().states.values(), strict=True)
        )
        first = resumed.first()
        again.early(at + 1)
        again.late(at + 1)
        resumed.ended(first)
    return equal, about_to_change(found), told(resumed)


RECIPES: dict[type[Recipe], tuple[int, ...]] = {
    PerStep: tuple(range(2, STEPS)),
    PerStepBeforeTheLog: tuple(range(1, STEPS)),
    PerEpoch: (5, 6, 7, 9, 10, 11, 13, 14, 15),
    Plateau: (5, 6, 7, 9, 10, 11, 13, 14, 15),
    WarmThenStop: (2, 3, *range(6, STEPS)),
    WarmThenMain: tuple(range(6, STEPS)),
    StopsSomewhere: (2, 3, 4, 5, *range(8, STEPS)),
    Ema: (),
    EmaEveryThird: (10, 11, 13, 14),
    SwaSwitch: (),
    SwaSwitchBeforeTheLog: tuple(range(8, STEPS)),
    Counters: (),
    Best: (9, 10, 11, 13, 14, 15),
    Tracked: tuple(range(2, STEPS)),
    Twice: (),
}
"""Steps of which a death in the log is exact."""


def silent(make: type[Recipe], found: dict[int, tuple[bool, list[str], list[str]]]) -> list[int]:
    """Steps that are different, and nobody says so. In the first one nothing shows that a scheduler steps twice."""
    return [
        at
        for at, (equal, reasons, later) in found.items()
        if not (equal or reasons or later) and (make, at) != (Twice, 1)
    ]


@pytest.mark.parametrize("make", RECIPES)
def test_a_step_cut_off_in_its_log_is_exact_or_told(make: type[Recipe]) -> None:
    found = {at: cut(make, at) for at in range(1, STEPS)}
    assert silent(make, found) == [], "different, and nobody says so"
    exact = tuple(at for at, (equal, reasons, later) in found.items() if equal and not (reasons or later))
    assert exact == RECIPES[make]


@pytest.mark.parametrize("make", RECIPES)
def test_where_nobody_knows_the_epochs_nothing_is_silent_either(make: type[Recipe]) -> None:
    found = {at: cut(make, at, known=False) for at in range(1, STEPS)}
    assert silent(make, found) == []


@pytest.mark.ci
def test_without_its_word_most_of_these_would_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(extras_module._Taken, "may_move", lambda self, forecast: {})
    wrong = {make for make in RECIPES if silent(make, {at: cut(make, at) for at in range(2, STEPS)})}
    assert wrong == RECIPES.keys() - {
        PerStep,
        PerStepBeforeTheLog,
        WarmThenStop,
        StopsSomewhere,
        SwaSwitchBeforeTheLog,
        Tracked,
    }


def test_the_leaf_that_had_not_moved_is_named() -> None:
    reason = next(one for one in cut(Counters, 3)[1] if "best" not in one)
    assert "extras['mine']['meters']['loss_sum']" in reason
    assert Forecast.DUE.value in reason


def test_a_scheduler_that_was_stepped_on_resume_and_stands_still_then_is_told() -> None:
    """Nothing shows beforehand that the loop was done with it."""
    equal, reasons, later = cut(StopsSomewhere, 7)
    assert (equal, reasons) == (False, [])
    assert later == [
        "extras['scheduler'] was stepped on resume, as in every earlier step, but the loop now steps it differently"
    ]


def test_a_scheduler_whose_turn_another_one_has_taken_is_not_stepped_on_resume() -> None:
    equal, reasons, _ = cut(SwaSwitchBeforeTheLog, 7)
    assert equal
    golden.says(reasons[0])


def test_steps_without_an_update_say_nothing_of_when_a_scheduler_moves() -> None:
    """A loop that accumulates by itself updates, and steps, in every third of its steps."""
    loop = PerStep()
    extras = Extras(loop.extras)
    snapshot, late = extras.first(), Late()
    for step in range(1, 6):
        updated = step % 3 == 0
        if updated:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loop.late(step)
        snapshot = extras.ended(snapshot, updated)
        if updated:
            late.happened(snapshot.moved, late.steps + 1, None)
    saved, found = extras.after_update(snapshot, late)
    assert (saved.step_on_resume, found) == (("scheduler",), {})
