"""`TFTRegister`: what a training script registers, enters, resumes with and loops over."""

from __future__ import annotations

import contextlib
import logging
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from lastwords.errors import ConfigError
from lastwords.optim_wrapper.capture.host_copy import HostCopy
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.capture.source import TrainerSource
from lastwords.optim_wrapper.ddp import ddp_buckets
from lastwords.optim_wrapper.launch import forks, switch
from lastwords.optim_wrapper.launch.config import Config, DataMode
from lastwords.optim_wrapper.launch.world import World, next_prefix, restart_count, tells_the_others
from lastwords.optim_wrapper.loop import own_loop
from lastwords.optim_wrapper.loop.loader_changes import onward
from lastwords.optim_wrapper.loop.steps import Steps
from lastwords.optim_wrapper.resume.facts import run_facts
from lastwords.optim_wrapper.resume.resume import Resumed, resume_from
from lastwords.optim_wrapper.resume.resume_point import ResumePoint
from lastwords.optim_wrapper.state.global_names import Naming
from lastwords.optim_wrapper.trainer.common_step import CommonStep
from lastwords.optim_wrapper.trainer.hold import ExceptHook, exit_code_of, is_collective_error, one_line
from lastwords.optim_wrapper.trainer.job_shape import (
    CopyMode,
    GateMode,
    Options,
    declared_units,
    settings_of,
    wrappers_of,
)
from lastwords.optim_wrapper.trainer.protection import Protection
from lastwords.optim_wrapper.trainer.training_hooks import LoopEvents, resume_at
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor.saver import Position
from lastwords.sharding.declare import Unit
from lastwords.vocabulary import Phase

_log = logging.getLogger(__name__)


