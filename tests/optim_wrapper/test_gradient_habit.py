"""What a loop does with gradients that an update has used is seen, in whatever way it does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lastwords.optim_wrapper.capture.carried_gradients import PREFIX, ZEROED, GradientHabit, Habit, Pass
from tests import golden
from tests.optim_wrapper.test_state_watch import Job


class Loop:
    """A step: zero, backward, update. `before` and `after` stand before the backward pass and after the update."""

    def __init__(self, before: Callable[[Loop], Any], after: Callable[[Loop], Any], *, optimizer: Any = None) -> None:
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.seldom = nn.Linear(2, 2)
        self.used = True
        parameters = [*self.net.parameters(), *self.seldom.parameters()]
        self.optimizer = (optimizer or torch.optim.SGD)(parameters, lr=0.01)
        self.backward_pass = Pass()
        self.habit = GradientHabit(self.optimizer, self.backward_pass)
        self.before, self.after = before, after
        self.views = {id(one): torch.zeros(one.numel() + 1)[1:].view_as(one) for one in self.net.parameters()}

    def zero(self, set_to_none: bool = True) -> None:
        """As through the wrapper."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.habit.zeroed(set_to_none)

    def backward(self) -> None:
        x = torch.ones(1, 2)
        out = self.net(x) + (self.seldom(x) if self.used else 0)
        out.sum().backward()
        self.backward_pass.under_way = True
        if self.habit.looks:
            self.habit.in_backward()

    def until_update(self) -> None:
        self.before(self)
        self.backward()

    def update(self) -> bool:
        self.optimizer.step()
        self.after(self)
        self.backward_pass.under_way = False
        return self.habit.update_ended()

    def run(self, steps: int) -> Loop:
        for _ in range(steps):
            self.until_update()
            self.update()
        return self


def nothing(loop: Loop) -> None:
    """The loop does nothing there."""


def halve(loop: Loop) -> None:
    for one in loop.optimizer.param_groups[0]["params"]:
        if one.grad is not None:
            one.grad.mul_(0.5)


def into_views(loop: Loop) -> None:
    """What DDP does with gradient_as_bucket_view=True: gradients are always the same objects."""
    for one in loop.net.parameters():
        assert one.grad is not None
        view = loop.views[id(one)]
        one.grad = view.copy_(one.grad) if one.grad is not view else view


def module_zero(loop: Loop, set_to_none: bool = True) -> None:
    for module in (loop.net, loop.seldom):
        module.zero_grad(set_to_none=set_to_none)


def attacked(loop: Loop) -> None:
    """A backward pass for an adversarial sample, whose gradients are thrown away."""
    loop.backward()
    module_zero(loop)


def two_batches(loop: Loop) -> None:
    """The first batch of two, of one step."""
    module_zero(loop, False)
    loop.backward()


LOOPS: dict[str, tuple[Callable[[Loop], Any], Callable[[Loop], Any], Habit]] = {
    "zero_grad()": (Loop.zero, nothing, Habit.DROPPED),
    "zero_grad() after the update": (nothing, Loop.zero, Habit.DROPPED),
    "model.zero_grad()": (module_zero, nothing, Habit.DROPPED),
    "model.zero_grad() after the update": (nothing, module_zero, Habit.DROPPED),
    "model.zero_grad() of bucket views": (module_zero, into_views, Habit.DROPPED),
    "model.zero_grad() after another backward pass": (attacked, nothing, Habit.DROPPED),
    "zero_grad(set_to_none=False)": (lambda loop: loop.zero(False), nothing, Habit.ZEROED),
    "zero_grad(set_to_none=False) of bucket views": (lambda loop: loop.zero(False), into_views, Habit.ZEROED),
    "model.zero_grad(set_to_none=False)": (lambda loop: module_zero(loop, False), nothing, Habit.ZEROED),
    "the same in a step of two batches": (two_batches, nothing, Habit.ZEROED),
    "gradients are halved": (halve, nothing, Habit.KEPT),
    "gradients are halved after the update": (nothing, halve, Habit.KEPT),
    "gradients in bucket views are halved": (halve, into_views, Habit.KEPT),
    "nothing is ever set to zero": (nothing, nothing, Habit.KEPT),
}


