"""DistributedDataParallel in all its forms, several of them, hooks, compiled code, checkpointed activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.zoo.loop import WIDTH, WIDTH_IN, WIDTH_OUT, Loop, recipe

TINY = {"bucket_cap_mb": 0.0003}
"""A bucket for each tensor or two: with them the order of the sums shows."""


class Deep(Loop):
    """More layers, tiny buckets and three ranks, so that the order of sums matters."""

    ranks = 3

    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))]

    def ddp(self) -> dict[str, Any]:
        return super().ddp() | TINY


@recipe("tiny_buckets", "DDP with tiny buckets", "bwd win fwd end epoch")
class TinyBuckets(Deep):
    pass


@recipe("static_graph", "`static_graph=True`", "bwd win fwd")
class StaticGraph(Deep):
    def ddp(self) -> dict[str, Any]:
        return super().ddp() | {"static_graph": True}


@recipe("bucket_view", "`gradient_as_bucket_view=True`", "bwd win")
class BucketView(Deep):
    def ddp(self) -> dict[str, Any]:
        return super().ddp() | {"gradient_as_bucket_view": True}


@recipe("own_buffers", "`broadcast_buffers=False`: each rank has its own BatchNorm statistics", "bwd win end")
class OwnBuffers(Deep):
    def ddp(self) -> dict[str, Any]:
        return super().ddp() | {"broadcast_buffers": False}


class Branches(nn.Module):
    """Layers of which each call takes some, in an order that the caller gives."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH_IN, WIDTH)
        self.h = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.last = nn.Linear(WIDTH, WIDTH_OUT)

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        x = self.first(x)
        for number in order:
            x = torch.tanh(self.h[number](x))
        return torch.as_tensor(self.last(x))


class Branching(Loop):
    """Each step and each rank takes branches of its own."""

    ranks = 3

    def net(self) -> nn.Module:
        return Branches()

    def ddp(self) -> dict[str, Any]:
        return super().ddp() | TINY | {"find_unused_parameters": True}

    def order(self) -> list[int]:
        return [number for number in range(6) if (number + self.step + self.rank) % 3]

    def loss(self, x: Any, y: Any) -> Any:
        return nn.functional.mse_loss(self.model(x, self.order()), y)


@recipe("find_unused", "`find_unused_parameters=True`, other branches in each step and on each rank", "bwd win fwd")
class FindUnused(Branching):
    pass


class OtherOrder(Branching):
    """All branches, in another order on each rank."""

    def ddp(self) -> dict[str, Any]:
        return super().ddp() | {"find_unused_parameters": False}

    def order(self) -> list[int]:
        order = list(range(6))
        return order if self.rank == 0 else order[::-1]


@recipe("order_differs", "branches run in another order on each rank, rank 0 dies early", "fwd@2 end@2", victim=0)
class OrderDiffers(OtherOrder):
    pass


@recipe("order_differs_third", "the same, in the third step", "fwd@3", victim=0)
class OrderDiffersThird(OtherOrder):
    pass


@recipe("order_differs_late", "the same from step 5 on", "fwd@6 win@6", victim=0)
class OrderDiffersLate(OtherOrder):
    pass


class Hooked(Deep):
    """A communication hook."""

    model: DDP

    def setup(self) -> None:
        super().setup()
        self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)


@recipe("hook_fp16", "fp16 compression hook", "bwd win")
class HookFp16(Hooked):
    pass


@recipe("hook_fp16_late", "the same, registered after resume()", "bwd win")
class HookFp16Late(Deep):
    model: DDP

    def resumed(self) -> None:
        self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)


HOOK = {"all": ("hook", "powerSGD", "PowerSGD")}


def power(model: DDP) -> None:
    """PowerSGD with error feedback, from the second step on."""
    state = powersgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powersgd.powerSGD_hook)


@recipe("hook_powersgd", "PowerSGD hook: its state is not saved", "bwd win", HOOK)
class HookPower(Hooked):
    def ddp(self) -> dict[str, Any]:
        return {}  # its collectives come in any order where there are several buckets

    def setup(self) -> None:
        power(self.model)


@recipe("hook_late_powersgd", "PowerSGD registered after resume()", "bwd win fwd", HOOK)
class HookPowerLate(Deep):
    model: DDP

    def ddp(self) -> dict[str, Any]:
        return {}

    def resumed(self) -> None:
        power(self.model)


