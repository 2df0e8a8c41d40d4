"""The world that the shipped cores live in: trainers, sessions, one controller, a disk. No time and no chance here.

`World` knows what can happen next and what then happens; *when* and *which* is for its two drivers to say:
`tests.sim.timed` draws delays and faults from a seed, `tests.sim.explore` tries everything. Hooks that a driver
overrides stand at the end of the class.

The training loop of a rank, as the data dependence of DDP has it (`At` names the places):

    FORWARD -> REDUCE -> (READY -> GATE) -> UPDATE -> LOG -> END -> FORWARD ...

A rank leaves REDUCE of step n only if every rank has contributed its gradients of n. If a rank dies meanwhile, each
survivor for itself gets through, is stuck for ever, or sees an exception: that is how survivors split.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from lastwords.controller import events as to_controller
from lastwords.controller.core import ControllerCore
from lastwords.core_events import Log
from lastwords.processor import events as to_processor
from lastwords.processor.core import ProcessorCore
from lastwords.vocabulary import (
    DeathSource,
    Exit,
    Freeze,
    Hello,
    Order,
    PeerDied,
    Phase,
    Proceed,
    Refused,
    Report,
    Resume,
    Save,
    Saved,
    SaveProgress,
    Settled,
    Status,
    WholeCopy,
)
from tests.sim import behind
from tests.sim.disk import Disk
from tests.sim.job import TORN, Job
from tests.sim.ledger import Ledger, Life, Publication, RankRecord, Written


class At(enum.IntEnum):
    """Where the training thread of a rank is."""

    START = 0  # waits for all ranks to be registered, then begins its loop
    OPENING = 1  # waits for LoopGo
    FORWARD = 2
    REDUCE = 3  # inside the all-reduce of the gradients
    BACK = 4  # the all-reduce is done; optimizer.step() comes next
    READY = 5  # inside step(): gradients final, update not begun
    GATE = 6
    PARK_UPDATE = 7  # parked in step()
    UPDATE = 8
    LOG = 9  # between the update and the step's end, perhaps in a collective
    END = 10  # step_end() comes next
    COMMITTED = 11  # inside step_end(): the box is written, the step not yet ended
    PARK_END = 12  # parked in step_end(), the step not ended
    PARK_ENDED = 13  # parked in step_end(), the step ended
    LEFT = 14  # out of the loop, waits for Release
    STUCK = 15  # in a collective that will never return
    STUCK_UPDATE = 16  # the same, inside step()
    HELD = 17  # an exception is held until the incident is over
    GONE = 18
    COPY = 19  # copying its state for a periodic checkpoint


ENDED, IN_FORWARD, BEFORE_GATE, BEHIND_GATE = range(4)
"""Where a whole copy that was begun at a step's end may be whole."""


class Trainer:
    """One simulated training process. `contributed` and the like: newest step for which it entered that collective."""

    __slots__ = (
        "at",
        "box_committed",
        "box_tentative",
        "contributed",
        "copy_then",
        "copying",
        "core",
        "corrupt_at",
        "filling",
        "gated",
        "leave_after",
        "leave_inside",
        "linked",
        "logged",
        "loop_start",
        "memory",
        "outbox",
        "raise_at",
        "rank",
        "record",
        "save",
        "save_first",
        "swallows",
        "tear_at",
        "updated",
        "waking",
        "writer",
    )

    def __init__(self, rank: int, core: ProcessorCore, record: RankRecord, start_step: int) -> None:
        self.rank = rank
        self.core = core
        self.record = record
        self.at = At.START
        self.contributed = start_step
        self.gated = start_step
        self.updated = start_step
        self.logged = start_step
        self.box_committed = (start_step, start_step)
        self.box_tentative = -1
        self.waking = False
        self.linked = False
        self.outbox: dict[object, Report] = {}
        self.save: Save | None = None
        self.save_first = 0
        self.copying: Save | None = None  # its state is being copied for this periodic checkpoint
        self.copy_then = At.BACK  # where the training thread goes on after that
        self.memory = behind.NOTHING  # the copy
        self.filling: tuple[int, int] | None = None  # its newest whole copy, as long as it is not whole
        self.writer: behind.Writer | None = None  # behind the training
        self.raise_at = (-1, At.FORWARD)  # step, and FORWARD, READY or END: an exception of the user's code comes
        self.tear_at = -1  # step in whose update an exception comes
        self.corrupt_at = -1  # step before which its replicas find that its weights are wrong
        self.swallows = False  # ... which the user's code catches, to leave the loop quietly
        self.loop_start = start_step  # what it announces; -1: it never begins its loop
        self.leave_after = -1  # step after which it leaves the loop early
        self.leave_inside = -1  # step in which it leaves the loop with its gradients not applied

    def begin_copy(self) -> None:
        """The older of its whole copies is written over."""
        self.record.whole = self.record.whole[-1:]

    def fill_copy(self, place: int) -> None:
        """Beside the training; it is whole at one of these places, and before the gate in any case."""
        if self.filling is not None and place >= (ENDED, IN_FORWARD, BEFORE_GATE)[(self.filling[0] + self.rank) % 3]:
            self.record.whole += (self.filling,)
            self.filling = None

    def box_has(self, step: int) -> bool:
        """Whether the rank-local state of `step` can be read, dead or alive: from its black box or a whole copy."""
        return step in self.box_committed or step == self.box_tentative or step in dict(self.record.whole)

    def reach(self) -> tuple[int, ...]:
        """Steps that its weights are of, or would be of after an update from final gradients."""
        record = self.record
        if record.held == TORN or self.at is At.STUCK_UPDATE:
            return ()
        if self.at in (At.READY, At.GATE, At.PARK_UPDATE):
            return (record.held, record.ended + 1)
        if self.core.stand.ended_step != record.ended:
            return (record.held,)
        return tuple(sorted({record.held, record.ended})) if record.held < record.ended else (record.held,)


