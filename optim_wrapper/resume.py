"""Putting a checkpoint back into a live job: which one, does it fit, and what cannot be exact."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lastwords.checkpoint import load
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.manifest import Manifest
from lastwords.errors import CheckpointError, FormatError, IncompleteError, LastWordsError, MismatchError
from lastwords.optim_wrapper import ddp_buckets, hyperparameters
from lastwords.optim_wrapper.ddp_private import find_ddp
from lastwords.optim_wrapper.extras import ExtrasSnapshot, restore_inline
from lastwords.optim_wrapper.facts import differences
from lastwords.optim_wrapper.foreign_weights import ForeignWeights
from lastwords.optim_wrapper.rank_units import RankUnits
from lastwords.optim_wrapper.recorder import StepRecorder
from lastwords.optim_wrapper.source import EPOCH_PREFIX
from lastwords.optim_wrapper.state_restore import Reading, RestorePlan
from lastwords.optim_wrapper.tensor_bytes import dtype_named, tensor_over
from lastwords.optim_wrapper.tensor_tree import tensor_nodes
from lastwords.optim_wrapper.world import World
from lastwords.processor.box_reader import RegionCopy
from lastwords.sharding.describe import ranks_text
from lastwords.vocabulary import UNIT_REPLICATED

_log = logging.getLogger(__name__)

STORE_WAIT_S = 300.0

_SHOWN_MAX = 8


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a resume has put back, and what the loop still needs: the streams of the epoch's start and of the step."""

    path: Path
    job: str
    global_step: int
    epoch: int
    step: int
    facts: Mapping[str, Any]
    regions: Mapping[str, RegionCopy]
    epoch_start: Mapping[str, RegionCopy]
    reasons: list[str] = field(default_factory=list)


def choose(roots: list[Path], world: World, key: str, only_job: str | None, missing_ok: bool) -> Path | None:
    """Newest complete checkpoint, chosen by rank 0 for all ranks.

    IncompleteError if there is none (None with missing_ok), FormatError if there are only unusable ones: to start from
    the beginning over a damaged checkpoint is nothing that may happen in silence.
    """
    if world.rank == 0:
        word: dict[str, Any]
        try:
            found = [path for root in roots if (path := load.latest(root, only_job)) is not None]
            newest = max(found, key=lambda path: load.open_checkpoint(path).manifest.published_unix_ns, default=None)
            word = {"path": "" if newest is None else str(newest)}
            if newest is None and (unusable := _unusable(roots, only_job)):
                word["unusable"] = unusable
        except LastWordsError as error:
            word = {"path": "", "error": str(error)}
        world.publish(key, word)
    else:
        word = world.read(key, STORE_WAIT_S, "rank 0 to choose the checkpoint")
    if "error" in word:
        raise FormatError(f"rank 0 cannot tell which checkpoint is the newest: {word['error']}")
    if word["path"]:
        return Path(word["path"])
    if "unusable" in word:
        raise FormatError(
            f"no checkpoint can be used: {word['unusable']}. See `lastwords verify PATH`; mend it, or move it "
            "away to start from the beginning"
        )
    if missing_ok:
        return None
    where = " or ".join(str(root) for root in roots)
    whose = f" of job {only_job}" if only_job else ""
    raise IncompleteError(
        f"there is no complete checkpoint{whose} in {where}; start without resume (or give missing_ok=True), "
        "or see what is there with `lastwords latest`",
        missing=tuple(str(root) for root in roots),
    )


def _unusable(roots: list[Path], only_job: str | None) -> str:
    """Checkpoints that are there and cannot be used, with the reason of each; "" if there are none."""
    found = [entry for root in roots for entry in load.scan(root, job=only_job) if entry.status != load.Status.COMPLETE]
    return "; ".join(f"{entry.path} ({entry.why})" for entry in found)


def resume_from(
    roots: list[Path],
    world: World,
    recorder: StepRecorder,
    facts_here: Mapping[str, Any],
    *,
    key: str,
    only_job: str | None,
    missing_ok: bool,
) -> Resumed | None:
    """Restore everything but the data position. See `TFTRegister.resume` for the errors."""
    path = choose(roots, world, key, only_job, missing_ok)
    if path is None:
        return None
    own: Exception | None = None
    resumed: Resumed | None = None
    try:
        resumed = _restore(path, world, recorder, facts_here)
    except LastWordsError as error:
        own = error
    problem = world.problem_anywhere(f"{key}/restored", None if own is None else str(own), STORE_WAIT_S)
    if own is not None:
        raise own
    if problem is not None:
        raise CheckpointError(f"another rank cannot resume, so none does: {problem}")
    return resumed


