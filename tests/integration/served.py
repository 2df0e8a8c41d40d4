"""`lastwords serve` as a process of its own, and clients of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lastwords.controller.handover import TOKEN_VARIABLE
from tests.integration.harness import Port
from tests.page.test_columns import applied
from tests.patience import until

LIMIT_S = 60.0
NO_HEADERS: Mapping[str, str] = {}
TOKEN = {TOKEN_VARIABLE: "of-the-controller"}
SECRET = "0123456789abcdef"
"""Of a page, as those who look at it know it."""


class Page:
    """What it serves."""

    def __init__(self, port: int, process: subprocess.Popen[str]) -> None:
        self.port = port
        self.process = process

    @property
    def url(self) -> str:
        """Of the page."""
        return f"http://127.0.0.1:{self.port}/"

    def ask(self, path: str, headers: Mapping[str, str] = NO_HEADERS, method: str = "GET") -> tuple[int, bytes]:
        """Status and body of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            connection.request(method, path, headers=dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        """What it answers there."""
        status, body = self.ask(path)
        assert status == 200, body
        return json.loads(body)


@contextmanager
def served(
    *arguments: str, env: Mapping[str, str] = NO_HEADERS, host: str = "127.0.0.1", ready: bool = True
) -> Iterator[Page]:
    """Serves meanwhile."""
    port = Port()
    command = [sys.executable, "-m", "lastwords.cli", "serve", *arguments, "--http", f"{host}:{port.number}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **env})
    page = Page(port.number, process)
    try:
        if ready:
            until(lambda: process.poll() is None and is_open(port.number), "a page")
        yield page
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT_S)
        port.release()


def is_open(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Events(threading.Thread):
    """Reads /events until it is closed."""

    def __init__(self, page: Page, headers: Mapping[str, str] = NO_HEADERS) -> None:
        super().__init__(daemon=True)
        self.state: dict[str, Any] = {}
        self.kinds: list[str] = []
        self.bytes_read = 0
        self._connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=LIMIT_S)
        self._connection.request("GET", "/events", headers=dict(headers))
        self._answer = self._connection.getresponse()
        self.status = self._answer.status

    def run(self) -> None:
        kind = ""
        try:
            while line := self._answer.readline():
                self.bytes_read += len(line)
                if line.startswith(b"event: "):
                    kind = line[7:].decode().strip()
                elif line.startswith(b"data: "):
                    told = json.loads(line[6:])
                    self.state = told if kind == "state" else applied(self.state, told)
                    self.kinds.append(kind)
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            pass  # it was closed here or there

    def close(self) -> None:
        """As a browser does that goes elsewhere."""
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):  # it may be closed already
                self._connection.sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def reading(page: Page, count: int = 1) -> Iterator[list[Events]]:
    """So many browsers."""
    events = [Events(page) for _ in range(count)]
    for one in events:
        one.start()
    try:
        yield events
    finally:
        for one in events:
            one.close()


def file_of(folder: Path, text: str) -> str:
    """A file with a token."""
    path = folder / "token"
    path.write_text(text)
    return str(path)
