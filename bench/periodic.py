"""What a periodic checkpoint costs the training, beside other writers of the same state and a plain copy of it.

    python bench/periodic.py [--mib 256] [--saves 12] [--dir PATH]

One rank trains a multilayer perceptron (weights and AdamW's moments: --mib). In turn, a checkpoint is written by
`tft.save()`, by DCP's `async_save`, and by torch_checkpointing, where it is installed; so all meet the same load. Per
way: the stall (what the copy adds to one step), the median step while a checkpoint is being written divided by the
median step just before in which none is, and the time until it is written. "Plain" copies the same tensors, at the end
of a step too, into others of that size which have been touched. Exit code 1 if a budget is missed.
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
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import lastwords
from lastwords.processor.saver import Writers

try:
    import torch_checkpointing
    import torch_checkpointing.config
    import torch_checkpointing.staging
    import torch_checkpointing.storage.filesystem
except ImportError:
    torch_checkpointing = None  # type: ignore[assignment]

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

    def one(self, update: AbstractContextManager[object] = nullcontext()) -> float:  # noqa: B008
        """Seconds of one step, whose update is made within `update`."""
        begun_mono_s = time.monotonic()
        self.tft.optimizer.zero_grad()
        self.net(self.batch).square().mean().backward()
        with update:
            self.tft.optimizer.step()
        self.step += 1
        self.tft.step_end(1, self.step)
        return time.monotonic() - begun_mono_s

    def tensors(self) -> list[torch.Tensor]:
        """Weights and moments."""
        moments = [value for state in self.tft.optimizer.inner.state.values() for value in state.values()]
        return [one.detach() for one in [*self.net.parameters(), *moments]]

    def state(self) -> dict[str, Any]:
        """As DCP names it."""
        model, optimizer = get_state_dict(self.net, self.tft.optimizer.inner)
        return {"model": model, "optim": optimizer}


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


Cost = tuple[float, float, list[float]]
"""Stall, time until it is written (both in seconds, the second from the end of the first), and the steps meanwhile."""


class ByLastwords:
    """`tft.save()`; the step that copies is none of those meanwhile."""

    name = "**lastwords**"

    def __init__(self, training: Training) -> None:
        self._training = training
        self._copies = Copies()

    def save(self) -> Cost:
        """One checkpoint."""
        training, before = self._training, len(self._copies.took_s)
        training.tft.save()
        while len(self._copies.took_s) == before:
            training.one()
        begun_mono_s, copied_step = time.monotonic(), training.step - 1
        during_s: list[float] = []
        while not published(training.root, copied_step):
            during_s.append(training.one())
        return self._copies.took_s[-1], time.monotonic() - begun_mono_s, during_s

    def close(self) -> None:
        """Nothing of its own."""


def published(root: Path, step: int) -> bool:
    """Whether there is a checkpoint of this step, or of a later one."""
    return any(int(path.name.rpartition("_")[2]) >= step for path in root.glob("tft_saved_checkpoints-step_*"))


class ByDcp:
    """`torch.distributed.checkpoint.async_save`."""

    name = "DCP `async_save`"

    def __init__(self, training: Training, directory: Path) -> None:
        self._training, self._directory = training, directory
        self._group = dist.new_group(backend="gloo")

    def save(self) -> Cost:
        """One checkpoint."""
        begun_mono_s, place = time.monotonic(), self._directory / str(self._training.step)
        future: Future[Any] = dcp.async_save(self._training.state(), checkpoint_id=place, process_group=self._group)
        copied_mono_s = time.monotonic()
        during_s: list[float] = []
        while not future.done():
            during_s.append(self._training.one())
        future.result()
        shutil.rmtree(place)
        return copied_mono_s - begun_mono_s, time.monotonic() - copied_mono_s, during_s

    def close(self) -> None:
        """Nothing that outlives the process."""


class Waited:
    """A context, and how long it was waited for."""

    def __init__(self, inner: AbstractContextManager[object]) -> None:
        self._inner = inner
        self.took_s = 0.0

    def __enter__(self) -> None:
        begun_mono_s = time.monotonic()
        self._inner.__enter__()
        self.took_s = time.monotonic() - begun_mono_s

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)


class ByTorchCheckpointing:
    """Its `save()` copies beside the next forward and backward pass; `lock()` keeps the update waiting for the copy."""

    name = "torch_checkpointing (no fsync)"

    def __init__(self, training: Training, directory: Path) -> None:
        self._training, self._directory = training, directory
        staging = torch_checkpointing.staging.CheckpointStagerConfig(
            use_pinned_memory=False, use_non_blocking_copy=False
        )
        saving = torch_checkpointing.config.AsyncCheckpointSaverConfig(staging_config=staging)
        # Its default, O_DIRECT from buffers of any alignment, is refused by ext4 (EINVAL).
        storage = torch_checkpointing.storage.filesystem.LocalFileSystemStorageConfig(use_direct_io=False)
        config = torch_checkpointing.CheckpointManager.Config(save=saving, storage_config=storage)
        self._manager = torch_checkpointing.CheckpointManager(config)

    def save(self) -> Cost:
        """One checkpoint."""
        begun_mono_s, place = time.monotonic(), self._directory / str(self._training.step)
        future = self._manager.save(str(place), self._training.state())
        assert future is not None
        stall_s, copied_mono_s = time.monotonic() - begun_mono_s, time.monotonic()
        lock = Waited(self._manager.lock())
        during_s = [self._training.one(lock) - lock.took_s]
        stall_s += lock.took_s
        while not future.done():
            during_s.append(self._training.one(self._manager.lock()))
        future.result()
        shutil.rmtree(place)
        return stall_s, time.monotonic() - copied_mono_s, during_s

    def close(self) -> None:
        """Ends its process."""
        self._manager.close()


class PlainCopy:
    """Of the same tensors, at the end of a step too."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._targets = [torch.ones_like(one) for one in training.tensors()]

    def took_s(self) -> float:
        """Seconds of one."""
        begun_mono_s = time.monotonic()
        for source, target in zip(self._training.tensors(), self._targets, strict=True):
            target.copy_(source)
        return time.monotonic() - begun_mono_s


