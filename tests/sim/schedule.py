"""A random schedule: the job, the faults and the weather of the network, all drawn from one seed."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from lastwords.vocabulary import UNIT_REPLICATED
from tests.sim import troubles as around
from tests.sim.job import Job
from tests.sim.troubles import NONE, Troubles
from tests.sim.world import At


@dataclass(frozen=True, slots=True)
class Trigger:
    """When a fault strikes: when `rank` comes to `at` in `step`, when an incident comes to `stage`, or at `time_s`.

    delay_s is added, so that faults strike inside of things and not only at their beginning.
    """

    at: tuple[int, At, int] | None = None
    stage: str = ""
    time_s: float = -1.0
    delay_s: float = 0.0

    def __str__(self) -> str:
        if self.at is not None:
            rank, place, step = self.at
            return f"{self.delay_s:.4f} s after rank {rank} came to {place.name} of step {step}"
        if self.stage:
            return f"{self.delay_s:.4f} s after {self.stage} began"
        return f"at {self.time_s:.4f} s"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong. `kind` is a method of `TimedWorld`: fault_kill, fault_pause, ..."""

    kind: str
    trigger: Trigger
    ranks: tuple[int, ...] = ()
    duration_s: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.duration_s:.2f} s" if self.duration_s else ""
        return f"{self.kind} {list(self.ranks)}{lasts} {self.trigger}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that one simulation does on purpose. What remains (delays, who gets through) comes from the seed."""

    seed: int
    job: Job
    faults: tuple[Fault, ...]
    raises: tuple[tuple[int, int, At], ...] = ()  # rank, step, and where in it the user's code raises
    tears: tuple[tuple[int, int], ...] = ()  # rank, step whose update raises
    corrupts: tuple[tuple[int, int], ...] = ()  # rank, step before which its replicas find its weights wrong
    swallows: bool = False  # ... and the user's code catches the exception and leaves the loop
    leaves: tuple[tuple[int, int], ...] = ()  # rank, step after which it leaves the loop
    leaves_inside: tuple[tuple[int, int], ...] = ()  # rank, step in which it leaves the loop
    raises_after_loop: frozenset[int] = frozenset()  # ranks whose user code raises while they wait for the release
    refused: frozenset[tuple[int, int]] = frozenset()  # rank, target: the file system refuses
    hanging: frozenset[int] = frozenset()  # ranks whose writes never end
    unreadable: frozenset[int] = frozenset()  # ranks whose files lose a bit
    publish_failures: int = 0
    hanging_verify: bool = False
    hanging_publish: bool = False
    older_directory: bool = False
    odd_loop: tuple[int, int] = (-1, -1)  # a rank, and the step at which it alone wants to start (-1: never)
    message_delay_s: float = 0.002
    slow_messages: float = 0.02  # share of messages that take up to half a second
    update_s: float = 0.01
    log_s: float = 0.002
    troubles: Troubles = NONE


PLACES = (
    At.FORWARD,
    At.REDUCE,
    At.BACK,
    At.READY,
    At.GATE,
    At.UPDATE,
    At.LOG,
    At.END,
    At.COMMITTED,
)
_PLACE_WEIGHTS = (10, 22, 6, 14, 4, 16, 12, 8, 8)
STAGES = ("settling", "proceeding", "saving", "verifying", "publishing", "ending")
_STAGE_WEIGHTS = (28, 8, 32, 14, 14, 6)
PLACE_DELAY_S_MAX = {At.FORWARD: 0.05, At.REDUCE: 0.01, At.UPDATE: 0.01, At.LOG: 0.003}
STAGE_DELAY_S_MAX = {
    "settling": 0.04,
    "proceeding": 0.02,
    "saving": 0.25,
    "verifying": 0.05,
    "publishing": 0.03,
    "ending": 0.02,
}


COPIES_FROM = 1_000_000
"""Schedules from here on are of jobs in which each rank alone holds a part, and keeps whole copies of it."""

SHARED = 0.3
"""So many jobs have units that are written in shares. Drawn apart, so that all else is as it was without."""


