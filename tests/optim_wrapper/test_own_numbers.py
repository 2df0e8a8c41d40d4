"""Python numbers in an optimizer's state are each rank's own, or it is told that they may differ."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lastwords.checkpoint.entries import LocalEntry
from lastwords.checkpoint.reason import Reason
from lastwords.optim_wrapper.joined_optimizer import JoinedOptimizer
from lastwords.optim_wrapper.resume import resume
from lastwords.optim_wrapper.state.own_numbers import KEPT_MAX, OwnNumbers
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.sharding.pieces import Members, UnitTable


class Polyak(torch.optim.SGD):
    """Keeps Python numbers for each parameter, one of them of this rank's loss."""

    def keep(self, loss: float, count: int = 1) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(loss=loss, count=count, moment=torch.ones(2))


class Rank:
    """What one rank's black box says after each step."""

    def __init__(self, layers: int = 1) -> None:
        self.net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)])
        self.optimizer = Polyak(self.net.parameters(), lr=0.1)
        self.numbers = OwnNumbers(UnitView(self.net, self.optimizer))
        self.step = 0

    def end(self, loss: float, **more: Any) -> dict[str, Any]:
        self.step += 1
        self.optimizer.keep(loss, **more)
        self.numbers.look()
        return self.again()

    def again(self) -> dict[str, Any]:
        self.numbers.take(self.step)
        said: dict[str, Any] = json.loads(b"{" + self.numbers.members({})[1:] + b"}")
        return said


def reasons(*ranks: tuple[str, dict[str, Any]], known: bool = True) -> list[Reason]:
    """For rank 0, out of each rank's kind of copy and document."""
    locals_ = {
        rank: LocalEntry(0, "rank_0/x", (), {"kind": kind, "slot": slot}, True, ())
        for rank, (kind, slot) in enumerate(ranks)
    }
    manifest: Any = SimpleNamespace(locals=locals_)
    return resume._not_alike(manifest, 0, range(len(ranks)) if known else None)


def test_numbers_of_states_that_belong_to_no_parameter_are_not_mixed_up() -> None:
    rank = Rank()
    keys: list[Any] = ["a", "b"]
    rank.optimizer.state.update({key: {"loss": float(place)} for place, key in enumerate(keys)})
    said = rank.end(3.0)
    rank.optimizer.state["a"]["loss"] = rank.optimizer.state["b"]["loss"] = 7.0
    rank.numbers.restore(said["numbers"])
    assert [rank.optimizer.state[key]["loss"] for key in keys] == [0.0, 1.0]


def test_numbers_of_states_with_one_name_are_not_kept() -> None:
    rank = Rank()
    rank.optimizer.state.update({frozenset({place}): {"loss": float(place)} for place in range(2)})
    assert "numbers" not in rank.end(3.0), "one's would be put into the other"


def test_numbers_that_are_this_rank_s_own_come_back() -> None:
    one, other = Rank(), Rank()
    said = one.end(0.25), other.end(float("nan"))
    assert reasons(("committed", said[0]), ("committed", said[1])) == []
    fresh = Rank()
    fresh.optimizer.keep(0.25)  # as another rank's checkpoint has it
    fresh.numbers.restore(said[1]["numbers"])
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
        assert str(reason).startswith("rank 0: the optimizer's loss, count may differ from rank to rank")
    assert bool(reasons(("tentative", behind), ("committed", other.end(0.125)))) == told


def test_in_another_layout_all_ranks_get_one_s_numbers() -> None:
    one, other = (("committed", Rank().end(loss)) for loss in (0.5, 0.75))
    assert reasons(one, other, known=False)


def test_param_groups_that_differ_by_rank_are_told() -> None:
    ranks = [Rank(), Rank()]
    ranks[1].optimizer.param_groups[0]["lr"] = torch.tensor(0.2)
    said = [rank.end(0.5) for rank in ranks]
    [reason] = reasons(("committed", said[0]), ("committed", said[1]))
    assert "the optimizer's param_groups" in reason.detail


def test_ranks_that_hold_other_units_are_not_compared() -> None:
    members = Members()
    table = UnitTable({"replicated": (0, 1, 2, 3), "a": (0, 2), "b": (1, 3)}, {"a": members}, {})
    assert table.holding_the_same(0) == {0, 2}
    said = {rank: Rank().end(float(rank % 2)) for rank in range(4)}
    locals_ = {
        rank: LocalEntry(0, "rank_0/x", (), {"kind": "tentative", "slot": slot}, True, ())
        for rank, slot in said.items()
    }
    manifest: Any = SimpleNamespace(locals=locals_)
    assert resume._not_alike(manifest, 0, table.holding_the_same(0)) == []
    assert resume._not_alike(manifest, 0) != []


def test_of_many_numbers_others_are_looked_at_in_each_step_and_what_differed_is_remembered() -> None:
    ranks = [Rank(KEPT_MAX), Rank(KEPT_MAX)]
    parameters = [*ranks[1].net.parameters()]
    for step in range(8):
        said = [rank.end(0.5) for rank in ranks]
        assert "numbers" not in said[0], "too many to be kept"
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
    numbers = OwnNumbers(UnitView(net, torch.optim.AdamW(net.parameters())))
    numbers.look()
    numbers.take(1)
    numbers.take(2)
    said = numbers.members({})
    numbers.take(3)
    assert numbers.members({}) is said
    assert b"own" in numbers.members({"own": ["x", 1, 1]})


def test_numbers_of_several_optimizers_are_told_apart() -> None:
    net = nn.Linear(2, 2)
    parts = [Polyak([net.weight], lr=0.1), Polyak([net.bias], lr=0.1)]
    for value, part in enumerate(parts):
        part.keep(float(value))
    numbers = OwnNumbers(UnitView(net, JoinedOptimizer(parts)))
    numbers.look()
    numbers.take(1)
    saved = numbers.values()
    for part in parts:
        part.keep(9.0)
    numbers.restore(saved)
    assert [part.state[next(iter(part.state))]["loss"] for part in parts] == [0.0, 1.0]


def test_what_no_other_process_writes_alike_does_not_count() -> None:
    ranks = [Rank(), Rank()]
    for rank, words in zip(ranks, ("ab", "ba"), strict=True):
        rank.optimizer.param_groups[0]["tags"] = set(words)
    assert ranks[0].end(0.5)["alike"]["groups"] == ranks[1].end(0.5)["alike"]["groups"]
