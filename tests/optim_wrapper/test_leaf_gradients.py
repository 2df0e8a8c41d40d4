"""The `.grad` of tensors in the dicts among the extras."""

from __future__ import annotations

from typing import Any

import torch

from lastwords.optim_wrapper.capture import step_document
from lastwords.optim_wrapper.state.extras import Extras, pack_inline, restore_inline
from lastwords.optim_wrapper.state.leaf_gradients import LeafGradients

NAME = "gradients of extras"


def local(*dicts: dict[str, Any]) -> Extras:
    extras = Extras({str(number): one for number, one in enumerate(dicts)}, "local_extras")
    extras.add_later(LeafGradients({"net": torch.nn.Linear(1, 1)}, {str(n): one for n, one in enumerate(dicts)}))
    extras.admit()
    return extras


def leaf(gradient: float | None = None) -> torch.Tensor:
    tensor = torch.zeros(2, requires_grad=True)
    tensor.grad = None if gradient is None else torch.full((2,), gradient)
    return tensor


def test_they_come_back_where_they_were() -> None:
    saved = local({"a": [leaf(1.0)], "b": leaf()})
    here = {"a": [leaf()], "b": leaf(5.0)}
    extras = local(here)
    restore_inline(extras, pack_inline(saved, saved.first()))
    (a,), b = here["a"], here["b"]
    assert torch.equal(a.grad, torch.ones(2))
    assert b.grad is None


def test_a_new_gradient_is_one_that_has_moved() -> None:
    tensor = leaf(1.0)
    extras = local({"a": tensor})
    before = extras.first()
    assert extras.again(before)[1] == []
    tensor.grad = torch.full((2,), 3.0)
    assert extras.again(before)[1] == [NAME]


def test_nothing_is_there_where_no_tensor_requires_one() -> None:
    tensor = torch.zeros(2)
    extras = local({"a": tensor})
    assert NAME not in extras.first().states
    before = extras.first()
    tensor.requires_grad_(True)
    extras.admit()
    after = extras.again(before)[0]
    assert after.states[NAME] == {}


def test_a_checkpoint_that_has_some_finds_their_place() -> None:
    extras, here = Extras({}, "local_extras"), {"a": torch.zeros(2)}
    extras = Extras({"0": here}, "local_extras")
    gradients = LeafGradients(None, {"0": here})
    extras.add_later(gradients)
    saved = local({"a": leaf(1.0), "gone": leaf(2.0)})
    del here["a"]
    here["a"] = leaf()
    restore_inline(extras, pack_inline(saved, saved.first()))
    assert torch.equal(here["a"].grad, torch.ones(2))
    assert not gradients.reasons
    gradients.load_state_dict({"local_extras['0']['nowhere']": torch.ones(2)})
    assert gradients.reasons == ["the saved gradient of local_extras['0']['nowhere'] fits no tensor here"]


def test_messages_do_not_call_it_one_of_the_user_s() -> None:
    tensor = leaf(1.0)
    extras = local({"a": tensor})
    before = extras.first()
    tensor.grad = torch.zeros(2)
    after = extras.again(before)[0]
    assert step_document.what_differs(extras, before, after) == "gradients of extras"
    assert extras.called(["0", NAME]) == ["local_extras['0']", "gradients of extras"]
