"""A resumed loop of the user's own: whether it begins with the random streams that resume() has put back.

Such a loop sets its data back by itself, and what it draws on the way (building a DataLoader's iterator draws a seed)
is not drawn by the run that was never killed. Whether numbers that were drawn are too many cannot be told from here:
a dataset that augments in this process draws some for the next batch, rightly. So this makes no reason against
exactness; it only keeps the claim from being made in silence, in the one place where most such loops go wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from lastwords.errors import ConfigError
from lastwords.optim_wrapper.rank_local import RngCapture

_log = logging.getLogger(__name__)


def look_at_first_forward(model: torch.nn.Module, rng: RngCapture, step: int, is_own: Callable[[], bool]) -> None:
    """Log, once, if the streams are elsewhere at the model's next forward pass than now, right after resume().

    step: the one that was resumed after. is_own: asked then; `steps()` puts the streams where they belong.
    """
    restored = rng.snapshot()

    def look(module: torch.nn.Module, args: Any) -> None:
        hook.remove()
        if not is_own():
            return
        now = rng.snapshot()
        moved = [name for name, was in restored.items() if bytes(now[name].data) != bytes(was.data)]
        if moved:
            _log.warning("%s", moved_text(step, sorted(name.removeprefix("rng/") for name in moved)))

    hook = model.register_forward_pre_hook(look)


def moved_text(step: int, streams: list[str]) -> str:
    """What the user is told.

    >>> moved_text(7, ["torch"]).startswith("random numbers (torch) were drawn between resume() and the first forward")
    True
    """
    return (
        f"random numbers ({', '.join(streams)}) were drawn between resume() and the first forward pass of your own "
        f"loop. The resume is exact only if the uninterrupted run draws the same ones after step {step}. Building a "
        "DataLoader's iterator draws too many: put the streams back after it, see 'A loop of your own' in the README"
    )


def refuse_position(epoch: object, step: object) -> None:
    """ConfigError for what step_end() was given, naming the argument."""
    for name, value in (("epoch", epoch), ("step", step)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number that counts from 1, not {value!r}")
