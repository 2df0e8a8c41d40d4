"""What a loop does with the gradients of an update before it adds the next ones to them.

Most set them to None. Some set them to zero in place, which a parameter that the next forward pass leaves out feels (it
is decayed, and moved by its momentum), and some go on with them. That has to be seen:

- `zero_grad()` of the wrapped optimizer says it.
- Otherwise (`model.zero_grad()`, `p.grad = None`) a gradient that is another object than after the last update was
  dropped. A few are looked at in each step: the smallest of each group and one by turns. They are held, not referred
  to weakly, as torch swaps no tensor that has a weak reference.
- Where the object is the same, hooks look at what each gradient is added to, in one backward pass: at nothing (DDP's
  bucket views are always the same objects), at zeros, or at more.
- A frozen parameter gets no gradient from a backward pass: one that is the same after the next update is kept.
- Gradients that come between a `zero_grad()` after the update and the step's end are the next update's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from lastwords.optim_wrapper.wrapper import stands_in
from lastwords.sharding.dtensor import local_of

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
        self._hooks = [one.register_hook(_Look(one, self._found)) for one in parameters]  # type: ignore[no-untyped-call]

    @property
    def found(self) -> Habit | None:
        """The worst of all parameters; None if no gradient has come."""
        return max(self._found.values(), default=None)

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()


class _Look:
    def __init__(self, parameter: torch.Tensor, found: dict[int, Habit]) -> None:
        self._parameter, self._found = parameter, found

    def __call__(self, gradient: torch.Tensor) -> None:
        # Of several backward passes the one counts that found least: others add to what it has begun.
        key = id(self._parameter)
        if self._found.get(key) is not Habit.DROPPED:
            self._found[key] = min(_held_by(self._parameter), self._found.get(key, Habit.KEPT))


class Pass:
    """Whether a backward pass of the step in hand has begun, and whether its update is over; of all optimizers."""

    under_way = False

    def __init__(self, follows_update: Callable[[], bool] = lambda: False) -> None:
        self.follows_update = follows_update


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
        self._says = type(optimizer).zero_grad is Optimizer.zero_grad and (own is None or stands_in(own))
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
        """Whether gradients are looked at."""
        return self._samples is not None

    def dropped_as_before(self) -> bool:
        """What nearly every step is: `zero_grad()` said so, in this step as in the last one. Else `update_ended`."""
        if self._seen is Habit.DROPPED and self.habit is Habit.DROPPED and self._samples is None:
            if self._cleared_after_update and self.next_ones:
                return False
            self._seen, self._said = None, True
            return True
        return False

    def look(self) -> None:
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
        if self._samples is None:
            return True
        return any(parameter.grad is gradient for parameter, gradient in self._samples)

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
            return not ended and self._any_there()
        if not ended and self._begins_early:
            return True
        if ended and self._seen is None and self._may_live_on():
            return True
        if not ended:
            if self._seen is None and self._samples is None and self.habit is not Habit.UNKNOWN:
                return not self._dropped_late and self._any_there()
            judged = self._judged()
            if judged is Habit.UNKNOWN:
                return self._any_there()
            return judged is Habit.KEPT or (judged is Habit.ZEROED and self.habit is not Habit.ZEROED)
        found = self._seen if self._seen is not None or self._probe is None else self._probe.found
        if found is not None:
            return found is not Habit.DROPPED and (self.habit is Habit.UNKNOWN or found > self.habit)
        if not self.same_gradients:
            return False
        # Between an auxiliary backward pass and the one that counts gradients may be there that are dropped then.
        return self.habit is Habit.UNKNOWN or (self._pass.under_way and not self._dropped_late)

    # ------------------------------------------------------------------ inside

    def _may_live_on(self) -> bool:
        """Of those that the last update has used, before `zero_grad()` says anything else."""
        if self._pass.under_way and not self._dropped_late and self._kept_frozen():
            return True
        return self._wavers and self._probe is not None and self._probe.found is None and self.same_gradients

    def _kept_frozen(self) -> bool:
        """Whether a frozen parameter still has the gradient that it had after the last update."""
        return any(
            one.grad is gradient and gradient._version == version and _held_by(one) is Habit.KEPT
            for one, gradient, version in self._frozen
        )

    def _any_there(self) -> bool:
        return any(one.grad is not None for one in self.parameters())

    def _judged(self) -> Habit:
        """What has become of the last update's gradients."""
        if self._seen is not None:
            return self._seen
        if self._samples is None:
            return Habit.UNKNOWN
        if not self._samples:
            return Habit.UNKNOWN if self.habit is Habit.KEPT else self.habit
        if self._kept_frozen():
            return Habit.KEPT
        if not self.same_gradients:
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


def _held_by(parameter: torch.Tensor) -> Habit:
    gradient: Any = parameter.grad
    if gradient is None:
        return Habit.DROPPED
    local = local_of(gradient).detach()
    if local.layout is not torch.strided or local.dtype not in _COMPARABLE or local.is_meta:
        return Habit.KEPT
    return Habit.KEPT if bool(local.any()) else Habit.ZEROED
