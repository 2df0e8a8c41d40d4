"""Identity of a process: a pid alone is reused, a pid with its start time is not.

Reads /proc only. `start_ticks` is field 22 of /proc/PID/stat, see proc(5).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path

from lastwords.errors import UnavailableError
from lastwords.vocabulary import ProcessId


def host_id() -> str:
    """Opaque text, equal for two processes exactly if they share this boot, this pid namespace and /dev/shm.

    A host name would not do: containers of one host have different names, and clones of one image the same.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = socket.gethostname()
    return f"{boot}/{_inode('/proc/self/ns/pid'):x}/{_device('/dev/shm'):x}"


def start_ticks(pid: int) -> int | None:
    """Clock ticks between boot and the start of `pid`; None if there is no such process or it is a zombie.

    Raises UnavailableError where the system does not say (no descriptor, no memory): that is no death.

    >>> start_ticks(os.getpid()) == start_ticks(os.getpid())
    True
    """
    try:
        fields = _fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as error:
        raise UnavailableError(f"cannot tell whether process {pid} lives: {error}") from error
    if fields[0] in (b"Z", b"X", b"x"):
        return None
    return int(fields[19])


def open_pidfd(pid: int) -> int:
    """See pidfd_open(2). Raises ProcessLookupError, and UnavailableError where the system refuses."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError as error:
        advice = ""
        if error.errno in (errno.ENOSYS, errno.EPERM):
            advice = (
                "; lastwords needs Linux 5.3 or newer and, in a container, a seccomp profile that allows this call "
                "(docker 20.10 and newer; elsewhere --security-opt seccomp=unconfined)"
            )
        raise UnavailableError(f"cannot watch process {pid}: pidfd_open: {error.strerror}{advice}") from error


def is_handled(pid: int, number: int) -> bool:
    """Whether this process has a handler for the signal, or ignores it."""
    handled = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, mask = line.partition(":")
            if name in ("SigCgt", "SigIgn"):
                handled |= int(mask, 16)
    return bool(handled >> (number - 1) & 1)


def exit_code(process: ProcessId) -> int | None:
    """How this process of this host, which has died, has ended: as of Popen.returncode. None where nobody says so.

    Whoever may look at a process can read it from when its threads end until its parent has collected it. Others read
    0, which an end by `os._exit(0)` cannot be told from: that is None, too. start_ticks 0: of whoever has the pid.
    """
    try:
        fields = _fields(process.pid)
        status = int(fields[49]) if process.start_ticks in (0, int(fields[19])) else 0
    except (OSError, IndexError, ValueError):
        return None
    return os.waitstatus_to_exitcode(status) if status else None


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP, Ctrl-Z) or a debugger holds this process; False where the system does not say.

    >>> is_stopped(os.getpid())
    False
    """
    try:
        return _fields(pid)[0] in (b"T", b"t")
    except OSError:
        return False


def _fields(pid: int) -> list[bytes]:
    """Of /proc/PID/stat, from the third, the state, on."""
    text = Path(f"/proc/{pid}/stat").read_bytes()
    # The command name stands in parentheses and may itself contain blanks and parentheses.
    return text[text.rfind(b")") + 2 :].split()


def this_process(nonce: str) -> ProcessId:
    """Identity of the calling process. `nonce` is drawn by the caller, once at start-up."""
    pid = os.getpid()
    ticks = start_ticks(pid)
    assert ticks is not None, "a running process has an entry in /proc"
    return ProcessId(host_id=host_id(), pid=pid, start_ticks=ticks, nonce=nonce)


def is_alive(process: ProcessId) -> bool:
    """Whether this very process still runs; a zombie or a new process with the same pid does not count.

    Only meaningful for a process of this host (`process.host_id == host_id()`). See `runs`.
    """
    return runs(process.pid, process.start_ticks)


def runs(pid: int, ticks: int) -> bool:
    """Whether the process `pid` that started at `ticks` still runs; True where the system does not say."""
    try:
        return start_ticks(pid) == ticks
    except UnavailableError:
        return True


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def _device(path: str) -> int:
    try:
        return os.stat(path).st_dev
    except OSError:
        return 0
