"""What follows a state, looked up part by part: what lets the exploration visit millions of states.

A state of `SmallWorld` consists of a part for each rank and a shared part; each has a number here. Whatever happens
changes few of them, and depends on few. So `SmallWorld` itself, which is the definition, runs once for each
different (part, action), and the result is looked up afterwards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lastwords.vocabulary import Freeze, Hello, Resume
from tests.sim.ledger import Life
from tests.sim.small_world import ASKED, CLOSED, NOT_ASKED, Action, Own, SmallWorld, State
from tests.sim.world import At

Numbers = tuple[int, ...]
"""A state: the number of each rank's part, and last the number of the shared part."""

Sent = tuple[tuple[int, int], ...]
WRITTEN = ("written", "written behind")
"""Actions of a rank that change the disk, too."""

COUNTERS = ("contributed", "gated", "updated", "logged")


class Look(NamedTuple):
    """What the rest of the world can see of a rank."""

    alive: bool
    killed: bool
    counters: tuple[int, ...]
    next_up: int | None  # number of the message that the controller would hear
    unannounced: bool
    breaks: int
    collective: int  # index of the counter of the collective that it is in, or -1
    gated: bool  # frozen at the gate: nobody else matters
    writes: bool
    writes_behind: bool
    may_act_alone: bool  # as far as it is for itself to say
    resumed: int
    box: Any
    record: Any  # what the checkers look at


