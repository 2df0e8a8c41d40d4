"""A loop over torchdata's StatefulDataLoader, as a user has it, with `tft.steps(loader)` and no word of the loader.

With "beside" the loader is a local extra, and with "own" the loop is the user's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tests.frameworks.script import BROKEN, CASE, DIRECTORY, PROTECTED, RANK, die, end, ended, final

RANKS, EPOCHS, BATCH, SAMPLES, WORKERS = 2, 3, 4, 27, 2
"""Samples of a rank: six batches and three samples."""


class Points(Dataset[torch.Tensor]):
    """Ten numbers each, which may be moved a little at random as they are fetched."""

    def __init__(self, count: int) -> None:
        self.points = torch.randn(count, 10, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.points[index] + (torch.randn(10) if "draws" in CASE else 0)


class Stream(IterableDataset[torch.Tensor]):
    """The same, in an order of its own, which depends on the epochs before; it knows where it stands."""

    def __init__(self, points: Points) -> None:
        self.points, self.at, self.epoch = points, 0, 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if self.at == 0:
            self.epoch += 1
        while self.at * step + first < SAMPLES:
            self.at += 1
            place = (self.at - 1) * step + first
            yield self.points[(place * 7 * self.epoch + self.epoch + SAMPLES * RANK) % len(self.points)]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


def loader() -> Any:
    points = Points(RANKS * SAMPLES)
    more = {"batch_size": BATCH, "drop_last": "drop" in CASE, "num_workers": WORKERS if "workers" in CASE else 0}
    if "stream" in CASE:
        return StatefulDataLoader(Stream(points), **more)
    if "shuffle" in CASE:
        return StatefulDataLoader(points, shuffle=True, **more)
    sampler: Any = StatefulDistributedSampler(points)
    return StatefulDataLoader(points, sampler=sampler, **more)


def own_loop(data: Any, tft: Any, point: Any) -> Iterator[torch.Tensor]:
    """Of a user's own: the loader's state, which is handed over, says where an epoch goes on."""
    epoch, done = (1, 0) if point is None else (point.epoch, point.step)
    while epoch <= EPOCHS:
        data.sampler.set_epoch(epoch - 1)
        batches = iter(data)
        if done:
            tft.step_begin()
        for batch in batches:
            done += 1
            yield batch
            tft.step_end(epoch, done)
        epoch, done = epoch + 1, 0


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(10, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 1))
    model, optimizer = DDP(net), torch.optim.AdamW(net.parameters(), 1e-2)
    torch.manual_seed(11 + RANK)
    data, step, tft = loader(), 0, None
    if PROTECTED:
        import lastwords

        if BROKEN == "streams of the epoch":
            from lastwords.optim_wrapper.trainer.run import Run

            whole = Run.resume_at.fget
            Run.resume_at = property(lambda run: (at := whole(run)) and replace(at, restore_epoch_start=lambda: None))
        beside = {"data": data} if "beside" in CASE else {}
        tft = lastwords.protect(
            DIRECTORY / "ckpt", model=model, optimizer=optimizer, local_extras=beside, in_place=True
        )
    with tft or contextlib.nullcontext():
        if tft is not None:
            point = tft.resume(missing_ok=True)
            step = 0 if point is None else point.global_step
        for epoch in [None] if tft is not None else range(EPOCHS):
            if epoch is not None and "stream" not in CASE and "shuffle" not in CASE:
                data.sampler.set_epoch(epoch)
            found: Any = data
            if tft is not None:
                found = own_loop(data, tft, point) if "own" in CASE else (one[-1] for one in tft.steps(data, EPOCHS))
            for batch in found:
                step += 1
                die(step, "fetched")
                loss = model(batch).square().mean()
                die(step, "fwd")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                die(step, "win")
                ended(step, net.state_dict(), optimizer.state_dict()["state"], loss.detach())
                if step % 5 == 0:
                    model.eval()
                    with torch.no_grad():
                        model(batch)
                    die(step, "evaluating")
                    model.train()
    final(net.state_dict())
    end()


if __name__ == "__main__":
    main()
