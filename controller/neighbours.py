"""Ranks on the controller's own host, watched by itself: their deaths are known before any connection breaks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lastwords import threads
from lastwords.checkpoint.retry import PAUSES_S
from lastwords.controller import handover
from lastwords.errors import LastWordsError, is_shortage
from lastwords.liveness import leftovers, paths, process_id
from lastwords.liveness.watch import HostWatch
from lastwords.vocabulary import DeathSource, ProcessId

_log = logging.getLogger(__name__)


class Neighbours:
    """The host watch behind a thread of its own, since adding a watch opens files and may wait for a thread.

    `on_death(rank, source, known_mono_s)`, `on_watched(rank)`, `on_release(rank)` and `on_ending(rank, how)` come from
    threads of their own; methods are for the loop's thread.
    """

    def __init__(
        self,
        job: str,
        generation: int,
        on_death: Callable[[int, DeathSource, float], None],
        on_watched: Callable[[int], None],
        on_release: Callable[[int], None],
        on_ending: Callable[[int, str], None],
        nonce: str = "",
    ) -> None:
        self._job = job
        self._generation = generation
        self._nonce = nonce
        self._host_id = process_id.host_id()
        self._on_watched = on_watched
        self._watched: dict[int, ProcessId] = {}
        self._watch = HostWatch(on_death, on_release=on_release, on_ending=on_ending)
        self._jobs = ThreadPoolExecutor(1, thread_name_prefix="lastwords-host-watch")  # one keeps the order of calls

    def start(self) -> None:
        """Start the threads, and remove what ended jobs and killed controllers have left on this host.

        UnavailableError where there are none, after some seconds.
        """
        self._watch.start()
        with threads.starting("lastwords-host-watch"):
            self._jobs.submit(_clear_up)

    def welcome(self, rank: int, process: ProcessId) -> None:
        """An accepted rank: watch its process if it runs on this host, unless that is done already."""
        if process.host_id == self._host_id and self._watched.get(rank) != process:
            self._watched[rank] = process
            self._jobs.submit(self._add, rank, process)

    def part_with(self, rank: int) -> None:
        """The rank's process ends with permission; its end is nobody's business."""
        if self._watched.pop(rank, None) is not None:
            self._jobs.submit(self._watch.remove, rank)

    def stop(self) -> None:
        """Stop watching. Waits for threads: not for the loop's thread."""
        self._jobs.shutdown(wait=True)
        self._watch.stop()

    def _add(self, rank: int, process: ProcessId, tried: int = 0) -> None:
        try:
            self._watch.add(rank, paths.life_path(self._job, self._generation, rank, self._nonce), process)
            self._on_watched(rank)
        except LastWordsError as error:
            if is_shortage(error):  # too many open files, say: it passes, and until then a death is found out late
                self._add_later(rank, process, min(tried, len(PAUSES_S) - 1))
            elif tried < len(PAUSES_S):
                self._add_later(rank, process, tried)
            else:
                _log.warning(
                    ("rank %d cannot be watched on this host; its death will show only as a lost connection: %s"),
                    rank,
                    error,
                )
        except Exception:  # outermost: nobody looks at what a thread pool's job raises
            _log.exception("watching rank %d failed", rank)

    def _add_later(self, rank: int, process: ProcessId, tried: int) -> None:
        def again() -> None:
            if self._watched.get(rank) == process:
                with contextlib.suppress(RuntimeError):  # it has been stopped
                    self._jobs.submit(self._add, rank, process, tried + 1)

        self._watch.later(PAUSES_S[tried], again)


def _clear_up() -> None:
    try:
        handover.remove_dead_run_files()
        leftovers.remove_dead_job_dirs()
    except Exception:  # outermost: nobody looks at what a thread pool's job raises
        _log.exception("cleaning up failed")
