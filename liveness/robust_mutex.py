"""A process's life line: a robust mutex in shared memory that the kernel gives back when its owner dies.

Linux walks a dying thread's list of robust futexes *before* it frees the process's memory (exit_mm_release in
kernel/fork.c), marks each with FUTEX_OWNER_DIED and wakes one waiter. Sockets and pidfds speak only after the
memory is gone: half a second later for a process of 8 GB. See set_robust_list(2), futex(2), robust-futex-ABI.txt.

Roles. The owner locks a `PTHREAD_MUTEX_ROBUST | PTHREAD_PROCESS_SHARED` mutex with a thread of its own, which
sleeps until the process ends: robust futexes belong to threads, and a forked child has none of its parent's
threads, so children neither hold the mutex nor hide the death of their parent. Watchers never lock: they map the
file read-only, sleep on the futex word and look at what the kernel wrote into it. (Locking it would make the first
watcher the new owner, and all others would depend on that one process to go on; so the word stays as the kernel
left it, for every watcher, also for one that comes later.) A watcher therefore cannot announce itself by setting
FUTEX_WAITERS, without which the kernel wakes nobody; the owner sets that bit itself, once.

File: 4 KiB, appears under its name only when the mutex is already held.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import logging
import os
import platform
import stat
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lastwords import threads
from lastwords.errors import ConfigError, FormatError, StorageError, UnavailableError, named
from lastwords.liveness import paths
from lastwords.liveness.process_id import start_ticks
from lastwords.vocabulary import ProcessId

_log = logging.getLogger(__name__)

_FILE_BYTES = 4096
_HEADER = struct.Struct("=8sIIQII")  # magic, state, offset of the futex word, start ticks, pid, thread id
_MAGIC = b"LWLIFE\x00\x01"
_STATE_AT = 8
_MUTEX_AT = 64
_STATE_HELD = 1
_STATE_CLEAN = 2

# <linux/futex.h>, <linux/prctl.h>, <pthread.h>; the values are part of the ABI.
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_FUTEX_WAITERS = 0x80000000
_FUTEX_OWNER_DIED = 0x40000000
_FUTEX_TID_MASK = 0x3FFFFFFF
_EVERYBODY = 0x7FFFFFFF
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_PTHREAD_PROCESS_SHARED = 1
_PTHREAD_MUTEX_ROBUST = 1
_PROT_READ, _PROT_WRITE, _MAP_SHARED = 1, 2, 1

_RECHECK_S = 0.5
"""The kernel wakes one watcher and that one wakes the others. Should it be stopped (SIGSTOP) at that very
moment, the others look by themselves this often. A look costs about 20 us, so 64 watches take 0.3 % of a core."""


class EndKind(enum.Enum):
    """How a watched process ended its life line."""

    DIED = "died"
    CLEAN = "clean"


@dataclass(frozen=True, slots=True)
class LifeOwner:
    """The process that a life line belongs to, as written in the file."""

    pid: int
    start_ticks: int


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Mapping:
    """A shared mapping made with mmap(2) itself.

    Python's mmap object would unmap when the interpreter is torn down, before the kernel walks the robust list;
    the owner's mapping has to stay until the very end.
    """

    def __init__(self, fd: int, *, writable: bool) -> None:
        protection = _PROT_READ | (_PROT_WRITE if writable else 0)
        address = _libc().mmap(None, _FILE_BYTES, protection, _MAP_SHARED, fd, 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise StorageError(f"cannot map a life line: {os.strerror(code)}", errno=code)
        self.address: int = address

    def word(self, offset: int) -> ctypes.c_uint32:
        """An aligned 32-bit word: ctypes reads and writes it with one instruction."""
        return ctypes.c_uint32.from_address(self.address + offset)

    def header(self) -> tuple[bytes, int, int, int, int, int]:
        fields: tuple[bytes, int, int, int, int, int] = _HEADER.unpack(ctypes.string_at(self.address, _HEADER.size))
        return fields

    def wake_all(self, offset: int) -> None:
        _libc().syscall(_SYS_FUTEX[platform.machine()], self.address + offset, _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def sleep_while(self, offset: int, value: int, timeout_s: float) -> int:
        """Sleep until woken, `timeout_s` at most, if the word still is `value`; returns errno (0: woken)."""
        timeout = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        result = _libc().syscall(
            _SYS_FUTEX[platform.machine()],
            self.address + offset,
            _FUTEX_WAIT,
            value,
            ctypes.byref(timeout),
            None,
            0,
        )
        return 0 if result == 0 else ctypes.get_errno()

    def unmap(self) -> None:
        _libc().munmap(self.address, _FILE_BYTES)


class LifeLine:
    """Held by this process until it ends or calls `release()`. Made by `LifeLine.create`, once for each process."""

    def __init__(self, path: Path, mapping: _Mapping) -> None:
        self.path = path
        self._mapping = mapping
        self._pid = os.getpid()
        self._held = threading.Event()
        self._let_go = threading.Event()
        self._refused: str | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def create(cls, path: Path) -> LifeLine:
        """Take the life line at `path` for this process; a file of an earlier process there is replaced.

        The directory has to exist (`paths.make_job_dir`). Raises UnavailableError where the platform has no robust
        mutexes of the known kind (the caller then relies on pidfd), or no thread can be started, which is a shortage;
        StorageError if the file system refuses.
        """
        if platform.machine() not in _SYS_FUTEX:
            raise UnavailableError(
                f"robust mutexes are not known to work on {platform.machine()}; falling back on pidfd"
            )
        try:
            with paths.replacing(path) as fd:
                os.posix_fallocate(fd, 0, _FILE_BYTES)
                line = cls(path, _Mapping(fd, writable=True))
                line._start()
            os.close(fd)
        except OSError as error:
            raise StorageError(
                f"cannot create the life line {path}: {error.strerror}", errno=error.errno or 0
            ) from error
        return line

    def release(self) -> None:
        """Tell all watchers that what follows is no death. Harmless when repeated, or in a forked child."""
        if os.getpid() != self._pid or self._let_go.is_set():
            return
        self._mapping.word(_STATE_AT).value = _STATE_CLEAN
        self._let_go.set()
        assert self._thread is not None, "`create` has started it"
        self._thread.join(timeout=5.0)
        self._mapping.wake_all(_MUTEX_AT)

    def _start(self) -> None:
        libc = _libc()
        attributes = ctypes.create_string_buffer(64)  # pthread_mutexattr_t: 4 or 8 bytes on every known platform
        mutex = self._mapping.address + _MUTEX_AT
        for code in (
            libc.pthread_mutexattr_init(attributes),
            libc.pthread_mutexattr_setpshared(attributes, _PTHREAD_PROCESS_SHARED),
            libc.pthread_mutexattr_setrobust(attributes, _PTHREAD_MUTEX_ROBUST),
            libc.pthread_mutex_init(ctypes.c_void_p(mutex), attributes),
        ):
            if code != 0:
                raise UnavailableError(f"this system has no robust mutexes: {os.strerror(code)}; falling back on pidfd")
        # A daemon thread, so that it never delays the end of the process; it sleeps in C without the interpreter
        # lock and therefore outlives the interpreter: its end is the kernel's doing.
        self._thread = threads.start_patiently(self._own, name="lastwords-life")
        self._held.wait()
        if self._refused is not None:
            raise UnavailableError(self._refused)

    def _own(self) -> None:
        try:
            self._hold()
        except Exception as error:  # the outermost frame of this thread: whoever waits for the lock has to hear of it
            _log.exception("a life line cannot be held")
            self._refused = f"{named(error)}; falling back on pidfd"
        finally:
            self._held.set()

    def _hold(self) -> None:
        """Until it is let go."""
        libc = _libc()
        mutex = ctypes.c_void_p(self._mapping.address + _MUTEX_AT)
        code = libc.pthread_mutex_lock(mutex)
        word = self._mapping.word(_MUTEX_AT)
        thread_id = threading.get_native_id()
        if code != 0 or word.value & _FUTEX_TID_MASK != thread_id:
            # Another C library may keep the futex elsewhere in pthread_mutex_t: say so instead of guessing.
            self._refused = f"pthread_mutex_lock returned {code} and the word {word.value:#x}; falling back on pidfd"
            return
        word.value = thread_id | _FUTEX_WAITERS
        header = _HEADER.pack(_MAGIC, _STATE_HELD, _MUTEX_AT, start_ticks(self._pid) or 0, self._pid, thread_id)
        ctypes.memmove(self._mapping.address, header, len(header))
        self._held.set()
        self._let_go.wait()
        libc.pthread_mutex_unlock(mutex)


class LifeWatch:
    """A running watch of one life line. `stop()` ends it without a call-back.

    Takes the mapping over. UnavailableError if no thread can be started, which is a shortage.
    """

    def __init__(self, path: Path, mapping: _Mapping, on_end: Callable[[EndKind], None]) -> None:
        _, _, _, ticks, pid, _ = mapping.header()
        self.owner = LifeOwner(pid=pid, start_ticks=ticks)
        self._path = path
        self._mapping = mapping
        self._on_end = on_end
        self._stopping = False
        self._lock = threading.Lock()  # guards the mapping against being unmapped under `stop`
        self._mapped = True
        try:
            self._thread = threads.start(self._run, name=f"lastwords-watch-{pid}")
        except UnavailableError:
            mapping.unmap()
            raise

    def stop(self) -> None:
        """End the watch; on return its call-back does not run any more (unless called from the call-back itself)."""
        self._stopping = True
        while self._thread.is_alive() and self._thread is not threading.current_thread():
            # A wake-up between the thread's look at `_stopping` and its sleep is lost, hence the loop.
            with self._lock:
                if self._mapped:
                    self._mapping.wake_all(_MUTEX_AT)
            self._thread.join(timeout=0.01)

    def _run(self) -> None:
        try:
            kind = self._await_end()
            if kind is not None:
                self._on_end(kind)
        except Exception:  # the outermost frame of this thread
            _log.exception("watching %s failed", self._path)
        finally:
            with self._lock:
                self._mapped = False
                self._mapping.unmap()

    def _await_end(self) -> EndKind | None:
        word = self._mapping.word(_MUTEX_AT)
        while not self._stopping:
            value = word.value
            kind = _end_kind(self._mapping)
            if kind is not None:
                self._mapping.wake_all(_MUTEX_AT)
                return kind
            code = self._mapping.sleep_while(_MUTEX_AT, value, _RECHECK_S)
            if code not in (0, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(code, f"futex wait: {os.strerror(code)}")
        return None


def watch(path: Path, on_end: Callable[[EndKind], None], *, process: ProcessId | None = None) -> LifeWatch:
    """Call `on_end` once, in a thread of its own, when the owner of this life line dies or releases it.

    An owner that has already ended is reported at once. Raises UnavailableError if there is no file (yet), if it is
    not `process`'s, or if no thread can be started; FormatError if it is not a life line.
    """
    return LifeWatch(path, _attach(path, process), on_end)


def owner_of(path: Path) -> LifeOwner:
    """The process that this life line belongs to, alive or not. Raises like `watch`."""
    mapping = _attach(path, None)
    try:
        _, _, _, ticks, pid, _ = mapping.header()
    finally:
        mapping.unmap()
    return LifeOwner(pid=pid, start_ticks=ticks)


def state_of(path: Path, *, process: ProcessId | None = None) -> EndKind | None:
    """How the owner of this life line ended, or None while it lives. Raises like `watch`."""
    mapping = _attach(path, process)
    try:
        return _end_kind(mapping)
    finally:
        mapping.unmap()


def _end_kind(mapping: _Mapping) -> EndKind | None:
    # The futex word is read before the state: a clean owner sets the state first and then gives the mutex back.
    value = mapping.word(_MUTEX_AT).value
    if mapping.word(_STATE_AT).value == _STATE_CLEAN:
        return EndKind.CLEAN
    return EndKind.DIED if value & _FUTEX_OWNER_DIED or value & _FUTEX_TID_MASK == 0 else None


def _attach(path: Path, process: ProcessId | None) -> _Mapping:
    if platform.machine() not in _SYS_FUTEX:
        raise UnavailableError(f"robust mutexes are not known to work on {platform.machine()}; falling back on pidfd")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise UnavailableError(f"no life line at {path}: its process has not started, or the job is over") from error
    except OSError as error:
        raise ConfigError(f"cannot open the life line {path}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FormatError(f"{path} is not a life line: it is no regular file")
        if os.fstat(fd).st_size != _FILE_BYTES:
            raise FormatError(f"{path} is not a life line: {os.fstat(fd).st_size} bytes instead of {_FILE_BYTES}")
        mapping = _Mapping(fd, writable=False)
    finally:
        os.close(fd)
    magic, state, word_at, ticks, pid, _ = mapping.header()
    if magic != _MAGIC or state not in (_STATE_HELD, _STATE_CLEAN) or word_at != _MUTEX_AT:
        mapping.unmap()
        raise FormatError(f"{path} is not a life line of this version")
    if process is not None and (pid, ticks) != (process.pid, process.start_ticks):
        mapping.unmap()
        raise UnavailableError(f"the life line {path} belongs to process {pid}, not to {process.pid}")
    return mapping


_libc_loaded: ctypes.CDLL | None = None


def _libc() -> ctypes.CDLL:
    """The C library of this process, with the signatures used here (the interpreter lock is free during calls)."""
    global _libc_loaded
    if _libc_loaded is None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
        ]  # fmt: skip
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.syscall.restype = ctypes.c_long
        libc.syscall.argtypes = [
            ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p,
            ctypes.c_uint32,
        ]  # fmt: skip
        for name in ("init", "lock", "unlock"):
            getattr(libc, f"pthread_mutex_{name}")  # AttributeError here would mean a C library without threads
        _libc_loaded = libc
    return _libc_loaded
