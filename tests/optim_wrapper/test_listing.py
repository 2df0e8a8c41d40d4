"""A kept list of a unit's tensors is used again only where a new one would be the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lastwords.checkpoint.part import UnitState
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.tensors.tensor_bytes import staged_bytes


class Job:
    def __init__(self) -> None:
        self.net: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4, bias=False)))
        self.net.register_buffer("level", torch.zeros(4))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 0.1)
        self.step()
        self.view = UnitView(self.net, self.optimizer)

    @property
    def weight(self) -> Any:
        return self.net[0].weight

    @property
    def state(self) -> Any:
        return self.optimizer.state[self.weight]

    def listed_anew(self) -> UnitState:
        known, self.view._known = self.view._known, None
        state = self.view.state()
        assert self.view._known is None, "nothing of the user's is held unless a copy asks for it"
        self.view._known = known
        return state

    def step(self) -> None:
        self.net(torch.randn(5, 3)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def seen(state: UnitState) -> list[Any]:
    """Everything of it, as bytes and words."""
    tensors = [(spec, bytes(source() if callable(source) else source)) for spec, source in state.tensors]
    return [*tensors, state.meta.to_json()]


def replace_parameter(job: Job) -> None:
    job.net[0].weight = nn.Parameter(job.weight.detach().clone())
    job.optimizer.param_groups[0]["params"][0] = job.net[0].weight


def add_group(job: Job) -> None:
    job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def replace_module(job: Job) -> None:
    other = nn.Sequential(nn.Linear(4, 4, bias=False))
    other[0].weight = job.net[2][0].weight
    job.net[2] = other
    other.append(nn.ReLU())
    other.register_buffer("new", torch.ones(1))


def turn(job: Job) -> None:
    job.net[2][0].weight.data = job.net[2][0].weight.data.t()


CHANGES: dict[str, Callable[[Job], object]] = {
    "another parameter": replace_parameter,
    "other memory": lambda job: setattr(job.weight, "data", job.weight.data.clone() + 1),
    "another shape of the same memory": lambda job: setattr(job.net.level, "data", job.net.level.data.view(2, 2)),
    "other strides": turn,
    "another type": lambda job: setattr(job.net.level, "data", job.net.level.data.double()),
    "less of the same memory": lambda job: setattr(job.net.level, "data", job.net.level.data[1:]),
    "fewer elements of the same memory": lambda job: setattr(job.net.level, "data", job.net.level.data[:2]),
    "another type of the same memory": lambda job: setattr(job.net.level, "data", job.net.level.data.view(torch.int32)),
    "another optimizer": lambda job: setattr(job.view, "optimizer", torch.optim.AdamW(job.net.parameters(), 0.1)),
    "frozen": lambda job: job.weight.requires_grad_(False),
    "another buffer": lambda job: setattr(job.net, "level", torch.ones(4)),
    "a buffer that is gone": lambda job: setattr(job.net, "level", None),
    "a new buffer": lambda job: job.net.register_buffer("new", torch.ones(2)),
    "a buffer under another name": lambda job: job.net._buffers.__setitem__("other", job.net._buffers.pop("level")),
    "a buffer that is not persistent any more": lambda job: job.net._non_persistent_buffers_set.add("level"),
    "another module": replace_module,
    "another moment": lambda job: job.state.__setitem__("exp_avg", torch.ones(4, 3)),
    "a moment under another name": lambda job: job.state.__setitem__("other", job.state.pop("exp_avg")),
    "a moment that is gone": lambda job: job.state.pop("exp_avg"),
    "a number among them": lambda job: job.state.__setitem__("calls", 7),
    "a list among them": lambda job: job.state.__setitem__("past", [torch.ones(1)]),
    "an entry that is a number": lambda job: job.optimizer.state.__setitem__("calls", 1),
    "an entry that is a tensor": lambda job: job.optimizer.state.__setitem__("seen", torch.ones(1)),
    "state that is gone": lambda job: job.optimizer.state.pop(job.weight),
    "another table of state": lambda job: setattr(job.optimizer, "state", type(job.optimizer.state)(dict)),
    "another group": add_group,
    "a learning rate": lambda job: job.optimizer.param_groups[0].__setitem__("lr", 0.5),
    "a buffer that is left out": lambda job: setattr(job.view, "exclude_buffers", frozenset({"level"})),
    "nothing": lambda job: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_the_list_is_what_a_new_one_would_be(change: str) -> None:
    job = Job()
    job.view.state(keep=True)
    known = job.view._known
    assert known is not None
    CHANGES[change](job)
    assert seen(job.view.state(keep=True)) == seen(job.listed_anew())
    assert seen(job.view.state(keep=True)) == seen(job.listed_anew())
    if change in ("nothing", "a learning rate"):
        job.view.state(keep=True)
        assert job.view._known is not None, "else nothing is spared"


def test_numbers_that_an_optimizer_has_in_a_list_are_listed_anew_each_time() -> None:
    job = Job()
    job.state["past"] = [1]
    for number in range(3):
        job.state["past"][0] = number
        assert seen(job.view.state(keep=True)) == seen(job.listed_anew())
    job.state["past"] = 0
    for number in range(3):
        job.state["past"] = number
        assert seen(job.view.state(keep=True)) == seen(job.listed_anew())


def test_state_that_could_not_be_stored_is_listed_once_it_can_be() -> None:
    job = Job()
    storage = job.state["exp_avg"].untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    assert len(job.view.state(keep=True).tensors) + 1 == len(Job().view.state().tensors)
    storage.resize_(nbytes)
    assert seen(job.view.state(keep=True)) == seen(job.listed_anew())


def test_whoever_saves_reads_through_a_reader_of_its_own_whatever_is_kept() -> None:
    job = Job()
    job.net.turned = nn.Buffer(torch.arange(6.0).view(2, 3).t())
    job.view.state(keep=True)
    assert job.view._known is not None
    read = []

    def reader(tensor: torch.Tensor) -> memoryview:
        read.append(tensor.shape)
        return staged_bytes(tensor)

    assert seen(job.view.state(stage=reader)) == seen(job.listed_anew())
    assert read == [torch.Size([3, 2])]


def test_training_goes_on_with_the_same_list() -> None:
    job = Job()
    job.view.state(keep=True)
    known = job.view._known
    for _ in range(3):
        job.step()
        assert seen(job.view.state(keep=True)) == seen(UnitView(job.net, job.optimizer).state())
        assert job.view._known is known
