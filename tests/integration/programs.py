"""`python -m` by a fork of a process that has imported torch: a launcher or a rank takes 0.2 processor seconds, not 3.

    job parent --fork--> launcher --fork--> nursery --fork--> (in between) --fork--> rank

What the launcher starts by `subprocess.Popen` is forked as well if it is a module of these tests: by its nursery, a
process of one thread that is as the launcher was before it began. The rank is the launcher's child all the same, to be
waited for and killed: the process in between ends at once, and the launcher adopts what it leaves. Whatever else a
launcher starts, as controllers, is started by exec.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MESSAGE_BYTES_MAX = 256 * 1024
OURS = "tests."
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Set a process attribute; raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


@dataclass
class Program:
    """What a process was forked for. It is run by the last statement of the file that this process began with."""

    module: str
    arguments: list[str]

    def run(self) -> None:
        """As `python -m module arguments` does, in a `__main__` of its own."""
        sys.modules.pop(self.module, None)  # or the interpreter warns that it is there already
        sys.modules["__main__"] = types.ModuleType("__main__")
        sys.argv = ["-m", *self.arguments]
        sys.orig_argv = [sys.executable, "-m", self.module, *self.arguments]
        runpy._run_module_as_main(self.module)  # type: ignore[attr-defined]


def of_command(command: Any) -> Program | None:
    """What is to be run by this command line, if it is a module of the tests in this interpreter."""
    match [*command] if isinstance(command, (list, tuple)) else []:
        case [sys.executable, "-m", str(module), *arguments] | [sys.executable, "-u", "-m", str(module), *arguments]:
            return Program(module, arguments) if module.startswith(OURS) else None
    return None


def use_nursery() -> Program | None:
    """In a launcher, before it begins. None in the launcher itself; in a process forked for it, what it has to run."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher_pid = os.getpid()
    if os.fork() == 0:
        ours.close()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        return _serve(theirs, launcher_pid)
    theirs.close()
    _serve_popen(ours)
    return None


def _serve(sock: socket.socket, launcher_pid: int) -> Program:
    """Returns in the forked processes."""
    while True:
        data, fds, _, _ = socket.recv_fds(sock, MESSAGE_BYTES_MAX, 3)
        if not data:
            os._exit(0)
        between_pid = os.fork()
        if between_pid == 0:
            parent_pid = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == parent_pid:
                os.sched_yield()
            if os.getppid() != launcher_pid:  # it has ended
                os._exit(1)
            sock.send(str(os.getpid()).encode())
            sock.close()
            return _begin(json.loads(data), fds)
        for fd in fds:
            os.close(fd)
        os.waitpid(between_pid, 0)


def _begin(request: Mapping[str, Any], fds: list[int]) -> Program:
    """What exec hands on to a new program, and nothing else."""
    for place, fd in enumerate(fds):
        os.dup2(fd, place)
        os.close(fd)
    if request["session"]:
        os.setsid()
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    return Program(request["module"], request["arguments"])


def _serve_popen(nursery: socket.socket) -> None:
    """Let each `subprocess.Popen` of this process, whoever has imported it, start our modules by a fork."""
    by_exec = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    names = inspect.signature(by_exec)
    one_at_a_time = threading.Lock()

    def start(process: subprocess.Popen[Any], *given: Any) -> None:
        call = names.bind(process, *given).arguments
        program = of_command(call["args"])
        if program is None or call["shell"] or call["preexec_fn"] or call["pass_fds"]:
            return by_exec(process, *given)
        ends = [call[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [ours if end == -1 else end for ours, end in enumerate(ends)]
        request = {
            "module": program.module,
            "arguments": program.arguments,
            "environment": dict(os.environ if call["env"] is None else call["env"]),
            "directory": str(call["cwd"] or os.getcwd()),
            "session": bool(call["start_new_session"]),
            "ignored": [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
            "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        }
        try:
            with one_at_a_time:
                prctl(PR_SET_CHILD_SUBREAPER, 1)
                socket.send_fds(nursery, [json.dumps(request).encode()], streams)
                answer = nursery.recv(MESSAGE_BYTES_MAX)
                prctl(PR_SET_CHILD_SUBREAPER, 0)
            if not answer:
                raise RuntimeError("the nursery has ended")
            process.pid = int(answer)
            process._child_created = True  # type: ignore[attr-defined]
        finally:
            process._close_pipe_fds(  # type: ignore[attr-defined]
                *(call[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
            )

    subprocess.Popen._execute_child = start  # type: ignore[attr-defined]
