"""Fixtures of the process tests: one zygote for the whole session, one rig for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import Cluster
from tests.integration.rig import Rig


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The zygote, and every process that was started from it until the session ends."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where uninterrupted runs are kept for all tests of the session, those of its other workers included."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "references"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def rig(cluster: Cluster, references: Path, tmp_path: Path) -> Iterator[Rig]:
    """Runs jobs; whatever happens, their processes end with the test."""
    rig = Rig(cluster, tmp_path, references)
    try:
        yield rig
    finally:
        rig.close()
