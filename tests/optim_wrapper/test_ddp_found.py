"""DDPs and networks that only the optimizer's parameters lead to are found, with their buffers and frozen weights."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lastwords.checkpoint.entries import facts_problem
from lastwords.optim_wrapper.capture.buffers import Buffers
from lastwords.optim_wrapper.capture.rank_local import BeforeCollective
from lastwords.optim_wrapper.ddp import ddp_found
from lastwords.optim_wrapper.ddp.ddp_found import ModulesBeside, holding, known_ddps
from lastwords.optim_wrapper.joined_optimizer import JoinedOptimizer
from lastwords.optim_wrapper.state.state_view import UnitView


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    net[2].weight.requires_grad_(False)
    return net


def view_of(registered: nn.Module, *nets: nn.Module) -> UnitView:
    trained = [[p for p in net.parameters() if p.requires_grad] for net in nets]
    return UnitView(registered, JoinedOptimizer([torch.optim.SGD(one, 0.1) for one in trained]))


BESIDE = {"~beside1.1.running_mean", "~beside1.1.running_var", "~beside1.1.num_batches_tracked"}


def test_buffers_and_frozen_weights_of_a_second_ddp_are_saved_with_the_model(group: None) -> None:
    generator, critic = nn.Linear(2, 2), DistributedDataParallel(network())
    view = view_of(DistributedDataParallel(generator), generator, critic.module)
    names = view.names()
    assert set(names.buffers) == BESIDE
    assert "~group1.0" in names.parameters, "what an optimizer has keeps its name there"
    assert names.parameters["~beside1.2.weight"] is critic.module[2].weight
    assert Buffers(view.model).captured == BESIDE
    assert len({id(p) for p in names.parameters.values()}) == len(names.parameters) == 2 + 6


def test_a_network_that_no_ddp_holds_is_found_as_the_largest_module_around_the_parameters(
    put_aside: Callable[[], None],
) -> None:
    generator, critic = nn.Linear(2, 2), network()
    around = nn.ModuleDict({"critic": critic, "scale": nn.BatchNorm1d(1, affine=False)})
    put_aside()
    names = view_of(generator, generator, critic).names()
    assert "~beside1.critic.1.running_mean" in names.buffers
    assert "~beside1.scale.running_mean" in names.buffers
    assert around is not None


def test_what_the_model_has_is_not_named_twice_where_the_module_beside_holds_it_too() -> None:
    generator, critic = network(), network()
    both = nn.ModuleDict({"g": generator, "d": critic})
    names = view_of(generator, generator, critic).names()
    assert "1.running_mean" in names.buffers
    assert "~beside1.d.1.running_mean" in names.buffers
    assert not any(name.startswith("~beside1.g") for name in names.buffers)
    assert not names.aliases
    assert both is not None


def test_a_model_that_has_everything_is_left_as_it_is(group: None) -> None:
    net = network()
    assert view_of(DistributedDataParallel(net), net).model is net
    alone = nn.Linear(2, 2)
    loose = nn.Parameter(torch.zeros(2))
    view = UnitView(alone, torch.optim.SGD([*alone.parameters(), loose], 0.1))
    assert view.model is alone, "nothing but the parameter itself is beside the model"


@pytest.mark.ci
def test_a_ddp_that_was_made_before_lastwords_looked_and_one_that_was_made_after_are_found(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Linear(2, 2)
    monkeypatch.setattr(ddp_found, "_known", ddp_found.weakref.WeakKeyDictionary())
    before = DistributedDataParallel(net)
    ddp_found._known.clear()  # as if nobody had listened
    monkeypatch.setattr(ddp_found, "_looked", True)
    assert known_ddps() == []
    monkeypatch.setattr(ddp_found, "_looked", False)
    after = DistributedDataParallel(net)
    assert set(holding(list(net.parameters()))) == {before, after}
    del before
    gc.collect()
    assert holding(list(net.parameters())) == [after]
    assert holding([nn.Parameter(torch.zeros(1))]) == []


def test_the_copy_is_taken_before_each_ddps_own_reduction(group: None) -> None:
    first, second = (DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2))
    both = nn.ModuleList([first, second])
    taken: list[int] = []
    hook = BeforeCollective(both, lambda: taken.append(1), holding(list(both.parameters())))
    for model in (first, second):
        model(torch.ones(1, 2)).sum().backward()
    assert len(taken) == 2
    hook.remove()
    first(torch.ones(1, 2)).sum().backward()
    assert len(taken) == 2


def test_where_the_loop_calls_a_ddp_around_the_model_the_copy_is_taken_once(group: None) -> None:
    net = nn.Linear(2, 2)
    model = DistributedDataParallel(net)
    taken: list[int] = []
    hook = BeforeCollective(net, lambda: taken.append(1), holding(list(net.parameters())))
    model(torch.ones(1, 2)).sum().backward()
    assert len(taken) == 1
    hook.remove()


def test_names_beside_the_model_are_given_by_no_naming(group: None) -> None:
    generator, critic = nn.Linear(2, 2), DistributedDataParallel(network())
    trained = [*generator.parameters(), *critic.module[0].parameters()]
    view = UnitView(generator, torch.optim.SGD(trained, 0.1), names=lambda own: f"stage0.{own}")
    assert "stage0.weight" in view.names().parameters
    assert "~beside1.1.running_mean" in view.names().buffers
    assert isinstance(view.model, ModulesBeside)


def test_a_damaged_record_of_several_ddps_is_named() -> None:
    good = {"static_graph": False, "find_unused_parameters": False, "parameters": ["w"], "passes": [[0]],
            "buckets": None, "reasons": [], "step": 1, "synced": {"forward": True}}  # fmt: skip
    several = {"ddps": [good, good]}
    assert facts_problem({"buckets": several}) is None
    for wrong in ({**good, "passes": [["0"]]}, {**good, "synced": {"forward": 1}}, 3):
        assert "buckets.ddps[1]" in str(facts_problem({"buckets": {"ddps": [good, wrong]}}))


@pytest.mark.ci
def test_what_lives_while_it_is_looked_for_can_be_freed(put_aside: Callable[[], None]) -> None:
    put_aside()
    model = nn.Linear(2, 2)
    model.me = [model]
    seen = weakref.ref(model)
    ddp_found.with_those_beside(nn.Linear(1, 1), (), [*model.parameters()])
    del model
    gc.collect()
    assert seen() is None
