"""A tensor that is made of others, as those of quantized optimizers are: codes and a scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing


class Eighth(torch.Tensor):
    """Eight bits for each element, and one scale; what is written into it is rounded."""

    codes: torch.Tensor
    scale: torch.Tensor
    levels: int

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, levels: int = 127) -> Eighth:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, levels: int = 127) -> None:
        self.codes, self.scale, self.levels = codes, scale, levels

    @classmethod
    def zeros(cls, shape: Sequence[int]) -> Eighth:
        """So many zeros."""
        return cls(torch.zeros(*shape, dtype=torch.int8), torch.zeros(()))

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"levels": self.levels}

    @classmethod
    def __tensor_unflatten__(cls, inner: Mapping[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Eighth:
        return cls(inner["codes"], inner["scale"], context["levels"])

    def whole(self) -> torch.Tensor:
        """As a plain tensor."""
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            target, source = args[0], args[1].whole() if isinstance(args[1], cls) else args[1]
            scale = source.abs().max().clamp(min=1e-12) / target.levels
            target.codes.copy_((source / scale).round())
            target.scale.copy_(scale)
            return target
        if function is torch.ops.aten.detach.default:
            one = cls(args[0].codes, args[0].scale, args[0].levels)
            return return_and_correct_aliasing(function, args, kwargs or {}, one)
        return function(*[one.whole() if isinstance(one, cls) else one for one in args], **kwargs or {})


class EighthMomentum(torch.optim.Optimizer):
    """SGD whose momentum is made of these."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = Eighth.zeros(parameter.shape)
                moment = state["momentum"]
                moment.copy_(moment.whole() * group["momentum"] + parameter.grad)
                parameter.sub_(moment.whole(), alpha=group["lr"])
