"""Gradients that live from one step to the next: of a loop that accumulates by itself over steps without an update.

They are this rank's own (under `no_sync` nobody else has them), so they go into the black box, at the end of each step
in which their optimizer has not updated. After its update most loops set them to zero or to None before they count
again; those of a loop that goes on with them (`GradientHabit`) are carried as well, also those of parameters that no
optimizer has: clipping counts them, and a later group may bring them in. Those of modules among the extras always are.
Those that a GradScaler among the extras has skipped, which shows in its scale, are used up like those of an update;
where there are several optimizers it does not show whose, so they are saved nevertheless.
Those that FSDP2 keeps whole, or has reduced within a shard group only, while its sync is off, are named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from lastwords.errors import MismatchError, StorageError
from lastwords.optim_wrapper.capture.captured_buffer import region_dtype
from lastwords.optim_wrapper.capture.gradient_habit import GradientHabit, Habit, Pass
from lastwords.optim_wrapper.capture.zeroed_gradients import ZeroedGradients
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.state.extras import Extras
from lastwords.optim_wrapper.tensors.value_copies import put_gradient
from lastwords.processor.black_box import BlackBox, RegionCopy, RegionSpec, SlotKind
from lastwords.sharding.dtensor import empty_shard, has_unreduced, is_dtensor, local_of, placements_to_json

_log = logging.getLogger(__name__)

PREFIX = "grad/"

BYTES_MAX = 256 << 20
"""Of all gradients together. The black box has room for four copies."""


class _Strays:
    """In the place of an optimizer: the parameters that none has, and that have a gradient."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, list[torch.Tensor]]] = [{"params": []}]

    def zero_grad(self) -> None:
        """Nobody calls it."""


class _AlwaysKept(GradientHabit):
    """Of modules among the extras, of whose updates nothing is known."""

    def carries(self) -> None:
        """As always."""

    def update_ended(self) -> bool:
        """Nothing is looked at."""
        return False


