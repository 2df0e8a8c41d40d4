"""What is known of schedulers of torch's kind: how often one was stepped, and whether a resume can step it."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def is_scheduler(target: Any) -> bool:
    """Whether it is a scheduler of torch's kind."""
    return isinstance(target, torch.optim.lr_scheduler.LRScheduler) or callable(getattr(target, "get_last_lr", None))


def steps_without_argument(target: Any) -> bool:
    """Whether it is a scheduler whose step() can be called as it is."""
    step = getattr(target, "step", None)
    if not callable(step) or not callable(getattr(target, "get_last_lr", None)):
        return False  # a second optimizer, say, has a step() too; stepping it again is not what is due
    try:
        inspect.signature(step).bind()
    except (TypeError, ValueError):
        return False
    return True


def is_at_its_end(state: Any) -> bool:
    """Whether a scheduler has just made the last one of the steps that it was made for."""
    known = ("total_iters", "T_max", "total_steps")
    return isinstance(state, dict) and any(state.get(key, -1) == state.get("last_epoch") for key in known)


def times_stepped(before: Any, now: Any) -> int:
    """How often a scheduler stepped between two states of it: 1, or 2 for anything else; other objects: always 1.

    torch's schedulers count in last_epoch and most in _step_count as well (CosineAnnealingWarmRestarts does not);
    one that is stepped with an argument, such as a fraction of an epoch, does not count up by one.
    """
    if not isinstance(before, dict) or not isinstance(now, dict):
        return 1
    if isinstance(now.get("last_epoch"), int | float) and isinstance(before.get("last_epoch"), int | float):
        counts = before.get("_step_count"), now.get("_step_count")
        known = isinstance(counts[0], int) and isinstance(counts[1], int)
        extra = known and counts[1] - counts[0] not in (0, 1)  # type: ignore[operator]
        return 2 if extra or now["last_epoch"] - before["last_epoch"] != 1 else 1
    inner, inner_now = before.get("_schedulers"), now.get("_schedulers")
    if isinstance(inner, list) and isinstance(inner_now, list) and len(inner) == len(inner_now):
        return max(map(times_stepped, inner, inner_now), default=1)
    return 1
