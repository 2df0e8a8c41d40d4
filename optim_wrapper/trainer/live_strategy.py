"""`save_strategy`: which rank of a live job holds which part of which tensor, written to a file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from lastwords.checkpoint.reshard.strategy import save_strategy_file
from lastwords.errors import ConfigError
from lastwords.optim_wrapper.capture.buffers import Buffers
from lastwords.optim_wrapper.joined_optimizer import JoinedOptimizer
from lastwords.optim_wrapper.launch.world import World, restart_count
from lastwords.optim_wrapper.state.global_names import Naming
from lastwords.optim_wrapper.state.rank_units import without_buffers
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.tensors.tensor_bytes import dtype_name, dtype_named, spec_of
from lastwords.optim_wrapper.trainer.job_shape import declared_units
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.sharding.agree import use_all_lists
from lastwords.sharding.declare import Unit
from lastwords.sharding.discover import pieces_of
from lastwords.sharding.dtensor import box_of, is_dtensor, local_of
from lastwords.sharding.grouping import Alike
from lastwords.sharding.pieces import Piece
from lastwords.sharding.strategy import VOLATILE, strategy_from

_calls: dict[tuple[int, ...], int] = {}
"""How often each set of ranks has saved a strategy: all of them count alike, so each call has a place of its own."""


def save_strategy(
    model: torch.nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    path: str | os.PathLike[str],
    *,
    units: Sequence[Unit] = (),
    names: Naming | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes to `path` how parameters, buffers and the optimizer's state are divided over the ranks of this job.

    Every rank of the job calls it with the same path, at any time between two steps, the first one included; the lowest
    writes. A collective over the process group's store: every rank returns when the file is there, or gets an error.

    Args:
        model: as the loop calls it; it may be on the meta device.
        optimizer: with or without OptTFTWrapper, or several.
        path: of the file.
        units: as for TFTRegister.
        names: likewise.
        group: only its ranks call it, and the file says only what they hold, as one stage of a pipeline;
            `merge_pipeline_strategys` joins such files.

    Raises:
        ConfigError: tensors that have no strategy, named with what to do.
        StorageError: the file exists or cannot be written.
        UnavailableError: another rank does not come within 300 s.
    """
    world = World()
    ranks = _ranks(world, group)
    number = _calls[ranks] = _calls.get(ranks, 0) + 1
    digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    prefix = f"lastwords/{restart_count()}/strategy/{digest}/{number}"
    declared: tuple[Unit, ...] = ()
    problem: ConfigError | None = None
    target = ""
    try:
        declared = declared_units(units)
        target = str(destination(path))
    except ConfigError as error:  # the others have to hear of it
        problem = error

    def find() -> list[Piece]:
        if problem is not None:
            raise problem
        return _pieces(model, optimizer, declared, names, world.rank)

    def write(lists: Sequence[Alike]) -> None:
        strategy = strategy_from(lists, declared, world.size, _stored)
        strategy.check()
        save_strategy_file(strategy, Path(target))

    use_all_lists(world, prefix, ranks, find, declared, write, target)


def destination(path: object) -> Path:
    """`path` as a Path; ConfigError for anything that is none."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or isinstance(os.fspath(path), bytes):
        raise ConfigError(f"path is {path!r}; it must be the name of the file to write")
    return Path(path)


def _ranks(world: World, group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Global ranks that take part, sorted."""
    if group is None:
        return tuple(range(world.size))
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"group is {group!r}; it must be a process group that this rank belongs to, such as mesh.get_group()"
        )
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _stored(dtype: str) -> tuple[str, tuple[int, ...]]:
    spec = spec_of("x", torch.empty((), dtype=dtype_named(dtype), device="meta"))
    return spec.dtype, spec.shape


def _pieces(
    model: torch.nn.Module, optimizer: Any, declared: Sequence[Unit], names: Naming | None, rank: int
) -> list[Piece]:
    """What this rank holds of model and optimizer, in the words that ranks exchange.

    ConfigError for what is no box of a whole.
    """
    view = UnitView(model, _joined(optimizer), forms_only=True, names=names)
    # What is saved for each rank apart belongs to no strategy.
    every = without_buffers(view.all_names(), Buffers(view.model, called=view.called).captured)
    found: list[Piece] = []
    in_groups = {name for group in every.groups for name in group}
    for piece in pieces_of(every, view.optimizer, declared, rank):
        if piece.name.startswith("~"):
            continue
        if piece.kind == "model":
            found.append(replace(piece, scope=""))
            if piece.held and piece.name in in_groups:
                found.append(replace(piece, kind="optim", scope=""))
                found += _state_elsewhere(piece, view.optimizer_state.get(every.parameters[piece.name], {}))
        elif piece.name in every.volatile_buffers and piece.name in every.buffers:
            buffer = every.buffers[piece.name]
            shape, of, at = box_of(buffer, f"buffer {piece.name!r}")
            form = dtype_name(buffer.dtype)
            found.append(replace(piece, dtype=form, shape=shape, global_shape=of, offsets=at, scope=VOLATILE))
        else:
            found.append(piece)
    return found


def _state_elsewhere(piece: Piece, state: Mapping[str, Any]) -> list[Piece]:
    """State of a parameter that does not lie as the parameter does: only a DTensor can say where it lies."""
    found = []
    for key, value in state.items():
        if is_dtensor(value) and local_of(value).ndim:
            box = box_of(value, f"the optimizer's {key!r} of {piece.name!r}")
            like_parameter = (piece.shape, piece.global_shape, piece.offsets)
            if tuple(box) != like_parameter and box.shape != box.global_shape:
                found.append(Piece(f"{piece.name}/{key}", "state", dtype_name(value.dtype), *box, unit=piece.unit))
    return found


def _joined(optimizer: Any) -> Any:
    several = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    inner = [one.inner if isinstance(one, OptTFTWrapper) else one for one in several]
    for one in inner:
        if not isinstance(one, Optimizer):
            raise ConfigError(f"optimizer must be a torch.optim.Optimizer, or a list of them, not {type(one).__name__}")
    if not inner:
        raise ConfigError("optimizer is an empty list; give the optimizer of the model's parameters")
    return inner[0] if len(inner) == 1 else JoinedOptimizer(inner)
