"""The states of the controller, as the transcripts see them: exactly those moves that the table has."""

from __future__ import annotations

import pytest

from lastwords.controller.context import JobContext
from lastwords.controller.events import NEXT_STATES, JobStage
from tests.scenarios.test_transcripts import TRANSCRIPTS, retell

Move = tuple[JobStage, JobStage]


class WatchedContext(JobContext):
    """Notes each move of `state`; everything else is the shipped class."""

    moves: set[Move] = set()  # noqa: RUF012 (shared by all contexts of one test on purpose)

    @property  # type: ignore[override]
    def state(self) -> JobStage:
        return self.__dict__["watched"]  # type: ignore[no-any-return]

    @state.setter
    def state(self, after: JobStage) -> None:
        before = self.__dict__.get("watched", after)
        if before is not after:
            WatchedContext.moves.add((before, after))
        self.__dict__["watched"] = after


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> set[Move]:
    """All moves that the transcripts make."""
    WatchedContext.moves = set()
    monkeypatch.setattr("lastwords.controller.core.JobContext", WatchedContext)
    for path in TRANSCRIPTS:
        retell(path.read_text(encoding="utf-8"))
    return WatchedContext.moves


def test_the_transcripts_make_every_move_of_the_table_and_no_other(moves: set[Move]) -> None:
    table = {(before, after) for before, following in NEXT_STATES.items() for after in following}
    assert moves - table == set(), "moves that are not in the table"
    assert table - moves == set(), "moves that no transcript shows"


def test_nothing_leads_back_to_training_but_settling() -> None:
    back = {before for before, following in NEXT_STATES.items() if JobStage.WATCHING in following}
    assert back == {JobStage.REGISTERING, JobStage.SETTLING}
