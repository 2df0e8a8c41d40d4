"""One checkpoint goes to a remote store, or comes from there. Nothing of either is visible before it is complete.

up      its files, then a look at the size of each, then the manifest. Without that there is no checkpoint: whoever
        is killed before leaves files that the next upload of this checkpoint finds and does not send again. What a
        store has lost, or has only a part of, is sent again.
down    into a hidden directory beside the others, made durable, every byte verified, then one rename. A damaged one
        that has the name already is kept under another one.
removed the manifest first. What is no part of a checkpoint, or a link, is refused before.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os as posix
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lastwords.checkpoint import layout, load
from lastwords.checkpoint.appearing import TEMPORARY, alone_at, making_directory
from lastwords.checkpoint.document import read_document
from lastwords.checkpoint.lock_file import LockFile
from lastwords.checkpoint.manifest import Claimed, Manifest
from lastwords.checkpoint.reader_lock import ReaderLock
from lastwords.checkpoint.remote.address import RemotePath, name_of
from lastwords.checkpoint.remote.store import OnBytes, RemoteOs, Store
from lastwords.checkpoint.removal import move_aside, refuse_strangers, replaced
from lastwords.checkpoint.retry import patiently
from lastwords.checkpoint.system import (
    REAL_OS,
    Os,
    close,
    make_directories,
    remove_tree,
    storage_errors,
    sync_directory,
)
from lastwords.errors import FormatError, ReplacedError, StorageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Item:
    """A file of a checkpoint: its path in the directory, and its size in bytes."""

    path: str
    bytes: int


def items_of(manifest: Manifest, raw: bytes) -> list[Item]:
    """The files of a checkpoint in the order in which they are uploaded: the manifest is last.

    raw: the manifest's bytes.
    """
    items = [Item(entry.path, entry.bytes) for entry in manifest.files]
    items += [Item(entry.description, entry.part_bytes) for entry in manifest.files if entry.part_sum]
    return [*items, Item(layout.MANIFEST_NAME, len(raw))]


def upload(directory: Path, store: Store, on_bytes: OnBytes | None = None, os: Os = REAL_OS) -> RemotePath:
    """Uploads a published checkpoint, or what of it is not there; returns where it is.

    Every byte is verified before. Raises IncompleteError or FormatError if it is not sound, BusyError or ReplacedError
    if it is removed meanwhile, StorageError. The same call again goes on where it stopped.
    """
    held = ReaderLock.take(directory, os)
    try:
        # A path through the open directory leads to these very files, also if a newer one takes the name meanwhile.
        with _opened(directory, os) as here:
            manifest, raw = _manifest(here, os)
            target = store.root / name_of(manifest.global_step, raw)
            items = items_of(manifest, raw)
            if not (_has_manifest(store, target, raw) and _has_files(store, target, items)):
                _refuse_problems(directory, here, os)
                _send(here, target, store, items, on_bytes)
            return target
    except FileNotFoundError as error:
        raise ReplacedError(f"{directory} was removed while it was uploaded; nothing is damaged") from error
    finally:
        held.release()


@contextlib.contextmanager
def _opened(directory: Path, os: Os) -> Iterator[Path]:
    fd = os.open_directory(directory)
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        close(fd, directory, os)


def _manifest(directory: Path, os: Os) -> tuple[Manifest, bytes]:
    path = directory / layout.MANIFEST_NAME
    raw = read_document(path, os)
    return Manifest.decode(raw, path, os), raw


def _refuse_problems(directory: Path, here: Path, os: Os) -> None:
    problems = load.verify(here, os=os)
    if problems:
        text = problems[0].text.replace(str(here), str(directory))
        raise FormatError(f"{directory} is not uploaded: {text}")


def _is_there(store: Store, path: RemotePath, size: int) -> bool:
    with storage_errors("looking for", path):
        return store.size(path) == size


def _has_manifest(store: Store, target: RemotePath, raw: bytes) -> bool:
    path = target / layout.MANIFEST_NAME
    with storage_errors("looking for", path):
        return store.size(path) == len(raw) and store.read(path, 0, len(raw)) == raw


def _has_files(store: Store, target: RemotePath, items: list[Item]) -> bool:
    return all(_is_there(store, target / item.path, item.bytes) for item in items)


def _send(here: Path, target: RemotePath, store: Store, items: list[Item], on_bytes: OnBytes | None) -> None:
    *files, manifest = items
    for item in files:
        path = target / item.path
        if _is_there(store, path, item.bytes):
            _tell(on_bytes, item.bytes)
            continue
        _put(here, target, store, item, on_bytes)
    for item in files:
        if not _is_there(store, target / item.path, item.bytes):
            raise StorageError(f"{target / item.path} was uploaded, but the store does not have all of it")
    _put(here, target, store, manifest, on_bytes)


def _put(here: Path, target: RemotePath, store: Store, item: Item, on_bytes: OnBytes | None) -> None:
    """FileNotFoundError if the checkpoint is gone here."""
    with storage_errors("uploading", target / item.path):
        try:
            store.put(here / item.path, target / item.path, on_bytes)
        except OSError:
            if (here / item.path).exists():
                raise
            gone = True
        else:
            gone = False
    if gone:
        raise FileNotFoundError(item.path)


def _tell(on_bytes: OnBytes | None, count: int) -> None:
    if on_bytes is not None:
        on_bytes(count)


def download(source: RemotePath, root: Path, store: Store, on_bytes: OnBytes | None = None, os: Os = REAL_OS) -> Path:
    """Downloads a checkpoint into `root` under the name that it has in the store; returns where it is.

    Raises IncompleteError or FormatError if it is not sound there, StorageError; BusyError if another process fetches
    it, ReplacedError if it is removed meanwhile. Nothing is left behind then.
    """
    target = root / source.name
    make_directories(root, os)
    with storage_errors("looking for", target):
        if os.exists(target) and load.examine(target, os).status is load.Status.COMPLETE:
            return target
    _keep_aside(target, os)
    _sweep(root, os)
    with making_directory(target, os) as hidden:
        manifest, raw = _remote_manifest(source, store)
        for item in items_of(manifest, raw):
            _receive(source / item.path, hidden / item.path, store, on_bytes, os)
        for name in sorted({posix.path.dirname(item.path) for item in items_of(manifest, raw)} - {""}):
            sync_directory(hidden / name, os)
        if read_document(hidden / layout.MANIFEST_NAME, os) != raw:
            raise ReplacedError(f"{source} was replaced while it was downloaded; nothing is damaged")
        problems = load.verify(hidden, os=os, progress=lambda _: _tell(on_bytes, 0))
        if problems:
            raise FormatError(f"{source} is damaged: {problems[0].text}")
    return target


def _keep_aside(target: Path, os: Os) -> None:
    """Frees the name from what is not whole there. StorageError if that cannot be read: it may be whole."""
    with alone_at(target, os), storage_errors("looking at", target):
        if not os.exists(target):
            return
        found = load.examine(target, os)
        if found.status is load.Status.COMPLETE:
            return  # another process was faster
        if found.status is load.Status.UNREADABLE:
            raise StorageError(found.why, errno=found.errno)
        aside = move_aside(target, target, os)
    logger.warning("%s is downloaded again; what had its name is kept as %s: %s", target, aside, found.why)


def _remote_manifest(source: RemotePath, store: Store) -> tuple[Manifest, bytes]:
    try:
        return _manifest(source, RemoteOs(store))
    except FileNotFoundError as error:
        raise _removed(source) from error


def _removed(source: RemotePath) -> ReplacedError:
    return ReplacedError(f"{source} was removed while it was downloaded; nothing is damaged")


def _receive(source: RemotePath, target: Path, store: Store, on_bytes: OnBytes | None, os: Os) -> None:
    def once() -> None:
        with storage_errors("downloading", source):
            store.get(source, target, on_bytes)
            _tell(on_bytes, 0)  # a library that copies at once tells nothing

    make_directories(target.parent, os)
    try:
        patiently(once, os)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            raise _removed(source) from error
        raise
    with storage_errors("fsync of", target):
        fd = os.open_read(target)
        try:
            os.fsync(fd)
        finally:
            close(fd, target, os)


def _sweep(root: Path, os: Os) -> None:
    """Removes what killed downloads have left, of whichever checkpoint."""
    with storage_errors("listing", root):
        names = os.listdir(root)
    for name in names:
        of = layout.CheckpointName.parse(name.removeprefix(TEMPORARY))
        if of is None or not of.checksum or not name.startswith(TEMPORARY):
            continue
        with LockFile(root / f"{name}.lock", os).held() as mine:
            if mine:
                remove_tree(root / name, os)


def remove(directory: RemotePath, said: Claimed, store: Store) -> None:
    """Removes the checkpoint whose manifest says this from a store; from the first call on it is none.

    What is refused here (`removal.remove`) is refused there, and it stays: ReplacedError if another checkpoint has its
    name by now, FormatError for a link, or if anything is in it that belongs to no checkpoint. StorageError.
    """
    os = RemoteOs(store)
    manifest = directory / layout.MANIFEST_NAME
    with storage_errors("looking into", directory):
        if os.is_link(directory):
            raise FormatError(f"{directory} stays: it is a link")
        refuse_strangers(directory, os)
        if os.exists(manifest) and Claimed.if_readable(directory, os) != said:
            raise replaced(directory)
    with storage_errors("removing", directory):
        for path in (manifest, directory):
            with contextlib.suppress(FileNotFoundError):
                store.remove(path)
