"""Processes that a host's launcher starts beside torch's own: replacements, and controllers in advance."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from lastwords.controller import launch as controller_launch
from lastwords.liveness import process_id


class Process(SubprocessHandler):
    """A worker that was started after the others; its output goes on in the file of the one that it replaces."""

    def __init__(self, *args: Any, out: str = "", err: str = "") -> None:
        self._out, self._err = out, err
        super().__init__(*args)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as files:
            streams = [files.enter_context(open(one, "ab")) if one else None for one in (self._out, self._err)]
            return subprocess.Popen(args, env=env, stdout=streams[0], stderr=streams[1], start_new_session=True)


class Controllers:
    """One process that has imported what a controller needs, and those that were handed out."""

    def __init__(self) -> None:
        self._ready: subprocess.Popen[bytes] | None = None
        self._out: list[subprocess.Popen[bytes]] = []
        self._wanted = False

    def prepare(self) -> None:
        """For the next entry, where one was used in this: the host whose rank has asked is that of the next, too."""
        self._out = [one for one in self._out if one.poll() is None]
        if not self._wanted or (self._ready is not None and self._ready.poll() is None):
            return
        command, environment = controller_launch.waiting_command()
        pipe = subprocess.PIPE
        with contextlib.suppress(OSError):  # then rank 0 starts its controller itself
            self._ready = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, start_new_session=True)

    def hand_out(self, work: dict[str, str]) -> subprocess.Popen[bytes] | None:
        """It is a controller from now on; None if there is none, or it is stopped: nobody waits until it goes on."""
        self._wanted = True
        process, self._ready = self._ready, None
        if process is None or process.poll() is not None:
            return None
        if process_id.is_stopped(process.pid):
            process.kill()
            process.wait()
            return None
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has died: the other end of its answers says so
            process.stdin.write(json.dumps(work).encode() + b"\n")
            process.stdin.close()
        self._out.append(process)
        return process

    def end(self) -> None:
        """The one that nobody needs any more; a controller ends with its job."""
        if self._ready is not None:
            self._ready.kill()
            self._ready.wait()


def ended_badly(pid: int) -> bool:
    """Of a process that has ended and has not been collected."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return found is None or found.si_code != os.CLD_EXITED or found.si_status != 0


def kill_group(pid: int) -> None:
    """All processes of the group that this one leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
