"""The controller of a simulated job lives and does nothing, and a rank of its host has another one follow.

`optim_wrapper.launch.successor` is the shipped code, and what the process does that it starts (`Controllers`).
"""

from __future__ import annotations

import dataclasses
import math
import random
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastwords.errors import UnavailableError
from lastwords.optim_wrapper.launch.successor import ControllerWatch
from lastwords.processor.events import ProcessorOptions
from lastwords.processor.ring import Silence
from lastwords.vocabulary import DeathSource, PeerDied, ProcessId
from tests.sim.ledger import Life
from tests.sim.shells.plan import Blow, StackPlan, draw
from tests.sim.shells.scheduler import Process

if TYPE_CHECKING:
    from tests.sim.shells.stack import Rank, Stack, Watch

START_S = 0.3
"""A process needs so long to become a controller."""

CLIENT_KEEPALIVE_S = 10.0
"""After so much silence of a stopped controller its ranks' transport breaks their sessions."""

STOPS_S = (6.0, 11.0, 20.0, 400.0)
"""The last one is longer than anybody waits. One that hangs does so for good."""


def behind_a_silent_controller(seed: int, kind: str = "stop_controller") -> StackPlan:
    """The plan of this seed, and its controller is stopped, or hangs, at a random time as well (and is not killed)."""
    plan, dice = draw(seed), random.Random(seed ^ 0x51135)
    stop = Blow(
        kind, dice.uniform(0.0, 0.3), lasts_s=dice.choice(STOPS_S if kind == "stop_controller" else (math.inf,))
    )
    blows = [blow for blow in plan.blows if not blow.kind.endswith("controller")]
    return dataclasses.replace(plan, blows=tuple(sorted([*blows, stop], key=lambda blow: blow.at_s)))


class Following:
    """The ranks that watch the controller of one simulation, and what becomes of them if it does nothing."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._watching: set[int] = set()
        self._told: list[tuple[Process, Callable[[], None]]] = []

    # ------------------------------------------------------------------ what the shipped watch looks at

    def watch(self, rank: Rank, reached: Callable[[], bool]) -> ControllerWatch:
        """That of a rank of the controller's host."""
        self._watching.add(rank.rank)

        def living_before() -> int:
            return sum(other.process.lives for other in self.neighbours if other.rank < rank.rank)

        return ControllerWatch(
            rank.process.name,
            self.stack.controllers.path,
            self._when_ended,
            living_before,
            lambda: not rank.departure.decided,
            Silence(ProcessorOptions()),
            lambda: rank.core.asks,
            reached,
        )

    @property
    def neighbours(self) -> list[Rank]:
        """The ranks of the controller's host."""
        hosts = self.stack.job.hosts
        return [rank for rank in self.stack.ranks if hosts[rank.rank] == hosts[0]]

    def _when_ended(self, watched: ProcessId, on_end: Callable[[], None]) -> None:
        process = self.stack.controllers.process(watched.pid)
        if not process.lives:
            self.stack.scheduler.after(0.0005, on_end)
        self._told.append((process, on_end))

    def start(self, _path: Path) -> Any:
        """In place of `start_successor`: in a rank's thread."""
        scheduler, answer = self.stack.scheduler, types.SimpleNamespace(error=None, pid=0)
        process = self.stack.controllers.new()
        scheduler.spawn(process, "loop", lambda: self._follow(answer))
        while process.lives and not answer.pid:
            scheduler.sleep(0.05)
        if answer.pid:
            return answer
        raise answer.error or UnavailableError("it has ended")

    def _follow(self, answer: Any) -> None:
        self.stack.scheduler.sleep(START_S)
        self.stack.begin_anew(answer)

    def killed(self, process: Process) -> None:
        """Of a controller: whoever watches it is told."""
        process.stopped = False
        for watched, on_end in self._told:
            if watched is process:
                self.stack.scheduler.after(0.0005, on_end)

    # ------------------------------------------------------------------ what else happens around it

    def stopped(self, process: Process, answers_pings: bool) -> None:
        """Sessions with a controller that has been stopped for long break unless it hangs; none can be opened."""
        self.excuse()
        if answers_pings:
            return

        def break_sessions() -> None:
            if process.stopped and process.lives:
                for rank in self.stack.ranks:
                    self.stack.wire.cut(rank.rank, 0.01, 0.0)

        self.stack.scheduler.after(CLIENT_KEEPALIVE_S, break_sessions)

    def excuse(self) -> None:
        """Where nobody is left that could start another one (or not all are registered), a silent one is a dead one."""
        able = [rank for rank in self.neighbours if rank.rank in self._watching and rank.process.lives]
        if self.stack.controller.stopped and not able:
            self.stack.ledger.controller_killed = True

    def died(self, dead: Rank) -> None:
        """Ranks of its host know of it, whatever the controller does."""
        hosts, report = self.stack.job.hosts, DeathSource.ROBUST_MUTEX
        for rank in self.stack.ranks:
            if rank.process.lives and hosts[rank.rank] == hosts[dead.rank] and hasattr(rank, "agent"):
                death = PeerDied(rank.rank, 1, dead.rank, report)
                self.stack.scheduler.spawn(rank.process, "ring", partial(rank.agent.on_peer_died, death))

    def looks_after(self, watch: Watch, number: int) -> None:
        """A follower's host watch: whoever has died meanwhile is told at once, and whoever has left."""
        rank = self.stack.ranks[number]
        if len(self.stack.served) > 1 and rank in self.neighbours and not rank.process.lives:
            now_s = self.stack.scheduler.now_s
            if rank.record.life is Life.KILLED:
                watch.on_death(number, DeathSource.ROBUST_MUTEX, now_s)
            else:
                watch.on_release(number)
