"""Schedulers, averages and whatever else is handed over as `extras`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from tests.zoo.loop import Loop, recipe

PER_EPOCH = Loop.per_epoch


class Scheduled(Loop):
    """A scheduler that is stepped after the update, in each step."""

    def make(self) -> Any:
        return schedulers.CosineAnnealingLR(self.opt, T_max=8)

    def setup(self) -> None:
        super().setup()
        self.extras["scheduler"] = self.scheduler = self.make()

    def after_update(self) -> None:
        super().after_update()
        self.scheduler.step()


def rising() -> Callable[[int], float]:
    calls = 0

    def factor(_epoch: int) -> float:
        nonlocal calls
        calls += 1
        return min(1.0, calls / 20)

    return factor


@recipe("lambda_counts", "LambdaLR, whose function counts its own calls", "fwd win end", beside=("calls",))
class LambdaCounts(Scheduled):
    def make(self) -> Any:
        return schedulers.LambdaLR(self.opt, rising())


@recipe("cosine", "CosineAnnealingLR in each step", "win bwd end")
class Cosine(Scheduled):
    pass


@recipe("cosine_after_log", "the same after the log", "win end")
class CosineAfterLog(Scheduled):
    def after_update(self) -> None:
        pass

    def after_log(self) -> None:
        super().after_log()
        self.scheduler.step()


@recipe("cosine_first_step", "the same, killed in the first step", "win@1", {"win": "scheduler"})
class CosineFirstStep(CosineAfterLog):
    pass


@recipe("onecycle", "OneCycleLR", "win bwd")
class OneCycle(Scheduled):
    def make(self) -> Any:
        return schedulers.OneCycleLR(self.opt, max_lr=0.05, total_steps=9)


@recipe("sequential", "SequentialLR at its milestone", "win bwd")
class Sequential(Scheduled):
    def make(self) -> Any:
        first = schedulers.LinearLR(self.opt, 0.1, total_iters=5)
        return schedulers.SequentialLR(self.opt, [first, schedulers.CosineAnnealingLR(self.opt, 8)], milestones=[5])


@recipe("chained", "ChainedScheduler", "win bwd")
class Chained(Scheduled):
    def make(self) -> Any:
        return schedulers.ChainedScheduler([schedulers.ConstantLR(self.opt), schedulers.ExponentialLR(self.opt, 0.9)])


@recipe("cyclic", "CyclicLR(exp_range)", "win bwd")
class Cyclic(Scheduled):
    def make(self) -> Any:
        return schedulers.CyclicLR(self.opt, 1e-4, 0.1, step_size_up=3, mode="exp_range", cycle_momentum=False)


class Decay:
    """A callable with a state of its own, which LambdaLR saves."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1.0 / (1 + 0.1 * self.calls)


@recipe("lambda_object", "LambdaLR with a callable object that counts", "win bwd")
class LambdaObject(Scheduled):
    def make(self) -> Any:
        return schedulers.LambdaLR(self.opt, Decay())


@recipe("scheduler_first", "the scheduler is stepped before the optimizer", "win bwd")
class SchedulerFirst(Scheduled):
    def after_update(self) -> None:
        pass

    def after_backward(self) -> None:
        super().after_backward()
        self.scheduler.step()


@recipe("plateau_step", "ReduceLROnPlateau in each step", "win bwd end", {"win": "scheduler"})
class PlateauStep(Scheduled):
    def make(self) -> Any:
        return schedulers.ReduceLROnPlateau(self.opt, factor=0.5, patience=0)

    def after_update(self) -> None:
        pass

    def after_log(self) -> None:
        super().after_log()
        self.scheduler.step(self.mean)


class EachEpoch(Scheduled):
    """A scheduler that is stepped at the end of an epoch."""

    def make(self) -> Any:
        return schedulers.StepLR(self.opt, 1, gamma=0.5)

    def after_update(self) -> None:
        pass

    def epoch_end(self) -> None:
        super().epoch_end()
        self.scheduler.step()


WINDOW_OF_EPOCH = {"win epoch": "scheduler"}


@recipe("steplr_epoch1", "StepLR at the epoch's end", "win@4 epoch bwd@4 end@4", {"win epoch bwd": "scheduler"})
class StepEpoch(EachEpoch):
    pass


@recipe("steplr_midepoch2", "the same, killed in the middle of the second epoch", "win@6 bwd@6 fwd@6 end@6")
class StepMidEpoch(EachEpoch):
    pass


class Metric(EachEpoch):
    """ReduceLROnPlateau with an averaged metric, once an epoch."""

    def make(self) -> Any:
        return schedulers.ReduceLROnPlateau(self.opt, factor=0.5, patience=0, mode="max")

    def epoch_end(self) -> None:
        metric = torch.tensor(1.0 / self.epoch)
        dist.all_reduce(metric)
        self.scheduler.step(metric)


