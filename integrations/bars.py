"""Progress bars on stderr, where that is a terminal; all commands have theirs from here. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

Tell = Callable[[str, int, int | None], None]
"""Takes what it is about, bytes that are done, and bytes in all, or None where that is not known."""


@contextmanager
def bars() -> Iterator[Tell | None]:
    """Yields what is to be told; each thing that it is told of has a bar. None where stderr is no terminal.

    Without a number for all bytes the bar only shows that something moves, and how much there is already.
    """
    console = Console(stderr=True)
    if not console.file.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as progress:

        def tell(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, visible=total is None or done < total)

        yield tell


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yields `tell(bytes_done, bytes_in_all)` for a single bar; None where stderr is no terminal."""
    with bars() as tell:
        yield None if tell is None else lambda done, total: tell(what, done, total)


@contextmanager
def bar_of(what: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """Yields `tell(bytes_done)` for a bar of so many bytes; None where stderr is no terminal or there are none."""
    with bars() as tell:
        yield None if tell is None or not total else lambda done: tell(what, done, total)


@contextmanager
def rank_bars() -> Iterator[Callable[[int, int, int | None], None] | None]:
    """Yields `tell(rank, bytes_done, bytes_in_all)`, a bar for each rank; None where stderr is no terminal."""
    with bars() as tell:
        yield None if tell is None else lambda rank, done, total: tell(f"rank {rank}", done, total)
