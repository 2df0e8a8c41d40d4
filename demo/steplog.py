"""What a rank did, as JSON lines: who it is, the loss of every step, and at the end a checksum of every tensor.

This is how the demos compare two runs; training does not need it. Of a sharded tensor the rank's own part counts.

{"rank": 2, "pid": 4711, "steps": 140}
{"resumed_after": 12, "resumed_state": "77c0..."}
{"batch_of": 13, "samples": [5, 2]}
{"epoch": 1, "step": 13, "global_step": 13, "loss": 2.3065, "mono_s": 8123.25, "state": "08d2..."}
{"tensor": "optim/0.weight/exp_avg", "xxh3": "6a1c..."}
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor


class StepLog:
    """Appends to `{folder}/rank_{rank}.jsonl`, a line at a time; writes nothing where `folder` is empty."""

    def __init__(self, folder: str, rank: int, steps: int) -> None:
        self._file = None
        self._rank, self._folder = rank, Path(folder)
        if folder:
            path = Path(folder) / f"rank_{rank}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1, encoding="utf-8")  # a killed process leaves whole lines behind
        self._write({"rank": rank, "pid": os.getpid(), "steps": steps})

    def write_step(
        self,
        epoch: int,
        step: int,
        global_step: int,
        loss: float,
        net: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Give net and optimizer where not only the losses of the step are to be compared, but a checksum of them too.

        JSON prints a float with as many digits as it takes to read the very same bits back.
        """
        if self._file is None:
            return
        record: dict[str, Any] = {"epoch": epoch, "step": step, "global_step": global_step}
        record |= {"loss": loss, "mono_s": time.monotonic()}
        if net is not None and optimizer is not None:
            record["state"] = checksum(checksums(net, optimizer))
        self._write(record)

    def write_batch(self, global_step: int, samples: Sequence[int]) -> None:
        """Which samples the step has; before its backward, as a rank may be parked before it gets to `write_step`."""
        self._write({"batch_of": global_step, "samples": list(samples)})

    def write_resumed(self, global_step: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The state that a resumed run begins with."""
        self._write({"resumed_after": global_step, "resumed_state": checksum(checksums(net, optimizer))})

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Writes a tensor beside the log, on rank 0."""
        if self._file is not None and self._rank == 0:
            torch.save(tensor, self._folder / f"{name}.pt")

    def write_final(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
        """Writes one line per tensor; returns a checksum of this rank's weights and optimizer state."""
        found = checksums(net, optimizer)
        for name, value in found.items():
            self._write({"tensor": name, "xxh3": value})
        return checksum(found)

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")


def tensors(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights, buffers, optimizer state and the state of torch's random numbers, by name."""
    yield from ((f"model/{name}", tensor) for name, tensor in net.state_dict().items())
    state = getattr(optimizer, "optim", optimizer).state  # ZeroRedundancyOptimizer keeps the rank's own state in .optim
    for name, parameter in net.named_parameters():
        for key, value in sorted(state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                yield f"optim/{name}/{key}", value
    yield "rng/torch", torch.get_rng_state()


def checksums(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Name of each tensor and the checksum of its bytes."""
    found = {}
    for name, tensor in tensors(net, optimizer):
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        raw = part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        found[name] = xxhash.xxh3_64_hexdigest(raw.data)
    return found


def checksum(found: Mapping[str, str]) -> str:
    """One for all of them but the random numbers, which may differ between ranks that hold the same weights."""
    text = "".join(f"{name}={value};" for name, value in found.items() if not name.startswith("rng/"))
    return xxhash.xxh3_64_hexdigest(text.encode())
