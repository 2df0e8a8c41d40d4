"""What a loop of one's own does with gradients that no wrapper averages, and that torch's clipping refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor; of a plain tensor all of it. Shares memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def average(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None, ranks: int) -> None:
    """Replace each gradient by its sum over `group`, divided by `ranks`: one all-reduce for all of them."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= ranks
    for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def clip(parameters: Iterable[nn.Parameter], copies: Callable[[nn.Parameter], int], max_norm: float) -> None:
    """Scale the gradients so that the norm of the whole model's is `max_norm` at most.

    Every rank adds up its own squares, each divided by `copies`, the number of ranks that hold the same tensor; so the
    sum over all ranks counts everything once. An all-reduce gives the same bits everywhere, and so does the scale.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    squares = torch.zeros(1, device=with_gradient[0].device)
    for parameter in with_gradient:
        assert parameter.grad is not None
        squares += local(parameter.grad).square().sum() / copies(parameter)
    dist.all_reduce(squares)
    scale = (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    for parameter in with_gradient:
        assert parameter.grad is not None
        local(parameter.grad).mul_(scale)


def copies_of(parameter: nn.Parameter) -> int:
    """Number of ranks that hold the same part of a parameter: all, divided by the mesh axes that it is cut along."""
    copies = dist.get_world_size()
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                copies //= parameter.device_mesh.size(axis)
    return copies
