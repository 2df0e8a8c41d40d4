"""Weights and buffers that move outside of the update."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.zoo.loop import WIDTH, WIDTH_IN, WIDTH_OUT, Loop, recipe


@recipe("plain", "DDP, BatchNorm, dropout, AdamW, logged loss", "fwd bwd win end epoch")
class Plain(Loop):
    pass


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


@recipe("moco", "momentum encoder of frozen parameters, `b.data = ...` first thing in forward", "bwd fwd win end")
class Moco(Loop):
    in_place = False

    def net(self) -> nn.Module:
        return MomentumEncoder(self.in_place)


@recipe("moco_inplace", "the same with `b.mul_().add_()`", "bwd fwd win end")
class MocoInPlace(Moco):
    in_place = True


@recipe("moco_copy", "the same with `copy=True`", "fwd end", price="a copy of the state in host memory")
class MocoCopy(MocoInPlace):
    def options(self) -> dict[str, Any]:
        return {"copy": True}


class Codebook(nn.Module):
    """VQ-VAE's codebook as it is widely written: buffers of 128 KiB, changed through `.data`."""

    def __init__(self, codes: int = 2048) -> None:
        super().__init__()
        self.register_buffer("embed", torch.randn(codes, WIDTH))
        self.register_buffer("embed_avg", self.embed.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = torch.cdist(x, self.embed[:64]).argmin(1)
        if self.training:
            total = torch.zeros_like(self.embed).index_add_(0, codes, x.detach())
            self.embed_avg.data.mul_(0.9).add_(total, alpha=0.1)
            self.embed.data.copy_(self.embed_avg / 2)
        return x + self.embed[codes].detach() - x.detach()


@recipe("vq_data", "VQ-VAE codebook in large buffers, `embed.data.copy_()`", "bwd fwd win")
class VqData(Loop):
    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), Codebook()]


@recipe("vq_data_nb", "the same with `broadcast_buffers=False`: each rank has its own", "bwd fwd win end")
class VqDataOwn(VqData):
    ranks = 3

    def ddp(self) -> dict[str, Any]:
        return super().ddp() | {"broadcast_buffers": False}


@recipe("vq_small", "VQ-VAE codebook in small buffers", "bwd")
class VqSmall(Loop):
    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), Codebook(64)]


class Bank(nn.Module):
    """A memory bank: one row of a large buffer is written in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(4096, WIDTH))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.bank.data[int(self.place) : int(self.place) + len(x)] = x.detach()
            self.place += len(x)
        return x + self.bank[:32].mean(0)


@recipe("bigbuf_data", "memory bank in a large buffer of each rank, `bank.data[i:j] = x`", "bwd fwd win end")
class BigBuffer(Loop):
    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), Bank()]

    def ddp(self) -> dict[str, Any]:
        return super().ddp() | {"broadcast_buffers": False}


class LazyNone(nn.Module):
    """A buffer that is None until the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("m", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(0)
        self.m = mean if self.m is None else 0.9 * self.m + 0.1 * mean
        return x - self.m


@recipe("lazy_none", "`register_buffer('m', None)`, made in the first forward, moved in each", "bwd fwd win")
class Lazy(Loop):
    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), LazyNone()]