PARKED = (At.PARK_UPDATE, At.PARK_END, At.PARK_ENDED, At.LEFT, At.OPENING)
_WOKEN = (*PARKED, At.START, At.GATE)
_NEWEST_ONLY = (Status, Settled, SaveProgress)

GO = ("go",)
WAIT: tuple[str, ...] = ()


class World:
    """Everything that exists in one simulation. Methods are indivisible; the drivers interleave them."""

    follows = 0
    """Controllers that have followed another one."""

    def __init__(
        self,
        job: Job,
        controller: ControllerCore,
        cores: Mapping[int, ProcessorCore],
        disk: Disk,
    ) -> None:
        self.job = job
        self.now_s = 0.0
        self.controller = controller
        self.controller_lives = True
        self.disk = disk
        start = job.start_step
        records = [RankRecord(held=start, ended=start, reach=(start,)) for _ in range(job.world_size)]
        self.ledger = Ledger(records)
        self.trainers = [Trainer(rank, cores[rank], records[rank], start) for rank in range(job.world_size)]
        self.bound: dict[int, int] = {}  # rank -> the session that its orders go to
        self.incident = 0  # newest one that ranks were told of
        self.gate_breaks = job.gate_breaks
        self.gate_break = (-1, -1)  # rank, step whose gate fails there although everybody lives
        self.stage = ""  # of the incident, as the controller's effects show it
        self.verifying: to_controller.StartVerify | None = None
        self.publishing: to_controller.StartPublish | None = None
        self.periodic_files: behind.FilesJob | None = None  # what is done about a periodic checkpoint

    # ------------------------------------------------------------------ the training loop

    def choices(self, trainer: Trainer) -> tuple[str, ...]:
        """What the training thread of a living rank could do next; () while it waits."""
        at = trainer.at
        if at in PARKED:
            return GO if trainer.waking else WAIT
        if at is At.START:
            return GO if trainer.core.welcomed and trainer.loop_start >= 0 else WAIT
        if at is At.REDUCE:
            return self._collective(trainer.contributed, "contributed")
        if at is At.UPDATE and self.job.update_collective:
            return self._collective(trainer.updated, "updated")
        if at is At.LOG and self.job.log_collective:
            return self._collective(trainer.logged, "logged")
        if at is At.GATE:
            return self._gate(trainer)
        if at is At.STUCK or at is At.STUCK_UPDATE:
            return ("time out",)
        if at is At.HELD or at is At.GONE:
            return WAIT
        return GO

    def _gate(self, trainer: Trainer) -> tuple[str, ...]:
        if trainer.core.frozen or trainer.core.leaving:
            return GO
        if (trainer.rank, trainer.gated) == self.gate_break:
            return ("break",)
        complete = all(other.gated >= trainer.gated for other in self.trainers)
        if trainer.rank in self.gate_breaks and any(o.record.life is not Life.ALIVE for o in self.trainers):
            return ("go", "break") if complete else ("break",)  # that all have entered is no promise that all pass
        return GO if complete else WAIT

    def _collective(self, step: int, entered: str) -> tuple[str, ...]:
        complete = True
        broken = False
        for other in self.trainers:
            if getattr(other, entered) < step:
                complete = False
            if other.record.life is not Life.ALIVE:
                broken = True
        if broken:
            return ("go", "stuck", "raise") if complete else ("stuck", "raise")
        return GO if complete else WAIT

    def advance(self, trainer: Trainer, choice: str) -> None:
        """Let the training thread of a living rank make one of its `choices`."""
        trainer.waking = False
        if choice == "go":
            _MOVES[trainer.at](self, trainer)
        elif choice == "break":
            self.ledger.certain_faults += (trainer.rank, trainer.gated) == self.gate_break
            trainer.core.mark_gate_failed("connection closed by peer")
            self._move_to(trainer, At.PARK_END if trainer.core.stand.phase is Phase.SKIPPED else At.PARK_UPDATE)
        elif choice == "stuck":
            self._move_to(trainer, At.STUCK_UPDATE if trainer.at is At.UPDATE else At.STUCK)
            if trainer.at is At.STUCK_UPDATE:
                trainer.record.ill.add("stuck in its update")
        else:
            self._raise(trainer, "a collective failed: connection closed by peer", secondary=True)
        self.drain(trainer)

    def _move_to(self, trainer: Trainer, at: At) -> None:
        trainer.at = at
        self.on_moved(trainer)

    def _raise(self, trainer: Trainer, text: str, secondary: bool) -> None:
        if trainer.at in (At.UPDATE, At.STUCK_UPDATE):
            trainer.record.held = TORN
            trainer.record.ill.add("torn")
        if not secondary:
            self.ledger.certain_faults += 1
        trainer.record.gave_up |= trainer.core.stand.phase is Phase.READY
        if trainer.at is At.UPDATE:
            trainer.core.mark_torn()
        if trainer.at is At.UPDATE and trainer.swallows:
            trainer.core.mark_left()
        else:
            trainer.core.mark_raised(text, secondary)
        self._move_to(trainer, At.HELD)

    def _from_start(self, trainer: Trainer) -> None:
        trainer.core.begin_loop(0, 0, trainer.loop_start, self.job.schedule)
        self._move_to(trainer, At.OPENING)

    def _from_opening(self, trainer: Trainer) -> None:
        if trainer.core.loop_open:
            self._move_to(trainer, At.FORWARD)

    def _from_forward(self, trainer: Trainer) -> None:
        step = trainer.record.ended + 1
        if trainer.corrupt_at == step and trainer.rank % 2 == 0:
            self._corrupt(trainer, "these weights differ from those of the replicas")
            return
        if trainer.raise_at == (step, At.FORWARD):
            self._raise(trainer, "out of memory", secondary=False)
            return
        trainer.fill_copy(IN_FORWARD)
        trainer.box_tentative = step
        trainer.contributed = step
        self._move_to(trainer, At.REDUCE)
        self.on_entered(trainer)

    def _from_reduce(self, trainer: Trainer) -> None:
        self._move_to(trainer, At.BACK)

    def _from_back(self, trainer: Trainer) -> None:
        skips = trainer.record.ended + 1 in self.job.skipped and not self.job.skips_inside
        if (skips and not self.job.has_gate) or not behind.begins_copy(self, trainer, At.BACK, At.COPY):
            self._copied_before_update(trainer)

    def _from_copy(self, trainer: Trainer) -> None:
        behind.ends_copy(trainer)
        _AFTER_COPY[trainer.copy_then](self, trainer)

    def _copied_before_update(self, trainer: Trainer) -> None:
        trainer.fill_copy(BEFORE_GATE)
        step = trainer.record.ended + 1
        if step not in self.job.skipped or self.job.skips_inside:
            trainer.core.mark_ready()
            if self.job.closure:
                trainer.core.mark_ready()
        elif self.job.has_gate and not self.job.skips_gate:
            trainer.core.mark_skipped()
        else:
            self._move_to(trainer, At.END)
            return
        if self.job.has_gate:
            trainer.gated = step
            self._move_to(trainer, At.GATE)
            self.on_entered(trainer)
        else:
            self._move_to(trainer, At.READY)

    def _from_ready(self, trainer: Trainer) -> None:
        step = trainer.record.ended + 1
        if trainer.raise_at == (step, At.READY):
            self._raise(trainer, "a hook of the optimizer failed", secondary=False)
        elif step == trainer.leave_inside:
            self.ledger.certain_faults += 1
            trainer.record.gave_up = True
            trainer.core.mark_left()
            self._move_to(trainer, At.LEFT)
        elif step in self.job.skipped:
            trainer.core.mark_skipped()
            self._move_to(trainer, At.END)
        else:
            self._try_update(trainer)

    def _from_gate(self, trainer: Trainer) -> None:
        if trainer.core.stand.phase is Phase.SKIPPED:
            parks = trainer.core.frozen or trainer.core.leaving  # at the gate, which it still has to pass
            self._move_to(trainer, At.PARK_END if parks else At.END)
        elif trainer.core.frozen or trainer.core.leaving:
            self._try_update(trainer)
        else:
            self._from_ready(trainer)

    def _back_to_gate(self, trainer: Trainer) -> bool:
        """A rank that parked instead of waiting at the gate has been resumed: the gate still has to be passed."""
        if not self.job.has_gate or not trainer.core.may_train:
            return False
        self._move_to(trainer, At.GATE)
        return True

    def _from_park_update(self, trainer: Trainer) -> None:
        if not self._back_to_gate(trainer):
            self._try_update(trainer)

    def _try_update(self, trainer: Trainer) -> None:
        step = trainer.record.ended + 1
        if trainer.core.try_update():
            trainer.fill_copy(BEHIND_GATE)
            trainer.record.held = TORN
            if self.job.update_collective:
                trainer.updated = step
            self._move_to(trainer, At.UPDATE)
            self.on_entered(trainer)
        else:
            self._move_to(trainer, At.PARK_UPDATE)

    def _from_update(self, trainer: Trainer) -> None:
        step = trainer.record.ended + 1
        if trainer.tear_at == step:
            self._raise(trainer, "a kernel failed inside step()", secondary=False)
            return
        trainer.record.held = step
        trainer.core.mark_updated()
        if self.job.log_collective:
            trainer.logged = step
        self._move_to(trainer, At.LOG)
        self.on_entered(trainer)

    def _from_log(self, trainer: Trainer) -> None:
        self._move_to(trainer, At.END)

    def _from_end(self, trainer: Trainer) -> None:
        if not behind.begins_copy(self, trainer, At.END, At.COPY):  # a step without an update
            self._copied_before_end(trainer)

    def _corrupt(self, trainer: Trainer, text: str) -> None:
        trainer.record.held = TORN
        trainer.record.ill.add("corrupt")
        trainer.core.mark_corrupt()
        self._raise(trainer, text, secondary=False)

    def _copied_before_end(self, trainer: Trainer) -> None:
        if trainer.corrupt_at == trainer.record.ended + 1 and trainer.core.phase is Phase.UPDATED:
            self._corrupt(trainer, "the loop does not go on from the checkpoint")
            return
        if trainer.raise_at == (trainer.record.ended + 1, At.END):
            self._raise(trainer, "could not log the loss", secondary=False)
        elif trainer.core.may_end_step:
            trainer.box_committed = (trainer.box_committed[1], trainer.record.ended + 1)
            trainer.begin_copy()
            self._move_to(trainer, At.COMMITTED)
        else:
            self._try_end(trainer)

    def _try_end(self, trainer: Trainer) -> None:
        step = trainer.record.ended + 1
        if not trainer.core.try_end_step():
            self._move_to(trainer, At.PARK_END)
            return
        if step > trainer.box_committed[1]:
            trainer.box_committed = (trainer.box_committed[1], step)
        if self.job.copies and not step % self.job.copies and step not in dict(trainer.record.whole):
            trainer.begin_copy()
            trainer.filling = step, trainer.record.held
            trainer.fill_copy(ENDED)
        trainer.record.ended = step
        if trainer.record.held != step:
            assert step in self.job.skipped
            trainer.record.held = step
        if trainer.core.frozen:
            self._move_to(trainer, At.PARK_ENDED)
        else:
            self._next_step(trainer)

    def _from_park_end(self, trainer: Trainer) -> None:
        if trainer.record.ended + 1 not in self.job.skipped or not self.job.has_gate:
            self._from_end(trainer)
        elif not self._back_to_gate(trainer):  # it has failed, or this rank is to leave: it stays parked there
            self._move_to(trainer, At.PARK_END)

    def _from_park_ended(self, trainer: Trainer) -> None:
        if not trainer.core.frozen:
            self._next_step(trainer)

    def _next_step(self, trainer: Trainer) -> None:
        if trainer.record.ended < self.job.steps and trainer.record.ended != trainer.leave_after:
            self._move_to(trainer, At.FORWARD)
        elif not behind.begins_copy(self, trainer, At.LEFT, At.COPY):
            self._leave_loop(trainer)

    def _leave_loop(self, trainer: Trainer) -> None:
        if trainer.record.ended < self.job.steps and trainer.core.stand.phase is not Phase.DONE:
            self.ledger.certain_faults += 1
        trainer.core.mark_left()
        if trainer.rank % 2:
            trainer.core.mark_left()  # the generator's end, and then __exit__
        self._move_to(trainer, At.LEFT)

    def raise_after_loop(self, trainer: Trainer) -> None:
        """An exception of the user's code while this rank waits for the others to be done."""
        if trainer.at is At.LEFT and not trainer.core.leaving and not trainer.core.released:
            self._raise(trainer, "could not plot the loss", secondary=False)
            self.drain(trainer)

    def _from_left(self, trainer: Trainer) -> None:
        """Woken for a copy, or for nothing: `released` and `leave` end the process by themselves."""
        behind.begins_copy(self, trainer, At.LEFT, At.COPY)

    # ------------------------------------------------------------------ processes end

    def kill(self, trainer: Trainer) -> None:
        """SIGKILL: nothing of the process runs any more; its black box stays."""
        record = trainer.record
        record.life = Life.KILLED
        self.ledger.certain_faults += 1
        self._end_process(trainer)

    def depart(self, trainer: Trainer, farewell: str) -> None:
        """The process ends by itself. The kernel closes what it had open."""
        record = trainer.record
        record.reach = trainer.reach()
        if trainer.at is At.UPDATE:
            record.ill.add("waiting in its update")
        record.life = Life.LEFT
        record.farewell = farewell
        self._end_process(trainer)

    def _end_process(self, trainer: Trainer) -> None:
        trainer.at = At.GONE
        trainer.save = trainer.writer = trainer.copying = None
        trainer.outbox.clear()
        self.on_ended(trainer)

    def signal(self, trainer: Trainer, number: int) -> None:
        """SIGTERM or the like, seen by the signal thread."""
        self.ledger.certain_faults += 1
        trainer.core.mark_signalled(number)
        self.drain(trainer)

    # ------------------------------------------------------------------ sessions

    def link(self, trainer: Trainer) -> None:
        """A session opens: Hello first, then what was left in the outbox, then what the core still owes."""
        trainer.linked = True
        self._say_hello(trainer)
        waiting = list(trainer.outbox.values())
        trainer.outbox.clear()
        for report in waiting:
            self.send_up(trainer, report)
        self.feed(trainer, to_processor.SessionUp())

    def _say_hello(self, trainer: Trainer) -> None:
        job, rank = self.job, trainer.rank
        hello = job.hello(rank, trainer.core.stand)
        self.send_up(trainer, hello)

    def unlink(self, trainer: Trainer) -> None:
        """The rank notices that its session is broken."""
        trainer.linked = False
        self.feed(trainer, to_processor.SessionDown())

    def _report(self, trainer: Trainer, report: Report) -> None:
        if trainer.linked:
            self.send_up(trainer, report)
            return
        key: object = type(report) if isinstance(report, _NEWEST_ONLY) else report
        trainer.outbox.pop(key, None)
        trainer.outbox[key] = report

    def report_peer_death(self, observer: Trainer, dead: Trainer, source: DeathSource) -> None:
        """The host watch of a living process has seen another one end."""
        self._report(observer, PeerDied(observer.rank, self.job.generation, dead.rank, source))

    # ------------------------------------------------------------------ the processor's shell

    def feed(self, trainer: Trainer, event: to_processor.Event) -> None:
        """One event for a rank's core, and what follows from it."""
        trainer.core.handle(event, self.rank_now_s(trainer))
        self.drain(trainer)

    def drain(self, trainer: Trainer) -> None:
        """Carry out what a rank's core wants done."""
        core = trainer.core
        while core.effects:
            for effect in core.take_effects():
                kind = type(effect)
                if kind is to_processor.SendReport:
                    self._report(trainer, self._with_copies(trainer, effect.report))  # type: ignore[union-attr]
                elif kind is to_processor.SayHello:
                    self._say_hello(trainer)
                elif kind is to_processor.Wake:
                    if trainer.at in _WOKEN:
                        trainer.waking = True
                        self.on_woken(trainer)
                elif kind is to_processor.StartSave and not effect.order.incident:  # type: ignore[union-attr]
                    behind.starts(self, trainer, effect.order)  # type: ignore[union-attr]
                elif kind is to_processor.CancelSave and not effect.incident:  # type: ignore[union-attr]
                    behind.cancels(self, trainer)
                elif kind is to_processor.StartSave:
                    trainer.save = effect.order  # type: ignore[union-attr]
                    trainer.save_first = trainer.record.held
                    self.on_save_started(trainer)
                elif kind is to_processor.CancelSave:
                    trainer.save = None
                elif kind is to_processor.Leave:
                    self.on_leave(trainer, _farewell(effect))  # type: ignore[arg-type]
                elif kind is to_processor.PassOn:
                    self.on_log(f"rank {trainer.rank}", "obeys the signal by itself")
                    self.on_leave(trainer, "signalled")
                elif kind is to_processor.Released:
                    self.on_leave(trainer, "released")
                else:
                    self.on_log(f"rank {trainer.rank}", effect.text)  # type: ignore[union-attr]
        self.on_deadline(trainer)

    def _with_copies(self, trainer: Trainer, report: Report) -> Report:
        if type(report) is not Settled or not self.job.copies:
            return report
        neighbours = [other for other in self.trainers if self.job.hosts[other.rank] == self.job.hosts[trainer.rank]]
        copies = tuple(WholeCopy(other.rank, step) for other in neighbours for step, _ in other.record.whole)
        return dataclasses.replace(report, copies=copies)

    def _copied(self, trainer: Trainer, unit: str, step: int) -> int | None:
        """What the whole copies of a step hold of a unit, on this host; None if there is none."""
        for rank, host in enumerate(self.job.hosts):
            content = dict(self.trainers[rank].record.whole).get(step)
            if host == self.job.hosts[trainer.rank] and unit in self.job.units[rank] and content is not None:
                return content
        return None

    def finish_save(self, trainer: Trainer, failure: str = "") -> None:
        """The saver's thread ends. `failure`: "", "storage" (ENOSPC), "for a moment" (works again), anything else."""
        order, trainer.save = trainer.save, None
        assert order is not None
        if failure:
            reason, storage = f"could not write: {failure}", failure in ("storage", "for a moment")
            self.ledger.storage_failures += failure == "storage"
            self.feed(trainer, to_processor.SaveErrored(order.incident, order.attempt, reason, storage))
            return
        content = trainer.record.held
        copied = {unit: self._copied(trainer, unit, order.step) for unit in order.copied}
        if None in copied.values():
            self.feed(trainer, to_processor.SaveErrored(order.incident, order.attempt, "there is no copy", False))
            return
        units = [(unit, copied.get(unit, trainer.save_first), copied.get(unit, content)) for unit in order.units]
        file = Written(
            writer=trainer.rank,
            generation=order.generation,
            incident=order.incident,
            attempt=order.attempt,
            step=order.step,
            units=tuple(units),  # type: ignore[arg-type]
            local_steps=tuple(
                (rank, order.step if self.trainers[rank].box_has(order.step) else -1) for rank in order.local_ranks
            ),
            whole=True,
        )
        self.disk.put(order.target, file)
        self.feed(trainer, to_processor.SaveFinished(order.incident, order.attempt, 100))

    # ------------------------------------------------------------------ the controller's shell

    def hear(self, session: int, report: Report) -> None:
        """A report comes out of a session at the controller's end; only bound sessions are listened to."""
        if type(report) is not Hello:
            if self.bound.get(report.rank) == session:
                if type(report) is Saved:
                    self._note_saved(report)
                self.feed_controller(to_controller.FromRank(report))
            return
        if not self.controller_lives:
            return
        effects = self.controller.handle(to_controller.FromRank(report), self.controller_now_s())
        if not any(type(effect) is to_controller.Reply for effect in effects):
            self.bound[report.rank] = session
        self._carry_out_all(effects)

    def _note_saved(self, report: Saved) -> None:
        """The controller knows of a finished file. It owes no use of the file of a rank that it had to give up."""
        if not report.incident:
            behind.note_saved(self, report)
            return
        if self.ledger.ranks[report.rank].ill & {"silent", "said to be dead"}:
            return
        for (target, step, incident, attempt), files in self.disk.attempts.items():
            if (step, incident, attempt) != (report.step, report.incident, report.attempt) or report.rank not in files:
                continue
            if files[report.rank].whole:
                for unit, _, _ in files[report.rank].units:
                    self.ledger.heard_saved.add((target, report.rank, step, unit))

    def close(self, rank: int, session: int) -> None:
        """The controller's end of a session is closed."""
        if self.bound.get(rank) == session:
            del self.bound[rank]
            self.feed_controller(to_controller.SessionClosed(rank))

    def feed_controller(self, event: to_controller.Event) -> None:
        """One event for the controller's core, and what follows from it."""
        if self.controller_lives:
            self._carry_out_all(self.controller.handle(event, self.controller_now_s()))

    def _carry_out_all(self, effects: list[to_controller.Effect]) -> None:
        for effect in effects:
            self._carry_out(effect)
        self.on_controller_deadline()
        for effect in effects:
            if type(effect) is to_controller.LookForNewest:
                self.on_look(effect)

    def _carry_out(self, effect: to_controller.Effect) -> None:
        kind = type(effect)
        if kind is to_controller.Send:
            order = effect.order  # type: ignore[union-attr]
            self._note_stage(order)
            self.send_down(effect.rank, order)  # type: ignore[union-attr]
        elif behind.is_of_none(effect) and isinstance(effect, behind.FilesJob):  # type: ignore[arg-type]
            self.periodic_files = effect
            self.on_periodic("verifying it" if kind is to_controller.StartVerify else "publishing it")
            self.on_periodic_files(effect)
        elif kind is to_controller.StartVerify:
            self._enter_stage("verifying")
            self.verifying = effect  # type: ignore[assignment]
            self.on_controller_job()
        elif kind is to_controller.StartPublish:
            self._enter_stage("publishing")
            self.publishing = effect  # type: ignore[assignment]
            self.on_controller_job()
        elif kind is to_controller.Discard:
            self.discard(effect)  # type: ignore[arg-type]
        elif kind is to_controller.KeepParts:
            pass  # it gets another name, and nobody looks at it any more
        elif kind is to_controller.EndController:
            self.on_log("controller", f"stops: {effect.reason}")  # type: ignore[union-attr]
            self.ledger.controller_stopped = True
            self.controller_lives = False
            self.on_controller_ended()
        elif kind is Log:
            self.on_log("controller", effect.text)  # type: ignore[union-attr]

    def _note_stage(self, order: Order) -> None:
        kind = type(order)
        if behind.is_of_none(order):
            self.on_periodic("ordered")
        elif kind is Freeze:
            self.incident = max(self.incident, order.incident)  # type: ignore[union-attr]
            if self.stage == "":
                self._enter_stage("settling")
        elif kind is Resume:
            self._enter_stage("")
        elif kind is Proceed:
            self._enter_stage("proceeding")
        elif kind is Save:
            self._enter_stage("saving")
        elif kind is Exit:
            self._enter_stage("ending")

    def _enter_stage(self, stage: str) -> None:
        if stage != self.stage:
            self.stage = stage
            self.on_stage(stage)

    def finish_verify(self) -> None:
        """The controller's storage thread has looked at every part."""
        effect, self.verifying = self.verifying, None
        assert effect is not None
        problems = self.disk.verify(effect)
        for rank, _ in problems:
            self.ledger.heard_saved = {saved for saved in self.ledger.heard_saved if saved[1] != rank}
        if problems:
            self.ledger.storage_failures += 1
            self.feed_controller(to_controller.VerifyFailed(effect.incident, effect.attempt, problems))
        else:
            self.feed_controller(to_controller.Verified(effect.incident, effect.attempt))

    def cannot_look(self) -> None:
        """The controller's storage thread could not read the parts this time."""
        effect, self.verifying = self.verifying, None
        assert effect is not None
        reason = "OSError: [Errno 24] Too many open files"
        self.feed_controller(to_controller.VerifyBlocked(effect.incident, effect.attempt, reason))

    def cannot_rename(self) -> None:
        """The controller's storage thread could not rename this time."""
        effect, self.publishing = self.publishing, None
        assert effect is not None
        reason = "OSError: [Errno 116] Stale file handle"
        self.feed_controller(to_controller.PublishFailed(effect.incident, effect.attempt, reason))

    def finish_publish(self, failure: str = "") -> None:
        """The controller's storage thread has renamed the directory, or could not."""
        effect, self.publishing = self.publishing, None
        assert effect is not None
        if failure:
            self.feed_controller(to_controller.PublishFailed(effect.incident, effect.attempt, failure))
            return
        self.rename(effect)
        self.feed_controller(to_controller.Published(effect.incident, effect.attempt, final_name(effect)))

    def newest(self) -> tuple[int, str]:
        """Step and name of the newest checkpoint that can be seen; (0, "") if there is none."""
        return max(((one.step, final_name(one)) for one in self.ledger.publications), default=(0, ""))

    def rename(self, effect: to_controller.StartPublish) -> None:
        """The one system call that makes a checkpoint visible."""
        publication, renaming = self.disk.publish(effect)
        self.ledger.publications.append(publication._replace(controller=self.follows))
        self.ledger.renamings.append(renaming)

    def kill_controller(self) -> None:
        """SIGKILL of the controller; what its storage thread was about to do does not happen."""
        self.ledger.controller_killed = True
        self.controller_lives = False
        self.verifying = self.publishing = self.periodic_files = None
        self.on_controller_ended()

    def discard(self, effect: to_controller.Discard) -> None:
        """The controller's storage thread removes what an attempt has written."""
        self.disk.discard(effect)

    # ------------------------------------------------------------------ what a driver has to bring

    def send_up(self, trainer: Trainer, report: Report) -> None:
        """Put a report on the way to the controller."""
        raise NotImplementedError

    def send_down(self, rank: int, order: Order) -> None:
        """Put an order on the way to a rank."""
        raise NotImplementedError

    def on_leave(self, trainer: Trainer, farewell: str) -> None:
        """The process of this rank has to end."""
        raise NotImplementedError

    def on_moved(self, trainer: Trainer) -> None:
        """The training thread is somewhere else."""

    def on_entered(self, trainer: Trainer) -> None:
        """A rank has entered a collective: others may get through."""

    def on_woken(self, trainer: Trainer) -> None:
        """A parked training thread should look again."""

    def on_ended(self, trainer: Trainer) -> None:
        """A process has ended."""

    def on_save_started(self, trainer: Trainer) -> None:
        """A saver has begun to read and write."""

    def on_periodic(self, stage: str) -> None:
        """A periodic checkpoint is ordered, copied, written, verified, or published."""

    def on_writer_started(self, trainer: Trainer) -> None:
        """A writer behind the training has begun."""

    def on_copy_refused(self, trainer: Trainer, order: Save) -> None:
        """The memory for the copy is still being read."""

    def on_writer_cancelled(self, trainer: Trainer) -> None:
        """It is to stop."""

    def on_periodic_files(self, effect: behind.FilesJob) -> None:
        """`periodic_files` is set."""

    def on_published(self, effect: to_controller.StartPublish) -> None:
        """A periodic checkpoint has its name."""
        self.tell_published(effect)

    def tell_published(self, effect: to_controller.StartPublish) -> None:
        """The controller hears of it."""
        self.feed_controller(to_controller.Published(effect.incident, effect.attempt, final_name(effect)))

    def on_look(self, effect: to_controller.LookForNewest) -> None:
        """The controller's storage thread looks for the newest checkpoint."""
        self.feed_controller(to_controller.NewestKnown(effect.incident, *self.newest()))

    def on_controller_job(self) -> None:
        """`verifying` or `publishing` is set."""

    def on_controller_ended(self) -> None:
        """The controller's process has ended."""

    def on_stage(self, stage: str) -> None:
        """The incident has come to another stage."""

    def on_deadline(self, trainer: Trainer) -> None:
        """The core of a rank may have another deadline."""

    def on_controller_deadline(self) -> None:
        """The controller's core may have another deadline."""

    def on_log(self, who: str, text: str) -> None:
        """A line for people."""

    def rank_now_s(self, trainer: Trainer) -> float:
        """What the clock of this rank's process says."""
        return self.now_s

    def controller_now_s(self) -> float:
        """What the clock of the controller's process says."""
        return self.now_s


def final_name(checkpoint: to_controller.StartPublish | Publication) -> str:
    """The name of a directory that is published."""
    return f"/t{checkpoint.target}/step_{checkpoint.step}"


def _farewell(effect: to_processor.Leave) -> str:
    order = effect.order
    if isinstance(order, Exit):
        return f"exit {order.kind.name.lower()}"
    return "refused" if isinstance(order, Refused) else "controller lost"


_MOVES = {
    At.START: World._from_start,
    At.OPENING: World._from_opening,
    At.FORWARD: World._from_forward,
    At.REDUCE: World._from_reduce,
    At.BACK: World._from_back,
    At.READY: World._from_ready,
    At.GATE: World._from_gate,
    At.PARK_UPDATE: World._from_park_update,
    At.UPDATE: World._from_update,
    At.LOG: World._from_log,
    At.END: World._from_end,
    At.COMMITTED: World._try_end,
    At.PARK_END: World._from_park_end,
    At.PARK_ENDED: World._from_park_ended,
    At.LEFT: World._from_left,
    At.COPY: World._from_copy,
}

_AFTER_COPY = {
    At.BACK: World._copied_before_update,
    At.END: World._copied_before_end,
    At.LEFT: World._leave_loop,
}
