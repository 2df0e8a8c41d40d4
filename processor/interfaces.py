"""What the agent needs of the things around it, and how often it looks at them."""

from __future__ import annotations

from typing import Protocol

from lastwords.vocabulary import Report

STATUS_INTERVAL_S = 0.1
"""Status is coalesced to ten reports a second: every step is seen, no step costs a round trip."""

PARK_POLL_S = 0.5
"""A parked thread looks again this often even if nobody wakes it; a wake-up is an optimisation, not a need."""

GATE_PAUSE_S = 0.00005
"""Between two looks at the gate. A sleep, however short, gives the processor to the peers that are waited for: on 2
cores spinning was up to a hundred times slower, sleeping as fast as a blocking wait. What the kernel makes of it is
0.1 ms."""


class SessionLike(Protocol):
    """What the agent needs of a session with the controller (`processor.session.Session`)."""

    def send(self, report: Report) -> None: ...

    def look(self, asks: bool, now_s: float) -> None: ...

    def close(self, timeout_s: float) -> None: ...


class GateLike(Protocol):
    """A collective that this rank has entered (`optim_wrapper.trainer.gate.Gate`)."""

    def passed(self) -> bool:
        """Whether every rank has entered it. Raises GateFailedError if that can never be any more."""


class PhaseWord(Protocol):
    """Where the newest stand is written so that it survives `kill -9` (the black box)."""

    def set_stand(self, phase: int, step: int) -> None: ...
