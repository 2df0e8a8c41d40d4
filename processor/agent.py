"""The processor of one rank: threads, time and I/O around the pure `ProcessorCore`.

Threads. The training thread says here where its step is (`ready`, `begin_update`, `end_update`, `end_step`, ...), which
moves the core's phase, and is parked here in an incident. The session's threads hand in orders, a pulse thread streams
the status and feeds ticks, and a writer thread exists while a part of a checkpoint is written. One lock is held around
every call of the core: it makes "check the freeze, set UPDATING" and "set the freeze, read the phase" atomic. No torch
here: tensors arrive as memoryviews (`StateSource`).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
import types
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from lastwords import clock, errors, threads
from lastwords.clock import Clock, mono_s
from lastwords.core_events import Log, Tick
from lastwords.errors import UnavailableError, named
from lastwords.processor import departure as ways_out
from lastwords.processor import events
from lastwords.processor.black_box import BlackBox
from lastwords.processor.core import ENDED_PHASES, ProcessorCore
from lastwords.processor.departure import Departure
from lastwords.processor.saver import SaverSpec, Writers
from lastwords.processor.signals import SignalGuard
from lastwords.vocabulary import (
    NO_SCHEDULE,
    Exit,
    Goodbye,
    Hello,
    Order,
    PeerDied,
    Phase,
    Refused,
    Report,
    Schedule,
    Settled,
    Stack,
    Stand,
    Status,
)

if TYPE_CHECKING:  # it imports gRPC, which a fork cannot take over
    from lastwords.processor.session import Session

STATUS_INTERVAL_S = 0.1
"""Status is coalesced to ten reports a second: every step is seen, no step costs a round trip."""

PARK_POLL_S = 0.5
"""A parked thread looks again this often even if nobody wakes it; a wake-up is an optimisation, not a need."""

GATE_PAUSE_S = 0.00005
"""Between two looks at the gate. A sleep, however short, gives the processor to the peers that are waited for: on 2
cores spinning was up to a hundred times slower, sleeping as fast as a blocking wait. What the kernel makes of it is
0.1 ms."""


# The thread that keeps a rank's time: ticks for its core, its newest status. It outlives whatever goes wrong in it.

_log = logging.getLogger(__name__)


def keep_up(beat: Callable[[], bool], rank: int) -> None:
    """Call `beat` until it says False. What it raises is logged, once where it comes again and again."""
    said = ""
    while True:
        try:
            if not beat():
                return
        except Exception as error:  # outermost loop of this thread: without ticks its rank would wait for ever
            if named(error) != said:
                _log.exception("the pulse of rank %d failed, and goes on", rank)
            said = named(error)
            time.sleep(STATUS_INTERVAL_S)


# What a step takes a rank by itself, measured where it meets the others: two looks at the clock in each step.
#
# A rank that is slower than the others never waits for them, so between two ends of a step all ranks take equally
# long. They differ in the time from where they have all met to where they meet again: the last gradient that is ready
# before it is reduced, or the gate.

STEPS = 32
"""So many of the newest steps count. With the median of them a pause now and then, such as a validation, counts for
nothing, and neither do the first steps, which may compile kernels."""

STEPS_MIN = 8
"""Of fewer steps nothing is said."""


class StepWork:
    """Of one rank. `arrive` and `go_on` are for the thread that trains (or its backward pass), `seconds` for any."""

    def __init__(self, clock: Clock = mono_s) -> None:
        self._clock = clock
        self._newest_s: deque[float] = deque(maxlen=STEPS)
        self._since_s: float | None = None
        self._arrived_s: float | None = None

    def arrive(self) -> None:
        """From here on this rank waits for the others; of several arrivals in a step the last one counts."""
        self._arrived_s = self._clock()

    def go_on(self) -> None:
        """All ranks have arrived. A step without an arrival is left out."""
        since_s, arrived_s, self._since_s, self._arrived_s = self._since_s, self._arrived_s, self._clock(), None
        if since_s is not None and arrived_s is not None:
            self._newest_s.append(arrived_s - since_s)

    @property
    def seconds(self) -> float:
        """The median of the newest steps; 0.0: not known.

        >>> now_s = iter(range(100))
        >>> work = StepWork(lambda: next(now_s))
        >>> for _ in range(STEPS_MIN):
        ...     work.arrive(), work.go_on()
        >>> work.seconds
        0.0
        >>> work.arrive(), work.go_on()
        >>> work.seconds
        1.0
        """
        newest_s = sorted(self._newest_s.copy())  # one call, during which no other thread appends
        return float(newest_s[len(newest_s) // 2]) if len(newest_s) >= STEPS_MIN else 0.0


# Where a training thread stands still: its Python frames say so, looked at from another thread and only then.
#
# A thread that is in a backward pass or in a collective for seconds may wait for a rank that never comes. Which line
# of the user's that is, no one else can tell.

STILL_S = 3.0
"""So long a thread may take for a phase of its step before anybody looks where it is; most steps are shorter."""

LOOK_S = 1.0

_COLLECTIVES = ("torch.distributed", "torch.nn.parallel.distributed")
_BACKWARD = "torch.autograd.graph"
_OTHERS = sys.stdlib_module_names | {"torch", "lastwords"}

STACK_FRAMES = 64
"""So many of the innermost frames are shown; a model of nested modules has some three for each level."""


class Whereabouts:
    """Of one thread. Not thread-safe: for the one thread that looks."""

    def __init__(self, thread_id: int) -> None:
        self._thread_id = thread_id
        self._stand: Stand | None = None
        self._look_at_s = 0.0
        self._found = ("", "")

    def places(self, stand: Stand, now_s: float) -> tuple[str, str]:
        """(place, "") of a thread that has been in a collective or a backward pass for `STILL_S` or longer.

        ("", place) if it has been in anything else, ("", "") if it moves. A place is a file and a line of the user's.
        """
        if stand != self._stand:
            self._stand, self._look_at_s, self._found = stand, now_s + STILL_S, ("", "")
        elif now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            self._found = places_of(sys._current_frames().get(self._thread_id))
        return self._found

    def show(self, text: str, rank: int, generation: int, report: Callable[[Stack], None]) -> threading.Thread | None:
        """Report the thread's stack, and log `text` and the stack below it; from a thread of its own.

        That one waits where the thread has stopped inside the log. Without one, the stack is only reported.
        """

        def tell() -> None:
            try:
                report(Stack(rank, generation, stack := self.stack()))
                _log.warning("%s\n%s", text, stack)
            except Exception:  # the outermost frame of this thread: it only tells people
                _log.exception("the stack of rank %d could not be told", rank)

        try:
            return threads.start(tell, name="lastwords-stack")
        except UnavailableError:
            report(Stack(rank, generation, self.stack()))
            return None

    def stack(self) -> str:
        """The thread's Python frames, the innermost last, each with its line."""
        frame = sys._current_frames().get(self._thread_id)
        if frame is None:
            return "(the thread has ended)"
        return "".join(traceback.format_list(traceback.extract_stack(frame)[-STACK_FRAMES:])).rstrip()


