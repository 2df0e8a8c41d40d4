"""A run that has started, on one rank: `Run` where TTP is switched off, `ProtectedRun` otherwise."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lastwords.checkpoint.entries import Reason, as_reason, first_of
from lastwords.checkpoint.meta import RunFacts, json_of
from lastwords.errors import ConfigError, UnavailableError
from lastwords.optim_wrapper.capture.device_copies import DeviceCopies
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.capture.source import TrainerSource
from lastwords.optim_wrapper.ddp.ddp_buckets import BucketOrder
from lastwords.optim_wrapper.launch import forks
from lastwords.optim_wrapper.launch.config import Config
from lastwords.optim_wrapper.launch.reporter import Reporter, reporter
from lastwords.optim_wrapper.launch.startup import Agreement
from lastwords.optim_wrapper.launch.world import World, next_prefix, restart_count
from lastwords.optim_wrapper.loop import own_loop
from lastwords.optim_wrapper.loop.data_digest import data_digest
from lastwords.optim_wrapper.loop.data_position import STARTED_WORKERS, hear_of_workers
from lastwords.optim_wrapper.loop.steps import FirstStep, ResumeAt, Steps
from lastwords.optim_wrapper.resume.facts import settings
from lastwords.optim_wrapper.resume.resume import Resumed
from lastwords.optim_wrapper.state.attributes import NOTHING, SavedValues
from lastwords.optim_wrapper.state.beside import UNSEEN, words_on
from lastwords.optim_wrapper.state.running import program_files
from lastwords.optim_wrapper.trainer.agreed_layout import AgreedLayout
from lastwords.optim_wrapper.trainer.hold import ExceptHook
from lastwords.optim_wrapper.trainer.job_shape import Options, settings_of
from lastwords.optim_wrapper.trainer.protected_step import ProtectedStep
from lastwords.optim_wrapper.trainer.protection import Protection
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor.box_layout import RegionCopy
from lastwords.processor.saver import Position
from lastwords.processor.whole_copies import WholeCopies
from lastwords.sharding import zero
from lastwords.sharding.declare import Unit
from lastwords.vocabulary import NO_SCHEDULE, Phase

_log = logging.getLogger(__name__)


SPOILT_S = 10.0
"""How long a rank that refuses the end of a step waits for the others to refuse it, too, before an incident begins.

