"""torchdata's StatefulDataLoader in `tft.steps(loader)`, with no word of it elsewhere: in one process, cut at any step,
and in a script that is killed. `make ci-frameworks` installs torchdata.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lastwords.optim_wrapper.loop import data_position
from lastwords.optim_wrapper.state import generators
from lastwords.optim_wrapper.state.object_walk import Walk
from tests.frameworks import test_frameworks
from tests.frameworks.test_frameworks import NOT_EXACT, check_equal, run, whole
from tests.optim_wrapper import test_steps
from tests.optim_wrapper.test_steps import KINDS, after, points, resumed, told, whole_run

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="not installed: make ci-frameworks")
__all__ = ["whole"]

CASES = {
    "draws": ("1:3:fwd", "0:7:win", "1:8:fwd", "0:10:evaluating", "0:16:win"),
    "shuffle drop workers draws": ("1:3:fwd", "0:13:win", "1:14:fwd"),
    "beside workers": ("1:3:fwd", "0:7:win", "1:8:fwd"),
    "own beside workers": ("1:3:fwd", "0:12:fwd"),
    "stream": ("1:3:fwd", "0:7:win", "1:8:fwd", "0:16:win"),
    "drop stream workers": ("1:3:fwd", "0:6:win", "1:7:fwd", "1:10:evaluating"),
}
"""In an epoch, at the end of one, at the start of the next, in an evaluation."""
TOLD = ("beside workers",)
"""Bit for bit all the same: what the data set draws in its workers is not known."""


@pytest.fixture
def _in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_steps, "DataLoader", stateful.StatefulDataLoader)
    monkeypatch.setattr(generators, "Beyond", lambda walk, roots: Walk({}, {}))


@pytest.fixture
def _script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_frameworks.SCRIPTS, "torchdata", "stateful_script")


def cut(kind: str, draw: str, workers: int = 0) -> list[tuple[tuple[int, int], bool, bool]]:
    """Of runs cut at some steps: whether each goes on with the same bits, and whether it is exact."""

    def make() -> Any:
        return test_steps.loader(kind, draw, workers)

    undisturbed, found = whole_run(make, epochs=3), []
    assert undisturbed.steps is not None
    for epoch, step in points(undisturbed.steps.steps_per_epoch):
        again = resumed(undisturbed, make, epoch, step, epochs=3)
        assert again.steps is not None
        same = again.record == after(undisturbed.record, epoch, step)
        found.append(((epoch, step), same, not told(again)))
    return found


@pytest.mark.usefixtures("_in_one_process")
@pytest.mark.parametrize("draw", ["none", "all"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("list", "iterable")])
def test_a_map_style_data_set_goes_on_exactly(kind: str, draw: str) -> None:
    assert {found[1:] for found in cut(kind, draw)} == {(True, True)}


@pytest.mark.usefixtures("_in_one_process")
@pytest.mark.parametrize("kind", ["shuffle", "distributed", "iterable"])
def test_with_workers_it_goes_on_exactly(kind: str) -> None:
    assert {found[1:] for found in cut(kind, "all", 2)} == {(True, True)}


@pytest.mark.usefixtures("_in_one_process")
@pytest.mark.parametrize(("draw", "exact"), [("none", True), ("all", False)])
def test_an_iterable_data_set_is_exact_or_its_draws_are_told(draw: str, exact: bool) -> None:
    found = cut("iterable", draw)
    assert all(same or not is_exact for _, same, is_exact in found)
    assert all(is_exact for *_, is_exact in found) is exact


@pytest.mark.usefixtures("_in_one_process")
def test_a_loader_that_is_not_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the tests above would see it."""
    monkeypatch.setattr(data_position, "_STATEFUL", "another one")
    assert not all(is_exact for *_, is_exact in cut("shuffle", "all"))


@pytest.mark.usefixtures("_in_one_process")
def test_the_loaders_own_state_counts_what_was_passed_over() -> None:
    """A user may save it beside."""

    def states(resume_at: int) -> list[Any]:
        one, found = test_steps.loader("shuffle with generator"), []
        facts = data_position.loader_facts(one)
        iterator = iter(one)
        order = data_position.EpochOrder()
        data_position.pass_over(one, facts, iterator, order, resume_at, lambda: None, show_progress=False)
        for _ in range(resume_at, 4):
            next(iterator)
            found.append({name: one.state_dict()[name] for name in ("_num_yielded", "_sampler_iter_yielded")})
        return found

    assert states(2) == states(0)[2:]


@pytest.mark.usefixtures("_script")
@pytest.mark.parametrize("case", CASES)
def test_a_loop_is_healed_bit_for_bit(case: str, whole: Callable[[str, str], Path], tmp_path: Path) -> None:
    undisturbed = whole("torchdata", case)
    said = run(tmp_path, "torchdata", case, *CASES[case], PROTECTED="1")
    check_equal_steps(tmp_path, undisturbed)
    assert len([*tmp_path.glob("died-*")]) == len(CASES[case])
    assert (NOT_EXACT in said) is (case in TOLD), said


@pytest.mark.usefixtures("_script")
def test_without_the_streams_of_the_epoch_it_differs(whole: Callable[[str, str], Path], tmp_path: Path) -> None:
    """The control."""
    undisturbed = whole("torchdata", "shuffle drop workers draws")
    run(tmp_path, "torchdata", "shuffle drop workers draws", "1:3:fwd", PROTECTED="1", BROKEN="streams of the epoch")
    with pytest.raises(AssertionError):
        check_equal_steps(tmp_path, undisturbed)


def check_equal_steps(directory: Path, undisturbed: Path) -> None:
    check_equal(directory, undisturbed, files=("final",))
