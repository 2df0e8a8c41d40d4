"""Every interleaving of a small job, with the shipped cores: three ranks, one unit, up to two deaths at any point."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from lastwords.processor import events
from lastwords.processor.core import ProcessorCore
from lastwords.vocabulary import Freeze, Resume
from tests.sim.explore import Found, explore
from tests.sim.interned import InternedProcessor, Table
from tests.sim.job import Job, data_parallel
from tests.sim.mutants import MUTANTS

GATED = dataclasses.replace(data_parallel(3, 1), units=(("tp0",), ("tp1",), ("tp0",)))
"""Two units, the first with two holders: a job that needs the gate."""

GATED_TWICE = dataclasses.replace(GATED, steps=2)


def _explore(capsys: pytest.CaptureFixture[str], job: Job, kills_max: int) -> Found:
    found = explore(job, kills_max)
    controllers, processors = found.cores
    with capsys.disabled():
        print(
            f"\n  {job.world_size} ranks, {len(job.unit_names)} unit(s), {job.steps} step(s), {kills_max} death(s): "
            f"{found.states} distinct states, {found.moves} moves, {len(found.ends)} different ends "
            f"({controllers} states of the controller's core, {processors} of the processors')"
        )
    return found


def _assert_clean(found: Found, command: str) -> None:
    story = [f"{text}\n" + "\n".join(f"    {action}" for action in actions) for text, actions in found.bad]
    assert not found.bad, "\n".join([*story, f"replay: python -m tests.sim.explore {command}"])


def _steps_published(found: Found) -> set[int]:
    return {publication[0] for _, published, _ in found.ends for publication in published}


def test_three_ranks_keep_every_invariant_whenever_two_of_them_die(capsys: pytest.CaptureFixture[str]) -> None:
    found = _explore(capsys, data_parallel(3, 2), kills_max=2)
    _assert_clean(found, "--ranks 3 --steps 2 --kills 2")
    assert found.states > 200_000
    assert _steps_published(found) == {1, 2}


def test_three_ranks_with_a_gate_keep_every_invariant_whenever_one_dies(capsys: pytest.CaptureFixture[str]) -> None:
    found = _explore(capsys, GATED, kills_max=1)
    _assert_clean(found, "--gate --steps 1 --kills 1")
    assert _steps_published(found) == {1}


@pytest.mark.parametrize(
    ("job", "kills_max"), [(data_parallel(2, 2), 1), (data_parallel(2, 1), 2)], ids=["one death", "two deaths"]
)
def test_the_reductions_lose_no_end(job: Job, kills_max: int) -> None:
    assert explore(job, kills_max).ends == explore(job, kills_max, whole=True).ends


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.small])
def test_a_broken_rule_is_found(name: str) -> None:
    mutant = MUTANTS[name]
    with mutant.applied():
        found = explore(data_parallel(3, 2), 1)
    assert found.bad, f"nobody notices that {mutant.rule}"


def test_an_interned_core_does_what_the_shipped_core_does() -> None:
    dice = random.Random(5)
    table = Table(InternedProcessor.QUERIES, frozenset())
    freeze, resume = events.FromController(Freeze(1, 1, 30.0, "why")), events.FromController(Resume(1, 1))
    for _ in range(50):
        core: Any = ProcessorCore(0, 1, 0)
        twin: Any = InternedProcessor(table, table.number(core))
        for _ in range(30):
            phase = core.phase.name
            calls: dict[str, tuple[tuple[str, tuple[Any, ...]], ...]] = {
                "COMPUTING": (("mark_ready", ()), ("try_end_step", ())),
                "READY": (("try_update", ()),),
                "UPDATING": (("mark_updated", ()),),
                "UPDATED": (("try_end_step", ()),),
                "SKIPPED": (("try_end_step", ()),),
            }
            name, arguments = dice.choice([*calls[phase], ("handle", (freeze, 0.0)), ("handle", (resume, 0.0))])
            assert getattr(core, name)(*arguments) == getattr(twin, name)(*arguments)
            assert tuple(core.take_effects()) == twin.take_effects()
            assert (core.stand, core.frozen, core.may_end_step) == (twin.stand, twin.frozen, twin.may_end_step)
    assert len(table.pickles) < 600, "equal states are counted as one"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("job", "kills_max"),
    [(data_parallel(3, 3), 2), (GATED, 2), (GATED_TWICE, 1)],
    ids=["three steps", "gate, two deaths", "gate, two steps"],
)
def test_a_larger_small_job_keeps_every_invariant(capsys: pytest.CaptureFixture[str], job: Job, kills_max: int) -> None:
    _assert_clean(_explore(capsys, job, kills_max), f"--steps {job.steps} --kills {kills_max} (--gate)")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("job", [data_parallel(3, 1), GATED], ids=["one unit", "gate"])
def test_the_reductions_lose_no_end_of_three_ranks(job: Job) -> None:
    assert explore(job, 1).ends == explore(job, 1, whole=True).ends
