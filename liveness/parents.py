"""Parents and orphans, as the kernel has them (prctl)."""

from __future__ import annotations

import ctypes
import os
import signal

# <linux/prctl.h>; the values are part of the ABI.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)

MEANT_FOR_RANKS = (
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
"""A terminal or a batch system sends them to all processes of a job."""


def die_with_parent(number: signal.Signals) -> None:
    """This process gets the signal once the thread ends that has started it. Its own children do not inherit that.

    OSError where the kernel refuses. Where the parent has ended before this call, nothing comes: compare `os.getppid()`
    with what it was.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def take_in_orphans() -> None:
    """From now on this process is the parent of all its descendants whose own parent has ended. OSError. Main thread.

    It waits for them, which it could not where whoever has started it ignores SIGCHLD; nor could its children.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
