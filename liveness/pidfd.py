"""Deaths seen through pidfds: slower than a robust mutex (the memory is freed first), but no file is needed.

One thread polls any number of processes. See pidfd_open(2); Linux >= 5.3.
"""

from __future__ import annotations

import heapq
import logging
import os
import select
import threading
from collections.abc import Callable

from lastwords import clock, threads
from lastwords.errors import UnavailableError
from lastwords.liveness.process_id import is_alive, open_pidfd
from lastwords.vocabulary import ProcessId

_log = logging.getLogger(__name__)


class PidWatcher:
    """Watches processes of this host. Methods are for any thread; call-backs come from the watcher's own.

    Raises UnavailableError where there are no descriptors for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[int, Callable[[], None]]] = {}  # token -> pidfd (-1: dead already), call-back
        self._newest_token = 0
        self._later: list[tuple[float, int, Callable[[], None]]] = []  # a heap: due, number, what
        self._later_count = 0
        self._stopping = False
        try:
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            try:
                self._poll = select.epoll()
                self._poll.register(self._wake_fd, select.EPOLLIN)
            except OSError:
                os.close(self._wake_fd)
                raise
        except OSError as error:
            raise UnavailableError(
                f"cannot watch processes of this host: {error.strerror}; raise the limit on open files (ulimit -n)"
            ) from error
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, which `add` does too; from then on `later` works. UnavailableError, after some seconds."""
        with self._lock:
            self._start_thread(threads.start_patiently)

    def add(self, process: ProcessId, on_end: Callable[[], None]) -> int:
        """Call `on_end` once when `process` ends, or at once if it already has; returns a token for `remove`.

        Raises UnavailableError where the kernel has no pidfds or does not allow them, or is short of something.
        """
        try:
            fd = open_pidfd(process.pid)
        except ProcessLookupError:
            fd = -1
        if fd >= 0 and not is_alive(process):  # looked at after the open: from here on the pid cannot be reused
            os.close(fd)
            fd = -1
        with self._lock:
            assert not self._stopping, "a stopped watcher takes no more processes"
            try:
                if fd >= 0:
                    self._poll.register(fd, select.EPOLLIN)
                self._start_thread()
            except (OSError, UnavailableError) as error:
                if fd >= 0:
                    os.close(fd)
                why = f"epoll: {error.strerror}" if isinstance(error, OSError) else str(error)
                raise UnavailableError(f"cannot watch process {process.pid}: {why}") from error
            self._newest_token += 1
            token = self._newest_token
            self._watched[token] = (fd, on_end)
        if fd < 0:
            self._wake()
        return token

    def later(self, pause_s: float, what: Callable[[], None]) -> None:
        """Call `what` after `pause_s`, in the watcher's thread, unless it is stopped before.

        Where a thread could not be had for a watch there is none for a timer either.
        """
        with self._lock:
            if self._stopping:
                return
            self._later_count += 1
            heapq.heappush(self._later, (clock.mono_s() + pause_s, self._later_count, what))
        self._wake()

    def remove(self, token: int) -> None:
        """Forget a process; harmless if it has been reported or removed before."""
        with self._lock:
            entry = self._watched.pop(token, None)
            if entry is not None and entry[0] >= 0:
                self._poll.unregister(entry[0])
                os.close(entry[0])

    def stop(self) -> None:
        """Forget all processes and end the thread; on return no call-back runs (unless called from one)."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            thread = self._thread
        self._wake()
        if thread is None:
            self._close()
        elif thread is not threading.current_thread():
            thread.join()

    def _wake(self) -> None:
        with self._lock:
            if self._wake_fd < 0:
                return  # the thread was awake, has seen that it is to stop, and has tidied up
            try:
                os.eventfd_write(self._wake_fd, 1)
            except BlockingIOError:
                pass  # the counter is full: a wake-up is under way in any case

    def _run(self) -> None:
        try:
            while not self._stopping:
                ready = {fd for fd, _ in self._poll.poll(self._due_in_s())}
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                with self._lock:
                    ended = sorted(token for token, (fd, _) in self._watched.items() if fd < 0 or fd in ready)
                for token in ended:
                    with self._lock:
                        entry = self._watched.get(token)
                    if entry is None or self._stopping:
                        continue  # removed meanwhile
                    self.remove(token)
                    self._call(entry[1])
                while not self._stopping and (what := self._next_due()) is not None:
                    self._call(what)
        except Exception:  # the outermost frame of this thread
            _log.exception("watching processes failed")
        finally:
            self._close()

    def _start_thread(self, start: Callable[..., threading.Thread] = threads.start) -> None:
        """With the lock."""
        if self._thread is None:
            self._thread = start(self._run, name="lastwords-pidfd")

    def _call(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception:  # outermost for this call-back: the other processes are watched all the same
            _log.exception("what follows from the end of a process failed")

    def _due_in_s(self) -> float | None:
        with self._lock:
            return max(0.0, self._later[0][0] - clock.mono_s()) if self._later else None

    def _next_due(self) -> Callable[[], None] | None:
        with self._lock:
            due = self._later and self._later[0][0] <= clock.mono_s()
            return heapq.heappop(self._later)[2] if due else None

    def _close(self) -> None:
        with self._lock:
            for fd, _ in self._watched.values():
                if fd >= 0:
                    os.close(fd)
            self._watched.clear()
            self._later.clear()
            self._poll.close()
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1
