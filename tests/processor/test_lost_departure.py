"""A rank that hears nothing of its controller any more leaves with the truth, as far as there is any."""

from __future__ import annotations

import threading

import pytest

from lastwords import threads
from lastwords.processor import departure
from lastwords.processor.departure import EXIT_NOT_SAVED, EXIT_SAVED, Departure, Verdict
from lastwords.vocabulary import Exit, ExitKind
from tests import golden
from tests.shortage import no_threads

WAIT_S = 10.0
ENDED = Exit(1, 1, ExitKind.SAVED, 37, "/c/tft_saved_checkpoints-step_37", "rank 2 was lost", (2,))


def verdict(found: Departure) -> Verdict:
    decided = threading.Event()
    found.decide_alone("the controller was lost for 30 s", decided.set)
    assert decided.wait(WAIT_S)
    assert found.verdict is not None
    return found.verdict


def test_a_rank_that_slept_through_the_end_says_what_was_saved() -> None:
    told = verdict(Departure(2, lambda: ENDED))
    assert told.code == EXIT_SAVED
    golden.says(told.line)


def test_where_a_launcher_begins_again_nobody_is_told_to_start_the_job_again() -> None:
    golden.says(verdict(Departure(2, lambda: ENDED, healed=lambda: True)).line)


def test_without_a_record_it_does_not_say_that_nothing_was_saved() -> None:
    told = verdict(Departure(2, lambda: None))
    assert told.code == EXIT_NOT_SAVED
    assert "NOTHING WAS SAVED" not in told.line
    golden.says(told.line)


def test_a_file_system_that_hangs_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departure, "LOOK_UP_S", 0.05)
    forever = threading.Event()

    def hang() -> Exit | None:
        forever.wait(WAIT_S)
        return ENDED

    assert verdict(Departure(2, hang)).code == EXIT_NOT_SAVED
    forever.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_record_that_cannot_be_read_keeps_nobody() -> None:
    def fail() -> Exit | None:
        raise OSError("stale file handle")

    assert verdict(Departure(2, fail)).code == EXIT_NOT_SAVED


def test_a_record_that_no_thread_can_be_had_to_look_for_keeps_nobody() -> None:
    threads.reserve(1)  # the one that decides
    try:
        with no_threads():
            assert verdict(Departure(2, lambda: ENDED)).code == EXIT_NOT_SAVED
    finally:
        threads.release(1)
