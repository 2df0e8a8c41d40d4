"""Compares what two launches recorded, bit for bit and rank for rank, and names the first thing that differs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """The first step at which a rank's record differs from the reference, and everything that differs there."""

    rank: int
    step: int
    names: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank} differs from the uninterrupted run at step {self.step}: {self.text}"


class Track:
    """Everything that the ranks of one launch recorded."""

    def __init__(self, directory: Path, world_size: int) -> None:
        self.world_size = world_size
        self.records = [read_records(directory / f"rank_{rank}.jsonl") for rank in range(world_size)]

    def steps(self, rank: int, kind: str = "step") -> dict[int, dict[str, str]]:
        """Step -> values that this rank recorded at the end of its body; the newest where there are several."""
        return {record["step"]: record["values"] for record in self.records[rank] if record["kind"] == kind}

    def last_step(self, rank: int) -> int:
        """Newest step whose body this rank has finished; 0 if none."""
        return max(self.steps(rank), default=0)

    def pids(self, rank: int) -> list[int]:
        """The processes that were this rank, in turn."""
        return list(dict.fromkeys(record["pid"] for record in self.records[rank]))

    def one(self, rank: int, kind: str) -> Record | None:
        """The newest record of a kind."""
        found = [record for record in self.records[rank] if record["kind"] == kind]
        return found[-1] if found else None


def read_records(path: Path) -> list[Record]:
    """Whole lines of a recording; a rank that never started has none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def differing(reference: dict[str, str], found: dict[str, str], only: str = "") -> list[str]:
    """Names whose values differ or that only one side has, in the order in which training makes them."""
    names = list(dict.fromkeys([*reference, *found]))
    return [name for name in names if name.startswith(only) and reference.get(name) != found.get(name)]


def first_difference(reference: Track, track: Track, steps: Iterable[int] | None = None) -> Difference | None:
    """First step at which any rank of `track` differs from the reference; None if all recorded steps are equal.

    Only steps that `track` has are compared, unless `steps` says which it must have.
    """
    wanted = None if steps is None else set(steps)
    found: list[Difference] = []
    for rank in range(reference.world_size):
        ours, theirs = track.steps(rank), reference.steps(rank)
        for step in sorted(ours.keys() if wanted is None else wanted):
            if step not in ours:
                found.append(Difference(rank, step, (), "this step was never recorded"))
            else:
                names = differing(theirs.get(step, {}), ours[step])
                if names:
                    text = "; ".join(
                        f"{name}: {theirs.get(step, {}).get(name)} / {ours[step].get(name)}" for name in names[:4]
                    )
                    found.append(Difference(rank, step, tuple(names), f"{len(names)} values, first {text}"))
            if found and found[-1].rank == rank:
                break
    return min(found, key=lambda difference: (difference.step, difference.rank), default=None)


def resumed_difference(reference: Track, track: Track) -> Difference | None:
    """What `resume()` restored against the reference's state at that step: weights, buffers, optimizer, by rank."""
    for rank in range(reference.world_size):
        record = track.one(rank, "resumed")
        if record is None:
            return Difference(rank, 0, (), "resume() did not return")
        theirs = reference.steps(rank).get(record["step"], {})
        state = {name: value for name, value in theirs.items() if name.startswith(("model/", "buffer/", "optim/"))}
        names = differing(state, record["values"])
        if names:
            return Difference(rank, record["step"], tuple(names), f"restored state: {names[:6]}")
    return None