@recipe("plateau_epoch1", "ReduceLROnPlateau with an averaged metric, first epoch", "epoch@4 win@4", WINDOW_OF_EPOCH)
class PlateauFirst(Metric):
    pass


@recipe("plateau_epoch2", "the same, second epoch of three", "epoch@8 win@8", WINDOW_OF_EPOCH)
class PlateauSecond(Metric):
    epochs = 3


@recipe("metric_epoch", "an extra that keeps the best metric, once an epoch", "epoch@4 win@4", {"win epoch": "extras"})
class BestMetric(Loop):
    def setup(self) -> None:
        super().setup()
        self.extras["best"] = self.best = {"metric": 0.0, "epoch": 0}

    def epoch_end(self) -> None:
        super().epoch_end()
        metric = torch.tensor(1.0 + self.epoch)
        dist.all_reduce(metric)
        self.best.update(metric=float(metric), epoch=self.epoch)


@recipe("steplr_own_loop", "StepLR at the end of an epoch, after `step_end()`", "epoch end@4 win@4 fwd@5 bwd@5",
        {"win bwd": ("global step", "scheduler")})  # fmt: skip
class StepOwnLoop(EachEpoch):
    own_loop = True


@recipe("warm_then_stop", "warm-up scheduler that is stepped in steps 1 to 4 only", "win@5", {"win": "scheduler"})
class WarmThenStop(Scheduled):
    def make(self) -> Any:
        return schedulers.LinearLR(self.opt, 0.1, total_iters=4)

    def after_update(self) -> None:
        if self.step <= 4:
            self.scheduler.step()


@recipe("warm_last", "the same, in its last step", "win@4 end@4", {"win": "scheduler"})
class WarmLast(WarmThenStop):
    pass


@recipe("warm_stopped", "the same, in the second epoch", "win@7 bwd@7", {"win": "scheduler"})
class WarmStopped(WarmThenStop):
    pass


@recipe("swa_switch", "AveragedModel and SWALR take over in step 5", "win@5 end@5 bwd@5", {"win": "extras["})
class SwaSwitch(Scheduled):
    def blocks(self) -> list[nn.Module]:
        return [nn.ReLU(), nn.Dropout(0.1)]

    def setup(self) -> None:
        super().setup()
        self.extras["swa"] = self.swa = AveragedModel(self.bare)
        self.extras["swalr"] = self.swalr = SWALR(self.opt, swa_lr=0.001, anneal_epochs=2)

    def after_update(self) -> None:
        if self.step >= 5:
            self.swa.update_parameters(self.bare)
            self.swalr.step()
        else:
            self.scheduler.step()


@recipe("swa_later", "the same, two steps later", "win@7 bwd@7", {"win": "extras["})
class SwaLater(SwaSwitch):
    pass


class Averaged(Loop):
    """An exponential average as an extra, updated before the log."""

    buffers = False

    def blocks(self) -> list[nn.Module]:
        return [nn.ReLU(), nn.Dropout(0.1)]

    def setup(self) -> None:
        super().setup()
        fn = get_ema_multi_avg_fn(0.9)
        self.extras["ema"] = self.ema = AveragedModel(self.bare, multi_avg_fn=fn, use_buffers=self.buffers)

    def due(self) -> bool:
        return True

    def after_update(self) -> None:
        super().after_update()
        if self.due():
            self.ema.update_parameters(self.bare)


@recipe("ema", "EMA of the weights as an extra, in each step", "win bwd end", {"win": "extras['ema']"})
class Ema(Averaged):
    pass


@recipe("ema_bn", "the same with BatchNorm, of which the average copies each rank's buffers", "end win bwd",
        {"all": "extras['ema']"})  # fmt: skip
class EmaBatchNorm(Averaged):
    def blocks(self) -> list[nn.Module]:
        return Loop.blocks(self)


@recipe("ema_first", "the same, its first time in step 5", "win bwd end", {"win": "extras['ema']"})
class EmaFirst(Averaged):
    def due(self) -> bool:
        return self.step >= 5


@recipe("ema_every4", "the same in every fourth step, for the first time", "win@4 bwd@4", {"win": "extras['ema']"})
class EmaEveryFour(Averaged):
    def due(self) -> bool:
        return self.step % 4 == 0


@recipe("ema_multi", "EMA with the buffers, which differ by rank", "bwd win end", {"all": "extras['ema']"})
class EmaBuffers(Averaged):
    ranks = 3
    buffers = True

    def blocks(self) -> list[nn.Module]:
        return Loop.blocks(self)

    def ddp(self) -> dict[str, Any]:
        return super().ddp() | {"broadcast_buffers": False}


