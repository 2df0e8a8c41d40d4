"""A world without time and chance, whose whole state can be taken out, put back, and counted.

What is left out, and why nothing is lost by it:

* Registration has happened, and every rank is about to compute its first step. Before that there is nothing to save;
  random schedules do kill there.
* Reports of where a rank stands while it trains are not sent: the controller uses them for people, and to be patient
  with those who have left the loop (who may even die where all are done; random schedules do that). A step's places in
  which nothing is decided are passed in one go. In particular a rank computes and has contributed its gradients at
  once: if it is killed before, the others can do what they can do if it is killed just after and their collective
  never returns.
* Nothing is sent again by a timer, only with a new session: that brings every order and every report back that can
  have been lost. (The intervals would only add copies of messages.)
* A session that breaks takes with it a tail of what was on its way, in both directions. Orders that still arrive have
  arrived before; that a rank learns later of the break is the same as that its Hello takes longer.
* Time. A rank's own grace at the end of a step may run out at any moment. The controller's deadlines (2 s and more)
  run out only when nothing else can happen: whoever is slower than that has broken them, which is what random
  schedules do.
* A dead rank is remembered by what others can still see of it: how far it came in collectives, and its black box.
* Once the verdict is out (or everybody is released) and every survivor is told, the order of their leaving is not
  varied, and nobody is killed: what is on disk cannot change any more.
* Ranks are not interchangeable (the lowest is chosen), so states are not merged by renaming ranks.
"""

from __future__ import annotations

from typing import Any

from lastwords.controller import events as to_controller
from lastwords.controller.core import ControllerCore
from lastwords.controller.events import ControllerOptions
from lastwords.controller.events import JobStage as ControllerState
from lastwords.core_events import Tick
from lastwords.processor import events as to_processor
from lastwords.processor.core import ProcessorCore
from lastwords.vocabulary import (
    DeathSource,
    Freeze,
    Hello,
    LoopBegin,
    LoopGo,
    Order,
    Raised,
    Release,
    Report,
    Resume,
    Save,
    SaveProgress,
    Settled,
    Welcome,
)
from tests.sim import behind
from tests.sim.disk import Disk
from tests.sim.interned import ONLY_FOR_PEOPLE, InternedController, InternedProcessor, Table
from tests.sim.job import Job
from tests.sim.ledger import Life, Publication, RankRecord, Renaming
from tests.sim.world import PARKED, At, Trainer, World

OUT_OF_REACH_S = 1e6
NOT_ASKED, ASKED, ANSWERED = range(3)
"""Whether a rank has been sent a Freeze (or a Proceed that it follows), and has sent its Settled."""

_ONLY_FOR_TIMERS = frozenset(
    {("ProcessorCore", "_now_s"), ("Correspondence", "unanswered"), ("Correspondence", "_hello_pause")}
)
"""Fields of the processor's core that decide nothing but when something is sent again."""

CLOSED = -1
"""What stands in a channel where the controller notices that a session is over."""

Action = tuple[Any, ...]
Own = tuple[Any, ...]
"""All that belongs to one rank, the messages from and to it included."""

State = tuple[Any, ...]
"""The `Own` of each rank, and last what is shared."""

JUDGED = 6
"""So many values at the end of what is shared matter to the checkers: a controller that lives, the disk, the ledger."""


