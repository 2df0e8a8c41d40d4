"""After a replay of DDP's buckets a resumed run equals the uninterrupted one bit for bit; without it, it does not."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lastwords.checkpoint.meta import BucketRecord
from lastwords.optim_wrapper.ddp import ddp_buckets
from lastwords.optim_wrapper.ddp.ddp_buckets import BucketOrder
from lastwords.optim_wrapper.ddp.ddp_found import buckets_from_log
from lastwords.optim_wrapper.resume.state_restore import RestorePlan
from lastwords.optim_wrapper.state.state_view import UnitView
from tests.integration.forked import on_ranks
from tests.selection import usually

pytestmark = pytest.mark.process

RANKS = 4

# ------------------------------------------------------------------ models


class Crossed(nn.Module):
    """Layers run in another order than they are defined in, so gradients come in an order of their own."""

    def __init__(self, width: int, features: int = 12) -> None:
        super().__init__()
        self.first = nn.Linear(features, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.last = nn.Linear(width, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        for k in (2, 0, 3, 1):
            x = torch.relu(self.layers[k](x)) + x
        out: torch.Tensor = self.last(x)
        return out


class Mixed(nn.Module):
    """Parameters of several types, so that buckets of each fill at their own times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(160, 160).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64) * 5
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


class Shared(nn.Module):
    """For static graphs: a layer whose gradients arrive twice, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 200)
        self.twice = nn.Linear(200, 200)
        self.unused = nn.Linear(50, 50)
        self.more = nn.ModuleList(nn.Linear(200, 200) for _ in range(4))
        self.last = nn.Linear(200, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.twice, x, use_reentrant=True))
        for k in (2, 0, 3, 1):
            x = torch.tanh(self.more[k](x))
        out: torch.Tensor = self.last(x)
        return out


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 12, sparse=True)
        self.body = Crossed(120)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(self.embedding((x.abs()[:, 0] * 7).long() % 30))
        return out


class Part(nn.Module):
    """Every third step leaves a layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Crossed(120)
        self.extra = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return self.extra(out) if x[0, 0] > 0 else out


# ------------------------------------------------------------------ runs


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def replay(model: nn.Module, stored: Any) -> list[str]:
    """With the records as they stand in a file."""
    return ddp_buckets.replay(model, BucketRecord.read(stored))


