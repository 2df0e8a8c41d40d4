"""What the controller's core consists of, and what it can be asked. Pure; the events are in `controller.core`."""

from __future__ import annotations

from collections.abc import Mapping

from lastwords.controller.closing import Closing
from lastwords.controller.context import JobContext
from lastwords.controller.events import ControllerOptions, Effect, Outcome, Remember, State
from lastwords.controller.hang import HangWatch
from lastwords.controller.incident import Incident
from lastwords.controller.loop import LoopWatch
from lastwords.controller.membership import Membership
from lastwords.controller.memory import Memory
from lastwords.controller.periodic import Periodic
from lastwords.controller.stragglers import Stragglers
from lastwords.controller.succession import Succession


class JobState:
    """The parts of one job's controller, and the queries on them. before: what one that was killed has kept."""

    def __init__(
        self,
        world_size: int,
        generation: int,
        options: ControllerOptions | None = None,
        before: Remember | None = None,
    ) -> None:
        self._context = JobContext(world_size, generation, options or ControllerOptions())
        self._members = self._context.members
        self._timers = self._context.timers
        self._incident: Incident | None = None
        self._incident_number = 0
        self._incident_resumed = 0  # newest one that was a false alarm
        self._closing = Closing(self._context)
        self._periodic = Periodic(self._context)
        self._loop = LoopWatch(self._context, self._closing, self._periodic)
        self._hang = HangWatch(self._context, before.memory.pace_s if before is not None else 0.0)
        self._stragglers = Stragglers(self._context)
        self._succession = Succession(self._context, before)
        self._started = False

    @property
    def state(self) -> State:
        """Where the job stands."""
        return self._context.state

    @property
    def incident(self) -> int:
        """Number of the newest incident, 0 if there was none."""
        return self._incident_number

    @property
    def outcome(self) -> Outcome | None:
        """How the job ended, once that is decided."""
        return self._closing.outcome

    @property
    def members(self) -> Membership:
        """Who takes part; to be read only."""
        return self._members

    @property
    def slower(self) -> Mapping[int, float]:
        """The ranks that are persistently slower than their peers, and by how much: 0.5 is half as much again."""
        return self._stragglers.slower

    @property
    def deadline_s(self) -> float | None:
        """When the next Tick is due; None if nothing is waited for. Before the first event it is due at once."""
        return self._timers.next_s if self._started else 0.0

    def _current(self, number: int) -> Incident | None:
        return self._incident if self._incident is not None and self._incident.number == number else None

    def _incident_or_new(self) -> Incident:
        if self._incident is None:
            self._incident_number += 1
            self._incident = Incident(self._context, self._incident_number)
        return self._incident

    def _remembering(self, effects: list[Effect]) -> list[Effect]:
        """The effects, preceded by a Remember if the successor needs new state."""
        wanted, pace_s = self._periodic.wanted, self._hang.kept_pace_s
        if self._succession.may_wait(effects, self._incident, wanted=wanted, pace_s=pace_s):
            return effects
        numbers = Memory(
            incident=self._incident_number,
            resumed=self._incident_resumed,
            periodic=self._periodic.newest,
            wanted=wanted,
            pace_s=pace_s,
            outcome=self._closing.outcome,
        )
        kept = self._succession.remember(numbers, self._incident)
        return effects if kept is None else [kept, *effects]
