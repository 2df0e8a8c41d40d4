"""Python numbers in an optimizer's state are each rank's own, or it is told that they may differ."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lastwords.checkpoint.entries import LocalEntry, Reason
from lastwords.checkpoint.meta import Marks
from lastwords.optim_wrapper.joined_optimizer import JoinedOptimizer
from lastwords.optim_wrapper.resume import resume
from lastwords.optim_wrapper.state.plain_values import KEPT_MAX, PlainValues
from lastwords.sharding.pieces import Members, UnitTable
from tests import golden


class Polyak(torch.optim.SGD):
    """Keeps Python numbers for each parameter, one of them of this rank's loss."""

    def keep(self, loss: float, count: int = 1) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(loss=loss, count=count, moment=torch.ones(2))


def values_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> PlainValues:
    return PlainValues(optimizer, lambda: dict(net.named_parameters()))


class Rank:
    """What one rank's black box says after each step."""

    def __init__(self, layers: int = 1) -> None:
        self.net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)])
        self.optimizer = Polyak(self.net.parameters(), lr=0.1)
        self.values = values_of(self.net, self.optimizer)
        self.step = 0

    def end(self, loss: float, **more: Any) -> dict[str, Any]:
        self.step += 1
        self.optimizer.keep(loss, **more)
        self.values.list_values()
        return self.again()

    def again(self) -> dict[str, Any]:
        self.values.mark_end(self.step)
        return self.values.members({})


def reasons(*ranks: tuple[str, dict[str, Any]], known: bool = True) -> list[Reason]:
    """For rank 0, out of each rank's kind of copy and document."""
    locals_ = {
        rank: LocalEntry(0, "rank_0/x", (), {"kind": kind, "slot": slot}, True, ())
        for rank, (kind, slot) in enumerate(ranks)
    }
    manifest: Any = SimpleNamespace(locals=locals_, units={}, world_size=1, holders_world_size=1)
    return resume._not_alike(manifest, 0, range(len(ranks)) if known else None)


def test_numbers_of_states_that_belong_to_no_parameter_are_not_mixed_up() -> None:
    rank = Rank()
    keys: list[Any] = ["a", "b"]
    rank.optimizer.state.update({key: {"loss": float(place)} for place, key in enumerate(keys)})
    said = rank.end(3.0)
    rank.optimizer.state["a"]["loss"] = rank.optimizer.state["b"]["loss"] = 7.0
    rank.values.restore(said["numbers"])
    assert [rank.optimizer.state[key]["loss"] for key in keys] == [0.0, 1.0]


def test_numbers_of_states_with_one_name_are_not_kept() -> None:
    rank = Rank()
    rank.optimizer.state.update({frozenset({place}): {"loss": float(place)} for place in range(2)})
    assert rank.end(3.0)["numbers"] == {}, "one's would be put into the other"


def test_numbers_that_are_this_rank_s_own_come_back() -> None:
    one, other = Rank(), Rank()
    said = one.end(0.25), other.end(float("nan"))
    assert reasons(("committed", said[0]), ("committed", said[1])) == []
    fresh = Rank()
    fresh.optimizer.keep(0.25)  # as another rank's checkpoint has it
    fresh.values.restore(said[1]["numbers"])
    values = [state["loss"] for state in fresh.optimizer.state.values()]
    assert [*map(repr, values)] == ["nan", "nan"]
    assert fresh.again()["alike"]["numbers"][1] == said[1]["alike"]["numbers"][1]


@pytest.mark.parametrize(("losses", "told"), [((0.5, 0.5), False), ((0.5, 0.75), True)])
def test_a_copy_of_before_the_update_has_none_and_that_is_told_where_they_differ(
    losses: tuple[float, float], told: bool
) -> None:
    one, other = Rank(), Rank()
    behind, ahead = [rank.end(loss) for rank, loss in zip((one, other), losses, strict=True)]
    if told:
        [reason] = reasons(("tentative", behind), ("tentative", ahead))
        assert str(reason).startswith("rank 0: the optimizer's loss, count may differ between ranks")
    assert bool(reasons(("tentative", behind), ("committed", other.end(0.125)))) == told


def test_in_another_layout_all_ranks_get_one_s_numbers() -> None:
    one, other = (("committed", Rank().end(loss)) for loss in (0.5, 0.75))
    assert reasons(one, other, known=False)


def test_param_groups_that_differ_by_rank_are_told() -> None:
    ranks = [Rank(), Rank()]
    ranks[1].optimizer.param_groups[0]["lr"] = torch.tensor(0.2)
    said = [rank.end(0.5) for rank in ranks]
    [reason] = reasons(("committed", said[0]), ("committed", said[1]))
    golden.says(reason.detail)


