"""State that the loop takes out of the optimizer between two updates, to save memory, and puts back for the next.

If a rank dies in between, the optimizer's state is not all there. What was taken out after the end of a step is known
to the witness, and is saved as if it were in its place, as long as nobody has written to it. What is out when a step
ends cannot be told from what the loop has thrown away; it is named until the next update, and from then on if it has
come back by then. If it has not, the loop throws state away, and what is saved of such a step's end is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from lastwords.optim_wrapper.capture.witness import StateName, Witness
from lastwords.sharding.dtensor import local_of

Lent = dict[Any, dict[Any, Any] | None]
"""Parameter -> what its state lacks; None: it is not worth saving."""

AMOUNT = "the amount of optimizer state"
"""What messages call it that the loop takes state out after its update."""


class StateCounts:
    """How much state the optimizers have at the moments of a step: a microsecond for each 50 parameters.

    optimizers: those that have a state of their own, also while it changes. Training thread, except `is_out`.
    """

    def __init__(self, optimizers: Callable[[], Collection[Optimizer]]) -> None:
        self._optimizers = optimizers
        self._updated: int | None = None
        self._out = False
        """There was less at the last step's end than after its update, or than at the end before it."""
        self._ended = 0
        self._comes_back = self._stays_away = False

    def now(self) -> int:
        """Number of entries of all parameters together."""
        entries = 0
        for one in self._optimizers():
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

    def end_update(self) -> None:
        """The optimizer has written it. Not called: it is not looked at in this step."""
        self._updated = self.now()

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
