"""A small world whose controller is killed at any instant, and followed by another one that knows what was remembered.

Every prefix of what the controller was doing has been done when it is killed: an order that was sent may be lost with
its stream (or has arrived before), a rename may have happened without a word, what was to be removed may still be
there, and a report that was not heard is as one that was lost. Ranks connect again in any order, and say what they owe.
A finished file of which only the dead controller knew is owed no more than one whose writer died before it could say
so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from lastwords.controller import events as to_controller
from lastwords.controller.core import ControllerCore
from lastwords.controller.events import ControllerOptions, Remember
from lastwords.core_events import Log, Tick
from lastwords.processor import events as to_processor
from lastwords.processor.participation import Correspondence
from lastwords.vocabulary import Order, Report
from tests.sim.components import Components, Numbers
from tests.sim.explore import Found, Search, reduced, without_garbage_collection
from tests.sim.interned import ONLY_FOR_PEOPLE, Fields, InternedController, Table
from tests.sim.job import Job
from tests.sim.ledger import Life
from tests.sim.small_world import NOT_ASKED, Action, SmallWorld, Tables, _registered
from tests.sim.world import At, Trainer

ANNOUNCES_AGAIN = True
"""The successor's host watch tells of those that have died meanwhile."""

DEAF, DEAF_FOR_EVER, ALONE = 2, 3, 4
"""More values of `cut`: the rank has not noticed yet that its controller is gone, whose orders may still come (and
another one follows, or none does); it has noticed, and there is none."""

_MAKE_A_DIFFERENCE = (to_controller.Discard, to_controller.EndController)
"""Effects that the next controller finds done or not done. Of the others it sees nothing, or what is lost anyway."""

_REMEMBERED: Fields = frozenset({("Succession", "remembered"), ("Member", "source"), ("Member", "stand")})
"""Decides what is kept, or what a successor does."""


@dataclass(frozen=True, slots=True)
class How:
    """What else may happen when the controller is killed, and what keeps two of them apart.

    late_orders: a rank may go on reading what the killed one had sent, while another one serves already.
    lost: what it has kept is lost with it, so none follows.
    stale: what it has kept is what it kept first (deliberately wrong).
    fenced: False lets the older one live on (deliberately wrong): it was stopped, and wakes up at any time.
    """

    late_orders: bool = False
    lost: bool = False
    stale: bool = False
    fenced: bool = True


SHIPPED = How()


class SuccessionTables(Tables):
    """`last`: the controllers that nobody follows any more; fewer of their differences matter."""

    def __init__(self, job: Job, whole: bool) -> None:
        super().__init__(whole)
        if not whole:
            periodic = {("Member", "stand")} if job.schedule.steps else frozenset[tuple[str, str]]()
            self.controllers = Table(InternedController.QUERIES, ONLY_FOR_PEOPLE - _REMEMBERED, tidies=True)
            self.last = Table(InternedController.QUERIES, ONLY_FOR_PEOPLE - periodic, tidies=True)
        else:
            self.last = self.controllers


