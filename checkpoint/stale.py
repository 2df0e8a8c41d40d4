"""Temporary directories that nobody will publish any more: whose they are, and when they may go.

A directory may go when its generation is older, no process writes in it, and the controller of its generation has
ended. Locks tell: they end with the process that holds them, however it ends, also on another host of a shared file
system. A writer locks the file that it writes; a controller locks its claim, since between a writer's last byte and
the final name nobody has a file of that directory open.
"""

from __future__ import annotations

import logging
from pathlib import Path

from lastwords.checkpoint import layout
from lastwords.checkpoint.manifest import read_manifest
from lastwords.checkpoint.part import read_part
from lastwords.checkpoint.system import REAL_OS, Os, close, remove_tree
from lastwords.errors import CheckpointError, FormatError, StorageError

logger = logging.getLogger(__name__)


class Claim:
    """Held by a controller as long as it lives: its temporary directories in `root` are its own. Made by `take`."""

    def __init__(self, path: Path, fd: int, os: Os) -> None:
        self._path = path
        self._fd = fd
        self._os = os

    @classmethod
    def take(cls, root: Path, job: str, generation: int, os: Os = REAL_OS) -> Claim | None:
        """None where the file system refuses, which is logged: other jobs may then tidy up what this one writes."""
        path = layout.claim_path(root, job, generation)
        try:
            try:
                fd = os.create(path, direct=False)
            except FileExistsError:
                fd = os.open_read(path)
            if not os.try_lock(fd):
                logger.warning("%s is held by another controller of this job and generation", path)
        except OSError as error:
            logger.warning("cannot claim the temporary directories in %s: %s", root, error)
            return None
        return cls(path, fd, os)

    def release(self) -> None:
        """Nothing of this controller is under way any more."""
        try:
            self._os.unlink(self._path)
            close(self._fd, self._path, self._os)
        except (OSError, StorageError) as error:
            logger.warning("could not give %s back: %s", self._path, error)


def discard(tmp_dir: Path, os: Os = REAL_OS) -> None:
    """Removes a directory that will never be published; a failure is only logged, since nobody can act on it."""
    try:
        remove_tree(tmp_dir, os)
    except StorageError as error:
        logger.warning("could not remove %s, which is not needed any more: %s", tmp_dir, error)


def remove_stale(root: Path, job: str, generation: int, os: Os = REAL_OS) -> list[Path]:
    """Removes what writers of older generations left unfinished in `root`; returns what went.

    A directory stays if a living process writes in it, if the controller of its generation lives, if another job has
    marked it as its own, or if it is a whole checkpoint that only lacks its name. Failures are only logged.
    """
    removed: list[Path] = []
    try:
        names = os.listdir(root)
    except OSError as error:
        logger.warning("could not look for stale directories in %s: %s", root, error)
        return removed
    claimed = _claimed(root, names, generation, os)
    for name in names:
        found = layout.TemporaryName.parse(name)
        if found is None or found.generation >= generation or found.generation in claimed:
            continue
        if _in_use(root / name, job, os) or _lacks_only_its_name(root, root / name, found.global_step, os):
            continue
        discard(root / name, os)
        removed.append(root / name)
    return removed


def _claimed(root: Path, names: list[str], generation: int, os: Os) -> set[int]:
    """Older generations with a living controller; claims of dead ones are removed."""
    claimed: set[int] = set()
    for name in names:
        number = layout.parse_claim(name)
        if number is None or number >= generation:
            continue
        try:
            if _unlocked(root / name, os):
                os.unlink(root / name)  # a name is never used again, so nobody can be about to lock it
            else:
                claimed.add(number)
        except FileNotFoundError:
            pass  # its controller has just ended
        except (OSError, StorageError) as error:
            logger.info("cannot tell whether the controller of %s lives: %s", root / name, error)
            claimed.add(number)
    return claimed


def _in_use(tmp_dir: Path, job: str, os: Os) -> bool:
    try:
        for rank_name in os.listdir(tmp_dir):
            rank_dir = tmp_dir / rank_name
            if layout.parse_rank_dir(rank_name) is None or not os.is_directory(rank_dir):
                continue
            for name in os.listdir(rank_dir):
                if name == layout.PART_NAME:
                    if read_part(rank_dir, os).job not in ("", job):
                        return True
                elif not _unlocked(rank_dir / name, os):
                    return True
    except FileNotFoundError:
        return True  # somebody else is removing it
    except FormatError:
        return False  # a part.json that was never finished
    except (OSError, StorageError) as error:
        logger.warning("could not look into %s: %s", tmp_dir, error)
        return True
    return False


def _lacks_only_its_name(root: Path, tmp_dir: Path, step: int, os: Os) -> bool:
    """A manifest is the last thing to be written: these are whole last words, and the only ones of their step."""
    final = layout.checkpoint_dir(root, step)
    if not os.exists(tmp_dir / layout.MANIFEST_NAME) or os.is_directory(final):
        return False
    try:
        read_manifest(tmp_dir, os)
    except CheckpointError:
        return False
    logger.warning("%s is a whole checkpoint that never got its name: rename it to %s, or remove it", tmp_dir, final)
    return True


def _unlocked(path: Path, os: Os) -> bool:
    fd = os.open_read(path)
    try:
        return os.try_lock(fd)
    finally:
        close(fd, path, os)
