"""The order of a drill: two undisturbed runs, then one for each death, each compared with the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lastwords.drill.compare import (
    FAILED,
    DrillVerdict,
    first_difference,
    judge,
    judge_fewer,
    replicated,
    unsteady,
)
from lastwords.drill.phases import FEWER, Drill, choose
from lastwords.drill.report import Report
from lastwords.drill.runs import RunOutcome, Runs
from lastwords.errors import CommandFailedError, ConfigError, ranks_text
from lastwords.optim_wrapper.launch.drill_plan import CHECKPOINTS, FORWARD, Death, DrillPlan

STEPS_MIN = 4


@dataclass(frozen=True)
class Wishes:
    """What the command line asks for. kills: deaths in each phase. two: two ranks at once, besides."""

    ranks: int
    steps: int
    phases: Sequence[str]
    kills: int = 1
    two: bool = False
    self_test: bool = False
    keeps: bool = False


def drill(runs: Runs, wishes: Wishes, report: Report, say: Callable[[str], None]) -> None:
    """Fills in the report. say: takes a line about what is going on.

    Raises CommandFailedError, and ConfigError for a script that cannot be drilled.
    """
    say(f"undisturbed, twice: {wishes.steps} steps on {wishes.ranks} ranks")
    first = _undisturbed(runs, wishes, "undisturbed-1")
    _refuse(first, wishes)
    second = _undisturbed(runs, wishes, "undisturbed-2")
    reference, again = first.firsts, second.firsts
    report.world, report.began = len(reference), reference[0].begin
    report.steps = last = min(first.ended.values())
    aside = unsteady(reference, again)
    report.set_aside = sorted({f"{kind} {name}" for kind, name in aside})
    report.irreproducible = first_difference(reference, again, aside)
    if report.irreproducible is not None:
        return
    if wishes.self_test:
        steps = [step for step in reference[0].steps if 2 < step < last] or [2]
        death = Death((max(reference),), steps[len(steps) // 2], FORWARD, 1)
        found = [Drill("self-test", death)]
    else:
        found, report.missed = choose(reference, wishes.phases, wishes.kills, two=wishes.two)
    for number, one in enumerate(found):
        outcome = _killed(runs, wishes, one, f"{number + 1:02}-{one.phase}", say)
        report.verdicts.append(_judged(outcome, one, first, aside, last))
        if not wishes.keeps:
            runs.drop_checkpoints(outcome)
    if FEWER in wishes.phases and not wishes.self_test:
        _on_fewer(runs, wishes, first, report, say)


def _undisturbed(runs: Runs, wishes: Wishes, name: str) -> RunOutcome:
    outcome = runs.run(name, wishes.ranks, DrillPlan(wishes.steps))
    if not wishes.keeps:
        runs.drop_checkpoints(outcome)
    if outcome.code is None:
        ended = (
            ", ".join(f"rank {rank} step {step}" for rank, step in outcome.ended.items()) or "none has begun its loop"
        )
        raise CommandFailedError(
            f"the command has not come to the end of step {wishes.steps} in {outcome.took_s:.0f} s (newest steps that "
            f"have ended: {ended}): --steps or --timeout; its output is in {outcome.folder}/output.log:\n"
            f"{outcome.last_lines}"
        )
    if outcome.code:
        raise CommandFailedError(
            f"the command fails by itself, with exit code {outcome.code}; the end of {outcome.folder}/output.log:\n"
            f"{outcome.last_lines}"
        )
    if again := [rank for rank, lives in outcome.lives.items() if len(lives) > 1]:
        raise CommandFailedError(
            f"rank {again[0]} was started again although nothing was killed; the end of {outcome.folder}/output.log:\n"
            f"{outcome.last_lines}"
        )
    return outcome


def _refuse(outcome: RunOutcome, wishes: Wishes) -> None:
    """What makes no sense to go on with."""
    lives = outcome.firsts
    if not lives:
        raise ConfigError(
            "the script has ended and never begun a protected loop: a drill needs lastwords.protect() or TFTRegister "
            "around it, and steps() or step_end() in it"
        )
    if not all(life.begin.resumes for life in lives.values()):
        raise ConfigError(
            "the script never resumes: call tft.resume(missing_ok=True) before its loop (it returns None where there "
            "is no checkpoint)"
        )
    if min(outcome.ended.values()) < STEPS_MIN:
        raise ConfigError(
            f"the loop has ended after step {min(outcome.ended.values())}: a drill needs {STEPS_MIN}, to kill in one "
            "and to compare later ones"
        )
    if len(lives) < wishes.ranks or len({life.begin.world for life in lives.values()}) > 1:
        raise ConfigError(f"only {len(lives)} of {wishes.ranks} ranks are protected")


def _killed(runs: Runs, wishes: Wishes, one: Drill, name: str, say: Callable[[str], None]) -> RunOutcome:
    say(f"{one.phase}: kill -9 of {ranks_text(one.death.ranks)} in step {one.death.step}")
    return runs.run(name, wishes.ranks, DrillPlan(wishes.steps, (one.death,), one.every, wishes.self_test))


def _judged(
    outcome: RunOutcome, one: Drill, first: RunOutcome, aside: frozenset[tuple[str, str]], last: int
) -> DrillVerdict:
    if outcome.code == 0:
        return judge(one, first.firsts, outcome.lives, aside, last)
    how = f"hung: ended after {outcome.took_s:.0f} s" if outcome.code is None else f"ended with {outcome.code}"
    lines = outcome.last_lines.strip().splitlines()
    return DrillVerdict(
        one, FAILED, problem=f"the run {how}; {outcome.folder}/output.log ends with: {lines[-1] if lines else ''}"
    )


def _on_fewer(runs: Runs, wishes: Wishes, first: RunOutcome, report: Report, say: Callable[[str], None]) -> None:
    """A rank is killed, and one rank less goes on from that checkpoint."""
    if wishes.ranks < 2:
        report.missed = {**report.missed, FEWER: "there is one rank"}
        return
    steps = sorted(first.firsts[0].steps)
    if not replicated(first.firsts, steps[-1], "parameter"):
        report.missed = {**report.missed, FEWER: "each rank holds parameters of its own, so nothing can be compared"}
        return
    one = Drill(FEWER, Death((wishes.ranks - 1,), steps[len(steps) // 2], FORWARD, 1))
    outcome = _killed(runs, wishes, one, "fewer-killed", say)
    after = {life.begin.step for every in outcome.lives.values() for life in every[1:]}
    if outcome.code != 0 or len(after) != 1 or not (step := after.pop()):
        report.verdicts.append(DrillVerdict(one, FAILED, problem=f"nothing was saved: see {outcome.folder}/output.log"))
        return
    say(f"{FEWER}: one rank less goes on after step {step}")
    resumed = runs.run("fewer-resumed", wishes.ranks - 1, DrillPlan(step), outcome.folder / CHECKPOINTS)
    if resumed.code != 0:
        report.verdicts.append(_judged(resumed, one, first, frozenset(), step))
        return
    if not any(life.begin.resumed for every in resumed.lives.values() for life in every):
        why = "the script resumes only where a launcher starts it again (tft.restarted): give it its own flag, too"
        report.missed = {**report.missed, FEWER: why}
        return
    report.verdicts.append(judge_fewer(one, first.firsts, resumed.lives, step))
    if not wishes.keeps:
        runs.drop_checkpoints(resumed)
