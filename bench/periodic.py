"""What a periodic checkpoint costs the training, beside DCP's async_save of the same state and a plain copy of it.

    python bench/periodic.py [--mib 256] [--saves 12] [--dir PATH]

One rank trains a multilayer perceptron (weights and AdamW's moments: --mib). In turn, a checkpoint is written by
`tft.save()`, or by DCP's `async_save`, or none, for as many steps as that takes; so all meet the same load. Per way:
the stall (what the copy adds to one step), the median step while a checkpoint is being written divided by the median
step beside it in which none is, and the time until it is durable.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import lastwords
from lastwords.processor.writers import Writers

STALL_BUDGET, STEP_BUDGET = 1.2, 1.05
BESIDE_STEPS = 12
"""Steps without a checkpoint before each one with it."""
WIDTH = 1024


def network(mib: int) -> nn.Sequential:
    """Layers of 4 MiB, times three with the moments."""
    layers = [layer for _ in range(max(1, mib // 12)) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers)


class Training:
    """The loop of one rank, and the times of its steps."""

    def __init__(self, mib: int, directory: Path) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.net = network(mib)
        plain = torch.optim.AdamW(self.net.parameters(), 1e-4)
        self.root = directory / "lastwords"
        self.tft = lastwords.protect(self.root, model=self.net, optimizer=plain)
        self.step = 0
        self.batch = torch.randn(16, WIDTH)

    def one(self) -> float:
        """Seconds of one step."""
        begun_mono_s = time.monotonic()
        self.tft.optimizer.zero_grad()
        self.net(self.batch).square().mean().backward()
        self.tft.optimizer.step()
        self.step += 1
        self.tft.step_end(1, self.step)
        return time.monotonic() - begun_mono_s

    def state_bytes(self) -> int:
        """Of weights and moments."""
        moments = [value for state in self.tft.optimizer.inner.state.values() for value in state.values()]
        return sum(one.numel() * one.element_size() for one in [*self.net.parameters(), *moments])


class Copies:
    """Seconds that `Writers.copy` has taken, the newest last."""

    def __init__(self) -> None:
        self.took_s: list[float] = []
        original = Writers.copy

        def timed(writers: Writers, *arguments: Any) -> str:
            begun_mono_s = time.monotonic()
            try:
                return original(writers, *arguments)
            finally:
                self.took_s.append(time.monotonic() - begun_mono_s)

        Writers.copy = timed  # type: ignore[method-assign]


class Way:
    """One way to write a checkpoint, and what it cost."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stalls_s: list[float] = []
        self.ratios: list[float] = []
        self.durable_s: list[float] = []

    def note(self, beside_s: list[float], during_s: list[float], stall_s: float, durable_s: float) -> None:
        """One checkpoint."""
        self.stalls_s.append(stall_s)
        self.durable_s.append(durable_s)
        if during_s:
            self.ratios.append(statistics.median(during_s) / statistics.median(beside_s))


def by_lastwords(training: Training, copies: Copies) -> tuple[float, float, list[float]]:
    """Stall, time until it is durable, and the steps meanwhile; the step that copies is none of them."""
    before = len(copies.took_s)
    training.tft.save()
    while len(copies.took_s) == before:
        training.one()
    begun_mono_s, copied_step = time.monotonic(), training.step - 1
    during_s: list[float] = []
    while not published(training.root, copied_step):
        during_s.append(training.one())
    return copies.took_s[-1], time.monotonic() - begun_mono_s, during_s


def published(root: Path, step: int) -> bool:
    """Whether there is a checkpoint of this step, or of a later one."""
    return any(int(path.name.rpartition("_")[2]) >= step for path in root.glob("tft_saved_checkpoints-step_*"))


def by_dcp(training: Training, directory: Path, group: dist.ProcessGroup) -> tuple[float, float, list[float]]:
    """The same."""
    begun_mono_s, place = time.monotonic(), directory / str(training.step)
    model, optimizer = get_state_dict(training.net, training.tft.optimizer.inner)
    future: Future[Any] = dcp.async_save({"model": model, "optim": optimizer}, checkpoint_id=place, process_group=group)
    stall_s = time.monotonic() - begun_mono_s
    during_s: list[float] = []
    while not future.done():
        during_s.append(training.one())
    future.result()
    shutil.rmtree(place)
    return stall_s, time.monotonic() - begun_mono_s, during_s


def plain_copy_s(size: int) -> float:
    """Of so many bytes, into memory that has been touched before."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    took_s = []
    for _ in range(5):
        begun_mono_s = time.monotonic()
        target[:] = source
        took_s.append(time.monotonic() - begun_mono_s)
    return statistics.median(took_s)


def measure(directory: Path, mib: int, saves: int) -> None:
    """All of it."""
    copies, ours, theirs = Copies(), Way("lastwords"), Way("DCP async_save")
    training = Training(mib, directory)
    group = dist.new_group(backend="gloo")
    with training.tft:
        training.tft.every(steps=1 << 40, keep=2)
        for _ in range(5):
            training.one()
        for number in range(saves + 1):  # the first one allocates
            for way in (ours, theirs):
                beside_s = [training.one() for _ in range(BESIDE_STEPS)]
                if way is ours:
                    stall_s, durable_s, during_s = by_lastwords(training, copies)
                else:
                    stall_s, durable_s, during_s = by_dcp(training, directory / "dcp", group)
                if number:
                    way.note(beside_s, during_s, stall_s, durable_s)
        size = training.state_bytes()
    report(size, plain_copy_s(size), statistics.median(beside_s), (ours, theirs))


def report(size: int, copy_s: float, step_s: float, ways: tuple[Way, ...]) -> None:
    """The table."""
    print(f"state {size / (1 << 20):.0f} MiB, plain copy {1e3 * copy_s:.0f} ms, step {1e3 * step_s:.0f} ms\n")
    print("| way | stall | of a plain copy | step while it writes | durable after |")
    print("|---|---:|---:|---:|---:|")
    for way in ways:
        stall_s = statistics.median(way.stalls_s)
        ratio = f"{statistics.median(way.ratios):.2f} x" if way.ratios else "-"
        durable_s = statistics.median(way.durable_s)
        print(f"| {way.name} | {1e3 * stall_s:.0f} ms | {stall_s / copy_s:.2f} x | {ratio} | {durable_s:.2f} s |")
    print(f"\nbudgets: stall <= {STALL_BUDGET} x a plain copy, step <= {STEP_BUDGET} x")


def main() -> int:
    """The benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--saves", type=int, default=12, help="checkpoints of each kind")
    parser.add_argument("--dir", type=Path, default=None, help="where to write; a temporary directory by default")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    directory = Path(tempfile.mkdtemp(prefix="bench-periodic-", dir=options.dir))
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        measure(directory, options.mib, options.saves)
        dist.destroy_process_group()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
