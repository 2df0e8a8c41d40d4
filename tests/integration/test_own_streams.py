"""Random generators of the user's own, through a real kill and resume: in `steps()` and in loops of one's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import Cluster
from tests.integration.streams_training import RANKS, STEPS
from tests.integration.toy import Toy
from tests.selection import more

pytestmark = pytest.mark.process

KILLED, SAVED = -9, 75


class Runs(Toy):
    """Launches of the script with generators of its own."""

    def launch(self, name: str, loop: str, **changes: Any) -> dict[int, int]:
        """Exit codes of one launch."""
        plan = {**dict.fromkeys(("recover", "plain", "blind"), False), "kill": None, "loop": loop, **changes}
        return self.run(name, **plan)

    def goes_on(self, loop: str, at: int, **changes: Any) -> tuple[bool, list[str]]:
        """Whether a killed and resumed run is that of torch alone in every bit, and the reasons that it knows."""
        codes = self.launch("killed", loop, kill=[1, at], **changes)
        assert codes == {0: SAVED, 1: KILLED}, self.report()
        assert set(self.launch("resumed", loop, recover=True, **changes).values()) == {0}, self.report()
        assert set(self.launch("reference", loop, plain=True).values()) == {0}, self.report()
        reference, ours = self.computed("reference"), self.computed("killed", "resumed")
        assert [max(steps) for steps in ours] == [STEPS] * RANKS
        reasons = [json.loads((self.directory / "resumed" / f"rank_{rank}.reasons").read_text()) for rank in range(2)]
        return ours == reference, [reason for said in reasons for reason in said]


@pytest.fixture
def runs(cluster: Cluster, tmp_path: Path) -> Iterator[Runs]:
    runs = Runs(cluster, tmp_path, module="tests.integration.streams_training", ranks=RANKS)
    yield runs
    runs.close()


@pytest.mark.parametrize(
    ("loop", "at"), [more("steps", 3), more("steps", 6), ("sampled", 6), ("own", 3), more("own", 6)]
)
def test_generators_wherever_they_are_kept_go_on_with_the_same_bits(runs: Runs, loop: str, at: int) -> None:
    """Of the model, of the data set, global ones, local ones, of an extra, of the loader and of its sampler."""
    assert runs.goes_on(loop, at) == (True, [])


def test_control_without_a_search_the_numbers_differ(runs: Runs) -> None:
    same, _ = runs.goes_on("steps", 6, blind=True)
    assert not same
