"""Which parameters have a gradient at a step's end, of a loop that sets gradients to zero in place.

A gradient of zeros is not the same as none: an optimizer passes over a parameter that has none. The values need not be
kept. One byte a parameter goes into the black box, in the order of the trained parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from lastwords.optim_wrapper.tensors.value_copies import put_gradient
from lastwords.processor.black_box import BlackBox, RegionCopy, RegionSpec

NAME = "zeroed/gradients"


class ZeroedGradients:
    """A `Capture` of that. trained: the parameters that an optimizer has, by name. Training thread."""

    def __init__(self, trained: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._trained = trained
        self._parameters: list[torch.Tensor] = []
        self._count = 0
        self._flags = b""
        self._targets: dict[int, memoryview] = {}

    def __bool__(self) -> bool:
        return bool(self._flags)

    def look(self, parameters: Collection[torch.Tensor], count: int) -> bool:
        """The gradients of `parameters`, of `count` in all, are set to zero. Whether the box has to be made anew."""
        before = len(self._flags)
        if self._count != count:
            self._count = count
            self._parameters = [*self._trained().values()]
        if len(parameters) == count:
            self._flags = bytes([one.grad is not None for one in self._parameters])
        else:
            ids = {id(one) for one in parameters}
            self._flags = bytes([id(one) in ids and one.grad is not None for one in self._parameters])
        return len(self._flags) != before

    @property
    def regions(self) -> tuple[RegionSpec, ...]:
        """Nothing, until gradients are known to be set to zero."""
        return (RegionSpec(NAME, "U8", (len(self._flags),)),) if self._flags else ()

    def bind(self, box: BlackBox) -> None:
        """Prepare the captures into each step slot of `box`."""
        self._targets = {slot: box.region(slot, NAME) for slot in box.step_slots}

    def refresh(self) -> None:
        """They are looked at in `look`."""

    def capture(self, slot: int) -> None:
        """Take them into an open step slot; into a tentative copy, as the last step has left them."""
        target = self._targets.get(slot)
        if target is not None and len(target) == len(self._flags):
            target[:] = self._flags

    def stale(self) -> bool:
        """Whether others have a gradient now than at the last step's end. Any thread, while no step is computed."""
        flags = [flag for flag, one in zip(self._flags, self._parameters, strict=False) if (one.grad is None) == flag]
        return bool(flags)

    def restore(self, regions: Mapping[str, RegionCopy]) -> tuple[str, ...]:
        """Give zeros to the parameters that had a gradient, and None to all others. Returns why that is not exact."""
        copy = regions.get(NAME)
        if copy is None:
            return ()
        trained, flags = [*self._trained().values()], bytes(memoryview(copy.data))
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
