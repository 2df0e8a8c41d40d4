"""A published checkpoint goes: first out of sight, in one rename, then file by file.

The order of system calls is what invariants I5 and I9 rest on:

    locked      alone, so that nobody reads it, and nobody begins to before it is out of sight
    renamed     to a name that no reader takes for a checkpoint, and that says which one it was
    durable     the new name, so that no crash brings a torso back under the old one
    looked at   whether it is the one that was to go: another one may have taken its name before the rename
    closed      since NFS keeps a name for a file that is removed while it is open, and with it the directory
    removed     whoever finds the name later, and locks what is there alone, goes on with it (`finish`)
"""

from __future__ import annotations

import errno
import logging
from pathlib import Path

from lastwords.checkpoint import layout
from lastwords.checkpoint.lock_file import is_at
from lastwords.checkpoint.manifest import CheckpointKind, Claimed, Manifest, read_manifest
from lastwords.checkpoint.system import Os, close, remove_tree, storage_errors, sync_directory
from lastwords.errors import BusyError, CheckpointError, FormatError, IncompleteError, ReplacedError, StorageError

logger = logging.getLogger(__name__)

_REPLACED_MAX = 1000


def remove(directory: Path, said: Claimed, os: Os) -> None:
    """Removes the checkpoint whose manifest says this, or raises, and it stays: BusyError if another process reads it.

    ReplacedError if another checkpoint has its name by now, FormatError if anything is in it that belongs to no
    checkpoint, StorageError. After a StorageError it may be out of sight already; then `finish` goes on.
    """
    path = directory / layout.MANIFEST_NAME
    hidden = name_of(said).under(directory.parent, layout.REMOVED)
    try:
        stranger = _stranger(directory, os)
        with storage_errors("locking", path):
            fd = os.open_lock(path)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            raise replaced(directory) from error
        raise
    try:
        _refuse(stranger, directory)
        _hide_locked(directory, hidden, said, fd, os)
    finally:
        close(fd, path, os)
    remove_tree(hidden, os)


def refuse_strangers(directory: Path, os: Os) -> None:
    """FormatError if anything is in it that belongs to no checkpoint; StorageError."""
    _refuse(_stranger(directory, os), directory)


def _refuse(stranger: str | None, directory: Path) -> None:
    if stranger is not None:
        raise FormatError(f"{directory} stays: it contains {stranger}, which is no part of a checkpoint")


def _hide_locked(directory: Path, hidden: Path, said: Claimed, fd: int, os: Os) -> None:
    path = directory / layout.MANIFEST_NAME
    with storage_errors("locking", path):
        if not os.try_lock(fd):
            raise BusyError(f"{directory} stays: another process reads it, or removes it")
        if not is_at(path, fd, os) or Claimed.read(directory, os) != said:
            raise replaced(directory)
    with storage_errors("removing", directory):
        if os.exists(hidden):  # of a copy that was removed before, and not to the end
            finish(hidden.parent, [hidden.name], os)
        os.rename(directory, hidden)
        sync_directory(directory.parent, os)
        if not is_at(hidden / layout.MANIFEST_NAME, fd, os):
            _give_back_another(hidden, directory, name_of(said), os)
            raise replaced(directory)


def replaced(directory: Path) -> ReplacedError:
    """Of a directory that is not the checkpoint any more that was to go."""
    return ReplacedError(f"{directory} has been replaced, or removed, by another process; nothing is damaged")


def finish(root: Path, names: list[str], os: Os) -> list[Path]:
    """Removes what was being removed when its process ended; returns what went. names: all in `root`.

    Where another checkpoint was caught by that rename, it gets its name back. Failures are only logged.
    """
    gone = []
    for name in names:
        of = layout.TemporaryName.parse(name, layout.REMOVED)
        if of is None or not os.is_directory(root / name):
            continue
        try:
            if _finish_one(root / name, of, os):
                gone.append(root / name)
        except (OSError, StorageError) as error:
            logger.warning("could not remove %s, which is no longer needed: %s", root / name, error)
    return gone