class Tables:
    """Numbers for everything that recurs: core states, messages, disks."""

    def __init__(self, whole: bool = False) -> None:
        ignored = frozenset() if whole else ONLY_FOR_PEOPLE
        self.controllers = Table(InternedController.QUERIES, ignored, tidies=not whole)
        self.processors = Table(InternedProcessor.QUERIES, _ONLY_FOR_TIMERS)
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
    """kills_max, breaks_max: so many ranks may be killed, and so many sessions of living ranks may break.

    whole: without the reductions that a smaller job can do without, to show that they lose no end.
    """

    def __init__(self, job: Job, tables: Tables, kills_max: int, breaks_max: int, whole: bool = False) -> None:
        controller, cores, ordered = _registered(job)
        processors: Any = {
            rank: InternedProcessor(tables.processors, tables.processors.number(core)) for rank, core in cores.items()
        }
        interned: Any = InternedController(tables.controllers, tables.controllers.number(controller))
        super().__init__(job, interned, processors, Disk(job.generation))
        self.tables = tables
        self.disk_number = 0
        self.kills_max = kills_max
        self.breaks_max = breaks_max
        self.whole = whole
        ranks = range(job.world_size)
        self.up: list[list[int]] = [[] for _ in ranks]
        self.down: list[list[int]] = [[] for _ in ranks]
        self.sent: list[tuple[int, int]] = []  # (rank, number of an order): what the last action has sent
        self.unannounced = [False for _ in ranks]
        self.asked = [NOT_ASKED for _ in ranks]
        self.cut = [False for _ in ranks]  # its new session is not bound yet: orders go nowhere
        self.breaks = [0 for _ in ranks]
        self.own_s = 0.0  # time of the rank that something happens to
        self.controller_clock_s = 0.0
        self.bound = dict.fromkeys(ranks, 1)
        for trainer in self.trainers:
            trainer.linked = True
            trainer.at = At.FORWARD
            self.on_moved(trainer)
        for rank, order in ordered:
            self.append(rank, order)

    # ------------------------------------------------------------------ state

    def take(self) -> State:
        """The state, as a value."""
        return (*(self.take_own(trainer.rank) for trainer in self.trainers), self.take_shared())

    def take_own(self, rank: int) -> Own:
        """What belongs to one rank. The channels come first: `append` and `pop` know that."""
        return (
            tuple(self.up[rank]),
            tuple(self.down[rank]),
            self.asked[rank],
            self.cut[rank],
            self.breaks[rank],
            self.unannounced[rank],
            _rank_state(self.trainers[rank], self.tables.number),
        )

    def take_shared(self) -> tuple[Any, ...]:
        """The controller, the disk, and what is in the ledger about them."""
        number, ledger = self.tables.number, self.ledger
        return (
            self.controller.state,
            self.controller_clock_s,
            self.stage,
            number(self.verifying),
            number(self.publishing),
            number(self.periodic_files),
            tuple(sorted(self.bound)),
            self.controller_lives,
            self.tables.number_disk(self.disk, self.disk_number),
            number(tuple(ledger.publications)),
            number(tuple(ledger.renamings)),
            number(frozenset(ledger.heard_saved)),
            ledger.controller_stopped,
        )

    def put(self, state: State) -> None:
        """Continue from a state that was taken."""
        for rank, own in enumerate(state[:-1]):
            self.put_own(rank, own)
        self.put_shared(state[-1])
        self.ledger.certain_faults = sum(trainer.record.life is Life.KILLED for trainer in self.trainers)
        self.ledger.ended = False

    def put_own(self, rank: int, own: Own) -> None:
        """Restore one rank."""
        up, down, *rest, saved = own
        self.up[rank], self.down[rank] = list(up), list(down)
        self.asked[rank], self.cut[rank], self.breaks[rank], self.unannounced[rank] = rest
        _restore_rank(self.trainers[rank], saved, self.tables.things)

    def put_shared(self, shared: tuple[Any, ...]) -> None:
        """Restore everything else."""
        things, ledger = self.tables.things, self.ledger
        controller: Any = self.controller
        (
            controller.state,
            self.controller_clock_s,
            self.stage,
            verifying,
            publishing,
            periodic_files,
            bound,
            self.controller_lives,
            disk,
            publications,
            renamings,
            heard_saved,
            ledger.controller_stopped,
        ) = shared
        self.verifying, self.publishing = things[verifying], things[publishing]
        self.periodic_files = things[periodic_files]
        self.bound = dict.fromkeys(bound, 1)
        self.disk_number, self.disk = disk, self.tables.disks[disk]
        saved_publications: tuple[Publication, ...] = things[publications]
        saved_renamings: tuple[Renaming, ...] = things[renamings]
        ledger.publications = list(saved_publications)
        ledger.renamings = list(saved_renamings)
        ledger.heard_saved = set(things[heard_saved])

    # ------------------------------------------------------------------ what can happen

    def actions(self) -> list[Action]:
        """Everything that has to be tried next; nothing if this is an end."""
        if not self.over and not self.whole:
            for trainer in self.trainers:
                if self.up[trainer.rank] and self.may_be_heard_first(self.up[trainer.rank][0], self.may_break):
                    return [("hear", trainer.rank)]
            for trainer in self.trainers:
                if self.acts_alone(trainer):
                    return self.own_actions(trainer) + self.faults(trainer)
        found: list[Action] = []
        for trainer in self.trainers:
            if self.up[trainer.rank] and self.controller_lives:
                found.append(("hear", trainer.rank))
            found += self.own_actions(trainer)
        if self.controller_lives:
            found += [("died", trainer.rank) for trainer in self.trainers if self.unannounced[trainer.rank]]
        found += self.storage_actions()
        if not found and self.time_may_pass:
            found.append(("time",))
        if self.over:
            return found if self.whole else found[:1]
        for trainer in self.trainers:
            found += self.faults(trainer)
        return found

    @property
    def over(self) -> bool:
        """The verdict is out: what is left to happen is that everybody leaves."""
        return self.stage == "ending" or not self.controller_lives

    @property
    def time_may_pass(self) -> bool:
        """Whether the controller waits for a deadline."""
        due_s = self.controller.deadline_s if self.controller_lives else None
        return due_s is not None and due_s < OUT_OF_REACH_S

    def storage_actions(self) -> list[Action]:
        """What the controller's storage thread could finish: of one directory, a periodic checkpoint goes first."""
        found: list[Action] = [("periodic files",)] if self.periodic_files is not None else []
        if found and (self.publishing is not None or isinstance(self.periodic_files, to_controller.StartVerify)):
            return found
        if self.verifying is not None:
            found.append(("verify",))
        return [*found, ("publish",)] if self.publishing is not None else found

    @property
    def may_kill(self) -> bool:
        """Whether one more rank may be killed."""
        return sum(trainer.record.life is Life.KILLED for trainer in self.trainers) < self.kills_max

    @property
    def may_break(self) -> bool:
        """Whether one more session may break."""
        return sum(self.breaks) < self.breaks_max

    def own_actions(self, trainer: Trainer) -> list[Action]:
        """What a living rank could do next."""
        if trainer.record.life is not Life.ALIVE:
            return []
        rank = trainer.rank
        found: list[Action] = [("move", rank, choice) for choice in self.choices(trainer) if choice != "time out"]
        if self.down[rank]:
            found.append(("tell", rank))
        if trainer.save is not None:
            found.append(("written", rank))
        if trainer.writer is not None:
            found.append(("written behind", rank))
        due_s = trainer.core.deadline_s
        if due_s is not None and due_s < OUT_OF_REACH_S:
            found.append(("tick", rank))
        return found

    def faults(self, trainer: Trainer) -> list[Action]:
        """How a rank could die, or its session break, and how much of what it has said arrives nevertheless."""
        if trainer.record.life is not Life.ALIVE:
            return []
        rank = trainer.rank
        found: list[Action] = []
        if self.may_kill:
            found += [("kill", rank, arriving) for arriving in range(len(self.up[rank]) + 1)]
        if self.may_break:
            for arriving in range(len(self.up[rank]) + 1):
                found += [("break", rank, arriving, True), ("break", rank, arriving, False)]
        return found

    def acts_alone(self, trainer: Trainer) -> bool:
        """Whether nothing that others may do can matter to what this rank does next, nor the other way round.

        Then its actions (its death and the break of its session among them) form a persistent set: the others' may
        wait, as any order with them first leads to the same end. That needs

        * that the next order to it is known: one is on its way already, or it has been asked to settle and has not
          answered, so the controller sends it nothing more, whatever it hears from others;
        * that it is not in a collective that others may still complete, or break;
        * that it is not writing: what it finds in the black boxes of others is for them to change, and a part behind
          the training is for the controller to discard.
        """
        rank = trainer.rank
        if trainer.record.life is not Life.ALIVE or trainer.save is not None or trainer.writer is not None:
            return False
        if not self.down[rank] and (self.asked[rank] != ASKED or self.cut[rank]):
            return False
        entered = self.in_collective(trainer)
        if entered is not None and not (trainer.at is At.GATE and trainer.core.frozen):
            others = [other for other in self.trainers if other is not trainer]
            mine = getattr(trainer, entered)
            behind = [other for other in others if getattr(other, entered) < mine]
            if all(other.record.life is Life.ALIVE for other in (behind or others)) and (behind or self.may_kill):
                return False
        return bool(self.own_actions(trainer))

    def in_collective(self, trainer: Trainer) -> str | None:
        """Name of the counter of the collective that this rank is in."""
        at, job = trainer.at, self.job
        if at is At.REDUCE:
            return "contributed"
        if at is At.GATE:
            return "gated"
        if at is At.UPDATE and job.update_collective:
            return "updated"
        return "logged" if at is At.LOG and job.log_collective else None

    # ------------------------------------------------------------------ what then happens

    def perform(self, action: Action) -> None:
        """Let one of the `actions` happen."""
        self.sent.clear()
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
        elif kind == "written behind":
            behind.writes(self, self.trainers[action[1]])
        elif kind == "periodic files":
            assert self.periodic_files is not None
            behind.files_done(self, self.periodic_files)
        elif kind == "tick":
            due_s = self.trainers[action[1]].core.deadline_s
            assert due_s is not None
            self.own_s = due_s
            self.feed(self.trainers[action[1]], Tick())
            self.own_s = 0.0  # a rank has one timer, and it has run out: its clock can start anew
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
            self.feed_controller(Tick())
        elif kind == "kill":
            trainer = self.trainers[action[1]]
            del self.up[trainer.rank][action[2] :]
            self.kill(trainer)
        else:
            self._break_session(self.trainers[action[1]], action[2], seen=action[3])

    def _break_session(self, trainer: Trainer, arriving: int, *, seen: bool) -> None:
        """`seen`: the controller notices before the Hello of the next session comes."""
        rank = trainer.rank
        self.breaks[rank] += 1
        self.cut[rank] = True
        self.down[rank].clear()
        self.up[rank][arriving:] = [CLOSED] if seen else []
        self.unlink(trainer)
        self.link(trainer)

    def _announce(self, rank: int) -> None:
        """The death is known. Whatever still comes from the dead is not listened to, so it does not come."""
        self.unannounced[rank] = False
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
            return
        report: Report = self.tables.things[number]
        if type(report) is Hello:
            self.cut[rank] = False
        self.hear(1, report)

    def feed(self, trainer: Trainer, event: to_processor.Event) -> None:
        self.now_s = self.own_s
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
        if trainer.at in (At.FORWARD, At.BACK) or (trainer.at is At.LOG and not self.job.log_collective):
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
        if rank in self.bound:
            self.sent.append((rank, self.tables.number(order)))
            self.append(rank, order)
            if type(order) is Release:
                self.stage = "ending"

    def append(self, rank: int, order: Order) -> None:
        """An order on its way to a rank that can still get it."""
        if self.trainers[rank].record.life is not Life.ALIVE or self.cut[rank]:
            return
        if type(order) is Resume and not self.whole and order.incident <= self.resumed(rank):
            return  # it makes no difference any more, whenever it comes
        self.down[rank].append(self.tables.number(order))
        if type(order) is Freeze:
            self.asked[rank] = ASKED
        elif type(order) is Resume:
            self.asked[rank] = NOT_ASKED

    def resumed(self, rank: int) -> int:
        """Newest incident of which this rank knows, or will be told by what is on its way, that it is over."""
        core: Any = self.trainers[rank].core
        newest: int = core.resumed
        for number in self.down[rank]:
            order: Order = self.tables.things[number]
            newest = max(newest, order.incident) if isinstance(order, Resume) else newest
        return newest

    def may_be_heard_first(self, number: int, may_break: bool) -> bool:
        """Whether it loses nothing to have the controller hear this report before anything else happens.

        * A Settled of an incident that was a false alarm: whenever it is heard, it is answered by one more Resume.
        * A secondary exception in an incident that is certain: it changes nothing.
        * A Settled that the controller waits for while it waits for another rank, too: it is noted, and nothing can
          be chosen before. If the rank dies first and the report is lost, that comes to the same as soon as its death
          is known, which may be at once, as that chooses nothing, either. (If sessions may still break, it is not that
          simple.)
        """
        if number == CLOSED:
            return False
        report: Report = self.tables.things[number]
        controller: Any = self.controller
        if type(report) is Settled and report.incident <= controller.resumed:
            return True
        if not isinstance(report, Settled | Raised):
            return False
        core: Any = controller.table.core(controller.state)
        incident = core._incident
        if incident is None or not incident.opened:
            return False
        if isinstance(report, Raised):
            return report.secondary and bool(core._context.certain)
        waits = report.rank in incident._unsettled and len(incident._unsettled) > 1
        return waits and core.state is ControllerState.SETTLING and report.incident == incident.number and not may_break

    def on_leave(self, trainer: Trainer, farewell: str) -> None:
        if trainer.record.life is Life.ALIVE:
            self.depart(trainer, farewell)

    def on_ended(self, trainer: Trainer) -> None:
        rank = trainer.rank
        self.down[rank].clear()
        self.up[rank].append(CLOSED)
        self.asked[rank], self.cut[rank] = NOT_ASKED, False
        self.unannounced[rank] = trainer.record.life is Life.KILLED


