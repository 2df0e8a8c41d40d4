"""Every interleaving of a small job: `python -m tests.sim.explore`. The shipped cores, all orders of all events.

A state is the whole world: where each training thread is, the state of each core, what is in every channel, on disk
and in the ledger. From each state everything that could happen next is tried, states that have been seen before are
not entered again, and the checkers judge each state in which nothing can happen any more. A state that leads back
to itself would be a wait without end, and is reported as such.

What is left out, and why nothing is lost by it:

* Registration has happened, and every rank is about to compute its first step. Before that there is nothing to save;
  random schedules do kill there.
* Sessions of living ranks do not break, so nothing is lost or doubled on them and sending again can only add copies
  of messages (the intervals for that are out of reach here). What a dead rank had on its way arrives up to any
  point, or not at all. Random schedules break sessions.
* Reports of where a rank stands while it trains are not sent: the controller uses them for people, and to be patient
  with those who have left the loop. A step's places in which nothing is decided are passed in one go.
* Time. A rank's own grace at the end of a step may run out at any moment. The controller's deadlines (2 s and more)
  run out only when nothing else can happen: whoever is slower than that has broken them, which is what random
  schedules do.
* A dead rank is remembered by what others can still see of it: how far it came in collectives, and its black box.
* Once the verdict is out and every survivor is told, the order of their leaving is not varied, and nobody is killed:
  what is on disk cannot change any more.
* Ranks are not interchangeable (the lowest is chosen), so states are not merged by renaming ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from lastwords.controller import events as to_controller
from lastwords.controller.core import ControllerCore
from lastwords.controller.events import ControllerOptions
from lastwords.processor import events as to_processor
from lastwords.processor.core import ProcessorCore
from lastwords.vocabulary import (
    DeathSource,
    Freeze,
    Hello,
    LoopBegin,
    LoopGo,
    Order,
    Report,
    SaveProgress,
    Settled,
    Welcome,
)
from tests.sim.checkers import complaints
from tests.sim.disk import Disk
from tests.sim.interned import ONLY_FOR_PEOPLE, InternedController, InternedProcessor, Table
from tests.sim.job import Job, data_parallel
from tests.sim.ledger import Life, Publication, RankRecord, Renaming
from tests.sim.mutants import MUTANTS
from tests.sim.world import PARKED, At, Trainer, World

NEVER_S = 1e9
OUT_OF_REACH_S = 1e6
NOT_ASKED, ASKED, ANSWERED = range(3)
"""Whether a rank has been sent a Freeze (or a Proceed that it follows), and has sent its Settled."""

CLOSED = -1
"""What stands in a channel behind the last message of a session."""

Action = tuple[Any, ...]
State = tuple[Any, ...]

_SENDING_AGAIN = (
    "lastwords.controller.incident.RESEND_INTERVAL_S",
    "lastwords.controller.closing.RESEND_INTERVAL_S",
    "lastwords.processor.correspondence.RESEND_INTERVAL_S",
)


class Tables:
    """Numbers for everything that recurs: core states, messages, disks."""

    def __init__(self, whole: bool = False) -> None:
        ignored = frozenset() if whole else ONLY_FOR_PEOPLE
        self.controllers = Table(("deadline_s",), ignored)
        self.processors = Table(InternedProcessor.QUERIES, frozenset())
        self.things: list[Any] = [None]
        self.number_of_thing: dict[Any, int] = {None: 0}
        self.disks: list[Disk] = []
        self.number_of_disk: dict[Any, int] = {}

    def number(self, thing: Any) -> int:
        known = self.number_of_thing.get(thing)
        if known is None:
            known = self.number_of_thing[thing] = len(self.things)
            self.things.append(thing)
        return known

    def number_disk(self, disk: Disk, last: int) -> int:
        if self.disks and disk is self.disks[last]:
            return last
        key = disk.key()
        known = self.number_of_disk.get(key)
        if known is None:
            known = self.number_of_disk[key] = len(self.disks)
            self.disks.append(disk.copy())
        return known


class SmallWorld(World):
    """A world whose whole state can be taken out and put back."""

    def __init__(self, job: Job, tables: Tables, kills_max: int, whole: bool = False) -> None:
        controller, cores = _registered(job)
        processors: Any = {
            rank: InternedProcessor(tables.processors, tables.processors.number(core)) for rank, core in cores.items()
        }
        interned: Any = InternedController(tables.controllers, tables.controllers.number(controller))
        super().__init__(job, interned, processors, Disk(job.generation))
        self.tables = tables
        self.disk_number = 0
        self.kills_max = kills_max
        self.whole = whole
        self.kills = 0
        ranks = range(job.world_size)
        self.up: list[list[int]] = [[] for _ in ranks]
        self.down: list[list[int]] = [[] for _ in ranks]
        self.unannounced: set[int] = set()
        self.asked = [NOT_ASKED for _ in ranks]
        self.clock_s = [0.0 for _ in ranks]
        self.controller_clock_s = 0.0
        self.bound = dict.fromkeys(ranks, 1)
        for trainer in self.trainers:
            trainer.linked = True
            trainer.at = At.FORWARD

    # ------------------------------------------------------------------ state

    def take(self) -> State:
        """The state, as a value."""
        number = self.tables.number
        ledger = self.ledger
        return (
            tuple(_rank_state(trainer, number) for trainer in self.trainers),
            tuple(map(tuple, self.up)),
            tuple(map(tuple, self.down)),
            (
                self.controller.state,
                self.controller_lives,
                self.controller_clock_s,
                tuple(self.clock_s),
                self.stage,
                number(self.verifying),
                number(self.publishing),
                tuple(sorted(self.bound)),
                tuple(sorted(self.unannounced)),
                tuple(self.asked),
                self.kills,
                self.tables.number_disk(self.disk, self.disk_number),
                number(tuple(ledger.publications)),
                number(tuple(ledger.renamings)),
                number(frozenset(ledger.heard_saved)),
                ledger.controller_stopped,
            ),
        )

    def put(self, state: State) -> None:
        """Continue from a state that was taken."""
        ranks, up, down, rest = state
        things = self.tables.things
        for trainer, saved in zip(self.trainers, ranks, strict=True):
            _restore_rank(trainer, saved, things)
        self.up = [list(channel) for channel in up]
        self.down = [list(channel) for channel in down]
        ledger = self.ledger
        controller: Any = self.controller
        (
            controller.state,
            self.controller_lives,
            self.controller_clock_s,
            clock_s,
            self.stage,
            verifying,
            publishing,
            bound,
            unannounced,
            asked,
            self.kills,
            disk,
            publications,
            renamings,
            heard_saved,
            ledger.controller_stopped,
        ) = rest
        self.clock_s = list(clock_s)
        self.verifying, self.publishing = things[verifying], things[publishing]
        self.bound = dict.fromkeys(bound, 1)
        self.unannounced = set(unannounced)
        self.asked = list(asked)
        self.disk_number, self.disk = disk, self.tables.disks[disk]
        saved_publications: tuple[Publication, ...] = things[publications]
        saved_renamings: tuple[Renaming, ...] = things[renamings]
        ledger.publications = list(saved_publications)
        ledger.renamings = list(saved_renamings)
        ledger.heard_saved = set(things[heard_saved])
        ledger.certain_faults = self.kills
        ledger.ended = False

    # ------------------------------------------------------------------ what can happen

    def actions(self) -> list[Action]:
        """Everything that has to be tried next; nothing if this is an end."""
        if not self.over and not self.whole:
            for trainer in self.trainers:
                if self._acts_alone(trainer):
                    return self._own_actions(trainer) + self._kills(trainer)
        found: list[Action] = []
        for trainer in self.trainers:
            if self.up[trainer.rank] and self.controller_lives:
                found.append(("hear", trainer.rank))
            found += self._own_actions(trainer)
        if self.controller_lives:
            found += [("died", rank) for rank in sorted(self.unannounced)]
        if self.verifying is not None:
            found.append(("verify",))
        if self.publishing is not None:
            found.append(("publish",))
        if not found and self.controller_lives:
            due_s = self.controller.deadline_s
            if due_s is not None and due_s < OUT_OF_REACH_S:
                found.append(("time",))
        if self.over:
            return found if self.whole else found[:1]
        for trainer in self.trainers:
            found += self._kills(trainer)
        return found

    @property
    def over(self) -> bool:
        """The verdict is out: what is left to happen is that everybody leaves."""
        return self.stage == "ending" or not self.controller_lives

    def _own_actions(self, trainer: Trainer) -> list[Action]:
        if trainer.record.life is not Life.ALIVE:
            return []
        rank = trainer.rank
        found: list[Action] = [("move", rank, choice) for choice in self.choices(trainer) if choice != "time out"]
        if self.down[rank]:
            found.append(("tell", rank))
        if trainer.save is not None:
            found.append(("written", rank))
        due_s = trainer.core.deadline_s
        if due_s is not None and due_s < OUT_OF_REACH_S:
            found.append(("tick", rank))
        return found

    def _kills(self, trainer: Trainer) -> list[Action]:
        if self.kills == self.kills_max or trainer.record.life is not Life.ALIVE or trainer.at is At.LEFT:
            return []
        return [("kill", trainer.rank, arriving) for arriving in range(len(self.up[trainer.rank]) + 1)]

    def _acts_alone(self, trainer: Trainer) -> bool:
        """Whether nothing that others may do can matter to what this rank does next, nor the other way round.

        Then its actions (its death among them) form a persistent set: the others' may wait, as any order with them
        first leads to the same end. Until it has answered a Freeze, the controller sends it nothing more, whatever it
        hears from others; and in an incident some rank is dead or has raised, so that collectives are broken
        already. Only one that it waits in could still be completed by others.
        """
        if self.asked[trainer.rank] != ASKED or trainer.record.life is not Life.ALIVE:
            return False
        if all(other.record.life is Life.ALIVE for other in self.trainers):
            return False
        if trainer.at is At.REDUCE:
            behind = [other for other in self.trainers if other.contributed < trainer.contributed]
        elif trainer.at is At.GATE:
            behind = [other for other in self.trainers if other.gated < trainer.gated]
        else:
            return bool(self._own_actions(trainer))
        complete, hopeless = not behind, any(other.record.life is not Life.ALIVE for other in behind)
        return (complete or hopeless) and bool(self._own_actions(trainer))

    def perform(self, action: Action) -> None:
        """Let one of the `actions` happen."""
        kind = action[0]
        if kind == "move":
            self.advance(self.trainers[action[1]], action[2])
            return
        self.disk = self.disk.copy()  # it may change
        if kind == "hear":
            self._hear_next(action[1])
        elif kind == "tell":
            order = self.tables.things[self.down[action[1]].pop(0)]
            self.feed(self.trainers[action[1]], to_processor.FromController(order))
        elif kind == "written":
            self.finish_save(self.trainers[action[1]])
        elif kind == "tick":
            due_s = self.trainers[action[1]].core.deadline_s
            assert due_s is not None
            self.clock_s[action[1]] = max(due_s, self.clock_s[action[1]])
            self.feed(self.trainers[action[1]], to_processor.Tick())
        elif kind == "died":
            self._announce(action[1])
        elif kind == "verify":
            self.finish_verify()
        elif kind == "publish":
            self.finish_publish()
        elif kind == "time":
            due_s = self.controller.deadline_s
            assert due_s is not None
            self.controller_clock_s = max(due_s, self.controller_clock_s)
            self.feed_controller(to_controller.Tick())
        else:
            self.kills += 1
            trainer = self.trainers[action[1]]
            del self.up[trainer.rank][action[2] :]
            self.kill(trainer)

    def _announce(self, rank: int) -> None:
        """The death is known. Whatever still comes from the dead is not listened to, so it does not come."""
        self.unannounced.discard(rank)
        self.feed_controller(to_controller.Died(rank, DeathSource.ROBUST_MUTEX))
        if not self.whole:
            self.up[rank].clear()
            if self.controller_lives:
                self.close(rank, 1)

    def _hear_next(self, rank: int) -> None:
        number = self.up[rank].pop(0)
        self.now_s = self.controller_clock_s
        if number == CLOSED:
            self.close(rank, 1)
        else:
            self.hear(1, self.tables.things[number])

    def feed(self, trainer: Trainer, event: to_processor.Event) -> None:
        self.now_s = self.clock_s[trainer.rank]
        super().feed(trainer, event)

    def feed_controller(self, event: to_controller.Event) -> None:
        self.now_s = self.controller_clock_s
        super().feed_controller(event)

    # ------------------------------------------------------------------ hooks

    def on_moved(self, trainer: Trainer) -> None:
        if trainer.at is At.UPDATE and trainer.core.frozen:
            self.asked[trainer.rank] = ASKED  # it proceeds, and will say so when it has
        if self.whole:
            return
        if trainer.at is At.BACK or (trainer.at is At.LOG and not self.job.log_collective):
            self.advance(trainer, "go")  # nothing is decided here

    def on_woken(self, trainer: Trainer) -> None:
        while not self.whole and trainer.waking and trainer.record.life is Life.ALIVE and trainer.at in PARKED:
            self.advance(trainer, "go")

    def send_up(self, trainer: Trainer, report: Report) -> None:
        if type(report) is SaveProgress:
            return
        if type(report) is Settled:
            self.asked[trainer.rank] = ANSWERED
        self.up[trainer.rank].append(self.tables.number(report))

    def send_down(self, rank: int, order: Order) -> None:
        if rank in self.bound and self.trainers[rank].record.life is Life.ALIVE:
            self.down[rank].append(self.tables.number(order))
            if type(order) is Freeze:
                self.asked[rank] = ASKED

    def on_leave(self, trainer: Trainer, farewell: str) -> None:
        if trainer.record.life is Life.ALIVE:
            self.depart(trainer, farewell)

    def on_ended(self, trainer: Trainer) -> None:
        rank = trainer.rank
        self.down[rank].clear()
        self.up[rank].append(CLOSED)
        self.asked[rank], self.clock_s[rank] = NOT_ASKED, 0.0
        if trainer.record.life is Life.KILLED:
            self.unannounced.add(rank)


def _rank_state(trainer: Trainer, number: Any) -> State:
    record = trainer.record
    seen = (trainer.contributed, trainer.gated, trainer.updated, trainer.logged)
    box = (trainer.box_committed, trainer.box_tentative)
    if record.life is Life.KILLED:
        return (record.life, seen, box)
    own = (record.held, record.ended, record.reach, record.farewell, tuple(sorted(record.ill)))
    core: Any = trainer.core
    return (
        record.life,
        seen,
        box,
        own,
        trainer.at,
        core.state,
        trainer.waking,
        number(trainer.save),
        trainer.save_first,
    )


def _restore_rank(trainer: Trainer, saved: State, things: list[Any]) -> None:
    record: RankRecord = trainer.record
    record.life = saved[0]
    trainer.contributed, trainer.gated, trainer.updated, trainer.logged = saved[1]
    trainer.box_committed, trainer.box_tentative = saved[2]
    if record.life is Life.KILLED:
        record.farewell, record.ill, trainer.at, trainer.save, trainer.waking = "", set(), At.GONE, None, False
        return
    record.held, record.ended, record.reach, record.farewell, ill = saved[3]
    record.ill = set(ill)
    core: Any = trainer.core
    trainer.at, core.state, trainer.waking, save, trainer.save_first = saved[4:]
    core.effects = ()
    trainer.save = things[save]


def _registered(job: Job) -> tuple[ControllerCore, dict[int, ProcessorCore]]:
    """Cores of a job whose ranks are all registered and about to compute their first step."""
    controller = ControllerCore(job.world_size, job.generation, ControllerOptions(has_fallback_target=job.fallback))
    cores = {rank: ProcessorCore(rank, job.generation, job.start_step) for rank in range(job.world_size)}
    for rank, core in cores.items():
        core.handle(to_processor.SessionUp(), 0.0)
        hello = Hello(rank, job.generation, job.world_size, job.process(rank), job.units[rank], core.stand)
        controller.handle(to_controller.FromRank(hello), 0.0)
    for rank, core in cores.items():
        core.handle(to_processor.FromController(Welcome(job.generation, 0, job.world_size)), 0.0)
        core.begin_loop(0, 0, job.start_step)
        report = LoopBegin(rank, job.generation, 0, 0, job.start_step)
        controller.handle(to_controller.FromRank(report), 0.0)
    for core in cores.values():
        core.handle(to_processor.FromController(LoopGo(job.generation)), 0.0)
        core.take_effects()
    return controller, cores


def _no_words(_: object) -> str:
    return "a reason"


@dataclass(slots=True)
class Found:
    """What an exploration has seen. `bad`: complaints with the actions that lead there."""

    states: int = 0
    moves: int = 0
    ends: set[End] = field(default_factory=set)
    """What the checkers can tell apart of the states in which nothing can happen any more."""
    published: int = 0
    cores: tuple[int, int] = (0, 0)
    bad: list[tuple[str, list[Action]]] = field(default_factory=list)


@contextlib.contextmanager
def reduced() -> Iterator[None]:
    """Nothing is sent again, and reasons are not worded: they differ by what was heard first, and decide nothing."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("lastwords.controller.incident.Incident.words", _no_words))
        for name in _SENDING_AGAIN:
            stack.enter_context(mock.patch(name, NEVER_S))
        yield


