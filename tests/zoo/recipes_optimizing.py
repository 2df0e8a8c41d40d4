"""Optimizers and what loops do around their steps."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import nn

from tests.zoo.loop import WIDTH, WIDTH_OUT, Loop, recipe

GRADIENTS = ("grad",)


@recipe("accum_noarg2", "accumulates over 3 batches by itself in `steps()`", "end@4 fwd@5 bwd@5",
        {"end bwd": GRADIENTS})  # fmt: skip
class AccumulateByHand(Loop):
    def train(self, x: Any, y: Any) -> Any:
        loss = self.loss(x, y) / 3
        self.at("fwd")
        loss.backward()
        if self.step % 3 == 0:
            self.opt.step()
            self.opt.zero_grad()
        return loss


@recipe("accum_own", "the same in a loop with `step_end()` for each batch", "end@5 fwd@6 bwd@4",
        {"end bwd": GRADIENTS})  # fmt: skip
class AccumulateOwn(AccumulateByHand):
    own_loop = True


@recipe("accumulate", "`steps(accumulate=2)`", "fwd bwd win end@2")
class Accumulate(Loop):
    accumulate = 2


@recipe("no_sync", "the same under `no_sync()` but for the last batch", "fwd bwd win end")
class NoSync(Accumulate):
    model: Any

    def train(self, x: Any, y: Any) -> Any:
        with contextlib.nullcontext() if self.ends_step else self.model.no_sync():
            return super().train(x, y)


@recipe("no_sync_own", "the same in a loop of one's own", "fwd bwd win end", {"win": "global step"})
class NoSyncOwn(NoSync):
    own_loop = True


class Counting(torch.optim.SGD):
    """Its own `state_dict()` has a counter, on which the next update depends."""

    count = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.count
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "count"})


@recipe("opt_attr", "a counter that the optimizer's own `state_dict()` carries", "bwd win")
class OwnState(Loop):
    def optimizers(self) -> list[Any]:
        return [Counting(self.bare.parameters(), lr=0.05)]


class Lookahead(torch.optim.SGD):
    """Slow weights in its own `state_dict()`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.count = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        self.count += 1
        if self.count % 3 == 0:
            with torch.no_grad():
                for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                    p.copy_(slow.lerp_(p, 0.5))
        return result

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"slow": self.slow, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for slow, saved in zip(self.slow, state_dict["slow"], strict=True):
            slow.copy_(saved)
        self.count = state_dict["count"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


@recipe("lookahead", "Lookahead's slow weights in the optimizer's own `state_dict()`", "bwd win fwd end")
class LookaheadLoop(Loop):
    def optimizers(self) -> list[Any]:
        return [Lookahead(self.bare.parameters())]


@recipe("moved_group", "a parameter moves to the group without decay", "fwd@3 bwd win@5 end@4")
class MovedGroup(Loop):
    def optimizers(self) -> list[Any]:
        first, *rest = self.bare.parameters()
        return [torch.optim.AdamW([{"params": rest, "weight_decay": 0.5}, {"params": [first], "weight_decay": 0.0}])]

    def after_log(self) -> None:
        if self.step == 2:
            decayed, plain = self.opt.param_groups
            plain["params"].append(decayed["params"].pop(0))


def weaken(optimizer: Any) -> None:
    """Its moments are half of what they were, and its state is another object."""
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        values["exp_avg"] *= 0.5
    optimizer.load_state_dict(state)


@recipe("state_loaded", "after some updates, `load_state_dict()` of the optimizer", "fwd bwd@5 win@7 end@5",
        {"win": "exp_avg"})  # fmt: skip
class StateLoaded(Loop):
    def after_log(self) -> None:
        if self.step in {3, 4, 7}:
            weaken(self.opt)


@recipe("state_loaded_first", "the same before the forward pass", "fwd@7 bwd@5 win@7 end@6")
class StateLoadedFirst(StateLoaded):
    def before_forward(self, batch: Any) -> Any:
        super().after_log()
        return batch

    def after_log(self) -> None:
        """Not there."""


class HiddenCount(torch.optim.SGD):
    """A counter that no `state_dict()` has."""

    count = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.count
        return super().step(closure)


@recipe("opt_hidden", "an attribute of the optimizer that no `state_dict()` has", "bwd", {"all": "count"})
class HiddenState(Loop):
    def optimizers(self) -> list[Any]:
        return [HiddenCount(self.bare.parameters(), lr=0.05)]


@recipe("lbfgs", "LBFGS with a closure", "fwd bwd win", price="a copy of the state in host memory")
class Lbfgs(Loop):
    def optimizers(self) -> list[Any]:
        return [torch.optim.LBFGS(self.bare.parameters(), lr=0.1, max_iter=2)]

    def train(self, x: Any, y: Any) -> Any:
        def closure() -> Any:
            self.opt.zero_grad()
            loss = self.loss(x, y)
            self.at("fwd")
            loss.backward()
            return self.agreed(loss.detach())

        return self.opt.step(closure)

    def agreed(self, loss: Any) -> Any:
        torch.distributed.all_reduce(loss)
        return loss


@recipe("lbfgs_local_loss", "the same, each rank returns its own loss, which LBFGS keeps", "fwd bwd win",
        {"win": "prev_loss"}, mixes=False)  # fmt: skip
class LbfgsLocal(Lbfgs):
    def agreed(self, loss: Any) -> Any:
        return loss


class Sam(torch.optim.SGD):
    """SAM as an optimizer with a closure."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        weights = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        moves = [0.05 * p.grad / (p.grad.norm() + 1e-6) for p in weights]
        torch._foreach_add_(weights, moves)
        with torch.enable_grad():
            loss = closure()
        torch._foreach_sub_(weights, moves)
        super().step()
        return loss


@recipe("sam_closure", "SAM that calls its closure while the weights are perturbed", "fwd bwd win", nothing=("bwd",))
class SamClosure(Loop):
    def optimizers(self) -> list[Any]:
        return [Sam(self.bare.parameters(), lr=0.05)]

    def options(self) -> dict[str, Any]:
        return {"copy": True}

    def train(self, x: Any, y: Any) -> Any:
        def closure() -> Any:
            self.opt.zero_grad()
            loss = self.loss(x, y)
            loss.backward()
            return loss.detach()

        closure()
        self.at("fwd")
        return self.opt.step(closure)


class With(Loop):
    """Another optimizer."""

    def weights(self) -> list[nn.Parameter]:
        return [p for p in self.bare.parameters() if p.requires_grad]


@recipe("amsgrad_fused", "fused AMSGrad", "bwd win")
class FusedAmsgrad(With):
    def optimizers(self) -> list[Any]:
        return [torch.optim.Adam(self.weights(), lr=0.01, amsgrad=True, fused=True)]


@recipe("lr_tensor", "lr in a tensor, multiplied in place before the forward pass", "bwd win")
class TensorLr(With):
    def optimizers(self) -> list[Any]:
        return [torch.optim.AdamW(self.weights(), lr=torch.tensor(0.01), foreach=False)]

    def before_forward(self, batch: Any) -> Any:
        self.opt.param_groups[0]["lr"].mul_(0.9)
        return super().before_forward(batch)


@recipe("adafactor", "Adafactor", "bwd win end")
class Adafactor(With):
    def optimizers(self) -> list[Any]:
        return [torch.optim.Adafactor(self.weights(), lr=0.05)]


@recipe("asgd_nadam", "ASGD and NAdam, half of the weights each", "bwd win end mid", nothing=("mid", "bwd"))
class TwoKinds(With):
    def optimizers(self) -> list[Any]:
        first, rest = self.weights()[:2], self.weights()[2:]
        return [torch.optim.ASGD(first, lr=0.05, t0=2), torch.optim.NAdam(rest, lr=0.01)]


@recipe("muon_adamw", "Muon for matrices, AdamW for the rest, `copy=True`", "bwd win mid fwd")
class MuonAdamW(With):
    def optimizers(self) -> list[Any]:
        matrices = [p for p in self.weights() if p.ndim == 2]
        rest = [p for p in self.weights() if p.ndim != 2]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]

    def options(self) -> dict[str, Any]:
        return {"copy": True}


@recipe("groups_clip", "decayed and other weights in two groups, clipped gradients (timm, nanoGPT)", "bwd win end")
class GroupsAndClip(With):
    def optimizers(self) -> list[Any]:
        decayed = [p for p in self.weights() if p.ndim > 1]
        others = [p for p in self.weights() if p.ndim <= 1]
        return [torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.01)]

    def after_backward(self) -> None:
        super().after_backward()
        nn.utils.clip_grad_norm_(self.bare.parameters(), 0.5)


@recipe("amp_inf", "bf16 autocast, GradScaler with a step that is skipped", "fwd@4 bwd@4 win@4 end@3")
class Amp(With):
    def setup(self) -> None:
        super().setup()
        self.extras["scaler"] = self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)

    def loss(self, x: Any, y: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            loss = super().loss(x, y)
        return loss * float("inf") if self.step == 4 else loss

    def backward(self, loss: Any) -> None:
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.bare.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()


@recipe("amp_after_inf", "the same, in the step after that", "win@5 fwd@5")
class AmpAfter(Amp):
    pass


@recipe(
    "skipped_steps",
    "the loop leaves out `optimizer.step()` in every third step",
    "bwd@7 win@6 end@6 fwd@7",
    {"end": "gradients"},
)
class Skipped(Loop):
    def update(self) -> None:
        if self.step % 3:
            super().update()


@recipe("grow_groups", "`add_param_group` in step 4 (gradual unfreezing)", "bwd@6 win@5 end@3 fwd@6",
        {"win": "parameters without an optimizer", "end": "gradients"})  # fmt: skip
class GrowGroups(Loop):
    bare: Any

    def optimizers(self) -> list[Any]:
        return [torch.optim.AdamW(self.bare[-1].parameters(), lr=0.01)]

    def before_forward(self, batch: Any) -> Any:
        if self.step >= 4 and len(self.opt.param_groups) == 1:
            self.opt.add_param_group({"params": self.bare[0].parameters(), "lr": 0.005})
        return super().before_forward(batch)


@recipe("unfreeze", "layers unfrozen at an epoch's beginning, `find_unused_parameters=True`", "bwd@5 win@5 end@4 fwd@6")
class Unfreeze(Loop):
    bare: Any

    def ddp(self) -> dict[str, Any]:
        return super().ddp() | {"find_unused_parameters": True}

    def before_forward(self, batch: Any) -> Any:
        self.bare[0].requires_grad_(self.epoch > 1)
        return super().before_forward(batch)

    def optimizers(self) -> list[Any]:
        return [torch.optim.AdamW(self.bare.parameters(), lr=0.01)]


@recipe("gradnoise4", "gradient noise from torch's stream in every fourth step", "win@4 bwd@4", {"win": "rng"})
class GradientNoise(Loop):
    def after_backward(self) -> None:
        super().after_backward()
        if self.step % 4 == 0:
            generator = torch.Generator().manual_seed(int(torch.randint(1000, ())) // 1000)  # all ranks alike
            for p in self.bare.parameters():
                if p.grad is not None:
                    p.grad.add_(torch.randn(p.shape, generator=generator), alpha=0.01)


@recipe("gradnoise_after", "the same, in the step after that", "win@5 fwd@5")
class GradientNoiseAfter(GradientNoise):
    pass


@recipe("gradient_penalty", "gradient penalty with a double backward", "bwd win")
class Penalty(Loop):
    def loss(self, x: Any, y: Any) -> Any:
        x = x.requires_grad_()
        out = self.model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return nn.functional.mse_loss(out, y) + 0.1 * slope.square().mean()


@recipe("three_forwards", "three forward passes before one backward", "bwd win fwd")
class ThreeForwards(Loop):
    def ddp(self) -> dict[str, Any]:
        return super().ddp() | {"broadcast_buffers": False}

    def loss(self, x: Any, y: Any) -> Any:
        return sum(super(ThreeForwards, self).loss(x * scale, y) for scale in (1.0, 0.5, 0.25))


@recipe("sparse", "sparse embedding with SparseAdam beside AdamW", "bwd win end")
class Sparse(With):
    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), Tokens()]

    def optimizers(self) -> list[Any]:
        sparse = [p for name, p in self.bare.named_parameters() if "tokens" in name]
        dense = [p for name, p in self.bare.named_parameters() if "tokens" not in name]
        return [torch.optim.AdamW(dense, lr=0.01), torch.optim.SparseAdam(sparse, lr=0.01)]

    def options(self) -> dict[str, Any]:
        return {"copy": True}


class Tokens(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(x + self.tokens((x.detach()[:, 0].abs() * 7).long() % 32))


@recipe("no_ddp", "gradients all-reduced by hand, without DDP", "bwd win fwd")
class NoDdp(Loop):
    def wrap(self, net: nn.Module) -> nn.Module:
        return net

    def net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH_OUT))

    def after_backward(self) -> None:
        super().after_backward()
        for p in self.bare.parameters():
            if p.grad is not None:
                torch.distributed.all_reduce(p.grad)
                p.grad /= self.ranks


class ByMethod(nn.Module):
    """A network that is never called itself."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.body(x))


@recipe("no_ddp_method", "the same, and the loop calls a method of the model instead of the model", "bwd win fwd")
class NoDdpMethod(NoDdp):
    def net(self) -> nn.Module:
        return ByMethod(super().net())

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.model.logits(x), y)  # type: ignore[operator]


class Averaging(torch.optim.Optimizer):
    """As schedule-free optimizers do, it trains one point and shows another one between `eval()` and `train()`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "k": 0, "shown": False})

    @torch.no_grad()
    def swing(self, shown: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["shown"] is not shown:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
                group["shown"] = shown

    def eval(self) -> None:
        self.swing(True, 1 - 1 / 0.9)

    def train(self) -> None:
        self.swing(False, 1 - 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("z", p.clone())
                p.lerp_(state["z"], 1 / group["k"]).add_(p.grad, alpha=-0.1 * group["lr"])
                state["z"].sub_(p.grad, alpha=group["lr"])


@recipe("schedule_free", "an optimizer whose `eval()` moves the weights at an epoch's end, and `train()` back",
        "fwd@7 bwd@6 win@4 end@4", {"win": "eval()", "end": "outside of optimizer.step()"})  # fmt: skip
class ScheduleFree(Loop):
    def optimizers(self) -> list[Any]:
        return [Averaging(self.bare.parameters())]

    def before_forward(self, batch: Any) -> Any:
        self.opt.train()
        return super().before_forward(batch)

    def epoch_end(self) -> None:
        super().epoch_end()
        self.opt.eval()