def _draw_job(dice: random.Random) -> Job:
    ranks = dice.choices((1, 2, 3, 4, 5, 6, 7, 8), (3, 14, 30, 28, 8, 7, 4, 6))[0]
    per_host = dice.randint(1, 4)
    hosts = tuple(rank // per_host for rank in range(ranks))
    layout = dice.random()
    if layout < 0.6 or ranks == 1:
        units: tuple[tuple[str, ...], ...] = ((UNIT_REPLICATED,),) * ranks
    elif layout < 0.82:
        shards = dice.choice([number for number in (2, 3, 4) if number <= ranks])
        units = tuple((f"tp{rank % shards}",) for rank in range(ranks))
    else:
        units = tuple(("dense", f"experts{rank % 2}") for rank in range(ranks))
    steps = dice.randint(2, 5)
    start_step = dice.choice((0, 0, 0, 7))
    return Job(
        hosts,
        units,
        start_step + steps,
        start_step=start_step,
        skipped=frozenset(step for step in range(start_step + 1, start_step + steps) if dice.random() < 0.1),
        log_collective=dice.random() < 0.25,
        update_collective=dice.random() < 0.06,
        fallback=dice.random() < 0.25,
        skips_inside=dice.random() < 0.4,
        closure=dice.random() < 0.05,
    )


def _draw_trigger(dice: random.Random, job: Job, in_incident: bool) -> Trigger:
    roll = dice.random()
    if in_incident and roll < 0.7:
        stage = dice.choices(STAGES, _STAGE_WEIGHTS)[0]
        return Trigger(stage=stage, delay_s=dice.random() * STAGE_DELAY_S_MAX[stage])
    if roll < 0.92:
        place = dice.choices(PLACES, _PLACE_WEIGHTS)[0]
        if place is At.GATE and not job.has_gate:
            place = At.REDUCE
        step = dice.randint(job.start_step + 1, job.steps)
        delay_s = dice.random() * PLACE_DELAY_S_MAX.get(place, 0.0004)
        return Trigger(at=(dice.randrange(job.world_size), place, step), delay_s=delay_s)
    return Trigger(time_s=dice.random() * 0.1 * (job.steps - job.start_step + 5))


def _draw_ranks(dice: random.Random, job: Job, trigger: Trigger, several: float) -> tuple[int, ...]:
    first = trigger.at[0] if trigger.at is not None and dice.random() < 0.8 else dice.randrange(job.world_size)
    if job.world_size > 1 and dice.random() < several:
        number = dice.randint(2, job.world_size) if dice.random() < 0.3 else 2
        return tuple(sorted({first, *dice.sample(range(job.world_size), number)}))
    return (first,)


_OTHER_FAULTS = (
    "kill",
    "kill_writer",
    "pause",
    "cut",
    "signal",
    "stale",
    "kill_host",
    "isolate_host",
    "kill_controller",
)
_OTHER_WEIGHTS = {
    "any": (34, 16, 12, 14, 6, 8, 5, 3, 2),
    "storm": (40, 60, 5, 5, 0, 0, 5, 0, 1),
    "network": (10, 0, 40, 50, 0, 10, 0, 10, 0),
    "echo": (10, 0, 20, 40, 0, 60, 0, 0, 0),
}


def _draw_echo(dice: random.Random, job: Job) -> list[Fault]:
    """A false alarm early on, and messages that still speak of it later."""
    rank = dice.randrange(job.world_size)
    start = Trigger(at=(rank, At.FORWARD, job.start_step + 1), delay_s=0.01 * dice.random())
    faults = [Fault("cut", start, (rank,), 0.2 * dice.random())]
    for _ in range(3):
        step = dice.randint(job.start_step + 1, job.steps)
        at = (dice.randrange(job.world_size), dice.choice(PLACES), step)
        trigger = Trigger(at=at) if dice.random() < 0.6 else Trigger(stage="settling", delay_s=0.01 * dice.random())
        faults.append(Fault("stale", trigger, (dice.randrange(job.world_size),)))
    return faults


def _draw_laggards(dice: random.Random, job: Job) -> list[Fault]:
    """A death while the gate opens, so that some are past it and some are not; then deaths while these catch up."""
    step = dice.randint(job.start_step + 1, job.steps)
    at = (dice.randrange(job.world_size), dice.choice((At.GATE, At.GATE, At.READY, At.UPDATE)), step)
    faults = [Fault("kill", Trigger(at=at, delay_s=0.003 * dice.random()), (dice.randrange(job.world_size),))]
    if dice.random() < 0.7:
        stage = Trigger(stage="proceeding", delay_s=dice.random() * STAGE_DELAY_S_MAX["proceeding"])
        faults.append(Fault("kill", stage, (dice.randrange(job.world_size),)))
    return faults


def _draw_fault(dice: random.Random, job: Job, kind: str, in_incident: bool) -> Fault:
    trigger = _draw_trigger(dice, job, in_incident)
    if kind in ("kill_host", "isolate_host"):
        host = dice.choice(sorted(set(job.hosts)))
        return Fault(kind, trigger, tuple(rank for rank, home in enumerate(job.hosts) if home == host), 60.0)
    ranks = _draw_ranks(dice, job, trigger, {"kill": 0.15, "signal": 0.5, "cut": 0.3}.get(kind, 0.05))
    duration_s = 0.0
    if kind == "pause":
        duration_s = dice.choice((dice.random(), 1.0, 1.0, 3 * dice.random(), 5 + 60 * dice.random()))
    elif kind == "cut":
        duration_s = dice.choice((0.0, dice.random(), dice.random(), 4 * dice.random(), 40.0))
    return Fault(kind, trigger, ranks, duration_s)


def draw(seed: int, with_death: bool = True, kinds: frozenset[str] = around.AS_SHIPPED) -> Plan:
    """The plan of a seed. `with_death`: at least one process is killed, otherwise none is. `kinds`: of troubles."""
    plan = _draw(seed, with_death)
    troubles = around.draw(seed, plan.job, kinds)
    if around.needs_fallback(troubles):
        job = dataclasses.replace(plan.job, fallback=True)
        plan = dataclasses.replace(plan, job=job, publish_failures=0)  # each try takes minutes there
    return dataclasses.replace(plan, troubles=troubles)


def _draw(seed: int, with_death: bool) -> Plan:
    dice = random.Random(seed)
    job = dataclasses.replace(_draw_job(dice), shared=random.Random(f"shares of {seed}").random() < SHARED)
    if seed >= COPIES_FROM:
        alone = tuple((UNIT_REPLICATED, f"rank{rank}") for rank in range(job.world_size))
        job = dataclasses.replace(job, units=alone, copies={0: 3, 1: 2}.get(seed % 5, 1), shared=False)
    faults: list[Fault] = []
    if with_death:
        faults.append(_draw_fault(dice, job, "kill", in_incident=False))
    profile = dice.choices(("any", "storm", "network", "echo"), (55, 23, 14, 8))[0]
    if job.has_gate and with_death and dice.random() < 0.5:
        faults += _draw_laggards(dice, job)
    if profile == "storm" and dice.random() < 0.5:
        proceeding = Trigger(stage="proceeding", delay_s=0.01 * dice.random())
        faults.append(Fault("kill_writer", proceeding, (dice.randrange(job.world_size),)))
    if profile == "echo":
        faults += _draw_echo(dice, job)
    others = dice.choices((0, 1, 2, 3), (25, 40, 22, 13))[0] if profile in ("any", "echo") else dice.randint(1, 3)
    for _ in range(others):
        kind = dice.choices(_OTHER_FAULTS, _OTHER_WEIGHTS[profile])[0]
        if not with_death and kind.startswith("kill"):
            kind = dice.choice(("pause", "cut", "signal", "stale"))
        faults.append(_draw_fault(dice, job, kind, in_incident=bool(faults)))
    ranks = range(job.world_size)
    step = dice.randint(job.start_step + 1, job.steps)
    pick = dice.random()
    refused: set[tuple[int, int]] = set()
    if pick < 0.05:
        refused = {(rank, 0) for rank in ranks}
        if dice.random() < 0.3:
            refused |= {(rank, 1) for rank in ranks}
    elif pick < 0.12:
        refused = {(dice.choice(ranks), 0)}
    elif pick < 0.15:
        host = dice.choice(job.hosts)
        refused = {(rank, 0) for rank in ranks if job.hosts[rank] == host}
    quirk = dice.random()
    # An exception between the gate and the update would break the gate's promise: there is no user code there.
    raising = (At.FORWARD, At.END) if job.has_gate else (At.FORWARD, At.READY, At.END)
    return Plan(
        seed,
        job,
        tuple(faults),
        raises=((dice.choice(ranks), step, dice.choice(raising)),) if 0.0 <= quirk < 0.06 else (),
        tears=((dice.choice(ranks), step),) if 0.06 <= quirk < 0.09 else (),
        corrupts=((dice.choice(ranks), step),) if 0.244 <= quirk < 0.25 and job.world_size > 1 else (),
        swallows=dice.random() < 0.3,
        leaves=((dice.choice(ranks), step),) if 0.09 <= quirk < 0.12 else (),
        leaves_inside=((dice.choice(ranks), step),) if 0.12 <= quirk < 0.13 else (),
        raises_after_loop=frozenset({dice.choice(ranks)}) if 0.22 <= quirk < 0.24 else frozenset(),
        refused=frozenset(refused),
        hanging=frozenset({dice.choice(ranks)}) if 0.13 <= quirk < 0.16 else frozenset(),
        unreadable=frozenset({dice.choice(ranks)}) if 0.16 <= quirk < 0.19 else frozenset(),
        publish_failures=dice.choice((1, 5)) if 0.19 <= quirk < 0.21 else 0,
        hanging_verify=0.21 <= quirk < 0.215,
        hanging_publish=0.215 <= quirk < 0.22,
        older_directory=dice.random() < 0.3,
        odd_loop=(dice.choice(ranks), dice.choice((-1, job.start_step + 1)))
        if 0.24 <= quirk < 0.244 and job.world_size > 1
        else (-1, -1),
        message_delay_s=dice.choice((0.0003, 0.002, 0.002, 0.02)),
        slow_messages=dice.choice((0.0, 0.02, 0.1)),
        update_s=dice.choice((0.005, 0.02, 0.02, 0.3, 2.0)),
        log_s=dice.choice((0.002, 0.002, 0.05, 1.0)),
    )
