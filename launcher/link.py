"""JSON lines over sockets, and who is at the other end; what the lines mean stands in protocol.py.

What comes from a peer is decoded in `Connection.feed`, and what cannot be is told there, once for each peer. What is
raised by whoever acts on a message is a mistake of this process, and is never taken for the peer's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from lastwords.checkpoint.codec import from_json
from lastwords.clock import mono_s
from lastwords.errors import FormatError
from lastwords.launcher.protocol import OWN

_log = logging.getLogger(__name__)

LINE_BYTES_MAX = 1 << 22
"""Paths and digests of some thousands of files take less."""

STRANGER_LINE_BYTES_MAX = 1 << 12
"""The same before the token is shown: thousands of strangers at a time then take some MiB."""

PEERS_MAX = 1024
"""So many are known to have been told of."""

UNSENT_BYTES_MAX = 8 * LINE_BYTES_MAX
"""A peer that does not take what is said until it is more than that counts as gone."""

RECV_BYTES = 1 << 16

SILENCE_S = 20
"""A peer that does not answer the kernel's probes for so long is lost."""

AGAIN_S = 0.2


class Lines:
    """Messages out of the bytes that a socket brings."""

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self.line_bytes_max = line_bytes_max
        self._bytes = bytearray()
        self._looked = 0
        """So many of them hold no end of a line."""

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The messages that are whole now; those not taken come at the next call. FormatError for what is none."""
        self._bytes += data
        return self._whole()

    def _whole(self) -> Iterator[dict[str, Any]]:
        while True:
            end = self._bytes.find(b"\n", self._looked)
            if (len(self._bytes) if end < 0 else end) > self.line_bytes_max:
                raise FormatError(f"a line of more than {self.line_bytes_max} bytes")
            if end < 0:
                self._looked = len(self._bytes)
                return
            line = bytes(self._bytes[:end])
            del self._bytes[: end + 1]
            self._looked = 0
            yield _message(line)


def _message(line: bytes) -> dict[str, Any]:
    try:
        return from_json(line, dict[str, Any])
    except FormatError as error:
        raise FormatError(f"{line[:80]!r} is no message: {error}") from error


class Complaints:
    """What is wrong with peers: one line for each, however often it comes again."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], None] = {}

    def tell(self, peer: str, what: str, detail: str = "") -> None:
        """For people, with what to do about it. detail: what may differ each time."""
        if (peer, what) in self._told:
            return
        if len(self._told) >= PEERS_MAX:
            del self._told[next(iter(self._told))]
        self._told[peer, what] = None
        _log.warning("%s %s%s", peer, what, detail)


