"""The tests' own forked ranks."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.integration.forked import on_ranks


@pytest.mark.ci
def test_a_rank_does_not_wait_for_the_threads_of_a_group_that_its_parent_has_dropped(tmp_path: Path) -> None:
    gc.disable()
    try:
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        dropped = SimpleNamespace(group=group)
        dropped.itself = dropped
        del group, dropped
        assert on_ranks(lambda rank: gc.collect() >= 0, tmp_path, 1) == [True]
    finally:
        gc.enable()
        gc.collect()
