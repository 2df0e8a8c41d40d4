"""What lastwords uses of DistributedDataParallel beyond its public face: looked up by name, tested, with reasons."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

_MODEL_NAMES = (
    "reducer",
    "logger",
    "require_backward_grad_sync",
    "static_graph",
    "find_unused_parameters",
    "_build_params_for_reducer",
    "_get_ddp_logging_data",
)
_REDUCER_NAMES = ("_rebuild_buckets", "prepare_for_forward", "prepare_for_backward", "_delay_all_reduce")
_BUCKETS = "rebuilt_per_bucket_param_indices"


def find_ddp(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel in a model as the loop calls it, looked for under wrappers; None if none."""
    inner: torch.nn.Module | None = model
    while inner is not None and not isinstance(inner, DistributedDataParallel):
        inner = one_layer_off(inner)
    return inner


def one_layer_off(model: torch.nn.Module) -> torch.nn.Module | None:
    """What is under DDP, DataParallel, torch.compile, or a wrapper that adds nothing to it; None for any other module.

    Such wrappers keep the model as `_forward_module` (Fabric) or, around DDP, as `module` (Accelerate and loops of
    one's own). A module with tensors of its own beside those is no wrapper.
    """
    if isinstance(model, DistributedDataParallel | DataParallel):
        return cast(torch.nn.Module, model.module)
    for name in ("_orig_mod", "_forward_module", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, torch.nn.Module) and (
            name == "_orig_mod"
            or ((name == "_forward_module" or find_ddp(inner) is not None) and _tensors(model) == _tensors(inner))
        ):
            return inner
    return None


def _tensors(model: torch.nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*model.parameters(), *model.buffers())}


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether the compiler runs this module or one in it, and would trace what hooks do."""
    return any(
        isinstance(getattr(module, "_orig_mod", None), torch.nn.Module)
        or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def capability(ddp: DistributedDataParallel) -> list[str]:
    """Why the order of this model's buckets cannot be recorded or replayed; empty if it can."""
    missing = [f"DistributedDataParallel.{name}" for name in _MODEL_NAMES if not hasattr(ddp, name)]
    missing += [f"Reducer.{name}" for name in _REDUCER_NAMES if not hasattr(getattr(ddp, "reducer", None), name)]
    if not hasattr(getattr(ddp, "logger", None), "set_runtime_stats_and_log"):
        missing.append("Logger.set_runtime_stats_and_log")
    if missing:
        return [
            f"this torch ({torch.__version__}) has no {', '.join(missing)}, so the order of DDP's buckets "
            f"cannot be restored"
        ]
    reasons = []
    if getattr(ddp, "_use_python_reducer", False):
        reasons.append("DDP runs in the compiler's Python reducer mode, whose reduction order is not recorded")
    if getattr(ddp, "_delay_all_reduce_all_params", False) or getattr(ddp, "_delay_all_reduce_params", None):
        reasons.append("DDP delays the reduction of some parameters, which is not replayed")
    if getattr(ddp, "mixed_precision", None) is not None:
        reasons.append("DDP's own mixed precision is on, which is not replayed; use torch.autocast")
    return reasons


def build_parameters(ddp: DistributedDataParallel) -> tuple[list[torch.Tensor], list[bool]]:
    """The reducer's parameters in its own numbering, and whether each gets sparse gradients."""
    built: Any = ddp._build_params_for_reducer
    parameters, sparse = built()
    return list(parameters), list(sparse)


def reducer_parameters(ddp: DistributedDataParallel) -> tuple[list[str], list[torch.Tensor]]:
    """Names and parameters in the reducer's own numbering."""
    parameters: list[torch.Tensor] = build_parameters(ddp)[0]
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    return [names.get(id(parameter), "?") for parameter in parameters], parameters


def buckets_from_log(ddp: DistributedDataParallel) -> list[list[int]] | None:
    """The rebuilt buckets as DDP's logging data show them, from the third iteration on; None before.

    Takes the reducer's lock: only for the training thread, outside of a backward pass.

    >>> parse_buckets("7 6 5 4, 2 3 1 0")
    [[7, 6, 5, 4], [2, 3, 1, 0]]
    """
    logged: Any = ddp._get_ddp_logging_data
    found = logged()
    text = found.get(_BUCKETS)
    if not found.get("has_rebuilt_buckets") or not isinstance(text, str):
        return None
    return parse_buckets(text)


def parse_buckets(text: str) -> list[list[int]] | None:
    """Indices by bucket, from DDP's text; None for a text of another form.

    >>> parse_buckets("5 4") , parse_buckets("?"), parse_buckets("")
    ([[5, 4]], None, None)
    """
    try:
        buckets = [[int(index) for index in bucket.split()] for bucket in text.split(",")]
    except ValueError:
        return None
    return buckets if all(buckets) else None


def kinds_of(ddp: DistributedDataParallel) -> list[tuple[str, str, bool]]:
    """What each of the reducer's parameters shares a bucket by: dtype, device, and whether its gradients are sparse."""
    parameters, sparse = build_parameters(ddp)
    return [(str(one.dtype), str(one.device), thin) for one, thin in zip(parameters, sparse, strict=True)]


def replicate_states(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Modules that `torch.distributed._composable.replicate` has marked, with its state, which holds their DDP.

    That is made in the first forward pass, or by the state's `lazy_init()`.
    """
    marking: Any = getattr(sys.modules.get("torch.distributed._composable.replicate"), "replicate", None)
    if marking is None:
        return
    for module in model.modules():
        state = marking.state(module)
        if hasattr(state, "lazy_init") and hasattr(state, "_param_list"):
            yield module, state


def agreed_order(
    order: Sequence[int], buckets: Sequence[Sequence[int]], kinds: Sequence[object] | None = None
) -> list[int]:
    """The order that leads to `buckets`: `order` itself if its items come as they do there, else the buckets' own.

    Buckets of one kind (see `kinds_of`) fill one after the other, so within a kind they stand in the order of the
    gradients; those of several kinds fill at the same time. kinds: by index; None: all are of one.
    In a static graph an item may come twice, of which the last time counts, or never.

    >>> agreed_order([3, 2, 1, 0], [[3, 2], [1, 0]]), agreed_order([3, 1, 2, 0], [[2, 3], [1, 0]])
    ([3, 2, 1, 0], [2, 3, 1, 0])
    >>> agreed_order([0, 1, 2], [[2], [1, 0]]), agreed_order([3, 1, 2, 0], [[3, 2], [1, 0]], ["a", "a", "b", "b"])
    ([2, 1, 0], [3, 1, 2, 0])
    >>> agreed_order([1, 0, 1], [[0, 1, 2]]), agreed_order([1, 0, 1], [[1, 0, 2]])
    ([1, 0, 1], [1, 1, 0])
    """
    last = {index: place for place, index in enumerate(order)}
    known = [index for bucket in buckets for index in bucket if index in last]
    of_kind: dict[object, list[int]] = {}
    for index in known:
        of_kind.setdefault(None if kinds is None else kinds[index], []).append(last[index])
    if all(places == sorted(places) for places in of_kind.values()):
        return list(order)
    earlier = [index for place, index in enumerate(order) if last[index] != place]
    return earlier + known
