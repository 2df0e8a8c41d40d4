"""Gradients of several optimizers that step in turns."""

from __future__ import annotations

import torch
from torch import nn

from lastwords.optim_wrapper.capture.carried_gradients import PREFIX, CarriedGradients


class Turns:
    """Two layers with an optimizer each; the second one steps in every second step."""

    def __init__(self) -> None:
        self.net = nn.ModuleDict({"often": nn.Linear(2, 2), "seldom": nn.Linear(2, 2)})
        self.often, self.seldom = (torch.optim.SGD(one.parameters(), lr=0.1) for one in self.net.values())
        self.scaler = torch.amp.GradScaler("cpu")
        parameters = lambda: dict(self.net.named_parameters())  # noqa: E731
        self.carried = CarriedGradients(parameters, [self.scaler], None, [self.often, self.seldom])

    def backward(self, *layers: str) -> None:
        self.often.zero_grad()
        for name in layers:
            self.net[name](torch.ones(1, 2)).sum().backward()

    def end(self, *stepped: torch.optim.Optimizer) -> list[str]:
        """What is carried from this step to the next."""
        idle = [one for one in (self.often, self.seldom) if one not in stepped]
        self.carried.in_turns(stepped, idle)
        self.carried.step_ends(updated=bool(stepped), trained=lambda: dict(self.net.named_parameters()))
        return list(self.carried._carried)


SELDOM = ["seldom.weight", "seldom.bias"]


def test_gradients_of_an_optimizer_that_has_not_stepped_are_carried() -> None:
    turns = Turns()
    turns.backward("often", "seldom")
    assert turns.end(turns.often) == SELDOM
    assert [region.name for region in turns.carried.regions] == [PREFIX + name for name in SELDOM]
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
        turns.scaler.load_state_dict({**turns.scaler.state_dict(), "scale": turns.scaler.get_scale() / 2})
        assert turns.end(*stepped) == SELDOM


def test_frozen_parameters_carry_none() -> None:
    turns = Turns()
    turns.backward("seldom")
    turns.net["seldom"].requires_grad_(False)
    assert turns.end(turns.often) == []
