"""Several optimizers: one update a step, one state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lastwords.errors import ConfigError
from lastwords.optim_wrapper.joined_optimizer import JoinedOptimizer, optimizer_kind, order_state
from lastwords.optim_wrapper.several_optimizers import SeveralOptimizers
from lastwords.optim_wrapper.wrapper import OptTFTWrapper


class Around:
    def __init__(self) -> None:
        self.words: list[str] = []

    def begin_update(self) -> None:
        self.words.append("begin")

    def end_update(self) -> None:
        self.words.append("end")

    def tear_update(self) -> None:
        self.words.append("tear")


def _pair() -> tuple[nn.Linear, nn.Linear, OptTFTWrapper, OptTFTWrapper]:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    for module in (first, second):
        module(torch.ones(2, 3)).sum().backward()
    return (
        first,
        second,
        OptTFTWrapper(torch.optim.AdamW(first.parameters(), lr=0.1)),
        OptTFTWrapper(torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)),
    )


def _attached(*wrappers: OptTFTWrapper) -> tuple[Around, SeveralOptimizers]:
    around = Around()
    several = SeveralOptimizers(around, len(wrappers))
    for number, wrapper in enumerate(wrappers):
        wrapper.attach(several.hooks(number))
    return around, several


def test_an_update_lasts_from_the_first_optimizer_to_the_last() -> None:
    _, _, one, two = _pair()
    around, several = _attached(one, two)
    for _ in range(3):
        one.step()
        assert around.words == ["begin"]
        two.step()
        assert around.words == ["begin", "end"]
        several.end_step()
        assert around.words == ["begin", "end"]
        around.words.clear()


def test_an_optimizer_that_comes_only_now_and_then_never_finds_the_update_over() -> None:
    """A critic in every step, a generator in every fifth: nothing is concluded from the steps before."""
    _, _, one, two = _pair()
    around, several = _attached(one, two)
    for step in range(1, 11):
        one.step()
        assert around.words == ["begin"], "whether the other one still comes is not known"
        if step % 5 == 0:
            two.step()
            assert around.words == ["begin", "end"]
        several.end_step()
        assert around.words == ["begin", "end"]
        around.words.clear()


def test_an_optimizer_that_raises_tears_the_update_of_all() -> None:
    _, _, one, two = _pair()
    around, _ = _attached(one, two)
    one.step()
    two.param_groups[0]["lr"] = "no number"
    with pytest.raises(TypeError):
        two.step()
    assert around.words == ["begin", "tear"]


def test_the_joined_state_is_that_of_the_parts() -> None:
    first, second, one, two = _pair()
    one.step()
    two.step()
    joined = JoinedOptimizer([one.inner, two.inner])
    assert [len(group["params"]) for group in joined.param_groups] == [2, 2]
    assert set(joined.state) == {*first.parameters(), *second.parameters()}
    assert joined.state[second.weight] is two.inner.state[second.weight]
    joined.state[first.weight] = {"here": 1}
    assert one.inner.state[first.weight] == {"here": 1}
    del joined.state[second.bias]
    assert second.bias not in two.inner.state
    assert optimizer_kind(joined) == "AdamW+SGD"


def test_looking_for_the_state_of_a_parameter_makes_none() -> None:
    first, _, one, two = _pair()
    joined = JoinedOptimizer([one.inner, two.inner])
    assert joined.state.get(first.weight) is None
    assert len(one.inner.state) == 0


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    first, _, one, _ = _pair()
    with pytest.raises(ConfigError, match="share a parameter"):
        JoinedOptimizer([one.inner, torch.optim.SGD(first.parameters(), lr=0.1)])


def test_state_is_put_into_the_order_of_the_parameters_whichever_unit_came_first() -> None:
    """A loop may add up what is in it: other bits in another order."""
    layers = [nn.Linear(1, 1), nn.Linear(1, 1)]
    parts = [torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9) for layer in layers]
    for layer, part in zip(layers, parts, strict=True):
        part.state["own"] = {"count": 1}
        for parameter in [layer.bias, layer.weight]:
            part.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    before = [dict(part.state) for part in parts]
    order_state(JoinedOptimizer(parts))
    for layer, part, was in zip(layers, parts, before, strict=True):
        assert [*map(id, part.state)] == [id(layer.weight), id(layer.bias), id("own")]
        assert all(part.state[key] is value for key, value in was.items())
