"""Everything that is asked of torch's DTensor: is it one, what lies here, and which box of the whole is that.

DDP over a `parallelize_module` model trains on the DTensors' local tensors (`_pre_dp_module_transform`); torch leaves
the layout on them, in `_st_info`, so that those are shards too, although they are plain tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from lastwords.errors import ConfigError


class ShardBox(NamedTuple):
    """A shard: its shape and its offsets in a tensor of global_shape, in elements."""

    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


def is_dtensor(tensor: object) -> bool:
    """True for a DTensor; cheap, and loads nothing: where the module was never imported there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_shard(tensor: object) -> bool:
    """True for a DTensor, and for the local tensor of one that still knows its layout."""
    return is_dtensor(tensor) or hasattr(tensor, "_st_info")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lies on this rank: a DTensor's own local tensor (not a copy), else the tensor."""
    if is_dtensor(tensor):
        local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
        return local
    return tensor


def box_of(tensor: torch.Tensor, path: str = "a tensor") -> ShardBox:
    """Where this rank's part lies in the whole. ConfigError, naming `path`, where that is not one box."""
    if not is_shard(tensor):
        shape = tuple(tensor.shape)
        return ShardBox(shape, shape, (0,) * len(shape))
    layout = _layout(tensor)
    box = _box(layout.mesh, tuple(layout.placements), tuple(layout.shape), tuple(local_of(tensor).shape))
    if isinstance(box, str):
        raise ConfigError(f"{path} {box}")
    return box


@lru_cache(maxsize=4096)
def _box(mesh: Any, placements: tuple[Any, ...], whole: tuple[int, ...], here: tuple[int, ...]) -> ShardBox | str:
    """The box, or why there is none. Torch takes 0.1 ms for it, and a save asks for each tensor of the optimizer."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if mesh.get_coordinate() is None:
        return "lives on a mesh that this rank is not part of; leave it out of this rank's model"
    for placement in placements:
        if placement.is_partial():
            return f"is a partial sum that has not been reduced yet ({placement}); only final values can be saved"
    shape, offsets = compute_local_shape_and_global_offset(whole, mesh, placements)
    if tuple(shape) != here or not _is_run(mesh, placements, whole):
        return (
            f"has {here} of {whole} on this rank, placed as {placements}, which is not one box of the whole; place it "
            "with Shard and Replicate, or choose sizes that divide evenly"
        )
    return ShardBox(here, whole, tuple(int(offset) for offset in offsets) if 0 not in here else (0,) * len(here))


def _layout(tensor: Any) -> Any:
    """mesh, placements and (global) shape of a shard."""
    return tensor._st_info if hasattr(tensor, "_st_info") else tensor._spec


def _is_run(mesh: Any, placements: tuple[Any, ...], whole: tuple[int, ...]) -> bool:
    """Whether the elements here are neighbours in the whole along each dimension, as strided shards may not be."""
    coordinate = mesh.get_coordinate()
    strided = {placement.dim for placement in placements if type(placement).__name__ == "_StridedShard"}
    for dimension in strided:
        index = torch.arange(whole[dimension])
        for mesh_dimension, placement in enumerate(placements):
            if getattr(placement, "dim", None) == dimension:
                chunks = placement._split_tensor(index, mesh.size(mesh_dimension), with_padding=False)[0]
                index = chunks[coordinate[mesh_dimension]]
        if index.numel() and int(index[-1] - index[0]) != index.numel() - 1:
            return False
    return True


def placements_to_json(tensor: torch.Tensor) -> list[list[Any]]:
    """A DTensor's placements as plain values, one for each mesh dimension.

    ["R"] is replicated, ["S", dim] sharded, ["SS", dim, split_factor] sharded in strides.
    """
    sharded: Any = tensor
    result: list[list[Any]] = []
    for placement in sharded.placements:
        if placement.is_replicate():
            result.append(["R"])
        elif type(placement).__name__ == "_StridedShard":
            result.append(["SS", placement.dim, placement.split_factor])
        else:
            result.append(["S", placement.dim])
    return result


def empty_shard(
    like: torch.Tensor, placements: Sequence[Sequence[Any]], global_shape: Sequence[int], local: torch.Tensor
) -> torch.Tensor:
    """A DTensor around `local`, on the mesh of `like`. ConfigError for placements that this torch does not know."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, placement_types

    made: list[Any] = []
    for kind, *numbers in placements:
        if kind == "R":
            made.append(Replicate())
        elif kind == "S":
            made.append(Shard(*numbers))
        elif kind == "SS" and hasattr(placement_types, "_StridedShard"):
            made.append(placement_types._StridedShard(numbers[0], split_factor=numbers[1]))
        else:
            raise ConfigError(f"this torch {torch.__version__} has no placement {kind!r}; use that of the saved run")
    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    same = tuple(global_shape) == tuple(like.shape)
    stride = like.stride() if same else torch.empty(tuple(global_shape), device="meta").stride()
    with torch.no_grad():
        result: torch.Tensor = DTensor.from_local(
            local, mesh, made, run_check=False, shape=torch.Size(global_shape), stride=tuple(stride)
        )
    return result


def taken_out_by_ddp(model: torch.nn.Module, trained: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters that a DDP model over DTensors no longer names: name -> the tensor in `trained`, else the DTensor.

    Since its first forward pass a DTensor stands in the place of each, as a plain attribute over the same memory.
    """
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    if not any(getattr(hook, "__name__", "") == "_reconstruct_dtensor" for hook in hooks):
        return {}
    by_memory = {local.data_ptr(): local for local in trained if hasattr(local, "_st_info") and local.numel()}
    return {
        f"{prefix}.{key}" if prefix else key: by_memory.get(local_of(value).data_ptr(), value)
        for prefix, module in model.named_modules()
        for key, value in vars(module).items()
        if is_dtensor(value)
    }


def managed_by_fsdp2(model: torch.nn.Module) -> bool:
    """True if `fully_shard` swaps the model's parameters for whole ones while it computes."""
    module = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(module, "FSDPModule", None)
    return kind is not None and any(isinstance(inner, kind) for inner in model.modules())


def has_unreduced(model: torch.nn.Module) -> bool:
    """Whether FSDP2 holds gradients that it has not reduced to the parameters' `grad` (its sync was off)."""
    module = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(module, "FSDPModule", None)
    for inner in model.modules():
        if kind is None or not isinstance(inner, kind):
            continue
        state: Any = inner._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in filter(None, groups):
            whole = (part for one in getattr(group, "fsdp_params", ()) for part in (
                getattr(one, "unsharded_accumulated_grad", None),
                getattr(getattr(one, "_unsharded_param", None), "grad", None),
            ))  # fmt: skip
            if getattr(group, "_partial_reduce_output", None) is not None or any(one is not None for one in whole):
                return True
    return False


def managed_by_fsdp1(model: torch.nn.Module) -> bool:
    """True if the older FullyShardedDataParallel is in the model."""
    module = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(module, "FullyShardedDataParallel", None)
    return kind is not None and any(isinstance(inner, kind) for inner in model.modules())
