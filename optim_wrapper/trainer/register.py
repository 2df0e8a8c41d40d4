"""`TFTRegister`: what a training script registers, enters, resumes with and loops over."""

from __future__ import annotations

import contextlib
import logging
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from lastwords import log_lines
from lastwords.errors import ConfigError
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.ddp import ddp_buckets
from lastwords.optim_wrapper.launch import config
from lastwords.optim_wrapper.launch.config import Config, DataMode
from lastwords.optim_wrapper.launch.drill_plan import DRILL
from lastwords.optim_wrapper.launch.world import World, next_prefix, restart_count, tells_the_others
from lastwords.optim_wrapper.loop import own_loop
from lastwords.optim_wrapper.loop.batches import Batches
from lastwords.optim_wrapper.loop.loader_changes import onward
from lastwords.optim_wrapper.loop.steps import Steps
from lastwords.optim_wrapper.resume.facts import run_facts
from lastwords.optim_wrapper.resume.resume import resume_from
from lastwords.optim_wrapper.resume.resume_choice import ResumePoint, drilled_beside
from lastwords.optim_wrapper.state.global_names import Naming
from lastwords.optim_wrapper.trainer.checkpoint_config import (
    CheckpointConfig,
    ModelCheckpoint,
    checked_schedule,
    schedule_of,
)
from lastwords.optim_wrapper.trainer.hold import exit_code_of
from lastwords.optim_wrapper.trainer.job_shape import (
    CopyMode,
    GateMode,
    Options,
    declared_units,
    forgotten_by,
    wrappers_of,
)
from lastwords.optim_wrapper.trainer.run import ProtectedRun, Run
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.sharding.declare import Unit
from lastwords.vocabulary import NO_SCHEDULE

_log = logging.getLogger(__name__)