class SuccessionWorld(SmallWorld):
    """restarts_max: so often may the controller be killed and followed."""

    tables: SuccessionTables

    def __init__(
        self, job: Job, tables: SuccessionTables, kills_max: int, restarts_max: int, how: How, whole: bool = False
    ) -> None:
        self.restarts_max = restarts_max
        self.how = how
        self.restarts = 0
        self.first = self.remembered = self.kept_at_last_act = tables.number(_registered_memory(job))
        self.older: tuple[Any, ...] | None = None
        self.is_older = False  # who acts
        super().__init__(job, tables, kills_max, breaks_max=0, whole=whole)
        self._followers: dict[tuple[bool, int], int] = {}
        self.effects_done = 0  # by the last action
        self.effects_max: int | None = None  # after so many it is killed
        self.fatal: list[int] = []

    def take_shared(self) -> tuple[Any, ...]:
        older = self.tables.number(self.older)
        return (self.restarts, self.remembered, self.kept_at_last_act, older, *super().take_shared())

    def put_shared(self, shared: tuple[Any, ...]) -> None:
        self.restarts, self.remembered, self.kept_at_last_act, older = shared[:4]
        self.older = self.tables.things[older]
        super().put_shared(shared[4:])
        controller: Any = self.controller
        controller.table = self.tables.controllers if self.may_be_killed or not self.how.fenced else self.tables.last
        self.ledger.storage_failures = 0  # a verification that comes too late is none
        self.ledger.controller_killed = not self.controller_lives and not self.ledger.controller_stopped

    # ------------------------------------------------------------------ what can happen

    @property
    def over(self) -> bool:
        """Whether the world may be left to itself: there is no state in which no controller may be killed."""
        return super().over and not self.may_be_killed and self.older is None and not self.ledger.controller_killed

    @property
    def may_be_killed(self) -> bool:
        """Whether one more controller may be killed."""
        return self.restarts < self.restarts_max

    def actions(self) -> list[Action]:
        if self.may_be_killed or self.older is not None:
            whole, self.whole = self.whole, True
            found = super().actions() + self.older_actions()
            self.whole = whole
            return found
        return super().actions()

    def ends_of_controller(self) -> list[Action]:
        """How it may be killed while it waits."""
        if not self.may_be_killed or not self.controller_lives or self.ledger.controller_stopped:
            return []
        found: list[Action] = []
        publishes = isinstance(self.periodic_files, to_controller.StartPublish) or (
            self.periodic_files is None and self.publishing is not None
        )
        for renamed in (False, True)[: 1 + publishes]:
            found += [("follow", kept, renamed) for kept in sorted(self.kept)]
            found += [("nobody follows", renamed)] * self.how.lost
        return found

    @property
    def kept(self) -> set[int]:
        """What may stand in the file when another one reads it: the newest, unless nothing was done after that."""
        return {self.first} if self.how.stale else {self.remembered, self.kept_at_last_act}

    def own_actions(self, trainer: Trainer) -> list[Action]:
        found = super().own_actions(trainer)
        if trainer.record.life is Life.ALIVE:
            cut = self.cut[trainer.rank]
            if cut in (DEAF, DEAF_FOR_EVER):
                found.append(("notice", trainer.rank))
            elif cut == ALONE and trainer.at in (At.STUCK, At.STUCK_UPDATE):
                found.append(("move", trainer.rank, "time out"))
        return found

    def older_actions(self) -> list[Action]:
        """What a controller may do that lives on behind another one."""
        if self.older is None:
            return []
        found: list[Action] = []
        with self._as_older():
            for trainer in self.trainers:
                if self.up[trainer.rank] and self.cut[trainer.rank] == DEAF:
                    found.append(("older", ("hear", trainer.rank)))
            found += [("older", action) for action in self.storage_actions()]
        return found

    # ------------------------------------------------------------------ what then happens

    def perform(self, action: Action) -> None:
        kind = action[0]
        self.effects_done, self.fatal = 0, []
        if kind == "notice":
            self.sent.clear()
            self._notice(self.trainers[action[1]])
        elif kind == "older":
            with self._as_older():
                super().perform(action[1])
        elif kind == "while it acts":
            self.effects_max = action[2]
            super().perform(action[1])
            self.effects_max = None
            self.perform(action[3])
        elif kind in ("follow", "nobody follows"):
            self.sent.clear()
            self.disk = self.disk.copy()
            if action[-1]:
                published = self.periodic_files if self.periodic_files is not None else self.publishing
                assert isinstance(published, to_controller.StartPublish)
                self.rename(published)
            if kind == "follow":
                self._follow(action[1])
            else:
                self._nobody_follows()
        else:
            super().perform(action)

    def _follow(self, kept: int) -> None:
        """Another controller serves; nobody has said anything to it yet."""
        if not self.how.fenced:
            self.older = self._side()
        before: Remember = self.tables.things[kept]
        self._is_killed()
        self.remembered = self.kept_at_last_act = kept
        controller: Any = self.controller
        if not self.may_be_killed and self.how.fenced:
            controller.table = self.tables.last
        controller.state = self._follower(kept)
        gone = {one.rank for one in before.memory.gone}
        for trainer in self.trainers:
            if trainer.record.life is Life.ALIVE:
                self._loses_controller(trainer, DEAF)
            else:
                self.down[trainer.rank].clear()
                again = ANNOUNCES_AGAIN and trainer.record.life is Life.KILLED and trainer.rank not in gone
                self.unannounced[trainer.rank] = again
        self.feed_controller(Tick())
        if not self.may_be_killed:
            self.remembered = self.kept_at_last_act = 0

    def _follower(self, kept: int) -> int:
        """The state of a core that begins with this."""
        controller: Any = self.controller
        key = (controller.table is self.tables.last, kept)
        known = self._followers.get(key)
        if known is None:
            known = self._followers[key] = controller.table.number(follower(self.job, self.tables.things[kept]))
        return known

    def _nobody_follows(self) -> None:
        self._is_killed()
        self.restarts = self.restarts_max
        self.remembered = self.kept_at_last_act = 0
        self.controller_lives = False
        self.ledger.controller_killed = True
        controller: Any = self.controller
        controller.table = self.tables.last
        controller.state = self._follower(self.first)
        for trainer in self.trainers:
            self.unannounced[trainer.rank] = False
            if trainer.record.life is Life.ALIVE:
                self._loses_controller(trainer, DEAF_FOR_EVER)

    def _is_killed(self) -> None:
        self.restarts += 1
        self.verifying = self.publishing = self.periodic_files = None
        self.stage = ""
        self.bound.clear()
        self.ledger.heard_saved.clear()
        if self.how.fenced:
            for reports in self.up:
                reports.clear()

    def _loses_controller(self, trainer: Trainer, cut: int) -> None:
        self.cut[trainer.rank] = cut  # type: ignore[call-overload]
        if not self.how.late_orders and self.how.fenced:
            self._notice(trainer)

    def _notice(self, trainer: Trainer) -> None:
        rank = trainer.rank
        follows = self.cut[rank] == DEAF
        self.up[rank].clear()
        self.down[rank].clear()
        self.cut[rank], self.asked[rank] = (True if follows else ALONE), NOT_ASKED  # type: ignore[call-overload]
        if follows:
            self.unlink(trainer)
            self.link(trainer)
        else:
            self.feed(trainer, to_processor.SessionDown())

    def send_up(self, trainer: Trainer, report: Report) -> None:
        if self.cut[trainer.rank] in (False, True) or (self.older is not None and self.cut[trainer.rank] == DEAF):
            super().send_up(trainer, report)

    def append(self, rank: int, order: Order) -> None:
        if self.is_older and self.cut[rank] == DEAF:
            self.down[rank].append(self.tables.number(order))
        elif not self.is_older:
            super().append(rank, order)

    def rename(self, effect: to_controller.StartPublish) -> None:
        """As the shipped one: the order that a killed controller has carried out already changes nothing."""
        done = ((publication.incident, publication.attempt) for publication in self.ledger.publications)
        if (effect.incident, effect.attempt) not in done:
            super().rename(effect)

    def _carry_out(self, effect: to_controller.Effect) -> None:
        if self.effects_max is not None and self.effects_done >= self.effects_max:
            return
        if isinstance(effect, _MAKE_A_DIFFERENCE):
            self.fatal.append(self.effects_done)
        self.effects_done += 1
        if not self.is_older and self.may_be_killed:
            if isinstance(effect, Remember):
                self.remembered = self.tables.number(effect)
            elif not isinstance(effect, Log):
                self.kept_at_last_act = self.remembered
        super()._carry_out(effect)

    # ------------------------------------------------------------------ two at once

    @contextmanager
    def _as_older(self) -> Iterator[None]:
        """The older one acts, and not the one that has taken its place."""
        assert self.older is not None
        newer = (self._side(), self.controller_lives, self.ledger.controller_stopped)
        self._put_side(self.older)
        self.is_older, self.controller_lives = True, True
        try:
            yield
        finally:
            self.older = self._side() if self.controller_lives else None
            self.is_older = False
            side, self.controller_lives, self.ledger.controller_stopped = newer
            self._put_side(side)

    def _side(self) -> tuple[Any, ...]:
        """What one controller has of its own."""
        controller: Any = self.controller
        files = (self.verifying, self.publishing, self.periodic_files)
        return (controller.state, self.controller_clock_s, self.stage, tuple(sorted(self.bound)), *files)

    def _put_side(self, side: tuple[Any, ...]) -> None:
        controller: Any = self.controller
        controller.state, self.controller_clock_s, self.stage, bound, *files = side
        self.bound = dict.fromkeys(bound, 1)
        self.verifying, self.publishing, self.periodic_files = files


