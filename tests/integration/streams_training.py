"""Loops whose random numbers come from generators of their own: `python -m tests.integration.streams_training PLAN`.

The plan: checkpoints, port, out, recover, plain, kill = [rank, step] or null, loop "steps", "own" or "sampled", and
blind = true for the negative control, in which nothing is searched. "sampled": one generator is shared by the loader
and its sampler.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from tests.zoo import without

RANKS, EPOCHS, STEPS_PER_EPOCH, BATCH = 2, 2, 4, 3
STEPS = EPOCHS * STEPS_PER_EPOCH
AUGMENT = np.random.default_rng(7)


class Noisy(Dataset[Any]):
    """Draws from a global of the module and from generators of its own."""

    def __init__(self) -> None:
        self.streams = [random.Random(3), np.random.RandomState(4)]

    def __len__(self) -> int:
        return STEPS_PER_EPOCH * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = AUGMENT.normal() + self.streams[0].gauss(0, 1) + self.streams[1].randn()
        return torch.full((8,), index / 7) + float(noise)


class Net(nn.Module):
    """Noise from a generator that the module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 2)
        self.noise = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The usual."""
        out: torch.Tensor = self.inner(x + torch.randn(x.shape, generator=self.noise))
        return out


class Schedule:
    """An extra with a state of its own, and a generator beside it."""

    def __init__(self) -> None:
        self.rng = np.random.Generator(np.random.Philox(9))

    def state_dict(self) -> dict[str, Any]:
        """Nothing of the generator."""
        return {"is": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


def loader_of(plan: dict[str, Any]) -> Any:
    """A loader that draws from generators of its own."""
    items = Noisy()
    shared = torch.Generator().manual_seed(6)
    if plan["loop"] == "sampled":
        sampler: Any = BatchSampler(RandomSampler(items, generator=shared), BATCH, False)
        return DataLoader(items, batch_sampler=sampler, generator=shared)
    return DataLoader(items, BATCH, shuffle=True, generator=shared)


def batches_of(loader: Any, done: int, restore: Any) -> Iterator[tuple[int, int, Any]]:
    """A loop of one's own: only the epoch that is under way is opened, and its done batches are drawn again."""
    for epoch in range(1 + done // STEPS_PER_EPOCH, EPOCHS + 1):
        first = done % STEPS_PER_EPOCH if epoch == 1 + done // STEPS_PER_EPOCH else 0
        loader.generator.manual_seed(100 + epoch)
        iterator = iter(loader)
        for _ in range(first):
            next(iterator)
        if first or epoch > 1:
            restore(epoch == 1 + done // STEPS_PER_EPOCH)
        for step in range(first + 1, STEPS_PER_EPOCH + 1):
            yield epoch, step, next(iterator)


def main(arguments: list[str]) -> None:
    """Train as the plan says."""
    plan = json.loads(Path(arguments[0]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = Net()
    model = DDP(net)
    inner = torch.optim.AdamW(net.parameters(), 1e-2)
    loader, schedule = loader_of(plan), Schedule()
    jitter = np.random.default_rng(20 + rank)
    if plan["recover"] or not plan["plain"]:
        import lastwords

    def train(step: int, optimizer: Any, x: torch.Tensor, draws: Any) -> None:
        passing = torch.Generator().manual_seed(step)
        scale = 1 + 0.1 * draws.random() + 0.1 * schedule.rng.random() + torch.rand((), generator=passing).item()
        loss = (model(x) * scale).square().mean()
        optimizer.zero_grad()
        if plan["kill"] == [rank, step]:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        states = [value for state in inner.state.values() for value in state.values()]
        digest = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in (*net.parameters(), *states)))
        with (Path(plan["out"]) / f"rank_{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "loss": loss.item().hex(), "state": digest.hexdigest()}) + "\n")

    if plan["plain"]:
        for number, (_, _, x) in (
            enumerate(batches_of(loader, 0, lambda first: None), 1)
            if plan["loop"] == "own"
            else (enumerate(((0, 0, x) for _ in range(EPOCHS) for x in loader), 1))
        ):
            train(number, inner, x, jitter)
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)
    if plan["blind"]:
        without.take_out(["own generators"])
    optimizer = lastwords.OptTFTWrapper(inner)
    tft = lastwords.TFTRegister(
        0, "127.0.0.1", plan["port"], plan["checkpoints"], model=model, optimizer=optimizer,
        extras={"schedule": schedule},
    )  # fmt: skip
    with tft:
        point = tft.resume() if plan["recover"] else None
        done = 0 if point is None else point.global_step
        if plan["loop"] == "own":
            for epoch, step, x in batches_of(loader, done, lambda first: first and point and tft.step_begin()):
                train(STEPS_PER_EPOCH * (epoch - 1) + step, optimizer, x, jitter)
                if step == 1 and point is not None:
                    said(plan, rank, tft)
                tft.step_end(epoch, step)
        else:
            for number, (_, _, x) in enumerate(tft.steps(loader, EPOCHS), done + 1):
                train(number, optimizer, x, jitter)
        said(plan, rank, tft)
    dist.destroy_process_group()


def said(plan: dict[str, Any], rank: int, tft: Any) -> None:
    """What is known against exactness by now, resume() included."""
    (Path(plan["out"]) / f"rank_{rank}.reasons").write_text(json.dumps([*map(str, tft._recorder.ledger.reasons)]))


if __name__ == "__main__":
    main(sys.argv[1:])
