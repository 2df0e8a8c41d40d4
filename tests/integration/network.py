"""The models and the dataset of the training script: small, but with everything that makes exactness hard."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from tests.integration.faults import Faults
from tests.integration.plan import Layout

FEATURES = 64
CLASSES = 10
BATCH_SIZE = 6
WIDTHS = {"small": 96, "medium": 560, "large": 2048}
"""Two square layers of float32: 0.1 MB, 2.6 MB and 34 MB, against DDP's buckets of 1 MB (the first) and 25 MB."""


class Net(nn.Module):
    """Linear layers with, as the layout asks: BatchNorm, dropout, a tied weight, a frozen layer, odd buffers."""

    def __init__(self, layout: Layout, faults: Faults) -> None:
        super().__init__()
        width = WIDTHS[layout.model]
        self.inlet = nn.Linear(FEATURES, width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.outlet = nn.Linear(width, CLASSES)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(2 if layout.batch_norm else 0))
        self.drop = nn.Dropout(0.2 if layout.dropout else 0.0)
        if layout.tied:
            self.second.weight = self.first.weight
        if layout.frozen:
            self.inlet.requires_grad_(False)
        self.unused = nn.Linear(4, 4) if layout.find_unused else None
        if layout.batch_norm:
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("level", torch.zeros(width), persistent=False)
        self._faults = lambda: faults  # what breaks a run is no state of the network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of each class; comes by the phases "forward", "backward" and "backward_last"."""
        faults = self._faults()
        if faults.has("backward_last"):
            x = x.detach().requires_grad_().view_as(x)
            # A gradient with respect to the input comes last: every bucket has been launched by then.
            _call_on_gradient(x, lambda: faults.at("backward_last"))
        x = torch.relu(self.inlet(x))
        x = self.first(x)
        if len(self.norms):
            x = self.norms[0](x)
            with torch.no_grad():
                self.seen += 1
                self.level.lerp_(x.detach().mean(0), 0.1)
        faults.at("forward")
        x = self.drop(torch.relu(x))
        if faults.has("backward"):
            _call_on_gradient(x, lambda: faults.at("backward"))
        x = self.second(x)
        if len(self.norms):
            x = self.norms[1](x)
        return torch.as_tensor(self.outlet(self.drop(torch.relu(x))))


def _call_on_gradient(x: torch.Tensor, call: Callable[[], None]) -> None:
    x.register_hook(lambda _: call())


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random points and labels; `augment` adds noise from three random generators at every access."""

    def __init__(self, size: int, augment: bool, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._x = torch.randn(size, FEATURES, generator=generator)
        self._y = torch.randint(0, CLASSES, (size,), generator=generator)
        self._augment = augment

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._x[index]
        if self._augment:
            x = x + 0.1 * torch.randn(FEATURES)
            x = x * float(0.9 + 0.2 * np.random.rand()) + float(np.random.normal()) * 0.01
            if random.random() < 0.5:
                x = x.flip(0)
        return x, self._y[index]


class StartSampler(Sampler[int]):
    """A sampler that comes by the phase "epoch_start" whenever an epoch begins."""

    def __init__(self, inner: DistributedSampler[object], on_start: Callable[[], None]) -> None:
        self._inner = inner
        self._on_start = on_start

    def set_epoch(self, epoch: int) -> None:
        """0-based, as DistributedSampler has it."""
        self._inner.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        self._on_start()
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)


def end_with_parent(worker: int) -> None:
    """In a loader's worker, at its start: torch takes for its rank whoever is its parent a moment later.

    Where a test has killed the rank by then, that is the reaper of orphans, and the worker would wait for ever.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(0)


def make_loader(
    layout: Layout, rank: int, on_start: Callable[[], None]
) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    """The layout's loader: `steps_per_epoch * accumulate` batches an epoch on every rank."""
    own = layout.steps_per_epoch * layout.accumulate * BATCH_SIZE
    persistent = layout.persistent_workers and layout.workers > 0
    if layout.loader == "plain":
        samples = Samples(own, layout.augment, layout.seed)
        return DataLoader(
            samples,
            BATCH_SIZE,
            shuffle=True,
            num_workers=layout.workers,
            persistent_workers=persistent,
            worker_init_fn=end_with_parent,
        )
    samples = Samples(own * layout.world_size - 1, layout.augment, layout.seed)  # the sampler pads by one
    sampler = DistributedSampler(samples, layout.world_size, rank, shuffle=True, seed=layout.seed)
    return DataLoader(
        samples,
        BATCH_SIZE,
        sampler=StartSampler(sampler, on_start),
        num_workers=layout.workers,
        persistent_workers=persistent,
        worker_init_fn=end_with_parent,
    )