@recipe("sam_manual", "SAM by hand: weights perturbed, second backward, put back, step", "bwd fwd mid@5")
class SamByHand(Loop):
    def update(self) -> None:
        weights = [p for p in self.bare.parameters() if p.grad is not None]
        moves = [0.05 * p.grad / (p.grad.norm() + 1e-6) for p in weights if p.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(weights, moves)
        self.opt.zero_grad()
        loss = self.loss(*self.batch)
        self.at("mid")
        loss.backward()
        with torch.no_grad():
            torch._foreach_sub_(weights, moves)
        self.opt.step()

    def before_forward(self, batch: Any) -> Any:
        self.batch = batch
        return super().before_forward(batch)


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


class Words(nn.Module):
    """An embedding that renormalises its rows in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.em = nn.Embedding(32, WIDTH, max_norm=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(x + self.em((x.detach()[:, 0].abs() * 7).long() % 32))


@recipe(
    "embed_maxnorm",
    "`nn.Embedding(max_norm=1.0)`: replicas drift apart in forward",
    "bwd fwd win end",
    {"win end": "em.weight"},
    price="copies of the table in each step",
)
class EmbeddingMaxNorm(Loop):
    ranks = 3

    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), Words()]


@recipe(
    "embed_maxnorm_own_loop",
    "the same in a loop of one's own: they drift apart before its first step",
    "bwd fwd win end",
    {"win end": "em.weight"},
)
class EmbeddingMaxNormOwnLoop(EmbeddingMaxNorm):
    own_loop = True


@recipe("clamp_after_log", "WGAN's weights clamped after the log", "win end bwd", {"win": "weight"})
class ClampAfterLog(Loop):
    def after_log(self) -> None:
        super().after_log()
        with torch.no_grad():
            for p in self.bare.parameters():
                p.clamp_(-0.2, 0.2)


@recipe("clamp_before_log", "WGAN's weights clamped directly after the update", "win end", {"win": "weight"})
class ClampBeforeLog(Loop):
    def after_update(self) -> None:
        super().after_update()
        for p in self.bare.parameters():
            p.data.clamp_(-0.2, 0.2)


class Target(nn.Module):
    """BYOL: a target network inside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Sequential(nn.Linear(WIDTH_IN, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH_OUT))
        self.k = copy.deepcopy(self.q).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            aim = self.k(x)
        return torch.as_tensor(self.q(x) + aim)


class Byol(Loop):
    bare: Any

    def net(self) -> nn.Module:
        return Target()

    def follow(self) -> None:
        for a, b in zip(self.bare.q.parameters(), self.bare.k.parameters(), strict=True):
            b.data.mul_(0.9).add_(a.data, alpha=0.1)


@recipe("byol_target_after", "target network updated after the log", "win bwd end", {"win": "k."})
class ByolAfter(Byol):
    def after_log(self) -> None:
        super().after_log()
        self.follow()


@recipe("byol_target", "target network updated between update and log", "win bwd end", {"win": "k."})
class ByolBefore(Byol):
    def after_update(self) -> None:
        super().after_update()
        self.follow()


@recipe("counter", "a Python counter of the loop, which scales the loss", "bwd", beside=("count",), mixes=False)
class Counter(Loop):
    count = 0

    def loss(self, x: Any, y: Any) -> Any:
        self.count += 1
        return super().loss(x, y) * self.count


class Remembering(nn.Module):
    """A tensor attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.detach().mean(0)
        return x + self.seen


@recipe("stateful_attr", "a tensor attribute that is no buffer", "bwd")
class StatefulAttribute(Loop):
    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), Remembering()]


class Scale(nn.Module):
    by = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


@recipe("late_attr", "an attribute moves for the first time in step 20, on one rank, which neither dies nor writes",
        "fwd@22 end@22", {"all": ".by changed for the first time"}, mixes=False, victim=2)  # fmt: skip
class LateAttribute(Loop):
    ranks, epochs, per_epoch = 3, 1, 24

    def blocks(self) -> list[nn.Module]:
        self.scale = Scale()
        return [*super().blocks(), self.scale]

    def after_update(self) -> None:
        super().after_update()
        if (self.step, self.rank) == (20, 1):
            self.scale.by = 2.0


class Scaling(nn.Module):
    """Multiplies by the numbers that an iterator gives, one for each forward pass."""

    def __init__(self, numbers: Iterator[float]) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.numbers)


class Falling:
    """An iterator of the user's own."""

    def __init__(self) -> None:
        self.number = 1.0

    def __next__(self) -> float:
        self.number *= 0.9
        return self.number

    def __iter__(self) -> Iterator[float]:
        return self


@recipe("iterator_attr", "a module that asks an iterator for a number in each forward pass", "fwd bwd win end")
class IteratorAttribute(Loop):
    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), Scaling(Falling())]


@recipe("generator_attr", "the same with a generator, which nobody can save", "fwd bwd win end", {"all": "generator"})
class GeneratorFunctionAttribute(Loop):
    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), Scaling(0.9**step for step in itertools.count())]


class Statistics(nn.Module):
    """Keeps what it has seen in an array with fields, as nobody can save it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = np.zeros(2, [("mean", "f4"), ("count", "i4")])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["count"][0] += 1
        self.seen["mean"][0] += 0.1 * (float(x.detach().mean()) - self.seen["mean"][0])
        return x / (1 + abs(float(self.seen["mean"][0])))


@recipe("fields_attr", "a module with statistics in an array with fields", "fwd bwd win end", {"all": "seen"})
class FieldsAttribute(Loop):
    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), Statistics()]


@recipe("parameter_attr", "gradients divided by their average norm, an attribute of each parameter", "fwd bwd win end",
        {"win end": "norm"})  # fmt: skip
class ParameterAttribute(Loop):
    def setup(self) -> None:
        super().setup()
        for parameter in self.bare.parameters():
            parameter.norm = 1.0  # type: ignore[attr-defined]

    def after_backward(self) -> None:
        for parameter in self.bare.parameters():
            parameter.norm += 0.1 * (self.norm_of(parameter.grad) - parameter.norm)  # type: ignore[attr-defined]
            parameter.grad.div_(parameter.norm)  # type: ignore[attr-defined,union-attr]

    def norm_of(self, gradient: Any) -> float:
        return float(gradient.norm())


class Normalising:
    """Nobody but a parameter's hook has it."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.norm = 1.0
        parameter.register_post_accumulate_grad_hook(self.hook)

    def hook(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.norm += 0.1 * (float(parameter.grad.norm()) - self.norm)
        parameter.grad.div_(self.norm)


@recipe("parameter_hook", "the same, in an object that a parameter's hook holds", "fwd end", beside=("norm",))
class ParameterHook(Loop):
    def setup(self) -> None:
        super().setup()
        for parameter in self.bare.parameters():
            Normalising(parameter)


class Average:
    """Of losses. Its state lacks a number that it goes by."""

    def __init__(self) -> None:
        self.mean, self.seen = 1.0, 0

    def update(self, value: float) -> float:
        self.seen += 1
        self.mean += (value - self.mean) / self.seen
        return self.mean

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


@recipe(
    "kept_back",
    "a loss is divided by an extra's average, whose state_dict() leaves out of how many it is",
    "fwd@6 win@6 end",
    beside=("seen",),
)
class KeptBack(Loop):
    def setup(self) -> None:
        super().setup()
        self.average = self.local_extras["average"] = Average()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().loss(x, y)
        return loss / (1 + abs(self.average.update(loss.item())))


class Part(Enum):
    HEAD = 1


class Tallying(nn.Module):
    """Has a number in a dict whose keys are no plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = {Part.HEAD: 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tally[Part.HEAD] *= 0.9
        return x * self.tally[Part.HEAD]


@recipe("keys_attr", "a number in a dict of the module whose keys are members of an Enum", "fwd bwd win end")
class KeysAttribute(Loop):
    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), Tallying()]
