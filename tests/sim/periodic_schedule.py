"""What a random schedule with periodic checkpoints does on purpose: that of its seed, and what is added here."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from lastwords.vocabulary import Schedule
from tests.sim.schedule import Fault, Plan, Trigger, draw
from tests.sim.troubles import NONE

STAGES = ("ordered", "copying", "writing", "verifying it", "publishing it", "held")
"""Of a periodic checkpoint; `held`: all ranks have left the loop and wait for it."""

_DELAY_S_MAX = {
    "ordered": 0.3,
    "copying": 0.02,
    "writing": 0.3,
    "verifying it": 0.06,
    "publishing it": 0.04,
    "held": 0.3,
}
_FAULTS = ("kill", "kill_behind", "cut", "pause", "signal", "stale", "kill_controller")
_FAULT_WEIGHTS = (34, 24, 18, 10, 4, 8, 2)


@dataclass(frozen=True, slots=True)
class Behind:
    """How periodic checkpoints go. write_s: the longest write. hanging: ranks whose writers never end, nor obey.

    failing: rank, how many of its writes fail. stops_s: so long a cancelled writer may still read. blocked: so many
    jobs of the controller's storage fail. wants: when, which rank asks for one. storage_s: longest work on the files.
    quiet: nothing goes wrong, so every checkpoint that is due has to come.
    """

    write_s: float = 0.2
    hanging: frozenset[int] = frozenset()
    failing: tuple[tuple[int, int], ...] = ()
    stops_s: float = 0.004
    blocked: int = 0
    wants: tuple[tuple[float, int], ...] = ()
    storage_s: float = 0.05
    quiet: bool = False


def draw_periodic(seed: int, *, quiet: bool = False) -> tuple[Plan, Behind]:
    """The plan of a seed. `quiet`: without any fault."""
    dice = random.Random(seed ^ 0x9E210D1C)
    plan = draw(seed, with_death=not quiet and dice.random() < 0.7)
    if quiet:
        plan = Plan(
            seed,
            plan.job,
            (),
            message_delay_s=plan.message_delay_s,
            slow_messages=plan.slow_messages,
            update_s=plan.update_s,
            log_s=plan.log_s,
        )
    steps = plan.job.steps + dice.choice((0, 2, 4, 8))
    plan = dataclasses.replace(plan, job=dataclasses.replace(plan.job, steps=steps, schedule=_schedule(dice)))
    behind = Behind(
        write_s=dice.choice((0.01, 0.05, 0.2, 1.0)),
        wants=_wants(dice, plan),
        storage_s=dice.choice((0.005, 0.05)),
        quiet=quiet,
    )
    return (plan, behind) if quiet else _troubled(dice, plan, behind)


def _schedule(dice: random.Random) -> Schedule:
    every = dice.choices(("steps", "seconds", "both", "wanted"), (60, 15, 15, 10))[0]
    steps = dice.choice((1, 1, 2, 3)) if every in ("steps", "both") else 0
    return Schedule(steps=steps, seconds=dice.choice((0.1, 0.4, 2.0)) if every in ("seconds", "both") else 0.0)


def _wants(dice: random.Random, plan: Plan) -> tuple[tuple[float, int], ...]:
    often = dice.choices((0, 1, 3, 20), (40, 30, 20, 10))[0]
    if plan.job.schedule == Schedule():
        often = max(often, 2)
    last_s = 0.1 * (plan.job.steps - plan.job.start_step + 2) + plan.update_s
    return tuple((last_s * dice.random(), dice.randrange(plan.job.world_size)) for _ in range(often))


def _troubled(dice: random.Random, plan: Plan, behind: Behind) -> tuple[Plan, Behind]:
    faults = list(plan.faults)
    if dice.random() < 0.3:
        faults, plan = [], dataclasses.replace(plan, troubles=NONE)
    for _ in range(dice.choice((0, 1, 1, 2))):
        stage = dice.choice(STAGES)
        trigger = Trigger(stage=stage, delay_s=dice.random() * _DELAY_S_MAX[stage])
        kind = dice.choices(_FAULTS, _FAULT_WEIGHTS)[0]
        ranks = (dice.randrange(plan.job.world_size),)
        faults.append(Fault(kind, trigger, ranks, dice.choice((0.0, dice.random(), 4 * dice.random()))))
    ranks = range(plan.job.world_size)
    pick = dice.random()
    behind = dataclasses.replace(
        behind,
        hanging=frozenset({dice.choice(ranks)}) if pick < 0.1 else frozenset(),
        failing=((dice.choice(ranks), dice.choice((1, 1, 5))),) if 0.1 <= pick < 0.2 else (),
        blocked=dice.choice((1, 3)) if 0.2 <= pick < 0.3 else 0,
        stops_s=dice.choice((0.004, 0.05, 1.0)),
    )
    return dataclasses.replace(plan, faults=tuple(faults)), behind
