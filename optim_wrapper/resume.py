"""Putting a checkpoint back into a live job: which one, does it fit, and what cannot be exact."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lastwords.checkpoint import load
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.manifest import Manifest
from lastwords.errors import CheckpointError, FormatError, IncompleteError, LastWordsError
from lastwords.optim_wrapper import ddp_buckets, hyperparameters
from lastwords.optim_wrapper.ddp_private import find_ddp
from lastwords.optim_wrapper.extras import ExtrasSnapshot, restore_inline
from lastwords.optim_wrapper.facts import differences
from lastwords.optim_wrapper.foreign_weights import ForeignWeights
from lastwords.optim_wrapper.recorder import StepRecorder
from lastwords.optim_wrapper.reshard import fits_as_it_is
from lastwords.optim_wrapper.resume_elsewhere import (
    Resharding,
    reason_of,
    refuse_left_overs,
    regions_of,
    take_over,
)
from lastwords.optim_wrapper.source import EPOCH_PREFIX
from lastwords.optim_wrapper.state_restore import Reading, RestorePlan
from lastwords.optim_wrapper.tensor_bytes import dtype_named, tensor_over
from lastwords.optim_wrapper.tensor_tree import tensor_nodes
from lastwords.optim_wrapper.world import World
from lastwords.processor.box_reader import RegionCopy
from lastwords.vocabulary import UNIT_REPLICATED

_log = logging.getLogger(__name__)

STORE_WAIT_S = 300.0

_OF_LAYOUT = ("ddp", "optimizer", "backend", "buckets")
"""Facts that another layout changes by its nature; one reason says so."""

OF_A_MOVE = ("it is resumed ", "small buffers (", "the saved run had been resumed elsewhere")
EARLIER_MOVE = "the saved run had been resumed elsewhere itself, and made its sums in another order from there on"


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
    checkpoint: load.Checkpoint | None = None
    fits = True
    try:
        checkpoint = load.open_checkpoint(path)
        fits = fits_as_it_is(checkpoint.manifest, recorder.units.table, world.rank, recorder.view)
    except LastWordsError as error:
        own = error
    _all_or_none(world, f"{key}/opened", own)
    assert checkpoint is not None
    elsewhere = world.problem_anywhere(f"{key}/layout", None if fits else "another layout", STORE_WAIT_S) is not None
    resumed: Resumed | None = None
    try:
        if elsewhere:
            nothing_left_over = refuse_left_overs(world, key, checkpoint.manifest, recorder)
            nothing_left_over()
        resumed = _restore(checkpoint, world, recorder, facts_here, key=key, elsewhere=elsewhere)
    except LastWordsError as error:
        own = error
    _all_or_none(world, f"{key}/restored", own)
    return resumed


def _all_or_none(world: World, key: str, own: Exception | None) -> None:
    """An error of one rank is an error on all."""
    problem = world.problem_anywhere(key, None if own is None else str(own), STORE_WAIT_S)
    if own is not None:
        raise own
    if problem is not None:
        raise CheckpointError(f"another rank cannot resume, so none does: {problem}")


def _restore(
    checkpoint: load.Checkpoint,
    world: World,
    recorder: StepRecorder,
    facts_here: Mapping[str, Any],
    *,
    key: str,
    elsewhere: bool,
) -> Resumed:
    """elsewhere: some rank's units are not those of the saved run, so the state is put together from slices."""
    manifest, path = checkpoint.manifest, checkpoint.path
    moved = elsewhere or manifest.world_size != world.size
    if moved:
        taken = take_over(checkpoint, world, key, recorder)
        local, owner, extras_of = taken.regions, taken.source, taken.extras_of
        reasons = [reason_of(manifest, world.size), *taken.reasons]
    else:
        local, owner, reasons = _local(checkpoint, world.rank)
        extras_of = owner
    reasons += _reasons_of(manifest)
    reasons += differences({k: v for k, v in manifest.facts.items() if not moved or k not in _OF_LAYOUT}, facts_here)

    if not elsewhere:
        # The replay runs real collectives, before the weights are there: it leaves zero gradients and nothing else.
        rng = recorder.rng.snapshot()
        order, amiss = _buckets(manifest, recorder)
        with recorder.paused():
            reasons += amiss or ddp_buckets.replay(recorder.model, order)
        recorder.rng.restore(rng)

    local_buffers = {name.removeprefix("buffer/") for name in local if name.startswith("buffer/")}
    history = _restore_units(checkpoint, recorder, frozenset(local_buffers), reasons, elsewhere=elsewhere)

    step_regions = {name: copy for name, copy in local.items() if not name.startswith(EPOCH_PREFIX)}
    epoch_start = {
        name.removeprefix(EPOCH_PREFIX): copy for name, copy in local.items() if name.startswith(EPOCH_PREFIX)
    }
    reasons += recorder.buffers.restore(step_regions)
    if owner == world.rank or (moved and owner >= 0):
        reasons += recorder.rng.restore(step_regions)
        local_history = None
        packed = manifest.locals[extras_of].meta.get("slot", {}).get("local_extras")
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