def _rank_state(trainer: Trainer, number: Any) -> State:
    record = trainer.record
    seen = (trainer.contributed, trainer.gated, trainer.updated, trainer.logged)
    box = (trainer.box_committed, trainer.box_tentative)
    if record.life is Life.KILLED:
        return (record.life, seen, box)
    own = (record.held, record.ended, record.reach, record.farewell, tuple(sorted(record.ill)), record.gave_up)
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
        (number(trainer.copying), trainer.copy_then, trainer.memory, number(trainer.writer)),
    )


def _restore_rank(trainer: Trainer, saved: State, things: list[Any]) -> None:
    record: RankRecord = trainer.record
    record.life = saved[0]
    trainer.contributed, trainer.gated, trainer.updated, trainer.logged = saved[1]
    trainer.box_committed, trainer.box_tentative = saved[2]
    if record.life is Life.KILLED:
        record.farewell, record.ill, trainer.at, trainer.save, trainer.waking = "", set(), At.GONE, None, False
        trainer.copying = trainer.writer = None
        return
    record.held, record.ended, record.reach, record.farewell, ill, record.gave_up = saved[3]
    record.ill = set(ill)
    core: Any = trainer.core
    trainer.at, core.state, trainer.waking, save, trainer.save_first, copies = saved[4:]
    core.effects = ()
    trainer.save = things[save]
    copying, trainer.copy_then, trainer.memory, writer = copies
    trainer.copying, trainer.writer = things[copying], things[writer]


