"""What is captured while training runs: the tentative copy in each step, the committed one at its end."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lastwords.checkpoint.storable import pack
from lastwords.optim_wrapper import rank_units
from lastwords.optim_wrapper.before_collective import BeforeCollective
from lastwords.optim_wrapper.extras import Extras, ExtrasSnapshot, pack_inline
from lastwords.optim_wrapper.global_names import Naming
from lastwords.optim_wrapper.host_copy import HostCopy
from lastwords.optim_wrapper.joined_optimizer import JoinedOptimizer
from lastwords.optim_wrapper.rank_local import BoxRecorder, BufferCapture, RngCapture, regions
from lastwords.optim_wrapper.rank_units import RankUnits
from lastwords.optim_wrapper.source import Snapshot, TrainerSource
from lastwords.optim_wrapper.state_view import UnitView, copy_groups
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor.black_box import BlackBox, BoxLayout, RegionCopy
from lastwords.processor.saver import Position
from lastwords.sharding.agree import World
from lastwords.sharding.declare import Unit

_log = logging.getLogger(__name__)


class StepRecorder:
    """Captures what may have moved on by the time of an incident. Belongs to the training thread.

    The tentative copy is taken in the backward pass, before a collective that lets a peer update (`BeforeCollective`).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[OptTFTWrapper],
        extras: Mapping[str, Any] | None,
        local_extras: Mapping[str, Any] | None,
        names: Naming | None = None,
    ) -> None:
        self.model = model
        inner = [wrapper.inner for wrapper in optimizers]
        self.view = UnitView(model, inner[0] if len(inner) == 1 else JoinedOptimizer(inner), names=names)
        self.extras = Extras(extras)
        self.local_extras = Extras(local_extras, "local_extras")
        self.buffers = BufferCapture(self.view.model, called=self.view.called)
        self.rng = RngCapture()
        self.source: TrainerSource | None = None
        self._units: RankUnits | None = None
        self._unchecked = False
        self.reasons: list[str] = []
        self._box: BoxRecorder | None = None
        self._extras_now: ExtrasSnapshot = self.extras.first()
        self._local_now: ExtrasSnapshot = self.local_extras.first()
        self._position = Position(1, 0)
        self._step = 0
        self._has_local_extras = bool(self.local_extras)
        self._hook: BeforeCollective | None = None
        self._paused = False
        self._needs_epoch_start = False
        self._tentative_document: bytes | None = None
        self._plain_document: tuple[Position | None, bytes] = None, b""
        self._tentative_reasons: list[str] = []

    # ------------------------------------------------------------------ life

    def agree_units(self, world: World, prefix: str, declared: Sequence[Unit]) -> RankUnits:
        """Find out with the other ranks who holds what; `prefix` is a place of its own in the store."""
        self._units = rank_units.agree(self.view, world, prefix, declared, self.rank_local_buffers())
        self._units.exclude_buffers(self.rank_local_buffers())
        self._unchecked = not self._units.pure
        return self._units

    @property
    def units(self) -> RankUnits:
        """This rank's units; known once they are agreed."""
        assert self._units is not None, "agree_units() comes first"
        return self._units

    def make_source(
        self,
        box_path: Callable[[int], Path],
        facts: Callable[[int], dict[str, Any]],
        buckets: Callable[[int], dict[str, Any]] | None = None,
        copy: HostCopy | None = None,
    ) -> TrainerSource:
        """The writer's view of this rank."""
        self.source = TrainerSource(self.units, self.extras, box_path, self.rank_local_buffers, facts, buckets, copy)
        return self.source

    def rank_local_buffers(self) -> frozenset[str]:
        """Names of the buffers that live in the black box, and therefore not in the unit."""
        return self.buffers.captured

    def open(self, path: Path, *, at_gate: bool = False) -> BlackBox:
        """Make the black box; copies go there from now on. at_gate: the gate calls `tentative`, nothing else does."""
        captures = (self.rng, self.buffers)
        box = BlackBox.create(path, BoxLayout(regions(captures)))
        self._box = BoxRecorder(box, captures, on_reason=lambda reason: self.not_exact((reason,)))
        self.reasons += [reason for reason in self._box.reasons if reason not in self.reasons]
        self._say_reasons()
        if self._hook is None and not at_gate:
            self._hook = BeforeCollective(self.model, self.tentative)
        return box

    def begin(
        self,
        step: int,
        position: Position,
        *,
        epoch_start: Mapping[str, RegionCopy] | None = None,
        step_regions: Mapping[str, RegionCopy] | None = None,
        needs_epoch_start: bool = False,
    ) -> None:
        """Training goes on after `step`: put the streams there, and take the copies from which it could start again."""
        self._needs_epoch_start = needs_epoch_start
        self._plain_document = None, b""
        if epoch_start and self._box is not None:
            self.rng.restore(epoch_start)
            self._box.epoch_start(position.epoch)
        if step_regions:
            self.rng.restore(step_regions)
        self._extras_now = self.extras.first(self._extras_now)
        self._local_now = self.local_extras.first(self._local_now)
        self._keep(step, position)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, backward passes belong to no step (the replay of DDP's buckets)."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def close(self) -> None:
        """Take the hook off the model again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def history(self, extras: ExtrasSnapshot, local_extras: ExtrasSnapshot | None) -> None:
        """How the extras of the run that is resumed have moved so far."""
        self._extras_now = extras
        if local_extras is not None:
            self._local_now = local_extras

    def not_exact(self, reasons: Iterable[str]) -> None:
        """Why a resume of this run cannot be exact, as it becomes known."""
        new = [reason for reason in reasons if reason not in self.reasons]
        if new:
            self.reasons += new
            if self._box is not None:
                self._say_reasons()

    # ------------------------------------------------------------------ each step

    @property
    def position_under_way(self) -> Position:
        """Epoch and step of the step that has begun."""
        return self._position

    def under_way(self, position: Position) -> None:
        """The next step is this one."""
        self._position = position
        if self.source is not None:
            self.source.under_way(position)

    def committed(self, step: int, position: Position) -> None:
        """The end of `step`: everything that may move on from here."""
        self._extras_now = self.extras.ended(self._extras_now)
        if self._has_local_extras:
            self._local_now = self.local_extras.ended(self._local_now)
        self._keep(step, position)
        if self._units is not None and not self._units.pure:
            self._units.check_step()
            if self._unchecked:  # the optimizer's state is there since this step
                self._unchecked = False
                self._units.exclude_buffers(self.rank_local_buffers())
                self._units.check()

    def _keep(self, step: int, position: Position) -> None:
        self._step = step
        self._position = position
        if self._box is not None:
            document = self._document(position, self._local_now)
            self._box.committed(step, document)
            if self._has_local_extras and self._tentative_document not in (None, document):
                self._tentative_reasons = ["local_extras change between the forward pass and the end of a step"]
                self._say_reasons()
            self._tentative_document = None
        if self.source is not None:
            self.source.committed(Snapshot(step, position, copy_groups(self.view.optimizer), self._extras_now))

    def epoch_start(self, epoch: int) -> None:
        """The random number streams before the first batch of `epoch` is asked for."""
        if self._box is not None:
            self._box.epoch_start(epoch)

    def tentative(self) -> None:
        """The copy of the step under way, before anything that lets a peer update."""
        if self._box is not None and not self._paused:
            local = self.local_extras.ended(self._local_now) if self._has_local_extras else self._local_now
            self._tentative_document = document = self._document(self._position, local)
            self._box.tentative(self._step + 1, document)

    def _say_reasons(self) -> None:
        assert self._box is not None
        facts = {"reasons": self.reasons, "tentative_reasons": self._tentative_reasons}
        self._box.box.set_facts(json.dumps(facts).encode())

    def _document(self, position: Position, local: ExtrasSnapshot) -> bytes:
        if not self._has_local_extras:
            if position == self._plain_document[0]:
                return self._plain_document[1]  # the tentative copy's: it is the same step
            document = b'{"epoch":%d,"step":%d,"needs_epoch_start":%s}' % (
                position.epoch,
                position.step,
                b"true" if self._needs_epoch_start else b"false",
            )
            self._plain_document = position, document
            return document
        members = {
            "epoch": position.epoch,
            "step": position.step,
            "needs_epoch_start": self._needs_epoch_start,
            "local_extras": pack(pack_inline(self.local_extras, local), "local_extras"),
        }
        return json.dumps(members).encode()
