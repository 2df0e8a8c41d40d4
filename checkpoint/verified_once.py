"""Checkpoints that this process has read byte for byte, so that nobody is removed for the sake of a damaged one.

A published file's checksums were taken from memory, while it was written: what the disk has made of it shows only when
it is read. That takes as long as the disk takes, so each checkpoint is read once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import xxhash

from lastwords.checkpoint import layout, load
from lastwords.checkpoint.manifest import Claimed
from lastwords.checkpoint.reading import refuse_replaced, stamp_of
from lastwords.checkpoint.system import REAL_OS, Os, storage_errors
from lastwords.errors import StorageError

Watch = Callable[[Path], AbstractContextManager[Callable[[int], None] | None]]
"""Entered while a checkpoint is read. It gives what hears of the bytes so far; what that raises ends the reading."""


class VerifiedOnce:
    """What reading has shown of checkpoints. It holds while their files stay as they are, by the stamps of all of them.

    For one thread at a time. watch: see `Watch`.
    """

    def __init__(self, watch: Watch = lambda _: contextlib.nullcontext()) -> None:
        self._watch = watch
        self._known: dict[Claimed, tuple[int, str]] = {}

    def problem(self, path: Path, said: Claimed, os: Os = REAL_OS) -> str:
        """What is wrong with the checkpoint, "" if it is sound; it is read, unless that is known.

        Raises StorageError if it could not be read, which says nothing about it, BusyError or ReplacedError if another
        process removes or replaces it.
        """
        stamps = _stamps(path, os)
        known = self._known.get(said)
        if known is None or known[0] != stamps:
            known = self._known[said] = stamps, self._read(path, os)
        return known[1]

    def known_problem(self, path: Path, said: Claimed, os: Os = REAL_OS) -> str:
        """As `problem`, as far as that is known: nothing is read. StorageError."""
        known = self._known.get(said)
        return known[1] if known is not None and known[1] and known[0] == _stamps(path, os) else ""

    def forget(self, said: Claimed) -> None:
        """The checkpoint is gone."""
        self._known.pop(said, None)

    def _read(self, path: Path, os: Os) -> str:
        before = stamp_of(path, os)
        with self._watch(path) as progress:
            found = load.examine_data(path, os, progress)
        if found.status is load.Status.COMPLETE:
            return ""
        refuse_replaced(path, before, os)
        if found.status is load.Status.UNREADABLE:
            raise StorageError(found.why, errno=found.errno)
        return found.why


def _stamps(path: Path, os: Os) -> int:
    """Of all files of a checkpoint, as one number."""
    seen = xxhash.xxh3_64()
    with storage_errors("looking at the files of", path):
        for name in os.listdir(path):
            inside = path / name
            files = os.listdir(inside) if layout.parse_rank_dir(name) is not None and os.is_directory(inside) else []
            for file in [inside / one for one in files] or [inside]:
                seen.update(repr((name, file.name, os.stamp(file))).encode())
    return int(seen.intdigest())
