"""Ranks of one host that look after each other, so that a death is known at once on every host of a job.

The controller watches the ranks of its own host by itself; of any other host it would only see a connection break,
after the memory is freed and not at all while a forked child holds the socket open. So each rank watches the next
two living ranks of its host, in a ring of rank numbers, through their life lines and pidfds, and reports a death as
`PeerDied`. That is two watches a rank instead of all to all, every rank has two watchers, one of which may be busy
or stopped, and as long as anybody lives the ring closes again: who loses a neighbour takes the next one, which is
reported at once if it has died already. A rank that has given its life line back is passed over without a word.

Who is on this host stands in the job's directory in shared memory. Each rank creates its life line before it says
Hello, so once all are welcome all of them are there. Nothing here runs while nobody dies, except for one look at a
word of memory each half second.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lastwords.checkpoint.system import PAUSES_S, REAL_OS, patiently, storage_errors
from lastwords.errors import LastWordsError, StorageError, is_shortage
from lastwords.liveness import paths, process_id
from lastwords.liveness.robust_mutex import owner_of, state_of
from lastwords.liveness.watch import HostWatch
from lastwords.processor.events import ProcessorOptions
from lastwords.vocabulary import DeathSource, PeerDied, ProcessId

# When a controller that lives and shows no sign of life is to be followed by another one. Pure.
#
# A sign of life is a beat: the controller's event loop leaves one every fifth of a second, where every process of its
# host sees it, and it counts for a rank while its session is up. A controller that is stopped leaves none, nor does
# one that hangs, although the threads of its gRPC go on answering pings. What is decided here is only that somebody
# should go and ask. Whoever does so ends the controller only if that does not answer either (`controller.takeover`),
# so a wrong decision costs a process that looks and leaves again.
#
# A rank of any host counts every word of its session as a sign of life, too. Without one for `unanswered_s`, and with
# something to say, it asks there (`Session.ask_if_silent`), since nobody may be left who could do more.

ASK_TURN_S = 3.0
"""The first living rank of the host asks, for 2 s, and starts the next controller; the others give it that time.

Where the controller is known to be dead nobody is asked: `START_TURN_S` of optim_wrapper/launch/successor.py."""


class Silence:
    """How long the controller has been silent, for one rank of its host. `now_s`: own time (`clock.OwnTime`).

    >>> silence = Silence(ProcessorOptions(unanswered_s=5.0, controller_silent_s=10.0))
    >>> silence.hear(beat=1, now_s=0.0)
    >>> silence.hear(beat=2, now_s=0.5)
    >>> [silence.is_over(asks, is_first=True, now_s=5.5) for asks in (True, False)]
    [True, False]
    >>> [silence.is_over(asks, is_first=True, now_s=10.5) for asks in (True, False)]
    [True, True]
    """

    def __init__(self, options: ProcessorOptions) -> None:
        self._asking_s = options.unanswered_s
        self._training_s = max(options.unanswered_s, options.controller_silent_s)
        self._beat: int | None = None
        self._since_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Another controller serves, or this one has answered: it has all its time again."""
        self._since_s = now_s

    def hear(self, beat: int | None, now_s: float) -> None:
        """`beat`: the newest one, None while nothing can be heard from the controller."""
        if self._since_s is None or (beat is not None and beat != self._beat):
            self._since_s = now_s
        self._beat = self._beat if beat is None else beat

    def is_over(self, asks: bool, *, is_first: bool, now_s: float) -> bool:
        """Whether it is time to ask. asks: this rank has something to say that only a controller can act upon."""
        if self._since_s is None:
            return False
        patience_s = self._asking_s if asks else self._training_s
        return now_s - self._since_s >= patience_s + (0.0 if is_first else ASK_TURN_S)


_log = logging.getLogger(__name__)

WATCHED_EACH = 2
"""Ranks that each rank watches. With one, a watcher that is stopped, or holds the interpreter's lock for a second,
would hide a death for that long; two make that a matter of two ranks next to each other."""

_LIFE = re.compile(r"rank_(\d+)\.life")


