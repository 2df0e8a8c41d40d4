"""Training jobs whose DDPs are not the registered model: inside of it, around it, beside it, made later."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SMALL: dict[str, Any] = {"bucket_cap_mb": 0.002, "broadcast_buffers": False}


class Crossed(nn.Module):
    """Layers run in another order than they are defined in; `turn` runs them in yet another one on each rank."""

    def __init__(self, *, turn: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.norm = nn.BatchNorm1d(24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.last = nn.Linear(24, 3)
        self.turn = dist.get_rank() if turn else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.relu(self.first(x)))
        parts = [self.layers[(k + self.turn) % 4](x) for k in (2, 0, 3, 1)]
        out: torch.Tensor = self.last(torch.stack([torch.tanh(part) for part in parts]).sum(0))
        return out


def batch(step: int, part: int = 0) -> torch.Tensor:
    """What this rank trains on."""
    generator = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
    return torch.randn(5, 12, generator=generator)


class Job:
    """One network in one DDP that is not the registered module. late: the DDP is made after the registration."""

    late = False

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.nets = self.networks()
        self.inner = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in self.nets]
        if not self.late:
            self.wrap()

    def networks(self) -> list[nn.Module]:
        return [Crossed()]

    def wrap(self) -> None:
        self.called: list[Any] = [DistributedDataParallel(net, **SMALL) for net in self.nets]

    def registered(self) -> nn.Module:
        return self.nets[0]

    @property
    def trained(self) -> list[torch.Tensor]:
        return [p for optimizer in self.inner for group in optimizer.param_groups for p in group["params"]]

    def train(self, step: int) -> None:
        for optimizer in self.inner:
            optimizer.zero_grad()
        for number, model in enumerate(self.called):
            model(batch(step, number)).square().mean().backward()
        for optimizer in self.inner:
            optimizer.step()

    def bits(self) -> bytes:
        """Weights, buffers and moments."""
        parts = [value.numpy().tobytes() for net in self.nets for value in net.state_dict().values()]
        for optimizer in self.inner:
            parts += [optimizer.state[p]["exp_avg"].numpy().tobytes() for p in optimizer.param_groups[0]["params"]]
        return b"".join(parts)

    def state(self) -> Any:
        return copy.deepcopy([one.state_dict() for one in (*self.nets, *self.inner)])

    def restore(self, state: Any) -> None:
        for one, saved in zip((*self.nets, *self.inner), state, strict=True):
            one.load_state_dict(saved)


class TwoInAModule(Job):
    """A GAN as one model."""

    def networks(self) -> list[nn.Module]:
        return [Crossed(), Crossed()]

    def registered(self) -> nn.Module:
        return nn.ModuleDict({"g": self.called[0], "d": self.called[1]})


class TwoAndOneRegistered(TwoInAModule):
    """A GAN of whose two networks only one is registered."""

    def registered(self) -> nn.Module:
        return self.called[0]  # type: ignore[no-any-return]


class TheInnerOne(Job):
    """`model=net`, and the loop calls `DDP(net)`."""


class MadeLater(TheInnerOne):
    late = True


class Replicated(Job):
    def wrap(self) -> None:
        from torch.distributed._composable.replicate import replicate

        self.called = [replicate(net, **SMALL) for net in self.nets]


class OtherOrder(Job):
    """Each rank runs the layers in an order of its own."""

    def networks(self) -> list[nn.Module]:
        return [Crossed(turn=True)]


class SharedTrunk(OtherOrder):
    """Two DDPs that begin with the same layer, which the second one trains with a head of its own."""

    def networks(self) -> list[nn.Module]:
        trunk, again = Crossed(turn=True), Crossed(turn=True)
        again.first = trunk.first
        return [trunk, again]

    def registered(self) -> nn.Module:
        return nn.ModuleList(self.nets)

    def wrap(self) -> None:
        super().wrap()
        own = {id(one) for one in self.nets[0].parameters()}
        rest = [one for one in self.nets[1].parameters() if id(one) not in own]
        self.inner[1] = torch.optim.AdamW(rest, lr=0.01)
