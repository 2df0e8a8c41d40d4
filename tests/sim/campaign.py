"""Many schedules, watched: what failed, what died where, which transitions were seen."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.sim.checkers import complaints
from tests.sim.coverage import Coverage, PhaseStep, StateStep
from tests.sim.schedule import draw
from tests.sim.timed import TimedWorld

SEEDS_PER_JOB = 1500
PROCESSES_MAX = 2
FAILURES_KEPT = 20


@dataclass(slots=True)
class Summary:
    """What some schedules have shown."""

    schedules: int = 0
    with_death: int = 0
    """Schedules with a death that overlapped a step or an incident."""
    deaths: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    phases: set[PhaseStep] = field(default_factory=set)
    states: set[StateStep] = field(default_factory=set)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Summary) -> None:
        self.schedules += other.schedules
        self.with_death += other.with_death
        self.deaths += other.deaths
        self.endings += other.endings
        self.phases |= other.phases
        self.states |= other.states
        self.failures += other.failures[: FAILURES_KEPT - len(self.failures)]


def run_some(first: int, last: int, with_death: bool) -> Summary:
    """The schedules of seeds `first` to `last` - 1."""
    summary, coverage = Summary(), Coverage()
    for seed in range(first, last):
        plan = draw(seed, with_death)
        world = TimedWorld(plan, controller=coverage.controller, processor=coverage.processor)
        try:
            bad = complaints(plan.job, world.run())
        except Exception as error:  # outermost loop: a core that raises is a finding like any other
            bad = [f"{type(error).__name__}: {error}"]
        summary.schedules += 1
        summary.with_death += bool(world.deaths)
        summary.deaths += world.deaths
        summary.endings[_ending(world)] += 1
        if bad:
            summary.failures.append((seed, bad[0]))
    summary.phases, summary.states = coverage.phases, coverage.states
    return summary


def _ending(world: TimedWorld) -> str:
    if world.ledger.controller_killed:
        return "controller killed"
    outcome = world.controller.outcome
    return outcome.kind.value if outcome is not None else "none"


def run_all(first: int, count: int, with_death: bool) -> Summary:
    """The same for `count` seeds, on as many processors as there are (at most two: other tests want some, too)."""
    parts = [(start, min(start + SEEDS_PER_JOB, first + count)) for start in range(first, first + count, SEEDS_PER_JOB)]
    processes = min(PROCESSES_MAX, len(os.sched_getaffinity(0)))
    summary = Summary()
    if processes < 2 or len(parts) < 2:
        for start, end in parts:
            summary.add(run_some(start, end, with_death))
        return summary
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        futures = [pool.submit(run_some, start, end, with_death) for start, end in parts]
        for future in futures:
            summary.add(future.result())
    return summary


def table(counts: Counter[str], names: Sequence[str]) -> str:
    """Counts side by side, for the test's output."""
    return ", ".join(f"{name} {counts[name]}" for name in names)
