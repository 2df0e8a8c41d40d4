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
from collections.abc import Callable, Collection, Iterable
from functools import cache
from operator import ne
from typing import Any

import torch
import xxhash
from torch.optim.optimizer import Optimizer

from lastwords.checkpoint.meta import Marks
from lastwords.optim_wrapper.capture.boundary_copies import BoundaryCopies
from lastwords.optim_wrapper.capture.box_tensors import BoxTensors
from lastwords.optim_wrapper.capture.device_copies import DeviceMarks, OfDevice, by_device, is_seen
from lastwords.optim_wrapper.capture.device_copies import Mark as DeviceMark
from lastwords.optim_wrapper.capture.taken_out import AMOUNT, Lent, StateCounts, emptied, gone_for_good, taken_out
from lastwords.optim_wrapper.capture.witness import ROUNDS, Mark, StateName, Witness, tensors_of
from lastwords.optim_wrapper.joined_optimizer import with_state
from lastwords.optim_wrapper.state.own_state import OwnState
from lastwords.optim_wrapper.state.plain_values import PlainValues, groups_differ, seen
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of, problem_of, staged_bytes
from lastwords.processor.recurrence import Forecast, Late, some
from lastwords.sharding import zero

_log = logging.getLogger(__name__)

LOOKS, LOOK_EVERY = 16, 4
"""Before the update it is looked at in so many steps first, and then in one of so many."""

FULL_LOOKS = 4
"""At the ends of so many steps all bytes are looked at of what the optimizer has nothing to do with, in the host's
memory: a queue or a codebook, of which a step writes a few rows through `.data`, is found out then."""

_HYPERPARAMETERS = "hyperparameters"

_called = cache(str)
"""What messages call a `StateName`."""


