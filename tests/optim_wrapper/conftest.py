"""What is the user's own in these tests: a run of the suite has imported the modules of all tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lastwords.optim_wrapper.state import object_walk, running

IMPORTED_BY_TESTS = frozenset({"tests", "tools", "demo", "bench"})


@pytest.fixture(autouse=True)
def other_tests_are_not_the_users(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No walk looks at the names of another one's module."""

    def user_modules() -> Iterator[tuple[str, dict[str, Any]]]:
        for name, names in running.user_modules():
            if name == request.module.__name__ or name.partition(".")[0] not in IMPORTED_BY_TESTS:
                yield name, names

    monkeypatch.setattr(object_walk, "user_modules", user_modules)