def test_ranks_that_hold_other_units_are_not_compared() -> None:
    members = Members()
    table = UnitTable({"replicated": (0, 1, 2, 3), "a": (0, 2), "b": (1, 3)}, {"a": members}, {})
    assert table.holding_the_same(0) == {0, 2}
    said = {rank: Rank().end(float(rank % 2)) for rank in range(4)}
    locals_ = {
        rank: LocalEntry(0, "rank_0/x", (), {"kind": "tentative", "slot": slot}, True, ())
        for rank, slot in said.items()
    }
    manifest: Any = SimpleNamespace(locals=locals_, units={}, world_size=1, holders_world_size=1)
    assert resume._not_alike(manifest, 0, table.holding_the_same(0)) == []
    assert resume._not_alike(manifest, 0) != []


def test_of_many_numbers_others_are_looked_at_in_each_step_and_what_differed_is_remembered() -> None:
    ranks = [Rank(KEPT_MAX), Rank(KEPT_MAX)]
    parameters = [*ranks[1].net.parameters()]
    for step in range(8):
        said = [rank.end(0.5) for rank in ranks]
        assert said[0]["numbers"] == {}, "too many to be kept"
        if step == 1:
            assert said[0]["alike"] == said[1]["alike"]
            for parameter in parameters:
                ranks[1].optimizer.state[parameter]["count"] = 7
            ranks[1].step += 1
            ranks[0].step += 1
            said = [rank.again() for rank in ranks]
    assert said[0]["alike"]["numbers"] != said[1]["alike"]["numbers"]


def test_nothing_is_written_anew_where_nothing_has_moved() -> None:
    net = nn.Linear(2, 2)
    values = values_of(net, torch.optim.AdamW(net.parameters()))
    values.list_values()
    values.mark_end(1)
    values.mark_end(2)
    said = values.members({})
    values.mark_end(3)
    assert values.members({}) is said
    assert "own" in values.members({"own": Marks("x", 1, 1)})["alike"]


def test_numbers_of_several_optimizers_are_told_apart() -> None:
    net = nn.Linear(2, 2)
    parts = [Polyak([net.weight], lr=0.1), Polyak([net.bias], lr=0.1)]
    for value, part in enumerate(parts):
        part.keep(float(value))
    values = values_of(net, JoinedOptimizer(parts))
    values.list_values()
    values.mark_end(1)
    saved = values.members({})["numbers"]
    for part in parts:
        part.keep(9.0)
    values.restore(saved)
    assert [part.state[next(iter(part.state))]["loss"] for part in parts] == [0.0, 1.0]


def test_what_no_other_process_writes_alike_does_not_count() -> None:
    ranks = [Rank(), Rank()]
    for rank, words in zip(ranks, ("ab", "ba"), strict=True):
        rank.optimizer.param_groups[0]["tags"] = set(words)
    assert ranks[0].end(0.5)["alike"]["groups"] == ranks[1].end(0.5)["alike"]["groups"]


NESTED: dict[str, Any] = {
    "list": [0.25, 3],
    "dict of tuples": {"a": (0.25, 1), "b": {3: 4.0}},
    "numpy": np.float64(0.25),
    "deque": deque([1.5], 4),
}


@pytest.mark.parametrize("case", NESTED)
def test_numbers_inside_of_others_are_this_rank_s_own_too(case: str) -> None:
    one, other, fresh = Rank(), Rank(), Rank()
    parameter = next(other.net.parameters())
    other.optimizer.state[parameter]["mine"] = NESTED[case]
    one.optimizer.state[next(one.net.parameters())]["mine"] = type(NESTED[case])()
    said = one.end(0.5), other.end(0.5)
    assert said[0]["alike"]["numbers"] != said[1]["alike"]["numbers"]
    assert reasons(("committed", said[0]), ("committed", said[1])) == []
    first = next(fresh.net.parameters())
    fresh.optimizer.keep(0.5)
    fresh.optimizer.state[first]["mine"] = type(NESTED[case])()
    assert fresh.values.restore(said[1]["numbers"]) == []
    back = fresh.optimizer.state[first]["mine"]
    assert back == NESTED[case]
    assert type(back) is type(NESTED[case])


def test_a_number_whose_key_is_another_one_in_each_step_is_followed() -> None:
    rank, fresh = Rank(), Rank()
    state = rank.optimizer.state[next(rank.net.parameters())]
    state["at 1"] = 0.25
    rank.end(0.5)
    del state["at 1"]
    state["at 2"] = 0.25
    said = rank.again()
    for one in (rank, fresh):
        one.optimizer.keep(0.5)
    fresh.optimizer.state[next(fresh.net.parameters())]["at 2"] = 0.75
    assert fresh.values.restore(said["numbers"]) == []
    assert fresh.optimizer.state[next(fresh.net.parameters())]["at 2"] == 0.25


