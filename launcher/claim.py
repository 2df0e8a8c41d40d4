"""One launcher for a job on a host: what a second one would do to the checkpoints of the first is found out here.

A claim is an abstract Unix socket, which the kernel removes with its process, and which tells who holds it. Two starts
are of one job if `LASTWORDS_JOB` names it, and the command and the working directory are the same: the name alone may
be that of jobs in different directories. Nodes of one rendezvous may share a host, as in tests.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence

from lastwords.errors import ConfigError, is_shortage
from lastwords.optim_wrapper.launch.reporter import peer

_log = logging.getLogger(__name__)

CONNECT_S = 5.0
AGAIN_S = 1.0

BACKLOG = 4096
"""Launchers that may ask a stopped one who it is."""

UNKNOWN_PID = 0
"""As the kernel has it for a process that cannot be seen from here."""


class Claim:
    """Names that this launcher holds until `close`.

    Whoever finds one taken connects, to learn by whom. A thread for each takes these connections: one that is not
    taken keeps its place in the backlog for ever, and once that is full nobody learns anything.
    """

    def __init__(self, *held: socket.socket) -> None:
        self.held = held
        self._threads = [
            threading.Thread(target=_take_all, args=(one,), name="lastwords-claim", daemon=True) for one in held
        ]
        for thread in self._threads:
            try:
                thread.start()
            except RuntimeError as error:  # no room for a thread; the job is claimed all the same
                _log.info("another launcher may not learn which process runs this job: %s", error)

    def close(self) -> None:
        """Another launcher may have the job."""
        for one in self.held:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # a thread in accept() would keep the name, and sleep on
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(CONNECT_S)
        for one in self.held:
            one.close()


def claim(command: Sequence[str], meeting: Sequence[str], nodes: int, environ: Mapping[str, str] = os.environ) -> Claim:
    """Hold this job, if it has a name, until the claim is closed. meeting: which rendezvous this is.

    Raises ConfigError where another launcher holds it, unless that is one of so many `nodes` of the same rendezvous.
    """
    job = environ.get("LASTWORDS_JOB", "")
    if not job:
        return Claim()
    name = f"lastwords-{os.getuid()}-{_digest([job, os.getcwd(), *command])}"
    of_meeting = f"{name}-{_digest(meeting)}"
    first = _bind(name)
    if first is None and _holder(f"{of_meeting}-0") is None:
        raise _refusal(job, _holder(name))
    for node in range(nodes):
        if (place := _bind(f"{of_meeting}-{node}")) is not None:
            return Claim(place) if first is None else Claim(first, place)
    raise _refusal(job, _holder(f"{of_meeting}-0"))


def _refusal(job: str, pid: int | None) -> ConfigError:
    who, how = (f", by process {pid}", f" (kill -TERM {pid})") if pid else ("", "")
    return ConfigError(
        f"job {job!r} (LASTWORDS_JOB) is run by this command in this directory already{who}: end that one first{how}, "
        "or give this one another name"
    )


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([*words]).encode()).hexdigest()[:24]


def _bind(name: str) -> socket.socket | None:
    """None if another process has that name."""
    one = socket.socket(socket.AF_UNIX)
    try:
        one.bind(f"\0{name}")
        one.listen(BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            one.close()
            return None
        _log.info("whether another launcher runs this job is not known: %s", error)
    return one


def _take_all(server: socket.socket) -> None:
    while True:
        try:
            server.accept()[0].close()
        except OSError as error:
            if not is_shortage(error):
                return  # it was shut down
            time.sleep(AGAIN_S)


def _holder(name: str) -> int | None:
    """Its process, UNKNOWN_PID where it does not say; None if nobody has that name."""
    with socket.socket(socket.AF_UNIX) as probe:
        # A timeout of Python's own would make the socket non-blocking, and a full backlog a failure at once.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", *divmod(int(CONNECT_S * 1e6), 10**6)))
        try:
            probe.connect(f"\0{name}")
        except ConnectionRefusedError:
            return None
        except OSError:  # it is stopped, and many have asked
            return UNKNOWN_PID
        return peer(probe)[0]
