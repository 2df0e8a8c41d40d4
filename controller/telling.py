"""Incidents reach the operator's own tools: once a record is written, a process of its own (`teller`) takes it there.

A process, not a thread: what it starts may hang, fail or flood its output, and it may end after whoever has started it.
The record is in a file without a name, so nobody waits for a reader.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import site
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import lastwords
from lastwords.errors import ConfigError

_log = logging.getLogger(__name__)

VARIABLE = "LASTWORDS_ON_INCIDENT"
"""A command of the shell, or an http or https URL."""

COLLECTOR_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own: where spans are sent."""

TELLERS_MAX = 8
"""At a time. Each ends within some minutes; more incidents than this meanwhile are in the record only."""


def is_url(target: str) -> bool:
    """Whether records are posted there; else it is a command.

    >>> is_url("https://hooks.example.org/x"), is_url("./page.sh https://hooks.example.org/x")
    (True, False)
    """
    return target.lower().startswith(("http://", "https://"))


def check_target(target: str) -> None:
    """Of `VARIABLE`; "" is none. ConfigError for a URL that cannot work, without its path, which may be a secret."""
    if not is_url(target):
        return
    try:
        parts = urlsplit(target)
        usable = bool(parts.hostname) and parts.port != 0 and parts.username is None and target.isprintable()
        usable = usable and " " not in target
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            f"{VARIABLE} begins as a URL does, and is none that can be posted to: write https://HOST/PATH, without a "
            "user's name, or, to run a command, the command"
        )


def wants_spans(environ: Mapping[str, str]) -> bool:
    """Whether the environment names a collector, and something of OpenTelemetry is installed; imports nothing."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not any(map(environ.get, COLLECTOR_VARIABLES)):
        return False
    return importlib.util.find_spec("opentelemetry") is not None


def in_memory(record: bytes) -> int:
    """Descriptor of a file that holds `record`, at its beginning. OSError."""
    fd = os.memfd_create("lastwords-incident", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(record)
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:
        os.close(fd)
        raise
    return fd


class Telling:
    """Starts the processes that tell. Any thread but the one that decides: a start takes some milliseconds."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[bytes]] = []

    def tell(self, line: str) -> None:
        """Start a process with this line of incidents.jsonl. Waits for nothing; where that fails, the log says so."""
        if self._environ.get(VARIABLE) or wants_spans(self._environ):
            with self._lock:
                self._tell(line)

    def _tell(self, line: str) -> None:
        self._running = [process for process in self._running if process.poll() is None]
        if len(self._running) >= TELLERS_MAX:
            return _log.warning("an incident is not told: %d others are being told still", len(self._running))
        try:
            record = in_memory(f"{line}\n".encode())
            try:
                self._running.append(_teller(record, self._environ))
            finally:
                os.close(record)
        except OSError as error:
            _log.warning("an incident is not told, since no process can be started for it: %s", error)


def _teller(record: int, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Its output goes to where this process's log goes. A session of its own: whoever ends this one does not end it."""
    from lastwords.controller.spec import TOKEN_VARIABLE  # whoever starts one has it; a teller starts faster without

    environment = finding_lastwords(environ)
    environment.pop(TOKEN_VARIABLE, None)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "lastwords.controller.teller"],
        stdin=record,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )


def finding_lastwords(environ: Mapping[str, str]) -> dict[str, str]:
    """For a new process: a script may have found lastwords through a path that its own process knows only."""
    environment = dict(environ)
    home = str(Path(lastwords.__file__).resolve().parent.parent)
    if home not in (*site.getsitepackages(), site.getusersitepackages()):
        known = environment.get("PYTHONPATH", "").split(os.pathsep)
        if home not in known:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (*known, home)))
    return environment
