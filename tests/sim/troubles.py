"""What happens around the cores beside deaths: storage that fails for a moment, lost messages, a slow controller, ...

Each kind has a name, and `draw` says what it does in the schedule of a seed. The dice are not those of the rest of the
schedule, so that a seed keeps its job and its deaths whatever kinds there are.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.sim.job import Job

LATE_S = ((119.9, 120.5), (115.0, 130.0))
"""Around the deadlines of verification and publication (120 s): just then, when the next attempt begins, or so."""


@dataclass(frozen=True, slots=True)
class Troubles:
    """What goes wrong in one schedule. Steps and ranks of -1: nothing.

    verify_glitches: that many verifications cannot look at the parts (EIO, EMFILE, ESTALE, MemoryError).
    write_glitches: rank, how many of its writes fail. publish_glitches: that many renames fail. All of these work when
    they are tried again.
    loss: share of messages that are lost while their session lives. mute, deaf: rank, from, until (seconds): what it
    says, or what it is told, is held up. controller_pause: from, until. controller_slow_s: time that each event takes.
    gate_break: rank, step whose gate fails there although everybody lives. before_update: rank, step in which an
    exception comes between the gate and the update. false_death: rank that is reported dead, and when.
    late_verify_s, late_publish_s: how long these take. skew: seconds and rate by which each rank's clock differs.
    """

    verify_glitches: int = 0
    write_glitches: tuple[tuple[int, int], ...] = ()
    publish_glitches: int = 0
    loss: float = 0.0
    mute: tuple[int, float, float] = (-1, 0.0, 0.0)
    deaf: tuple[int, float, float] = (-1, 0.0, 0.0)
    controller_pause: tuple[float, float] = (0.0, 0.0)
    controller_slow_s: float = 0.0
    gate_break: tuple[int, int] = (-1, -1)
    before_update: tuple[int, int] = (-1, -1)
    false_death: tuple[int, float] = (-1, 0.0)
    late_verify_s: float = 0.0
    late_publish_s: float = 0.0
    skew: tuple[tuple[float, float], ...] = ()

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in self.__slots__}
        said = [f"{name}={value}" for name, value in values.items() if value != getattr(NONE, name)]
        return ", ".join(said) or "none"


NONE = Troubles()


KINDS = (
    "verify",
    "write",
    "publish",
    "loss",
    "one-way",
    "slow-controller",
    "paused-controller",
    "gate",
    "before-update",
    "false-death",
    "late",
    "skew",
)

AS_SHIPPED = frozenset(KINDS)
"""The kinds that random schedules draw by default: all."""


def draw(seed: int, job: Job, kinds: frozenset[str]) -> Troubles:
    """The troubles of a seed: in half of the schedules one of `kinds`, in some of them a second one."""
    dice = random.Random(seed ^ 0x7B0B1E)
    names = [name for name in KINDS if name in kinds]
    number = dice.choices((0, 1, 2), (50, 40, 10))[0] if len(kinds) > 1 else 1
    drawn: dict[str, object] = {}
    for name in dice.sample(names, min(number, len(names))):
        drawn |= _draw_one(dice, job, name)
    return Troubles(**drawn)  # type: ignore[arg-type]


def needs_fallback(troubles: Troubles) -> bool:
    """A publication that was given up matters most where another directory is tried meanwhile."""
    return troubles.late_publish_s > 0.0


def _draw_one(dice: random.Random, job: Job, name: str) -> dict[str, object]:
    rank = dice.randrange(job.world_size)
    step = dice.randint(job.start_step + 1, job.steps)
    about_s = 0.1 * dice.random() * (job.steps - job.start_step + 2)
    drawn: dict[str, object] = {}
    match name:
        case "verify":
            drawn = {"verify_glitches": dice.choice((1, 1, 2, 3))}
        case "write":
            ranks = dice.sample(range(job.world_size), dice.choice((1, 1, job.world_size)))
            drawn = {"write_glitches": tuple((rank, dice.choice((1, 1, 2))) for rank in sorted(ranks))}
        case "publish":
            drawn = {"publish_glitches": dice.choice((1, 1, 2))}
        case "loss":
            drawn = {"loss": dice.choice((0.02, 0.1, 0.3, 0.5))}
        case "one-way":
            until_s = about_s + dice.choice((dice.random(), 5 * dice.random(), 30 * dice.random()))
            drawn = {dice.choice(("mute", "deaf")): (rank, about_s, until_s)}
        case "slow-controller":
            drawn = {"controller_slow_s": dice.choice((0.001, 0.01, 0.05))}
        case "paused-controller":
            pause_s = dice.choice((dice.random(), 5 * dice.random(), 60 * dice.random()))
            drawn = {"controller_pause": (about_s, about_s + pause_s)}
        case "gate":
            drawn = {"gate_break": (rank, step)} if job.has_gate else {}
        case "before-update":
            drawn = {"before_update": (rank, step)}
        case "false-death":
            drawn = {"false_death": (rank, about_s)}
        case "late":
            drawn = {
                dice.choice(("late_verify_s", "late_publish_s", "late_publish_s")): dice.uniform(*dice.choice(LATE_S))
            }
        case "skew":
            clocks = [(1e6 * dice.random(), 1.0 + 0.04 * (dice.random() - 0.5)) for _ in range(job.world_size)]
            drawn = {"skew": tuple(clocks)}
    return drawn