def _finish_one(hidden: Path, of: layout.TemporaryName, os: Os) -> bool:
    """Whether it went. It stays if the process that removes it lives: that one is about to look at what it has."""
    path = hidden / layout.MANIFEST_NAME
    if os.exists(path):
        said = Claimed.read(hidden, os)
        if name_of(said) != of:
            _give_back_another(hidden, layout.checkpoint_dir(hidden.parent, said.global_step), of, os)
            return False
        try:
            fd = os.open_lock(path)
        except FileNotFoundError:
            return False  # somebody else goes on with it
        try:
            if not os.try_lock(fd) or not is_at(path, fd, os):
                return False
        finally:
            close(fd, path, os)
    remove_tree(hidden, os)  # its manifest goes first
    return True


def name_of(said: Claimed) -> layout.TemporaryName:
    """What tells one checkpoint from all others."""
    return layout.TemporaryName(said.global_step, said.job, said.generation, said.incident, said.attempt)


def fence(manifest: Manifest) -> tuple[int, int, int]:
    """The order in which the checkpoints of a job were begun."""
    return manifest.generation, manifest.incident, manifest.attempt


def is_older(directory: Path, manifest: Manifest, os: Os) -> bool:
    """Whether a checkpoint of this step is there that the new one replaces. StorageError."""
    try:
        found = read_manifest(directory, os)
    except StorageError:
        raise
    except CheckpointError:
        return False  # unreadable: keep it for a person to look at
    if found.exact and not manifest.exact:
        return False  # of one generation, both are of the very same state, and the exact one has more of it
    if (found.kind, manifest.kind) == (CheckpointKind.LAST_WORDS, CheckpointKind.PERIODIC):
        return False
    return found.job == manifest.job and fence(found) <= fence(manifest)


def _name_aside(final: Path, os: Os) -> Path:
    """A free name beside a checkpoint's own, under which scans still find it."""
    name = layout.CheckpointName.parse(final.name)
    assert name is not None
    for count in range(1, _REPLACED_MAX):
        aside = final.parent / str(layout.CheckpointName(name.global_step, count))
        if not os.exists(aside):
            return aside
    raise StorageError(f"{final.parent} has {_REPLACED_MAX} replaced checkpoints of one step: remove some")


def move_aside(directory: Path, final: Path, os: Os) -> Path:
    """Renames to a free name beside the checkpoint `final`, and returns it. OSError, StorageError."""
    while True:
        aside = _name_aside(final, os)
        try:
            os.rename(directory, aside)
        except FileExistsError:
            continue  # somebody else was faster
        return aside


def _give_back_another(hidden: Path, final: Path, of: layout.TemporaryName, os: Os) -> None:
    """What took the place of a checkpoint just before it was renamed gets a name again, if it is sound.

    Not so the checkpoint that was to go: somebody else may be removing it, and it would be a torso under a final name.
    """
    try:
        found = read_manifest(hidden, os)
    except IncompleteError:
        return  # somebody else has given it back, or is removing it
    except FormatError as error:
        logger.warning("%s is left as it is: its manifest cannot be read: %s", hidden, error)
        return
    if name_of(Claimed.of(found)) == of:
        return
    try:
        os.rename(hidden, final)
    except FileExistsError:
        move_aside(hidden, final, os)
    except FileNotFoundError:
        return  # somebody else has given it back
    sync_directory(final.parent, os)


def _stranger(directory: Path, os: Os) -> str | None:
    """Something in it that no publisher has put there; None if there is nothing."""
    with storage_errors("looking into", directory):
        for name in os.listdir(directory):
            inside = directory / name
            if name == layout.MANIFEST_NAME:
                continue
            if layout.parse_rank_dir(name) is None or not os.is_directory(inside):
                return name
            for file in os.listdir(inside):
                if not _is_part(f"{name}/{file}") or os.is_directory(inside / file):
                    return f"{name}/{file}"
    return None


def _is_part(path: str) -> bool:
    if path.endswith(f"/{layout.PART_NAME}"):
        return True
    try:
        layout.PartPath.parse(path, where="")
    except FormatError:
        return False
    return True