class TFTRegister:
    """Protects a training run: when a process dies, the survivors' state is saved, and a restart goes on from it.

    `lastwords.protect` is the short form. ctrl_rank_id, ctrl_ip, ctrl_port: the rank that starts the controller, the
    address of its host that all ranks reach, and a free port there (0: any). ckpt_save_path: directory that all ranks
    and the controller see. model: the module as the loop calls it (DDP included). optimizer: an `OptTFTWrapper`.
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
        local_copy: CopyMode = "auto",
    ) -> None:
        self._enabled = switch.switch_from_env().enabled
        self._config = Config.from_env(
            ctrl_rank_id, ctrl_ip, ctrl_port, ckpt_save_path, fallback_path=fallback_path, data=data
        )
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model must be the torch.nn.Module that the loop calls, not a {type(model).__name__}")
        self._optimizers = wrappers_of(optimizer)
        self._options = Options(gate, verify_every, local_copy).suited_to(self._optimizers)
        if self._options.copies_all:
            self._config = self._config.with_copy()
        self._model = model
        self._declared = declared_units(units)
        copies = local_copy is not False
        self._recorder = StepRecorder(model, self._optimizers, extras, local_extras, names, copies=copies)
        watched = self._recorder.view.trained if self._enabled else None
        self._buckets = ddp_buckets.BucketOrder.observe(self._recorder.view.model, watched)
        self._facts: dict[str, Any] = {}
        self._protection: Protection | None = None
        self._excepthook = ExceptHook(self._hold)
        self._world: World | None = None
        self._resumed: Resumed | None = None
        self._steps: Steps | None = None
        self._common: CommonStep | None = None
        self._begun = False
        self._global_step = 0
        self._position: Position | None = None
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
        settings = settings_of(self._config, self._options, len(self._optimizers), world.size)
        protection.start(settings, common.checkpoint_bytes)
        self._protection = protection
        try:
            self._recorder.open_box(protection.use_box, at_gate=common.gate is not None)
            self._recorder.not_exact(self._buckets.share(world.store, next_prefix()))
            self._recorder.begin(0, self._position)
            common.attach(protection, self._ensure_loop)
        except BaseException:
            self._close()
            raise
        self._excepthook.install()
        forks.watch(self)

    def stop(self) -> None:
        """The loop is over on this rank: wait until it is over on all of them, then end the protection."""
        protection = self._protection
        if protection is None or protection.closed:
            return
        try:
            if self._common is not None and protection.stand.phase is Phase.UPDATING:
                self._common.before_step_end()
            if protection.stand.phase in (Phase.UPDATED, Phase.SKIPPED):
                self._end_step(self._recorder.position_under_way)
            protection.agent.left()
        finally:
            self._close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> Literal[False]:
        clean = error is None or (isinstance(error, SystemExit) and exit_code_of(error) == 0)
        leaving = self._protection is not None and self._protection.leaving
        if error is not None and (leaving or not clean):
            self._hold(error)
        else:
            self.stop()
        return False

    def _hold(self, error: BaseException) -> None:
        """An exception leaves the loop: wait until the incident is over, then let the right one through.

        Raises SystemExit where it is only the echo of another rank's end; returns where it is this rank's own.
        """
        protection = self._protection
        if protection is None or protection.closed:
            return
        own = protection.alone or not is_collective_error(error)
        protection.raised(one_line(error), not own)
        self._close()
        if not isinstance(error, SystemExit) or not protection.leaving_by(error):
            protection.depart(own, error)

    def _close(self) -> None:
        self._detach()
        if self._protection is not None:
            self._protection.close()

    def _detach(self) -> None:
        self._excepthook.uninstall()
        for wrapper in self._optimizers:
            wrapper.detach()
        self._recorder.close()
        self._buckets.close()

    def leave_to_parent(self) -> None:
        """In a forked child, which is not protected and answers for nobody; see `forks`."""
        self._detach()
        self._recorder.forget_box()
        forks.inherited(self._protection)
        self._protection = None

    # ------------------------------------------------------------------ resume

    @property
    def optimizer(self) -> OptTFTWrapper:
        """The wrapped optimizer, which the loop, gradient scalers and schedulers use; several are `optimizers`."""
        if len(self._optimizers) != 1:
            raise ConfigError(f"this job has {len(self._optimizers)} optimizers: use tft.optimizers")
        return self._optimizers[0]

    @property
    def optimizers(self) -> tuple[OptTFTWrapper, ...]:
        """All of them, as they were given."""
        return self._optimizers

    @property
    def restarted(self) -> bool:
        """Whether a launcher starts this very job again (torchrun with --max-restarts); the same on all ranks.

        Unlike TORCHELASTIC_RESTART_COUNT, which each node counts for itself. Known once started.
        """
        return restart_count() > 0 if self._protection is None else self._protection.agreement.restarted

    def resume(self, missing_ok: bool | None = None) -> ResumePoint | None:
        """Go on from the newest complete checkpoint below ckpt_save_path; call it before the loop, on all ranks.

        Weights, buffers, optimizer, extras and random number streams are restored here, the data position when the
        loop begins. Raises IncompleteError if there is no checkpoint; with missing_ok=True returns None instead, and
        so it does by itself where `restarted`: then, and where LASTWORDS_JOB names the job, only its own checkpoints
        count, and those from which it has resumed, and ConfigError says that there are only others. What another world
        size or parallel layout has saved is put together anew while it is read; that is never `exact`.
        Raises MismatchError if it is of another model or optimizer, FormatError if it is damaged: do not train then.
        """
        if self._world is None:
            raise ConfigError("resume() has to be called inside `with tft:` (or after tft.start())")
        if self._begun or self._global_step:
            raise ConfigError("resume() has to be called before the training loop begins")
        agreed = self._protection.agreement if self._protection else None
        if not self._enabled:
            self._recorder.agree_units(self._world, next_prefix(), self._declared)
        self._resumes += 1
        resumed = resume_from(
            self._config.roots,
            self._world,
            self._recorder,
            self._facts,
            key=f"{agreed.prefix if agreed else next_prefix()}/resume/{self._resumes}",
            agreed=agreed,
            missing_ok=self.restarted if missing_ok is None else missing_ok,
            named=bool(self._config.job),
        )
        if resumed is None:
            return None
        self._resumed, self._global_step, self._position = resumed, resumed.global_step, resumed.position
        self._recorder.begin(resumed.global_step, self._position, step_regions=resumed.regions)
        self._recorder.not_exact(resumed.reasons)
        reasons, (epoch, step) = tuple(map(str, resumed.reasons)), resumed.position or (None, None)
        point = ResumePoint(epoch, step, resumed.global_step, not reasons, reasons, str(resumed.path), resumed.groups)
        if self._world.rank == 0:
            own_loop.look_at_first_forward(self._model, self._recorder.rng, self._global_step, lambda: not self._steps)
        return point

    def restore_streams(self) -> None:
        """In a resumed loop of one's own: put the random streams back to where `resume()` found them.

        For right before the first step, after whatever draws on the way there: building a DataLoader's iterator, say,
        and fetching the batches that were done. Does nothing where there is nothing to put back: no checkpoint, or one
        without this rank's streams, and `ResumePoint.reasons` has said so. ConfigError in `steps()`, which does it by
        itself, and once a step has ended.
        """
        if self._world is None or self._steps is not None or self._begun:
            raise ConfigError("restore_streams() is for loops of one's own, between resume() and their first step")
        if self._resumed is not None and self._resumed.regions:
            regions = own_loop.without_the_loaders(self._resumed.regions)
            self._recorder.not_exact(self._recorder.rng.restore(regions))

    # ------------------------------------------------------------------ the loop

    def steps(self, loader: Iterable[Any], epochs: int, accumulate: int = 1) -> Iterator[tuple[int, int, Any]]:
        """(epoch, step, batch) for every batch, from where the run stands; both count from 1.

        A step is `accumulate` batches (the last one of an epoch may have fewer) and ends when the next batch is asked
        for; `ends_step` tells whether the batch in hand is its last. All ranks must have the same number of steps;
        ConfigError otherwise, and at once for what cannot work. Calls `set_epoch(epoch - 1)` where the sampler has it.
        """
        if self._world is None:
            raise ConfigError("steps() has to be called inside `with tft:` (or after tft.start())")
        if self._begun or self._steps is not None:
            raise ConfigError("the training loop has begun already; call steps() once, before anything is trained")
        resumed = self._resumed
        here = onward(resumed, loader, accumulate, self._world.size)
        self._steps = Steps(
            loader,
            epochs,
            accumulate=accumulate,
            events=LoopEvents(self._recorder, self._end_step, self._protection),
            resume=None if resumed is None else resume_at(resumed, self._recorder),
            data=self._config.data,
            show_progress=self._world.rank == 0,
            onward=here,
            placed=resumed is not None and bool(resumed.regions) and loader in self._recorder.local_extras,
        )
        self._facts["data"] = {**self._steps.facts(), "world_size": self._world.size}
        return self._iterate(self._steps, loader, known_length=here.carried is None)

    def _iterate(self, steps: Steps, loader: object, known_length: bool) -> Iterator[tuple[int, int, Any]]:
        """The loop begins when its first batch is asked for: what is drawn until then belongs to no step."""
        self._begun, resumed = True, self._resumed
        self._recorder.not_exact([*steps.reasons, *self._buckets.reasons])
        self._recorder.know(loader, steps.generators)
        if self._protection is not None:
            gated = self._common is not None and self._common.gate is not None
            self._recorder.open_box(self._protection.use_box, at_gate=gated)
        self._recorder.begin(
            self._global_step,
            self._position,
            epoch_start=None if resumed is None else resumed.epoch_start,
            step_regions=None if resumed is None else resumed.regions,
            steps_per_epoch=steps.steps_per_epoch if known_length else 0,
        )
        if self._protection is not None and self._common is not None:
            self._common.begin_loop()
            shape = (steps.steps_per_epoch, steps.epochs) if known_length else (0, 0)
            self._protection.agent.begin_loop(*shape, self._global_step)
        yield from steps

    @property
    def ends_step(self) -> bool:
        """True if the batch in hand is the last one of its step: the one after which the optimizer updates."""
        return self._steps is None or self._steps.ends_step

    def step_end(self, epoch: int | None = None, step: int | None = None) -> None:
        """The step is over, whether or not the optimizer updated in it; what follows (a log) changes nothing of it.

        A loop of one's own calls it once a step on every rank. epoch, step: what it calls the step, both counted from
        1 and the same on every rank, or neither; `resume()` gives them back. Inside `steps`, which ends a step when the
        next batch is asked for, it ends the step now; ConfigError before its last batch, and the second time.
        """
        position = own_loop.named(epoch, step)
        if self._steps is not None:
            self._recorder.ends_early = True
            return self._steps.end_early(position)
        if self._world is None:
            raise ConfigError("step_end() has to be called inside `with tft:` (or after tft.start())")
        if not self._begun:
            self._ensure_loop()
        if self._protection is None:
            self._global_step += 1
            return
        self._recorder.names_steps = position is not None
        self._end_step(position)

    @contextlib.contextmanager
    def step(self, epoch: int | None = None, step: int | None = None) -> Iterator[None]:
        """`step_end` at the block's exit, if it is that of a step's last batch and no exception leaves it."""
        yield
        if self.ends_step:
            self.step_end(epoch, step)

    def _ensure_loop(self) -> None:
        """A loop of the user's own begins with its first optimizer step or step_end."""
        if not self._begun:
            self._begun = True
            regions = {} if self._resumed is None else self._resumed.regions
            self._recorder.not_exact(own_loop.left_to_the_loop(regions, self._recorder.rng.own))
            if self._protection is not None and self._common is not None:
                self._common.begin_loop()
                self._protection.agent.begin_loop(0, 0, self._global_step)

    def _end_step(self, position: Position | None) -> None:
        self._global_step += 1
        common = self._common
        if self._protection is None or common is None:
            return
        common.before_step_end()

        def commit(step: int) -> None:
            self._recorder.committed(step, position)
            self._recorder.not_exact(self._buckets.step_ended(step))

        self._protection.agent.end_step(commit)
        common.after_step_end(self._global_step)

    def _make_source(self, box_path: Callable[[int], Path]) -> TrainerSource:
        # Where ranks hold different units their buckets may differ too: each unit has its own writer's.
        buckets = None if self._recorder.units.pure else self._buckets.record
        copy = HostCopy() if self._options.copies_all else None
        return self._recorder.make_source(box_path, self._manifest_facts, buckets, copy)

    def _manifest_facts(self, step: int) -> dict[str, Any]:
        if not self._recorder.units.pure:
            return dict(self._facts)
        return {**self._facts, "buckets": self._buckets.record(step)}
