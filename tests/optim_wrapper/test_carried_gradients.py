"""Gradients of several optimizers that step in turns."""

from __future__ import annotations

import torch
from torch import nn

from lastwords.optim_wrapper.capture.carried_gradients import PREFIX, ZEROED, CarriedGradients
from lastwords.optim_wrapper.state.extras import Extras
from lastwords.processor.box_layout import RegionCopy


class Turns:
    """Two layers with an optimizer each; the second one steps in every second step."""

    def __init__(self) -> None:
        self.net = nn.ModuleDict({"often": nn.Linear(2, 2), "seldom": nn.Linear(2, 2)})
        self.often, self.seldom = (torch.optim.SGD(one.parameters(), lr=0.1) for one in self.net.values())
        parameters = lambda: dict(self.net.named_parameters())  # noqa: E731
        self.carried = CarriedGradients(parameters, True, None, [self.often, self.seldom])

    def backward(self, *layers: str) -> None:
        self.often.zero_grad()
        for name in layers:
            self.net[name](torch.ones(1, 2)).sum().backward()

    def end(self, *stepped: torch.optim.Optimizer, skipped: bool = False) -> list[str]:
        """What is carried from this step to the next."""
        idle = [one for one in (self.often, self.seldom) if one not in stepped]
        self.carried.in_turns(stepped, idle)
        trained = lambda: dict(self.net.named_parameters())  # noqa: E731
        self.carried.end_step(updated=bool(stepped), trained=trained, skipped=skipped)
        return list(self.carried.carried)


SELDOM = ["seldom.weight", "seldom.bias"]


def test_gradients_of_an_optimizer_that_has_not_stepped_are_carried() -> None:
    turns = Turns()
    turns.backward("often", "seldom")
    assert turns.end(turns.often) == SELDOM
    assert [region.name for region in turns.carried.tensors.regions] == [PREFIX + name for name in SELDOM]
    turns.backward("often", "seldom")
    assert turns.end(turns.often, turns.seldom) == []


def test_gradients_that_its_last_update_has_used_up_are_not_carried_until_they_are_added_to() -> None:
    turns = Turns()
    turns.backward("often", "seldom")
    assert turns.end(turns.often, turns.seldom) == []
    turns.backward("often")
    assert turns.end(turns.often) == []
    turns.backward("often", "seldom")
    assert turns.end(turns.often) == SELDOM


def test_new_gradients_after_those_that_are_used_up_are_carried() -> None:
    turns = Turns()
    turns.backward("often", "seldom")
    turns.end(turns.often, turns.seldom)
    turns.seldom.zero_grad()
    turns.backward("seldom")
    assert turns.end(turns.often) == SELDOM


def test_a_scale_that_moves_says_nothing_of_the_optimizer_that_has_not_stepped() -> None:
    turns = Turns()
    for stepped in ((turns.often,), ()):
        turns.backward("seldom")
        assert turns.end(*stepped, skipped=True) == SELDOM


def test_frozen_parameters_keep_theirs_as_torch_applies_them_nevertheless() -> None:
    turns = Turns()
    turns.backward("seldom")
    turns.net["seldom"].requires_grad_(False)
    assert turns.end(turns.often) == SELDOM


class Head:
    """An optimizer that has the last of two layers only."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.optimizer = torch.optim.SGD(self.net[1].parameters(), lr=0.1)
        self.carried = CarriedGradients(lambda: dict(self.net.named_parameters()), False, None, [self.optimizer])
        self.count = 0

    def step(self, zeroed: nn.Module, frozen: bool = False) -> list[str]:
        """What is carried from this step to the next. zeroed: whose `zero_grad` is called."""
        zeroed.zero_grad()
        if zeroed is self.net[1]:
            self.carried.habits[0].zeroed(True)
        self.net[0].requires_grad_(not frozen)
        self.net(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        self.count += 1
        look = self.count & (self.count - 1) == 0
        self.carried.end_step(updated=True, trained=lambda: dict(self.net[1].named_parameters("1")), look=look)
        return list(self.carried.carried)


def test_gradients_of_parameters_that_no_optimizer_has_are_carried() -> None:
    head = Head()
    head.step(head.net[1])
    assert head.carried.doubts(ended=True), "not before it is seen what the loop does with them"
    assert [head.step(head.net[1]) for _ in range(2)][1] == ["0.weight", "0.bias"]
    assert not head.carried.doubts(ended=True)
    head.optimizer.add_param_group({"params": [*head.net[0].parameters()]})
    head.optimizer.zero_grad()
    head.carried.habits[0].zeroed(True)
    assert head.step(head.net) == [], "an optimizer has them now"


def test_those_that_the_loop_drops_are_not() -> None:
    head = Head()
    assert [head.step(head.net) for _ in range(6)] == [[]] * 6
    assert not head.carried.doubts(ended=True)


def test_where_there_are_none_nothing_is_looked_at_in_most_steps() -> None:
    head = Head()
    for _ in range(4):
        head.step(head.net[1], frozen=True)
    head.carried._update_ended = None  # type: ignore[method-assign,assignment]
    head.carried._know = None  # type: ignore[method-assign,assignment]
    assert head.step(head.net[1], frozen=True) == []


def test_a_restored_gradient_is_written_into_the_one_that_is_there() -> None:
    head = Head()
    flat = torch.zeros(4)
    head.net[1].weight.grad = flat.view(2, 2)
    values = torch.arange(4.0)
    head.carried.restore({PREFIX + "1.weight": region((2, 2), values), PREFIX + "0.bias": region((2,), values[:2])})
    assert torch.equal(flat, values)
    assert torch.equal(head.net[0].bias.grad, values[:2])
    head.carried.restore({ZEROED: region((2,), torch.tensor([1, 0], dtype=torch.uint8))})
    assert not flat.any()
    assert head.net[1].weight.grad is not None


def test_those_of_a_module_among_the_extras_are_always_carried() -> None:
    head = Head()
    judge = nn.Linear(2, 1)
    extras = Extras({"judge": judge, "same": head.net})
    head.carried = CarriedGradients(lambda: dict(head.net.named_parameters()), False, None, [head.optimizer], [extras])
    assert [head.step(head.net) for _ in range(2)] == [[], []], "there are none"
    names = ["extras['judge'].weight", "extras['judge'].bias"]
    for _ in range(6):
        judge.zero_grad()
        judge(torch.ones(1, 2)).sum().backward()
        carried = head.step(head.net)
    assert carried == names
    judge.zero_grad()
    assert head.step(head.net) == []
    head.carried.restore({PREFIX + names[1]: region((1,), torch.ones(1))})
    assert judge.bias.grad == 1
    for _ in range(3):
        judge.zero_grad()
        judge(torch.ones(1, 2)).sum().backward()
        carried = head.step(head.net)
    assert names[1] in carried, "still"


def region(shape: tuple[int, ...], values: torch.Tensor) -> RegionCopy:
    code = "U8" if values.dtype is torch.uint8 else "F32"
    return RegionCopy(code, shape, memoryview(values.numpy().tobytes()))
