"""Resuming in another layout or world size: what the ranks do together, and what each takes for its own.

Rank-local state follows one rule. Rank r goes on with the state of saved rank r mod M, M being the saved world's size;
if that was lost, with that of the lowest rank whose state is there. Its random streams are those of that rank where
both are r; else they are seeded anew from those streams and r div M, so that a resume can be repeated, and ranks whose
streams were equal (those of one tensor-parallel group) have equal streams again.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
import xxhash

from lastwords.checkpoint.load import Checkpoint
from lastwords.checkpoint.manifest import Manifest
from lastwords.checkpoint.slice_reader import SliceReader, Target
from lastwords.errors import MismatchError
from lastwords.optim_wrapper.foreign_weights import ForeignWeights
from lastwords.optim_wrapper.recorder import StepRecorder
from lastwords.optim_wrapper.reshard import Resharded, VirtualUnit, saved_names
from lastwords.optim_wrapper.state_restore import Reading, RestorePlan
from lastwords.optim_wrapper.world import World
from lastwords.processor.box_reader import RegionCopy
from lastwords.sharding.pieces import Members

STORE_WAIT_S = 300.0
_SHOWN_MAX = 8


def reason_of(manifest: Manifest, world_size: int) -> str:
    """The one line that says why this is not exact."""
    if manifest.world_size == world_size:
        how = "in another parallel layout"
    else:
        how = f"by {world_size} rank{'s' * (world_size > 1)} from a checkpoint of {manifest.world_size}"
    return (
        f"it is resumed {how}: the state is the saved one, bit for bit, but sums are made in another order from here on"
        + (", and random streams belong to ranks" if manifest.world_size != world_size else "")
    )


class Resharding:
    """One rank's plan for the state of its units, out of the slices of a checkpoint of another layout.

    The constructor raises MismatchError, FormatError or IncompleteError, and changes nothing.
    """

    def __init__(self, checkpoint: Checkpoint, recorder: StepRecorder) -> None:
        self._checkpoint = checkpoint
        saved = Resharded(checkpoint.path, checkpoint.manifest)
        self._plans: list[tuple[Reading, VirtualUnit]] = []
        for unit, view in recorder.units.views.items():
            virtual = saved.unit(view, unit, view.names())
            self._plans.append((RestorePlan(view, virtual.tensors, virtual.meta), virtual))
        for unit, members in recorder.units.table.reads.items():
            others = recorder.view.part(unit, Members(members.parameters), ()).names()
            virtual = saved.unit(recorder.view, unit, others)
            foreign = ForeignWeights(recorder.view, unit, members.parameters, virtual.tensors, virtual.meta)
            self._plans.append((foreign, virtual))

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


def refuse_left_overs(world: World, key: str, manifest: Manifest, recorder: StepRecorder) -> Callable[[], None]:
    """MismatchError, when what it returns is called, for saved tensors that no rank here has a place for.

    Every rank calls this, whatever happens to it afterwards: the others read its word.
    """
    names = recorder.view.all_names()
    here = {*names.parameters, *names.buffers, *names.aliases, *names.owners, *recorder.view.exclude_buffers}
    left = sorted(saved_names(manifest) - here)
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
            more = f" and {len(shown) - _SHOWN_MAX} more" if len(shown) > _SHOWN_MAX else ""
            raise MismatchError(
                f"the checkpoint does not fit this {type(recorder.view.model).__name__}; nothing was changed. Only in "
                f"the checkpoint: {', '.join(shown[:_SHOWN_MAX])}{more}. Build the model as the saved run did, or "
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
    known = [rank for rank, entry in sorted(manifest.locals.items()) if entry.tensors]
    own = rank % manifest.world_size
    return own if own in known else next(iter(known), -1)


def streams_of(
    regions: dict[str, RegionCopy], manifest: Manifest, source: int, rank: int, recorder: StepRecorder
) -> dict[str, RegionCopy]:
    """Rank-local regions for `rank`: the source's own, or with default streams that are seeded anew from them.

    The process's streams are left as they were.
    """
    if source == rank:
        return regions
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
        for name, (spec, data) in checkpoint.read_local(rank).items()
    }
