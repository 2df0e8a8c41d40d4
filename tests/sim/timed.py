"""One simulation in virtual time: a queue of what happens when, delays and luck from a seed, faults from a plan."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from lastwords.clock import OwnTime
from lastwords.controller import events as to_controller
from lastwords.controller.core import ControllerCore
from lastwords.controller.events import ControllerOptions
from lastwords.core_events import Tick
from lastwords.processor import events as to_processor
from lastwords.processor.core import ProcessorCore
from lastwords.vocabulary import DeathSource, Exit, Freeze, Hello, Order, Refused, Release, Report, Resume, Status
from tests.sim import stale
from tests.sim.disk import Disk
from tests.sim.ledger import Directory, Ledger, Life, Renaming
from tests.sim.schedule import Fault, Plan
from tests.sim.world import At, Trainer, World, final_name

GROUP_TIMEOUT_S = 1800.0
"""torch's default: a collective that waits longer raises by itself."""

HORIZON_S = 5000.0
"""Far beyond the sum of all named deadlines: who is there then waits for ever."""

EVENTS_MAX = 100_000
"""The longest schedules have a few thousand: more is a protocol that goes round in circles."""

WELCOME_TIMEOUT_S = 330.0
"""How long a process waits for all ranks to be registered before it gives up."""

KEEPALIVE_S = 1.8
"""After so much silence the controller's transport breaks a session."""

STORAGE_TIMEOUT_S = 120.0
"""The controller gives up a verification, or a publication, that takes longer."""

CLIENT_KEEPALIVE_S = 10.0
"""The same at a rank's end."""

SILENT_S = 1.5
"""A rank that could not be heard of for so long may be taken for dead (lost_confirm_s is 2 s)."""

UNASKED_S = 5.0
"""A rank that has heard no Freeze for so long may be left out (settle_timeout_s is 15 s): its answers are lost, too."""

_STAY_S: Mapping[At, tuple[float, float]] = {
    At.OPENING: (0.0, 0.001),
    At.FORWARD: (0.01, 0.06),
    At.COPY: (0.0, 0.01),
    At.REDUCE: (0.0002, 0.01),
    At.BACK: (0.0, 0.0004),
    At.READY: (0.0, 0.0004),
    At.GATE: (0.0002, 0.002),
    At.PARK_UPDATE: (0.0, 0.0005),
    At.END: (0.0, 0.0004),
    At.COMMITTED: (0.0, 0.0004),
    At.PARK_END: (0.0, 0.0005),
    At.PARK_ENDED: (0.0, 0.0005),
    At.LEFT: (0.0, 0.0005),
}

ControllerFactory = Callable[[int, int, ControllerOptions], ControllerCore]
ProcessorFactory = Callable[[int, int, int], ProcessorCore]


