"""Progress bars on stderr, where that is a terminal. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yields `tell(bytes_done, bytes_in_all)` for a single bar; None where stderr is no terminal."""
    with rank_bars(called=what) as tell:
        yield None if tell is None else lambda done, total: tell(0, done, total)


@contextmanager
def rank_bars(called: str = "rank {}") -> Iterator[Callable[[int, int, int | None], None] | None]:
    """Yields `tell(rank, bytes_done, bytes_in_all)`, a bar for each rank; None where stderr is no terminal.

    Without a number for all bytes the bar only shows that something moves, and how much there is already.
    """
    console = Console(stderr=True)
    if not console.file.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    tasks: dict[int, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as progress:

        def tell(rank: int, done: int, total: int | None) -> None:
            if rank not in tasks:
                tasks[rank] = progress.add_task(called.format(rank), total=total)
            progress.update(tasks[rank], completed=done, visible=total is None or done < total)

        yield tell
