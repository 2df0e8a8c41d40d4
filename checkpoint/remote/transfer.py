"""One checkpoint goes to a remote store, or comes from there. Nothing of either is visible before it is complete.

up      its files, then a look at the size of each, then the manifest, which is read back. Without that there is no
        checkpoint: whoever is killed before leaves files that the next upload of this checkpoint finds and does not
        send again. What a store has lost, or has only a part of, is sent again; what is damaged there, if it is read.
down    into a hidden directory beside the others, made durable, every byte verified, then one rename. A damaged one
        that has the name already is kept under another one.
removed the manifest first. What is no part of a checkpoint, or a link, is refused before.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os as posix
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lastwords.checkpoint import layout, load
from lastwords.checkpoint.appearing import TEMPORARY, alone_at, making_directory, refuse_checkpoint
from lastwords.checkpoint.document import read_document
from lastwords.checkpoint.lock_file import LockFile, ReaderLock
from lastwords.checkpoint.manifest import Claimed, Manifest
from lastwords.checkpoint.remote.store import OnBytes, RemoteOs, RemotePath, Store, name_of, os_for
from lastwords.checkpoint.removal import move_aside, refuse_strangers, replaced
from lastwords.checkpoint.system import (
    REAL_OS,
    Os,
    close,
    make_directories,
    patiently,
    read_whole,
    remove_tree,
    storage_errors,
    sync_directory,
    sync_file,
)
from lastwords.errors import FormatError, LastWordsError, ReplacedError, StorageError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BLOCK_BYTES = 8 << 20
"""What is in the store is read in such pieces."""


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


def upload(
    directory: Path, store: Store, on_bytes: OnBytes | None = None, os: Os = REAL_OS, *, verify: bool = False
) -> RemotePath:
    """Uploads a published checkpoint, or what of it is not there; returns where it is.

    Every byte is verified before. Raises IncompleteError or FormatError if it is not sound, BusyError or ReplacedError
    if it is removed meanwhile, StorageError. The same call again goes on where it stopped. verify: whether a file is
    there is known by its bytes, all of which are read, instead of by its size.
    """
    try:
        # A path through the open directory leads to these very files, also if a newer one takes the name meanwhile.
        with ReaderLock.take(directory, os), _opened(directory, os) as here:
            manifest, raw = _manifest(here, os)
            there = _There(store, store.root / name_of(manifest.global_step, raw), here, os)
            *files, last = items_of(manifest, raw)
            is_complete = there.has(last, verify=True)
            missing = {item for item in files if not there.has(item, verify=verify)}
            if missing or not is_complete:
                _refuse_problems(directory, here, os)
                for item in files:
                    if item in missing:
                        there.put(item, on_bytes)
                    else:
                        _tell(on_bytes, item.bytes)
                for item in files:
                    there.check(item, verify=verify and item in missing)
                there.put(last, on_bytes)
                there.check(last, verify=True)
            return there.directory
    except FileNotFoundError as error:
        raise ReplacedError(f"{directory} was removed while it was uploaded; nothing is damaged") from error


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


@dataclass(frozen=True, slots=True)
class _There:
    """A checkpoint in a store, of which `here` has the files. FileNotFoundError where one is gone here."""

    store: Store
    directory: RemotePath
    here: Path
    os: Os

    def has(self, item: Item, *, verify: bool) -> bool:
        """Whether the store has a file, by its size; verify: by all of its bytes."""
        path = self.directory / item.path
        if _asked("looking for", path, self.os, lambda: self.store.size(path)) != item.bytes:
            return False
        return not verify or all(self._is_equal(item, begin) for begin in range(0, item.bytes, _BLOCK_BYTES))

    def _is_equal(self, item: Item, begin: int) -> bool:
        path, end = self.directory / item.path, min(begin + _BLOCK_BYTES, item.bytes)
        there = _asked("reading", path, self.os, lambda: self.store.read(path, begin, end))
        return there == read_whole(
            self.here / item.path, self.os, bytes_max=item.bytes, first=end - begin, offset=begin
        )

    def put(self, item: Item, on_bytes: OnBytes | None) -> None:
        source, path = self.here / item.path, self.directory / item.path

        def once() -> bool:
            try:
                self.store.put(source, path, on_bytes)
            except OSError:
                if source.exists():
                    raise
                return False
            return True

        if not _asked("uploading", path, self.os, once):
            raise FileNotFoundError(item.path)

    def check(self, item: Item, *, verify: bool) -> None:
        """StorageError if what was uploaded is not there."""
        if not self.has(item, verify=verify):
            raise StorageError(
                f"{self.directory / item.path} was uploaded, but the store does not have it as it is here: check the "
                "store, and upload again"
            )


def _asked(doing: str, path: Path, os: Os, call: Callable[[], T]) -> T:
    """What the store answers; it is asked again while it refuses what it may do in a moment. StorageError."""

    def once() -> T:
        with storage_errors(doing, path):
            return call()

    return patiently(once, os, logging.DEBUG)


def _tell(on_bytes: OnBytes | None, count: int) -> None:
    if on_bytes is not None:
        on_bytes(count)


def download(source: RemotePath, root: Path, store: Store, on_bytes: OnBytes | None = None, os: Os = REAL_OS) -> Path:
    """Downloads a checkpoint into `root` under the name that it has in the store; returns where it is.

    Raises ConfigError if `root` is a checkpoint, IncompleteError or FormatError if it is not sound there, StorageError;
    BusyError if another process fetches it, ReplacedError if it is removed meanwhile. Nothing is left behind then.
    """
    target = root / source.name
    refuse_checkpoint(root, os)
    make_directories(root, os)
    with storage_errors("looking for", target):
        if os.exists(target) and load.examine(target, os).status is load.DirectoryStatus.COMPLETE:
            return target
    _keep_aside(target, os)
    _sweep(root, os)
    with making_directory(target, os) as hidden:
        manifest, raw = _remote_manifest(source, store, os)
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
        if found.status is load.DirectoryStatus.COMPLETE:
            return  # another process was faster
        if found.status is load.DirectoryStatus.UNREADABLE:
            raise StorageError(found.why, errno=found.errno)
        aside = move_aside(target, target, os)
    logger.warning("%s is downloaded again; what had its name is kept as %s: %s", target, aside, found.why)


def _remote_manifest(source: RemotePath, store: Store, os: Os) -> tuple[Manifest, bytes]:
    try:
        return patiently(lambda: _manifest(source, RemoteOs(store)), os, logging.DEBUG)
    except FileNotFoundError as error:
        raise _removed(source) from error


def _removed(source: RemotePath) -> ReplacedError:
    return ReplacedError(f"{source} was removed while it was downloaded; nothing is damaged")


def _receive(source: RemotePath, target: Path, store: Store, on_bytes: OnBytes | None, os: Os) -> None:
    def get() -> None:
        store.get(source, target, on_bytes)
        _tell(on_bytes, 0)  # a library that copies at once tells nothing

    make_directories(target.parent, os)
    try:
        _asked(f"downloading {source} to", target, os, get)  # the disk here may be what refuses
    except StorageError as error:
        if error.errno == errno.ENOENT:
            raise _removed(source) from error
        raise
    sync_file(target, os)


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


# From where a run goes on, if there is a remote store beside its directories.


def local_roots(sources: Sequence[Path]) -> list[Path]:
    """The directories among them, without the remote stores."""
    return [path for path in sources if not isinstance(path, RemotePath)]


def highest_generation(sources: Sequence[Path]) -> int:
    """Of the checkpoints in a remote store, so that no start here gets one that was drawn before.

    0 without a store, and, with a warning, where it does not answer; `resume` refuses what could be taken for newer.
    """
    remote = [path for path in sources if isinstance(path, RemotePath)]
    if not remote:
        return 0
    try:
        os = os_for(remote)
        return max((Claimed.read(path, os).generation for path in load.candidates(remote, os)), default=0)
    except LastWordsError as error:
        logger.warning("it is not known which checkpoints are in %s: %s", remote[0], error)
        return 0


def fetched(path: Path, root: Path, on_bytes: OnBytes | None = None) -> Path:
    """The checkpoint itself, downloaded into `root` first if it is a remote one. Errors as of `download`."""
    if not isinstance(path, RemotePath):
        return path
    logger.info("downloading %s to %s", path, root)
    return download(path, root, Store(path.parent), on_bytes)
