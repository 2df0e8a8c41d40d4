"""Putting a checkpoint back into a live job: which one, does it fit, and what cannot be exact."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lastwords.checkpoint import load, starts
from lastwords.checkpoint.entries import Cause, Reason, as_reason, merged
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.layout import EPOCH_UNKNOWN
from lastwords.checkpoint.load import Stamp, damage_told_from_replacement
from lastwords.checkpoint.manifest import Manifest
from lastwords.checkpoint.meta import (
    COMMITTED,
    NO_STATE,
    BucketRecord,
    ExtrasMeta,
    Habits,
    LoopFacts,
    Marks,
    RunFacts,
    StepDocument,
    StoredLate,
    Tree,
    groups_of,
)
from lastwords.errors import FormatError
from lastwords.optim_wrapper.capture.buffers import SavedForms
from lastwords.optim_wrapper.capture.carried_gradients import PREFIX as GRADIENT
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.capture.source import EPOCH_PREFIX
from lastwords.optim_wrapper.ddp import ddp_buckets
from lastwords.optim_wrapper.joined_optimizer import order_state
from lastwords.optim_wrapper.launch.startup import Agreement
from lastwords.optim_wrapper.launch.world import World
from lastwords.optim_wrapper.loop.data_position import known_at_resume
from lastwords.optim_wrapper.resume.facts import changed
from lastwords.optim_wrapper.resume.reshard import fits_as_it_is
from lastwords.optim_wrapper.resume.resume_choice import OwnJobs, all_or_none, begun_of, open_chosen, refuse_later_start
from lastwords.optim_wrapper.resume.resume_elsewhere import (
    Resharding,
    Survey,
    of_weights,
    own_or_stand_in,
    places_of,
    reason_of,
    refuse_left_overs,
    survey,
    take_over,
)
from lastwords.optim_wrapper.resume.state_restore import Reading, RestorePlan, adopted
from lastwords.optim_wrapper.state import extras, plain_values
from lastwords.optim_wrapper.state.attributes import NOTHING, SavedValues, saved_in
from lastwords.optim_wrapper.state.extras import restore_inline
from lastwords.optim_wrapper.tensors.overwriting import Overwriting
from lastwords.optim_wrapper.tensors.tensor_bytes import dtype_named
from lastwords.optim_wrapper.tensors.tensor_tree import tensor_nodes
from lastwords.processor.box_layout import RegionCopy
from lastwords.processor.recurrence import Recurrence
from lastwords.processor.saver import Position
from lastwords.sharding.agree import STORE_WAIT_S
from lastwords.vocabulary import UNIT_REPLICATED

# What the run that is resumed had learned of its loop, and what its loop had called its steps.


def habits_for(rank: int | None, manifest: Manifest) -> Habits:
    """What the saved run had learned: that of this rank, or of all together where its own is lost, or for None."""
    every = {rank: local.meta.habits for rank, local in manifest.locals.items()}
    own = manifest.locals.get(-1 if rank is None else rank)
    names_go_back = any(habits.names_go_back for habits in every.values())  # all ranks have to judge alike
    if own is not None and own.meta.kind != NO_STATE:
        return replace(own.meta.habits, names_go_back=names_go_back)
    passes = {one.passes for one in every.values()} - {None}
    return Habits(
        names_go_back=names_go_back,
        passes=passes.pop() if rank is not None and len(passes) == 1 else None,
        early_reasons=[*dict.fromkeys(why for one in every.values() for why in one.early_reasons)],
        after_copy=_newest(one.after_copy for one in every.values()),
        after_update=_newest(one.after_update for one in every.values()),
        updates=max((one.updates for one in every.values()), default=0),
        draws=any(one.draws for one in every.values()) or None,
    )


def _newest(tables: Iterable[StoredLate]) -> StoredLate:
    """Of each name what is known by the table in which it has come last."""
    every = [item for table in tables for item in table.items()]
    return dict(sorted(every, key=lambda item: Recurrence(*item[1]).last))


def last_named(manifest: Manifest) -> Position | None:
    """Of the step that was saved, or, where nobody knew that, of the newest one before it that a rank knew."""
    if manifest.named:
        return Position(manifest.epoch, manifest.step)
    said = [local.document.after or () for local in manifest.locals.values() if local.tensors]
    return max((Position(*after) for after in said if len(after) == 2), default=None)


_log = logging.getLogger(__name__)

_STATE = "state "

EARLIER_MOVE = Reason(
    "the saved run had itself been resumed on a different layout or world size, so its reductions ran in a "
    "different order from there on",
    Cause.RESHARDED,
)


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a resume has put back, and what the loop still needs: the streams of the epoch's start and of the step.

    at_step, at_start: attributes and random generators at the step's end, and at the epoch's start. order: of
    the epoch so far, as in a `StepDocument`.
    epoch and step are as in the manifest: see `position`. last_named: the last step that the loop had given a name;
    None if it gives none. moved: the saved run had other ranks, or another layout.
    """

    path: Path
    job: str
    global_step: int
    epoch: int
    step: int
    data: LoopFacts
    regions: Mapping[str, RegionCopy]
    epoch_start: Mapping[str, RegionCopy]
    at_step: SavedValues = NOTHING
    at_start: SavedValues = NOTHING
    order: tuple[int, str] | None = None
    reasons: list[Reason] = field(default_factory=list)
    last_named: Position | None = None
    moved: bool = False
    groups: tuple[tuple[str, ...], ...] = ()
    beside: Mapping[str, str] = field(default_factory=dict)
    begun: bool = False

    @property
    def position(self) -> Position | None:
        """What the loop calls the step that was saved; None if nobody who saved it knew."""
        return None if self.epoch == EPOCH_UNKNOWN else Position(self.epoch, self.step)


