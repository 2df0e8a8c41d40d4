"""Checkpoints of small sharded jobs, written without a controller, and beside each the same state gathered by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from tests.integration.forked import on_ranks
from tests.integration.test_layouts import Rank

STEP = 3
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def gathered(model: Any, optimizers: Any) -> dict[str, Any]:
    """The whole state on rank 0, as torch gathers it; nothing on the others."""
    weights, moments = get_state_dict(getattr(model, "module", model), optimizers, options=FULL)
    return {"model": weights, "optim": moments}


def write(name: str, tmp_path: Path, ranks: int = 4) -> tuple[Path, dict[str, Any]]:
    """Trains the layout for a few steps; returns the checkpoint and the gathered state."""
    root = tmp_path / f"saved by {ranks}"
    root.mkdir(parents=True)

    def body(rank: int) -> None:
        run = Rank(name, seed=0)
        run.train(1, STEP)
        run.save(root, STEP)
        state = gathered(run.trial.model, run.trial.optimizers)
        if dist.get_rank() == 0:
            torch.save(state, tmp_path / "whole.pt")

    on_ranks(body, root, ranks)
    (path,) = root.glob("tft_saved_checkpoints-step_*")
    return path, torch.load(tmp_path / "whole.pt", weights_only=False)


def differing(one: Any, other: Any, path: str = "") -> list[str]:
    """Places at which two nested states differ, tensors bit by bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
        return [] if same else [path]
    if isinstance(one, dict) and isinstance(other, dict):
        found = [f"{path}.{key} is in one only" for key in one.keys() ^ other.keys()]
        return found + [
            line for key in one.keys() & other.keys() for line in differing(one[key], other[key], f"{path}.{key}")
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            line for at, pair in enumerate(zip(one, other, strict=True)) for line in differing(*pair, f"{path}.{at}")
        ]
    return [] if type(one) is type(other) and one == other else [path]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
