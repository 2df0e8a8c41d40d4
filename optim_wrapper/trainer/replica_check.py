"""Replicas are compared before one of them can ever be chosen: silent corruption, or copies that never were."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch.distributed as dist

from lastwords.checkpoint.layout import UnitTensorName, parse_tensor_name
from lastwords.errors import MismatchError
from lastwords.optim_wrapper.state import extra_digests
from lastwords.optim_wrapper.state.optimizer_trees import generators_in
from lastwords.optim_wrapper.state.rank_units import RankUnits
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.sharding.verify import Difference, Digests, compare, digest_units, exchange_digests

_log = logging.getLogger(__name__)


OWN = 0
"""In the place of the digest of a tensor that is each rank's own."""


class ReplicaCheck:
    """Compares this rank's units with the other holders'; a collective. Training thread only.

    group: a gloo group of all ranks. extras: gives digests of what else is promised to be the same on all of them.
    """

    def __init__(
        self,
        units: RankUnits,
        rank: int,
        world_size: int,
        group: Any,
        extras: Callable[[], dict[str, int]] = dict,
    ) -> None:
        self._extras = extras
        self._units = units
        self._rank = rank
        self._world_size = world_size
        self._group = group

    def run(self, when: str, own: Collection[str] = ()) -> tuple[MismatchError | None, bool, list[str]]:
        """The error to raise on every rank, whether this rank's own copy must not be saved, and reasons "not exact".

        own: names of the parameters and buffers that are each rank's own; random generators always are.
        Buffers and extras that differ are no error, since a loop may mean it so; they cannot be resumed exactly.
        """
        holders = self._units.table.units
        views = [view for unit, view in self._units.views.items() if len(holders[unit]) > 1]
        digests = _without_own(digest_units(views), own, _generators_of(views))
        mine = {**digests, extra_digests.UNIT: self._extras()}
        compared = compare(_where_nobody_has_its_own(exchange_digests(self._group, mine)))
        found = [difference for difference in compared if difference.unit != extra_digests.UNIT]
        harmless = [difference for difference in found if _is_buffer(difference)]
        serious = [difference for difference in found if not _is_buffer(difference)]
        reasons = [f"replicas have diverged: {difference}" for difference in harmless]
        reasons += [extra_digests.text(one) for one in compared if one.unit == extra_digests.UNIT]
        if not serious:
            return None, False, reasons
        suspect = any(self._rank in difference.suspects for difference in serious)
        return MismatchError(_text(serious, when), different=_different(serious)), suspect, reasons

    def meet(self) -> None:
        """Wait until every rank has come here; an error of the group's is no news any more."""
        if self._world_size > 1:
            with contextlib.suppress(RuntimeError, dist.DistError):
                dist.barrier(group=self._group)


def check_group(world_size: int, group: Any) -> Any:
    """A gloo group of all ranks: `group` if there is one, else the default one, else a new one (a collective)."""
    if group is not None or world_size == 1 or "gloo" in str(dist.get_backend()):
        return group
    return dist.new_group(backend="gloo")


def _without_own(
    digests: dict[str, dict[str, int]], own: Collection[str], generators: Collection[str]
) -> dict[str, dict[str, int]]:
    for tensors in digests.values() if own or generators else ():
        for stored in tensors:
            name = parse_tensor_name(stored)
            is_own = isinstance(name, UnitTensorName) and name.kind != "optim" and name.fqn in own
            if is_own or stored in generators:
                tensors[stored] = OWN
    return digests


def _generators_of(views: Iterable[UnitView]) -> set[str]:
    """Names of generators in the optimizer, which are saved for each rank like all random streams."""
    metas = [view.state().meta for view in views]
    trees = [tree for meta in metas for tree in (*meta.groups, *meta.optimizer_state.values())]
    return set().union(*map(generators_in, trees))


def _where_nobody_has_its_own(found: Mapping[int, Digests]) -> dict[int, Digests]:
    """Without the tensors that some rank says to be its own: others may not have seen yet that theirs are."""
    own = {(unit, name) for digests in found.values() for unit, tensors in digests.items()
           for name, digest in tensors.items() if digest == OWN}  # fmt: skip
    return {
        rank: {
            unit: {name: OWN if (unit, name) in own else digest for name, digest in tensors.items()}
            for unit, tensors in digests.items()
        }
        for rank, digests in found.items()
    }


def _is_buffer(difference: Difference) -> bool:
    name = parse_tensor_name(difference.tensor)
    return isinstance(name, UnitTensorName) and name.kind == "buffer"


def _text(found: Iterable[Difference], when: str) -> str:
    return (
        f"replicas differ {when}: {'; '.join(str(difference) for difference in found)}. If these are meant to be "
        "different tensors (stages, parts, experts), declare that with units="
    )


def _different(found: Iterable[Difference]) -> dict[str, str]:
    return {difference.tensor: str(difference) for difference in found}