End = tuple[Any, ...]


def explore(job: Job, kills_max: int, *, bad_max: int = 1, whole: bool = False) -> Found:
    """Visit every state that can be reached; ends early after `bad_max` complaints.

    whole: without the reductions that a smaller job can do without, to show that they lose no end.
    """
    with reduced():
        return _explore(job, kills_max, bad_max, whole)


def _explore(job: Job, kills_max: int, bad_max: int, whole: bool) -> Found:
    tables = Tables(whole)
    world = SmallWorld(job, tables, kills_max, whole)
    found = Found()
    start = world.take()
    open_states = {start: 0}  # on the path under way -> depth
    done: set[State] = set()
    path: list[tuple[State, list[Action]]] = [(start, world.actions())]
    taken: list[Action] = []
    while path:
        state, actions = path[-1]
        if not actions:
            path.pop()
            del open_states[state]
            done.add(state)
            if taken:
                taken.pop()
            continue
        action = actions.pop()
        world.put(state)
        world.perform(action)
        found.moves += 1
        if world.over and not whole:
            _run_to_the_end(world)
        after = world.take()
        if after in done:
            continue
        if after in open_states:
            found.bad.append(("i7_nobody_waits_for_ever: this can go on for ever", [*taken, action]))
        else:
            following = world.actions()
            taken.append(action)
            if not following:
                _judge(job, world, found, taken)
            path.append((after, following))
            open_states[after] = len(path)
        if len(found.bad) >= bad_max:
            break
    found.states = len(done) + len(open_states)
    found.cores = (len(tables.controllers.pickles), len(tables.processors.pickles))
    return found


