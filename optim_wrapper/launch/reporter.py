"""What a rank says to the launcher that has started it, which forks all ranks anew after a failure.

Where there is no such launcher nothing is said, and an incident ends the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lastwords.errors import ConfigError

PROTOCOL = 4
"""Higher with every change of a message between processes of a job: tests/launcher/test_protocol.py tells when."""

LAUNCHER = "LASTWORDS_LAUNCHER"
"""Of a process that the launcher could not fork, as with --no-python: a step and a path, as of `Reporter`."""

AUTO = "LASTWORDS_AUTO"
"""In the environment of ranks: their launcher was given --auto."""

ANSWER_S = 60.0
"""How long the launcher may take to make a controller."""


class Reporter:
    """Of one process. path: the launcher's Unix socket, to which the first word connects. step: the newest one that was
    saved when this process was started; 0: none. imports: what has taken long to import since then, in seconds. Any
    thread; what cannot be said, since the launcher has ended, is not.
    """

    def __init__(self, path: str, rank: int, step: int = 0, imports: Callable[[], Mapping[str, float]] = dict) -> None:
        self._path, self._rank = path, rank
        self._imports = imports
        self.goes_on_at = step
        """Where the training loop has to go on; a loop that comes after that begins anywhere."""
        self._link: socket.socket | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._asked = 0
        self._dismissed = False

    # ------------------------------------------------------------------ what happens to the rank

    def guarded(self, path: Path | None) -> None:
        """A controller looks after it, which keeps its state in `path`, if it is on this host."""
        self._say("Guarded", path="" if path is None else str(path))

    def loaded(self, files: Sequence[str]) -> None:
        """The training loop is about to begin. files: paths of what the program consists of."""
        self._say("Loaded", files=[*files])

    def begun(self, step: int, inexact: str, *, lacks: str) -> None:
        """The training loop begins after `step`. inexact, lacks: as of the launcher's `Begun`."""
        self.goes_on_at = 0
        self._say("Begun", step=step, inexact=inexact, lacks=lacks, imports=[*self._imports().items()])

    def updated(self) -> None:
        """Its first step is over."""
        self._say("Updated")

    def over(self) -> None:
        """The training loop has come to its end by itself."""
        self._say("Over")

    def left(self, step: int, record: Path | None, ended: int = 0) -> None:
        """An incident is over, and ends this process. step: the newest one that is saved; 0: none that is known.

        record: where the controller writes how each incident went. ended: the newest step that this process has ended.
        """
        self._say("Left", step=step, record=str(record or ""), ended=ended)

    def raised(self, error: str, *, lasting: bool) -> None:
        """An exception leaves the script. lasting: each process after this one would meet it as well."""
        self._say("Raised", error=error, lasting=lasting)

    def controller(self, arguments: Sequence[str], environment: Mapping[str, str], log: str) -> int | None:
        """The pid of a new controller, which has imported all that it needs; None if it cannot be had.

        log: a file, to which its output is appended.
        """
        with self._lock, contextlib.suppress(OSError):
            if (link := self._connected()) is None:
                return None
            self._asked += 1
            wanted = {"arguments": [*arguments], "environment": {**environment}, "log": log, "asked": self._asked}
            self._send(link, {"kind": "ControllerWanted", **wanted})
            for said in _lines(link):
                if said.get("kind") == "ControllerAnswer" and said.get("asked") == self._asked:
                    return None if said["pid"] is None else int(said["pid"])
                if said.get("kind") == "Refused":
                    raise ConfigError(str(said["why"]))
        return None

    # ------------------------------------------------------------------ the launcher

    @property
    def launcher_pid(self) -> int | None:
        """Of its process; None where that is not known."""
        with self._lock, contextlib.suppress(OSError):
            if (link := self._connected()) is not None:
                pid, _, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                return int(pid) or None
        return None

    @property
    def dismissed(self) -> bool:
        """Whether the launcher has said that it ends, and begins nothing again. Reads what it has said so far."""
        with self._lock, contextlib.suppress(OSError):
            if self._link is not None and not self._dismissed:
                self._link.settimeout(0)  # with another one Python waits, whatever the flags
                try:
                    self._dismissed = any(one.get("kind") == "Dismissed" for one in _lines(self._link))
                finally:
                    self._link.settimeout(ANSWER_S)
        return self._dismissed

    @property
    def is_here(self) -> bool:
        """Whether this process is the one that it speaks for."""
        return os.getpid() == self._pid

    def _say(self, kind: str, **fields: object) -> None:
        if not self.is_here:
            return
        with self._lock, contextlib.suppress(OSError):
            if (link := self._connected()) is not None:
                self._send(link, {"kind": kind, **fields})

    def _connected(self) -> socket.socket | None:
        if self._link is None:
            link = socket.socket(socket.AF_UNIX)
            try:
                link.settimeout(ANSWER_S)
                link.connect(self._path)
                self._send(link, {"kind": "Hello", "rank": self._rank, "pid": os.getpid(), "version": PROTOCOL})
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
        step, path = said.split(" ", 1)
        use(Reporter(path, int(os.environ["RANK"]), int(step)))
    return _reporter if _reporter is not None and _reporter.is_here else None