class Figures:
    """What one way cost."""

    def __init__(self) -> None:
        self.stalls_s: list[float] = []
        self.of_a_copy: list[float] = []
        self.ratios: list[float] = []
        self.written_s: list[float] = []

    def note(self, cost: Cost, beside_s: list[float], copy_s: float) -> None:
        """One checkpoint."""
        stall_s, written_s, during_s = cost
        self.stalls_s.append(stall_s)
        self.of_a_copy.append(stall_s / copy_s)
        self.written_s.append(written_s)
        if during_s:
            self.ratios.append(statistics.median(during_s) / statistics.median(beside_s))

    def row(self, name: str) -> str:
        """Of the table."""
        ratio = f"{statistics.median(self.ratios):.2f}" if self.ratios else "-"
        stall_ms = 1e3 * statistics.median(self.stalls_s)
        return (
            f"| {name} | {stall_ms:.0f} ms | {statistics.median(self.of_a_copy):.2f} | {ratio} "
            f"| {statistics.median(self.written_s):.2f} s |"
        )

    def kept(self) -> bool:
        """Whether both budgets are."""
        step = statistics.median(self.ratios) if self.ratios else 1.0
        return statistics.median(self.of_a_copy) <= STALL_BUDGET and step <= STEP_BUDGET


def measure(training: Training, ways: list[Any], saves: int) -> bool:
    """All of it; whether lastwords, the first of the ways, keeps its budgets."""
    figures = {way.name: Figures() for way in ways}
    plain = PlainCopy(training)
    copies_s, steps_s = [], []
    for number in range(saves + 1):  # the first one allocates
        for way in ways:
            beside_s = [training.one() for _ in range(BESIDE_STEPS)]
            copies_s.append(plain.took_s())
            cost = way.save()
            if number:
                figures[way.name].note(cost, beside_s, copies_s[-1])
                steps_s.extend(beside_s)
    size_mib = sum(one.numel() * one.element_size() for one in training.tensors()) / (1 << 20)
    copy_ms, step_ms = 1e3 * statistics.median(copies_s), 1e3 * statistics.median(steps_s)
    print(
        f"{size_mib:.0f} MiB in {len(training.tensors())} tensors, plain copy {copy_ms:.0f} ms, step {step_ms:.0f} ms\n"
    )
    print("| way | stall | stall / plain copy | step while it writes / step | written after |")
    print("|---|---:|---:|---:|---:|")
    for way in ways:
        print(figures[way.name].row(way.name))
    print(f"\nbudgets: stall / plain copy <= {STALL_BUDGET}, step while it writes / step <= {STEP_BUDGET}")
    return figures[ways[0].name].kept()


def compared(directory: Path, mib: int, saves: int) -> bool:
    """With all ways that are installed."""
    training = Training(mib, directory)
    with training.tft:
        training.tft.every(steps=1 << 40, keep=2)
        for _ in range(5):
            training.one()
        ways: list[Any] = [ByLastwords(training), ByDcp(training, directory / "dcp")]
        if torch_checkpointing is not None:
            ways.append(ByTorchCheckpointing(training, directory / "torch_checkpointing"))
        try:
            return measure(training, ways, saves)
        finally:
            for way in ways:
                way.close()


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
        kept = compared(directory, options.mib, options.saves)
        dist.destroy_process_group()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
