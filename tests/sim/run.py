"""Replay one schedule and tell its story: `python -m tests.sim.run --seed 7`. `--count` tries many, quietly."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter

from tests.sim.checkers import complaints
from tests.sim.mutants import MUTANTS
from tests.sim.schedule import draw
from tests.sim.timed import Story, TimedWorld
from tests.sim.troubles import AS_SHIPPED, KINDS


def replay(
    seed: int, with_death: bool = True, mutant: str = "", kinds: frozenset[str] = AS_SHIPPED
) -> tuple[list[str], list[str]]:
    """Complaints and story of one seed."""
    plan = draw(seed, with_death, kinds)
    story = Story()
    with MUTANTS[mutant].applied() if mutant else contextlib.nullcontext():
        ledger = TimedWorld(plan, story=story).run()
    head = [f"seed {seed}: {plan.job}", *(f"  fault: {fault}" for fault in plan.faults)]
    quirks = {name: getattr(plan, name) for name in _QUIRKS if getattr(plan, name)}
    head.append(f"  also: {quirks}; troubles: {plan.troubles}")
    return complaints(plan.job, ledger), head + story.lines


_QUIRKS = (
    "raises",
    "tears",
    "corrupts",
    "leaves",
    "leaves_inside",
    "raises_after_loop",
    "refused",
    "hanging",
    "unreadable",
    "publish_failures",
    "hanging_verify",
    "hanging_publish",
    "older_directory",
    "swallows",
)


def command(seed: int, with_death: bool = True, mutant: str = "", kinds: frozenset[str] = AS_SHIPPED) -> str:
    """What replays this seed."""
    text = f"python -m tests.sim.run --seed {seed}"
    text += ("" if with_death else " --no-death") + (f" --mutant {mutant}" if mutant else "")
    return text + ("" if kinds == AS_SHIPPED else f" --troubles {','.join(sorted(kinds))}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.run", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the schedule to replay, or the first of --count")
    parser.add_argument("--no-death", action="store_true", help="the plan of this seed in which no process is killed")
    parser.add_argument("--count", type=int, default=0, help="run so many seeds and print only what fails")
    parser.add_argument("--mutant", default="", choices=["", *MUTANTS], help="break this rule of the cores")
    parser.add_argument("--troubles", default="", help=f"draw these instead of the usual ones: {', '.join(KINDS)}")
    options = parser.parse_args(arguments)
    kinds = frozenset(options.troubles.split(",")) if options.troubles else AS_SHIPPED
    if not kinds <= set(KINDS):
        parser.error(f"no such troubles: {', '.join(sorted(kinds - set(KINDS)))}")
    if not options.count:
        bad, lines = replay(options.seed, not options.no_death, options.mutant, kinds)
        sys.stdout.write("\n".join([*lines, "", *(f"VIOLATED  {line}" for line in bad or ())]) + "\n")
        sys.stdout.write("all invariants hold\n" if not bad else "")
        return 1 if bad else 0
    return sweep(range(options.seed, options.seed + options.count), not options.no_death, options.mutant, kinds)


def sweep(seeds: range, with_death: bool, mutant: str, kinds: frozenset[str]) -> int:
    """Run many seeds and print only what fails; 1 if anything did."""
    failed: Counter[str] = Counter()
    with MUTANTS[mutant].applied() if mutant else contextlib.nullcontext():
        for seed in seeds:
            plan = draw(seed, with_death, kinds)
            try:
                bad = complaints(plan.job, TimedWorld(plan).run())
            except Exception as error:  # outermost loop of a sweep: a core that raises is a finding
                bad = [f"{type(error).__name__}: {error}"]
            if bad:
                failed[bad[0].split(":")[0]] += 1
                sys.stdout.write(f"{command(seed, with_death, mutant, kinds)}\n    {bad[0]}\n")
    sys.stdout.write(f"{len(seeds)} schedules, {failed.total()} failed {dict(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