class Connection:
    """Feeds what a peer says over `link` to `hear`, a message at a time, and None at its end. Thread of the selector.

    peer: who that is, for people. decode: makes a message of JSON; FormatError for what means nothing. lines: of what
    has come so far. A peer that has not been let in yet is a stranger, whose lines are short. Nobody is waited for: a
    peer that is stopped, say, takes what it is told once it goes on.
    """

    def __init__(
        self,
        link: socket.socket,
        selector: selectors.BaseSelector,
        peer: str,
        decode: Callable[[dict[str, Any]], Any],
        hear: Callable[[Any], None],
        complaints: Complaints | None = None,
        lines: Lines | None = None,
    ) -> None:
        self.peer = peer
        self.open = True
        self.rank = OWN
        """At the other end, once it is known."""
        self.broken = False
        """The peer has said what is not understood, so it is not heard any more."""
        self._link, self._selector, self._decode, self._hear = link, selector, decode, hear
        self._complaints, self._lines = complaints or Complaints(), lines or Lines()
        self._unsent = bytearray()
        self._events = selectors.EVENT_READ
        link.setblocking(False)
        selector.register(link, selectors.EVENT_READ, self._go_on)

    def let_in(self, peer: str) -> None:
        """It has shown who it is."""
        self.peer = peer
        self._lines.line_bytes_max = LINE_BYTES_MAX

    def hang_up(self) -> None:
        """Nothing more is said, and the selector waits for nothing; what still comes can be read."""
        self._send()
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._link)
        with contextlib.suppress(OSError):  # it is broken already
            self._link.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Nothing comes any more; what the peer does not take at once is lost."""
        self._send()
        self.open = False
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._link)
        self._link.close()

    def tell(self, message: dict[str, Any]) -> None:
        """To the peer; if it has gone, that is seen where it is read."""
        if self.open:
            self._unsent += _line(message)
            self._send()

    def _send(self) -> None:
        """What the peer takes now."""
        if not self.open:
            return
        try:
            while self._unsent:
                del self._unsent[: self._link.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._break()
        if len(self._unsent) > UNSENT_BYTES_MAX:
            self._break()
        self._watch()

    def _break(self) -> None:
        """Its end is read after all that has come."""
        self._unsent.clear()
        with contextlib.suppress(OSError):  # it is broken already
            self._link.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if events != self._events:
            self._events = events
            self._selector.modify(self._link, events, self._go_on)

    def _go_on(self) -> None:
        self._send()
        self.read()

    @property
    def has_gone(self) -> bool:
        """Whether the peer has closed the connection, or it has broken, with nothing left to read."""
        try:
            return not self._link.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def read(self) -> bool:
        """Whether there was something, and there may be more."""
        if not self.open:
            return False
        try:
            data = self._link.recv(RECV_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self.feed(data)
        if self.open and (not data or self.broken):
            self.close()
            self._hear(None)
        return self.open

    def feed(self, data: bytes) -> None:
        """Hear the messages that are whole with this."""
        messages = self._lines.feed(data)
        while self.open and not self.broken:
            try:
                raw = next(messages, None)
                message = None if raw is None else self._decode(raw)
            except FormatError as error:
                self.broken = True
                self._complaints.tell(
                    self.peer,
                    "says what is not understood, and is not heard any more",
                    f": {error}; if it is a process of this job, install the same version of lastwords everywhere",
                )
                return
            if message is None:
                return
            self._hear(message)


def send(to: socket.socket, message: dict[str, Any]) -> None:
    """OSError if the other end is gone."""
    to.sendall(_line(message))


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def listening(port: int, backlog: int, at: tuple[int, tuple[Any, ...]] | None = None) -> socket.socket:
    """A server at all addresses of this host; a `Reception` takes from it. OSError.

    at: family and address, with the port, of the only one where it listens.
    """
    both = at is None and socket.has_dualstack_ipv6()
    family, address = at or (socket.AF_INET6 if both else socket.AF_INET, ("", port))
    server = socket.create_server(address, family=family, backlog=backlog, dualstack_ipv6=both)
    server.setblocking(False)
    return server


class Reception:
    """Takes the connections that are made to `server`."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._failed_s = -math.inf

    def accept(self) -> tuple[socket.socket, str] | None:
        """A connection that somebody has made, and from which address: one that was reset does not say it any more.

        None where nobody has, and where it fails, after a pause: there may be no descriptor left.
        """
        try:
            link, address = self._server.accept()
            if link.family == socket.AF_UNIX:
                return link, ""
            keep_alive(link)
            return link, str(address[0]).removeprefix("::ffff:")
        except BlockingIOError:
            return None
        except OSError as error:
            self._has_failed(error)
            time.sleep(AGAIN_S)
            return None

    def _has_failed(self, error: OSError) -> None:
        """Said once until it has been well for SILENCE_S: a shortage comes and goes with each connection."""
        now_s = mono_s()
        if now_s - self._failed_s > SILENCE_S:
            _log.warning("a connection could not be taken: %s; it is tried again", error)
        self._failed_s = now_s


def keep_alive(link: socket.socket) -> None:
    """A peer that has vanished with its host is noticed after SILENCE_S."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 2)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 4)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
