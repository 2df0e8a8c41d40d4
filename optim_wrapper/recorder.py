"""What is captured while training runs: the tentative copy in each step, the committed one at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lastwords.checkpoint.storable import pack
from lastwords.optim_wrapper import extra_digests, rank_units
from lastwords.optim_wrapper.before_collective import BeforeCollective
from lastwords.optim_wrapper.ddp_found import holding
from lastwords.optim_wrapper.extra_buffers import ExtraBuffers
from lastwords.optim_wrapper.extras import Extras, ExtrasSnapshot, left_out_of, pack_inline
from lastwords.optim_wrapper.global_names import Naming
from lastwords.optim_wrapper.group_copies import GroupCopies
from lastwords.optim_wrapper.host_copy import HostCopy
from lastwords.optim_wrapper.joined_optimizer import JoinedOptimizer
from lastwords.optim_wrapper.own_state import OwnStates
from lastwords.optim_wrapper.own_streams import OwnStreams
from lastwords.optim_wrapper.rank_local import BoxRecorder, BufferCapture, RngCapture, regions
from lastwords.optim_wrapper.rank_units import RankUnits
from lastwords.optim_wrapper.source import Snapshot, TrainerSource
from lastwords.optim_wrapper.state_view import UnitView
from lastwords.optim_wrapper.weight_marks import WeightMarks
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor.black_box import BlackBox, BoxLayout, RegionCopy
from lastwords.processor.saver import Position
from lastwords.sharding.agree import World
from lastwords.sharding.declare import Unit

_log = logging.getLogger(__name__)

DIGESTS_EVERY = 64
"""Steps after which extras are compared by rank, besides the first, second, fourth, eighth, ... one."""


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
        self._groups = GroupCopies(self.view.optimizer)
        self.extras = Extras(extras)
        self.local_extras = Extras(local_extras, "local_extras")
        whole = lambda: self._units is None or self._units.pure  # noqa: E731
        self._own = OwnStates(self.view.model, self.view.called, optimizers, whole)
        self.extras.add(self._own.of_optimizers)
        self.local_extras.add(self._own.of_modules)
        self.buffers = BufferCapture(self.view.model, called=self.view.called)
        plain = [state for part in (extras, local_extras) for state in (part or {}).values() if isinstance(state, dict)]
        self._search_in = {"model": model, "optimizer": inner, "extras": extras, "local_extras": local_extras}, plain
        self.rng = RngCapture(own=OwnStreams(*self._search_in))
        self.extra_buffers = ExtraBuffers(self.extras)
        self._digests = b""
        self.source: TrainerSource | None = None
        self._units: RankUnits | None = None
        self._unchecked = False
        self._ended_here = 0
        self._weights = WeightMarks(lambda: self.view.all_names().parameters)
        self._weights.choose()
        self._announced: set[str] = set()
        self.reasons: list[str] = []
        self._box: BoxRecorder | None = None
        self._extras_now: ExtrasSnapshot = self.extras.first()
        self._local_now: ExtrasSnapshot = self.local_extras.first()
        self._position: Position | None = None
        self._document = b""  # of the step under way
        self._named: Position | None = None
        self.names_steps = True
        self._step = 0
        self._has_local_extras = bool(self.local_extras)
        self._hook: BeforeCollective | None = None
        self._paused = False
        self._needs_epoch_start = False
        self._tentative_local: tuple[ExtrasSnapshot, bytes] | None = None
        self._tentative_reasons: list[str] = []
        self._steps_per_epoch = 0  # not known
        self.updated = True  # in the step that ends
        self.ends_early = False
        self._early_reasons: list[str] = []

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
        self.source = TrainerSource(
            self.units, self.extras, box_path, self.buffers_at, facts, buckets, copy, self._weights, self.ends_epoch
        )
        return self.source

    def know(self, loader: Any, generators: Mapping[str, torch.Generator]) -> None:
        """The loop draws its batches from this loader, whose torch generators are these; before the box is opened."""
        roots, plain = self._search_in
        own = OwnStreams({"loader": loader, **roots}, [*plain, *generators.values()])
        self.rng = RngCapture(generators=generators, own=own)

    def rank_local_buffers(self) -> frozenset[str]:
        """Names of the buffers that go into the black box from now on, and therefore not into the unit."""
        return self.buffers.captured

    def buffers_at(self, step: int) -> tuple[frozenset[str], dict[str, str]]:
        """Names of the buffers that are in no unit of `step`, and why what is saved of some others is not exact."""
        apart, moved = self.buffers.at(None if self._box is None else self._box.slot_of(step))
        return (apart if self.units.pure else apart | self.buffers.always), moved

    def open(self, path: Path, *, at_gate: bool = False) -> BlackBox:
        """Make the black box; copies go there from now on. at_gate: the gate calls `tentative`, nothing else does."""
        self.rng.own.look()
        captures = (self.rng, self.buffers, self.extra_buffers)
        box = BlackBox.create(path, BoxLayout(regions(captures)))
        self._box = BoxRecorder(box, captures, on_reason=lambda reason: self.not_exact((reason,)))
        self.reasons += [reason for reason in self._box.reasons if reason not in self.reasons]
        self._say_reasons()
        if self._hook is None and not at_gate:
            self._hook = BeforeCollective(self.model, self.tentative, holding(self.view.trained))
        return box

    def begin(
        self,
        step: int,
        position: Position | None,
        *,
        epoch_start: Mapping[str, RegionCopy] | None = None,
        step_regions: Mapping[str, RegionCopy] | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Training goes on after `step`: put the streams there, and take the copies from which it could start again.

        position: what the loop calls `step`, None if it has no name; with `epoch_start`, the epoch that those are of.
        steps_per_epoch: None: a loop of one's own; 0: epochs are not equally long.
        """
        self._needs_epoch_start = steps_per_epoch is not None
        self._steps_per_epoch = steps_per_epoch or 0
        self._extras_now = self.extras.first(self._extras_now)
        self._local_now = self.local_extras.first(self._local_now)  # a loader may draw numbers for that
        self.buffers.look()
        if step_regions:
            self.local_extras.reopen_loaders()
        if epoch_start and position is not None and self._box is not None:
            self.rng.restore(epoch_start)
            self._box.epoch_start(position.epoch)
        if step_regions:
            self.rng.restore(step_regions)
        self._keep(step, position)

    def put_back(self, streams: Mapping[str, RegionCopy], *, last: bool) -> None:
        """Restore the random streams; last: the loop goes on from there, so what is missing now stays so."""
        self.not_exact(self.rng.restore(streams))
        self.not_exact(self.rng.own.left_over() if last else ())

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

    def forget_box(self) -> None:
        """In a forked child: the black box is its parent's."""
        self._box = None

    @property
    def own_reasons(self) -> list[str]:
        """Why state of the optimizer's or a module's own is not as it was saved, after a resume."""
        return self._own.reasons

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
    def position_under_way(self) -> Position | None:
        """What the loop calls the step that has begun; None until it says so, in a loop of one's own."""
        return self._position

    def ends_epoch(self, position: Position | None) -> bool | None:
        """Whether this is the last step of its epoch; None: not known."""
        return position.step == self._steps_per_epoch if position is not None and self._steps_per_epoch else None

    @property
    def position_at_gate(self) -> Position | None:
        """The newest thing that the loop has said: the name of the step that has begun, or else of the last one."""
        return self._position or self._named

    def under_way(self, position: Position) -> None:
        """The loop calls the next step so."""
        self._position = position
        self._document = self._document_of(position)
        if self.source is not None:
            self.source.under_way(position)

    def committed(self, step: int, position: Position | None) -> None:
        """The end of `step`: everything that may move on from here. position: None if the loop has not named it."""
        self._extras_now = self.extras.ended(self._extras_now, self.updated, self.ends_epoch(position))
        self.not_exact(self.extras.reasons)
        if self._has_local_extras:
            self._local_now = self.local_extras.again(self._local_now)[0]
        self._ended_here += 1
        look = self._ended_here & (self._ended_here - 1) == 0  # after 1, 2, 4, 8, ... steps
        if look:
            self._weights.choose()
            self.buffers.look()
        if look or not self._ended_here % DIGESTS_EVERY:
            self.extras_by_rank()
        same_streams = not self.rng.own.step_ended(look=look)
        self._keep(step, position, comparable=same_streams)
        if look:
            self._announce_left_out()
            self.not_exact(self._own.look())
        if self._units is not None and not self._units.pure:
            self._units.check_step()
            if self._unchecked:  # the optimizer's state is there since this step
                self._unchecked = False
                self._units.exclude_buffers(self.rank_local_buffers())
                self._units.check()

    def look_again(self) -> bool:
        """The loop, which ended its step early (`ends_early`), is done with what came after: take the copies once more.

        What has moved is told, once: a rank that is killed in between leaves it as it was before. True.
        """
        self.ends_early = False
        self._extras_now, of_all = self.extras.again(self._extras_now)
        self._local_now, of_rank = self.local_extras.again(self._local_now)
        moved = [*self.extras.called(of_all), *self.local_extras.called(of_rank)]
        if self.source is not None:
            moved += self.source.look_again(self._groups.take(), self._extras_now)
        self.rng.own.follow()
        if self._box is not None:
            local = self._local(self._local_now) if self._has_local_extras else b""
            region = self._box.committed_again(
                self._step, self._document_of(self._named) + local + self._digests + b"}"
            )
            moved += [] if region is None else [region]
        if moved and not self._early_reasons:
            self._early_reasons = [
                f"between step_end() and the next batch {', '.join(moved)} changed in an earlier step"
            ]
            _log.warning(
                "after step_end(), in what followed in step %s, %s changed: where a rank is killed there, the "
                "resume is not exact; change what the next step reads before step_end()",
                self._step,
                ", ".join(moved),
            )
        return True

    def extras_by_rank(self) -> dict[str, int]:
        """Digests of what has to be the same on all ranks; noted, for whoever resumes."""
        states = {name: one for name, one in self._extras_now.states.items() if self.extras.are_users(name)}
        found = extra_digests.digests(states, {name: self.extra_buffers.of(name) for name in states})
        noted = [self._ended_here, extra_digests.by_extra(found, states)]
        self._digests = b',"extras":%s' % json.dumps(noted).encode() if states else b""
        return found

    def _announce_left_out(self) -> None:
        """A look at all of the optimizer's state, which costs microseconds a parameter."""
        for reason in self.view.left_out():
            if reason not in self._announced:
                self._announced.add(reason)
                _log.warning("%s, so it is left out of what is saved, and a resume is not exact", reason)

    def _announce_late_change(self, tentative: ExtrasSnapshot) -> None:
        """Said once: from here on, a rank that is killed between its update and the end of its step is not exact."""
        if self._tentative_reasons:
            return
        names = [
            name for name in tentative.states if self._alone(tentative, name) != self._alone(self._local_now, name)
        ]
        which = ", ".join(f"local_extras[{name!r}]" for name in names) or "local_extras"
        self._tentative_reasons = [f"{which} changed between the forward pass and the end of a step"]
        self._say_reasons()
        _log.warning(
            "%s changed between the forward pass and the end of step %s: where a rank is killed in between, the resume "
            "is not exact; change it before the forward pass, or after the step's end",
            which,
            self._step,
        )

    def _alone(self, snapshot: ExtrasSnapshot, name: str) -> bytes:
        states = {name: snapshot.states[name]}
        return self._local(dataclasses.replace(snapshot, states=states))

    def _keep(self, step: int, position: Position | None, *, comparable: bool = True) -> None:
        named_before = position is not None and position == self._position
        ended = self._document if named_before else self._document_of(position)
        self._step = step
        self._position = None
        self._named = position or self._named
        # In steps() the next step has a name before its tentative copy; elsewhere this is written while it is cheap.
        self._document = b"" if self._needs_epoch_start else self._document_of(None)
        if self._box is not None:
            local = self._local(self._local_now) if self._has_local_extras else b""
            early = b',"early":%s' % json.dumps(self._early_reasons).encode() if self.ends_early else b""
            self._box.committed(step, ended + local + early + self._digests + b"}", comparable=comparable)
            if self._tentative_local is not None and self._tentative_local[1] != local:
                self._announce_late_change(self._tentative_local[0])
            self._tentative_local = None
        if self.source is not None:
            self.source.committed(Snapshot(step, position, self._groups.take(), self._extras_now))

    def epoch_start(self, epoch: int) -> None:
        """The random number streams before the first batch of `epoch` is asked for."""
        if self._box is not None:
            self._box.epoch_start(epoch)

    def tentative(self) -> None:
        """The copy of the step under way, before anything that lets a peer update."""
        if self._box is not None and not self._paused:
            local = b""
            if self._has_local_extras:
                extras = self.local_extras.again(self._local_now)[0]
                local = self._local(extras)
                self._tentative_local = extras, local
            self._box.tentative(
                self._step + 1, (self._document or self._document_of(self._position)) + local + self._digests + b"}"
            )

    def _say_reasons(self) -> None:
        assert self._box is not None
        facts = {"reasons": self.reasons, "tentative_reasons": self._tentative_reasons}
        self._box.box.set_facts(json.dumps(facts).encode())

    def _document_of(self, position: Position | None) -> bytes:
        """What the box says of a step that the loop calls so, without what is rank-local, and without its end."""
        ahead = b"true" if self._needs_epoch_start else b"false"
        if position is not None:
            return b'{"epoch":%d,"step":%d,"needs_epoch_start":%s' % (*position, ahead)
        # What the loop called the last step: null if no step has ended, nothing if it gives no names.
        after = b"[]" if not self.names_steps else b"null" if self._named is None else b"[%d,%d]" % self._named
        return b'{"epoch":null,"step":null,"after":%s,"needs_epoch_start":%s' % (after, ahead)

    def _local(self, local: ExtrasSnapshot) -> bytes:
        inline = pack_inline(self.local_extras, local)
        members: dict[str, Any] = {"local_extras": pack(inline, "local_extras")}
        if inline["tree"]["left_out"]:
            members["reasons"] = left_out_of(inline["tree"])
        return b",%s" % json.dumps(members).encode()[1:-1]
