"""Who holds what, as all ranks have agreed at the start, and what follows from it: a gate, replicas to compare."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lastwords.checkpoint.layout import UnitTensorName, parse_tensor_name
from lastwords.errors import MismatchError
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.launch.config import Config
from lastwords.optim_wrapper.launch.startup import checkpoint_bytes
from lastwords.optim_wrapper.launch.world import World, next_prefix
from lastwords.optim_wrapper.state import extras
from lastwords.optim_wrapper.state.own_state import generators_in
from lastwords.optim_wrapper.state.rank_units import RankUnits
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.trainer.gate import Gate
from lastwords.optim_wrapper.trainer.job_shape import Options, announce, needs_gate
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.sharding.agree import STORE_WAIT_S
from lastwords.sharding.declare import Unit
from lastwords.sharding.group_info import value_is_shared, write_group_info
from lastwords.sharding.verify import Digests, HolderDifference, compare, digest_units, exchange_digests

# Replicas are compared before one of them can ever be chosen: silent corruption, or copies that never were.

_log = logging.getLogger(__name__)


OWN = 0
"""In the place of the digest of a tensor that is each rank's own."""


def compare_replicas(
    units: RankUnits, rank: int, group: Any, of_extras: dict[str, int], when: str, own: Collection[str] = ()
) -> tuple[MismatchError | None, bool, list[str]]:
    """The error to raise on every rank, whether this rank's own copy must not be saved, and reasons "not exact".

    A collective, with the other holders of this rank's units. group: a gloo group of all ranks. of_extras: digests of
    what else is promised to be the same on all of them. own: names of the parameters and buffers that are each rank's
    own; random generators always are. Buffers and extras that differ are no error, since a loop may mean it so; they
    cannot be resumed exactly.
    """
    holders = units.table.units
    views = [view for unit, view in units.views.items() if len(holders[unit]) > 1]
    digests = _without_own(digest_units(views), own, _generators_of(views))
    mine = {**digests, extras.UNIT: of_extras}
    compared = compare(_where_nobody_has_its_own(exchange_digests(group, mine)))
    found = [difference for difference in compared if difference.unit != extras.UNIT]
    harmless = [difference for difference in found if _is_buffer(difference)]
    serious = [difference for difference in found if not _is_buffer(difference)]
    reasons = [f"replicas have diverged: {difference}" for difference in harmless]
    reasons += [extras.text(one) for one in compared if one.unit == extras.UNIT]
    if not serious:
        return None, False, reasons
    suspect = any(rank in difference.suspects for difference in serious)
    different = {one.tensor: str(one) for one in serious}
    return MismatchError(_text(serious, when), different=different), suspect, reasons


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


def _is_buffer(difference: HolderDifference) -> bool:
    name = parse_tensor_name(difference.tensor)
    return isinstance(name, UnitTensorName) and name.kind == "buffer"


def _text(found: Iterable[HolderDifference], when: str) -> str:
    return (
        f"replicas differ {when}: {'; '.join(str(difference) for difference in found)}. If these are meant to be "
        "different tensors (stages, parts, experts), declare that with units="
    )


class AgreedLayout:
    """Made by all ranks together: the constructor is a collective. Training thread only.

    Raises ConfigError on every rank where one contradicts another, StorageError for a GROUP_INFO_FILE that is refused.
    """

    def __init__(
        self,
        world: World,
        recorder: StepRecorder,
        optimizers: Sequence[OptTFTWrapper],
        declared: Sequence[Unit],
        options: Options,
        config: Config,
    ) -> None:
        self._recorder = recorder
        self._inner = [wrapper.inner for wrapper in optimizers]
        prefix = next_prefix()
        self.units: RankUnits = recorder.agree_units(world, prefix, declared)
        if world.rank == 0:
            announce(self.units.table, world.size, options, len(self._inner))
        shared = value_is_shared(world, prefix, os.environ, STORE_WAIT_S)
        write_group_info(os.environ, world.rank, self.units.table, shared=shared)
        self.gate: Gate | None = None
        if needs_gate(self.units.table, options):
            self.gate = Gate(world, f"{prefix}/gate", timeout_s=config.gate_timeout_s, notice_s=config.gate_notice_s)
        self._world = world
        self._group = check_group(world.size, None if self.gate is None else self.gate.group)

    @property
    def checkpoint_bytes(self) -> int:
        """About how large a checkpoint of the whole job will be."""
        nbytes = self.units.table.nbytes
        return checkpoint_bytes(sum(nbytes.values()), sum(nbytes[name] for name in self.units.names), self._inner)

    def shared(self, from_mb: float) -> tuple[str, ...]:
        """Those of this rank's units that have several holders and will take `from_mb` MB or more in a checkpoint."""
        table = self.units.table
        total = sum(table.nbytes.values())
        growth = self.checkpoint_bytes / total if total else 1.0
        large = [unit for unit in self.units.names if table.nbytes[unit] * growth >= from_mb * 1e6]
        return tuple(unit for unit in large if len(table.units[unit]) > 1)

    def compare_at_start(self, bar: Callable[[], None]) -> None:
        """Before the first update. In a loop of the user's own, forward passes may have moved buffers on each rank.

        Weights that have moved since the start are compared nevertheless: they may have been loaded on one rank alone.
        But not those that the forward pass of an embedding with max_norm has scaled.
        bar: called before MismatchError is raised where this rank's own copy has diverged: it must not be saved.
        """
        self._recorder.view.refuse_strangers()  # what came after protect() may have put other parameters into it
        watch = self._recorder.watch
        own = watch.copies.own()
        watch.see()
        self._compare("before the first step", bar, own | (watch.copies.own() & self._scaled_in_forward()))

    def compare(self, step: int, bar: Callable[[], None]) -> None:
        """At the end of `step`. What has been seen to change outside of updates is each rank's own by now."""
        self._compare(f"at the end of step {step}", bar, self._recorder.watch.copies.own())

    def _scaled_in_forward(self) -> frozenset[str]:
        """Names of the weights of embeddings with max_norm."""
        kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
        modules = self._recorder.model.modules()
        scaled = {id(one.weight) for one in modules if isinstance(one, kinds) and one.max_norm is not None}
        return frozenset(name for name, one in self._recorder.view.all_names().parameters.items() if id(one) in scaled)

    def _compare(self, when: str, bar: Callable[[], None], own: frozenset[str]) -> None:
        """A collective. Raises MismatchError on every rank if a replica has diverged, which then saves nothing."""
        recorder = self._recorder
        of_extras, own = recorder.extras_by_rank(), own | recorder.buffers.captured
        error, suspect, reasons = compare_replicas(self.units, self._world.rank, self._group, of_extras, when, own)
        recorder.ledger.tell(*reasons)
        if error is not None:
            if suspect:
                bar()
            # Nobody raises, and so begins an incident, before the diverged rank has said that it cannot be a writer.
            if self._world.size > 1:
                with contextlib.suppress(RuntimeError, dist.DistError):  # an error of the group's is no news any more
                    dist.barrier(group=self._group)
            raise error
