"""The controller's host watch: what fails for a moment is tried again."""

from __future__ import annotations

import errno
import queue
from collections.abc import Callable
from typing import Any

import pytest

from lastwords.controller import server as neighbours_module
from lastwords.controller.server import Neighbours
from lastwords.errors import UnavailableError
from lastwords.liveness import process_id

SOON_S = 10.0


def missing() -> UnavailableError:
    return UnavailableError("no life line")


def short() -> UnavailableError:
    error = UnavailableError("too many open files")
    error.__cause__ = OSError(errno.EMFILE, "too many open files")
    return error


@pytest.mark.parametrize(
    ("kind", "failures", "watched"), [(missing, 2, True), (missing, 3, False), (short, 3, True), (short, 20, True)]
)
def test_a_rank_that_cannot_be_watched_for_a_moment_is_watched_soon(
    kind: Callable[[], UnavailableError], failures: int, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours_module, "PAUSES_S", (0.01, 0.01))
    done: queue.Queue[int] = queue.Queue()
    here = Neighbours("job", 1, lambda *death: None, done.put, done.put, lambda *ending: None)
    here.start()
    left = [kind() for _ in range(failures)]

    def add(rank: int, *rest: Any) -> None:
        if left:
            raise left.pop()

    monkeypatch.setattr(here._watch, "add", add)
    monkeypatch.setattr(neighbours_module._log, "warning", lambda *words: done.put(-1))
    process = process_id.this_process("nonce")
    here.welcome(3, process)
    assert done.get(timeout=SOON_S) == (3 if watched else -1)
    here.stop()
