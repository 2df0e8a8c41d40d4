"""What the launcher and its ranks set for their whole process must not outlive a test."""

from __future__ import annotations

import pytest

from lastwords.launcher import worker
from lastwords.optim_wrapper.launch import reporter
from lastwords.optim_wrapper.trainer import protect


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protect, "_rank_0", "")
    monkeypatch.setattr(reporter, "_reporter", None)
    monkeypatch.setattr(worker, "_called", False)
