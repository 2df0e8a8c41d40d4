"""The rig of the process tests, one for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import Cluster
from tests.integration.rig import Rig
from tests.integration.trouble import build


@pytest.fixture
def rig(cluster: Cluster, references: Path, tmp_path: Path) -> Iterator[Rig]:
    """Runs jobs; whatever happens, their processes end with the test."""
    rig = Rig(cluster, tmp_path, references)
    try:
        yield rig
    finally:
        rig.close()


@pytest.fixture
def slow_rig(references: Path, tmp_path: Path) -> Iterator[Rig]:
    """Jobs whose calls can be made to take a second each."""
    library = build(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler")
    with Cluster(preload=library) as cluster:
        rig = Rig(cluster, tmp_path, references)
        try:
            yield rig
        finally:
            rig.close()
