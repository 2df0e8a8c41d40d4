"""One wrong bit on one rank is found and named, and sound replicas are left alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.part import UnitState
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.tensors import tensor_bytes
from lastwords.optim_wrapper.tensors.tensor_bytes import source_of, spec_of
from lastwords.sharding.verify import compare, digest_units, exchange, exchange_digests


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(x)).relu())
        return out


Replica = tuple[Net, torch.optim.Optimizer]


def replica(steps: int = 2) -> Replica:
    """The same state each time."""
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 6)).square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return net, optimizer


def digests_of(replicas: list[Replica]) -> dict[int, dict[str, dict[str, int]]]:
    return {rank: digest_units([UnitView(net, optimizer)]) for rank, (net, optimizer) in enumerate(replicas)}


def flip_bit(tensor: torch.Tensor, bit: int = 0) -> None:
    """The lowest bit of the middle element: nobody would see it in a loss."""
    plain = tensor.detach().view(-1)
    raw = plain[plain.numel() // 2 : plain.numel() // 2 + 1].view(torch.uint8)
    raw[0] ^= 1 << bit


# ---------------------------------------------------------------------- digests


def test_sound_replicas_have_equal_digests() -> None:
    assert compare(digests_of([replica() for _ in range(3)])) == []


def test_one_flipped_bit_in_one_moment_of_one_rank_is_found_and_named() -> None:
    replicas = [replica() for _ in range(3)]
    net, optimizer = replicas[1]
    flip_bit(optimizer.state[net.last.weight]["exp_avg_sq"])
    (found,) = compare(digests_of(replicas))
    assert (found.suspects, found.certain, found.count) == ((1,), True, 1)
    assert found.tensor == "unit/replicated/optim/last.weight/exp_avg_sq"


def every_tensor(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {f"unit/replicated/model/{name}": parameter for name, parameter in net.named_parameters()}
    tensors |= {f"unit/replicated/buffer/{name}": buffer for name, buffer in net.named_buffers()}
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"unit/replicated/optim/{name}/{key}"] = value
    return tensors


def test_a_flipped_bit_is_found_wherever_it_is() -> None:
    names = list(every_tensor(*replica()))
    assert len(names) == 6 + 3 + 18
    for name in names:
        wrong = replica()
        flip_bit(every_tensor(*wrong)[name], bit=3)
        (found,) = compare(digests_of([replica(), wrong, replica()]))
        assert (found.tensor, found.suspects) == (name, (1,))


def test_the_first_tensor_in_the_model_is_named_state_before_later_weights() -> None:
    wrong = replica()
    for tensor in (wrong[0].last.weight, wrong[1].state[wrong[0].first.weight]["exp_avg"]):
        flip_bit(tensor)
    (found,) = compare(digests_of([replica(), wrong]))
    assert (found.tensor, found.count) == ("unit/replicated/optim/first.weight/exp_avg", 2)


def test_minus_zero_and_zero_are_different_bits_and_two_equal_nans_are_not() -> None:
    """Bytes are compared, not numbers."""

    def digest(value: float) -> Any:
        return digest_units([One(torch.tensor([value]))])

    assert digest(0.0) != digest(-0.0)
    assert digest(float("nan")) == digest(float("nan"))


def test_form_and_type_belong_to_the_digest() -> None:
    zeros = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(0), torch.zeros(0, 4)]
    assert len({digest_units([One(tensor)])["u"]["unit/u/model/w"] for tensor in zeros}) == len(zeros)


class One:
    """A view of a unit with one tensor."""

    unit = "u"

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def state(self) -> UnitState:
        return UnitState([(spec_of("unit/u/model/w", self._tensor), source_of(self._tensor))])


def test_a_tensor_in_c_order_is_hashed_where_it_lies_and_another_one_through_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[torch.Size] = []
    staged = tensor_bytes.staged_bytes
    monkeypatch.setattr(tensor_bytes, "staged_bytes", lambda tensor: (copied.append(tensor.shape), staged(tensor))[1])
    plain = torch.arange(12.0).view(3, 4)
    turned = torch.arange(12.0).view(3, 4).t().contiguous().t()
    assert digest_units([One(plain)]) == digest_units([One(turned)]), "the same elements"
    assert copied == [torch.Size((3, 4))]


def test_units_of_a_rank_are_digested_each_for_itself() -> None:
    class Other(One):
        unit = "v"

        def state(self) -> UnitState:
            return UnitState([(TensorSpec("unit/v/model/w", "F32", (1,)), b"abcd")])

    digests = digest_units([One(torch.ones(1)), Other(torch.ones(1))])
    assert {unit: list(tensors) for unit, tensors in digests.items()} == {
        "u": ["unit/u/model/w"],
        "v": ["unit/v/model/w"],
    }


# ---------------------------------------------------------------------- exchange

Body = Callable[[int, Callable[[Any], list[Any]]], Any]


def on_threads(ranks: int, body: Body) -> tuple[list[Any], int]:
    """What body(rank, all_gather) returns on each rank, and how many rounds it took."""
    barrier = threading.Barrier(ranks)
    rounds: list[dict[int, Any]] = []

    def run(rank: int) -> Any:
        mine = 0

        def all_gather(value: Any) -> list[Any]:
            nonlocal mine
            if barrier.wait(60) == 0:
                rounds.append({})
            barrier.wait(60)
            rounds[mine][rank] = value
            barrier.wait(60)
            mine += 1
            return [rounds[mine - 1][other] for other in range(ranks)]

        return body(rank, all_gather)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks))), len(rounds)


def exchanged(digests: Mapping[int, Any]) -> tuple[list[Any], int]:
    return on_threads(len(digests), lambda rank, gather: exchange(gather, rank, digests[rank]))


def test_ranks_that_agree_need_one_round_and_get_no_details() -> None:
    same = {"a": {"unit/a/model/w": 1}}
    assert exchanged({0: same, 1: same, 2: {"b": {"unit/b/model/w": 5}}, 3: {}}) == ([{}] * 4, 1)


def test_only_units_that_differ_are_told_in_detail_and_every_rank_gets_the_same() -> None:
    sound = {"unit/a/model/w": 1, "unit/a/model/v": 2}
    digests = {rank: {"a": sound, "b": {"unit/b/model/w": 3}} for rank in range(3)}
    digests[3] = {"b": {"unit/b/model/w": 4}}
    answers, rounds = exchanged(digests)
    assert rounds == 2
    assert answers == [{rank: {"b": digests[rank]["b"]} for rank in range(4)}] * 4
    (found,) = compare(answers[0])
    assert (found.unit, found.suspects) == ("b", (3,))


def test_the_order_of_a_units_tensors_is_no_difference() -> None:
    one, other = {"unit/a/model/w": 1, "unit/a/model/v": 2}, {"unit/a/model/v": 2, "unit/a/model/w": 1}
    assert exchanged({0: {"a": one}, 1: {"a": other}}) == ([{}] * 2, 1)


def test_two_tensors_with_swapped_bytes_are_a_difference() -> None:
    one, other = {"unit/a/model/w": 1, "unit/a/model/v": 2}, {"unit/a/model/w": 2, "unit/a/model/v": 1}
    answers, _ = exchanged({0: {"a": one}, 1: {"a": other}})
    assert compare(answers[0])[0].count == 2


def test_a_job_of_one_has_nobody_to_compare_with() -> None:
    assert exchange_digests(None, {"a": {"unit/a/model/w": 1}}) == {}


# ---------------------------------------------------------------------- tensor parallelism


class Part(nn.Module):
    """One rank of a two-part tensor-parallel block: the norm is whole on every rank, the matrices are halves."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        generator = torch.Generator().manual_seed(7)
        whole = torch.randn(2, 2, 6, 8, generator=generator) / 3
        self.up = nn.Parameter(whole[tp, 0].clone())
        self.down = nn.Parameter(whole[tp, 1].t().contiguous())

    def partial(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden @ self.up.t()).relu() @ self.down.t()