@pytest.mark.parametrize("key", [7, ("a", 1)])
def test_keys_that_are_no_text_are_no_hindrance(key: Any) -> None:
    one, fresh = Rank(), Rank()
    for rank, value in ((one, 0.25), (fresh, 0.5)):
        rank.optimizer.state[next(rank.net.parameters())] = {key: value}
    said = one.end(0.5)
    fresh.values.restore(said["numbers"])
    assert fresh.optimizer.state[next(fresh.net.parameters())][key] == 0.25


def test_a_number_that_has_no_place_here_is_told() -> None:
    one, fresh = Rank(), Rank()
    one.optimizer.state[next(one.net.parameters())]["mine"] = 3
    said = one.end(0.5)
    fresh.optimizer.keep(0.5)
    [reason] = fresh.values.restore(said["numbers"])
    golden.says(reason)


def test_numbers_among_tensors_are_told_where_they_differ() -> None:
    ranks = [Rank(), Rank()]
    for value, rank in enumerate(ranks):
        rank.optimizer.state[next(rank.net.parameters())]["history"] = [value, torch.ones(2)]
    said = [rank.end(0.5) for rank in ranks]
    [reason] = reasons(("committed", said[0]), ("committed", said[1]))
    golden.says(reason.detail)


HYPERPARAMETERS: dict[str, tuple[Any, Any]] = {
    "dict": ({"a": [1]}, {"a": [2]}),
    "tensor": (torch.ones(3), torch.full((3,), 2.0)),
    "array": (np.ones(3), np.zeros(3)),
    "numpy number": (np.float32(1), np.float32(2)),
    "generator": (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
}


@pytest.mark.parametrize("case", HYPERPARAMETERS)
def test_hyperparameters_of_every_kind_that_differ_by_rank_are_told(case: str) -> None:
    ranks = [Rank(), Rank()]
    for rank, value in zip(ranks, HYPERPARAMETERS[case], strict=True):
        rank.optimizer.param_groups[0]["schedule"] = value
    said = [rank.end(0.5) for rank in ranks]
    [reason] = reasons(("committed", said[0]), ("committed", said[1]))
    golden.says(reason.detail)


def test_what_was_a_number_may_become_a_tensor_and_ends_nothing() -> None:
    """LBFGS' `H_diag` is 1 after its first iteration."""
    rank = Rank()
    rank.end(0.5)
    state = rank.optimizer.state[next(rank.net.parameters())]
    state["loss"] = torch.ones(())
    rank.step += 1
    assert {"loss of 0.weight"}.isdisjoint(rank.again()["numbers"])
    state["loss"] = [torch.ones(2)]
    rank.step += 1
    rank.again()


def test_lists_that_are_reordered_or_grow_after_a_step_s_end_are_named() -> None:
    rank = Rank()
    history = [torch.ones(2), torch.zeros(2)]
    rank.optimizer.state[next(rank.net.parameters())]["history"] = history
    rank.end(0.5)
    assert rank.values.moved() == ([], "")
    history.reverse()
    assert rank.values.moved() == ([], "optimizer's history")
    rank.step += 1
    rank.again()
    assert rank.values.moved() == ([], "")
    history.append(torch.ones(1))
    assert rank.values.moved() == ([], "optimizer's history")


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [(float("nan"), float("nan"), False), (0.0, -0.0, True), (1, True, True), (np.float32(2), np.float32(2), False)],
)
def test_numbers_beside_tensors_are_compared_bit_by_bit(before: Any, after: Any, told: bool) -> None:
    rank = Rank()
    history = [before, torch.ones(2)]
    rank.optimizer.state[next(rank.net.parameters())]["history"] = history
    rank.end(0.5)
    history[0] = after
    assert rank.values.moved() == ([], "optimizer's history" if told else "")


def test_numbers_that_change_after_a_step_s_end_are_known_as_they_were() -> None:
    rank = Rank()
    parameter = next(rank.net.parameters())
    rank.optimizer.state[parameter]["mine"] = [1, 2]
    rank.end(0.5)
    rank.optimizer.state[parameter]["mine"].append(3)
    rank.optimizer.state[parameter]["count"] = 9
    [*known], others = rank.values.moved()
    assert others == ""
    assert [(owner is parameter, key, value) for owner, key, value in known] == [
        (True, "mine", [1, 2]),
        (True, "count", 1),
    ]


def test_a_generator_in_the_state_is_named_where_it_has_drawn_or_differs_by_rank() -> None:
    ranks = [Rank(), Rank()]
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for rank, generator in zip(ranks, generators, strict=True):
        rank.optimizer.state[next(rank.net.parameters())]["noise"] = generator
    said = [rank.end(0.5) for rank in ranks]
    [reason] = reasons(("committed", said[0]), ("committed", said[1]))
    golden.says(reason.detail)
    assert ranks[0].values.moved() == ([], "")
    torch.rand(1, generator=generators[0])
    assert ranks[0].values.moved() == ([], "optimizer's noise")