@pytest.mark.parametrize("case", LOOPS)
def test_a_loop_s_habit_is_known_after_three_updates(case: str) -> None:
    before, after, habit = LOOPS[case]
    loop = Loop(before, after).run(3)
    assert loop.habit.habit is habit
    assert loop.run(8).habit.habit is habit


@pytest.mark.parametrize("case", [case for case, (*_, habit) in LOOPS.items() if habit is not Habit.KEPT])
def test_nothing_is_in_doubt_where_gradients_are_dropped_or_zeroed(case: str) -> None:
    before, after, _ = LOOPS[case]
    loop = Loop(before, after).run(3)
    for _ in range(8):
        assert not loop.habit.in_doubt(ended=True)
        loop.until_update()
        assert not loop.habit.in_doubt(ended=True)
        loop.optimizer.step()
        assert not loop.habit.in_doubt(ended=False)
        loop.after(loop)
        loop.backward_pass.under_way = False
        assert loop.habit.update_ended() is False


@pytest.mark.parametrize("before", [Loop.zero, module_zero], ids=["zero_grad()", "model.zero_grad()"])
def test_a_plain_loop_is_in_no_doubt_from_its_first_backward_pass_on(before: Callable[[Loop], Any]) -> None:
    loop = Loop(before, into_views).run(1)
    loop.until_update()
    assert not loop.habit.in_doubt(ended=True)


def test_gradients_that_outlive_the_first_updates_are_in_doubt_until_it_is_known() -> None:
    loop = Loop(halve, nothing)
    loop.until_update()
    loop.optimizer.step()
    assert loop.habit.in_doubt(ended=False)
    assert not loop.update()
    for _ in range(2):
        loop.before(loop)
        assert loop.habit.in_doubt(ended=True)
        loop.backward()
        assert loop.habit.in_doubt(ended=True)
        found = loop.update()
    assert found, "it is told once"
    loop.until_update()
    assert not loop.habit.in_doubt(ended=True)
    assert not loop.update()
    assert loop.habit.in_doubt(ended=False)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_first_step_in_which_nothing_is_zeroed_is_in_doubt(set_to_none: bool) -> None:
    loop = Loop(lambda loop: loop.zero(set_to_none), nothing).run(4)
    loop.before = nothing
    loop.until_update()
    assert loop.habit.in_doubt(ended=True)
    loop.update()
    assert loop.habit.in_doubt(ended=True)
    assert loop.run(1).habit.habit is Habit.KEPT


def test_a_zero_grad_that_comes_in_some_steps_only_is_not_believed_any_more() -> None:
    steps = iter(range(100))
    loop = Loop(lambda loop: loop.zero() if next(steps) % 2 == 0 else None, nothing).run(3)
    assert loop.habit.in_doubt(ended=True), "before any backward pass"
    assert loop.run(1).habit.habit is Habit.KEPT


def test_a_frozen_parameter_that_keeps_its_gradient_is_seen_at_the_next_look() -> None:
    loop = Loop(
        lambda loop: [setattr(one, "grad", None) for one in loop.net.parameters() if one.requires_grad], nothing
    )
    loop.used = False
    assert loop.run(3).habit.habit is Habit.DROPPED
    loop.net[0].requires_grad_(False)
    loop.habit.choose_anew()
    loop.run(1)
    loop.until_update()
    assert loop.habit.in_doubt(ended=True)
    loop.update()
    assert loop.habit.habit is Habit.KEPT


def test_gradients_that_come_after_a_zero_grad_at_the_step_s_end_are_the_next_update_s() -> None:
    loop = Loop(nothing, lambda loop: (loop.zero(), loop.backward()))
    loop.backward_pass.follows_update = lambda: True
    loop.run(2)
    assert loop.habit.next_ones
    assert loop.habit.in_doubt(ended=False)
    plain = Loop(nothing, Loop.zero)
    plain.backward_pass.follows_update = lambda: True
    assert not plain.run(2).habit.next_ones


def test_a_zero_grad_between_two_backward_passes_puts_nothing_in_doubt() -> None:
    loop = Loop(lambda loop: (loop.backward(), loop.zero()), nothing).run(2)
    loop.backward()
    assert not loop.habit.in_doubt(ended=True)