def train_dp2_tp2(seed_of: Callable[[int, int], int], steps: int = 3) -> dict[int, dict[str, dict[str, int]]]:
    """Digests of four ranks, rank = 2 dp + tp, after some steps; all-reduces are sums in rank order.

    seed_of(dp, tp) seeds the dropout behind the norm.
    """
    places = [(dp, tp) for dp in range(2) for tp in range(2)]
    parts = {place: Part(place[1]) for place in places}
    optimizers = {place: torch.optim.AdamW(part.parameters(), 1e-2) for place, part in parts.items()}
    masks = {place: torch.Generator().manual_seed(seed_of(*place)) for place in places}
    batches = torch.Generator().manual_seed(3)
    for _ in range(steps):
        for dp in range(2):
            x = torch.randn(4, 8, generator=batches)
            normed, hidden, partials = {}, {}, {}
            for tp in range(2):
                part = parts[dp, tp]
                mask = torch.rand(4, 8, generator=masks[dp, tp]) > 0.3
                normed[tp] = part.norm(x) * mask
                hidden[tp] = normed[tp].detach().requires_grad_()
                partials[tp] = part.partial(hidden[tp])
            (partials[0] + partials[1] - x).square().mean().backward()
            gradient = hidden[0].grad + hidden[1].grad  # type: ignore[operator]  # the all-reduce of the backward pass
            for tp in range(2):
                normed[tp].backward(gradient)
        for tp in range(2):
            for one, other in zip(parts[0, tp].parameters(), parts[1, tp].parameters(), strict=True):
                mean = (one.grad + other.grad) / 2  # type: ignore[operator]
                one.grad, other.grad = mean, mean.clone()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    digests = {}
    for rank, (dp, tp) in enumerate(places):
        everything = digest_units([UnitView(parts[dp, tp], optimizers[dp, tp])])["replicated"]
        norm = {name: digest for name, digest in everything.items() if "norm." in name}
        rest = {name: digest for name, digest in everything.items() if name not in norm}
        digests[rank] = {"replicated": norm, f"tp{tp}": rest}
    return digests


def test_dropout_seeded_by_data_parallel_index_keeps_what_tensor_parallelism_replicates_equal() -> None:
    """Negative control for the one below."""
    assert compare(train_dp2_tp2(lambda dp, tp: dp)) == []


def test_dropout_seeded_by_rank_is_found_in_the_norm_that_tensor_parallelism_replicates() -> None:
    found = compare(train_dp2_tp2(lambda dp, tp: 2 * dp + tp))
    assert [item.unit for item in found] == ["replicated"], "every check along data parallel alone is clean"
    assert found[0].tensor == "unit/replicated/model/norm.weight"
    assert found[0].camps == ((0, 2), (1, 3))
    assert "dropout" in str(found[0])
