"""Starts the controller again where it was killed, or is silent, and no rank of its host is left that would do so.

Ranks of other hosts that still hold everything then save, and nothing is lost. As long as ranks of this host live, it
is their turn first.
"""

from __future__ import annotations

from pathlib import Path

from lastwords.errors import UnavailableError
from lastwords.liveness.pidfd import PidWatcher
from lastwords.optim_wrapper.launch.successor import ControllerWatch
from lastwords.processor.events import ProcessorOptions
from lastwords.processor.ring import Silence

AGAIN_S = 1.0
"""Before another try where no thread can be started."""


class Standby:
    """For one host, and one controller after the other. One thread.

    Raises UnavailableError if it lacks descriptors, or no thread can be started.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._ranks: set[int] = set()
        self._watch: ControllerWatch | None = None
        self._pids = PidWatcher()
        self._pids.start()

    def controlled(self, rank: int, path: Path) -> None:
        """A rank of this host has a controller, which keeps its state in `path`, on this host."""
        if path != self._path:
            self._forget()
            self._path = path
            self._watch = ControllerWatch(
                "the launcher",
                path,
                self._pids.add,
                lambda: len(self._ranks),
                lambda: self._path == path,
                Silence(ProcessorOptions()),
                lambda: not self._ranks,
            )
            self._start(self._watch)
        self._ranks.add(rank)

    def ended(self, rank: int) -> None:
        """The process of this rank has ended."""
        self._ranks.discard(rank)

    def end(self) -> None:
        """No controller is started any more; one that is there ends with its job."""
        self._forget()
        self._pids.stop()

    def _start(self, watch: ControllerWatch) -> None:
        try:
            watch.start(patiently=False)
        except UnavailableError:
            self._pids.later(AGAIN_S, lambda: self._start(watch))

    def _forget(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._path = self._watch = None
        self._ranks.clear()
