"""Replay one schedule whose controller is killed: `python -m tests.sim.followed_run --seed 7`. `--count` tries many."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.sim.checkers import complaints
from tests.sim.followed_schedule import draw_followed
from tests.sim.followed_world import FollowedWorld
from tests.sim.timed import Story


@dataclass(slots=True)
class Seen:
    """What some schedules have shown. `failures`: seed, and the first complaint."""

    schedules: int = 0
    follows: int = 0
    twice: int = 0
    """Schedules in which the one that followed was killed and followed, too."""
    late: int = 0
    """How often what was kept last was lost, and it made a difference."""
    without: int = 0
    """Schedules that ended with no controller, since what the last one had kept was lost, or nobody started another."""
    deaths: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)


def replay(
    seed: int, *, quiet: bool = False, fenced: bool = True, story: Story | None = None
) -> tuple[list[str], FollowedWorld]:
    """Complaints of one seed, and the world at its end."""
    world = FollowedWorld(*draw_followed(seed, quiet=quiet), fenced=fenced, story=story)
    ledger = world.run()
    bad = complaints(world.job, ledger)
    return (bad + checkpoints_go_on(world) if quiet else bad), world


STEPS_UNTIL_ONE_IS_DUE = 8


def checkpoints_go_on(world: FollowedWorld) -> list[str]:
    """Where nothing else goes wrong, periodic checkpoints come after the controller was killed, as before."""
    job, every = world.job, world.job.schedule.steps
    if not every or not world.followed_s:
        return []
    followed_s, ended = world.followed_s[-1]
    left = job.steps - ended
    if left < 2 * every + STEPS_UNTIL_ONE_IS_DUE or world.ledger.controller_killed:
        return []
    record = world.record
    late = [attempt for attempt, (_, ordered_s) in record.ordered.items() if ordered_s > followed_s]
    if record.missed & set(late) or record.busy & set(late):
        return []  # the next one is further ahead
    if any(published_s > followed_s for published_s in record.published.values()):
        return []
    return [f"checkpoints_go_on: none came in the {left} steps after another controller had begun"]


def run_some(seeds: Iterable[int], *, quiet: bool = False, fenced: bool = True) -> Seen:
    """Many seeds."""
    seen = Seen()
    for seed in seeds:
        seen.schedules += 1
        try:
            bad, world = replay(seed, quiet=quiet, fenced=fenced)
        except Exception as error:  # outermost loop: a core that raises is a finding like any other
            seen.failures.append((seed, f"{type(error).__name__}: {error}"))
            continue
        seen.follows += world.follows
        seen.twice += world.follows > 1
        seen.late += world.late_files
        seen.without += world.ledger.controller_killed
        seen.deaths += world.deaths
        outcome = world.controller.outcome
        seen.endings["killed" if world.ledger.controller_killed else outcome.kind.value if outcome else "none"] += 1
        seen.failures += [(seed, bad[0])] if bad else []
    return seen


def command(seed: int, *, quiet: bool = False) -> str:
    """What replays this seed."""
    return f"python -m tests.sim.followed_run --seed {seed}" + (" --quiet" if quiet else "")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.followed_run", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the schedule to replay, or the first of --count")
    parser.add_argument("--quiet", action="store_true", help="the plan of this seed in which nothing else goes wrong")
    parser.add_argument("--unfenced", action="store_true", help="nothing keeps two controllers apart")
    parser.add_argument("--count", type=int, default=0, help="run so many seeds and print only what fails")
    options = parser.parse_args(arguments)
    named = {"quiet": options.quiet, "fenced": not options.unfenced}
    if options.count:
        seen = run_some(range(options.seed, options.seed + options.count), **named)
        lines = [f"{command(seed, quiet=options.quiet)}\n    {text}" for seed, text in seen.failures]
        lines += [
            f"{seen.schedules} schedules, {seen.follows} followers, {len(seen.failures)} failed",
            str(seen.deaths),
        ]
        bad = [text for _, text in seen.failures]
    else:
        story = Story()
        bad, world = replay(options.seed, story=story, **named)
        head = [f"seed {options.seed}: {world.job}", f"  {world.behind}", f"  {world.followers}"]
        head += [f"  fault: {fault}" for fault in world.plan.faults]
        head.append(f"  troubles: {world.troubles}; {world.plan}")
        lines = [*head, *story.lines, "", *(f"VIOLATED  {text}" for text in bad)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
