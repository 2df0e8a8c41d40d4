"""Two runs, leaf by leaf: the first bit that differs, and what may be the cause."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lastwords.drill.phases import Drill, Leaves, RankLife
from lastwords.optim_wrapper.launch.drill_plan import BESIDE, MAY_DIFFER, STATE

AT_RESUME = ("hyperparameter", "extras", "local_extras", "buffer", "parameter", "optimizer")
"""Kinds that are back when a loop begins; random streams come back while it finds its place in the data."""

SUSPECTS_MAX = 8

BITWISE, TOLD, DIFFERS, FAILED = "bitwise", "told", "differs", "failed"
"""What came of a drill: no bit differs; one does, and `resume()` had said so; one does without a word; no resume."""

Run = Mapping[int, RankLife]
"""Rank -> its life."""

_Names = Collection[tuple[str, str]]
"""Kinds and names of leaves."""


@dataclass(frozen=True)
class Leaf:
    """A leaf of a rank's state after a step. more: others that differ there as well."""

    kind: str
    name: str
    step: int
    rank: int
    more: int = 0

    def __str__(self) -> str:
        more = f" (and {self.more} more)" if self.more else ""
        return f"{self.kind} {self.name}{more} after step {self.step} on rank {self.rank}"


@dataclass(frozen=True)
class DrillVerdict:
    """What came of a drill.

    resumed_after: global step of the checkpoint; 0: there was none, and the script began anew. compared: global steps
    that were compared. first: the first leaf that differs. at_resume: that differed right after resume(). reasons:
    those of `ResumePoint`, and what was found since. suspects: what nobody saved, and was not what it should have been.
    dead: paths of state that was told not to be saved, was not back, and was as ever after each later step, as was all
    else. problem: why there was nothing to compare. spoilt: the parameter of which a self-test has flipped a bit.
    """

    drill: Drill
    kind: str
    resumed_after: int = 0
    compared: int = 0
    first: Leaf | None = None
    at_resume: Leaf | None = None
    reasons: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    problem: str = ""
    spoilt: str = ""


def differing(one: Leaves, other: Leaves, kinds: Sequence[str], but: _Names = ()) -> list[tuple[str, str]]:
    """Kinds and names of the leaves that differ, or that only one of them has."""
    found = []
    for kind in kinds:
        here, there = one.get(kind, {}), other.get(kind, {})
        if here != there:
            names = dict.fromkeys([*here, *there])
            found += [(kind, name) for name in names if here.get(name) != there.get(name) and (kind, name) not in but]
    return found


def first_difference(reference: Run, run: Run, but: _Names = (), after: int = 0) -> Leaf | None:
    """In the steps after `after` that both have: of the earliest step, on the lowest rank. but: what may differ."""
    for step in sorted({step for life in run.values() for step in life.steps if step > after}):
        for rank, life in sorted(run.items()):
            there = reference[rank].steps.get(step) if rank in reference else None
            here = life.steps.get(step)
            if here is None or there is None:
                continue
            if names := differing(there.leaves, here.leaves, STATE, but):
                return Leaf(*names[0], step, rank, len(names) - 1)
    return None


def unsteady(one: Run, other: Run) -> frozenset[tuple[str, str]]:
    """Kinds and names of what differs from run to run although nothing was killed, and need not be equal.

    Times in attributes and variables; random streams that nobody seeds, and from which nothing comes into the state.
    """
    return frozenset(
        name
        for rank in one.keys() & other.keys()
        for step in one[rank].steps.keys() & other[rank].steps.keys()
        for name in differing(one[rank].steps[step].leaves, other[rank].steps[step].leaves, MAY_DIFFER)
    )


def judge(
    drill: Drill, reference: Run, lives: Mapping[int, Sequence[RankLife]], unsteady: _Names, last: int
) -> DrillVerdict:
    """lives: of each rank in the run with the deaths. last: step after which that run was to end."""
    before = {rank: every[0] for rank, every in lives.items() if every}
    if (first := first_difference(reference, before, unsteady)) is not None:
        return DrillVerdict(drill, FAILED, first=first, problem=f"already before the kill another bit: {first}")
    missing = [rank for rank in reference if len(lives.get(rank, ())) < 2]
    if missing:
        dead = any(life.dies for every in lives.values() for life in every)
        why = "was not started again" if dead else "was not killed: it never came there this time"
        return DrillVerdict(drill, FAILED, problem=f"rank {missing[0] if dead else drill.death.ranks[0]} {why}")
    run = {rank: every[-1] for rank, every in lives.items()}
    after = {life.begin.step for life in run.values()}
    begun_at = min(after)
    ended = min(max(life.steps, default=life.begin.step) for life in run.values())
    reasons = reasons_of(run, reference)
    if len(after) > 1 or ended < last:
        problem = f"the run went on after step {begun_at}, and ended after step {ended}, not {last}"
        return DrillVerdict(drill, FAILED, begun_at, reasons=reasons, problem=problem)
    if (wanted := drill.death.published) and begun_at != wanted:
        problem = f"the periodic checkpoint of step {wanted} was not there in time: the run went on after {begun_at}"
        return DrillVerdict(drill, FAILED, begun_at, reasons=reasons, problem=problem)
    first = first_difference(reference, run, unsteady, begun_at)
    resumed = all(life.begin.resumed for life in run.values())
    restored = _restored_otherwise(reference, run, begun_at) if resumed else None
    if first is None and any(life.begin.begun for life in run.values()):
        restored = None  # what came between the two steps is in it, and nothing has come of that
    kind = BITWISE if first is None and restored is None else TOLD if reasons else DIFFERS
    return DrillVerdict(
        drill,
        kind,
        begun_at if resumed else 0,
        ended - begun_at,
        first,
        restored,
        reasons,
        suspects_of(reference, run, begun_at, unsteady) if resumed else (),
        dead_in(reference, run, begun_at, unsteady) if resumed and kind == BITWISE else (),
        spoilt=run[0].spoilt,
    )


