"""A script as README.md shows it, for `lastwords drill`; with a fault if it is told to have one.

--unsaved: a number that the loop changes hangs on an object that nobody hands over. --unseeded: all weights are drawn
anew in each run. --cache: a layer keeps its last output, too large to be saved, and nothing reads it; --cache-read: the
next forward pass does. --never: it does not resume. --crash: it fails in step 4. --hang: it stands still there.
--halves: the layers have two optimizers.
"""

from __future__ import annotations

import argparse
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lastwords


class Cache(nn.Module):
    """Keeps its last output many times over; adds a part of it to the next one if it `reads` it."""

    last: torch.Tensor | None = None

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads and self.training and self.last is not None:
            x = x + 0.1 * self.last[: len(x)]
        if self.training:
            self.last = x.detach().repeat(1000, 1)
        return x


class Trainer:
    """Holds what no checkpoint has."""

    scale: float

    def __init__(self) -> None:
        self.scale = 1.0


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--unsaved", "--unseeded", "--cache", "--cache-read", "--never", "--crash", "--hang", "--halves"):
        parser.add_argument(flag, action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if not arguments.unseeded:
        torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    if arguments.cache or arguments.cache_read:
        net.append(Cache(reads=arguments.cache_read))
    model = DDP(net)
    torch.manual_seed(2 + dist.get_rank())
    drawn = torch.Generator().manual_seed(7)
    samples = TensorDataset(torch.randn(80, 8, generator=drawn), torch.randint(0, 4, (80,), generator=drawn))
    loader = DataLoader(samples, 8, sampler=DistributedSampler(samples, seed=3))
    parts = [net[:2], net[2:]] if arguments.halves else [net]
    plain = [torch.optim.AdamW(part.parameters(), 1e-3) for part in parts]
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(plain[0], 5000)
    trainer = Trainer()
    with lastwords.protect("./mine/", model=model, optimizer=plain, extras={"scheduler": scheduler}) as tft:
        if not arguments.never:
            tft.resume(missing_ok=True)
        for _epoch, step, (x, y) in tft.steps(loader, epochs=5):
            if step == 4 and arguments.crash:
                raise RuntimeError("planted")
            if step == 4 and arguments.hang:
                threading.Event().wait()
            loss = nn.functional.cross_entropy(model(x), y)
            if arguments.unsaved:
                loss = loss * trainer.scale
                trainer.scale *= 0.9
            for optimizer in tft.optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in tft.optimizers:
                optimizer.step()
            scheduler.step()
            tft.step_end()
            if step == 5:
                net.eval()
                with torch.no_grad():
                    net(x)
                net.train()


if __name__ == "__main__":
    main()
