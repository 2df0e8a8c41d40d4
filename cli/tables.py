"""Tables for people. Text from files is shown as it is: no markup, no control characters that a terminal would obey."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lastwords.checkpoint.format import TensorSpec

_WIDTH_WITHOUT_TERMINAL = 160
_VALUE_CHARACTERS_MAX = 300


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """A reader that has seen enough is no failure; rich would exit with code 1."""
        raise BrokenPipeError


def console() -> Console:
    """Console on stdout. Where that is no terminal, tables are wide and all other lines are as long as they are."""
    terminal = sys.stdout.isatty()
    width = None if terminal else _WIDTH_WITHOUT_TERMINAL
    return _Console(file=sys.stdout, width=width, soft_wrap=not terminal, highlight=False, markup=False)


def plain(text: object, style: str = "") -> Text:
    """Text without control characters.

    >>> plain("a\\x1b[31mb").plain
    'a?[31mb'
    """
    return Text("".join(c if c.isprintable() or c == "\n" else "?" for c in str(text)), style=style)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> Table:
    """A table; columns named in `right` hold numbers."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else plain(cell) for cell in row))
    return made


def facts(rows: Iterable[tuple[str, object]]) -> Table | Text:
    """Two columns without a frame: what, and its value. In a log or a pipe no line is broken, so grep finds it."""
    pairs = [(name, value if isinstance(value, Text) else plain(value)) for name, value in rows]
    if not sys.stdout.isatty():
        width = 2 + max(len(name) for name, _ in pairs)
        below = "\n" + " " * width
        return Text("\n".join(name.ljust(width) + value.plain.replace("\n", below) for name, value in pairs))
    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        made.add_row(name, value)
    return made


def size(count: int) -> str:
    """Bytes for people.

    >>> size(999), size(1536), size(5 << 30)
    ('999 B', '1.5 KiB', '5.0 GiB')
    """
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def age(seconds: float) -> str:
    """How long ago, for people; a clock that was set back makes it negative.

    >>> age(59), age(200), age(7300), age(3 * 86400), age(-5)
    ('59 s', '3 min', '2 h', '3 d', 'in the future')
    """
    if seconds < 0:
        return "in the future"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def moment(unix_ns: int) -> str:
    """Time in UTC, to the second.

    >>> moment(1_700_000_000_000_000_000)
    '2023-11-14 22:13:20 UTC'
    """
    try:
        return datetime.fromtimestamp(unix_ns // 1_000_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError):
        return f"{unix_ns} ns after 1970"


def short(value: Any) -> str:
    """JSON of a value, cut off where it becomes unreadable.

    >>> short([1, 2])
    '[1, 2]'
    """
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _VALUE_CHARACTERS_MAX else f"{text[:_VALUE_CHARACTERS_MAX]}... ({len(text)} characters)"


def numbers(values: Iterable[int]) -> str:
    """Ranks, in words.

    >>> numbers([3, 1]), numbers([])
    ('1, 3', 'none')
    """
    return ", ".join(map(str, sorted(values))) or "none"


def amount(specs: Sequence[TensorSpec]) -> tuple[int, str]:
    """How many tensors these are, and their size for people."""
    return len(specs), size(sum(spec.nbytes for spec in specs))
