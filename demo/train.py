"""A five-layer network learns handwritten digits under DDP, and `kill -9` of any worker costs nothing.

torchrun --standalone --nproc-per-node 4 -m demo.train                   # kill -9 a worker while it runs: exit code 75
torchrun --standalone --nproc-per-node 4 -m demo.train --is_recover 1    # goes on at the next step
lastwords run --standalone --nproc-per-node 4 -m demo.train              # goes on by itself
for rank in 0 1 2 3; do RANK=$rank WORLD_SIZE=4 python -m demo.train & done; wait
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

import lastwords
from demo.digits import load_training_set
from demo.steplog import StepLog


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--is_recover", type=int, choices=(0, 1), default=0, help="1: go on from the last words")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="images per rank and step")
    parser.add_argument("--hidden", type=int, default=5120, help="width of the two wide layers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ckpt-path", default="./ttp_checkpoints/")
    parser.add_argument("--ctrl-ip", default="127.0.0.1", help="address of the host of rank 0")
    parser.add_argument("--ctrl-port", type=int, default=30051, help="a free port on that host")
    parser.add_argument("--step-log", default="", help="folder for one file of losses per rank, as JSON lines")
    return parser.parse_args()


def five_layers(hidden: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in ((784, 512), (512, hidden), (hidden, hidden), (hidden, 512)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def main() -> None:
    args = arguments()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(args.seed)
    net = five_layers(args.hidden)
    model = DDP(net)
    torch.manual_seed(args.seed + 1 + rank)  # dropout differs from rank to rank
    digits = load_training_set()
    sampler: DistributedSampler[Any] = DistributedSampler(digits, seed=args.seed, drop_last=True)
    loader = DataLoader(digits, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    optimizer = lastwords.OptTFTWrapper(torch.optim.AdamW(net.parameters(), lr=3e-4, weight_decay=0.01))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
    tft = lastwords.TFTRegister(
        0,
        args.ctrl_ip,
        args.ctrl_port,
        args.ckpt_path,
        model=model,
        optimizer=optimizer,
        extras={"scheduler": scheduler},
    )
    log = StepLog(args.step_log, rank, steps=args.epochs * len(loader))
    with tft:
        if args.is_recover or tft.restarted:
            point = tft.resume()
            if rank == 0:
                print(f"rank 0: continues after step {point.global_step}", flush=True)
        for epoch, step, (images, labels) in tft.steps(loader, epochs=args.epochs):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            log.write_step(epoch, step, (epoch - 1) * len(loader) + step, loss.item())

    checksum = log.write_final(net, optimizer)
    sys.stdout.write(f"rank {rank}: finished; weights and optimizer state have checksum {checksum}\n")  # a line at once
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
