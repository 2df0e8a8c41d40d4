"""The tests' training script for parallel layouts: the demo's transformer, tiny, with places for faults.

`python -m tests.integration.parallel_training PLAN.json`, one process per rank. Everything but the model and how it is
spread over the ranks is as in training.py.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from demo.transformer.layouts import LAYOUTS, Task
from demo.transformer.model import Block, Shape
from demo.transformer.text import Text
from tests.integration import sabotage, training
from tests.integration.network import StartSampler
from tests.integration.training import LEARNING_RATE, Batch, PhasedAdamW, Trainer


class ParallelTrainer(Trainer):
    """A rank of a parallel layout."""

    uses_scaler = False

    def build(self) -> None:
        """The demo's transformer, as the layout spreads it; the loader gives each replica its own text."""
        layout = self.layout
        shape = Shape(context=8, width=16, layers=max(2, layout.parts), dropout=0.1 if layout.dropout else 0.0)
        sequences = 2 * layout.world_size
        task = Task(
            shape,
            sequences,
            layout.parts,
            PhasedAdamW,
            {"lr": LEARNING_RATE, "weight_decay": 0.1},
        )
        self.parallel = parallel = LAYOUTS[layout.parallel](task)
        self.net = self.model = parallel.model
        self.inner = parallel.optimizer
        getattr(self.inner, "optim", self.inner).faults = self.faults
        self.replica = parallel.replica
        text = Text(shape.context, layout.steps_per_epoch * sequences)
        sampler: DistributedSampler[Any] = DistributedSampler(
            text, parallel.replicas, parallel.replica, seed=layout.seed
        )
        own = sequences // parallel.replicas
        self.loader = DataLoader(text, own, sampler=StartSampler(sampler, self.on_epoch_start))
        self._visits: Counter[str] = Counter()
        if layout.parallel != "ddp":
            sabotage.watch_gate(self.faults)
        self._watch_model()

    def parameter(self) -> torch.Tensor:
        """What garbage is written over: a tensor that every rank has something of."""
        return max(self.net.parameters(), key=lambda parameter: parameter.numel())

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """The loss; the gradients are there and averaged when it returns."""
        self._visits.clear()
        return self.parallel.backward(*batch)

    def update(self) -> None:
        """Clip, and let the optimizer write, unless the loop leaves the update of this step out."""
        self.parallel.clip()
        self.faults.at("before_step")
        if self.layout.inf_steps is None or self.faults.step not in self.layout.inf_steps:
            self.optimizer.step()

    def more_settings(self) -> dict[str, Any]:
        """What a layout has to declare."""
        units = self.parallel.units()
        return {"units": units} if units else {}

    # ------------------------------------------------------------------ places for faults

    def _watch_model(self) -> None:
        """Come by "forward" before the rank's last block, and by "backward" when the gradient reaches its first one."""
        blocks = [module for module in self.net.modules() if isinstance(module, Block)]
        blocks[-1].register_forward_pre_hook(lambda *_: self._come_by("forward"))
        blocks[0].register_forward_hook(lambda _module, _inputs, output: self._watch_gradient(output))

    def _watch_gradient(self, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self._come_by("backward"))

    def _come_by(self, phase: str) -> None:
        """In a pipeline the stages have to wait for each other's faults without waiting for each other's data.

        So the stage that another one gets its data from comes by with its second chunk, when the first one is sent.
        """
        self._visits[phase] += 1
        wanted = 1
        if self.layout.parallel == "pp":
            is_last = self.rank >= self.layout.world_size - self.layout.world_size // self.layout.parts
            wanted = 2 if is_last == (phase == "backward") else 1
        if self._visits[phase] == wanted:
            self.faults.at(phase)


def main(arguments: list[str]) -> None:
    """Train as the plan says."""
    training.main(arguments, ParallelTrainer)


if __name__ == "__main__":
    main(sys.argv[1:])
