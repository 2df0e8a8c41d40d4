"""From every rank's pieces to the strategy of the job: a pure function, called by one rank for all.

Beside parameters ("model") and buffers the lists have pieces of kind "optim" where a rank has, or will have, the
optimizer's state of a parameter, and of kind "state", called FQN/KEY, for state that lies elsewhere than its parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lastwords.checkpoint.boxes import Box
from lastwords.checkpoint.reshard.strategy import Cut, Held, Strategy
from lastwords.errors import ConfigError
from lastwords.sharding.declare import Unit, check_cuts, refuse_no_whole
from lastwords.sharding.grouping import Alike, refuse_different_forms
from lastwords.sharding.pieces import ANY_FORM, Piece

_REMEDY = (
    "if these are parts of one tensor, declare their regions with cuts= of their units (lastwords.Part); if "
    "they are two tensors, such as tensors of two stages, give them different names"
)

VOLATILE = "volatile"
"""Scope of a buffer that is not persistent: its form is nobody's promise."""

Stored = Callable[[str], tuple[str, tuple[int, ...]]]
"""Name of an element type -> its safetensors code, and further sizes for a type that safetensors lacks."""


def strategy_from(lists: Sequence[Alike], declared: Sequence[Unit], world_size: int, stored: Stored) -> Strategy:
    """The strategy of the ranks whose pieces these are; ranks are global ones, in a world of `world_size`.

    Buffers of the scope `VOLATILE` are left out where ranks have them in several forms. Raises ConfigError, naming the
    tensor, where ranks contradict each other or the declarations, or where the boxes of a name are no whole, or more
    than one.
    """
    ranks = {rank for _, alike in lists for rank in alike}
    here = [unit for unit in declared if ranks.intersection(unit.holders)]
    refuse_different_forms([([one for one in alike if one.scope != VOLATILE], those) for alike, those in lists])
    check_cuts(lists, here)
    holders: dict[tuple[str, str], dict[Piece, set[int]]] = {}
    for alike, those in lists:
        for piece in alike:
            holders.setdefault((piece.kind, piece.name), {}).setdefault(piece, set()).update(those)
    _refuse_missing_holders(holders, here, ranks)
    tensors: dict[str, Cut] = {}
    for (kind, name), pieces in holders.items():
        if name.startswith("~") or any(piece.dtype == ANY_FORM for piece in pieces):
            continue
        first = next(iter(pieces))
        if first.scope == VOLATILE and len({(piece.dtype, piece.global_shape) for piece in pieces}) > 1:
            continue
        _check_whole(kind, list(pieces))
        dtype, more = stored(first.dtype)
        boxes: dict[Box, set[int]] = {}
        for piece, at in pieces.items():
            box = Box((*piece.offsets, *(0 for _ in more)), (*piece.shape, *more))
            boxes.setdefault(box, set()).update(at)
        held = tuple(Held(box, tuple(sorted(at))) for box, at in sorted(boxes.items()))
        shape = (*first.global_shape, *more)
        tensors[f"{'optim' if kind == 'state' else kind}/{name}"] = Cut("" if kind == "optim" else dtype, shape, held)
    return Strategy(world_size, tensors)


def _check_whole(kind: str, pieces: Sequence[Piece]) -> None:
    # Ranks that only read what ZeRO's owner holds have the same box, perhaps under another declared unit.
    held = [piece for piece in pieces if piece.held] or pieces
    if kind == "state":
        # Whole beside each shard of its parameter, such as a counter: copies, whatever the unit.
        held = list({(piece.offsets, piece.shape): piece for piece in held}.values())
    refuse_no_whole(held, _REMEDY)


def _refuse_missing_holders(
    holders: dict[tuple[str, str], dict[Piece, set[int]]], declared: Sequence[Unit], ranks: set[int]
) -> None:
    """What takes a tensor on one of a declared unit's ranks has to be there on all of them."""
    expected = {unit.name: ranks.intersection(unit.holders) for unit in declared}
    for (kind, name), pieces in holders.items():
        if kind in ("model", "buffer"):
            for piece, those in pieces.items():
                missing = expected.get(piece.unit, those) - {rank for one in pieces for rank in pieces[one]}
                if missing:
                    raise ConfigError(
                        f"the unit {piece.unit!r} is also declared for rank {min(missing)}, but {kind} tensor {name!r} "
                        f"of rank {min(those)} is not there; correct holders or tensors of units="
                    )
