"""A mixture of experts, sharded by hand: every rank has some of the experts, and tokens travel to them and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from demo.transformer.model import MLP, Shape


class Exchange(torch.autograd.Function):
    """all_to_all of rows: `send[i]` rows go to rank i of the group, `receive[i]` come from it; gradients go back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.way_back = receive, send, group
        found = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), receive, send, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return Exchange.forward(ctx, gradients[0], *ctx.way_back), None, None, None


class Experts(nn.Module):
    """In the place of an MLP: a router sends each token to the one of `count` experts that it likes best.

    This rank has count / size experts, size being the ranks of `group`. They bear the same names on every rank and are
    different tensors: nothing but a declaration can tell that.
    """

    def __init__(self, shape: Shape, count: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.size = group, dist.get_world_size(group)
        self.router = nn.Linear(shape.width, count)
        every = [MLP(shape) for _ in range(count)]  # all are made, so that each gets its own random weights
        here = count // self.size
        first = dist.get_rank(group) * here
        self.experts = nn.ModuleList(every[first : first + here])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        leaving = chosen.bincount(minlength=self.router.out_features).view(self.size, -1)  # (rank, expert there)
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=self.group)
        send, receive = leaving.sum(1).tolist(), coming.sum(1).tolist()

        guests = Exchange.apply(tokens[order], send, receive, self.group).split(coming.flatten().tolist())
        done = torch.cat([self.experts[place % len(self.experts)](rows) for place, rows in enumerate(guests)])
        back = Exchange.apply(done, receive, send, self.group)
        y = torch.empty_like(tokens).index_copy(0, order, back)
        return (y * weight.unsqueeze(-1)).view_as(x)
