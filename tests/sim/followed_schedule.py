"""What a random schedule whose controller is killed does on purpose: that of its seed, and what is added here."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from tests.sim import periodic_schedule as periodic
from tests.sim.periodic_schedule import Behind, draw_periodic
from tests.sim.schedule import PLACES, STAGES, Fault, Plan, Trigger, draw
from tests.sim.world import At

IN_TIME_S = 20.0
"""So soon another one has to serve, lest ranks that wait leave without one (`controller_lost_s` is 30 s)."""

_PLACES = (*PLACES, At.OPENING, At.PARK_UPDATE, At.PARK_ENDED, At.LEFT)


@dataclass(frozen=True, slots=True)
class Followers:
    """What becomes of a controller that is killed.

    delays_s: from each kill to the next one that serves; nobody follows a kill after these. again_s: so long after it
    has begun each of these is killed, too; 0: it is not. within: the kill strikes when so many effects of the next
    event are carried out; -1: between two events. late: what was kept with nothing done after it is lost. lost: all
    that was kept is. by_hand: another one comes although no rank of its host lives, or not all are registered yet.
    wakes_s: where nothing keeps two of them apart, the older one was only stopped, and goes on so long after the other
    one has begun.
    """

    delays_s: tuple[float, ...] = ()
    again_s: tuple[float, ...] = ()
    within: int = -1
    late: bool = False
    lost: bool = False
    by_hand: bool = False
    wakes_s: float = 0.0


def draw_followed(seed: int, *, quiet: bool = False) -> tuple[Plan, Behind, Followers]:
    """The plan of a seed. `quiet`: nothing goes wrong but that the controller is killed and followed."""
    dice = random.Random(f"followers of {seed}")
    if quiet or dice.random() < 0.5:
        plan, behind = draw_periodic(seed, quiet=quiet)
    else:
        plan, behind = draw(seed, with_death=dice.random() < 0.8), Behind()
    if quiet:
        plan = dataclasses.replace(plan, job=dataclasses.replace(plan.job, steps=plan.job.steps + 12))
    kills = [_draw_kill(dice, plan, quiet) for _ in range(dice.choice((1, 1, 2)))]
    followers = Followers(
        delays_s=tuple(_draw_delay_s(dice, quiet) for _ in range(4 if quiet else dice.choice((4, 4, 4, 1)))),
        again_s=tuple(dice.choice((0.0, dice.random() * dice.choice((0.02, 0.5, 3.0)))) for _ in range(3)),
        within=dice.choice((-1, -1, 0, 1, 2, 3)),
        late=dice.random() < 0.3,
        lost=not quiet and dice.random() < 0.1,
        by_hand=dice.random() < 0.3,
        wakes_s=dice.random() * dice.choice((0.05, 1.0)),
    )
    plan = dataclasses.replace(plan, faults=(*plan.faults, *kills))
    if not quiet and dice.random() < 0.15:
        plan = _stopped(dice, plan)
    return plan, behind, followers


def _stopped(dice: random.Random, plan: Plan) -> Plan:
    """The controller is stopped first, and ended by the one that takes its place, before it wakes up."""
    at_s = 0.1 * dice.random() * (plan.job.steps - plan.job.start_step + 2)
    lasts_s = dice.choice((0.1, 1.0, 12.0)) * dice.random()
    ended = Fault("kill_controller", Trigger(time_s=at_s + lasts_s * dice.random()))
    troubles = dataclasses.replace(plan.troubles, controller_pause=(at_s, at_s + lasts_s))
    return dataclasses.replace(plan, faults=(*plan.faults, ended), troubles=troubles)


def _draw_kill(dice: random.Random, plan: Plan, quiet: bool) -> Fault:
    job, roll = plan.job, dice.random()
    if roll < 0.45 and not quiet:
        stage = dice.choice(STAGES)
        trigger = Trigger(stage=stage, delay_s=dice.random() * dice.choice((0.002, 0.05, 0.25)))
    elif roll < 0.7:
        stage = dice.choice(periodic.STAGES)
        trigger = Trigger(stage=stage, delay_s=dice.random() * dice.choice((0.002, 0.05, 0.25)))
    elif roll < 0.9:
        at = (dice.randrange(job.world_size), dice.choice(_PLACES), dice.randint(job.start_step + 1, job.steps))
        trigger = Trigger(at=at, delay_s=0.01 * dice.random())
    else:
        trigger = Trigger(time_s=dice.random() * 0.1 * (job.steps - job.start_step + 5))
    return Fault("kill_controller", trigger)


def _draw_delay_s(dice: random.Random, quiet: bool) -> float:
    usual_s = dice.choice((0.01 * dice.random(), 0.3 + 0.3 * dice.random(), 3.0 * dice.random()))
    return usual_s if quiet or dice.random() < 0.9 else 40.0 * dice.random()
