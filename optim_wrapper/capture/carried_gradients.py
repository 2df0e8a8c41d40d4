"""Gradients that live from one step to the next: of a loop that accumulates by itself over steps without an update.

They are this rank's own (under `no_sync` nobody else has them), so they go into the black box, at the end of each step
in which their optimizer has not updated. After its update most loops set them to zero or to None before they count
again; those of a loop that goes on with them (`GradientHabit`) are carried as well, also those of parameters that no
optimizer has: clipping counts them, and a later group may bring them in. Those of modules among the extras, and of
tensors in dicts among them, always are, as nothing is known of their updates.
Those that a GradScaler among the extras has skipped, which shows in its scale, are used up like those of an update;
where there are several optimizers it does not show whose, so they are saved nevertheless.
Those that FSDP2 keeps whole, or has reduced within a shard group only, while its sync is off, are named.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, call, is_not, methodcaller
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from lastwords.errors import MismatchError
from lastwords.optim_wrapper.capture.box_tensors import BoxTensor, BoxTensors, stored_form, tensor_of, unstorable
from lastwords.optim_wrapper.state.extras import Extras
from lastwords.optim_wrapper.tensors.tensor_tree import put_gradient
from lastwords.optim_wrapper.wrapper import stands_in
from lastwords.processor.box_layout import RegionCopy
from lastwords.sharding.dtensor import empty_shard, has_unreduced, is_dtensor, local_of, placements_to_json

# What a loop does with the gradients of an update before it adds the next ones to them.
#
# Most set them to None. Some set them to zero in place, which a parameter that the next forward pass leaves out
# feels (it is decayed, and moved by its momentum), and some go on with them. That has to be seen:
#
# - `zero_grad()` of the wrapped optimizer says it.
# - Otherwise (`model.zero_grad()`, `p.grad = None`) a gradient that is another object than after the last update was
#   dropped. A few are looked at in each step: the smallest of each group and one by turns. They are held, not referred
#   to weakly, as torch swaps no tensor that has a weak reference.
# - Where the object is the same, hooks look at what each gradient is added to, in one backward pass: at nothing (DDP's
#   bucket views are always the same objects), at zeros, or at more.
# - A frozen parameter gets no gradient from a backward pass: one that is the same after the next update is kept.
# - Gradients that come between a `zero_grad()` after the update and the step's end are the next update's.

HELD_ELEMENTS_MAX = 1 << 16
"""Of the gradient that is held by turns."""

_COMPARABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Habit(IntEnum):
    """What becomes of gradients that an update has used. UNKNOWN: nobody has seen it yet."""

    DROPPED = 0
    ZEROED = 1
    KEPT = 2
    UNKNOWN = 3


class _Probe:
    """Sees, in the next backward pass, what the gradients of these parameters are added to."""

    def __init__(self, parameters: Iterable[torch.Tensor], *, whole: bool) -> None:
        self.whole = whole
        self._found: dict[int, Habit] = {}
        self._hooks = [one.register_hook(partial(self._look, one)) for one in parameters]  # type: ignore[no-untyped-call]

    @property
    def found(self) -> Habit | None:
        """The worst of all parameters; None if no gradient has come."""
        return max(self._found.values(), default=None)

    def _look(self, parameter: torch.Tensor, _gradient: torch.Tensor) -> None:
        # Of several backward passes the one counts that found least: others add to what it has begun.
        key = id(parameter)
        if self._found.get(key) is not Habit.DROPPED:
            self._found[key] = min(_habit_of(parameter.grad), self._found.get(key, Habit.KEPT))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


class Pass:
    """Whether a backward pass of the step in hand has begun, and whether its update is over; of all optimizers."""

    under_way = False
    follows_update: Callable[[], bool] = staticmethod(lambda: False)


class GradientHabit:
    """That of a loop with one optimizer. always: gradients are looked at even where `zero_grad` says what happens.

    Training thread, except `in_doubt`.
    """

    def __init__(self, optimizer: Optimizer, backward: Pass, *, always: bool = False) -> None:
        self.optimizer = optimizer
        self._pass = backward
        self._always = always
        self.habit = Habit.UNKNOWN
        own = vars(optimizer).get("zero_grad")
        self._says = getattr(type(optimizer), "zero_grad", None) is Optimizer.zero_grad and (
            own is None or stands_in(own)
        )
        self._seen: Habit | None = None
        self._smallest: list[torch.Tensor] = []
        self._all: list[torch.Tensor] = []
        self._turn = 0
        self._samples: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # as long as zero_grad() says it
        self._probe: _Probe | None = None
        self._frozen: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._there_in_backward = self._dropped_late = self._provisional = False
        self._said = self._wavers = self._cleared_after_update = self._begins_early = False

    def parameters(self) -> Iterable[torch.Tensor]:
        """All that the optimizer has now."""
        return (one for group in self.optimizer.param_groups for one in group["params"])

    def zeroed(self, set_to_none: bool = True) -> None:
        """`zero_grad(set_to_none)` of the optimizer has returned."""
        if self._says:
            self._seen = Habit.DROPPED if set_to_none else Habit.ZEROED
            self._cleared_after_update = set_to_none and self._pass.follows_update()
            if self._pass.under_way:
                self._dropped_late = True
        elif self._samples and not any(parameter.grad is not None for parameter, _ in self._samples):
            self._seen = Habit.DROPPED

    def in_backward(self) -> None:
        """A backward pass has begun. Only needed where gradients are looked at."""
        if self._seen is None and self.same_gradients:
            self._there_in_backward = True

    @property
    def looks(self) -> bool:
        return self._samples is not None

    def dropped_as_before(self) -> bool:
        """What nearly every step is: `zero_grad()` said so, in this step as in the last one. Else `update_ended`."""
        if self._seen is Habit.DROPPED and self.habit is Habit.DROPPED and self._samples is None:
            if self._cleared_after_update and self.next_ones:
                return False
            self._seen, self._said = None, True
            return True
        return False

    def choose_anew(self) -> None:
        """See anew, at the end of this step, which parameters are frozen."""
        self._all = []

    @property
    def next_ones(self) -> bool:
        """At the end of a step with an update: whether its gradients have come after the last `zero_grad()`."""
        if self._cleared_after_update and not self._begins_early:
            self._choose()
            self._begins_early = any(one.grad is not None for one in self._smallest)
        return self._cleared_after_update and self._begins_early

    def carries(self) -> None:
        """A resume has put gradients back: until the loop shows what it does with them, they are taken to be kept."""
        self.habit, self._provisional = Habit.KEPT, True

    @property
    def same_gradients(self) -> bool:
        """Whether gradients may be the same objects as after the last update: some are, or none was looked at."""
        return self._same(aside=False)

    @property
    def renewed(self) -> bool:
        """Whether all gradients that there are have come after the last update."""
        return self._seen is Habit.DROPPED or not self.same_gradients

    def update_ended(self) -> bool:
        """A step in which the optimizer has updated is over. Returns whether its gradients are now found to be kept."""
        if self.dropped_as_before():
            return False
        late, self._there_in_backward = self._there_in_backward, False
        before, judged = self.habit, self._judged()
        self._dropped_late |= late and judged <= Habit.ZEROED
        suspect = judged is Habit.UNKNOWN and (bool(self._samples) or before <= Habit.ZEROED)
        if before is not Habit.KEPT or (self._provisional and judged is not Habit.UNKNOWN):
            self.habit, self._provisional = judged, False
        said, self._seen = self._seen is not None, None
        self._wavers |= self._said and not said and before is Habit.DROPPED
        self._said = said
        self._samples = None if said and not (self._always or self._wavers) else self._sampled()
        if self.habit is Habit.UNKNOWN and not self._samples:
            self.habit = Habit.DROPPED  # already
        self._look_closer(suspect=suspect or (self._wavers and self.habit is not Habit.KEPT), said=said)
        return self.habit is Habit.KEPT and before is not Habit.KEPT

    def in_doubt(self, *, ended: bool) -> bool:
        """Whether the next step may go on with gradients that no copy has. Any thread, while no step is computed.

        ended: the last step to be saved is over; else its update is, and copies are of before that.
        """
        if self.habit is Habit.KEPT:
            return not ended and any_there(self.parameters())
        if not ended and self._begins_early:
            return True
        if ended and self._seen is None and self._may_live_on():
            return True
        if not ended:
            if self._seen is None and self._samples is None and self.habit is not Habit.UNKNOWN:
                return not self._dropped_late and any_there(self.parameters())
            judged = self._judged(aside=True)
            if judged is Habit.UNKNOWN:
                return any_there(self.parameters())
            return judged is Habit.KEPT or (judged is Habit.ZEROED and self.habit is not Habit.ZEROED)
        found = self._seen if self._seen is not None or self._probe is None else self._probe.found
        if found is not None:
            return found is not Habit.DROPPED and (self.habit is Habit.UNKNOWN or found > self.habit)
        if not self._same(aside=True):
            return False
        # Between an auxiliary backward pass and the one that counts gradients may be there that are dropped then.
        there = self._pass.under_way and (self._there_in_backward or not self.looks)
        return self.habit is Habit.UNKNOWN or (there and not self._dropped_late)

    # ------------------------------------------------------------------ inside

    def _may_live_on(self) -> bool:
        """Of those that the last update has used, before `zero_grad()` says anything else."""
        if self._pass.under_way and not self._dropped_late and self._kept_frozen(aside=True):
            return True
        return self._wavers and self._probe is not None and self._probe.found is None and self._same(aside=True)

    def _same(self, *, aside: bool) -> bool:
        """See `same_gradients`. aside: for another thread than the training thread."""
        return self._samples is None or any(_is_still(one, gradient, aside) for one, gradient in self._samples)

    def _kept_frozen(self, *, aside: bool) -> bool:
        """Whether a frozen parameter still has the gradient that it had after the last update."""
        return any(
            _is_still(one, gradient, aside) and gradient._version == version and _habit_of(gradient) is Habit.KEPT
            for one, gradient, version in self._frozen
        )

    def _judged(self, *, aside: bool = False) -> Habit:
        """What has become of the last update's gradients."""
        if self._seen is not None:
            return self._seen
        if self._samples is None:
            return Habit.UNKNOWN
        if not self._samples:
            return Habit.UNKNOWN if self.habit is Habit.KEPT else self.habit
        if self._kept_frozen(aside=aside):
            return Habit.KEPT
        if not self._same(aside=aside):
            return Habit.DROPPED
        probe = self._probe
        if probe is None:
            return Habit.UNKNOWN
        if probe.found is None:  # FSDP2's do not come from autograd
            return Habit.KEPT if probe.whole else Habit.UNKNOWN
        return probe.found if probe.whole or probe.found in (Habit.DROPPED, self.habit) else Habit.UNKNOWN

    def _choose(self) -> None:
        """Of each group the smallest parameter, and the smallest one that is frozen and has a gradient."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        if len(self._all) != sum([len(group) for group in groups]):
            self._all = [*self.parameters()]
            groups = [[one for one in group if one.requires_grad] for group in groups] + [
                [one for one in group if not one.requires_grad and one.grad is not None] for group in groups
            ]
            self._smallest = [min(group, key=torch.Tensor.numel) for group in groups if group]

    def _sampled(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self._choose()
        chosen = self._smallest
        if self._all:
            self._turn = (self._turn + 1) % len(self._all)
            other = self._all[self._turn]
            chosen = [*chosen, other] if other.numel() <= HELD_ELEMENTS_MAX else chosen
        samples = [(one, gradient) for one in chosen if (gradient := one.grad) is not None]
        self._frozen = [(one, gradient, gradient._version) for one, gradient in samples if not one.requires_grad]
        return samples

    def _look_closer(self, *, suspect: bool, said: bool) -> None:
        if self._probe is not None:
            self._probe.remove()
            self._probe = None
        if suspect and self._samples:
            self._probe = _Probe([one for one in self._all if one.requires_grad and one.is_leaf], whole=True)
        elif not said and self.habit is not Habit.KEPT:
            always = [one for one, gradient in self._samples or () if self.habit is Habit.ZEROED or gradient._is_view()]
            if always:
                self._probe = _Probe({id(one): one for one in always if one.requires_grad}.values(), whole=False)


def _is_still(parameter: torch.Tensor, gradient: torch.Tensor, aside: bool) -> bool:
    """Whether it has this gradient. aside: or something else of torch's has it, as no other thread may read `.grad`."""
    return gradient._use_count() > 1 if aside else parameter.grad is gradient  # type: ignore[attr-defined]


