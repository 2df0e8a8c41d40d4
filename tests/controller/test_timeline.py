"""An incident's record: begins when it was known, ends with the last word, one line for each incident."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lastwords.controller.events import Outcome, OutcomeKind, Published, Verified
from lastwords.controller.timeline import EVENTS_MAX, Timeline, recorded_exit, sentence
from lastwords.state import OpenIncident
from lastwords.vocabulary import (
    Exit,
    ExitKind,
    Freeze,
    Phase,
    Raised,
    Resume,
    Save,
    Saved,
    SaveProgress,
    Settled,
    Stand,
    Status,
)
from tests import golden

AT_7 = Stand(Phase.COMPUTING, 7)
FREEZE = Freeze(2, 1, "rank 1 died")
SAVE = Save(2, 1, 1, 7, ("replicated",), (0, 1), 0, "lowest healthy rank")
EXIT = Exit(2, 1, ExitKind.SAVED, 7, "/ckpt/step_7", "rank 1 died", (1,))
WALL_NS = 1_700_000_000_000_000_000


def incident(timeline: Timeline) -> dict[str, Any]:
    timeline.note("died", 9.999, rank=1, source="ROBUST_MUTEX")
    timeline.note_order(0, FREEZE, 10.0, WALL_NS)
    timeline.note_order(2, FREEZE, 10.0, WALL_NS)
    timeline.note_report(Settled(0, 2, 1, 1, AT_7), 10.002)
    timeline.note_report(Settled(0, 2, 1, 2, AT_7), 10.003)
    timeline.note_order(0, SAVE, 10.004, WALL_NS)
    timeline.note_report(Saved(0, 2, 1, 1, 7, 5_000_000), 10.5)
    timeline.note_storage(Verified(1, 1), 10.51)
    timeline.note_storage(Published(1, 1, "/ckpt/step_7"), 10.52)
    line = timeline.note_order(0, EXIT, 10.53, WALL_NS)
    assert line is not None
    record: dict[str, Any] = json.loads(line)
    return record


def test_an_incident_begins_when_it_was_known_and_holds_every_event_once() -> None:
    record = incident(Timeline("digits", 2))
    assert record["known_mono_s"] == 9.999
    assert abs(record["known_wall_ns"] - (WALL_NS - 1_000_000)) < 1000
    assert [event["what"] for event in record["events"]] == [
        "known", "died", "frozen_sent", "settled", "decided", "saved", "verified", "published", "exit_sent",
    ]  # fmt: skip
    assert (record["outcome"], record["step"], record["bytes"], record["cause_ranks"]) == ("SAVED", 7, 5_000_000, [1])


def test_people_see_the_incident_that_is_under_way_and_what_its_newest_attempt_has_written() -> None:
    timeline = Timeline("digits", 2)
    assert timeline.under_way(9.0) is None
    timeline.note_order(0, FREEZE, 10.0, WALL_NS)
    timeline.note_report(SaveProgress(0, 2, 0, 7, 9_999), 10.5)  # of a periodic checkpoint
    assert timeline.under_way(10.5) == OpenIncident("rank 1 died", 0.5, 0)
    timeline.note_report(SaveProgress(0, 2, 1, 1, 3_000), 11.0)
    timeline.note_report(Saved(2, 2, 1, 1, 7, 5_000), 11.5)
    assert timeline.under_way(12.0) == OpenIncident("rank 1 died", 2.0, 8_000)
    timeline.note_report(SaveProgress(2, 2, 1, 2, 100), 12.0)
    timeline.note_report(SaveProgress(0, 2, 1, 1, 4_000), 12.0)  # of one that was given up
    assert timeline.under_way(12.0) == OpenIncident("rank 1 died", 2.0, 100)
    timeline.note_order(0, EXIT, 12.5, WALL_NS)
    assert timeline.under_way(13.0) is None


def test_a_periodic_checkpoint_is_no_part_of_an_incident() -> None:
    timeline = Timeline("digits", 2)
    timeline.note_storage(Published(0, 4, "/ckpt/step_6"), 9.99)
    timeline.note_order(0, FREEZE, 10.0, WALL_NS)
    timeline.note_storage(Verified(0, 5), 10.1)
    record = json.loads(timeline.note_order(0, EXIT, 10.5, WALL_NS) or "")
    assert [event["what"] for event in record["events"]] == ["known", "frozen_sent", "exit_sent"]


def test_the_sentence_counts_from_the_moment_it_was_known() -> None:
    text = sentence(json.dumps(incident(Timeline("digits", 2))))
    assert text.startswith("incident 1 (rank 1 died): SAVED, step 7, 5.0 MB, /ckpt/step_7; since known: ")
    golden.says(text)


def test_the_record_has_all_who_began_the_incident_although_no_order_names_them_all() -> None:
    timeline = Timeline("digits", 2)
    timeline.note_order(0, FREEZE, 10.0, WALL_NS)
    outcome = Outcome(OutcomeKind.SAVED, 7, "/ckpt/step_7", "all raised", tuple(range(100)))
    line = timeline.note_order(0, EXIT, 10.5, WALL_NS, outcome)
    assert json.loads(line or "")["cause_ranks"] == list(range(100))


def test_orders_that_are_repeated_after_the_end_open_nothing() -> None:
    timeline = Timeline("digits", 2)
    incident(timeline)
    assert timeline.note_order(2, EXIT, 11.0, WALL_NS) is None
    timeline.note_order(2, FREEZE, 11.0, WALL_NS)
    assert timeline.close(None, "end") is None


def test_of_a_choice_every_writer_is_recorded_once() -> None:
    timeline = Timeline("digits", 2)
    timeline.note_order(0, FREEZE, 10.0, WALL_NS)
    for rank in (0, 5, 0):  # the last one is sent again
        timeline.note_order(rank, SAVE, 10.1, WALL_NS)
    record = json.loads(timeline.note_order(0, EXIT, 10.53, WALL_NS) or "")
    assert [event["writers"] for event in record["events"] if event["what"] == "decided"] == [[0, 5]]


def test_a_false_alarm_is_recorded_as_one() -> None:
    timeline = Timeline("digits", 2)
    timeline.note_order(0, FREEZE, 10.0, WALL_NS)
    line = timeline.note_order(0, Resume(2, 1), 10.4, WALL_NS)
    assert line is not None
    assert json.loads(line)["outcome"] == "FALSE_ALARM"
    assert "resumed 400.0 ms" in sentence(line)


def test_what_happened_long_before_does_not_belong_to_an_incident() -> None:
    timeline = Timeline("digits", 2)
    timeline.note("suspected", 1.0, ranks=[3])
    timeline.note_report(Raised(0, 2, "boom", False, AT_7), 9.5)
    timeline.note_report(Status(0, 2, AT_7), 9.6)
    timeline.note_order(0, FREEZE, 10.0, WALL_NS)
    line = timeline.close(None, "nobody is left")
    assert line is not None
    assert [event["what"] for event in json.loads(line)["events"]] == ["known", "raised", "frozen_sent"]


def test_a_checkpoint_that_nobody_is_left_to_hear_of_is_saved_all_the_same() -> None:
    timeline = Timeline("digits", 2)
    timeline.note_order(0, FREEZE, 10.0, WALL_NS)
    line = timeline.close(Outcome(OutcomeKind.SAVED, 7, "/c/step_7", "rank 1 died", (1,)), "every rank has left")
    assert line is not None
    record = json.loads(line)
    assert (record["outcome"], record["step"], record["path"]) == ("SAVED", 7, "/c/step_7")
    assert (record["reason"], record["cause_ranks"]) == ("rank 1 died", [1])


def test_reports_of_another_incident_are_not_mixed_in() -> None:
    timeline = Timeline("digits", 2)
    timeline.note_order(0, FREEZE, 10.0, WALL_NS)
    timeline.note_report(Saved(0, 2, 9, 1, 7, 5), 10.1)
    line = timeline.close(None, "x")
    assert line is not None
    assert json.loads(line)["bytes"] == 0


def test_an_endless_incident_does_not_fill_the_memory() -> None:
    timeline = Timeline("digits", 2)
    timeline.note_order(0, FREEZE, 10.0, WALL_NS)
    for count in range(EVENTS_MAX + 100):
        timeline.note("died", 10.0 + count, rank=1)
    line = timeline.close(None, "x")
    assert line is not None
    assert len(json.loads(line)["events"]) <= EVENTS_MAX


def test_how_a_job_has_ended_is_read_back_from_its_record(tmp_path: Path) -> None:
    path = tmp_path / "incidents.jsonl"
    assert recorded_exit(path, "digits", 2) is None
    lines = []
    for job, generation in (("digits", 2), ("words", 2), ("digits", 3)):
        timeline = Timeline(job, generation)
        timeline.note_order(0, Freeze(generation, 1, "rank 1 is in doubt"), 5.0, 0)
        lines.append(timeline.note_order(0, Resume(generation, 1), 5.1, 0))
        timeline.note_order(0, Freeze(generation, 2, "rank 1 died"), 6.0, 0)
        order = Exit(generation, 2, ExitKind.SAVED, 7, f"/ckpt/{job}/{generation}", "rank 1 died", (1,))
        lines.append(timeline.note_order(0, order, 7.0, 0))
    path.write_text(
        "\n".join(["not json", *filter(None, lines), "[]", "[" * 100_000, '{"job": "digits"}', '{"half": ']) + "\n"
    )
    for job, generation in (("digits", 2), ("words", 2), ("digits", 3)):
        order = Exit(generation, 2, ExitKind.SAVED, 7, f"/ckpt/{job}/{generation}", "rank 1 died", (1,))
        assert recorded_exit(path, job, generation) == order
    assert recorded_exit(path, "digits", 4) is None
    path.write_text(f"{lines[0]}\n")
    assert recorded_exit(path, "digits", 2) is None, "a false alarm is no end"
