"""The rig of the process tests, one for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import Cluster
from tests.integration.rig import Rig


@pytest.fixture
def rig(cluster: Cluster, references: Path, tmp_path: Path) -> Iterator[Rig]:
    """Runs jobs; whatever happens, their processes end with the test."""
    rig = Rig(cluster, tmp_path, references)
    try:
        yield rig
    finally:
        rig.close()
