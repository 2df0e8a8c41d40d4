"""All ranks of this host, each watched through its robust mutex and its pidfd; whichever speaks first counts."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lastwords.clock import Clock, mono_s
from lastwords.errors import (
    ConfigError,
    FormatError,
    LastWordsError,
    StorageError,
    UnavailableError,
    is_shortage,
)
from lastwords.liveness import process_id
from lastwords.liveness.endings import UNKNOWN, OomCounts, OomKills, ending_text
from lastwords.liveness.pidfd import PidWatcher
from lastwords.liveness.robust_mutex import EndKind, LifeWatch, state_of, watch
from lastwords.vocabulary import DeathSource, ProcessId

_log = logging.getLogger(__name__)

OnDeath = Callable[[int, DeathSource, float], None]
"""Called with the rank that died, who says so, and the monotonic second at which it was known."""

OnRelease = Callable[[int], None]
"""Called with a rank that gave its life line back: what follows is no death."""

OnEnding = Callable[[int, str], None]
"""Called with a rank that has died, after `OnDeath`, and how it has ended, for people. Not where nobody knows."""


AGAIN_S = 1.0
"""Before another try of a way of watching that lacks a descriptor or a thread. The other way works meanwhile."""


@dataclass(slots=True)
class _WatchedLine:
    process: ProcessId
    life_path: Path | None
    life: LifeWatch | None = None
    pid_token: int | None = None
    by_pid: bool = True
    counts: OomCounts | None = None
    kills: OomKills = UNKNOWN  # before it died
    died: bool = False
    told: bool = False  # how

    @property
    def is_whole(self) -> bool:
        """Whether it is watched in every way that is meant for it."""
        has_life = self.life is not None or self.life_path is None
        return has_life and (self.pid_token is not None or not self.by_pid)


class HostWatch:
    """Calls `on_death` at most once for each added process, from a thread of its own; the calls may overlap.

    A process that released its life line before it ended is no death; `on_release` hears of it, in the same way. How
    a death came about is told after it, by `on_ending`: to read that may take as long as to free the process's memory.
    `add`, `remove` and `stop` may be called from any thread, also from within the call-backs.
    """

    def __init__(
        self,
        on_death: OnDeath,
        *,
        on_release: OnRelease = lambda rank: None,
        on_ending: OnEnding = lambda rank, how: None,
        clock: Clock = mono_s,
    ) -> None:
        self._on_death = on_death
        self._on_release = on_release
        self._on_ending = on_ending
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[int, _WatchedLine] = {}
        self._lacking: dict[int, tuple[ProcessId, str]] = {}  # what does not work in watching them, and has been said
        self._pids = PidWatcher()

    def start(self) -> None:
        """Start the thread that all others may lack later. UnavailableError if there is none, after some seconds."""
        self._pids.start()

    def later(self, pause_s: float, what: Callable[[], None]) -> None:
        """Call `what` after `pause_s`, once `start` was called, in the thread of the call-backs."""
        self._pids.later(pause_s, what)

    def add(
        self, rank: int, life_path: Path | None, process: ProcessId, *, by_pid: bool = True
    ) -> tuple[DeathSource, ...]:
        """Watch `process` as `rank`, in place of an earlier process of that rank; returns the sources in use.

        A life line that is missing, or is another process's, is logged and left out; the same for a pidfd. What fails
        for a shortage is tried again. Raises UnavailableError if neither can be had: a shortage, if that is why one of
        them cannot. Must be a process of this host. by_pid=False leaves the pidfd out: for a process that shares
        /dev/shm but not the pid namespace, where its pid means another one.
        """
        self.remove(rank)
        entry = _WatchedLine(process, life_path, by_pid=by_pid)
        if by_pid:
            entry.counts = OomCounts.around(process.pid)
            entry.kills = entry.counts.read()
        with self._lock:
            self._entries[rank] = entry
        ways = [*([self._by_life_line] if life_path is not None else []), *([self._by_pidfd] if by_pid else [])]
        sources: list[DeathSource] = []
        problems: list[LastWordsError] = []
        short = []
        for way in ways:
            try:
                sources.append(way(rank, entry))
            except (UnavailableError, ConfigError, FormatError, StorageError) as error:
                problems.append(error)
                if is_shortage(error):
                    short.append(way)
        text = "; ".join(map(str, problems))
        self._tell_lacking(rank, process, text)
        if not sources:
            with self._lock:
                if self._entries.get(rank) is entry:
                    del self._entries[rank]
            cause = next(filter(is_shortage, problems), None)
            raise UnavailableError(f"cannot watch rank {rank} on this host: {text}") from cause
        for way in short:
            self._add_later(rank, entry, way)
        return tuple(sources)

    def when_ended(self, process: ProcessId, on_end: Callable[[], None]) -> None:
        """Call `on_end` once when another process of this host ends, which is no rank. Raises UnavailableError."""
        self._pids.add(process, on_end)

    def remove(self, rank: int) -> None:
        """Stop watching a rank; afterwards its end is not reported. Harmless if it is not watched."""
        with self._lock:
            entry = self._entries.pop(rank, None)
        if entry is not None:
            self._forget(entry)

    def stop(self) -> None:
        """Stop watching all ranks."""
        with self._lock:
            entries = [self._entries.pop(rank) for rank in sorted(self._entries)]
        for entry in entries:
            self._forget(entry)
        self._pids.stop()

    def _by_life_line(self, rank: int, entry: _WatchedLine) -> DeathSource:
        assert entry.life_path is not None, "only where there is one"
        entry.life = watch(entry.life_path, functools.partial(self._life_ended, rank, entry), process=entry.process)
        return DeathSource.ROBUST_MUTEX

    def _by_pidfd(self, rank: int, entry: _WatchedLine) -> DeathSource:
        entry.pid_token = self._pids.add(entry.process, functools.partial(self._pid_ended, rank, entry))
        return DeathSource.PIDFD

    def _add_later(self, rank: int, entry: _WatchedLine, way: Callable[[int, _WatchedLine], DeathSource]) -> None:
        def again() -> None:
            if not self._has(rank, entry):
                return
            try:
                way(rank, entry)
            except (UnavailableError, ConfigError, FormatError, StorageError) as error:
                if is_shortage(error):
                    self._add_later(rank, entry, way)
                else:
                    self._tell_lacking(rank, entry.process, str(error))
                return
            if entry.is_whole:
                self._tell_lacking(rank, entry.process, "")
            if not self._has(rank, entry):  # removed meanwhile
                self._forget(entry)

        self._pids.later(AGAIN_S, again)

    def _tell_lacking(self, rank: int, process: ProcessId, text: str) -> None:
        """Why not every way of watching a process works: said once, however often it is tried, and once it is over."""
        with self._lock:
            said = self._lacking.pop(rank, None)
            if text:
                self._lacking[rank] = (process, text)
        if text and said != (process, text):
            _log.warning("not every way of watching rank %d (process %d) works: %s", rank, process.pid, text)
        elif not text and said is not None and said[0] == process:
            _log.warning("every way of watching rank %d (process %d) works now", rank, process.pid)

    def _has(self, rank: int, entry: _WatchedLine) -> bool:
        with self._lock:
            return self._entries.get(rank) is entry

    def _forget(self, entry: _WatchedLine) -> None:
        if entry.life is not None:
            entry.life.stop()
        if entry.pid_token is not None:
            self._pids.remove(entry.pid_token)

    def _life_ended(self, rank: int, entry: _WatchedLine, kind: EndKind) -> None:
        self._ended(rank, entry, DeathSource.ROBUST_MUTEX, kind)
        self._tell_ending(rank, entry, last=entry.pid_token is None)

    def _pid_ended(self, rank: int, entry: _WatchedLine) -> None:
        kind = EndKind.DIED
        if entry.life_path is not None:
            try:
                kind = state_of(entry.life_path, process=entry.process) or EndKind.DIED
            except (UnavailableError, ConfigError, FormatError, StorageError):
                pass  # the file is gone or another process's by now; the pidfd's word stands
        self._ended(rank, entry, DeathSource.PIDFD, kind)
        self._tell_ending(rank, entry, last=True)

    def _ended(self, rank: int, entry: _WatchedLine, source: DeathSource, kind: EndKind) -> None:
        now_s = self._clock()
        with self._lock:
            if self._entries.get(rank) is not entry:
                return  # removed, replaced, or reported by the other source
            del self._entries[rank]
        if kind is EndKind.DIED:
            self._on_death(rank, source, now_s)
            entry.died = True
        else:
            self._on_release(rank)

    def _tell_ending(self, rank: int, entry: _WatchedLine, *, last: bool) -> None:
        """last: nobody will look again, so it is told even if its exit status is not known."""
        if not entry.died or entry.told or not entry.by_pid:
            return
        code = process_id.exit_code(entry.process)
        if code is None and not last:
            return
        with self._lock:
            if entry.told:
                return
            entry.told = True
        kills = UNKNOWN if entry.counts is None else entry.counts.read()
        if how := ending_text(code, entry.kills, kills):
            self._on_ending(rank, how)
