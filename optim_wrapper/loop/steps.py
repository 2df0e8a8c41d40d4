"""The loop over epochs, steps and batches, and where it goes on in a resumed run.

`Steps` knows nothing of processes or checkpoints: it is told where to begin and says what happens, in this order:

    epoch_start(epoch)          the sampler knows its epoch; nothing of the epoch has been drawn yet
    under_way(epoch, step)      before the step's first batch is fetched
    (the batches, accumulate of them, are yielded; the loop's body runs)
    step_end(epoch, step)       the body is done with the step's last batch; before anything of the next is fetched

A body may end its step itself (`end_early`); then step_end comes at that moment, and in its old place

    round_over(epoch, step)     the body has come back from what it did after its step's end

A step whose body did not come back (break, return, an exception) has no step_end: a generator cannot tell these
apart, as all of them arrive as GeneratorExit. Whoever runs the loop looks at `epoch`, `step` and `under_way`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from lastwords.checkpoint.layout import EPOCH_UNKNOWN, epoch_and_step
from lastwords.checkpoint.meta import LoopFacts
from lastwords.errors import ConfigError
from lastwords.optim_wrapper.ddp.staying_hook import StayingHook
from lastwords.optim_wrapper.launch.config import DataMode
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.loop.data_position import (
    PERSISTENT,
    Draws,
    EpochOrder,
    LoaderKind,
    loader_facts,
    open_epoch,
    pass_over,
    set_epoch,
    skipping_iterator,
    static_reasons,
    told_epochs,
)
from lastwords.optim_wrapper.loop.loader_changes import Onward, about, dealing

_log = logging.getLogger(__name__)

_GROWS = "; if it is meant to change from epoch to epoch, write the loop yourself, with step_end()"


class StepEvents(Protocol):
    """Who hears of the loop's progress. All are called on the thread that runs the loop."""

    def epoch_start(self, epoch: int) -> None:
        """`epoch` (1-based) begins; the random streams of this moment are the ones to resume it from."""

    def under_way(self, epoch: int, step: int) -> None:
        """`step` (1-based) of `epoch` begins."""

    def step_end(self, epoch: int, step: int) -> None:
        """`step` of `epoch` has ended."""

    def round_over(self, epoch: int, step: int) -> None:
        """The body, which had ended `step` itself, is done with what came after it."""


FETCHED_AHEAD = (
    "the loop asked for its second step's batch before it had trained on the first one's: each step counts before it "
    "is trained on, and after a death one is left out; fetch ahead in the DataLoader (num_workers), or write the loop "
    "yourself, with step_end()"
)


class FirstStep:
    """Whether a loop's first step is trained on before it ends. accumulate: batches in a step. Training thread.

    It is not where something between `steps()` and the loop, a prefetcher, holds batches back.
    """

    def __init__(self, model: torch.nn.Module, accumulate: int) -> None:
        self._batches, self._passes = accumulate, 0
        self._hook = model.register_forward_pre_hook(StayingHook(self._called))

    def _called(self, module: torch.nn.Module, args: Any) -> None:
        self._passes += module.training and torch.is_grad_enabled()

    def end(self, *, updated: bool) -> list[str]:
        """It is over. Returns why a resume will not be exact, if so."""
        self._hook.remove()
        calls_parts = updated and not self._passes  # of the model
        return [] if calls_parts or self._passes >= self._batches else [FETCHED_AHEAD]


@dataclass(frozen=True, slots=True)
class ResumeAt:
    """Go on after `step` of `epoch` (both 1-based; `step` may be the epoch's last).

    epoch 0: the loop that was saved had no name for the step, and `step` is the global one. It is counted out then, as
    if all epochs had equally many steps, which nobody can promise: the resume is not exact.

    restore_epoch_start puts every random stream (python, numpy, torch, accelerators and the loader's generators) back
    to the start of `epoch`, restore_step to the end of `step`. None: not known, and the resume is not exact.
    order: what `EpochOrder.said` had said at that end.
    """

    epoch: int
    step: int
    restore_epoch_start: Callable[[], None] | None
    restore_step: Callable[[], None] | None
    order: tuple[int, str] | None = None