class CarriedGradients:
    """A `Capture` of the gradients of `parameters`, by name. Training thread."""

    def __init__(
        self,
        parameters: Callable[[], Mapping[str, torch.Tensor]],
        scalers: Sequence[Any] = (),
        model: torch.nn.Module | None = None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        extras: Sequence[Extras] = (),
        ledger: Ledger | None = None,
    ) -> None:
        self._parameters_of_model = parameters
        self._extras = extras
        self.backward = Pass()
        self.looks_in_backward = False
        self.habits = [GradientHabit(one, self.backward, always=len(optimizers) > 1) for one in optimizers]
        self._alone = self.habits[0] if len(self.habits) == 1 and not scalers else None
        self.zeroed = ZeroedGradients(self._trained)
        self._strays = GradientHabit(cast(Any, _Strays()), self.backward)
        self._of_extras = _AlwaysKept(cast(Any, _Strays()), self.backward)
        self._of_extras.habit = Habit.KEPT
        self._strays_by_name: dict[str, torch.Tensor] = {}
        self._count = 0  # of what the optimizers have
        self._model = model
        self._scalers = scalers
        self._scales: list[Any] = [scaler.state_dict() for scaler in scalers]
        self._parameters: dict[str, torch.Tensor] = {}
        self._regions: dict[str, RegionSpec] = {}
        self._carried: list[str] = []
        self._targets: dict[int, dict[str, torch.Tensor]] = {}
        self._box: BlackBox | None = None
        self._bound: set[str] = set()
        self._given_up = False
        self.ledger = ledger or Ledger()
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
        if any(habit.in_doubt(ended=ended) for habit in self.habits) or (not ended and self.zeroed.stale()):
            reasons.append("gradients may have been carried from this update into the next step, and were not saved")
        if any(habit.in_doubt(ended=ended) for habit in self._every()[len(self.habits) :]):
            reasons.append("gradients of parameters without an optimizer were not saved")
        return reasons

    def end_step(self, *, updated: bool, trained: Callable[[], Mapping[str, torch.Tensor]], look: bool = False) -> bool:
        """Which gradients the next step goes on with. Returns whether the black box has to be made anew for them.

        look: whether to see which parameters without an optimizer have one, and which are frozen.
        """
        self._carried, self._updated = [], updated
        self.backward.under_way = False
        if look or (self._strays_by_name and self._count != self._counted()):
            self._look()
        plain = updated and not self._strays_by_name and self._alone is not None
        if plain and self._alone is not None and self._alone.dropped_as_before():
            return False
        skipped = bool(self._scalers) and self._scaler_has_skipped()
        more = self._update_ended() if updated else self._look_at_zeroed()
        new = self._next_ones() if updated else []
        keeping = [habit for habit in self._every() if habit.habit is Habit.KEPT or habit in new]
        if self._given_up or (updated and not self._idle and not keeping):
            return more
        kept = {id(one) for habit in keeping for one in habit.parameters()}
        if self._model is not None and has_unreduced(self._model):
            return self._give_up("gradients that FSDP has not reduced yet are carried from step to step: not saved")
        here = {**trained(), **self._strays_by_name}
        present = {name: tensor for name, tensor in here.items() if tensor.grad is not None}
        if updated:
            present = {name: one for name, one in present.items() if id(one) in kept or self._waits(one)}
        if not present or (skipped and not self._idle and not kept):
            return more
        self._carried = [*present]
        grown = self._admit(present)
        return more or (grown and not self._given_up)

    def _next_ones(self) -> list[GradientHabit]:
        """Of the optimizers that have updated, those whose gradients are already the next update's."""
        return [habit for habit in self._every() if id(habit.optimizer) not in self._idle and habit.next_ones]

    def _update_ended(self) -> bool:
        """What the loop does with gradients that were used, as far as it shows. As `end_step` returns."""
        for habit in self._every():
            if id(habit.optimizer) not in self._idle and habit.update_ended():
                _log.warning(
                    "gradients are carried from step to step in this loop, so they are copied at the end of "
                    "each step; zero_grad() of the wrapped optimizer avoids the copies"
                )
        self.looks_in_backward = any(habit.looks for habit in self._every())
        return self._look_at_zeroed()

    def _look_at_zeroed(self) -> bool:
        zeroed = [habit for habit in self.habits if habit.habit is Habit.ZEROED]
        if not zeroed and not self.zeroed:
            return False
        return self.zeroed.look([one for habit in zeroed for one in habit.parameters()], self._counted())

    def _counted(self) -> int:
        return sum([len(group["params"]) for habit in self.habits for group in habit.optimizer.param_groups])

    def _every(self) -> list[GradientHabit]:
        return [*self.habits, self._strays, self._of_extras] if self._strays_by_name else self.habits

    def _look(self) -> None:
        for habit in self.habits:
            habit.look()
        known = self._strays_by_name.keys()
        without = self._without_optimizer()
        self._know_strays({name: one for name, one in without.items() if one.grad is not None or name in known})

    def _without_optimizer(self) -> dict[str, torch.Tensor]:
        ids = {id(one) for habit in self.habits for one in habit.parameters()}
        return {name: one for name, one in self._all().items() if id(one) not in ids}

    def _know_strays(self, strays: dict[str, torch.Tensor]) -> None:
        self._strays_by_name, self._count = strays, self._counted()
        of_model = self._parameters_of_model() if strays else {}
        for habit, mine in ((self._strays, True), (self._of_extras, False)):
            habit.optimizer.param_groups[0]["params"] = [
                one for name, one in strays.items() if (name in of_model) is mine
            ]
            habit.look()

    def _all(self) -> dict[str, torch.Tensor]:
        known = dict(self._parameters_of_model())
        ids = {id(one) for one in known.values()}
        others = {name: one for extras in self._extras for name, one in extras.parameters().items()}
        return known | {name: one for name, one in others.items() if id(one) not in ids}

    def _trained(self) -> dict[str, torch.Tensor]:
        ids = {id(one) for habit in self.habits for one in habit.parameters()}
        return {name: one for name, one in self._all().items() if id(one) in ids}

    def _scaler_has_skipped(self) -> bool:
        """Whether a GradScaler has looked at this step's gradients, and found some that are not finite."""
        before, self._scales = self._scales, [scaler.state_dict() for scaler in self._scalers]
        return before != self._scales

    def _admit(self, present: Mapping[str, torch.Tensor]) -> bool:
        self._parameters = dict(present)
        regions = {}
        for name, parameter in present.items():
            assert parameter.grad is not None
            local = local_of(parameter.grad)
            code = region_dtype(local.dtype)
            if code is None or local.layout is not torch.strided:
                return self._give_up(f"the gradient of {name!r} ({local.dtype}, {local.layout}) cannot be captured")
            regions[name] = RegionSpec(PREFIX + name, code, tuple(local.shape), lazy=True, committed_only=True)
        wanted = {**self._regions, **regions}
        nbytes = sum(region.nbytes for region in wanted.values())
        if nbytes > BYTES_MAX:
            return self._give_up(
                f"{nbytes / 1e6:.0f} MB of gradients are carried from step to step, more "
                f"than the limit of {BYTES_MAX / 1e6:.0f} MB"
            )
        new = wanted.keys() != self._regions.keys() or any(wanted[name] != self._regions[name] for name in regions)
        self._regions = wanted
        return new

    def _give_up(self, what: str) -> bool:
        self.ledger.tell(f"{what}; steps(accumulate=...) ends a step with its update instead")
        self._given_up, self._regions, self._carried = True, {}, []
        return False

    # ------------------------------------------------------------------ Capture

    @property
    def regions(self) -> tuple[RegionSpec, ...]:
        """What each copy needs room for."""
        return tuple(self._regions.values())

    def bind(self, box: BlackBox) -> None:
        """Prepare the captures into each step slot of `box`."""
        self._box = box
        self._bound = {region.name for region in box.layout.regions}
        self._targets = {slot: {} for slot in box.step_slots}

    def refresh(self) -> None:
        """Only those that are carried are in the next copy."""
        box = self._box
        if box is None:
            return
        try:
            for name, region in self._regions.items():
                if region.name not in self._bound:
                    continue
                if name not in self._carried:
                    box.deactivate(region.name)
                elif not box.is_active(region.name):
                    box.activate(region.name)
        except StorageError as error:
            self._give_up(f"the gradients that are carried from step to step could not be copied: {error}")

    def capture(self, slot: int) -> None:
        """Take them into an open slot; they are complete at a step's end only."""
        if not self._carried or self._box is None or self._box.open_kind is SlotKind.TENTATIVE:
            return
        targets = self._targets[slot]
        for name in self._carried:
            if PREFIX + name not in self._bound:
                continue
            gradient = self._parameters[name].grad
            assert gradient is not None
            local = local_of(gradient).detach()
            if name not in targets:
                view = torch.frombuffer(self._box.region(slot, PREFIX + name), dtype=local.dtype)
                targets[name] = view.reshape(self._regions[name].shape)
            targets[name].copy_(local)

    def restore(self, regions: Mapping[str, RegionCopy]) -> tuple[str, ...]:
        """Give the parameters the gradients that they had; other regions are ignored.

        Raises MismatchError, before anything is changed, for those of no parameter, or of another form.
        """
        here = self._all()
        saved = {name.removeprefix(PREFIX): copy for name, copy in regions.items() if name.startswith(PREFIX)}
        for name, copy in saved.items():
            if name not in here or tuple(local_of(here[name]).shape) != tuple(copy.shape):
                raise MismatchError(f"the saved gradient of {name!r} matches no parameter here", extra=[name])
        reasons = self.zeroed.restore(regions)
        without = self._without_optimizer() if saved else {}
        self._know_strays({name: one for name, one in without.items() if name in saved})
        restored = {id(here[name]) for name in saved}
        for habit in self._every():
            if any(id(one) in restored for one in habit.parameters()):
                habit.carries()
        for name, copy in saved.items():
            parameter = here[name]
            dtype = next(one for one in _DTYPES if region_dtype(one) == copy.dtype)
            data = torch.frombuffer(bytearray(copy.data), dtype=dtype).reshape(copy.shape).to(parameter.device)
            if is_dtensor(parameter):
                data = empty_shard(parameter, placements_to_json(parameter), list(parameter.shape), data)
            put_gradient(parameter, data)
        return reasons


_DTYPES = [one for one in vars(torch).values() if isinstance(one, torch.dtype)]
