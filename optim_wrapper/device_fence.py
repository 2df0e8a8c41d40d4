"""Waiting for an accelerator, which runs behind its host: what a phase says has to be true on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.optim.optimizer import Optimizer


def device_fence(optimizers: Iterable[Optimizer]) -> Callable[[], None] | None:
    """A function that returns when the current stream has done everything so far; None where all is on the CPU.

    Called once when the gradients are final and once when the update has been written.
    """
    devices = {
        parameter.device
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.device.type not in ("cpu", "meta")
    }
    if not devices:
        return None

    def wait() -> None:
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()

    return wait
