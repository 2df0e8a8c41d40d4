"""The small jobs that are explored: `JOBS`, by the names that `python -m tests.sim.explore --job` takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lastwords.vocabulary import UNIT_REPLICATED, Schedule
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
RING = (("a", "c"), ("a", "b"), ("b", "c"))
RING_AND_ALL = tuple((*units, UNIT_REPLICATED) for units in RING)

TWO = (("tp0",), ("tp1",))

SKIPPED = frozenset({1})

JOBS: dict[str, Explored] = {
    "ddp-two": Explored("2 ranks, one unit, 2 steps", data_parallel(2, 2), 1),
    "ddp-two-break": Explored("2 ranks, one unit, 1 step", data_parallel(2, 1), 1, 1),
    "ddp": Explored("3 ranks, one unit, 2 steps", data_parallel(3, 2), 2, slow=True),
    "ddp-shares": Explored(
        "3 ranks, one unit that is written in shares, 1 step", replace(data_parallel(3, 1), shared=True), 1
    ),
    "two-break": Explored("2 ranks, a unit on each, 1 step", _gated(TWO), 1, 1),
    "mixed": Explored("3 ranks, units on {0,2} {1}, 1 step", _gated(MIXED), 1),
    "mixed-break": Explored("3 ranks, units on {0,2} {1}, 1 step", _gated(MIXED), 0, 1, slow=True),
    "mixed-skip": Explored(
        "3 ranks, units on {0,2} {1}, 2 steps, the first one skipped", _gated(MIXED, 2, skipped=SKIPPED), 1
    ),
    "mixed-skip-inside": Explored(
        "3 ranks, units on {0,2} {1}, 2 steps, the first one skipped, which only the optimizer finds out",
        _gated(MIXED, 2, skipped=SKIPPED, skips_inside=True),
        1,
        slow=True,
    ),
    "mixed-hang": Explored(
        "3 ranks, units on {0,2} {1}, 1 step that ends with a collective", _gated(MIXED, log_collective=True), 1
    ),
    "ring": Explored("3 ranks, units on {0,1} {1,2} {2,0} and on all, 1 step", _gated(RING_AND_ALL), 2, slow=True),
    "pairs": Explored("4 ranks, units on {0,2} {1,3}, 1 step", _gated(PAIRS), 1, slow=True),
    "ddp-three-steps": Explored("3 ranks, one unit, 3 steps", data_parallel(3, 3), 2, slow=True),
    "mixed-two-steps": Explored("3 ranks, units on {0,2} {1}, 2 steps", _gated(MIXED, 2), 2, slow=True),
    "mixed-death-and-break": Explored("3 ranks, units on {0,2} {1}, 1 step", _gated(MIXED), 1, 1, slow=True),
    "ring-two-steps": Explored(
        "3 ranks, units on {0,1} {1,2} {2,0} and on all, 2 steps", _gated(RING_AND_ALL, 2), 2, slow=True
    ),
    "ring-skip-and-hang": Explored(
        "3 ranks, units on {0,1} {1,2} {2,0} and on all, 2 steps that end with a collective, the first one skipped",
        _gated(RING_AND_ALL, 2, skipped=SKIPPED, log_collective=True),
        2,
        slow=True,
    ),
    "pairs-two-deaths": Explored("4 ranks, units on {0,2} {1,3}, 1 step", _gated(PAIRS), 2, slow=True),
    "pairs-two-steps": Explored("4 ranks, units on {0,2} {1,3}, 2 steps", _gated(PAIRS, 2), 1, slow=True),
    "pairs-break": Explored("4 ranks, units on {0,2} {1,3}, 1 step", _gated(PAIRS), 0, 1, slow=True),
    "pairs-hang": Explored(
        "4 ranks, units on {0,2} {1,3}, 1 step that ends with a collective",
        _gated(PAIRS, log_collective=True),
        1,
        slow=True,
    ),
    "pairs-skip": Explored(
        "4 ranks, units on {0,2} {1,3}, 2 steps, the first one skipped",
        _gated(PAIRS, 2, skipped=SKIPPED),
        1,
        slow=True,
    ),
}

EVERY_STEP, EVERY_OTHER = Schedule(steps=1), Schedule(steps=2)
_DDP, _TWO_STEPS = data_parallel(2, 1), data_parallel(2, 2)

PERIODIC: dict[str, Explored] = {
    "periodic": Explored(
        "2 ranks, one unit, 2 steps, a checkpoint of each", replace(_TWO_STEPS, schedule=EVERY_STEP), 1
    ),
    "periodic-break": Explored(
        "2 ranks, one unit, 1 step and its checkpoint", replace(_DDP, schedule=EVERY_STEP), 0, 1
    ),
    "periodic-death-and-break": Explored(
        "2 ranks, one unit, 1 step and its checkpoint", replace(_DDP, schedule=EVERY_STEP), 1, 1, slow=True
    ),
    "periodic-two-deaths": Explored(
        "2 ranks, one unit, 2 steps, a checkpoint of each", replace(_TWO_STEPS, schedule=EVERY_STEP), 2
    ),
    "periodic-later": Explored(
        "2 ranks, one unit, 3 steps, a checkpoint of the second", replace(data_parallel(2, 3), schedule=EVERY_OTHER), 1
    ),
    "periodic-skip": Explored(
        "2 ranks, one unit, 2 steps, the second one skipped, a checkpoint of each",
        replace(_TWO_STEPS, schedule=EVERY_STEP, skipped=frozenset({2})),
        1,
    ),
    "periodic-gate": Explored(
        "2 ranks, a unit on each, 1 step and its checkpoint", _gated(TWO, schedule=EVERY_STEP), 1
    ),
    "periodic-gate-two-steps": Explored(
        "2 ranks, a unit on each, 2 steps, a checkpoint of each", _gated(TWO, 2, schedule=EVERY_STEP), 1, slow=True
    ),
    "periodic-three": Explored(
        "3 ranks, one unit, 1 step and its checkpoint", replace(data_parallel(3, 1), schedule=EVERY_STEP), 1, slow=True
    ),
    "periodic-three-two-deaths": Explored(
        "3 ranks, one unit, 1 step and its checkpoint", replace(data_parallel(3, 1), schedule=EVERY_STEP), 2, slow=True
    ),
    "periodic-mixed": Explored(
        "3 ranks, units on {0,2} {1}, 1 step and its checkpoint", _gated(MIXED, schedule=EVERY_STEP), 1, slow=True
    ),
}
"""Jobs with periodic checkpoints."""

BROKEN: dict[str, Explored] = {
    "no-gate": Explored("the same without its gate", _gated(MIXED, without_gate=True), 1),
    "no-gate-in-a-skipped-step": Explored(
        "the same, whose skipped step has no gate", _gated(MIXED, 2, skipped=frozenset({1}), skips_gate=True), 1
    ),
}
"""Loops that are deliberately wrong: some checker has to see it."""
