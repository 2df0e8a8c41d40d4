"""A loop in the way of a framework, which is not part of the tests' environment: Fabric, Accelerate, torchdata.

The plan: checkpoints, port, out, recover, kill = [rank, step] or null, framework "fabric", "fabric loader",
"accelerate", "torchdata" or "torchdata, own loop".
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lastwords

RANKS, EPOCHS, STEPS_PER_EPOCH = 2, 3, 6


class Loop:
    """One rank's model, data and loop. `prepare` has the framework's own lines."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 4))
        self.inner = torch.optim.AdamW(self.net.parameters(), 1e-2)
        self.optimizer = lastwords.OptTFTWrapper(self.inner)
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(RANKS * STEPS_PER_EPOCH * 8, 20, generator=generator)
        self.data = TensorDataset(x, torch.randint(0, 4, (len(x),), generator=generator))
        self.move: Callable[[Any], Any] = lambda batch: batch
        self.backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
        self.local_extras: dict[str, Any] = {}
        self.model, self.loader = self.prepare(plan["framework"])
        self.rank = dist.get_rank()
        torch.manual_seed(5 + self.rank)
        self.step = 0

    def prepare(self, framework: str) -> tuple[nn.Module, Any]:
        if framework == "accelerate":
            from accelerate import Accelerator

            accelerator = Accelerator(cpu=True)
            self.backward = accelerator.backward
            loader = DataLoader(self.data, batch_size=8, shuffle=True)
            model, _, loader = accelerator.prepare(self.net, self.optimizer, loader)
            return model, loader
        if framework.startswith("fabric"):
            from lightning_fabric import Fabric

            fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
            fabric.launch()
            self.move, self.backward = fabric.to_device, fabric.backward
            loader = DataLoader(self.data, batch_size=8, sampler=DistributedSampler(self.data, drop_last=True))
            model, _ = fabric.setup(self.net, self.optimizer)
            return model, fabric.setup_dataloaders(loader) if framework == "fabric loader" else loader
        from torchdata.stateful_dataloader import StatefulDataLoader

        dist.init_process_group("gloo")
        sampler: Any = DistributedSampler(self.data, drop_last=True)
        stateful = StatefulDataLoader(self.data, batch_size=8, sampler=sampler, num_workers=2)
        self.local_extras = {"data": stateful}
        return DDP(self.net), stateful

    def train(self) -> None:
        """Every step that is left, with a record of each."""
        plan = self.plan
        tft = lastwords.TFTRegister(
            0,
            "127.0.0.1",
            plan["port"],
            plan["checkpoints"],
            model=self.model,
            optimizer=self.optimizer,
            local_extras=self.local_extras,
        )
        with tft:
            point = tft.resume() if plan["recover"] else None
            if point is not None:
                (Path(plan["out"]) / f"rank_{self.rank}.resumed").write_text(json.dumps([point.exact, point.reasons]))
            self.step = 0 if point is None else point.global_step
            own = plan["framework"].endswith("own loop")
            for epoch, step, batch in self.own_loop(tft, point) if own else tft.steps(self.loader, EPOCHS):
                self.one(self.move(batch))
                if own:
                    tft.step_end(epoch, step)

    def own_loop(self, tft: Any, point: Any) -> Iterator[tuple[int, int, Any]]:
        epoch, done = (1, 0) if point is None else (point.epoch, point.step)
        while epoch <= EPOCHS:
            self.loader.sampler.set_epoch(epoch - 1)
            batches = iter(self.loader)
            if done:
                tft.step_begin()
            for batch in batches:
                done += 1
                yield epoch, done, batch
            epoch, done = epoch + 1, 0

    def one(self, batch: Any) -> None:
        """One step."""
        self.step += 1
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.optimizer.zero_grad()
        self.backward(loss)
        if self.plan["kill"] == [self.rank, self.step]:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        self.optimizer.step()
        digest = hashlib.sha256()
        for value in (*self.net.state_dict().values(), *(v for s in self.inner.state.values() for v in s.values())):
            digest.update(value.numpy().tobytes())
        with (Path(self.plan["out"]) / f"rank_{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.step, "loss": loss.item().hex(), "state": digest.hexdigest()}) + "\n")


def main(arguments: list[str]) -> None:
    """Train as the plan says."""
    logging.basicConfig(level=logging.INFO)
    Loop(json.loads(Path(arguments[0]).read_text())).train()
