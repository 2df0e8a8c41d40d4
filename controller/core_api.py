"""What the controller's shell takes of a core, be it the controller's or another one that answers in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from lastwords.controller import events
from lastwords.controller.events import Effect, Event, State


class Core(Protocol):
    """What the shell needs of a core (`controller.core.ControllerCore`)."""

    @property
    def state(self) -> State: ...

    @property
    def deadline_s(self) -> float | None: ...

    @property
    def incident(self) -> int: ...

    @property
    def outcome(self) -> events.Outcome | None: ...

    @property
    def slower(self) -> Mapping[int, float]: ...

    def handle(self, event: Event, now_s: float) -> list[Effect]: ...
