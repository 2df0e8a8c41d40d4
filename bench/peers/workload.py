"""The training that every system of the comparison runs, and the log from which its recovery is read.

A multilayer perceptron of 2.4 million parameters with dropout, AdamW, 16 samples per rank and step, one data order.
After each update every rank appends one line: time, process, rank, step, number of ranks in the update, checksum of the
loss, and in every 20th step checksum of the weights.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path

import torch
import xxhash
from torch import nn

RANKS = 4
BATCH = 16
FEATURES, WIDTH, CLASSES = 256, 1024, 10
SAMPLES = 4096
WEIGHTS_EVERY = 20
"""Steps between two checksums of the weights."""

DIRECTORY = "BENCH_PEERS_DIRECTORY"
"""The environment variable that names the run's directory, and marks its processes."""


def directory() -> Path:
    """Where the run keeps its log and its checkpoints."""
    return Path(os.environ[DIRECTORY])


class Workload:
    """Model, optimizer and samples, equal on all ranks; afterwards each rank has its own random numbers for dropout."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.rank = rank
        self.net = nn.Sequential(*hidden(FEATURES), *hidden(WIDTH), *hidden(WIDTH), nn.Linear(WIDTH, CLASSES))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self._features = torch.randn(SAMPLES, FEATURES)
        self._labels = torch.randint(CLASSES, (SAMPLES,))
        self._order = torch.randperm(SAMPLES)
        torch.manual_seed(1 + rank)

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
        """One step of the training; the loss of this rank's samples. Steps count from 1."""
        begin = ((step - 1) * RANKS + self.rank) * BATCH % SAMPLES
        chosen = self._order[begin : begin + BATCH]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(self._features[chosen]), self._labels[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()


def hidden(inputs: int) -> tuple[nn.Module, ...]:
    """One hidden layer."""
    return nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Dropout(0.1)


class UpdateLog:
    """One file for each process; a line is one write, so that a killed process leaves no half of one."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._file = os.open(directory() / f"updates_{os.getpid()}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def updated(self, step: int, ranks: int, loss: torch.Tensor) -> None:
        """Appends the line of an update that is over."""
        line = {
            "mono_ns": time.monotonic_ns(),
            "pid": os.getpid(),
            "rank": self._workload.rank,
            "step": step,
            "ranks": ranks,
            "loss": zlib.crc32(loss.numpy().tobytes()),
        }
        if step % WEIGHTS_EVERY == 0:
            line["weights"] = self._weights()
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def _weights(self) -> int:
        checksum = xxhash.xxh32()
        for parameter in self._workload.net.parameters():
            checksum.update(parameter.detach().numpy().data)
        return checksum.intdigest()


def goes_on(done: int) -> bool:
    """Whether there is a step after the step `done`. The driver names the last step while it is still some steps off,
    so all ranks give the same answer."""
    try:
        return done < int((directory() / "last_step").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return True
