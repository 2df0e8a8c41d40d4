"""Tables of small jobs, as the ranks agree on them, and a board of words that needs no process group."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lastwords.errors import UnavailableError
from lastwords.sharding.declare import Unit, units_from_mesh
from lastwords.vocabulary import UNIT_REPLICATED


@dataclass(frozen=True)
class Table:
    """Units of a job, and those of one rank."""

    units: Mapping[str, tuple[int, ...]]
    mine: Mapping[str, Any]


def table_of(rank: int, units: Mapping[str, tuple[int, ...]]) -> Table:
    return Table(units, {name: () for name, holders in units.items() if rank in holders})


def tables_of(declared: Sequence[Unit]) -> list[Table]:
    """Every rank's table; the unit of all ranks is always there."""
    everyone = tuple(sorted({rank for unit in declared for rank in unit.holders}))
    units = {UNIT_REPLICATED: everyone, **{unit.name: unit.holders for unit in declared}}
    return [table_of(rank, units) for rank in everyone]


def eight_ranks() -> list[Table]:
    """Groups [0,4] [1,5] [2,6] [3,7]."""
    return tables_of(units_from_mesh(dp=2, tp=4))


@dataclass
class Words:
    """What all ranks can read."""

    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)


@dataclass
class ThreadBoard:
    """One rank's view of the words; ranks are threads."""

    rank: int
    size: int
    words: Words

    def publish(self, key: str, value: dict[str, Any]) -> None:
        with self.words.changed:
            self.words.said[key] = value
            self.words.changed.notify_all()

    def read(self, key: str, timeout_s: float, what: str) -> dict[str, Any]:
        with self.words.changed:
            if not self.words.changed.wait_for(lambda: key in self.words.said, timeout_s):
                raise UnavailableError(f"rank {self.rank} waited in vain for {what}")
            return self.words.said[key]
