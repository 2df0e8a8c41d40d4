"""What a new user writes: `lastwords.protect`. argv: ckpt folder, log folder, step in which rank 1 dies."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lastwords


def main(arguments: list[str]) -> None:
    folder, log, dies_at = arguments[0], Path(arguments[1]), int(arguments[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1)))
    samples = TensorDataset(torch.randn(80, 6), torch.randn(80, 1))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(samples, seed=3)
    loader = DataLoader(samples, batch_size=4, sampler=sampler)
    torch.manual_seed(100 + rank)
    plain = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 3, 0.5)

    with lastwords.protect(folder, model=model, optimizer=plain, extras={"scheduler": scheduler}) as tft:
        assert type(tft.optimizer) is lastwords.OptTFTWrapper
        point = tft.resume(missing_ok=True)
        if point is not None and not point.exact:
            raise SystemExit(f"not exact: {point.reasons}")
        at = 0 if point is None else point.global_step
        with (log / f"{rank}").open("a") as lines:
            for _, _, (inputs, targets) in tft.steps(loader, epochs=2):
                at += 1
                loss = (model(inputs) - targets).square().mean()
                tft.optimizer.zero_grad()
                loss.backward()
                if (rank, at) == (1, dies_at):
                    os.kill(os.getpid(), signal.SIGKILL)
                tft.optimizer.step()
                scheduler.step()
                weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
                lines.write(f"{at} {float(loss).hex()} {hashlib.sha256(weights).hexdigest()}\n")
                lines.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
