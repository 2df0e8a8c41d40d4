"""Random schedules: one with its story (`python -m tests.sim.run --seed 7`), or many of which only what fails is said.

`--world`: "incidents"; "periodic", with periodic checkpoints; "followed", whose controller is killed and followed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tests.sim import mutants, periodic_mutants
from tests.sim.checkers import complaints
from tests.sim.coverage import Coverage, PhaseStep, StateStep
from tests.sim.followed_schedule import draw_followed
from tests.sim.followed_world import FollowedWorld
from tests.sim.periodic_checkers import checkpoints_go_on, the_newest_is_named, what_is_due_is_published
from tests.sim.periodic_schedule import draw_periodic
from tests.sim.periodic_world import PeriodicWorld
from tests.sim.schedule import draw
from tests.sim.timed import Story, TimedWorld
from tests.sim.troubles import AS_SHIPPED, KINDS

MUTANTS = {**mutants.MUTANTS, **periodic_mutants.MUTANTS}
WORLDS = ("incidents", "periodic", "followed")
SEEDS_PER_JOB = 1500
PROCESSES_MAX = 2
FAILURES_KEPT = 20


@dataclass(frozen=True, slots=True)
class Setting:
    """What is drawn from a seed.

    with_death: whether a process is killed; kinds: of troubles. Both of "incidents". quiet: nothing goes wrong, but
    that the controller of "followed" is killed. fenced: False lets two controllers act at once (deliberately wrong).
    """

    world: str = "incidents"
    with_death: bool = True
    kinds: frozenset[str] = AS_SHIPPED
    quiet: bool = False
    fenced: bool = True


INCIDENTS, PERIODIC, FOLLOWED = map(Setting, WORLDS)


@dataclass(slots=True)
class Seen:
    """What some schedules have shown. `failures`: seed, and the first complaint."""

    schedules: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    phases: set[PhaseStep] = field(default_factory=set)
    states: set[StateStep] = field(default_factory=set)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Seen) -> None:
        self.schedules += other.schedules
        self.counts += other.counts
        self.deaths += other.deaths
        self.endings += other.endings
        self.phases |= other.phases
        self.states |= other.states
        self.failures += other.failures[: FAILURES_KEPT - len(self.failures)]


def world_of(seed: int, setting: Setting, story: Story | None = None, **cores: Any) -> TimedWorld:
    """Before anything has happened in it. cores: how those of "incidents" are made."""
    if setting.world == "followed":
        return FollowedWorld(*draw_followed(seed, quiet=setting.quiet), fenced=setting.fenced, story=story)
    if setting.world == "periodic":
        return PeriodicWorld(*draw_periodic(seed, quiet=setting.quiet), story=story)
    return TimedWorld(draw(seed, setting.with_death, setting.kinds), story=story, **cores)


def judged(world: TimedWorld) -> list[str]:
    """Run a world to its end: what the checkers complain about."""
    bad = complaints(world.job, world.run())
    if isinstance(world, FollowedWorld):
        bad += checkpoints_go_on(world) if world.behind.quiet else []
    elif isinstance(world, PeriodicWorld):
        bad += the_newest_is_named(world.record)
        due = what_is_due_is_published(world.plan, world.behind, world.ledger, world.record)
        bad += due if world.behind.quiet else []
    return bad


def replay(seed: int, setting: Setting = INCIDENTS, story: Story | None = None) -> tuple[list[str], TimedWorld]:
    """Complaints of one seed, and the world at its end."""
    world = world_of(seed, setting, story)
    return judged(world), world


def run_some(seeds: Iterable[int], setting: Setting = INCIDENTS, *, watched: bool = False) -> Seen:
    """Many seeds. watched: which transitions the cores make (of "incidents", and of no mutant) is seen as well."""
    seen, coverage = Seen(), Coverage()
    cores = {"controller": coverage.controller, "processor": coverage.processor} if watched else {}
    for seed in seeds:
        world = world_of(seed, setting, **cores)
        try:
            bad = judged(world)
        except Exception as error:  # outermost loop: a core that raises is a finding like any other
            bad = [f"{type(error).__name__}: {error}"]
        seen.schedules += 1
        seen.counts += counts_of(world)
        seen.deaths += world.deaths
        seen.endings[_ending(world)] += 1
        seen.failures += [(seed, bad[0])] if bad else []
    seen.phases, seen.states = coverage.phases, coverage.states
    return seen


def counts_of(world: TimedWorld) -> Counter[str]:
    """What this schedule is one of.

    with_death: one with a death that overlapped a step or an incident. published: periodic checkpoints; both: beside
    last words. follows: controllers that have followed another one; twice: one that was killed, too; late: how often
    what was kept last was lost, and it made a difference; without: no controller at the end.
    """
    counts = Counter(with_death=bool(world.deaths))
    if isinstance(world, PeriodicWorld):
        counts["published"] = sum(not publication.incident for publication in world.ledger.publications)
        counts["both"] = bool(counts["published"] and world.ledger.last_words)
    if isinstance(world, FollowedWorld):
        counts.update(follows=world.follows, twice=world.follows > 1, late=world.late_files)
        counts["without"] = world.ledger.controller_killed
    return counts


def _ending(world: TimedWorld) -> str:
    if world.ledger.controller_killed:
        return "controller killed"
    outcome = world.controller.outcome
    return outcome.kind.value if outcome is not None else "none"


def run_all(first: int, count: int, setting: Setting = INCIDENTS) -> Seen:
    """The same for `count` seeds, watched, on as many processors as there are, of which other tests want some, too."""
    seeds = range(first, first + count)
    parts = [seeds[start : start + SEEDS_PER_JOB] for start in range(0, count, SEEDS_PER_JOB)]
    processes = min(PROCESSES_MAX, len(os.sched_getaffinity(0)))
    seen = Seen()
    if processes < 2 or len(parts) < 2:
        for part in parts:
            seen.add(run_some(part, setting, watched=True))
        return seen
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(run_some, part, setting, watched=True) for part in parts]:
            seen.add(future.result())
    return seen


def command(seed: int, setting: Setting = INCIDENTS, mutant: str = "") -> str:
    """What replays this seed."""
    flags = {
        f"--world {setting.world}": setting.world != INCIDENTS.world,
        "--no-death": not setting.with_death,
        f"--troubles {','.join(sorted(setting.kinds))}": setting.kinds != AS_SHIPPED,
        "--quiet": setting.quiet,
        "--unfenced": not setting.fenced,
        f"--mutant {mutant}": mutant,
    }
    return " ".join((f"python -m tests.sim.run --seed {seed}", *(flag for flag, is_set in flags.items() if is_set)))


def assert_clean(seen: Seen, setting: Setting = INCIDENTS) -> None:
    """No schedule has failed; else the message says how to replay those that have."""
    assert not seen.failures, "\n".join(f"{text}\n    replay: {command(seed, setting)}" for seed, text in seen.failures)


def story_of(seed: int, setting: Setting) -> tuple[list[str], list[str]]:
    """Complaints about a schedule, and its story: what was drawn, and what has come of it."""
    story = Story()
    bad, world = replay(seed, setting, story)
    plan = world.plan
    quirks = {one.name: getattr(plan, one.name) for one in dataclasses.fields(plan)[3:]}
    head = [f"seed {seed}: {world.job}", *(f"  fault: {fault}" for fault in plan.faults)]
    head.append(f"  also: { {name: value for name, value in quirks.items() if value and name != 'troubles'} }")
    head.append(f"  troubles: {plan.troubles}")
    head += [f"  {getattr(world, name)}" for name in ("behind", "followers") if hasattr(world, name)]
    return bad, head + story.lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.run", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the schedule to replay, or the first of --count")
    parser.add_argument("--count", type=int, default=0, help="run so many seeds and print only what fails")
    parser.add_argument("--world", default=INCIDENTS.world, choices=WORLDS)
    parser.add_argument("--no-death", action="store_true", help="the plan of this seed in which no process is killed")
    parser.add_argument("--troubles", default="", help=f"draw these instead of the usual ones: {', '.join(KINDS)}")
    parser.add_argument("--quiet", action="store_true", help="the plan of this seed in which nothing else goes wrong")
    parser.add_argument("--unfenced", action="store_true", help="nothing keeps two controllers apart")
    parser.add_argument("--mutant", default="", choices=["", *MUTANTS], help="break this rule of the cores")
    options = parser.parse_args(arguments)
    kinds = frozenset(options.troubles.split(",")) if options.troubles else AS_SHIPPED
    if not kinds <= set(KINDS):
        parser.error(f"no such troubles: {', '.join(sorted(kinds - set(KINDS)))}")
    setting = Setting(options.world, not options.no_death, kinds, options.quiet, not options.unfenced)
    with MUTANTS[options.mutant].applied() if options.mutant else contextlib.nullcontext():
        if options.count:
            seen = run_some(range(options.seed, options.seed + options.count), setting)
            bad = [text for _, text in seen.failures]
            lines = [f"{command(seed, setting, options.mutant)}\n    {text}" for seed, text in seen.failures]
            failed = Counter(text.split(":")[0] for text in bad)
            lines += [f"{seen.schedules} schedules, {len(bad)} failed {dict(failed)}", f"{dict(seen.counts)}"]
        else:
            bad, lines = story_of(options.seed, setting)
            lines += ["", *(f"VIOLATED  {text}" for text in bad), *(["all invariants hold"] * (not bad))]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