class StateWatch:
    """captured: names of the buffers that the black box has. keep_buffer: from now on it has this one too.

    copies: whether what moves outside of updates is copied, or only named. late: what has moved after updates, as
    `end_step` has said. Training thread, except what is said.
    """

    def __init__(
        self,
        view: UnitView,
        captured: Callable[[], frozenset[str]],
        keep_buffer: Callable[[str], bool],
        tensors: BoxTensors | None = None,
        *,
        copies: bool = True,
        sampled: bool = True,
        late: Late | None = None,
    ) -> None:
        self._view = view
        self._late = Late() if late is None else late
        self._witness = Witness(lambda: dict(tensors_of(view, captured)), sampled=sampled)
        self._keep_buffer = keep_buffer
        self._promotes = copies
        self.copies = BoundaryCopies(tensors)
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
        self._updating = False
        self._digests: dict[StateName, bytes] = {}
        self._parameters: list[torch.Tensor] = []
        by_hand = lambda was, now: groups_differ(was, now, view.optimizer.param_groups, self.schedulers)  # noqa: E731
        self._others: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], bool]]] = {
            _HYPERPARAMETERS: (self.values.groups, by_hand),
            "the optimizer's numbers": (lambda: self.values.now(self._ended_step + 1), ne),
            "requires_grad": (lambda: [one.requires_grad for one in self._parameters], ne),
        }
        """What else the loop may change after its update: how to take its value, and whether two of them differ."""
        self._taken: dict[str, Any] = {}
        """Values after the update. Those that have never changed so are taken in some steps only."""
        self._named: set[StateName] = set()
        self._optimizers: list[Optimizer] = []
        self._counts = StateCounts(lambda: self._optimizers)
        self._entries = -1
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
        if self._updating or self._ended is None:
            return
        self._updating = True
        self._counts.begin_update()
        # Most of what moves does so from the start; what begins to later is named for a few steps before it is copied.
        if self._looks_closely or self._digests:
            self._note(self._moved(self._ended))

    def see(self) -> None:
        """What has moved since the last step's end, and before an update, is copied from now on."""
        if self._ended is not None and not self._updating:
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
        if self._looks_closely:
            self._counts.end_update()
        self._updated = self._witness.mark(step=self._ended_step + 1)
        closely, late = self._looks_closely, self._late
        self._taken = {
            name: take()
            for name, (take, _) in self._others.items()
            if closely or name is _HYPERPARAMETERS or name in late
        }

    @property
    def was_updated(self) -> bool:
        """Whether the step under way has come to its update."""
        return self._updating

    @property
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
        self._updated, self._updating = None, False
        entries = self._counts.now()
        if self._counts.end_step(entries):
            moved[AMOUNT] = 1
        if look or entries != self._entries or self._witness.modules_change:
            self.look()
        return moved

    def _written(self, since: Mark, until: Mark) -> dict[str, int]:
        """Tensors that were written in between, and how often."""
        witness = self._witness
        return {_called(name): witness.writes(name, since, until) for name in witness.moved(since, until)}

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

    def look(self) -> None:
        """See which tensors there are now."""
        self._optimizers = [*with_state(self._view.optimizer).values()]
        self._entries = self._counts.now()
        self._parameters = [*self._view.all_names().parameters.values()]
        self._witness.look()
        self._share()
        self.values.look()
        if self.copies:
            self.copies.follow(self._witness.get)

    def announce_left_out(self) -> None:
        """A look at all of the optimizer's state, which costs microseconds a parameter."""
        for reason in self._view.left_out():
            if reason not in self._announced:
                self._announced.add(reason)
                _log.warning("%s: it is not saved, and a resume will not be exact", reason)

    def take(self, step: int, *, digests: bool = False) -> None:
        """The end of `step`: copies of what is known to move, a mark of the rest. digests: of all bytes, too."""
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
            self.copies.take(step)
        self.values.take(step)
        self._steps += 1
        self._looks_closely = self._steps <= LOOKS or self._steps * 0x9E3779B1 >> 16 & LOOK_EVERY - 1 == 0
        self._digests = {}
        digests = digests or bool(self.verify_every and step % self.verify_every == 0)
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
        """`take` once more, where anything has moved since; what has."""
        moved = [] if self._ended is None else self._witness.moved(self._ended)
        if moved:
            self.take(step)
        return [f"the {some(moved)}"] if moved else []

    def know(self, own: Iterable[OwnState]) -> None:
        """These optimizers' state_dict() has more than what is looked at here."""
        for one in own:
            self._others[f"what {one.name} has"] = (lambda one=one: seen(one)), ne  # type: ignore[misc]

    def keep(self, names: Iterable[StateName]) -> None:
        """Copy these from now on: a run that is resumed has found that they move."""
        self._witness.look()
        self._promote([name for name in names if self._witness.get(name) is not None])

    def alike(self) -> dict[str, Marks]:
        """What shows, beside other ranks' same, whether copies of this step's end are alike on all ranks.

        all: those that are taken to be; own: those that a tentative copy lacks.
        """
        kinds = {"all": self.copies.unboxed, "own": self.copies.late}
        return {kind: Marks(some(names), *self._sums(kind, names)) for kind, names in kinds.items() if names}

    def state_marks(self) -> Marks:
        """Shows, beside other ranks' same, whether optimizer state and trained parameters are alike.

        what: what else has to be the same if they are.
        """
        return Marks(self._state_kind, *self._state)

    def _sums(self, kind: str, names: list[StateName]) -> tuple[int, int]:
        """Of the last step's end, and of the one before."""
        step = -1 if self._ended is None else self._ended_step
        if kind not in self._checksums or self._checksums[kind][0] != step:
            now = self.copies.checksum(names)
            self._checksums[kind] = step, now, self._checksums.get(kind, (0, 0, 0))[1]
        return self._checksums[kind][1:]

    # ------------------------------------------------------------------ writer's thread

    def copies_at(self, step: int) -> dict[StateName, memoryview]:
        """What is to be saved in the live tensors' place at the end of `step`."""
        return self.copies.at(step)

    @property
    def copied(self) -> list[StateName]:
        """What is copied at each step's end."""
        return self.copies.names

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
        if nested and numbers and not others:
            others = "optimizer's numbers"
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
        buffers = [name for name in names if name.kind == "buffer" and self._keep_buffer(name.name)]
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
    if problem_of(tensor):
        return b""
    memory = bytes_of(tensor)
    return xxhash.xxh3_128_digest(staged_bytes(tensor) if memory is None else memory)
