"""The tests' training script for parallel layouts: the demo's transformer, tiny, with places for faults.

`python -m tests.integration.parallel_training PLAN.json`, one process per rank. Everything but the model and how it is
spread over the ranks is as in training.py.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader, DistributedSampler

from demo.transformer.gradients import clip, copies_of
from demo.transformer.layouts import (
    LAYOUTS,
    MAX_NORM,
    TENSOR_PARALLEL,
    Parallel,
    Task,
    fully_sharded,
    loss_and_gradients,
)
from demo.transformer.model import Block, Shape
from demo.transformer.text import Numbered, Text
from tests.integration import sabotage, training
from tests.integration.network import StartSampler, end_with_parent
from tests.integration.plan import Layout
from tests.integration.recording import random_streams, text_digest
from tests.integration.training import LEARNING_RATE, Batch, PhasedAdamW, Trainer

CONTEXT, WIDTH = 8, 16


def shape_of(layout: Layout) -> Shape:
    """Sizes of the model."""
    layers, dropout = max(2, layout.layers), 0.1 if layout.dropout else 0.0
    return Shape(context=CONTEXT, width=WIDTH, layers=layers, dropout=dropout)


def question() -> torch.Tensor:
    """Bytes that every model is asked about."""
    return torch.arange(4 * CONTEXT).reshape(4, CONTEXT) * 7 % 256


def sharded_tp(task: Task) -> Parallel:
    """Tensor parallelism of `parts`; each part of a projection is sharded over all replicas: nothing has a copy."""
    mesh = task.mesh("replicate", "tp")
    model = parallelize_module(task.model(), mesh["tp"], TENSOR_PARALLEL)
    fully_sharded(model, mesh["replicate"])
    norm = partial(clip, list(model.parameters()), copies_of, MAX_NORM)
    backward = partial(loss_and_gradients, model)
    replicas = mesh["replicate"]
    optimizer = task.optimizer(model.parameters())
    return Parallel(model, optimizer, backward, norm, replicas.get_local_rank(), replicas.size())


class Augmented(Numbered):
    """Some bytes of a window are replaced at random."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        inputs, targets, _ = super().__getitem__(index)
        inputs = torch.where(torch.rand(inputs.shape) < 0.1, torch.randint(0, 256, inputs.shape), inputs)
        return inputs, targets, index


class ParallelTrainer(Trainer):
    """A rank of a parallel layout."""

    uses_scaler = False

    def build(self) -> None:
        """The demo's transformer, as the layout spreads it; the loader gives each replica its own text."""
        layout = self.layout
        sequences = layout.sequences or 2 * layout.world_size
        batch = sequences // layout.accumulate
        task = Task(
            shape_of(layout),
            batch,
            layout.parts,
            PhasedAdamW,
            {"lr": LEARNING_RATE, "weight_decay": 0.1, "foreach": False},  # which refuses DTensors beside others
            layout.device,
        )
        self.parallel = parallel = ({**LAYOUTS, "sharded-tp": sharded_tp})[layout.parallel](task)
        self.net = self.model = parallel.model
        self.inner = parallel.optimizer
        type(getattr(self.inner, "optim", self.inner)).faults = self.faults
        self.replica = parallel.replica
        windows = Text(CONTEXT, layout.steps_per_epoch * sequences - layout.left_over)
        text = Augmented(windows) if layout.augment else Numbered(windows)
        sampler: DistributedSampler[Any] = DistributedSampler(
            text, parallel.replicas, parallel.replica, seed=layout.seed, drop_last=layout.even
        )
        self.loader = DataLoader(
            text,
            batch // parallel.replicas,
            sampler=StartSampler(sampler, self.on_epoch_start) if layout.own_sampler else sampler,
            drop_last=layout.even,
            num_workers=layout.workers,
            persistent_workers=layout.persistent_workers,
            worker_init_fn=end_with_parent,
        )
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
        inputs, targets, numbers = batch
        # Before anything can stop this rank: it may be parked in this step, and the step be saved all the same.
        self.recording.write("batch", step=self.faults.step, epoch=self.epoch, samples=numbers.tolist())
        if not self.layout.own_sampler:
            self.values[f"streams{self.micro}"] = text_digest(sorted(random_streams().items()))
        return self.parallel.backward(inputs, targets)

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

    def write_whole(self, moment: str) -> None:
        """Everything as it would be on one rank, gathered by torch, and the model's answer; on rank 0 of the job."""
        net = getattr(self.net, "module", self.net)  # what DDP is around
        whole = {name: gathered(tensor) for name, tensor in net.named_parameters()}
        for name, parameter in net.named_parameters():
            for key, value in self.inner.state.get(parameter, {}).items():
                whole[f"{name}/{key}"] = gathered(value)
        self.net.eval()
        with torch.no_grad():
            answer = self.net(question())
        self.net.train()
        if dist.get_rank() == 0:
            torch.save({"state": whole, "answer": answer}, Path(self.plan.directory) / f"whole-{moment}.pt")

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
        if self.layout.parallel in ("pp", "pp-tp"):
            is_last = self.rank >= self.layout.world_size - self.layout.world_size // self.layout.parts
            wanted = 2 if is_last == (phase == "backward") else 1
        if self._visits[phase] == wanted:
            self.faults.at(phase)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, in memory of its own."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def main(arguments: list[str]) -> None:
    """Train as the plan says."""
    training.main(arguments, ParallelTrainer)


if __name__ == "__main__":
    main(sys.argv[1:])