def resume_from(
    roots: list[Path],
    world: World,
    recorder: StepRecorder,
    facts_here: RunFacts,
    *,
    key: str,
    agreed: Agreement | None,
    missing_ok: bool,
    named: bool = False,
) -> Resumed | None:
    """Restore everything but the data position; `named`: the user has given the job its name.

    See `TFTRegister.resume` for the errors.
    """
    own = OwnJobs(agreed.job, agreed.jobs) if agreed and (agreed.restarted or named) else None
    opened = open_chosen(roots, world, key, own, missing_ok)
    if opened is None:
        return None
    with opened[0] as checkpoint:
        refuse_later_start(checkpoint.manifest, agreed)
        resumed = _resume(checkpoint, opened[1], world, recorder, facts_here, key)
    if world.rank == 0:
        if agreed and resumed.job not in (agreed.job, *agreed.jobs):
            starts.note_resumed(roots[0], agreed.generation, resumed.job)
        _log.info("resumed after step %s from %s", resumed.global_step, resumed.path)
        for reason in resumed.reasons:
            _log.warning("lastwords: not exact, because %s", reason)
    return resumed


def _resume(
    checkpoint: load.Checkpoint,
    stamp: Stamp | None,
    world: World,
    recorder: StepRecorder,
    facts_here: RunFacts,
    key: str,
) -> Resumed:
    with all_or_none(world, f"{key}/read"):
        fits = fits_as_it_is(checkpoint.manifest, recorder.units.table, world.rank, recorder.view)
    elsewhere = world.problem_anywhere(f"{key}/layout", None if fits else "another layout", STORE_WAIT_S) is not None
    with all_or_none(world, f"{key}/restored"), damage_told_from_replacement(checkpoint.path, stamp):
        surveyed = None
        if elsewhere:
            with all_or_none(world, f"{key}/surveyed"):
                surveyed = survey(checkpoint.path, checkpoint.manifest, places_of(recorder))
                nothing_left_over = refuse_left_overs(world, key, surveyed.names, recorder)
            nothing_left_over()
        return _restore(checkpoint, world, recorder, facts_here, key=key, surveyed=surveyed)


