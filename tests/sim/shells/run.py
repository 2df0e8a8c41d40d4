"""Replay one schedule of the shells and tell its story: `python -m tests.sim.shells.run --seed 7`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable

from tests.sim.shells.plan import StackPlan, draw, draw_followed
from tests.sim.shells.stack import Stack


def sweep(plans: Iterable[StackPlan]) -> tuple[Counter[str], list[tuple[int, str]]]:
    """How these jobs ended, with how many controllers that followed another one; and the complaints, by seed."""
    endings: Counter[str] = Counter()
    failures: list[tuple[int, str]] = []
    for plan in plans:
        stack = Stack(plan)
        stack.run()
        outcome = stack.core.outcome
        endings[outcome.kind.value if outcome is not None else "none"] += 1
        endings["followed"] += len(stack.served) - 1
        failures += [(plan.seed, text) for text in stack.complaints()[:1]]
    return endings, failures


def command(seed: int, *, followed: bool = False) -> str:
    """What replays this seed."""
    return f"python -m tests.sim.shells.run --seed {seed}" + (" --followed" if followed else "")


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 1 if an invariant is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.shells.run", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the schedule to replay, or the first of --count")
    parser.add_argument("--count", type=int, default=0, help="run so many seeds and print only what fails")
    parser.add_argument("--followed", action="store_true", help="the controller is killed or stopped, and followed")
    options = parser.parse_args(arguments)
    followed = options.followed
    drawn = draw_followed if followed else draw
    if options.count:
        endings, failures = sweep(map(drawn, range(options.seed, options.seed + options.count)))
        sys.stdout.write("".join(f"{command(seed, followed=followed)}\n    {text}\n" for seed, text in failures))
        sys.stdout.write(f"{options.count} schedules, {len(failures)} failed, endings: {dict(endings)}\n")
        return 1 if failures else 0
    stack = Stack(drawn(options.seed))
    stack.run()
    bad = stack.complaints()
    lines = [str(stack.plan), *stack.lines, "", *(f"VIOLATED  {text}" for text in bad)]
    sys.stdout.write("\n".join(lines) + ("\n" if bad else "\nall invariants hold\n"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
