"""What of a rank's state moves at which moments of a step, and what that means for what is saved.

    end of step N     mark; what is known to move outside of updates is copied
    before the update what has moved since that mark is moved by the loop itself: it is copied from now on
    update            the optimizer writes
    after the update  mark
    end of step N+1   what has moved since is written by the loop after its update: where a step is cut off in
                      between, that may be missing

In an incident the writer compares once more: what has moved since the mark, and was not copied, is named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter, is_, ne
from typing import Any

import torch
import xxhash
from torch.optim.optimizer import Optimizer

from lastwords import clock
from lastwords.checkpoint.meta import Marks
from lastwords.errors import MismatchError, some
from lastwords.optim_wrapper.capture.box_tensors import BoxTensor, BoxTensors, stored_form, tensor_of
from lastwords.optim_wrapper.capture.buffers import Buffers
from lastwords.optim_wrapper.capture.device_copies import DeviceMark, DeviceMarks, OfDevice, by_device, is_seen
from lastwords.optim_wrapper.capture.witness import ROUNDS, Mark, StateName, Witness, tensors_of
from lastwords.optim_wrapper.joined_optimizer import with_state
from lastwords.optim_wrapper.state.own_state import OwnState
from lastwords.optim_wrapper.state.plain_values import PlainValues, groups_differ, seen
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.tensors.tensor_bytes import CODES, bytes_in, bytes_of, overwrite, problem_of
from lastwords.processor.box_layout import RegionCopy
from lastwords.processor.recurrence import Forecast, Late
from lastwords.sharding import zero
from lastwords.sharding.dtensor import local_of
from lastwords.torch_private import foreach_copy

# State that the loop takes out of the optimizer between two updates, to save memory, and puts back for the next.
#
# If a rank dies in between, the optimizer's state is not all there. What was taken out after the end of a step is
# known to the witness, and is saved as if it were in its place, as long as nobody has written to it. What is missing
# when a step ends may be back for the next update or gone for good. Until then it is reported; if it is back by then,
# it is reported at each later end of a step; if not, the loop throws state away, and what is saved is complete.

Lent = dict[Any, dict[Any, Any] | None]
"""Parameter -> what its state lacks; None: it is not worth saving."""

_state = attrgetter("state")

ENTRIES_MAX = 2048
"""Of no more it is looked at whether the loop has put other tensors into them after its update."""

AMOUNT = "the amount of optimizer state"
"""What messages call it that the loop takes state out after its update."""


class StateCounts:
    """How much state the optimizers have at the moments of a step: a microsecond for each 50 parameters.

    optimizers: those that have a state of their own; may change. Training thread, except `is_out`.
    """

    def __init__(self, optimizers: Collection[Optimizer]) -> None:
        self._optimizers = optimizers
        self._updated: int | None = None
        self._out = False
        """There was less at the last step's end than after its update, or than at the end before it."""
        self._ended = 0
        self._comes_back = self._stays_away = False
        self._seen = -1
        self._lasting: list[Optimizer] = []
        """Those that do not make their `state` anew for whoever asks."""
        self._states: list[Any] = []
        self._states_updated: list[Any] = []
        """Their `state` at the last look, and after the last update."""
        self._tensors: list[torch.Tensor] | None = None
        """What the entries held after the update of the step under way, if that was counted."""

    def look(self) -> None:
        """See what there is now."""
        self._lasting = [one for one in self._optimizers if _state(one) is _state(one)]
        self._states = [*map(_state, self._lasting)]
        self._seen = self.now()

    def has_changed(self, entries: int) -> bool:
        """Whether there is something else than at the last look. entries: what `now` says."""
        return entries != self._seen or self.is_loaded()

    def is_loaded(self, *, late: bool = False) -> bool:
        """Whether one has another `state` than at the last look (late: than after the update), as `load_state_dict()`
        gives it. Any thread.
        """
        return not all(map(is_, map(_state, self._lasting), self._states_updated if late else self._states))

    def now(self) -> int:
        """Number of entries of all parameters together."""
        entries = 0
        for one in self._optimizers:
            try:
                entries += sum(map(len, one.state.values()))
            except TypeError:  # there are values without a length
                entries += sum(len(value) if isinstance(value, dict) else 1 for value in one.state.values())
        return entries

    def begin_update(self) -> None:
        """The optimizer is about to read its state."""
        if self._out:
            back = self.now() > self._ended
            self._comes_back, self._stays_away = self._comes_back or back, not back
            self._out = False

    def end_update(self, *, count: bool) -> None:
        """The optimizer has written it. count: else it is not counted in this step."""
        self._states_updated, self._tensors = [*map(_state, self._lasting)], None
        if count:
            self._updated = self.now()
            self._tensors = self._held() if self._updated <= ENTRIES_MAX else None

    def is_replaced(self) -> bool:
        """Whether entries hold other tensors than after the update, as far as that was counted."""
        then, now = self._tensors, [] if self._tensors is None else self._held()
        return then is not None and len(then) == len(now) and not all(map(is_, then, now))

    def _held(self) -> list[torch.Tensor]:
        tables = [table for one in self._lasting for table in [*one.state.values()] if isinstance(table, dict)]
        return [value for table in tables for value in [*table.values()] if isinstance(value, torch.Tensor)]

    def is_out(self, entries: int | None = None) -> bool:
        """Whether there is less now than after the update, or than at the last step's end. entries: what `now` says."""
        return (self.now() if entries is None else entries) < (self._ended if self._updated is None else self._updated)

    def end_step(self, entries: int) -> bool:
        """The step is over. Returns whether state is out."""
        self._out = self.is_out(entries)
        self._ended, self._updated = entries, None
        return self._out

    def reasons(self) -> list[str]:
        """Why what is saved of the last step's end may lack state, or have some that was not there then."""
        if self._comes_back:
            out = "the loop removes optimizer state after optimizer.step() and restores it before the next update"
            return [f"{out}, so it is missing from the state saved at a step's end"]
        if self._out and not self._stays_away:
            return ["optimizer state was removed between optimizer.step() and the end of the step"]
        if self.now() > self._ended:
            return ["optimizer state was added after the end of the step"]
        return []


