"""Resuming in another layout or world size: what the ranks do together, and what each takes for its own.

Rank-local state follows one rule, also where a rank of the same layout has lost its own with its host. Rank r goes on
with the state of saved rank r mod M, M being the saved world's size; if that was lost, with that of the lowest rank
whose state is there. Its random streams are those of that rank where both are r; else they are seeded anew from those
streams and r div M, so that a resume can be repeated, and ranks whose streams were equal have equal streams again.

Ranks that share one replica's work (a tensor-parallel group) must draw the same numbers, and may have belonged to
several replicas before. Which ranks these are is nowhere written down, but the job has seeded them alike: where torch's
streams are equal when resume() is called and the rule would part them, they all take streams and buffers as the lowest
of them does. `local_extras` keep to the first rule. Buffers that a rank does not have go to those that do, by name.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import xxhash

from lastwords.checkpoint.boxes import Box, overlap
from lastwords.checkpoint.entries import Cause, Reason
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.load import Checkpoint
from lastwords.checkpoint.manifest import Manifest
from lastwords.checkpoint.meta import UnitMeta
from lastwords.checkpoint.reshard.saved_state import SavedUnit, units_of
from lastwords.checkpoint.slice_reader import SliceReader, Target
from lastwords.errors import MismatchError, counted, some
from lastwords.optim_wrapper.capture.carried_gradients import PREFIX as GRADIENT
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.capture.source import EPOCH_PREFIX
from lastwords.optim_wrapper.launch.world import World
from lastwords.optim_wrapper.resume.reshard import Resharded, VirtualUnit
from lastwords.optim_wrapper.resume.state_restore import RestorePlan
from lastwords.processor.box_layout import RegionCopy
from lastwords.sharding.agree import STORE_WAIT_S
from lastwords.vocabulary import UNIT_REPLICATED


def of_weights(meta: UnitMeta) -> UnitMeta:
    """Of a unit that other ranks hold, what this one needs: weights, and the hyperparameters of their groups.

    ZeroRedundancyOptimizer's owners bring everybody's weights up to date in `step()`, but the first forward pass of a
    resumed run comes before it. A rank may own no parameter of a group, and yet shows its hyperparameters to
    schedulers.
    """
    return replace(meta, buffers={}, absent_buffers=(), optimizer_state={}, optimizer_own=(), shared={}, left_out=())


# What a rank that resumes in another layout has to know of a checkpoint: one look at each unit, and few are kept.

_COUNTER_BYTES_MAX = 16
"""State up to here (`step`) is the same beside each part of its parameter."""

Places = dict[str, list[tuple[Box, tuple[int, ...]] | None]]
"""Name of a parameter or buffer -> boxes of it and the shape of the whole; None: whatever there is of it."""


@dataclass(slots=True)
class Survey:
    """names: of all saved parameters and buffers. units: those that have something of what is wanted.

    optimizer_own: some unit has state of the optimizer that belongs to no parameter. at_other_moments: units that were
    written at another place of the step than the first one.
    """

    names: set[str] = field(default_factory=set)
    units: list[SavedUnit] = field(default_factory=list)
    optimizer_own: bool = False
    at_other_moments: list[str] = field(default_factory=list)


def survey(path: Path, manifest: Manifest, wanted: Places) -> Survey:
    """Looks at every unit. Of a large checkpoint only those stay in memory of which something is wanted.

    A part that is not wanted may contradict others unseen here; whoever wants it sees that. FormatError as of
    `units_of`.
    """
    found = Survey()
    seen: set[str] = set()
    moments: dict[str, bool | None] = {}
    for name, unit in units_of(path, manifest):
        found.names |= {*unit.meta.parameters, *unit.meta.buffers}
        found.optimizer_own |= bool(unit.meta.optimizer_own)
        ended = unit.meta.step_ended
        moments[name] = next(iter(moments.values()), None) if ended is None else ended
        if manifest.moved or _is_wanted(unit, wanted, seen):
            found.units.append(unit)
            seen |= {*unit.meta.parameters, *unit.meta.buffers, *unit.meta.absent_buffers}
        elif manifest.tables is not None:
            manifest.tables.forget(name)
    first = next(iter(moments.values()), None)
    found.at_other_moments = [name for name, moment in moments.items() if moment != first]
    return found


def places_of(recorder: StepRecorder) -> Places:
    """Everything that a rank holds or reads."""
    found: Places = {}
    for view in (*recorder.units.views.values(), *recorder.units.foreign.values()):
        names = view.names()
        tensors: list[tuple[str, torch.Tensor | None]] = [*names.parameters.items()]
        tensors += [(name, names.buffers.get(name)) for name in names.owners]
        for name, tensor in tensors:
            spec = None if tensor is None else view.spec_of(f"unit/{view.unit}/model/{name}", name, tensor)
            place = None if spec is None else (Box(spec.offsets, spec.shape), spec.global_shape)
            found.setdefault(name, []).append(place)
    return found


def _is_wanted(unit: SavedUnit, wanted: Places, seen: set[str]) -> bool:
    """Whether the unit has the job's extras, something of what is wanted, or the first sight of a name."""
    if unit.meta.extras is not None or any(name in wanted and name not in seen for name in _names_of(unit)):
        return True
    for name, spec in unit.specs.items():
        kind, _, fqn = name.partition("/")
        if kind == "optim":
            fqn = fqn.rpartition("/")[0]
            if spec.nbytes <= _COUNTER_BYTES_MAX and f"model/{fqn}" in unit.specs:
                continue  # it goes where the parameter's part goes
        if any(place is None or _shares(spec, *place) for place in wanted.get(fqn, ())):
            return True
    return False


