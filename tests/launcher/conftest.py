"""What the launcher and its workers set for their whole process must not outlive a test."""

from __future__ import annotations

import pytest

from lastwords.optim_wrapper.trainer import protect


@pytest.fixture(autouse=True)
def _no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protect, "_rank_0", "")
