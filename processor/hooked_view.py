"""A view of memory whose stores can be counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class HookedView:
    """A memoryview that reports each store; only for tests that kill the writer between any two stores."""

    def __init__(self, view: memoryview, after_store: Callable[[], None]) -> None:
        self._view = view
        self._after_store = after_store

    def __setitem__(self, key: Any, value: Any) -> None:
        self._view[key] = value
        self._after_store()

    def __getitem__(self, key: Any) -> Any:
        return self._view[key]
