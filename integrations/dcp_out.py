"""A checkpoint directory rewritten as one of torch.distributed.checkpoint, tensor by tensor."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from lastwords.checkpoint.appearing import making_directory, refuse_existing
from lastwords.checkpoint.boxes import Divided, Shard, whole
from lastwords.checkpoint.entries import leaves
from lastwords.checkpoint.layout import EPOCH_UNKNOWN
from lastwords.checkpoint.load import Checkpoint, read_checkpoint
from lastwords.checkpoint.meta import ABOUT_VERSION, ExtrasMeta, UnitMeta, json_of
from lastwords.checkpoint.slice_reader import SliceReader
from lastwords.checkpoint.storable import pack
from lastwords.checkpoint.system import remedy
from lastwords.errors import CheckpointError, ConfigError, LastWordsError, StorageError
from lastwords.integrations.catalogue import Catalogue, Whole, ambiguous_numbers, catalogue, read_box
from lastwords.integrations.dcp import MODEL, OPTIMIZER, Standing, nested_state, stand_in
from lastwords.integrations.export import Progress, check_dtype
from lastwords.optim_wrapper.tensors.tensor_bytes import dtype_named, dtype_of_code
from lastwords.vocabulary import UNIT_REPLICATED

EXTENSION = "lastwords"
"""Key beside model and optimizer: what torch.distributed.checkpoint has no place for, so that the way back is exact."""


def to_dcp(
    path: Path,
    out: Path,
    *,
    model: str = MODEL,
    optimizer: str = OPTIMIZER,
    units: Collection[str] = (),
    names: Sequence[str] = (),
    dtype: str = "",
    tied: Mapping[str, str] = MappingProxyType({}),
    progress: Progress | None = None,
) -> Path:
    """Writes the new directory `out`, which torch.distributed.checkpoint.load reads into any mesh; returns it.

    Its keys are those of `LastWordsReader`, nested. State of single ranks (random streams, place in the data) has no
    place there and is left out. Every byte is checked as it is read; one tensor is in memory at a time.
    names: patterns; only what has a name that fits one of them, and its state. dtype: such as "bfloat16", for the
    model's floating-point tensors; the optimizer's state keeps its type, as do buffers that no state_dict() has.
    tied: other name -> name, of what was saved twice (see `load_for_inference`); the state of the name that stays.
    ConfigError if `out` exists, for keys as `check_keys` refuses them, or if units differ in a param group;
    StorageError, FormatError, IncompleteError or ReplacedError (then there is nothing at `out`).
    """
    check_keys(model, optimizer)
    check_dtype(dtype)
    refuse_existing(out)

    def convert(checkpoint: Checkpoint) -> None:
        found = catalogue(checkpoint, units).tied(tied, checkpoint).only(names)
        _convert(checkpoint, found, out, model, optimizer, dtype, progress)

    read_checkpoint(path, convert)
    return out


def check_keys(model: str, optimizer: str) -> None:
    """ConfigError for keys that leave no way back."""
    if not optimizer or len({model, optimizer, EXTENSION}) < 3:
        raise ConfigError(
            f"model and optimizer need two different keys, not {model!r} and {optimizer!r}, neither of them "
            f"{EXTENSION!r}; if there is no optimizer, pass any unused key for it"
        )


def _convert(
    checkpoint: Checkpoint,
    found: Catalogue,
    out: Path,
    model: str,
    optimizer: str,
    dtype: str,
    progress: Progress | None,
) -> None:
    saved = {whole.name: whole.dtype for whole in (*found.parameters.values(), *found.buffers.values())}
    if dtype:
        found = replace(
            found,
            parameters=_typed(found.parameters, dtype),
            buffers=_typed(found.buffers, dtype, found.not_persistent),
        )
    ambiguous = ambiguous_numbers(found.groups)
    if ambiguous:
        raise ConfigError(
            f"{checkpoint.path}: units differ in the hyperparameters of param group {min(ambiguous)}, and "
            "torch.distributed.checkpoint has one group of each number; select units with units= (on the command "
            "line --unit)"
        )
    standing: Standing = {}
    nested = nested_state(found, model, optimizer) | {EXTENSION: _extension(checkpoint, found)}
    with making_directory(out) as directory, SliceReader(checkpoint, checked=True, keep_edges=True) as reader:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                save(
                    stand_in(nested, standing),
                    storage_writer=FileSystemWriter(directory, thread_count=1),
                    planner=_ReadingPlanner(reader, standing, saved, progress),
                    no_dist=True,
                )
        except CheckpointException as error:
            raise own_error(error, f"writing {out}") from error


class _ReadingPlanner(DefaultSavePlanner):
    """Reads each tensor when its turn to be written has come."""

    def __init__(
        self, reader: SliceReader, standing: Standing, saved: Mapping[str, str], progress: Progress | None
    ) -> None:
        """saved: the type of each tensor of the model in the checkpoint."""
        super().__init__()
        self._reader = reader
        self._standing = standing
        self._saved = saved
        self._progress = progress
        self._done, self._total = 0, sum(tensor.nbytes for tensor, _ in standing.values())

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        found = self.lookup_object(write_item.index)
        if not isinstance(found, torch.Tensor):
            plain: torch.Tensor | io.BytesIO = self.transform_object(write_item, found)
            return plain
        stored = self._standing[id(found)][1]
        as_saved = replace(stored, dtype=self._saved.get(stored.name, stored.dtype))
        tensor = read_box(self._reader, as_saved, stored.box)
        if self._progress is not None:
            self._done += found.nbytes
            self._progress(self._done, self._total)
        return tensor.to(found.dtype)


def _typed(tensors: Mapping[str, Whole], dtype: str, but: Collection[str] = ()) -> dict[str, Whole]:
    return {
        name: replace(whole, dtype=dtype) if name not in but and dtype_named(whole.dtype).is_floating_point else whole
        for name, whole in tensors.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What torch.distributed.checkpoint has no place for.

    buffers: their names; None in a directory of another origin.
    """

    version: int = ABOUT_VERSION
    job: str = ""
    global_step: int | None = None
    epoch: int = EPOCH_UNKNOWN
    step: int | None = None
    world_size: int = 0
    optimizer: str = ""
    buffers: Sequence[str] | None = None
    volatile_buffers: Sequence[str] = ()
    absent_buffers: Sequence[str] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    extras: ExtrasMeta | None = None


