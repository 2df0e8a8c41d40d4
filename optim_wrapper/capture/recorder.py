"""What is captured while training runs: the tentative copy in each step, the committed one at its end."""

from __future__ import annotations

import contextlib
import json
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from lastwords.checkpoint.codec import brief
from lastwords.checkpoint.meta import Habits
from lastwords.checkpoint.storable import pack
from lastwords.errors import StorageError
from lastwords.optim_wrapper.capture.box_tensors import BoxTensors
from lastwords.optim_wrapper.capture.buffers import Buffers, ExtraBuffers, SavedForms
from lastwords.optim_wrapper.capture.carried_gradients import CarriedGradients
from lastwords.optim_wrapper.capture.rank_local import BeforeCollective, BoxRecorder, RngCapture, regions
from lastwords.optim_wrapper.capture.source import Snapshot, TrainerSource
from lastwords.optim_wrapper.capture.state_watch import StateWatch, names_in
from lastwords.optim_wrapper.ddp.ddp_found import holding
from lastwords.optim_wrapper.joined_optimizer import JoinedOptimizer
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.state import attributes, extras, own_state, rank_units
from lastwords.optim_wrapper.state.attributes import NOTHING, SavedValues
from lastwords.optim_wrapper.state.extras import Extras, ExtrasSnapshot, pack_inline
from lastwords.optim_wrapper.state.global_names import Naming
from lastwords.optim_wrapper.state.plain_values import copy_groups, groups_differ
from lastwords.optim_wrapper.state.rank_units import RankUnits
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor.agent import StepWork
from lastwords.processor.black_box import BlackBox
from lastwords.processor.box_layout import BoxLayout, RegionCopy, SlotKind
from lastwords.processor.recurrence import Late
from lastwords.processor.saver import Position
from lastwords.processor.whole_copies import WholeCopies
from lastwords.sharding.agree import WorldLike
from lastwords.sharding.declare import Unit

# What a rank learns of its loop beside what the black box shows: it goes into the checkpoint, and a resume has it.


class BackwardPasses:
    """How many a step has, where a hook sees them (`BeforeCollective`); training thread.

    A resumed loop that has another number counts its data otherwise.

    A number counts once two steps in a row have had it, so that the left-over batches of an epoch do not. A second such
    number makes it 0, "changes": there is nothing to compare then. saved: `usual` of the run that is resumed.

    >>> passes = BackwardPasses(saved=4)
    >>> passes.when_other = lambda saved, here: print(saved, here)
    >>> for count in (2, 2, 2):
    ...     passes.count = count
    ...     _ = passes.end_step()
    4 2
    """

    def __init__(self, saved: int | None = None) -> None:
        self.count = 0
        """In the step under way."""
        self.usual = saved
        """In every step; 0 where that changes, None where it is not known."""
        self.when_other: Callable[[int, int], None] | None = None
        """Called once, with the saved number and this run's, where they differ; None: nobody wants to know."""
        self._saved = saved
        self._before = 0

    def end_step(self) -> bool:
        """A step is over. Returns whether `usual` has become another one."""
        count, self.count = self.count, 0
        if not count:
            return False
        before, self._before = self._before, count
        if count != before:
            return False
        saved, self._saved = self._saved, None
        if saved and saved != count:
            self.usual = count
            if self.when_other is not None:
                self.when_other(saved, count)
            return True
        if self.usual in (0, count):
            return False
        self.usual = count if self.usual is None else 0
        return True