def _habit_of(gradient: torch.Tensor | None) -> Habit:
    if gradient is None:
        return Habit.DROPPED
    local: Any = local_of(gradient).detach()
    if local.layout is not torch.strided or local.dtype not in _COMPARABLE or local.is_meta:
        return Habit.KEPT
    return Habit.KEPT if bool(local.any()) else Habit.ZEROED


_FRAMES, _NAMES, _GRADIENT = methodcaller("values"), attrgetter("f_code.co_names"), attrgetter("grad")
_BUSY = tuple(methodcaller("__contains__", name) for name in ("grad", "run_backward"))
"""Whether code may be setting gradients, by the names in it."""
_STOP, _END = 2, 3


def are_there(tensors: Sequence[torch.Tensor]) -> list[bool] | None:
    """Which of them have a gradient; None while another thread may be setting them. Any thread.

    torch frees a gradient that is set to None, and sets those of a backward pass, without the GIL: who reads `.grad` at
    that moment gets memory that is freed. So what every thread is in is looked at, and then `.grad`, all in one call of
    C code, in which the GIL does not change hands.
    """
    if not tensors:
        return []
    frames = [chain.from_iterable(map(_FRAMES, map(call, (sys._current_frames,)))) for _ in _BUSY]
    busy = chain.from_iterable([map(has, map(_NAMES, every)) for has, every in zip(_BUSY, frames, strict=True)])
    there = map(is_not, map(_GRADIENT, tensors), repeat(None))
    # Numbers, as no garbage is collected for them: a finalizer would let others have the GIL.
    found = [*iter(chain(map((0, _STOP).__getitem__, busy), there, (_END,)).__next__, _STOP)]
    return [*map(bool, found[-1 - len(tensors) : -1])] if found[-1:] == [_END] else None


