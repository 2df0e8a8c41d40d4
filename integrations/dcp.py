"""torch.distributed.checkpoint reads our directories: into any mesh, with torch's own planner.

state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
torch.distributed.checkpoint.load(state, storage_reader=LastWordsReader(path))
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
"""

from __future__ import annotations

import io
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from lastwords.checkpoint.boxes import Box, Slice
from lastwords.checkpoint.layout import MANIFEST_NAME
from lastwords.checkpoint.load import Checkpoint, Stamp, find_checkpoint, open_checkpoint, refuse_replaced, stamp_of
from lastwords.checkpoint.slice_reader import SliceReader, Target
from lastwords.errors import CheckpointError, IncompleteError, ReplacedError
from lastwords.integrations.catalogue import Catalogue, Whole, ambiguous_numbers, catalogue
from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of, dtype_named

MODEL = "model"
OPTIMIZER = "optim"

Standing = dict[int, tuple[torch.Tensor, Whole]]
"""id -> an empty tensor, and the Whole that it stands for."""


class LastWordsReader(StorageReader):  # type: ignore[misc, unused-ignore]
    """Reads one checkpoint directory (or the newest one in a directory of them) for torch.distributed.checkpoint.

    Args:
        path: the directory.
        model: what the caller's state dict calls the model; "" where the model's names stand at its top.
        optimizer: likewise.
        units: only these units, for pipeline stages and other layouts whose ranks use one name for different tensors.
        checked: every 4 MiB chunk of which a slice is wanted is read and held against its checksum. False reads only
            the wanted bytes, and checks only chunks that are read whole.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: str = MODEL,
        optimizer: str = OPTIMIZER,
        units: Collection[str] = (),
        checked: bool = True,
    ) -> None:
        self.path = Path(path)
        self._model = model
        self._optimizer = optimizer
        self._units = tuple(units)
        self._checked = checked
        self._stamp: Stamp | None = None
        self._checkpoint: Checkpoint | None = None
        self._items: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins; `checkpoint_id` (dcp.load's) replaces the path."""
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self._checkpoint = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for a directory that has a manifest."""
        return (Path(checkpoint_id) / MANIFEST_NAME).exists()

    def read_metadata(self) -> Metadata:
        """Every key that can be asked for, with its type, shape and the boxes it is stored in."""
        found = find_checkpoint(self.path)
        self._stamp = stamp_of(found)
        self._checkpoint = open_checkpoint(found)
        self._items, mappings = flat_items(catalogue(self._checkpoint, self._units), self._model, self._optimizer)
        return Metadata(
            state_dict_metadata={key: _metadata_of(item) for key, item in self._items.items()},
            planner_data=mappings,
            storage_meta=StorageMeta(checkpoint_id=str(self._checkpoint.path)),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing is shared between ranks: each reads its own slices."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """With the checkpoint that this rank has found."""
        if self._checkpoint is None:
            return plan
        said = self._checkpoint.manifest
        found = (self._checkpoint.path.name, said.job, said.generation, said.incident, said.attempt)
        return replace(plan, storage_data=found)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """ReplacedError where ranks have found different checkpoints, the newest having changed in between."""
        found = dict.fromkeys(plan.storage_data for plan in plans if plan.storage_data)
        if len(found) > 1:
            names = ", ".join(sorted(one[0] for one in found))
            raise ReplacedError(
                f"the ranks have found different checkpoints in {self.path}: {names}; one was published meanwhile: "
                "load again, or give the path of one checkpoint"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads everything of the plan before it returns."""
        if self._checkpoint is None:
            raise IncompleteError(f"{self.path} was not opened: call read_metadata() before read_data()")
        try:
            self._read(self._checkpoint, plan, planner)
        except CheckpointError as error:
            refuse_replaced(self._checkpoint.path, self._stamp, why=error)
            raise
        finally:
            self._checkpoint.close()
        if not self._checked:
            refuse_replaced(self._checkpoint.path, self._stamp)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, checkpoint: Checkpoint, plan: LoadPlan, planner: LoadPlanner) -> None:
        straight: list[tuple[ReadItem, torch.Tensor]] = []
        targets: list[Target] = []
        others: list[tuple[ReadItem, torch.Tensor, torch.dtype, Slice]] = []
        for item in plan.items:
            found = self._items[item.storage_index.fqn]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _saved(found))
                continue
            piece = _slice_of(found, item)
            tensor = planner.resolve_tensor(item).detach()
            dtype = dtype_named(found.dtype)
            view = bytes_of(tensor) if tensor.dtype == dtype else None
            if view is None:
                others.append((item, tensor, dtype, piece))
            else:
                straight.append((item, tensor))
                targets.append(Target(piece.region, view, [piece]))
        with SliceReader(checkpoint, checked=self._checked, keep_edges=True) as reader:
            reader.read(targets)
            for item, tensor in straight:
                planner.commit_tensor(item, tensor)
            for item, tensor, dtype, piece in others:  # one at a time: each needs memory beside its tensor
                staged = torch.empty(tensor.shape, dtype=dtype)
                memory = bytes_of(staged)
                assert memory is not None
                reader.read([Target(piece.region, memory, [piece])])
                tensor.copy_(staged)
                planner.commit_tensor(item, tensor)


