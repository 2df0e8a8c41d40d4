"""Reading a checkpoint that somebody else may replace meanwhile: told from damage, and tried once more."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from lastwords.checkpoint import layout
from lastwords.checkpoint.load import Checkpoint, latest, open_checkpoint
from lastwords.checkpoint.system import REAL_OS, Os, close, storage_errors, where_it_leads
from lastwords.errors import CheckpointError, IncompleteError, MismatchError, ReplacedError

logger = logging.getLogger(__name__)

T = TypeVar("T")

Stamp = tuple[int, ...]


def read_checkpoint(path: Path, read: Callable[[Checkpoint], T], os: Os = REAL_OS, *, checked: bool = True) -> T:
    """`read(checkpoint)` of the checkpoint at `path`, or of the newest complete one in it.

    If that fails and another checkpoint lies there by then, it is done once more, with that one: `read` has to begin
    anew. checked: `read` holds all that it uses against checksums; otherwise its success counts only if nothing was
    replaced. Raises ReplacedError if the second one was replaced too, and whatever `read` raises.
    """
    try:
        return _read_once(path, read, os, checked)
    except ReplacedError as error:
        logger.warning("%s; reading it again", error)
    return _read_once(path, read, os, checked)


def find_checkpoint(path: Path, os: Os = REAL_OS) -> Path:
    """`path` itself if it is a checkpoint, else the newest complete one in it. IncompleteError if there is none."""
    if os.exists(path / layout.MANIFEST_NAME) or _is_named(path):
        return path
    newest = latest(path, os=os)
    if newest is None:
        raise IncompleteError(
            f"there is no complete checkpoint at {path} or in it; see what is there with `lastwords inspect {path}`",
            missing=(str(path),),
        )
    return newest


def _is_named(path: Path) -> bool:
    """Whether the path, or what it leads to, has a checkpoint's name."""
    return any(layout.CheckpointName.parse(name) is not None for name in (path.name, where_it_leads(path).name))


def _read_once(path: Path, read: Callable[[Checkpoint], T], os: Os, checked: bool) -> T:
    found = find_checkpoint(path, os)
    before = stamp_of(found, os) if found == path else stamp_of_chosen(found, os)
    with damage_told_from_replacement(found, before, os), open_checkpoint(found, os) as checkpoint:
        result = read(checkpoint)
    if not checked:
        refuse_replaced(found, before, os)
    return result


@contextlib.contextmanager
def damage_told_from_replacement(directory: Path, before: Stamp | None, os: Os = REAL_OS) -> Iterator[None]:
    """ReplacedError for an error of reading, if what lies at `directory` is not what had the stamp `before`."""
    try:
        yield
    except MismatchError:
        raise
    except CheckpointError as error:
        refuse_replaced(directory, before, os, error)
        raise


def stamp_of(path: Path | None, os: Os = REAL_OS) -> Stamp | None:
    """What tells a checkpoint, or a file, from another one that takes its place; None if there is none."""
    if path is None:
        return None
    if os.leads_to_directory(path):
        path = path / layout.MANIFEST_NAME
    try:
        fd = os.open_read(path)
    except OSError:  # told by whoever reads it
        return None
    try:
        with storage_errors("looking at", path):
            return os.stamp(fd)
    finally:
        close(fd, path, os)


def stamp_of_chosen(path: Path, os: Os = REAL_OS) -> Stamp | None:
    """As `stamp_of`, of a checkpoint that was seen to be there: ReplacedError if it is gone."""
    stamp = stamp_of(path, os)
    if stamp is None and not os.exists(path):
        raise ReplacedError(
            f"{path} has been removed since it was chosen; nothing is damaged (if other hosts still see it, check that "
            "its disk is mounted here)"
        )
    return stamp


def refuse_replaced(
    directory: Path, before: Stamp | None, os: Os = REAL_OS, why: CheckpointError | None = None
) -> None:
    """ReplacedError if what lies at `directory` is not what had the stamp `before`."""
    if before is not None and stamp_of(directory, os) != before:
        raise ReplacedError(f"{directory} was replaced or removed while it was read; nothing is damaged") from why
