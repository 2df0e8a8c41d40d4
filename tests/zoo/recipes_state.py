"""What loops and optimizers do to the optimizer's state."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.zoo.loop import Loop, recipe
from tests.zoo.recipes_optimizing import OwnState


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
        {"all": ("was removed", "removes optimizer state", "the amount of optimizer state")})  # fmt: skip
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


class Own(torch.optim.SGD):
    """Keeps a share of its own on each rank, in one of several forms."""

    form = "tensor"

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        state = self.state[self.param_groups[0]["params"][0]]
        share = 0.9 * self.share() + 0.01 * (dist.get_rank() + 1)
        if self.form == "tensor":
            state.setdefault("share", torch.zeros(200)).fill_(share)
        elif self.form == "tensors":
            state["share"] = [1, [torch.tensor(share, dtype=torch.float64)]]
        elif self.form == "list":
            state["share"] = [{3: (share,)}]
        else:
            state[7] = np.float64(share)
        return result

    def share(self) -> float:
        state = self.state[self.param_groups[0]["params"][0]]
        match state.get("share", state.get(7, 0.0)):
            case [_, [torch.Tensor() as share]]:
                return float(share)
            case [{3: (share,)}]:
                return float(share)
            case torch.Tensor() as several:
                return float(several[0])
            case other:
                return float(other)


BY_RANK = ("may differ between ranks",)


@recipe("own_tensor", "a tensor in the optimizer's state that differs by rank", "fwd bwd win end", {"all": BY_RANK})
class OwnTensor(Loop):
    opt: Any

    def optimizers(self) -> list[Any]:
        return [Own(self.bare.parameters(), lr=0.05, momentum=0.9)]

    def loss(self, x: Any, y: Any) -> Any:
        return super().loss(x, y) * (1 + self.inner[0].share())


@recipe("own_tensor_list", "the same in a list", "fwd win", {"all": BY_RANK})
class OwnTensors(OwnTensor):
    def setup(self) -> None:
        super().setup()
        self.inner[0].form = "tensors"


@recipe("own_number_list", "numbers in lists and dicts of that state that differ by rank", "fwd bwd win end",
        {"bwd win end": BY_RANK})  # fmt: skip
class OwnList(OwnTensor):
    def setup(self) -> None:
        super().setup()
        self.inner[0].form = "list"


@recipe("own_numpy", "numpy's numbers there, under keys that are no text", "fwd bwd", {"bwd": BY_RANK})
class OwnNumpy(OwnTensor):
    def setup(self) -> None:
        super().setup()
        self.inner[0].form = "numpy"


@recipe("own_groups", "hyperparameters that differ by rank, in a dict", "fwd bwd", {"all": BY_RANK})
class OwnGroups(Loop):
    def before_forward(self, batch: Any) -> Any:
        scale = self.opt.param_groups[0].setdefault("loss", {"scale": 1.0 + self.rank})
        scale["scale"] *= 0.9
        return super().before_forward(batch)

    def loss(self, x: Any, y: Any) -> Any:
        return super().loss(x, y) * self.opt.param_groups[0]["loss"]["scale"]


@recipe("list_reordered", "a list in the optimizer's state that the loop reorders before the update", "fwd bwd win",
        {"fwd bwd": "history"})  # fmt: skip
class Reordered(Loop):
    opt: Any

    def before_forward(self, batch: Any) -> Any:
        states = self.opt.state
        if states:
            state = next(iter(states.values()))
            history = state.setdefault("history", [torch.full((3,), float(n)) for n in range(3)])
            history.append(history.pop(0))
            self.weight = 1 + float(history[0][0])
        return super().before_forward(batch)

    weight = 1.0

    def loss(self, x: Any, y: Any) -> Any:
        return super().loss(x, y) * self.weight


@recipe("late_key", "averaged weights in that state from step 5 on, which the loop scales", "fwd@7 bwd@8 win@6",
        {"fwd bwd": "average"})  # fmt: skip
class LateKey(Loop):
    def after_update(self) -> None:
        super().after_update()
        if self.step == 5:
            for p in self.opt.state:
                self.opt.state[p]["average"] = p.detach().clone()

    def before_forward(self, batch: Any) -> Any:
        if self.step > 5:
            for p in self.opt.state:
                self.opt.state[p]["average"].mul_(0.9)
        return super().before_forward(batch)


@recipe("shared_step", "one `step` tensor for all parameters, which each of them counts up", "fwd bwd win")
class SharedStep(Loop):
    def after_update(self) -> None:
        super().after_update()
        if self.step == 1:
            states = [*self.opt.state.values()]
            for state in states:
                state["step"] = states[0]["step"]


@recipe("flat_moments", "a moment and the memory in which it lies, both in the optimizer's state", "fwd win",
        {"all": "share part of their memory"})  # fmt: skip
class FlatMoments(Loop):
    def after_update(self) -> None:
        super().after_update()
        if self.step == 1:
            for state in self.opt.state.values():
                flat = torch.cat([state["exp_avg"].flatten(), state["exp_avg_sq"].flatten()])
                state["flat"], state["exp_avg"] = flat, flat[: state["exp_avg"].numel()].view_as(state["exp_avg"])


@recipe("group_generator", "a generator among the hyperparameters, seeded by rank", "fwd bwd win end", {"all": BY_RANK})
class GroupGenerator(Loop):
    def optimizers(self) -> list[Any]:
        optimizers = super().optimizers()
        optimizers[0].param_groups[0]["noise"] = torch.Generator().manual_seed(7 + self.rank)
        return optimizers

    def before_forward(self, batch: Any) -> Any:
        x, y = super().before_forward(batch)
        generator = self.inner[0].param_groups[0]["noise"]
        return x + 0.1 * torch.randn(x.shape, generator=generator), y


@recipe("state_generator", "the same in the state of a parameter", "fwd bwd", {"all": ("noise",)})
class StateGenerator(Loop):
    def generator(self) -> torch.Generator:
        state = self.opt.state[next(iter(self.opt.state))]
        if "noise" not in state:
            state["noise"] = torch.Generator().manual_seed(7 + self.rank)
        return state["noise"]  # type: ignore[no-any-return]

    def before_forward(self, batch: Any) -> Any:
        x, y = super().before_forward(batch)
        return (x + 0.1 * torch.randn(x.shape, generator=self.generator()) if self.opt.state else x), y


@recipe(
    "own_state_late", "the loop adds to a counter of the optimizer's own after the log", "win", {"win": "optimizer"}
)
class OwnStateLate(OwnState):
    def after_log(self) -> None:
        super().after_log()
        self.inner[0].count += 2


class Scaled(torch.optim.SGD):
    """Has a number for each parameter, which scales its gradient."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(self.state[p].setdefault("scale", 1.0))
        return super().step(closure)


@recipe("number_late", "numbers in the optimizer's state scaled after the log", "win", {"win": "numbers"})
class NumberLate(Loop):
    def optimizers(self) -> list[Any]:
        return [Scaled(self.bare.parameters(), lr=0.05)]

    def after_log(self) -> None:
        super().after_log()
        for state in self.opt.state.values():
            state["scale"] *= 0.9


@recipe("frozen_in_turns", "layers frozen and thawed in turns after the log", "win", {"win": "requires_grad"})
class FrozenInTurns(Loop):
    def ddp(self) -> dict[str, Any]:
        return super().ddp() | {"find_unused_parameters": True}

    def after_log(self) -> None:
        super().after_log()
        self.bare[0].requires_grad_(self.step % 2 == 0)
        self.bare[4].requires_grad_(self.step % 2 == 1)


@recipe("reset_by_epoch", "moments deleted at each epoch's end", "end@4 win@8 fwd@9",
        {"end": "was removed", "win": "the amount of optimizer state"})  # fmt: skip
class ResetByEpoch(Loop):
    epochs = 3

    def epoch_end(self) -> None:
        super().epoch_end()
        for p in [*self.opt.state]:
            del self.opt.state[p]