class Steps:
    """Iterate to get (epoch, step, batch) for every batch, all epochs; once only.

    `accumulate` batches make one step; an epoch's left-over batches make its last one. `ends_step` tells the loop's
    body whether the batch in hand is its step's last. aside: a context in which the sampler is told its epoch. onward:
    where the resumed loop goes on in its data, where that is not what comes after so many steps, and what of the loader
    differs. placed: its own state is back: its next iterator goes on where the saved one stood. followed: by `Batches`,
    which know what it draws.
    Raises ConfigError for a loader without a usable length.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        epochs: int,
        *,
        accumulate: int = 1,
        events: StepEvents,
        ledger: Ledger | None = None,
        aside: Callable[[], AbstractContextManager[object]] = nullcontext,
        resume: ResumeAt | None = None,
        data: DataMode = "refetch",
        show_progress: bool = False,
        onward: Onward | None = None,
        placed: bool = False,
        followed: bool = False,
    ) -> None:
        for name, value, least in (("epochs", epochs, 0), ("accumulate", accumulate, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be an integer of at least {least}, not {value!r}")
        self._loader: Any = loader
        self._facts = loader_facts(loader)
        self.epochs = epochs
        self.accumulate = accumulate
        self._events = events
        self._aside = aside
        self._resume = resume
        onward = onward or Onward()
        carried = onward.carried
        self._carried = None if placed else carried
        self._draws = Draws(loader, self._facts, onward.saved.draws, followed=followed)
        self._at_start = LoopFacts(
            steps_per_epoch=self.steps_per_epoch,
            epochs=epochs,
            accumulate=accumulate,
            batches_per_epoch=self._facts.batches,
            mode=data,
            dealing=dealing(loader),
            inputs=about(loader, self._facts.batches, accumulate),
            carried=None if self._carried is None else self._carried.begun,
        )
        self._placed, self._followed = placed, followed
        self._data: DataMode = data
        self._show_progress = show_progress
        self._begun = False
        counted_out: list[str] = []
        if resume is not None and resume.epoch == EPOCH_UNKNOWN:
            resume = self._resume = self._counted_out(resume)
            counted_out = [
                f"the checkpoint does not record its epoch and step; assuming epoch {resume.epoch}, step "
                f"{resume.step}, as if every epoch had had {self.steps_per_epoch} steps"
            ]
        self.epoch = resume.epoch if resume is not None else 1
        self.step = resume.step if resume is not None else 0
        self.under_way = False
        self.ends_step = False
        said = [*onward.reasons, *counted_out]
        self.order = EpochOrder()
        if resume is not None and resume.step < self.steps_per_epoch and not (placed or self._carried or said):
            self.order.expect(resume.order)  # at an epoch's end nothing is left to be in order
        self.ledger = ledger or Ledger()
        self.ledger.tell(*static_reasons(self._facts, "skip" if placed and not followed else data), *said)
        known = carried is not None or resume is None or 0 <= resume.step <= self.steps_per_epoch
        for reason in said if show_progress else ():
            _log.warning("lastwords: not exact, because %s", reason)
        if resume is not None and not (known and resume.epoch >= 1):
            raise ConfigError(
                f"the checkpoint is of epoch {resume.epoch}, step {resume.step}, but an epoch has "
                f"{self.steps_per_epoch} steps here; resume with the data, batch size, accumulate and number "
                f"of ranks of the saved run"
            )

    def facts(self, world_size: int) -> LoopFacts:
        """What a resume has to know of the loop as it stands. Any thread."""
        return replace(self._at_start, draws=self._draws.seen, world_size=world_size)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in each epoch on this rank; must be the same on all ranks."""
        return -(-self._facts.batches // self.accumulate)

    def end_early(self, named: tuple[int, int] | None = None) -> None:
        """The body says that its step is over before it comes back. named: what it calls it.

        ConfigError if the batch in hand is not its step's last, the step has ended already, or it has another name.
        """
        if not self.under_way:
            raise ConfigError(
                "step_end() was called, but this step has ended already: call it once a step, and ask for no batch "
                "before the last one has been trained on"
            )
        if not self.ends_step:
            raise ConfigError("step_end() was called before the step's last batch; call it only if tft.ends_step")
        if named not in (None, (self.epoch, self.step)):
            raise ConfigError(f"step_end{named} was called in step {(self.epoch, self.step)}; here it needs no name")
        self.under_way = False
        self._events.step_end(self.epoch, self.step)

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        if self._begun:
            raise ConfigError("these steps have been iterated over already; call steps() once for the whole run")
        self._begun = True
        return self._whole()

    def _whole(self) -> Generator[tuple[int, int, Any], None, None]:
        try:
            yield from self._all()
        finally:
            # Left to the garbage collector in a cycle, persistent workers take five seconds each to end.
            self._loader, self.order = None, EpochOrder()

    def _all(self) -> Generator[tuple[int, int, Any], None, None]:
        resume = self._resume
        opened = False
        for epoch in range(1 if resume is None else resume.epoch, self.epochs + 1):
            here = resume if resume is not None and epoch == resume.epoch else None
            if here is not None and not self._has_to_replay(here):
                if here.restore_step is not None:
                    here.restore_step()
                continue
            with self._aside():
                set_epoch(self._loader, epoch)
            told = told_epochs(self._loader)
            if here is not None:
                self._restore_epoch_start(here)
            self.epoch, self.step = epoch, 0 if here is None else here.step
            self._events.epoch_start(epoch)
            iterator, batches_done = self._open(here, late=not opened and epoch > 1)
            opened = True
            self._draws.epoch_starts()
            total = self._facts.batches
            if here is not None and self._carried is not None:
                total = batches_done + self._carried.batches
            yield from self._one(epoch, iterator, batches_done, total, told)
        if resume is not None and resume.epoch > self.epochs and resume.restore_step is not None:
            resume.restore_step()

    def _one(
        self, epoch: int, iterator: Iterator[Any], batches_done: int, total: int, told: list[Any]
    ) -> Generator[tuple[int, int, Any]]:
        accumulate, events, draws = self.accumulate, self._events, self._draws
        last = -(-total // accumulate)
        count, step = batches_done, self.step
        while True:
            if count % accumulate == 0 and count < total:
                step = count // accumulate + 1
                self.step = step
                self.under_way = True
                self.ends_step = False
                if self._facts.persistent_workers and (epoch > 1 or (step == last and epoch < self.epochs)):
                    self._not_exact(PERSISTENT)
                events.under_way(epoch, step)
            if draws.looks:
                draws.asked()
            try:
                batch = next(iterator)
            except StopIteration:
                break
            if not self._followed:
                self.order.hear_batch(self._loader, self._facts, batch)
            if draws.looks:
                draws.given()
            # Samplers count on once all indices are asked for, which workers do early; torch's loaders tell none.
            foreign = self._facts.kind is LoaderKind.FOREIGN
            if foreign and count == batches_done and told_epochs(self._loader) != told:
                self._not_exact(
                    f"the loader ({type(self._loader).__name__}) counts its epochs itself and passed its "
                    f"sampler a different epoch than {epoch}, so the data order differs; pass the DataLoader "
                    f"inside it to steps()"
                )
            count += 1
            if count > total:
                raise ConfigError(
                    f"the loader yields more batches than its length when steps() was called, {total}, so all later "
                    f"step numbers would be wrong; correct its __len__{_GROWS}"
                )
            self.ends_step = count % accumulate == 0 or count == total
            yield epoch, step, batch
            del batch  # not kept alive while the next one is fetched
            if self.ends_step:
                if self.under_way:
                    self.under_way = False
                    events.step_end(epoch, step)
                else:
                    events.round_over(epoch, step)
        if count < total:
            raise ConfigError(
                f"the loader ended after {count} batches, but its length when steps() was called was {total}, so all "
                f"later step numbers would be wrong; correct its __len__{_GROWS}"
            )

    # ------------------------------------------------------------------ resume

    def _has_to_replay(self, here: ResumeAt) -> bool:
        """Whether the epoch that is resumed has to be opened at all, be it only to let it end."""
        if self._carried is not None:
            return self._carried.batches > 0
        if here.step < self.steps_per_epoch or self._followed:
            return here.step < self.steps_per_epoch
        # Its last step has ended; but only now would the iterator be asked for more, and samplers draw from their
        # generators even then. With workers that has happened long ago, as they are ahead.
        if self._facts.workers or self._facts.kind is LoaderKind.SEQUENCE:
            return False
        return self._facts.kind is LoaderKind.INDEXED or (self._data == "refetch" and here.epoch < self.epochs)

    def _restore_epoch_start(self, here: ResumeAt) -> None:
        if self._carried is not None and not self._carried.drawn:
            return  # the order of what is left is known without them
        if here.restore_epoch_start is not None:
            here.restore_epoch_start()
        elif here.step > 0:
            self._not_exact(
                f"the random streams at the start of epoch {here.epoch} are unknown, so the order of its "
                f"data may differ"
            )

    def _open(self, here: ResumeAt | None, *, late: bool) -> tuple[Iterator[Any], int]:
        loader, facts = self._loader, self._facts
        if here is None:
            return open_epoch(loader, facts, self.order, late=late), 0
        batches = min(here.step * self.accumulate, facts.batches)
        iterator = None
        if self._carried is not None:
            batches, iterator = here.step * self.accumulate, self._carried.open(loader)
        elif self._placed:
            iterator = iter(loader)
        elif self._data == "skip":
            iterator = skipping_iterator(loader, facts, self.order, batches)
        reasons: list[str] = []
        if iterator is None:
            iterator = open_epoch(loader, facts, self.order, late=late)
            put_back, shown = partial(self._restore_step, here), self._show_progress
            reasons = pass_over(loader, facts, iterator, self.order, batches, put_back, show_progress=shown)
        else:
            self._restore_step(here)
        self._not_exact(*(reasons or self.order.otherwise()))
        return iterator, batches

    def _restore_step(self, here: ResumeAt) -> None:
        if here.restore_step is not None:
            here.restore_step()
        else:
            self._not_exact(f"this rank's random streams at the end of step {here.step} are unknown")

    def _counted_out(self, here: ResumeAt) -> ResumeAt:
        epoch, step = epoch_and_step(here.step, self.steps_per_epoch)
        return replace(here, epoch=epoch, step=step)

    def _not_exact(self, *reasons: str) -> None:
        for reason in self.ledger.tell(*reasons):
            _log.warning("lastwords: not exact, because %s", reason)
