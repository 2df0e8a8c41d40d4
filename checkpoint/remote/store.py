"""A remote store through fsspec, and the `Os` with which checkpoints in it are read as local ones are.

fsspec is imported when a store is first used. Every failure of a store is an OSError: ENOENT for what is not there, the
library's own number, or EREMOTEIO.
"""

from __future__ import annotations

import errno
import functools
import importlib
import itertools
import os as posix
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PosixPath
from typing import Any

import xxhash

from lastwords.checkpoint.layout import CheckpointName
from lastwords.checkpoint.system import REAL_OS, Os, storage_error, sync_directory, sync_file
from lastwords.errors import ConfigError, named

# Where a checkpoint lies in a remote store.
#
# A store has no rename, so nothing in it is ever overwritten: the name of a directory says the step and the checksum
# of the manifest, which has the checksums of everything else. Whoever writes a name writes the same bytes.

_PATTERN = re.compile(r"[*\[\]]")
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.ASCII)


class RemotePath(PosixPath):
    """A place in a remote store. Its text is the URL; the local file system has nothing of that name.

    >>> str(RemotePath("s3://bucket/job") / "rank_0")
    's3://bucket/job/rank_0'
    >>> str(RemotePath("file:///mnt/job"))
    'file:///mnt/job'
    """

    def __str__(self) -> str:
        protocol, _, rest = super().__str__().partition(":/")
        return f"{protocol}:///{rest}" if protocol == "file" else f"{protocol}://{rest}"


def is_url(text: str) -> bool:
    """Whether a PATH of the command line means a remote store."""
    return _URL.fullmatch(text) is not None


def address_of(url: str) -> RemotePath:
    """The directory that a URL names. ConfigError for what is no URL of one.

    >>> address_of("s3://bucket/job/").name
    'job'
    """
    found = _URL.fullmatch(url)
    if found is None or not found[2].strip("/") or "::" in url or "?" in url:
        raise ConfigError(f"{url!r} is no URL of a directory in a remote store; give one such as s3://bucket/job")
    if found := _PATTERN.search(url):
        raise ConfigError(f"{url!r} has {found[0]!r}, which stores take for a pattern: choose a directory without it")
    if (url.startswith("file://")) != url.startswith(f"{url.partition(':')[0]}:///"):
        raise ConfigError(
            f"{url!r} names no place: file:///PATH has three slashes, any other URL a host or bucket first"
        )
    return RemotePath(url)


def place(text: str) -> Path:
    """A PATH of the command line: local, or of a remote store."""
    return address_of(text) if is_url(text) else Path(text)


def name_of(global_step: int, manifest: bytes) -> str:
    """Name in any remote store of the checkpoint with this manifest.

    >>> name_of(37, b"")
    'tft_saved_checkpoints-step_37-2d06800538d394c2'
    """
    return str(CheckpointName(global_step, checksum=xxhash.xxh3_64_hexdigest(manifest)))


OnBytes = Callable[[int], None]

_READABLE = ("file", "link", None)
"""What `facts` says of a regular file. Of a FIFO it says "other" where a store is mounted; reading one could block."""

_FIRST_DESCRIPTOR = 1 << 30
"""No process has so many files open."""


