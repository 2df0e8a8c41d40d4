"""A small transformer learns English in any parallel layout, and `kill -9` of a worker costs nothing.

torchrun --standalone --nproc-per-node 4 -m demo.transformer.train                     # kill -9 a worker while it runs
torchrun --standalone --nproc-per-node 4 -m demo.transformer.train --is_recover 1      # goes on at the next step
torchrun --standalone --nproc-per-node 4 -m demo.transformer.train --layout hsdp       # or pp, zero1, moe, ddp
torchrun --standalone --nproc-per-node 8 -m demo.transformer.train --layout fsdp-tp
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import lastwords
from demo.steplog import StepLog
from demo.transformer.layouts import LAYOUTS, Task
from demo.transformer.model import Shape
from demo.transformer.text import Text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="tp")
    parser.add_argument("--is_recover", type=int, choices=(0, 1), default=0, help="1: go on from the last words")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--windows", type=int, default=1024, help="pieces of text in an epoch; 0: the whole text")
    parser.add_argument("--batch-size", type=int, default=16, help="pieces of text in a step, over all replicas")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="torch alone, without lastwords")
    parser.add_argument("--ckpt-path", default="./ttp_checkpoints/")
    parser.add_argument("--ctrl-ip", default="127.0.0.1", help="address of the host of rank 0")
    parser.add_argument("--ctrl-port", type=int, default=30051, help="a free port on that host")
    parser.add_argument("--step-log", default="", help="folder for one file of losses per rank, as JSON lines")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")

    torch.manual_seed(args.seed)
    task = Task(Shape(width=args.width), args.batch_size)
    parallel = LAYOUTS[args.layout](task)
    torch.manual_seed(args.seed + 1 + parallel.replica)  # dropout differs between replicas, and only between those
    text = Text(task.shape.context, args.windows)
    sampler: DistributedSampler[Any] = DistributedSampler(
        text, parallel.replicas, parallel.replica, seed=args.seed, drop_last=True
    )
    loader = DataLoader(text, batch_size=args.batch_size // parallel.replicas, sampler=sampler, drop_last=True)

    optimizer = parallel.optimizer if args.plain else lastwords.OptTFTWrapper(parallel.optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
    log = StepLog(args.step_log, dist.get_rank(), steps=args.epochs * len(loader))
    tft = (
        Unprotected()
        if args.plain
        else lastwords.TFTRegister(
            0,
            args.ctrl_ip,
            args.ctrl_port,
            args.ckpt_path,
            model=parallel.model,
            optimizer=optimizer,
            extras={"scheduler": scheduler},
            units=parallel.units(),
        )
    )
    with tft:
        if args.is_recover or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            tft.resume()
        for epoch, step, (inputs, targets) in tft.steps(loader, epochs=args.epochs):
            optimizer.zero_grad()
            loss = parallel.backward(inputs, targets)
            parallel.clip()
            optimizer.step()
            scheduler.step()
            log.write_step(epoch, step, (epoch - 1) * len(loader) + step, loss.item(), parallel.model, optimizer)

    checksum = log.write_final(parallel.model, optimizer)
    print(f"rank {dist.get_rank()}: finished; its weights and optimizer state have checksum {checksum}", flush=True)
    dist.destroy_process_group()


class Unprotected(contextlib.AbstractContextManager[None]):
    """Takes the place of TFTRegister where torch is to train alone."""

    def __exit__(self, *_: object) -> None:
        pass

    def resume(self) -> None:
        raise SystemExit("--plain saves nothing, so there is nothing to resume from")

    def steps(self, loader: DataLoader[Any], epochs: int) -> Iterator[tuple[int, int, Any]]:
        for epoch in range(1, epochs + 1):
            loader.sampler.set_epoch(epoch - 1)  # type: ignore[attr-defined]
            for step, batch in enumerate(loader, start=1):
                yield epoch, step, batch


if __name__ == "__main__":
    main()
