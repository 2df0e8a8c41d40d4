"""Putting a checkpoint back into a live job: which one, does it fit, and what cannot be exact."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lastwords.checkpoint import load
from lastwords.checkpoint.format import TensorSpec
from lastwords.errors import CheckpointError, FormatError, IncompleteError, LastWordsError, MismatchError
from lastwords.optim_wrapper import ddp_buckets
from lastwords.optim_wrapper.extras import restore_inline
from lastwords.optim_wrapper.facts import differences
from lastwords.optim_wrapper.recorder import StepRecorder
from lastwords.optim_wrapper.source import EPOCH_PREFIX
from lastwords.optim_wrapper.state_restore import RestorePlan
from lastwords.optim_wrapper.tensor_bytes import dtype_named, tensor_over
from lastwords.optim_wrapper.tensor_tree import tensor_nodes
from lastwords.optim_wrapper.world import World
from lastwords.processor.box_reader import RegionCopy
from lastwords.vocabulary import UNIT_REPLICATED

_log = logging.getLogger(__name__)

STORE_WAIT_S = 300.0


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
    entry = manifest.units.get(UNIT_REPLICATED)
    if entry is None:
        raise IncompleteError(f"{path} has no unit {UNIT_REPLICATED!r}", missing=(UNIT_REPLICATED,))
    local, owner, reasons = _local(checkpoint, world.rank)
    reasons += [str(reason) for reason in manifest.reasons]
    reasons += differences(manifest.facts, facts_here)

    # The replay runs real collectives, before the weights are there: it leaves zero gradients and nothing else.
    rng = recorder.rng.snapshot()
    with recorder.paused():
        reasons += ddp_buckets.replay(recorder.model, manifest.facts.get("buckets", {}))
    recorder.rng.restore(rng)

    local_buffers = {name.removeprefix("buffer/") for name in local if name.startswith("buffer/")}
    recorder.view.exclude_buffers = frozenset(local_buffers)
    plan = RestorePlan(recorder.view, entry.tensors, entry.meta)
    extras = _ExtraTensors(entry.meta["extras"], entry.tensors)
    checkpoint.read_tensors(
        [*plan.tensor_names, *extras.names],
        lambda spec: extras.into(spec) if spec.name in extras.specs else plan.into(spec),
    )
    plan.commit()
    history = recorder.extras.restore(entry.meta["extras"], extras.read)

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