def _run_to_the_end(world: SmallWorld) -> None:
    while actions := world.actions():
        world.perform(actions[0])


def _judge(job: Job, world: SmallWorld, found: Found, taken: list[Action]) -> None:
    found.published += bool(world.ledger.publications)
    found.ends.add(_end(world))
    world.ledger.ended = True
    for text in complaints(job, world.ledger):
        found.bad.append((text, list(taken)))


def _end(world: SmallWorld) -> End:
    ledger = world.ledger
    ranks = tuple(
        (record.life,) if record.life is Life.KILLED else (record.life, record.held, record.ended, tuple(record.ill))
        for record in ledger.ranks
    )
    published = tuple(
        (publication.step, publication.verified, publication.files, publication.lost_local_ranks)
        for publication in ledger.publications
    )
    return (ranks, published, ledger.controller_stopped)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.explore", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--mutant", default="", choices=["", *MUTANTS], help="break this rule of the cores")
    parser.add_argument("--whole", action="store_true", help="without most of the reductions (much slower)")
    parser.add_argument(
        "--gate", action="store_true", help="two units instead of one, on ranks 0, 2, ... and 1, 3, ..."
    )
    options = parser.parse_args(arguments)
    job = data_parallel(options.ranks, options.steps)
    if options.gate:
        job = dataclasses.replace(job, units=tuple((f"tp{rank % 2}",) for rank in range(options.ranks)))
    with MUTANTS[options.mutant].applied() if options.mutant else contextlib.nullcontext():
        found = explore(job, options.kills, whole=options.whole)
    controllers, processors = found.cores
    sys.stdout.write(
        f"{found.states} distinct states, {found.moves} moves, {len(found.ends)} different ends; "
        f"{controllers} states of the controller's core, {processors} of the processors'\n"
    )
    for text, actions in found.bad:
        sys.stdout.write(f"VIOLATED  {text}\n" + "".join(f"    {action}\n" for action in actions))
    return 1 if found.bad else 0


if __name__ == "__main__":
    sys.exit(main())
