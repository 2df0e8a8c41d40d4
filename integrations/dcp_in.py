"""A directory of torch.distributed.checkpoint rewritten as one of ours, tensor by tensor.

torch keeps what is no tensor there as pickles, and reading them runs what is in them: convert only what you trust.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lastwords.checkpoint import layout
from lastwords.checkpoint.appearing import alone_at, refuse_existing
from lastwords.checkpoint.codec import STEP_MAX, typed
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.layout import EPOCH_UNKNOWN, unit_tensor_name
from lastwords.checkpoint.manifest import IncidentFacts
from lastwords.checkpoint.meta import ABOUT_VERSION, ExtrasMeta, Tree, UnitMeta
from lastwords.checkpoint.part import UnitState, write_part
from lastwords.checkpoint.publish import publish_new
from lastwords.checkpoint.storable import unpack
from lastwords.checkpoint.system import REAL_OS, make_directories, remove_tree
from lastwords.errors import ConfigError, FormatError, IncompleteError, StorageError
from lastwords.integrations.dcp import MODEL, OPTIMIZER
from lastwords.integrations.dcp_out import EXTENSION, About, check_keys
from lastwords.integrations.export import Progress
from lastwords.optim_wrapper.tensors.tensor_bytes import dtype_name, source_of, spec_of
from lastwords.optim_wrapper.tensors.tensor_tree import take_apart
from lastwords.vocabulary import RANKS_MAX, UNIT_REPLICATED

KeyPath = tuple[Any, ...]
NO_EXTRAS = ExtrasMeta(states={}, step_on_resume=())


@dataclass(frozen=True, slots=True)
class Told:
    """What a foreign directory does not say. buffers: patterns of names that are buffers, not parameters.

    optimizer: name of the class, such as "AdamW". ranks: how many will resume (each holds everything, as in DDP).
    """

    global_step: int | None = None
    optimizer: str = ""
    buffers: tuple[str, ...] = ("*running_mean", "*running_var", "*num_batches_tracked")
    ranks: int = 1
    job: str = "converted"


def from_dcp(
    source: Path,
    root: Path,
    told: Told | None = None,
    *,
    model: str = MODEL,
    optimizer: str = OPTIMIZER,
    progress: Progress | None = None,
) -> Path:
    """Publishes the directory `source` as a checkpoint in `root` and returns its path.

    Everything is one unit that all ranks hold. What `to_dcp` wrote knows its step, optimizer and buffers; for another
    directory they have to be `told`. Holds one tensor in memory. ConfigError for what is missing or if the checkpoint
    exists; FormatError, StorageError (then nothing is published).
    """
    told = told or Told()
    check_keys(model, optimizer)
    if not 1 <= told.ranks <= RANKS_MAX:
        raise ConfigError(f"the number of ranks that will resume (--ranks) is from 1 to {RANKS_MAX}, not {told.ranks}")
    stored = _DcpDirectory(source)
    about = _about(stored)
    step = about.global_step if told.global_step is None else told.global_step
    if step is None:
        raise ConfigError(f"{source} does not record its global step; pass it (--step N)")
    if type(step) is not int or not 1 <= step <= STEP_MAX:
        raise ConfigError(f"{step!r} is no global step; pass one from 1 to {STEP_MAX} (--step N)")
    state, meta = _WholeUnit(stored, about, told, model, optimizer).made()
    final = layout.checkpoint_dir(root, step)
    refuse_existing(final)
    if told.global_step in (None, about.global_step):
        epoch, in_epoch = about.epoch, about.step or step
    else:
        epoch, in_epoch = EPOCH_UNKNOWN, step
    directory = layout.TemporaryName(step, told.job, 0, 0, 0).under(root)
    lost = dict.fromkeys(range(told.ranks), "it was converted from torch.distributed.checkpoint, which has none")
    make_directories(root, REAL_OS)
    with alone_at(final, REAL_OS):
        refuse_existing(final)
        remove_tree(directory, REAL_OS)  # what a killed process has left
        try:
            units = {UNIT_REPLICATED: UnitState(state, meta)}
            total = sum(spec.nbytes for spec, _ in state)
            tell = None if progress is None else lambda done: progress(min(done, total), total)
            write_part(directory, 0, epoch, in_epoch, step, units, {}, {}, tell, job=told.job)
            incident = IncidentFacts(
                told.job, 0, 0, 0, step, told.ranks, (0,), f"converted from {source}", lost_locals=lost
            )
            return publish_new(root, directory, incident)
        except BaseException:
            remove_tree(directory, REAL_OS)
            raise


class _DcpDirectory:
    """A directory of torch.distributed.checkpoint: its keys as paths, and each of their values alone."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self._reader = FileSystemReader(source)
        if not (source / ".metadata").exists():
            raise IncompleteError(
                (
                    f"{source} has no .metadata, so it is not a complete directory of torch.distributed.checkpoint; "
                    "pass the directory that was passed to dcp.save"
                ),
                missing=(".metadata",),
            )
        try:
            self._metadata: Metadata = self._reader.read_metadata()
        except (UnpicklingError, EOFError, AttributeError, ImportError, ValueError, TypeError) as error:
            raise FormatError(f"{source}/.metadata cannot be read ({error!r}); use another checkpoint") from error
        self._reader.set_up_storage_reader(self._metadata, True)
        paths = self._metadata.planner_data or {}
        self.keys: dict[KeyPath, str] = {
            tuple(paths.get(key, (key,))): key for key in self._metadata.state_dict_metadata
        }

    def tensor_form(self, path: KeyPath) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Type and shape of a tensor; None for what is none."""
        entry = self._metadata.state_dict_metadata[self.keys[path]]
        return (entry.properties.dtype, tuple(entry.size)) if isinstance(entry, TensorStorageMetadata) else None

    def load(self, path: KeyPath) -> Any:
        """The value under a key. FormatError if its file is damaged, StorageError if it cannot be read."""
        key, form = self.keys[path], self.tensor_form(path)
        state: dict[str, Any] = {key: None if form is None else torch.empty(form[1], dtype=form[0])}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, self._metadata, True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except FileNotFoundError as error:
            raise IncompleteError(f"{error.filename} is missing; restore it", missing=(str(error.filename),)) from error
        except OSError as error:
            raise StorageError(f"reading {self.source} failed: {error}", errno=error.errno or 0) from error
        except (RuntimeError, ValueError, EOFError, UnpicklingError, AssertionError) as error:
            raise FormatError(f"{key} in {self.source} is damaged ({error!r}); use another checkpoint") from error
        return planner.state_dict[key]


def _about(stored: _DcpDirectory) -> About:
    path, where = (EXTENSION, "about"), f"{stored.source}: {EXTENSION}"
    if path not in stored.keys:
        return About()
    try:
        content = json.loads(stored.load(path))
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"{where} is damaged ({error}); use another checkpoint") from error
    about = typed(unpack(content, where), About, where)
    if about.version != ABOUT_VERSION:
        raise FormatError(f"{stored.source} was converted by a newer lastwords; upgrade this one")
    return about


@dataclass
class _WholeUnit:
    """The one unit that is made of everything."""

    stored: _DcpDirectory
    about: About
    told: Told
    model: str
    optimizer: str
    tensors: list[tuple[TensorSpec, Any]] = field(default_factory=list)

    def made(self) -> tuple[list[tuple[TensorSpec, Any]], UnitMeta]:
        aliases, known = self.about.aliases, self.about.buffers
        parameters: dict[str, str] = {}
        buffers: dict[str, str] = {}
        for path, name in self._model_names():
            form = self.stored.tensor_form(path)
            if form is None:
                raise ConfigError(f"{'.'.join(map(str, path))} is not a tensor; a model's state may hold tensors only")
            if name in aliases:
                continue
            by_pattern = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.told.buffers)
            buffer = by_pattern if known is None else name in known
            (buffers if buffer else parameters)[name] = dtype_name(form[0])
            self._add(unit_tensor_name(UNIT_REPLICATED, "buffer" if buffer else "model", name), path)
        if not parameters:
            tops = ", ".join(sorted({str(path[0]) for path in self.stored.keys}))
            raise ConfigError(
                f"{self.stored.source} has no key {self.model!r}; its top-level keys: {tops} (choose one with "
                "--model-key KEY)"
            )
        for path in self._below((EXTENSION, "extra")):
            self._add(str(path[2]), path)
        groups = self._groups()
        kind = self.told.optimizer or self.about.optimizer
        if groups and not kind:
            raise ConfigError(
                f"{self.stored.source} has an optimizer's state but not its class; pass the class (--optimizer AdamW)"
            )
        state = self._optimizer_state(parameters, groups)
        meta = UnitMeta(
            optimizer=kind,
            parameters=parameters,
            buffers=buffers,
            aliases=aliases,
            absent_buffers=self.about.absent_buffers,
            groups=[self._tree(group, f"~groups.{number}") for number, (group, _) in enumerate(groups)],
            group_parameters=[names for _, names in groups],
            group_numbers=list(range(len(groups))),
            volatile_buffers=self.about.volatile_buffers,
            optimizer_state=state,
            extras=self.about.extras or NO_EXTRAS,
        )
        return self.tensors, meta

    def _model_names(self) -> list[tuple[KeyPath, str]]:
        """Keys of the model's tensors and their names, buffers that no state_dict() has included."""
        hidden = [(path, str(path[2])) for path in self._below((EXTENSION, "buffer"))]
        if self.model:
            return [(path, _dotted(path[1:])) for path in self._below((self.model,))] + hidden
        own = [path for path in self.stored.keys if path[0] not in (self.optimizer, EXTENSION)]
        return [(path, _dotted(path)) for path in own] + hidden

    def _below(self, top: KeyPath) -> list[KeyPath]:
        return [path for path in self.stored.keys if len(path) > len(top) and path[: len(top)] == top]

    def _add(self, name: str, path: KeyPath) -> None:
        form = self.stored.tensor_form(path)
        assert form is not None
        # The spec follows from type and shape; the bytes are read when their turn to be written has come.
        spec = spec_of(name, torch.empty(form[1], dtype=form[0], device="meta"))
        self.tensors.append((spec, self._later(path)))

    def _later(self, path: KeyPath) -> Callable[[], memoryview]:
        def read() -> memoryview:
            source = source_of(self.stored.load(path))
            return source() if callable(source) else source

        return read

    def _groups(self) -> list[tuple[dict[str, Any], Sequence[str]]]:
        for path in self._below((self.optimizer,)):
            if path[1] not in ("state", "param_groups"):
                self._refuse_flat(path)
        groups: dict[int, dict[str, Any]] = {}
        for path in self._below((self.optimizer, "param_groups")):
            number, *keys = path[2:]
            if not isinstance(number, int) or len(keys) != 1:
                self._refuse_flat(path)
            groups.setdefault(number, {})[str(keys[0])] = self.stored.load(path)
        found: list[tuple[dict[str, Any], Sequence[str]]] = []
        for _, group in sorted(groups.items()):
            names = group.pop("params", None)
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ConfigError(
                    f"{self.stored.source}: a param group does not name its parameters; save what get_state_dict or "
                    "get_optimizer_state_dict returns, not optimizer.state_dict()"
                )
            found.append((group, names))
        return found

    def _tree(self, group: Mapping[str, Any], owner: str) -> Tree:
        pairs = []
        for key, value in group.items():
            node, found = take_apart(value, unit_tensor_name(UNIT_REPLICATED, "optim", owner, key), f"{owner}.{key}")
            self.tensors += [(spec_of(item.name, item.tensor), source_of(item.tensor)) for item in found]
            pairs.append([key, node])
        return {"dict": pairs}

    def _optimizer_state(
        self, parameters: Mapping[str, str], groups: Sequence[tuple[Mapping[str, Any], Sequence[str]]]
    ) -> dict[str, Tree]:
        on_device = {n for group, names in groups if group.get("fused") or group.get("capturable") for n in names}
        trees: dict[str, Tree] = {}
        for path in self._below((self.optimizer, "state")):
            name, *keys = path[2:]
            if name not in parameters or len(keys) != 1:
                self._refuse_flat(path)
            key, form = str(keys[0]), self.stored.tensor_form(path)
            stored = unit_tensor_name(UNIT_REPLICATED, "optim", name, key)
            if form is None:
                node: Tree = {"plain": self.stored.load(path)}
            else:
                node = {"tensor": stored, "dtype": dtype_name(form[0]), "shape": list(form[1])}
                if form[1] == () and name not in on_device:
                    node["apart"] = "cpu"  # torch keeps step counters there, unless the update reads them on the device
                self._add(stored, path)
            trees.setdefault(name, {"dict": []})["dict"].append([key, node])
        return trees

    def _refuse_flat(self, path: KeyPath) -> None:
        raise ConfigError(
            f"{self.stored.source}: {'.'.join(map(str, path))} is not where get_state_dict puts it; save the optimizer "
            "without flatten_optimizer_state_dict, under the key that --optim-key names"
        )


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))
