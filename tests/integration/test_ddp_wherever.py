"""A DDP that the registered model does not show is recorded and replayed like one that is the whole model."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from lastwords.checkpoint.entries import facts_problem
from lastwords.checkpoint.meta import BucketRecord
from lastwords.optim_wrapper.ddp import ddp_order
from lastwords.optim_wrapper.ddp.ddp_buckets import BucketOrder, replay
from tests import golden
from tests.integration.ddp_jobs import (
    Job,
    MadeLater,
    OtherOrder,
    Replicated,
    SharedTrunk,
    TheInnerOne,
    TwoAndOneRegistered,
    TwoInAModule,
    batch,
)
from tests.integration.forked import on_ranks
from tests.selection import usually

pytestmark = pytest.mark.process

RANKS = 3
STEPS = 5


class Watched:
    """A job whose DDPs are recorded. told: rank 0's order is, to the others."""

    made = 0

    def __init__(self, make: type[Job], seed: int, *, told: bool = True) -> None:
        self.job = make(seed)
        self.order = BucketOrder(self.job.registered(), self.job.trained)
        Watched.made += 1
        if told:
            self.order.share(dist.distributed_c10d._get_default_store(), f"order/{Watched.made}")
        if self.job.late:
            self.job.wrap()

    def train(self, step: int) -> None:
        self.job.train(step)
        self.order.end_step(step)

    def record(self, step: int | None = None) -> Any:
        return json.loads(json.dumps(self.order.record(step)))

    def replay(self, record: Any) -> list[str]:
        return replay(self.job.registered(), BucketRecord.read(record), self.job.trained)


# Jobs like these are killed in the zoo: tests/zoo/recipes_ddp.py.
JOBS = [TwoInAModule, TwoAndOneRegistered, TheInnerOne, MadeLater, Replicated]


def cut(make: type[Job], at: int, *, replayed: bool) -> tuple[int, list[str], int]:
    """How many steps after a cut at step `at` differ, the reasons, and how many DDPs the record has."""
    whole, seen = Watched(make, 0), {}
    for step in range(1, STEPS + 1):
        whole.train(step)
        seen[step] = whole.job.bits()
        if step == at:
            state, record = whole.job.state(), whole.record(at)
            assert facts_problem({"buckets": record}) is None
    again = Watched(make, 1)
    reasons = again.replay(record) if replayed else []
    again.job.restore(state)
    different = 0
    for step in range(at + 1, STEPS + 1):
        again.train(step)
        different += again.job.bits() != seen[step]
    return different, reasons, len(record.get("ddps", [record]))


@pytest.mark.parametrize("make", usually(JOBS, (TwoInAModule, MadeLater)))
def test_its_resumed_run_equals_the_uninterrupted_one_and_without_a_replay_it_does_not(
    make: type[Job], tmp_path: Path
) -> None:
    def body(_: int) -> list[Any]:
        found: list[Any] = [cut(make, at, replayed=True) for at in (1, 3)]
        return [*found, cut(make, 3, replayed=False)[0]]

    for first, later, without in on_ranks(body, tmp_path, RANKS):
        count = 1 + issubclass(make, TwoInAModule)
        assert first == later == (0, [], count)
        assert without > 0


def test_a_ddp_of_the_saved_run_that_is_not_there_yet_is_named(tmp_path: Path) -> None:
    def body(_: int) -> tuple[list[str], list[str]]:
        whole = Watched(TwoInAModule, 0)
        for step in (1, 2):
            whole.train(step)
        alone, lone, pair = Watched(TheInnerOne, 1), Watched(TheInnerOne, 2), Watched(TwoInAModule, 3)
        return alone.replay(whole.record(2)), pair.replay(lone.record())

    for fewer, more in on_ranks(body, tmp_path, 2):
        assert len(fewer) == 1
        assert "before resume()" in fewer[0]
        assert "first.weight" in fewer[0]
        assert len(more) == 1
        assert "had no DistributedDataParallel around first.weight" in more[0]


def test_what_a_pass_without_gradients_leaves_is_saved_and_put_back(tmp_path: Path) -> None:
    """The next forward pass of the uninterrupted run does not hand rank 0's buffers round."""

    def body(rank: int) -> tuple[Any, Any, float, float]:
        def made(seed: int) -> tuple[Any, BucketOrder]:
            torch.manual_seed(seed)
            model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4)))
            order = BucketOrder(model)
            order.share(dist.distributed_c10d._get_default_store(), f"order/{seed}")
            return model, order

        model, order = made(0)
        for step in (1, 2):
            model(batch(step)).sum().backward()
        with torch.no_grad():
            model(batch(3))
        order.end_step(2)
        record, state = json.loads(json.dumps(order.record(2))), copy.deepcopy(model.module.state_dict())
        model(batch(4))
        expected = model.module[1].running_mean.clone()
        found = []
        for put_back in (True, False):
            again, _ = made(1)
            reasons = replay(again, BucketRecord.read(record if put_back else {**record, "synced": {}}))
            again.module.load_state_dict(state)
            again(batch(4))
            found.append(float((again.module[1].running_mean - expected).abs().max()))
        return record["synced"], reasons, found[0], found[1]

    answers = on_ranks(body, tmp_path, RANKS)
    assert all(answer[:3] == ({"forward": False, "backward": True}, [], 0.0) for answer in answers)
    assert [answer[3] > 0 for answer in answers] == [False, True, True], "without the flag ranks 1 and 2 differ"