def places_of(frame: types.FrameType | None) -> tuple[str, str]:
    """The innermost line of the user's that `frame` has come from, as in `Whereabouts.places`."""
    waits = False
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(_COLLECTIVES) or module == _BACKWARD:
            waits = True
        elif module.split(".", 1)[0] not in _OTHERS:
            place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            return (place, "") if waits else ("", place)
        frame = frame.f_back
    return "", ""


class Agent:
    """Holds a rank's core and everything that moves around it. Made by the training thread.

    Calls marked *training thread* must come from the thread that trains. A call that parks returns when the rank may go
    on, and raises `SystemExit` with a documented code where the incident ended in `Exit`.
    """

    def __init__(
        self,
        core: ProcessorCore,
        hello: Callable[[Stand], Hello],
        saver: SaverSpec,
        departure: Departure,
        settled: Callable[[Settled], Settled] = lambda report: report,
        forsake_copies: Callable[[], None] = lambda: None,
    ) -> None:
        self._core, self._hello, self._departure = core, hello, departure
        self.signals: SignalGuard | None = None
        self._settled, self._forsake_copies = settled, forsake_copies
        self._lock = threading.Lock()  # what the condition holds, without the condition's Python-level overhead
        self._condition = threading.Condition(self._lock)
        self._box: BlackBox | None = None
        self._session: Session | None = None
        self._writers, self._own_time = Writers(saver, self._handle), clock.OwnTime()
        self._closed, self._in_our_hands = False, 0
        self._whereabouts, self.work = Whereabouts(threading.get_ident()), StepWork()
        self._status_sent: Status | None = None
        self._goodbye: Goodbye | None = None  # to be said once nothing is written here any more
        self._pulse: threading.Thread | None = None

    # ------------------------------------------------------------------ life

    def start(self, session: Session) -> None:
        """Begin to stream status; `session` has been created with this agent's callbacks. UnavailableError."""
        self._session = session
        self._pulse = threads.start_patiently(keep_up, self._beat, self._core.rank, name="lastwords-pulse")

    def close(self, timeout_s: float = 2.0) -> None:
        """End the threads and the session; the incident, if any, is over. Idempotent, any thread."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self._condition.notify_all()
        if self._session is not None:
            if self._goodbye is not None:
                self._writers.wait(timeout_s)
                with self._condition:
                    self._say_goodbye()
            self._session.close(timeout_s)
        if self._pulse is not None and threading.current_thread() is not self._pulse:
            self._pulse.join(timeout_s)

    def write_stands_to(self, box: BlackBox) -> None:
        """From now on keep the newest stand in the black box, where it survives this process."""
        with self._condition:
            self._box = box
            self._settle_calls()

    def hello(self) -> Hello:
        """First report of every session (called by the session's thread)."""
        with self._condition:
            return self._hello(self._core.stand)

    # ------------------------------------------------------------------ training thread

    @property
    def stand(self) -> Stand:
        return self._core.stand

    @property
    def phase(self) -> Phase:
        return self._core.phase

    @property
    def incident_open(self) -> bool:
        """True while this rank is frozen or has been told to leave."""
        return self._core.frozen or self._departure.decided

    def begin_loop(self, steps_per_epoch: int, epochs: int, start_step: int, schedule: Schedule = NO_SCHEDULE) -> None:
        """Agree with all ranks on the loop's shape; parks until every rank is there.

        Raises ConfigError if the ranks disagree, SystemExit if an incident ends the job meanwhile.
        """
        with self._condition:
            self._core.begin_loop(steps_per_epoch, epochs, start_step, schedule)
            self._settle_calls()
        self._park(lambda: self._core.loop_open)

    def copy_if_due(self) -> None:
        """A step has ended, and nothing of it is to move on before its state is copied, if a checkpoint is due."""
        if (order := self._core.copy_due) is None:
            return
        problem = self._writers.copy(order, self._core.stand)
        with self._lock:
            if problem:
                self._core.mark_not_copied(order, problem)
            else:
                self._core.mark_copied(order)
            self._settle_calls()

    def want_save(self) -> None:
        """A checkpoint of the next step's end is wanted; any thread."""
        self._move(self._core.want_save)

    def ready(self) -> None:
        with self._lock:
            self._core.mark_ready()
            self._settle_calls()

    def begin_update(self) -> None:
        """The gradients are final, and the optimizer is about to write. Parks during an incident."""
        core = self._core
        with self._lock:
            core.mark_ready()
            may_write = core.try_update()
            self._settle_calls()
        if not may_write:
            self._park(core.try_update)

    def skip_update(self) -> None:
        self._move(self._core.mark_skipped)

    def pass_gate(self, passed: Callable[[], bool]) -> None:
        """After `ready` or `skip_update`: wait until the gate, which this rank has entered, is passed.

        passed: whether every rank has entered it; GateFailedError if that can never be any more. Looks at it now and
        then instead of blocking in it, so that an incident can have this thread: it parks then. Returns also if this
        rank is told to proceed; then somebody else has passed, so all have entered.
        """
        core = self._core
        while True:
            while not (core.frozen or self._departure.decided):
                try:
                    if passed():
                        return
                except errors.GateFailedError as error:
                    with self._condition:
                        core.mark_gate_failed(str(error))
                        self._settle_calls()
                    self._park(lambda: core.may_proceed)
                    return
                time.sleep(GATE_PAUSE_S)
            self._park(lambda: core.may_proceed or not core.frozen)
            if core.may_proceed:
                return

    def end_update(self) -> None:
        with self._lock:
            self._core.mark_updated()
            self._settle_calls()

    def tear_update(self) -> None:
        self._move(self._core.mark_torn)

    def corrupt(self, *why: str) -> None:
        """This rank's weights are wrong: the other holders' bytes say so, or `why` does."""
        self._forsake_copies()
        self._move(self._core.mark_corrupt, *why)

    def end_step(self, commit: Callable[[int], None]) -> int:
        """The step is over; `commit(step)` captures what may move on before it counts as ended. Returns its number.

        Parks during an incident: a rank that has settled neither captures nor counts any more."""
        core = self._core
        while not core.may_end_step or core.phase is Phase.COMPUTING:
            with self._condition:
                if core.may_end_step:
                    core.mark_skipped()  # a freeze from here on finds this: copies of the step before are replaced
                    self._settle_calls()
                    break
                core.try_end_step()  # says SKIPPED where there was no update, and parks
                self._settle_calls()
            self._park(lambda: core.may_end_step)
        commit(step := core.ended_step + 1)
        with self._lock:
            ended = core.try_end_step()
            self._settle_calls()
        if not ended:  # frozen between the two: the copy is there, and the step ends if training goes on
            self._park(core.try_end_step)
        elif core.frozen:
            self._park(lambda: not core.frozen)
        return step

    def between_steps(self, look: Callable[[], bool]) -> None:
        """In COMPUTING: `look()`, which says True, while this rank is not frozen, so that no writer reads meanwhile."""
        self._park(lambda: not self._core.frozen and look())

    def left(self) -> None:
        """The loop is over here; waits until all have left, and copies the last step if told to, or for an incident."""
        with self._condition:
            self._core.mark_left()
            self._settle_calls()
        while not self._core.released:
            self._park(lambda: self._core.released or self._core.mark_copying())
            self.copy_if_due()

    def raised(self, text: str, secondary: bool) -> None:
        """An exception leaves the loop. Returns when the incident is over, never raises."""
        with self._condition:
            if not self._departure.decided:
                self._core.mark_raised(text, secondary)
                self._settle_calls()
        self._wait_parked(lambda: False)

    # ------------------------------------------------------------------ other threads

    def on_order(self, order: Order) -> None:
        """Session thread: an order of the controller."""
        self._handle(events.FromController(order))

    def on_session_up(self) -> None:
        """Session thread: connected; the core repeats what it still owes, and the pulse the status."""
        self._status_sent = None
        self._handle(events.SessionUp())

    def on_session_down(self) -> None:
        """Session thread: the stream broke, which the session has told; it reconnects by itself."""
        self._handle(events.SessionDown())

    def on_session_refused(self, reason: str) -> None:
        """Session thread: the controller does not want this process (wrong token, other job)."""
        with self._condition:
            self._departure.refuse(reason)
            self._condition.notify_all()

    def on_signal(self, number: int) -> None:
        """Signal thread: this process was asked to stop."""
        self._move(self._core.mark_signalled, number)

    def on_peer_died(self, report: PeerDied) -> None:
        """A watcher's thread: a process of this host has died."""
        self._move(self._core.mark_peer_died, report)

    def report(self, report: Report) -> None:
        """Hand a report to the session, if there is one; any thread."""
        if self._session is not None:
            self._session.send(report)

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for `ready()`; False after `timeout_s`. Raises ConfigError if refused, SystemExit if told to leave."""
        deadline_mono_s = clock.mono_s() + timeout_s
        with self._condition:
            while not ready() and not self._departure.decided and (left_s := deadline_mono_s - clock.mono_s()) > 0:
                self._condition.wait(min(left_s, PARK_POLL_S))
        if not (is_ready := ready()):
            self._leave_if_told()
        return is_ready

    # ------------------------------------------------------------------ inside

    def _handle(self, event: events.Event) -> None:
        with self._condition:
            frozen = self._core.frozen
            self._core.handle(event, self._own_time.at(clock.mono_s()))
            if self.signals is not None and self._core.frozen is not frozen:
                # While an incident is on, no handler may raise in the training thread.
                self.signals.begin_incident() if self._core.frozen else self.signals.end_incident()
            self._settle_calls()
            self._condition.notify_all()

    def _move(self, move: Callable[..., object], *arguments: object) -> None:
        with self._condition:
            move(*arguments)
            self._settle_calls()

    def _settle_calls(self) -> None:
        """With the lock: write the stand where it survives, and carry out what the core wants."""
        core = self._core
        if self._box is not None:
            under_way = core.phase not in ENDED_PHASES  # `core.step`, without a call: this is done in every step
            self._box.set_stand(core.phase, core.ended_step + under_way)
        while core.effects:
            for effect in core.take_effects():
                self._carry_out(effect)

    def _carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.SendReport(Goodbye() as report):
                self._goodbye = report
                self._say_goodbye()
            case events.SendReport(Settled() as report):
                self.report(self._settled(report))
            case events.SendReport(report):
                self.report(report)
            case events.SayHello():
                self.report(self._hello(self._core.stand))
            case events.StartSave(order):
                if failed := self._writers.start(order, self._core.settled_stand):
                    self._core.handle(failed, self._own_time.at(clock.mono_s()))
            case events.CancelSave(incident):
                self._writers.cancel(incident)
            case events.Leave(order, reason):
                self._leave(order, reason)
            case events.PassOn(number) if self.signals is not None:
                self.signals.pass_on(number)
            case Log(level, text):
                _log.log(level, "%s", text)
            case events.ShowStack(text):
                self._whereabouts.show(text, self._core.rank, self._core.generation, self.report)
            case events.Wake() | events.Released():
                self._condition.notify_all()

    def _say_goodbye(self) -> None:
        """Once nothing is being written: after the last goodbye the controller removes unfinished files, and ends."""
        if self._goodbye is not None and not self._writers.busy:
            goodbye, self._goodbye = self._goodbye, None
            self.report(goodbye)

    def _leave(self, order: Exit | Refused | None, reason: str) -> None:
        """With the lock: this process has to end. Parked, the training thread ends it; stuck, this thread does."""
        if order is None:
            return self._departure.decide_alone(reason, self._end_from_here)
        if isinstance(order, Refused):
            self._departure.refuse(order.reason)
        else:
            self._departure.decide(ways_out.verdict_of(self._core.rank, order, healed=self._departure.healed))
        self._condition.notify_all()
        if not self._in_our_hands and not isinstance(order, Refused):
            threads.run(self._end_from_here, name="lastwords-end")

    def _end_from_here(self) -> None:
        try:
            if self._ends_without_us():
                return
            self.close(timeout_s=1.0)
        except Exception:  # the outermost frame of this thread: the process ends all the same
            _log.exception("leaving rank %d's loop failed", self._core.rank)
        self._departure.end_now()

    def _ends_without_us(self) -> bool:
        """The training thread sits in the user's code or in a collective; it gets a moment to come by by itself."""
        with self._condition:
            come_by_s = ways_out.come_by_s(self._departure.verdict, asked_to_stop=self._core.asked_to_stop)
            asleep_s = ways_out.ASLEEP_S if self._departure.healed else 0.0
            wait_for = self._condition.wait_for
            if ways_out.wait_out(lambda s: wait_for(lambda: self._in_our_hands > 0, s), come_by_s, asleep_s):
                return True
        if not self._core.steps_done:
            return False
        if self.signals is not None:
            self.signals.hand_back()  # it may be writing the user's last files, or hang: that is for its user to end
        self._departure.announce(ends=False)
        return True

    def _park(self, go_on: Callable[[], bool]) -> None:
        """Training thread: wait until `go_on()` (called with the lock); leave if this process has to end."""
        if not self._wait_parked(go_on):
            self._leave_if_told()

    def _wait_parked(self, go_on: Callable[[], bool]) -> bool:
        """True once `go_on()`, False once this process has to end."""
        with self._condition:
            self._in_our_hands += 1
            if self._departure.decided:
                self._condition.notify_all()
            try:
                while not self._departure.decided:
                    if go_on():
                        self._settle_calls()
                        return True
                    self._settle_calls()
                    self._condition.wait(PARK_POLL_S)
            finally:
                if not self._departure.decided:
                    self._in_our_hands -= 1
        return False

    def _leave_if_told(self) -> None:
        if self._departure.decided:
            self.close(timeout_s=1.0)
            self._departure.leave()

    def _beat(self) -> bool:
        """Pulse thread: ticks for the core, and the newest status at most ten times a second. False at the end."""
        core = self._core
        with self._condition:
            if self._closed:
                return False
            now_s, due_s = self._own_time.at(clock.mono_s()), core.deadline_s
            if due_s is not None and due_s <= now_s:
                core.handle(Tick(), now_s)
                self._settle_calls()
            self._say_goodbye()
            stand, asks = core.stand, core.asks
        if self._session is not None:
            self._session.ask_if_silent(asks, now_s)
        status = Status(core.rank, core.generation, stand, *self._whereabouts.places(stand, now_s), self.work.seconds)
        if status != self._status_sent:
            self._status_sent = status
            self.report(status)
        with self._condition:
            if not self._closed:
                due_s, latest_s = core.deadline_s, now_s + STATUS_INTERVAL_S
                self._condition.wait(max(min(latest_s, latest_s if due_s is None else due_s) - now_s, 0.001))
        return True