A rank that has not refused it by then could save that step. Longer than a log or an evaluation on one rank takes,
shorter than a launcher waits for the end of a rank.
"""


OTHER_DATA = (
    "the loader iterates over other samples than in the saved run: a split was drawn anew, say; draw it with a "
    "generator that is seeded before"
)


COUNTS_ITSELF = (
    "a step has ended without the update of its batches, so what accumulates them counts by itself, and that count "
    "begins anew where a run goes on: update where tft.ends_step is True, with steps(loader, epochs, accumulate=...) "
    "(DeepSpeed: call engine.set_gradient_accumulation_boundary(tft.ends_step) before each forward pass)"
)

OF_A_STRANGER = "saved by --auto, which does not know where the loop stood in its data, nor what it kept in variables"


_ended_in: dict[str, int] = {}
"""Checkpoint directory -> the step with which a loop of this process has come to its end there."""


class Run:
    """Where a run stands that nobody protects, and the `StepEvents` of its loop. Training thread only."""

    def __init__(self, world: World, recorder: StepRecorder, buckets: BucketOrder, facts: RunFacts) -> None:
        self.world = world
        self.recorder = recorder
        self.buckets = buckets
        self.facts = facts
        """What its arithmetic depends on, which a resume compares with its own."""
        self.resumed: Resumed | None = None
        """What it was resumed from."""
        self.resumes = False
        """The script has called `resume()`, or asked whether it should."""
        self.lacks = "call that before the loop, every time"
        """What a script has to do that has not."""
        self._saved_only = False
        self._reasons: tuple[Reason, ...] = ()
        """Why a resume is not exact, as far as was known after `resume()`."""
        self._missing: list[str] = []
        """Of a resumed loop of one's own: what only the loop can have made."""
        self._unnamed_since: Resumed | None = None
        """What it was resumed from, until the loop has called a step something."""
        self._not_begun: Resumed | None = None
        """What it was resumed from, until the loop has said where its first step begins."""
        self._ended = self._says_begin = False
        """A step has ended and the next one not begun; the loop says where steps begin."""
        self.steps: Steps | None = None
        """The loop, unless it is the user's own."""
        self.begun = False
        self._unhear: Callable[[], None] = lambda: None
        self.schedule = NO_SCHEDULE
        """When periodic checkpoints are due."""

    @property
    def agreement(self) -> Agreement | None:
        """Which job this is, as all ranks have agreed."""
        return None

    @property
    def restarted(self) -> bool:
        """Whether a launcher starts this very job again."""
        return restart_count() > 0

    @property
    def leaving(self) -> bool:
        """Whether an incident ends this process."""
        return False

    def on_leave(self, function: Callable[[], object]) -> None:
        """Call it before an incident ends this process."""

    @property
    def start_step(self) -> int:
        """The global step after which training goes on."""
        return 0 if self.resumed is None else self.resumed.global_step

    # ------------------------------------------------------------------ the loop begins

    def resume_after(self, resumed: Resumed) -> None:
        """All but the position in the data is that of the checkpoint now."""
        self.resumed = self._unnamed_since = self._not_begun = resumed
        self.recorder.named = resumed.last_named
        generators = self.recorder.known(resumed.at_step)._replace(values={})  # the values are there
        self.recorder.begin(resumed.global_step, resumed.position, step_regions=resumed.regions, at_step=generators)
        inexact, self._missing = self.recorder.attributes.put_where_it_is(resumed.at_step.values)
        self.not_exact(*inexact)
        resumed.reasons.extend(one for one in map(as_reason, inexact) if one not in resumed.reasons)
        self.recorder.ledger.tell(*resumed.reasons)
        self._reasons = self.recorder.ledger.reasons

    def begin(self, steps: Steps, loader: object, *, known_length: bool) -> None:
        """The first batch of `steps` is asked for: what is drawn until then belongs to no step."""
        self.begun, resumed = True, self.resumed
        self.recorder.ledger.tell(*self.buckets.reasons)
        self.recorder.attributes.know(loader)
        self.know_data(loader)
        self._open_box()
        self.recorder.order = lambda: steps.order.said
        self.recorder.begin(
            self.start_step,
            None if resumed is None else resumed.position,
            epoch_start=None if resumed is None else resumed.epoch_start,
            step_regions=None if resumed is None else resumed.regions,
            at_start=NOTHING if resumed is None else resumed.at_start.at_its_place,
            at_step=NOTHING if resumed is None else resumed.at_step.at_its_place,
            steps_per_epoch=steps.steps_per_epoch if known_length else 0,
        )
        self._open_loop(*((steps.steps_per_epoch, steps.epochs) if known_length else (0, 0)))

    def know_loader(self, loader: object) -> None:
        """The loop will iterate over this one, which was not there when the run started or was resumed."""
        attributes, resumed = self.recorder.attributes, self.resumed
        with attributes.aside():
            attributes.know(loader)
        attributes.look()
        if resumed is not None and resumed.regions:
            self.not_exact(*attributes.put(resumed.at_step.of_the_loader.values))

    def loader_values(self, *, look: bool = False) -> str:
        """What moves of the loader, as of now. look: also what has moved since the last look."""
        return self.recorder.attributes.of_loader(look=look or self.recorder.looks_here)

    def loader_as_of(self, values: str) -> Callable[[], None]:
        """Make the loader what it was then; what makes it what it is now."""
        return self.recorder.attributes.loader_as_of(values)

    def know_data(self, loader: object) -> None:
        """The loop iterates over this; told where it is not what the saved run's did."""
        same = self.recorder.loop.iterates_over(data_digest(loader))
        if self.resumed is not None and self.resumed.data.world_size in (None, self.world.size) and not same:
            self.not_exact(OTHER_DATA)

    def not_exact(self, *reasons: str) -> None:
        """Why a resume from here on is not; each is said once."""
        for why in self.recorder.ledger.tell(*reasons):
            _log.warning("lastwords: not exact, because %s", why)

    def save_only(self, lacks: str) -> None:
        """Who calls the loop's steps does not know the loop. lacks: as of the launcher's `Begun`."""
        self.lacks, self._saved_only = lacks, True
        self.recorder.ledger.tell(OF_A_STRANGER)

    def ensure_begun(self) -> None:
        """A loop of the user's own begins with its first optimizer step or step_end."""
        if not self.begun:
            self.begun = True
            if self.world.rank == 0:
                self.recorder.loop.passes.when_other = own_loop.passes_differ
            if self.resumed is not None and self.resumed.regions:
                of_loader = self.resumed.at_step.of_the_loader.generators
                known = self.recorder.attributes.knows_loader()
                self.recorder.ledger.tell(*own_loop.left_to_the_loop({} if known else of_loader))
                self.not_exact(
                    *(f"{name} is not what it was: there was no such object in resume()" for name in self._missing)
                )
                self.recorder.ledger.tell(*self.recorder.attributes.generators.left_over())
            self._open_loop(0, 0)

    def look_at_name(self, position: Position) -> None:
        """A loop of the user's own calls the step that it ends so.

        ConfigError if it is the first one so called since `resume()`, and no later than the last one in the checkpoint:
        all ranks say the same then. On other ranks, or in another layout, an epoch may have fewer steps.
        """
        last, resumed, self._unnamed_since = self.recorder.named, self._unnamed_since, None
        if last is None or position > last or self.recorder.loop.known.names_go_back:
            return
        if resumed is None:
            self.recorder.loop.know(names_go_back=True)
            own_loop.names_went_back(position, last)
        elif not resumed.moved or position.epoch < last.epoch:
            text = own_loop.goes_back(position, last, resumed.global_step, resumed.path)
            self._spoil(text)
            raise ConfigError(text)

    def _spoil(self, why: str) -> None:
        """The step under way should not have been."""

    @property
    def resume_at(self) -> ResumeAt | None:
        """Where `steps` go on, and how the random streams come back."""
        resumed = self.resumed
        if resumed is None:
            return None

        def back_to(regions: Mapping[str, RegionCopy], saved: SavedValues, *, last: bool) -> Callable[[], None] | None:
            return (lambda: self.recorder.put_back(regions, saved.at_its_place, last=last)) if regions else None

        at_start = back_to(resumed.epoch_start, resumed.at_start, last=False)
        at_step = back_to(resumed.regions, resumed.at_step, last=True)
        return ResumeAt(resumed.epoch, resumed.step, at_start, at_step, resumed.order)

    def _open_box(self) -> None:
        """The black box anew: it is known now what has to go in."""

    def _open_loop(self, steps_per_epoch: int, epochs: int) -> None:
        """All ranks begin; zeros where nobody knows how many steps there are."""
        self._unhear = hear_of_workers(self._started_workers)

    def _started_workers(self, loader: Any) -> None:
        if not self.recorder.attributes.knows_loader(loader):
            self.not_exact(STARTED_WORKERS.format(type(loader.dataset).__name__))

    # ------------------------------------------------------------------ StepEvents

    def epoch_start(self, epoch: int) -> None:
        """Before the first batch of `epoch` is asked for."""
        self.recorder.epoch_start(epoch)

    def under_way(self, epoch: int, step: int) -> None:
        """This step has begun."""

    def step_end(self, epoch: int, step: int) -> None:
        self.end_step(Position(epoch, step))

    def round_over(self, epoch: int, step: int) -> None:
        """What the loop does after the end of this step is over, too."""

    def begin_step(self) -> None:
        """A loop of the user's own begins a step here: the streams are put back, or the copies taken once more."""
        if self.steps is not None:
            return
        resumed, self._not_begun = self._not_begun, None
        if resumed is not None and resumed.regions and not self.begun:
            early = [*self.recorder.moved_since(), *filter(None, [self.recorder.drawn_early()])]
            self.not_exact(*own_loop.moved_too_early(early))
            saved = self.recorder.known(resumed.at_step)
            values = saved.values if self.recorder.loop.repeats else {}
            self.recorder.put_back(resumed.regions, saved._replace(values=values), last=False)
        self._says_begin, ended, self._ended = True, self._ended, False
        if ended:
            self.look_again()

    def look_again(self) -> None:
        """What the loop does between the end of a step and the start of the next one is over."""

    def end_step(self, position: Position | None) -> None:
        """A step is over. position: what the loop calls it."""
        self._says_begin = self._says_begin and not self._ended  # it has, of every step so far
        self._ended = True

    def want_save(self) -> None:
        """A checkpoint of the next step's end is wanted."""

    # ------------------------------------------------------------------ the end

    def stop(self) -> None:
        """The loop is over on this rank: wait until it is over on all of them."""
        self._unhear()
        self.recorder.close()

    def fail(self, error: BaseException) -> None:
        """An exception leaves the loop."""


