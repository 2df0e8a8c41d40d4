"""Real ranks in a gloo group exchange digests: a replica that has drifted is named the same way on all of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lastwords.optim_wrapper.launch.world import World
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.sharding.declare import units_from_mesh
from lastwords.sharding.group_info import restore_group_info_list, value_is_shared, write_group_info
from lastwords.sharding.verify import compare, digest_units, exchange_digests
from tests.integration.test_ddp_buckets import on_ranks
from tests.sharding.tables import tables_of

pytestmark = pytest.mark.process


def drift(rank: int) -> list[Any]:
    """Two sound steps, then a bit flips in a moment of rank 2, then one more step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    view = UnitView(ddp, optimizer)
    group = dist.new_group(backend="gloo")
    generator = torch.Generator().manual_seed(rank)

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()

    def check() -> list[str]:
        found = compare(exchange_digests(group, digest_units([view])))
        return [f"{item.suspects} {item.certain} {item.tensor} {item.count}" for item in found]

    at_start = check()
    for _ in range(2):
        step()
    sound = check()
    if rank == 2:
        moment = optimizer.state[net[2].weight]["exp_avg"]
        moment.view(-1).view(torch.uint8)[0] ^= 1
    flipped = check()
    step()
    return [at_start, sound, flipped, check()]


def test_a_flipped_bit_on_one_of_three_ranks_is_named_by_all_of_them(tmp_path: Path) -> None:
    answers = on_ranks(drift, tmp_path, 3)
    assert answers[0] == answers[1] == answers[2]
    at_start, sound, flipped, later = answers[0]
    assert at_start == sound == []
    assert flipped == ["(2,) True unit/replicated/optim/2.weight/exp_avg 1"]
    assert later
    assert later[0].startswith("(2,) True unit/replicated/"), "it does not go away by itself"


def write_groups(rank: int) -> list[str]:
    """As the start does it: find out whether the path is shared, then write."""
    environ = {"GROUP_INFO_FILE": os.environ["LASTWORDS_TEST_GROUPS"]}
    shared = value_is_shared(World(), "lastwords/test", environ, 60.0)
    path = write_group_info(environ, rank, tables_of(units_from_mesh(dp=2, tp=2))[rank], shared=shared)
    return [str(path), str(restore_group_info_list(str(path)))]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("group_info.pb", ["group_info_rank_0.pb", "group_info_rank_1.pb"]),
        ("{rank}/group_info.pb", ["0/group_info.pb", "1/group_info.pb"]),
    ],
)
def test_ranks_that_share_one_value_write_different_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, names: list[str]
) -> None:
    monkeypatch.setenv("LASTWORDS_TEST_GROUPS", str(tmp_path / value))
    answers = on_ranks(write_groups, tmp_path, 4)
    assert answers[:2] == [[str(tmp_path / names[0]), "[0, 2]"], [str(tmp_path / names[1]), "[1, 3]"]]
