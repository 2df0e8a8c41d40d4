"""How tests wait for what another process or thread is about to do: as long as it takes, in one place."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LONG_S = 300.0
"""Far longer than anything takes on a busy machine: a test that gets here is broken, and says what it waited for."""


def until(what: Callable[[], Any], why: Callable[[], str] | str = "") -> Any:
    """What `what` returns, as soon as that is true. why: for the message of a test that has waited in vain."""
    deadline_mono_s = time.monotonic() + LONG_S
    while not (found := what()):
        if time.monotonic() > deadline_mono_s:
            raise AssertionError(f"waited {LONG_S:.0f} s: {why if isinstance(why, str) else why()}")
        time.sleep(0.01)
    return found
