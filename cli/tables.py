"""Tables for people. Text from files is shown as it is: no markup, no control characters that a terminal would obey."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from lastwords.checkpoint.format import TensorSpec

# Why a resume is not exact, in a table.

SHOWN_MAX = 6
"""Reasons in a table; `--all` shows every one."""


def shortened(reasons: Sequence[object], *, everything: bool, most: int = SHOWN_MAX) -> list[str]:
    """A line for each reason: no more than `most`, or all of them."""
    lines = [str(reason) for reason in (reasons if everything else reasons[:most])]
    more = len(reasons) - len(lines)
    return [*lines, f"and {more} more (--all shows them)"] if more else lines


_VALUE_CHARACTERS_MAX = 300


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """A reader that has seen enough is no failure; rich would exit with code 1."""
        raise BrokenPipeError


def console() -> Console:
    """Console on stdout. It breaks and cuts no line: `table` and `facts` know how wide a terminal is."""
    return _Console(file=sys.stdout, soft_wrap=True, highlight=False, markup=False)


def plain(text: object, style: str = "") -> Text:
    """Text without control characters.

    >>> plain("a\\x1b[31mb").plain
    'a?[31mb'
    """
    return Text("".join(c if c.isprintable() or c == "\n" else "?" for c in str(text)), style=style)


GAP = 2
"""Spaces between two columns."""

LEAST = 16
"""Characters that a column has which gives way, before the rows are shown as blocks."""


class _Rows:
    """Rows of a table, as wide as the console allows. What is neither cut nor wrapped is always shown as it is.

    Where the columns do not fit, cells of `cut` lose their end, and those of `wrap` take several lines. Where that does
    not suffice, each row becomes a block: its first cell alone on a line, and below it what the others are. Without a
    terminal no line is broken and nothing is cut, so that grep finds it.
    """

    def __init__(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Text]],
        right: Sequence[str],
        cut: Sequence[str],
        wrap: Sequence[str],
    ) -> None:
        self._title, self._columns, self._rows = title, columns, rows
        self._right, self._cut, self._wrap = right, cut, wrap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        lines = self._lines(options.max_width if console.file.isatty() else None)
        for line in [plain(self._title, "italic"), *lines, Text()]:
            line.rstrip()
            line.no_wrap, line.overflow = True, "ignore"
            yield line

    def _lines(self, width: int | None) -> list[Text]:
        widths = self._widths(width)
        if widths is None:
            return [line for row in self._rows for line in self._block(row, width or 0)]
        header = [Text(column, "bold") for column in self._columns]
        rule = [Text("\u2500" * (sum(widths) + GAP * (len(widths) - 1)))] if width is not None else []
        rows = [line for row in self._rows for line in self._row(row, widths)]
        return [*self._row(header, widths), *rule, *rows]

    def _widths(self, width: int | None) -> list[int] | None:
        """Of the columns; None: the rows are blocks."""
        widths = [
            max([cell_len(column), *(cell_len(line) for row in self._rows for line in row[number].plain.split("\n"))])
            for number, column in enumerate(self._columns)
        ]
        if width is None:
            return widths
        least = [self._least(number, widths[number]) for number in range(len(widths))]
        spare = width - GAP * (len(widths) - 1) - sum(least)
        if spare < 0:
            return None
        for number, one in enumerate(least):
            more = min(spare, widths[number] - one)
            least[number], spare = one + more, spare - more
        return least

    def _least(self, number: int, natural: int) -> int:
        column = self._columns[number]
        if column in self._cut:
            return min(natural, max(LEAST, cell_len(column)))
        if column in self._wrap:
            words = [cell_len(word) for row in self._rows for word in row[number].plain.split()]
            return min(natural, max([LEAST, cell_len(column), *words]))
        return natural

    def _row(self, row: Sequence[Text], widths: Sequence[int]) -> list[Text]:
        cells = [
            self._fitted(column, cell, width) for column, cell, width in zip(self._columns, row, widths, strict=True)
        ]
        lines = []
        for number in range(max(map(len, cells))):
            parts = []
            for column, cell, width in zip(self._columns, cells, widths, strict=True):
                part = cell[number].copy() if number < len(cell) else Text()
                part.align("right" if column in self._right else "left", width)
                parts.append(part)
            lines.append(Text(" " * GAP).join(parts))
        return lines

    def _fitted(self, column: str, cell: Text, width: int) -> list[Text]:
        if column in self._cut and cell_len(cell.plain) > width:
            cell = cell.copy()
            cell.truncate(width, overflow="ellipsis")
        if column in self._wrap:
            return wrapped(cell, width)
        return wrapped(cell, None)

    def _block(self, row: Sequence[Text], width: int) -> Iterator[Text]:
        """The first cell, and what the others are: the short ones side by side, each that may be long by itself."""
        first, inside = self._columns[0], max(LEAST, width - GAP)
        yield Text.assemble(f"{first} " if first in self._right else "", row[0])
        beside, below = Text(), list[Text]()
        for column, cell in [*zip(self._columns, row, strict=True)][1:]:
            if not cell.plain:
                continue
            part = Text.assemble((f"{column} " if column else "", "dim"), cell)
            long = cell_len(part.plain) > LEAST or "\n" in part.plain
            if long and column in self._cut:
                part.truncate(inside, overflow="ellipsis")
                below.append(part)
            elif long and column in self._wrap:
                below += wrapped(part, inside)
            elif not beside.plain:
                beside = part
            elif cell_len(beside.plain) + GAP + cell_len(part.plain) <= inside:
                beside = Text.assemble(beside, ", ", part)
            else:
                yield _indented(beside)
                beside = part
        for line in [*([beside] if beside.plain else []), *below]:
            yield _indented(line)


def _indented(line: Text) -> Text:
    return Text.assemble(" " * GAP, line)


def wrapped(text: Text, width: int | None) -> list[Text]:
    """Lines of a text, broken between words only, so that a path can be copied; None: only where it breaks by itself.

    >>> [line.plain for line in wrapped(plain("no room for /a/long/path here"), 12)]
    ['no room for', '/a/long/path', 'here']
    """
    found: list[Text] = []
    for line in text.split("\n", allow_blank=True) or [Text()]:
        breaks, begin = [], 0
        for word in re.finditer(r"\S+", line.plain):
            if width is not None and cell_len(line.plain[begin : word.end()]) > width and word.start() > begin:
                begin = word.start()
                breaks.append(begin)
        parts = line.divide(breaks)
        for part in parts:
            part.rstrip()
        found += parts
    return found


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Sequence[str] = (),
    cut: Sequence[str] = (),
    wrap: Sequence[str] = (),
) -> RenderableType:
    """A table; columns named in `right` hold numbers. cut, wrap: those that give way on a narrow terminal."""
    cells = [[cell if isinstance(cell, Text) else plain(cell) for cell in row] for row in rows]
    return _Rows(title, columns, cells, right, cut, wrap)


class _Facts:
    """Names, and beside them the values. In a terminal they are wrapped between words, elsewhere no line is broken."""

    def __init__(self, rows: Sequence[tuple[str, Text]]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        begin = GAP + max(len(name) for name, _ in self._rows)
        width = max(LEAST, options.max_width - begin)
        for name, value in self._rows:
            for number, line in enumerate(wrapped(value, width if console.file.isatty() else None)):
                shown = Text.assemble(("" if number else name).ljust(begin), line)
                shown.rstrip()
                shown.no_wrap, shown.overflow = True, "ignore"
                yield shown


def facts(rows: Iterable[tuple[str, object]]) -> RenderableType:
    """Two columns without a frame: what, and its value."""
    return _Facts([(name, value if isinstance(value, Text) else plain(value)) for name, value in rows])


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
