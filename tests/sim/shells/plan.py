"""A random schedule for the shells: the job, and what strikes it when."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from lastwords.vocabulary import UNIT_REPLICATED
from tests.sim.job import Job


@dataclass(frozen=True, slots=True)
class Blow:
    """`kind` is a method of `Stack`: kill, stop, cut, one_way, glitch, kill_controller, stop_controller,
    hang_controller (its transport goes on answering pings), or start_controller: `count` processes at once try to take
    the place of the one that serves, or did."""

    kind: str
    at_s: float
    rank: int = -1
    lasts_s: float = 0.0
    count: int = 0

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.2f} s" if self.lasts_s else ""
        return f"{self.kind} {self.rank if self.rank >= 0 else ''}{lasts}{f' x {self.count}' if self.count else ''}"


@dataclass(frozen=True, slots=True)
class StackPlan:
    """Everything that one simulation does on purpose."""

    seed: int
    job: Job
    blows: tuple[Blow, ...]
    raises: tuple[int, int] = (-1, -1)  # rank, step
    delay_s: float = 0.001
    slow_disk_s: float = 0.01
    older_is_ahead: bool = False  # an older checkpoint was written where the clock was years ahead
    followed: bool = False  # controllers hold their lock and keep their state, so that others can take their place
    names_late: bool = False  # a step has a name only when its loop has ended it


KINDS = ("kill", "stop", "cut", "one_way", "glitch", "stop_controller", "kill_controller")


def draw(seed: int, kinds: frozenset[str] = frozenset(KINDS)) -> StackPlan:
    """The plan of a seed."""
    dice = random.Random(seed)
    ranks = dice.choices((1, 2, 3, 4), (5, 35, 40, 20))[0]
    per_host = dice.randint(1, 4)
    sharded = ranks > 2 and dice.random() < 0.4
    units = tuple((f"tp{rank % 2}",) if sharded else (UNIT_REPLICATED,) for rank in range(ranks))
    job = Job(
        tuple(rank // per_host for rank in range(ranks)),
        units,
        dice.randint(3, 6),
        log_collective=dice.random() < 0.3,
    )
    about_s = 0.06 + 0.03 * job.steps
    blows = []
    if dice.random() < 0.85:
        blows.append(Blow("kill", dice.uniform(0.05, about_s), dice.randrange(ranks)))
    for _ in range(dice.choice((0, 1, 1, 2, 3))):
        kind = dice.choices(KINDS, (6, 4, 4, 4, 6, 2, 1))[0]
        if kind not in kinds:
            continue
        at_s = dice.choice((about_s, 2.0, 0.3)) * dice.random()
        lasts_s = dice.choice((dice.random(), 3 * dice.random(), 20 * dice.random()))
        rank = (
            -1 if kind.endswith("controller") or (kind == "glitch" and dice.random() < 0.6) else dice.randrange(ranks)
        )
        blows.append(
            Blow(
                kind,
                at_s,
                rank,
                0.0 if kind in ("kill", "kill_controller", "glitch") else lasts_s,
                dice.randint(1, 3) if kind == "glitch" else 0,
            )
        )
    return StackPlan(
        seed,
        job,
        tuple(sorted(blows, key=lambda blow: blow.at_s)),
        raises=(dice.randrange(ranks), dice.randint(1, job.steps)) if dice.random() < 0.1 else (-1, -1),
        delay_s=dice.choice((0.0003, 0.002, 0.01)),
        slow_disk_s=dice.choice((0.001, 0.01, 0.1)),
        names_late=dice.random() < 0.5,
        older_is_ahead=random.Random(seed ^ 0xC10C).random() < 0.2,  # older seeds stay what they were
    )


def draw_followed(seed: int) -> StackPlan:
    """The same with a controller that is killed, or stopped, and one or two others that are to take its place."""
    dice = random.Random(f"followed {seed}")
    plan = draw(seed, frozenset(KINDS) - {"kill_controller", "stop_controller"})
    about_s = 0.06 + 0.03 * plan.job.steps
    blows = [*plan.blows]
    at_s = dice.choice((0.0, 0.15, 0.15, 0.15)) + dice.choice((about_s, 0.5, 1.5)) * dice.random()
    killed = [blow.at_s for blow in blows if blow.kind == "kill"]
    if killed and dice.random() < 0.5:
        at_s = killed[0] + dice.choice((0.003, 0.1, 0.5)) * dice.random()
    for _ in range(dice.choice((1, 1, 2))):
        kind = dice.choices(("kill_controller", "stop_controller"), (3, 1))[0]
        lasts_s = dice.choice((dice.random(), 5.0 * dice.random()))
        blows.append(Blow(kind, at_s, lasts_s=lasts_s if kind == "stop_controller" else 0.0))
        at_s += dice.choice((0.01 * dice.random(), 0.3 + 0.3 * dice.random(), 3.0 * dice.random()))
        blows.append(Blow("start_controller", at_s, count=dice.choice((1, 1, 2))))
        at_s += dice.choice((0.02, 0.3, 1.0)) * dice.random()
    ordered = tuple(sorted(blows, key=lambda blow: blow.at_s))
    return dataclasses.replace(plan, blows=ordered, followed=True)