class ProtectedRun(Run):
    """Everything that lastwords does for one rank, from the start on, which is a collective.

    Raises ConfigError, StorageError or UnavailableError with what to do about it; nothing is left running then.
    """

    def __init__(
        self,
        world: World,
        recorder: StepRecorder,
        buckets: BucketOrder,
        facts: RunFacts,
        *,
        config: Config,
        options: Options,
        optimizers: Sequence[OptTFTWrapper],
        declared: Sequence[Unit],
    ) -> None:
        super().__init__(world, recorder, buckets, facts)
        self._options = options
        self._optimizers = optimizers
        self._on_first_end: Reporter | None = None
        self._first: FirstStep | None = None
        self._verify_every = recorder.watch.verify_every = options.verify_every
        self._layout = AgreedLayout(world, recorder, optimizers, declared, options, config)
        self._excepthook = ExceptHook(self.fail)
        self._root = os.path.realpath(config.ckpt_save_path)
        shared = self._layout.shared(config.shared_from_mb)
        self.protection = Protection(config, world, self._make_source, self._layout.units.names, shared)
        self.protection.start(settings_of(config, options, len(optimizers), world.size), self._layout.checkpoint_bytes)
        try:
            self._open_box()
            buckets.share(world.store, next_prefix())
            recorder.ledger.tell(*buckets.reasons)
            recorder.begin(0, None)
            gate = self._layout.gate
            self._step = ProtectedStep(
                recorder, buckets, self.protection, gate, optimizers, self.ensure_begun, self.fail
            )
            for wrapper in optimizers:
                wrapper.watch_groups(self._layout.units.admit)
        except BaseException:  # handed to the caller
            self.close()
            raise
        self._excepthook.install()
        forks.watch(self)

    @property
    def agreement(self) -> Agreement:
        return self.protection.agreement

    @property
    def restarted(self) -> bool:
        """Whether a launcher starts this very job again; the same on all ranks."""
        return self.agreement.restarted

    @property
    def leaving(self) -> bool:
        return self.protection.departure.decided

    def on_leave(self, function: Callable[[], object]) -> None:
        self.protection.departure.on_leave(function)

    # ------------------------------------------------------------------ the loop

    def _open_box(self) -> None:
        self.recorder.open_box(self.protection.use_box, at_gate=self._layout.gate is not None)

    def _refuse_to_begin_before(self, saved: int) -> None:
        """Of a job that begins again after a failure. ConfigError if it would not go on from what was saved then."""
        if self.start_step >= saved:
            return
        again = f"all ranks were started again after a failure, and step {saved} is saved, but "
        shared = "the checkpoint directory has to be the same in every start, and on a file system that all hosts share"
        if self.protection.newest_step() < saved:
            raise ConfigError(
                f"{again}its checkpoint cannot be read on host {socket.gethostname()}, so the training loop would "
                f"begin after step {self.start_step}: {shared}"
            )
        raise ConfigError(
            f"{again}its training loop begins after step {self.start_step}: call tft.resume(missing_ok=True) before "
            f"the loop, every time; if it was called, another host does not see that checkpoint: {shared}"
        )

    def _open_loop(self, steps_per_epoch: int, epochs: int) -> None:
        if self.start_step < (ended := _ended_in.get(self._root, 0)):
            raise ConfigError(
                f"this process has trained to step {ended} with the checkpoint directory {self._root}, and another "
                f"loop begins there after step {self.start_step}: after a failure one would go on from the other one's "
                "checkpoint; give each a directory of its own"
            )
        self.recorder.attributes.loop_begins()
        resumed = self.resumed if self.world.rank == 0 else None
        if resumed is not None and (named := self.missing_beside(resumed.beside)):
            _log.warning("lastwords: %s", words_on(named, variables=self._options.variables))
        super()._open_loop(steps_per_epoch, epochs)
        # Not before all are here: a rank that has left out its first step would meet the others' next collective.
        self.protection.agent.begin_loop(steps_per_epoch, epochs, self.start_step, self.schedule)
        self._layout.compare_at_start(self.protection.agent.corrupt)
        if self.steps is not None:
            self._first = FirstStep(self.recorder.model, self.steps.accumulate)
        self._counted = (self.steps is not None and self.steps.accumulate > 1) or bool(zero.told_of_deepspeed())
        self._on_first_end = launcher = reporter()
        if launcher is not None:
            self._refuse_to_begin_before(launcher.goes_on_at)
            launcher.loaded(program_files())
            lacks = "" if self.resumes else self.lacks
            launcher.begun(self.start_step, lacks=lacks, saved_only=self._saved_only)

    def missing_beside(self, beside: Mapping[str, str]) -> list[str]:
        """Names of what the saved run's loop had changed beside its state, but for what the script has put back."""
        names = self.recorder.attributes.missing_beside(beside)
        if unseen := [name for name in names if name.startswith(UNSEEN)]:
            _log.info("of the saved run it is not known what its loop had changed beside its state: %s", unseen[0])
        return [name for name in names if name not in unseen]

    def _spoil(self, why: str) -> None:
        """The step under way should not have been: no rank's state of it is saved, so wait for the others' word."""
        self._step.spoil(why)
        with contextlib.suppress(UnavailableError):
            self.world.problem_anywhere(f"{self.agreement.prefix}/spoilt", why, SPOILT_S)

    def under_way(self, epoch: int, step: int) -> None:
        self.recorder.under_way(Position(epoch, step))

    def end_step(self, position: Position | None) -> None:
        """A step is over: its copies are taken, and every so many steps the replicas are compared. May park."""
        super().end_step(position)
        if self.steps is None:
            self.recorder.ends_early = self._says_begin
        if self._first is not None:
            updated = self.protection.agent.phase in (Phase.UPDATING, Phase.UPDATED)  # of several, one may not step
            self.not_exact(*self._first.end(updated=updated))
            self._first = None
        number = self._step.end_step(position)
        if self._counted and self.recorder.gradients.carried:
            self.not_exact(COUNTS_ITSELF)
        if self._on_first_end is not None:
            since = [one for one in self.recorder.ledger.reasons if one not in self._reasons]
            self._on_first_end.updated("" if self.resumed is None else first_of([*self.resumed.reasons, *since]))
            self._on_first_end = None
        if self._verify_every and number % self._verify_every == 0:
            self._layout.compare(number, self.protection.agent.corrupt)

    def round_over(self, epoch: int, step: int) -> None:
        """What the loop does after the end of this step is over, too: the copies are taken once more."""
        own_loop.refuse_update_after_end(self.protection.agent.stand)
        self.look_again()

    def begin_step(self) -> None:
        """A loop of the user's own begins a step here; `steps()` does so by itself."""
        if self.steps is not None:
            return
        own_loop.refuse_begin_after_update(self.protection.agent.stand)
        super().begin_step()

    def look_again(self) -> None:
        """The copies of the last step's end are taken once more. May park."""
        self.protection.agent.between_steps(lambda: self.recorder.look_again(expected=self._says_begin))

    def want_save(self) -> None:
        """A checkpoint of the next step's end is wanted. Too late for one, it raises nothing: it may be a `finally`."""
        if self.protection.closed:
            _log.warning("tft.save() writes nothing after the end of `with tft:` (or tft.stop()): call it before that")
            return
        self.protection.agent.want_save()

    # ------------------------------------------------------------------ the end

    def stop(self) -> None:
        """The loop is over on this rank: wait until it is over on all of them, then end the protection."""
        if self.protection.closed:
            return
        try:
            self._step.end_if_updated()
            self.protection.agent.left()
            _ended_in[self._root] = self.protection.agent.stand.ended_step
        finally:
            self.close()
        if (launcher := reporter()) is not None and not self.protection.departure.decided:
            launcher.over()

    def fail(self, error: BaseException) -> None:
        """An exception leaves the loop: wait until the incident is over, then let the right one through.

        Raises SystemExit where it is only the echo of another rank's end; returns where it is this rank's own.
        """
        if not self.protection.closed:
            self.protection.fail(error, self._detach)

    def leave_to_parent(self) -> None:
        """In a forked child, which answers for nobody (see `forks`): from here on it is a run that is not protected."""
        self._detach()
        self.recorder.forget_box()
        forks.inherited(self.protection)
        self.__class__ = Run  # type: ignore[assignment]

    def close(self) -> None:
        """End the protection of this rank, and give everything back. Idempotent."""
        self._detach()
        self.protection.close()

    def _detach(self) -> None:
        self._excepthook.uninstall()
        if self._first is not None:
            self._first.end(updated=True)
        for wrapper in self._optimizers:
            wrapper.detach()
        self._unhear()
        self.recorder.close()
        self.buckets.close()

    # ------------------------------------------------------------------ what a writer saves

    def _make_source(self, box_path: Callable[[int], Path]) -> TrainerSource:
        # Where ranks hold different units their buckets may differ too: each unit has its own writer's.
        buckets = None if self.recorder.units.pure else self.buckets.record
        rank = self.world.rank
        beside = self._options.copy != "now"
        copy = None
        if every := self._options.copies_every:
            copy = WholeCopies(rank, lambda: box_path(rank).parent, beside=beside, devices=DeviceCopies())
        return self.recorder.make_source(box_path, self._manifest_facts, buckets, copy, every)

    def _manifest_facts(self, step: int) -> dict[str, Any]:
        data = None if self.steps is None else self.steps.facts(self.world.size)
        buckets = self.buckets.record(step) if self.recorder.units.pure else None
        beside, forgotten = self.recorder.attributes.beside() or None, self.recorder.ledger.forgotten or None
        now = replace(self.facts, **settings())  # the loop may have set others, which a new process has not
        return json_of(replace(now, data=data, buckets=buckets, forgotten=forgotten, beside=beside))