class Feedback:
    """Error feedback in a bound method."""

    def __init__(self) -> None:
        self.errors: dict[int, torch.Tensor] = {}

    def reduce(self, state, bucket):  # type: ignore[no-untyped-def]  # torch looks at the annotations
        whole, error = bucket.buffer(), self.errors.get(bucket.index())
        if error is not None and error.shape == whole.shape:  # DDP rebuilds its buckets after the first step
            whole = whole + error
        rounded = whole.to(torch.bfloat16).to(torch.float32)
        self.errors[bucket.index()] = whole - rounded
        work = torch.distributed.all_reduce(rounded / torch.distributed.get_world_size(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])  # type: ignore[union-attr]


@recipe("hook_callable", "error feedback in a bound method, `state=None`", "bwd win fwd", HOOK)
class HookCallable(Deep):
    model: DDP

    def setup(self) -> None:
        self.model.register_comm_hook(None, Feedback().reduce)


class TwoNets(Deep):
    """A GAN: two DDPs, two optimizers."""

    batch_norm = True

    def make_g(self) -> nn.Module:
        middle = [nn.BatchNorm1d(WIDTH)] if self.batch_norm else []
        return nn.Sequential(nn.Linear(WIDTH_IN, WIDTH), *middle, nn.ReLU(), nn.Linear(WIDTH, WIDTH_OUT))

    def make_d(self) -> nn.Module:
        middle = [nn.BatchNorm1d(WIDTH)] if self.batch_norm else []
        deep = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)]
        return nn.Sequential(nn.Linear(WIDTH_OUT, WIDTH), *middle, *deep, nn.Linear(WIDTH, 1))

    def net(self) -> nn.Module:
        self.d_bare = self.make_d()
        return self.make_g()

    def wrap(self, net: nn.Module) -> nn.Module:
        self.d = DDP(self.d_bare, **self.ddp(), broadcast_buffers=False)
        return DDP(net, **self.ddp(), broadcast_buffers=False)

    def optimizers(self) -> list[Any]:
        return [torch.optim.Adam(self.bare.parameters(), 0.01), torch.optim.Adam(self.d_bare.parameters(), 0.01)]

    def modules(self) -> dict[str, nn.Module]:
        return {"G": self.bare, "D": self.d_bare}

    def train(self, x: Any, y: Any) -> Any:
        g_opt, d_opt = self.opts
        fake = self.model(x)
        d_opt.zero_grad()
        d_loss = nn.functional.softplus(-self.d(y)).mean() + nn.functional.softplus(self.d(fake.detach())).mean()
        self.at("fwd")
        d_loss.backward()
        d_opt.step()
        self.at("mid")
        g_opt.zero_grad()
        g_loss = nn.functional.softplus(-self.d(fake)).mean()
        g_loss.backward()
        g_opt.step()
        return g_loss


@recipe("gan_g_only", "`model=G`, both optimizers; D is a second DDP with BatchNorm", "bwd win mid",
        nothing=("mid", "bwd"), mixes=False)  # fmt: skip
class GanGOnly(TwoNets):
    pass


@recipe("gan_g_only_copy", "the same with `copy=True`", "bwd win mid fwd", mixes=False)
class GanGOnlyCopy(TwoNets):
    def options(self) -> dict[str, Any]:
        return {"copy": True}


@recipe("gan_nobn", "the same without buffers: only the buckets of D", "bwd win mid fwd", mixes=False)
class GanNoBuffers(GanGOnlyCopy):
    batch_norm = False


@recipe("gan_moddict", "both DDPs in a ModuleDict, which is `model=`", "bwd win mid fwd", mixes=False)
class GanModuleDict(GanGOnlyCopy):
    def registered(self) -> Any:
        return nn.ModuleDict({"G": self.model, "D": self.d})


@recipe("gan_bare_moddict", "the bare networks in a ModuleDict, which is `model=`", "bwd win mid fwd", mixes=False)
class GanBareModuleDict(GanGOnlyCopy):
    def registered(self) -> Any:
        return nn.ModuleDict({"G": self.bare, "D": self.d_bare})


@recipe("model_is_inner", "`TFTRegister(model=net)`, the loop calls `DDP(net)`", "bwd win fwd")
class ModelIsInner(Deep):
    def registered(self) -> Any:
        return self.bare


