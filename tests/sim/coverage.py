"""Which transitions of the shipped cores simulations have seen. The cores are watched from outside, not changed."""

from __future__ import annotations

from typing import Any

from lastwords.controller.context import JobContext
from lastwords.controller.core import ControllerCore
from lastwords.controller.events import NEXT_STATES, ControllerOptions, JobStage
from lastwords.processor.core import PARKED, TRANSITIONS, ProcessorCore
from lastwords.vocabulary import Phase

PhaseStep = tuple[Phase, str, Phase]
StateStep = tuple[JobStage, JobStage]

WANTED_PHASES: frozenset[PhaseStep] = frozenset(
    (before, call, after) for table in (TRANSITIONS, PARKED) for (before, call), after in table.items()
)
"""Every entry of the processor core's tables."""

WANTED_STATES: frozenset[StateStep] = frozenset(
    (before, after) for before, following in NEXT_STATES.items() for after in following
)
"""The picture of docs/protocol.md: nothing else may happen, and all of it has to."""


class Coverage:
    """What has been seen so far; `controller` and `processor` make cores that are watched."""

    def __init__(self) -> None:
        self.phases: set[PhaseStep] = set()
        self.states: set[StateStep] = set()

    def controller(self, world_size: int, generation: int, options: ControllerOptions) -> ControllerCore:
        core = ControllerCore(world_size, generation, options)
        context: Any = core._context
        context.__class__ = _WatchedContext
        context.watch(self.states)
        return core

    def processor(self, rank: int, generation: int, start_step: int) -> ProcessorCore:
        core: Any = _WatchedProcessor(rank, generation, start_step)
        core.seen = self.phases
        return core  # type: ignore[no-any-return]


class _WatchedContext(JobContext):
    """A context whose `state` is a property; instances are plain contexts whose class was exchanged."""

    def watch(self, seen: set[StateStep]) -> None:
        self.__dict__["seen"] = seen

    @property
    def state(self) -> JobStage:
        return self.__dict__["state"]  # type: ignore[no-any-return]

    @state.setter
    def state(self, after: JobStage) -> None:
        before = self.__dict__.get("state")
        if before is not None and before is not after and "seen" in self.__dict__:
            self.__dict__["seen"].add((before, after))
        self.__dict__["state"] = after


class _WatchedProcessor(ProcessorCore):
    """A core that notes each call of the training thread with the phases before and after it."""

    seen: set[PhaseStep]


def _watched(call: str) -> Any:
    shipped = getattr(ProcessorCore, call)

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        before = self.phase
        value = shipped(self, *arguments, **named)
        self.seen.add((before, call, self.phase))
        return value

    return method


for _call in sorted({call for _, call in TRANSITIONS}):
    setattr(_WatchedProcessor, _call, _watched(_call))