def _restore(
    checkpoint: load.Checkpoint,
    world: World,
    recorder: StepRecorder,
    facts_here: RunFacts,
    *,
    key: str,
    surveyed: Survey | None,
) -> Resumed:
    """surveyed: some rank's units are not those of the saved run, so the state is put together from slices."""
    manifest, path = checkpoint.manifest, checkpoint.path
    moved = surveyed is not None or manifest.world_size != world.size
    reasons: list[str | Reason] = []
    with all_or_none(world, f"{key}/taken"):
        if moved:
            taken = take_over(checkpoint, world, key, recorder)
            reasons.append(reason_of(manifest, world.size))
        else:
            taken = own_or_stand_in(checkpoint, world.rank, recorder)
        local, owner, extras_of = taken.regions, taken.source, taken.extras_of
        reasons += taken.reasons
        order, amiss = _buckets(manifest, recorder) if surveyed is None else ([], [])
    reasons += _reasons_of(manifest)
    run = manifest.run
    data = run.data or LoopFacts()
    reasons += known_at_resume(data, manifest.step)
    begun, of_some = begun_of(manifest)
    reasons += [of_some] if of_some else []
    reasons += extras.differing({rank: one.document for rank, one in manifest.locals.items()})
    reasons += changed(run, facts_here, moved=moved)

    if surveyed is None:
        # The replay runs real collectives, before the weights are there: it leaves zero gradients and nothing else.
        rng = recorder.rng.snapshot()
        with recorder.paused():
            reasons += amiss or ddp_buckets.replay(recorder.view.model, order, recorder.view.trained)
        recorder.rng.restore(rng)

    local_buffers = {name.removeprefix("buffer/") for name in local if name.startswith("buffer/")}
    if surveyed is None:
        untouched = _changed_elsewhere_only(manifest, recorder.buffers.larger - local_buffers)
        reasons += [
            Reason(
                f"the buffer {name!r} had changed on other ranks but not on this rank, so no file has this "
                f"rank's value; it keeps the model's initial value",
                ranks=(world.rank,),
            )
            for name in sorted(untouched)
        ]
        local_buffers |= untouched
    with_same = None if moved else recorder.units.table.holding_the_same(world.rank)
    reasons += _not_alike(manifest, world.rank, with_same)
    overwriting = Overwriting([*recorder.view.model.parameters(), *recorder.view.model.buffers()])
    _restore_units(checkpoint, recorder, frozenset(local_buffers), reasons, surveyed, overwriting)

    step_regions = {name: copy for name, copy in local.items() if not name.startswith(EPOCH_PREFIX)}
    epoch_start = {
        name.removeprefix(EPOCH_PREFIX): copy for name, copy in local.items() if name.startswith(EPOCH_PREFIX)
    }
    reasons += recorder.restore_own(step_regions, _forms(manifest), _regions_of_any(manifest))
    if with_same is not None:
        reasons += recorder.watch.values.restore(_numbers_of(manifest, world.rank))
    if owner >= 0:
        of = manifest.locals[extras_of]
        at_step, at_start = (saved_in(one, str(path)) for one in (of.document, of.meta.epoch_document))
        constants = of.meta.habits.constants if owner == world.rank else {}
        reasons += recorder.attributes.made_otherwise(constants, at_step.values)
        reasons += recorder.attributes.restore(recorder.known(at_step))
        reasons += recorder.rng.restore(step_regions)
        if run.data is None:  # else the loader is not known before steps() begins
            reasons += recorder.attributes.generators.unsaved()
        reasons += recorder.extra_buffers.restore(step_regions)
        inline = manifest.locals[extras_of].document.extras_inline(f"{path}: local_extras")
        if inline is not None:
            restore_inline(recorder.local_extras, inline, overwriting)
    else:
        step_regions, epoch_start, at_step, at_start = {}, {}, NOTHING, NOTHING
    reasons += recorder.gradients.restore(step_regions)
    recorder.learn(habits_for(None if moved else world.rank, manifest))
    reasons += [*recorder.extras.own_reasons, *recorder.local_extras.own_reasons]
    return Resumed(
        path=path,
        job=manifest.job,
        global_step=manifest.global_step,
        epoch=manifest.epoch,
        step=manifest.step,
        data=data,
        regions=step_regions,
        epoch_start=epoch_start,
        at_step=at_step,
        at_start=at_start,
        order=manifest.locals[extras_of].document.order if owner >= 0 else None,
        reasons=list(merged(map(as_reason, reasons))),
        last_named=last_named(manifest),
        moved=moved,
        groups=groups_of([unit.meta for unit in manifest.units.values()]),
        beside=run.beside or {},
        begun=begun,
    )


