"""Two optimizers, a collective between their updates: `python -m tests.integration.window_training PLAN.json`.

The plan: checkpoints, port, copy, recover, out (a folder for what each rank computed), plain, every (the second
optimizer comes in every so many steps), twice (a step in which it wrongly comes twice), and kill = [rank, step, place]
with place "window" (before the collective between the updates) or "between" (after it); together: the killed rank waits
until all others have come to that place. swallow = [rank, step]: the loop swallows exceptions, also one that is raised
there before the step's end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 6


def digest_of(modules: list[nn.Module], optimizers: list[Any]) -> str:
    """Bytes of all weights and moments, in an order of their own."""
    parts = [p.detach().numpy().tobytes() for module in modules for p in module.parameters()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = optimizer.state.get(p, {})
                parts += [state[key].numpy().tobytes() for key in sorted(state)]
    return b"".join(parts).hex()[-4000:]


def main(arguments: list[str]) -> None:
    plan = json.loads(Path(arguments[0]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    torch.manual_seed(1)
    body, head = nn.Linear(8, 16), nn.Linear(16, 4)
    model = DDP(nn.Sequential(body, nn.ReLU(), nn.Dropout(0.1), head))
    inner = [
        torch.optim.AdamW(body.parameters(), lr=0.01),
        torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.9),
    ]
    optimizers: list[Any] = list(inner)
    tft: Any = None
    if not plan["plain"]:
        import lastwords

        optimizers = [lastwords.OptTFTWrapper(optimizer) for optimizer in inner]
        tft = lastwords.TFTRegister(
            0,
            "127.0.0.1",
            plan["port"],
            plan["checkpoints"],
            model=model,
            optimizer=optimizers,
            copy=plan["copy"],
        )
    torch.manual_seed(100 + rank)

    def come_by(step: int, place: str) -> None:
        (Path(plan["out"]) / f"{place}_{step}_{rank}").touch()
        if plan["kill"] == [rank, step, place]:
            while plan["together"] and len(list(Path(plan["out"]).glob(f"{place}_{step}_*"))) < dist.get_world_size():
                time.sleep(0.001)  # a rank that had not begun its update could still save the step before
            os.kill(os.getpid(), signal.SIGKILL)

    def train(step: int) -> None:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x, y = torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizers[0].step()
        if step % plan["every"]:
            record(step, loss)
            return
        come_by(step, "window")
        share = loss.detach().clone()
        dist.all_reduce(share)  # what the second update depends on
        come_by(step, "between")
        for group in optimizers[1].param_groups:
            group["lr"] = 0.05 / (1.0 + share.item())
        optimizers[1].step()
        if plan["twice"] == step:
            optimizers[1].step()
        record(step, loss)

    def record(step: int, loss: torch.Tensor) -> None:
        with (Path(plan["out"]) / f"rank_{rank}.jsonl").open("a") as file:
            line = {"step": step, "loss": loss.item().hex(), "state": digest_of([body, head], inner)}
            file.write(json.dumps(line) + "\n")

    if tft is None:
        for step in range(1, STEPS + 1):
            train(step)
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # the interpreter's end is not what reference runs are for
    else:
        with tft:
            first = tft.resume().global_step + 1 if plan["recover"] else 1
            for step in range(first, STEPS + 1):
                try:
                    train(step)
                    if plan["swallow"] == [rank, step]:
                        raise ValueError("a log that fails")
                    tft.step_end(1, step)
                except Exception as error:  # as loops do that go on whatever happens
                    if plan["swallow"] is None:
                        raise
                    print(error, file=sys.stderr, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
