"""This rank's units: agreed with the others at the start, watched while training goes on.

A job whose ranks hold all the same keeps its one unit `replicated`, which takes whatever the model has. In every other
job each tensor has the place that was agreed, and what has none is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from lastwords.errors import ConfigError
from lastwords.optim_wrapper.state.state_view import Names, UnitView
from lastwords.sharding import zero
from lastwords.sharding.agree import WorldLike, agree_units
from lastwords.sharding.declare import Unit
from lastwords.sharding.discover import cut_by_hand, pieces_of
from lastwords.sharding.pieces import ANY_FORM, Piece, UnitTable

LOOK_EVERY_STEPS = 32
"""A look at all tensors takes some microseconds for each of them: spread over so many steps it is nothing."""


class RankUnits:
    """Views of this rank's units, and the proof that its tensors are still those that were agreed.

    views: unit -> its state. foreign: unit of other ranks -> what of it this one reads on a resume. pure: every rank
    holds everything. All methods belong to the training thread, except that `check_layout` and the views may be used by
    any.
    """

    def __init__(self, view: UnitView, table: UnitTable, pieces: Sequence[Piece], declared: Sequence[Unit], rank: int):
        self.table = table
        self.pure = table.pure
        self._view = view
        self._declared = tuple(declared)
        self._rank = rank
        self._agreed = {(piece.kind, piece.name): piece for piece in pieces}
        self._parameters = {id(parameter): name for name, parameter in view.all_names().parameters.items()}
        self._counts = self._count()
        self._steps_until_look = LOOK_EVERY_STEPS
        view.cut_by_hand = cut_by_hand(pieces, declared)
        self.views: Mapping[str, UnitView] = dict.fromkeys(table.mine, view)
        if not table.pure:
            self.views = {unit: view.part(unit, members, table.units[unit]) for unit, members in table.mine.items()}
        self.foreign = {unit: view.part(unit, members, ()) for unit, members in table.reads.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.views)

    def exclude_buffers(self, names: Collection[str]) -> None:
        """These buffers are rank-local: in no unit."""
        for view in (self._view, *self.views.values()):
            view.exclude_buffers = frozenset(names)

    def check(self) -> None:
        """ConfigError for what has no unit, is another part than was agreed, or cannot be stored."""
        if self.pure:
            return
        self.check_layout()
        for view in self.views.values():
            view.check()

    def check_layout(self) -> None:
        """ConfigError for a tensor that has no unit, or is another part of the whole than was agreed."""
        if self.pure:
            return
        pieces = pieces_of(without_buffers(self._view.all_names(), self._view.exclude_buffers), self._view.optimizer,
                           self._declared, self._rank)  # fmt: skip
        for piece in pieces:
            agreed = self._agreed.get((piece.kind, piece.name))
            if agreed is None and piece.dtype == ANY_FORM:
                continue  # a cache that came later and is not persistent: whoever needs it makes it again
            if agreed is None:
                _refuse_uncovered(f"the {_KINDS[piece.kind]} {piece.name!r}")
            elif piece.key != agreed.key:
                raise ConfigError(
                    f"the {_KINDS[piece.kind]} {piece.name!r} was {_form(agreed)} when TFTRegister was started and is "
                    f"{_form(piece)} now: the model was sharded or converted again; do that first, then make the "
                    "optimizer, then TFTRegister"
                )

    def check_step(self) -> None:
        """Cheap, at each step's end: ConfigError if a parameter group has come or grown that was not let in.

        Now and then the whole layout is compared, so that a model which is changed later is not found at a death.
        """
        if self.pure:
            return
        self._steps_until_look -= 1
        if self._steps_until_look == 0:
            self._steps_until_look = LOOK_EVERY_STEPS
            self.check_layout()
        if self._count() != self._counts:
            for group in self._view.optimizer.param_groups:
                self._refuse_strangers(group["params"])
            self.check_layout()
            self._counts = self._count()

    def admit(self, group: dict[str, Any]) -> None:
        """Before `group` goes into the optimizer: ConfigError if no unit of this job covers its parameters."""
        if self.pure:
            return
        if zero.is_zero(self._view.optimizer):
            raise ConfigError(
                "a ZeroRedundancyOptimizer repartitions its parameters when a group is added, but units are "
                "fixed at the start; add all groups before TFTRegister is started"
            )
        params = group.get("params", ())
        if not isinstance(params, torch.Tensor | list | set):
            params = group["params"] = list(params)  # a generator can be walked only once
        each = [params] if isinstance(params, torch.Tensor) else params
        self._refuse_strangers([one[1] if isinstance(one, tuple) else one for one in each])  # (name, parameter)

    # ------------------------------------------------------------------ inside

    def _count(self) -> tuple[int, ...]:
        return tuple(len(group["params"]) for group in self._view.optimizer.param_groups)

    def _refuse_strangers(self, parameters: Collection[torch.Tensor]) -> None:
        for place, parameter in enumerate(parameters):
            if id(parameter) not in self._parameters:
                _refuse_uncovered(f"parameter {place} of the new group, of shape {tuple(parameter.shape)},")


_KINDS = {"model": "parameter", "buffer": "buffer"}


def agree(
    view: UnitView, world: WorldLike, prefix: str, declared: Sequence[Unit], rank_local_buffers: Collection[str]
) -> RankUnits:
    """Find out with all other ranks who holds what. ConfigError on every rank where one of them contradicts another."""
    pieces: list[Piece] = []

    def find() -> list[Piece]:
        names = without_buffers(view.all_names(), rank_local_buffers)
        pieces.extend(pieces_of(names, view.optimizer, declared, world.rank))
        return pieces

    table = agree_units(world, prefix, find, declared)
    return RankUnits(view, table, pieces, declared, world.rank)


def without_buffers(names: Names, buffers: Collection[str]) -> Names:
    """`names` without some buffers: those of single ranks are in no unit."""
    return replace(
        names,
        buffers={name: buffer for name, buffer in names.buffers.items() if name not in buffers},
        absent_buffers=tuple(name for name in names.absent_buffers if name not in buffers),
    )


def _refuse_uncovered(what: str) -> NoReturn:
    raise ConfigError(
        f"{what} did not exist when TFTRegister was started, so no unit covers it and it would be lost if "
        f"this rank died; add all parameters before TFTRegister is started (frozen parameters may join the "
        f"optimizer later)"
    )


def _form(piece: Piece) -> str:
    text = f"{piece.dtype} {piece.shape}"
    if piece.shape != piece.global_shape:
        text += f" at {piece.offsets} of {piece.global_shape}"
    return text + (f" ({piece.scope})" if piece.scope else "")
