"""Every interleaving of small jobs, with the shipped cores. tests/sim/README.md has the table of what was explored."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import pytest

from lastwords.processor import events
from lastwords.processor.core import ProcessorCore
from lastwords.vocabulary import Freeze, Resume
from tests.selection import usually
from tests.sim.explore import Found, explore
from tests.sim.interned import InternedProcessor, Table
from tests.sim.job import Job, data_parallel
from tests.sim.mutants import MUTANTS
from tests.sim.small_jobs import BROKEN, JOBS, PERIODIC, Explored

PAGE = Path(__file__).parent / "README.md"
ROW = re.compile(r"^\| `([a-z-]+)` \| (.*) \| (\d+) \| (\d+) \| ([\d,]+) \| make ([a-z-]+) \|$", re.MULTILINE)

SMALL = [name for name, explored in JOBS.items() if not explored.slow]


def documented() -> dict[str, tuple[str, int, int, int, bool]]:
    """Words, deaths, broken sessions, states, and whether it is slow."""
    text = PAGE.read_text(encoding="utf-8")
    return {
        name: (words, int(kills), int(breaks), int(states.replace(",", "")), made == "matrix")
        for name, words, kills, breaks, states, made in ROW.findall(text)
    }


def _explore(capsys: pytest.CaptureFixture[str], name: str) -> Found:
    explored = JOBS[name]
    found = explore(explored.job, explored.kills, explored.breaks)
    with capsys.disabled():
        print(f"\n  {name}: {explored.words}, {explored.kills} death(s), {explored.breaks} broken session(s): {found}")
    return found


def assert_clean(name: str, found: Found) -> None:
    story = [f"{text}\n" + "\n".join(f"    {action}" for action in actions) for text, actions in found.bad]
    assert not found.bad, "\n".join([*story, f"replay: python -m tests.sim.explore --job {name}"])


def _steps_published(found: Found) -> set[int]:
    return {publication[0] for _, published, _ in found.ends for publication in published}


def _has_all(job: Job, without: int) -> bool:
    units = {unit for rank, units in enumerate(job.units) if rank != without for unit in units}
    return units == set(job.unit_names)


@pytest.mark.ci
@pytest.mark.parametrize("name", usually(SMALL, lambda name: name not in ("mixed-skip", "mixed-hang", "ddp-shares")))
def test_a_small_job_keeps_every_invariant_whatever_happens_in_any_order(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    found = _explore(capsys, name)
    assert_clean(name, found)
    assert found.states == documented()[name][3], "tests/sim/README.md says another number of states"
    job = JOBS[name].job
    if JOBS[name].kills and any(_has_all(job, without=rank) for rank in range(job.world_size)):
        assert _steps_published(found) == set(range(1, job.steps + 1)), "a step that is never published"
    else:
        assert not _steps_published(found)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [name for name, explored in JOBS.items() if explored.slow])
def test_a_larger_small_job_keeps_every_invariant_whatever_happens_in_any_order(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    found = _explore(capsys, name)
    assert_clean(name, found)
    assert found.states == documented()[name][3], "tests/sim/README.md says another number of states"


def test_the_protocol_page_names_every_job_that_is_explored() -> None:
    rows = {name: (words, kills, breaks, slow) for name, (words, kills, breaks, _, slow) in documented().items()}
    jobs = {**JOBS, **PERIODIC}
    assert rows == {name: (job.words, job.kills, job.breaks, job.slow) for name, job in jobs.items()}


# ------------------------------------------------------------------ what the exploration leaves out


_TWO = JOBS["two-break"].job
_SMALLEST = {
    "one unit, two steps": Explored("", data_parallel(2, 2), 1),
    "one unit, two deaths": Explored("", data_parallel(2, 1), 2),
    "a gate": Explored("", _TWO, 2),
    "a gate that hangs": Explored("", dataclasses.replace(_TWO, gate_breaks=frozenset()), 2),
    "a skipped step": Explored("", dataclasses.replace(_TWO, steps=2, skipped=frozenset({1})), 1),
    "a step that the optimizer skips": Explored(
        "", dataclasses.replace(_TWO, steps=2, skipped=frozenset({1}), skips_inside=True), 1
    ),
    "a collective at the end of the step": Explored("", dataclasses.replace(_TWO, log_collective=True), 2),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", usually(_SMALLEST, ("one unit, two steps", "a gate")))
def test_the_reductions_lose_no_end(name: str) -> None:
    assert_the_same_ends(_SMALLEST[name])


_SMALL = {
    "a broken session": Explored("", _TWO, 0, 1),
    "a death and a broken session": Explored("", _TWO, 1, 1),
    "one unit, a death and a broken session": Explored("", data_parallel(2, 1), 1, 1),
    "three ranks, one unit": Explored("", data_parallel(3, 1), 1),
    "three ranks, a gate": Explored("", JOBS["mixed"].job, 1),
}


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", _SMALL)
def test_the_reductions_lose_no_end_of_larger_jobs(name: str) -> None:
    assert_the_same_ends(_SMALL[name])


def assert_the_same_ends(explored: Explored) -> None:
    quickly = explore(explored.job, explored.kills, explored.breaks)
    plainly = explore(explored.job, explored.kills, explored.breaks, whole=True)
    assert quickly.states < plainly.states
    assert quickly.ends == plainly.ends


# ------------------------------------------------------------------ negative controls


@pytest.mark.ci
@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.small])
def test_a_broken_rule_is_found(name: str) -> None:
    mutant = MUTANTS[name]
    explored = JOBS[mutant.small]
    with mutant.applied():
        found = explore(explored.job, explored.kills, explored.breaks)
    assert found.bad, f"nobody notices that {mutant.rule}"


@pytest.mark.parametrize("name", BROKEN)
def test_a_loop_without_its_gate_is_found(name: str) -> None:
    found = explore(BROKEN[name].job, BROKEN[name].kills)
    assert found.bad, "nobody notices that the gate is missing"
    assert found.bad[0][0].startswith("i3_what_can_be_saved_is_saved: every unit had a healthy holder")


def test_an_interned_core_does_what_the_shipped_core_does() -> None:
    dice = random.Random(5)
    table = Table(InternedProcessor.QUERIES, frozenset())
    freeze, resume = events.FromController(Freeze(1, 1, "why")), events.FromController(Resume(1, 1))
    for _ in range(50):
        core: Any = ProcessorCore(0, 1, 0)
        twin: Any = InternedProcessor(table, table.number(core))
        for _ in range(30):
            phase = core.phase.name
            calls: dict[str, tuple[tuple[str, tuple[Any, ...]], ...]] = {
                "COMPUTING": (("mark_ready", ()), ("try_end_step", ())),
                "READY": (("try_update", ()), ("mark_gate_failed", ("closed by peer",))),
                "UPDATING": (("mark_updated", ()),),
                "UPDATED": (("try_end_step", ()),),
                "SKIPPED": (("try_end_step", ()),),
            }
            name, arguments = dice.choice([*calls[phase], ("handle", (freeze, 0.0)), ("handle", (resume, 0.0))])
            assert getattr(core, name)(*arguments) == getattr(twin, name)(*arguments)
            assert tuple(core.take_effects()) == twin.take_effects()
            assert (core.stand, core.frozen, core.may_end_step) == (twin.stand, twin.frozen, twin.may_end_step)
    assert len(table.pickles) < 1500, "equal states are counted as one"
