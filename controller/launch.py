"""Starts a controller's process from a trainer and waits until it serves.

The process gets a session of its own (a launcher kills the whole session of a worker), no terminal, no file of the
trainer's, and a log file for its output. Nothing here imports torch or gRPC.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lastwords import clock
from lastwords.checkpoint.appearing import read_end
from lastwords.checkpoint.codec import from_json
from lastwords.controller import handover
from lastwords.controller.handover import TOKEN_VARIABLE, ControllerSpec
from lastwords.controller.timeline import finding_lastwords
from lastwords.errors import BusyError, ConfigError, FormatError, LastWordsError, StorageError, UnavailableError
from lastwords.liveness import process_id
from lastwords.liveness.endings import ending_text
from lastwords.vocabulary import ProcessId

__all__ = ["ControllerHandle", "ControllerSpec", "start_controller", "start_successor"]

_log = logging.getLogger(__name__)

READY_TIMEOUT_S = 60.0
"""A controller serves after 0.3 s; on a host that imports from a cold network file system it takes far longer."""

LOG_LINES_SHOWN = 15

_started: list[subprocess.Popen[bytes]] = []
"""Kept, since a Popen that is collected while its process runs complains."""

Fork = Callable[[Sequence[str], Mapping[str, str], str], int | None]
"""Makes a process with these arguments and environment, whose output goes to this file; None where it cannot be had."""

_fork: Fork = lambda arguments, environment, log: None  # noqa: E731


def use_forks(fork: Fork) -> None:
    """From now on a controller is a fork of a process that has imported everything, where that can be."""
    global _fork
    _fork = fork


@dataclass(frozen=True, slots=True)
class ControllerHandle:
    """A controller that was started by this process and serves."""

    pid: int
    port: int
    log_path: Path
    _process: subprocess.Popen[bytes] | None = field(repr=False)

    def wait(self, timeout_s: float) -> int | None:
        """Exit status of the controller once it has ended; None if it has not after `timeout_s`, or is no child."""
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


def start_controller(spec: ControllerSpec, token: str) -> ControllerHandle:
    """Start the controller of a job; returns once it listens, and every rank may connect. Port 0: any free one.

    Waits for a controller of the incident before, on the same address (see `handover`) or in the same directory
    (`await_publications`). Raises ConfigError (address impossible or in use, bad argument), StorageError (no log file),
    UnavailableError (it does not come up: the message ends with the last lines of its log).
    """
    spec.check()
    if not sys.executable:
        raise ConfigError("sys.executable is not set, so the controller's process cannot be started")
    os.close(process_id.open_pidfd(os.getpid()))
    handover.await_address(spec.ip, spec.port)
    if handover.await_publications(spec):
        handover.await_address(spec.ip, spec.port)  # a controller that has followed one of this job's has it, too
    return _start(spec, spec.to_json(), token)


def start_successor(path: Path, *, by_hand: bool = False) -> ControllerHandle:
    """Start a controller in the place of one that was killed and has left its state in `path`; returns once it serves.

    Raises as `handover.read`, BusyError if there is a controller, ConfigError where it should not be started, and
    UnavailableError if it does not come up.
    """
    return _start(handover.read(path).spec, str(path), "", *(["--by-hand"] if by_hand else []))


def _start(spec: ControllerSpec, argument: str, token: str, *more: str) -> ControllerHandle:
    log_path = spec.log_path
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StorageError(f"cannot open the controller's log {log_path}: {error}", errno=error.errno or 0) from error
    try:
        ready, told = os.pipe()
    except OSError as error:
        os.close(log)
        raise UnavailableError(f"cannot start the controller's process: {error}") from error
    process: subprocess.Popen[bytes] | None = None
    try:
        pid = None
        if not more:
            name = f"{os.fstat(told).st_ino}:/proc/{os.getpid()}/fd/{told}"
            pid = _fork([argument, name], _environment(token), str(log_path))
            if pid is None:  # a fork that comes too late finds no pipe, and ends
                unanswered, (ready, told) = (ready, told), os.pipe()
                for fd in unanswered:
                    os.close(fd)
        if pid is None:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lastwords.controller", argument, str(told), *more],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(told,),
                start_new_session=True,
                env=_environment(token),
            )
            pid = process.pid
        who = ProcessId("", pid, 0, "")
        answer = _await_answer(ready, pid) or {"ended": ending_text(process_id.exit_code(who))}
    except OSError as error:
        raise UnavailableError(f"cannot start the controller's process: {error}") from error
    finally:
        for fd in (ready, told, log):
            os.close(fd)
    if process is not None and "port" in answer:
        _started[:] = [other for other in _started if other.poll() is None] + [process]
    elif process is not None:
        process.kill()
        process.wait()
    if not isinstance(port := answer.get("port"), int):
        raise _failure(answer, log_path)
    _log.info("controller of job %s is process %d, its log is %s", spec.job, pid, log_path)
    return ControllerHandle(pid, port, log_path, process)


def _environment(token: str) -> dict[str, str]:
    environment = {**os.environ, TOKEN_VARIABLE: token}
    # gRPC tells of each connection that breaks, in words of its own; the log says it in ours. A trainer's setting is
    # left alone, since its other users of gRPC share it.
    environment.setdefault("GRPC_VERBOSITY", "ERROR")
    return finding_lastwords(environment)


def _await_answer(fd: int, pid: int) -> dict[str, object]:
    """First line that comes through the pipe, as JSON; {} if the process `pid` ends before."""
    deadline_mono_s = clock.mono_s() + READY_TIMEOUT_S
    received = b""
    with contextlib.ExitStack() as stack:
        try:
            ended = os.pidfd_open(pid)
        except ProcessLookupError:
            return {}
        stack.callback(os.close, ended)
        poll = select.poll()
        for one in (fd, ended):
            poll.register(one, select.POLLIN)
        while b"\n" not in received:
            left_s = deadline_mono_s - clock.mono_s()
            found = {one for one, _ in poll.poll(max(0.0, left_s) * 1000)}
            if not found:
                return {"silent": True}
            if fd not in found:
                return {}
            received += os.read(fd, 65536)
    try:
        return from_json(received.partition(b"\n")[0], dict[str, object])
    except FormatError:
        return {}


def _failure(answer: dict[str, object], log_path: Path) -> LastWordsError:
    message = answer.get("message")
    if answer.get("error") == "config":
        return ConfigError(str(message))
    if answer.get("error") == "busy":
        return BusyError(str(message))
    if answer.get("silent"):
        message = f"it did not serve within {READY_TIMEOUT_S:g} s"
    elif message is None:
        how = answer.get("ended")
        message = f"it ended at once ({how})" if how else "it ended at once"
    return UnavailableError(f"the controller did not start: {message}; the end of {log_path}:\n{_tail(log_path)}")


def _tail(path: Path) -> str:
    try:
        lines = read_end(path, 16384).decode(errors="replace").splitlines()
    except OSError as error:
        return f"(cannot be read: {error})"
    return "\n".join(f"    {line}" for line in lines[-LOG_LINES_SHOWN:])
