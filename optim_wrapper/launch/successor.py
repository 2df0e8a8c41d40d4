"""Starts the controller again where it was killed or is silent: any rank of its host can, the lowest living one does.

The ranks of that host watch the controller's process. A controller that ends by itself takes its state file away; one
that was killed leaves it, and whoever is next in the row of ranks starts another one with it. The others wait for their
turn, which comes if those before them are dead or stopped. Two that do it at once do no harm (`controller.takeover`).

A controller that lives and shows no sign of life (stopped, hanging) is ended by the one that follows it, if it does not
answer that either. How long it may be silent is decided by `processor.ring.Silence`.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path

from lastwords import clock, threads
from lastwords.controller import handover
from lastwords.controller.handover import StateOwner
from lastwords.controller.launch import start_successor
from lastwords.controller.saving import Patience
from lastwords.errors import BusyError, ConfigError, LastWordsError, UnavailableError, is_shortage
from lastwords.liveness import process_id
from lastwords.processor.ring import Silence
from lastwords.vocabulary import ProcessId

_log = logging.getLogger(__name__)

START_TURN_S = 2.0
"""After the controller's death a rank waits so long for each living rank before it: a process needs 0.3 s to become a
controller. A controller that lives is asked first, which takes longer: `processor.ring.ASK_TURN_S`."""

POLL_INTERVAL_S = 0.05

LOOK_INTERVAL_S = clock.OwnTime.LOOK_INTERVAL_S
"""Between two looks for a sign of life."""

STOP_S = 1.0
"""A watch that is stopped while it starts a controller is waited for no longer."""

LEAVE_S = 5.0
"""A rank that leaves waits so long, at most, for a controller that clears up behind the job."""

TRIES_MAX = 6
"""Something else may hold the port for a moment, or the new process may lack memory. The pauses between as many tries
make 7.75 s. A try that fails since this process is short of something (`errors.is_shortage`) does not count."""


class ControllerWatch:
    """Harmless on a host without a controller. `start` and `stop` by any thread. name: of the rank, for people.

    when_ended: has a process watched. living_before: living ranks of this host that come before this one. wanted:
    whether this rank still needs a controller, which is not so once it knows how its job ends. silence: of the
    controller, as this rank takes it. asks: whether this rank has something to say that only a controller can act upon.
    reached: whether this rank has a session.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        when_ended: Callable[[ProcessId, Callable[[], None]], object],
        living_before: Callable[[], int],
        wanted: Callable[[], bool],
        silence: Silence,
        asks: Callable[[], bool],
        reached: Callable[[], bool] = lambda: True,
    ) -> None:
        self._name = name
        self._path = path
        self._when_ended = when_ended
        self._living_before = living_before
        self._wanted = wanted
        self._silence, self._asks, self._reached = silence, asks, reached
        self._own_time = clock.OwnTime()
        self._ended = threading.Event()  # the process that is watched now; or this watch is stopped
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._tries, self._problem, self._patience = 0, "", Patience()

    def start(self, *, patiently: bool = True) -> None:
        """Watch the controller that serves, and those that follow it.

        UnavailableError if no thread can be started; only after some seconds if `patiently`.
        """
        try:
            is_there = handover.owner(self._path) is not None
        except UnavailableError:
            is_there = True  # the thread finds out
        if is_there:
            begin = threads.start_patiently if patiently else threads.start
            self._thread = begin(self._run, name="lastwords-successor")

    def stop(self) -> None:
        """A controller that ends, or is silent, from now on is nobody's business here."""
        self._stopped.set()
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)

    def leave(self) -> None:
        """This rank ends, knowing how the job does. If the controller was killed before it could clear up, and nobody
        who is left needs it, another one is started all the same: it tells those who have not heard, and clears up.

        Any thread; returns at once where the controller lives or has ended by itself, after `LEAVE_S` at the latest.
        """
        try:
            kept = handover.read(self._path)
        except LastWordsError:
            return
        if kept.memory.outcome is None or kept.owner.is_running or self._stopped.is_set():
            return
        if not self._path.exists():
            return  # it has ended by itself since its file was read
        _log.info("%s sees to it that a controller clears up", self._name)
        self._wanted = lambda: True
        followed = threading.Event()

        def follow() -> None:
            self._guarded(self._until_another_serves)
            followed.set()

        try:
            threads.run(follow, name="lastwords-successor")
        except UnavailableError as error:
            _log.warning("%s could not see to it that a controller serves: %s", self._name, error)
        else:
            followed.wait(LEAVE_S)

    # ------------------------------------------------------------------ threads of its own

    def _run(self) -> None:
        while self._guarded(self._until_ended) and self._guarded(self._until_another_serves):
            pass

    def _guarded(self, step: Callable[[], bool]) -> bool:
        try:
            return step()
        except Exception:  # outermost frame of a thread: training goes on without a controller
            _log.exception("%s could not see to it that a controller serves", self._name)
            return False

    def _until_ended(self) -> bool:
        """Watch the controller that serves now, and have it followed if it is silent. False if this watch is over."""
        owner = self._owner()
        if owner is None:
            return False
        ended = self._ended = threading.Event()
        if not self._tells_when_ended(owner, ended):
            return False
        self._silence.begin(self._own_time.at(clock.mono_s()))
        while not (self._stopped.is_set() or ended.wait(LOOK_INTERVAL_S)):
            if self._is_silent():
                self._end_silent(owner)
        return not self._stopped.is_set()

    def _owner(self) -> StateOwner | None:
        """Whose controller's state it is; a shortage is waited out. None if there is none, or this watch is stopped."""
        patience = Patience()
        while True:
            try:
                return handover.owner(self._path)
            except UnavailableError:
                if self._is_stopped_within(patience):
                    return None

    def _tells_when_ended(self, owner: StateOwner, ended: threading.Event) -> bool:
        """Have `ended` set when that process ends; a shortage is waited out. False if it cannot be had."""
        process, patience = ProcessId(process_id.host_id(), owner.pid, owner.start_ticks, nonce=""), Patience()
        while True:
            try:
                self._when_ended(process, ended.set)
                return True
            except UnavailableError as error:
                if not is_shortage(error):
                    _log.info("%s does not watch the controller: %s", self._name, error)
                    return False
            if self._is_stopped_within(patience):
                return False

    def _is_stopped_within(self, patience: Patience) -> bool:
        """Whether this watch is stopped in the next pause."""
        return self._stopped.wait(patience.pause_s(clock.mono_s(), math.inf))

    def _is_silent(self) -> bool:
        now_s, asks = self._own_time.at(clock.mono_s()), self._asks()
        self._silence.hear(handover.beat(self._path) if self._reached() else None, now_s)
        if not self._silence.is_over(asks, is_first=True, now_s=now_s) or not self._wanted():
            return False
        is_first = self._living_before() == 0
        # Without its file it has ended by itself, or nobody can follow.
        return self._silence.is_over(asks, is_first=is_first, now_s=now_s) and self._path.exists()

    def _end_silent(self, owner: StateOwner) -> None:
        """Start the next controller, which ends this one if it does not answer."""
        _log.info("the controller (process %d) shows no sign of life; %s asks it", owner.pid, self._name)
        try:
            handle = start_successor(self._path)
            _log.warning(
                "the controller (process %d) did not answer and was ended; %s has started it again as process %d",
                owner.pid,
                self._name,
                handle.pid,
            )
        except BusyError as error:
            _log.info("%s", error)  # this one has answered, or another rank was faster
        except LastWordsError as error:
            if not self._stopped.is_set():
                _log.warning("%s could not replace the controller, which does not answer: %s", self._name, error)
        self._silence.begin(self._own_time.at(clock.mono_s()))

    def _until_another_serves(self) -> bool:
        """True once a controller lives; False if none is wanted, or none can be had from here."""
        began_mono_s = clock.mono_s()
        while self._wanted() and not self._stopped.is_set():
            owner = self._owner()
            if owner is None:
                return False  # it has ended by itself
            if owner.is_running:
                return True
            if clock.mono_s() - began_mono_s >= self._living_before() * START_TURN_S:
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
            self._tries += not is_shortage(error)
            owner = self._owner()
            if owner is None or owner.is_running:
                return True  # another rank was faster, or the job is over
            if str(error) != self._problem:
                _log.warning("%s could not start the controller again: %s", self._name, error)
            self._problem = str(error)
            return self._tries < TRIES_MAX and not self._is_stopped_within(self._patience)
        self._tries, self._problem, self._patience = 0, "", Patience()
        _log.warning(
            "the controller (process %d) was killed; %s has started it again as process %d",
            killed_pid,
            self._name,
            handle.pid,
        )
        return True
