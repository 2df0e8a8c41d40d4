"""Signals that may neither tear an update nor an incident.

SIGTERM and SIGINT ask the job to stop; that is an incident like any other. So do SIGHUP (a closed terminal), SIGQUIT
(Ctrl-\\), SIGUSR2 and SIGXCPU (notices of batch systems) where nobody handles them: each would end the process, and
launchers pass the first two on to all ranks at once. Stop signals are reported to the agent through
`signal.set_wakeup_fd`, from a thread of its own: C code writes the wake-up byte whatever the main thread is doing,
while a Python-level handler waits until the main thread leaves its collective, which may be never.

The others belong to their owners: torch's DataLoader sets a handler for SIGCHLD that raises in the main thread when a
worker has died, even in the middle of `optimizer.step()`, and a user's own for SIGUSR1 (Slurm's notice before a time
limit, on all ranks at once) may raise as well. Whatever Python handler is set (usually after ours) is wrapped: it runs
at once outside an update, later when it arrives inside one, and not at all once an incident is on, when dead workers
are nothing new (a launcher kills them together with their trainer). A handler in C (faulthandler's) is left alone, and
so is what is ignored (`nohup`). SIGUSR1 that nobody handles asks for a checkpoint.

Forked children inherit handlers and wake-up fd; without the hook below the SIGTERM of a data-loader worker would be
reported as one of its parent's.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed does not list it
import contextlib
import ctypes
import logging
import os
import signal
import socket
import threading
import types
import weakref
from collections.abc import Callable
from operator import is_
from typing import Any

from lastwords import threads
from lastwords.errors import UnavailableError, is_shortage

_log = logging.getLogger(__name__)

_getsignal: Callable[[int], Any] = _signal.getsignal  # signal.getsignal makes an enum of it: 2 us instead of 0.05
ASKS = signal.SIGUSR1
"""Asks for a checkpoint now."""
_STOPS = (signal.SIGINT, signal.SIGTERM)
UNHANDLED_STOPS = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2, signal.SIGXCPU)
"""The same as long as nobody handles them. Others whose default ends a process are not sent to ranks in practice: a
script that sets a timer (SIGALRM, SIGVTALRM, SIGPROF) to end itself means it, and a fault cannot be put off."""

_DEFERRED = (signal.SIGCHLD, signal.SIGUSR1, signal.SIGALRM, *UNHANDLED_STOPS)
_HANDLED = 0x80
"""Added to a signal's number in the byte by which its handler wakes the guard's thread. C code writes the number."""

_Handler = Callable[[int, types.FrameType | None], Any]


class SignalGuard:
    """Takes stop signals, and puts off the handlers of others, from `install` to `uninstall`.

    Made for the main thread, where handlers run.

    on_signal: called in the guard's own thread, once for each stop signal.
    on_ask: called there for each SIGUSR1, as long as nobody else handles it; None: it is left alone.

    A stop signal that is ignored (SIG_IGN, as for a job in the background) stays ignored. The first SIGINT only
    reports; the second runs the handler that was there before (KeyboardInterrupt), after the update if one is under
    way; every further one at once.
    """

    def __init__(self, on_signal: Callable[[int], None], *, on_ask: Callable[[], None] | None = None) -> None:
        self._on_signal = on_signal
        self._on_ask = on_ask
        self._updating = False
        self._incident = False
        self._stop_requested = False
        self._installed = False
        self._reasons: list[str] = []
        self._ours: dict[int, _Handler] = {}
        self._before: dict[int, Any] = {}
        self._numbers: tuple[int, ...] = ()  # signals that are looked at before each update
        self._handlers: tuple[Any, ...] = ()  # what is set for them, if nobody else has set anything since
        self._address = 0  # of the C function by which Python handles any signal
        self._pending: dict[int, _Handler] = {}
        self._interrupts = 0
        self._asks: _Handler = lambda number, frame: None  # a function of this guard's; its thread reads the signal
        self._reported: set[int] = set()
        self._passing: set[int] = set()  # reported, and now on their own way
        self._handed_back = False
        self._outer_wakeup_fd = -1
        self._pid = os.getpid()
        self._write_end: socket.socket | None = None
        self._read_end: socket.socket | None = None
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ life

    def install(self) -> None:
        """Take the signals; harmless if done before. Where that is impossible a warning says why, and nothing raises.

        Only the main thread of a process may set handlers. UnavailableError without a thread or a descriptor.
        """
        if self._installed:
            return
        if threading.current_thread() is not threading.main_thread():
            self._degrade("training does not run in the main thread, so no signal handler can be set")
            return
        self._pid = os.getpid()
        try:
            read_end, write_end = socket.socketpair()
        except OSError as error:
            if not is_shortage(error):
                self._degrade(f"no pair of sockets can be had ({error.strerror})")
                return
            raise UnavailableError(
                f"signals cannot be handled: {error.strerror}; raise the limit on open files (ulimit -n), or close some"
            ) from error
        try:
            self._thread = threads.start_patiently(self._read_signals, read_end, name="lastwords-signals")
        except UnavailableError:
            read_end.close()
            write_end.close()
            raise
        self._read_end, self._write_end = read_end, write_end
        write_end.setblocking(False)
        self._installed = True
        for number in dict.fromkeys((*_STOPS, *UNHANDLED_STOPS, *_DEFERRED)):
            self._take(number)
        if self._on_ask is not None and signal.getsignal(ASKS) is signal.SIG_DFL and not _handled_in_c(ASKS):
            self._set(ASKS, self._asks, signal.SIG_DFL)
        self._outer_wakeup_fd = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
        _guards.add(self)

    def uninstall(self) -> None:
        """Give every signal back to whom it was taken from; harmless if nothing is installed.

        A handler that was set over ours meanwhile stays; what it calls of ours only passes on.
        """
        if not self._installed:
            return
        if threading.current_thread() is not threading.main_thread():
            self._degrade("uninstall was not called in the main thread, so signal handlers stay")
            return
        _guards.discard(self)
        self._restore()
        read_end, write_end, thread = self._read_end, self._write_end, self._thread
        self._read_end = self._write_end = self._thread = None
        if write_end is not None:
            with contextlib.suppress(OSError):
                write_end.shutdown(socket.SHUT_WR)  # the reader sees the end though a child may hold a copy
            write_end.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5.0)
        if read_end is not None:
            read_end.close()

    # ------------------------------------------------------------------ hot path (training thread)

    def refresh(self) -> None:
        """Take back what others have set since."""
        for number, seen in zip(self._numbers, self._handlers, strict=True):
            if _getsignal(number) is not seen:
                self._take(number)

    def begin_update(self) -> None:
        """`refresh`; and from here on no handler runs that could raise."""
        if not all(map(is_, map(_getsignal, self._numbers), self._handlers)):
            self.refresh()
        self._updating = True

    def end_update(self) -> bool:
        """The update is whole. True if `run_deferred` should follow, at a place where an exception does no harm."""
        self._updating = False
        return bool(self._pending)

    @property
    def deferring(self) -> bool:
        """Whether handlers of others have to wait now."""
        return self._updating or self._incident or self._stop_requested

    def run_deferred(self) -> None:
        """Run the handlers that had to wait, in the training thread; they may raise. Nothing while `deferring`."""
        if self._pending and not self._updating:
            for number in sorted(self._pending):
                # A second Ctrl-C is meant for the incident, too.
                if number == signal.SIGINT or not self.deferring:
                    self._pending.pop(number)(number, None)

    # ------------------------------------------------------------------ incident (any thread)

    def begin_incident(self) -> None:
        """From here on handlers of others wait."""
        self._incident = True

    def end_incident(self) -> None:
        """A false alarm: training goes on. `run_deferred` catches up."""
        self._incident = False

    # ------------------------------------------------------------------ without a controller (any thread)

    def hand_back(self) -> None:
        """From here on stop signals do what they would do without us, so that this process can be ended by them."""
        self._handed_back = True
        for number in filter(self._is_stop, (*_STOPS, *UNHANDLED_STOPS)):
            self._default_if_it_was(number)

    def pass_on(self, number: int) -> None:
        """Let a stop signal that was reported do what it would have done without us; the next one is reported again."""
        _log.warning(
            ("signal %d is handled as without lastwords: there is no controller to save a checkpoint"),
            number,
        )
        self._passing.add(number)
        self._reported.discard(number)
        self._stop_requested = False
        self._default_if_it_was(number)
        os.kill(self._pid, number)

    def _default_if_it_was(self, number: int) -> None:
        if self._before.get(number) is signal.SIG_DFL:
            # Not signal.signal: that is for the main thread, which may sit in a collective that never returns.
            ctypes.CDLL(None).signal(number, None)

    # ------------------------------------------------------------------ handlers

    def _take(self, number: int) -> None:
        """Put ours over the handler that is set now."""
        before = signal.getsignal(number)
        unhandled = before is signal.SIG_DFL
        stops = number in _STOPS or (number in UNHANDLED_STOPS and unhandled)
        if stops and (before is None or (unhandled and _handled_in_c(number))):
            name = signal.Signals(number).name
            self._degrade(f"{name} is left to the handler that C code (faulthandler, say) has set, and saves nothing")
            return self._seen(number)
        if not stops and not callable(before):
            return self._seen(number)  # nothing of Python's that could raise: looked at again before each update
        if before is signal.SIG_IGN:
            return self._seen(number)
        if number in self._ours:
            _log.info("the handler of %s was replaced by %r; lastwords calls it", signal.Signals(number).name, before)
        # Each time a new function: an older one may be called by the handler that it is put over.
        self._set(number, self._stop_handler(before) if stops else self._deferring_handler(before), before)

    def _set(self, number: int, ours: _Handler, before: Any) -> None:
        try:
            signal.signal(number, ours)
        except ValueError as error:
            return self._degrade(str(error))
        self._ours[number], self._before[number] = ours, before
        self._address = _address(number)
        self._seen(number)

    def _is_stop(self, number: int) -> bool:
        """Whether this signal asks the job to stop if it comes now. Any thread."""
        ours = self._ours.get(number)
        if number in _STOPS or ours is None:
            return ours is not None
        unhandled = number in UNHANDLED_STOPS and self._before.get(number) is signal.SIG_DFL
        return unhandled and _getsignal(number) is ours  # and nobody has set a handler since

    def _seen(self, number: int) -> None:
        """The handler that is set now is as it should be."""
        seen = {**dict(zip(self._numbers, self._handlers, strict=True)), number: _getsignal(number)}
        self._numbers, self._handlers = tuple(seen), tuple(seen.values())

    def _stop_handler(self, before: Any) -> _Handler:
        def on_stop(number: int, frame: types.FrameType | None) -> None:
            if not self._installed or self._handed_back or os.getpid() != self._pid or number in self._passing:
                self._passing.discard(number)
                _pass_on(before, number, frame)
                return
            self._stop_requested = True
            if number not in self._reported:
                self._nudge(number)  # somebody else (asyncio) may have taken the wake-up fd, or handles it and calls us
            if number == signal.SIGINT and callable(before):
                self._interrupts += 1
                if self._interrupts > 2 or (self._interrupts == 2 and not self._updating):
                    before(number, frame)
                elif self._interrupts == 2:
                    self._pending[number] = before

        return on_stop

    def _deferring_handler(self, before: Any) -> _Handler:
        def on_other(number: int, frame: types.FrameType | None) -> None:
            if self._installed and self.deferring and os.getpid() == self._pid:
                self._pending[number] = before
            else:
                before(number, frame)

        return on_other

    def _nudge(self, number: int) -> None:
        if self._write_end is not None:
            with contextlib.suppress(OSError):  # full: the reader is awake in any case
                self._write_end.send(bytes((number | _HANDLED,)))

    def _restore(self) -> None:
        """Handlers and wake-up fd as they were, as far as they still are ours."""
        self._installed = False
        for number, ours in self._ours.items():
            if _getsignal(number) is ours and _address(number) == self._address:  # C code may have set its own since
                signal.signal(number, self._before[number])
        self._ours.clear()
        self._before.clear()
        self._numbers = self._handlers = ()
        current = signal.set_wakeup_fd(-1)
        mine = self._write_end.fileno() if self._write_end is not None else -1
        back = self._outer_wakeup_fd if current == mine else current
        if back >= 0:
            with contextlib.suppress(OSError, ValueError):  # its owner has closed it
                signal.set_wakeup_fd(back)

    def _in_child(self) -> None:
        """After a fork, in the child: its signals are its own."""
        if self._installed:
            self._outer_wakeup_fd = -1
            self._restore()
        for end in (self._read_end, self._write_end):
            if end is not None:
                end.close()

    def _degrade(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.append(reason)
            _log.warning("not every signal is handled by lastwords: %s", reason)

    # ------------------------------------------------------------------ the guard's own thread

    def _read_signals(self, read_end: socket.socket) -> None:
        while True:
            try:
                numbers = read_end.recv(256)
            except OSError:
                return
            if not numbers:
                return
            outer = self._outer_wakeup_fd
            if outer >= 0:
                with contextlib.suppress(OSError):
                    os.write(outer, bytes(number for number in numbers if number < _HANDLED))
            for number in numbers:
                try:
                    self._tell(number)
                except Exception:  # the outermost frame of this thread
                    _log.exception("reporting signal %d failed", number)

    def _tell(self, byte: int) -> None:
        number = byte & ~_HANDLED
        if byte & _HANDLED or self._is_stop(number):
            if number not in self._reported:
                self._reported.add(number)
                self._on_signal(number)
        elif number == ASKS and self._on_ask is not None and _getsignal(number) is self._asks:
            self._on_ask()


def _handled_in_c(number: int) -> bool:
    """Whether there is a handler that Python, which says SIG_DFL, does not know of: faulthandler's, say."""
    return _address(number) not in (signal.SIG_DFL, signal.SIG_IGN)


def _address(number: int) -> int:
    """Of the C function that handles a signal, or SIG_DFL or SIG_IGN. It is the first field of struct sigaction."""
    action = (ctypes.c_void_p * 64)()
    ctypes.CDLL(None).sigaction(number, None, action)
    return action[0] or 0


_guards: weakref.WeakSet[SignalGuard] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for guard in list(_guards):
        guard._in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _pass_on(before: Any, number: int, frame: types.FrameType | None) -> None:
    """What would have happened without us."""
    if callable(before):
        before(number, frame)
    elif before is signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
