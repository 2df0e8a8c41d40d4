"""The controller of a simulated job lives and does nothing, and a rank of its host has another one follow.

`optim_wrapper.launch.successor` is the shipped code. The process that it starts is played here: it asks the older
one, ends it if that does not answer, and serves with what was remembered, as `controller.takeover` does.
"""

from __future__ import annotations

import dataclasses
import math
import random
import types
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lastwords.controller import takeover
from lastwords.controller.events import Remember
from lastwords.errors import BusyError, UnavailableError
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


@dataclasses.dataclass(frozen=True)
class Owner:
    """`handover.Owner`, of a simulated process."""

    pid: int
    process: Process
    start_ticks: int = 1

    @property
    def is_running(self) -> bool:
        return self.process.lives


class Kept:
    """In place of the state file of one controller, and its path."""

    def __init__(self, following: Following, owner: Owner) -> None:
        self._following = following
        self._owner = owner

    def write(self, remembered: Remember) -> None:
        self._following.owner, self._following.remembered = self._owner, remembered

    def write_again(self) -> None:
        """Nothing: it is always written."""

    def beat(self) -> None:
        self._following.beats += 1


class Following:
    """Who serves in one simulation, who is to, and what is kept for whoever follows. `beats`: signs of life."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.owner: Owner | None = None
        self.remembered: Remember | None = None
        self.beats = 0
        self.holder: Process | None = None
        self.begun = 0
        self._watching: set[int] = set()
        self._told: list[tuple[Process, Callable[[], None]]] = []

    # ------------------------------------------------------------------ what the shipped watch looks at

    def watch(self, rank: Rank, reached: Callable[[], bool]) -> ControllerWatch:
        """That of a rank of the controller's host."""
        path: Any = self
        self._watching.add(rank.rank)

        def living_before() -> int:
            return sum(other.process.lives for other in self.neighbours if other.rank < rank.rank)

        return ControllerWatch(
            rank.process.name,
            path,
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

    def exists(self) -> bool:
        """As the path of the state file."""
        return self.owner is not None

    def state_file(self) -> Any:
        """In place of the module."""
        return types.SimpleNamespace(owner=lambda _: self.owner, beat=lambda _: self.beats if self.owner else None)

    def _when_ended(self, process: ProcessId, on_end: Callable[[], None]) -> None:
        assert self.owner is not None
        if not self.owner.process.lives:
            self.stack.scheduler.after(0.0005, on_end)
        self._told.append((self.owner.process, on_end))

    def start(self, _path: Any) -> Any:
        """In place of `start_successor`: in a rank's thread."""
        scheduler = self.stack.scheduler
        process, answer = Process("controller"), types.SimpleNamespace(error=None, pid=0)
        scheduler.spawn(process, "loop", lambda: self._follow(process, answer))
        while process.lives and not answer.pid:
            scheduler.sleep(0.05)
        if answer.pid:
            return answer
        raise answer.error or UnavailableError("it has ended")

    # ------------------------------------------------------------------ the process that is to follow

    def _follow(self, process: Process, answer: Any) -> None:
        scheduler = self.stack.scheduler
        scheduler.sleep(START_S)
        until_s = scheduler.now_s + takeover.END_S
        while self.holder is not None and self.holder.lives:
            if self.owner is not None and self.owner.is_running and self._answers(self.owner.process):
                answer.error = BusyError("it is alive")
            elif scheduler.now_s > until_s:
                answer.error = UnavailableError("it does not end")
            if answer.error is not None:
                scheduler.leave()
            if self.owner is not None and self.owner.process.lives:
                self.stack.tell("controller", "does not answer and is ended")
                self.end(self.owner.process)
            scheduler.sleep(takeover.POLL_INTERVAL_S)
        if self.owner is None or self.remembered is None:
            answer.error = UnavailableError("the job is over")
            scheduler.leave()
        self.holder = process
        answer.pid = self.begun + 2
        self.stack.serve(process, self.begins(process), self.remembered)

    def _answers(self, older: Process) -> bool:
        scheduler = self.stack.scheduler
        until_s = scheduler.now_s + takeover.ANSWER_S
        while older.stopped and older.lives and scheduler.now_s < until_s:
            scheduler.sleep(takeover.POLL_INTERVAL_S)
        return older.lives and not older.stopped

    def begins(self, process: Process) -> Kept:
        """A controller begins to serve."""
        self.begun += 1
        self.holder = process
        owner = Owner(self.begun, process)
        self.owner = self.owner or owner
        return Kept(self, owner)

    def ends(self) -> None:
        """It has ended by itself: nothing of it is left."""
        self.owner = self.remembered = None

    def end(self, process: Process) -> None:
        """SIGKILL."""
        process.stopped = False
        self.stack.kill_process(process)
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
        if self.begun > 1 and rank in self.neighbours and not rank.process.lives:
            now_s = self.stack.scheduler.now_s
            if rank.record.life is Life.KILLED:
                watch.on_death(number, DeathSource.ROBUST_MUTEX, now_s)
            else:
                watch.on_release(number)