def any_there(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of them may have a gradient. Any thread."""
    there = are_there([*tensors])
    return there is None or any(there)


_log = logging.getLogger(__name__)

PREFIX = "grad/"

ZEROED = "zeroed/gradients"
"""Of a loop that sets gradients to zero in place: which parameters have one, a byte for each. A gradient of zeros is
not the same as none: an optimizer passes over a parameter that has none. The values need not be kept."""

BYTES_MAX = 256 << 20
"""Of all gradients together. The black box has room for four copies."""


class _Live:
    """Where the gradients are that the next step goes on with, and `ZEROED`: they may be replaced, or dropped."""

    def __init__(self) -> None:
        self.carried: dict[str, torch.Tensor] = {}  # the parameters
        self.zeroed: torch.Tensor | None = None

    def get(self, name: str, /) -> torch.Tensor | None:
        parameter = self.carried.get(name)
        return parameter.grad if parameter is not None else self.zeroed if name == ZEROED else None


def _fits(parameter: torch.Tensor | None, saved: RegionCopy) -> bool:
    return parameter is not None and stored_form(parameter) == (saved.dtype, tuple(saved.shape))


def _gradients_in(regions: Mapping[str, RegionCopy]) -> dict[str, RegionCopy]:
    return {name.removeprefix(PREFIX): copy for name, copy in regions.items() if name.startswith(PREFIX)}


class CarriedGradients:
    """Keeps the gradients of `parameters`, by name, in `tensors`. Training thread."""

    def __init__(
        self,
        parameters: Callable[[], Mapping[str, torch.Tensor]],
        scaled: bool = False,
        model: torch.nn.Module | None = None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        extras: Sequence[Extras] = (),
        tensors: BoxTensors | None = None,
    ) -> None:
        self._parameters_of_model = parameters
        self._extras = extras
        self.backward = Pass()
        self.looks_in_backward = False
        self.habits = [GradientHabit(one, self.backward, always=len(optimizers) > 1) for one in optimizers]
        self._alone = self.habits[0] if len(self.habits) == 1 and not scaled else None
        self.tensors = tensors or BoxTensors()
        self._live = _Live()
        self._ordered: list[torch.Tensor] = []  # the parameters that `ZEROED` speaks of
        self._flags = bytearray()
        of_none: Any = SimpleNamespace(param_groups=[{"params": []}])
        self._strays = GradientHabit(of_none, self.backward)
        """Of the parameters that no optimizer has, and that have a gradient."""
        self._strays_by_name: dict[str, torch.Tensor] = {}
        self._in_modules: dict[str, torch.Tensor] = {}  # of extras, those that have had a gradient
        self._with_leaves = False  # whether extras had any at the last look
        self._shared: dict[str, torch.Tensor] = {}  # of these, what are the model's or an optimizer's own parameters
        self._apart: dict[str, torch.Tensor] = {}  # what is carried of others than extras
        self._count = 0  # of what the optimizers have
        self._model = model
        self._given_up = False
        self._updated = True
        self._idle: set[int] = set()
        self._idle_parameters: dict[int, GradientHabit] = {}
        self._used_up: dict[int, tuple[int, int]] = {}

    def in_turns(self, stepped: Sequence[torch.optim.Optimizer], idle: Sequence[torch.optim.Optimizer]) -> None:
        """Of several optimizers: which have updated in the step that ends, and which not. Before `end_step`."""
        for parameter in (one for optimizer in stepped for group in optimizer.param_groups for one in group["params"]):
            gradient = parameter.grad
            self._used_up[id(parameter)] = (0, 0) if gradient is None else (id(gradient), gradient._version)
        self._idle = {id(optimizer) for optimizer in idle}
        waiting = [habit for habit in self.habits if id(habit.optimizer) in self._idle]
        self._idle_parameters = {id(parameter): habit for habit in waiting for parameter in habit.parameters()}

    def _waits(self, parameter: torch.Tensor) -> bool:
        """Whether its optimizer has not updated, and its gradient is another one than that of its last update."""
        habit, gradient = self._idle_parameters.get(id(parameter)), parameter.grad
        if gradient is None or habit is None:
            return False
        # An id may be that of another object by now, but not as long as others of that time are still there.
        return habit.renewed or self._used_up.get(id(parameter)) != (id(gradient), gradient._version)

    def in_backward(self) -> None:
        """A backward pass has begun."""
        for habit in self._every():
            habit.in_backward()

    def doubts(self, *, ended: bool) -> list[str]:
        """Why what is saved may lack gradients of the last update. See `GradientHabit.in_doubt`."""
        if ended and not self._updated:
            return []  # all that there were have been carried
        reasons = []
        if any(habit.in_doubt(ended=ended) for habit in self.habits) or (not ended and self._zeroed_are_others()):
            reasons.append("gradients may have been carried from this update into the next step, and were not saved")
        strays = self._every()[len(self.habits) :]
        kept = () if ended else self._among_extras().values()
        if any(habit.in_doubt(ended=ended) for habit in strays) or any_there(kept):
            reasons.append("gradients of parameters without an optimizer were not saved")
        return reasons

    def end_step(
        self,
        *,
        updated: bool,
        trained: Callable[[], Mapping[str, torch.Tensor]],
        look: bool = False,
        skipped: bool = False,
    ) -> None:
        """Which gradients the next step goes on with.

        look: whether to see which parameters without an optimizer have one, and which are frozen. skipped: where it was
        not updated, a GradScaler has looked at this step's gradients, and found some that are not finite.
        """
        if self._live.carried:
            self._carry({})
        self._apart = {}
        self._updated = updated
        self.backward.under_way = False
        if look or ((self._strays_by_name or self._in_modules) and self._count != self._counted()):
            self._look()
        extras = self._of_extras() if self._with_leaves else self._in_modules
        plain = updated and not self._strays_by_name and not extras and self._alone is not None
        if plain and self._alone is not None and self._alone.dropped_as_before():
            return
        if updated:
            self._update_ended()
        self._look_at_zeroed()
        new = self._next_ones() if updated else []
        keeping = [habit for habit in self._every() if habit.habit is Habit.KEPT or habit in new]
        if self._given_up or (updated and not self._idle and not keeping and not extras):
            return
        kept = {id(one) for habit in keeping for one in habit.parameters()} | {id(one) for one in extras.values()}
        if self._model is not None and has_unreduced(self._model):
            self._give_up("gradients that FSDP has not reduced yet are carried from step to step: not saved")
            return
        here = {**trained(), **self._strays_by_name, **extras}
        present = {name: tensor for name, tensor in here.items() if tensor.grad is not None}
        if updated or (skipped and not self._idle):
            present = {name: one for name, one in present.items() if id(one) in kept or self._waits(one)}
        self._carry(present)
        self._apart = {name: one for name, one in present.items() if name not in extras}

    def again(self) -> list[str]:
        """After an early end of a step: carry those that extras have by now. Returns which have come since."""
        before, extras = {*self.carried}, self._of_extras()
        if not self._given_up and (self._with_leaves or self._in_modules):
            self._carry(self._apart | {name: one for name, one in extras.items() if one.grad is not None})
        return [f"the gradient of {name}" for name in self.carried if name not in before]

    def _next_ones(self) -> list[GradientHabit]:
        """Of the optimizers that have updated, those whose gradients are already the next update's."""
        return [habit for habit in self._every() if id(habit.optimizer) not in self._idle and habit.next_ones]

    def _update_ended(self) -> None:
        """What the loop does with gradients that were used, as far as it shows."""
        for habit in self._every():
            if id(habit.optimizer) not in self._idle and habit.update_ended():
                _log.warning(
                    "gradients are carried from step to step in this loop, so they are copied at the end of "
                    "each step; zero_grad() of the wrapped optimizer avoids the copies"
                )
        self.looks_in_backward = any(habit.looks for habit in self._every())

    def _look_at_zeroed(self) -> None:
        zeroed = [habit for habit in self.habits if habit.habit is Habit.ZEROED]
        if not zeroed and not self._flags:
            return
        if len(self._ordered) != self._counted():
            self._ordered = [*self._parameters(trained=True).values()]
        if len(zeroed) == len(self.habits):
            flags = bytearray([one.grad is not None for one in self._ordered])
        else:
            ids = {id(one) for habit in zeroed for one in habit.parameters()}
            flags = bytearray([id(one) in ids and one.grad is not None for one in self._ordered])
        if len(flags) == len(self._flags):
            self._flags[:] = flags
        elif flags:
            self._flags, self._live.zeroed = flags, torch.frombuffer(flags, dtype=torch.uint8)
            self._keep(ZEROED, "which gradients are zero")

    def _zeroed_are_others(self) -> bool:
        """Whether others have a gradient now than at the last step's end. Any thread, while no step is computed."""
        there = are_there(self._ordered)
        return there is None or there != [*map(bool, self._flags)]

    def _counted(self) -> int:
        return sum([len(group["params"]) for habit in self.habits for group in habit.optimizer.param_groups])

    def _every(self) -> list[GradientHabit]:
        return [*self.habits, self._strays] if self._strays_by_name else self.habits

    def _look(self) -> None:
        for habit in self.habits:
            habit.choose_anew()
        self._know(lambda name, one: one.grad is not None or name in self._strays_by_name or name in self._in_modules)

    def _know(self, wanted: Callable[[str, torch.Tensor], bool]) -> None:
        """Of the parameters that no optimizer has, these; and where others may come to extras."""
        strays, extras, leaves = self._parameters(trained=False), self._among_extras(), self._leaves()
        self._in_modules = {name: one for name, one in extras.items() if name not in leaves and wanted(name, one)}
        self._shared = {name: one for name, one in leaves.items() if name not in extras}
        self._with_leaves = bool(leaves)
        self._strays_by_name = {name: one for name, one in strays.items() if wanted(name, one)}
        self._strays.optimizer.param_groups[0]["params"] = [*self._strays_by_name.values()]
        self._strays.choose_anew()
        self._count = self._counted()

    def _parameters(self, *, trained: bool) -> dict[str, torch.Tensor]:
        """The model's that optimizers have, or the others."""
        ids = {id(one) for habit in self.habits for one in habit.parameters()}
        return {name: one for name, one in self._parameters_of_model().items() if (id(one) in ids) is trained}

    def _among_extras(self) -> dict[str, torch.Tensor]:
        """All that are not the model's or an optimizer's as well."""
        ids = {id(one) for one in self._parameters_of_model().values()}
        every = {name: one for extras in self._extras for name, one in extras.parameters().items()}
        return {name: one for name, one in every.items() if id(one) not in ids}

    def _leaves(self) -> dict[str, torch.Tensor]:
        """The tensors in dicts among them that may get a gradient, or have one."""
        every = {name: one for extras in self._extras for name, one in extras.leaves().items()}
        return {name: one for name, one in every.items() if one.requires_grad or one.grad is not None}

    def _of_extras(self) -> dict[str, torch.Tensor]:
        """Those that may have a gradient to carry: of dicts whatever is at its place by now."""
        if not self._with_leaves:
            return self._in_modules
        leaves = self._leaves().items()
        return self._in_modules | {name: one for name, one in leaves if self._shared.get(name) is not one}

    @property
    def carried(self) -> list[str]:
        """Names of those that the next step goes on with."""
        return [name.removeprefix(PREFIX) for name in self._live.carried]

    def _carry(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._live.carried = {PREFIX + name: one for name, one in parameters.items()}
        for name, one in parameters.items():
            if one.grad is not None and (problem := unstorable(one.grad)):
                self._give_up(f"the gradient of {name!r} {problem}")
                return
        if not parameters:
            return
        for name in parameters:
            self._keep(PREFIX + name, "the gradients that are carried from step to step", late=True)
        nbytes = sum(kept.region.nbytes for kept in self.tensors.of_kind(PREFIX).values())
        if nbytes > BYTES_MAX:
            self._give_up(
                f"{nbytes / 1e6:.0f} MB of gradients are carried from step to step, more "
                f"than the limit of {BYTES_MAX / 1e6:.0f} MB"
            )

    def _keep(self, name: str, what: str, *, late: bool = False) -> None:
        kept = self.tensors.get(name)
        if kept is None or kept.misfit():
            self.tensors.add(BoxTensor(name, what, self._live, name, late=late, optional=True, alone=late))

    def _give_up(self, what: str) -> None:
        self.tensors.ledger.tell(f"{what}; steps(accumulate=...) ends a step with its update instead")
        self._given_up = True
        self._carry({})
        for kept in self.tensors.of_kind(PREFIX).values():
            self.tensors.remove(kept.name)

    def refuse(self, regions: Mapping[str, RegionCopy]) -> None:
        """Raises MismatchError for gradients of no parameter, or of another form; a dict may get its tensors later."""
        here = {**self._parameters_of_model(), **self._among_extras()}
        dicts = tuple(place for extras in self._extras for place in extras.dicts())
        for name, copy in _gradients_in(regions).items():
            if not _fits(here.get(name), copy) and not name.startswith(dicts):
                raise MismatchError(f"the saved gradient of {name!r} matches no parameter here", extra=[name])

    def restore(self, regions: Mapping[str, RegionCopy]) -> tuple[str, ...]:
        """Give the parameters the gradients that they had; other regions are ignored. After the extras are restored.

        Returns why the outcome is not exact, if it is not. Raises MismatchError, before anything is changed, for those
        of no parameter, or of another form.
        """
        extras, every = self._among_extras(), _gradients_in(regions)
        here = {**self._parameters_of_model(), **extras}
        saved = {name: copy for name, copy in every.items() if _fits(here.get(name), copy)}
        unfit = [f"the saved gradient of {name} fits no tensor here" for name in every.keys() - saved.keys()]
        reasons = (*self._restore_zeroed(regions), *sorted(unfit))
        for one in [one for name, one in extras.items() if regions and name not in saved]:
            one.grad = None
        self._know(lambda name, _: name in saved)
        restored = {id(here[name]) for name in saved}
        for habit in self._every():
            if any(id(one) in restored for one in habit.parameters()):
                habit.carries()
        for name, copy in saved.items():
            parameter = here[name]
            data = tensor_of(copy).to(parameter.device)
            if is_dtensor(parameter):
                data = empty_shard(parameter, placements_to_json(parameter), list(parameter.shape), data)
            put_gradient(parameter, data)
        return reasons

    def _restore_zeroed(self, regions: Mapping[str, RegionCopy]) -> tuple[str, ...]:
        """Give zeros to the parameters that had a gradient, and None to all others. Returns why that is not exact."""
        copy = regions.get(ZEROED)
        if copy is None:
            return ()
        trained, flags = [*self._parameters(trained=True).values()], tensor_of(copy).tolist()
        if len(flags) != len(trained):
            return (
                f"the checkpoint records which of {len(flags)} parameters had a gradient, but "
                f"{len(trained)} are trained here",
            )
        for parameter, flag in zip(trained, flags, strict=True):
            if flag:
                put_gradient(parameter, torch.zeros_like(parameter.detach()))
            else:
                parameter.grad = None
        return ()
