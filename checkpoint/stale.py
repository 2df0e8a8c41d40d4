"""Temporary directories that nobody will publish any more: whose they are, and when they may go.

A directory may go when no process writes in it and the controller of its job and generation has ended. Locks tell:
they end with the process that holds them, however it ends, also on another host of a shared file system. A writer
locks the file that it writes; a controller locks its claim, since between a writer's last byte and the final name
nobody has a file of that directory open.

A lock that is free proves less where the file system keeps locks to one host, or has none. So a directory of another
job goes at once only where its controller's claim says that it ran on this host; else it has to be quiet for a day.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lastwords import clock
from lastwords.checkpoint import layout, removal
from lastwords.checkpoint.lock_file import has_name
from lastwords.checkpoint.manifest import Claimed, Kind, read_manifest
from lastwords.checkpoint.retry import patiently
from lastwords.checkpoint.system import (
    REAL_OS,
    Os,
    boot_id,
    close,
    pwrite_all,
    read_whole,
    remove_tree,
    storage_errors,
    sync_directory,
)
from lastwords.errors import CheckpointError, FormatError, IncompleteError, StorageError

logger = logging.getLogger(__name__)

QUIET_S = 86_400.0
"""A day without any change: longer than any save, and than clocks of two hosts differ."""

_CLAIM_TRIES = 20
_CLAIM_PAUSE_S = 0.05
"""Whoever looks whether a claim is held has it locked for that moment, and a start that waits looks all the time."""
_BOOT_BYTES_MAX = 4096


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
            for _ in range(_CLAIM_TRIES):
                fd = patiently(lambda: cls._lock(path, os), os)
                if fd is not None:
                    return cls(path, fd, os)
                os.pause(_CLAIM_PAUSE_S)
        except StorageError as error:
            logger.warning("cannot claim the temporary directories in %s: %s", root, error)
            return None
        logger.warning("%s belongs to another controller of this job and generation", path)
        return None

    @staticmethod
    def _lock(path: Path, os: Os) -> int | None:
        """None if somebody else holds it, or has removed it between its creation and the lock."""
        with storage_errors("claiming", path):
            try:
                fd = os.create(path, direct=False)
            except FileExistsError:
                fd = os.open_lock(path)
            try:
                if os.try_lock(fd) and has_name(path, fd, os):
                    pwrite_all(os, fd, boot_id())
                    return fd
            except BaseException:
                close(fd, path, os)
                raise
            close(fd, path, os)
            return None

    def release(self) -> None:
        """Nothing of this controller is under way any more."""
        try:
            self._os.unlink(self._path)
            close(self._fd, self._path, self._os)
        except (OSError, StorageError) as error:
            logger.warning("could not release %s: %s", self._path, error)


def discard(tmp_dir: Path, os: Os = REAL_OS) -> bool:
    """Removes a directory that will never be published; a failure is only logged: nobody else can act on it.

    Returns whether it is gone.
    """
    try:
        remove_tree(tmp_dir, os)
    except StorageError as error:
        logger.warning("could not remove %s, which is no longer needed: %s", tmp_dir, error)
        return False
    return True


def discard_own(tmp_dir: Path, os: Os = REAL_OS) -> bool:
    """As `discard`, but only of what this directory's own attempt has written.

    If the publication exchanged this directory with another checkpoint, that checkpoint is renamed, not deleted,
    unless it is damaged or the published one replaces it.
    """
    name = layout.TemporaryName.parse(tmp_dir.name)
    said = Claimed.if_readable(tmp_dir, os)
    if name is None or said == Claimed():
        return discard(tmp_dir, os)
    own = removal.name_of(said) == name
    return (not own and _is_put_aside(tmp_dir, name.global_step, os)) or discard(tmp_dir, os)


def keep(tmp_dir: Path, kept: Path, os: Os = REAL_OS) -> Path | None:
    """Moves a directory with finished files out of the way of `remove_stale`; where it is now, None if it is empty.

    Raises StorageError; then it lies where it was.
    """
    with storage_errors("keeping", tmp_dir):
        if not os.is_directory(tmp_dir):
            return None
        names = [name for name in os.listdir(tmp_dir) if layout.parse_rank_dir(name) is not None]
        if not any(os.exists(tmp_dir / name / layout.PART_NAME) for name in names) and not os.exists(
            tmp_dir / layout.MANIFEST_NAME
        ):
            return None
        os.rename(tmp_dir, kept)
    sync_directory(kept.parent, os)
    return kept


def remove_stale(root: Path, job: str, generation: int, os: Os = REAL_OS) -> list[Path]:
    """Removes what ended controllers and their writers left unfinished in `root`; returns what went.

    Directories of this job's own and later generations stay, and any in which a living process writes, whose controller
    may live, or which are a whole checkpoint that only lacks its name. Where another one has that name by now, which it
    does not make way for, it becomes `...-replaced-K`. One with a finished part of last words, of a step that its job
    has not published, is renamed to `unpublished-...`. What was being pruned goes, whosever it was. Failures are only
    logged.
    """
    removed: list[Path] = []
    try:
        names = os.listdir(root)
    except OSError as error:
        logger.warning("could not look for stale directories in %s: %s", root, error)
        return removed
    removed += removal.finish(root, names, os)
    claims = _Claims.look(root, names, (job, generation), os)
    for name in names:
        found = layout.TemporaryName.parse(name)
        if found is None or (found.job == job and found.generation >= generation):
            continue
        if claims.may_live(found) or _in_use(root / name, os):
            continue
        certain = claims.has_died_here(found) or found.job == job
        if not (certain or _is_quiet(root / name, os)):
            continue
        if _lacks_only_its_name(root, root / name, found.global_step, os):
            continue
        if _is_put_aside(root / name, found.global_step, os):
            continue
        if not _is_kept(root, root / name, found, os):
            discard(root / name, os)
            removed.append(root / name)
    claims.remove_dead(root, os)
    return removed


def under_way(roots: Sequence[Path], own: tuple[str, int], os: Os = REAL_OS) -> dict[str, tuple[float, ...]]:
    """Temporary directories that controllers of earlier generations may still publish; for each, when what changed.

    Earlier by the claims in the first of `roots`, where the generations are drawn. own: this job and generation.
    Where the file system refuses to say, nothing is under way.
    """
    found: dict[str, tuple[float, ...]] = {}
    try:
        held = _Claims.look(roots[0], os.listdir(roots[0]), own, os).held
        for root in roots:
            for name in os.listdir(root):
                temporary = layout.TemporaryName.parse(name)
                whose = None if temporary is None else (temporary.job, temporary.generation)
                if whose in held and whose[1] < own[1]:
                    found[str(root / name)] = _changed(root / name, os)
    except OSError as error:
        logger.info("cannot determine what is being published in %s: %s", roots[0], error)
    return found


def held(root: Path, names: list[str], os: Os = REAL_OS) -> frozenset[tuple[str, int]]:
    """Job and generation of every controller whose claim, out of `names` in `root`, says that it may live."""
    return _Claims.look(root, names, ("", 0), os).held


def _changed(tmp_dir: Path, os: Os) -> tuple[float, ...]:
    try:
        return tuple(os.modified_unix_s(path) for path in _with_content(tmp_dir, os))
    except FileNotFoundError:
        return ()  # it has just been published, or removed; the next look knows


@dataclass(frozen=True, slots=True)
class _Claims:
    """What the claims in a directory say of other controllers, by (job, generation)."""

    held: frozenset[tuple[str, int]]
    dead: dict[tuple[str, int], bool]  # True: it ran on this host

    @staticmethod
    def look(root: Path, names: list[str], own: tuple[str, int], os: Os) -> _Claims:
        held: set[tuple[str, int]] = set()
        dead: dict[tuple[str, int], bool] = {}
        here = boot_id()
        for name in names:
            whose = layout.parse_claim(name)
            if whose is None or whose == own or (whose[0] == own[0] and whose[1] > own[1]):
                continue
            try:
                if _unlocked(root / name, os):
                    dead[whose] = read_whole(root / name, os, bytes_max=_BOOT_BYTES_MAX) == here
                else:
                    held.add(whose)
            except FileNotFoundError:
                pass  # its controller has just ended
            except (OSError, StorageError) as error:
                logger.info("cannot tell whether the controller of %s lives: %s", root / name, error)
                held.add(whose)
        return _Claims(frozenset(held), dead)

    def may_live(self, name: layout.TemporaryName) -> bool:
        return (name.job, name.generation) in self.held

    def has_died_here(self, name: layout.TemporaryName) -> bool:
        return self.dead.get((name.job, name.generation), False)

    def remove_dead(self, root: Path, os: Os) -> None:
        """Claims of which nothing is left; a name is never used again, so nobody can be about to lock it."""
        try:
            left = {layout.TemporaryName.parse(name) for name in os.listdir(root)}
            needed = {(name.job, name.generation) for name in left if name is not None}
            for job, generation in sorted(self.dead.keys() - needed):
                path = layout.claim_path(root, job, generation)
                if self.dead[job, generation] or _is_quiet(path, os):
                    os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.info("could not remove the claims of ended controllers in %s: %s", root, error)


def _in_use(tmp_dir: Path, os: Os) -> bool:
    try:
        for rank_name in os.listdir(tmp_dir):
            rank_dir = tmp_dir / rank_name
            if layout.parse_rank_dir(rank_name) is None or not os.is_directory(rank_dir):
                continue
            for name in os.listdir(rank_dir):
                if name != layout.PART_NAME and not _unlocked(rank_dir / name, os):
                    return True
    except FileNotFoundError:
        return True  # somebody else is removing it
    except (OSError, StorageError) as error:
        logger.warning("could not look into %s: %s", tmp_dir, error)
        return True
    return False


def _with_content(path: Path, os: Os) -> Iterator[Path]:
    """It and everything in it: while one file grows, the times of the directories do not move."""
    inside = [path]
    for entry in inside:
        yield entry
        if os.is_directory(entry):
            inside += [entry / name for name in os.listdir(entry)]


def _is_quiet(path: Path, os: Os) -> bool:
    """Whether nothing in this directory, or of this file, has changed for a day."""
    try:
        for entry in _with_content(path, os):
            if clock.wall_ns() / 1e9 - os.modified_unix_s(entry) < QUIET_S:
                return False
    except OSError as error:
        logger.info("could not look into %s: %s", path, error)
        return False
    return True


def _lacks_only_its_name(root: Path, tmp_dir: Path, step: int, os: Os) -> bool:
    """A manifest is the last thing to be written: these are whole last words, and the only ones of their step."""
    final = layout.checkpoint_dir(root, step)
    if not os.exists(tmp_dir / layout.MANIFEST_NAME) or os.leads_to_directory(final):
        return False
    try:
        read_manifest(tmp_dir, os)
    except CheckpointError:
        return False
    logger.warning("%s is a complete checkpoint that was not published: rename it to %s, or remove it", tmp_dir, final)
    return True


def _is_put_aside(tmp_dir: Path, step: int, os: Os) -> bool:
    """A whole checkpoint whose name is another's: it was not published any more, or its name was taken a moment ago.

    What the one with the name replaces is left there when its publisher ends before it has removed it.
    """
    final = layout.checkpoint_dir(tmp_dir.parent, step)
    try:
        if not os.exists(tmp_dir / layout.MANIFEST_NAME) or read_manifest(tmp_dir, os).global_step != step:
            return False
        if _makes_way(tmp_dir, final, os):
            return False
        aside = removal.move_aside(tmp_dir, final, os)
        sync_directory(final.parent, os)
    except (CheckpointError, FileNotFoundError):
        return False  # damaged, or somebody else has it by now
    except OSError as error:
        logger.warning("could not give a name to %s, which is a complete checkpoint: %s", tmp_dir, error)
        return True
    logger.warning("%s is a complete checkpoint that was not published under its own name", aside)
    return True


def _makes_way(tmp_dir: Path, final: Path, os: Os) -> bool:
    try:
        return removal.is_older(tmp_dir, read_manifest(final, os), os)
    except (IncompleteError, FormatError):
        return False


def _is_kept(root: Path, tmp_dir: Path, name: layout.TemporaryName, os: Os) -> bool:
    """Whether finished parts are in it that their controller did not live to publish, or nobody can tell.

    Parts of a periodic checkpoint are not kept: jobs that end while they write one are nothing unusual.
    """
    if Kind.of(name.incident, name.attempt) is Kind.PERIODIC:
        return False
    final = layout.checkpoint_dir(root, name.global_step)
    if os.leads_to_directory(final) and name.job == Claimed.if_readable(final, os).job:
        return False
    kept_dir = layout.unpublished_dir(root, name.global_step, name.job, name.generation, name.incident, name.attempt)
    try:
        kept = keep(tmp_dir, kept_dir, os)
    except StorageError as error:
        logger.warning("left as it is: %s", error)
        return True
    if kept is not None:
        logger.warning("finished files of step %d were not published, and are kept in %s", name.global_step, kept)
    return kept is not None


def _unlocked(path: Path, os: Os) -> bool:
    fd = os.open_lock(path)
    try:
        return os.try_lock(fd)
    finally:
        close(fd, path, os)