class HostRing:
    """Reports deaths of this host's ranks to `report`, from threads of its own. `start` and `stop` by any thread."""

    def __init__(
        self,
        rank: int,
        job: str,
        generation: int,
        report: Callable[[PeerDied], None],
        nonce: str = "",
    ) -> None:
        self._rank = rank
        self._job = job
        self._generation = generation
        self._nonce = nonce
        self._report = report
        self._lock = threading.Lock()
        self._after: list[int] = []  # ranks of this host that were never watched yet, next ones first
        self._watched: set[int] = set()
        self._died: dict[int, PeerDied] = {}
        self._tried: dict[int, int] = {}
        self._problems: dict[int, str] = {}  # that have been said
        self.is_first = False
        """Whether this is the lowest rank of its host; known after `start`."""
        self._stopped = False
        self._pid = os.getpid()
        self._watch = HostWatch(self._on_death, on_release=self._take_next, on_ending=self._on_ending)

    def start(self) -> None:
        """Begin to watch; call it once all ranks are registered. A host that cannot be watched is only logged.

        UnavailableError if no thread can be started, after some seconds.
        """
        self._watch.start()
        ranks = ranks_here(self._job, self._generation, self._nonce)
        self.is_first = ranks[:1] == [self._rank]
        with self._lock:
            self._after = in_ring_order(self._rank, ranks)
            self._close_ring()

    def when_ended(self, process: ProcessId, on_end: Callable[[], None]) -> None:
        """Watch another process of this host, too: its end is told once. Raises UnavailableError."""
        with self._lock:
            if not self._stopped:
                self._watch.when_ended(process, on_end)

    def stop(self) -> None:
        """Stop watching; what ends from now on is nobody's business here. Harmless in a forked child."""
        if os.getpid() != self._pid:
            return  # the parent's threads are not here, but its pidfds and their poll are
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        self._watch.stop()

    # ------------------------------------------------------------------ watchers' threads

    def _on_death(self, rank: int, source: DeathSource, known_mono_s: float) -> None:
        self._died[rank] = report = PeerDied(self._rank, self._generation, rank, source)
        self._report(report)
        self._take_next(rank)

    def _on_ending(self, rank: int, how: str) -> None:
        self._report(replace(self._died[rank], how=how))

    def _take_next(self, gone: int) -> None:
        with self._lock:
            self._watched.discard(gone)
            self._close_ring()

    def _look_again(self, rank: int, error: LastWordsError) -> bool:
        """With the lock: what is wrong may pass, and a shortage always does; then it is the next one to be watched.

        False for a shortage: it is this process's own, so that no other rank could be watched either.
        """
        self._tried[rank] = tried = self._tried.get(rank, -1) + 1
        is_short = is_shortage(error)
        if is_short:
            self._after.insert(0, rank)
        elif tried >= len(PAUSES_S):
            return True

        def again() -> None:
            with self._lock:
                if not is_short:
                    self._after.insert(0, rank)
                self._close_ring()

        self._watch.later(PAUSES_S[min(tried, len(PAUSES_S) - 1)], again)
        return not is_short

    def _close_ring(self) -> None:
        """With the lock: watch the next ranks, as long as there are any that were not looked at."""
        while self._after and len(self._watched) < WATCHED_EACH and not self._stopped:
            rank = self._after.pop(0)
            path = paths.life_path(self._job, self._generation, rank, self._nonce)
            self._watched.add(rank)
            try:
                process = _process_of(path)
                # A process that is not seen here lives in another container: its life line says what there is to say.
                self._watch.add(rank, path, process, by_pid=process_id.is_alive(process))
                self._problems.pop(rank, None)
            except LastWordsError as error:
                self._watched.discard(rank)
                if self._problems.get(rank) != str(error):  # it is tried again; the same words are said once
                    _log.info("rank %d does not watch rank %d: %s", self._rank, rank, error)
                self._problems[rank] = str(error)
                if not self._look_again(rank, error):
                    return
            except Exception:  # the outermost frame of a watcher's thread; training must not notice
                self._watched.discard(rank)
                _log.exception("rank %d cannot watch rank %d", self._rank, rank)


def in_ring_order(rank: int, ranks: list[int]) -> list[int]:
    """The other ranks, from the next one after `rank` around to the one before it.

    >>> in_ring_order(2, [0, 1, 2, 3])
    [3, 0, 1]
    """
    return [other for other in sorted(ranks) if other > rank] + [other for other in sorted(ranks) if other < rank]


def ranks_here(job: str, generation: int, nonce: str = "") -> list[int]:
    """Ranks with a life line on this host, sorted; none where nothing can be read."""
    directory = paths.job_dir(job, generation, nonce)
    try:
        names = patiently(lambda: _names_in(directory), REAL_OS)
    except StorageError as error:
        _log.warning("no rank on this host is watched: %s", error)
        return []
    return sorted(int(found[1]) for name in names if (found := _LIFE.fullmatch(name)))


def living_before(rank: int, job: str, generation: int, nonce: str = "") -> int:
    """How many ranks of this host that come before `rank` live, by their life lines."""
    return sum(
        _lives(paths.life_path(job, generation, other, nonce))
        for other in ranks_here(job, generation, nonce)
        if other < rank
    )


def _lives(path: Path) -> bool:
    try:
        return state_of(path) is None
    except LastWordsError:
        return False  # the job is over


def _names_in(directory: Path) -> list[str]:
    with storage_errors("reading", directory):
        return os.listdir(directory)


def _process_of(path: Path) -> ProcessId:
    owner = owner_of(path)
    return ProcessId(process_id.host_id(), owner.pid, owner.start_ticks, nonce="")
