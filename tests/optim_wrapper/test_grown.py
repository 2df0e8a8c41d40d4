"""Models and optimizers that have grown while they trained: groups that were added, buffers that have another form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

import lastwords
from lastwords.errors import MismatchError
from lastwords.optim_wrapper.resume.state_restore import RestorePlan, adopted
from lastwords.optim_wrapper.state.plain_values import copy_groups
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from tests import golden
from tests.integrations.made import saved as published
from tests.optim_wrapper.test_state_view import Stored, store


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))


def made(model: nn.Sequential, groups: int, kind: Callable[..., Optimizer] = torch.optim.SGD) -> Optimizer:
    """The last layers first, as they are unfrozen."""
    optimizer = kind(model[2].parameters(), lr=0.1)
    for number in range(1, groups):
        optimizer.add_param_group({"params": model[2 - number].parameters(), "lr": 0.1 / 2**number})
    return optimizer


def stepped(model: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def resume(view: UnitView, stored: Stored) -> None:
    specs, contents, meta = stored
    with adopted(view, [meta]):
        plan = RestorePlan(view, specs, meta)
    by_name = {spec.name: spec for spec in specs}
    for name in plan.tensor_names:
        plan.into(by_name[name])[:] = contents[name]
    plan.commit()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("groups", [2, 3])
def test_groups_that_were_added_on_the_way_are_added_by_resume(kind: Callable[..., Optimizer], groups: int) -> None:
    models = net(), net()
    optimizers = made(models[0], groups, kind), made(models[1], 1, kind)
    stepped(models[0], optimizers[0])
    optimizers[0].param_groups[1]["lr"] = 0.7
    resume(UnitView(models[1], optimizers[1]), store(UnitView(models[0], optimizers[0]).state()))
    for one, other in zip(optimizers[0].param_groups, optimizers[1].param_groups, strict=True):
        assert {**one, "params": 0} == {**other, "params": 0}
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            stepped(model, optimizer)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_loop_that_adds_the_group_again_has_it_once_with_the_values_that_were_saved() -> None:
    models = net(), net()
    optimizers = made(models[0], 3), made(models[1], 1)
    optimizers[0].param_groups[1]["lr"] = 0.7
    wrapper = OptTFTWrapper(optimizers[1])
    resume(UnitView(models[1], wrapper), store(UnitView(models[0], optimizers[0]).state()))
    for layer in (1, 0):
        wrapper.add_param_group({"params": models[1][layer].parameters(), "lr": 0.05})
    assert [group["lr"] for group in wrapper.param_groups] == [0.1, 0.7, 0.025]
    with pytest.raises(ValueError, match="group"):
        wrapper.add_param_group({"params": models[1][1].parameters()})


@pytest.mark.ci
def test_a_group_that_the_step_under_way_has_added_is_added_by_the_step_that_is_repeated() -> None:
    """It is no part of the step that is saved: what the loop does to all groups before it adds one would be twice."""
    models = net(), net()
    optimizers = made(models[0], 2), made(models[1], 1)
    stepped(models[0], optimizers[0])
    ended = copy_groups(optimizers[0])
    optimizers[0].add_param_group({"params": models[0][0].parameters(), "lr": 0.5})
    optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})  # of the loop's own
    state = UnitView(models[0], optimizers[0]).state(ended)
    assert [*state.meta.parameters] == [name for name, _ in models[0].named_parameters()]
    resume(UnitView(models[1], optimizers[1]), store(state))
    assert [group["lr"] for group in optimizers[1].param_groups] == [0.1, 0.05]
    assert "~group3.0" in UnitView(models[0], optimizers[0]).state().meta.parameters


def test_without_a_resume_a_group_that_is_added_twice_is_torchs_error() -> None:
    """Negative control."""
    model = net()
    wrapper = OptTFTWrapper(made(model, 2))
    with pytest.raises(ValueError, match="group"):
        wrapper.add_param_group({"params": model[1].parameters()})


def test_groups_that_do_not_fit_are_refused_and_none_is_added() -> None:
    model, other = net(), net()
    stored = store(UnitView(model, made(model, 3)).state())
    taken = torch.optim.SGD([*other[2].parameters(), *other[1].parameters()], lr=0.1)
    with golden.raises(MismatchError):
        resume(UnitView(other, taken), stored)
    assert len(taken.param_groups) == 1
    narrow = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    fewer = torch.optim.SGD(narrow[2].parameters(), lr=0.1)
    with golden.raises(MismatchError):
        resume(UnitView(narrow, fewer), stored)
    assert len(fewer.param_groups) == 1


def test_a_group_that_the_saved_run_has_removed_is_removed_before_resume() -> None:
    models = net(), net()
    optimizers = made(models[0], 2, torch.optim.AdamW), made(models[1], 2, torch.optim.AdamW)
    stepped(models[0], optimizers[0])
    optimizers[0].param_groups.pop(0)
    stepped(models[0], optimizers[0])
    stored, view = store(UnitView(models[0], optimizers[0]).state()), UnitView(models[1], optimizers[1])
    with golden.raises(MismatchError):
        resume(view, stored)
    assert len(optimizers[1].param_groups) == 2
    del optimizers[1].param_groups[0]
    resume(view, stored)
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            stepped(model, optimizer)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_layers_are_frozen_as_they_were_when_the_step_was_saved() -> None:
    model, other = net(), net()
    model[0].requires_grad_(False)
    other[1].requires_grad_(False)
    resume(UnitView(other, made(other, 1)), store(UnitView(model, made(model, 1)).state()))
    assert [p.requires_grad for p in other.parameters()] == [False, False, True, True, True, True]


def test_layers_that_a_step_freezes_for_a_while_are_saved_as_of_the_last_step_s_end() -> None:
    model = net()
    parameters = [*model.parameters()]
    then = {id(one): True for one in parameters[:-1]}
    parameters[0].requires_grad_(False)
    parameters[-1].requires_grad_(False)  # of which nothing was seen then
    meta = UnitView(model, made(model, 1)).state(trained=then).meta
    assert meta.frozen == ["2.bias"]


def test_peek_says_which_groups_a_checkpoint_has(tmp_path: Path) -> None:
    model = net()
    published(tmp_path, model, made(model, 2))
    point = lastwords.peek(tmp_path)
    assert point is not None
    assert point.groups == (("2.weight", "2.bias"), ("1.weight", "1.bias"))


# ------------------------------------------------------------------ buffers


class Growing(nn.Module):
    """Buffers that get another form, come late, and one that does neither."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("low", torch.tensor([]))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("fixed", torch.ones(2))

    def grow(self) -> None:
        self.low.resize_(3).fill_(7)
        self.scale.resize_(3).fill_(5)
        self.register_buffer("late", torch.full((2,), 4.0))


