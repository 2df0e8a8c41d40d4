"""A finished checkpoint takes its final name, and what has that name is replaced or pushed aside.

Others publish, prune and look meanwhile. So what was looked at before a rename is looked at again after it, and only
what the new checkpoint replaces is removed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator
from pathlib import Path

from lastwords.checkpoint.appearing import give_name, sync_name
from lastwords.checkpoint.manifest import Manifest
from lastwords.checkpoint.removal import is_older, move_aside
from lastwords.checkpoint.stale import discard
from lastwords.checkpoint.system import Os, storage_error, storage_errors, sync_directory
from lastwords.errors import StorageError

logger = logging.getLogger(__name__)


def rename_into_place(root: Path, tmp_dir: Path, final: Path, manifest: Manifest, os: Os) -> None:
    """Gives what is finished and durable its final name, as `publish` says. StorageError."""
    while True:
        try:
            give_name(tmp_dir, final, os)
            return
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
        try:
            if _take_its_place(root, tmp_dir, final, manifest, os):
                return
        except FileNotFoundError as error:
            if not os.exists(tmp_dir):
                raise storage_error("publishing", final, error) from error
            # What had the name has just been pruned.


def _take_its_place(root: Path, tmp_dir: Path, final: Path, manifest: Manifest, os: Os) -> bool:
    """Publishes where there is a checkpoint of this step; False if somebody else takes the name meanwhile.

    FileNotFoundError, and nothing is done, if it is gone.
    """
    replaces = is_older(final, manifest, os)
    if replaces:
        with _unless_gone("publishing", final):
            exchanged = os.exchange(tmp_dir, final)
        if exchanged:
            sync_name(final, os)
            put_away(tmp_dir, final, manifest, os)
            return True
    # First the old one gets its new name, under which scans still find it; then the new one is published. A crash in
    # between leaves the old one visible, under the other name, and the new one not. The fsync keeps their order: were
    # only the second rename to survive, the old one would be lost.
    with _unless_gone("publishing", final):
        aside = move_aside(final, final, os)
    sync_directory(root, os)
    try:
        give_name(tmp_dir, final, os)
    except StorageError as error:
        if error.errno != errno.EEXIST:
            raise
        return False
    if replaces and is_older(aside, manifest, os):
        # Hidden first, and durably so: a crash half-way through removing it must not leave a visible torso.
        with storage_errors("removing", aside), contextlib.suppress(FileNotFoundError):
            os.rename(aside, tmp_dir)
        sync_directory(root, os)
        put_away(tmp_dir, final, manifest, os)
    return True


def put_away(tmp_dir: Path, final: Path, manifest: Manifest, os: Os) -> None:
    """Removes what had the name before. It may not be what was looked at: others can publish in between."""
    with storage_errors("looking at", tmp_dir):
        is_there = os.is_directory(tmp_dir)
    if not is_there or is_older(tmp_dir, manifest, os):
        discard(tmp_dir, os)
        return
    with storage_errors("keeping", tmp_dir):
        aside = move_aside(tmp_dir, final, os)
    sync_directory(final.parent, os)
    logger.warning("%s was published at the same moment as %s; both are kept", aside, final)


@contextlib.contextmanager
def _unless_gone(doing: str, path: Path) -> Iterator[None]:
    """As `storage_errors`, but for a FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(doing, path, error) from error
