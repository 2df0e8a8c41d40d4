"""The `.grad` of tensors in the dicts among the extras."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lastwords.errors import MismatchError
from lastwords.optim_wrapper.capture.carried_gradients import PREFIX, CarriedGradients
from lastwords.optim_wrapper.capture.rank_local import BoxRecorder
from lastwords.optim_wrapper.state.extras import Extras
from lastwords.processor.black_box import BlackBox
from lastwords.processor.box_layout import BoxLayout, BoxReader, RegionCopy
from lastwords.processor.recurrence import Late


class Training:
    """A layer with an optimizer, and dicts among the extras."""

    def __init__(self, *dicts: dict[str, Any], **modules: nn.Module) -> None:
        self.net = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        every = {**{str(number): one for number, one in enumerate(dicts)}, **modules}
        self.extras = Extras(every, "local_extras")
        parameters = lambda: dict(self.net.named_parameters())  # noqa: E731
        self.gradients = CarriedGradients(parameters, False, None, [self.optimizer], [self.extras])

    def step(self, *, look: bool = False) -> list[str]:
        """What is carried from this step, with an update, to the next."""
        self.optimizer.zero_grad()
        self.gradients.habits[0].zeroed(True)
        self.net(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        self.gradients.end_step(updated=True, trained=lambda: dict(self.net.named_parameters()), look=look)
        return list(self.gradients.carried)

    def copy(self, folder: Path) -> dict[str, RegionCopy]:
        """What a black box has of it."""
        path, tensors = folder / "rank_0.box", self.gradients.tensors
        box = BlackBox.create(path, BoxLayout(tensors.regions))
        BoxRecorder(box, (tensors,), Late()).committed(1, b"{}")
        with BoxReader(path) as reader:
            copy = reader.read(1)
            assert copy is not None
            return {name: replace(one, data=memoryview(bytes(one.data))) for name, one in copy.regions.items()}


def leaf(gradient: float | None = None, size: int = 2) -> torch.Tensor:
    tensor = torch.zeros(size, requires_grad=True)
    tensor.grad = None if gradient is None else torch.full((size,), gradient)
    return tensor


def region(value: float, size: int = 2) -> RegionCopy:
    return RegionCopy("F32", (size,), memoryview(torch.full((size,), value).numpy().tobytes()))


def test_they_come_back_where_they_were(tmp_path: Path) -> None:
    saved = Training({"a": [leaf(1.0)], "b": leaf()})
    assert saved.step(look=True) == ["local_extras['0']['a'][0]"]
    regions = saved.copy(tmp_path)
    here = {"a": [leaf()], "b": leaf(5.0)}
    again = Training(here)
    again.gradients.refuse(regions)
    assert again.gradients.restore(regions) == ()
    (a,), b = here["a"], here["b"]
    assert torch.equal(a.grad, torch.ones(2))
    assert b.grad is None


MISSING = "gradients of parameters without an optimizer were not saved"


def test_they_are_carried_whenever_they_come() -> None:
    """Not only from the next look on."""
    tensor = leaf()
    training = Training({"a": tensor})
    assert [training.step(look=True), training.step()] == [[], []]
    tensor.grad = torch.ones(2)
    assert training.step() == ["local_extras['0']['a']"]
    assert MISSING in training.gradients.doubts(ended=False), "of a step that is cut off after its update"
    assert MISSING not in training.gradients.doubts(ended=True)
    tensor.grad = None
    assert training.step() == []
    assert MISSING not in training.gradients.doubts(ended=False)


def test_a_tensor_is_followed_by_its_place(tmp_path: Path) -> None:
    extra = {"a": leaf(1.0), "b": leaf(2.0)}
    training = Training(extra)
    training.step(look=True)
    extra["a"] = leaf(3.0)
    del extra["b"]
    assert training.step() == ["local_extras['0']['a']"]
    regions = training.copy(tmp_path)
    assert {name: bytes(one.data) for name, one in regions.items()} == {
        f"{PREFIX}local_extras['0']['a']": bytes(region(3.0).data)
    }


def test_what_comes_after_an_early_end_is_named_and_carried() -> None:
    extra = {"a": leaf(), "b": leaf(1.0)}
    training = Training(extra)
    training.step(look=True)
    assert training.gradients.again() == []
    extra["a"].grad = torch.ones(2)
    extra["b"] = leaf()
    assert training.gradients.again() == ["the gradient of local_extras['0']['a']"]
    assert training.gradients.carried == ["local_extras['0']['a']"]


def test_nothing_is_looked_at_where_no_tensor_requires_one() -> None:
    tensor = torch.zeros(2)
    training = Training({"a": tensor})
    training.step(look=True)
    training.step(look=True)
    training.gradients._leaves = None  # type: ignore[method-assign,assignment]
    assert training.step() == []
    del training.gradients._leaves
    tensor.requires_grad_(True)
    tensor.grad = torch.ones(2)
    assert training.step(look=True) == ["local_extras['0']['a']"]


def test_those_that_an_optimizer_has_as_well_are_its_own() -> None:
    training = Training({})
    extra = training.extras.dicts()["local_extras['0']"]
    extra["weight"] = training.net.weight
    assert [training.step(look=True), training.step()] == [[], []]
    extra["weight"] = leaf(1.0)
    assert training.step() == ["local_extras['0']['weight']"], "by now it is another one"


def test_a_dict_may_get_its_tensor_with_the_checkpoint() -> None:
    here: dict[str, Any] = {}
    again = Training(here)
    regions = {f"{PREFIX}local_extras['0']['a']": region(1.0)}
    again.gradients.refuse(regions)
    here["a"] = torch.zeros(2)
    assert again.gradients.restore(regions) == ()
    assert torch.equal(here["a"].grad, torch.ones(2))
    assert again.step(look=True) == ["local_extras['0']['a']"]


@pytest.mark.parametrize("here", [{}, {"a": leaf(size=3)}])
def test_one_that_fits_no_tensor_is_named(here: dict[str, Any]) -> None:
    again = Training(here)
    (reason,) = again.gradients.restore({f"{PREFIX}local_extras['0']['a']": region(1.0)})
    assert reason == "the saved gradient of local_extras['0']['a'] fits no tensor here"


def test_one_of_a_module_still_has_to_fit() -> None:
    again = Training(judge=nn.Linear(2, 1))
    with pytest.raises(MismatchError, match="judge"):
        again.gradients.refuse({f"{PREFIX}local_extras['judge'].bias": region(1.0)})
