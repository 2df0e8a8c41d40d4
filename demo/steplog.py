"""What a rank did, as JSON lines: who it is, the loss of every step, and at the end a checksum of every tensor.

This is how the demo compares two runs; training does not need it.

{"rank": 2, "pid": 4711, "steps": 140}
{"epoch": 1, "step": 1, "global_step": 1, "loss": 2.3065004348754883, "mono_s": 8123.25}
{"tensor": "optim/0.weight/exp_avg", "xxh3": "6a1c..."}
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn


class StepLog:
    """Appends to `{folder}/rank_{rank}.jsonl`, a line at a time; writes nothing where `folder` is empty."""

    def __init__(self, folder: str, rank: int, steps: int) -> None:
        self._file = None
        if folder:
            path = Path(folder) / f"rank_{rank}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1, encoding="utf-8")  # a killed process leaves whole lines behind
        self._write({"rank": rank, "pid": os.getpid(), "steps": steps})

    def write_step(self, epoch: int, step: int, global_step: int, loss: float) -> None:
        """JSON prints a float with as many digits as it takes to read the very same bits back."""
        record = {"epoch": epoch, "step": step, "global_step": global_step, "loss": loss, "mono_s": time.monotonic()}
        self._write(record)

    def write_final(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
        """Writes one line per tensor; returns a checksum of weights and optimizer state, equal on all ranks."""
        total = xxhash.xxh3_64()
        for name, tensor in tensors(net, optimizer):
            raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            checksum = xxhash.xxh3_64_hexdigest(raw.data)
            self._write({"tensor": name, "xxh3": checksum})
            if not name.startswith("rng/"):
                total.update(f"{name}={checksum};".encode())
        return total.hexdigest()

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")


def tensors(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights, buffers, optimizer state and the state of torch's random numbers, by name."""
    yield from ((f"model/{name}", tensor) for name, tensor in net.state_dict().items())
    for name, parameter in net.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                yield f"optim/{name}/{key}", value
    yield "rng/torch", torch.get_rng_state()
