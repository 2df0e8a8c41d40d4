"""Reading black boxes at a death: what cannot be opened for a moment is not lost."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from lastwords.checkpoint.meta import COMMITTED, LocalMeta
from lastwords.checkpoint.part import LocalState
from lastwords.errors import StorageError, UnavailableError
from lastwords.optim_wrapper.capture import source
from lastwords.optim_wrapper.capture.source import TrainerSource
from tests import golden

FULL = StorageError("cannot open the black box: Too many open files", errno=errno.EMFILE)


def read(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> LocalState:
    left = list(answers)

    def read_box(rank: int, step: int) -> LocalState:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    monkeypatch.setattr(source, "BOX_PAUSES_S", (0.0, 0.0))
    state: LocalState = TrainerSource._local_state(SimpleNamespace(_read_box=read_box), 1, 7)  # type: ignore[arg-type]
    assert not left
    return state


@pytest.mark.parametrize("error", [FULL, OSError(errno.ENOMEM, "no memory"), MemoryError()])
def test_a_box_that_cannot_be_opened_for_a_moment_is_read_all_the_same(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    there = LocalState([], LocalMeta(kind=COMMITTED))
    assert read(monkeypatch, error, error, there) is there


def test_a_box_that_can_never_be_opened_costs_the_exactness_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    state = read(monkeypatch, FULL, FULL, FULL)
    assert not state.exact
    golden.says(map(str, state.reasons))


def test_other_errors_are_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError):
        read(monkeypatch, UnavailableError("no black box"))