def _names_of(unit: SavedUnit) -> Iterator[str]:
    yield from unit.meta.parameters
    yield from unit.meta.buffers
    yield from unit.meta.absent_buffers
    yield from (fqn for fqn in unit.states if f"model/{fqn}" not in unit.specs)


def _shares(spec: TensorSpec, box: Box, shape: tuple[int, ...]) -> bool:
    """Whether the tensor has elements of the box; True for one of another form, of which whoever compares it speaks."""
    dimensions = len(shape)
    if spec.global_shape[:dimensions] != shape:
        return True
    return overlap(Box(spec.offsets[:dimensions], spec.shape[:dimensions]), box) is not None


_SHOWN_MAX = 8
_ACCELERATOR = re.compile(r"rng/[a-z]+:\d+")


def reason_of(manifest: Manifest, world_size: int) -> Reason:
    """Why no resume on other ranks is exact."""
    if manifest.world_size == world_size:
        how = "on a different parallel layout"
    else:
        how = f"on {counted(world_size, 'rank')} from a checkpoint saved on {manifest.world_size}"
    return Reason(
        f"resumed {how}: the restored state is bitwise identical, but reductions now run in a different order"
        + (", and RNG streams are per-rank" if manifest.world_size != world_size else ""),
        Cause.RESHARDED,
    )


class Resharding:
    """One rank's plan for the state of its units, out of the slices of a checkpoint of another layout.

    The constructor raises MismatchError, FormatError or IncompleteError, and changes nothing.
    """

    def __init__(self, checkpoint: Checkpoint, recorder: StepRecorder, found: Survey) -> None:
        self._checkpoint = checkpoint
        saved = Resharded(checkpoint.path, found.units, copies=checkpoint.manifest.moved)
        self._plans: list[tuple[RestorePlan, VirtualUnit]] = []
        units = recorder.units
        for unit, view in {**units.views, **units.foreign}.items():
            virtual = saved.unit(view)
            meta = virtual.meta if unit in units.views else of_weights(virtual.meta)
            self._plans.append((RestorePlan(view, virtual.tensors, meta), virtual))

    def read(self) -> int:
        """Overwrites the weights; returns the bytes that were read. If it raises, the model holds rubbish."""
        targets: list[Target] = []
        for plan, virtual in self._plans:
            specs = {spec.name: spec for spec in virtual.tensors}
            for name in plan.tensor_names:
                if specs[name].nbytes:
                    targets.append(Target(virtual.boxes[name], plan.into(specs[name]), virtual.slices[name]))
                else:
                    plan.into(specs[name])
        with SliceReader(self._checkpoint, checked=True) as reader:
            reader.read(targets)
            return reader.bytes_read

    def commit(self) -> None:
        """After everything has been read."""
        for plan, _ in self._plans:
            plan.commit()


def refuse_left_overs(world: World, key: str, saved: Collection[str], recorder: StepRecorder) -> Callable[[], None]:
    """MismatchError, when what it returns is called, for saved tensors that no rank here has a place for.

    saved: their names. Every rank calls this, whatever happens to it afterwards: the others read its word.
    """
    names = recorder.view.all_names()
    here = {*names.parameters, *names.buffers, *names.aliases, *names.owners, *recorder.view.exclude_buffers}
    left = sorted({*saved} - here)
    world.publish(f"{key}/left/{world.rank}", {"left": left})

    def check() -> None:
        missing = set(left)
        for rank in range(world.size):
            if not missing:
                return
            if rank != world.rank:
                missing &= {*world.read(f"{key}/left/{rank}", STORE_WAIT_S, f"rank {rank} to resume")["left"]}
        if missing:
            shown = sorted(missing)
            raise MismatchError(
                f"the checkpoint does not fit this {type(recorder.view.model).__name__}; nothing was changed. Only in "
                f"the checkpoint: {some(shown, _SHOWN_MAX)}. Build the model as the saved run did, or "
                "choose another checkpoint",
                extra=shown,
            )

    return check


