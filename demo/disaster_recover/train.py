"""A small network trains under DDP, by workers that may be killed and started again one by one: run.sh, recover.sh.

The same script under torchrun is the run that nobody disturbs:
torchrun --standalone --nproc-per-node 8 -m demo.disaster_recover.train --step-log undisturbed
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lastwords
from demo.steplog import StepLog

FEATURES = 32
BATCH = 4
EPOCHS = 2
SEED = 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="in all; an even number")
    parser.add_argument("--pause-s", type=float, default=0.02, help="makes a step as long as one of a larger network")
    parser.add_argument("--ckpt-path", default="./ttp_checkpoints/")
    parser.add_argument("--step-log", default="", help="folder for one file of losses per rank, as JSON lines")
    return parser.parse_args()


def samples(count: int) -> TensorDataset:
    draws = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(count, FEATURES, generator=draws)
    return TensorDataset(inputs, inputs.flip(1).tanh())


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, FEATURES))
    model = DDP(net)
    torch.manual_seed(SEED + 1 + rank)  # dropout differs from rank to rank
    known = samples(args.steps // EPOCHS * BATCH * ranks)
    sampler: DistributedSampler[Any] = DistributedSampler(known, seed=SEED)
    loader = DataLoader(known, batch_size=BATCH, sampler=sampler)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    log = StepLog(args.step_log, rank, steps=args.steps)

    with lastwords.protect(args.ckpt_path, model=model, optimizer=optimizer, extras={"scheduler": scheduler}) as tft:
        tft.resume(missing_ok=True)
        for epoch, step, (inputs, targets) in tft.steps(loader, epochs=EPOCHS):
            loss = nn.functional.mse_loss(model(inputs), targets)
            # Before the backward, which needs all ranks: a step that any rank has taken is in every rank's log.
            log.write_step(epoch, step, (epoch - 1) * len(loader) + step, loss.item())
            time.sleep(args.pause_s)
            tft.optimizer.zero_grad()
            loss.backward()
            tft.optimizer.step()
            scheduler.step()

    checksum = log.write_final(net, optimizer)
    print(f"rank {rank}: finished; weights and optimizer state have checksum {checksum}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    lastwords.run(main)
