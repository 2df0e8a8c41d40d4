"""What is known of a wrapped optimizer's own step: who writes in it, and whether hooks run around it."""

from __future__ import annotations

from torch.optim.optimizer import Optimizer

from lastwords.torch_private import global_step_hooks


def writer_of(inner: Optimizer) -> Optimizer:
    """The optimizer that writes weights and state: the local one inside a ZeroRedundancyOptimizer, else `inner`."""
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(inner).__mro__):
        local = getattr(inner, "optim", None)
        if isinstance(local, Optimizer):
            return local
    return inner


def has_step_hooks(inner: Optimizer) -> bool:
    """Whether there are any beside our guard."""
    own = inner.__dict__
    before, after = own.get("_optimizer_step_pre_hooks"), own.get("_optimizer_step_post_hooks")
    if before is None:
        return bool(after)
    return bool(len(before) > 1 or after or _before_all or _after_all)


_before_all, _after_all = global_step_hooks