def _restore(path: Path, world: World, recorder: StepRecorder, facts_here: Mapping[str, Any]) -> Resumed:
    checkpoint = load.open_checkpoint(path)
    manifest = checkpoint.manifest
    if manifest.world_size != world.size:
        raise MismatchError(
            f"{path} was written by {manifest.world_size} ranks, this job has {world.size}; start it with "
            f"{manifest.world_size} (moving between rank counts is not there yet)",
            different={"world size": f"saved {manifest.world_size}, here {world.size}"},
        )
    refuse_other_units(path, manifest, recorder.units)
    local, owner, reasons = _local(checkpoint, world.rank)
    reasons += [str(reason) for reason in manifest.reasons]
    reasons += differences(manifest.facts, facts_here)

    # The replay runs real collectives, before the weights are there: it leaves zero gradients and nothing else.
    rng = recorder.rng.snapshot()
    order, amiss = _buckets(manifest, recorder)
    with recorder.paused():
        reasons += amiss or ddp_buckets.replay(recorder.model, order)
    recorder.rng.restore(rng)

    local_buffers = {name.removeprefix("buffer/") for name in local if name.startswith("buffer/")}
    history = _restore_units(checkpoint, recorder, frozenset(local_buffers), reasons)

    step_regions = {name: copy for name, copy in local.items() if not name.startswith(EPOCH_PREFIX)}
    epoch_start = {
        name.removeprefix(EPOCH_PREFIX): copy for name, copy in local.items() if name.startswith(EPOCH_PREFIX)
    }
    reasons += recorder.buffers.restore(step_regions)
    if owner == world.rank:
        reasons += recorder.rng.restore(step_regions)
        local_history = None
        packed = manifest.locals[owner].meta.get("slot", {}).get("local_extras")
        if packed is not None:
            local_history = restore_inline(recorder.local_extras, packed)
    else:
        step_regions, epoch_start, local_history = {}, {}, None
    recorder.history(history, local_history)
    return Resumed(
        path=path,
        job=manifest.job,
        global_step=manifest.global_step,
        epoch=manifest.epoch,
        step=manifest.step,
        facts=manifest.facts,
        regions=step_regions,
        epoch_start=epoch_start,
        reasons=list(dict.fromkeys(reasons)),
    )


def refuse_other_units(path: Path, manifest: Manifest, units: RankUnits) -> None:
    """MismatchError if the saved run was divided into other units than this one: says which there and which here."""
    table = units.table
    saved = {
        unit: tuple(entry.meta.get("holders", range(manifest.world_size))) for unit, entry in manifest.units.items()
    }
    missing, extra = sorted(table.units.keys() - saved.keys()), sorted(saved.keys() - table.units.keys())
    different = {
        f"unit {unit}": f"saved on the ranks {ranks_text(saved[unit])}, here on {ranks_text(holders)}"
        for unit, holders in table.units.items()
        if unit in saved and saved[unit] != holders
    }
    if not missing and not extra and not different:
        return
    raise MismatchError(
        f"{path} was saved in another parallel layout; nothing was changed. Units saved: {_some_units(saved)}. Units "
        f"here: {_some_units(table.units)}. Start with the layout of the saved run (moving between layouts is not "
        "there yet)",
        missing=[f"unit {unit}" for unit in missing],
        extra=[f"unit {unit}" for unit in extra],
        different=different,
    )


def _some_units(units: Mapping[str, Sequence[int]]) -> str:
    ordered = sorted(units.items(), key=lambda item: (item[0] != UNIT_REPLICATED, tuple(item[1]), item[0]))
    named = [f"{unit} (rank{'s' if len(held) != 1 else ''} {ranks_text(held)})" for unit, held in ordered[:_SHOWN_MAX]]
    return ", ".join(named) + (f" and {len(units) - _SHOWN_MAX} more" if len(units) > _SHOWN_MAX else "")


