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

from lastwords import clock, codec, descriptors
from lastwords.checkpoint.lock_file import LockFile
from lastwords.controller import handover
from lastwords.controller.handover import LOG_DIRECTORY, TOKEN_VARIABLE, KeptState, StateOwner
from lastwords.errors import BusyError, ConfigError, UnavailableError, is_shortage
from lastwords.liveness import paths, process_id
from lastwords.state import ControllerState
from lastwords.transport import call_metadata, channel_options, grpc, host_port

# Asks a running controller what it knows; for the command line. Blocking, bounded.

QUERY_TIMEOUT_S = 5.0


def find_controller(root: Path | None = None) -> str:
    """Address of the one controller of this user on this host; of one that saves in `root`, where that is given.

    Raises UnavailableError if there is none, ConfigError naming all if there are several.
    """
    running = handover.running_here()
    if root is not None:
        running = [record for record in running if Path(record.log).parent == root.resolve() / LOG_DIRECTORY]
    if not running:
        which = "" if root is None else f" that saves in {root}"
        raise UnavailableError(
            f"no controller of this user{which} runs on this host; specify one: --controller HOST:PORT"
        )
    if len(running) > 1:
        known = ", ".join(f"{record.address} (job {record.job})" for record in running)
        raise ConfigError(f"several controllers run here, choose one with --controller: {known}")
    return running[0].address


def query_state(
    address: str, token: str | None = None, *, timeout_s: float = QUERY_TIMEOUT_S, with_ranks: bool = True
) -> ControllerState:
    """State of the controller at `address` ("HOST:PORT", "[IPv6]:PORT"); of 16 384 ranks it has 2.5 MB.

    Without a token, LASTWORDS_TOKEN is used, else the run file of a controller of this user on this host.
    Raises ConfigError (malformed address, wrong or no token) or UnavailableError (nobody answers, or this process is
    short of descriptors).
    """
    host, port = split_address(address)
    if token is None:
        token = os.environ.get(TOKEN_VARIABLE) or _token_of(host, port)
    descriptors.look_for_grpc()
    with grpc.insecure_channel(host_port(host, port), options=channel_options()) as channel:
        method = channel.unary_unary(codec.STATE_METHOD)
        try:
            request = codec.state_request_to_bytes(without_ranks=not with_ranks)
            raw = method(request, metadata=call_metadata(token), timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION):
                raise ConfigError(f"the controller at {address} rejected the request: {error.details()}") from error
            raise UnavailableError(f"no controller answers at {address}: {error.details()}") from error
    return codec.state_from_bytes(raw)


def split_address(address: str) -> tuple[str, int]:
    """Host and port; raises ConfigError for anything else.

    >>> split_address("[::1]:30051"), split_address("node-3:30051")
    (('::1', 30051), ('node-3', 30051))
    """
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{address!r} is not the address of a controller; write HOST:PORT or [IPV6]:PORT")
    return host, int(port)


def _token_of(host: str, port: int) -> str:
    record = handover.read_run_file(handover.run_file_path(host, port))
    if record is None or not record.is_running:
        raise ConfigError(
            f"the token of the controller at {host_port(host, port)} is not known here: set {TOKEN_VARIABLE}, or ask "
            "as the same user on the controller's host"
        )
    return record.token


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


def this_owner(before: StateOwner | None = None) -> StateOwner:
    """This process, which begins to serve now."""
    begun = (() if before is None else before.begun_mono_s) + (clock.mono_s(),)
    return StateOwner(os.getpid(), process_id.start_ticks(os.getpid()) or 0, begun[-STARTS_MAX:])


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
    (by_hand: that is ignored); UnavailableError if it cannot be ended; and as `handover.read`.
    """
    kept = handover.read(path)
    recent = [begun for begun in kept.owner.begun_mono_s if clock.mono_s() - begun < STARTS_WITHIN_S]
    if len(recent) >= STARTS_MAX and not by_hand:
        raise ConfigError(
            f"the controller of job {kept.spec.job} was started {len(recent)} times within {STARTS_WITHIN_S:g} s, so "
            f"it is not started again; find out from {kept.spec.log_path} why it ends, then start it by hand: "
            f"lastwords controller --recover {path}"
        )
    deadline_mono_s = clock.mono_s() + END_S
    while not _take_lock(path.parent, POLL_INTERVAL_S):
        kept = handover.read(path)
        if kept.owner.is_running:
            _end_if_silent(kept, answer_s)
        if clock.mono_s() > deadline_mono_s:
            raise UnavailableError(
                f"process {kept.owner.pid}, the controller of job {kept.spec.job}, neither serves nor ends; find out "
                f"what it waits for (cat /proc/{kept.owner.pid}/stack), and try again"
            )
        sleep(POLL_INTERVAL_S)
    return handover.read(path)


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
