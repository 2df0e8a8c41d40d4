"""A checkpoint of a compiled model that is resumed without the compiler says just that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from lastwords.checkpoint.meta import BucketRecord
from lastwords.optim_wrapper.ddp import ddp_buckets
from lastwords.optim_wrapper.ddp.ddp_found import is_compiled
from lastwords.optim_wrapper.resume.facts import changed, run_facts
from tests.integration.forked import on_ranks


@pytest.mark.ci
def test_a_compiled_model_is_told_in_whatever_place_it_was_compiled() -> None:
    plain, within, itself = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    assert not is_compiled(within)
    within[0] = torch.compile(within[0])  # type: ignore[assignment]
    itself.compile()
    assert [is_compiled(model) for model in (plain, within, itself, torch.compile(plain))] == [False, True, True, True]  # type: ignore[arg-type]
    facts = [run_facts(net, torch.optim.SGD(net.parameters(), lr=0.1), "gloo") for net in (itself, plain)]
    assert changed(*facts) == ["torch.compile: True in the saved run, False here"]


def test_names_of_a_compiled_model_are_no_other_parameters(tmp_path: Path) -> None:
    def body(rank: int) -> list[str]:
        plain = DDP(nn.Linear(2, 2))
        compiled = DDP(torch.compile(nn.Linear(2, 2)))  # type: ignore[arg-type]
        record = ddp_buckets.BucketOrder(compiled).record()
        return ddp_buckets.replay(plain, BucketRecord.read(record))

    assert on_ranks(body, tmp_path, 1) == [[]]
