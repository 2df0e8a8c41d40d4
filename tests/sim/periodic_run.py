"""Replay one schedule with periodic checkpoints: `python -m tests.sim.periodic_run --seed 7`. `--count` tries many."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.sim.checkers import complaints
from tests.sim.periodic_checkers import the_newest_is_named, what_is_due_is_published
from tests.sim.periodic_mutants import MUTANTS
from tests.sim.periodic_schedule import draw_periodic
from tests.sim.periodic_world import PeriodicWorld
from tests.sim.timed import Story


@dataclass(slots=True)
class Seen:
    """What some schedules have shown. `failures`: seed, and the first complaint."""

    schedules: int = 0
    published: int = 0
    named: int = 0
    """Schedules in which an incident that saved nothing has named an older checkpoint."""
    both: int = 0
    """Schedules with a periodic checkpoint and last words."""
    deaths: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)


def replay(seed: int, *, quiet: bool = False, story: Story | None = None) -> tuple[list[str], PeriodicWorld]:
    """Complaints of one seed, and the world at its end."""
    plan, behind = draw_periodic(seed, quiet=quiet)
    world = PeriodicWorld(plan, behind, story=story)
    ledger = world.run()
    bad = complaints(plan.job, ledger) + the_newest_is_named(world.record)
    return (bad + what_is_due_is_published(plan, behind, ledger, world.record) if quiet else bad), world


def run_some(seeds: Iterable[int], *, quiet: bool = False) -> Seen:
    """Many seeds."""
    seen = Seen()
    for seed in seeds:
        seen.schedules += 1
        try:
            bad, world = replay(seed, quiet=quiet)
        except Exception as error:  # outermost loop: a core that raises is a finding like any other
            seen.failures.append((seed, f"{type(error).__name__}: {error}"))
            continue
        periodic = sum(not publication.incident for publication in world.ledger.publications)
        seen.published += periodic
        seen.both += bool(periodic and world.ledger.last_words)
        seen.named += bool(world.record.newest and world.record.newest[0])
        seen.deaths += world.deaths
        outcome = world.controller.outcome
        seen.endings[outcome.kind.value if outcome is not None else "none"] += 1
        seen.failures += [(seed, bad[0])] if bad else []
    return seen


def command(seed: int, *, quiet: bool = False, mutant: str = "") -> str:
    """What replays this seed."""
    text = f"python -m tests.sim.periodic_run --seed {seed}"
    return text + (" --quiet" if quiet else "") + (f" --mutant {mutant}" if mutant else "")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.periodic_run", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the schedule to replay, or the first of --count")
    parser.add_argument("--quiet", action="store_true", help="the plan of this seed in which nothing goes wrong")
    parser.add_argument("--count", type=int, default=0, help="run so many seeds and print only what fails")
    parser.add_argument("--mutant", default="", choices=["", *MUTANTS], help="break this rule of the cores")
    options = parser.parse_args(arguments)
    with MUTANTS[options.mutant].applied() if options.mutant else contextlib.nullcontext():
        if options.count:
            seen = run_some(range(options.seed, options.seed + options.count), quiet=options.quiet)
            lines = [f"{command(seed, quiet=options.quiet)}\n    {text}" for seed, text in seen.failures]
            counts = f"{seen.schedules} schedules, {seen.published} checkpoints, {seen.named} named"
            lines.append(f"{counts}, {len(seen.failures)} failed")
            bad = [text for _, text in seen.failures]
        else:
            story = Story()
            bad, world = replay(options.seed, quiet=options.quiet, story=story)
            head = [f"seed {options.seed}: {world.job}", f"  {world.behind}", *map(str, world.plan.faults)]
            lines = [*head, *story.lines, "", *(f"VIOLATED  {text}" for text in bad)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
