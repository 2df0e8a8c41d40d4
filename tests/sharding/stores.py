"""A process group's store in memory, and several ranks that meet in it one after another."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from lastwords.errors import LastWordsError
from lastwords.sharding.agree import agree_units
from lastwords.sharding.declare import Unit
from lastwords.sharding.pieces import Piece, UnitTable


class NotThereError(Exception):
    """Another rank's word is still to come: this rank would wait."""


class MemoryWorld:
    """A rank's door to the store; `words` is shared. Reading what is not there raises NotThereError."""

    def __init__(self, rank: int, size: int, words: dict[str, str]) -> None:
        self.rank = rank
        self.size = size
        self.words = words

    def publish(self, key: str, value: dict[str, Any]) -> None:
        self.words[key] = json.dumps(value)

    def read(self, key: str, timeout_s: float, what: str) -> dict[str, Any]:
        if key not in self.words:
            raise NotThereError(what)
        value: dict[str, Any] = json.loads(self.words[key])
        return value


def piece(name: str, *shape: int, at: tuple[int, ...] = (), of: tuple[int, ...] = (), **more: Any) -> Piece:
    """A float32 parameter; whole, or the box at `at` of a tensor of shape `of`."""
    nbytes = 4
    for size in shape:
        nbytes *= size
    return Piece(name, "model", "float32", shape, of or shape, at or (0,) * len(shape), nbytes=nbytes, **more)


def agreed(
    lists: Sequence[Sequence[Piece] | Callable[[], Sequence[Piece]]],
    declared: Sequence[Unit] | Sequence[Sequence[Unit]] = (),
) -> list[UnitTable | LastWordsError]:
    """What each rank gets: its table, or its error. declared: for all ranks, or one for each."""
    size = len(lists)
    words: dict[str, str] = {}
    outcomes: dict[int, UnitTable | LastWordsError] = {}
    waiting = list(range(size))
    for _ in range(3):  # every rank waits for rank 0, which waits for every rank
        for rank in list(waiting):
            own: Any = lists[rank]
            mine: Any = declared[rank] if declared and not isinstance(declared[0], Unit) else declared
            try:
                find = own if callable(own) else lambda own=own: own
                outcomes[rank] = agree_units(MemoryWorld(rank, size, words), "here", find, mine)
            except NotThereError:
                continue
            except LastWordsError as error:
                outcomes[rank] = error
            waiting.remove(rank)
    assert not waiting, f"ranks {waiting} would wait for ever"
    return [outcomes[rank] for rank in range(size)]


def tables(lists: Sequence[Sequence[Piece]], declared: Sequence[Unit] = ()) -> list[UnitTable]:
    """`agreed` where nothing is wrong."""
    found = agreed(lists, declared)
    for table in found:
        if isinstance(table, LastWordsError):
            raise table
    return [table for table in found if isinstance(table, UnitTable)]