def gone_for_good(witness: Witness, lent: Lent, parameters: Mapping[str, torch.Tensor]) -> list[StateName]:
    """Names of what was there at the last step's end and is not now, beside what is `lent`."""
    known = {name: lent.get(parameters.get(name.name), {}) for name in witness.gone()}
    return [name for name, values in known.items() if values is not None and witness.slot(name).key not in values]


def taken_out(
    witness: Witness,
    moved: Collection[StateName],
    parameters: Mapping[str, torch.Tensor],
    numbers: Iterable[tuple[Any, Any, Any]] = (),
) -> Lent:
    """State of each parameter that is not in the optimizer any more, as it was at the last step's end.

    moved: names of the tensors that are not what they were then. parameters: all, by name. numbers: parameter, key and
    value of what is no tensor and has changed. Writer's thread.
    """
    lent: Lent = {}
    for name in witness.gone():
        parameter = parameters.get(name.name)
        if name.kind == "optim" and parameter is not None and name not in moved:
            slot = witness.slot(name)
            lent[parameter] = {**(slot.table or {}), **(lent.get(parameter) or {}), slot.key: slot.tensor}
    for owner, key, value in numbers:
        lent[owner] = {**(lent.get(owner) or {}), key: value}
    without = [parameters[name.name] for name in emptied(witness, moved) if name.name in parameters]
    return lent | dict.fromkeys(without, None)


def emptied(witness: Witness, moved: Collection[StateName]) -> list[StateName]:
    """Which of these are optimizer state that has no memory any more."""
    found = {name: tensor for name in moved if name.kind == "optim" and (tensor := witness.get(name)) is not None}
    return [name for name, tensor in found.items() if _is_empty(tensor)]


