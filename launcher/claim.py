"""One launcher for a job on a host: what a second one would do to the checkpoints of the first is found out here.

A claim is an abstract Unix socket, which the kernel removes with its process, and which tells who holds it. Two starts
are of one job if `LASTWORDS_JOB` names it, and the command and the working directory are the same: the name alone may
be that of jobs in different directories. Nodes of one rendezvous may share a host, as in tests.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import socket
import struct
from collections.abc import Mapping, Sequence

from lastwords.errors import ConfigError

_log = logging.getLogger(__name__)

CONNECT_S = 5.0


def claim(
    command: Sequence[str], meeting: Sequence[str], nodes: int, environ: Mapping[str, str] = os.environ
) -> list[socket.socket]:
    """Hold this job as long as the sockets are open; none where it has no name. meeting: which rendezvous this is.

    Raises ConfigError where another launcher holds it, unless that is one of so many `nodes` of the same rendezvous.
    """
    job = environ.get("LASTWORDS_JOB", "")
    if not job:
        return []
    name = f"lastwords-{os.getuid()}-{_digest([job, os.getcwd(), *command])}"
    of_meeting = f"{name}-{_digest(meeting)}"
    first = _bind(name)
    if first is None and not _holder(f"{of_meeting}-0"):
        raise _refusal(job, _holder(name))
    for node in range(nodes):
        if (place := _bind(f"{of_meeting}-{node}")) is not None:
            return [place] if first is None else [first, place]
    raise _refusal(job, _holder(f"{of_meeting}-0"))


def _refusal(job: str, pid: int | None) -> ConfigError:
    return ConfigError(
        f"job {job!r} (LASTWORDS_JOB) is run by this command in this directory already, by process {pid}: end that one "
        f"first (kill -TERM {pid}), or give this one another name"
    )


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([*words]).encode()).hexdigest()[:24]


def _bind(name: str) -> socket.socket | None:
    """None if another process has that name."""
    one = socket.socket(socket.AF_UNIX)
    try:
        one.bind(f"\0{name}")
        one.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            one.close()
            return None
        _log.info("whether another launcher runs this job is not known: %s", error)
    return one


def _holder(name: str) -> int | None:
    """Its process; None if nobody has that name."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.connect(f"\0{name}")
        except OSError:
            return None
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)