def test_rank_0s_order_is_recorded_by_all_from_the_first_step_on(tmp_path: Path) -> None:
    def body(rank: int) -> tuple[Any, Any, Any]:
        found = []
        for told in (True, False):
            job = Watched(OtherOrder, 0, told=told)
            job.train(1)
            found.append(job.record(1))
            job.order.close()
        return found[0], found[1], cut_with_record_of(1, told=True)

    answers = on_ranks(body, tmp_path, RANKS)
    told, untold = [answer[0] for answer in answers], [answer[1] for answer in answers]
    assert all(one["passes"] == told[0]["passes"] and one["unconfirmed"] == "" for one in told)
    assert untold[1]["passes"] != untold[0]["passes"], "the ranks must disagree for this test to mean anything"
    assert [bool(one["unconfirmed"]) for one in untold] == [False, True, True]
    assert [answer[2] for answer in answers] == [(0, [])] * RANKS


def cut_with_record_of(rank: int, *, told: bool) -> tuple[int, list[str]]:
    """As `cut` after step 1, and all ranks resume with the record that this rank has written."""
    whole, seen = Watched(OtherOrder, 0, told=told), {}
    for step in range(1, STEPS + 1):
        whole.train(step)
        seen[step] = whole.job.bits()
        if step == 1:
            state, record = whole.job.state(), [whole.record(1)]
    dist.broadcast_object_list(record, src=rank)
    again = Watched(OtherOrder, 1)
    reasons = again.replay(record[0])
    again.job.restore(state)
    different = 0
    for step in range(2, STEPS + 1):
        again.train(step)
        different += again.job.bits() != seen[step]
    return different, reasons


def test_without_the_store_a_wrong_order_is_told(tmp_path: Path) -> None:
    """Negative control of the one above: rank 1's own order is not what the others' sums follow."""

    def body(_: int) -> tuple[int, list[str]]:
        return cut_with_record_of(1, told=False)

    for different, reasons in on_ranks(body, tmp_path, RANKS):
        assert different > 0
        assert len(reasons) == 1
        assert "had not arrived" in reasons[0]


def test_two_ddps_that_begin_with_the_same_layer_have_an_order_each(tmp_path: Path) -> None:
    def body(_: int) -> Any:
        job = Watched(SharedTrunk, 0)
        for net in job.job.nets[1:]:
            net.turn = -net.turn if dist.get_rank() else 1  # its layers run in yet another order
        job.train(1)
        return job.record(1)["ddps"], [board._key for board in job.order._boards]

    records, keys = zip(*on_ranks(body, tmp_path, RANKS), strict=True)
    assert [*keys] == [keys[0]] * RANKS
    assert len({*keys[0]}) == 2, "under one key, the slower of the two would have the other's order"
    first, second = ([one["passes"] for one in record] for record in zip(*records, strict=True))
    assert first == [first[0]] * RANKS
    assert second == [second[0]] * RANKS
    assert first[0] != second[0]
    assert not any(one["unconfirmed"] for record in records for one in record)


def test_once_ddp_shows_its_buckets_their_order_is_recorded_even_where_each_is_sorted(tmp_path: Path) -> None:
    """Every bucket has one parameter, so each rank's own order fits each bucket, but not the order of the buckets."""

    def body(_: int) -> Any:
        class Tiny(OtherOrder):
            def wrap(self) -> None:
                self.called = [DistributedDataParallel(net, bucket_cap_mb=1e-5) for net in self.nets]

        job = Watched(Tiny, 0, told=False)
        for step in range(1, 5):
            job.train(step)
        return job.record(4)

    records = on_ranks(body, tmp_path, RANKS)
    assert all(one["buckets"] for one in records)
    assert all(one["passes"] == records[0]["passes"] and not one["unconfirmed"] for one in records)


def test_a_store_that_never_answers_keeps_nobody_waiting(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        board = ddp_order.OrderBoard(dist.distributed_c10d._get_default_store(), "nobody writes", writes=False)
        board.exchange([[0]])
        found = board.found(0.01)
        board.close()
        return found

    assert on_ranks(body, tmp_path, 2) == [None, None]


def test_that_ranks_may_end_at_different_steps_is_said_once(tmp_path: Path) -> None:
    def body(_: int) -> list[list[str]]:
        said: list[list[str]] = []
        for joined in (lambda ddps: nullcontext(), Join, partial(Join, throw_on_early_termination=True)):
            one, heard = Watched(TheInnerOne, 0), list[str]()
            [order] = one.order._orders
            with patch.object(ddp_order._log, "warning", heard.append), joined([order.ddp]):
                for step in (1, 2, 3, 4):
                    one.order.end_step(step)
            said.append(heard)
        return said

    for plain, joined, all_at_once in on_ranks(body, tmp_path, 2):
        assert (plain, all_at_once) == ([], [])
        golden.says(joined)
        assert len(joined) == 1


def test_of_two_around_the_same_that_is_recorded_which_the_loop_calls(tmp_path: Path) -> None:
    def body(rank: int) -> tuple[int, list[str], list[str]]:
        def made() -> tuple[nn.Module, Any, BucketOrder]:
            torch.manual_seed(0)
            net = nn.Linear(4, 4)
            old, order = DistributedDataParallel(net), BucketOrder(net, [*net.parameters()])
            return old, DistributedDataParallel(net, find_unused_parameters=True), order

        old, new, order = made()
        both = len(BucketRecord.read(json.loads(json.dumps(order.record(0)))))
        for step in (1, 2, 3):
            new(torch.ones(2, 4) + rank).sum().backward()
            order.end_step(step)
        record = BucketRecord.read(json.loads(json.dumps(order.record(3))))
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        again = DistributedDataParallel(net, find_unused_parameters=True)
        assert old is not again
        return both, replay(net, record, [*net.parameters()]), list(order.reasons)

    for found in on_ranks(body, tmp_path, 2):
        assert found == (2, [], [])
