"""How a trainer leaves when an incident is over: one line on stderr, a documented exit code, no hanging.

If the training thread is in our hands (parked, or held in `__exit__`) it raises `SystemExit`, so that the
user's `finally` blocks run; a bounded time later the process ends anyway. If it sits in the user's code or in
a collective that will never return, nothing in Python can move it, and the process ends at once: everything
worth keeping is on disk. `os._exit` is used because tearing down a communicator with work in flight can block
for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
import threading
from dataclasses import dataclass

from lastwords.errors import ConfigError
from lastwords.vocabulary import Exit, ExitKind

EXIT_SAVED = 75
"""Last words were published; start again with resume (sysexits' EX_TEMPFAIL: "try again")."""

EXIT_NOT_SAVED = 76
"""The incident is over and there is no new checkpoint; the line on stderr says why."""

UNWIND_S = 5.0
"""How long the user's `finally` blocks may take after an incident before the process ends regardless."""


COME_BY_S = 0.5
"""How long the training thread may take to come by after an incident before the process is ended without it. By then
the checkpoint is published, so this costs nothing but time; a rank in a dead collective never comes."""

COME_BY_UNSAVED_S = 3.0
"""The same where nothing was saved: mostly errors that all ranks have at once, at the start or in resume(), and each
should end with its own traceback rather than with the news of another one's."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What this rank was told at the end of an incident."""

    code: int
    line: str
    is_cause: bool

    @staticmethod
    def controller_lost(rank: int, reason: str) -> Verdict:
        """The controller went away for good while this rank waited for it."""
        line = (
            f"lastwords: rank {rank}: {reason}; NOTHING WAS SAVED by this rank "
            f"(see `lastwords latest` for what is there); exit code {EXIT_NOT_SAVED}"
        )
        return Verdict(EXIT_NOT_SAVED, line, is_cause=False)


def verdict_of(rank: int, order: Exit) -> Verdict:
    """Exit code and the one line for people, from the controller's last order.

    >>> o = Exit(1, 1, ExitKind.SAVED, 37, "/c/tft_saved_checkpoints-step_37", "rank 1 died", (1,))
    >>> verdict_of(2, o).code
    75
    """
    if order.kind is ExitKind.SAVED:
        line = (
            f"lastwords: rank {rank}: {order.reason}; the last words of step {order.step} are in {order.path}; "
            "start again with --is_recover=1 (or call resume()) to go on at "
            f"step {order.step + 1}; exit code {EXIT_SAVED}"
        )
        return Verdict(EXIT_SAVED, line, rank in order.cause_ranks)
    what = "nothing to save yet" if order.kind is ExitKind.NOTHING_TO_SAVE else "NOTHING WAS SAVED"
    line = f"lastwords: rank {rank}: {order.reason}; {what}; exit code {EXIT_NOT_SAVED}"
    return Verdict(EXIT_NOT_SAVED, line, rank in order.cause_ranks)


class Departure:
    """The decision to leave, made once, and the ways to carry it out. Methods may be called by any thread."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._verdict: Verdict | None = None
        self._refused: str | None = None
        self._lock = threading.Lock()
        self._announced = False
        self._exit_code: int | None = None

    @property
    def decided(self) -> bool:
        """True once this process has to end."""
        return self._verdict is not None or self._refused is not None

    @property
    def verdict(self) -> Verdict | None:
        """What was decided, if anything."""
        return self._verdict

    def decide(self, verdict: Verdict) -> bool:
        """Take the first verdict; later ones change nothing. True if this one was the first."""
        with self._lock:
            if self._verdict is None:
                self._verdict = verdict
                return True
            return False

    def refuse(self, reason: str) -> None:
        """The controller refused this process; the training thread raises ConfigError with `reason`."""
        with self._lock:
            if self._refused is None:
                self._refused = reason

    @property
    def refused(self) -> str | None:
        """Why the controller refused this process, if it did."""
        return self._refused

    def raise_if_refused(self) -> None:
        """Raises ConfigError if the controller refused this process."""
        if self._refused is not None:
            raise ConfigError(self._refused)

    def announce(self) -> None:
        """Print the one line, once."""
        with self._lock:
            if self._announced or self._verdict is None:
                return
            self._announced = True
            line = self._verdict.line
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    def unwind(self) -> SystemExit:
        """Training thread: the exception to raise; arms the bound on how long unwinding may take."""
        assert self._verdict is not None
        self.announce()
        self.end_within(UNWIND_S, self._verdict.code)
        return SystemExit(self._verdict.code)

    def end_within(self, seconds: float, code: int) -> None:
        """End the process with `code` after at most `seconds`, and at interpreter exit without clean-up."""
        with self._lock:
            if self._exit_code is not None:
                return
            self._exit_code = code
        atexit.register(end_process, code)
        timer = threading.Timer(seconds, end_process, (code,))
        timer.daemon = True
        timer.start()

    def end_now(self) -> None:
        """Any thread: announce and end the process at once."""
        self.announce()
        end_process(self._verdict.code if self._verdict is not None else EXIT_NOT_SAVED)


def end_process(code: int) -> None:
    """End this process without running destructors: flush what people may read, stop data-loader workers."""
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with contextlib.suppress(OSError, ValueError):
        logging.shutdown()
    os._exit(code)
