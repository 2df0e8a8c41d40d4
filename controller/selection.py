"""Which step is saved, and who writes what: a pure function of what is known about the ranks.

A large unit is shared out among those of its holders that stand at the end of the step, up to SHARES_MAX of them. Into
how many shares it is cut stays as it is while one of them is kept; who drops out leaves its share to another holder.

`select` returns a `Decision` or a `NoDecision`, each with its reason in words. The same input gives the same
answer: everything is sorted before it is chosen from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import Enum

from lastwords.controller.words import NAMED_UNITS_MAX, units_text
from lastwords.errors import NAMED_RANKS_MAX, ranks_text, some
from lastwords.vocabulary import SHARES_MAX, Phase, Share, Stand, whole_units

# What selection is told and what it answers: plain values, and how they are said.
#
# Terms. A rank is *usable* if it has settled, has not been excluded, and is not dead or suspect: it has a `stand`. A
# *part* is what one rank writes: units or shares of them, and the rank-local state of ranks of its host. A finished
# part counts even if its writer has died since.

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
class WrittenPart:
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
    kept: tuple[WrittenPart, ...]
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
    absent = (f"rank {view.rank} {_absence(view)}" for view in owners)
    return f"{unit} cannot be saved at step {step}: {some(absent, NAMED_RANKS_MAX)}"


def _absence(view: RankView) -> str:
    if view.stand is None:
        return view.absence or "is gone"
    return f"is at {view.stand}"


@dataclass(frozen=True, slots=True)
class _RankIndex:
    """The ranks, indexed once, so that a choice among thousands stays linear."""

    views: Mapping[int, RankView]
    usable: Sequence[RankView]  # sorted by rank
    holders: Mapping[str, Sequence[RankView]]  # usable ranks of each unit, sorted
    by_host: Mapping[str, Sequence[RankView]]
    units: Sequence[str]
    parts: Sequence[WrittenPart]


@dataclass(frozen=True, slots=True)
class _SavePlace:
    """Where a checkpoint of `step` could be written. refused_hosts: the file system has refused their writes there."""

    step: int
    target: int
    refused_hosts: frozenset[str]
    may_retry: bool
    holding: frozenset[int]  # usable ranks that hold the step
    proceeding: frozenset[int]  # usable ranks that reach it only by applying their gradients

    def may_write(self, view: RankView) -> bool:
        """True if this rank may try: it never does twice, and its host only as the last resort."""
        return self.target not in view.refused_targets and (self.may_retry or view.host_id not in self.refused_hosts)

    def has_ended(self, view: RankView) -> bool:
        """True if this rank holds the step as it was at its end."""
        return view.rank in self.holding and view.stand is not None and view.stand.ended_step == self.step


@dataclass(slots=True)
class _Draft:
    """A choice that is being made for one place."""

    place: _SavePlace
    kept: list[WrittenPart]
    units_of: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    copied_of: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    locals_of: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    proceed: set[int] = field(default_factory=set)
    lost_local_ranks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Obstacle:
    """The unit that has no writer; `storage` if it has holders, but none whose writes succeed."""

    unit: str
    storage: bool


def select(
    views: Mapping[int, RankView],
    units: Iterable[str],
    parts: Sequence[WrittenPart] = (),
    *,
    base_step: int = 0,
    targets: Sequence[int] = (PRIMARY_TARGET,),
    retry_refused: bool = False,
    back: bool = False,
) -> Decision | NoDecision:
    """Choose step and writers.

    N is the largest step that a usable rank has ended or begun to update, or that a finished part is of. If a
    unit cannot be had at that N, the next lower step is tried, down to the largest step that a usable rank has
    *ended*: going lower would take back a step that a survivor has ended.

    parts: finished parts, and parts that usable ranks are writing. base_step: the step at which the job started;
    there is nothing to save unless a step after it has been reached. targets: the directories still in play, the
    preferred one first. retry_refused: let ranks of a host whose file system refused try the same directory again
    (each rank once), as the last resort. back: try the step below those, too, and lower ones that were copied whole.
    """
    given_up: list[int] = []
    usable = sorted((view for view in views.values() if view.stand is not None), key=lambda view: view.rank)
    while True:
        survey = _survey(views, usable, units, parts)
        answer = _select_among(survey, base_step, targets, retry_refused, back, tuple(sorted(given_up)))
        if isinstance(answer, Decision) or answer.kind is not NoDecisionKind.STORAGE:
            return answer
        # Ranks that can write nowhere hold their step in vain. Losing one step is better than losing all.
        useless = [view for view in usable if all(target in view.refused_targets for target in targets)]
        if not useless or len(useless) == len(usable):
            return answer
        given_up.extend(view.rank for view in useless)
        left_out = {view.rank for view in useless}
        usable = [view for view in usable if view.rank not in left_out]


def _survey(
    views: Mapping[int, RankView], usable: Sequence[RankView], units: Iterable[str], parts: Sequence[WrittenPart]
) -> _RankIndex:
    holders: dict[str, list[RankView]] = defaultdict(list)
    by_host: dict[str, list[RankView]] = defaultdict(list)
    for view in usable:
        by_host[view.host_id].append(view)
        for unit in view.units:
            holders[unit].append(view)
    newest_first = sorted(parts, key=lambda part: (-part.attempt, part.rank))
    return _RankIndex(views, usable, holders, by_host, sorted(set(units)), newest_first)


def _select_among(
    survey: _RankIndex,
    base_step: int,
    targets: Sequence[int],
    retry_refused: bool,
    back: bool,
    given_up: tuple[int, ...],
) -> Decision | NoDecision:
    steps = _candidate_steps(survey)
    if not steps:
        return NoDecision(NoDecisionKind.NO_HOLDER, "no rank is left that could write")
    if steps[0] <= base_step:
        return NoDecision(NoDecisionKind.NOTHING_TO_SAVE, nothing_text(base_step))
    if back:
        steps += _steps_before(survey, steps[-1])
    first_obstacle: _Obstacle | None = None
    by_storage = False
    for step in steps:
        if step <= base_step:
            break
        for may_retry in (False, True) if retry_refused else (False,):
            places = [_place(survey, step, target, may_retry) for target in targets]
            answers = [_draft(survey, place) for place in places]
            drafts = [answer for answer in answers if isinstance(answer, _Draft)]
            if drafts:
                return _decision(min(drafts, key=_cost), given_up)
            for obstacle in answers:
                assert isinstance(obstacle, _Obstacle)
                first_obstacle = first_obstacle or obstacle
                by_storage = by_storage or obstacle.storage
    assert first_obstacle is not None
    if by_storage:
        return NoDecision(NoDecisionKind.STORAGE, f"no rank is left that could write {first_obstacle.unit}", steps[0])
    lost = _lost_units(survey, steps[0]) or [first_obstacle.unit]
    return NoDecision(NoDecisionKind.NO_HOLDER, lost_text(survey.views, lost, steps[0]), steps[0])


def _lost_units(survey: _RankIndex, step: int) -> list[str]:
    """Units that nobody can bring to `step` and no finished part has."""
    covered = whole_units(name for part in survey.parts if part.step == step for name in part.units)
    holding, proceeding = _reaching(survey, step)
    reaching = holding | proceeding
    had = {unit for unit in survey.units if any(view.rank in reaching for view in survey.holders.get(unit, ()))}
    return [unit for unit in survey.units if unit not in covered | had]


def _cost(draft: _Draft) -> tuple[int, int, int]:
    """Of two directories the one that saves the rank-local state of more ranks, then the one with less to write."""
    return len(draft.lost_local_ranks), len(draft.units_of), len(draft.locals_of)


def _candidate_steps(survey: _RankIndex) -> list[int]:
    """Steps worth trying, the best first."""
    stands = [view.stand for view in survey.usable if view.stand is not None]
    reached = {stand.begun_step for stand in stands} | {part.step for part in survey.parts}
    lowest = max((stand.ended_step for stand in stands), default=0)
    return sorted((step for step in reached | {lowest} if step >= lowest), reverse=True) if reached else []


def _steps_before(survey: _RankIndex, lowest: int) -> list[int]:
    """Steps lower than that of which something may be left, the best first."""
    copied = {step for view in survey.views.values() for step in view.copies}
    return sorted({lowest - 1} | {step for step in copied if step < lowest}, reverse=True)


def _place(survey: _RankIndex, step: int, target: int, may_retry: bool) -> _SavePlace:
    refused = frozenset(view.host_id for view in survey.views.values() if target in view.refused_targets)
    return _SavePlace(step, target, refused, may_retry, *_reaching(survey, step))


def _reaching(survey: _RankIndex, step: int) -> tuple[frozenset[int], frozenset[int]]:
    """Ranks that hold `step`, and those that are ready to apply it."""
    ready = Stand(Phase.READY, step)
    holding = frozenset(view.rank for view in survey.usable if view.stand is not None and view.stand.holds(step))
    return holding, frozenset(view.rank for view in survey.usable if view.stand == ready)


def _draft(survey: _RankIndex, place: _SavePlace) -> _Draft | _Obstacle:
    """Assign every unit and all rank-local state, or name the unit that cannot be had."""
    draft = _Draft(place, _kept_parts(survey.parts, place))
    while True:
        obstacle, reopened = _assign_units(survey, draft)
        if obstacle is not None:
            return obstacle
        reopened = reopened or _assign_locals(survey, draft)
        if not reopened:
            return draft
        # A rank has one part per checkpoint: the one that has to write more writes all of it anew. What it had
        # finished stays on disk until it is replaced, so that its death meanwhile costs nothing.
        draft = _Draft(place, [part for part in draft.kept if part.rank not in reopened])


def _kept_parts(parts: Sequence[WrittenPart], place: _SavePlace) -> list[WrittenPart]:
    """Parts of this step and directory; of several by one rank the newest, nothing twice, and no unit cut two ways."""
    kept: list[WrittenPart] = []
    ranks: set[int] = set()
    counts: dict[str, int] = {}
    units: set[Share] = set()
    local_ranks: set[int] = set()
    for part in parts:
        if (part.step, part.target) != (place.step, place.target) or part.rank in ranks:
            continue
        shares = {Share.parse(name) for name in part.units}
        alike = all(counts.get(share.unit, share.count) == share.count for share in shares)
        if alike and units.isdisjoint(shares) and local_ranks.isdisjoint(part.local_ranks):
            kept.append(part)
            ranks.add(part.rank)
            counts |= {share.unit: share.count for share in shares}
            units |= shares
            local_ranks.update(part.local_ranks)
    return kept


def _assign_units(survey: _RankIndex, draft: _Draft) -> tuple[_Obstacle | None, set[int]]:
    """Give what no kept part has of each unit to its holders; (obstacle, ranks whose kept part must be redone)."""
    covered: dict[str, set[Share]] = defaultdict(set)
    for share in (Share.parse(name) for part in draft.kept for name in part.units):
        covered[share.unit].add(share)
    for unit in survey.units:
        kept = covered[unit]
        if kept and kept.issuperset(next(iter(kept)).all):
            continue
        obstacle, reopened = None, _assign_shares(survey, draft, unit, kept)
        if reopened is None:
            obstacle, reopened = _assign_whole(survey, draft, unit)
        if obstacle is not None or reopened:
            return obstacle, reopened
    return None, set()


def _assign_shares(survey: _RankIndex, draft: _Draft, unit: str, kept: AbstractSet[Share]) -> set[int] | None:
    """Share the unit out among its holders, or what is missing of it; None if it is to be written whole.

    Only among those that have ended the step: what a loop does between update and end has not been done by the others.
    Returns ranks whose kept part must be redone: one that takes over more, or all, where nobody can.
    """
    place = draft.place
    kept_ranks = {part.rank for part in draft.kept}

    def cost(view: RankView) -> tuple[bool, bool, int, int]:
        rank = view.rank
        return rank in kept_ranks, view.host_id in place.refused_hosts, len(draft.units_of.get(rank, ())), rank

    holders = [view for view in survey.holders.get(unit, ()) if place.has_ended(view) and place.may_write(view)]
    sharers = sorted(holders, key=cost)
    free = [view.rank for view in sharers if view.rank not in kept_ranks]
    if kept:
        if not sharers:
            return {part.rank for part in draft.kept if not kept.isdisjoint(map(Share.parse, part.units))}
        if not free:
            return {sharers[0].rank}
        missing = sorted(set(next(iter(kept)).all).difference(kept))
    else:
        count = min(len(free), SHARES_MAX) if all(unit in view.shared for view in holders) else 1
        if count < 2:
            return None
        missing = [*Share(unit, 0, count).all]
    for number, share in enumerate(missing):
        draft.units_of[free[number % len(free)]].append(str(share))
    return set()


def _assign_whole(survey: _RankIndex, draft: _Draft, unit: str) -> tuple[_Obstacle | None, set[int]]:
    """Give the unit to its best holder; (obstacle, ranks whose kept part must be redone)."""
    place = draft.place
    kept_ranks = {part.rank for part in draft.kept}

    def cost(view: RankView) -> tuple[bool, bool, bool, int]:
        rank = view.rank
        return rank in place.proceeding, view.host_id in place.refused_hosts, rank in kept_ranks, rank

    reaching = place.holding | place.proceeding
    holders = [view for view in survey.holders.get(unit, ()) if view.rank in reaching]
    best = min(filter(place.may_write, holders), key=cost, default=None)
    copied = best is None
    if best is None:
        readers = _readers(survey, unit, place.step)

        def cost_of_reading(view: RankView) -> tuple[bool, bool, int, int]:
            rank = view.rank
            return rank in kept_ranks, unit not in view.units, len(draft.units_of.get(rank, ())), rank

        best = min(filter(place.may_write, readers), key=cost_of_reading, default=None)
        holders = holders or readers
    if best is None:
        return _Obstacle(unit, storage=bool(holders)), set()
    if best.rank in kept_ranks:
        return None, {best.rank}
    draft.units_of[best.rank].append(unit)
    if copied:
        draft.copied_of[best.rank].append(unit)
        return None, set()
    if best.rank in place.proceeding:
        draft.proceed.add(best.rank)
    return None, set()


def _readers(survey: _RankIndex, unit: str, step: int) -> list[RankView]:
    """Usable ranks of hosts in whose memory a whole copy of the unit is, at this step."""
    having = [view for view in survey.views.values() if unit in view.units and step in view.copies and _is_sound(view)]
    hosts = {view.host_id for view in having}
    return [view for host in sorted(hosts) for view in survey.by_host.get(host, ()) if view.may_copy]


def _is_sound(view: RankView) -> bool:
    """Whether nothing is wrong with its weights, of which its copies would be."""
    return view.stand is None or view.stand.phase is not Phase.TORN


def _assign_locals(survey: _RankIndex, draft: _Draft) -> set[int]:
    """Give each rank's local state to a rank of its host, which can read its black box even if it is dead.

    A rank that writes a unit anyway is preferred, then one that stands at the step, then the lowest. Any usable
    rank will do, even a torn one: it only copies boxes. Returns the rank whose kept part must be redone, if any.
    """
    place = draft.place
    covered = {rank for part in draft.kept for rank in part.local_ranks}
    kept_ranks = {part.rank for part in draft.kept}

    def cost(view: RankView) -> tuple[bool, bool, bool, int]:
        rank = view.rank
        return rank in kept_ranks, rank not in draft.units_of, rank not in place.holding, rank

    writers: dict[str, RankView | None] = {}
    for rank in sorted(survey.views):
        if rank in covered:
            continue
        host_id = survey.views[rank].host_id
        if host_id not in writers:
            able = [view for view in survey.by_host.get(host_id, ()) if view.may_copy and place.may_write(view)]
            writers[host_id] = min(able, key=cost, default=None)
        writer = writers[host_id]
        if writer is None:
            draft.lost_local_ranks.append(rank)
        elif writer.rank in kept_ranks:
            return {writer.rank}
        else:
            draft.locals_of[writer.rank].append(rank)
    return set()


def _decision(draft: _Draft, given_up: tuple[int, ...]) -> Decision:
    place = draft.place
    ranks = sorted(set(draft.units_of) | set(draft.locals_of))
    decision = Decision(
        step=place.step,
        target=place.target,
        kept=tuple(sorted(draft.kept, key=lambda part: part.rank)),
        writers={
            rank: Assignment(
                tuple(draft.units_of.get(rank, ())),
                tuple(draft.locals_of.get(rank, ())),
                tuple(draft.copied_of.get(rank, ())),
            )
            for rank in ranks
        },
        proceed=tuple(sorted(draft.proceed)),
        lost_local_ranks=tuple(draft.lost_local_ranks),
        given_up=given_up,
        reason="",
    )
    return replace(decision, reason=decision_text(decision, place.holding))
