"""The training thread's calls against the table of phases."""

from __future__ import annotations

import ast
import glob
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

import lastwords
from lastwords.errors import ConfigError
from lastwords.processor.core import PARKED, TRANSITIONS, ProcessorCore
from lastwords.vocabulary import Left, Phase, Raised, Stand
from tests import golden
from tests.processor.rank_driver import GENERATION, RankDriver, reports

METHODS: dict[str, Callable[[ProcessorCore], object]] = {
    "begin_loop": lambda core: core.begin_loop(10, 2, 7),
    "mark_ready": lambda core: core.mark_ready(),
    "try_update": lambda core: core.try_update(),
    "mark_updated": lambda core: core.mark_updated(),
    "mark_torn": lambda core: core.mark_torn(),
    "mark_skipped": lambda core: core.mark_skipped(),
    "mark_corrupt": lambda core: core.mark_corrupt(),
    "mark_gate_failed": lambda core: core.mark_gate_failed("connection closed by peer"),
    "try_end_step": lambda core: core.try_end_step(),
    "mark_left": lambda core: core.mark_left(),
    "mark_raised": lambda core: core.mark_raised("ValueError: x", secondary=False),
}
STEP_OF = {Phase.COMPUTING: 7, Phase.DONE: 7}


def at(phase: Phase) -> RankDriver:
    rank = RankDriver(ended_step=7)
    rank.walk(phase, STEP_OF.get(phase, 8))
    rank.core.take_effects()
    return rank


def test_the_table_knows_every_call() -> None:
    assert {method for _, method in TRANSITIONS} == set(METHODS)
    assert {method for _, method in PARKED} <= set(METHODS)


@pytest.mark.parametrize(("phase", "method"), list(itertools.product(Phase, METHODS)))
def test_a_call_does_what_the_table_says(phase: Phase, method: str) -> None:
    rank = at(phase)
    after = TRANSITIONS.get((phase, method))
    if after is None:
        with pytest.raises(ConfigError, match="rank 1 at"):
            METHODS[method](rank.core)
        assert rank.core.stand == at(phase).core.stand
    else:
        METHODS[method](rank.core)
        assert rank.core.phase is after


@pytest.mark.parametrize(("phase", "method"), PARKED)
def test_a_frozen_rank_parks_as_the_table_says(phase: Phase, method: str) -> None:
    rank = at(phase)
    rank.freeze()
    rank.wait(1.0)  # a rank in UPDATED settles when its grace is over
    assert METHODS[method](rank.core) is False
    assert rank.core.phase is PARKED[phase, method]
    rank.resume()
    assert METHODS[method](rank.core) is True
    assert rank.core.phase is TRANSITIONS[phase, method]


def test_steps_are_counted_at_their_end_only() -> None:
    rank = at(Phase.COMPUTING)
    core = rank.core
    stands = []
    for method in ("mark_ready", "try_update", "mark_updated", "try_end_step"):
        METHODS[method](core)
        stands.append(str(core.stand))
    assert stands == ["READY(8)", "UPDATING(8)", "UPDATED(8)", "COMPUTING(8)"]
    assert core.ended_step == 8


def test_a_step_without_an_update_counts() -> None:
    rank = at(Phase.COMPUTING)
    assert rank.core.try_end_step() is True
    assert rank.core.stand == Stand(Phase.COMPUTING, 8)


def test_the_loop_goes_on_from_where_it_was_resumed() -> None:
    rank = RankDriver()
    rank.core.begin_loop(10, 5, 37)
    assert rank.core.stand == Stand(Phase.COMPUTING, 37)


def test_an_exception_in_ready_gives_the_gradients_up() -> None:
    rank = at(Phase.READY)
    rank.core.mark_raised("ValueError: in a hook", secondary=False)
    assert rank.core.stand == Stand(Phase.COMPUTING, 7)
    assert rank.core.stand.reach == {7}


def test_leaving_after_a_torn_update_is_reported_as_an_exception() -> None:
    rank = at(Phase.TORN)
    rank.core.mark_left()
    (report,) = reports(rank.core.take_effects())
    assert isinstance(report, Raised)
    assert not report.secondary
    assert report.stand == Stand(Phase.TORN, 8)


def test_the_error_for_a_second_step_says_what_to_do() -> None:
    rank = at(Phase.UPDATED)
    with golden.raises(ConfigError):
        rank.core.mark_ready()


def test_the_error_after_a_torn_update_says_so() -> None:
    with golden.raises(ConfigError):
        at(Phase.TORN).core.mark_ready()


def test_only_the_first_exception_is_reported() -> None:
    rank = at(Phase.COMPUTING)
    rank.core.mark_raised("ValueError: first", secondary=False)
    rank.core.mark_raised("RuntimeError: second", secondary=True)
    (report,) = reports(rank.core.take_effects())
    assert report == Raised(1, GENERATION, "ValueError: first", False, Stand(Phase.COMPUTING, 7))


def test_leaving_is_reported_once() -> None:
    rank = at(Phase.COMPUTING)
    rank.core.mark_left()
    rank.core.mark_left()
    assert reports(rank.core.take_effects()) == [Left(1, GENERATION, Stand(Phase.DONE, 7))]


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("step", [6, 7, 8, 9])
def test_a_rank_holds_what_is_in_its_reach_unless_it_has_to_update_first(phase: Phase, step: int) -> None:
    stand = Stand(phase, STEP_OF.get(phase, 8))
    needs_update = stand == Stand(Phase.READY, step)
    assert stand.holds(step) == (step in stand.reach and not needs_update)


@pytest.mark.ci
def test_the_safety_predicate_is_written_once() -> None:
    """A second version on the other side of the wire agrees only until one of the two is changed."""
    product = Path(lastwords.__file__).parent
    files = [path for path in glob.iglob(f"{product}/**/*.py", recursive=True) if "/_pb/" not in path]
    assert len(files) > 200
    defined = {
        path.removeprefix(f"{product}/")
        for path in files
        for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.strip("_") == "holds"
    }
    assert defined == {"stand.py"}
