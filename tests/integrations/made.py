"""Checkpoints made in one process: of a real model, or of whole tensors cut over units by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.meta import EMPTY_UNIT, UnitMeta
from lastwords.checkpoint.part import UnitState
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of, spec_of
from tests.checkpoint.states import published

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape."""


class Small(torch.nn.Module):
    """A frozen weight, tied weights, a buffer that is saved and one that is not."""

    scale: torch.Tensor
    cache: torch.Tensor

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = torch.nn.Linear(3, width)
        self.down = torch.nn.Linear(width, 3)
        self.head = torch.nn.Linear(3, width)
        self.head.weight = self.up.weight
        self.frozen = torch.nn.Parameter(torch.randn(5, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("scale", torch.randn(2, 2))
        self.register_buffer("cache", torch.randn(7), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.down(torch.relu(self.up(x)))) * self.scale.sum()
        return out


def trained(seed: int = 0, width: int = 4) -> tuple[Small, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Small(width)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def saved(root: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int = 7) -> Path:
    """Checkpoint of a job of one rank."""
    root.mkdir(parents=True, exist_ok=True)
    return published(root, {0: {"replicated": UnitView(model, optimizer).state()}}, step=step)


def unit(name: str, pieces: Sequence[tuple[str, torch.Tensor, Box | None]], holders: Sequence[int] = (0,)) -> UnitState:
    """A unit that holds these boxes of these parameters; None is the whole."""
    tensors: list[tuple[TensorSpec, Any]] = []
    for fqn, whole, box in pieces:
        part = whole
        spec = spec_of(f"unit/{name}/model/{fqn}", whole)
        if box is not None:
            offsets, shape = box
            place = tuple(slice(at, at + size) for at, size in zip(offsets, shape, strict=True))
            part = whole[place].contiguous()
            spec = TensorSpec(spec.name, spec.dtype, shape, tuple(whole.shape), offsets)
        tensors.append((spec, bytes_of(part)))
    dtypes = {fqn: str(whole.dtype).removeprefix("torch.") for fqn, whole, _ in pieces}
    return UnitState(tensors, meta_of(dtypes, holders))


def meta_of(dtypes: Mapping[str, str], holders: Sequence[int]) -> UnitMeta:
    """What a unit without an optimizer's state records of itself."""
    return replace(EMPTY_UNIT, optimizer="SGD", parameters=dict(dtypes), holders=holders)


def flip(file: Path, at: int) -> None:
    """Changes one byte of a file."""
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte[0] ^ 1]))
