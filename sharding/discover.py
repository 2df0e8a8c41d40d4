"""What this rank holds, found in the tensors themselves: DTensor placements, ZeRO's owners, declarations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch.optim.optimizer import Optimizer

from lastwords.errors import ConfigError
from lastwords.sharding import zero
from lastwords.sharding.declare import Unit
from lastwords.sharding.dtensor import ShardBox, box_of, is_shard, local_of
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
        unit = _unit_of(mine, name)
        box = _box(parameter, f"parameter {name!r}", unit, name)
        place, owner = owners.get(id(parameter), (-1, rank))
        pieces.append(
            Piece(
                name,
                "model",
                _dtype(parameter),
                *box,
                scope="" if place < 0 else f"zero-{place}",
                unit="" if unit is None else unit.name,
                nbytes=local_of(parameter).nbytes,
                owner=-1 if owner == rank else owner,
            )
        )
    for name, buffer in names.buffers.items():
        unit = _unit_of(mine, name)
        called, nbytes = "" if unit is None else unit.name, local_of(buffer).nbytes
        if name in names.volatile_buffers:
            pieces.append(Piece(name, "buffer", ANY_FORM, (), (), (), unit=called, nbytes=nbytes))
        else:
            box = _box(buffer, f"buffer {name!r}", unit, name)
            pieces.append(Piece(name, "buffer", _dtype(buffer), *box, unit=called, nbytes=nbytes))
    for name in names.absent_buffers:
        unit = _unit_of(mine, name)
        pieces.append(Piece(name, "buffer", ANY_FORM, (), (), (), unit="" if unit is None else unit.name))
    return pieces


def cut_by_hand(pieces: Sequence[Piece], declared: Sequence[Unit]) -> dict[str, ShardBox]:
    """Which parts those of `pieces` are that are declared to be parts, by name."""
    units = {unit.name: unit for unit in declared if unit.cuts}
    return {
        piece.name: ShardBox(piece.shape, piece.global_shape, piece.offsets)
        for piece in pieces
        if piece.unit in units and piece.dtype != ANY_FORM and units[piece.unit].cut_pattern(piece.name) is not None
    }


def _unit_of(mine: Sequence[Unit], name: str) -> Unit | None:
    return next((unit for unit in mine if unit.takes(name)), None)


def _box(tensor: torch.Tensor, called: str, unit: Unit | None, name: str) -> ShardBox:
    """Where this rank's part lies in the whole: found in the tensor, or declared."""
    box = box_of(tensor, called)
    pattern = None if unit is None else unit.cut_pattern(name)
    if unit is None or pattern is None:
        return box
    called = f"{called} of the declared unit {unit.name!r}"
    if is_shard(tensor):
        raise ConfigError(f"{called} is a DTensor, whose placement already gives its region; omit it from cuts=")
    return ShardBox(box.shape, *unit.cuts[pattern].place(box.shape, called))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
