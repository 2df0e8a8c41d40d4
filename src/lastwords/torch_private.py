"""Private names of torch: each one that lastwords uses, what for, and what happens in a release that lacks it.

A private name is used only where no public one does the same. Those of DistributedDataParallel are in
`optim_wrapper.ddp` alone, those of DTensor, FSDP2 and ZeroRedundancyOptimizer in two modules of `sharding`, dtensor and
zero.
A test looks for every use in the source, and for every name in the installed torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d
from torch.nn.modules import batchnorm
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

__all__ = [
    "NAMES",
    "NormBase",
    "Store",
    "default_store",
    "foreach_copy",
    "global_step_hooks",
    "has_state_dict_hooks",
    "in_transform",
    "non_persistent",
]

NAMES = {
    # tensors, in what runs in each step
    "torch.Tensor._version": "how often a tensor was written; without it nothing can be exact, so the import fails",
    "torch.Tensor._cdata": "where its fields lie; they are looked for and checked, without them each tensor is asked",
    "torch.UntypedStorage._cdata": "the same",
    "torch.Tensor._use_count": "whether torch has a gradient still, for threads that must not read it; needed",
    "torch.Tensor._is_view": "whether a gradient is part of a flat buffer; needed",
    "torch.Tensor._indices": "of a sparse tensor that is not coalesced, whose indices() raises; needed",
    "torch.Tensor._values": "the same",
    "torch.Tensor._backward_hooks": "searched for random generators; without it those are not found",
    "torch.Tensor._post_accumulate_grad_hooks": "the same",
    "torch.Generator._cdata": "whether two objects are one generator; needed",
    "torch._foreach_copy_": "many small copies in one call; without it one by one",
    "torch._C._functorch.peek_interpreter_stack": "whether a forward pass is traced by torch.func; without: it is not",
    # modules
    "torch.nn.Module._parameters": "a tensor that a module holds is replaced under its name; needed",
    "torch.nn.Module._buffers": "the same, also where it is None",
    "torch.nn.Module._modules": "which module stands where; needed",
    "torch.nn.Module._non_persistent_buffers_set": "which buffers a state_dict() leaves out; needed",
    "torch.nn.Module._forward_pre_hooks": "whether DDP has taken DTensors out of a model; needed",
    "torch.nn.Module._compiled_call_impl": "whether a module is compiled; without it only OptimizedModule is known",
    "torch.nn.modules.batchnorm._NormBase": "whose kernels write buffers past `_version`; needed",
    # optimizers and schedulers
    "torch.optim.Optimizer._optimizer_step_pre_hooks": "right before the inner optimizer writes; needed",
    "torch.optim.Optimizer._optimizer_step_post_hooks": "right after it has written; needed",
    "torch.optim.Optimizer._optimizer_state_dict_pre_hooks": "with such hooks the state is asked for",
    "torch.optim.Optimizer._optimizer_state_dict_post_hooks": "the same",
    "torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks": "the wrapper's are the inner optimizer's; needed",
    "torch.optim.Optimizer._optimizer_load_state_dict_post_hooks": "the same",
    "torch.optim.optimizer._global_optimizer_pre_hooks": "hooks of all optimizers; without: not looked at",
    "torch.optim.optimizer._global_optimizer_post_hooks": "the same",
    "torch.optim.Adam._step_supports_amp_scaling": "GradScaler reads it from the wrapper",
    "torch.optim.Optimizer._opt_called": "set by schedulers, not looked at as state of the optimizer's own",
    "torch.optim.Optimizer._need_device_dtype_check_for_fused": "the same, set by fused optimizers",
    "torch.optim.Optimizer._warned_capturable_if_run_uncaptured": "the same",
    "torch.optim.LBFGS._numel_cache": "the same",
    "torch.optim.lr_scheduler.LRScheduler._step_count": "stepped once? without: last_epoch alone",
    "torch.optim.lr_scheduler.LRScheduler._last_lr": "the lr that it left; without: any lr is taken for its own",
    "torch.optim.lr_scheduler.SequentialLR._schedulers": "the same of the schedulers in it",
    # the rest
    "torch.distributed.distributed_c10d._get_default_store": "the job's store; without: ConfigError",
    "torch.utils.data.dataloader._BaseDataLoaderIter._sampler_iter": "skips batches unread; without: reads them",
    "torch.utils.data.dataloader._BaseDataLoaderIter._num_yielded": "the same",
    "torch.distributed.checkpoint._nested_dict.flatten_state_dict": "the names of DCP; needed by lastwords.dcp alone",
}  # fmt: skip

NormBase: type[torch.nn.Module] = batchnorm._NormBase
"""Normalisation layers with running statistics."""

default_store: Callable[[], Any] | None = getattr(distributed_c10d, "_get_default_store", None)
"""The store that `init_process_group` made."""

global_step_hooks: tuple[dict[int, Any], dict[int, Any]] = (
    getattr(torch_optimizer, "_global_optimizer_pre_hooks", {}),
    getattr(torch_optimizer, "_global_optimizer_post_hooks", {}),
)
"""Before and after the step of every optimizer of the process."""


def _copy_one_by_one(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False
) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking)


foreach_copy: Callable[..., Any] = getattr(torch, "_foreach_copy_", _copy_one_by_one)
"""`target.copy_(source, non_blocking)` of each pair of two sequences, in one call where torch has one."""


def non_persistent(module: torch.nn.Module) -> set[str]:
    """The module's own set of buffers that its `state_dict()` leaves out."""
    names: set[str] = module._non_persistent_buffers_set
    return names


def in_transform() -> bool:
    """Whether this thread is inside of `torch.func.grad`, `vmap` or their like."""
    return _innermost() is not None


_innermost: Callable[[], Any] = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)


def has_state_dict_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks take part in the optimizer's `state_dict()`."""
    tables = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    return any(getattr(optimizer, table, None) for table in tables)
