"""The small jobs that are explored: `JOBS`, by the names that `python -m tests.sim.explore --job` takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lastwords.vocabulary import UNIT_REPLICATED
from tests.sim.job import Job, data_parallel


@dataclass(frozen=True, slots=True)
class Explored:
    """A job with the faults that may happen in it. `slow`: not part of `make test`."""

    words: str
    job: Job
    kills: int
    breaks: int = 0
    slow: bool = False


def _gated(units: tuple[tuple[str, ...], ...], steps: int = 1, **others: object) -> Job:
    """A job with a gate that fails on every rank, sooner or later, once a peer is dead."""
    ranks = len(units)
    job = Job((0,) * ranks, units, steps, gate_breaks=frozenset(range(ranks)))
    return replace(job, **others)  # type: ignore[arg-type]


MIXED = (("tp0",), ("tp1",), ("tp0",))
PAIRS = (("tp0",), ("tp1",), ("tp0",), ("tp1",))
PAIRS_AND_ALL = tuple((*units, UNIT_REPLICATED) for units in PAIRS)
RING = (("a", "c"), ("a", "b"), ("b", "c"))
RING_AND_ALL = tuple((*units, UNIT_REPLICATED) for units in RING)

TWO = (("tp0",), ("tp1",))

JOBS: dict[str, Explored] = {
    "ddp-two": Explored("2 ranks, one unit, 2 steps", data_parallel(2, 2), 1),
    "ddp-two-break": Explored("2 ranks, one unit, 1 step", data_parallel(2, 1), 1, 1),
    "two": Explored("2 ranks, a unit on each, 1 step", _gated(TWO), 1),
    "two-break": Explored("2 ranks, a unit on each, 1 step", _gated(TWO), 1, 1),
    "ddp": Explored("3 ranks, one unit, 2 steps", data_parallel(3, 2), 2),
    "mixed": Explored("3 ranks, tp0 on 0 and 2, tp1 on 1, 1 step", _gated(MIXED), 1),
    "ring": Explored("3 ranks, 3 units on {0,1} {1,2} {2,0} and one on all, 1 step", _gated(RING_AND_ALL), 1),
    "pairs": Explored("4 ranks, 2 units with 2 holders, 1 step", _gated(PAIRS), 1),
}

BROKEN: dict[str, Explored] = {
    "no-gate": Explored("the same without its gate", _gated(MIXED, without_gate=True), 1),
    "no-gate-in-a-skipped-step": Explored(
        "the same, whose skipped step has no gate", _gated(MIXED, 2, skipped=frozenset({1}), skips_gate=True), 1
    ),
}
"""Loops that are deliberately wrong: some checker has to see it."""
