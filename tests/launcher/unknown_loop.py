"""A script that knows nothing of lastwords, for `lastwords run --auto`: a plain loop over a DataLoader.

    unknown_loop.py DYING_STEP [gan | two | lines]

Rank 1 is killed in the backward pass of that step (0: never). Losses go to losses.txt, by step. gan: two models and
optimizers. lines: what --auto has said it needs is written into it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 2


def main(dies_at: int, kind: str) -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    optimizer: Any = torch.optim.AdamW(net.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1) if kind == "gan" else None
    data = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    second = DistributedDataParallel(nn.Linear(4, 1))

    def train(step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        if kind == "two":
            second(x)
        if step == dies_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0:
            with open("losses.txt", "a", encoding="utf-8") as file:
                file.write(f"{step} {loss.item()!r} {other is None}\n")

    if kind == "lines":
        lastwords = importlib.import_module("lastwords")  # --auto leaves a script alone that imports it

        with lastwords.protect("last_words", model=net, optimizer=optimizer, extras={"scheduler": scheduler}) as tft:
            point = tft.resume(missing_ok=True)
            optimizer = tft.optimizer
            for epoch, step, (x, y) in tft.steps(loader, EPOCHS):
                train((epoch - 1) * len(loader) + step, x, y)
        if rank == 0:
            print("resumed", point)
    else:
        for step, (x, y) in enumerate(batches(loader), start=1):
            train(step, x, y)
    torch.distributed.destroy_process_group()


def batches(loader: DataLoader[Any]) -> Iterator[Any]:
    """Of all epochs."""
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        yield from loader


if __name__ == "__main__":
    main(int(sys.argv[1]), *(sys.argv[2:] or [""]))
