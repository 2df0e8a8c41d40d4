"""Parts of the product, switched off inside a rank of a test: a test that still passes then proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.integration.plan import Plan

_SABOTAGE: dict[str, Callable[[Plan, int], None]] = {}


def apply(plan: Plan, rank: int) -> None:
    """Carry out every sabotage that the plan names, in this process."""
    for name in plan.sabotage:
        _SABOTAGE[name](plan, rank)


def is_frozen(tft: Any) -> bool:
    """Whether lastwords has frozen this rank."""
    raise NotImplementedError
