"""One stay of a rank in `main`: how it is left after a failure elsewhere, and what the launcher hears of it."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
from pathlib import Path

import torch.distributed as dist

from lastwords import clock, threads
from lastwords.errors import ConfigError
from lastwords.launcher.events import Begun, Over, Updated, Waiting
from lastwords.launcher.link import send
from lastwords.launcher.protocol import OWN, Controlled, Report, to_launcher
from lastwords.launcher.roster import OWN_LEAVE_S
from lastwords.launcher.unblock import Unblocker, open_sockets
from lastwords.optim_wrapper.trainer import reentry
from lastwords.processor import departure
from lastwords.processor.departure import EXIT_NOT_SAVED, EXIT_SAVED, UNWIND_S, say, wait_out
from lastwords.torch_private import forget_groups

THREADS = 2 + departure.THREADS
"""That a worker keeps in reserve, to leave `main` after a failure or to end."""


class Stay:
    """One stay in `main`, and the `reentry.Leaver` of what runs in it: whoever is late finds that it is over."""

    def __init__(self, link: socket.socket, goes_on_at: int = 0, exit_code: int = EXIT_NOT_SAVED) -> None:
        self.leaving = False
        self.trains = False
        """Its loop has begun."""
        self.saved_step = 0
        self.saves = False
        """The incident that ends it has saved a step, which is the newest one that has ended."""
        self.record = ""
        self.signal = 0
        """By which this process was asked to stop since it entered `main`."""
        self.dismissed = False
        """Nobody enters `main` any more, so there is nothing for which this process should be kept."""
        self._link = link
        self._goes_on_at = goes_on_at
        self._exit_code = exit_code
        self._lock = threading.Lock()
        self._over = False
        self._left = threading.Event()
        self._unblocker: Unblocker | None = None
        self._runs: list[reentry.Running] = []
        self._before = frozenset(inode for _, inode in open_sockets())
        self._frozen = gc.get_freeze_count()

    def leave(self, step: int, ports: tuple[int, ...], record: Path | None) -> None:
        """The training thread comes out of `main`, wherever it is; after `OWN_LEAVE_S` this process ends instead, after
        `UNWIND_S` if it is dismissed.
        """
        with self._lock:
            if self.leaving or self._over:
                return
            self.leaving, self.saves = True, step > 0
            self.saved_step, self.record = step, str(record or "")
            self._unblocker = Unblocker(self._before, ports, self._frozen)
            self._unblocker.begin()
        threads.run(self._end_if_here, name="lastwords-leave")

    @property
    def exit_code(self) -> int:
        """Of this process if it ends now: whether the newest step that has ended here is saved."""
        if self.saves:
            return EXIT_SAVED
        return EXIT_NOT_SAVED if self.trains else self._exit_code

    def started(self, run: reentry.Running) -> None:
        """It ends with this stay, unless it has ended by itself."""
        self._runs.append(run)

    def hold(self, error: BaseException) -> None:
        """Training thread: `error` has left `main`, perhaps past a run that no `with` encloses."""
        if not self.leaving:
            for run in self._runs:
                run.hold(error)

    def begun(self, step: int, inexact: str) -> None:
        """The training loop begins after `step`; a controller looks after this rank."""
        if step < self._goes_on_at:
            raise ConfigError(self._why_not_after(step))
        self.trains = True
        self._goes_on_at = 0  # of a loop that comes after this one nothing is known
        self._tell(Begun(OWN, step, inexact))

    def _why_not_after(self, step: int) -> str:
        again = f"main() was entered again after a failure, and step {self._goes_on_at} is saved, but "
        shared = "the checkpoint directory has to be on a file system that all hosts share"
        if self._newest_step() < self._goes_on_at:
            return (
                f"{again}its checkpoint cannot be read on host {socket.gethostname()}, so the training loop would "
                f"begin after step {step}: {shared}"
            )
        return (
            f"{again}its training loop begins after step {step}: call tft.resume(missing_ok=True) before the loop, "
            f"every time; if it was called, another host does not see that checkpoint: {shared}"
        )

    def _newest_step(self) -> int:
        return max((run.newest_step() for run in self._runs), default=0)

    def asked_to_stop(self, number: int) -> None:
        """An incident follows, and with it the end of this stay."""
        self.signal = number

    def controlled(self, path: Path) -> None:
        """A controller of this host looks after this rank."""
        self._tell(Controlled(str(path)))

    def updated(self) -> None:
        """The first step of this stay is over."""
        self._tell(Updated(OWN))

    def over(self) -> None:
        """The training loop has come to its end."""
        self._tell(Over(OWN))

    def tell_what_is_saved(self) -> None:
        """For the last line of a launcher that ends: an exception of the script's own ends this process, too."""
        self._tell(Waiting(OWN, self._newest_step(), self.record))

    def _tell(self, report: Report) -> None:
        with contextlib.suppress(OSError):  # the launcher has ended, which the thread that listens sees
            send(self._link, to_launcher(report))

    def end(self) -> None:
        """Training thread: out of all groups; nothing of this stay runs after that."""
        if self.trains and not self.saved_step:  # an incident that saves nothing does not tell of periodic checkpoints
            self.saved_step = self._newest_step()
        while self._runs:
            self._runs.pop().close()
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        forget_groups()  # also of those that could not be made
        gc.collect()
        with self._lock:
            self._over = True
        self._left.set()
        if self._unblocker is not None:
            self._unblocker.end()

    def _end_if_here(self) -> None:
        """In a thread of its own; files that are being written are waited for."""
        leave_s = UNWIND_S if self.dismissed else OWN_LEAVE_S
        if wait_out(lambda seconds: clock.within_own_time(self._left, seconds), leave_s):
            return
        with self._lock:
            if self._over:
                return
        rank = os.environ.get("RANK", "?")
        follows = "it ends" if self.dismissed else "its process is replaced"
        say(f"lastwords: rank {rank} has not left main() for {leave_s:g} s; {follows}")
        if self.dismissed:  # what is saved is the launcher's last line
            self._tell(Waiting(OWN, self.saved_step, self.record))
        os._exit(self.exit_code)
