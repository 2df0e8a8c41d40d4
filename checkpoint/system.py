"""The system calls that decide whether a checkpoint survives, behind one object that tests replace.

A test that crashes at every call in turn, a disk that is full, an fsync that fails and a machine that loses
power are all other implementations of `Os`. Nothing in this package touches the file system in another way.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os as posix
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from lastwords.errors import StorageError

BLOCK_BYTES = 4096
"""Alignment of O_DIRECT addresses, lengths and offsets: the largest logical block size in common use."""

_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
UNSUPPORTED = frozenset((errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY))
"""What file systems and kernels answer to a call that they do not have."""

_libc = ctypes.CDLL(None, use_errno=True)


def _raise_errno(path: Path | None = None) -> None:
    number = ctypes.get_errno()
    raise OSError(number, posix.strerror(number), None if path is None else str(path))


def _renameat2(source: Path, target: Path, flags: int) -> None:
    """Linux renameat2(2), which every libc has that torch runs on (glibc since 2.28)."""
    if _libc.renameat2(_AT_FDCWD, posix.fsencode(source), _AT_FDCWD, posix.fsencode(target), flags):
        _raise_errno(source)


def _open_regular(path: Path, access: int) -> int:
    fd = posix.open(path, access | posix.O_CLOEXEC | posix.O_NONBLOCK)
    if not stat.S_ISREG(posix.fstat(fd).st_mode):
        posix.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


class Os:
    """The real system. Every method may raise OSError; callers wrap it into StorageError at the edge."""

    def create(self, path: Path, *, direct: bool) -> int:
        """Creates a new file for writing; FileExistsError if the name is taken, EINVAL where O_DIRECT is refused."""
        flags = posix.O_CREAT | posix.O_EXCL | posix.O_WRONLY | posix.O_CLOEXEC
        return posix.open(path, flags | (posix.O_DIRECT if direct else 0), 0o644)

    def open_read(self, path: Path) -> int:
        """Opens a regular file for reading. A FIFO or device is refused, since reading one could block for ever."""
        return _open_regular(path, posix.O_RDONLY)

    def open_lock(self, path: Path) -> int:
        """Opens a regular file to lock it. Writable, since NFS makes a byte-range lock of flock (else EBADF)."""
        return _open_regular(path, posix.O_RDWR)

    def open_directory(self, path: Path) -> int:
        return posix.open(path, posix.O_RDONLY | posix.O_DIRECTORY | posix.O_CLOEXEC)

    def close(self, fd: int) -> None:
        posix.close(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return posix.pwrite(fd, data, offset)

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        return posix.preadv(fd, list(views), offset)

    def size(self, file: int | Path) -> int:
        return posix.stat(file).st_size

    def stamp(self, file: int | Path) -> tuple[int, ...]:
        """Differs when the file was replaced, or written again (as far as its times tell)."""
        facts = posix.stat(file)
        return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns

    def fallocate(self, fd: int, size: int) -> None:
        """Reserves `size` bytes, so that a full disk is known before the first byte is written.

        Not posix_fallocate: where the file system cannot reserve, glibc emulates that by writing every block.
        """
        if _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
            _raise_errno()

    def ftruncate(self, fd: int, size: int) -> None:
        posix.ftruncate(fd, size)

    def clear_direct(self, fd: int) -> None:
        """Turns O_DIRECT off for a file that is already open."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~posix.O_DIRECT)

    def fsync(self, fd: int) -> None:
        posix.fsync(fd)

    def try_lock(self, fd: int, *, shared: bool = False) -> bool:
        """Takes a flock that ends with the process, for it alone or shared; False if a living process is in the way."""
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        """Gives back what `try_lock` took, for a child that was forked since then as well."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def pause(self, seconds: float) -> None:
        """Waits, between two looks at what another process does."""
        time.sleep(seconds)

    def advise_sequential(self, fd: int) -> None:
        posix.posix_fadvise(fd, 0, 0, posix.POSIX_FADV_SEQUENTIAL)

    def mkdir(self, path: Path) -> None:
        posix.mkdir(path, 0o755)

    def rename(self, source: Path, target: Path) -> None:
        """Renames; FileExistsError if the target exists (never replaces anything)."""
        try:
            _renameat2(source, target, _RENAME_NOREPLACE)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            # NFS and old kernels. The check can race, but rename(2) itself never replaces a directory that is
            # not empty, and every directory with a final name has a manifest in it.
            if self.exists(target):
                raise FileExistsError(errno.EEXIST, posix.strerror(errno.EEXIST), str(target)) from None
            try:
                posix.rename(source, target)
            except OSError as refused:
                if refused.errno != errno.ENOTEMPTY:
                    raise
                raise FileExistsError(errno.EEXIST, posix.strerror(errno.EEXIST), str(target)) from None

    def replace(self, source: Path, target: Path) -> None:
        """Renames a file; one that has the name already is gone, and there is no moment without either."""
        posix.replace(source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        """Swaps two names in one step; False where the file system or kernel cannot."""
        try:
            _renameat2(one, other, _RENAME_EXCHANGE)
        except OSError as error:
            if error.errno in UNSUPPORTED:
                return False
            raise
        return True

    def unlink(self, path: Path) -> None:
        posix.unlink(path)

    def rmdir(self, path: Path) -> None:
        posix.rmdir(path)

    def listdir(self, path: Path) -> list[str]:
        return sorted(posix.listdir(path))

    def modified_unix_s(self, path: Path) -> float:
        """When the file, or the list of names in a directory, was last changed."""
        return posix.lstat(path).st_mtime

    def is_directory(self, path: Path) -> bool:
        """True for a directory itself; a symbolic link to one does not count."""
        try:
            return stat.S_ISDIR(posix.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def is_link(self, path: Path) -> bool:
        """True for a symbolic link, wherever it leads."""
        return posix.path.islink(path)

    def leads_to_directory(self, path: Path) -> bool:
        """True for a directory and for a link to one: what may be read. What is removed is asked with the other one."""
        try:
            return stat.S_ISDIR(posix.stat(path).st_mode)
        except OSError:  # told by whoever reads it
            return False

    def exists(self, path: Path) -> bool:
        """True for a link that leads nowhere, too. StorageError where the file system does not say."""
        try:
            posix.lstat(path)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return False
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
                return False
            raise storage_error("looking for", path, error) from error
        return True

    def free_bytes(self, path: Path) -> int:
        facts = posix.statvfs(path)
        return facts.f_bavail * facts.f_frsize


REAL_OS = Os()


class SyncWatch(Os):
    """The real system, which knows whether a thread is inside a call that can take long and shows no progress.

    fsync of what the page cache holds, and close on file systems that upload only then, take minutes on slow storage.
    Any thread.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._lock = threading.Lock()

    @property
    def inside(self) -> bool:
        """Whether such a call runs now."""
        return self._inside > 0

    @contextmanager
    def _noted(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1

    def fsync(self, fd: int) -> None:
        with self._noted():
            super().fsync(fd)

    def close(self, fd: int) -> None:
        with self._noted():
            super().close(fd)

    def fallocate(self, fd: int, size: int) -> None:
        with self._noted():
            super().fallocate(fd, size)


_REMEDIES = {
    errno.ENOSPC: "free some space there (a job can have a fallback directory)",
    errno.EDQUOT: "the disk quota is used up: free some space there (a job can have a fallback directory)",
    errno.EROFS: "the file system is mounted read-only: remount it or choose another directory",
    errno.EACCES: "check the permissions of the directory and its parents",
    errno.EPERM: "check the permissions of the directory and its parents",
    errno.EIO: "the device reports an error: see the kernel log; do not trust this disk",
    errno.ENOENT: "check that the directory exists and is mounted",
    errno.ENOTDIR: "there is a file where a directory is needed: choose another path",
    errno.EEXIST: "something else uses this name: remove it or choose another directory",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EFBIG: "a limit on the size of files is met: raise `ulimit -f`",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
    errno.EREMOTEIO: "check the URL, the credentials and the network",
    errno.ESTALE: "the network file system lost the file: check the mount",
}


def host_id() -> bytes:
    """Equal for two processes if they share a running kernel, so that each sees the other one's locks, and /dev/shm.

    Containers of one kernel may each have a /dev/shm, and none sees there whether another one's ranks live.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        return b"%s/%x" % (boot, posix.stat("/dev/shm").st_dev)
    except OSError:
        return posix.uname().nodename.encode()


def remedy(number: int) -> str:
    """What to do about an errno."""
    return _REMEDIES.get(number, "check the file system and the kernel log")


def storage_error(doing: str, path: Path, error: OSError) -> StorageError:
    """What the caller sees of an OSError: what was being done, where, why it failed, and what to do."""
    number = error.errno or 0
    why = error.strerror or str(error)
    return StorageError(f"{doing} {path} failed: {why} (errno {number}); {remedy(number)}", errno=number)


def pwrite_all(os: Os, fd: int, content: bytes | memoryview, offset: int = 0) -> None:
    """`Os.pwrite` until everything is written: a full disk takes a part, and refuses only the next one. OSError."""
    view, done = memoryview(content), 0
    while done < len(view):
        count = os.pwrite(fd, view[done:], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the file system wrote nothing")
        done += count


@contextmanager
def storage_errors(doing: str, path: Path) -> Iterator[None]:
    """Turns an OSError of the block into a StorageError that says what was being done."""
    try:
        yield
    except OSError as error:
        raise storage_error(doing, path, error) from error


def where_it_leads(path: Path) -> Path:
    """The path without links, as far as they lead anywhere. StorageError where the current directory is gone."""
    with storage_errors("following", path):
        return Path(posix.path.realpath(path))


def close(fd: int, path: Path, os: Os) -> None:
    """Closes; the descriptor is gone even if the system reports an error, which is a StorageError."""
    with storage_errors("closing", path):
        os.close(fd)


def sync_directory(path: Path, os: Os) -> bool:
    """Makes the names inside `path` durable; False where the file system cannot do that at all (`probe` says so)."""
    with storage_errors("making the entries durable of", path):
        fd = os.open_directory(path)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            return False
        finally:
            close(fd, path, os)
    return True


def sync_file(path: Path, os: Os) -> None:
    """Makes the content of a file durable that somebody else has written."""
    with storage_errors("fsync of", path):
        fd = os.open_read(path)
        try:
            os.fsync(fd)
        finally:
            close(fd, path, os)


def make_directories(path: Path, os: Os) -> None:
    """Creates `path` and its missing parents, each made durable in its own parent; races are harmless."""
    with storage_errors("looking for the directory", path):
        if os.exists(path):
            return
    if path.parent != path:
        make_directories(path.parent, os)
    make_directory(path, os)
    sync_directory(path.parent, os)


def make_directory(path: Path, os: Os) -> None:
    """Creates one directory unless it is there. Its name is not durable yet."""
    with storage_errors("creating the directory", path):
        try:
            os.mkdir(path)
        except FileExistsError:
            # Another writer was faster, or it is a symbolic link to a directory: both are fine; a file is not,
            # and says so when something is created in it.
            pass


def remove_tree(path: Path, os: Os) -> None:
    """Removes a directory with everything in it; a name that vanishes meanwhile is fine. Of a link only itself."""
    with storage_errors("removing", path):
        if os.is_directory(path):
            _remove_tree(path, os)
        elif os.is_link(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _remove_tree(path: Path, os: Os) -> None:
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    for name in names:
        child = path / name
        if os.is_directory(child):
            _remove_tree(child, os)
            continue
        try:
            os.unlink(child)
        except FileNotFoundError:
            pass
    try:
        os.rmdir(path)
    except FileNotFoundError:
        pass


def read_whole(path: Path, os: Os, *, bytes_max: int, first: int | None = None, offset: int = 0) -> bytes:
    """Content of a small file from `offset`, or `first` bytes of that; StorageError where that fails.

    FileNotFoundError is left to the caller, since a missing file means something else than a failing disk.
    """
    try:
        fd = os.open_read(path)
    except FileNotFoundError:
        raise
    except NotADirectoryError as error:  # a file stands where its directory should be: it is missing all the same
        raise FileNotFoundError(errno.ENOENT, posix.strerror(errno.ENOENT), str(path)) from error
    except OSError as error:
        raise storage_error("opening", path, error) from error
    with storage_errors("reading", path):
        try:
            size = os.size(fd)
            left = max(0, size - offset)
            wanted = left if first is None else min(first, left)
            if size > bytes_max:
                what = f"it has {size} bytes, where at most {bytes_max} are expected"
                raise StorageError(f"{path} is not what its name says: {what}", errno=errno.EFBIG)
            buffer = bytearray(wanted)
            view = memoryview(buffer)
            done = 0
            while done < wanted:
                count = os.preadv(fd, [view[done:]], offset + done)
                if count == 0:
                    break
                done += count
            return bytes(view[:done])
        finally:
            close(fd, path, os)


# What a file system refuses may pass in a moment: which refusals, and how often it is asked again.

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAUSES_S = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
"""8 s between tries: a mount that fails over takes longer, a descriptor does not."""

NO_FILE = frozenset((errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG))
"""What the system says of a thing that is no file, or too large to be the one: it is damage, not a failure to look."""

LASTING = NO_FILE | UNSUPPORTED | {0, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
"""What is refused now is refused again in a moment."""


def patiently(what: Callable[[], T], os: Os, level: int = logging.WARNING) -> T:
    """`what()`, again after growing pauses while it raises a StorageError that may pass; then that error.

    Waits on the caller's thread. level: of what is logged about each try, where that is too common for a warning.
    """
    for pause_s in PAUSES_S:
        try:
            return what()
        except StorageError as error:
            if error.errno in LASTING:
                raise
            logger.log(level, "trying again in %s s: %s", pause_s, error)
            os.pause(pause_s)
    return what()


# What the file system of a checkpoint directory can do, tried at the start with the calls that a death will need.

NO_DIRECT = (
    "O_DIRECT is not supported: writing goes through the page cache, which is slower and needs memory, and fsync "
    "takes long (LASTWORDS_SYNC_TIMEOUT_S limits it)"
)
NO_DIRECTORY_FSYNC = (
    "fsync of a directory is not supported: a checkpoint survives the death of its processes, but may not survive "
    "a power loss soon after"
)
NO_LOCKS = "flock is not supported: unfinished files of killed jobs stay until you remove them"
NO_FALLOCATE = "space cannot be reserved: a full disk is noticed only while a part is written"


def probe(root: Path, os: Os = REAL_OS) -> tuple[str, ...]:
    """What is missing in `root` and what that means, one sentence each; nothing of the probe is left behind.

    Raises StorageError where last words could not be published at all: a directory and a file are created, written,
    fsynced, and the directory is renamed.
    """
    here = root / f".lastwords-probe-{posix.getpid()}-{secrets.token_hex(4)}"
    renamed = here.with_name(f"{here.name}-renamed")
    make_directory(here, os)
    try:
        missing = _try_file(here / "file", os)
        durable = sync_directory(here, os)
        with storage_errors("renaming the directory", here):
            os.rename(here, renamed)
        durable = sync_directory(root, os) and durable
        missing += [] if durable else [NO_DIRECTORY_FSYNC]
    finally:
        for directory in (here, renamed):
            try:
                remove_tree(directory, os)
            except StorageError:
                pass  # what led here matters more, and an empty directory harms nobody
    return tuple(missing)


def _try_file(path: Path, os: Os) -> list[str]:
    missing: list[str] = []
    with storage_errors("writing", path):
        if not _writes_directly(path, os):
            missing.append(NO_DIRECT)
            fd = os.create(path.with_name("plain"), direct=False)
            try:
                pwrite_all(os, fd, bytes(BLOCK_BYTES))
                os.fsync(fd)
            finally:
                os.close(fd)
        fd = os.create(path.with_name("other"), direct=False)
        try:
            if not _works(lambda: os.try_lock(fd)):
                missing.append(NO_LOCKS)
            if not _works(lambda: os.fallocate(fd, BLOCK_BYTES)):
                missing.append(NO_FALLOCATE)
        finally:
            os.close(fd)
    return missing


def _writes_directly(path: Path, os: Os) -> bool:
    try:
        fd = os.create(path, direct=True)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return False
        raise
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as aligned, memoryview(aligned) as view:
            if os.pwrite(fd, view, 0) < BLOCK_BYTES:
                return False
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        os.close(fd)
    return True


def _works(call: Callable[[], object]) -> bool:
    """Whether the call does not raise OSError; that of a full disk is another matter."""
    try:
        call()
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return True