class Trial:
    """One model on one rank: train it, stop it, build it anew."""

    built = 0

    def __init__(self, make: Callable[[], nn.Module], features: int = 12, accumulate: int = 1, **ddp: Any) -> None:
        self.make, self.features, self.accumulate = make, features, accumulate
        self.hook = ddp.pop("hook", None)
        self.optimizer_of = ddp.pop("optimizer", adam)
        self.ddp = ddp
        self.told = True  # rank 0's order, to the others

    def build(self, seed: int) -> tuple[DistributedDataParallel, torch.optim.Optimizer, BucketOrder]:
        torch.manual_seed(seed)
        model = DistributedDataParallel(self.make(), **self.ddp)
        if self.hook is not None:
            model.register_comm_hook(None, self.hook)
        order = BucketOrder(model)
        Trial.built += 1
        if self.told:
            order.share(dist.distributed_c10d._get_default_store(), f"order/{Trial.built}")
        return model, self.optimizer_of(model.module), order

    def step(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        for part in range(self.accumulate):
            generator = torch.Generator().manual_seed(1000 * number + 10 * part + dist.get_rank())
            x = torch.randn(5, self.features, generator=generator)
            quiet = part + 1 < self.accumulate
            with model.no_sync() if quiet else contextlib.nullcontext():
                model(x).square().mean().backward()
        optimizer.step()

    def bits(self, model: nn.Module) -> list[bytes]:
        return [p.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for p in model.parameters()]

    def whole(self, steps: int, cuts: tuple[int, ...]) -> tuple[list[Any], dict[int, Any]]:
        """All steps' bits, and what is saved at the cuts."""
        model, optimizer, order = self.build(0)
        seen, saved = [], {}
        for number in range(1, steps + 1):
            self.step(model, optimizer, number)
            order.end_step(number)
            seen.append(hash(tuple(self.bits(model))))
            if number in cuts:
                state = UnitView(model, optimizer).state()
                tensors = {s.name: bytes(b() if callable(b) else b) for s, b in state.tensors}
                specs, meta = [s for s, _ in state.tensors], copy.deepcopy(state.meta)
                saved[number] = (json.dumps(order.record(number)), specs, meta, tensors)
        self.last = model, optimizer, order
        return seen, saved

    def resumed(self, saved: Any, cut: int, steps: int, *, replayed: bool = True) -> tuple[list[Any], list[str]]:
        record, specs, meta, tensors = saved
        model, optimizer, order = self.build(1)
        reasons = replay(model, json.loads(record)) if replayed else []
        assert all(p.grad is None for p in model.parameters())
        assert json.loads(json.dumps(order.record(cut))) == json.loads(record) or not replayed
        plan = RestorePlan(UnitView(model, optimizer), specs, meta)
        for spec in specs:
            plan.into(spec)[:] = tensors[spec.name]
        plan.commit()
        seen = []
        for number in range(cut + 1, steps + 1):
            self.step(model, optimizer, number)
            order.end_step(number)
            seen.append(hash(tuple(self.bits(model))))
        self.last = model, optimizer, order
        return seen, reasons


def differing(left: list[Any], right: list[Any]) -> int:
    assert len(left) == len(right)
    return sum(a != b for a, b in zip(left, right, strict=True))


def compare(trial: Trial, cuts: tuple[int, ...], steps: int = 20) -> dict[str, Any]:
    whole, saved = trial.whole(steps, cuts)
    answer: dict[str, Any] = {}
    for cut in cuts:
        answer[f"{cut}"], answer[f"{cut} reasons"] = [
            differing(found, whole[cut:]) if k == 0 else found
            for k, found in enumerate(trial.resumed(saved[cut], cut, steps))
        ]
        again = json.loads(json.dumps(trial.last[2].record(steps)))
        answer[f"{cut} record"] = again["passes"] == json.loads(saved[cut][0])["passes"]
        last = min(cut + 3, steps)  # enough for the control
        answer[f"{cut} without"] = differing(trial.resumed(saved[cut], cut, last, replayed=False)[0], whole[cut:last])
    return answer


def assert_exact(answers: list[dict[str, Any]], cuts: tuple[int, ...]) -> None:
    for answer in answers:
        for cut in cuts:
            assert answer[f"{cut} reasons"] == []
            assert answer[f"{cut}"] == 0, f"{answer[f'{cut}']} steps differ after a cut at step {cut}"


SIZES: dict[str, Callable[[], Trial]] = {
    "small (0.3 MB)": lambda: Trial(lambda: Crossed(130)),
    "medium (4 MB, more than one bucket)": lambda: Trial(lambda: Crossed(500)),
    "large (34 MB, above the 25 MB bucket)": lambda: Trial(lambda: Crossed(1450)),
}


@pytest.mark.parametrize("name", usually(sorted(SIZES), lambda name: "medium" in name))
def test_a_resumed_run_equals_the_uninterrupted_one_for_twenty_steps(name: str, tmp_path: Path) -> None:
    cuts = (1, 7) if "large" not in name else (1,)
    answers = on_ranks(lambda rank: compare(SIZES[name](), cuts), tmp_path)
    assert_exact(answers, cuts)
    for cut in cuts:
        assert all(answer[f"{cut} record"] for answer in answers), "a resumed run records what was replayed"
        # The control: without the replay nearly every step differs.
        assert all(answer[f"{cut} without"] > 0 for answer in answers)


def test_with_three_ranks_the_replay_is_needed_and_enough_and_with_two_it_is_not_needed(tmp_path: Path) -> None:
    for ranks in (3, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        answers = on_ranks(lambda rank: compare(Trial(lambda: Crossed(500)), (2,), steps=8), folder, ranks)
        assert_exact(answers, (2,))
        assert all((answer["2 without"] > 0) is (ranks == 3) for answer in answers)


OPTIONS: dict[str, Callable[[], Trial]] = {
    "gradient_as_bucket_view": lambda: Trial(lambda: Crossed(300), gradient_as_bucket_view=True),
    "no_sync accumulation": lambda: Trial(lambda: Crossed(300), accumulate=3),
    "mixed dtypes": lambda: Trial(Mixed, features=160),
    "small buckets": lambda: Trial(lambda: Crossed(300), bucket_cap_mb=0.2),
    "no buffers broadcast": lambda: Trial(lambda: Crossed(300), broadcast_buffers=False),
    "sparse gradients": lambda: Trial(Sparse, optimizer=sgd),
    "fp16 communication hook": lambda: Trial(lambda: Crossed(300), hook=fp16_compress_hook),
    "static graph": lambda: Trial(lambda: Crossed(300), static_graph=True),
    "static graph, gradients that come twice or never": lambda: Trial(Shared, static_graph=True, optimizer=sgd),
    "static graph, gradient_as_bucket_view": lambda: Trial(
        lambda: Crossed(300), static_graph=True, gradient_as_bucket_view=True
    ),
    "find_unused_parameters": lambda: Trial(Part, find_unused_parameters=True),
}


@pytest.mark.parametrize("name", usually(sorted(OPTIONS), ["static graph", "sparse gradients"]))
def test_every_option_of_ddp_that_claims_to_be_exact_is(name: str, tmp_path: Path) -> None:
    cuts = (1, 2, 4)
    answers = on_ranks(lambda rank: compare(OPTIONS[name](), cuts, steps=7), tmp_path)
    assert_exact(answers, cuts)
    needed = name != "find_unused_parameters"  # its buckets are never rebuilt
    assert all((answer["4 without"] > 0) is needed for answer in answers)


def test_the_hooks_are_gone_after_the_passes_that_count(tmp_path: Path) -> None:
    def body(rank: int) -> list[tuple[int, int]]:
        counts = []
        for static in (False, True):
            trial = Trial(lambda: Crossed(100), static_graph=static)
            model, optimizer, order = trial.build(0)
            before = hooked(model)
            for number in (1, 2):
                trial.step(model, optimizer, number)
                order.end_step(number)
            counts.append((before, hooked(model)))
        return counts

    def hooked(model: nn.Module) -> int:
        return sum(bool(p._post_accumulate_grad_hooks) for p in model.parameters())  # type: ignore[attr-defined]

    for counts in on_ranks(body, tmp_path, 2):
        assert counts == [(12, 0), (12, 0)]


def test_logging_data_that_do_not_show_the_buckets_are_asked_a_few_times_only(tmp_path: Path) -> None:
    def body(rank: int) -> tuple[int, Any, list[str]]:
        trial = Trial(lambda: Crossed(60))
        model, optimizer, order = trial.build(0)
        asked = []

        def silent() -> dict[str, Any]:
            asked.append(1)
            return {"has_rebuilt_buckets": 1}

        model._get_ddp_logging_data = silent  # type: ignore[method-assign]
        for number in range(1, 20):
            trial.step(model, optimizer, number)
            order.end_step(number)
        record = order.record(19)
        return len(asked), record["buckets"], replay(trial.build(1)[0], json.loads(json.dumps(record)))

    assert on_ranks(body, tmp_path, 2) == [(8, None, [])] * 2


def test_where_ranks_disagree_about_the_order_that_of_rank_0_is_recorded_once_ddp_shows_it(tmp_path: Path) -> None:
    class Forked(nn.Module):
        """Two branches whose gradients come in another order on odd ranks."""

        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Linear(12, 300)
            self.right = nn.Linear(12, 300)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if dist.get_rank() % 2:
                return self.left(x).tanh() + self.right(x).sigmoid()  # type: ignore[no-any-return]
            return self.right(x).sigmoid() + self.left(x).tanh()  # type: ignore[no-any-return]

    def body(rank: int) -> Any:
        trial = Trial(Forked)
        trial.told = False
        whole, saved = trial.whole(8, (1, 5))
        mine = saved[1][0], saved[5][0]
        found, reasons = trial.resumed(saved[5], 5, 8)
        return mine, differing(found, whole[5:]), reasons, buckets_from_log(trial.last[0])

    answers = on_ranks(body, tmp_path)
    early = [json.loads(answer[0][0])["passes"] for answer in answers]
    late = [json.loads(answer[0][1]) for answer in answers]
    assert early[0] != early[1], "the ranks must disagree for this test to mean anything"
    assert all(record["passes"] == early[0] for record in late)
    assert all(record["buckets"] == answer[3] for record, answer in zip(late, answers, strict=True))
    assert [answer[1] for answer in answers] == [0] * RANKS
    assert all(answer[2] == [] for answer in answers)


def test_what_cannot_be_exact_says_why(tmp_path: Path) -> None:
    def body(rank: int) -> dict[str, list[str]]:
        trial = Trial(lambda: Crossed(100))
        _, saved = trial.whole(4, (4,))
        record = json.loads(saved[4][0])
        answer: dict[str, list[str]] = {"rebuilt before": replay(trial.last[0], record)}

        def fresh(**ddp: Any) -> DistributedDataParallel:
            return Trial(lambda: Crossed(100), **ddp).build(1)[0]

        answer["static"] = replay(fresh(static_graph=True), record)
        answer["unused"] = replay(fresh(find_unused_parameters=True), record)
        answer["buckets"] = replay(fresh(bucket_cap_mb=0.01), record)
        answer["damaged"] = replay(fresh(), {**record, "passes": [[77]]})
        answer["no ddp there"] = replay(fresh(), {})
        answer["no ddp here"] = replay(Crossed(100), record)
        answer["neither"] = replay(Crossed(100), {})
        model = DistributedDataParallel(Crossed(100))
        model.register_comm_hook({"error": 0}, lambda state, bucket: fp16_compress_hook(None, bucket))
        answer["stateful hook"] = BucketOrder(model).reasons
        froze = Trial(lambda: Crossed(100))
        wrapped = froze.make()
        wrapped.last.bias.requires_grad_(False)  # type: ignore[union-attr]
        answer["frozen"] = replay(DistributedDataParallel(wrapped), record)
        gone = fresh()
        observed = BucketOrder(gone)
        answer["fine"] = observed.reasons
        del gone.find_unused_parameters
        answer["gone"] = BucketOrder(gone).reasons
        return answer

    expected = {
        "rebuilt before": "before resume()",
        "static": "static_graph=True here",
        "unused": "find_unused_parameters=True here",
        "buckets": "bucket 0 differs",
        "damaged": "damaged",
        "no ddp there": "did not use",
        "no ddp here": "this run does not",
        "stateful hook": "has its own state",
        "frozen": "requires_grad",
        "gone": "has no DistributedDataParallel.find_unused_parameters",
    }
    for answer in on_ranks(body, tmp_path, 2):
        assert answer.pop("neither") == []
        assert answer.pop("fine") == []
        assert answer.keys() == expected.keys()
        for key, text in expected.items():
            assert len(answer[key]) == 1
            assert text in answer[key][0], key


def test_a_record_can_be_taken_while_a_collective_hangs_in_ddp(tmp_path: Path) -> None:
    """Rank 1 stays away from the all-reduce; rank 0's side thread takes the record within a bounded time."""

    def body(rank: int) -> bool:
        import threading

        trial = Trial(lambda: Crossed(100))
        model, optimizer, order = trial.build(0)
        for number in (1, 2, 3, 4):
            trial.step(model, optimizer, number)
            order.end_step(number)
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["taken"])
            trial.step(model, optimizer, 5)
            return True
        got: list[Any] = []
        begun = threading.Event()

        def take() -> None:
            begun.wait()
            got.append(order.record(4))
            store.set("taken", "1")

        thread = threading.Thread(target=take)
        thread.start()
        begun.set()
        trial.step(model, optimizer, 5)
        thread.join()
        return bool(got and got[0]["buckets"])

    assert on_ranks(body, tmp_path, 2) == [True, True]
