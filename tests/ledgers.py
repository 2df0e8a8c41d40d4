"""What has been told to a ledger, as text."""

from __future__ import annotations

from typing import Any


def told(by: Any) -> list[str]:
    """by: anything with a `ledger`."""
    return [*map(str, by.ledger.reasons)]
