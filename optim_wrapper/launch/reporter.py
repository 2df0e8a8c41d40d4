"""What a rank says to the launcher that has started it, which forks all ranks anew after a failure.

Where there is no such launcher nothing is said, and an incident ends the job.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lastwords.errors import ConfigError
from lastwords.processor.departure import say

PROTOCOL = 9
"""Higher with every change of a message between processes of a job: tests/launcher/test_protocol.py tells when."""

LAUNCHER = "LASTWORDS_LAUNCHER"
"""Of a process that the launcher could not fork, as with --no-python: a step and a name, as of `Reporter`."""

AUTO = "LASTWORDS_AUTO"
"""In the environment of ranks: their launcher was given --auto."""

ANSWER_S = 60.0
"""How long the launcher may take to hear what is said."""

CONTROLLER_S = 2.0
"""And to make a controller, which takes milliseconds: a process of the rank's own serves after 0.3 s."""


def listening(backlog: int) -> tuple[socket.socket, str]:
    """A launcher's socket, and its name. There is no path to it, which could be removed; it ends with its process."""
    name = f"lastwords-{os.getpid()}-{secrets.token_hex(8)}"
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"\0{name}")
    server.listen(backlog)
    return server, name


def peer(link: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel has them."""
    pid, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


class Reporter:
    """Of one process. name: of the launcher's socket, to which the first word connects. step: the newest one that was
    saved when this process was started; 0: none. imports: what has taken long to import since then, in seconds. Any
    thread; what cannot be said is not, which is told once.
    """

    def __init__(self, name: str, rank: int, step: int = 0, imports: Callable[[], Mapping[str, float]] = dict) -> None:
        self._name, self._rank = name, rank
        self._imports = imports
        self.goes_on_at = step
        """Where the training loop has to go on; a loop that comes after that begins anywhere."""
        self._link: socket.socket | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._asked = 0
        self._dismissed = self._lost = False

    # ------------------------------------------------------------------ what happens to the rank

    def guarded(self, path: Path | None) -> None:
        """A controller looks after it, which keeps its state in `path`, if it is on this host."""
        self._say("Guarded", path="" if path is None else str(path))

    def loaded(self, files: Sequence[str]) -> None:
        """The training loop is about to begin. files: paths of what the program consists of."""
        self._say("Loaded", files=[*files])

    def begun(self, step: int, *, lacks: str, saved_only: bool = False) -> None:
        """The training loop begins after `step`. The others: as of the launcher's `Begun`."""
        self.goes_on_at = 0
        imports = [*self._imports().items()]
        self._say("Begun", step=step, lacks=lacks, saved_only=saved_only, imports=imports)

    def updated(self, inexact: str = "") -> None:
        """Its first step is over. inexact: as of the launcher's `Updated`."""
        self._say("Updated", inexact=inexact)

    def over(self) -> None:
        """The training loop has come to its end by itself."""
        self._say("Over")

    def left(self, step: int, record: Path | None, ended: int = 0, *, alone: bool = False) -> None:
        """An incident is over, and ends this process. step: the newest one that is saved; 0: none that is known.

        record: where the controller writes how each incident went. ended: the newest step that this process has ended.
        alone: it has lost its controller.
        """
        self._say("Leaving", step=step, record=str(record or ""), ended=ended, alone=alone)

    def raised(self, error: str, *, lasting: bool) -> None:
        """An exception leaves the script. lasting: each process after this one would meet it as well."""
        self._say("RankRaised", error=error, lasting=lasting)

    def controller(self, arguments: Sequence[str], environment: Mapping[str, str], log: str) -> int | None:
        """The pid of a new controller, which has imported all that it needs; None if it cannot be had.

        log: a file, to which its output is appended.
        """
        with self._lock, contextlib.suppress(OSError):
            link = self._connected()
            self._asked += 1
            wanted = {"arguments": [*arguments], "environment": {**environment}, "log": log, "asked": self._asked}
            self._send(link, {"kind": "ControllerWanted", **wanted})
            try:
                link.settimeout(CONTROLLER_S)
                for said in _lines(link):
                    if said.get("kind") == "ControllerAnswer" and said.get("asked") == self._asked:
                        return None if said["pid"] is None else int(said["pid"])
                    if said.get("kind") == "Rejected":
                        raise ConfigError(str(said["why"]))
            finally:
                link.settimeout(ANSWER_S)
        return None

    # ------------------------------------------------------------------ the launcher

    @property
    def launcher_pid(self) -> int | None:
        """Of its process; None where that is not known."""
        with self._lock, contextlib.suppress(OSError):
            return peer(self._connected())[0] or None
        return None

    @property
    def dismissed(self) -> bool:
        """Whether the launcher has said that it ends, and begins nothing again."""
        self._look()
        return self._dismissed

    @property
    def heals(self) -> bool:
        """Whether the launcher may begin again: it has not said that it ends, and can be reached."""
        self._look()
        return not (self._dismissed or self._lost)

    def _look(self) -> None:
        """What has the launcher said so far?"""
        with self._lock:
            if self._link is None or self._dismissed or self._lost:
                return
            try:
                self._link.settimeout(0)  # with another one Python waits, whatever the flags
                self._dismissed = any(one.get("kind") == "Dismissed" for one in _lines(self._link))
                self._lost = not self._dismissed
            except BlockingIOError:
                pass
            except OSError:
                self._lost = True
            finally:
                self._link.settimeout(ANSWER_S)

    @property
    def is_here(self) -> bool:
        """Whether this process is the one that it speaks for."""
        return os.getpid() == self._pid

    def _say(self, kind: str, **fields: object) -> None:
        if not self.is_here:
            return
        with self._lock:
            try:
                self._send(self._connected(), {"kind": kind, **fields})
            except OSError as error:
                if not (self._dismissed or self._lost):
                    say(
                        f"lastwords: rank {self._rank} cannot tell its launcher what happens to it ({error}): the "
                        "launcher has ended, or is in another network namespace; a failure may end the job, and steps "
                        "may be lost"
                    )
                self._lost = True

    def _connected(self) -> socket.socket:
        if self._link is None:
            link = socket.socket(socket.AF_UNIX)
            try:
                link.settimeout(ANSWER_S)
                link.connect(f"\0{self._name}")
                if (uid := peer(link)[1]) not in (os.geteuid(), 0):  # anybody may take the name of one that has ended
                    raise PermissionError(errno.EPERM, f"user {uid} listens there")
                self._send(link, {"kind": "RankHello", "rank": self._rank, "pid": os.getpid(), "version": PROTOCOL})
            except OSError:
                link.close()
                raise
            self._link = link
        return self._link

    @staticmethod
    def _send(link: socket.socket, message: Mapping[str, object]) -> None:
        link.sendall(json.dumps(message).encode() + b"\n")


def _lines(link: socket.socket) -> Any:
    """What the launcher says, until it ends or, where nothing is waited for, has said all."""
    rest = b""
    while data := link.recv(1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


_reporter: Reporter | None = None


def use(one: Reporter) -> None:
    """It speaks for this process from now on."""
    global _reporter
    _reporter = one


def reporter() -> Reporter | None:
    """That of this process; None where no launcher would begin again. A child that a rank has forked has none."""
    said = os.environ.pop(LAUNCHER, None)  # of a process that is none of the launcher's forks; not for its children
    if said is not None and _reporter is None:
        step, name = said.split(" ", 1)
        use(Reporter(name, int(os.environ["RANK"]), int(step)))
    return _reporter if _reporter is not None and _reporter.is_here else None
