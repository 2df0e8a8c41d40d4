"""Threads where the system may have none left: a shortage, which passes, and a few in reserve for what cannot wait.

A thread cannot be started where its user, or the cgroup, has as many as it may (`ulimit -u`, `pids.max`), or memory
is short. Python says RuntimeError then, which nobody can tell from a mistake; here it is an UnavailableError that
`errors.is_shortage` knows.

What an incident needs cannot wait for a shortage to end: a rank that cannot start the thread that ends it would hang
in a collective for ever. So threads are kept in reserve from the start of the job on, where nothing is lost yet.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator

from lastwords.errors import UnavailableError

_log = logging.getLogger(__name__)

_PAUSES_S = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Before further tries of who may wait: 8 s."""

_NO_THREAD = "can't start new thread"
"""CPython's text. Another RuntimeError says that the interpreter shuts down, which does not pass."""


@contextlib.contextmanager
def starting(name: str) -> Iterator[None]:
    """Around whatever starts a thread. UnavailableError if there is none to be had now, which is a shortage."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and str(error) != _NO_THREAD:
            raise
        raise UnavailableError(
            f"the thread {name} cannot be started: the limit on threads is reached or memory is short; raise the limit "
            "(ulimit -u, or pids.max of the cgroup), or start fewer processes on this host"
        ) from OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def start(target: Callable[..., object], *args: object, name: str) -> threading.Thread:
    """A daemon thread that has started. UnavailableError if there is none to be had now."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    with starting(name):
        thread.start()
    return thread


def start_patiently(target: Callable[..., object], *args: object, name: str) -> threading.Thread:
    """As `start`, after pauses of 8 s at most. For the start of a job."""
    for pause_s in _PAUSES_S:
        try:
            return start(target, *args, name=name)
        except UnavailableError as error:
            _log.warning("trying again in %s s: %s", pause_s, error)
            time.sleep(pause_s)
    return start(target, *args, name=name)


# ---------------------------------------------------------------------- in reserve

_Task = Callable[[], object]


class _Waiting:
    """A thread without a task."""

    def __init__(self, of: _Reserve) -> None:
        self._of = of
        self.task: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        """None: no more will come."""
        self.thread = start_patiently(self._run, name="lastwords-reserve")

    def _run(self) -> None:
        while (task := self.task.get()) is not None:
            try:
                task()
            except Exception:  # the outermost frame of this thread
                _log.exception("a task failed")
            del task
            if not self._of.is_idle(self):
                return


class _Reserve:
    """Threads that wait for a task that no other thread can be had for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Waiting] = []
        self._surplus = 0  # threads with a task, to end after it

    def add(self, count: int) -> None:
        for added in range(count):
            try:
                one = _Waiting(self)
            except UnavailableError:
                self.remove(added)
                raise
            with self._lock:
                self._idle.append(one)

    def remove(self, count: int) -> None:
        with self._lock:
            ended, self._idle = self._idle[:count], self._idle[count:]
            self._surplus += count - len(ended)
        for one in ended:
            one.task.put(None)
        for one in ended:
            one.thread.join()

    def give(self, task: _Task) -> bool:
        with self._lock:
            if not self._idle:
                return False
            self._idle.pop().task.put(task)
            return True

    def is_idle(self, one: _Waiting) -> bool:
        """It has done its task; False if it is not needed any more."""
        with self._lock:
            if self._surplus:
                self._surplus -= 1
                return False
            self._idle.append(one)
            return True


_reserve = _Reserve()


def reserve(count: int) -> None:
    """Keep so many more threads in reserve. UnavailableError, as `start_patiently`; then none of them is kept."""
    _reserve.add(count)


def release(count: int) -> None:
    """So many fewer; one that has a task ends after it."""
    _reserve.remove(count)


def run(target: Callable[[], object], *, name: str) -> None:
    """Start `target` in a thread of its own, or else in one in reserve. UnavailableError if there is none of those."""
    try:
        start(target, name=name)
    except UnavailableError:
        if not _reserve.give(target):
            raise


def _in_child() -> None:
    global _reserve
    _reserve = _Reserve()  # a forked child has none of its parent's threads


os.register_at_fork(after_in_child=_in_child)
