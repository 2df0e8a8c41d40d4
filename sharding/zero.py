"""ZeroRedundancyOptimizer: weights on every rank, each parameter's optimizer state on one owner only.

It broadcasts weights inside `step()`, so in the middle of an update only an owner's parameters are good.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from lastwords.errors import ConfigError

_CLASS = "ZeroRedundancyOptimizer"


def is_zero(optimizer: Optimizer) -> bool:
    """True for torch.distributed.optim.ZeroRedundancyOptimizer and what is derived from it."""
    return any(
        kind.__name__ == _CLASS and kind.__module__.startswith("torch.distributed.optim")
        for kind in type(optimizer).__mro__
    )


def refuse_unusable(optimizer: Optimizer) -> None:
    """ConfigError for a ZeroRedundancyOptimizer whose state cannot be followed."""
    zero: Any = optimizer
    if getattr(zero, "_overlap_with_ddp", False):
        raise ConfigError(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) updates in DDP's hooks, amid the backward pass, "
            "where no rank has final gradients; use overlap_with_ddp=False"
        )
    for name in ("optim", "_param_to_rank", "process_group"):
        if not hasattr(zero, name):
            raise ConfigError(
                f"this torch's ZeroRedundancyOptimizer has no attribute {name!r}, so the owners of its state are not "
                "known; use a torch release that lastwords was tested with (2.7 to 2.13)"
            )


def owners(optimizer: Optimizer) -> dict[int, tuple[int, int]]:
    """id(parameter) -> its owner's rank in the optimizer's own process group, and the owner's global rank."""
    zero: Any = optimizer
    group = zero.process_group
    return {
        id(parameter): (int(owner), dist.get_global_rank(group, owner))
        for parameter, owner in zero._param_to_rank.items()
    }


def stateful(optimizer: Optimizer) -> Optimizer:
    """The optimizer that has the state: ZeRO's local one, else `optimizer` itself."""
    if not is_zero(optimizer):
        return optimizer
    zero: Any = optimizer
    local: Optimizer = zero.optim
    return local
