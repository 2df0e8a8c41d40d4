"""Threads of which only one runs at a time, in virtual time; who is next is for the dice to say.

Each simulated thread is a real one that waits for its baton, so shipped code runs in it as it is. It hands the baton
on wherever the shipped code takes a lock, waits, sleeps, or starts a thread: the places where the order can matter.
`Process` groups threads: they can be stopped (SIGSTOP) and killed together, at any of those places.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

SWITCHES_MAX = 3_000_000
"""Far more than a schedule needs: threads that never wait are a mistake of the simulation."""


class Gone(BaseException):
    """Raised in a thread whose process has ended; nothing of it may run on."""


class Process:
    """What dies and is stopped as one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lives = True
        self.stopped = False


class Task:
    """One simulated thread."""

    def __init__(self, process: Process, name: str, body: Callable[[], None]) -> None:
        self.process = process
        self.name = name
        self.body = body
        self.baton = threading.Semaphore(0)
        self.over = False
        self.waits = False  # for `wake`, or for its time
        self.woken = False
        self.ticket = 0
        self.joiners: list[Task] = []
        self.thread: threading.Thread | None = None


class Scheduler:
    """One simulation's threads and its clock."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.now_s = 0.0
        self.tasks: list[Task] = []
        self.crashed: list[str] = []
        self._ready: list[Task] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._current: Task | None = None
        self._main = threading.Semaphore(0)
        self._switches = 0
        self._horizon_s = 0.0

    # ------------------------------------------------------------------ from outside

    def spawn(self, process: Process, name: str, body: Callable[[], None]) -> Task:
        """A thread of `process` that can run from now on."""
        task = Task(process, name, body)
        task.thread = threading.Thread(target=self._run, args=(task,), name=f"{process.name}/{name}", daemon=True)
        self.tasks.append(task)
        self._ready.append(task)
        task.thread.start()
        return task

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action`, which must not wait, in `delay_s`."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), action))

    def run(self, horizon_s: float) -> bool:
        """Until nothing can happen any more (True), or until the horizon; then end what is left of all threads."""
        self._horizon_s = horizon_s
        first = self._pick()
        if first is not None:
            self._current = first
            first.baton.release()
            self._main.acquire()
        finished = not self._events
        for task in self.tasks:
            task.process.lives = False
        for task in self.tasks:
            if not task.over and task.thread is not None:
                task.baton.release()
                task.thread.join(5.0)
                assert not task.thread.is_alive(), f"{task.process.name}/{task.name} does not end"
        return finished

    # ------------------------------------------------------------------ from simulated threads

    @property
    def current(self) -> Task:
        if self._current is None:
            raise Gone  # all is over, and this thread still runs on to its next wait
        return self._current

    @property
    def inside(self) -> bool:
        """Whether this is called by a simulated thread whose process lives."""
        task = self._current
        return task is not None and task.thread is threading.current_thread() and task.process.lives

    @property
    def is_gone(self) -> bool:
        """Whether this is called by a simulated thread whose process has ended."""
        return any(task.thread is threading.current_thread() for task in self.tasks if not task.process.lives)

    def step(self) -> None:
        """Others may run here."""
        self._check()
        me = self.current
        self._ready.append(me)
        self._hand_on(me)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for `wake`; False if `timeout_s` is over first."""
        self._check()
        me = self.current
        me.waits, me.woken = True, False
        me.ticket += 1
        if timeout_s is not None:
            ticket = me.ticket
            self.after(max(0.0, timeout_s), lambda: self._ring(me, ticket))
        self._hand_on(me)
        return me.woken

    def wake(self, task: Task) -> None:
        """Let a waiting thread go on; from anywhere."""
        if task.waits and not task.over:
            task.waits, task.woken = False, True
            self._ready.append(task)

    def sleep(self, delay_s: float) -> None:
        """Virtual `time.sleep`."""
        self.wait(delay_s)

    def kill(self, process: Process) -> None:
        """No thread of this process runs on. Not for its own threads, see `leave`."""
        process.lives = False
        self._ready = [task for task in self._ready if task.process is not process]

    def leave(self) -> NoReturn:
        """End the process of the thread that calls this."""
        self.kill(self.current.process)
        raise Gone

    def _check(self) -> None:
        if not self.inside:
            raise Gone

    def _ring(self, task: Task, ticket: int) -> None:
        if task.waits and task.ticket == ticket and not task.over:
            task.waits = False
            self._ready.append(task)

    # ------------------------------------------------------------------ batons

    def _run(self, task: Task) -> None:
        task.baton.acquire()
        try:
            if task.process.lives:
                task.body()
        except Gone:
            pass
        except BaseException as error:  # outermost: a thread that crashes is a finding
            self.crashed.append(f"{task.process.name}/{task.name}: {type(error).__name__}: {error}")
        finally:
            task.over = True
            for joiner in task.joiners:
                self.wake(joiner)
            if self._current is task:
                self._hand_on(None)

    def _hand_on(self, me: Task | None) -> None:
        following = self._pick()
        if following is me and me is not None:
            return
        self._current = following
        if following is None:
            self._main.release()
        else:
            following.baton.release()
        if me is not None:
            me.baton.acquire()
            if not me.process.lives:
                raise Gone

    def _pick(self) -> Task | None:
        self._switches += 1
        if self._switches > SWITCHES_MAX:
            self.crashed.append("threads that never wait")
            return None
        while True:
            able = [task for task in self._ready if not task.process.stopped]
            if able:
                chosen = able[0] if len(able) == 1 else self.dice.choice(able)
                self._ready.remove(chosen)
                return chosen
            if not self._events or self._events[0][0] > self._horizon_s:
                return None
            at_s, _, action = heapq.heappop(self._events)
            self.now_s = max(self.now_s, at_s)
            try:
                action()
            except Exception as error:  # outermost: between the threads nobody else would see it
                self.crashed.append("".join(traceback.format_exception(error)))
                return None


