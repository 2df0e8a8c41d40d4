"""What the ranks of a drilled run have written: lives of ranks, and their steps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lastwords.checkpoint.codec import typed

Leaves = Mapping[str, Mapping[str, str]]
"""Kind -> name -> digest."""


@dataclass(frozen=True)
class Begin:
    """The loop begins after global step `step`. resumes: the script resumes if it can; resumed: it has.

    steps_per_epoch: 0 if it is not known. begun: the saved run had begun the next step. script, sha256,
    arguments_sha256, data: what runs here, see `checkpoint.drill_record`.
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
class Life:
    """A rank from the begin of its loop to its end. dies: in which event the drill has killed it. spoilt: a leaf."""

    begin: Begin
    steps: dict[int, Step] = field(default_factory=dict)
    dies: str = ""
    spoilt: str = ""


def lives_in(lines: Iterable[str], where: str) -> list[Life]:
    """Of one rank, in their order. A line that a dying rank has left unfinished counts for nothing.

    FormatError, with `where`, for a line that no rank has written.
    """
    lives: list[Life] = []
    spoilt = ""
    for line in lines:
        try:
            one = json.loads(line)
        except ValueError:
            continue
        kind = one.get("kind") if isinstance(one, dict) else None
        if kind == "begin":
            lives.append(Life(typed(one, Begin, where), spoilt=spoilt))
        elif kind == "spoilt":
            spoilt = str(one.get("name"))
        elif kind == "step" and lives:
            step = typed(one, Step, where)
            lives[-1].steps[step.step] = step
        elif kind == "dies" and lives:
            lives[-1].dies = str(one.get("event"))
    return lives