class Components:
    """`following` is `SmallWorld.actions` with `SmallWorld.perform` of each, for states as numbers."""

    def __init__(self, world: SmallWorld) -> None:
        self.world = world
        self.ranks = len(world.trainers)
        self.owns: list[Own] = []
        self.looks: list[Look] = []
        self._number_of_own: dict[tuple[int, Own], int] = {}
        self.shared: list[Any] = []
        self._shared_looks: list[tuple[bool, bool, tuple[Action, ...], bool]] = []
        self._first: dict[tuple[int, int, bool], bool] = {}
        self._number_of_shared: dict[Any, int] = {}
        self._own_moves: dict[tuple[int, bool, bool], tuple[tuple[Action, int], ...]] = {}
        self._faults: dict[tuple[int, bool, bool], tuple[tuple[Action, int], ...]] = {}
        self._written: dict[tuple[Any, ...], tuple[int, int]] = {}
        self._controllers: dict[tuple[Any, ...], tuple[int, Sent]] = {}
        self._popped: dict[tuple[int, bool], int] = {}
        self._told: dict[tuple[int, int], int] = {}

    # ------------------------------------------------------------------ numbers

    def take(self) -> Numbers:
        """The numbers of the state that the world is in."""
        state = self.world.take()
        return (*(self._number(rank, own) for rank, own in enumerate(state[:-1])), self._share(state[-1]))

    def put(self, numbers: Numbers) -> None:
        """Put the world into that state."""
        self.world.put(self.state(numbers))

    def state(self, numbers: Numbers) -> State:
        """The state itself."""
        return (*(self.owns[number] for number in numbers[:-1]), self.shared[numbers[-1]])

    def over(self, numbers: Numbers) -> bool:
        """As `SmallWorld.over`."""
        return self._shared_looks[numbers[-1]][0]

    def _number(self, rank: int, own: Own) -> int:
        known = self._number_of_own.get((rank, own))
        if known is None:
            known = self._number_of_own[(rank, own)] = len(self.owns)
            self.owns.append(own)
            self.looks.append(self._look(rank, own))
        return known

    def _look(self, rank: int, own: Own) -> Look:
        up, down, asked, cut, breaks, unannounced, saved = own
        world, life = self.world, saved[0]
        alive = life is Life.ALIVE
        collective, gated, writes, writes_behind, resumed = -1, False, False, False, 0
        if alive:
            world.put_own(rank, own)
            trainer = world.trainers[rank]
            entered = world.in_collective(trainer)
            collective = COUNTERS.index(entered) if entered is not None else -1
            gated = trainer.at is At.GATE and trainer.core.frozen
            writes = trainer.save is not None
            writes_behind = trainer.writer is not None
            resumed = world.resumed(rank)
        return Look(
            alive,
            life is Life.KILLED,
            saved[1],
            up[0] if up else None,
            unannounced,
            breaks,
            collective,
            gated,
            writes,
            writes_behind,
            alive and not writes and not writes_behind and (bool(down) or (asked == ASKED and not cut)),
            resumed,
            saved[2],
            (life,) if life is Life.KILLED else (life, saved[3]),
        )

    def _share(self, shared: Any) -> int:
        known = self._number_of_shared.get(shared)
        if known is None:
            known = self._number_of_shared[shared] = len(self.shared)
            self.shared.append(shared)
            world = self.world
            world.put_shared(shared)
            look = (world.over, world.controller_lives, tuple(world.storage_actions()), world.time_may_pass)
            self._shared_looks.append(look)
        return known

    # ------------------------------------------------------------------ what follows

    def following(self, numbers: Numbers) -> list[tuple[Action, Numbers]]:
        """Everything that has to be tried next, with the state after it; nothing if this is an end."""
        looks = [self.looks[number] for number in numbers[:-1]]
        if not self.over(numbers):
            may_break = sum(look.breaks for look in looks) < self.world.breaks_max
            for rank, look in enumerate(looks):
                if look.next_up is not None and self._heard_first(look.next_up, numbers, may_break):
                    return [(("hear", rank), self._hear(rank, numbers))]
            may_kill = sum(look.killed for look in looks) < self.world.kills_max
            for rank, look in enumerate(looks):
                if look.may_act_alone and self._independent(rank, looks, may_kill):
                    found = self._own(rank, numbers, looks)
                    if found:
                        return found + self._faults_of(rank, numbers, looks)
        return self._everything(numbers, looks)

    def _everything(self, numbers: Numbers, looks: list[Look]) -> list[tuple[Action, Numbers]]:
        """Without looking for what may wait."""
        over, lives, storage, time_may_pass = self._shared_looks[numbers[-1]]
        found = []
        for rank, look in enumerate(looks):
            if look.next_up is not None and lives:
                found.append((("hear", rank), self._hear(rank, numbers)))
            if look.alive:
                found += self._own(rank, numbers, looks)
            if over and found:
                return found[:1]
        if lives:
            for rank, look in enumerate(looks):
                if look.unannounced:
                    found.append((("died", rank), self._announce(rank, numbers)))
        found += [(action, self._controller_acts(action, numbers)) for action in storage]
        if not found and time_may_pass:
            found.append((("time",), self._controller_acts(("time",), numbers)))
        if over:
            return found[:1]
        for rank, look in enumerate(looks):
            if look.alive:
                found += self._faults_of(rank, numbers, looks)
        return found

    def _heard_first(self, message: int, numbers: Numbers, may_break: bool) -> bool:
        key = (message, numbers[-1], may_break)
        known = self._first.get(key)
        if known is None:
            self.put(numbers)
            known = self._first[key] = self.world.may_be_heard_first(message, may_break)
        return known

    @staticmethod
    def _independent(rank: int, looks: list[Look], may_kill: bool) -> bool:
        look = looks[rank]
        if look.collective < 0 or look.gated:
            return True
        mine = look.counters[look.collective]
        others = [other for index, other in enumerate(looks) if index != rank]
        behind = [other for other in others if other.counters[look.collective] < mine]
        return not all(other.alive for other in (behind or others)) or not (behind or may_kill)

    def _own(self, rank: int, numbers: Numbers, looks: list[Look]) -> list[tuple[Action, Numbers]]:
        look = looks[rank]
        complete = broken = False
        if look.collective >= 0:
            mine = look.counters[look.collective]
            complete = all(other.counters[look.collective] >= mine for other in looks)
            broken = not all(other.alive for other in looks)
        own = numbers[rank]
        moves = self._own_moves.get((own, complete, broken))
        if moves is None:
            self.put(numbers)
            actions = self.world.own_actions(self.world.trainers[rank])
            actions = [action for action in actions if action[0] not in WRITTEN]
            moves = tuple((action, self._alone(rank, numbers, action)) for action in actions)
            self._own_moves[(own, complete, broken)] = moves
        head, tail = numbers[:rank], numbers[rank + 1 :]
        found = [(action, (*head, after, *tail)) for action, after in moves]
        if look.writes:
            found.append((("written", rank), self._write(("written", rank), numbers, looks)))
        if look.writes_behind:
            found.append((("written behind", rank), self._write(("written behind", rank), numbers, looks)))
        return found

    def _faults_of(self, rank: int, numbers: Numbers, looks: list[Look]) -> list[tuple[Action, Numbers]]:
        may_die = sum(look.killed for look in looks) < self.world.kills_max
        may_break = sum(look.breaks for look in looks) < self.world.breaks_max
        if not may_die and not may_break:
            return []
        own = numbers[rank]
        moves = self._faults.get((own, may_die, may_break))
        if moves is None:
            self.put(numbers)
            actions = self.world.faults(self.world.trainers[rank])
            moves = tuple((action, self._alone(rank, numbers, action)) for action in actions)
            self._faults[(own, may_die, may_break)] = moves
        head, tail = numbers[:rank], numbers[rank + 1 :]
        return [(action, (*head, after, *tail)) for action, after in moves]

    def _alone(self, rank: int, numbers: Numbers, action: Action) -> int:
        """The rank's part after an action that changes nothing else."""
        self.put(numbers)
        self.world.perform(action)
        after = self.take()
        assert (*after[:rank], *after[rank + 1 :]) == (*numbers[:rank], *numbers[rank + 1 :]), action
        return after[rank]

    def _write(self, action: Action, numbers: Numbers, looks: list[Look]) -> Numbers:
        what, rank = action
        key = (what, numbers[rank], numbers[-1], *(look.box for look in looks))
        result = self._written.get(key)
        if result is None:
            self.put(numbers)
            self.world.perform(action)
            after = self.take()
            assert (*after[:rank], *after[rank + 1 : -1]) == (*numbers[:rank], *numbers[rank + 1 : -1])
            result = self._written[key] = (after[rank], after[-1])
        return (*numbers[:rank], result[0], *numbers[rank + 1 : -1], result[1])

    def _hear(self, rank: int, numbers: Numbers) -> Numbers:
        message = self.looks[numbers[rank]].next_up
        key = ("hear", rank, message, numbers[-1])
        result = self._controllers.get(key)
        if result is None:
            result = self._controllers[key] = self._controller(("hear", rank), numbers)
        heard = message != CLOSED and type(self.world.tables.things[message or 0]) is Hello
        owns = list(numbers)
        owns[rank] = self._pop(rank, owns[rank], heard)
        return self._tell(owns, result)

    def _announce(self, rank: int, numbers: Numbers) -> Numbers:
        key = ("died", rank, numbers[-1])
        result = self._controllers.get(key)
        if result is None:
            result = self._controllers[key] = self._controller(("died", rank), numbers)
        _, down, asked, cut, breaks, _, saved = self.owns[numbers[rank]]
        owns = list(numbers)
        owns[rank] = self._number(rank, ((), down, asked, cut, breaks, False, saved))
        return self._tell(owns, result)

    def _controller_acts(self, action: Action, numbers: Numbers) -> Numbers:
        key = (action[0], numbers[-1])
        result = self._controllers.get(key)
        if result is None:
            result = self._controllers[key] = self._controller(action, numbers)
        return self._tell(list(numbers), result)

    def _controller(self, action: Action, numbers: Numbers) -> tuple[int, Sent]:
        self.put(numbers)
        self.world.perform(action)
        return self._share(self.world.take_shared()), tuple(self.world.sent)

    def _pop(self, rank: int, own: int, connects: bool) -> int:
        """The rank's part when its first message has been heard; `connects`: it was a Hello."""
        known = self._popped.get((own, connects))
        if known is None:
            up, down, asked, cut, *rest = self.owns[own]
            known = self._number(rank, (up[1:], down, asked, cut and not connects, *rest))
            self._popped[(own, connects)] = known
        return known

    def _tell(self, owns: list[int], result: tuple[int, Sent]) -> Numbers:
        """The state when the controller's part is the result's, and what it has sent is on its way."""
        owns[-1] = result[0]
        for rank, order in result[1]:
            own = owns[rank]
            told = self._told.get((own, order))
            if told is None:
                up, down, asked, cut, *rest = self.owns[own]
                kind = type(self.world.tables.things[order])
                known = kind is Resume and self.world.tables.things[order].incident <= self.looks[own].resumed
                if self.looks[own].alive and not cut and not known:
                    asked = ASKED if kind is Freeze else NOT_ASKED if kind is Resume else asked
                    down = (*down, order)
                told = self._told[(own, order)] = self._number(rank, (up, down, asked, cut, *rest))
            owns[rank] = told
        return tuple(owns)
