"""Quantisation, normalised weights, buffers that come late or change their size, parts that are frozen."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.traceable import EighthMomentum
from tests.zoo.loop import WIDTH, Loop, recipe


class Block(Loop):
    """One more layer."""

    def block(self) -> nn.Module:
        return nn.Identity()

    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), self.block()]


class Quantised(nn.Module):
    """A linear layer with a fake-quantised weight."""

    def __init__(self, per_channel: bool) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.ao import quantization as ao

            self.inner = nn.Linear(WIDTH, WIDTH)
            if per_channel:
                self.fake = ao.FakeQuantize(
                    ao.MovingAveragePerChannelMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8,
                    qscheme=torch.per_channel_symmetric,
                )  # fmt: skip
            else:
                self.fake = ao.FakeQuantize(ao.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.fake(self.inner.weight), self.inner.bias)


@recipe("qat_channel", "QAT, per-channel observers that resize their buffers", "bwd win fwd")
class QatChannel(Block):
    def block(self) -> nn.Module:
        return Quantised(True)

    def ddp(self) -> dict[str, Any]:
        return super().ddp() | {"broadcast_buffers": False}


@recipe("qat_tensor", "QAT, per-tensor observers", "bwd win end")
class QatTensor(Block):
    def block(self) -> nn.Module:
        return Quantised(False)


class LazyMask(nn.Module):
    """A mask that is made in the first forward pass and is not persistent."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.tril(torch.ones(WIDTH, WIDTH)), persistent=False)
        return x @ self.mask / WIDTH


@recipe(
    "lazy_buffer",
    "non-persistent buffer registered in the first forward pass (causal mask)",
    "bwd win fwd end",
    {"bwd": "mask"},  # a death while DDP hands it round for the first time
)
class LazyBuffer(Block):
    def block(self) -> nn.Module:
        return LazyMask()


class GrowingCache(nn.Module):
    """A buffer that `resize_` makes larger in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(0, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            rows = len(self.cache)
            self.cache.resize_(rows + 1, WIDTH)
            self.cache[rows] = x.detach().mean(0)
        return x - self.cache.mean(0)


@recipe("growing_cache", "buffer that `resize_` makes larger in each step", "bwd win fwd end", {"all": "cache"})
class Growing(Block):
    def block(self) -> nn.Module:
        return GrowingCache()

    def ddp(self) -> dict[str, Any]:
        return super().ddp() | {"broadcast_buffers": False}


class Rebound(nn.Module):
    """A buffer that is replaced by a new tensor in each forward pass."""

    def __init__(self, size: int, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size, WIDTH), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean[0]


@recipe("buffer_rebound", "small buffer replaced in each forward pass", "bwd win fwd")
class ReboundSmall(Block):
    def block(self) -> nn.Module:
        return Rebound(1, persistent=True)


@recipe("buffer_volatile", "large non-persistent buffer replaced in each forward pass", "bwd win fwd end")
class ReboundLarge(Block):
    def block(self) -> nn.Module:
        return Rebound(2048, persistent=False)


@recipe("buffer_first_change", "large buffer that changes first in this step", "fwd@4 bwd@4 win@4",
        {"fwd bwd": "codes"}, mixes=False)  # fmt: skip
class FirstChange(Loop):
    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), Codes()]

    def before_forward(self, batch: Any) -> Any:
        if self.step >= 4:
            codes: Any = list(self.bare.children())[-2]
            codes.codes.mul_(0.9)
        return super().before_forward(batch)


class Codes(nn.Module):
    """A large buffer that the loop changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.ones(4096, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.codes[0]


@recipe("spectral_weight_norm", "spectral_norm and weight_norm", "bwd win fwd end")
class Normed(Block):
    def block(self) -> nn.Module:
        spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        return nn.Sequential(spectral, parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))


@recipe("bn_cumulative", "BatchNorm with momentum=None", "bwd win end")
class Cumulative(Block):
    def block(self) -> nn.Module:
        return nn.BatchNorm1d(WIDTH, momentum=None)


class LoraLinear(nn.Module):
    """A frozen layer and a low-rank update of it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH) * 0.1)
        self.b = nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.frozen(x) + x @ self.a.T @ self.b.T)


@recipe("lora", "LoRA: frozen layers and low-rank updates", "bwd win fwd")
class Lora(Block):
    def block(self) -> nn.Module:
        return LoraLinear()


@recipe("relora", "ReLoRA: the update is merged into the frozen weight at an epoch's end", "epoch fwd@5 bwd@5 end@4",
        {"epoch": "weight"})  # fmt: skip
class Relora(Lora):
    @torch.no_grad()
    def epoch_end(self) -> None:
        super().epoch_end()
        for module in self.bare.modules():
            if isinstance(module, LoraLinear):
                module.frozen.weight.data += module.b @ module.a
                module.b.zero_()


@recipe("prune", "magnitude pruning at an epoch's end: masks are buffers", "epoch fwd@5 bwd@5 end@4",
        {"epoch end": ("mask", "buffer")})  # fmt: skip
class Pruned(Loop):
    bare: Any

    def net(self) -> nn.Module:
        net: Any = super().net()
        prune.l1_unstructured(net[0], "weight", amount=0.2)
        return nn.Sequential(*net)

    @torch.no_grad()
    def epoch_end(self) -> None:
        super().epoch_end()
        weight = self.bare[0].weight_orig
        self.bare[0].weight_mask.copy_((weight.abs() > weight.abs().median()).float())


class Average(nn.Module):
    """A small buffer that the loop moves after the update."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(x - self.average)


@recipe("buffer_after_update", "small buffer that the loop moves after each update", "win end bwd fwd",
        {"win end": ("average", "buffer")})  # fmt: skip
class BufferAfterUpdate(Block):
    bare: Any

    def block(self) -> nn.Module:
        return Average()

    @torch.no_grad()
    def after_update(self) -> None:
        super().after_update()
        for module in self.bare.modules():
            if isinstance(module, Average):
                module.average.mul_(0.9).add_(self.bare[0].bias, alpha=0.1)


class DinoCentre(nn.Module):
    """DINO's centre: a buffer that the loop moves after the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x - self.centre
        self.centre = self.centre * 0.9 + x.detach().mean(0, keepdim=True) * 0.1
        return torch.as_tensor(out)


@recipe("dino_centre", "DINO's centre, a buffer that forward replaces", "bwd win fwd")
class Dino(Block):
    def block(self) -> nn.Module:
        return DinoCentre()


@recipe("moments_8bit", "an optimizer whose moments are a tensor subclass of codes and scales", "fwd bwd win end")
class Moments8bit(Loop):
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [EighthMomentum(self.bare.parameters(), lr=0.01)]


class Graph(nn.Module):
    """Features go along the edges of a graph that never changes."""

    adjacency: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        edges = torch.rand(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)) > 0.5
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.register_buffer("adjacency", edges.float().to_sparse_csr())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.adjacency @ x.t()).t() / WIDTH


@recipe("sparse_buffer", "a graph's adjacency is a sparse buffer, which cannot be stored as it lies", "fwd bwd win")
class SparseBuffer(Block):
    def block(self) -> nn.Module:
        return Graph()

    def ddp(self) -> dict[str, Any]:
        return super().ddp() | {"broadcast_buffers": False, "init_sync": False}


@recipe("sparse_buffer_moves", "the same; its edges' weights fade from step to step", "fwd bwd win")
class SparseBufferMoves(SparseBuffer):
    def loss(self, x: Any, y: Any) -> Any:
        for module in self.bare.modules():
            if isinstance(module, Graph):
                module.adjacency.values().mul_(0.99)
        return super().loss(x, y)
