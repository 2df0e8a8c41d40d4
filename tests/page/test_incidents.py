"""Incidents and recoveries as the page draws and the metrics count them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lastwords.page.incidents import ROWS_MAX, Incidents, cause

EVENTS: list[dict[str, Any]] = [
    {"what": "known", "mono_s": 5.0},
    {"what": "died", "mono_s": 5.0, "rank": 1},
    {"what": "suspected", "mono_s": 5.001, "ranks": [1]},
    {"what": "raised", "mono_s": 5.002, "rank": 0, "secondary": True},
    {"what": "settled", "mono_s": 5.004, "rank": 0, "stand": "COMPUTING(31)"},
    {"what": "settled", "mono_s": 5.005, "rank": 2, "stand": "COMPUTING(31)"},
    {"what": "decided", "mono_s": 5.01, "attempt": 1, "step": 31, "writers": [0], "reason": ""},
    {"what": "saved", "mono_s": 5.06, "rank": 0, "attempt": 1, "bytes": 2_000_000},
    {"what": "published", "mono_s": 5.07, "attempt": 1},
    {"what": "exit_sent", "mono_s": 5.08},
]
SAVED: dict[str, Any] = {
    "job": "digits", "generation": 1, "incident": 1, "outcome": "SAVED", "step": 31, "path": "/c", "reason": "r",
    "cause_ranks": [1], "bytes": 2_000_000, "known_mono_s": 5.0, "known_wall_ns": 10**18, "events": EVENTS,
}  # fmt: skip
RECOVERED: dict[str, Any] = {
    "outcome": "RECOVERED", "entry": 2, "generation": 1, "incident": 1, "step": 31, "began_mono_s": 1.0,
    "died_mono_s": 5.0,
    "events": [
        {"what": "died", "mono_s": 5.0, "rank": 1, "code": -9},
        {"what": "entered", "mono_s": 5.2},
        *({"what": "updated", "mono_s": 5.7 + rank / 10, "rank": rank} for rank in range(3)),
    ],
}  # fmt: skip


def read(*records: object) -> Incidents:
    found = Incidents()
    for number, record in enumerate(records, 1):
        found.add(record if isinstance(record, bytes) else json.dumps(record).encode(), number)
    return found


def bars_of(item: dict[str, Any]) -> dict[str, list[Any]]:
    return {row["name"]: row["bars"] for row in item["rows"]}


def test_an_incident_is_drawn_with_who_died_who_wrote_and_who_waited() -> None:
    (item,) = read(SAVED).items
    assert bars_of(item) == {
        "rank 0": [("trains", None, 0.004), ("parked", 0.004, 0.08), ("saves", 0.01, 0.06)],
        "rank 1": [("trains", None, 0.0), ("dead", 0.0, 0.08)],
        "rank 2": [("trains", None, 0.005), ("parked", 0.005, 0.08)],
    }
    assert item["seconds"] == {"settle": 0.005, "choose": 0.005, "write": 0.05, "publish": 0.01}
    assert item["marks"] == [["decided", 0.01], ["published", 0.07]]
    assert item["cause"] == "death"
    assert item["unix_s"] == 1e9


def test_a_recovery_takes_the_place_of_the_incident_that_it_mends() -> None:
    incident, recovery = read(SAVED, RECOVERED).items
    assert incident["key"] == recovery["key"]
    assert recovery["healed"]
    assert bars_of(recovery)["rank 1"] == [
        ("trains", None, 0.0), ("dead", 0.0, 0.2), ("starts", 0.2, 0.8), ("trains", 0.8, None),
    ]  # fmt: skip
    assert recovery["seconds"]["restart"] == pytest.approx(0.13)
    assert recovery["seconds"]["resume"] == pytest.approx(0.7)


def test_a_recovery_without_an_incident_is_drawn_by_itself() -> None:
    (item,) = read(RECOVERED).items
    assert item["outcome"] == "RECOVERED"
    assert item["unix_s"] is None


def test_each_incident_is_counted_once_and_recoveries_by_themselves() -> None:
    other = {
        **SAVED,
        "outcome": "NOT_SAVED",
        "cause_ranks": [0],
        "events": [{"what": "raised", "mono_s": 1, "rank": 0}],
    }
    found = read(SAVED, RECOVERED, other, other)
    assert found.counts == {("death", "SAVED"): 1, ("exception", "NOT_SAVED"): 2}
    assert found.recoveries == 1


def test_a_copy_does_not_grow_with_what_is_read_later() -> None:
    found = read(SAVED)
    copy = found.copy()
    found.add(json.dumps(SAVED).encode(), 2)
    assert (copy.newest_id, len(copy.items), copy.counts["death", "SAVED"]) == (1, 1, 1)
    assert [item["id"] for item in found.after(1)] == [2]


def test_of_a_thousand_ranks_some_have_a_row_and_the_others_one_together() -> None:
    settled = [{"what": "settled", "mono_s": 5.004 + rank / 1e6, "rank": rank} for rank in range(1000) if rank != 1]
    (item,) = read({**SAVED, "events": sorted([*EVENTS, *settled], key=lambda event: event["mono_s"])}).items
    names = [row["name"] for row in item["rows"]]
    assert len(names) == ROWS_MAX + 1
    assert {"rank 0", "rank 1"} < {*names}
    assert names[-1] == f"{1000 - ROWS_MAX} others"
    assert len(json.dumps(item)) < 4_000


STRANGE = (
    b"half of a li", b"5", b"[" * 100_000, b'{"outcome": []}', b"\xff\xfe", b'{"outcome": "SAVED"}',
    *(
        json.dumps({**record, **changed}).encode()
        for record in (SAVED, RECOVERED)
        for changed in (
            {"events": 1}, {"events": [1]}, {"events": []}, {"known_mono_s": 10**400}, {"died_mono_s": "x"},
            {"reason": {}}, {"cause_ranks": 3}, {"step": None}, {"events": [{"what": [], "mono_s": 1}]},
            {"events": [{"what": "decided", "mono_s": 6, "writers": 5}]},
            {"events": [{"what": "settled", "mono_s": None, "rank": 0}]},
        )
    ),
)  # fmt: skip


@pytest.mark.parametrize("line", STRANGE, ids=range(len(STRANGE)))
def test_a_line_that_nobody_of_lastwords_has_written_harms_nothing(line: bytes) -> None:
    assert read(line, SAVED).items[-1]["step"] == 31


@pytest.mark.parametrize(
    ("events", "word"),
    [
        ([("suspected", None)], "lost"),
        ([("signalled", 1), ("died", 1)], "signal"),
        ([("raised", 1), ("died", 1)], "exception"),
        ([("raised", 0), ("died", 1)], "death"),
        ([("stack", 1)], "hang"),
        ([], "other"),
    ],
)
def test_the_cause_is_what_the_ranks_did_that_began_it(events: list[tuple[str, int | None]], word: str) -> None:
    found = [{"what": what, **({} if rank is None else {"rank": rank})} for what, rank in events]
    assert cause(found, [1]) == word