@recipe("ema_after_log", "EMA updated after the log", "win bwd end", {"win": "extras['ema']"})
class EmaAfterLog(Averaged):
    def after_update(self) -> None:
        pass

    def after_log(self) -> None:
        super().after_log()
        self.ema.update_parameters(self.bare)


@recipe(
    "extras_partial", "a dict of which one value moves before forward, one after the log", "win bwd", {"win": "sum"}
)
class Counts(Loop):
    def setup(self) -> None:
        super().setup()
        self.extras["counts"] = self.counts = {"samples": 0, "sum": 0.0}

    def before_forward(self, batch: Any) -> Any:
        self.counts["samples"] += len(batch[0])
        return super().before_forward(batch)

    def after_log(self) -> None:
        super().after_log()
        self.counts["sum"] += float(self.mean)
        self.opt.param_groups[0]["lr"] = 0.01 / (1 + 0.1 * self.counts["sum"])


@recipe("lr_by_hand", "the loop sets lr before the forward pass from its step", "win bwd end")
class LrByHand(Loop):
    def before_forward(self, batch: Any) -> Any:
        for group in self.opt.param_groups:
            group["lr"] = 0.01 / self.step
        return super().before_forward(batch)


@recipe("lr_after_log", "the loop multiplies lr after the log", "win bwd", {"win": ("lr", "group", "hyperparameters")})
class LrAfterLog(Loop):
    def after_log(self) -> None:
        super().after_log()
        for group in self.opt.param_groups:
            group["lr"] *= 0.9


@recipe("loss_ema", "lr scaled by an average of the loss, a plain float of the network that moves after the log",
        "fwd bwd win end epoch", {"win end epoch": "loss_ema"})  # fmt: skip
class LossEma(Loop):
    def setup(self) -> None:
        super().setup()
        self.averaging.loss_ema = 1.0

    @property
    def averaging(self) -> Any:
        """The module of which the average is an attribute."""
        return self.bare

    def before_forward(self, batch: Any) -> Any:
        for group in self.opt.param_groups:
            group["lr"] = 0.01 * self.averaging.loss_ema
        return super().before_forward(batch)

    def after_log(self) -> None:
        super().after_log()
        self.averaging.loss_ema = 0.9 * self.averaging.loss_ema + 0.1 * float(self.mean)


@recipe("loss_ema_ddp", "the same with `model = DDP(net)`, of which the float is an attribute", "fwd win end",
        {"win end": "loss_ema"}, mixes=False)  # fmt: skip
class LossEmaOfDdp(LossEma):
    @property
    def averaging(self) -> Any:
        return self.model


LATE: dict[str, Any] = {"win": "hyperparameters"}


@recipe("decay_beside_cosine", "weight decay multiplied after the log, beside a scheduler", "win", LATE)
class DecayBesideCosine(Scheduled):
    def after_log(self) -> None:
        super().after_log()
        for group in self.opt.param_groups:
            group["weight_decay"] *= 1.5


@recipe("betas_beside_steps", "betas lowered after the log, beside a scheduler of epochs", "win", LATE)
class BetasBesideSteps(Loop):
    def setup(self) -> None:
        super().setup()
        self.extras["scheduler"] = self.scheduler = schedulers.StepLR(self.opt, 1)

    def after_log(self) -> None:
        super().after_log()
        for group in self.opt.param_groups:
            group["betas"] = group["betas"][0] * 0.95, 0.99

    def epoch_end(self) -> None:
        super().epoch_end()
        self.scheduler.step()


@recipe("lr_floor", "a floor under the scheduler's lr, after the log", "win", LATE)
class LrFloor(Scheduled):
    def make(self) -> Any:
        return schedulers.ExponentialLR(self.opt, 0.5)

    def after_log(self) -> None:
        super().after_log()
        for group in self.opt.param_groups:
            group["lr"] = max(group["lr"], 0.003)


@recipe("lr_of_the_other", "a scheduler for one optimizer, the other's lr multiplied after the log", "win", LATE)
class LrOfTheOther(Scheduled):
    def optimizers(self) -> list[Any]:
        every = [*self.bare.parameters()]
        return [torch.optim.AdamW(every[:3], lr=0.01), torch.optim.SGD(every[3:], lr=0.05)]

    def after_log(self) -> None:
        super().after_log()
        for group in self.opts[1].param_groups:
            group["lr"] *= 0.8


@recipe("lr_drop_epoch", "the loop multiplies lr at the end of an epoch", "fwd@5 win@7 bwd@8 end@4",
        {"bwd": ("lr", "group", "hyperparameters", "optimizer.step()")})  # fmt: skip
class LrDropEpoch(Loop):
    epochs = 3

    def epoch_end(self) -> None:
        super().epoch_end()
        for group in self.opt.param_groups:
            group["lr"] *= 0.1
