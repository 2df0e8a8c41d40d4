"""The product's log lines: as people read them or, with LASTWORDS_LOG=json, one JSON object each.

    {"time", "level", "logger", "message", "host", "job"?, "rank"?, "step"?, "error"?}

Only lines of lastwords' own loggers, and what it writes to stderr; those of the user's code are left alone.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from datetime import UTC, datetime

from lastwords.errors import ConfigError

VARIABLE = "LASTWORDS_LOG"
FORMATS = ("text", "json")

Fact = int | str | Callable[[], int | None]

_facts: dict[str, Fact] = {}
_HOST = socket.gethostname()


def check(value: str) -> None:
    """Of `VARIABLE`; "" is text. ConfigError."""
    if value not in ("", *FORMATS):
        raise ConfigError(f"{VARIABLE}={value!r}: must be one of {', '.join(FORMATS)}")


def is_json() -> bool:
    """Whether lines are JSON in this process."""
    return os.environ.get(VARIABLE) == "json"


def know(**facts: Fact) -> None:
    """Each line says these from now on: job, rank, step. A function is asked at each line; None is left out."""
    _facts.update(facts)


def _known() -> dict[str, int | str]:
    facts = {"job": os.environ.get("LASTWORDS_JOB") or None, **_facts}
    asked = {name: fact() if callable(fact) else fact for name, fact in facts.items()}
    return {name: fact for name, fact in asked.items() if fact is not None}


class JsonLines(logging.Formatter):
    """One JSON object, without a line break, for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """Any thread."""
        content: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "host": _HOST,
            **_known(),
        }
        if record.exc_info and record.exc_info[0] is not None:
            content["error"] = self.formatException(record.exc_info)
        return json.dumps(content, ensure_ascii=False)


def formatter(text: logging.Formatter) -> logging.Formatter:
    """For a handler that the product sets up. text: what it formats with if lines are not JSON."""
    return JsonLines() if is_json() else text


class _Stderr(logging.Handler):
    """What stderr is at that moment, as logging's handler of last resort has it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # handed to logging, which knows what is wanted then
            self.handleError(record)


def begin(rank: str = "") -> None:
    """With JSON: lines of lastwords' loggers go to stderr alone, not through the user's handlers. Else nothing.

    rank: of this process, if it has one. Idempotent. For processes in which logging belongs to the user: ranks, and
    `lastwords run`.
    """
    if rank.isdecimal():
        know(rank=int(rank))
    ours = logging.getLogger("lastwords")
    if not is_json() or any(isinstance(one, _Stderr) for one in ours.handlers):
        return
    handler = _Stderr()
    handler.setFormatter(JsonLines())
    ours.addHandler(handler)
    ours.propagate = False


def said(line: str, logger: str) -> str:
    """A line that goes to stderr without a logger, as it is written there."""
    if not is_json():
        return line
    return JsonLines().format(logging.LogRecord(logger, logging.WARNING, "", 0, line, None, None))
