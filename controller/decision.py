"""What selection is told and what it answers: plain values, and how they are said.

Terms. A rank is *usable* if it has settled, has not been excluded, and is not dead or suspect: it has a `stand`.
A *part* is what one rank writes: units or shares of them, and the rank-local state of ranks of its host. A finished
part counts even if its writer has died since.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from lastwords.controller.words import NAMED_RANKS_MAX, NAMED_UNITS_MAX, ranks_text, units_text
from lastwords.vocabulary import Phase, Share, Stand

PRIMARY_TARGET = 0
"""The configured directory; target 1, where there is one, is the fallback."""


NO_TARGETS: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class RankView:
    """What selection knows about one registered rank.

    stand: None unless the rank is usable; `absence` then says why, for people. refused_targets: directories on
    which this rank's writes have failed. may_copy: False if it failed to copy black boxes. shared: those of its units
    that may be written in shares. copies: steps of which a whole copy of its units is in the memory of its host.
    """

    rank: int
    host_id: str
    units: tuple[str, ...]
    stand: Stand | None
    absence: str = ""
    refused_targets: frozenset[int] = NO_TARGETS
    may_copy: bool = True
    shared: tuple[str, ...] = ()
    copies: frozenset[int] = NO_TARGETS


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has written, or is writing, for `step` in the directory of `attempt`."""

    rank: int
    attempt: int
    step: int
    target: int
    units: tuple[str, ...]
    local_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one rank is to write. copied: those of the units that it reads from a whole copy."""

    units: tuple[str, ...]
    local_ranks: tuple[int, ...]
    copied: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """A step that can be saved whole.

    kept: parts that are finished or being written and stay as they are. writers: what is to be written beside
    them, by rank. proceed: ranks that have to apply their gradients first; where it is not empty the ranks settle
    again and `select` is asked again before anything is written. given_up: ranks that can write nowhere and were
    left out of the choice of the step. lost_local_ranks: rank-local state that nobody can write.
    """

    step: int
    target: int
    kept: tuple[Part, ...]
    writers: Mapping[int, Assignment]
    proceed: tuple[int, ...]
    lost_local_ranks: tuple[int, ...]
    given_up: tuple[int, ...]
    reason: str


class NoDecisionKind(Enum):
    """Why nothing can be saved."""

    NOTHING_TO_SAVE = "nothing to save"
    NO_HOLDER = "no holder"
    STORAGE = "storage"


@dataclass(frozen=True, slots=True)
class NoDecision:
    """Nothing can be saved, and why. step: that could have been; 0 if nobody is left who has one."""

    kind: NoDecisionKind
    reason: str
    step: int = 0


def laggards(views: Mapping[int, RankView], answer: Decision | NoDecision) -> set[int]:
    """Ranks whose word must be out of date, if that may be why there is no holder.

    If a rank has begun the update of N+1, every rank had entered that step's gate. One that said COMPUTING(N) said so
    while it still computed; it has come to the gate since, stands at READY(N+1), and says so next.
    """
    if isinstance(answer, Decision) or answer.kind is not NoDecisionKind.NO_HOLDER:
        return set()
    stands = {rank: view.stand for rank, view in views.items() if view.stand is not None}
    newest = max((stand.begun_step for stand in stands.values()), default=0)
    return {rank for rank, stand in stands.items() if stand == Stand(Phase.COMPUTING, newest - 1)}


# --------------------------------------------------------------------------- words


def decision_text(decision: Decision, held: Collection[int]) -> str:
    """A decision for people; `held` are the ranks that hold the step as they stand."""
    step = decision.step
    copied = any(work.copied for work in decision.writers.values())
    place = f"held by {ranks_text(held)}" if held else "in whole copies" if copied else "in finished files"
    words = [f"step {step} is {place}"]
    words += _writers_words(decision.writers)
    for part in decision.kept[:NAMED_RANKS_MAX]:
        words.append(f"the files that rank {part.rank} wrote in attempt {part.attempt} are used")
    if len(decision.kept) > NAMED_RANKS_MAX:
        words.append(f"so are the files of {len(decision.kept) - NAMED_RANKS_MAX} more ranks")
    if decision.proceed:
        words.append(f"{ranks_text(decision.proceed)} must apply the gradients of step {step} first")
    if decision.lost_local_ranks:
        words.append(f"no rank can write the rank-local state of {ranks_text(decision.lost_local_ranks)}")
    if decision.given_up:
        words.append(f"{ranks_text(decision.given_up)} cannot write to any directory")
    if decision.target != PRIMARY_TARGET:
        words.append("the fallback directory is used")
    return "; ".join(words)


def _writers_words(writers: Mapping[int, Assignment]) -> list[str]:
    whole = {rank: [name for name in work.units if Share.parse(name).count == 1] for rank, work in writers.items()}
    unit_writers = [rank for rank, units in whole.items() if units]
    local_writers = [rank for rank, work in writers.items() if not work.units]
    words = [f"rank {rank} writes {units_text(whole[rank])}" for rank in unit_writers[:NAMED_RANKS_MAX]]
    if len(unit_writers) > NAMED_RANKS_MAX:
        words.append(f"{len(unit_writers) - NAMED_RANKS_MAX} more ranks write a unit each")
    for rank, work in list(writers.items())[:NAMED_RANKS_MAX]:
        if work.copied:
            words.append(f"rank {rank} reads {units_text(work.copied)} from a copy in its host's memory")
    words += _shares_words(writers)
    if local_writers:
        verb = "writes" if len(local_writers) == 1 else "write"
        words.append(f"{ranks_text(local_writers)} {verb} rank-local state of its host")
    return words


def _shares_words(writers: Mapping[int, Assignment]) -> list[str]:
    ranks: dict[tuple[str, int], list[int]] = {}
    for rank, work in writers.items():
        for share in map(Share.parse, work.units):
            if share.count > 1:
                ranks.setdefault((share.unit, share.count), []).append(rank)
    words = []
    for (unit, count), by_share in list(ranks.items())[:NAMED_UNITS_MAX]:
        verb = "writes" if len(set(by_share)) == 1 else "write"
        what = unit if len(by_share) == count else f"{len(by_share)} of {count} shares of {unit}"
        together = f" in {count} shares" if len(by_share) == count else ""
        words.append(f"{ranks_text(set(by_share))} {verb} {what}{together}")
    if len(ranks) > NAMED_UNITS_MAX:
        words.append(f"{len(ranks) - NAMED_UNITS_MAX} more units are written in shares")
    return words


def nothing_text(base_step: int) -> str:
    """Why there is nothing to save in a job that started at `base_step`."""
    if base_step == 0:
        return "no step had been completed since the start"
    return f"no step had been completed since the start at step {base_step}, whose checkpoint is still the newest"


def lost_text(views: Mapping[int, RankView], units: Sequence[str], step: int) -> str:
    """Why these units cannot be had at `step`; all of them named, or as many as a line can take."""
    named = "; ".join(obstacle_text(views, unit, step) for unit in units[:NAMED_UNITS_MAX])
    return (
        f"{named}; {len(units) - NAMED_UNITS_MAX} more units cannot be saved either"
        if len(units) > NAMED_UNITS_MAX
        else named
    )


def obstacle_text(views: Mapping[int, RankView], unit: str, step: int) -> str:
    """Why this unit cannot be had at `step`: each of its ranks, and what is the matter with it."""
    owners = sorted((view for view in views.values() if unit in view.units), key=lambda view: view.rank)
    named = ", ".join(f"rank {view.rank} {_absence(view)}" for view in owners[:NAMED_RANKS_MAX])
    more = f" and {len(owners) - NAMED_RANKS_MAX} more" if len(owners) > NAMED_RANKS_MAX else ""
    return f"{unit} cannot be saved at step {step}: {named}{more}"


def _absence(view: RankView) -> str:
    if view.stand is None:
        return view.absence or "is gone"
    return f"is at {view.stand}"
