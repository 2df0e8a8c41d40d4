"""What a controller has to know of the one before it, where that was killed: plain values, and how they are used.

The ranks repeat most of what they have said to whoever serves them, so little is kept: who takes part, since a dead
rank says nothing any more; what all have agreed upon; numbers that must not be used twice; and what has been decided
and can be told already. `Remember` says it before anything is done that rests on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lastwords.controller.events import Discard, Outcome, StartPublish
from lastwords.controller.membership import LoopShape
from lastwords.vocabulary import DeathSource, ProcessId, Stand


@dataclass(frozen=True, slots=True)
class Registered:
    """One rank of the job."""

    process: ProcessId
    units: tuple[str, ...]
    shared: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gone:
    """A rank whose process has ended; `left`: where it had left the loop, if it had."""

    rank: int
    source: DeathSource
    left: Stand | None


@dataclass(frozen=True, slots=True)
class Memory:
    """Beside the members; the defaults are those of a job that has just begun.

    certain: the incident that is open cannot be a false alarm. attempts: temporary directories that are in use.
    publishing: the newest order to publish in an incident that is open. periodic: the newest of its kind.
    wanted: one was asked for and is not written yet. pace_s: about what a step takes. outcome: how the job ends, once
    that is decided.
    """

    gone: tuple[Gone, ...] = ()
    base_step: int = 0
    loop: LoopShape | None = None
    incident: int = 0
    resumed: int = 0
    certain: bool = False
    attempts: tuple[Discard, ...] = ()
    publishing: StartPublish | None = None
    periodic: Discard | None = None
    wanted: bool = False
    pace_s: float = 0.0
    outcome: Outcome | None = None
