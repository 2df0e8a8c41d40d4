"""Open files of a job's directory in /dev/shm, in case somebody empties that while the job runs.

systemd removes whatever a user has there as soon as he logs out (`RemoveIPC=yes`, its default), and so do clean-up
scripts. Black boxes and copies are found by name; those of a rank that dies afterwards would be lost with their names.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

_log = logging.getLogger(__name__)

_NAMES = re.compile(r"rank_\d+\.(box|copy\d)")
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def open_by_name(path: Path) -> int:
    """A descriptor to read from; OSError."""
    return os.open(path, _FLAGS)


class HeldFiles:
    """Descriptors of all ranks' black boxes and copies in `directory`. Any thread.

    A file that is gone while others are there was removed by its owner: its memory is kept until the next `follow`.
    """

    def __init__(self, directory: Callable[[], Path]) -> None:
        self._directory = directory
        self._held: dict[str, tuple[int, int]] = {}
        """Name -> inode and descriptor."""
        self._lock = threading.Lock()
        self._told = self._closed = False

    def follow(self) -> None:
        """See which files there are now; some 50 µs with eight ranks."""
        there = self._there()
        if there is None:
            return
        with self._lock:
            if self._closed:
                return
            if not self._told and self._emptied(there):
                self._tell()
            for name in () if self._told else self._held.keys() - there.keys():
                os.close(self._held.pop(name)[1])
            for name, inode in there.items():
                if name in self._held and self._held[name][0] == inode:
                    continue
                try:
                    fd = open_by_name(self._directory() / name)
                except OSError:  # gone again; or no descriptor is left, which costs nothing as long as there are names
                    continue
                if name in self._held:
                    os.close(self._held[name][1])
                self._held[name] = os.fstat(fd).st_ino, fd

    def open(self, path: Path) -> int:
        """A descriptor to read from, of the file that was there last; OSError."""
        try:
            return open_by_name(path)
        except FileNotFoundError:
            with self._lock:
                if path.name not in self._held:
                    raise
                return os.dup(self._held[path.name][1])

    def copies(self) -> list[Path]:
        """Where files with whole copies of ranks are, or were before the directory was emptied, sorted."""
        there = self._there()
        with self._lock:
            lost = there is None or self._told or self._emptied(there)
            names = {*self._held, *(there or ())} if lost else there or ()
            return [self._directory() / name for name in sorted(names) if ".copy" in name]

    def close(self) -> None:
        """Hold none any more."""
        with self._lock:
            self._closed = True
            while self._held:
                os.close(self._held.popitem()[1][1])

    def _there(self) -> dict[str, int] | None:
        """None if that cannot be seen now: no descriptor is left, say."""
        try:
            with os.scandir(self._directory()) as found:
                return {one.name: one.inode() for one in found if _NAMES.fullmatch(one.name)}
        except FileNotFoundError:
            return {}
        except OSError as error:
            _log.warning("the files in %s cannot be looked for: %s", self._directory(), error)
            return None

    def _emptied(self, there: dict[str, int]) -> bool:
        return bool(self._held) and self._held.keys().isdisjoint(there)

    def _tell(self) -> None:
        self._told = True
        _log.warning(
            "somebody has emptied %s while the job runs: a rank that dies is saved all the same, but a controller "
            "that dies cannot be followed. Where systemd does so when you log out, run `loginctl enable-linger`",
            self._directory(),
        )
