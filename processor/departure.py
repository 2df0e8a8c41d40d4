"""How a trainer leaves when an incident is over: one line on stderr, a documented exit code, no hanging.

Where a launcher begins again with new processes, this one ends at once. Else, if the training thread is in our hands
(parked, or held in `__exit__`) it raises `SystemExit`, so that the user's `finally` blocks run; a bounded time later
the process ends anyway. If it sits in the user's code or in a collective that will never return, nothing in Python can
move it, and the process ends at once: everything worth keeping is on disk. `os._exit` is used because tearing down a
communicator with work in flight can block for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from lastwords import log_lines, threads
from lastwords.errors import ConfigError, UnavailableError
from lastwords.vocabulary import Exit, ExitKind

_log = logging.getLogger(__name__)

EXIT_SAVED = 75
"""Last words were published; start again with resume (sysexits' EX_TEMPFAIL: "try again")."""

EXIT_NOT_SAVED = 76
"""The incident is over and there is no new checkpoint; the line on stderr says why."""

THREADS = 4
"""That the end of an incident may need at a time: to decide, to look up how the job has ended, to flush, to end."""

UNWIND_S = 5.0
"""How long the user's `finally` blocks may take after an incident before the process ends regardless, unless they are
writing files."""


_BUFFERED = (io.TextIOBase, io.BufferedIOBase)
"""The first ones write into the others."""

USERS_S = 1.0
"""How long what the user has given to `TFTRegister.on_leave` may take, in all."""

FLUSH_S, FLUSHES_MAX = 2.0, 5
"""How long flushing may take at the end (a terminal or a log takes some milliseconds), and how many such periods it
may have while it makes progress, on a busy machine."""

LOOK_UP_S = 5.0
"""How long a rank without a controller looks for the record of how its job has ended; a file system may hang."""

COME_BY_S = 0.5
"""How long the training thread may take to come by after an incident before the process is ended without it. By then
the checkpoint is published, so this costs nothing but time; a rank in a dead collective never comes."""

ASLEEP_S = 0.1
"""The same where a launcher waits for this process's end, and all of its threads sleep: none writes a file of the
user's."""

WRITES_QUIET_S = 5.0
"""Whoever writes the user's files is not ended until so long after the last sign of it."""

WRITES_BYTES_MIN = 256 << 10
"""So much tells a writer in another thread from gRPC, which wakes its threads by writing a few bytes."""

COME_BY_UNSAVED_S = 3.0
"""The same where nothing was saved: mostly errors that all ranks have at once, at the start or in resume(), and each
should end with its own traceback rather than with the news of another one's. Not so where a signal ends the job."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What this rank was told at the end of an incident. is_cause: of that rank, or of nobody that is known.

    line: for people; the exit code is added when it is said. "": there is nothing that others do not say.
    """

    code: int
    line: str
    is_cause: bool
    step: int = 0
    """That is saved; 0: none that this rank knows of."""
    alone: bool = False
    """No controller has told it."""


def say(line: str) -> None:
    """Write `line` to stderr. Without a word where nobody takes it: the terminal is closed, or there is no stderr."""
    with contextlib.suppress(Exception):  # what comes next matters more, whatever stands in for stderr
        sys.stderr.write(f"{log_lines.said(line, __name__)}\n")
        sys.stderr.flush()


def flush() -> None:
    """Write out what is buffered for people, where somebody takes it."""
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def come_by_s(verdict: Verdict | None, *, asked_to_stop: bool) -> float:
    """How long the training thread may take to come by. asked_to_stop: by a signal, which may be why the job ends.

    >>> verdict = Verdict(EXIT_NOT_SAVED, "", is_cause=True)
    >>> come_by_s(verdict, asked_to_stop=False), come_by_s(verdict, asked_to_stop=True)
    (3.0, 0.5)
    """
    if verdict is None:
        return COME_BY_UNSAVED_S
    soon = verdict.code == EXIT_SAVED or (verdict.is_cause and asked_to_stop)
    return COME_BY_S if soon else COME_BY_UNSAVED_S


def verdict_of(rank: int, order: Exit, *, healed: bool = False) -> Verdict:
    """Exit code and the one line for people, from the controller's last order. healed: a launcher begins again.

    >>> o = Exit(1, 1, ExitKind.SAVED, 37, "/c/tft_saved_checkpoints-step_37", "rank 1 died", (1,))
    >>> verdict_of(2, o).code
    75
    """
    is_cause = rank in order.cause_ranks or not order.cause_ranks
    if order.kind is ExitKind.SAVED:
        line = (
            f"lastwords: rank {rank}: {order.reason}; a checkpoint of step {order.step} was saved in {order.path}; "
            f"{'' if healed else 'start the job again: '}resume() loads this checkpoint, and "
            f"training continues with step {order.step + 1}"
        )
        return Verdict(EXIT_SAVED, line, is_cause, order.step)
    if healed and order.kind is ExitKind.NOTHING_TO_SAVE:
        return Verdict(EXIT_NOT_SAVED, "", is_cause)  # `lastwords run` says once where all go on
    what = "there was nothing new to save" if order.kind is ExitKind.NOTHING_TO_SAVE else "NOTHING WAS SAVED"
    line = f"lastwords: rank {rank}: {order.reason}; {what}"
    return Verdict(EXIT_NOT_SAVED, line, is_cause)


class Departure:
    """The decision to leave, made once, and the ways to carry it out. Methods may be called by any thread.

    last: called right before the process ends. healed: whether a launcher begins again with new processes, so nobody
    waits for this one's `finally` blocks. tell: takes the verdict, once.
    """

    def __init__(
        self,
        rank: int,
        recorded: Callable[[], Exit | None] = lambda: None,
        last: Callable[[], None] = lambda: None,
        healed: Callable[[], bool] = lambda: False,
        tell: Callable[[Verdict], None] = lambda verdict: None,
    ) -> None:
        self.rank = rank
        self._healed = healed
        self._recorded = recorded
        self._last = last
        self._tell = tell
        self._users: list[Callable[[], object]] = []
        self.verdict: Verdict | None = None
        """What was decided. This and the next ones are written here alone."""
        self.refused: str | None = None
        """Why the controller refused this process."""
        self._lock = threading.Lock()
        self._announced = False
        self.exit_code: int | None = None
        """What this process ends with, once that is certain."""

    @property
    def healed(self) -> bool:
        """A launcher begins again with new processes."""
        return self._healed()

    @property
    def decided(self) -> bool:
        """True once this process has to end."""
        return self.verdict is not None or self.refused is not None

    def on_leave(self, function: Callable[[], object]) -> None:
        """Call it before the process is ended from here, after all files were flushed; `USERS_S` for all of them."""
        self._users.append(function)

    def decide(self, verdict: Verdict) -> None:
        """Take the first verdict; later ones change nothing."""
        with self._lock:
            if self.verdict is not None:
                return
            self.verdict = verdict
        self._tell(verdict)

    def decide_alone(self, reason: str, then: Callable[[], None]) -> None:
        """The controller is gone; it may have ended the job while this rank was stopped. Returns at once.

        In threads of their own: look up how the job ended, for `LOOK_UP_S` at most, decide, and call `then`.
        """
        found: list[Exit | None] = []
        looked = threading.Event()

        def look_up() -> None:
            try:
                found.append(self._recorded())
            except Exception:  # the outermost frame of this thread: nothing is known then
                _log.exception("the record of how this job has ended could not be read")
            finally:
                looked.set()

        def decide() -> None:
            looked.wait(LOOK_UP_S)
            line = (
                f"lastwords: rank {self.rank}: {reason}; this rank does not know whether a checkpoint was saved "
                "(`lastwords latest PATH` prints the newest one)"
            )
            alone = Verdict(EXIT_NOT_SAVED, line, is_cause=True, alone=True)
            order = found[0] if found else None
            self.decide(alone if order is None else verdict_of(self.rank, order, healed=self.healed))
            then()

        threads.run(decide, name="lastwords-end")
        try:
            threads.run(look_up, name="lastwords-look")
        except UnavailableError:
            looked.set()  # nothing is known then

    def refuse(self, reason: str) -> None:
        """The controller refused this process; the training thread raises ConfigError with `reason`."""
        with self._lock:
            if self.refused is None:
                self.refused = reason

    def announce(self, *, ends: bool = True) -> None:
        """Print the one line, once; it names the exit code if this process `ends` by our doing, which is ours to know.

        Blocks where the reader of stderr has stopped.
        """
        with self._lock:
            if self._announced or self.verdict is None:
                return
            self._announced = True
            code = self.verdict.code if self.exit_code is None else self.exit_code
            line = f"{self.verdict.line}; exit code {code}" if ends and not self.healed else self.verdict.line
        if not self.verdict.line:
            return
        say(line)

    def leave(self) -> NoReturn:
        """Training thread: out of the user's code, whose time to unwind is bounded.

        Raises SystemExit, and ConfigError if the controller refused this process.
        """
        if self.refused is not None:
            raise ConfigError(self.refused) from None
        assert self.verdict is not None
        if self.healed:
            self.end_now()
        self.end_within(UNWIND_S, self.verdict.code)
        self.announce(ends=self.exit_code is not None)
        raise SystemExit(self.verdict.code if self.exit_code is None else self.exit_code) from None

    def end_within(self, seconds: float, code: int) -> None:
        """End the process with `code` after at most `seconds`, and at interpreter exit without clean-up.

        The first code that this or `end_now` is called with is the one.
        """
        with self._lock:
            if self.exit_code is not None:
                return
            self.exit_code = code
        self._arm(code, seconds)

    def leave_to_user(self, error: BaseException, code: int) -> None:
        """Training thread: this rank's own `error` goes to its user, whose code takes the time that it takes.

        Only the interpreter's end is bounded, since a communicator with work in flight can block it for ever: where
        `error` is what ends it, with `code` at once; where the user has handled it, the exit code is the user's, and 1
        if nothing has come of that after `UNWIND_S`.
        """
        self.announce(ends=False)
        self._arm(code, None, lambda: isinstance(error, SystemExit) or getattr(sys, "last_value", None) is error)

    def end_now(self) -> None:
        """Any thread: announce and end the process at once. Does not return."""
        with self._lock:
            if self.exit_code is None:
                self.exit_code = EXIT_NOT_SAVED if self.verdict is None else self.verdict.code
            code = self.exit_code
        if self._arm(code, 0.0):
            threading.Event().wait()

    def _arm(self, code: int, seconds: float | None, at_exit_too: Callable[[], bool] = lambda: True) -> bool:
        """End this process, without running destructors, after `seconds`, or when the interpreter ends.

        seconds: 0: at once; None: never. at_exit_too: whether the interpreter's end counts if nothing hangs there. What
        people may read is flushed, `FLUSH_S` at most: the reader of a pipe may have stopped, and another thread may
        hold a lock of logging. Then come the users' own functions, for `USERS_S`. Both threads are started now, since
        none can be once the interpreter shuts down. False, and no end, if that is so already.
        """
        hurry, go, flushed, called, pid = *(threading.Event() for _ in range(4)), os.getpid()
        flushing: list[int] = []
        if seconds == 0.0:
            hurry.set()

        def tell() -> None:
            flushing.append(threading.get_native_id())
            go.wait()
            self.announce()
            flush()
            with contextlib.suppress(OSError, ValueError):
                logging.shutdown()
            _flush_files()
            flushed.set()
            for function in self._users:
                try:
                    function()
                except Exception:  # outermost for the user's own code: the process ends in any case
                    _log.exception("what was to be done before this rank leaves has failed")
            called.set()

        def end() -> None:
            try:
                try:
                    wait_out(hurry.wait, seconds)
                    for child in multiprocessing.active_children():
                        with contextlib.suppress(OSError, ValueError, AttributeError):
                            child.kill()
                finally:
                    go.set()
                    for _ in range(FLUSHES_MAX):
                        if flushed.wait(FLUSH_S) or not any(map(_is_awake, flushing)):
                            break
                    if flushed.is_set() and self._users:
                        called.wait(USERS_S)
                self._last()
            finally:
                os._exit(code)

        def at_exit() -> None:
            if os.getpid() != pid:
                return  # a forked child, whose end is its own
            if at_exit_too():
                hurry.set()
                threading.Event().wait()  # the threads above end the process
            _end_from_c_after(UNWIND_S)

        try:
            for name, target in (("lastwords-flush", tell), ("lastwords-exit", end)):
                threads.run(target, name=name)
        except (RuntimeError, UnavailableError) as error:
            _log.error("lastwords cannot end this process: %s", error)
            return False
        atexit.register(at_exit)
        return True


def wait_out(wait: Callable[[float | None], bool], seconds: float | None, asleep_s: float = 0.0) -> bool:
    """Wait for `wait(seconds)` to become True, and longer as long as this process seems to write the user's files.

    That is: the main thread writes anything, or the whole process a lot. What is written through a memory map is not
    seen. Nothing of ours writes by then; whoever hangs in a collective does not either. False if it was in vain.

    asleep_s: only for so long, if not 0, where all other threads sleep before and after it.
    """
    before = _bytes_written()
    if asleep_s and not _awake():
        if wait(asleep_s):
            return True
        if not _awake() and _bytes_written()[0] == before[0]:
            return False
    while not wait(seconds):
        written = _bytes_written()
        if written[0] == before[0] and written[1] < before[1] + WRITES_BYTES_MIN:
            return False
        before, seconds = written, WRITES_QUIET_S
    return True


def _awake() -> bool:
    """Whether any thread but this one runs or waits for a disk."""
    others = {*map(int, os.listdir("/proc/self/task"))} - {threading.get_native_id()}
    return any(map(_is_awake, others))


def _is_awake(thread: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/stat", "rb") as file:
        return file.read().rpartition(b") ")[2][:1] in b"RD"
    return False


def _bytes_written() -> tuple[int, int]:
    """By the main thread, and by the whole process; zeros where the kernel does not count."""
    counts = [0, 0]
    for index, path in enumerate((f"/proc/self/task/{threading.main_thread().native_id}/io", "/proc/self/io")):
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            counts[index] = int(file.read().split("wchar:")[1].split()[0])
    return counts[0], counts[1]


_opened: list[Any] = []
"""Files that this process has from the one that it is a fork of."""

_froze: Callable[[], object] = gc.get_freeze_count
"""Whether this process has set objects aside from garbage collection, where nobody finds them."""


def begin(opened: Sequence[Any]) -> None:
    """This process and its forks have these files from now on, and what was set aside is not looked at.

    There are so many objects that to count them takes as long as to fork.
    """
    global _froze
    freeze, noted = gc.freeze, threading.Event()
    _opened[:], _froze = opened, noted.is_set

    def noting() -> None:
        noted.set()
        freeze()

    gc.freeze = noting


def _flush_files() -> None:
    """Whatever the script has opened and not closed, as at the end of the interpreter."""
    if _froze():
        gc.unfreeze()
    found = [one for one in (*_opened, *gc.get_objects()) if issubclass(type(one), io.IOBase)]
    for kind in _BUFFERED:
        for one in found:
            if issubclass(type(one), kind):
                with contextlib.suppress(Exception):  # outermost for a class of the user's own
                    one.close() if _ends_only_closed(one) else one.flush()


def _ends_only_closed(file: Any) -> bool:
    """Whether the file is damaged before: what is compressed has an end."""
    return any(kind.__name__ in ("GzipFile", "BZ2File", "LZMAFile") for kind in type(file).__mro__)


def _end_from_c_after(seconds: float) -> None:
    """End this process with 1 after `seconds` even if no Python runs any more; nothing if it has ended by then."""
    with contextlib.suppress(OSError, RuntimeError):
        faulthandler.dump_traceback_later(seconds, exit=True, file=os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