class Store:
    """The store that a URL leads to. Any thread. Raises OSError, and ConfigError where no library knows the URL."""

    def __init__(self, root: RemotePath) -> None:
        self.root = root
        _refuse_unknown(str(root))

    @functools.cached_property
    def _files(self) -> Any:
        """Some libraries connect when they are made: a store that does not answer then may do so later."""
        # A listing that is remembered would hide what another process has uploaded.
        return _core().url_to_fs(str(self.root), use_listings_cache=False)[0]

    def names(self, directory: RemotePath) -> list[str]:
        """What is in a directory, sorted. FileNotFoundError if there is none."""
        with _failures(directory):
            self._files.invalidate_cache()
            listed = self._files.ls(str(directory), detail=False)
            itself = str(self._files._strip_protocol(str(directory))).rstrip("/")
        # An object store may list an empty object that stands for the directory itself.
        inside = {str(name).rstrip("/") for name in listed} - {itself}
        return sorted({name.rpartition("/")[2] for name in inside} - {""})

    def facts(self, path: RemotePath) -> dict[str, Any]:
        """What fsspec says of a file or a directory. FileNotFoundError."""
        with _failures(path):
            self._files.invalidate_cache()
            return dict(self._files.info(str(path)))

    def size(self, path: RemotePath) -> int | None:
        """Bytes of a file; None if it is not there."""
        try:
            return int(self.facts(path)["size"])
        except FileNotFoundError:
            return None

    def read(self, path: RemotePath, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of a file."""
        with _failures(path):
            return bytes(self._files.cat_file(str(path), start=begin, end=end))

    def put(self, source: Path, path: RemotePath, on_bytes: OnBytes | None = None) -> None:
        """Uploads a file. `on_bytes` hears of each piece, on any thread; of some stores only once all is there.

        StorageError where the store is a directory here that cannot make the file durable.
        """
        heard = 0

        def hear(count: int) -> None:
            nonlocal heard
            heard += count
            assert on_bytes is not None
            on_bytes(count)

        arguments = _heard(None if on_bytes is None else hear)
        with _failures(path):
            try:
                self._files.put_file(str(source), str(path), **arguments)
            except FileNotFoundError:
                if not posix.path.exists(source):
                    raise
                self._files.makedirs(str(path.parent), exist_ok=True)  # a store that has directories of its own
                self._files.put_file(str(source), str(path), **arguments)
            if on_bytes is not None and (more := posix.path.getsize(source) - heard) > 0:
                on_bytes(more)
        self._make_durable(path)

    def _make_durable(self, path: RemotePath) -> None:
        """What is uploaded is pruned elsewhere. An object store keeps what it has taken; a directory here may not."""
        if self.root.parts[0] == "file:":
            local = Path("/", *path.parts[1:])
            sync_file(local, REAL_OS)
            for directory in local.parents[:3]:  # of the rank, of the checkpoint, of the store
                sync_directory(directory, REAL_OS)

    def get(self, path: RemotePath, target: Path, on_bytes: OnBytes | None = None) -> None:
        """Downloads a file; it is not durable yet."""
        with _failures(path):
            self._files.get_file(str(path), str(target), **_heard(on_bytes))

    def remove(self, path: RemotePath) -> None:
        """Removes a file, or a directory with all that is in it. FileNotFoundError."""
        with _failures(path):
            self._files.invalidate_cache()
            self._files.rm(str(path), recursive=True)


def _refuse_unknown(url: str) -> None:
    """ConfigError where no library that is installed knows the URL."""
    try:
        core = _core()
    except ImportError as error:
        raise ConfigError(f"{url} needs fsspec: pip install 'lastwords[remote]'") from error
    try:
        core.get_filesystem_class(url.partition(":")[0])
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{url} cannot be used: {error}") from error


def _core() -> Any:
    return importlib.import_module("fsspec.core")


@contextmanager
def _failures(path: RemotePath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        number = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES}.get(type(error), errno.EREMOTEIO)
        raise OSError(number, str(error) or posix.strerror(number), str(path)) from error
    except Exception as error:  # handed to the caller: each library has its own, a missing credential is one
        raise OSError(errno.EREMOTEIO, named(error), str(path)) from error


def _heard(on_bytes: OnBytes | None) -> dict[str, Any]:
    """The argument with which fsspec tells of its progress."""
    if on_bytes is None:
        return {}
    callbacks: Any = importlib.import_module("fsspec.callbacks")
    sent = 0

    def on_value(_size: int | None, value: int, **_: Any) -> None:
        nonlocal sent
        count, sent = value - sent, value
        on_bytes(count)

    return {"callback": callbacks.Callback(hooks={"bytes": on_value})}


class RemoteOs(Os):
    """The real system, which reads the paths of one remote store as well; there it writes nothing.

    A store has no locks: a checkpoint that is removed while it is read is noticed by what is missing then.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._numbers = itertools.count(_FIRST_DESCRIPTOR)
        self._opened: dict[int, tuple[RemotePath, dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def open_read(self, path: Path) -> int:
        if not isinstance(path, RemotePath):
            return super().open_read(path)
        facts = self._store.facts(path)
        if facts.get("type") not in _READABLE:
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        with self._lock:
            number = next(self._numbers)
            self._opened[number] = path, facts
        return number

    def close(self, fd: int) -> None:
        if fd < _FIRST_DESCRIPTOR:
            super().close(fd)
        else:
            self._opened.pop(fd)

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        if fd < _FIRST_DESCRIPTOR:
            return super().preadv(fd, views, offset)
        path, facts = self._opened[fd]
        end = min(offset + sum(map(len, views)), int(facts["size"]))
        content = self._store.read(path, offset, end) if offset < end else b""
        at = 0
        for view in views:
            piece = content[at : at + len(view)]
            view[: len(piece)] = piece
            at += len(piece)
        return len(content)

    def size(self, file: int | Path) -> int:
        facts = self._facts(file)
        return super().size(file) if facts is None else int(facts["size"])

    def stamp(self, file: int | Path) -> tuple[int, ...]:
        facts = self._facts(file)
        if facts is None:
            return super().stamp(file)
        name = file if isinstance(file, Path) else self._opened[file][0]
        stated = [str(facts.get(key)) for key in ("ETag", "etag", "LastModified", "mtime", "created", "version_id")]
        return _number(str(name)), 0, int(facts["size"]), _number("\n".join(stated))

    def _facts(self, file: int | Path) -> dict[str, Any] | None:
        """None for what is local."""
        if isinstance(file, RemotePath):
            return self._store.facts(file)
        return self._opened[file][1] if isinstance(file, int) and file >= _FIRST_DESCRIPTOR else None

    def try_lock(self, fd: int, *, shared: bool = False) -> bool:
        return fd >= _FIRST_DESCRIPTOR or super().try_lock(fd, shared=shared)

    def unlock(self, fd: int) -> None:
        if fd < _FIRST_DESCRIPTOR:
            super().unlock(fd)

    def advise_sequential(self, fd: int) -> None:
        if fd < _FIRST_DESCRIPTOR:
            super().advise_sequential(fd)

    def listdir(self, path: Path) -> list[str]:
        return self._store.names(path) if isinstance(path, RemotePath) else super().listdir(path)

    def is_directory(self, path: Path) -> bool:
        if not isinstance(path, RemotePath):
            return super().is_directory(path)
        facts = self._facts_if_any(path)
        return facts.get("type") == "directory" and not _is_link(facts)

    def leads_to_directory(self, path: Path) -> bool:
        if not isinstance(path, RemotePath):
            return super().leads_to_directory(path)
        try:
            return self._facts_if_any(path).get("type") == "directory"
        except OSError:  # told by whoever reads it
            return False

    def is_link(self, path: Path) -> bool:
        return _is_link(self._facts_if_any(path)) if isinstance(path, RemotePath) else super().is_link(path)

    def exists(self, path: Path) -> bool:
        if not isinstance(path, RemotePath):
            return super().exists(path)
        try:
            self._store.facts(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise storage_error("looking for", path, error) from error
        return True

    def _facts_if_any(self, path: RemotePath) -> dict[str, Any]:
        """Empty for what is not there."""
        try:
            return self._store.facts(path)
        except FileNotFoundError:
            return {}


def _is_link(facts: dict[str, Any]) -> bool:
    """Object stores have no links; mounted ones do, and say of a link what it leads to."""
    return bool(facts.get("islink")) or facts.get("type") == "link"


def _number(text: str) -> int:
    return xxhash.xxh3_64_intdigest(posix.fsencode(text))


def os_for(paths: Iterable[Path]) -> Os:
    """The system with which these can be read: of all remote ones the first one's store. ConfigError."""
    remote = next((path for path in paths if isinstance(path, RemotePath)), None)
    return REAL_OS if remote is None else RemoteOs(Store(remote))
