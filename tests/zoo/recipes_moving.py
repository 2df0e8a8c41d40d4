"""Weights and buffers that move outside of the update."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.zoo.loop import WIDTH, WIDTH_IN, WIDTH_OUT, Loop, recipe


@recipe("plain", "DDP, BatchNorm, dropout, AdamW, logged loss", "fwd bwd win end epoch")
class Plain(Loop):
    """Nothing but the loop."""


class MomentumEncoder(nn.Module):
    """MoCo: a frozen copy of the encoder follows it at the beginning of each forward pass."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.q = nn.Sequential(nn.Linear(WIDTH_IN, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH_OUT))
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for a, b in zip(self.q.parameters(), self.k.parameters(), strict=True):
                if self.in_place:
                    b.mul_(0.9).add_(a, alpha=0.1)
                else:
                    b.data = b.data * 0.9 + a.data * 0.1
        return torch.as_tensor(self.q(x) + self.k(x).detach())


@recipe("moco", "momentum encoder of frozen parameters, `b.data = ...` at the start of forward", "bwd fwd win end")
class Moco(Loop):
    in_place = False

    def net(self) -> nn.Module:
        return MomentumEncoder(self.in_place)


@recipe("moco_inplace", "the same with `b.mul_().add_()`", "bwd fwd win end")
class MocoInPlace(Moco):
    in_place = True


class Annealed(nn.Module):
    """A frozen scalar that forward multiplies through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.t.data.mul_(0.9)
        return x * self.t


@recipe("frozen_bn_data", "frozen scalar parameter annealed in forward, `t.data.mul_()`", "bwd fwd win")
class FrozenScalar(Loop):
    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), Annealed()]


@recipe("ema_first", "AveragedModel as an extra, its first update in step 5", "win bwd", {"win": "extras['ema']"})
class EmaFirst(Loop):
    def setup(self) -> None:
        super().setup()
        self.extras["ema"] = self.ema = torch.optim.swa_utils.AveragedModel(self.bare)

    def after_update(self) -> None:
        super().after_update()
        if self.step >= 5:
            self.ema.update_parameters(self.bare)


@recipe("counter", "a Python counter of a module: out of reach", "bwd", silent=True, mixes=False)
class Counter(Loop):
    count = 0

    def loss(self, x: Any, y: Any) -> Any:
        self.count += 1
        return super().loss(x, y) * self.count