def _extension(checkpoint: Checkpoint, found: Catalogue) -> dict[str, Any]:
    """Position, names of buffers, extras: as JSON, and the extras' tensors."""
    manifest = checkpoint.manifest
    meta: UnitMeta | None = None
    tensors: dict[str, Whole] = {}
    entry = manifest.units.get(UNIT_REPLICATED)
    if entry is not None:
        meta = entry.meta
        states = {} if meta.extras is None else meta.extras.states
        dtypes = {
            leaf["tensor"]: leaf["dtype"]
            for label, tree in states.items()
            for leaf in leaves(tree, f"extras[{label!r}]")
        }
        for spec in entry.tensors:
            if spec.name in dtypes:
                shape = spec.shape if dtype_of_code(spec.dtype) == dtypes[spec.name] else spec.shape[:-1]
                divided = Divided(spec.name, spec.dtype, spec.shape, (Shard(spec.name, whole(spec.shape)),))
                tensors[spec.name] = Whole(spec.name, dtypes[spec.name], shape, divided)
    about = About(
        job=manifest.job,
        global_step=manifest.global_step,
        epoch=manifest.epoch,
        step=manifest.step,
        world_size=manifest.world_size,
        optimizer=found.optimizer,
        buffers=sorted(found.buffers),
        volatile_buffers=sorted(found.not_persistent),
        absent_buffers=() if meta is None else meta.absent_buffers,
        aliases=found.aliases,
        extras=None if meta is None else meta.extras,
    )
    # Buffers that state_dict() leaves out have no key of the model's.
    hidden = {name: tensor for name, tensor in found.buffers.items() if name in found.not_persistent}
    return {"about": json.dumps(pack(json_of(about), EXTENSION)), "extra": tensors, "buffer": hidden}


def own_error(error: CheckpointException, doing: str) -> LastWordsError:
    """What torch has wrapped, as one of our errors."""
    causes = [failure[0] for failure in error.failures.values()]
    for cause in causes:
        inner: BaseException | None = cause
        while inner is not None:
            if isinstance(inner, LastWordsError):
                return inner
            if isinstance(inner, OSError):
                number = inner.errno or 0
                return StorageError(f"{doing} failed: {inner}; {remedy(number)}", errno=number)
            inner = inner.__cause__ or inner.__context__
    return CheckpointError(f"{doing} failed in torch.distributed.checkpoint: {causes[0] if causes else error!r}")
