"""Controllers of forked ranks, by forks as well: a tenth of a processor second each, where an interpreter takes 0.4 s.

    job parent --fork--> nursery --fork--> controllers
         +-----fork----> ranks ---(socket)---> nursery

A rank asks as it would ask `lastwords run` for a process that waits to be a controller, and gets one that begins there.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
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
        launch.use_waiting(self._ask)

    def _ask(self, work: dict[str, str]) -> tuple[int, dict[str, object]] | None:
        ours, theirs = socket.socketpair()
        request = {"work": work, "environment": launch.waiting_command()[1]}
        socket.send_fds(self._asking, [json.dumps(request).encode()], [theirs.fileno()])
        theirs.close()
        with ours, ours.makefile() as lines:
            pid, answer = lines.readline(), lines.readline()
        return int(pid), json.loads(answer or "{}")


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
        told, telling = os.pipe()
        os.write(telling, json.dumps(request["work"]).encode() + b"\n")
        os.close(telling)
        for place, fd in enumerate((told, answers)):
            os.dup2(fd, place)
            os.close(fd)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = ["lastwords.controller", "--wait"]
        status = controller.main(["--wait"])
    finally:
        os._exit(status)
