"""Starts the controller again where it was killed: any rank of its host can, and the lowest one that lives does.

The ranks of that host watch the controller's process. A controller that ends by itself takes its state file away; one
that was killed leaves it, and whoever is next in the row of ranks starts another one with it. The others wait for their
turn, which comes if those before them are dead or stopped. Two that do it at once do no harm (`controller.takeover`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from lastwords import clock
from lastwords.controller import state_file
from lastwords.controller.launch import start_successor
from lastwords.errors import ConfigError, LastWordsError, UnavailableError
from lastwords.liveness import process_id
from lastwords.vocabulary import ProcessId

_log = logging.getLogger(__name__)

TURN_S = 2.0
"""A rank waits so long for each living rank before it: a process needs 0.3 s to become a controller."""

POLL_INTERVAL_S = 0.05

LEAVE_S = 5.0
"""A rank that leaves waits so long, at most, for a controller that clears up behind the job."""

TRIES_MAX = 3
"""Something else may hold the port, or memory may be short, for a moment."""


class ControllerWatch:
    """Harmless on a host without a controller. `start` and `stop` by any thread. name: of the rank, for people.

    when_ended: has a process watched. living_before: living ranks of this host that come before this one. wanted:
    whether this rank still needs a controller, which is not so once it knows how its job ends.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        when_ended: Callable[[ProcessId, Callable[[], None]], object],
        living_before: Callable[[], int],
        wanted: Callable[[], bool],
    ) -> None:
        self._name = name
        self._path = path
        self._when_ended = when_ended
        self._living_before = living_before
        self._wanted = wanted
        self._stopped = threading.Event()
        self._tries = 0

    def start(self) -> None:
        """Watch the controller that serves now."""
        owner = state_file.owner(self._path)
        if owner is None:
            return
        process = ProcessId(process_id.host_id(), owner.pid, owner.start_ticks, nonce="")
        try:
            self._when_ended(process, self._on_end)
        except UnavailableError as error:
            _log.info("%s does not watch the controller: %s", self._name, error)

    def stop(self) -> None:
        """A controller that ends from now on is nobody's business here."""
        self._stopped.set()

    def leave(self) -> None:
        """This rank ends, knowing how the job does. If the controller was killed before it could clear up, and nobody
        who is left needs it, another one is started all the same: it tells those who have not heard, and clears up.

        Any thread; returns at once where the controller lives or has ended by itself, after `LEAVE_S` at the latest.
        """
        try:
            kept = state_file.read(self._path)
        except LastWordsError:
            return
        if kept.memory.outcome is None or kept.owner.is_running or self._stopped.is_set():
            return
        _log.info("%s sees to it that a controller clears up", self._name)
        self._wanted = lambda: True
        thread = threading.Thread(target=self._see_to_it, name="lastwords-successor", daemon=True)
        thread.start()
        thread.join(LEAVE_S)

    # ------------------------------------------------------------------ threads of its own

    def _on_end(self) -> None:
        if not self._stopped.is_set():
            threading.Thread(target=self._see_to_it, name="lastwords-successor", daemon=True).start()

    def _see_to_it(self) -> None:
        try:
            if self._until_another_serves():
                self.start()
        except Exception:  # outermost frame of this thread: training goes on without a controller
            _log.exception("%s could not see to it that a controller serves", self._name)

    def _until_another_serves(self) -> bool:
        """True once a controller lives; False if none is wanted, or none can be had from here."""
        began_mono_s = clock.mono_s()
        while self._wanted() and not self._stopped.is_set():
            owner = state_file.owner(self._path)
            if owner is None:
                return False  # it has ended by itself
            if owner.is_running:
                return True
            if clock.mono_s() - began_mono_s >= self._living_before() * TURN_S:
                if not self._start_one(owner.pid):
                    return False
                began_mono_s = clock.mono_s()
            self._stopped.wait(POLL_INTERVAL_S)
        return False

    def _start_one(self, killed_pid: int) -> bool:
        """False if there is no point in trying again."""
        try:
            handle = start_successor(self._path)
        except ConfigError as error:
            _log.error("%s", error)
            return False
        except LastWordsError as error:
            self._tries += 1
            owner = state_file.owner(self._path)
            if owner is None or owner.is_running:
                return True  # another rank was faster, or the job is over
            _log.warning("%s could not start the controller again: %s", self._name, error)
            return self._tries < TRIES_MAX
        self._tries = 0
        _log.warning(
            "the controller (process %d) was killed; %s has started it again as process %d",
            killed_pid,
            self._name,
            handle.pid,
        )
        return True
