"""One controller at a time: how a process comes to serve a job, and that no other one does any more.

Whoever serves holds the lock beside the state file, which ends with its process. A successor takes the lock from a
controller that lives only if that does not answer: stopped, or hanging. It is ended then, before the successor does
anything, so that it cannot wake up and publish.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from lastwords import clock
from lastwords.checkpoint.lock_file import LockFile
from lastwords.controller import state_file
from lastwords.controller.query import query_state
from lastwords.controller.state_file import KeptState, Owner
from lastwords.errors import BusyError, ConfigError, UnavailableError, is_shortage
from lastwords.liveness import paths, process_id
from lastwords.transport import host_port

_log = logging.getLogger(__name__)

ANSWER_S = 2.0
"""A controller that serves answers within some milliseconds; one that has just been started needs 0.3 s to do so."""

END_S = 10.0
"""A process that was killed ends at once, unless a file system keeps it in a system call."""

POLL_INTERVAL_S = 0.02

STARTS_MAX, STARTS_WITHIN_S = 3, 30.0
"""A controller that is killed so often within so short a time is not started again but by hand."""

_held = contextlib.ExitStack()
"""The lock of the job that this process serves, until its end."""


def this_owner(before: Owner | None = None) -> Owner:
    """This process, which begins to serve now."""
    begun = (() if before is None else before.begun_mono_s) + (clock.mono_s(),)
    return Owner(os.getpid(), process_id.start_ticks(os.getpid()) or 0, begun[-STARTS_MAX:])


def hold(directory: Path) -> None:
    """The first controller of a start begins to serve. BusyError if there is one already."""
    if not _take_lock(directory, 0.0):
        raise BusyError(f"another controller of this start serves already: {directory / paths.LOCK_NAME} is locked")


def follow(
    path: Path,
    *,
    by_hand: bool = False,
    answer_s: float = ANSWER_S,
    sleep: Callable[[float], None] = time.sleep,
) -> KeptState:
    """Take the place of the controller whose state is in `path`; its process has ended on return.

    Raises BusyError if it serves, or another one is about to follow; ConfigError if it was started too often just now
    (by_hand: that is ignored); UnavailableError if it cannot be ended; and as `state_file.read`.
    """
    kept = state_file.read(path)
    recent = [begun for begun in kept.owner.begun_mono_s if clock.mono_s() - begun < STARTS_WITHIN_S]
    if len(recent) >= STARTS_MAX and not by_hand:
        raise ConfigError(
            f"the controller of job {kept.spec.job} was started {len(recent)} times within {STARTS_WITHIN_S:g} s, so "
            f"it is not started again; find out from {kept.spec.log_path} why it ends, then start it by hand: "
            f"lastwords controller --recover {path}"
        )
    deadline_mono_s = clock.mono_s() + END_S
    while not _take_lock(path.parent, POLL_INTERVAL_S):
        kept = state_file.read(path)
        if kept.owner.is_running:
            _end_if_silent(kept, answer_s)
        if clock.mono_s() > deadline_mono_s:
            raise UnavailableError(
                f"process {kept.owner.pid}, the controller of job {kept.spec.job}, neither serves nor ends; find out "
                f"what it waits for (cat /proc/{kept.owner.pid}/stack), and try again"
            )
        sleep(POLL_INTERVAL_S)
    return state_file.read(path)


def _take_lock(directory: Path, wait_s: float) -> bool:
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(LockFile(directory / paths.LOCK_NAME).held(wait_s=wait_s)):
            return False
        _held.push(stack.pop_all())
    return True


def _end_if_silent(kept: KeptState, answer_s: float) -> None:
    spec, owner = kept.spec, kept.owner
    try:
        found = query_state(host_port(spec.ip, spec.port), kept.token, timeout_s=answer_s, with_ranks=False)
    except (ConfigError, UnavailableError) as error:
        if is_shortage(error):
            raise  # it could not even be asked
        found = None
    if found is not None and found.pid == owner.pid:
        raise BusyError(f"the controller of job {spec.job} is alive: process {owner.pid} is {found.stage}")
    if clock.mono_s() - max(owner.begun_mono_s, default=0.0) < answer_s:
        return  # it has only just begun
    _log.warning("the controller of job %s, process %d, does not answer and is ended", spec.job, owner.pid)
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(owner.pid)
        try:
            if owner.is_running:  # looked at with the pidfd open: the pid cannot be another process's now
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)
