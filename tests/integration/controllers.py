"""Controllers of forked ranks, by forks as well: a tenth of a processor second each, where an interpreter takes 0.4 s.

    job parent --fork--> nursery --fork--> controllers
         +-----fork----> ranks ---(socket)---> nursery

A rank asks as it would ask `lastwords run` for a controller.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from lastwords.controller import __main__ as controller
from lastwords.controller import launch
from tests.integration.programs import MESSAGE_BYTES_MAX, PR_SET_PDEATHSIG, prctl


class Nursery:
    """Ends once nobody is left who could ask."""

    def __init__(self) -> None:
        self._asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            self._asking.close()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            _serve(asked)
        asked.close()

    def close(self) -> None:
        """In the process that asks for none itself."""
        self._asking.close()

    def use(self) -> None:
        """In a rank."""
        launch.use_forks(self._ask)

    def _ask(self, arguments: Sequence[str], environment: Mapping[str, str], log: str) -> int:
        ours, theirs = socket.socketpair()
        request = {"arguments": arguments, "environment": environment, "log": log}
        socket.send_fds(self._asking, [json.dumps(request).encode()], [theirs.fileno()])
        theirs.close()
        with ours, ours.makefile() as lines:
            return int(lines.readline())


def _serve(asked: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        data, fds, _, _ = socket.recv_fds(asked, MESSAGE_BYTES_MAX, 1)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            asked.close()
            _be_a_controller(json.loads(data), fds[0])
        os.close(fds[0])


def _be_a_controller(request: dict[str, Any], answers: int) -> NoReturn:
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.write(answers, f"{os.getpid()}\n".encode())
        os.close(answers)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for place, fd in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(fd, place)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = ["lastwords.controller", *request["arguments"]]
        status = controller.main(request["arguments"])
    finally:
        os._exit(status)
