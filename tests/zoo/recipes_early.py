"""Loops that end their step before their log: a death in the log's collective finds a whole step."""

from __future__ import annotations

from typing import Any

import torch

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
