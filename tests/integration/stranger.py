"""A stranger at the controller's port: connections that answer every ping and never carry a call or a token."""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Self

from lastwords.controller.takeover import query_state
from lastwords.errors import LastWordsError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING = 4, 6
ACK = 1


def frame(kind: int, flags: int, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame of stream 0."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags, 0, 0, 0, 0)) + payload


class Stranger:
    """Opens `count` connections and keeps them as long as the other side lets it. A context manager."""

    def __init__(self, host: str, port: int, count: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._stopping = False
        self.held = 0
        for _ in range(count):
            try:
                connection = socket.create_connection((host, port), timeout=5)
                connection.sendall(PREFACE + frame(SETTINGS, 0))
            except OSError:
                continue  # turned away at once
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, bytearray())
            self.held += 1
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            self._drop(key)
        self._selector.close()

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(0.1):
                self._answer(key)

    def _answer(self, key: selectors.SelectorKey) -> None:
        connection, received = key.fileobj, key.data
        assert isinstance(connection, socket.socket)
        try:
            piece = connection.recv(65536)
            received += piece
            while len(received) >= 9 and len(received) >= 9 + (length := int.from_bytes(received[:3], "big")):
                kind, flags, payload = received[3], received[4], bytes(received[9 : 9 + length])
                del received[: 9 + length]
                if kind in (SETTINGS, PING) and not flags & ACK:
                    connection.sendall(frame(kind, ACK, payload if kind == PING else b""))
        except OSError:
            piece = b""
        if not piece:
            self._drop(key)

    def _drop(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        assert isinstance(key.fileobj, socket.socket)
        key.fileobj.close()
        self.held -= 1


class Crowd:
    """Strangers as long as the block lasts: silent connections, garbage, and calls with a wrong token, all at once.

    They come as soon as anybody listens, and again when they are turned away.
    """

    def __init__(self, host: str, port: int, count: int, seed: int) -> None:
        self._address, self._count, self._draw = (host, port), count, random.Random(seed)
        self._stopping = threading.Event()
        self.times = 0
        """How often somebody came."""
        self._threads = [threading.Thread(target=self._repeat, args=(each,)) for each in (self._sit, self._talk)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, come: Callable[[], None]) -> None:
        while not self._stopping.wait(0.05):
            with contextlib.suppress(OSError, LastWordsError):
                socket.create_connection(self._address, timeout=1).close()
                self.times += 1
                come()

    def _sit(self) -> None:
        with Stranger(*self._address, self._count) as stranger:
            while stranger.held and not self._stopping.wait(0.05):
                pass

    def _talk(self) -> None:
        start = self._draw.choice((b"", PREFACE, PREFACE + frame(SETTINGS, 0)))
        with socket.create_connection(self._address, timeout=1) as connection:
            connection.sendall(start + self._draw.randbytes(self._draw.randint(1, 100_000)))
        query_state(f"{self._address[0]}:{self._address[1]}", "not the token", timeout_s=1.0)
