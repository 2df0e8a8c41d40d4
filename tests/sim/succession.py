"""A small world whose controller is killed at any instant, and followed by another one that knows what was remembered.

Every prefix of what the controller was doing has been done when it is killed: an order that was sent may be lost with
its stream (or has arrived before), a rename may have happened without a word, and a report that was not heard is as one
that was lost. Ranks connect again in any order, and say what they owe. A finished file of which only the dead
controller knew is owed no more than one whose writer died before it could say so.
"""

from __future__ import annotations

from typing import Any

from lastwords.controller import events as to_controller
from lastwords.controller.core import ControllerCore
from lastwords.controller.events import ControllerOptions, Remember
from tests.sim.explore import Found, Plain, Search, reduced, without_garbage_collection
from tests.sim.interned import InternedController
from tests.sim.job import Job
from tests.sim.ledger import Life
from tests.sim.small_world import NOT_ASKED, Action, SmallWorld, Tables, _registered

ANNOUNCES_AGAIN = True
"""The successor's host watch tells of those that have died meanwhile."""


class SuccessionWorld(SmallWorld):
    """restarts_max: so often may the controller be killed and followed.

    fenced: False lets what the older one was about to publish be published at any later time, as if it lived on.
    """

    def __init__(self, job: Job, tables: Tables, kills_max: int, restarts_max: int, *, fenced: bool = True) -> None:
        super().__init__(job, tables, kills_max, breaks_max=0, whole=True)
        self.restarts_max = restarts_max
        self.fenced = fenced
        self.restarts = 0
        self.remembered = self.kept_at_last_act = self.tables.number(_registered_memory(job))
        self.older: to_controller.StartPublish | None = None

    def take_shared(self) -> tuple[Any, ...]:
        older = self.tables.number(self.older)
        return (self.restarts, self.remembered, self.kept_at_last_act, older, *super().take_shared())

    def put_shared(self, shared: tuple[Any, ...]) -> None:
        self.restarts, self.remembered, self.kept_at_last_act, older = shared[:4]
        self.older = self.tables.things[older]
        super().put_shared(shared[4:])
        self.ledger.storage_failures = 0  # a verification that comes too late is none

    # ------------------------------------------------------------------ what can happen

    @property
    def over(self) -> bool:
        """Whether the world may be left to itself: there is no state in which no controller may be killed."""
        return super().over and self.restarts >= self.restarts_max

    def actions(self) -> list[Action]:
        found = super().actions()
        if self.older is not None:
            found.append(("older publishes",))
        if self.restarts < self.restarts_max and self.controller_lives:
            for kept in {self.remembered, self.kept_at_last_act}:
                found += [("restart", False, kept)] + [("restart", True, kept)] * (self.publishing is not None)
        return found

    def perform(self, action: Action) -> None:
        if action[0] not in ("restart", "older publishes"):
            super().perform(action)
            return
        self.sent.clear()
        self.disk = self.disk.copy()
        if action[0] == "older publishes":
            assert self.older is not None
            self.rename(self.older)
            self.older = None
            return
        if action[1] and self.publishing is not None:
            self.rename(self.publishing)
        elif not self.fenced:
            self.older = self.publishing
        self.restarts += 1
        self._follow(self.tables.things[action[2]])

    def _follow(self, before: Remember) -> None:
        """Another controller serves; nobody has said anything to it yet."""
        self.verifying = self.publishing = None
        self.stage = ""
        self.bound.clear()
        self.ledger.heard_saved.clear()
        core = follower(self.job, before)
        controller: Any = InternedController(self.tables.controllers, self.tables.controllers.number(core))
        self.controller = controller
        gone = {one.rank for one in before.memory.gone}
        for trainer in self.trainers:
            rank = trainer.rank
            self.up[rank].clear()
            self.down[rank].clear()
            if trainer.record.life is Life.ALIVE:
                self.cut[rank], self.asked[rank] = True, NOT_ASKED
                self.unlink(trainer)
                self.link(trainer)
            else:
                self.unannounced[rank] = ANNOUNCES_AGAIN and trainer.record.life is Life.KILLED and rank not in gone
        self.feed_controller(to_controller.Tick())

    def rename(self, effect: to_controller.StartPublish) -> None:
        """As the shipped one: the order that a killed controller has carried out already changes nothing."""
        done = ((publication.incident, publication.attempt) for publication in self.ledger.publications)
        if (effect.incident, effect.attempt) not in done:
            super().rename(effect)

    def _carry_out(self, effect: to_controller.Effect) -> None:
        if isinstance(effect, Remember):
            self.remembered = self.tables.number(effect)
        else:
            self.kept_at_last_act = self.remembered
        super()._carry_out(effect)


def follower(job: Job, before: Remember) -> ControllerCore:
    """The core of a controller that follows."""
    options = ControllerOptions(has_fallback_target=job.fallback)
    return ControllerCore(job.world_size, job.generation, options, before)


def _registered_memory(job: Job) -> Remember:
    """What a controller has remembered of a job whose ranks all begin their first step."""
    controller, *_ = _registered(job)
    before = controller._succession.remembered
    assert before is not None
    return before


def explore_succession(
    job: Job, kills_max: int, restarts_max: int = 1, *, fenced: bool = True, states_max: int = 0
) -> Found:
    """As `explore.explore`, with a controller that may be killed; by the definition, without reductions."""
    with reduced(), without_garbage_collection():
        world = SuccessionWorld(job, Tables(whole=True), kills_max, restarts_max, fenced=fenced)
        return Search(job, Plain(world), 1, states_max).run()
