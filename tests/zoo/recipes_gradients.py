"""Recipes in which gradients outlive the update that has used them, or are zeros where others have none."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.loop import WIDTH, WIDTH_IN, WIDTH_OUT, Loop, recipe


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
