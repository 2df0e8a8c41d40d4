"""Values of every kind, and loops that do what few do, through a real kill and resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import Cluster
from tests.integration.odd_training import AVERAGED, STEPS
from tests.integration.toy import Toy
from tests.selection import more, usually

pytestmark = pytest.mark.process

RANKS = 3
KILLED, SAVED, NOT_SAVED = -9, 75, 76


class Runs(Toy):
    """Launches of the odd script."""

    def launch(self, name: str, case: str, **changes: Any) -> dict[int, int]:
        """Exit codes of one launch."""
        plan = {**dict.fromkeys(("copy", "recover", "plain"), False), "kill": None, "case": case, **changes}
        return self.run(name, env={"LASTWORDS_SETTLE_TIMEOUT_S": "3"}, **plan)

    def die(self, case: str, kill: list[Any], **changes: Any) -> dict[str, Any]:
        """Kill a rank; the manifest of what the others saved."""
        codes = self.launch("killed", case, kill=kill, **changes)
        assert codes == {rank: KILLED if rank == kill[0] else SAVED for rank in range(RANKS)}, self.report()
        [manifest] = self.manifests()
        return manifest

    def resume(self, case: str, **changes: Any) -> list[tuple[bool, list[str]]]:
        """What resume() said on each rank."""
        assert set(self.launch("resumed", case, recover=True, **changes).values()) == {0}, self.report()
        folder = self.directory / "resumed"
        return [tuple(json.loads((folder / f"rank_{rank}.resumed").read_text())) for rank in range(RANKS)]

    def check_same(self, case: str) -> None:
        """The killed and resumed run did what torch alone does, the state that was restored included."""
        assert set(self.launch("reference", case, plain=True).values()) == {0}
        reference, ours = self.computed("reference"), self.computed("killed", "resumed")
        for rank in range(RANKS):
            assert STEPS in ours[rank]
            for step, (_, state) in ours[rank].items():
                assert state == reference[rank][step][1], (rank, step)


@pytest.fixture
def runs(cluster: Cluster, tmp_path: Path) -> Iterator[Runs]:
    runs = Runs(cluster, tmp_path, module="tests.integration.odd_training", ranks=RANKS)
    yield runs
    runs.close()


@pytest.mark.parametrize("copy", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_values_of_every_kind_come_back_after_a_kill(runs: Runs, copy: bool) -> None:
    manifest = runs.die("values", [1, 4, "forward"], copy=copy)
    assert manifest["global_step"] == 3
    assert runs.resume("values", copy=copy) == [(True, [])] * RANKS
    runs.check_same("values")


def test_what_becomes_unstorable_is_named_and_costs_neither_the_run_nor_the_weights(runs: Runs) -> None:
    manifest = runs.die("spoiled", [1, 5, "forward"])
    assert manifest["global_step"] == 4
    said = runs.said(0)
    places = ("extras['mine']['bad']", "local_extras['own']['bad']", "optimizer.state['0.weight']['bad']")
    for place in places:
        assert f"{place} (_thread.lock) cannot be stored" in said
    for exact, reasons in runs.resume("spoiled"):
        assert not exact
        for place in places:
            assert any(f"{place} (_thread.lock) cannot be stored" in reason for reason in reasons), reasons
    runs.check_same("spoiled")


@pytest.mark.parametrize("case", usually(AVERAGED, ["swapped", "copied within"]))
def test_averaged_weights_that_are_swapped_in_are_not_taken_for_those_of_the_step(runs: Runs, case: str) -> None:
    manifest = runs.die(case, [1, 3, "validation"])
    assert manifest["global_step"] == 3
    assert not manifest["exact"]
    assert any("parameter '0.weight'" in reason and " change" in reason for reason in manifest["reasons"])


def test_with_a_copy_swapped_weights_cost_nothing(runs: Runs) -> None:
    runs.die("swapped", [1, 3, "validation"], copy=True)
    assert runs.resume("swapped", copy=True)[0] == (True, [])
    runs.check_same("swapped")


def test_weights_that_are_clipped_before_the_step_ends_are_those_of_the_step(runs: Runs) -> None:
    """Negative control: what is written before the end of the step belongs to it."""
    manifest = runs.die("clipped", [1, 4, "forward"])
    assert (manifest["global_step"], manifest["exact"]) == (3, True)


def test_a_large_buffer_that_first_changes_in_the_step_of_the_kill_can_be_resumed_and_is_not_called_exact(
    runs: Runs,
) -> None:
    """The copy of the step that is saved lacks it; it was left out of the unit too, and nobody could resume."""
    manifest = runs.die("bank", [1, 4, "forward"])
    assert (manifest["global_step"], manifest["exact"]) == (3, False)
    for exact, reasons in runs.resume("bank"):
        assert not exact
        assert any("the buffer 'bank' is saved as of the start of the incident" in reason for reason in reasons)


def test_a_step_of_the_inner_optimizer_is_refused_before_it_writes(runs: Runs) -> None:
    codes = runs.launch("wrong", "inner")
    assert set(codes.values()) <= {1, SAVED}
    assert "Odd inside OptTFTWrapper" in " ".join(map(runs.said, range(RANKS)))
    [manifest] = runs.manifests()
    assert (manifest["global_step"], manifest["exact"]) == (2, True)


@pytest.mark.parametrize("place", [more("closure1"), "closure2"])
def test_a_kill_inside_the_closure_of_lbfgs_saves_the_state_before_the_step(runs: Runs, place: str) -> None:
    """From its second call on the closure runs on weights that are written already: a copy has those before."""
    manifest = runs.die("lbfgs", [1, 4, place])
    assert (manifest["global_step"], manifest["exact"]) == (3, True)
    assert runs.resume("lbfgs")[0] == (True, [])
    runs.check_same("lbfgs")
