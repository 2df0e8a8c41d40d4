"""Takes a mechanism of lastwords out of this process, to show that the zoo notices."""

from __future__ import annotations

from collections.abc import Callable, Iterable

MECHANISMS: dict[str, Callable[[], None]] = {}


def take_out(names: Iterable[str]) -> None:
    """Replace each of these mechanisms by one that does nothing."""
    for name in names:
        MECHANISMS[name]()
