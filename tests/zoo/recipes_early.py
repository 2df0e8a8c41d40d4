"""Loops that end their step before what else they do: a death in there finds a whole step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.loop import Loop, recipe
from tests.zoo.recipes_moving import Byol
from tests.zoo.recipes_schedules import Averaged, EachEpoch, Scheduled


class Early(Loop):
    """`tft.step_end()` before the log."""

    def log(self, loss: Any) -> None:
        self.end_step()
        super().log(loss)


@recipe("early_plain", "`tft.step_end()` before the log", "win fwd bwd end epoch")
class EarlyPlain(Early):
    pass


@recipe("early_cosine", "the same, with a scheduler", "win bwd", mixes=False)
class EarlyCosine(Early, Scheduled):
    pass


@recipe("early_ema", "the same, with an EMA that begins in step 5", "win bwd", mixes=False)
class EarlyEma(Early, Averaged):
    def due(self) -> bool:
        return self.step >= 5


@recipe("early_clamp", "the same, weights clamped before it", "win bwd end", mixes=False)
class EarlyClamp(Early):
    def after_update(self) -> None:
        super().after_update()
        for p in self.bare.parameters():
            p.data.clamp_(-0.2, 0.2)


@recipe("early_byol", "the same, a target network updated before it", "win bwd end", mixes=False)
class EarlyByol(Early, Byol):
    def after_update(self) -> None:
        super().after_update()
        self.follow()


@recipe("early_epoch", "the same, StepLR stepped before it in an epoch's last step", "win@4 bwd@4 epoch", mixes=False)
class EarlyEpoch(Early, EachEpoch):
    def after_update(self) -> None:
        if self.step % self.per_epoch == 0:
            self.scheduler.step()

    def epoch_end(self) -> None:
        pass


@recipe("early_counts", "the same, a dict of counts moved before it", "win bwd", mixes=False)
class EarlyCounts(Early):
    def setup(self) -> None:
        super().setup()
        self.extras["counts"] = self.counts = {"steps": 0, "samples": 0}

    def before_forward(self, batch: Any) -> Any:
        self.counts["samples"] += len(batch[0])
        return super().before_forward(batch)

    def after_update(self) -> None:
        super().after_update()
        self.counts["steps"] += 1


@recipe("early_log_draws", "the same, and the log draws a random number", "win bwd", {"win": ("random", "rng")},
        mixes=False)  # fmt: skip
class EarlyLogDraws(Early):
    def after_log(self) -> None:
        super().after_log()
        self.values["drawn"] = torch.rand(())


class Touched(Early):
    """After the log, what `touched` has is changed."""

    def optimizers(self) -> list[Any]:
        return [Touching(self.bare.parameters(), lr=0.05, momentum=0.9)]

    def touch(self) -> None:
        """Change it."""

    def after_log(self) -> None:
        super().after_log()
        with torch.no_grad():
            self.touch()


class Touching(torch.optim.SGD):
    """Has numbers in its state, and a counter in its own `state_dict()`."""

    count = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        for state in self.state.values():
            state.setdefault("number", 1.0)
        return result

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "count"})


def touched(name: str, what: str) -> Callable[[type[Touched]], type[Touched]]:
    return recipe(f"early_{name}", f"the same, and the log is followed by a change of {what}", "win",
                  {"win": "between step_end() and the next"}, mixes=False)  # fmt: skip


@touched("momentum", "tensors in the optimizer's state")
class EarlyMomentum(Touched):
    def touch(self) -> None:
        for state in self.opt.state.values():
            state["momentum_buffer"].mul_(0.5)


@touched("number", "numbers in the optimizer's state")
class EarlyNumber(Touched):
    def touch(self) -> None:
        for state in self.opt.state.values():
            state["number"] *= 0.5


@touched("opt_attr", "a counter in the optimizer's own `state_dict()`")
class EarlyOptAttr(Touched):
    def touch(self) -> None:
        self.inner[0].count += 1


@touched("frozen", "`requires_grad`")
class EarlyFrozen(Touched):
    def ddp(self) -> dict[str, Any]:
        return {"find_unused_parameters": True}

    def touch(self) -> None:
        self.bare[0].bias.requires_grad_(self.step % 2 == 0)


@touched("buffer", "buffers")
class EarlyBuffer(Touched):
    def touch(self) -> None:
        self.bare[1].running_mean.mul_(0.5)


@touched("weights", "weights")
class EarlyWeights(Touched):
    def touch(self) -> None:
        self.bare[0].weight.mul_(0.99)


@touched("model_attr", "an attribute of a module")
class EarlyModelAttr(Touched):
    def touch(self) -> None:
        self.bare[3].p = 0.9 - self.bare[3].p


@touched("parameter_attr", "an attribute of a parameter")
class EarlyParameterAttr(Touched):
    def touch(self) -> None:
        self.bare[0].weight.scale = self.step

    def before_forward(self, batch: Any) -> Any:
        x, y = super().before_forward(batch)
        return x * (1 + getattr(self.bare[0].weight, "scale", 0)), y


@touched("local", "what `local_extras` has")
class EarlyLocal(Touched):
    def setup(self) -> None:
        super().setup()
        self.local_extras["seen"] = self.seen = {"last": torch.zeros(())}

    def touch(self) -> None:
        self.seen["last"] += self.rank + 1


@touched("numpy", "numpy's random numbers")
class EarlyNumpy(Touched):
    def touch(self) -> None:
        self.values["drawn"] = torch.tensor(np.random.rand())


@touched("own_generator", "a generator of the model's")
class EarlyOwnGenerator(Touched):
    def setup(self) -> None:
        super().setup()
        self.bare.rng = np.random.default_rng(3)

    def touch(self) -> None:
        self.values["drawn"] = torch.tensor(self.bare.rng.random())


class Between(Loop):
    """A custom loop that evaluates after every second step, and says where each step begins. `epoch`: a death in the
    evaluation."""

    own_loop = begins = True

    def finish(self, step: int, ended: Callable[[int, int], None]) -> None:
        ended(self.epoch, step)
        if self.step % 2 == 0:
            self.evaluate()

    def evaluate(self) -> None:
        self.drawn = torch.rand(())
        self.at("epoch")


@recipe("between_draws", "a custom loop whose evaluation draws after every second step, with `step_begin()`",
        "fwd@5 bwd@5 end@7 win@6 epoch@6", {"epoch bwd": "step_end()", "win end": "about to change"},
        mixes=False)  # fmt: skip
class BetweenDraws(Between):
    pass


@recipe("between_draws_first", "the same, where the first evaluation is the last", "epoch@2", {"epoch": "step_end()"},
        mixes=False)  # fmt: skip
class BetweenDrawsFirst(Between):
    pass


@recipe("between_four", "the same on four ranks: one dies in the evaluation, the others are beyond it",
        "epoch@4 fwd@7", {"epoch": "step_end()"}, mixes=False, victim=2)  # fmt: skip
class BetweenFour(Between):
    ranks = 4


@recipe("between_gathers", "the same; all ranks stand in the evaluation's collective when one dies", "epoch@2 fwd@3",
        {"epoch": "step_end()"}, mixes=False)  # fmt: skip
class BetweenGathers(Between):
    def evaluate(self) -> None:
        super().evaluate()
        dist.all_reduce(self.drawn)


@recipe("between_one", "the same, and only one rank draws, which neither dies nor writes", "epoch@2",
        {"epoch": "step_end()"}, mixes=False, victim=2)  # fmt: skip
class BetweenOne(Between):
    ranks = 3

    def evaluate(self) -> None:
        self.drawn = torch.rand(()) if self.rank == 1 else torch.zeros(())
        self.at("epoch")
        dist.all_reduce(self.drawn)


@recipe("between_shuffles", "the same; the evaluation shuffles, and a scheduler is stepped after it", "fwd@5 epoch@4",
        {"epoch": "step_end()"}, mixes=False)  # fmt: skip
class BetweenShuffles(Between):
    def setup(self) -> None:
        super().setup()
        self.extras["scheduler"] = self.scheduler = StepLR(self.opt, 1, gamma=0.5)
        generator = torch.Generator().manual_seed(9)
        self.held_out = TensorDataset(torch.randn(8, 8, generator=generator))

    def evaluate(self) -> None:
        with torch.no_grad():
            for (x,) in DataLoader(self.held_out, 4, shuffle=True):
                self.bare(x)
        self.scheduler.step()
        self.at("epoch")


@recipe("between_nothing", "a custom loop with `step_begin()`: nothing changes in between", "fwd bwd end win@6 epoch@4",
        mixes=False)  # fmt: skip
class BetweenNothing(Between):
    def evaluate(self) -> None:
        self.at("epoch")


@recipe("between_values", "the same in every step: a rate, a local extra, an attribute, a generator",
        "fwd@4 win@5 end@5 epoch@1", {"epoch win end": "step_end()"}, mixes=False)  # fmt: skip
class BetweenValues(Between):
    def setup(self) -> None:
        super().setup()
        self.local_extras["own"] = self.own = {"count": 0}
        self.noisy: Any = self.bare
        self.noisy.calls = 0
        self.noisy.noise = self.generators["noise"] = torch.Generator().manual_seed(self.rank)

    def loss(self, x: Any, y: Any) -> Any:
        return super().loss(x * (1 + 0.1 * (self.own["count"] + self.noisy.calls)), y)

    def finish(self, step: int, ended: Callable[[int, int], None]) -> None:
        ended(self.epoch, step)
        self.evaluate()

    def evaluate(self) -> None:
        self.own["count"] += 1
        self.noisy.calls += 1
        torch.rand((), generator=self.noisy.noise)
        for group in self.opt.param_groups:
            group["lr"] *= 0.7
        self.at("epoch")
