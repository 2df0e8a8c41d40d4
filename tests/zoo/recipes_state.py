"""What loops and optimizers do to the optimizer's state."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.loop import Loop, recipe


@recipe("offload_state", "optimizer state taken out for the forward and backward pass, to save memory", "fwd bwd win")
class Offload(Loop):
    out: dict[Any, Any]

    def before_forward(self, batch: Any) -> Any:
        self.out = {p: self.opt.state.pop(p) for p in [*self.opt.state]}
        return super().before_forward(batch)

    def after_backward(self) -> None:
        super().after_backward()
        self.opt.state.update(self.out)


@recipe("offload_key", "the same with one key, in place of which None is left", "fwd bwd")
class OffloadKey(Loop):
    def before_forward(self, batch: Any) -> Any:
        self.out = {p: state.get("exp_avg") for p, state in self.opt.state.items()}
        for p in self.out:
            self.opt.state[p]["exp_avg"] = None
        return super().before_forward(batch)

    def after_backward(self) -> None:
        super().after_backward()
        for p, moment in self.out.items():
            self.opt.state[p]["exp_avg"] = moment


@recipe("offload_over_end", "the same from the update to the next one", "fwd bwd win end",
        {"all": ("taken out", "takes optimizer state out")})  # fmt: skip
class OffloadOverEnd(Loop):
    out: dict[Any, Any] | None = None

    def after_update(self) -> None:
        super().after_update()
        self.out = {p: self.opt.state.pop(p) for p in [*self.opt.state]}

    def after_backward(self) -> None:
        super().after_backward()
        if self.out is not None:
            self.opt.state.update(self.out)


@recipe("empty_moments", "moments whose memory is given back for the forward and backward pass", "fwd bwd",
        {"fwd": "emptied", "bwd": "emptied"})  # fmt: skip
class EmptyMoments(Loop):
    def before_forward(self, batch: Any) -> Any:
        self.out = [(state["exp_avg"], state["exp_avg"].data) for state in self.opt.state.values()]
        for moment, _ in self.out:
            moment.data = torch.empty(0)
        return super().before_forward(batch)

    def after_backward(self) -> None:
        super().after_backward()
        for moment, data in self.out:
            moment.data = data
