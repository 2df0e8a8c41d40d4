"""Rank 1 says that it is of a host of its own, where nobody is left to read what it had. argv: ckpt folder, log folder,
step in which it dies (0: in none)."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import lastwords
from lastwords.optim_wrapper.trainer import protection


class Net(nn.Sequential):
    """Counts its passes, which nobody else knows; its statistics differ by rank."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        out: torch.Tensor = super().forward(x)
        return out


def main(arguments: list[str]) -> None:
    folder, log, dies_at = arguments[0], Path(arguments[1]), int(arguments[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 1:
        here = protection.this_process
        protection.this_process = lambda nonce: dataclasses.replace(here(nonce), host_id="another-host")
    torch.manual_seed(1)
    net = Net()
    model, plain = DDP(net), torch.optim.Adam(net.parameters(), 1e-2)
    loader = DataLoader(torch.randn(64, 8), batch_size=4, shuffle=True)
    with lastwords.protect(folder, model=model, optimizer=plain) as tft:
        point = tft.resume(missing_ok=True)
        reasons = [] if point is None else [*map(str, point.reasons)]
        for _, step, batch in tft.steps(loader, epochs=1):
            if point is not None and step == point.step + 1:
                mean = net[1].running_mean.tolist()
                found = {"step": step, "reasons": reasons, "passes": net.passes, "mean": mean, "batch": batch.tolist()}
                (log / f"{rank}.json").write_text(json.dumps(found))
            tft.optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            if rank == 1 and step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            tft.optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1:])