def grown() -> tuple[Growing, UnitView]:
    model = Growing()
    view = UnitView(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.grow()
    return model, view


def test_buffers_that_have_changed_their_form_come_back_and_stay_the_same_tensors() -> None:
    stored = store(grown()[1].state())
    assert stored[2].reshaped_buffers == ["late", "low", "scale"]
    model = Growing()
    known = dict(model.named_buffers())
    view = UnitView(model, torch.optim.SGD(model.parameters(), lr=0.1))
    resume(view, stored)
    assert {name: buffer.tolist() for name, buffer in model.named_buffers()} == {
        "low": [7.0] * 3, "scale": [5.0] * 3, "fixed": [1.0] * 2, "late": [4.0] * 2,
    }  # fmt: skip
    assert all(buffer is dict(model.named_buffers())[name] for name, buffer in known.items())
    assert "late" in model.state_dict()
    assert store(view.state())[2].reshaped_buffers == ["late", "low", "scale"], "resumed once more"
    model.scale.resize_(9)


def test_without_their_names_another_form_is_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(UnitView, "reshaped", lambda self: [])
    stored = store(grown()[1].state())
    model = Growing()
    with pytest.raises(MismatchError, match="scale"):
        resume(UnitView(model, torch.optim.SGD(model.parameters(), lr=0.1)), stored)


def test_a_buffer_that_did_not_change_its_form_still_has_to_fit() -> None:
    model = Growing()
    model.fixed = torch.ones(4)
    with pytest.raises(MismatchError, match="fixed"):
        resume(UnitView(model, torch.optim.SGD(model.parameters(), lr=0.1)), store(grown()[1].state()))


def test_parameters_that_were_moved_between_groups_are_moved_by_resume(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="lastwords")
    models = net(), net()
    optimizers = made(models[0], 3, torch.optim.AdamW), made(models[1], 3, torch.optim.AdamW)
    first, second, _ = optimizers[0].param_groups
    second["params"].append(first["params"].pop(0))
    stepped(models[0], optimizers[0])
    before = [group["params"] for group in optimizers[1].param_groups]
    resume(UnitView(models[1], optimizers[1]), store(UnitView(models[0], optimizers[0]).state()))
    names = [{id(one): name for name, one in model.named_parameters()} for model in models]
    groups = [
        [[of[id(one)] for one in group["params"]] for group in optimizer.param_groups]
        for of, optimizer in zip(names, optimizers, strict=True)
    ]
    assert groups[0] == groups[1]
    assert all(group["params"] is was for group, was in zip(optimizers[1].param_groups, before, strict=True))
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(optimizers[0].state[one]["exp_avg"], optimizers[1].state[other]["exp_avg"])
    golden.says(caplog.messages)


def test_groups_of_other_parameters_are_refused_and_stay_as_they_were() -> None:
    models = net(), net()
    optimizers = made(models[0], 3), made(models[1], 3)
    optimizers[0].param_groups[1]["params"].append(optimizers[0].param_groups[0]["params"].pop(0))
    optimizers[1].param_groups[2]["params"].pop()
    before = [[*group["params"]] for group in optimizers[1].param_groups]
    with golden.raises(MismatchError):
        resume(UnitView(models[1], optimizers[1]), store(UnitView(models[0], optimizers[0]).state()))
    after = [group["params"] for group in optimizers[1].param_groups]
    assert [[*map(id, one)] for one in before] == [[*map(id, one)] for one in after]
