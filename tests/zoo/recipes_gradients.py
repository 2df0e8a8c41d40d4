"""Recipes in which gradients outlive the update that has used them, or are zeros where others have none."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.zoo.loop import BATCH, WIDTH, WIDTH_IN, WIDTH_OUT, Loop, recipe


class Decayed(Loop):
    """SGD with momentum and weight decay, which moves whatever has a gradient."""

    def optimizers(self) -> list[Any]:
        return [torch.optim.SGD(self.bare.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)]

    def zero(self) -> None:
        """What stands in the place of zero_grad()."""
        self.opt.zero_grad(set_to_none=False)

    def train(self, x: Any, y: Any) -> Any:
        self.zero()
        loss = self.loss(x, y)
        self.at("fwd")
        self.backward(loss)
        self.after_backward()
        self.update()
        return loss


@recipe("grad_momentum", "gradients are halved in place of zero_grad(): momentum of the gradient",
        "fwd bwd@6 win end epoch", {"win end bwd epoch": "gradients"}, mixes=False)  # fmt: skip
class GradientMomentum(Decayed):
    def zero(self) -> None:
        for parameter in self.bare.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


@recipe("never_zeroed", "gradients are never set to zero; killed before that could show, and after",
        "bwd@2 win@1 fwd@6", {"bwd win": "gradients"}, mixes=False)  # fmt: skip
class NeverZeroed(Decayed):
    def zero(self) -> None:
        """Nothing."""


@recipe("model_zero_grad", "`model.zero_grad()`, not seen by lastwords, and gradients that are DDP's bucket views",
        "fwd@2 bwd@3 win end")  # fmt: skip
class ModelZeroGrad(Decayed):
    def ddp(self) -> dict[str, Any]:
        return {"gradient_as_bucket_view": True}

    def zero(self) -> None:
        self.model.zero_grad()


class Skipping(nn.Module):
    """A layer that every second forward pass leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.seldom = nn.Linear(WIDTH_IN, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH_OUT)
        self.whole = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.first(x)
        out = out + self.seldom(out) if self.whole else out
        return torch.as_tensor(self.last(out))


@recipe("zero_not_none", "`zero_grad(set_to_none=False)` and a layer that is used in every second step: zeros decay it",
        "fwd@4 bwd@6 win@6 end@5")  # fmt: skip
class ZeroNotNone(Decayed):
    def net(self) -> nn.Module:
        return Skipping()

    def ddp(self) -> dict[str, Any]:
        return {"find_unused_parameters": True}

    def loss(self, x: Any, y: Any) -> Any:
        self.bare.whole = self.step % 2 == 1
        return super().loss(x, y)


@recipe("model_zero_not_none", "the same through `model.zero_grad(set_to_none=False)`, which lastwords does not see",
        "fwd@6 bwd@8 win@6 end@7", mixes=False)  # fmt: skip
class ModelZeroNotNone(ZeroNotNone):
    def zero(self) -> None:
        self.model.zero_grad(set_to_none=False)


class Head(Loop):
    """The optimizer has the last layer only; all others collect gradients."""

    def optimizers(self) -> list[Any]:
        return [torch.optim.SGD(self.bare[-1].parameters(), lr=0.05, momentum=0.9)]


@recipe("head_clipped", "the optimizer has the head only, but all parameters are clipped together",
        "fwd end@5 win bwd", {"win end": "gradients"}, mixes=False)  # fmt: skip
class HeadClipped(Head):
    def after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.bare.parameters(), 0.5)


@recipe("group_late", "a group that joins the optimizer between backward pass and update, with what it has collected",
        "fwd bwd", mixes=False)  # fmt: skip
class GroupLate(Head):
    def after_backward(self) -> None:
        if self.step >= 5 and len(self.opt.param_groups) == 1:
            self.opt.add_param_group({"params": self.bare[0].parameters(), "lr": 0.005})


class ByHand(Decayed):
    """Without DDP."""

    def wrap(self, net: nn.Module) -> nn.Module:
        return net

    def blocks(self) -> list[nn.Module]:
        return [nn.ReLU(), nn.Dropout(0.1)]

    def average(self, parameters: Any) -> None:
        """The ranks' mean of the gradients."""
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.ranks


@recipe("flat_gradients", "gradients are views of one flat tensor, which is zeroed and reduced", "fwd bwd win end",
        mixes=False)  # fmt: skip