def source_rank(manifest: Manifest, rank: int) -> int:
    """The saved rank whose local state this rank goes on with; -1 if there is none at all.

    >>> from types import SimpleNamespace as N
    >>> saved = N(world_size=4, locals={rank: N(tensors=(rank,)) for rank in (0, 2, 3)})
    >>> [source_rank(saved, rank) for rank in (0, 1, 6, 7)]
    [0, 0, 2, 3]
    """
    candidates = (rank % manifest.world_size, *sorted(manifest.locals))
    # One after the other: of a large checkpoint, each look at an entry reads a writer's part.
    return next((one for one in candidates if one in manifest.locals and manifest.locals[one].tensors), -1)


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Rank-local regions that this rank goes on with, of which saved rank they are (-1: of none), and what is amiss.

    extras_of: the saved rank whose `local_extras` it goes on with; -1 if there is none.
    """

    regions: dict[str, RegionCopy]
    source: int
    reasons: list[Reason]
    extras_of: int


def take_over(checkpoint: Checkpoint, world: World, key: str, recorder: StepRecorder) -> TakenOver:
    """Rank-local regions by the rule above. Every rank calls this, whatever happens to it afterwards.

    MismatchError for a buffer that has another form here.
    """
    if recorder.units.pure:
        taken = own = _by_the_rule(checkpoint, world.rank, recorder)
    else:
        word = {"here": _torch_streams(recorder.rng.snapshot(), recorder), "then": ""}
        try:
            taken = own = _by_the_rule(checkpoint, world.rank, recorder)
            word["then"] = _torch_streams(own.regions, recorder)
        finally:
            world.publish(f"{key}/streams/{world.rank}", word)
        leader = _leader(world, key, word)
        if leader != world.rank:
            taken = _by_the_rule(checkpoint, leader, recorder)
    regions = buffers_by_name(checkpoint, taken.regions, recorder)
    reasons = list(taken.reasons)
    if not (recorder.units.pure and checkpoint.manifest.units.keys() == {UNIT_REPLICATED}):
        names = sorted(name.removeprefix("buffer/") for name in regions if name.startswith("buffer/"))
        if names:
            said = (
                f"small buffers ({some(names, _SHOWN_MAX)}) were restored from one saved rank; "
                f"if a buffer depends on the layout, such as an offset into a sharded tensor, set it again "
                f"after resume()"
            )
            reasons.append(Reason(said, Cause.RESHARDED))
    return TakenOver(regions, taken.source, reasons, own.source)


def own_or_stand_in(checkpoint: Checkpoint, rank: int, recorder: StepRecorder) -> TakenOver:
    """Rank-local regions where ranks hold what they held: this rank's, or else what it can go on with of another one.

    Its streams are then as the script has seeded them: alike where the ranks of a tensor-parallel group have to draw
    alike. The epoch's data is in the other rank's order, since ranks that share it out have drawn alike, and gradients
    that the other one carried count once. MismatchError for a buffer that has another form here.
    """
    taken = _by_the_rule(checkpoint, rank, recorder, moved=False)
    if taken.source in (rank, -1):
        return taken
    regions = {name: copy for name, copy in taken.regions.items() if not name.startswith(GRADIENT)}
    return replace(taken, regions=buffers_by_name(checkpoint, {**regions, **recorder.rng.snapshot()}, recorder))


def _leader(world: World, key: str, word: dict[str, str]) -> int:
    """The rank whose streams and buffers this one goes on with: itself, or the lowest of those seeded alike."""
    words = {world.rank: word}
    for rank in range(world.size):
        if rank != world.rank:
            words[rank] = world.read(f"{key}/streams/{rank}", STORE_WAIT_S, f"rank {rank} to resume")
    alike = [rank for rank in range(world.size) if words[rank]["here"] == word["here"]]
    return world.rank if len({words[rank]["then"] for rank in alike}) == 1 else alike[0]


def buffers_by_name(
    checkpoint: Checkpoint, regions: Mapping[str, RegionCopy], recorder: StepRecorder
) -> dict[str, RegionCopy]:
    """The regions with the buffers that this rank has: stages and experts are on other ranks than they were.

    What the regions lack comes from the lowest saved rank that has it. MismatchError for one of another form.
    """
    here = {region.name: (region.dtype, tuple(region.shape)) for region in recorder.tensors.regions}
    found = {name: copy for name, copy in regions.items() if not name.startswith("buffer/") or name in here}
    for name in here.keys() - found.keys():
        stored = next(
            (
                spec
                for rank, entry in sorted(checkpoint.manifest.locals.items())
                for spec in entry.tensors
                if spec.name == f"local/{rank}/{name}"
            ),
            None,
        )
        if stored is not None:
            memory = bytearray(stored.nbytes)
            checkpoint.read_tensors([stored.name], lambda _, memory=memory: memoryview(memory))  # type: ignore[misc]
            found[name] = RegionCopy(stored.dtype, stored.shape, memoryview(memory))
    different = {
        name.removeprefix("buffer/"): f"saved {found[name].dtype} {tuple(found[name].shape)}, here {form[0]} {form[1]}"
        for name, form in here.items()
        if name in found and (found[name].dtype, tuple(found[name].shape)) != form
    }
    if different:
        others = (f"{name}: {text}" for name, text in sorted(different.items()))
        raise MismatchError(
            f"buffers differ in shape or dtype from the checkpoint: {some(others, _SHOWN_MAX, '; ')}. A buffer "
            f"whose shape depends on the layout cannot be restored on a different layout: make it a module attribute "
            f"that is computed when the module is built",
            different=different,
        )
    return found


def _torch_streams(regions: Mapping[str, RegionCopy], recorder: StepRecorder) -> str:
    """A checksum of the streams that models draw from: torch's own, of the CPU and of this rank's accelerator."""
    digest = xxhash.xxh3_64()
    for name in sorted(recorder.rng.snapshot().keys() - {"rng/python", "rng/numpy"}):
        digest.update(bytes(regions[name].data) if name in regions else b"")
    return digest.hexdigest()


def _by_the_rule(checkpoint: Checkpoint, rank: int, recorder: StepRecorder, *, moved: bool = True) -> TakenOver:
    manifest = checkpoint.manifest
    source, own = source_rank(manifest, rank), rank % manifest.world_size
    if source < 0:
        nothing = "no rank-local state was saved; it starts with new RNG streams"
        return TakenOver({}, -1, [Reason(nothing, ranks=(rank,))], -1)
    regions = on_this_device(regions_of(checkpoint, source), recorder.rng.snapshot().keys())
    lost = f"the rank-local state of saved rank {own} was lost; it goes on with that of rank {source}, and new streams"
    if source != rank and moved:
        step_regions = {name: copy for name, copy in regions.items() if not name.startswith(EPOCH_PREFIX)}
        regions = streams_of(step_regions, manifest, source, rank, recorder)
    return TakenOver(regions, source, [] if source == own else [Reason(lost, ranks=(rank,))], source)


def on_this_device(regions: Mapping[str, RegionCopy], here: Collection[str]) -> dict[str, RegionCopy]:
    """The regions with an accelerator's stream under the name of the device that this rank has: ranks move over cards.

    here: names of this rank's streams. Nothing is renamed where one of the two has several accelerators.

    >>> sorted(on_this_device({"rng/cuda:0": 0, "epoch/rng/cuda:0": 0, "rng/torch": 0}, ["rng/cuda:3", "rng/torch"]))
    ['epoch/rng/cuda:3', 'rng/cuda:3', 'rng/torch']
    """
    saved = [name for name in regions if _ACCELERATOR.fullmatch(name)]
    live = [name for name in here if _ACCELERATOR.fullmatch(name)]
    if len(saved) != 1 or len(live) != 1 or saved[0].split(":")[0] != live[0].split(":")[0]:
        return dict(regions)
    names = {saved[0]: live[0], EPOCH_PREFIX + saved[0]: EPOCH_PREFIX + live[0]}
    return {names.get(name, name): copy for name, copy in regions.items()}


def streams_of(
    regions: dict[str, RegionCopy], manifest: Manifest, source: int, rank: int, recorder: StepRecorder
) -> dict[str, RegionCopy]:
    """The source's rank-local regions, with default streams that are seeded anew from them for another `rank`.

    The process's streams are left as they were.
    """
    digest = xxhash.xxh3_64()
    for name in sorted(regions):
        if name.startswith("rng/"):
            digest.update(name.encode() + bytes(regions[name].data))
    place = rank // manifest.world_size if source == rank % manifest.world_size else rank
    digest.update(f"{manifest.global_step}/{place}".encode())
    seed = digest.intdigest()
    before = recorder.rng.snapshot()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)
    derived = recorder.rng.snapshot()
    recorder.rng.restore(before)
    return {**regions, **derived}


def regions_of(checkpoint: Checkpoint, rank: int) -> dict[str, RegionCopy]:
    """All rank-local tensors of a saved rank."""
    prefix = f"local/{rank}/"
    return {
        name.removeprefix(prefix): RegionCopy(spec.dtype, spec.shape, data.data)
        for name, (spec, data) in checkpoint.read(checkpoint.manifest.locals[rank]).items()
    }
