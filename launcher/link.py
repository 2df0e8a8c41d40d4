"""JSON lines: between a host's launcher and its workers (a Unix socket), and between the launchers of hosts (TCP).

From a worker: {"rank": k or null, "pid": p} once, then {"waiting": step, "record": path of incidents.jsonl or "",
"sources": one digest, "entered": its newest generation or -1}, {"sources": digests by path} where it is asked,
{"begun": step after which its loop goes on, "inexact": why it may differ, if it may}, {"updated": true} after its first
step, {"over": true} after the loop, {"state": path of what a controller of this host keeps for the one that follows
it}, {"controller": work, "asked": number}.
To a worker: {"sources": true}, {"become": environment, "stdout": path, "stderr": path} to a spare, {"enter":
generation, "port": p, "step": newest saved}, {"abandon": true}, {"dismissed": true} when nobody is replaced any more,
{"controller": [pid, answer] or null, "asked": number}, and {"lost": true} where the scheduler of a cluster has gone.
Between hosts: {"token": t} once, then events to the head of the job and effects from there (events.py), with "kind".
"""

from __future__ import annotations

import dataclasses
import json
import socket
from typing import Any

import msgspec

from lastwords.errors import FormatError
from lastwords.launcher import events, versions

LINE_BYTES_MAX = 1 << 22
"""Paths and digests of some thousands of files take less."""

_EVENTS = (
    events.Waiting,
    events.Inside,
    versions.Sources,
    events.Begun,
    events.Updated,
    events.Over,
    events.Ended,
    events.Stopped,
    events.Lost,
)
_EFFECTS = (
    events.Start,
    events.Enter,
    versions.Ask,
    events.Abandon,
    events.Kill,
    events.Awaited,
    events.Look,
    events.Stop,
)


def waiting_of(rank: int, message: dict[str, Any]) -> events.Waiting:
    """What a worker says when it waits."""
    return events.Waiting(
        rank,
        int(message["waiting"]),
        str(message["record"]),
        str(message["sources"]),
        int(message["entered"]),
    )


def to_message(what: events.Event | events.Effect) -> dict[str, Any]:
    """What another host's launcher understands."""
    return {"kind": type(what).__name__, **dataclasses.asdict(what)}


def event_of(message: dict[str, Any]) -> events.Event:
    """FormatError for what is none."""
    found: events.Event = _of(message, _EVENTS)
    return found


def effect_of(message: dict[str, Any]) -> events.Effect:
    """FormatError for what is none."""
    found: events.Effect = _of(message, _EFFECTS)
    return found


def _of(message: dict[str, Any], kinds: tuple[Any, ...]) -> Any:
    kind = next((one for one in kinds if one.__name__ == message.get("kind")), None)
    if kind is None:
        raise FormatError(f"{message.get('kind')!r} is neither an event nor an effect")
    try:
        return msgspec.convert({key: value for key, value in message.items() if key != "kind"}, kind)
    except msgspec.ValidationError as error:
        raise FormatError(str(error)) from error


class Lines:
    """Messages out of the bytes that a socket brings."""

    def __init__(self) -> None:
        self._bytes = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are whole now. FormatError for what is none."""
        *lines, self._bytes = (self._bytes + data).split(b"\n")
        if len(self._bytes) > LINE_BYTES_MAX:
            raise FormatError("a line without an end")
        return [_message(line) for line in lines]


def _message(line: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:  # of msgspec, and of bytes that are no text
        raise FormatError(f"{line[:80]!r} is no message: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{line[:80]!r} is no message")
    return value


def send(to: socket.socket, message: dict[str, Any]) -> None:
    """OSError if the other end is gone."""
    to.sendall(json.dumps(message).encode() + b"\n")