class Story:
    """The lines of one simulation, for people."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def tell(self, now_s: float, who: str, text: str) -> None:
        self.lines.append(f"{now_s:10.4f} s  {who:<10}  {text}")


class TimedWorld(World):
    """A world in which everything takes a random time."""

    def __init__(
        self,
        plan: Plan,
        *,
        controller: ControllerFactory = ControllerCore,
        processor: ProcessorFactory = ProcessorCore,
        story: Story | None = None,
    ) -> None:
        job = plan.job
        older = {}
        if plan.older_directory:
            older = {(0, job.steps): Directory(0, job.steps, job.unit_names, True)}
            older[(0, job.steps - 1)] = Directory(0, job.steps - 1, job.unit_names, True)
        options = ControllerOptions(has_fallback_target=job.fallback)
        super().__init__(
            job,
            controller(job.world_size, job.generation, options),
            {rank: processor(rank, job.generation, job.start_step) for rank in range(job.world_size)},
            Disk(job.generation, older),
        )
        self.plan = plan
        self.story = story
        self.dice = random.Random(plan.seed ^ 0x5EED)
        gate_dice = random.Random(plan.seed ^ 0x6A7E)  # of its own, so that older seeds stay what they were
        self.gate_breaks = frozenset(rank for rank in range(plan.job.world_size) if gate_dice.random() < 0.5)
        self.disk.unreadable = set(plan.unreadable)
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.sequence = 0
        ranks = job.world_size
        self.token = [0] * ranks
        self.waiting = [False] * ranks
        self.paused_until_s = [0.0] * ranks
        self.deferred: list[list[tuple[Callable[..., None], tuple[Any, ...]]]] = [[] for _ in range(ranks)]
        self.leaving = [False] * ranks
        self.session = [0] * ranks  # the client's newest session; 0 while it has none
        self.sessions = 0
        self.cut_s: dict[int, float] = {}  # session -> when it broke
        self.blocked_until_s = [0.0] * ranks  # no session can be opened before
        self.up_clear_s = [0.0] * ranks
        self.down_clear_s = [0.0] * ranks
        self.told: set[int] = set()  # ranks that were sent word of the job's end
        self.unheard_since_s = [-1.0] * ranks
        self.frozen_since_s = [-1.0] * ranks
        self.asked_since_s = [-1.0] * ranks  # the first of several Freezes that were all lost
        self.over = [0] * ranks  # newest incident whose Resume has arrived
        self.known: set[int] = set()  # ranks whose Hello has arrived
        self.tick_s: list[float] = [-1.0] * ranks
        self.controller_tick_s = -1.0
        self.controller_time = OwnTime()
        self.own_times = [OwnTime() for _ in range(ranks)]
        self.deaths: Counter[str] = Counter()
        self.place_faults: dict[tuple[int, At, int], list[Fault]] = {}
        self.stage_faults: dict[str, list[Fault]] = {}
        self.publish_failures = plan.publish_failures
        self.troubles = plan.troubles
        self.gate_break = plan.troubles.gate_break
        self.glitches = {"verify": plan.troubles.verify_glitches, "publish": plan.troubles.publish_glitches}
        self.write_glitches = dict(plan.troubles.write_glitches)
        self.controller_free_s = 0.0
        self.luck = random.Random(plan.seed ^ 0x10CC)  # of the troubles, so that older seeds stay what they were
        for rank, step, place in plan.raises:
            self.trainers[rank].raise_at = (step, place)
        for rank, step in plan.tears:
            self.trainers[rank].tear_at = step
            self.trainers[rank].swallows = plan.swallows
        for rank, step in plan.corrupts:
            self.trainers[rank].corrupt_at = step
        for rank, step in plan.leaves:
            self.trainers[rank].leave_after = step
        if plan.odd_loop[0] >= 0:
            self.trainers[plan.odd_loop[0]].loop_start = plan.odd_loop[1]
            self.ledger.certain_faults += 1
        if plan.troubles.before_update[0] >= 0:
            self.trainers[plan.troubles.before_update[0]].raise_at = (plan.troubles.before_update[1], At.READY)
        for rank, step in plan.leaves_inside:
            self.trainers[rank].leave_inside = step
        ledger = self.ledger
        ledger.refused = set(plan.refused)
        ledger.refused |= {(rank, target) for rank in plan.hanging | plan.unreadable for target in job.targets}
        too_late = max(plan.troubles.late_verify_s, plan.troubles.late_publish_s) > STORAGE_TIMEOUT_S - 0.1
        # One try takes longer than storage_retry_s, so what fails twice is given up.
        slow = (plan.troubles.late_verify_s and plan.troubles.verify_glitches > 1) or (
            plan.troubles.late_publish_s and plan.troubles.publish_glitches > 1
        )
        if plan.hanging_verify or plan.hanging_publish or too_late or slow:
            ledger.closed_targets = set(job.targets)

    # ------------------------------------------------------------------ the queue

    def run(self) -> Ledger:
        """From the first connection to the time when nothing can happen any more."""
        for fault in self.plan.faults:
            trigger = fault.trigger
            if trigger.at is not None:
                self.place_faults.setdefault(trigger.at, []).append(fault)
            elif trigger.stage:
                self.stage_faults.setdefault(trigger.stage, []).append(fault)
            else:
                self.after(trigger.time_s, self.strike, fault)
        self._plan_troubles()
        for trainer in self.trainers:
            self.on_moved(trainer)
            self.waiting[trainer.rank] = True
            self.feed(trainer, Tick())
            self.after(self.dice.random() * 0.05, self.connect, trainer)
        self.feed_controller(Tick())
        queue, popped = self.queue, 0
        while queue:
            self.now_s, _, action, arguments = heapq.heappop(queue)
            popped += 1
            if self.now_s > HORIZON_S or popped > EVENTS_MAX:
                self.ledger.crossed_horizon = True
                break
            action(*arguments)
        self._close_books()
        return self.ledger

    def _close_books(self) -> None:
        self.ledger.ended = True
        self.ledger.left_on_disk = self.disk.unpublished()
        for trainer in self.trainers:
            if trainer.record.life is Life.ALIVE:
                trainer.record.reach = trainer.reach()
            self._thawed(trainer)
            self._asked(trainer)

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self.sequence += 1
        heapq.heappush(self.queue, (self.now_s + delay_s, self.sequence, action, arguments))

    def after_in(self, trainer: Trainer, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """The same, inside the process of a rank: not after its death, and not while it is stopped."""
        self.sequence += 1
        heapq.heappush(self.queue, (self.now_s + delay_s, self.sequence, self._inside, (trainer, action, arguments)))

    def _inside(self, trainer: Trainer, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if trainer.record.life is Life.ALIVE:
            if self.paused_until_s[trainer.rank] > self.now_s:
                self.deferred[trainer.rank].append((action, arguments))
            else:
                action(*arguments)

    def tell(self, who: str, text: str) -> None:
        if self.story is not None:
            self.story.tell(self.now_s, who, text)

    def tell_of(self, trainer: Trainer, text: str) -> None:
        if self.story is not None:
            self.story.tell(self.now_s, f"rank {trainer.rank}", text)

    # ------------------------------------------------------------------ training threads

    def on_moved(self, trainer: Trainer) -> None:
        rank, at = trainer.rank, trainer.at
        self.token[rank] += 1
        self.waiting[rank] = False
        if self.story is not None:
            self.tell_of(trainer, f"is at {at.name} of step {trainer.record.ended + 1} ({trainer.core.stand})")
        if self.place_faults:
            for fault in self.place_faults.pop((rank, at, trainer.record.ended + 1), ()):
                self.after(fault.trigger.delay_s, self.strike, fault)
        if at is At.GATE:
            self.after_in(trainer, GROUP_TIMEOUT_S, self._gate_timeout, trainer, self.token[rank])
        if at is At.LEFT and rank in self.plan.raises_after_loop:
            self.after_in(trainer, 0.03 * self.dice.random(), self.raise_after_loop, trainer)
        if at is At.READY and self.dice.random() < 0.1:
            low_s, high_s = 0.0, 0.02  # a pre-hook of the optimizer has something to do
        elif at is At.UPDATE:
            low_s, high_s = 0.3 * self.plan.update_s, self.plan.update_s
        elif at is At.LOG:
            low_s, high_s = 0.0, self.plan.log_s
        elif at in _STAY_S:
            low_s, high_s = _STAY_S[at]
        elif at is At.STUCK or at is At.STUCK_UPDATE:
            low_s = high_s = GROUP_TIMEOUT_S
        elif at is At.START:
            self.after_in(trainer, WELCOME_TIMEOUT_S, self._not_welcomed, trainer)
            return
        else:
            return
        self.after_in(trainer, low_s + (high_s - low_s) * self.dice.random(), self._advance, trainer, self.token[rank])
        if at is At.FORWARD and trainer.linked and self.dice.random() < 0.3:
            self.send_up(trainer, Status(rank, self.job.generation, trainer.core.stand))

    def _not_welcomed(self, trainer: Trainer) -> None:
        if trainer.at is At.START:
            self.on_leave(trainer, "not welcomed")

    def _gate_timeout(self, trainer: Trainer, token: int) -> None:
        if token == self.token[trainer.rank]:
            self.advance(trainer, "time out")

    def _advance(self, trainer: Trainer, token: int) -> None:
        if token != self.token[trainer.rank]:
            return
        choices = self.choices(trainer)
        if not choices:
            self.waiting[trainer.rank] = True
            return
        choice = choices[0]
        if len(choices) > 1:
            choice = self.dice.choice(choices)
        self.advance(trainer, choice)
        if token == self.token[trainer.rank]:  # woken for something else
            self.waiting[trainer.rank] = True
            self._stir(trainer)

    def _stir(self, trainer: Trainer) -> None:
        rank = trainer.rank
        if self.waiting[rank] and self.choices(trainer):
            self.waiting[rank] = False
            slow, often = (0.5, 0.1) if trainer.waking else (0.03, 0.3 if trainer.at is At.GATE else 0.1)
            delay_s = 0.0005 + (slow * self.dice.random() if self.dice.random() < often else 0.0)
            self.after_in(trainer, delay_s, self._advance, trainer, self.token[rank])

    def on_entered(self, trainer: Trainer) -> None:
        for other in self.trainers:
            if self.waiting[other.rank]:
                self._stir(other)

    def on_woken(self, trainer: Trainer) -> None:
        self._stir(trainer)

    # ------------------------------------------------------------------ processes

    def on_ended(self, trainer: Trainer) -> None:
        rank = trainer.rank
        dice = self.dice
        self._thawed(trainer)
        self._heard(rank)
        killed = trainer.record.life is Life.KILLED
        self.tell_of(trainer, "is killed" if killed else f"ends: {trainer.record.farewell}")
        if killed:
            self._announce_death(trainer)
        self.break_session(rank, lose_tail=killed, seen_s=0.0005 + (0.5 if killed else 0.01) * dice.random())
        for other in self.trainers:
            if self.waiting[other.rank]:
                self._stir(other)

    def _announce_death(self, dead: Trainer) -> None:
        job, dice = self.job, self.dice
        source = DeathSource.ROBUST_MUTEX if dice.random() < 0.8 else DeathSource.PIDFD
        delay_s = 0.0002 + 0.003 * dice.random() + (0.5 * dice.random() if source is DeathSource.PIDFD else 0.0)
        if job.hosts[dead.rank] == job.hosts[0]:
            if dead.rank in self.bound or dice.random() < 0.5:
                self.after(delay_s, self.feed_controller, to_controller.Died(dead.rank, source))
            return
        for observer in self.trainers:
            if observer is not dead and job.hosts[observer.rank] == job.hosts[dead.rank]:
                later_s = delay_s + 0.001 * dice.random()
                self.after_in(observer, later_s, self.report_peer_death, observer, dead, source)

    def on_leave(self, trainer: Trainer, farewell: str) -> None:
        rank = trainer.rank
        if not self.leaving[rank]:
            self.leaving[rank] = True
            self.tell_of(trainer, f"has to end: {farewell}")
            delay_s = 0.001 + 0.02 * self.dice.random() + (4.0 if self.dice.random() < 0.03 else 0.0)
            self.after_in(trainer, delay_s, self.depart, trainer, farewell)

    def on_controller_ended(self) -> None:
        self.tell("controller", "has ended")
        if self.ledger.controller_stopped:
            self.ledger.untold = {rank for rank in self.bound if self._is_untold(rank)}
        for rank in range(self.job.world_size):
            self.blocked_until_s[rank] = HORIZON_S * 2
            self.break_session(rank, lose_tail=self.ledger.controller_killed, seen_s=0.0)

    def _is_untold(self, rank: int) -> bool:
        alive = self.trainers[rank].record.life is Life.ALIVE and not self.trainers[rank].core.leaving
        return alive and rank not in self.told and self.session[rank] not in self.cut_s

    # ------------------------------------------------------------------ sessions

    def connect(self, trainer: Trainer) -> None:
        """A rank tries to open a session."""
        rank = trainer.rank
        if trainer.record.life is not Life.ALIVE or trainer.linked or self.leaving[rank]:
            return
        if self.blocked_until_s[rank] > self.now_s:
            if self.blocked_until_s[rank] < HORIZON_S:
                delay_s = self.blocked_until_s[rank] - self.now_s + 0.1 * self.dice.random()
                self.after_in(trainer, delay_s, self.connect, trainer)
            return
        self.sessions += 1
        self.session[rank] = self.sessions
        self.link(trainer)

    def break_session(self, rank: int, *, lose_tail: bool, seen_s: float) -> None:
        """The newest session of a rank breaks now: both ends notice in their time, and what was on its way is lost."""
        session = self.session[rank]
        if session == 0 or session in self.cut_s:
            return
        dice = self.dice
        trainer = self.trainers[rank]
        self.cut_s[session] = self.now_s + (0.002 * dice.random() if lose_tail else 1.0)
        self.after(
            max(seen_s, self.up_clear_s[rank] - self.now_s) if not lose_tail else seen_s, self._closed, rank, session
        )
        if trainer.record.life is Life.ALIVE:
            self.after_in(trainer, 0.0005 + 0.05 * dice.random(), self._noticed, trainer, session)

    def _closed(self, rank: int, session: int) -> None:
        if self._controller_is_busy(self._closed, rank, session):
            return
        self.cut_s[session] = min(self.cut_s[session], self.now_s)
        if self.story is not None and self.bound.get(rank) == session:
            self.tell("controller", f"the session of rank {rank} is closed")
        self.close(rank, session)

    def _noticed(self, trainer: Trainer, session: int) -> None:
        if self.session[trainer.rank] != session:
            return
        self.session[trainer.rank] = 0
        self._unheard(trainer)
        self.tell_of(trainer, "has lost its session")
        self.unlink(trainer)
        self.after_in(trainer, 0.025 + 0.1 * self.dice.random(), self.connect, trainer)

    def _unheard(self, trainer: Trainer) -> None:
        if self.unheard_since_s[trainer.rank] < 0:
            self.unheard_since_s[trainer.rank] = self.now_s

    def _heard(self, rank: int) -> None:
        since_s = self.unheard_since_s[rank]
        if since_s >= 0:
            self.unheard_since_s[rank] = -1.0
            if self.now_s - since_s >= SILENT_S:
                self.ledger.ranks[rank].ill.add("silent")

    def _delay_s(self) -> float:
        dice = self.dice
        delay_s = self.plan.message_delay_s * (0.1 + dice.random())
        if self.plan.slow_messages and dice.random() < self.plan.slow_messages:
            delay_s += 0.5 * dice.random()
        return delay_s

    def send_up(self, trainer: Trainer, report: Report) -> None:
        rank = trainer.rank
        if self._is_lost():
            return
        at_s = max(self._passes_s(self.troubles.mute, rank), self.up_clear_s[rank])
        self.up_clear_s[rank] = at_s
        self.sequence += 1
        heapq.heappush(self.queue, (at_s, self.sequence, self._arrive_up, (rank, self.session[rank], report)))

    def _arrive_up(self, rank: int, session: int, report: Report) -> None:
        if not self.controller_lives or self.cut_s.get(session, HORIZON_S) < self.now_s:
            return
        if self._controller_is_busy(self._arrive_up, rank, session, report):
            return
        listened_to = type(report) is Hello or self.bound.get(rank) == session
        if listened_to and self.paused_until_s[rank] <= self.now_s:  # not what it had said before it was stopped
            self._heard(rank)
        self.known.add(rank)
        if self.story is not None:
            self.tell("controller", f"hears {report}")
        self.hear(session, report)

    def send_down(self, rank: int, order: Order) -> None:
        session = self.bound.get(rank)
        if session is None:
            return
        if isinstance(order, Exit | Release | Refused):
            self.told.add(rank)
        if self._is_lost():
            if type(order) is Freeze and self.asked_since_s[rank] < 0:
                self.asked_since_s[rank] = self.now_s
            return
        at_s = max(self._passes_s(self.troubles.deaf, rank), self.down_clear_s[rank])
        self.down_clear_s[rank] = at_s
        self.sequence += 1
        trainer = self.trainers[rank]
        arguments = (trainer, self._arrive_down, (trainer, session, order))
        heapq.heappush(self.queue, (at_s, self.sequence, self._inside, arguments))

    def _arrive_down(self, trainer: Trainer, session: int, order: Order) -> None:
        if self.session[trainer.rank] != session or self.cut_s.get(session, HORIZON_S) < self.now_s:
            return
        if self.story is not None:
            self.tell_of(trainer, f"is told {order}")
        kind = type(order)
        if kind is Freeze:
            self._asked(trainer)
            if self.frozen_since_s[trainer.rank] < 0:
                self.frozen_since_s[trainer.rank] = self.now_s
        elif kind is Resume or kind is Exit or kind is Refused:
            self._thawed(trainer)
            if kind is Resume:
                self.over[trainer.rank] = max(self.over[trainer.rank], order.incident)  # type: ignore[union-attr]
        self.feed(trainer, to_processor.FromController(order))

    def _asked(self, trainer: Trainer) -> None:
        """Who was sent every Freeze in vain for too long was out of reach, as if it had been silent."""
        since_s = self.asked_since_s[trainer.rank]
        self.asked_since_s[trainer.rank] = -1.0
        if since_s >= 0 and self.now_s - since_s >= UNASKED_S:
            trainer.record.ill.add("silent")

    def _thawed(self, trainer: Trainer) -> None:
        since_s = self.frozen_since_s[trainer.rank]
        if since_s >= 0:
            self.frozen_since_s[trainer.rank] = -1.0
            record = trainer.record
            record.frozen_s_max = max(record.frozen_s_max, self.now_s - since_s)

    # ------------------------------------------------------------------ timers

    def on_deadline(self, trainer: Trainer) -> None:
        due_s = trainer.core.deadline_s
        if due_s is None or trainer.record.life is not Life.ALIVE:
            return
        rank = trainer.rank
        due_s = self._world_s(rank, self.own_times[rank].look_mono_s(due_s))
        if self.tick_s[rank] < 0 or due_s < self.tick_s[rank]:
            self.tick_s[rank] = due_s
            self.after_in(trainer, max(0.0, due_s - self.now_s) + 1e-6, self._tick, trainer, due_s)

    def _tick(self, trainer: Trainer, due_s: float) -> None:
        if self.tick_s[trainer.rank] == due_s:
            self.tick_s[trainer.rank] = -1.0
            self.feed(trainer, Tick())

    def on_controller_deadline(self) -> None:
        due_s = self.controller.deadline_s
        if due_s is None:
            return
        due_s = self.controller_time.look_mono_s(due_s)
        if self.controller_tick_s < 0 or due_s < self.controller_tick_s:
            self.controller_tick_s = due_s
            self.after(max(0.0, due_s - self.now_s) + 1e-6, self._tick_controller, due_s)

    def _tick_controller(self, due_s: float) -> None:
        if self.controller_tick_s == due_s:
            if self._controller_is_busy(self._tick_controller, due_s):
                return
            self.controller_tick_s = -1.0
            self.feed_controller(Tick())

    # ------------------------------------------------------------------ files

    def on_save_started(self, trainer: Trainer) -> None:
        order = trainer.save
        assert order is not None
        rank, dice = trainer.rank, self.dice
        self.tell_of(trainer, f"starts to write step {order.step}")
        if rank in self.plan.hanging:
            return
        written_s = 0.01 + 0.2 * dice.random()
        if dice.random() < 0.1:
            self.after_in(trainer, 0.5 * written_s, self._progress, trainer, order)
        failure = "storage" if (rank, order.target) in self.plan.refused else ""
        if not failure and self.write_glitches.get(rank):
            self.write_glitches[rank] -= 1
            failure = "for a moment"
            self.ledger.refused_for_a_moment.add(rank)
        self.after_in(trainer, written_s, self._written, trainer, order, failure)

    def _progress(self, trainer: Trainer, order: object) -> None:
        if trainer.save is not None and trainer.save is order:
            self.feed(trainer, to_processor.SaveProgressed(trainer.save.incident, trainer.save.attempt, 50))

    def _written(self, trainer: Trainer, order: object, failure: str) -> None:
        if trainer.save is order:
            self.tell_of(trainer, f"cannot write: {failure}" if failure else "has written its part")
            self.finish_save(trainer, failure)

    def on_controller_job(self) -> None:
        if self.publishing is not None:
            if not self.plan.hanging_publish:
                delay_s = 0.001 + 0.03 * self.dice.random() + self.troubles.late_publish_s
                self.after(self.in_line(self.publishing.target, delay_s), self._renamed, self.publishing)
        elif self.verifying is not None and not self.plan.hanging_verify:
            delay_s = 0.001 + 0.05 * self.dice.random() + self.troubles.late_verify_s
            self.after(self.in_line(self.verifying.target, delay_s), self._checked, self.verifying)

    def in_line(self, target: int, delay_s: float) -> float:
        """When a job in this directory is done that takes so long by itself."""
        return delay_s

    def _checked(self, effect: to_controller.StartVerify) -> None:
        if self._controller_is_busy(self._checked, effect) or self.verifying is not effect:
            return
        if self.glitches["verify"]:
            self.glitches["verify"] -= 1
            self.tell("disk", "the parts cannot be looked at for a moment")
            self.cannot_look()
        else:
            self.finish_verify()

    def _renamed(self, effect: to_controller.StartPublish) -> None:
        if self._controller_is_busy(self._renamed, effect) or not self.controller_lives:
            return
        if self.publishing is not effect and self.troubles.late_publish_s:
            self.tell("disk", f"step {effect.step} gets its final name after all")
            self.rename(effect)
            self.feed_controller(to_controller.Published(effect.incident, effect.attempt, final_name(effect)))
        if self.publishing is effect:
            if self.glitches["publish"]:
                self.glitches["publish"] -= 1
                self.tell("disk", f"step {effect.step} cannot be renamed for a moment")
                self.cannot_rename()
                return
            if self.publish_failures:
                self.publish_failures -= 1
                self.finish_publish("no space left on device")
                return
            self.tell("disk", f"step {self.publishing.step} gets its final name")
            self.finish_publish()

    # ------------------------------------------------------------------ troubles

    def _plan_troubles(self) -> None:
        """What happens at a time of its own (the rest is looked up where it matters)."""
        troubles = self.troubles
        for rank, from_s, until_s in (troubles.mute, troubles.deaf):
            if rank >= 0 and until_s - from_s > KEEPALIVE_S:
                self.after(from_s + KEEPALIVE_S, self._break_one_way, rank, until_s)
        from_s, until_s = troubles.controller_pause
        if until_s > 0.0:
            self.after(until_s, self._controller_goes_on)
            if until_s - from_s >= SILENT_S:
                self.ledger.certain_faults += 1
            if until_s - from_s > CLIENT_KEEPALIVE_S:
                self.after(from_s + CLIENT_KEEPALIVE_S, self._give_the_controller_up, until_s)
        rank, at_s = troubles.false_death
        if rank >= 0:
            self.after(at_s, self._falsely_reported_dead, rank)

    def _is_lost(self) -> bool:
        return self.troubles.loss > 0.0 and self.luck.random() < self.troubles.loss

    def _passes_s(self, held_up: tuple[int, float, float], rank: int) -> float:
        """When a message that is sent now arrives. What is held up one way is sent again when the way is free."""
        stuck_rank, from_s, until_s = held_up
        arrives_s = self.now_s + self._delay_s()
        return until_s + 0.2 * self.luck.random() if rank == stuck_rank and from_s <= arrives_s < until_s else arrives_s

    def _break_one_way(self, rank: int, until_s: float) -> None:
        if self.trainers[rank].record.life is Life.ALIVE:
            self._isolate(rank, max(0.0, until_s - self.now_s))

    def _controller_is_busy(self, action: Callable[..., None], *arguments: Any) -> bool:
        """True if the controller takes this in later; it takes in one thing after the other."""
        if not self.controller_lives:
            return False
        from_s, until_s = self.troubles.controller_pause
        free_s = until_s if from_s <= self.now_s < until_s else self.controller_free_s
        if free_s > self.now_s:
            self.after(free_s - self.now_s, action, *arguments)
            return True
        self.controller_free_s = self.now_s + self.troubles.controller_slow_s
        return False

    def _give_the_controller_up(self, until_s: float) -> None:
        for rank in range(self.job.world_size):
            self._isolate(rank, max(0.0, until_s - self.now_s))

    def _controller_goes_on(self) -> None:
        """Whoever it has not heard of meanwhile was not silent."""
        self.tell("controller", "goes on")
        for rank, since_s in enumerate(self.unheard_since_s):
            if since_s >= 0 and self.paused_until_s[rank] <= self.now_s:
                self.unheard_since_s[rank] = self.now_s
        self.feed_controller(Tick())  # the worst order: its timers ring before it hears anything

    def _falsely_reported_dead(self, rank: int) -> None:
        record = self.trainers[rank].record
        if record.life is Life.ALIVE and rank in self.bound:
            self.tell("fault", f"rank {rank} lives and is reported dead")
            record.ill.add("said to be dead")
            self.ledger.certain_faults += 1
            self.feed_controller(to_controller.Died(rank, DeathSource.PIDFD))

    def rank_now_s(self, trainer: Trainer) -> float:
        offset_s, rate = self.troubles.skew[trainer.rank] if self.troubles.skew else (0.0, 1.0)
        return self.own_times[trainer.rank].at(offset_s + self.now_s * rate)

    def controller_now_s(self) -> float:
        return self.controller_time.at(self.now_s)

    def _world_s(self, rank: int, rank_s: float) -> float:
        """The inverse of `rank_now_s`."""
        if not self.troubles.skew:
            return rank_s
        offset_s, rate = self.troubles.skew[rank]
        return (rank_s - offset_s) / rate

    # ------------------------------------------------------------------ faults

    def on_stage(self, stage: str) -> None:
        self.tell("controller", f"the incident is at: {stage}")
        for fault in self.stage_faults.pop(stage, ()):
            self.after(fault.trigger.delay_s, self.strike, fault)

    def strike(self, fault: Fault) -> None:
        self.tell("fault", str(fault))
        _FAULTS[fault.kind](self, fault)

    def _kill_ranks(self, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            trainer = self.trainers[rank]
            if trainer.record.life is Life.ALIVE and not self.leaving[rank]:
                self.deaths[f"at {trainer.at.name}"] += 1
                if self.stage:
                    self.deaths[f"during {self.stage}"] += 1
            if trainer.record.life is Life.ALIVE:
                self.kill(trainer)

    def _kill(self, fault: Fault) -> None:
        self._kill_ranks(fault.ranks)

    def _kill_writer(self, fault: Fault) -> None:
        writers = [trainer.rank for trainer in self.trainers if trainer.save is not None]
        self._kill_ranks((self.dice.choice(writers),) if writers else fault.ranks)

    def _kill_host(self, fault: Fault) -> None:
        if 0 in fault.ranks:
            self._kill_controller(fault)
        self._kill_ranks(fault.ranks)

    def _kill_controller(self, fault: Fault) -> None:
        if self.controller_lives:
            if self.publishing is not None and self.dice.random() < 0.5:
                self.rename(self.publishing)  # the crash comes just after the rename
            else:
                here = self.disk.visible()
                self.ledger.renamings.append(Renaming(here, here))
            self.kill_controller()

    def _pause(self, fault: Fault) -> None:
        for rank in fault.ranks:
            trainer = self.trainers[rank]
            if trainer.record.life is Life.ALIVE and self.paused_until_s[rank] <= self.now_s:
                self.paused_until_s[rank] = self.now_s + fault.duration_s
                self._unheard(trainer)
                self.after(fault.duration_s, self._continue, trainer)
                if fault.duration_s > KEEPALIVE_S:
                    self.after(KEEPALIVE_S, self._stop_listening, rank, self.session[rank])

    def _stop_listening(self, rank: int, session: int) -> None:
        if session and session == self.session[rank] and session not in self.cut_s:
            self.break_session(rank, lose_tail=True, seen_s=0.0)

    def _continue(self, trainer: Trainer) -> None:
        rank = trainer.rank
        self.paused_until_s[rank] = 0.0
        if trainer.linked and self.session[rank] not in self.cut_s:
            self._heard(rank)
        if trainer.record.life is Life.ALIVE:
            self.tell_of(trainer, "goes on")
            deferred, self.deferred[rank] = self.deferred[rank], []
            for action, arguments in deferred:
                self.after_in(trainer, 0.0, action, *arguments)
            if not trainer.linked or self.session[rank] in self.cut_s:
                self._unheard(trainer)

    def _cut(self, fault: Fault) -> None:
        for rank in fault.ranks:
            self._isolate(rank, fault.duration_s)

    def _isolate(self, rank: int, duration_s: float) -> None:
        self.blocked_until_s[rank] = max(self.blocked_until_s[rank], self.now_s + duration_s)
        self._unheard(self.trainers[rank])
        half_open = duration_s > KEEPALIVE_S and self.dice.random() < 0.5
        self.break_session(rank, lose_tail=True, seen_s=KEEPALIVE_S if half_open else 0.001 + 0.05 * self.dice.random())

    def _isolate_host(self, fault: Fault) -> None:
        if 0 not in fault.ranks:
            for rank in fault.ranks:
                self._isolate(rank, fault.duration_s)

    def _signal(self, fault: Fault) -> None:
        for rank in fault.ranks:
            trainer = self.trainers[rank]
            if trainer.record.life is Life.ALIVE:
                self.after_in(trainer, 0.0, self.signal, trainer, 15)

    def _stale(self, fault: Fault) -> None:
        if self._controller_is_busy(self._stale, fault):
            return
        stale.inject(self, fault.ranks[0])

    def on_log(self, who: str, text: str) -> None:
        self.tell(who, text)


_FAULTS: Mapping[str, Callable[[TimedWorld, Fault], None]] = {
    "kill": TimedWorld._kill,
    "kill_writer": TimedWorld._kill_writer,
    "kill_host": TimedWorld._kill_host,
    "kill_controller": TimedWorld._kill_controller,
    "pause": TimedWorld._pause,
    "cut": TimedWorld._cut,
    "isolate_host": TimedWorld._isolate_host,
    "signal": TimedWorld._signal,
    "stale": TimedWorld._stale,
}