def _buckets(manifest: Manifest, recorder: StepRecorder) -> tuple[Mapping[str, Any], list[str]]:
    """The order of DDP's buckets in this rank's DDP process group, as the saved run recorded it; and what is amiss.

    In a sharded job each unit has its writer's order. All ranks of the group have to replay one and the same, so it is
    that of the group's largest unit, which each of them finds in the table, whether it holds it or not.
    """
    table = recorder.units.table
    if table.pure:
        return manifest.facts.get("buckets", {}), []
    ddp = find_ddp(recorder.model)
    if ddp is None:
        return {}, []
    group = frozenset(dist.get_process_group_ranks(ddp.process_group))
    inside = [unit for unit, holders in table.units.items() if group.issuperset(holders)]
    if not inside:
        return {}, ["no unit lies within DDP's process group, so the order of its buckets was not recorded"]
    largest = min(inside, key=lambda unit: (-len(table.units[unit]), unit))
    return manifest.units[largest].meta.get("buckets", {}), []


def _restore_units(
    checkpoint: load.Checkpoint, recorder: StepRecorder, rank_local_buffers: frozenset[str], reasons: list[str]
) -> ExtrasSnapshot:
    """Weights, optimizer and extras of this rank's units. Checked as a whole before anything is changed.

    What makes the resume inexact is added to `reasons`.
    """
    entries = checkpoint.manifest.units
    units = recorder.units
    units.exclude_buffers(rank_local_buffers)
    into: dict[str, Callable[[TensorSpec], memoryview]] = {}
    plans: list[Reading] = [
        RestorePlan(view, entries[unit].tensors, entries[unit].meta) for unit, view in units.views.items()
    ]
    plans += [
        ForeignWeights(recorder.view, unit, members.parameters, entries[unit].tensors, entries[unit].meta)
        for unit, members in units.table.reads.items()
    ]
    of_extras = entries[UNIT_REPLICATED]
    extras = _ExtraTensors(of_extras.meta["extras"], of_extras.tensors)
    for plan in plans:
        into |= dict.fromkeys(plan.tensor_names, plan.into)
    into |= dict.fromkeys(extras.names, extras.into)
    checkpoint.read_tensors(into, lambda spec: into[spec.name](spec))
    for plan in plans:
        plan.commit()
    if not units.pure:
        groups = recorder.view.optimizer.param_groups
        reasons += hyperparameters.align(groups, entries, [*units.views, *units.table.reads])
    return recorder.extras.restore(of_extras.meta["extras"], extras.read)


def _local(checkpoint: load.Checkpoint, rank: int) -> tuple[dict[str, RegionCopy], int, list[str]]:
    """Rank-local regions of `rank`; if they are lost, buffers of the lowest rank that has some, and why."""
    manifest = checkpoint.manifest
    entry = manifest.locals.get(rank)
    if entry is not None and entry.tensors:
        return _regions(checkpoint, rank), rank, []
    for other in sorted(manifest.locals):
        if manifest.locals[other].tensors:
            reason = f"rank {rank}: its own state was lost; it starts with the buffers of rank {other} and new streams"
            copies = _regions(checkpoint, other)
            return {name: copy for name, copy in copies.items() if name.startswith("buffer/")}, other, [reason]
    return {}, -1, [f"rank {rank}: its own state was lost; it starts with new random number streams"]


def _regions(checkpoint: load.Checkpoint, rank: int) -> dict[str, RegionCopy]:
    prefix = f"local/{rank}/"
    return {
        name.removeprefix(prefix): RegionCopy(spec.dtype, spec.shape, data.data)
        for name, (spec, data) in checkpoint.read_local(rank).items()
    }


class _ExtraTensors:
    """Tensors of the extras, read into memory of their own."""

    def __init__(self, tree: Mapping[str, Any], specs: tuple[TensorSpec, ...]) -> None:
        nodes: dict[str, Mapping[str, Any]] = {}
        for name, state in tree.get("states", {}).items():
            nodes |= tensor_nodes(state, f"extras[{name!r}]")
        known = {spec.name: spec for spec in specs}
        missing = sorted(nodes.keys() - known.keys())
        if missing:
            raise FormatError(f"the extras name tensors that are not in the file: {', '.join(missing)}")
        self.specs = {name: known[name] for name in nodes}
        self._nodes = nodes
        self._memory = {name: bytearray(spec.nbytes) for name, spec in self.specs.items()}

    @property
    def names(self) -> list[str]:
        return list(self.specs)

    def into(self, spec: TensorSpec) -> memoryview:
        return memoryview(self._memory[spec.name])

    def read(self, name: str) -> torch.Tensor:
        return tensor_over(self._memory[name], dtype_named(self._nodes[name]["dtype"]), self.specs[name].shape)