class FlatGradients(ByHand):
    def setup(self) -> None:
        parameters = [*self.bare.parameters()]
        self.flat = torch.zeros(sum(one.numel() for one in parameters))
        parts = self.flat.split([one.numel() for one in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def zero(self) -> None:
        self.flat.zero_()

    def after_backward(self) -> None:
        dist.all_reduce(self.flat)
        self.flat /= self.ranks


@recipe("frozen_waits", "the second optimizer updates in every second step, its parameters frozen at the step's end",
        "fwd@6 bwd@6 end@5", {"end": "gradients"}, mixes=False)  # fmt: skip
class FrozenWaits(ByHand):
    def optimizers(self) -> list[Any]:
        first, last = self.bare[0].parameters(), self.bare[-1].parameters()
        return [torch.optim.AdamW(last, lr=0.01), torch.optim.SGD(first, lr=0.05, momentum=0.9)]

    def options(self) -> dict[str, Any]:
        return {"copy": True}

    def train(self, x: Any, y: Any) -> Any:
        often, seldom = self.opts
        self.bare[0].requires_grad_(True)
        loss = self.loss(x, y)
        self.at("fwd")
        loss.backward()
        if self.step % 2 == 0:
            self.average(self.bare[0].parameters())
            seldom.step()
            seldom.zero_grad()
        self.bare[0].requires_grad_(False)
        often.zero_grad()
        self.loss(x, y).backward()
        self.average(self.bare[-1].parameters())
        often.step()
        return loss


@recipe("frozen_stale", "a layer frozen in step 3 keeps its last gradient; only what is trained is set to None",
        "fwd@6 bwd@8 win@7 end@5", {"win end": "gradients"}, mixes=False)  # fmt: skip
class FrozenStale(ByHand):
    def zero(self) -> None:
        for parameter in self.bare.parameters():
            if parameter.requires_grad:
                parameter.grad = None

    def after_backward(self) -> None:
        self.average(one for one in self.bare.parameters() if one.requires_grad)

    def update(self) -> None:
        super().update()
        if self.step == 3:
            self.resumed()

    def resumed(self) -> None:
        if self.step >= 3:
            self.bare[0].requires_grad_(False)


@recipe("delayed", "an update with the gradients of the step before; `zero_grad()` and backward pass come after it",
        "fwd end win", {"end win": "gradients"}, mixes=False)  # fmt: skip
class DelayedGradients(ByHand):
    def train(self, x: Any, y: Any) -> Any:
        self.at("fwd")
        dist.all_reduce(torch.zeros(1))
        if self.step > 1:
            self.update()
        self.opt.zero_grad()
        loss = self.loss(x, y)
        self.backward(loss)
        self.average(self.bare.parameters())
        return loss


@recipe("zero_every2", "`zero_grad()` in every second step, and an update in each", "fwd@6 bwd@7 win@6 end@5",
        {"win end": "gradients"}, mixes=False)  # fmt: skip
class ZeroEverySecond(Decayed):
    def zero(self) -> None:
        if self.step % 2:
            self.opt.zero_grad()


@recipe("free_adversarial", "a perturbation in `local_extras` that the gradient of the step before moves",
        "fwd bwd end win", {"end win bwd": ("local_extras", "gradients")}, mixes=False)  # fmt: skip
class FreeAdversarial(Loop):
    def setup(self) -> None:
        self.delta = torch.zeros(BATCH, WIDTH_IN, requires_grad=True)
        self.local_extras["adversary"] = {"delta": self.delta}

    def before_forward(self, batch: Any) -> Any:
        if self.delta.grad is not None:
            with torch.no_grad():
                self.delta.add_(self.delta.grad.sign(), alpha=0.1).clamp_(-0.3, 0.3)
            self.delta.grad = None
        return batch[0] + self.delta, batch[1]


@recipe("module_in_extras", "a discriminator among the extras, with an update of its own in every second step",
        "fwd@4 bwd@6 end", {"end bwd": "gradients"}, mixes=False)  # fmt: skip
class ModuleInExtras(ByHand):
    def setup(self) -> None:
        self.extras["judge"] = self.judge = nn.Linear(WIDTH_OUT, 1)
        self.extras["optimizer"] = self.second = torch.optim.SGD(self.judge.parameters(), lr=0.1)

    def after_backward(self) -> None:
        self.average(self.bare.parameters())

    def loss(self, x: Any, y: Any) -> Any:
        return super().loss(x, y) + self.judge(self.model(x)).mean()

    def modules(self) -> dict[str, nn.Module]:
        return {"": self.bare, "judge": self.judge}

    def before_forward(self, batch: Any) -> Any:
        if self.step % 2:
            self.average(one for one in self.judge.parameters() if one.grad is not None)
            self.second.step()
            self.second.zero_grad()
        return batch
