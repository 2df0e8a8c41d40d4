"""ZeroRedundancyOptimizer: weights on every rank, each parameter's optimizer state on one owner only.

It broadcasts weights inside `step()`, so in the middle of an update only an owner's parameters are good.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from lastwords.errors import ConfigError

_CLASS = "ZeroRedundancyOptimizer"

_DEEPSPEED = (
    "; DeepSpeed's ZeRO stages, fp16 and bf16 train flat copies of the parameters, of which a rank's part is nowhere "
    'else: use "zero_optimization": {"stage": 0} without "fp16" and "bf16" ("torch_autocast" instead), and '
    "protect(model=engine.module, optimizer=..., in_place=True) with the torch optimizer that it was given; or FSDP2"
)


def told_of_deepspeed() -> str:
    """What an error adds where an optimizer is not one of the model's parameters: "" if DeepSpeed is not there."""
    return _DEEPSPEED if "deepspeed" in sys.modules else ""


def is_zero(optimizer: Optimizer) -> bool:
    """True for torch.distributed.optim.ZeroRedundancyOptimizer, what is derived from it, and a set that has one."""
    return bool(_zeros(optimizer))


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers of a set that is seen as one (its `parts`); an optimizer alone is its own part."""
    return getattr(optimizer, "parts", None) or (optimizer,)


def refuse_unusable(optimizer: Optimizer) -> None:
    """ConfigError for a ZeroRedundancyOptimizer whose state cannot be followed; nothing for any other optimizer."""
    for zero in _zeros(optimizer):
        if getattr(zero, "_overlap_with_ddp", False):
            raise ConfigError(
                "ZeroRedundancyOptimizer(overlap_with_ddp=True) updates in DDP's hooks, during the backward pass, "
                "when no rank has final gradients; use overlap_with_ddp=False"
            )
        for name in ("optim", "_param_to_rank", "process_group"):
            if not hasattr(zero, name):
                raise ConfigError(
                    f"this torch's ZeroRedundancyOptimizer has no attribute {name!r}, so the owners of its state are "
                    "not known; use a torch release that lastwords was tested with (2.7 to 2.13)"
                )


def owners(optimizer: Optimizer) -> dict[int, tuple[int, int]]:
    """id(parameter) -> its owner's rank in the optimizer's own process group, and the owner's global rank."""
    return {
        id(parameter): (int(owner), dist.get_global_rank(zero.process_group, owner))
        for zero in _zeros(optimizer)
        for parameter, owner in zero._param_to_rank.items()
    }


def stateful(optimizer: Optimizer) -> Optimizer:
    """The optimizer that has the state: ZeRO's local one, else `optimizer` itself."""
    local: Optimizer = getattr(optimizer, "optim", optimizer) if _is_one(optimizer) else optimizer
    return local


def _zeros(optimizer: Optimizer) -> list[Any]:
    return [part for part in parts_of(optimizer) if _is_one(part)]


def _is_one(optimizer: Optimizer) -> bool:
    return any(
        kind.__name__ == _CLASS and kind.__module__.startswith("torch.distributed.optim")
        for kind in type(optimizer).__mro__
    )
