"""What a rank computed, step by step, as JSON lines that survive kill -9: enough to name the first bit that differs."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor


def digest(tensor: torch.Tensor) -> str:
    """xxh3 of a tensor's bytes, with type and shape; of a sharded one the part that this rank has."""
    plain = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu().contiguous()
    body = xxhash.xxh3_64_hexdigest(plain.view(-1).view(torch.uint8).numpy()) if plain.numel() else ""
    return f"{str(plain.dtype).removeprefix('torch.')}{list(plain.shape)}:{body}"


def text_digest(value: object) -> str:
    """xxh3 of a value's text."""
    return str(xxhash.xxh3_64_hexdigest(repr(value).encode()))


def random_streams() -> dict[str, str]:
    """Digest of each random generator that training draws from."""
    numpy_state: Any = np.random.get_state()
    on_device = {"rng/cuda": digest(torch.cuda.get_rng_state())} if torch.cuda.is_initialized() else {}
    return {
        **on_device,
        "rng/python": text_digest(random.getstate()),
        "rng/numpy": text_digest((numpy_state[0], numpy_state[1].tobytes(), *numpy_state[2:])),
        "rng/torch": digest(torch.get_rng_state()),
    }


class Recording:
    """Appends to `{directory}/rank_{rank}.jsonl`; one write a record, so a killed rank leaves whole lines."""

    def __init__(self, directory: Path, rank: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._file = os.open(directory / f"rank_{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._net = net
        self._optimizer = optimizer

    def write(self, kind: str, **values: object) -> None:
        """Append one record."""
        os.write(self._file, (json.dumps({"kind": kind, "pid": os.getpid(), **values}) + "\n").encode())

    def write_step(self, step: int, epoch: int, values: dict[str, str], extras: dict[str, Any]) -> None:
        """The end of a step's body: losses and batches, and a digest of every piece of state."""
        self.write(
            "step", step=step, epoch=epoch, values={**values, **self.state(), **random_streams(), **_texts(extras)}
        )

    def state(self) -> dict[str, str]:
        """A digest of every parameter, buffer and piece of optimizer state, by name."""
        found = {f"model/{name}": digest(value) for name, value in self._net.named_parameters()}
        found |= {f"buffer/{name}": digest(value) for name, value in self._net.named_buffers()}
        # ZeroRedundancyOptimizer keeps this rank's shard of the state in the optimizer that it has inside.
        state = getattr(self._optimizer, "optim", self._optimizer).state
        for name, parameter in self._net.named_parameters():
            for key, value in sorted(state.get(parameter, {}).items()):
                found[f"optim/{name}/{key}"] = digest(value) if isinstance(value, torch.Tensor) else repr(value)
        for number, group in enumerate(self._optimizer.param_groups):
            found[f"optim/group{number}/lr"] = float(group["lr"]).hex()
        return found


def floats(values: Iterable[float]) -> str:
    """Every bit of these numbers, readable."""
    return " ".join(float(value).hex() for value in values)


def _texts(extras: dict[str, Any]) -> dict[str, str]:
    return {f"extra/{name}": text_digest(sorted(part.state_dict().items())) for name, part in extras.items()}
