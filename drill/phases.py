"""Where ranks are killed: phases of a step by name, and which step, which rank, of what an undisturbed run came by."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lastwords.checkpoint.codec import typed
from lastwords.errors import ConfigError
from lastwords.optim_wrapper.launch.drill_plan import BACKWARD, END, EVALUATION, FORWARD, UPDATE, Death

# What the ranks of a drilled run have written: lives of ranks, and their steps.

Leaves = Mapping[str, Mapping[str, str]]
"""Kind -> name -> digest."""


@dataclass(frozen=True)
class Begin:
    """The loop begins after global step `step`. resumes: the script resumes if it can; resumed: it has.

    steps_per_epoch: 0 if it is not known. begun: the saved run had begun the next step. beside: names of what resume()
    says is not back. script, sha256, arguments_sha256, data: what runs here, see `checkpoint.drill_record`.
    """

    step: int
    world: int
    own_loop: bool
    steps_per_epoch: int
    resumes: bool
    resumed: bool
    begun: bool
    reasons: list[str]
    beside: list[str]
    leaves: dict[str, dict[str, str]]
    script: str = ""
    sha256: str = ""
    arguments_sha256: str = ""
    data: str = ""


@dataclass(frozen=True)
class Step:
    """A step has ended. passes: how often the rank has come by each event since the end of the one before.

    unsaved: paths of state of which reasons say by now that it is not saved.
    """

    step: int
    epoch: int | None
    passes: dict[str, int]
    reasons: list[str]
    leaves: dict[str, dict[str, str]]
    unsaved: list[str] = field(default_factory=list)


@dataclass
class RankLife:
    """A rank from the start of its loop to its end. dies: in which event the drill has killed it. spoilt: a leaf."""

    begin: Begin
    steps: dict[int, Step] = field(default_factory=dict)
    dies: str = ""
    spoilt: str = ""


def lives_in(lines: Iterable[str], where: str) -> list[RankLife]:
    """Of one rank, in their order. A line that a dying rank has left unfinished counts for nothing.

    FormatError, with `where`, for a line that no rank has written.
    """
    lives: list[RankLife] = []
    spoilt = ""
    for line in lines:
        try:
            one = json.loads(line)
        except ValueError:
            continue
        kind = one.get("kind") if isinstance(one, dict) else None
        if kind == "begin":
            lives.append(RankLife(typed(one, Begin, where), spoilt=spoilt))
        elif kind == "spoilt":
            spoilt = str(one.get("name"))
        elif kind == "step" and lives:
            step = typed(one, Step, where)
            lives[-1].steps[step.step] = step
        elif kind == "dies" and lives:
            lives[-1].dies = str(one.get("event"))
    return lives


PERIODIC = "periodic"
FEWER = "fewer-ranks"

EARLIEST = 3
"""Global step from which ranks are killed, if the phase comes often enough: in the first ones all is new."""

_Place = Callable[[Step, Step], int]
"""Of a step and the one after it: for the how manieth time a rank comes by the phase's event there; 0: it does not."""


def _middle(event: str) -> _Place:
    return lambda step, _: (step.passes.get(event, 0) + 1) // 2


def _ends_epoch(step: Step, after: Step) -> int:
    return int(step.epoch is not None and after.epoch is not None and after.epoch > step.epoch)


@dataclass(frozen=True)
class DrillPhase:
    """event: what a rank comes by there. why_not: what a script lacks that never comes there."""

    event: str
    place: _Place
    why_not: str


PHASES: Mapping[str, DrillPhase] = {
    "forward": DrillPhase(FORWARD, _middle(FORWARD), "the model that was registered makes no forward pass"),
    "backward": DrillPhase(BACKWARD, _middle(BACKWARD), "no module has an output that needs a gradient"),
    "between-updates": DrillPhase(
        UPDATE, lambda step, _: step.passes.get(UPDATE, 0) // 2, "no step has more than one optimizer's update"
    ),
    "after-update": DrillPhase(UPDATE, lambda step, _: step.passes.get(UPDATE, 0), "no optimizer updates"),
    "epoch-end": DrillPhase(END, _ends_epoch, "no epoch ends in these steps"),
    "evaluation": DrillPhase(
        EVALUATION, _middle(EVALUATION), "the registered model makes no forward pass without gradients in these steps"
    ),
    PERIODIC: DrillPhase(FORWARD, _middle(FORWARD), "there are too few steps, or no forward pass"),
}
NAMES = (*PHASES, FEWER)


def phases_of(text: str) -> tuple[str, ...]:
    """Names with commas between them. ConfigError for one that is none."""
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise ConfigError(
            f"--phases {text!r}: {unknown[0] if unknown else 'nothing'} is no phase; there are {', '.join(NAMES)}"
        )
    return names


@dataclass(frozen=True)
class Drill:
    """One death, or several at once, in a phase. every: steps between two periodic checkpoints; 0: none."""

    phase: str
    death: Death
    every: int = 0


def choose(
    run: Mapping[int, RankLife], phases: Sequence[str], kills: int, *, two: bool
) -> tuple[list[Drill], dict[str, str]]:
    """What is drilled, and for each phase that the run never comes to, why. run: rank -> its undisturbed life.

    kills: so many deaths of a rank in each phase, spread over steps and ranks. two: in each phase two at once besides.
    """
    drills: list[Drill] = []
    missed: dict[str, str] = {}
    for order, name in enumerate(name for name in phases if name in PHASES):
        found = _places(run, PHASES[name])
        if name == PERIODIC:
            found = {step: ranks for step, ranks in found.items() if step > 3 and len(ranks) == len(run)}
        if not found:
            missed[name] = PHASES[name].why_not
            continue
        steps = [step for step in found if step >= EARLIEST] or [*found]
        if name == PERIODIC:
            step = steps[len(steps) // 2]
            drills.append(Drill(name, _death(name, sorted(run), step, found[step], published=step - 2), step - 2))
            continue
        for number in range(kills):
            step = steps[(len(steps) * (number + 1) // (kills + 1) + order) % len(steps)]
            ranks = sorted(found[step])
            drills.append(Drill(name, _death(name, [ranks[(order + number) % len(ranks)]], step, found[step])))
        pairs = {step: ranks for step, ranks in found.items() if step in steps and len(ranks) > 1}
        if two and pairs:
            step = [*pairs][(len(pairs) // 2 + order) % len(pairs)]
            ranks = sorted(pairs[step])
            both = sorted({ranks[order % len(ranks)], ranks[(order + 1) % len(ranks)]})
            drills.append(Drill(name, _death(name, both, step, pairs[step])))
    return drills, missed


def _death(phase: str, ranks: Sequence[int], step: int, nth: Mapping[int, int], published: int = 0) -> Death:
    return Death(tuple(ranks), step, PHASES[phase].event, min(nth[rank] for rank in ranks), published)


def _places(run: Mapping[int, RankLife], phase: DrillPhase) -> dict[int, dict[int, int]]:
    """Step -> rank -> for the how manieth time it comes by there. Not in the last step: nothing comes after it."""
    found: dict[int, dict[int, int]] = {}
    for rank, life in sorted(run.items()):
        for number, step in sorted(life.steps.items()):
            after = life.steps.get(number + 1)
            if after is not None and (nth := phase.place(step, after)):
                found.setdefault(number, {})[rank] = nth
    return dict(sorted(found.items()))