class InPlace(torch.optim.SGD):
    """An optimizer of the user's, whose `zero_grad()` sets nothing to None."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)


def test_a_zero_grad_of_another_kind_is_not_taken_at_its_word() -> None:
    assert Loop(Loop.zero, nothing, optimizer=InPlace).run(3).habit.habit is Habit.ZEROED


def test_gradients_that_were_restored_are_carried_until_the_loop_drops_them() -> None:
    loop = Loop(module_zero, nothing)
    loop.habit.carries()
    loop.run(1)
    assert loop.habit.habit is Habit.KEPT
    loop.run(1)
    assert loop.habit.habit is Habit.DROPPED


def test_modules_are_converted_by_swapping_while_gradients_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to swap a tensor that has a weak reference."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    loop = Loop(module_zero, nothing).run(3)
    loop.until_update()
    loop.update()
    loop.net.double()
    assert loop.net[0].weight.grad.dtype is torch.float64


class Halving(Job):
    """Of the tests of state that moves, with gradients that live on."""

    def compute(self) -> None:
        for one in self.net.parameters():
            if one.grad is not None:
                one.grad.mul_(0.5)
        self.net(torch.randn(4, 8)).sum().backward()


class Zeroing(Job):
    """The same with gradients of zeros; the bias never has one."""

    def compute(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        (self.net.trained.weight * torch.randn(8)).sum().backward()


def test_gradients_that_outlive_their_update_are_kept_and_come_back(tmp_path: Path) -> None:
    job = Halving(tmp_path)
    job.run(1)
    job.compute()
    golden.says(job.save(step=1)[1])
    job.run(3)
    regions = job.regions()
    assert job.save()[1] == []
    (tmp_path / "again").mkdir()
    again = Halving(tmp_path / "again")
    assert again.recorder.gradients.restore(regions) == ()
    for name in ("weight", "bias"):
        assert torch.equal(getattr(again.net.trained, name).grad, getattr(job.net.trained, name).grad)
    again.run(1)
    assert f"{PREFIX}trained.weight" in again.regions(), "the resumed run carries them from its first update on"


def test_which_parameters_have_a_gradient_of_zeros_is_kept_in_every_copy(tmp_path: Path) -> None:
    job = Zeroing(tmp_path)
    job.run(2)
    assert job.save()[1] == []
    job.compute()
    job.recorder.tentative()
    job.step += 1
    assert job.regions()[ZEROED].shape == (2,), "of a step that is cut off after its update"
    assert not any(name.startswith(PREFIX) for name in job.regions()), "no gradient is copied"
    (tmp_path / "again").mkdir()
    again = Zeroing(tmp_path / "again")
    again.net.trained.bias.grad = torch.ones(8)
    assert again.recorder.gradients.restore(job.regions()) == ()
    assert again.net.trained.bias.grad is None
    assert torch.equal(again.net.trained.weight.grad, torch.zeros(8, 8))  # type: ignore[arg-type]


def test_a_parameter_that_had_its_first_gradient_in_a_step_that_was_cut_off_is_in_doubt(tmp_path: Path) -> None:
    job = Zeroing(tmp_path)
    job.run(2)
    job.compute()
    job.recorder.tentative()
    assert not job.recorder.gradients.doubts(ended=False)
    job.net.trained.bias.grad = torch.ones(8)
    assert job.recorder.gradients.doubts(ended=False)


def test_a_plain_loop_has_no_room_for_gradients_in_its_black_box(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(5)
    assert not any(name.startswith((PREFIX, ZEROED)) for name in job.regions())
    assert job.save()[1] == []


def test_another_number_of_trained_parameters_is_named(tmp_path: Path) -> None:
    job = Zeroing(tmp_path)
    job.run(2)
    (tmp_path / "again").mkdir()
    again = Zeroing(tmp_path / "again")
    again.net.trained.bias.requires_grad_(False)
    again.optimizer.param_groups[0]["params"].pop()
    (reason,) = again.recorder.gradients.restore(job.regions())
    golden.says(reason)