def reasons_of(run: Run, reference: Run | None = None) -> tuple[str, ...]:
    """Why a resume is not exact: told when the loop began, or in its first step, while it found its place in the data.

    reference: what its ranks have told by that step as well is about later checkpoints.
    """
    found: dict[str, None] = {}
    for rank, life in sorted(run.items()):
        found |= dict.fromkeys(life.begin.reasons)
        first = life.steps.get(life.begin.step + 1)
        if first is not None and reference is not None and life.begin.resumed:
            usual = reference[rank].steps[first.step].reasons if first.step in reference[rank].steps else ()
            found |= dict.fromkeys(why for why in first.reasons if why not in usual)
    return tuple(found)


def _restored_otherwise(reference: Run, run: Run, step: int, kinds: Sequence[str] = AT_RESUME) -> Leaf | None:
    for rank, life in sorted(run.items()):
        saved = reference[rank].steps.get(step)
        if saved is None or life.begin.own_loop:  # there, a step is under way before the loop is known to begin
            continue
        if names := differing(saved.leaves, life.begin.leaves, kinds):
            return Leaf(*names[0], step, rank, len(names) - 1)
    return None


def suspects_of(reference: Run, run: Run, step: int, unsteady: _Names) -> tuple[str, ...]:
    """Names of variables and attributes that the loop had changed by `step`, and that are not back.

    Also what resume() has named: what an extra's `state_dict()` leaves out is no variable, and no attribute of a model.
    """
    found: dict[str, None] = {}
    for rank, life in sorted(run.items()):
        saved = reference[rank].steps.get(step)
        if saved is None:
            continue
        changed = {*differing(reference[rank].begin.leaves, saved.leaves, BESIDE)}
        for kind, name in differing(saved.leaves, life.begin.leaves, BESIDE, unsteady):
            # What the loop has made is missed where there is something of the same object, or function, already.
            holders = {known.rpartition(".")[0] for known in life.begin.leaves.get(kind, {})}
            there = name in saved.leaves.get(kind, {}) and name.rpartition(".")[0] in holders
            if there and (kind, name) in changed and not name.startswith("loader."):
                found[name] = None
        steady = [name for name in life.begin.beside if not any((kind, name) in unsteady for kind in BESIDE)]
        found |= dict.fromkeys(steady)
    return tuple(found)[:SUSPECTS_MAX]


def dead_in(reference: Run, run: Run, step: int, unsteady: _Names) -> tuple[str, ...]:
    """Paths of state that was told not to be saved by `step`, and that nothing has missed since.

    Not back on any rank that has it, and after each later step all attributes were as in the undisturbed run: this one
    too, which each step makes anew, so that it is no sum or history that has lost what came before.
    """
    for rank, life in run.items():
        for number, here in life.steps.items():
            there = reference[rank].steps.get(number)
            if there is None or differing(there.leaves, here.leaves, ("attribute",), unsteady):
                return ()
    lost: dict[str, bool] = {}
    for rank, life in sorted(run.items()):
        saved = reference[rank].steps.get(step)
        if saved is None:
            return ()
        names = {name for _, name in differing(saved.leaves, life.begin.leaves, ("attribute",), unsteady)}
        for path in saved.unsaved:
            is_lost = any(f"{name}.".startswith((f"{path}.", f"{path}[")) for name in names)
            lost[path] = lost.get(path, True) and is_lost
    reasons = [why for life in run.values() for why in life.begin.reasons]
    return tuple(path for path, is_lost in lost.items() if is_lost and any(path in why for why in reasons))


def replicated(reference: Run, step: int, kind: str) -> bool:
    """Whether all ranks hold the same leaves of this kind."""
    held = [life.steps[step].leaves.get(kind, {}) for life in reference.values()]
    return all(one == held[0] for one in held)


def judge_fewer(drill: Drill, reference: Run, lives: Mapping[int, Sequence[RankLife]], step: int) -> DrillVerdict:
    """Of a run on fewer ranks that ends where it has resumed: state that all ranks hold is what it was."""
    run = {rank: every[-1] for rank, every in lives.items() if every}
    if not run or not all(life.begin.resumed for life in run.values()):
        return DrillVerdict(drill, FAILED, problem="no rank resumed")
    reasons = reasons_of(run)
    kinds = [kind for kind in ("hyperparameter", "parameter", "optimizer") if replicated(reference, step, kind)]
    if "parameter" not in kinds:
        return DrillVerdict(
            drill, FAILED, step, reasons=reasons, problem="not compared: each rank holds a part of its own"
        )
    first = _restored_otherwise(reference, run, step, kinds)
    return DrillVerdict(drill, BITWISE if first is None else DIFFERS, step, 0, first, first, reasons)