def _reasons_of(manifest: Manifest) -> list[Reason]:
    """Why the saved run was not exact. What every rank has said is said of none, or each resume would multiply it.

    An earlier move is told in the past tense, and once: it says nothing of the ranks that there are now.
    """
    moves = [reason for reason in manifest.reasons if reason.cause is Cause.RESHARDED]
    every = tuple(manifest.local_reasons)
    rest = [
        (replace(reason, ranks=()) if reason.ranks == every else reason).of_the_past()
        for reason in manifest.reasons
        if reason not in moves
    ]
    return [*([EARLIER_MOVE] if moves else []), *merged(rest)]


def _buckets(manifest: Manifest, recorder: StepRecorder) -> tuple[list[BucketRecord], list[str]]:
    """The order of DDP's buckets in this rank's DDP process group, as the saved run recorded it; and what is amiss.

    In a sharded job each unit has its writer's orders. All ranks of a DDP's group have to replay one and the same, so
    it is that of the group's largest unit, which each of them finds in the table, whether it holds it or not.
    """
    table = recorder.units.table
    if table.pure:
        return BucketRecord.read(manifest.run.buckets or {}), []
    records: list[BucketRecord] = []
    for group, number in ddp_buckets.groups_of(recorder.view.model, recorder.view.trained):
        inside = [unit for unit, holders in table.units.items() if group.issuperset(holders)]
        if not inside:
            return [], ["no unit lies within DDP's process group, so the order of its buckets was not recorded"]
        largest = min(inside, key=lambda unit: (-len(table.units[unit]), unit))
        records += BucketRecord.read(manifest.units[largest].meta.buckets or {})[number : number + 1]
    return records, []


def _restore_units(
    checkpoint: load.Checkpoint,
    recorder: StepRecorder,
    rank_local_buffers: frozenset[str],
    reasons: list[str | Reason],
    surveyed: Survey | None,
    overwriting: Overwriting | None = None,
) -> None:
    """Weights, optimizer and extras of this rank's units. Checked as a whole before anything is changed.

    What makes the resume inexact is added to `reasons`.
    """
    entries = checkpoint.manifest.units
    units = recorder.units
    units.exclude_buffers(rank_local_buffers)
    into: dict[str, Callable[[TensorSpec], memoryview]] = {}
    of_extras = entries.get(UNIT_REPLICATED)
    if of_extras is None or of_extras.meta.extras is None:
        raise FormatError(f"{checkpoint.path}: no unit contains the job's extras; use another checkpoint")
    extras = _ExtraTensors(of_extras.meta.extras, of_extras.tensors)
    plans: list[Reading] = [extras]
    resharding = Resharding(checkpoint, recorder, surveyed) if surveyed is not None else None
    if resharding is None:
        with adopted(recorder.view, [entries[unit].meta for unit in units.views]):
            plans += [
                RestorePlan(view, entries[unit].tensors, entries[unit].meta) for unit, view in units.views.items()
            ]
        plans += [
            RestorePlan(view, entries[unit].tensors, of_weights(entries[unit].meta))
            for unit, view in units.foreign.items()
        ]
    for plan in plans:
        into |= dict.fromkeys(plan.tensor_names, plan.into)
    checkpoint.read_tensors(into, lambda spec: into[spec.name](spec))
    if resharding is not None:
        resharding.read()
        resharding.commit()
    for plan in plans:
        plan.commit()
    if surveyed is not None and surveyed.optimizer_own:
        reasons.append("optimizer state that is not stored by parameter and name is not restored on a different layout")
    if surveyed is not None or not units.pure:
        order_state(recorder.view.optimizer)  # each unit has put its own behind the others'
        groups = recorder.view.optimizer.param_groups
        used = surveyed.at_other_moments if surveyed is not None else [*units.views, *units.foreign]
        reasons += plain_values.align(groups, entries, used)
    recorder.extras.restore(of_extras.meta.extras, extras.read, overwriting)


