"""A rank that is lost with its host: nobody can read its own state, so it goes on with another rank's, and says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lastwords.checkpoint import load
from lastwords.checkpoint.entries import Cause
from tests.integration.harness import Cluster

pytestmark = [pytest.mark.process, pytest.mark.timeout(330)]

MODULE = "tests.integration.lost_host_training"
DIES_AT, WAIT_S = 6, 110.0


def test_it_goes_on_with_what_another_rank_has_and_its_place_in_the_data(cluster: Cluster, tmp_path: Path) -> None:
    """A counter that began at 0 again on one rank alone would part what the ranks do."""
    for run, dies_at in ("killed", DIES_AT), ("resumed", 0):
        arguments = [str(tmp_path / "ckpt"), str(tmp_path), str(dies_at)]
        job = cluster.start(tmp_path / run, module=MODULE, arguments=arguments, world_size=2)
        codes = {end.code for end in job.wait(WAIT_S).values()}
        assert (codes == {0}) == (not dies_at), job.report()
    path = load.latest(tmp_path / "ckpt")
    assert path is not None
    with load.open_checkpoint(path) as saved:
        why = {(reason.cause, reason.ranks) for reason in saved.manifest.reasons}
    assert why == {(Cause.LOCAL_STATE_LOST, (1,))}
    kept, lost = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    said = "rank 1: the rank-local state of saved rank 1 was lost; it goes on with that of rank 0, and new streams"
    assert said in lost.pop("reasons")
    assert said not in kept.pop("reasons")
    assert lost == kept
    assert kept["passes"] == kept["step"] - 1 >= DIES_AT - 1
