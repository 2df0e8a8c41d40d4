"""Who holds what, as all ranks have agreed at the start, and what follows from it: a gate, replicas to compare."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.launch.config import Config
from lastwords.optim_wrapper.launch.space import checkpoint_bytes
from lastwords.optim_wrapper.launch.world import World, next_prefix
from lastwords.optim_wrapper.state.rank_units import RankUnits
from lastwords.optim_wrapper.trainer.gate import Gate
from lastwords.optim_wrapper.trainer.job_shape import Options, announce, needs_gate
from lastwords.optim_wrapper.trainer.replica_check import ReplicaCheck, check_group
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.sharding.agree import STORE_WAIT_S
from lastwords.sharding.declare import Unit
from lastwords.sharding.group_info import value_is_shared, write_group_info


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
        group = check_group(world.size, None if self.gate is None else self.gate.group)
        self._check = ReplicaCheck(self.units, world.rank, world.size, group, recorder.extras_by_rank)

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
        error, suspect, reasons = self._check.run(when, own | self._recorder.buffers.captured)
        self._recorder.ledger.tell(*reasons)
        if error is not None:
            if suspect:
                bar()
            # Nobody raises, and so begins an incident, before the diverged rank has said that it cannot be a writer.
            self._check.meet()
            raise error