class TFTRegister:
    """Protects a training run: when a process dies, the survivors' state is saved, and a restart goes on from it.

    `lastwords.protect` is the short form. Use it as a context manager. The constructor does no I/O. All methods belong
    to the training thread. With `MS_ENABLE_TFT='{TTP:0}'` nothing is started and nothing is protected, but `steps`,
    `step_end` and `resume` work.

    Args:
        ctrl_rank_id: the rank that starts the controller.
        ctrl_ip: the address of its host, which all ranks reach.
        ctrl_port: a free port there; 0: any.
        ckpt_save_path: directory for checkpoints, which all ranks and the controller see.
        model: the module as the loop calls it (DDP included).
        optimizer: an `OptTFTWrapper`, or a list of them, each of which steps at most once in a step.
        extras: name -> object with state_dict()/load_state_dict() (a scheduler, a GradScaler) or a dict of plain
            values, the same on every rank.
        local_extras: likewise, but different on each rank.
        fallback_path: second directory for last words, used when the first one refuses (a full disk).
        data: "refetch" fetches and drops the batches that were done when a loader with workers is resumed (exact also
            where the dataset draws random numbers); "skip" skips them by index.
        units: who holds what, where that cannot be seen from the tensors (tensor parallelism by hand, pipeline stages,
            experts): `units_from_mesh(...)`, or `Unit`s of one's own, the same on every rank. DDP, DTensor layouts
            (FSDP2, HSDP, parallelize_module) and ZeroRedundancyOptimizer need none.
        names: a function from a tensor's name in this rank's model to its name in the job, for stages and experts.
        gate: "auto" adds a collective before an update where not every rank holds everything or there are several
            optimizers; "existing": the loop has one of its own, which every rank enters once its gradients are final,
            and no rank updates before all have.
        verify_every: compare the replicas every so many steps; 0: only when the loop begins.
        copy: "auto" copies, at each step's end, what has been seen to change outside of `optimizer.step()`; True copies
            all state, while the next step is computed; "now" copies it within the step's end; a number is True for
            every so many steps. False copies nothing, and reports such changes.
        forget: names of attributes that nothing reads again after a step, as reasons name them (`*`: any part of a
            name). They are neither saved nor a reason. Stored with each checkpoint, and shown by `lastwords inspect`.
        variables: True: what objects, lists and dicts hold in local variables of the functions that run the loop is
            state as well (see docs/exact-resume.md): once it has changed it is saved, and put back into the same
            objects. A dict names the objects of which that holds instead, such as a framework's callbacks (see
            `AttributesOf`).
        repeats: where `ResumePoint.begun` is False, the resumed loop does again what it does between step_end() and
            step_begin(), so nothing is lost if a rank dies in between. What it has set in attributes between resume()
            and its first step_begin() is overwritten there once more.

    Raises:
        ConfigError: what cannot work.
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
        copy: CopyMode = "auto",
        forget: Sequence[str] = (),
        variables: bool | Mapping[str, Any] = False,
        repeats: bool = False,
    ) -> None:
        log_lines.begin(os.environ.get("RANK", ""))
        self._enabled = config.switch_from_env().enabled
        self._config = Config.from_env(
            ctrl_rank_id, ctrl_ip, ctrl_port, ckpt_save_path, fallback_path=fallback_path, data=data
        )
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model must be the torch.nn.Module that the loop calls, not a {type(model).__name__}")
        self._optimizers = wrappers_of(optimizer)
        own = Options(
            gate, verify_every, copy, forgotten_by(forget), False if isinstance(variables, Mapping) else variables
        )
        self._options = own.suited_to(self._optimizers)
        if self._options.copies_all:
            self._config = self._config.with_copy()
        self._model = model
        self._declared = declared_units(units)
        copies = copy is not False
        self._recorder = StepRecorder(
            model, self._optimizers, extras, local_extras, names, copies=copies, forget=forget, variables=variables
        )
        watched = self._recorder.view.trained if self._enabled else None
        self._buckets = ddp_buckets.BucketOrder(self._recorder.view.model, watched, self._recorder.ledger)
        self._entered = False
        self._run: Run | None = None
        self._resumes = 0
        self._asks = False
        self._on_leave: list[Callable[[], object]] = []
        self._recorder.loop.repeats = repeats
        loaders = [one for one in (local_extras or {}).values() if isinstance(one, Batches)]
        if len(loaders) > 1:
            raise ConfigError(f"local_extras has {len(loaders)} Batches: a loop draws its batches from one loader")
        self._batches = loaders[0] if loaders else None
        for one in loaders:
            one.join(lambda: self._started("iter(Batches)"))
            if one.loader is not None:
                self._recorder.attributes.know(one.loader)

    # ------------------------------------------------------------------ life

    def __enter__(self) -> TFTRegister:
        self.start()
        return self

    def start(self) -> None:
        """Register with the controller (rank ctrl_rank_id starts it first); returns when all ranks are there.

        For scripts without `with`: call `stop()` after the loop. Where it raises, nothing is left running.

        Raises:
            ConfigError, StorageError, UnavailableError: with what to do about it.
        """
        if self._entered:
            raise ConfigError("this TFTRegister has already been entered; create a new TFTRegister for another run")
        world, recorder, buckets = World(), self._recorder, self._buckets
        self._entered = True
        facts = run_facts(self._model, recorder.view.optimizer, world.backend)
        if not self._enabled:
            _log.info("MS_ENABLE_TFT switches TTP off: this run is not protected")
            self._run = Run(world, recorder, buckets, facts)
            return
        kind = ProtectedRun
        if DRILL in os.environ:
            from lastwords.optim_wrapper.trainer.drilled_run import DrilledRun as kind  # else nobody needs it
        self._run = kind(
            world,
            recorder,
            buckets,
            facts,
            config=self._config,
            options=self._options,
            optimizers=self._optimizers,
            declared=self._declared,
        )
        self._run.resumes = self._asks
        for function in self._on_leave:
            self._run.on_leave(function)

    def stop(self) -> None:
        """The loop is over on this rank: wait until it is over on all of them, then end the protection."""
        if self._run is not None:
            self._run.stop()

    def failed(self, error: BaseException) -> None:
        """An exception has left the loop, on this rank: for scripts without `with`, before they raise it again.

        Waits until the incident is over.

        Raises:
            SystemExit: the exception is only the echo of another rank's end.
        """
        self.__exit__(type(error), error, error.__traceback__)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> Literal[False]:
        clean = error is None or (isinstance(error, SystemExit) and exit_code_of(error) == 0)
        run = self._run
        if run is None:  # start() has refused; its error, or the user's own, is what matters
            return False
        if error is not None and (run.leaving or not clean):
            run.fail(error)
        else:
            run.stop()
        return False

    def _started(self, method: str) -> Run:
        if self._run is None:
            raise ConfigError(f"{method}() has to be called inside `with tft:` (or after tft.start())")
        return self._run

    # ------------------------------------------------------------------ resume

    @property
    def optimizer(self) -> OptTFTWrapper:
        """The wrapped optimizer, which the loop, gradient scalers and schedulers use; several are `optimizers`."""
        if len(self._optimizers) != 1:
            raise ConfigError(f"this job has {len(self._optimizers)} optimizers: use tft.optimizers")
        return self._optimizers[0]

    @property
    def optimizers(self) -> tuple[OptTFTWrapper, ...]:
        """All wrapped optimizers, in the order in which they were given."""
        return self._optimizers

    @property
    def restarted(self) -> bool:
        """Whether a launcher starts this very job again (torchrun with --max-restarts); the same on all ranks.

        Unlike TORCHELASTIC_RESTART_COUNT, which each node counts for itself. Known once started.
        """
        self._asks = True
        if self._run is None:
            return restart_count() > 0
        self._run.resumes = True
        return self._run.restarted

    def on_leave(self, function: Callable[[], object]) -> None:
        """Before lastwords ends this process after an incident, call `function`, in another thread, for 1 s at most.

        For what has to be told that this process ends: a tracker of experiments, a socket. Files are flushed before.
        Several functions are called in turn. None is called where the process ends by itself: after the end of the
        loop, or where the script has handled its own exception.
        """
        if not callable(function):
            raise ConfigError(f"tft.on_leave(function) takes a function without arguments, not {function!r:.80}")
        self._on_leave.append(function)
        if self._run is not None:
            self._run.on_leave(function)

    def resume(self, missing_ok: bool | None = None) -> ResumePoint | None:
        """Go on from the newest complete checkpoint below ckpt_save_path; call it before the loop, on all ranks.

        Weights, buffers, optimizer, extras and random number streams are restored here, the data position when the loop
        begins. What another world size or parallel layout has saved is put together anew while it is read; that is
        never `exact`.

        Args:
            missing_ok: return None if there is no checkpoint. None: as True where `restarted`. Then, and where
                LASTWORDS_JOB names the job, only its own checkpoints count, and those from which it has resumed.

        Raises:
            IncompleteError: there is no checkpoint.
            ConfigError: there are only other jobs' checkpoints.
            MismatchError: it is of another model or optimizer. Do not train then.
            FormatError: it is damaged. Do not train then.
        """
        run = self._started("resume")
        if run.begun or run.resumed is not None:
            raise ConfigError("resume() has to be called before the training loop begins")
        if not self._enabled:
            self._recorder.agree_units(run.world, next_prefix(), self._declared)
        self._resumes += 1
        run.resumes = True
        resumed = resume_from(
            self._config.sources,
            run.world,
            self._recorder,
            run.facts,
            key=f"{run.agreement.prefix if run.agreement else next_prefix()}/resume/{self._resumes}",
            agreed=run.agreement,
            missing_ok=self.restarted if missing_ok is None else missing_ok,
            named=bool(self._config.job),
        )
        if resumed is None:
            return None
        run.resume_after(resumed)
        reasons, (epoch, step) = tuple(map(str, resumed.reasons)), resumed.position or (None, None)
        if run.world.rank == 0:
            own_loop.look_at_first_forward(
                self._model, self._recorder.streams, resumed.global_step, lambda: run.steps is None
            )
        place, groups = str(resumed.path), resumed.groups
        beside, begun = tuple(resumed.beside), resumed.begun
        drilled, why = drilled_beside(self._config.ckpt_save_path, run.world.size, self._recorder.loop.known.data)
        if run.world.rank == 0:
            if why:
                _log.warning("lastwords: %s", why)
            for change in () if drilled is None else drilled.changed:
                _log.info("the drill beside the checkpoints says nothing of this run: %s", change)
        return ResumePoint(
            epoch, step, resumed.global_step, not reasons, reasons, place, groups, beside, begun, drilled
        )

    def save_only(self, lacks: str) -> None:
        """For whoever protects a loop that it does not know: what is saved is told to be not exact.

        Args:
            lacks: what the script has to do to be resumed; `lastwords run` says so after a death, and does not heal.
        """
        self._started("save_only").save_only(lacks)

    # ------------------------------------------------------------------ periodic checkpoints

    def every(
        self,
        config: CheckpointConfig | ModelCheckpoint | None = None,
        *,
        steps: int = 0,
        seconds: float = 0.0,
        keep: int | None = None,
        keep_per_minutes: int = 0,
    ) -> None:
        """Write periodic checkpoints behind the training; call it on all ranks, with the same numbers, before the loop.

        Each rank copies its part between two steps, which takes host memory of that size, and trains on while a thread
        writes it. One that falls due by steps while another is being written is left out. Nothing that fails here stops
        the training.

        Args:
            config: instead of the numbers, in MindSpore's words.
            steps: after each global step that is a multiple.
            seconds: so long after the one before.
            keep: so many of the newest remain (5); 0: all. Last words are not counted, and stay.
            keep_per_minutes: instead, one in so many minutes.

        Raises:
            ConfigError: what cannot be meant, and a second call, which would silently replace the first.
        """
        run = self._started("every")
        if run.begun:
            raise ConfigError("every() has to be called before the training loop begins")
        if run.schedule != NO_SCHEDULE:
            raise ConfigError(
                "every() was called before: call it once, with all that is to decide (steps=, keep=, ...)"
            )
        if config is None:
            run.schedule = checked_schedule(steps, seconds, keep, keep_per_minutes)
        elif steps or seconds or keep is not None or keep_per_minutes:
            raise ConfigError("every() takes a config, or numbers (steps=, seconds=, keep=, ...), not both")
        else:
            run.schedule = schedule_of(config, self._config.ckpt_save_path)

    def save(self) -> None:
        """Write a checkpoint of the end of this step, or of one soon after it, as `every` does; from any rank.

        After the last step, of that one; after the end of `with tft:` none, which is said.
        """
        self._started("save").want_save()

    # ------------------------------------------------------------------ the loop

    def steps(self, loader: Iterable[Any], epochs: int, accumulate: int = 1) -> Iterator[tuple[int, int, Any]]:
        """(epoch, step, batch) for every batch, from where the run stands; both count from 1.

        A step ends when the next batch is asked for; `ends_step` tells whether the batch in hand is its last. Calls
        `set_epoch(epoch - 1)` where the sampler has it.

        Args:
            loader: a DataLoader, or another iterable that yields an epoch each time.
            epochs: in all, those that were done before a resume included.
            accumulate: batches in a step; the last one of an epoch may have fewer.

        Raises:
            ConfigError: ranks have different numbers of steps; and at once for what cannot work.
        """
        run = self._started("steps")
        if run.begun or run.steps is not None:
            raise ConfigError(
                "the training loop has already begun: steps() is called once, before the first step; a loop in stages, "
                "or over data that grows, calls step_end() after each step instead"
            )
        here = onward(run.resumed, loader, accumulate, run.world.size)
        resumed_regions = run.resumed is not None and bool(run.resumed.regions)
        followed = self._batches is not None and loader in (self._batches, self._batches.given_by)
        run.steps = steps = Steps(
            loader,
            epochs,
            accumulate=accumulate,
            events=run,
            ledger=self._recorder.ledger,
            aside=self._recorder.attributes.aside,
            resume=run.resume_at,
            data=self._config.data,
            show_progress=run.world.rank == 0,
            onward=here,
            placed=resumed_regions and (followed or loader in self._recorder.local_extras),
            followed=followed,
        )
        return _iterate(run, steps, loader, known_length=here.carried is None)

    @property
    def ends_step(self) -> bool:
        """True if the batch in hand is the last one of its step: the one after which the optimizer updates."""
        steps = None if self._run is None else self._run.steps
        return steps is None or steps.ends_step

    def step_begin(self, epoch: int | None = None, step: int | None = None) -> None:
        """In a loop of one's own: the next step begins here, and here a resumed run goes on.

        Call it on every rank, at the same place in each step, after whatever the loop does between two steps: an
        evaluation, a log, an iterator that is built. What has changed since `step_end()` (random streams, extras,
        attributes) is saved as of here. The first call after `resume()` puts the random streams back to where they were
        at this place. Only the first call after a `step_end()` counts, so a loop over micro-batches may call it for
        each of them.

        Args:
            epoch: what `step_end()` will call it (from 1), for a loop in which all ranks may fail before that.
            step: likewise.

        Raises:
            ConfigError: in `steps()`, which does all that by itself, and between `optimizer.step()` and `step_end()`.
        """
        position = own_loop.named(epoch, step)
        run = self._started("step_begin")
        if run.steps is not None:
            raise ConfigError("step_begin() is for custom loops: steps() begins each step by itself")
        run.begin_step()
        if position is not None:
            run.under_way(*position)

    def step_end(self, epoch: int | None = None, step: int | None = None) -> None:
        """The step is over, whether or not the optimizer updated in it; what follows (a log) changes nothing of it.

        A loop of one's own calls it once a step on every rank. Inside `steps`, which ends a step when the next batch is
        asked for, it ends the step now.

        Args:
            epoch: what the loop calls the step: both numbers, counted from 1 and the same on every rank, or neither.
                `resume()` gives them back.
            step: likewise.

        Raises:
            ConfigError: inside `steps`, before the step's last batch, and the second time.
        """
        position = own_loop.named(epoch, step)
        run = self._started("step_end")
        if run.steps is not None:
            self._recorder.ends_early = True
            return run.steps.end_early(position)
        if not run.begun:
            run.ensure_begun()
        self._recorder.names_steps = position is not None
        if position is not None:
            run.look_at_name(position)
        run.end_step(position)

    @contextlib.contextmanager
    def step(self, epoch: int | None = None, step: int | None = None) -> Iterator[None]:
        """`step_end` at the block's exit, if it is that of a step's last batch and no exception leaves it."""
        yield
        if self.ends_step:
            self.step_end(epoch, step)


def _iterate(run: Run, steps: Steps, loader: object, *, known_length: bool) -> Iterator[tuple[int, int, Any]]:
    """The loop begins when its first batch is asked for: what is drawn until then belongs to no step."""
    run.begin(steps, loader, known_length=known_length)
    yield from steps
