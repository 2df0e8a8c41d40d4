"""Checkpoints that older code has written are read, and resumed from, as they were: their bytes are in `older/`.

Both are of this toy job, four ranks of which rank 1 was killed in the backward pass of step 4: version 1 by the last
code that knew no other, version 2 by the first that wrote it (with a limit of 0 bytes, so that it did so at once).
`expected.json` is each rank's state after step 3, as the job itself recorded it. Never make these files again: what
today's code writes is tested everywhere else.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lastwords.checkpoint.load import open_checkpoint, verify
from tests.integration.harness import Cluster
from tests.integration.toy import Toy

pytestmark = pytest.mark.process

OLDER = Path(__file__).parent / "older"


@pytest.mark.parametrize("version", [1, 2])
def test_a_checkpoint_of_older_code_is_sound_and_resumed_bit_for_bit(
    version: int, cluster: Cluster, tmp_path: Path
) -> None:
    saved = OLDER / f"version_{version}"
    path = saved / "tft_saved_checkpoints-step_3"
    assert verify(path) == []
    assert open_checkpoint(path).manifest.format_version == version
    toy = Toy(cluster, tmp_path)
    shutil.copytree(path, toy.checkpoints / path.name)
    assert toy.run("resumed", recover=True) == dict.fromkeys(range(4), 0), toy.report()
    expected = json.loads((saved / "expected.json").read_text())
    for rank in range(4):
        assert toy.resumed("resumed", rank)[:3] == [1, 3, 3]
        assert (tmp_path / "resumed" / f"state_{rank}").read_text() == expected[rank]
    assert all(sorted(steps) == [4, 5, 6] for steps in toy.computed("resumed"))
