"""`TFTRegister`: what a training script registers, enters, resumes with and loops over."""

from __future__ import annotations

import dataclasses
import logging
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lastwords.errors import ConfigError
from lastwords.optim_wrapper import ddp_buckets, own_loop, switch
from lastwords.optim_wrapper.common_step import CommonStep
from lastwords.optim_wrapper.config import Config, DataMode
from lastwords.optim_wrapper.facts import run_facts
from lastwords.optim_wrapper.global_names import Naming
from lastwords.optim_wrapper.global_samples import carry
from lastwords.optim_wrapper.hold import ExceptHook, exit_code_of, is_collective_error, one_line
from lastwords.optim_wrapper.host_copy import HostCopy
from lastwords.optim_wrapper.job_shape import GateMode, Options, declared_units, wrappers_of
from lastwords.optim_wrapper.protection import Protection
from lastwords.optim_wrapper.rank_local import RngCapture
from lastwords.optim_wrapper.recorder import StepRecorder
from lastwords.optim_wrapper.resume import Resumed, resume_from
from lastwords.optim_wrapper.source import TrainerSource
from lastwords.optim_wrapper.steps import ResumeAt, Steps
from lastwords.optim_wrapper.training_hooks import LoopEvents
from lastwords.optim_wrapper.world import World, next_prefix, restart_count, tells_the_others
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor.black_box import RegionCopy
from lastwords.processor.core import ProcessorOptions
from lastwords.processor.saver import Position
from lastwords.sharding.declare import Unit
from lastwords.vocabulary import Phase

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a resumed run stands: `step` of `epoch` (both 1-based) was the last one done, `global_step` in all.

    exact: every later step will be bitwise what it would have been; if not, `reasons` says why, one sentence each.
    In a loop without `steps()` that holds if the loop sets its data back and draws no random numbers on the way.
    """

    epoch: int
    step: int
    global_step: int
    exact: bool = True
    reasons: tuple[str, ...] = ()
    path: str = ""


class TFTRegister:
    """Protects a training run: when a process dies, the survivors' state is saved, and a restart goes on from it.

    ctrl_rank_id, ctrl_ip, ctrl_port: the rank that starts the controller, the address of its host that all ranks
    reach, and a free port there. ckpt_save_path: directory that all ranks and the controller see.
    model: the module as the loop calls it (DDP included). optimizer: an `OptTFTWrapper` around its optimizer.
    extras: name -> object with state_dict()/load_state_dict() (a scheduler, a GradScaler) or a dict of plain
    values, the same on every rank. local_extras: likewise, but different on each rank.
    fallback_path: second directory for last words, used when the first one refuses (a full disk).
    data: "refetch" fetches and drops the batches that were done when a loader with workers is resumed (exact also
    where the dataset draws random numbers); "skip" skips them by index.
    units: who holds what, where that cannot be seen from the tensors (tensor parallelism by hand, pipeline stages,
    experts): `units_from_mesh(...)`, or `Unit`s of one's own, the same on every rank. DDP, DTensor layouts (FSDP2,
    HSDP, parallelize_module) and ZeroRedundancyOptimizer need none. names: see `GlobalNames`, for stages and experts.
    gate, verify_every, local_copy: see `Options`; they matter where not every rank holds everything, or where there are
    several optimizers (`optimizer` is a list of wrappers then: each of them steps at most once in a step).

    Use as a context manager. The constructor does no I/O; it raises ConfigError for what cannot work. All methods
    belong to the training thread. With `MS_ENABLE_TFT='{TTP:0}'` nothing is started and nothing is protected, but
    `steps`, `step_end` and `resume` work.
    """

    @tells_the_others
    def __init__(
        self,
        ctrl_rank_id: int,
        ctrl_ip: str,
        ctrl_port: int,
        ckpt_save_path: str | os.PathLike[str],
        *,
        model: torch.nn.Module,
        optimizer: OptTFTWrapper | Sequence[OptTFTWrapper],
        extras: Mapping[str, Any] | None = None,
        local_extras: Mapping[str, Any] | None = None,
        fallback_path: str | os.PathLike[str] | None = None,
        data: DataMode = "refetch",
        units: Sequence[Unit] | None = None,
        names: Naming | None = None,
        gate: GateMode = "auto",
        verify_every: int = 0,
        local_copy: bool = False,
    ) -> None:
        self._enabled = switch.switch_from_env().enabled
        self._config = Config.from_env(
            ctrl_rank_id, ctrl_ip, ctrl_port, ckpt_save_path, fallback_path=fallback_path, data=data
        )
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"model must be the torch.nn.Module that the loop calls (DDP included), not a {type(model).__name__}"
            )
        self._options = Options(gate, verify_every, local_copy)
        if local_copy:
            self._config = dataclasses.replace(self._config, processor=ProcessorOptions(has_copy=True))
        self._model = model
        self._optimizers = wrappers_of(optimizer)
        self._declared = declared_units(units)
        self._recorder = StepRecorder(model, self._optimizers, extras, local_extras, names)
        self._buckets = ddp_buckets.BucketOrder.observe(model)
        self._facts: dict[str, Any] = {}
        self._protection: Protection | None = None
        self._excepthook = ExceptHook(self._hold)
        self._world: World | None = None
        self._resumed: Resumed | None = None
        self._steps: Steps | None = None
        self._common: CommonStep | None = None
        self._begun = False
        self._global_step = 0
        self._position = Position(1, 0)
        self._resumes = 0

    # ------------------------------------------------------------------ life

    def __enter__(self) -> TFTRegister:
        self.start()
        return self

    def start(self) -> None:
        """Register with the controller (rank ctrl_rank_id starts it first); returns when all ranks are there.

        For scripts without `with`: call `stop()` after the loop. Raises ConfigError, StorageError or UnavailableError
        with what to do about it; nothing is left running then.
        """
        if self._world is not None:
            raise ConfigError("this TFTRegister has been entered already; make a new one for another run")
        self._world = world = World()
        self._facts = run_facts(self._model, self._recorder.view.optimizer, world.backend)
        if not self._enabled:
            _log.info("MS_ENABLE_TFT switches TTP off: this run is not protected")
            return
        common = self._common = CommonStep(
            world, self._recorder, self._optimizers, self._declared, self._options, self._config
        )
        protection = Protection(self._config, world, self._make_source, common.units.names)
        protection.start(self._settings())
        self._protection = protection
        try:
            protection.use_box(lambda path: self._recorder.open(path, at_gate=common.gate is not None))
            self._recorder.not_exact(self._buckets.reasons)
            self._recorder.begin(0, self._position)
            common.attach(protection, self._ensure_loop)
        except BaseException:
            self._close()
            raise
        self._excepthook.install()

    def stop(self) -> None:
        """The loop is over on this rank: wait until it is over on all of them, then end the protection."""
        self.__exit__(None, None, None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> Literal[False]:
        protection = self._protection
        if protection is None or protection.closed:
            return False
        clean = error is None or (isinstance(error, SystemExit) and exit_code_of(error) == 0)
        if not clean or protection.leaving:
            if error is not None:
                self._hold(error)
            return False
        try:
            if self._common is not None and protection.stand.phase is Phase.UPDATING:
                self._common.before_step_end()
            if protection.stand.phase in (Phase.UPDATED, Phase.SKIPPED):
                self._end_step(self._recorder.position_under_way)
            protection.agent.left()
        finally:
            self._close()
        return False

    def _hold(self, error: BaseException) -> None:
        """An exception leaves the loop: wait until the incident is over, then let the right one through.

        Raises SystemExit where the exception is only the echo of another rank's end; returns where it is this
        rank's own, which its user wants to see.
        """
        protection = self._protection
        if protection is None or protection.closed:
            return
        own = not is_collective_error(error)
        protection.raised(one_line(error), not own)
        self._close()
        if not isinstance(error, SystemExit) or not protection.leaving_by(error):
            protection.depart(own, exit_code_of(error))

    def _close(self) -> None:
        self._excepthook.uninstall()
        for wrapper in self._optimizers:
            wrapper.detach()
        self._recorder.close()
        if self._protection is not None:
            self._protection.close()

    # ------------------------------------------------------------------ resume

    def resume(self, missing_ok: bool | None = None) -> ResumePoint | None:
        """Go on from the newest complete checkpoint below ckpt_save_path; call it before the loop, on all ranks.

        Weights, buffers, optimizer, extras and random number streams are restored here, the data position when the
        loop begins. Raises IncompleteError if there is no checkpoint; with missing_ok=True returns None instead, and
        so it does by itself in workers that torchrun has restarted, which take only checkpoints of their own job. What
        another world size or parallel layout has saved is put together anew while it is read; that is never `exact`.
        Raises MismatchError if it is of another model or optimizer, FormatError if it is damaged: do not train then.
        """
        if self._world is None:
            raise ConfigError("resume() has to be called inside `with tft:` (or after tft.start())")
        if self._begun or self._global_step:
            raise ConfigError("resume() has to be called before the training loop begins")
        if not self._enabled:
            self._recorder.agree_units(self._world, next_prefix(), self._declared)
        restarted = restart_count() > 0
        self._resumes += 1
        protection = self._protection
        resumed = resume_from(
            [path for path in (self._config.ckpt_save_path, self._config.fallback_path) if path is not None],
            self._world,
            self._recorder,
            self._facts,
            key=f"{protection.agreement.prefix if protection else next_prefix()}/resume/{self._resumes}",
            only_job=protection.agreement.job if restarted and protection else None,
            missing_ok=restarted if missing_ok is None else missing_ok,
        )
        if resumed is None:
            return None
        self._resumed = resumed
        self._global_step = resumed.global_step
        self._position = Position(resumed.epoch, resumed.step)
        self._recorder.begin(resumed.global_step, self._position, step_regions=resumed.regions)
        self._recorder.under_way(Position(resumed.epoch, resumed.step + 1))
        self._recorder.not_exact(resumed.reasons)
        point = ResumePoint(
            resumed.epoch,
            resumed.step,
            resumed.global_step,
            exact=not resumed.reasons,
            reasons=tuple(resumed.reasons),
            path=str(resumed.path),
        )
        if self._world.rank == 0:
            _log.info("resumed after step %s from %s", point.global_step, point.path)
            for reason in point.reasons:
                _log.warning("not exact, because %s", reason)
            own_loop.look_at_first_forward(self._model, self._recorder.rng, point.global_step, self._is_own_loop)
        return point

    def _is_own_loop(self) -> bool:
        return self._steps is None

    # ------------------------------------------------------------------ the loop

    def steps(self, loader: Iterable[Any], epochs: int, accumulate: int = 1) -> Iterator[tuple[int, int, Any]]:
        """Yields (epoch, step, batch) for every batch, from where the run stands; both count from 1.

        A step is `accumulate` batches (the last one of an epoch may have fewer) and ends when the next batch is asked
        for; `ends_step` tells whether the batch in hand is its last. All ranks must have the same number of steps;
        ConfigError otherwise. Calls `set_epoch(epoch - 1)` where the sampler has it.
        """
        if self._world is None:
            raise ConfigError("steps() has to be called inside `with tft:` (or after tft.start())")
        if self._begun:
            raise ConfigError("the training loop has begun already; call steps() once, before anything is trained")
        self._begun = True
        resumed = self._resumed
        carried, why = None, ""
        if resumed is not None:
            carried, why = carry(resumed.facts, resumed.epoch, resumed.step, loader, accumulate, self._world.size)
        steps = self._steps = Steps(
            loader,
            epochs,
            accumulate=accumulate,
            events=LoopEvents(self._recorder, self._end_step),
            resume=None if resumed is None else self._resume_at(resumed),
            data=self._config.data,
            show_progress=self._world.rank == 0,
            carried=carried,
            not_carried=why,
        )
        self._facts["data"] = {**steps.facts(), "world_size": self._world.size}
        self._recorder.not_exact([*steps.reasons, *self._buckets.reasons])
        self._recorder.rng = RngCapture(generators=steps.generators)
        if self._protection is not None:
            at_gate = self._common is not None and self._common.gate is not None
            self._protection.use_box(lambda path: self._recorder.open(path, at_gate=at_gate))
        self._recorder.begin(
            self._global_step,
            self._position,
            epoch_start=None if resumed is None else resumed.epoch_start,
            step_regions=None if resumed is None else resumed.regions,
            needs_epoch_start=True,
        )
        if self._protection is not None and self._common is not None:
            self._common.compare("before the first step")
            shape = (steps.steps_per_epoch, epochs) if carried is None else (0, 0)
            self._protection.agent.begin_loop(*shape, self._global_step)
        yield from steps

    @property
    def ends_step(self) -> bool:
        """True if the batch in hand is the last one of its step: the one after which the optimizer updates."""
        return self._steps is None or self._steps.ends_step

    def step_end(self, epoch: int, step: int) -> None:
        """In a loop of one's own: global step (epoch, step) is over, whether or not the optimizer updated in it.

        Call it once a step on every rank, after everything that belongs to the step. Counts from 1. ConfigError
        inside `steps`, which does it by itself.
        """
        if self._steps is not None:
            raise ConfigError("step_end() is for loops of one's own; steps() ends each step by itself")
        if type(epoch) is not int or type(step) is not int or epoch < 1 or step < 1:
            own_loop.refuse_position(epoch, step)
        if self._world is None:
            raise ConfigError("step_end() has to be called inside `with tft:` (or after tft.start())")
        if not self._begun:
            self._ensure_loop()
        if self._protection is None:
            self._global_step += 1
            return
        self._end_step(Position(epoch, step))
        self._recorder.under_way(Position(epoch, step + 1))

    # ------------------------------------------------------------------ inside

    def _ensure_loop(self) -> None:
        """A loop of the user's own begins with its first optimizer step or step_end."""
        if not self._begun:
            self._begun = True
            if self._protection is not None and self._common is not None:
                self._common.compare("before the first step")
                self._protection.agent.begin_loop(0, 0, self._global_step)

    def _end_step(self, position: Position) -> None:
        self._global_step += 1
        common = self._common
        if self._protection is None or common is None:
            return
        common.before_step_end()

        def commit(step: int) -> None:
            self._recorder.committed(step, position)
            self._buckets.step_ended(step)

        self._protection.agent.end_step(commit)
        common.after_step_end(self._global_step)

    def _resume_at(self, resumed: Resumed) -> ResumeAt:
        def back_to(regions: Mapping[str, RegionCopy]) -> Callable[[], None] | None:
            return (lambda: self._recorder.not_exact(self._recorder.rng.restore(regions))) if regions else None

        return ResumeAt(resumed.epoch, resumed.step, back_to(resumed.epoch_start), back_to(resumed.regions))

    def _settings(self) -> dict[str, Any]:
        config = self._config
        return {
            "ctrl_rank_id": config.ctrl_rank_id,
            "ctrl_ip": config.ctrl_ip,
            "ctrl_port": config.ctrl_port,
            "ckpt_save_path": str(config.ckpt_save_path),
            "fallback_path": str(config.fallback_path),
            "data": config.data,
            "gate": self._options.gate,
            "verify_every": self._options.verify_every,
            "local_copy": self._options.local_copy,
            "optimizers": len(self._optimizers),
            "world_size": self._world.size if self._world is not None else 0,
        }

    def _make_source(self, box_path: Callable[[int], Path]) -> TrainerSource:
        # Where ranks hold different units their buckets may differ too: each unit has its own writer's.
        buckets = None if self._recorder.units.pure else self._buckets.record
        copy = HostCopy() if self._options.local_copy else None
        return self._recorder.make_source(box_path, self._manifest_facts, buckets, copy)

    def _manifest_facts(self, step: int) -> dict[str, Any]:
        if not self._recorder.units.pure:
            return dict(self._facts)
        return {**self._facts, "buckets": self._buckets.record(step)}