# ---------------------------------------------------------------------- stand-ins for `threading`, `queue` and `time`


class Lock:
    """`threading.Lock`. Others may run before it is taken."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._taken = False
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        if not scheduler.inside:
            return True  # from an event, between the threads
        if scheduler.dice.random() < 0.3:
            scheduler.step()
        while self._taken:
            if not blocking:
                return False
            self._waiting.append(scheduler.current)
            scheduler.wait(None if timeout < 0 else timeout)
            if self._taken and timeout >= 0:
                return False
        self._taken = True
        return True

    def release(self) -> None:
        if not self._scheduler.inside:
            return
        self._taken = False
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._scheduler.wake(task)

    def locked(self) -> bool:
        return self._taken

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """`threading.Condition`."""

    def __init__(self, scheduler: Scheduler, lock: Lock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = lock if lock is not None else Lock(scheduler)
        self._waiting: list[Task] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def acquire(self, *arguments: Any) -> bool:
        return self._lock.acquire(*arguments)

    def release(self) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        self._waiting.append(self._scheduler.current)
        self._lock.release()
        woken = self._scheduler.wait(timeout)
        self._lock.acquire()
        return woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        end_s = None if timeout is None else self._scheduler.now_s + timeout
        while not predicate():
            left_s = None if end_s is None else end_s - self._scheduler.now_s
            if left_s is not None and left_s <= 0:
                return predicate()
            self.wait(left_s)
        return True

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._scheduler.wake(task)

    def notify(self, n: int = 1) -> None:
        self.notify_all()  # a wake-up too many is allowed


class Event:
    """`threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._condition = Condition(scheduler)
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._condition.notify_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            self._condition.wait_for(self.is_set, timeout)
        return self._set


class Thread:
    """`threading.Thread`, in the process of whoever makes it."""

    def __init__(
        self,
        scheduler: Scheduler,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        name: str = "",
        daemon: bool | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._call = lambda: target(*args, **(kwargs or {}))
        self.name = name
        self.daemon = daemon
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._scheduler.spawn(self._scheduler.current.process, self.name, self._body)
        self._scheduler.step()

    def _body(self) -> None:
        self._call()

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.over

    def join(self, timeout: float | None = None) -> None:
        end_s = None if timeout is None else self._scheduler.now_s + timeout
        while self.is_alive():
            left_s = None if end_s is None else end_s - self._scheduler.now_s
            if left_s is not None and left_s <= 0:
                return
            assert self._task is not None
            self._task.joiners.append(self._scheduler.current)
            self._scheduler.wait(left_s)

    @property
    def task(self) -> Task | None:
        return self._task


class Timer(Thread):
    """`threading.Timer`."""

    def __init__(
        self, scheduler: Scheduler, interval: float, function: Callable[..., object], args: tuple[Any, ...] = ()
    ) -> None:
        def later() -> None:
            scheduler.sleep(interval)
            function(*args)

        super().__init__(scheduler, later, name="timer")


class SimpleQueue:
    """`queue.SimpleQueue`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._condition = Condition(scheduler)
        self._items: list[Any] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._condition.notify_all()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._condition:
            self._condition.wait_for(lambda: bool(self._items), timeout)
            return self._items.pop(0)


class Threads:
    """Stands in for `lastwords.threads`: there always is one more."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def start(self, target: Callable[..., object], *args: object, name: str) -> Thread:
        thread = Thread(self._scheduler, target, args, name=name)
        thread.start()
        return thread

    start_patiently = start

    def run(self, target: Callable[[], object], *, name: str) -> None:
        self.start(target, name=name)


class Threading:
    """Stands in for the module `threading` where shipped code says `threading.Lock()` and so on."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._main = threading.main_thread()

    def Lock(self) -> Lock:
        return Lock(self._scheduler)

    RLock = Lock

    def Condition(self, lock: Lock | None = None) -> Condition:
        return Condition(self._scheduler, lock)

    def Event(self) -> Event:
        return Event(self._scheduler)

    def Thread(self, **arguments: Any) -> Thread:
        return Thread(self._scheduler, **arguments)

    def Timer(self, interval: float, function: Callable[..., object], args: Any = ()) -> Timer:
        return Timer(self._scheduler, interval, function, tuple(args))

    def current_thread(self) -> Task:
        return self._scheduler.current

    def get_ident(self) -> int:
        return id(self._scheduler.current)

    get_native_id = get_ident

    def main_thread(self) -> Any:
        return self._main


class Queue:
    """Stands in for the module `queue`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def SimpleQueue(self) -> SimpleQueue:
        return SimpleQueue(self._scheduler)


class Time:
    """Stands in for the module `time`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def sleep(self, delay_s: float) -> None:
        self._scheduler.sleep(max(delay_s, 0.001))  # polling of some ten microseconds would only cost real time

    def monotonic(self) -> float:
        return self._scheduler.now_s

    def time_ns(self) -> int:
        return int(self._scheduler.now_s * 1e9)