class SuccessionParts(Components):
    """What follows, looked up part by part; where the controller may still be killed, without leaving anything out."""

    world: SuccessionWorld

    def __init__(self, world: SuccessionWorld) -> None:
        super().__init__(world)
        self._fatal: dict[tuple[Any, ...], tuple[int, ...]] = {}

    def following(self, numbers: Numbers) -> list[tuple[Action, Numbers]]:
        shared = self.shared[numbers[-1]]
        restarts, lives = shared[0], self._shared_looks[numbers[-1]][1]
        looks = [self.looks[number] for number in numbers[:-1]]
        if restarts == self.world.restarts_max:
            return super().following(numbers) if lives or shared[-1] else self._everything(numbers, looks)
        found = self._everything(numbers, looks)
        return found + self._ends_of_controller(numbers, [action for action, _ in found])

    def _ends_of_controller(self, numbers: Numbers, actions: list[Action]) -> list[tuple[Action, Numbers]]:
        """How it may be killed: while it waits, and while it does one of these."""
        self.put(numbers)
        ends = self.world.ends_of_controller()
        found = [(end, self._performed(end, numbers)) for end in ends]
        for action in actions if ends else ():
            for done in self._fatal_places(action, numbers):
                found += self._ends_while_it_acts(action, done, numbers)
        return found

    def _performed(self, action: Action, numbers: Numbers) -> Numbers:
        self.put(numbers)
        self.world.perform(action)
        return self.take()

    def _ends_while_it_acts(self, action: Action, done: int, numbers: Numbers) -> list[tuple[Action, Numbers]]:
        world = self.world
        self.put(numbers)
        world.effects_max = done
        SmallWorld.perform(world, action)
        world.effects_max = None
        ends = [("while it acts", action, done, end) for end in world.ends_of_controller() if not end[-1]]
        return [(end, self._performed(end, numbers)) for end in ends]

    def _fatal_places(self, action: Action, numbers: Numbers) -> tuple[int, ...]:
        """After how many effects of this action it matters that no more are carried out."""
        if action[0] not in ("hear", "died", "verify", "publish", "periodic files", "time"):
            return ()
        key = (action, self.looks[numbers[action[1]]].next_up if action[0] == "hear" else None, numbers[-1])
        known = self._fatal.get(key)
        if known is None:
            self.put(numbers)
            self.world.perform(action)
            known = self._fatal[key] = tuple(self.world.fatal)
        return known


class WholeParts(SuccessionParts):
    """The same without looking anything up, and without leaving anything out."""

    def following(self, numbers: Numbers) -> list[tuple[Action, Numbers]]:
        self.put(numbers)
        actions = self.world.actions()
        found = [(action, self._performed(action, numbers)) for action in actions]
        return found + (self._ends_of_controller(numbers, actions) if self.world.may_be_killed else [])


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
    job: Job,
    kills_max: int,
    restarts_max: int = 1,
    how: How = SHIPPED,
    *,
    bad_max: int = 1,
    states_max: int = 0,
    whole: bool = False,
) -> Found:
    """As `explore.explore`, with a controller that may be killed. whole: by the definition, without reductions."""
    alone = mock.patch.object(Correspondence, "deadline_s", lambda self, now_s: self._lost_at_s())
    with reduced(), alone, without_garbage_collection():
        world = SuccessionWorld(job, SuccessionTables(job, whole), kills_max, restarts_max, how, whole)
        plain = whole or not how.fenced
        parts = WholeParts(world) if plain else SuccessionParts(world)
        return Search(job, parts, bad_max, states_max).run()
