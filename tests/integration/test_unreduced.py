"""Gradients that FSDP2 keeps to itself while its sync is off are named where a step ends with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lastwords.optim_wrapper.capture.carried_gradients import CarriedGradients
from lastwords.sharding.dtensor import has_unreduced
from tests.integration.forked import on_ranks
from tests.ledgers import told

pytestmark = pytest.mark.process


@pytest.mark.parametrize("policy", [{}, {"reduce_dtype": torch.float64}])
def test_what_fsdp_has_not_reduced_is_named_at_a_step_s_end(policy: dict[str, Any], tmp_path: Path) -> None:
    def body(_: int) -> Any:
        torch.manual_seed(1)
        net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(net, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
        carried = CarriedGradients(lambda: dict(net.named_parameters()), model=net)
        before = has_unreduced(net)
        for sync in (True, False):
            net.zero_grad()
            net.set_requires_gradient_sync(sync)
            net(torch.ones(3, 4)).sum().backward()
            carried.end_step(updated=sync, trained=lambda: dict(net.named_parameters()))
            if sync:
                after = has_unreduced(net), told(carried.tensors)
        return before, after, told(carried.tensors)

    for before, after, reasons in on_ranks(body, tmp_path, 2):
        assert not before
        assert after == (False, [])
        assert len(reasons) == 1
        assert "FSDP has not reduced yet" in reasons[0]


def test_a_model_without_fsdp_has_none() -> None:
    assert not has_unreduced(nn.Linear(2, 2))
