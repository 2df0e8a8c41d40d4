"""What the agent and a worker say to each other: one JSON object per line over a Unix socket.

From a worker: {"rank": k or null, "pid": p} once, then {"waiting": step}, {"begun": true}, {"controller": work}.
From the agent: {"become": environment, "stdout": path, "stderr": path} to a spare, {"enter": generation, "port": p},
{"abandon": true}, and {"controller": [pid, answer] or null}.
"""

from __future__ import annotations

import json
import socket
from typing import Any

VARIABLE = "LASTWORDS_LAUNCHER"
"""Environment variable: path of the agent's socket."""

SPARE = "LASTWORDS_SPARE"
"""Environment variable: 1 in a process that has no rank yet."""

LINE_BYTES_MAX = 1 << 20


class Lines:
    """Messages out of the bytes that a socket brings."""

    def __init__(self) -> None:
        self._bytes = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are whole now. ValueError for what is none."""
        *lines, self._bytes = (self._bytes + data).split(b"\n")
        if len(self._bytes) > LINE_BYTES_MAX:
            raise ValueError("a line without an end")
        return [_message(line) for line in lines]


def _message(line: bytes) -> dict[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"{line[:80]!r} is no message")
    return value


def send(to: socket.socket, message: dict[str, Any]) -> None:
    """OSError if the other end is gone."""
    to.sendall(json.dumps(message).encode() + b"\n")