def flat_items(found: Catalogue, model: str, optimizer: str) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Flat key -> Whole or plain value, and flat key -> path in the nested dict, both as torch's planner makes them.

    param_groups stand there twice: as torch nests them, and by parameter, as get_optimizer_state_dict does it with
    StateDictOptions(flatten_optimizer_state_dict=True); by parameter alone where one number means several groups.
    """
    standing: Standing = {}
    nested_groups = () if ambiguous_numbers(found.groups) else found.groups
    nested = stand_in(nested_state(replace(found, groups=nested_groups), model, optimizer), standing)
    flat, mappings = flatten_state_dict(nested)
    for group in found.groups:
        for name in group.parameters:
            for key, value in group.values.items():
                path = (*_top(optimizer), f"param_groups.{name}.{key}")
                flat.setdefault(".".join(path), stand_in(value, standing))
                mappings.setdefault(".".join(path), path)
    items = {key: standing[id(value)][1] if id(value) in standing else value for key, value in flat.items()}
    return items, dict(mappings)


def nested_state(found: Catalogue, model: str, optimizer: str) -> dict[str, Any]:
    """What get_state_dict would return, tensors as Whole: {model: {name: ...}, optimizer: {state, param_groups}}."""
    weights: dict[str, Any] = found.model()
    groups = [{**group.values, "params": list(group.parameters)} for group in found.groups]
    moments = {"state": {name: dict(keys) for name, keys in found.state.items()}, "param_groups": groups}
    nested: dict[str, Any] = {model: weights} if model else weights
    return {**nested, **({optimizer: moments} if optimizer else moments)}


def _top(name: str) -> tuple[str, ...]:
    return (name,) if name else ()


def stand_in(value: Any, standing: Standing) -> Any:
    """The same nesting with an empty tensor in each Whole's place: torch flattens it as it does the real one."""
    if isinstance(value, Whole):
        tensor = torch.empty(value.shape, dtype=dtype_named(value.dtype), device="meta")
        standing[id(tensor)] = (tensor, value)
        return tensor
    if type(value) in (list, tuple):
        return type(value)(stand_in(inner, standing) for inner in value)
    if isinstance(value, dict):
        return type(value)((key, stand_in(inner, standing)) for key, inner in value.items())
    return value


def _metadata_of(item: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(item, Whole):
        return BytesStorageMetadata()
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_named(item.dtype)),
        size=torch.Size(item.shape),
        chunks=[
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in (item.narrowed(shard.box) for shard in item.divided.shards)
        ],
    )


def _slice_of(found: Whole, item: ReadItem) -> Slice:
    """What the planner asks for, of the shard that it has chosen."""
    chosen = item.storage_index.offset
    shard = next(
        shard for shard in found.divided.shards if chosen is None or found.narrowed(shard.box).offsets == tuple(chosen)
    )
    begin = (at + inside for at, inside in zip(shard.box.offsets, item.storage_offsets, strict=False))
    return Slice(shard, found.stored(Box(tuple(begin), tuple(item.lengths))))


def _saved(value: Any) -> io.BytesIO:
    """A plain value as the planner takes it."""
    memory = io.BytesIO()
    torch.save(value, memory)
    memory.seek(0)
    return memory
