"""What keeps the ranks of a job in one step although they hold different state: units, gate, one update, replicas."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.device_fence import device_fence
from lastwords.optim_wrapper.launch.config import Config
from lastwords.optim_wrapper.launch.space import checkpoint_bytes
from lastwords.optim_wrapper.launch.world import World, next_prefix
from lastwords.optim_wrapper.several_optimizers import SeveralOptimizers
from lastwords.optim_wrapper.state.rank_units import RankUnits
from lastwords.optim_wrapper.trainer.gate import Gate, GatedStep
from lastwords.optim_wrapper.trainer.job_shape import Options, announce, needs_gate
from lastwords.optim_wrapper.trainer.protection import Protection
from lastwords.optim_wrapper.trainer.replica_check import ReplicaCheck, check_group
from lastwords.optim_wrapper.trainer.training_hooks import UpdateHooks
from lastwords.optim_wrapper.wrapper import OptTFTWrapper, StepHooks
from lastwords.sharding.agree import STORE_WAIT_S
from lastwords.sharding.declare import Unit
from lastwords.sharding.group_info import value_is_shared, write_group_info
from lastwords.vocabulary import Phase


class CommonStep:
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
        self._optimizers = tuple(optimizers)
        self._verify_every = recorder.watch.verify_every = options.verify_every
        self._protection: Protection | None = None
        self._gated: GatedStep | None = None
        self._several: SeveralOptimizers | None = None
        prefix = next_prefix()
        self.units: RankUnits = recorder.agree_units(world, prefix, declared)
        if world.rank == 0:
            announce(self.units.table, world.size, options, len(self._optimizers))
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
        nbytes, inner = self.units.table.nbytes, [wrapper.inner for wrapper in self._optimizers]
        return checkpoint_bytes(sum(nbytes.values()), sum(nbytes[name] for name in self.units.names), inner)

    def attach(self, protection: Protection, ensure_loop: Callable[[], None]) -> None:
        """From now on each optimizer's step is reported to `protection`."""
        self._protection = protection
        if self.gate is not None:
            self._gated = GatedStep(
                self.gate, protection.agent, self._recorder.tentative, lambda: self._recorder.position_at_gate
            )
        fence = device_fence([wrapper.inner for wrapper in self._optimizers])
        # A ZeroRedundancyOptimizer hands its weights round after it has written its own.
        whole = all(wrapper.writer is wrapper.inner for wrapper in self._optimizers)
        watch = self._recorder.watch
        updated = watch.updated if whole else _nothing_to_mark
        hooks: StepHooks = UpdateHooks(
            protection, ensure_loop, fence, self._gated, self._recorder.not_exact, watch.before_update, updated
        )
        if len(self._optimizers) > 1:
            self._several = SeveralOptimizers(hooks, len(self._optimizers))
        for number, wrapper in enumerate(self._optimizers):
            wrapper.attach(hooks if self._several is None else self._several.hooks(number))
            wrapper.watch_groups(self.units.admit)

    def begin_loop(self) -> None:
        """Before the first update. In a loop of one's own, forward passes may have moved buffers on each rank.

        Weights that have moved since the start are compared nevertheless: they may have been loaded on one rank alone.
        """
        own = self._recorder.watch.copies.own()
        self._recorder.watch.see()
        self._compare("before the first step", own | self._recorder.buffers.captured)

    def before_step_end(self) -> None:
        """The loop ends its step: its update is over, or there was none, and then its gate comes now."""
        if self._several is not None:
            stepped = self._several.end_step()
            inner = [wrapper.inner for wrapper in self._optimizers]
            self._recorder.gradients.in_turns(
                [one for number, one in enumerate(inner) if number in stepped],
                [one for number, one in enumerate(inner) if number not in stepped],
            )
        gated, protection = self._gated, self._protection
        if gated is not None and protection is not None and protection.stand.phase is Phase.COMPUTING:
            gated.without_update()
        self._recorder.updated = protection is None or protection.stand.phase is Phase.UPDATED

    def after_step_end(self, step: int) -> None:
        """Every so many steps the replicas are compared."""
        if self._verify_every and step % self._verify_every == 0:
            own = self._recorder.watch.copies.own() | self._recorder.buffers.captured
            self._compare(f"at the end of step {step}", own)

    def _compare(self, when: str, own: frozenset[str]) -> None:
        """A collective. MismatchError on every rank if a replica is none; one that is wrong saves nothing any more."""
        error, suspect, reasons = self._check.run(when, own)
        self._recorder.not_exact(reasons)
        if error is not None:
            if suspect and self._protection is not None:
                self._protection.agent.corrupt()
            # Nobody raises, and so begins an incident, before the wrong one has said that nothing is to be had from it.
            self._check.meet()
            raise error


def _nothing_to_mark() -> None:
    """What follows an update whose end is not that of the optimizer's step."""