def _is_empty(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 0 or local_of(tensor).untyped_storage().nbytes() == 0


# Copies, taken at each step's end, of tensors that something else than the optimizer writes.
#
# By the time of an incident such a tensor (a momentum encoder's, a codebook, weights that a second backward pass
# perturbs) has moved on, and there is no rank that still has what it was. So from the first time that one is seen to
# move, it is copied here. The writer of its unit saves the copy in the tensor's place. Small parameters go into the
# black box as well, as this rank's own: they may differ from rank to rank, since nothing keeps them alike.

_log = logging.getLogger(__name__)

BOX_EACH_BYTES_MAX, BOX_BYTES_MAX = 1 << 20, 16 << 20
"""Limits of one parameter, and of all, in the black box, which has room for four copies. Larger ones are kept in host
memory only, and assumed to be the same on every rank, which the checksum of their sampled words confirms."""

MUCH_BYTES = 64 << 20
"""From here on the first line about copies is a warning."""

PREFIX = "model/"


class BoundaryCopies:
    """Keeps them in host memory for the writer, and small parameters in `tensors` too. Training thread, except `at`."""

    def __init__(self, tensors: BoxTensors | None = None) -> None:
        self.tensors = tensors or BoxTensors()
        self._live: dict[StateName, torch.Tensor] = {}
        self._host: dict[StateName, torch.Tensor] = {}
        self._resized: set[StateName] = set()
        self._step = -1
        self._untold: list[StateName] = []

    def __contains__(self, name: StateName) -> bool:
        return name in self._live

    def __bool__(self) -> bool:
        return bool(self._live)

    @property
    def names(self) -> list[StateName]:
        return [*self._live]

    @property
    def _boxed(self) -> dict[StateName, BoxTensor]:
        every = self.tensors.of_kind(PREFIX).items()
        return {StateName("model", name): kept for name, kept in every if not kept.given_up}

    @property
    def unboxed(self) -> list[StateName]:
        """Names of those that no black box has: they have to be the same on every rank."""
        boxed = self._boxed
        return [name for name in self._live if name not in boxed]

    def own(self) -> frozenset[str]:
        """Names of the parameters that each rank has for itself."""
        return frozenset(name.name for name in self._boxed)

    @property
    def late(self) -> list[StateName]:
        """Names of those that only a black box's committed copies have."""
        return [name for name, kept in self._boxed.items() if kept.region.committed_only]

    def add(self, tensors: Mapping[StateName, torch.Tensor], frozen: Callable[[StateName], bool]) -> None:
        """Copy these as well from now on."""
        known = self._live.keys() | self._resized
        new = {name: tensor for name, tensor in tensors.items() if name not in known}
        room = BOX_BYTES_MAX - sum(kept.region.nbytes for kept in self._boxed.values())
        for name, tensor in new.items():
            self._live[name] = tensor
            small = tensor.dtype in CODES and tensor.nbytes <= min(BOX_EACH_BYTES_MAX, room)
            if name.kind == "model" and small:
                late = not frozen(name)  # else no update changes it
                region = PREFIX + name.name
                self.tensors.add(
                    BoxTensor(region, f"the {name}", self._live, name, late=late, optional=True, alone=True)
                )
                room -= tensor.nbytes
        self._untold += new

    def follow(self, tensor_of: Callable[[StateName], torch.Tensor | None]) -> None:
        """Tensors may have been replaced by others; what is gone, or has another form, is copied no more."""
        for name in [*self._live]:
            tensor = tensor_of(name)
            if tensor is self._live[name]:
                continue
            if tensor is None or not _same_form(tensor, self._live[name]):
                self._leave_out(name)
                continue
            self._live[name] = tensor

    def _leave_out(self, name: StateName) -> None:
        del self._live[name]
        self._host.pop(name, None)
        if name.kind == "model":
            self.tensors.remove(PREFIX + name.name)

    # ------------------------------------------------------------------ host memory

    def copy(self, step: int) -> None:
        """All of them, as they are at the end of `step`."""
        self._step = -1
        live = self._live
        for name in [name for name, host in self._host.items() if not _same_form(host, live[name])]:
            self._leave_out(name)  # `resize_` has given it another form, and will again: it is named, not copied
            self._resized.add(name)
        tensors = {name: tensor for name, tensor in live.items() if not problem_of(tensor)}
        for name in self._host.keys() - tensors.keys():
            del self._host[name]  # freed for now: it is named if it is to be saved
        if not tensors:
            return
        began_s = clock.mono_s()
        for name, tensor in tensors.items():
            if name not in self._host:
                self._host[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        with torch.inference_mode():
            foreach_copy([self._host[name] for name in tensors], [*tensors.values()])
        self._step = step
        if self._untold:
            self._tell(clock.mono_s() - began_s)

    def checksum(self, names: Iterable[StateName]) -> int:
        """Of the newest copies of some of them."""
        digest = xxhash.xxh3_64()
        for name in names:
            memory = bytes_of(self._host[name]) if name in self._host else b""
            digest.update(b"?" if memory is None else memory)
        return digest.intdigest()

    def at(self, step: int) -> dict[StateName, memoryview]:
        """Bytes of each as it was at the end of `step`; none if they were taken at another one. Any thread.

        Not of one that has another form by now: what is stored beside the bytes is the form of today.
        """
        if self._step != step:
            return {}
        same = {name: host for name, host in self._host.items() if _same_form(host, self._live[name])}
        return {name: memory for name, host in same.items() if (memory := bytes_of(host)) is not None}

    def _tell(self, took_s: float) -> None:
        nbytes = sum(self._live[name].nbytes for name in self._untold if name in self._live)
        which = f"the {some(self._untold, 1)}"
        self._untold = []
        _log.log(
            logging.WARNING if nbytes >= MUCH_BYTES else logging.INFO,
            "%s (%.1f MB) changed outside of optimizer.step(), so from now on %s copied at each step's end (%.1f ms a "
            "step for all such tensors); copy=False avoids the copies, but makes resumes inexact",
            which,
            nbytes / 1e6,
            "it is" if which.endswith("'") else "they are",
            took_s * 1e3,
        )

    def restore(self, regions: Mapping[str, RegionCopy]) -> None:
        """Put this rank's own back into tensors that were `add`ed; other regions are ignored.

        Raises MismatchError, before anything is changed, for one of another form.
        """
        saved = {name: regions[PREFIX + name.name] for name in self._live if PREFIX + name.name in regions}
        different = {
            name.name: f"saved {copy.dtype} {tuple(copy.shape)}, here {form}"
            for name, copy in saved.items()
            if (form := stored_form(self._live[name])) != (copy.dtype, tuple(copy.shape))
        }
        if different:
            raise MismatchError(f"saved parameters do not match this model: {different}", different=different)
        for name, copy in saved.items():
            overwrite(self._live[name], tensor_of(copy))


def names_in(regions: Iterable[str]) -> list[StateName]:
    """Of which parameters there are copies among these regions of a black box.

    >>> names_in(["rng/torch", "model/k.weight"])
    [StateName(kind='model', name='k.weight', key=None)]
    """
    return [StateName("model", name.removeprefix(PREFIX)) for name in regions if name.startswith(PREFIX)]


def _same_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


LOOKS, LOOK_EVERY = 16, 4
"""Before the update it is looked at in so many steps first, and then in one of so many."""

FULL_LOOKS = 4
"""At the ends of so many steps all bytes are looked at of what the optimizer has nothing to do with, in the host's
memory: a queue or a codebook, of which a step writes a few rows through `.data`, is found out then."""

_HYPERPARAMETERS, _NUMBERS = "hyperparameters", "optimizer's numbers"

_requires_grad = attrgetter("requires_grad")

_called = cache(str)
"""What messages call a `StateName`."""


class StateWatch:
    """buffers: those that the black box has are watched there.

    copies: whether what moves outside of updates is copied, or only named. late: what has moved after updates, as
    `end_step` has said. Training thread, except what is said.
    """

    def __init__(
        self,
        view: UnitView,
        buffers: Buffers,
        *,
        copies: bool = True,
        late: Late | None = None,
    ) -> None:
        self._view = view
        self._late = Late() if late is None else late
        self._witness = Witness(lambda: dict(tensors_of(view, buffers.captured)))
        self._buffers = buffers
        self._promotes = copies
        self.copies = BoundaryCopies(buffers.tensors)
        self.values = PlainValues(view.optimizer, lambda: view.all_names().parameters)
        self._ended: Mark | None = None
        self._devices = DeviceMarks()
        self._seen: tuple[Mark | None, list[StateName], list[OfDevice]] = None, [], []
        """What of the devices has been marked at the last step's end, and the mark since which it is these."""
        self._ended_there: DeviceMark | None = None
        self._updated: Mark | None = None
        self._newest: tuple[Mark, int | None] | None = None
        self._looks_closely = True
        """Whether this is one of the steps in which it is looked at before the update."""
        self.updating = False
        """Whether the step under way has come to its update."""
        self._digests: dict[StateName, bytes] = {}
        self._parameters: list[torch.Tensor] = []
        self.trained_ended: tuple[Sequence[torch.Tensor], Sequence[bool]] = (), ()
        """Parameters, and `requires_grad` of each as of the last step's end: a loop may freeze some within a step."""
        by_hand = lambda was, now: groups_differ(was, now, view.optimizer.param_groups, self.schedulers)  # noqa: E731
        self._others: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], bool]]] = {
            _HYPERPARAMETERS: (self.values.groups, by_hand),
            f"the {_NUMBERS}": (lambda: self.values.now(self._ended_step + 1), ne),
            "requires_grad": (lambda: [*map(_requires_grad, self._parameters)], ne),
        }
        """What else the loop may change after its update: how to take its value, and whether two of them differ."""
        self._taken: dict[str, Any] = {}
        """Values after the update. Those that have never changed so are taken in some steps only."""
        self._named: set[StateName] = set()
        self._optimizers: list[Optimizer] = []
        self._counts = StateCounts(self._optimizers)
        self._steps = 0
        self._ended_step = -1
        self._checksums: dict[str, tuple[int, int, int]] = {}
        self._state: tuple[int | None, int | None] = None, None
        self._state_kind = ""
        self._keeps_more = False
        self._lasting: tuple[int, list[StateName]] = -1, []
        self._announced: set[str] = set()
        self.schedulers: list[Any] = []
        """Those among the extras, which know by themselves whether they are due."""
        self.verify_every = 0
        """All bytes are looked at in every so many steps."""

    # ------------------------------------------------------------------ training thread

    def begin_update(self) -> None:
        """The gradients are final. The first call of a step counts."""
        if self.updating or self._ended is None:
            return
        self.updating = True
        self._counts.begin_update()
        # Most of what moves does so from the start; what begins to later is named for a few steps before it is copied.
        if self._looks_closely or self._digests:
            self._note(self._moved(self._ended))

    def see(self) -> None:
        """What has moved since the last step's end, and before an update, is copied from now on."""
        if self._ended is not None and not self.updating:
            self._note([*dict.fromkeys([*self._moved(self._ended), *self._moved_there()])])

    def _moved_there(self) -> list[StateName]:
        """What lies on devices and is not what it was at the last step's end, whether or not torch has counted that."""
        there = self._ended_there
        return [] if there is None else [self._seen[1][at] for at in self._devices.changed(there)]

    def _moved(self, since: Mark) -> list[StateName]:
        modules = (
            [one for one in self._witness.replaced() if one.kind != "optim"] if self._witness.modules_change else []
        )
        return [*dict.fromkeys([*self._witness.moved(since), *modules])]

    def end_update(self) -> None:
        """The optimizer has written everything."""
        self._counts.end_update(count=self._looks_closely)
        self._updated = self._witness.mark(step=self._ended_step + 1)
        closely, late = self._looks_closely, self._late
        self._taken = {}
        for name, (take, _) in self._others.items():
            if closely or name is _HYPERPARAMETERS or name in late:
                self._taken[name] = take()

    def update_is_over(self) -> bool:
        """Whether the update of the step under way has been written."""
        return self._updated is not None

    def end_step(self, *, look: bool) -> dict[str, int]:
        """Before anything is copied of the step that has ended. look: whether to see which tensors there are now.

        Returns what has moved since its update, and how often.
        """
        moved: dict[str, int] = {}
        if self._updated is not None:
            until = self._witness.mark(self._updated)
            self._newest = until, self._witness.checksum(until.round)
            moved = self._written(self._updated, until)
            for name, was in self._taken.items():
                take, differ = self._others[name]
                if differ(was, take()):
                    moved[name] = 1
        else:
            self.see()
        self._updated, self.updating = None, False
        entries = self._counts.now()
        if self._counts.end_step(entries):
            moved[AMOUNT] = 1
        replaced = self._counts.is_replaced()
        if look or replaced or self._witness.modules_change or self._counts.has_changed(entries):
            late = replaced or self._counts.is_loaded(late=True)
            self.list_tensors()
            if late:
                moved |= {_called(name): 1 for name, _ in self._witness.items() if name.kind == "optim"}
        return moved

    def _written(self, since: Mark, until: Mark) -> dict[str, int]:
        """Tensors that were written in between, and how often."""
        witness = self._witness
        moved = witness.moved(since, until)
        return {_called(name): witness.writes(name, since, until) for name in moved} if moved else {}

    def trained(self) -> dict[str, torch.Tensor]:
        """The parameters that an optimizer has, by name."""
        ids = {id(one) for group in self._view.optimizer.param_groups for one in group["params"]}
        return {name: one for name, one in self._view.all_names().parameters.items() if id(one) in ids}

    @property
    def lasting(self) -> list[StateName]:
        """What only an update writes, as far as is known, and the witness sees: weights and state.

        The same list until another look.
        """
        if self._lasting[0] != self._witness.looks:
            trained = self.trained()
            names = [
                name
                for name, tensor in self._witness.items()
                if (tensor.device.type == "cpu" or is_seen(tensor))
                and (name.kind == "optim" or (name.kind == "model" and name.name in trained))
            ]
            self._lasting = self._witness.looks, names
        return self._lasting[1]

    def is_still(self, names: Collection[StateName]) -> bool:
        """Whether these are as they were at the last step's end, or copied. Any thread, before the next update."""
        moved = [] if self._ended is None else self._witness.moved(self._ended)
        known = {*names} if moved else set()
        return all(name not in known or name in self.copies for name in moved)

    def same_copies(self) -> bool:
        """Whether no buffer is kept that was not when the step's tentative copy was taken."""
        more, self._keeps_more = self._keeps_more, False
        return not more

    def list_tensors(self) -> None:
        """See which tensors there are now."""
        self._optimizers[:] = with_state(self._view.optimizer).values()
        self._counts.look()
        self._parameters = [*self._view.all_names().parameters.values()]
        self._witness.list_tensors()
        self._share()
        self.values.list_values()
        if self.copies:
            self.copies.follow(self._witness.get)

    def announce_left_out(self) -> None:
        """A look at all of the optimizer's state, which costs microseconds a parameter."""
        lost = [f"{reason}: it is not saved, and a resume will not be exact" for reason in self._view.left_out()]
        for text in [*lost, *self._view.restructured()]:
            if text not in self._announced:
                self._announced.add(text)
                _log.warning("%s", text)

    def mark_end(self, step: int) -> None:
        """The end of `step`: copies of what is known to move, a mark of the rest."""
        newest, self._newest = self._newest, None
        if newest is None or newest[0].look != self._witness.looks or newest[0].round != step % ROUNDS:
            newest = self._witness.mark(step=step), self._witness.checksum(step)
        before = self._state[step == self._ended_step]
        self._ended, self._ended_step, self._state = newest[0], step, (newest[1], before)
        try:
            self._ended_there = self._mark_devices(newest[0])
        except MemoryError as error:
            self._ended_there = None
            _log.info("what lies on devices is not looked at in step %d: %s", step, error)
        if self.copies:
            self.copies.follow(self._witness.live)
            self.copies.copy(step)
        self.values.mark_end(step)
        self.trained_ended = self._parameters, [*map(_requires_grad, self._parameters)]
        self._steps += 1
        self._looks_closely = self._steps <= LOOKS or self._steps * 0x9E3779B1 >> 16 & LOOK_EVERY - 1 == 0
        self._digests = {}
        digests = self.verify_every and step % self.verify_every == 0
        if digests or self._steps <= FULL_LOOKS:
            trained = {id(one) for group in self._view.optimizer.param_groups for one in group["params"]}
            self._digests = {
                name: _digest(tensor)
                for name, tensor in self._witness.items()
                if digests or (name.kind != "optim" and tensor.device.type == "cpu" and id(tensor) not in trained)
            }

    def _mark_devices(self, ended: Mark) -> DeviceMark | None:
        since, _, there = self._seen
        if since is None or since.look != ended.look or since.form is not ended.form:
            seen = {name: tensor for name, tensor in self._witness.items() if is_seen(tensor)}
            self._seen = ended, [*seen], (there := [])
            if seen:
                there += by_device([*seen.values()])
        return self._devices.mark(there) if there else None

    def again(self, step: int) -> list[str]:
        """`mark_end` once more, where anything has moved since; what has."""
        tensors = [] if self._ended is None else self._witness.moved(self._ended)
        numbers, others = self.values.moved()
        moved = [f"the {some(tensors)}"] if tensors else []
        if self._counts.is_loaded():
            self.list_tensors()
            moved.append("the optimizer's state")
        moved += [f"the {others or _NUMBERS}"] if others or numbers else []
        if [*map(_requires_grad, self._parameters)] != self.trained_ended[1]:
            moved.append("requires_grad")
        if moved:
            self.mark_end(step)
        return moved

    def know(self, own: Iterable[OwnState]) -> None:
        """These optimizers' state_dict() has more than what is looked at here."""
        for one in own:
            self._others[f"what {one.name} has"] = (lambda one=one: seen(one)), ne  # type: ignore[misc]

    def keep(self, names: Iterable[StateName]) -> None:
        """Copy these from now on: a run that is resumed has found that they move."""
        self._witness.list_tensors()
        if there := [name for name in names if self._witness.get(name) is not None]:
            self._promote(there)

    def alike(self) -> dict[str, Marks]:
        """What shows, beside other ranks' same, whether copies of this step's end are alike on all ranks.

        all: those that are taken to be; own: those that a tentative copy lacks.
        """
        kinds = {"all": self.copies.unboxed, "own": self.copies.late}
        return {kind: Marks(some(names), *self._sums(kind, names)) for kind, names in kinds.items() if names}

    def state_marks(self) -> tuple[str, int | None, int | None]:
        """`Marks`: show, beside other ranks' same, whether optimizer state and trained parameters are alike.

        what: what else has to be the same if they are.
        """
        return (self._state_kind, *self._state)

    def _sums(self, kind: str, names: list[StateName]) -> tuple[int, int]:
        """Of the last step's end, and of the one before."""
        step = -1 if self._ended is None else self._ended_step
        if kind not in self._checksums or self._checksums[kind][0] != step:
            now = self.copies.checksum(names)
            self._checksums[kind] = step, now, self._checksums.get(kind, (0, 0, 0))[1]
        return self._checksums[kind][1:]

    # ------------------------------------------------------------------ writer's thread

    def moved_since(self, step: int) -> tuple[list[StateName], Lent, list[str]]:
        """What is not as it was at the end of `step`, the last one, and was not copied then; and how to save it.

        Lent: state that has been taken out of the optimizer, and can still be saved as it was. Last: further reasons.
        """
        if self._ended is None:
            return [], {}, []
        moved = [*dict.fromkeys([*self._witness.moved(self._ended), *self._moved_there()])]
        parameters = self._view.all_names().parameters
        nested = len(self._optimizers) > len(zero.parts_of(self._view.optimizer))
        numbers, others = self.values.moved()
        lent = {} if nested else taken_out(self._witness, moved, parameters, numbers)
        lost, empty = gone_for_good(self._witness, lent, parameters), emptied(self._witness, moved)
        copied = self.copies.at(step)

        def is_copied(name: StateName) -> bool:
            live = self._witness.live(name)
            return name in copied and (live is None or live.nbytes == copied[name].nbytes)

        found = dict.fromkeys([*moved, *self._witness.replaced()])
        reasons = self._counts.reasons()
        if self._counts.is_loaded() and not any(name.kind == "optim" for name in found):
            reasons.append(f"load_state_dict() of the optimizer was called after the end of step {step}")
        if nested and numbers and not others:
            others = _NUMBERS
        if others:
            reasons.append(f"the {others} changed outside of optimizer.step() after the end of step {step}")
        if lost:
            reasons.append(f"the {some(lost)} was removed after the end of step {step}, and is not saved")
        if empty:
            reasons.append(f"the {some(empty)} was emptied after the end of step {step}; a resume reinitialises it")
        return [name for name in found if name not in empty and not is_copied(name)], lent, reasons

    def moved_late(self) -> dict[str, int]:
        """Of tensors and state, what has moved since the update in the step under way, and how often: 0 if unknown."""
        if self._updated is None:
            return {}
        moved = self._written(self._updated, self._witness.mark(self._updated))
        return moved | ({AMOUNT: 0} if self._counts.is_out() else {})

    def cut_off(self, ends_epoch: bool | None = None) -> dict[str, str]:
        """What a step that was cut off between its update and its end may lack, and what is known of that."""
        if self._updated is None:
            return {}
        late, tensors = self._late, [_called(name) for name, _ in self._witness.items()]
        found = late.may_move([*tensors, *self._others, AMOUNT], late.steps + 1, ends_epoch, self.moved_late())
        if ends_epoch is not False and late.keys().isdisjoint(tensors) and any(map(_swings, self._optimizers)):
            found["weights that eval() of the optimizer swaps"] = Forecast.NEVER.value
        return found

    # ------------------------------------------------------------------ inside

    def _share(self) -> None:
        """What is copied is looked at as a whole, and may be this rank's own."""
        trained = self.trained()
        every = {name for name, _ in self._witness.items() if name.kind == "optim" or name.name in trained}
        shared = {name for name in every if name.kind != "buffer" and name not in self.copies}
        usual = self._witness.share(shared) and shared == every
        kind = "" if usual else xxhash.xxh3_64_hexdigest(repr(sorted(map(str, shared))).encode())
        if kind != self._state_kind:
            self._state_kind, self._state = kind, (None, None)

    def _note(self, moved: list[StateName]) -> None:
        """These have moved between the end of a step and the next update."""
        if self._digests:
            here = dict(self._witness.items())
            seen = {*moved}
            moved += [name for name, was in self._digests.items() if name not in seen and name in here
                      and _digest(here[name]) != was]  # fmt: skip
        if new := [name for name in moved if name not in self.copies and name not in self._named]:
            self._promote(new)

    def _promote(self, names: list[StateName]) -> None:
        if not self._promotes:
            self._named.update(names)
            nbytes = sum(tensor.nbytes for name in names if (tensor := self._witness.get(name)) is not None)
            _log.warning(
                "the %s (%.1f MB) changed outside of optimizer.step(); with copy=False a rank that dies before "
                "the next update leaves a checkpoint that is not exact",
                some(names),
                nbytes / 1e6,
            )
            return
        buffers = [name for name in names if name.kind == "buffer" and self._buffers.keep(name.name)]
        self._keeps_more = bool(buffers)
        found = {name: self._witness.get(name) for name in names if name not in buffers}
        rest = {name: tensor for name, tensor in found.items() if tensor is not None}
        trained = self.trained()
        self.copies.add(rest, lambda name: name.kind == "model" and name.name not in trained)
        self._share()


def _swings(optimizer: Optimizer) -> bool:
    """Whether it has weights for training and others to be looked at, as schedule-free ones have."""
    return all(callable(getattr(optimizer, name, None)) for name in ("eval", "train"))


def _digest(tensor: torch.Tensor) -> bytes:
    """Of all its bytes; of none where it cannot be read now."""
    return b"" if problem_of(tensor) else xxhash.xxh3_128_digest(bytes_in(tensor))
