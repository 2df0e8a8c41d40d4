"""Weights that are cut over several ranks: fully_shard on a mesh of two by two, so that each part has two holders."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from tests.zoo.loop import WIDTH, Loop, recipe
from tests.zoo.recipes_gradients import GradientMomentum, ZeroNotNone
from tests.zoo.recipes_moving import MomentumEncoder, ParameterAttribute
from tests.zoo.recipes_schedules import LossEma


class Hybrid(Loop):
    """HSDP."""

    ranks = 4
    bare: Any

    def blocks(self) -> list[nn.Module]:
        return [nn.ReLU(), nn.Dropout(0.1)]

    def policy(self) -> dict[str, Any]:
        return {}

    def wrap(self, net: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return fully_shard(net, mesh=mesh, **self.policy())


@recipe("hsdp", "HSDP 2 x 2", "bwd win fwd end", mixes=False)
class HybridPlain(Hybrid):
    pass


@recipe("hsdp_loss_ema", "HSDP with lr scaled by an average of the loss, a plain float of the sharded module",
        "fwd bwd win end", {"win end": "loss_ema"}, mixes=False)  # fmt: skip
class HybridLossEma(Hybrid, LossEma):
    pass


@recipe("hsdp_parameter_attr", "HSDP with gradients divided by their average norm, an attribute of each parameter",
        "fwd bwd win end", mixes=False)  # fmt: skip
class HybridAttribute(Hybrid, ParameterAttribute):
    def norm_of(self, gradient: Any) -> float:
        return float(gradient.full_tensor().norm())


@recipe("hsdp_group_attr", "the same in two groups of `fully_shard`, and an attribute that never changes",
        "fwd bwd win end", mixes=False)  # fmt: skip
class HybridGroups(HybridAttribute):
    def wrap(self, net: Any) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(net[0], mesh=mesh)
        net[0].register_forward_pre_hook(lambda *_: self.at("fwd"), prepend=True)  # the outer group is whole by then
        return fully_shard(net, mesh=mesh)

    def setup(self) -> None:
        super().setup()
        for parameter in self.bare.parameters():
            parameter.decays = parameter.ndim > 1

    def before_forward(self, batch: Any) -> Any:
        with torch.no_grad():
            self.values["metric"] = self.model(batch[0]).mean()  # which leaves the outer group whole
        return super().before_forward(batch)


@recipe("hsdp_bf16_clip", "HSDP with bf16 parameters, fp32 reduction, clipped gradients", "bwd win", mixes=False)
class HybridBf16(Hybrid):
    def policy(self) -> dict[str, Any]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return {"mp_policy": policy}

    def loss(self, x: Any, y: Any) -> Any:
        return nn.functional.mse_loss(self.model(x).float(), y)

    def after_backward(self) -> None:
        super().after_backward()
        nn.utils.clip_grad_norm_(self.bare.parameters(), 0.5)


@recipe("hsdp_moco", "HSDP with a momentum encoder updated before forward", "bwd fwd win end", mixes=False)
class HybridMoco(Hybrid):
    def net(self) -> nn.Module:
        return MomentumEncoder(True)

    def wrap(self, net: nn.Module) -> nn.Module:
        net.forward = self.student  # type: ignore[method-assign]
        return super().wrap(net)

    def student(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.bare.q(x) + self.bare.k(x).detach())

    def before_forward(self, batch: Any) -> Any:
        with torch.no_grad():
            for a, b in zip(self.bare.q.parameters(), self.bare.k.parameters(), strict=True):
                b.mul_(0.9).add_(a.detach(), alpha=0.1)
        return super().before_forward(batch)


@recipe("hsdp_ema", "HSDP with an EMA of the local parts in `local_extras`", "bwd win fwd", {"win": "local_extras"},
        mixes=False)  # fmt: skip
class HybridEma(Hybrid):
    def setup(self) -> None:
        super().setup()
        self.local_extras["ema"] = self.ema = {
            name: p.to_local().detach().clone() for name, p in self.bare.named_parameters()
        }

    @torch.no_grad()
    def after_update(self) -> None:
        super().after_update()
        for name, p in self.bare.named_parameters():
            self.ema[name].lerp_(p.to_local(), 0.1)


@recipe("hsdp_offload", "HSDP with CPUOffloadPolicy, kept whole after forward", "bwd win", heavy=True, mixes=False)
class HybridOffload(Hybrid):
    def policy(self) -> dict[str, Any]:
        return {"offload_policy": CPUOffloadPolicy(pin_memory=False), "reshard_after_forward": False}


@recipe("hsdp_accumulate", "HSDP that reduces in every second batch only", "bwd win fwd", heavy=True, mixes=False)
class HybridAccumulate(Hybrid):
    accumulate = 2
    model: Any

    def train(self, x: Any, y: Any) -> Any:
        self.model.set_requires_gradient_sync(self.ends_step)
        return super().train(x, y)


@recipe("hsdp_bn", "HSDP with BatchNorm: each rank has its own statistics", "bwd win end", heavy=True, mixes=False)
class HybridBatchNorm(Hybrid):
    def blocks(self) -> list[nn.Module]:
        return [nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.1)]


@recipe("hsdp_scaler", "HSDP with GradScaler and a step that is skipped", "fwd@4 win@5 end@4", heavy=True, mixes=False)
class HybridScaler(Hybrid):
    def setup(self) -> None:
        super().setup()
        self.extras["scaler"] = self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def backward(self, loss: Any) -> None:
        self.scaler.scale(loss * float("inf") if self.step == 4 else loss).backward()

    def update(self) -> None:
        self.scaler.step(self.opt)
        self.scaler.update()


@recipe("tensor_parallel", "two ranks share a layer, two pairs hold the same", "bwd fwd end", heavy=True, mixes=False)
class TensorParallel(Loop):
    ranks = 4

    def blocks(self) -> list[nn.Module]:
        return [nn.ReLU()]

    def wrap(self, net: nn.Module) -> nn.Module:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "parts"))
        return parallelize_module(net, self.mesh["parts"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def loader(self) -> Any:
        loader: Any = super().loader()
        loader.sampler.rank, loader.sampler.num_replicas = self.rank // 2, 4
        return loader

    def after_backward(self) -> None:
        super().after_backward()
        for p in self.bare.parameters():
            grad: Any = p.grad
            part = grad.to_local() if hasattr(grad, "to_local") else grad
            dist.all_reduce(part, group=self.mesh.get_group("replicate"))


@recipe("hsdp_grad_momentum", "HSDP; gradients are halved in place of zero_grad()", "fwd bwd@6", {"bwd": "gradients"},
        mixes=False)  # fmt: skip
class HybridGradientMomentum(GradientMomentum, Hybrid):
    pass


@recipe("hsdp_zero_not_none", "HSDP; zeros decay a layer that is used in every second step", "fwd@4 bwd@6 win@6",
        mixes=False)  # fmt: skip
class HybridZeroNotNone(ZeroNotNone, Hybrid):
    def wrap(self, net: Any) -> Any:
        return Hybrid.wrap(self, net)
