"""A small transformer learns English in any parallel layout, and `kill -9` of a worker costs nothing.

torchrun --standalone --nproc-per-node 4 -m demo.transformer.train                     # kill -9 a worker while it runs
torchrun --standalone --nproc-per-node 4 -m demo.transformer.train --is_recover 1      # goes on at the next step
torchrun --standalone --nproc-per-node 4 -m demo.transformer.train --layout hsdp       # or fsdp, pp, zero1, moe, ddp
torchrun --standalone --nproc-per-node 8 -m demo.transformer.train --layout fsdp-tp    # or pp-tp
torchrun --standalone --nproc-per-node 4 -m demo.transformer.train --is_recover 1      # on fewer ranks, as another one
"""

from __future__ import annotations

import argparse
import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import lastwords
from demo.steplog import StepLog
from demo.transformer.answer import answer
from demo.transformer.layouts import LAYOUTS, Task
from demo.transformer.model import Shape
from demo.transformer.text import Numbered, Text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="tp")
    parser.add_argument("--is_recover", type=int, choices=(0, 1), default=0, help="1: go on from the last words")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--windows", type=int, default=1024, help="pieces of text in an epoch; 0: the whole text")
    parser.add_argument("--batch-size", type=int, default=16, help="pieces of text in a step, over all replicas")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--parts", type=int, default=2, help="ranks that share what is cut into pieces")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="torch alone, without lastwords")
    parser.add_argument("--ckpt-path", default="./ttp_checkpoints/")
    parser.add_argument("--ctrl-ip", default="127.0.0.1", help="address of the host of rank 0")
    parser.add_argument("--ctrl-port", type=int, default=30051, help="a free port on that host")
    parser.add_argument("--sigterm-after", type=int, default=0, help="global step after which rank 0 gets SIGTERM")
    parser.add_argument("--step-log", default="", help="folder for one file of losses per rank, as JSON lines")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")

    torch.manual_seed(args.seed)
    task = Task(Shape(width=args.width, dropout=args.dropout), args.batch_size, args.parts)
    parallel = LAYOUTS[args.layout](task)
    torch.manual_seed(args.seed + 1 + parallel.replica)  # dropout differs between replicas, and only between those
    text = Numbered(Text(task.shape.context, args.windows))
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
            copy=parallel.copy,
        )
    )
    with tft:
        if args.is_recover or tft.restarted:
            point = tft.resume()
            if point is not None:
                log.write_resumed(point.global_step, parallel.model, optimizer)
        for epoch, step, (inputs, targets, numbers) in tft.steps(loader, epochs=args.epochs):
            done = (epoch - 1) * len(loader) + step
            log.write_batch(done, numbers.tolist())
            optimizer.zero_grad()
            loss = parallel.backward(inputs, targets)
            parallel.clip()
            optimizer.step()
            scheduler.step()
            log.write_step(epoch, step, done, loss.item(), parallel.model, optimizer)
            if done == args.sigterm_after:
                taken_away(log, parallel.model)

    checksum = log.write_final(parallel.model, optimizer)
    print(f"rank {dist.get_rank()}: finished; its weights and optimizer state have checksum {checksum}", flush=True)
    dist.destroy_process_group()


def taken_away(log: StepLog, model: nn.Module) -> None:
    """As when somebody else needs the machines, at a known step: SIGTERM. What the model says then goes to the log."""
    log.keep("answer", answer(model))
    dist.barrier()  # all of them have got here
    if dist.get_rank() == 0:
        signal.raise_signal(signal.SIGTERM)


class Unprotected(contextlib.AbstractContextManager[None]):
    """Takes the place of TFTRegister where torch is to train alone."""

    restarted = False

    def __exit__(self, *_: object) -> None:
        pass

    def resume(self) -> lastwords.ResumePoint | None:
        raise SystemExit("--plain saves nothing, so there is nothing to resume from")

    def steps(self, loader: DataLoader[Any], epochs: int) -> Iterator[tuple[int, int, Any]]:
        for epoch in range(1, epochs + 1):
            loader.sampler.set_epoch(epoch - 1)  # type: ignore[attr-defined]
            for step, batch in enumerate(loader, start=1):
                yield epoch, step, batch


if __name__ == "__main__":
    main()
