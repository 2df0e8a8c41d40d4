"""What this rank holds, found in the tensors themselves: DTensor placements, ZeRO's owners, declarations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch.optim.optimizer import Optimizer

from lastwords.sharding import zero
from lastwords.sharding.declare import Unit
from lastwords.sharding.dtensor import box_of, local_of
from lastwords.sharding.pieces import ANY_FORM, Piece


class NamedTensors(Protocol):
    """Tensors of a rank's model and optimizer by name."""

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]: ...
    @property
    def buffers(self) -> Mapping[str, torch.Tensor]: ...
    @property
    def absent_buffers(self) -> Sequence[str]: ...
    @property
    def volatile_buffers(self) -> Collection[str]: ...


def pieces_of(names: NamedTensors, optimizer: Optimizer, declared: Sequence[Unit], rank: int) -> list[Piece]:
    """This rank's pieces, in the order of the names. ConfigError for a tensor that is not one box of a whole."""
    mine = [unit for unit in declared if rank in unit.holders]
    zero.refuse_unusable(optimizer)
    owners = zero.owners(optimizer)
    pieces = []
    for name, parameter in names.parameters.items():
        box = box_of(parameter, f"parameter {name!r}")
        place, owner = owners.get(id(parameter), (-1, rank))
        pieces.append(
            Piece(
                name,
                "model",
                _dtype(parameter),
                *box,
                scope="" if place < 0 else f"zero-{place}",
                unit=_declared_unit(mine, name),
                nbytes=local_of(parameter).nbytes,
                owner=-1 if owner == rank else owner,
            )
        )
    for name, buffer in names.buffers.items():
        unit = _declared_unit(mine, name)
        if name in names.volatile_buffers:
            pieces.append(Piece(name, "buffer", ANY_FORM, (), (), (), unit=unit, nbytes=local_of(buffer).nbytes))
        else:
            box = box_of(buffer, f"buffer {name!r}")
            pieces.append(Piece(name, "buffer", _dtype(buffer), *box, unit=unit, nbytes=local_of(buffer).nbytes))
    for name in names.absent_buffers:
        pieces.append(Piece(name, "buffer", ANY_FORM, (), (), (), unit=_declared_unit(mine, name)))
    return pieces


def _declared_unit(mine: Sequence[Unit], name: str) -> str:
    for unit in mine:
        if any(fnmatchcase(name, pattern) for pattern in unit.tensors):
            return unit.name
    return ""


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