def _registered(job: Job) -> tuple[ControllerCore, dict[int, ProcessorCore], list[tuple[int, Order]]]:
    """Cores of a job whose ranks are all registered and about to compute their first step, and what is ordered."""
    ordered: list[tuple[int, Order]] = []
    controller = ControllerCore(job.world_size, job.generation, ControllerOptions(has_fallback_target=job.fallback))
    cores = {rank: ProcessorCore(rank, job.generation, job.start_step) for rank in range(job.world_size)}
    for rank, core in cores.items():
        core.handle(to_processor.SessionUp(), 0.0)
        hello = job.hello(rank, core.stand)
        controller.handle(to_controller.FromRank(hello), 0.0)
    for rank, core in cores.items():
        core.handle(to_processor.FromController(Welcome(job.generation)), 0.0)
        core.begin_loop(0, 0, job.start_step, job.schedule)
        report = LoopBegin(rank, job.generation, 0, 0, job.start_step, job.schedule)
        effects = controller.handle(to_controller.FromRank(report), 0.0)
        sent = [(effect.rank, effect.order) for effect in effects if isinstance(effect, to_controller.Send)]
        ordered += [(to, order) for to, order in sent if isinstance(order, Save)]
    for core in cores.values():
        core.handle(to_processor.FromController(LoopGo(job.generation)), 0.0)
        core.take_effects()
    return controller, cores, ordered