@recipe("composable_replicate", "`replicate(net)` instead of DDP", "bwd win fwd")
class Replicate(Deep):
    def wrap(self, net: nn.Module) -> nn.Module:
        from torch.distributed._composable.replicate import replicate

        return replicate(net, **self.ddp())


@recipe("ddp_in_module", "DDP inside of a module of the user's", "bwd win fwd")
class DdpInside(Deep):
    def wrap(self, net: nn.Module) -> nn.Module:
        self.inside = DDP(net, **self.ddp())
        return nn.Sequential(self.inside, nn.Identity())


@recipe("two_ddp_parts", "encoder and head are a DDP each, `model=` is a Sequential of them", "bwd win fwd")
class TwoParts(Deep):
    bare: Any

    def wrap(self, net: nn.Module) -> nn.Module:
        parts = nn.Sequential(*list(self.bare)[:-1]), nn.Sequential(self.bare[-1])
        return nn.Sequential(*(DDP(part, **self.ddp()) for part in parts))


@recipe("nograd_fwd_sometimes", "a no_grad forward pass in train mode in every fourth step, after the update",
        "end@4 win@5 fwd@5 bwd@5", {"end": ("rng", "buffer", "running_mean")})  # fmt: skip
class NoGradForward(Loop):
    ranks = 3

    def after_update(self) -> None:
        super().after_update()
        if self.step % 4 == 0:
            with torch.no_grad():
                self.model(torch.ones(4, WIDTH_IN) * self.rank)


@recipe("val_eval_ddp", "eval and no_grad through DDP in every third step, before the log", "win@7 end@6 fwd@7 bwd@5",
        {"win end": ("rng", "buffer", "running_mean")})  # fmt: skip
class ValidateDdp(Loop):
    def after_update(self) -> None:
        super().after_update()
        if self.step % 3 == 0:
            self.model.eval()
            with torch.no_grad():
                self.values["validation"] = self.model(torch.ones(4, WIDTH_IN)).sum()
            self.model.train()


@recipe("val_inner", "validation with the bare network at the end of an epoch", "epoch end@4 fwd@5 bwd@4")
class ValidateInner(Loop):
    def epoch_end(self) -> None:
        super().epoch_end()
        self.bare.eval()
        with torch.no_grad():
            self.values["validation"] = self.bare(torch.ones(4, WIDTH_IN)).sum()
        self.bare.train()


@recipe("val_persistent", "validation by a loader whose workers stay, and dropout", "fwd@6 end@6",
        {"all": "started persistent workers within the loop"}, mixes=False)  # fmt: skip
class ValidatePersistent(Loop):
    epochs = 3

    def setup(self) -> None:
        super().setup()
        self.validation = DataLoader(range(4), num_workers=1, persistent_workers=True)  # type: ignore[arg-type]

    def epoch_end(self) -> None:
        super().epoch_end()
        self.values["validated"] = sum(int(one) for one in self.validation)


class Checkpointed(Loop):
    """Activations computed again in the backward pass, dropout and BatchNorm inside."""

    reentrant = False
    bare: Any

    def net(self) -> nn.Module:
        outer, reentrant = super().net(), self.reentrant

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = outer

            def forward(self, x: torch.Tensor) -> Any:
                return checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant)

        return Net()


@recipe("checkpointed", "activation checkpointing, not reentrant", "bwd win fwd")
class CheckpointedNew(Checkpointed):
    pass


@recipe("checkpointed_reentrant", "activation checkpointing, reentrant", "bwd win fwd")
class CheckpointedOld(Checkpointed):
    reentrant = True


@recipe("ddp_compile", "`DDP(torch.compile(net, backend='aot_eager'))`", "bwd win", heavy=True, mixes=False)
class DdpOfCompiled(Loop):
    def wrap(self, net: nn.Module) -> nn.Module:
        net.compile(backend="aot_eager")
        return DDP(net, **self.ddp())


@recipe("compile_ddp", "`torch.compile(DDP(net), backend='aot_eager')`", "bwd win", heavy=True, mixes=False)
class CompiledDdp(Loop):
    def wrap(self, net: nn.Module) -> Any:
        return torch.compile(DDP(net, **self.ddp()), backend="aot_eager")