def _reasons_of(manifest: Manifest) -> list[str]:
    """Why the saved run was not exact. What every rank has said is said once, or each resume would multiply it.

    >>> from types import SimpleNamespace as N
    >>> local = N(reasons=("it is resumed by 3 ranks from a checkpoint of 4: ...", "why"))
    >>> _reasons_of(N(locals={0: local}, reasons=["rank 0: why"])) == [EARLIER_MOVE, "why"]
    True
    """
    by_rank = [entry.reasons for entry in manifest.locals.values()]
    by_all = (
        [reason for reason in dict.fromkeys(by_rank[0]) if all(reason in said for said in by_rank)] if by_rank else []
    )
    lines = {f"rank {rank}: {reason}" for rank in manifest.locals for reason in by_all}
    said = [*by_all, *(str(reason) for reason in manifest.reasons if reason not in lines)]
    earlier = [reason for reason in said if reason.startswith(OF_A_MOVE)]
    # An earlier move is told in the past tense, and once: it says nothing of the ranks that there are now.
    return [*([EARLIER_MOVE] if earlier else []), *(reason for reason in said if reason not in earlier)]


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
    checkpoint: load.Checkpoint,
    recorder: StepRecorder,
    rank_local_buffers: frozenset[str],
    reasons: list[str],
    *,
    elsewhere: bool,
) -> ExtrasSnapshot:
    """Weights, optimizer and extras of this rank's units. Checked as a whole before anything is changed.

    What makes the resume inexact is added to `reasons`.
    """
    entries = checkpoint.manifest.units
    units = recorder.units
    units.exclude_buffers(rank_local_buffers)
    into: dict[str, Callable[[TensorSpec], memoryview]] = {}
    plans: list[Reading] = []
    of_extras = entries[UNIT_REPLICATED]
    extras = _ExtraTensors(of_extras.meta["extras"], of_extras.tensors)
    resharding = Resharding(checkpoint, recorder) if elsewhere else None
    if resharding is None:
        plans += [RestorePlan(view, entries[unit].tensors, entries[unit].meta) for unit, view in units.views.items()]
        plans += [
            ForeignWeights(recorder.view, unit, members.parameters, entries[unit].tensors, entries[unit].meta)
            for unit, members in units.table.reads.items()
        ]
    for plan in plans:
        into |= dict.fromkeys(plan.tensor_names, plan.into)
    into |= dict.fromkeys(extras.names, extras.into)
    checkpoint.read_tensors(into, lambda spec: into[spec.name](spec))
    if resharding is not None:
        resharding.read()
        resharding.commit()
    for plan in plans:
        plan.commit()
    if elsewhere or not units.pure:
        groups = recorder.view.optimizer.param_groups
        used = [*entries] if elsewhere else [*units.views, *units.table.reads]
        reasons += hyperparameters.align(groups, entries, used)
    return recorder.extras.restore(of_extras.meta["extras"], extras.read)


def _local(checkpoint: load.Checkpoint, rank: int) -> tuple[dict[str, RegionCopy], int, list[str]]:
    """Rank-local regions of `rank`; if they are lost, buffers of the lowest rank that has some, and why."""
    manifest = checkpoint.manifest
    entry = manifest.locals.get(rank)
    if entry is not None and entry.tensors:
        return regions_of(checkpoint, rank), rank, []
    for other in sorted(manifest.locals):
        if manifest.locals[other].tensors:
            reason = f"rank {rank}: its own state was lost; it starts with the buffers of rank {other} and new streams"
            copies = regions_of(checkpoint, other)
            return {name: copy for name, copy in copies.items() if name.startswith("buffer/")}, other, [reason]
    return {}, -1, [f"rank {rank}: its own state was lost; it starts with new random number streams"]


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
