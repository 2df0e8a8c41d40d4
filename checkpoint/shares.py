"""What one of several writers writes of a unit (see `cuts`)."""

from __future__ import annotations

from dataclasses import replace

from lastwords.checkpoint.cuts import plan_sum, split
from lastwords.checkpoint.direct_io import as_bytes
from lastwords.checkpoint.meta import EMPTY_UNIT
from lastwords.checkpoint.part import TensorSource, UnitState
from lastwords.vocabulary import Share


def share_of(state: UnitState, share: Share) -> UnitState:
    """A share of a unit, for `write_part`. What is no tensor is in the first share."""
    if share.count == 1:
        return state
    shares = split(share.unit, [spec for spec, _ in state.tensors], share.count)
    sources = [source for _, source in state.tensors]
    tensors = [(cut.spec, _slice(sources[cut.tensor], cut.begin, cut.end)) for cut in shares[share.index]]
    meta = state.meta
    if share.index:
        meta = replace(EMPTY_UNIT, optimizer=meta.optimizer, holders=meta.holders, reasons=meta.reasons)
    return UnitState(tensors, meta, plan_sum([cut.spec for cut in one] for one in shares), state.version)


def _slice(source: TensorSource, begin: int, end: int) -> TensorSource:
    if callable(source):
        return lambda: as_bytes(source())[begin:end]
    return as_bytes(source)[begin:end]