class LoopHabits:
    """See `Habits`. say: called when any of it has changed."""

    def __init__(self, say: Callable[[], None]) -> None:
        self.known = Habits()
        self.repeats = False
        """A resumed loop does again what it does between the end of a step and the start of the next one."""
        self.passes = BackwardPasses()
        self._drew = 0
        self._say = say

    def learn(self, habits: Habits) -> None:
        """Those of the run that is resumed."""
        self.known, self.passes = habits, BackwardPasses(habits.passes)

    def know(self, **more: Any) -> None:
        """More, as `Habits` calls it."""
        self.known = replace(self.known, **more)
        self._say()

    def iterates_over(self, data: str) -> bool:
        """The loader's digest (see `data_digest`). False if the run that is resumed had another one."""
        before = self.known.data
        self.know(data=data)
        return not (before and data) or before == data

    def begins(self, *, drew: bool) -> None:
        """A step begins. drew: random numbers since the end of the one before, as a loader does that is asked here."""
        self._drew += drew
        draws = self.known.draws
        if not drew:
            draws = False
        elif draws is None and self._drew > 1:  # an evaluation, say, draws once in a while
            draws = True
        if draws is not self.known.draws:
            self.know(draws=draws)


_log = logging.getLogger(__name__)


def changed_after_the_end(moved: Sequence[str], step: int, *, expected: bool) -> str:
    """Say that this changed after the end of a step; the reason for a death in between.

    expected: the loop says where the next step begins.
    """
    _log.log(
        logging.INFO if expected else logging.WARNING,
        "after step_end() of step %s, %s changed: if a rank is killed before that change, the resume is not "
        "exact; change state that the next step reads before step_end()",
        step,
        ", ".join(moved),
    )
    return f"{', '.join(moved)} changed between step_end() and the next batch in an earlier step"


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
        *,
        copies: bool = True,
        forget: Sequence[str] = (),
        variables: bool | Mapping[str, Any] = False,
    ) -> None:
        self.model = model
        inner = [wrapper.inner for wrapper in optimizers]
        self._box: BoxRecorder | None = None
        self.after_copy, self.after_update = Late(), Late()
        """What moves late in a step: of what is this rank's own, after the tentative copy; and after the update."""
        self._late_named = False
        self.ledger = Ledger(forget)
        me = weakref.ref(self)  # a cycle would keep a refused one alive
        self.ledger.heard_by(lambda _: None if (one := me()) is None else one._say_reasons())
        self.view = UnitView(model, inner[0] if len(inner) == 1 else JoinedOptimizer(inner), names=names)
        self.extras = Extras(extras, ledger=self.ledger)
        self.local_extras = Extras(local_extras, "local_extras", self.ledger)
        whole = lambda: self._units is None or self._units.pure  # noqa: E731
        of_optimizers = own_state.of_optimizers(optimizers, whole)
        self.extras.add(of_optimizers)
        self.local_extras.add(own_state.of_modules(self.view.model, self.view.called))
        self.tensors = BoxTensors(self.ledger)
        self.buffers = Buffers(self.view.model, self.tensors, called=self.view.called)
        self.rng = RngCapture(ledger=self.ledger)
        self.extra_buffers = ExtraBuffers(self.extras, self.tensors)
        beside = {"model": model, **self.extras.objects(), **self.local_extras.objects()}
        apart: dict[str, Any] = {f"optimizer[{number}]": one for number, one in enumerate(optimizers)}
        for of, objects in (("extras", extras), ("local_extras", local_extras)):
            apart |= {f"{of}[{name!r}]": one for name, one in (objects or {}).items()}
        self.attributes = attributes.of_job(self.view, optimizers, self.ledger, of_optimizers, beside, apart, variables)
        self._digests: list[Any] | None = None
        """Of extras, as of so many steps: whether they are the same on all ranks."""
        self.source: TrainerSource | None = None
        self._units: RankUnits | None = None
        self.watch = StateWatch(self.view, self.buffers, copies=copies, late=self.after_update)
        self.watch.know(of_optimizers.values())
        self.watch.schedulers = [one for one in (extras or {}).values() if hasattr(one, "get_last_lr")]
        scalers = [name for name, one in (extras or {}).items() if isinstance(one, torch.amp.GradScaler)]
        self._scalers = tuple(self.extras.called(scalers))
        self.gradients = CarriedGradients(
            lambda: self.view.all_names().parameters, bool(scalers), model, inner, [self.extras, self.local_extras],
            self.tensors,
        )  # fmt: skip
        self.gradients.backward.follows_update = self.watch.update_is_over
        for wrapper, habit in zip(optimizers, self.gradients.habits, strict=True):
            wrapper.watch_zero_grad(habit.zeroed)
        self._reopen: Callable[[BoxRecorder | None], None] | None = None
        self.work = StepWork()
        self.extras_now: ExtrasSnapshot = self.extras.first()
        """As of the last step's end."""
        self.local_extras_now: ExtrasSnapshot = self.local_extras.first()
        self.position_under_way: Position | None = None
        """What the loop calls the step that has begun; None until it says so, in a loop of one's own."""
        self._of_all: dict[str, Any] = {}
        """Members of a document: what has to be alike on all ranks, as of the last step's end."""
        self.named: Position | None = None
        self.loop = LoopHabits(self._say_reasons)
        self._step = self._ended_here = 0
        self._hook: BeforeCollective | None = None
        self._paused = False
        self._tentative_local: ExtrasSnapshot | None = None
        self.uncopied = False
        """No copy has been taken of the step under way, and no gate will ask for one."""
        self._attributes_then: dict[str, Any] = {}
        self._attributes_ended: dict[str, Any] = {}
        """What documents say of them, in the tentative copy, and in the committed one."""
        self._steps_per_epoch: int | None = None
        self.ends_early, self.names_steps = False, True
        self._constants: dict[str, str] | None = None
        self.order: Callable[[], tuple[int, str] | None] = lambda: None
        """Of the epoch so far, where `steps()` knows it."""

    def agree_units(self, world: WorldLike, prefix: str, declared: Sequence[Unit]) -> RankUnits:
        """Find out with the other ranks who holds what; `prefix` is a place of its own in the store."""
        self._units = rank_units.agree(self.view, world, prefix, declared, self.buffers.captured)
        self._units.exclude_buffers(self.buffers.captured)
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
        copy: WholeCopies | None = None,
        every: int = 1,
    ) -> TrainerSource:
        """The writer's view of this rank."""
        self.source = TrainerSource(self, box_path, facts, buckets, copy, every)
        return self.source

    def drawn_since(self, step: int, kind: SlotKind = SlotKind.TENTATIVE) -> str:
        """The random stream that has moved on this rank since the copy of this kind of a step."""
        return "" if self._box is None else self._box.drawn_since(step, self.attributes.generators.drawn, kind)

    def moved_between(self, step: int, *, asks: bool = True) -> list[str]:
        """What has moved since the end of `step` in a loop that has not begun the next one. Any thread.

        Nothing that counts in a loop that does all that again. asks: also extras, which is the user's code.
        """
        if not self.ends_early or step != self._step or self.loop.repeats:
            return []
        drawn = self.drawn_since(step, SlotKind.COMMITTED)
        of_attributes = attributes.differing(self._attributes_ended, self.attributes.document())
        return [*(self.moved_since() if asks else ()), *filter(None, [drawn, of_attributes])]

    def moved_since(self) -> list[str]:
        """What of extras and hyperparameters is not what it was when the copies were taken last."""
        moved = [
            name
            for every, then in ((self.extras, self.extras_now), (self.local_extras, self.local_extras_now))
            for name in every.called(every.again(then, loaders=False)[1])
        ]
        if groups_differ(self.watch.values.groups_ended, copy_groups(self.view.optimizer)):
            moved.append("the optimizer's hyperparameters")
        return moved

    def drawn_early(self) -> str:
        """What has drawn random numbers since the last step's end, in a loop that does so before each step's start."""
        return self.drawn_since(self._step, SlotKind.COMMITTED) if self.loop.known.draws else ""

    def buffers_at(self, step: int) -> tuple[frozenset[str], dict[str, str]]:
        """Names of the buffers that are in no unit of `step`, and why what is saved of some others is not exact."""
        apart, moved = self.buffers.at(None if self._box is None else self._box.box.slot_of(step))
        return (apart if self.units.pure else apart | self.buffers.always), moved

    def open_box(self, use: Callable[[Callable[[Path], BlackBox]], None], *, at_gate: bool) -> None:
        """Copies go into a black box from now on: `use` is given what makes it. at_gate: see `open`."""
        self._reopen = lambda carried: use(lambda path: self.open(path, at_gate=at_gate, carried=carried))
        self._reopen(None)

    def open(self, path: Path, *, at_gate: bool = False, carried: BoxRecorder | None = None) -> BlackBox:
        """Make the black box, which begins with the copies of `carried`. at_gate: the gate alone calls `tentative`."""
        captures = (self.rng, self.tensors)
        old = None if carried is None else carried.box
        box = BlackBox.create(path, BoxLayout(regions(captures)), carried=old)
        self._box = BoxRecorder(box, captures, self.after_copy)
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
        at_start: SavedValues = NOTHING,
        at_step: SavedValues = NOTHING,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Training goes on after `step`: put the streams there, and take the copies from which it could start again.

        position: what the loop calls `step`, None if it has no name; with `epoch_start`, the epoch that those are of.
        at_start, at_step: what the loader had at the epoch's start, and at the step's end.
        steps_per_epoch: None: a loop of one's own; 0: epochs are not equally long.
        """
        self._steps_per_epoch = steps_per_epoch
        self.extras_now = self.extras.first()
        self.local_extras_now = self.local_extras.first()  # a loader may draw numbers for that
        self.tensors.make_room()
        self.buffers.admit_late()
        self.attributes.begin()
        self.view.begin()
        self._know_constants()
        self.watch.list_tensors()
        self._make_room()
        if step_regions:
            self.local_extras.reopen_loaders()
        as_constructed = self.attributes.now(at_step.values)
        if epoch_start and position is not None and self._box is not None:
            self.attributes.restore(at_start, looked=True)
            self.rng.restore(epoch_start)
            self._box.epoch_start(position.epoch, _encoded(self.attributes.document()))
        if step_regions:
            self.attributes.restore(at_step, looked=True)
            self.rng.restore(step_regions)
        self._keep(step, position)
        as_constructed()  # what had not moved by the epoch's start is as the constructors left it

    def _know_constants(self) -> None:
        """When protection begins, as `resume()` will compare them: what has changed by the loop's start is none."""
        now, before = self.attributes.constants(), self._constants
        self._constants = now if before is None else {name: one for name, one in before.items() if now.get(name) == one}
        if self._constants != before:
            self._say_reasons()

    def known(self, saved: SavedValues) -> SavedValues:
        """What of it there is before the loop begins."""
        return saved if self.attributes.knows_loader() else saved.before_the_loop

    def put_back(self, streams: Mapping[str, RegionCopy], saved: SavedValues, *, last: bool) -> None:
        """Restore streams and what the loader has; last: the loop goes on from there, so what is missing stays so."""
        self.ledger.tell(*self.attributes.restore(saved), *self.rng.restore(streams))
        self.ledger.tell(*(self.attributes.generators.left_over() if last else ()))

    def streams(self) -> dict[str, bytes]:
        """All random number streams as they are now."""
        every = {name: bytes(copy.data) for name, copy in self.rng.snapshot().items()}
        return every | self.attributes.generators.states()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, backward passes belong to no step (the replay of DDP's buckets)."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _make_room(self) -> None:
        """The black box anew, where it lacks room for what has come to be copied; all that it holds stays."""
        needed, carried, reopen = self.tensors.needs_room, self._box, self._reopen
        self.tensors.needs_room = False
        if not needed or carried is None or reopen is None:
            return
        try:
            reopen(carried)
        except StorageError as error:
            self.ledger.tell(f"state that changes outside of optimizer.step() could not be copied: {error}")

    def close(self) -> None:
        """Take the hook off the model again, and keep nothing of the loop's alive."""
        if self.source is not None:
            self.source.close()
        self.attributes.let_go()
        for view in (self.view, *(() if self._units is None else self._units.views.values())):
            view.let_go()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def forget_box(self) -> None:
        """In a forked child: the black box is its parent's."""
        self._box = None

    def restore_own(
        self, regions: Mapping[str, RegionCopy], forms: SavedForms, any_rank: Iterable[str] = ()
    ) -> list[str]:
        """Put back tensors that are this rank's own, but for gradients; why the outcome is not exact, if it is not."""
        self.gradients.refuse(regions)
        reasons = [*self.buffers.restore(regions, forms)]
        self.watch.keep(names_in(dict.fromkeys([*regions, *any_rank])))
        self.watch.copies.restore(regions)
        return reasons

    def learn(self, habits: Habits) -> None:
        """Go on from what the run that is resumed has learned of the loop."""
        self.loop.learn(habits)
        self.after_copy.learn(habits.after_copy)
        self.after_update.learn(habits.after_update, habits.updates)
        self._say_reasons()

    def ends_epoch(self, position: Position | None) -> bool | None:
        """Whether this is the last step of its epoch; None: not known."""
        return position.step == self._steps_per_epoch if position is not None and self._steps_per_epoch else None

    @property
    def position_at_gate(self) -> Position | None:
        """The newest thing that the loop has said: the name of the step that has begun, or else of the last one."""
        return self.position_under_way or self.named

    def under_way(self, position: Position) -> None:
        """The loop calls the next step so."""
        self.position_under_way = position

    def end_step(self, step: int, position: Position | None, *, updated: bool = True) -> None:
        """The end of `step`: everything that may move on from here. position: None if the loop has not named it.

        updated: there was an update in it.
        """
        if not updated:  # else it was finished before the update
            self.finish_copy()
        if self.loop.passes.end_step():
            self._say_reasons()
        ends_epoch = self.ends_epoch(position)
        self.extras_now = self.extras.ended(self.extras_now, updated)
        self._ended_here += 1
        look = self._ended_here & (self._ended_here - 1) == 0  # after 1, 2, 4, 8, ... steps
        late: list[str] = []
        if self.local_extras:
            before = self._tentative_local or self.local_extras_now
            self.local_extras_now, moved_late = self.local_extras.again(before)
            late = self.local_extras.called(moved_late)
        moved = self._see_what_moves(look=look)
        if updated:  # a loop that skips an update may step its schedulers or not
            self.after_update.happened({**self.extras_now.moved, **moved}, self.after_update.steps + 1, ends_epoch)
        if look or not self._ended_here % extras.EVERY:
            self.extras_by_rank()
            if self.source is not None:
                self.source.follow_files()
        self.attributes.end_step()
        if look or ends_epoch or self.looks_here:
            self.attributes.look(beyond=look)
            states = {"extras": self.extras_now.states, "local_extras": self.local_extras_now.states}
            said = {f"{of}[{name!r}]": one for of, every in states.items() for name, one in every.items()}
            self.attributes.compare_extras({
                name: one for name, one in said.items() if not isinstance(one, extras.LeftOut)
            })  # fmt: skip
        self._keep(step, position, late, comparable=self.watch.same_copies(), ends_epoch=ends_epoch)
        if look:
            self.watch.announce_left_out()
            self.ledger.tell(*self.extras.own_reasons, *self.local_extras.own_reasons)
        if self._units is not None and not self._units.pure:
            self._units.check_step()
            if self._ended_here == 1:  # the optimizer's state is there since this step
                self._units.exclude_buffers(self.buffers.captured)
                self._units.check()

    @property
    def looks_here(self) -> bool:
        """Whether the step that ended last is one of those at whose ends all attributes are looked at."""
        now = self._ended_here <= attributes.LOOKS or not self._ended_here % extras.EVERY
        return now and not self.attributes.is_slow

    def look_again(self, *, expected: bool = False) -> bool:
        """The loop, which ended its step early (`ends_early`), is done with what came after: take the copies once more.

        What has moved is told, once: a rank that is killed in between leaves it as it was before. expected: the loop
        says so itself. True.
        """
        self.ends_early = False
        self.extras_now, of_all = self.extras.again(self.extras_now, loaders=False)
        self.local_extras_now, of_rank = self.local_extras.again(self.local_extras_now, loaders=False)
        moved = [*self.extras.called(of_all), *self.local_extras.called(of_rank)]
        if self.source is not None:
            moved += self.source.look_again(self.watch.values.groups(), self.extras_now)
        self.attributes.follow()
        if of_rank or self.looks_here:  # an evaluation, say, which has moved more than that
            self.attributes.look()
        moved += self.gradients.again()
        self._make_room()
        if self._box is not None:
            self._of_all = self._said_of_all()
            drawn = self.attributes.generators.drawn()
            own = self.attributes.document()
            moved += filter(None, [attributes.differing(self._attributes_ended, own)])

            def document(region: str | None) -> bytes:
                moved.extend([] if region is None else [region])
                return self._document_of(self.named, self.local_extras_now, own, begun=True, between=moved)

            self._box.committed_again(self._step, document)
            if expected:
                self.loop.begins(drew=drawn != "" or any(name.startswith("rng/") for name in moved))
        if moved and self.source is not None:
            self.source.copy_again()
        if moved and not (self.loop.known.early_reasons or self.loop.repeats):
            why = changed_after_the_end(moved, self._step, expected=expected)
            self.loop.know(early_reasons=[why])
        return True

    def extras_by_rank(self) -> dict[str, int]:
        """Digests of what has to be the same on all ranks; noted, for whoever resumes."""
        states = {name: one for name, one in self.extras_now.states.items() if self.extras.are_users(name)}
        found = extras.digests(states, {name: self.extra_buffers.of(name) for name in states})
        self._digests = [self._ended_here, extras.by_extra(found, states)]
        return found

    def _see_what_moves(self, *, look: bool) -> dict[str, int]:
        """At a step's end, before it is copied: what has to be copied of it, and what has moved since the update."""
        updated = self.watch.updating
        moved = self.watch.end_step(look=look)
        self.tensors.make_room()
        for one in (self.buffers, self.extra_buffers):
            if one.modules_change:
                one.follow()
        if look:
            self.buffers.admit_late()
        skipped = bool(self._scalers) and any(leaf.startswith(self._scalers) for leaf in self.extras_now.moved)
        self.gradients.end_step(updated=updated, trained=self.watch.trained, look=look, skipped=skipped)
        if self.tensors.needs_room:
            self._make_room()
        return moved

    def _keep(
        self,
        step: int,
        position: Position | None,
        late: Sequence[str] = (),
        *,
        comparable: bool = True,
        ends_epoch: bool | None = None,
    ) -> None:
        """late: what of `local_extras` has changed since the tentative copy."""
        self.named = position or self.named
        self._step = step
        self.uncopied = self._hook is not None
        self.watch.mark_end(step)
        self._of_all = self._said_of_all()
        if self._box is not None:
            own = self._attributes_ended = self.attributes.document()
            early = {"begun": False, "early": self.loop.known.early_reasons} if self.ends_early else {}
            said = self._document_of(position, self.local_extras_now, own, **early)
            if self._box.committed(step, said, comparable=comparable, ends_epoch=ends_epoch):
                self._say_reasons()
            tentative, self._tentative_local = self._tentative_local, None
            unknown = tentative is not None and not self._late_named
            if unknown and (which := ", ".join(late) or attributes.differing(self._attributes_then, own)):
                self._moves_late(which)
            self._attributes_then = {}
            self.attributes.ended()
        self.position_under_way = None  # a writer in between finds no name, and never that of another step
        if self.source is not None:
            seen = self.after_update.copy()
            ended_groups = self.watch.values.groups_ended
            trained = self.watch.trained_ended
            self.source.committed(Snapshot(step, position, ended_groups, self.extras_now, seen, trained))

    def _moves_late(self, which: str) -> None:
        """Say so, once. From then on it may come in any step: to look in each would cost too much."""
        self._late_named = True
        _log.warning(
            "%s changed between the forward pass and the end of step %s: if a rank is killed in between, the "
            "resume is not exact; change it before the forward pass of the step that uses it",
            which,
            self._step,
        )
        if which not in self.after_copy:
            self.after_copy.happened({which: 1}, self._step, None)
            self._say_reasons()

    def epoch_start(self, epoch: int) -> None:
        """The random number streams, and what moves, before the first batch of `epoch` is asked for."""
        if self._box is not None:
            self._box.epoch_start(epoch, _encoded(self.attributes.document(look=True)))

    def tentative(self, *, late: bool = False) -> None:
        """The copy of the step under way, before anything that lets a peer update.

        late: only before this rank's own update, as neither the model nor a DDP was called in this step.
        """
        if self._box is not None and not self._paused:
            self.finish_copy()
            for one in (self.buffers, self.extra_buffers):
                if one.modules_change:
                    one.look_up()
            self.ends_early = self.uncopied = False  # the next step is under way, whether or not the loop has said so
            self._tentative_local = self.local_extras.again(self.local_extras_now)[0]
            looks = self._ended_here < attributes.LOOKS and not self.attributes.is_slow
            self._attributes_then = self.attributes.document(look=looks)
            if not late:
                self.work.arrive()
                self.loop.passes.count += self._hook is not None
                if self.gradients.looks_in_backward:
                    self.gradients.in_backward()
                self.gradients.backward.under_way = True
            said = self._document_of(self.position_under_way, self._tentative_local, self._attributes_then)
            self._box.tentative(self._step + 1, said)

    def finish_copy(self) -> None:
        """Before anything that lets a peer update, or this rank: the whole copy of the last step's end is whole."""
        if self.source is not None and self.source.copies and not self.source.finish_copy():
            self.watch.see()

    def _say_reasons(self) -> None:
        if self._box is None:
            return
        habits = replace(
            self.loop.known,
            after_copy=self.after_copy,
            after_update={},
            updates=0,
            passes=self.loop.passes.usual,
            constants=self._constants or {},
        )
        facts = {"reasons": [brief(one) for one in self.ledger.reasons], **habits.to_json()}
        self._box.box.set_facts(json.dumps(facts).encode())

    def _document_of(self, position: Position | None, local: ExtrasSnapshot, own: dict[str, Any], **more: Any) -> bytes:
        """A `StepDocument` of a step that the loop calls so. own: members of `attributes`."""
        epoch, step = position or (None, None)
        said: dict[str, Any] = {"epoch": epoch, "step": step, "needs_epoch_start": self._steps_per_epoch is not None}
        said["order"] = self.order()
        if position is None:
            said["after"] = self.named if self.names_steps else ()
        else:
            said["ends_epoch"] = self.ends_epoch(position)
        if self.local_extras:
            inline = pack_inline(self.local_extras, local)
            said |= {"local_extras": pack(inline.to_json(), "local_extras"), "reasons": inline.tree.reasons}
        return _encoded({**said, **own, **self._of_all, **more})

    def _said_of_all(self) -> dict[str, Any]:
        alike = self.watch.values.members(self.watch.alike() if self.watch.copies else {})
        return {"extras": self._digests, **alike, "state": self.watch.state_marks()}


def _encoded(document: Mapping[str, Any]) -> bytes:
    """
    >>> _encoded({"step": 7, "early": ["\\ud800"]})
    b'{"step": 7, "early": ["\\\\ud800"]}'
    """
    try:
        return msgspec.json.encode(document)
    except (UnicodeEncodeError, TypeError):  # text of the user's with half a surrogate pair, or of a class of its own
        return json.dumps(document).encode()
