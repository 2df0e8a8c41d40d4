"""When the tentative copy is taken: in every backward pass, after the loss, before the gradient that DDP reduces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lastwords.optim_wrapper.capture.rank_local import BeforeCollective


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Told:
    """What was there at each call."""

    def __init__(self, first: nn.Parameter, last: nn.Parameter) -> None:
        self.first, self.last = first, last
        self.calls: list[tuple[bool, bool]] = []

    def __call__(self) -> None:
        self.calls.append((self.first.grad is not None, self.last.grad is not None))


def model_and_told(**ddp: bool) -> tuple[nn.Module, Told, BeforeCollective]:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = DistributedDataParallel(net, **ddp) if ddp else net
    told = Told(net[0].weight, net[1].bias)
    return model, told, BeforeCollective(model, told)


def train(model: nn.Module) -> None:
    model(torch.ones(3, 4)).sum().backward()


def test_under_ddp_it_comes_before_the_first_parameters_gradient_is_reduced(group: None) -> None:
    model, told, _ = model_and_told(find_unused_parameters=False)
    train(model)
    assert [first for first, _ in told.calls] == [False]


def test_under_ddp_it_comes_once_in_each_backward_pass_also_without_synchronisation(group: None) -> None:
    model, told, _ = model_and_told(find_unused_parameters=False)
    assert isinstance(model, DistributedDataParallel)
    with model.no_sync():
        train(model)
    train(model)
    assert len(told.calls) == 2


def test_under_ddp_an_evaluation_mode_does_not_keep_it_away(group: None) -> None:
    model, told, _ = model_and_told(find_unused_parameters=False)
    train(model.eval())
    assert len(told.calls) == 1


def test_where_unused_parameters_are_looked_for_it_comes_before_any_gradient(group: None) -> None:
    model, told, _ = model_and_told(find_unused_parameters=True)
    train(model)
    assert told.calls == [(False, False)]


def test_without_ddp_it_comes_before_any_gradient() -> None:
    model, told, _ = model_and_told()
    train(model)
    assert told.calls == [(False, False)]


def test_frozen_parameters_and_those_that_ddp_ignores_are_not_waited_for(group: None) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["1.weight", "1.bias"])
    model = DistributedDataParallel(net)
    told = Told(net[2].weight, net[2].bias)
    BeforeCollective(model, told)
    train(model)
    assert [first for first, _ in told.calls] == [False]


def test_once_removed_it_does_not_come_any_more(group: None) -> None:
    for options in ({"find_unused_parameters": False}, {"find_unused_parameters": True}):
        model, told, hook = model_and_told(**options)
        hook.remove()
        train(model)
        assert told.calls == []


def test_in_a_transform_of_torch_func_nothing_is_copied_and_the_step_has_its_copy_nevertheless() -> None:
    model, told, _ = model_and_told()
    parameters = {name: one.detach() for name, one in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x[None],)).sum()

    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.ones(3, 4))
    assert not told.calls
    train(model)
    assert len(told.calls) == 1