def _not_alike(manifest: Manifest, rank: int, ranks: Collection[int] | None = None) -> list[Reason]:
    """Why copies of what changes outside of optimizer.step() are not this rank's.

    ranks: those that hold the same as this one does; None: whoever was in the saved run, of which nothing is kept.
    """
    locals_ = [local for one, local in manifest.locals.items() if ranks is None or one in ranks]
    unmoved = manifest.holders_world_size == manifest.world_size
    whole = ranks is not None or (len(manifest.units) < 2 and unmoved)
    said = [(local.meta.kind, _alike(local.document, whole)) for local in locals_]
    mine = manifest.locals.get(rank)
    committed = mine is not None and mine.meta.kind == COMMITTED
    there = {"own": committed, "numbers": ranks is not None and bool(_numbers_of(manifest, rank))}
    reasons = []
    for kind in sorted({kind for _, alike in said for kind in alike}):
        # What was looked at the step's end, and at the one before, which is all that a tentative copy knows of.
        marks = [
            (alike[kind].now, alike[kind].before) if copy == COMMITTED else (None, alike[kind].now)
            for copy, alike in said
            if kind in alike
        ]
        ends = [[mark for mark in end if mark is not None] for end in zip(*marks, strict=True)]
        alone = kind == "own" and all(len(end) < 2 for end in ends)
        if marks and not there.get(kind) and (any(len({*end}) > 1 for end in ends) or alone):
            what = next(alike[kind].what for _, alike in said if kind in alike)
            reasons.append(
                Reason(f"the {what} may differ between ranks, and this rank's were not saved", ranks=(rank,))
            )
    with_gradients = {one for one, local in manifest.locals.items() if any(map(_is_gradient, local.tensors))}
    if with_gradients and rank not in with_gradients and not committed:
        reasons.append(Reason("the gradients that it carried into the next step were not saved", ranks=(rank,)))
    return reasons


def _alike(document: StepDocument, whole: bool) -> dict[str, Marks]:
    """What a black box said has to be the same on other ranks. whole: they hold what this one holds."""
    state = document.state._replace(what="optimizer state or the trained parameters")
    return {**document.alike, **({f"{_STATE}{document.state.what}": state} if whole else {})}


def _numbers_of(manifest: Manifest, rank: int) -> Mapping[str, Any]:
    """A rank's own, packed; empty where its copy is of before the update."""
    local = manifest.locals.get(rank)
    return local.document.numbers if local is not None and local.meta.kind == COMMITTED else {}


def _is_gradient(spec: TensorSpec) -> bool:
    return spec.name.split("/", 2)[2].startswith(GRADIENT)


def _forms(manifest: Manifest) -> SavedForms:
    """What all units say of the job's buffers."""
    metas = [unit.meta for unit in manifest.units.values()]
    return SavedForms(
        frozenset(name for meta in metas for name in meta.volatile_buffers),
        frozenset(name for meta in metas for name in meta.reshaped_buffers),
    )


def _regions_of_any(manifest: Manifest) -> set[str]:
    """Names of the regions that any rank's copy has."""
    return {spec.name.split("/", 2)[2] for local in manifest.locals.values() for spec in local.tensors}


def _changed_elsewhere_only(manifest: Manifest, wanted: frozenset[str]) -> set[str]:
    """Those of `wanted` that other ranks have saved for themselves, and that are in no unit."""
    of_ranks = {
        spec.name.split("/", 2)[2].removeprefix("buffer/")
        for local in manifest.locals.values()
        for spec in local.tensors
    }
    in_units = {name for unit in manifest.units.values() for name in unit.meta.buffers}
    return set(wanted & of_ranks) - in_units


class _ExtraTensors(Reading):
    """Tensors of the extras, read into memory of their own."""

    def __init__(self, meta: ExtrasMeta, specs: tuple[TensorSpec, ...]) -> None:
        super().__init__()
        nodes: dict[str, Mapping[str, Any]] = {}
        for name, state in meta.states.items():
            nodes |= tensor_nodes(state, f"extras[{name!r}]")
        known = {spec.name: spec for spec in specs}
        missing = sorted(nodes.keys() - known.keys())
        if missing:
            raise FormatError(f"the extras name tensors that are not in the file: {', '.join(missing)}")
        self._targets = {name: torch.empty(known[name].nbytes, dtype=torch.uint8) for name in nodes}

    def read(self, node: Tree) -> torch.Tensor:
        return self._targets[node["tensor"]].view(dtype_named(node["dtype"])).view(node["shape"])
