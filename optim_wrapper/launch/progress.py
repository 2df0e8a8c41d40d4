"""A bar on stderr for waits that the user ought to see."""

from __future__ import annotations

import io
import sys
from typing import TextIO

from lastwords import log_lines
from lastwords.clock import Clock, mono_s

_QUIET_S = 1.0
_EVERY_S = 0.2
_EVERY_PLAIN_S = 10.0
_WIDTH = 30


class Progress:
    """Counts up to `total`. Says nothing for the first second; off a terminal, a plain line every ten seconds."""

    def __init__(self, what: str, total: int, *, out: TextIO | None = None, clock: Clock = mono_s) -> None:
        self._what = what
        self._total = total
        self._out = out or sys.stderr or io.StringIO()  # there is no stderr where it was closed from the start
        self._clock = clock
        self._terminal = self._out.isatty() and not log_lines.is_json()
        self._begin_mono_s = clock()
        self._next_mono_s = self._begin_mono_s + _QUIET_S
        self._shown = False

    def at(self, count: int) -> None:
        """`count` of `total` are done."""
        now_s = self._clock()
        if now_s < self._next_mono_s:
            return
        self._next_mono_s = now_s + (_EVERY_S if self._terminal else _EVERY_PLAIN_S)
        self._write(count, now_s)

    def close(self) -> None:
        """All done; ends the line if there is one."""
        if self._shown:
            self._write(self._total, self._clock())
            if self._terminal:
                self._out.write("\n")
            self._out.flush()

    def _write(self, count: int, now_s: float) -> None:
        self._shown = True
        share = min(1.0, count / self._total) if self._total else 1.0
        spent_s = now_s - self._begin_mono_s
        left = f", {spent_s / share - spent_s:.0f} s left" if 0 < share < 1 else ""
        text = f"lastwords: {self._what}: {count}/{self._total}{left}"
        if self._terminal:
            filled = round(_WIDTH * share)
            self._out.write(f"\r[{'#' * filled}{'.' * (_WIDTH - filled)}] {text}\x1b[K")
        else:
            self._out.write(log_lines.said(text, __name__) + "\n")
        self._out.flush()
