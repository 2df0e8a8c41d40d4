"""Where the writer finds this rank's state during an incident: weights live, everything else as last committed.

Called in the writer's thread while this rank is settled, so neither weights nor the newest `Snapshot` change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.layout import local_tensor_name
from lastwords.checkpoint.part import LocalState, UnitState
from lastwords.errors import IncompleteError, LastWordsError
from lastwords.optim_wrapper import hyperparameters
from lastwords.optim_wrapper.extras import Extras, ExtrasSnapshot
from lastwords.optim_wrapper.host_copy import HostCopy
from lastwords.optim_wrapper.rank_units import RankUnits
from lastwords.optim_wrapper.state_view import copy_groups
from lastwords.processor.box_layout import SlotKind
from lastwords.processor.box_reader import BoxReader, SlotCopy
from lastwords.processor.saver import Position
from lastwords.vocabulary import UNIT_REPLICATED, Phase, Stand

_log = logging.getLogger(__name__)

EPOCH_PREFIX = "epoch/"
"""Rank-local tensors of an epoch's start stand under this prefix, beside those of the step itself."""


class Snapshot(NamedTuple):
    """What may move on after a step has ended, as it was at the end of global step `step`."""

    step: int
    position: Position
    groups: list[dict[str, Any]]
    extras: ExtrasSnapshot


class TrainerSource:
    """`StateSource` over a live model, optimizer and extras, and the black boxes of this host.

    buckets: the order of DDP's buckets up to a step; None where the job's facts have it for all ranks. copy: taken at
    each step's end, and saved instead of the live state where it is of the step that is asked for.
    """

    def __init__(
        self,
        units: RankUnits,
        extras: Extras,
        box_path: Callable[[int], Path],
        rank_local_buffers: Callable[[], frozenset[str]],
        facts: Callable[[int], dict[str, Any]],
        buckets: Callable[[int], dict[str, Any]] | None = None,
        copy: HostCopy | None = None,
    ) -> None:
        self._units = units
        self._extras = extras
        self._box_path = box_path
        self._rank_local_buffers = rank_local_buffers
        self._facts = facts
        self._buckets = buckets
        self._copy = copy
        self._snapshot: Snapshot | None = None
        self._next_position: Position | None = None

    # ------------------------------------------------------------------ training thread

    def committed(self, snapshot: Snapshot) -> None:
        """The step of `snapshot` has ended. One assignment: the writer sees the old one or the new one."""
        self._snapshot = snapshot
        if self._copy is not None:
            stand = Stand(Phase.COMPUTING, snapshot.step)
            self._copy.take(snapshot.step, {unit: self._live(unit, snapshot.step, stand) for unit in self._units.names})

    def under_way(self, position: Position) -> None:
        """Epoch and step of the step that is being computed now."""
        self._next_position = position

    # ------------------------------------------------------------------ writer's thread (StateSource)

    def position(self, step: int) -> Position:
        """Epoch and step in the epoch of global step `step`."""
        snapshot = self._snapshot
        if snapshot is not None and snapshot.step == step:
            return snapshot.position
        if self._next_position is not None:
            return self._next_position
        before = snapshot.position if snapshot is not None else Position(1, 0)
        return Position(before.epoch, before.step + 1)

    def unit_state(self, unit: str, step: int, stand: Stand) -> UnitState:
        """Tensors and JSON of the unit at `step`; IncompleteError if this rank does not hold it."""
        copied = None if self._copy is None else self._copy.get(unit, step)
        return self._live(unit, step, stand) if copied is None else copied

    def _live(self, unit: str, step: int, stand: Stand) -> UnitState:
        view = self._units.views.get(unit)
        if view is None:
            held = ", ".join(self._units.names)
            raise IncompleteError(f"this rank holds the units {held}, not {unit!r}", missing=(unit,))
        snapshot = self._snapshot
        late: list[str] = []
        if snapshot is not None and snapshot.step == step:
            groups, extras = snapshot.groups, snapshot.extras
        elif stand in (Stand(Phase.UPDATED, step), Stand(Phase.SKIPPED, step)):
            # The update is done, or there is none; the step's end was never reached (a collective before it, say).
            groups = copy_groups(view.optimizer)
            extras, late = self._extras.after_update(None if snapshot is None else snapshot.extras)
        else:
            held = "nothing" if snapshot is None else f"step {snapshot.step}"
            raise IncompleteError(f"step {step} was asked for, but this rank holds {held} ({stand})")
        self._units.exclude_buffers(self._rank_local_buffers())
        self._units.check_layout()
        state = view.state(groups)
        meta: dict[str, Any] = dict(state.meta)
        tensors = list(state.tensors)
        if unit == UNIT_REPLICATED:
            meta["extras"], of_extras = self._extras.store(extras, unit)
            tensors += of_extras
        if not self._units.pure:
            ended = snapshot is not None and snapshot.step == step
            meta |= hyperparameters.moment(groups, unit=unit, ended=ended)
        if self._buckets is not None:
            meta["buckets"] = self._buckets(step)
        return UnitState(tensors=tensors, meta={**meta, "reasons": late if unit == UNIT_REPLICATED else []})

    def local_states(self, ranks: Sequence[int], step: int) -> Mapping[int, LocalState]:
        """Rank-local state of ranks of this host at `step`, dead or alive, read from their black boxes."""
        return {rank: self._local_state(rank, step) for rank in ranks}

    def facts(self, step: int) -> dict[str, Any]:
        """Facts of the run up to `step`, for the manifest."""
        return self._facts(step)

    # ------------------------------------------------------------------ inside

    def _local_state(self, rank: int, step: int) -> LocalState:
        try:
            with BoxReader(self._box_path(rank)) as box:
                copy = box.read(step)
                if copy is None:
                    there = ", ".join(f"{kind.name.lower()} {at}" for kind, at in box.contents()) or "nothing"
                    return _nothing(f"its black box has no state of step {step} (it has: {there})")
                reasons = [str(reason) for reason in box.facts().get("reasons", [])]
                if copy.problem:
                    reasons.append(copy.problem)
                if copy.kind is SlotKind.TENTATIVE:
                    trusted, why = box.tentative_trust()
                    if not trusted:
                        reasons.append(f"it had not ended step {step}, and {why}")
                    late = box.facts().get("tentative_reasons", [])
                    reasons += [f"it had not ended step {step}, and {why}" for why in late]
                epoch = copy.json.get("epoch")
                start = box.read_epoch(epoch) if isinstance(epoch, int) else None
                if start is None and copy.json.get("needs_epoch_start"):
                    reasons.append(f"its black box has no record of the start of epoch {epoch}")
        except LastWordsError as error:
            return _nothing(str(error))
        tensors = _tensors(rank, "", copy)
        meta: dict[str, Any] = {"kind": copy.kind.name.lower(), "slot": copy.json}
        if start is not None:
            tensors += _tensors(rank, EPOCH_PREFIX, start)
            meta["epoch_start"] = start.json
        return LocalState(tensors, meta, exact=not reasons, reasons=tuple(reasons))


def _nothing(reason: str) -> LocalState:
    return LocalState(tensors=[], meta={"kind": "none", "slot": {}}, exact=False, reasons=(reason,))


def _tensors(rank: int, prefix: str, copy: SlotCopy) -> list[tuple[TensorSpec, Any]]:
    return [
        (TensorSpec(local_tensor_name(rank, prefix + name), region.dtype, region.shape), region.data)
        for name, region in copy.regions.items()
    ]
