"""How a process becomes a worker of a cluster: it asks the scheduler, shows that it knows the token, and is a rank."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import socket
import struct
import time
from typing import Any, NamedTuple

from lastwords.clock import mono_s
from lastwords.errors import ConfigError, FormatError, StorageError, UnavailableError
from lastwords.launcher.cluster_state import read_token
from lastwords.launcher.environment import Cluster
from lastwords.launcher.link import RECV_BYTES, STRANGER_LINE_BYTES_MAX, Lines, keep_alive, send
from lastwords.launcher.protocol import (
    Admission,
    Answer,
    Applicant,
    Application,
    Challenge,
    difference,
    proof_of,
    read,
    to_message,
)
from lastwords.launcher.registry import Refused
from lastwords.liveness import process_id
from lastwords.optim_wrapper.launch.reporter import PROTOCOL
from lastwords.processor.departure import say

_log = logging.getLogger(__name__)

JOIN_S = 600.0
"""How long a worker waits for a scheduler, and for its name to become free, while no process of its rank runs."""

ANSWER_S = 10.0
ASK_S_MAX = 3 * ANSWER_S
"""A connection, a challenge, an answer."""

AGAIN_S = 0.5
NOTICE_S = 10.0

NO_ANSWER = (OSError, FormatError, StorageError, UnavailableError)
"""What asking a scheduler raises where there is none, or where it makes no sense."""


class Joined(NamedTuple):
    """Admitted by a scheduler. lines: of what has come over `link` so far."""

    answer: Admission
    link: socket.socket
    lines: Lines


class Candidate:
    """This process, which would be a worker of `cluster`, or is one and has lost its scheduler."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._name = cluster.node
        self._process = process_id.this_process("")
        self._rank: int | None = None
        self._job = ""

    def join(self) -> Joined:
        """It is a rank on return.

        Raises ConfigError where the scheduler refuses it or is of another version, UnavailableError where there is
        none, SystemExit where there is nothing left to do for it.
        """
        begun_s = told_s = mono_s()
        while True:
            try:
                answer = self.ask()
            except NO_ANSWER as error:
                why = f"there is no scheduler: {error}"
            else:
                if isinstance(answer, Joined):
                    self._take_place(answer.answer)
                    return answer
                why = f"the scheduler refuses this worker: {answer.why}"
                if answer.done:
                    say(f"lastwords: {answer.why}")
                    raise SystemExit(0)  # so that nobody starts it once more
                if not answer.later:
                    raise ConfigError(why)
            now_s = mono_s()
            if now_s - begun_s > JOIN_S:
                raise UnavailableError(
                    f"no place in the cluster at {self._cluster.address} after {JOIN_S:g} s: {why}"
                ) from None
            if now_s - told_s > NOTICE_S:
                told_s = now_s
                _log.warning("waiting for the scheduler at %s: %s", self._cluster.address, why)
            time.sleep(AGAIN_S)

    def _take_place(self, answer: Admission) -> None:
        self._name, self._rank, self._job = answer.name, answer.rank, answer.job

    def ask(self) -> Joined | Refused:
        """The scheduler's answer. NO_ANSWER, ConfigError."""
        token = read_token(self._cluster.path)
        link = socket.create_connection((self._cluster.host, self._cluster.port), ANSWER_S)
        lines = Lines(STRANGER_LINE_BYTES_MAX)
        try:
            answer = self._apply(link, lines, token)
        except BaseException:
            link.close()
            raise
        if isinstance(answer, Admission):
            return Joined(answer, link, lines)
        link.close()
        return answer

    def _apply(self, link: socket.socket, lines: Lines, token: str) -> Admission | Refused:
        _refuse_itself(link)
        keep_alive(link)
        challenge: Challenge = read(_next(link, lines), Challenge)
        if (wrong := difference(challenge.version)) is not None:
            raise ConfigError(f"the scheduler at {self._cluster.address} {wrong}")
        process = self._process
        who = Applicant(
            self._name, process.host_id, process.pid, process.start_ticks, self._cluster.workers, self._rank, self._job
        )
        application = {**dataclasses.asdict(who), "version": PROTOCOL}
        send(link, to_message(Application(application, proof_of(token, challenge.nonce, application))))
        answer: Admission | Refused = read(_next(link, lines), Answer)
        return answer


def _refuse_itself(link: socket.socket) -> None:
    """OSError for a connection whose two ends are one: it keeps the scheduler from its port.

    TCP makes one where nobody listens and the port, being in the range of `ip_local_port_range`, is chosen for the
    end here as well; whoever asks a thousand times meets that some day. It is reset: TIME_WAIT would keep the port.
    """
    if link.getsockname() == link.getpeername():
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _next(link: socket.socket, lines: Lines) -> dict[str, Any]:
    """The next message of a connection. OSError, FormatError."""
    data = b""
    while (message := next(lines.feed(data), None)) is None:
        try:
            data = link.recv(RECV_BYTES)
        except TimeoutError:
            raise TimeoutError(f"it has not answered for {ANSWER_S:g} s; is it stopped?") from None
        if not data:
            raise FormatError("the connection was closed")
    return message
